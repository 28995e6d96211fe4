"""Options of algorithms, checked once where they are given: limits, gates and normalizers."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from frl.types import Normalizer
from frl.validate import require_number


def check_limit(name: str, value: Any) -> None:
    """``ValueError`` unless ``value`` is a positive number, or ``None`` or infinity, which mean off. A limit of 0 would freeze learning."""
    if value is not None and not _infinite(value):
        require_number(f"{name} (None or infinity means off)", value, above=0.0)


def check_gate(name: str, value: Any) -> None:
    """``ValueError`` unless ``value`` is a number of at least 0, ``None`` or infinity; 0, ``None`` and infinity mean off."""
    if value is not None and not _infinite(value):
        require_number(f"{name} (0, None or infinity means off)", value, at_least=0.0)


def _infinite(value: Any) -> bool:
    return isinstance(value, Real) and float(value) == math.inf


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
