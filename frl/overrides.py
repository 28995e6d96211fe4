"""``--set key.path=value``: settings of a run file given on the command line, read as YAML and typed by the schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from frl import run_schema as schema
from frl.run_file import read_value
from frl.run_problems import ConfigError, plain_copy, unknown_key
from frl.run_values import describe


def apply_overrides(mapping: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of ``mapping`` with ``key.path=value`` applied in order; values are YAML 1.2 scalars or flow collections, typed later by the schema.

    Example:
        >>> apply_overrides({"trainer": {"num_envs": 64}}, ["trainer.num_envs=32", "algorithm.cfg.gamma=.9"])
        {'trainer': {'num_envs': 32}, 'algorithm': {'cfg': {'gamma': 0.9}}}

    Raises:
        ConfigError: not of the form ``key.path=value``, not YAML, or no such key; the nearest key is named.
    """
    result = plain_copy(mapping, "--set")
    problems: list[str] = []
    paths: list[tuple[str, ...]] = []
    for text in overrides:
        name, equals, raw = text.partition("=")
        keys = tuple(name.strip().split("."))
        if not equals or not all(keys):
            problems.append(f"{text}: expected key.path=value, such as trainer.num_envs=32")
            continue
        try:
            _assign(result, keys, read_value(raw))
            paths.append(keys)
        except ValueError as error:
            problems.append(f"{text}: {error}")
    algorithm, policy = schema.block_names(result)
    table = schema.sections(algorithm, policy)
    for keys in paths:
        problems.extend(_unreachable(keys, table))
    if problems:
        raise ConfigError("--set", problems)
    return result


def _assign(mapping: dict[str, Any], keys: tuple[str, ...], value: Any) -> None:
    for depth, key in enumerate(keys[:-1]):
        if keys[: depth + 1] == ("trainer", "learning_env") and isinstance(mapping.get(key), str):
            mapping[key] = {"name": mapping[key]}
        if mapping.get(key) is None:
            mapping[key] = {}
        mapping = mapping[key]
        if not isinstance(mapping, dict):
            raise ValueError(f"{'.'.join(keys[: depth + 1])} is {describe(mapping)} and has no keys")
    # The two spellings of one setting: the override takes the place of either.
    other = {"trainer.buffer_size": "rollout_steps", "trainer.rollout_steps": "buffer_size"}.get(".".join(keys), "")
    mapping.pop(other, None)
    mapping[keys[-1]] = value


def _unreachable(keys: tuple[str, ...], table: Mapping[str, tuple[str, ...] | None]) -> Iterator[str]:
    section = ""
    for key in keys:
        if section not in table:
            yield f"{'.'.join(keys)}: {section} is a single value and has no keys"
            return
        known = table[section]
        if known is None:
            return
        if key not in known:
            yield unknown_key(section, key, table)
            return
        section = f"{section}.{key}" if section else key
