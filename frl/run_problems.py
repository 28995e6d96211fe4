"""What is wrong with a run file, in words: one line for each problem, with the key path, the value, what is allowed and the nearest match."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from frl import run_schema as schema
from frl import run_values as values


class ConfigError(ValueError):
    """A run file or an override that cannot be used. ``problems`` holds one line each: key path, value, what is allowed, the nearest match."""

    def __init__(self, source: str, problems: Sequence[str] = ()) -> None:
        super().__init__(source, tuple(problems))
        self.source, self.problems = source, tuple(problems)

    def __str__(self) -> str:
        if len(self.problems) < 2:
            return ": ".join((self.source, *self.problems))
        return "\n  ".join([f"{self.source}: {len(self.problems)} problems", *self.problems])


def plain_copy(mapping: Any, source: str) -> dict[str, Any]:
    """A copy that holds plain Python values only; ``ConfigError`` for anything else, NaN included."""
    if not isinstance(mapping, Mapping):
        raise ConfigError(source, [f"expected a mapping with the blocks trainer, policy, algorithm at the top level, got {values.describe(mapping)}"])
    problems = [f"{path}: got {values.describe(value)}, {text}" for path, value, text in _not_plain(mapping)]
    if problems:
        raise ConfigError(source, problems)
    return values.copied(mapping)


def _not_plain(value: Any, path: str = "") -> Iterator[tuple[str, Any, str]]:
    """``(key path, value, what is wrong)`` for everything in a value that a run file cannot hold, NaN included."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            name = f"{path}.{key}" if path else str(key)
            if not isinstance(key, str):
                yield name, key, "expected text as the key; quote it"
            yield from _not_plain(item, name)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _not_plain(item, f"{path}[{index}]")
    elif isinstance(value, numbers.Real):
        if not isinstance(value, numbers.Integral) and math.isnan(value):
            yield path, value, "NaN is refused everywhere"
    elif not (value is None or isinstance(value, str)):
        yield path, type(value).__name__, "expected null, a boolean, a number, text, a list or a mapping"


def problem_of(path: str, error: Any, table: Mapping) -> str:
    """One line for one of pydantic's errors."""
    *above, key = (path, *(str(part) for part in error["loc"]))
    section, where = ".".join(above), ".".join((*above, key))
    if error["type"] == "extra_forbidden":
        return unknown_key(section, key, table)
    if error["type"] == "missing":
        expected = {"algorithm.name": f"one of {', '.join(schema.ALGORITHM_CFGS)} or the name of a registered algorithm"}.get(where)
        keys = ", ".join(table.get(where) or ())
        return f"{where}: missing" + (f", expected {expected or f'the keys {keys}'}" if expected or keys else "")
    if error["type"] in ("model_type", "model_attributes_type"):
        return not_a_section(where, error["input"], table)
    reason = error.get("ctx", {}).get("error", error["msg"])
    return f"{where}: got {values.describe(error['input'])}, {reason}"


def not_a_section(where: str, value: Any, table: Mapping) -> str:
    """What is expected where a single value stands in the place of a section."""
    keys = table.get(where) or ()
    hint = ""
    if isinstance(value, str) and "name" in keys:
        hint = "; write null to switch it off" if value.lower() in (*values.OFF_WORDS, "none") else f"; write {{name: {value}}}"
    return f"{where}: got {values.describe(value)}, expected a mapping" + (f" with the keys {', '.join(keys)}" if keys else "") + hint


def unknown_key(section: str, key: str, table: Mapping) -> str:
    """Why a key is not known: refused by name, misspelled, in the wrong place, or none of these."""
    where = f"{section}.{key}" if section else key
    if where in schema.REFUSED:
        return f"{where}: {schema.REFUSED[where]}"
    if key == "<<":
        return f"{where}: YAML 1.2 has no merge key; write the keys out"
    known = table.get(section) or ()
    plain = key.replace("-", "_").lower()
    leaves = {f"{at}.{leaf}".lstrip("."): leaf for at, keys in table.items() for leaf in keys or () if leaf not in ("name", "cfg", "type")}
    elsewhere = [path for path, leaf in leaves.items() if leaf == plain]
    others = [name for name, model in schema.ALGORITHM_CFGS.items() if section == "algorithm.cfg" and plain in model.model_fields]
    if plain not in known and elsewhere:
        return f"{where}: unknown key here; it belongs at {' or '.join(elsewhere)}"
    if plain not in known and others:
        return f"{where}: has no effect with this algorithm; it is a setting of {', '.join(others)}"
    hint = values.nearest_hint(key, known)
    if not hint:
        near = next((path for path, leaf in leaves.items() if values.nearest_hint(key, [leaf], cutoff=0.8)), None)
        hint = f'did you mean "{near}"?' if near else f"known keys: {', '.join(known)}"
    return f"{where}: unknown key; {hint}"
