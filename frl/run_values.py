"""One value of a run file: what each kind of value takes, how a refusal is worded, and how a value is spelled in a message.

Values are never converted from another type: ``true`` is not a number, ``"0.1"`` is not a number, ``1.5`` is not an integer, while ``1e6`` is one. The kinds
are validators that :mod:`frl.run_schema` puts beside the keys.
"""

from __future__ import annotations

import difflib
import json
import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, PlainValidator

LARGEST_INT = 2**53 - 1  # the largest integer that a float, and so ``1e6`` or JSON, carries exactly
OFF_WORDS = ("off", "no", "false")
_SWITCH_WORDS = ("yes", "no", "on", "off", "y", "n", "true", "false", "0", "1")


def describe(value: Any) -> str:
    """A value as a run file would spell it, with its kind where that is not obvious."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"{str(value).lower()} (a boolean)"
    if isinstance(value, str):
        return f"{json.dumps(value[:60], ensure_ascii=False)} (text)"
    if isinstance(value, Mapping | BaseModel):
        return "a mapping"
    if isinstance(value, list | tuple):
        return f"a list, {list(value)!r:.60}"
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: ".inf", -math.inf: "-.inf"}.get(value, ".nan")
    return f"{value!r:.60}"


def refused(expected: str, hint: str = "") -> ValueError:
    """The error of a validator: what was expected, and a hint."""
    return ValueError(f"expected {expected}" + (f"; {hint}" if hint else ""))


def number_hint(value: Any) -> str:
    """How to write a number that was given as text; nothing for anything else."""
    if not isinstance(value, str):
        return ""
    try:
        number = float(value)
    except ValueError:
        return ""
    if math.isnan(number):
        return ""
    if "_" in value:
        return "write the number without underscores"
    return "write .inf" if "inf" in value.lower() else "remove the quotes"


def real(value: Any, integral: bool = False) -> float | int | None:
    """The number, or ``None`` for what is not one (``true`` and text included) or, with ``integral``, is not whole."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    if integral and isinstance(value, numbers.Integral):
        return int(value)
    try:
        number = float(value)
    except OverflowError:
        return None
    if integral:
        return int(number) if number.is_integer() else None
    return number


def integer(low: int, *, none: bool = False, high: int = LARGEST_INT) -> PlainValidator:
    """An integer in [low, high], in any spelling of a whole number; with ``none`` also null."""
    text = f"an integer >= {low}" + (" or null" if none else "")

    def check(value: Any) -> int | None:
        if value is None and none:
            return None
        number = real(value, integral=True)
        if number is None or number < low:
            raise refused(text, number_hint(value))
        if number > high:
            raise refused(f"{text}, at most {high}")
        return int(number)

    return PlainValidator(check)


def number(low: float = -math.inf, high: float = math.inf, *, open_low: bool = False, none: bool = False) -> PlainValidator:
    """A finite number in [low, high], without ``low`` itself when ``open_low``; with ``none`` also null."""
    bounds = " in [" + f"{low:g}, {high:g}]" if high < math.inf else (f" {'>' if open_low else '>='} {low:g}" if low > -math.inf else "")
    text = f"a finite number{bounds}" + (" or null" if none else "")

    def check(value: Any) -> float | None:
        if value is None and none:
            return None
        number = real(value)
        if number is None or not math.isfinite(number) or not low <= number <= high or (open_low and number == low):
            raise refused(text, number_hint(value))
        return float(number)

    return PlainValidator(check)


def norm_limit(off: float | None) -> PlainValidator:
    """A limit where null and infinity mean off, stored as ``off``; 0 means off only where ``off`` is 0."""
    text = "a number > 0, or null or .inf to switch it off" if off is None else "a number >= 0 (0, null and .inf switch it off)"

    def check(value: Any) -> float | None:
        if value is None or value == math.inf:
            return off
        number = real(value)
        if number is None or not 0 <= number < math.inf or (off is None and number == 0):
            hint = "0 would freeze learning" if not isinstance(value, bool) and value == 0 else number_hint(value)
            raise refused(text, hint)
        return float(number)

    return PlainValidator(check)


def read_switch(value: Any) -> bool:
    """``true`` or ``false`` and no other spelling of them."""
    if not isinstance(value, bool):
        spelled = str(value).lower() in _SWITCH_WORDS
        raise refused("true or false", "write it as a plain true or false, without quotes" if spelled else "")
    return value


def free_text(what: str = "text", *, pattern: str = r"(?s).*\S.*", none: bool = False, off: bool = False, lower: bool = False) -> PlainValidator:
    """Text; with ``none`` also null; with ``off`` null switches something off, which words such as ``off`` do not."""
    text = what + (" or null" if none or off else "")

    def check(value: Any) -> str | None:
        if value is None and (none or off):
            return None
        if off and (value is False or (isinstance(value, str) and value.lower() in OFF_WORDS)):
            raise refused(text, "write null to switch it off")
        if not isinstance(value, str):
            raise refused(text, "quote it to make it text" if isinstance(value, numbers.Real) else "")
        if not re.fullmatch(pattern, value):
            raise refused(text)
        return value.lower() if lower else value

    return PlainValidator(check)


