"""Schedules of complete rollouts: what one rollout is to be, and a fair order of discrete difficulties.

A scheduled environment answers, before each complete rollout, how long it lasts, how much its objective counts and how it is labelled. The answer is a
function of the rollout's index alone, so a resumed run continues the same sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class DifferentiableRolloutSpec:
    """What one complete rollout is to be.

    Attributes:
        num_steps: horizon in steps, at least 1. An integral float such as ``2.0`` is accepted and stored as an int.
        objective_scale: factor on the rollout's objective: a finite number, or a floating tensor ``[]`` or ``[N]``. The values of a tensor on an
            accelerator are not read here: a non-finite one is caught by the update, which is then skipped.
        metadata: labels for the log, name -> finite number. Copied.

    Raises:
        TypeError: ``num_steps`` is a bool or not integral, ``objective_scale`` or a label is not a number, or a label's name is not a string.
        ValueError: ``num_steps`` is below 1, ``objective_scale`` or a label is not finite, or a tensor scale has the wrong dtype or shape.
    """

    num_steps: int
    objective_scale: float | Tensor = 1.0
    metadata: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _is_integral(self.num_steps):
            raise TypeError(f"num_steps must be an integer, got {self.num_steps!r}")
        if self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {self.num_steps!r}")
        object.__setattr__(self, "num_steps", int(self.num_steps))
        if isinstance(self.objective_scale, Tensor):
            _check_scale(self.objective_scale)
        else:
            object.__setattr__(self, "objective_scale", _finite("objective_scale", self.objective_scale))
        if not isinstance(self.metadata, Mapping):
            raise TypeError(f"metadata must be a mapping of names to numbers, got {self.metadata!r}")
        for name in self.metadata:
            if not isinstance(name, str):
                raise TypeError(f"metadata names must be strings, got {name!r}")
        object.__setattr__(self, "metadata", {name: _finite(f"metadata[{name!r}]", value) for name, value in self.metadata.items()})


def stratified_rollout_value(index: int, minimum: int, maximum: int) -> int:
    """The value that rollout ``index`` plays, from the integer range ``minimum..maximum`` (both included).

    With ``c = maximum - minimum + 1``, ``cycle = index // c`` and ``position = index % c`` the value is ``minimum + (position + cycle) % c``: each block of
    ``c`` rollouts plays every value once, and each block starts one value later than the one before, so that no value is tied to a place in the block.

    Args:
        index: rollout index, at least 0.
        minimum: lowest value.
        maximum: highest value, at least ``minimum``.

    Returns:
        The value, an int.

    Raises:
        TypeError: an argument is a bool or not an integer.
        ValueError: ``index`` is negative or ``maximum`` is below ``minimum``.
    """
    for name, value in (("index", index), ("minimum", minimum), ("maximum", maximum)):
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name} must be an integer, got {value!r}")
    if index < 0:
        raise ValueError(f"index must be at least 0, got {index!r}")
    if maximum < minimum:
        raise ValueError(f"maximum must be at least minimum = {minimum!r}, got {maximum!r}")
    count = int(maximum) - int(minimum) + 1
    cycle, position = divmod(int(index), count)
    return int(minimum) + (position + cycle) % count


def _is_integral(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, Integral) or (isinstance(value, Real) and float(value).is_integer())


def _finite(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value!r}")
    return float(value)


def _check_scale(scale: Tensor) -> None:
    if not scale.is_floating_point() or scale.ndim > 1:
        raise ValueError(f"objective_scale must be a floating tensor of shape [] or [N], got {scale.dtype} of shape {tuple(scale.shape)}")
    # Reading an accelerator's memory here would stall every rollout.
    if scale.device.type == "cpu" and not bool(torch.isfinite(scale).all()):
        raise ValueError(f"objective_scale must be finite, got {scale!r}")
