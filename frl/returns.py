"""Discounted returns: how the rewards of a rollout become one number for each row.

Time comes first: ``[T, ...]`` with any further dimensions, usually ``[T, N]``. There is no loop over time: the discount follows in closed form from the
number of steps since the last done, and sums over the steps to come are built by doubling their span. Entropy bonuses are discounted by the same functions,
given entropies for rewards.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from frl.one_operation import in_use
from frl.suffix_sums import applies, suffix_sums

_BLOCK = 8  # steps


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
    powers = _power(unit_number("gamma", gamma, reward.dtype, reward.device), steps)
    return (torch.where(alive_mask(done), reward, 0) * powers).sum(0)


def segmented_discounted_return(reward: Tensor, done: Tensor, gamma: float | Tensor, *, discount: float | Tensor = 1.0) -> Tensor:
    """Return of a segment in which rows start over after a done: ``G = sum_t D_t r_t`` with ``D`` of :func:`discounts`.

    Rewards of the episode that follows a done count, at a fresh discount. Segments chain: the return of a whole is the sum over its segments when each one
    gets the :func:`final_discount` of the one before as ``discount``.

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


def discounted_returns_to_go(reward: Tensor, done: Tensor, gamma: float | Tensor) -> Tensor:
    """Return from each step to the end of its episode or of the rollout: ``G_t = r_t + gamma (1 - done_t) G_{t+1}``, ``G_T = 0``.

    Rewards after a done reach nothing before it, whatever they are (NaN included).

    Args:
        reward: floating ``[T, ...]``.
        done: bool, same shape.
        gamma: discount factor in [0, 1]; a tensor (0-d, or one that broadcasts with a step) is not validated and may require a gradient.

    Returns:
        ``[T, ...]``, in the dtype of ``reward``.

    Raises:
        ValueError: as :func:`complete_discounted_return`.
    """
    _check_reward(reward, done)
    if reward.ndim == 0 or reward.shape[0] == 0:
        raise ValueError(f"at least one step is needed, got reward of shape {tuple(reward.shape)}")
    return discounted_suffix_sums(reward, unit_number("gamma", gamma, reward.dtype, reward.device), ~done)


def td_lambda_returns(reward: Tensor, next_value: Tensor, terminated: Tensor, truncated: Tensor, *, gamma: float | Tensor, td_lambda: float | Tensor) -> Tensor:
    """What a critic learns from a segment: ``G_t = r_t + gamma ((1 - lambda) V'_t + lambda G_{t+1})``, the lambda-weighted mean of all n-step returns.

    ``V'_t`` is what the state after step ``t`` is worth: ``next_value_t``, and 0 where the episode terminated, whatever stands there. Where the episode or
    the segment ends, ``G_t = r_t + gamma V'_t``. Termination wins when both flags are set. With ``lambda`` 0 this is the one-step target, with 1 the
    discounted return that ends in a value.

    Args:
        reward: floating ``[T, ...]``.
        next_value: floating, same shape: value of the observation after each step and before any reset.
        terminated: bool, same shape.
        truncated: bool, same shape.
        gamma: discount in [0, 1]; a tensor (0-d, or one that broadcasts with a step) is not validated. The same holds for the next.
        td_lambda: in [0, 1].

    Returns:
        ``[T, ...]``, in the dtype of ``reward``. Gradients flow through all inputs; detach those through which they should not.

    Raises:
        ValueError: as :func:`complete_discounted_return`.

    Source: Sutton and Barto 2018, "Reinforcement learning", equation 12.18, cut at the end of the segment.
    """
    _check_reward(reward, terminated)
    _check_reward(next_value, truncated)
    _check_reward(next_value, terminated)
    gamma, td_lambda = unit_number("gamma", gamma, reward.dtype, reward.device), unit_number("td_lambda", td_lambda, reward.dtype, reward.device)
    linked = ~(terminated | truncated)
    linked = torch.cat([linked[:-1], torch.zeros_like(linked[-1:])])
    after = torch.where(terminated, 0, next_value.to(reward.dtype))
    return discounted_suffix_sums(reward + gamma * after * torch.where(linked, 1 - td_lambda, 1), gamma * td_lambda, linked)


