"""Discounted returns: how the rewards of a rollout become one number for each row.

Time comes first: ``[T, ...]`` with any further dimensions, usually ``[T, N]``. There is no loop over time: the discount follows in closed form from the number
of steps since the last done. Entropy bonuses are discounted by the same functions, given entropies for rewards.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def discounts(done: Tensor, gamma: float | Tensor, initial: float | Tensor = 1.0, *, dtype: torch.dtype | None = None) -> Tensor:
    """Discount of each step, restarted after every done: ``D_0 = initial``, ``D_{t+1} = 1`` where ``done_t``, else ``gamma D_t``.

    Args:
        done: bool ``[T, ...]``, terminated or truncated.
        gamma: discount factor in [0, 1]; a 0-d tensor is not validated and may require a gradient.
        initial: discount of the first step, a number or ``[...]``: what :func:`final_discount` returned for the segment before.
        dtype: of the result; by default that of ``gamma`` and ``initial`` where they are tensors, else the default dtype.

    Returns:
        ``[T, ...]``, differentiable in ``gamma`` (also at 0) and ``initial``.

    Raises:
        ValueError: for ``T = 0``, a ``done`` that is not bool, or a number ``gamma`` outside [0, 1].
    """
    return _discounts(done, gamma, initial, dtype)[:-1]


def final_discount(done: Tensor, gamma: float | Tensor, initial: float | Tensor = 1.0, *, dtype: torch.dtype | None = None) -> Tensor:
    """The discount ``D_T`` of the step after the last one, with which the next segment starts.

    Args: as :func:`discounts`.

    Returns:
        ``[...]``, the shape of one step.
    """
    return _discounts(done, gamma, initial, dtype)[-1]


def alive_mask(done: Tensor) -> Tensor:
    """Steps before which the row was never done: ``alive_0 = True``, ``alive_{t+1} = alive_t and not done_t``.

    Args:
        done: bool ``[T, ...]``.

    Returns:
        bool ``[T, ...]``. The step that is done is alive itself: its reward counts.
    """
    return _episode_start(done)[:-1] == 0


def complete_discounted_return(reward: Tensor, done: Tensor, gamma: float | Tensor) -> Tensor:
    """Return of the first episode of each row: ``G = sum_t gamma^t alive_t r_t``.

    Rewards after the first done enter neither the value nor the gradient, whatever they are (NaN included).

    Args:
        reward: floating ``[T, ...]``.
        done: bool, same shape.
        gamma: as in :func:`discounts`.

    Returns:
        ``[...]``, in the dtype of ``reward``.

    Raises:
        ValueError: as :func:`discounts`, and for shapes that differ or a reward that is not floating.
    """
    _check_reward(reward, done)
    steps = torch.arange(reward.shape[0], device=reward.device).reshape(-1, *[1] * (reward.ndim - 1))
    powers = _power(_factor(gamma, reward.dtype, reward.device), steps)
    return (torch.where(alive_mask(done), reward, 0) * powers).sum(0)


def segmented_discounted_return(reward: Tensor, done: Tensor, gamma: float | Tensor, *, discount: float | Tensor = 1.0) -> Tensor:
    """Return of a segment in which rows start over after a done: ``G = sum_t D_t r_t`` with ``D`` of :func:`discounts`.

    Rewards of the episode that follows a done count, at a fresh discount. Segments chain: the return of a whole is the sum over its segments when each one gets
    the :func:`final_discount` of the one before as ``discount``.

    Args:
        reward: floating ``[T, ...]``.
        done: bool, same shape.
        gamma: as in :func:`discounts`.
        discount: discount of the first step, a number or ``[...]``.

    Returns:
        ``[...]``, in the dtype of ``reward``.

    Raises:
        ValueError: as :func:`complete_discounted_return`.
    """
    _check_reward(reward, done)
    return (_discounts(done, gamma, discount, reward.dtype)[:-1] * reward).sum(0)


def _discounts(done: Tensor, gamma: float | Tensor, initial: float | Tensor, dtype: torch.dtype | None) -> Tensor:
    """``D_0 ... D_T``."""
    start = _episode_start(done)
    if dtype is None:
        dtypes = [x.dtype for x in (gamma, initial) if isinstance(x, Tensor) and x.is_floating_point()]
        dtype = torch.promote_types(dtypes[0], dtypes[-1]) if dtypes else torch.get_default_dtype()
    steps = torch.arange(start.shape[0], device=done.device).reshape(-1, *[1] * (done.ndim - 1))
    powers = _power(_factor(gamma, dtype, done.device), steps - start)
    first = initial.to(dtype) if isinstance(initial, Tensor) else initial
    return torch.where(start == 0, powers * first, powers)


def _episode_start(done: Tensor) -> Tensor:
    """For each step ``0 ... T`` the step at which its episode began: int64 ``[T+1, ...]``, 0 in the first episode."""
    if done.dtype != torch.bool:
        raise ValueError(f"done must be bool, got {done.dtype}")
    if done.ndim == 0 or done.shape[0] == 0:
        raise ValueError(f"at least one step is needed, got done of shape {tuple(done.shape)}")
    steps = torch.arange(1, done.shape[0] + 1, device=done.device).reshape(-1, *[1] * (done.ndim - 1))
    marks = torch.where(done, steps, 0)
    return torch.cat([torch.zeros_like(marks[:1]), torch.cummax(marks, 0).values])


def _power(gamma: Tensor, exponent: Tensor) -> Tensor:
    """``gamma ** exponent`` for whole exponents, with ``0 ** 0 = 1`` and its gradient 0."""
    zero = exponent == 0
    return torch.where(zero, 1, gamma ** torch.where(zero, 1, exponent).to(gamma.dtype))


def _factor(gamma: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    if isinstance(gamma, Tensor):
        return gamma.to(dtype)
    if isinstance(gamma, bool) or not isinstance(gamma, (int, float)) or math.isnan(gamma) or not 0 <= gamma <= 1:
        raise ValueError(f"gamma must be a number in [0, 1], got {gamma!r}")
    return torch.full((), gamma, dtype=dtype, device=device)


def _check_reward(reward: Tensor, done: Tensor) -> None:
    if not reward.is_floating_point():
        raise ValueError(f"reward must be a floating tensor, got {reward.dtype}")
    if reward.shape != done.shape:
        raise ValueError(f"reward and done must have the same shape, got {tuple(reward.shape)} and {tuple(done.shape)}")
