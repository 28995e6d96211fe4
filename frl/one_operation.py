"""Functions that are one operation in graphs that Inductor compiles for a CPU, and C++ of ours when they run.

A long chain of small operations costs a compiler seconds wherever it occurs, and what it generates is no faster than a loop that one would write. Such a
function asks :func:`in_use` and then calls its operation; elsewhere, and where a gradient may be asked for, it is written out.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_state = threading.local()


def in_use() -> bool:
    """Whether a graph is being captured in which such functions are to be one operation."""
    return getattr(_state, "on", False)


@contextmanager
def as_one_operation(on: bool) -> Iterator[None]:
    """Graphs captured inside, by this thread, call the operations."""
    before, _state.on = in_use(), on
    try:
        yield
    finally:
        _state.on = before


@functools.cache
def library(source: str) -> Any:
    """C++ that needs nothing of torch, compiled and loaded, for a call from Python; a native loop has the source in its own library."""
    from torch._inductor.codecache import CppCodeCache

    return CppCodeCache.load(source, needs_vec_isa=False)
