"""Heads: what turns the output of an actor's network into an action distribution, one for each kind of action space."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from frl import rng
from frl.distributions import CategoricalParams, Distribution, NormalParams, categorical, diagonal_normal, multi_categorical, tanh_normal
from frl.policy_registry import action_count
from frl.registry import Registry
from frl.types import Params
from frl.validate import require_number, require_switch

_NOISE_BLOCK = 16
_DISTRIBUTIONS = Registry("distribution")
_DISTRIBUTIONS.register("normal", diagonal_normal)
_DISTRIBUTIONS.register("tanh_normal", tanh_normal)


def action_noise(key: Tensor, T: int, N: int, width: int, dtype: torch.dtype = torch.float32, draw: Callable[..., Tensor] = rng.normal) -> Tensor:
    """Noise of a rollout, standard normal by default.

    A row's numbers do not depend on ``N``, and those of its first steps not on ``T``: steps are drawn in blocks of 16 under ``fold_in(key, block)``, and
    within a block the row comes first.

    Args:
        key: int64 [2].
        T: steps.
        N: env rows.
        width: numbers for each action.
        dtype: float32 or float64.
        draw: ``(key, shape, dtype) -> noise``, such as :func:`frl.rng.gumbel`.

    Returns:
        ``[T, N, width]`` on the key's device.
    """
    blocks = -(-T // _NOISE_BLOCK)
    keys = rng.fold_in(key, torch.arange(blocks, device=key.device))
    drawn = draw(keys, (N, _NOISE_BLOCK, width), dtype=dtype)
    return drawn.transpose(1, 2).reshape(blocks * _NOISE_BLOCK, N, width)[:T]


def _range(name: str, value: Any) -> tuple[float, float]:
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise TypeError(f"{name} must be two numbers [low, high], got {value!r}")
    low, high = (require_number(name, bound) for bound in value)
    if low > high:
        raise ValueError(f"{name} must be two non-decreasing numbers, got {value!r}")
    return low, high


def _initial_log_std(initial_log_std: Any, initial_action_std: Any, limits: tuple[float, float]) -> float:
    if initial_action_std is not None:
        if initial_log_std is not None:
            raise ValueError(f"give initial_log_std or initial_action_std, not both (got {initial_log_std!r} and {initial_action_std!r})")
        initial_log_std = math.log(require_number("initial_action_std", initial_action_std, above=0.0))
    value = 0.0 if initial_log_std is None else require_number("initial_log_std", initial_log_std)
    if not limits[0] <= value <= limits[1]:
        raise ValueError(f"initial log std {value:g} lies outside the range [{limits[0]:g}, {limits[1]:g}], where its gradient is zero and it could never move")
    return value


def log_std_limits(log_std_range: Sequence[float] | None, action_std_range: Sequence[float] | None, default: tuple[float, float]) -> tuple[float, float]:
    """Limits of ``log_std`` from either way to give them."""
    if action_std_range is None:
        return default if log_std_range is None else _range("log_std_range", log_std_range)
    if log_std_range is not None:
        raise ValueError("give action_std_range or log_std_range, not both")
    low, high = _range("action_std_range", action_std_range)
    if low <= 0:
        raise ValueError(f"action_std_range must be two positive numbers, got {action_std_range!r}")
    return math.log(low), math.log(high)


def box_bounds(distribution: str, action_space: Any) -> dict[str, Any]:
    """``action_low`` and ``action_high`` for a distribution that squashes into the action space; nothing for another."""
    if _DISTRIBUTIONS.get(distribution) is not tanh_normal:
        return {}
    if not isinstance(action_space, spaces.Box):
        raise TypeError(f"tanh_normal takes its bounds from the action space, which must be a Box, or from action_low and action_high, got {action_space}")
    return {"action_low": action_space.low, "action_high": action_space.high}


class Head(NamedTuple):
    """What turns the output of the actor's network into distribution parameters."""

    distribution: Distribution
    width: int  # outputs that the network must have
    init: Callable[[torch.dtype, Any], Params]  # (dtype, device) -> the head's own entries of params, {} if it has none
    read: Callable[[Params, Tensor], Any]  # (params, output [..., width]) -> distribution parameters [...]

    def noise(self, key: Tensor, T: int, N: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The noise block of a rollout, ``[T, N, noise_dim]``."""
        return action_noise(key, T, N, self.distribution.noise_dim, dtype, self.distribution.draw_noise)


def gaussian_head(
    action_dim: int,
    *,
    distribution: str = "normal",
    action_low: Any = None,
    action_high: Any = None,
    initial_log_std: float | None = None,
    initial_action_std: float | None = None,
    log_std_range: Sequence[float],
    state_dependent_std: bool = False,
) -> Head:
    """``mean = output``, ``std = exp(clamp(log_std, *log_std_range))`` with a parameter ``"log_std"`` [A].

    Arguments and refusals are those of :func:`~frl.policies.actor_only`.

    With ``state_dependent_std`` the output has ``2 A`` numbers, the mean and an offset to the initial ``log_std``, and the head has no parameters.
    """
    squashed = _DISTRIBUTIONS.get(distribution) is tanh_normal
    require_switch("state_dependent_std", state_dependent_std)
    low, high = _range("log_std_range", log_std_range)
    start = _initial_log_std(initial_log_std, initial_action_std, (low, high))
    if not squashed:
        if action_low is not None or action_high is not None:
            raise ValueError("action_low and action_high have no effect on a 'normal' distribution; use 'tanh_normal' or leave them out")
        dist = diagonal_normal(action_dim)
    else:
        if action_low is None or action_high is None:
            raise ValueError("tanh_normal needs the action box: action_low and action_high")
        dist = tanh_normal(np.broadcast_to(action_low, (action_dim,)), np.broadcast_to(action_high, (action_dim,)))

    def init(dtype: torch.dtype, device: Any) -> Params:
        return {} if state_dependent_std else {"log_std": torch.full((action_dim,), start, dtype=dtype, device=device)}

    def read(params: Params, out: Tensor) -> NormalParams:
        if state_dependent_std:
            return NormalParams(mean=out[..., :action_dim], log_std=torch.clamp(out[..., action_dim:] + start, low, high))
        # The zeros give every row its log_std: vmap with out_dims=-1 returns garbage shapes for an output that does not depend on its input (torch 2.13).
        return NormalParams(mean=out, log_std=torch.clamp(params["log_std"], low, high) + torch.zeros_like(out))

    return Head(distribution=dist, width=2 * action_dim if state_dependent_std else action_dim, init=init, read=read)


def categorical_head(space: spaces.Space | int) -> Head:
    """``logits = output`` for a ``Discrete`` space, or a ``MultiDiscrete`` one of shape ``(A,)``, with their own names of the choices (``start``).

    Raises:
        TypeError: for another space.
    """
    if isinstance(space, spaces.Discrete):
        dist = categorical(int(space.n), int(space.start))
    elif isinstance(space, spaces.MultiDiscrete) and len(space.shape) == 1:
        dist = multi_categorical(space.nvec, space.start)
    else:
        raise TypeError(f"categorical actions need a Discrete space or a MultiDiscrete one of shape (A,), got {space}")
    return Head(distribution=dist, width=dist.noise_dim, init=lambda dtype, device: {}, read=lambda params, out: CategoricalParams(logits=out))


def head_for(
    space: spaces.Space | int,
    *,
    default_range: tuple[float, float],
    distribution: str | None = None,
    action_low: Any = None,
    action_high: Any = None,
    log_std_range: Sequence[float] | None = None,
    action_std_range: Sequence[float] | None = None,
    **std: Any,
) -> Head:
    """The head for an action space: Gaussian for a floating ``Box`` ``(A,)`` or an int (A features without bounds), categorical for a discrete space.

    Args:
        space: of the actions.
        default_range: limits of ``log_std`` where neither range is given.
        distribution: ``"normal"`` (default) or ``"tanh_normal"``, ``"categorical"`` (default).
        action_low, action_high: of ``"tanh_normal"``; those of the box by default.
        log_std_range, action_std_range: limits of the std, one of them at most.
        **std: of :func:`gaussian_head`.

    Raises:
        ValueError: for settings that do not fit the space.
        TypeError: for a space of another kind.
    """
    if isinstance(space, (spaces.Box, Integral)):
        name = "normal" if distribution is None else distribution
        limits = log_std_limits(log_std_range, action_std_range, default_range)
        bounds = {"action_low": action_low, "action_high": action_high}
        if action_low is None and action_high is None:
            bounds = box_bounds(name, space)
        return gaussian_head(action_count(space), distribution=name, **bounds, log_std_range=limits, **std)
    head = categorical_head(space)
    if distribution not in (None, "categorical"):
        raise ValueError(f"distribution {distribution!r} does not fit the action space {space}, whose policy is 'categorical'")
    given = {"action_low": action_low, "action_high": action_high, "log_std_range": log_std_range, "action_std_range": action_std_range}
    for name, value in {**std, **given}.items():
        if value is not None and value is not False:
            raise ValueError(f"{name} has no effect on the categorical policy of {space}; leave it out")
    return head
