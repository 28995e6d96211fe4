"""Run files as plain values: YAML 1.2 and JSON read strictly, and YAML written so that it reads back equal.

YAML follows the 1.2 core schema to the letter, so ``1e-4`` is a number, ``on`` and ``no`` are text, and a key that appears twice is refused. What the keys
mean is the business of :mod:`frl.config`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.tag import Tag

from frl.run_values import copied


class _CoreSchema(VersionedResolver):
    """The YAML 1.2 core schema. The library's own 1.2 rules also take underscores, binary numbers and dates."""

    _RULES = (
        ("null", r"~|null|Null|NULL|"),
        ("bool", r"true|True|TRUE|false|False|FALSE"),
        ("int", r"[-+]?[0-9]{1,300}|0o[0-7]{1,300}|0x[0-9a-fA-F]{1,300}"),
        ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
    )

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        name = {SequenceNode: "seq", MappingNode: "map"}.get(kind, "str")
        if kind is ScalarNode and implicit[0]:
            name = next((name for name, pattern in self._RULES if re.fullmatch(pattern, value)), "str")
        return Tag(suffix=f"tag:yaml.org,2002:{name}")


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver = _CoreSchema
    return yaml


def _scalar(kind: str, text: str) -> Any:
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    return float(re.sub(r"\.(?=[a-zA-Z])", "", text)) if kind == "float" else text


def _construct(node: Any, above: tuple[int, ...] = ()) -> Any:
    line = node.start_mark.line + 1
    kind = str(node.tag).removeprefix("tag:yaml.org,2002:")
    if id(node) in above:
        raise ValueError(f"line {line}: an alias refers to what contains it")
    above = (*above, id(node))
    if isinstance(node, MappingNode) and kind == "map":
        mapping = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                raise ValueError(f"line {line}: expected text as a key")
            key = _construct(key_node)
            if key in mapping:
                raise ValueError(f'line {key_node.start_mark.line + 1}: the key "{key}" appears twice in one mapping')
            mapping[key] = _construct(value_node, above)
        return mapping
    if isinstance(node, SequenceNode) and kind == "seq":
        return [_construct(item, above) for item in node.value]
    if isinstance(node, ScalarNode) and kind in ("null", "bool", "int", "float", "str"):
        try:
            return _scalar(kind, node.value)
        except ValueError:
            raise ValueError(f"line {line}: {node.value!r} is not of the tagged type {kind}") from None
    raise ValueError(f"line {line}: the tag {node.tag} is not supported")


def _compose(text: str) -> Any:
    """The node tree of one YAML document, ``None`` for an empty one; ``ValueError`` with the line otherwise."""
    try:
        return _yaml().compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{where}not valid YAML: {error.problem or error.context}") from None
    except (YAMLError, RecursionError) as error:
        raise ValueError(f"not valid YAML: {str(error).splitlines()[0]}") from None


def read_yaml(text: str) -> Any:
    """The plain value of one YAML document, ``None`` for an empty one; ``ValueError`` with the line otherwise."""
    node = _compose(text)
    return None if node is None else _construct(node)


def read_value(text: str) -> Any:
    """One YAML scalar or flow collection that is all of ``text``; ``ValueError`` for text that YAML reads as something shorter."""
    node = _compose(text)
    plain = node is None or (isinstance(node, ScalarNode) and not node.style)
    if plain and (node.value if node else "") != text.strip():
        raise ValueError("the value is ambiguous in YAML; put it in quotes")
    return None if node is None else _construct(node)


def read_json(text: str) -> Any:
    """The plain value of a JSON text, ``None`` for an empty one; ``ValueError`` with the line otherwise."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f'the key "{twice}" appears twice in one mapping')
        return mapping

    try:
        return json.loads(text, object_pairs_hook=unique) if text.strip() else None
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError("not valid JSON: nested too deeply") from None


def write_yaml(path: str | Path, mapping: Mapping[str, Any]) -> None:
    """Write plain Python values as YAML 1.2, key order kept, so that they read back equal."""
    yaml = _yaml()
    yaml.sort_base_mapping_type_on_output = False  # pyright: ignore[reportAttributeAccessIssue]
    yaml.default_flow_style = None  # pyright: ignore[reportAttributeAccessIssue]
    yaml.allow_unicode, yaml.width = True, 4096
    text = StringIO()
    yaml.dump(copied(mapping), text)
    Path(path).write_text(text.getvalue(), encoding="utf-8")
