"""Libraries of C++, compiled while Python goes on."""

from __future__ import annotations

import ctypes
import functools
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from frl.native.source import GEMM

_waited = 0.0


def waited_seconds() -> float:
    """Wall-clock seconds that this process has waited for libraries so far."""
    return _waited


@functools.cache
def has_products() -> bool:
    """Whether torch's library offers the matrix products that a loop calls."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return False
    return all(hasattr(library, name) for name, _ in GEMM.values())


@functools.cache
def _libraries() -> Any:
    """Inductor's cache of C++ libraries, with the header that all of ours include parsed once for all."""
    from torch._inductor.codecache import CppCodeCache

    class Libraries(CppCodeCache):
        cache: dict = {}

        @classmethod
        def _get_uncompiled_header(cls, device: str) -> str | None:
            return "torch/csrc/inductor/cpp_prefix.h" if shutil.which("openssl") else None  # Inductor calls it to compare headers

    return Libraries


@functools.cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, "frl-c++")


def prove_compiler() -> None:
    """Have nothing compiled with the flags of a library, or raise what the compiler says."""
    from torch._inductor.codecache import CppCodeCache

    with _flags():
        CppCodeCache.load("#include <cmath>\n#include <omp.h>\n", needs_vec_isa=True)


@contextmanager
def _flags() -> Iterator[None]:
    """Libraries made inside, by this thread, multiply and add in one instruction: a third of the time of a network's activations."""
    from torch._inductor import config

    with config.patch({"cpp.enable_floating_point_contract_flag": "fast"}):
        yield


class Build:
    """A library on its way.

    Args:
        source: ``source(plain=False)`` is what is compiled, and ``source(plain=True)`` if the compiler refuses that.
    """

    def __init__(self, source: Callable[..., str]) -> None:
        self._library = _compilers().submit(self._compile, source, source(plain=False))

    @staticmethod
    def _compile(source: Callable[..., str], text: str) -> Any:
        from torch._inductor.exc import CppCompileError

        with _flags():
            try:
                return _libraries().load_async(text, "cpu", needs_vec_isa=True)()
            except CppCompileError as error:
                library = _libraries().load_async(source(plain=True), "cpu", needs_vec_isa=True)()
                said = next((line for line in str(error).splitlines() if " error: " in line), "")
                warnings.warn(
                    f"the C++ compiler refused code that frl had made faster, and took it as it was ({said.strip()[:200]})", RuntimeWarning, stacklevel=2
                )
                return library

    def load(self) -> Callable[[Any, int, Any], int]:
        global _waited
        start = time.perf_counter()
        library = self._library.result()
        _waited += time.perf_counter() - start
        return library.frl_loop
