"""Where the wall clock of a run goes: seconds of each part of the training loop, with the calls that compiled something kept apart."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from frl import compile as compiler

NAMES = ("collect", "update", "evaluation", "saving", "logging", "callbacks")


@dataclass
class Phase:
    """What one part took. ``steady_*`` leave out the calls that compiled a graph or were traced."""

    calls: int = 0
    seconds: float = 0.0
    steady_calls: int = 0
    steady_seconds: float = 0.0


class Phases:
    """Counts calls and seconds by name: ``with phases("update"): ...``.

    Args:
        synchronize: called at the end of every part, to wait for work that an accelerator does behind the host; without it such work is counted in whatever
            part waits for it first.
        mark: gives a context to enter around each part, by its name, such as a mark in a trace.

    Attributes:
        traced: whether a profiler is running, which makes everything slower.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None, mark: Callable[[str], AbstractContextManager] | None = None) -> None:
        self._synchronize, self._mark = synchronize, mark
        self.traced = False
        self._phases = {name: Phase() for name in NAMES}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        graphs, started = compiler.graph_count(), time.perf_counter()
        try:
            with contextlib.nullcontext() if self._mark is None else self._mark(name):
                yield
        finally:
            if self._synchronize is not None:
                self._synchronize()
            took, phase = time.perf_counter() - started, self._phases[name]
            phase.calls += 1
            phase.seconds += took
            if compiler.graph_count() == graphs and not self.traced:
                phase.steady_calls += 1
                phase.steady_seconds += took

    def __getitem__(self, name: str) -> Phase:
        return self._phases[name]

    def table(self) -> list[dict[str, float | str]]:
        """One row for each part that was entered: ``phase, calls, seconds, share`` of all parts, and ``steady_ms``, the mean of
        the calls that compiled nothing and were not traced."""
        total = sum(phase.seconds for phase in self._phases.values())
        return [
            {
                "phase": name,
                "calls": phase.calls,
                "seconds": phase.seconds,
                "share": phase.seconds / total if total else 0.0,
                "steady_ms": 1e3 * phase.steady_seconds / phase.steady_calls if phase.steady_calls else float("nan"),
            }
            for name, phase in self._phases.items()
            if phase.calls
        ]
