"""Functions that are one operation in graphs that Inductor compiles for a CPU, and C++ of ours when they run.

A long chain of small operations costs a compiler seconds wherever it occurs, and what it generates is no faster than a loop that one would write. Such a
function asks :func:`in_use` and then calls its operation; elsewhere, and where a gradient may be asked for, it is written out. A time loop is one operation
too (:mod:`frl.loop_operation`), in graphs of functions that nobody differentiates.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

_state = threading.local()


def in_use() -> bool:
    """Whether a graph is being captured in which such functions are to be one operation."""
    return bool(getattr(_state, "on", False))


@contextmanager
def as_one_operation(on: bool) -> Iterator[bool]:
    """Graphs captured inside, by this thread, call the operations if ``on``, which is given back."""
    with _set("on", on):
        yield on


class Loops:
    """Time loops in a graph that is being captured.

    Attributes:
        threads: for the code of a loop; ``None`` for torch's number.
        met: whether there is one.
        calls: what the operations call.
    """

    def __init__(self, threads: int | None) -> None:
        self.threads = threads
        self.met = False
        self.calls: list[Any] = []


def loops_in_use() -> Loops | None:
    """The loops of the graph that is being captured, where they are to be one operation each."""
    return getattr(_state, "loops", None)


@contextmanager
def with_loops(threads: int | None, on: bool) -> Iterator[Loops]:
    """Time loops in graphs captured inside, by this thread, are one operation each if ``on``."""
    loops = Loops(threads)
    with _set("loops", loops if on else None):
        yield loops


def only_shapes() -> bool:
    """Whether results are asked for their shapes alone: a loop may then run one step instead of all."""
    return bool(getattr(_state, "shapes", False))


def for_shapes(on: bool) -> AbstractContextManager[None]:
    """Results of what this thread runs inside are asked for their shapes alone."""
    return _set("shapes", on)


@contextmanager
def _set(name: str, value: Any) -> Iterator[None]:
    before = getattr(_state, name, None)
    setattr(_state, name, value)
    try:
        yield
    finally:
        setattr(_state, name, before)


def vectorised(source: str) -> str:
    """C++ whose plain loops become vector code: Inductor's flags forbid it, since what it generates uses vector types."""
    gcc = "#if defined(__GNUC__) && !defined(__clang__)\n%s#endif\n"
    begin = gcc % '#pragma GCC push_options\n#pragma GCC optimize("tree-loop-vectorize")\n'
    return begin + source + gcc % "#pragma GCC pop_options\n"


@functools.cache
def library(source: str) -> Any:
    """C++ that needs nothing of torch, compiled and loaded, for a call from Python; a native loop has the source in its own library."""
    from torch._inductor.codecache import CppCodeCache

    return CppCodeCache.load(source, needs_vec_isa=False)