def word(*allowed: str, lower: bool = False) -> PlainValidator:
    """One of some words, in any case when ``lower``."""
    text = "one of " + ", ".join(allowed)

    def check(value: Any) -> str:
        word = value.lower() if lower and isinstance(value, str) else value
        if isinstance(word, str) and word in allowed:
            return word
        raise refused(text, nearest_hint(value, allowed))

    return PlainValidator(check)


def nearest_hint(value: Any, allowed: Sequence[str], cutoff: float = 0.6) -> str:
    """``did you mean "x"?`` or nothing."""
    near = difflib.get_close_matches(str(value).lower().replace("-", "_"), list(allowed), n=1, cutoff=cutoff)
    return f'did you mean "{near[0]}"?' if near and isinstance(value, str) else ""


def _listed(value: Any, what: str, hint: str = "") -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise refused(what, hint)
    return value


def read_sizes(value: Any) -> tuple[int, ...]:
    """Sizes of layers."""
    what = "a list of integers >= 1, such as [64, 64]"
    sizes = [real(item, integral=True) for item in _listed(value, what)]
    if any(size is None or not 1 <= size <= LARGEST_INT for size in sizes):
        raise refused(what)
    return tuple(int(size) for size in sizes if size is not None)


def read_gains(value: Any) -> float | tuple[float, ...] | None:
    """Gains of an initialisation."""
    what = "a finite number >= 0, a list of them (one per linear layer) or null"
    if value is None:
        return None
    numbers_ = [real(item) for item in (value if isinstance(value, list | tuple) else [value])]
    if not numbers_ or any(number is None or not 0 <= number < math.inf for number in numbers_):
        raise refused(what, number_hint(value))
    gains = tuple(float(number) for number in numbers_ if number is not None)
    return gains if isinstance(value, list | tuple) else gains[0]


def read_seeds(value: Any) -> tuple[int, ...] | None:
    """Seeds of members: ``None``, or a list of different integers."""
    if value is None:
        return None
    seeds = tuple(real(item, integral=True) for item in _listed(value, "a list of integers of at least 0", number_hint(value)))
    if not seeds or any(seed is None or seed < 0 for seed in seeds):
        raise refused("a non-empty list of integers of at least 0")
    if len(set(seeds)) < len(seeds):
        raise refused("different seeds: members of one seed would be the same")
    return tuple(int(seed) for seed in seeds if seed is not None)


def read_hyper(value: Any) -> dict[str, tuple[float, ...]]:
    """Values of hyper-parameters for the members: ``{name: non-empty list of numbers}``."""
    if not isinstance(value, Mapping):
        raise refused("a mapping of names to lists of numbers")
    result = {}
    for name, items in value.items():
        numbers = [real(item) for item in _listed(items, f"a list of numbers for {name}", number_hint(items))]
        if not numbers or any(x is None for x in numbers):
            raise refused(f"a non-empty list of numbers for {name}")
        result[str(name)] = tuple(float(x) for x in numbers if x is not None)
    return result


def interval(*, positive: bool) -> PlainValidator:
    """``[low, high]`` or null."""
    what = f"a list [low, high] of two finite {'positive ' if positive else ''}numbers with low <= high, or null"

    def check(value: Any) -> tuple[float, float] | None:
        if value is None:
            return None
        pair = [real(item) for item in _listed(value, what)]
        low, high = pair if len(pair) == 2 else (None, None)
        if low is None or high is None or not (0 if positive else -math.inf) < low <= high < math.inf or low == -math.inf:
            raise refused(what)
        return float(low), float(high)

    return PlainValidator(check)


def name_list(what: str, pattern: str, *, empty: bool) -> PlainValidator:
    """A list of texts that match ``pattern`` in full."""

    def check(value: Any) -> tuple[str, ...]:
        items = _listed(value, what, "write it as a list: [name]" if isinstance(value, str) else "")
        if not (items or empty) or any(not isinstance(item, str) or not re.fullmatch(pattern, item) for item in items):
            raise refused(what)
        return tuple(items)

    return PlainValidator(check)


def copied(value: Any) -> Any:
    """A copy of a plain value that shares no container with it."""
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [copied(item) for item in value]
    if isinstance(value, bool | None | str):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def read_free(value: Any) -> dict[str, Any]:
    """A mapping whose keys belong to whoever reads it."""
    if value is not None and not isinstance(value, Mapping):
        raise refused("a mapping or null")
    return copied(value or {})


def section(*, scalar: Callable[[Any], Any] | None = None) -> BeforeValidator:
    """null stands for the section's defaults; ``scalar`` may turn a short form into the mapping."""
    return BeforeValidator(lambda value: {} if value is None else scalar(value) if scalar and isinstance(value, str) else value)


Free = Annotated[dict[str, Any], PlainValidator(read_free)]
Switch = Annotated[bool, PlainValidator(read_switch)]
Name = Annotated[str, free_text("a name (text)")]
Fraction = Annotated[float, number(0, 1)]
Coefficient = Annotated[float, number(0)]
Count = Annotated[int, integer(0)]
Positive = Annotated[int, integer(1)]
