"""Objectives as functions of a trajectory: they know no network, environment or optimizer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from frl.returns import complete_discounted_return, segmented_discounted_return
from frl.types import Trajectory


class ApgTerms(NamedTuple):
    """The parts of the APG loss, all 0-d."""

    loss: Tensor
    objective: Tensor
    entropy: Tensor


def apg_loss(
    trajectory: Trajectory, gamma: float | Tensor, ent_coef: float | Tensor = 0.0, *, complete: bool = False, objective_scale: Tensor | None = None
) -> ApgTerms:
    """``loss = -objective - ent_coef * entropy`` with ``objective = mean_n sum_t D_{n,t} r_{n,t} scale_n``.

    Segmented: ``D`` restarts at 1 after a done, so that the episode after an automatic reset counts too. Complete: nothing after a row's first done counts. The entropy bonus is
    discounted, masked and scaled by the same rule. With ``ent_coef`` 0 the entropy stays out of the gradient altogether.

    Args:
        trajectory: fields ``reward``, flags and, when recorded, ``entropy``, ``[T, N]``.
        gamma: discount in [0, 1].
        ent_coef: entropy coefficient.
        complete: see above.
        objective_scale: ``[]`` or ``[N]``, not differentiated; 1 when ``None``.
    """
    done = trajectory.terminated | trajectory.truncated
    total = complete_discounted_return if complete else segmented_discounted_return
    gain = total(trajectory.reward, done, gamma)
    scale = torch.ones((), dtype=gain.dtype, device=gain.device) if objective_scale is None else objective_scale.detach().to(gain.dtype)
    objective = (gain * scale).mean()
    if isinstance(trajectory.entropy, tuple):
        return ApgTerms(loss=-objective, objective=objective, entropy=torch.zeros_like(objective))
    bonus = (total(trajectory.entropy, done, gamma) * scale).mean()
    coefficient = torch.as_tensor(ent_coef, dtype=gain.dtype, device=gain.device)
    used = torch.where(coefficient != 0, bonus, 0.0)
    return ApgTerms(loss=-objective - coefficient * used, objective=objective, entropy=bonus)
