"""Checks of single values at the edge: one place and one wording for counts, numbers, switches and choices.

Everything here raises ``ValueError`` in one sentence that names the value, what was got and what is allowed. A ``bool`` is neither a count nor a number, NaN
and infinity are refused, and numpy's scalars are taken as the numbers that they are.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any


def require_count(name: str, value: Any, at_least: int = 1) -> int:
    """The value as an int; ``ValueError`` unless it is an integer of at least ``at_least``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < at_least:
        raise ValueError(f"{name} must be an integer of at least {at_least}, got {value!r}")
    return int(value)


def require_number(
    name: str, value: Any, *, above: float = -math.inf, at_least: float = -math.inf, below: float = math.inf, at_most: float = math.inf
) -> float:
    """The value as a float; ``ValueError`` unless it is a finite number within the bounds."""
    bounds = (("above", above), ("at least", at_least), ("below", below), ("at most", at_most))
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not (math.isfinite(number) and above < number < below and at_least <= number <= at_most):
        limits = " and ".join(f"{word} {bound:g}" for word, bound in bounds if math.isfinite(bound))
        raise ValueError(f"{name} must be a finite number {limits}".rstrip() + f", got {value!r}")
    return number


def require_switch(name: str, value: Any, *, optional: bool = False) -> bool:
    """``value`` if it is ``True`` or ``False``, ``False`` for ``None`` where ``optional``; ``ValueError`` otherwise."""
    if isinstance(value, bool) or (optional and value is None):
        return bool(value)
    raise ValueError(f"{name} must be true or false, got {value!r}")


def require_choice(name: str, value: Any, allowed: Sequence[str]) -> str:
    """``value`` if it is one of the words ``allowed``; ``ValueError`` that names the nearest one otherwise."""
    if isinstance(value, str) and value in allowed:
        return value
    near = difflib.get_close_matches(value, allowed, n=1) if isinstance(value, str) else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}{hint}")
