"""Options of algorithms, checked once where they are given: numbers, limits, counts and normalizers."""

from __future__ import annotations

import math
from typing import Any

from frl.types import Normalizer


def check_number(name: str, value: Any, low: float, high: float = math.inf, *, positive: bool = False) -> None:
    """``ValueError`` unless ``value`` is a finite number in [low, high] (above low when ``positive``)."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and low <= value <= high
    if not good or (positive and value == low):
        end = "" if high == math.inf else f" and at most {high:g}"
        raise ValueError(f"{name} must be a finite number {'above' if positive else 'of at least'} {low:g}{end}, got {value!r}")


def check_limit(name: str, value: Any) -> None:
    """``ValueError`` unless ``value`` is a positive number, or ``None`` or infinity, which mean off."""
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0):
        return
    raise ValueError(f"{name} must be a positive number, or None or infinity to switch it off, got {value!r}")


def check_count(name: str, value: Any, low: int = 1) -> None:
    """``ValueError`` unless ``value`` is an integer of at least ``low``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")


def check_normalizers(policy: Any, normalizer: Normalizer | None, critic_normalizer: Normalizer | None) -> bool:
    """Whether actor and critic share one normalizer; ``ValueError`` where they cannot, or where one that the policy asks for is missing."""
    shared = critic_normalizer is not None and critic_normalizer is normalizer
    if shared and policy.uses_separate_critic_obs:
        raise ValueError("actor and critic see different observations and cannot share a normalizer; pass another critic_normalizer")
    for name, given in (("actor_obs_normalization", normalizer), ("critic_obs_normalization", critic_normalizer)):
        if getattr(policy, name) and given is None:
            part = "critic_normalizer" if name.startswith("critic") else "normalizer"
            raise ValueError(f"the policy asks for {name}: pass {part}, such as frl.empirical_normalizer(features)")
    return shared
