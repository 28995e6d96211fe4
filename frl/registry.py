"""One shape of registry for environments, policies, algorithms, optimizers and schedules.

Names are case-insensitive. Objects of other installed packages are found through entry-point groups (``frl.envs``, ``frl.policies``), loaded on the first
look-up: importing the entry point's module is expected to register the object, or the entry point is the factory itself.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any


class Registry:
    """A case-insensitive name -> object table.

    Args:
        kind: word used in messages, for example ``"environment"``.
        group: entry-point group whose entries are added under their own names on the first look-up.
    """

    def __init__(self, kind: str, group: str | None = None) -> None:
        self.kind = kind
        self._group = group
        self._table: dict[str, Any] = {}

    def register(self, name: str, value: Any = None, *, override: bool = False) -> Any:
        """Add ``value`` under ``name``; without ``value`` returns a decorator. ``ValueError`` for a taken or empty name."""
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"{self.kind} name must be a non-empty string, got {name!r}")
        if value is None:

            def decorator(item: Any) -> Any:
                self.register(name, item, override=override)
                return item

            return decorator
        key = name.lower()
        if key in self._table and not override:
            raise ValueError(f"{self.kind} {name!r} is already registered; pass override=True to replace it")
        self._table[key] = value
        return value

    def names(self) -> list[str]:
        """Sorted names (lower case)."""
        self._discover()
        return sorted(self._table)

    def get(self, name: str) -> Any:
        """The object under ``name``; ``ValueError`` that lists the names and the nearest one otherwise."""
        if isinstance(name, str):
            key = name.lower()
            if key not in self._table:
                self._discover()
            if key in self._table:
                return self._table[key]
        known = self.names()
        near = difflib.get_close_matches(str(name).lower(), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown {self.kind} {name!r}{hint} (known: {', '.join(known)})")

    def _discover(self) -> None:
        if self._group is None:
            return
        group, self._group = self._group, None
        for point in entry_points(group=group):
            if point.name.lower() not in self._table:
                value: Callable = point.load()
                self._table.setdefault(point.name.lower(), value)