def discounted_suffix_sums(x: Tensor, factor: Tensor, linked: Tensor) -> Tensor:
    """``S_t = x_t + factor S_{t+1}`` where ``linked_t``, ``S_t = x_t`` elsewhere, ``S_T = 0``; exact for any factor in [0, 1], 0 and 1 included.

    Step by step within blocks of 8, all blocks at once, then over the blocks in the same way: few passes over the data, and a compiled graph that hardly
    grows with T. In a graph for a CPU, where nobody asks for a gradient, it is one operation and one pass.
    Where ``linked`` is false nothing of a later step reaches an earlier one, in value or gradient, infinities and NaN included.

    Args:
        x: floating ``[T, ...]``.
        factor: ``[]``, or a tensor that broadcasts with one step.
        linked: bool, shape of ``x``.

    Source: Blelloch, "Prefix sums and their applications", 1990; here every link has the same factor, so that the product over a span is one power of it.
    """
    if in_use() and applies(x, factor):
        return suffix_sums(x, factor, linked)
    length = x.shape[0]
    if length <= _BLOCK:
        return torch.stack(_step_by_step(list(x.unbind(0)), factor, list(linked.unbind(0)))[0])
    blocks = -(-length // _BLOCK)
    missing = blocks * _BLOCK - length

    def by_block(value: Tensor) -> list[Tensor]:
        """Steps of all blocks, ``_BLOCK`` times ``[blocks, ...]``; what is missing at the end is zero and linked to nothing."""
        filled = torch.cat([value, torch.zeros_like(value[:1]).expand(missing, *value.shape[1:])]) if missing else value
        return list(filled.reshape(blocks, _BLOCK, *value.shape[1:]).unbind(1))

    # Links as numbers beside the values: a compiled loop takes long to read a bool, so each is read once.
    x, link = torch.stack((x, linked.to(x.dtype))).unbind(0)
    within, through, powers = _step_by_step(by_block(x), factor, [part > 0 for part in by_block(link)])
    sums, links = torch.stack(within), torch.stack(through)
    first = discounted_suffix_sums(sums[0], powers[0], links[0] > 0)
    after = torch.cat([first[1:], torch.zeros_like(first[:1])])
    whole = [y + power * torch.where(link > 0, after, 0) for y, power, link in zip(sums.unbind(0), powers, links.unbind(0), strict=True)]
    return torch.stack(whole, 1).flatten(0, 1)[:length]


def _step_by_step(x: list[Tensor], factor: Tensor, linked: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """From the last step to the first: the sums; whether each step is linked through to what follows the last one; and the factor of that."""
    sums, through, powers = [x[-1]], [torch.where(linked[-1], torch.ones_like(x[-1]), 0)], [factor]
    for value, link in zip(reversed(x[:-1]), reversed(linked[:-1]), strict=True):
        # Selected before the product: zero times the infinity of another episode would be NaN.
        sums.append(value + factor * torch.where(link, sums[-1], 0))
        through.append(torch.where(link, through[-1], 0))
        powers.append(factor * powers[-1])
    return sums[::-1], through[::-1], powers[::-1]


def unit_number(name: str, value: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number in [0, 1] as a 0-d tensor; a tensor is converted to ``dtype`` and not validated.

    Raises:
        ValueError: for anything else, with ``name`` in the text.
    """
    if isinstance(value, Tensor):
        return value.to(dtype)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value) or not 0 <= value <= 1:
        raise ValueError(f"{name} must be a number in [0, 1], got {value!r}")
    return torch.full((), value, dtype=dtype, device=device)


def _discounts(done: Tensor, gamma: float | Tensor, initial: float | Tensor, dtype: torch.dtype | None) -> Tensor:
    """``D_0 ... D_T``."""
    start = _episode_start(done)
    if dtype is None:
        dtypes = [x.dtype for x in (gamma, initial) if isinstance(x, Tensor) and x.is_floating_point()]
        dtype = torch.promote_types(dtypes[0], dtypes[-1]) if dtypes else torch.get_default_dtype()
    steps = torch.arange(start.shape[0], device=done.device).reshape(-1, *[1] * (done.ndim - 1))
    powers = _power(unit_number("gamma", gamma, dtype, done.device), steps - start)
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


def _check_reward(reward: Tensor, done: Tensor) -> None:
    if done.dtype != torch.bool:
        raise ValueError(f"done must be bool, got {done.dtype}")
    if not reward.is_floating_point():
        raise ValueError(f"reward must be a floating tensor, got {reward.dtype}")
    if reward.shape != done.shape:
        raise ValueError(f"reward and done must have the same shape, got {tuple(reward.shape)} and {tuple(done.shape)}")
