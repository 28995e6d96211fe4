"""Learning-rate schedules as pure functions of the number of updates made.

``schedule(base_learning_rate, step) -> learning_rate``: 0-d tensors in, a 0-d tensor in the dtype of the base rate out. ``step`` counts *successful* updates:
0 gives the rate of the first one, and a skipped update does not advance it. All are closed forms: nothing is remembered, a resumed run continues where it
was, and four calls of 25 updates are one call of 100. Where ``torch.optim.lr_scheduler`` multiplies its way forward, the two agree to that rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from frl.validate import require_count, require_number

Schedule: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def constant_schedule() -> Schedule:
    """The base rate at every step."""

    def schedule(base_learning_rate: Tensor, step: Tensor) -> Tensor:
        return base_learning_rate

    return schedule


def linear_schedule(total_iters: int, start_factor: float = 1.0, end_factor: float = 0.0) -> Schedule:
    """``base * (start_factor * (1 - f) + end_factor * f)`` with ``f = min(step, total_iters) / total_iters``.

    Args:
        total_iters: updates from the first factor to the last; past it the rate stays at ``end_factor``, exactly.
        start_factor: in (0, 1].
        end_factor: in [0, 1].

    Raises:
        ValueError: for an option out of its range.
    Source: ``torch.optim.lr_scheduler.LinearLR`` (there ``end_factor`` is 1 by default).
    """
    total_iters = require_count("linear schedule: total_iters", total_iters)
    start_factor = require_number("linear schedule: start_factor", start_factor, above=0.0, at_most=1.0)
    end_factor = require_number("linear schedule: end_factor", end_factor, at_least=0.0, at_most=1.0)

    def schedule(base_learning_rate: Tensor, step: Tensor) -> Tensor:
        f = _fraction(step, total_iters, base_learning_rate)
        return base_learning_rate * (start_factor * (1 - f) + end_factor * f).to(base_learning_rate.dtype)

    return schedule


def cosine_schedule(T_max: int, eta_min: float = 0.0) -> Schedule:
    """``eta_min + (base - eta_min) * (1 + cos(pi * f)) / 2`` with ``f = min(step, T_max) / T_max``.

    Args:
        T_max: updates from the base rate to ``eta_min``; past it the rate stays at ``eta_min`` (``torch`` would rise again).
        eta_min: last rate, at least 0.

    Raises:
        ValueError: for an option out of its range.
    Source: Loshchilov and Hutter 2017, equation 5, without restarts; the closed form of ``torch.optim.lr_scheduler.CosineAnnealingLR``.
    """
    T_max = require_count("cosine schedule: T_max", T_max)
    eta_min = require_number("cosine schedule: eta_min", eta_min, at_least=0.0)

    def schedule(base_learning_rate: Tensor, step: Tensor) -> Tensor:
        weight = (1 + torch.cos(math.pi * _fraction(step, T_max, base_learning_rate))) / 2
        return eta_min + (base_learning_rate - eta_min) * weight.to(base_learning_rate.dtype)

    return schedule


def step_schedule(step_size: int, gamma: float = 0.1) -> Schedule:
    """``base * gamma^floor(step / step_size)``.

    Args:
        step_size: updates between two changes.
        gamma: factor of a change, above 0.

    Raises:
        ValueError: for an option out of its range.
    Source: ``torch.optim.lr_scheduler.StepLR``.
    """
    step_size = require_count("step schedule: step_size", step_size)
    gamma = require_number("step schedule: gamma", gamma, above=0.0)

    def schedule(base_learning_rate: Tensor, step: Tensor) -> Tensor:
        return base_learning_rate * _power(gamma, torch.div(step, step_size, rounding_mode="floor"), base_learning_rate)

    return schedule


def exponential_schedule(gamma: float) -> Schedule:
    """``base * gamma^step``.

    Args:
        gamma: factor of an update, above 0.

    Raises:
        ValueError: for an option out of its range.
    Source: ``torch.optim.lr_scheduler.ExponentialLR``.
    """
    gamma = require_number("exponential schedule: gamma", gamma, above=0.0)

    def schedule(base_learning_rate: Tensor, step: Tensor) -> Tensor:
        return base_learning_rate * _power(gamma, step, base_learning_rate)

    return schedule


def _wide(like: Tensor) -> torch.dtype:
    """Half precision cannot count updates: scalars have at least single precision."""
    return torch.promote_types(like.dtype, torch.float32)


def _fraction(step: Tensor, total: int, like: Tensor) -> Tensor:
    """``clamp(step, 0, total) / total``; exactly 1 at the end and after it."""
    return step.clamp(0, total).to(_wide(like)) / total


def _power(gamma: float, exponent: Tensor, like: Tensor) -> Tensor:
    """``gamma^exponent``, through the logarithm: ``gamma`` itself, rounded to single precision, would be off by the exponent times that rounding."""
    return torch.exp(exponent.to(_wide(like)) * math.log(gamma)).to(like.dtype)
