"""The whole time loop as one native function: what Inductor generated for a step, called T times by C++ instead of by Python.

Inductor turns a step into C++ kernels, matrix products and a Python function that allocates buffers and calls them in order. That function is run once
here with symbols in place of tensors, which gives the order of the calls and where every buffer lies. From this a C++ loop is written: buffers of a step
are laid out once, results of all steps lie in one block, carries are pointers into it. A loop over 64 rows then pays for arithmetic and not for calls.

Only what is understood is turned into a loop: dense kernels and matrix products of float32 and float64 on a CPU. Anything else raises :class:`Unsupported`, and
``frl.scan`` calls the step from Python as before. Rows that are independent can be split into shards that run on threads of their own.
"""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import threading
import time
import types
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from frl import philox, suffix_sums
from frl.one_operation import vectorised

_ALIGN = 64
_MOST_LOOPS = 8  # in one C++ function
_C_TYPES = {torch.float32: "float", torch.float64: "double", torch.int64: "int64_t", torch.int32: "int32_t", torch.bool: "bool"}
_GEMM = {torch.float32: ("sgemm_", "float"), torch.float64: ("dgemm_", "double")}


class Unsupported(Exception):
    """A step that has no native loop."""


_dry: ContextVar[bool] = ContextVar("dry", default=False)


@contextmanager
def dry_run() -> Iterator[None]:
    """Loops inside run nothing and give zeros: all that follows is captured, and nobody waits for the C++ compiler meanwhile."""
    token = _dry.set(True)
    try:
        yield
    finally:
        _dry.reset(token)


# -- what a step does -----------------------------------------------------------------------------------------------------------------------------------


@dataclass
class Storage:
    """Memory that a step uses."""

    index: int
    nbytes: int
    input: int | None = None  # position among the inputs
    constant: Tensor | LoopFunction | None = None


@dataclass(frozen=True)
class Sym:
    """A tensor without data: a view of a storage."""

    storage: Storage
    offset: int  # bytes
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        count = 1
        for n in self.shape:
            count *= n
        return count * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        expected = 1
        for n, s in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if n != 1 and s != expected:
                return False
            expected *= n
        return True


@dataclass
class Program:
    """Calls in order: ``("mm", a, b, out)``, ``("addmm", a, b, out, bias)``, ``("bmm", a, b, out)``, ``("philox", operands, out, c0, c2)``,
    ``("cumsum", x, out, dim)``, ``("cummax", x, out, dim)``, ``("copy", x, out)``, ``("sort", x, out)``, ``("suffix_sums", x, factor, linked, out)``, ``("kernel", name, arguments)``,
    ``("loop", call, given, results, others)``: a :class:`LoopCall`, its inputs, its outputs and what else it needs, and ``("beside", lists)``: lists of
    calls that run side by side, a thread each."""

    storages: list[Storage]
    inputs: list[Sym]
    outputs: list[Sym] = field(default_factory=list)
    calls: list[tuple] = field(default_factory=list)
    kernels: dict[str, tuple[list[str], str]] = field(default_factory=dict)  # name: C types of the arguments, source
    threads: int = 1  # for the calls that are no kernels

    def every_call(self) -> Iterator[tuple]:
        """All calls, those that run side by side one by one."""
        for call in self.calls:
            if call[0] == "beside":
                for calls in call[1]:
                    yield from calls
            else:
                yield call


class _Kernel:
    """A generated kernel: source now, compiled when somebody calls it with tensors."""

    def __init__(self, types: list[str], source: str) -> None:
        self.types, self.source = types, source
        self._call: Callable | None = None

    def __call__(self, *args: Any) -> Any:
        if self._call is None:
            self._call = self.load()
        return self._call(*args)

    def load(self) -> Callable:
        from torch._inductor.codecache import CppPythonBindingsCodeCache

        return CppPythonBindingsCodeCache.load_pybinding(self.types, self.source)


def deferring_kernels() -> Any:
    """A context in which Inductor hands over the source of its CPU kernels and compiles none of them."""
    from unittest import mock

    from torch._inductor.async_compile import AsyncCompile

    return mock.patch.object(AsyncCompile, "cpp_pybinding", lambda self, types, source: _Kernel(types, source))


def compile_kernels(call: Callable) -> None:
    """Compile the kernels of a generated function that :func:`deferring_kernels` left as source."""
    names = call.__globals__  # pyright: ignore[reportFunctionMemberAccess]
    waiting = {name: value for name, value in names.items() if isinstance(value, _Kernel)}
    names.setdefault("_frl_kernels", {}).update(waiting)
    if len(waiting) > 1:
        with ThreadPoolExecutor(2) as pool:
            names.update(zip(waiting, pool.map(_Kernel.load, waiting.values()), strict=True))
    else:
        names.update({name: value.load() for name, value in waiting.items()})


class _Torch:
    """The module ``torch`` with the operations that native code replaces."""

    def __init__(self, cumsum: Callable, cummax: Callable, sort: Callable, **ours: Callable) -> None:
        space = types.SimpleNamespace
        aten = space(cumsum=space(default=cumsum), cummax=space(default=cummax), sort=space(stable=sort))
        self.ops = space(frl=space(**{name: space(default=function) for name, function in ours.items()}), aten=aten)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def trace(call: Callable, examples: Sequence[Tensor], threads: int | None = None) -> Program:
    """What a generated function does.

    Args:
        call: made by Inductor under :func:`deferring_kernels`.
        examples: tensors (fake ones suffice) with the shapes, strides and dtypes of its inputs.
        threads: number of threads that it was generated for, torch's by default.

    Raises:
        Unsupported: it does something else than allocate, call kernels and multiply matrices.
    """
    storages: list[Storage] = []

    def new(nbytes: int, **facts: Any) -> Storage:
        storages.append(Storage(len(storages), nbytes, **facts))
        return storages[-1]

    def symbol(x: Tensor, **facts: Any) -> Sym:
        if x.device.type != "cpu":
            raise Unsupported(f"a tensor on {x.device}")
        shape, stride = tuple(x.shape), tuple(x.stride())
        count = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if all(shape) else 0
        return Sym(new(count * x.dtype.itemsize, **facts), 0, shape, stride, x.dtype)

    program = Program(storages, [symbol(x, input=i) for i, x in enumerate(examples)], threads=torch.get_num_threads() if threads is None else threads)

    def empty(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Sym:
        count = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if all(shape) else 0
        return Sym(new(count * dtype.itemsize), 0, tuple(shape), tuple(stride), dtype)

    def view(x: Any, shape: Sequence[int], stride: Sequence[int], offset: int = 0) -> Sym:
        x = known(x)
        return Sym(x.storage, x.offset + offset * x.dtype.itemsize, tuple(shape), tuple(stride), x.dtype)

    def known(x: Any) -> Sym:
        if isinstance(x, Sym):
            return x
        if isinstance(x, Tensor):
            return symbol(x, constant=x)
        raise Unsupported(f"an argument of type {type(x).__name__}")

    class Products:
        def __getattr__(self, name: str) -> Callable:
            if name not in ("mm", "bmm", "addmm"):
                raise Unsupported(f"a call of {name}")

            def product(*args: Any, out: Sym, alpha: float = 1, beta: float = 1) -> Sym:
                if alpha != 1 or beta != 1:
                    raise Unsupported(f"{name} with factors")
                *bias, a, b = map(known, args)
                program.calls.append((name, a, b, out, *bias))
                return out

            return product

    def random_words(*args: Any) -> Sym:
        *operands, c0, c2 = args
        operands = [known(x) for x in operands]
        out = empty((shape := (4, *torch.broadcast_shapes(*(x.shape for x in operands)))), _dense(shape), torch.int64)
        program.calls.append(("philox", operands, out, c0, c2))
        return out

    def sums(*args: Any) -> Sym:
        x, factor, linked = map(known, args)
        out = empty(x.shape, _dense(x.shape), x.dtype)
        if not (x.contiguous and factor.contiguous and linked.contiguous):
            raise Unsupported("suffix sums of tensors that are not contiguous")
        program.calls.append(("suffix_sums", x, factor, linked, out))
        return out

    def cumsum(x: Any, dim: int, dtype: torch.dtype | None = None) -> Sym:
        x = known(x)
        out = empty(x.shape, _dense(x.shape), dtype or x.dtype)
        if x.dtype not in _C_TYPES or out.dtype not in _C_TYPES or not x.shape:
            raise Unsupported(f"cumsum of {x.dtype} {x.shape}")
        program.calls.append(("cumsum", x, out, dim % len(x.shape)))
        return out

    def cummax(x: Any, dim: int) -> tuple[Sym]:
        x = known(x)
        if x.dtype != torch.int64 or not x.shape:
            raise Unsupported(f"cummax of {x.dtype} {x.shape}")
        out = empty(x.shape, _dense(x.shape), x.dtype)
        program.calls.append(("cummax", x, out, dim % len(x.shape)))
        return (out,)  # values alone, see sort

    def sort(x: Any, *, stable: bool, dim: int, descending: bool) -> tuple[Sym]:
        x = known(x)
        if x.dtype != torch.int64 or not x.shape or dim % len(x.shape) != len(x.shape) - 1 or descending:
            raise Unsupported(f"sort of {x.dtype} {x.shape} along {dim}")
        if not x.contiguous:
            x, given = empty(x.shape, _dense(x.shape), x.dtype), x
            program.calls.append(("copy", given, x))
        out = empty(x.shape, _dense(x.shape), x.dtype)
        program.calls.append(("sort", x, out))
        return (out,)  # values alone: code that reads the order too finds no second result

    def loop(inputs: Sequence[Any], number: int) -> tuple[Sym, ...]:
        call, given = loop_call(number), list(map(known, inputs))
        if not all(x.contiguous for x in given):
            raise Unsupported("a loop over tensors that are not contiguous")
        results = [empty(shape, _dense(shape), dtype) for shape, dtype in call.results()]
        others = [Sym(new(0, constant=x), 0, (), (), torch.uint8) for x in call.constants()]
        program.calls.append(("loop", call, given, results, others))
        return tuple(results)

    names = dict(call.__globals__)  # pyright: ignore[reportFunctionMemberAccess]
    for name, kernel in [*names.get("_frl_kernels", {}).items(), *((n, k) for n, k in names.items() if isinstance(k, _Kernel))]:

        def record(*args: Any, name: str = name, kernel: _Kernel = kernel) -> None:
            program.kernels[name] = (kernel.types, kernel.source)
            program.calls.append(("kernel", name, [known(x) for x in args]))

        names[name] = record
    ours = _Torch(cumsum, cummax, sort, philox=random_words, suffix_sums=sums, loop=loop)
    names.update(empty_strided_cpu=empty, reinterpret_tensor=view, extern_kernels=Products(), torch=ours)
    function = getattr(call, "__func__", call)
    recorded = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    owner = [call.__self__] if hasattr(call, "__self__") else []  # pyright: ignore[reportFunctionMemberAccess]
    try:
        outputs = recorded(*owner, list(program.inputs))
    except Unsupported:
        raise
    except Exception as error:
        raise Unsupported(f"{type(error).__name__}: {error}") from error
    program.outputs = [known(x) for x in outputs]
    return program


# -- C++ ------------------------------------------------------------------------------------------------------------------------------------------------

_PREFIX = """
#ifndef INDUCTOR_USE_VECTOR_TYPES  // by the precompiled header
#include <torch/csrc/inductor/cpp_prefix.h>
#endif
#include <cstring>
#include <exception>
#include <stdexcept>
#define FRL_GEMM(name, T) extern "C" void name( \
    const char*, const char*, const int*, const int*, const int*, const T*, const T*, const int*, const T*, const int*, const T*, T*, const int*);
FRL_GEMM(sgemm_, float)
FRL_GEMM(dgemm_, double)
extern "C" int MKL_Set_Num_Threads_Local(int) __attribute__((weak));

// Functions of a number without side effects: where the number is the same for all elements, the compiler calls them once.
#define FRL_NUMBER(name) \\
  static __attribute__((const, nothrow, noinline)) float frl_##name(float x) { return std::name(x); } \\
  static __attribute__((const, nothrow, noinline)) double frl_##name(double x) { return std::name(x); }
FRL_NUMBER(exp)
FRL_NUMBER(expm1)
FRL_NUMBER(log)
FRL_NUMBER(log1p)
#undef FRL_NUMBER

#if INDUCTOR_USE_VECTOR_TYPES()
// at::vec reads and writes bools one by one, and has some conversions of masks go through memory.
template <size_t size> struct Mask { using type = int32_t; };
template <> struct Mask<8> { using type = int64_t; };
template <typename T, int N> static inline at::vec::VecMask<T, N> frl_mask(const bool* b, int64_t count = at::vec::VecMask<T, N>::size()) {
  using M = at::vec::VecMask<T, N>;
  constexpr int size = M::size();
  if (count < size) return M::from(b, count);
  typedef int8_t Bytes __attribute__((vector_size(size)));
  typedef typename Mask<sizeof(T)>::type Wide __attribute__((vector_size(size * sizeof(T))));
  Bytes x;
  std::memcpy(&x, b, size);
  const Wide m = __builtin_convertvector(x != 0, Wide);
  return M(at::vec::VectorizedN<T, N>::loadu(&m));
}
template <typename T, typename... Count> static inline void frl_store(T x, void* b, Count... count) { x.store(b, count...); }
template <typename T, int N> static inline void frl_store(at::vec::VecMask<T, N> x, bool* b, int64_t count = at::vec::VecMask<T, N>::size()) {
  constexpr int size = at::vec::VecMask<T, N>::size();
  if (count < size || (sizeof(T) != 4 && sizeof(T) != 8)) return x.store(b, count);
  typedef int8_t Bytes __attribute__((vector_size(size)));
  typedef typename Mask<sizeof(T)>::type Wide __attribute__((vector_size(size * sizeof(T))));
  Wide m;
  at::vec::VectorizedN<T, N>(x).store(&m);
  const Bytes y = __builtin_convertvector(m, Bytes) & 1;
  std::memcpy(b, &y, size);
}
// A store that goes past the cache, for results that nobody reads before long: memory is then written and not read first.
template <typename X, typename T, typename... Count> static inline void frl_stream(X x, T* b, Count... count) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  if constexpr (sizeof...(Count) == 0 && std::is_same_v<X, at::vec::Vectorized<float>>) {
    // Not the intrinsic, which the compiler takes for a store to anywhere: nothing would be kept in registers over it.
    constexpr int size = 4 * at::vec::Vectorized<float>::size();
    typedef float Place __attribute__((vector_size(size)));
    if ((uintptr_t)b % size == 0) {
      Place y;
      x.store(&y);
      __asm__("vmovntps %1, %0" : "=m"(*(Place*)b) : "x"(y));
      return;
    }
  }
#endif
  frl_store(x, b, count...);
}
template <typename T, int N, typename U, int L> static inline at::vec::VecMask<T, N> frl_cast(const at::vec::VecMask<U, L>& m) {
  if constexpr (std::is_same_v<T, double> && sizeof(U) == 4) return m.template cast<int64_t, N>().template cast<double, N>();
  else return m.template cast<T, N>();
}
template <typename T, int N, typename U, int L> static inline auto frl_convert(const at::vec::VectorizedN<U, L>& x) {
  constexpr int size = at::vec::VectorizedN<U, L>::size(), half = size / 2;
  if constexpr (sizeof(T) + sizeof(U) == 12 && std::is_floating_point_v<T> && std::is_floating_point_v<U> && at::vec::VectorizedN<T, N>::size() == size) {
    typedef U From __attribute__((vector_size(half * sizeof(U))));
    typedef T To __attribute__((vector_size(half * sizeof(T))));
    alignas(64) From a[2];
    alignas(64) To b[2];
    x.store(a);
    for (int i = 0; i < 2; ++i) b[i] = __builtin_convertvector(a[i], To);
    return at::vec::VectorizedN<T, N>::loadu(b);
  } else return at::vec::VectorizedN<T, N>(at::vec::convert<T, N, U, L>(x));
}
template <typename T, int N, typename U, int L> static inline at::vec::VecMask<T, N> frl_from(const at::vec::VectorizedN<U, L>& x) {
  if constexpr (sizeof(U) >= 4 && sizeof(T) >= 4 && at::vec::VecMask<T, N>::size() == at::vec::VectorizedN<U, L>::size())
    return frl_cast<T, N>(at::vec::VecMask<U, L>(x != at::vec::VectorizedN<U, L>(U(0))));
  else return at::vec::VecMask<T, N>::template from<U, L>(x);
}
#endif

struct Table { char* const* base; const int64_t* step; const int64_t* ring; char* const* start; };
static inline char* place_of(const Table& f, int i, int64_t t) { return f.base[i] + (f.ring[i] ? t % f.ring[i] : t) * f.step[i]; }
""" + vectorised("""
template <typename T> static void accumulate(T* total, const T* x, int64_t n) { for (int64_t i = 0; i < n; ++i) total[i] += x[i]; }
""")

_SORT = r"""
#include <algorithm>
#include <memory>
// Each of `rows` rows of `n` numbers in ascending order: by their digits, the lowest first.
static void frl_sort(int64_t rows, int64_t n, const int64_t* x, int64_t* y, int threads) {
  constexpr int bits = 11, passes = 6, size = 1 << bits;
  #pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 1)
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t* const from = x + row * n;
    int64_t* const to = y + row * n;
    std::copy(from, from + n, to);
    if (n < 1024) { std::sort(to, to + n); continue; }
    const std::unique_ptr<uint32_t[]> count(new uint32_t[passes * size]());
    const std::unique_ptr<int64_t[]> other(new int64_t[n]);
    const auto digit = [](int64_t v, int pass) { return (((uint64_t)v ^ (1ull << 63)) >> (pass * bits)) & (size - 1); };
    for (int64_t i = 0; i < n; ++i) for (int pass = 0; pass < passes; ++pass) ++count[pass * size + digit(from[i], pass)];
    int64_t *a = to, *b = other.get();
    for (int pass = 0; pass < passes; ++pass) {
      uint32_t* const c = count.get() + pass * size;
      if (c[digit(a[0], pass)] == n) continue;
      uint32_t sum = 0;
      for (int d = 0; d < size; ++d) { const uint32_t here = c[d]; c[d] = sum; sum += here; }
      for (int64_t i = 0; i < n; ++i) b[c[digit(a[i], pass)]++] = a[i];
      std::swap(a, b);
    }
    if (a != to) std::copy(a, a + n, to);
  }
}
"""

_ENTRY = """
extern "C" int frl_loop(int64_t length, int shards, const Table* tables) {
  int failed = 0;
  if (shards == 1) {
    const bool alone = frl_threads == 1 && MKL_Set_Num_Threads_Local;
    const int before = alone ? MKL_Set_Num_Threads_Local(1) : 0;
    try { run(length, tables[0]); } catch (const std::exception&) { failed = 1; }
#if defined(__SSE__)
    _mm_sfence();  // what was written past the cache is there
#endif
    if (alone) MKL_Set_Num_Threads_Local(before);
    return failed;
  }
  const int team = shards < omp_get_max_threads() ? shards : omp_get_max_threads();
  #pragma omp parallel for num_threads(team) schedule(dynamic, 1) reduction(|:failed)
  for (int s = 0; s < shards; ++s) {
    const int before = MKL_Set_Num_Threads_Local ? MKL_Set_Num_Threads_Local(1) : 0;
    try { run(length, tables[s]); } catch (const std::exception&) { failed |= 1; }
    if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(before);
  }
  return failed;
}
"""


def _product(a: Sym, b: Sym, out: Sym, place: Callable[[Sym], str], beta: int = 0) -> str:
    """``out = a @ b (+ out)`` by BLAS, whose matrices have their columns together."""
    if not (a.dtype == b.dtype == out.dtype and a.dtype in _GEMM) or any(len(x.shape) != 2 for x in (a, b, out)):
        raise Unsupported(f"a product of {a.dtype} {a.shape} and {b.dtype} {b.shape}")
    name, scalar = _GEMM[a.dtype]

    def side(x: Sym) -> tuple[bool, int]:
        """Whether the rows lie together, and the distance between them (or between the columns)."""
        (rows, columns), (s0, s1) = x.shape, x.stride
        if s1 == 1 or columns == 1:
            return True, max(s0 if rows > 1 else columns, columns, 1)
        if s0 == 1 or rows == 1:
            return False, max(s1, rows, 1)
        raise Unsupported(f"a matrix with strides {x.stride}")

    rows_together, ldc = side(out)
    if not rows_together:  # out^T = b^T a^T
        turn = lambda x: Sym(x.storage, x.offset, x.shape[::-1], x.stride[::-1], x.dtype)
        a, b, out = turn(b), turn(a), turn(out)
        rows_together, ldc = side(out)
    if not rows_together:
        raise Unsupported(f"a result with strides {out.stride}")
    (m, k), n = a.shape, b.shape[1]
    (a_rows, lda), (b_rows, ldb) = side(a), side(b)
    if 0 in (m, n, k):
        raise Unsupported("an empty product")
    # Rows together is the transpose with columns together: out^T [n, m] = b^T [n, k] a^T [k, m].
    ta, tb = ("N" if b_rows else "T"), ("N" if a_rows else "T")
    return (
        f"{{ const int m={n}, n={m}, k={k}, la={ldb}, lb={lda}, lc={ldc}; const {scalar} one=1, beta={int(beta)}; "
        f'{name}("{ta}", "{tb}", &m, &n, &k, &one, (const {scalar}*)({place(b)}), &la, (const {scalar}*)({place(a)}), &lb, &beta, '
        f"({scalar}*)({place(out)}), &lc); }}"
    )


def _source(program: Program, body: list[str], streamed: set[int] | None = None) -> str:
    """A C++ file with the kernels of a program and ``run``, whose body is given. Storages that are ``streamed`` are results that nobody reads before long."""
    parts = [_PREFIX]
    names = {call[0] for call in program.every_call()}
    if "philox" in names:
        parts.append(philox.SOURCE)
    if "suffix_sums" in names:
        parts.append(suffix_sums.SOURCE)
    if "sort" in names:
        parts.append(_SORT)
    overlapping, past_cache = _overlapping(program), _written_past_cache(program, streamed or set())
    for i, (name, (kinds, source)) in enumerate(program.kernels.items()):
        # The flag for integer division by zero is shared by all threads; without it such a division raises at once.
        lines = [line for line in source.splitlines() if "inductor_cpu_integer_div_error" not in line and not line.startswith("#include")]
        text, count = re.subn(r'extern\s+"C"\s+void\s+kernel\(', f"static __attribute__((noinline)) void kernel_{i}(", "\n".join(lines))
        if count != 1:
            raise Unsupported("a kernel of another form")
        # Numbers that a kernel reads stay the same while it writes, so what is computed from them alone is computed once and not for every element.
        marks = iter("* " if (name, at) in overlapping else "* __restrict__ " for at in range(len(kinds)))
        text = re.sub(r"\* ?(?=(?:in|out|in_out)_ptr\d+[,)\s])", lambda _, marks=marks: next(marks), text, count=len(kinds))
        text = re.sub(r"std::(exp|expm1|log|log1p)\((?=tmp\w+\))", r"frl_\1(", text)
        text = re.sub(r"at::vec::VecMask<(float|double|int32_t|int64_t|int),(\d)>::from\((?=(in|out|in_out)_ptr)", r"frl_mask<\1,\2>(", text)
        text = re.sub(r"at::vec::VecMask<(\w+),(\d)>::from<(\w+),(\d)>\((?=tmp\w+\))", r"frl_from<\1,\2,\3,\4>(", text)
        text = re.sub(r"at::vec::convert<(double,\d,float,\d|float,\d,double,\d)>\((?=tmp\w+\))", r"frl_convert<\1>(", text)
        text = re.sub(r"\b(tmp\w+)\.template cast<(\w+),(\d)>\(\)", r"frl_cast<\2,\3>(\1)", text)
        text = re.sub(r"\b(tmp\w+)\.store\((?=(out|in_out)_ptr)", r"frl_store(\1, ", text)
        for at in sorted(at for kernel, at in past_cache if kernel == name):
            target = re.findall(r"\b(?:in|out|in_out)_ptr\d+(?=[,)\s])", text)[at]
            uses, stores = len(re.findall(rf"\b{target}\b", text)) - 1, len(re.findall(rf"frl_store\(tmp\w+, {target} ", text))
            if target.startswith("out") and uses == stores:
                text = re.sub(rf"frl_store\((tmp\w+), {target} ", rf"frl_stream(\1, {target} ", text)
        parts.append(_in_functions("".join(map(_hoisted, _blocks(text)))))
    parts += [
        f"constexpr int frl_threads = {program.threads};",
        "static void run(int64_t length, const Table& f) {",
        *(f"  {line}" for line in body),
        "}",
        _ENTRY,
    ]
    return "\n".join(parts)


def _blocks(kernel: str) -> list[str]:
    """A kernel's head, and each of its loops one after the other."""
    return re.split(r"(?m)^(?=    \{\n)", kernel)


def _hoisted(block: str) -> str:
    """A loop with assembly in it, over which the compiler moves nothing: numbers that are the same in all its steps are computed before it."""
    if "frl_stream(" not in block or "[&]" in block:
        return block
    first, *lines = block.split("\n")
    times = Counter(re.findall(r"auto (tmp\d+) =", block))
    written = {*re.findall(r"frl_st\w+\(tmp\w+, (\w+)", block), *re.findall(r"(\w+_ptr\d+)\[[^\]]*\] =", block)}
    before, rest, known = [], [], set()
    for line in lines:
        found = re.fullmatch(r"\s*auto (tmp\d+) = (.*);", line)
        if (
            found
            and times[found[1]] == 1
            and not re.search(r"\bx\d|loadu|tmp_acc", found[2])
            and known.issuperset(re.findall(r"tmp\d+", found[2]))
            and written.isdisjoint(re.findall(r"\w+_ptr\d+", found[2]))
        ):
            known.add(found[1])
            before.append(line)
        else:
            rest.append(line)
    return "\n".join([first, *before, *rest])


def _in_functions(kernel: str) -> str:
    """A kernel of many loops as a function for each: in long functions the C++ compiler keeps less in registers."""
    head, *blocks = _blocks(kernel)
    if len(blocks) <= _MOST_LOOPS or "#pragma omp parallel" in kernel or head.partition(")\n{")[2].strip():  # a buffer that they share
        return kernel
    name = re.search(r"void (kernel_\d+)\(", head)
    assert name is not None
    declared = {re.findall(r"\w+", x)[-1]: x.strip() for x in head[name.end() : head.rindex(")")].split(",")}
    blocks[-1] = blocks[-1].rstrip().removesuffix("}")
    functions, calls = [], []
    for i, block in enumerate(blocks):
        used = [x for x in declared if re.search(rf"\b{x}\b", block)]
        functions.append(f"static __attribute__((noinline)) void {name[1]}_{i}({', '.join(declared[x] for x in used)})\n{{\n{block}}}\n")
        calls.append(f"    {name[1]}_{i}({', '.join(used)});\n")
    return f"{''.join(functions)}{head}{''.join(calls)}}}\n"


def _overlapping(program: Program) -> set[tuple[str, int]]:
    """Kernels and positions of their arguments that in some call lie where another one lies and one of them is written."""
    found = set()
    for call in program.every_call():
        if call[0] == "kernel":
            uses: dict[int, list[int]] = {}
            for at, x in enumerate(call[2]):
                uses.setdefault(x.storage.index, []).append(at)
            kinds = program.kernels[call[1]][0]
            found |= {(call[1], at) for ats in uses.values() if len(ats) > 1 and not all(kinds[i].startswith("const") for i in ats) for at in ats}
    return found


def _written_past_cache(program: Program, streamed: set[int]) -> set[tuple[str, int]]:
    """Kernels and positions of their arguments that in every call are a streamed storage, which no other call uses."""
    uses: dict[int, int] = {}
    for call in program.every_call():
        for x in _symbols(call):
            uses[x.storage.index] = uses.get(x.storage.index, 0) + 1
    found: dict[tuple[str, int], bool] = {}
    for call in program.every_call():
        if call[0] == "kernel":
            for at, x in enumerate(call[2]):
                found[call[1], at] = found.get((call[1], at), True) and x.storage.index in streamed and uses[x.storage.index] == 1
    return {key for key, here in found.items() if here}


def _over(x: Sym, out: Sym, without: int | None = None) -> tuple[list[str], list[str], list[str]]:
    """Loops over all dimensions but one, and where in ``x`` and ``out`` they are."""
    dims = [(d, n, a, b) for d, (n, a, b) in enumerate(zip(x.shape, x.stride, out.stride, strict=True)) if d != without]
    loops = [f"for (int64_t i{d} = 0; i{d} < {n}; ++i{d}) " for d, n, _, _ in dims]
    return loops, [f" + i{d} * {a}" for d, _, a, _ in dims], [f" + i{d} * {b}" for d, _, _, b in dims]


def _copy(x: Sym, out: Sym, place: Callable[[Sym], str]) -> str:
    """Every element of ``x`` at its place in ``out``, which has other strides."""
    kind = _C_TYPES[x.dtype]
    loops, source, target = _over(x, out)
    return f"{''.join(loops)}(({kind}*)({place(out)}))[0{''.join(target)}] = ((const {kind}*)({place(x)}))[0{''.join(source)}];"


def _running(kind: str, x: Sym, out: Sym, dim: int, place: Callable[[Sym], str]) -> str:
    """``cumsum`` or ``cummax`` along a dimension into a contiguous result."""
    loops, source, target = _over(x, out, dim)
    result, given = _C_TYPES[out.dtype], _C_TYPES[x.dtype]
    first, next_one = ("0", "so_far + z") if kind == "cumsum" else (f"std::numeric_limits<{result}>::lowest()", "std::max(so_far, z)")
    return (
        f"{''.join(loops)}{{ auto x = (const {given}*)({place(x)}){''.join(source)}; auto y = ({result}*)({place(out)}){''.join(target)}; "
        f"{result} so_far = {first}; for (int64_t j = 0; j < {x.shape[dim]}; ++j) "
        f"{{ const auto z = ({result})x[j * {x.stride[dim]}]; so_far = {next_one}; y[j * {out.stride[dim]}] = so_far; }} }}"
    )


def _symbols(call: tuple) -> list[Sym]:
    """Tensors that a call reads or writes."""
    if call[0] == "kernel":
        return call[2]
    if call[0] == "loop":
        return [*call[2], *call[3], *call[4]]
    parts = [*call[1], *call[2:]] if call[0] == "philox" else call[1:]
    return [x for x in parts if isinstance(x, Sym)]


def _side_by_side(parts: Sequence[list[str]]) -> str:
    """Lists of statements, a thread each."""
    cases = [line for k, lines in enumerate(parts) for line in (f"case {k}: {{", *(f"  {line}" for line in lines), "} break;")]
    return "\n".join(
        [
            "{ int failed = 0;",
            f"#pragma omp parallel for num_threads({len(parts)}) schedule(static, 1) reduction(|:failed)",
            f"for (int part = 0; part < {len(parts)}; ++part) {{",
            "const int before = MKL_Set_Num_Threads_Local ? MKL_Set_Num_Threads_Local(1) : 0;",
            "try { switch (part) {",
            *cases,
            "} } catch (const std::exception&) { failed |= 1; }",
            "if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(before);",
            '} if (failed) throw std::runtime_error("a part failed"); }',
        ]
    )


def _calls(program: Program, place: Callable[[Sym], str], replaced: dict[int, str]) -> list[str]:
    """Statements of one step. A product whose call is in ``replaced`` is added to the place named there."""
    return _statements(program, program.calls, program.threads, place, replaced)


def _statements(program: Program, calls: Sequence[tuple], threads: int, place: Callable[[Sym], str], replaced: dict[int, str]) -> list[str]:
    numbers = {name: i for i, name in enumerate(program.kernels)}
    lines = []
    for i, call in enumerate(calls):
        if call[0] == "beside":
            lines.append(_side_by_side([_statements(program, inner, 1, place, {}) for inner in call[1]]))
        elif call[0] == "mm":
            _, a, b, out = call
            if i in replaced:
                lines.append(_product(a, b, out, lambda x, i=i, out=out: replaced[i] if x.storage is out.storage else place(x), 1))
            else:
                lines.append(_product(a, b, out, place))
        elif call[0] == "addmm":
            _, a, b, out, bias = call
            if bias.dtype != out.dtype or len(bias.shape) > 2 or out.dtype not in _GEMM:
                raise Unsupported(f"addmm with a bias {bias.shape} of {bias.dtype}")
            shape, stride = (1,) * (2 - len(bias.shape)) + bias.shape, (0,) * (2 - len(bias.shape)) + bias.stride
            r, c = (0 if n == 1 else s for n, s in zip(shape, stride, strict=True))
            scalar, (m, n), (p, q) = _GEMM[out.dtype][1], out.shape, out.stride
            lines.append(
                f"{{ auto y = ({scalar}*)({place(out)}); auto x = (const {scalar}*)({place(bias)}); "
                f"for (int64_t i = 0; i < {m}; ++i) for (int64_t j = 0; j < {n}; ++j) y[i * {p} + j * {q}] = x[i * {r} + j * {c}]; }}"
            )
            lines.append(_product(a, b, out, place, 1))
        elif call[0] == "bmm":
            for member in range(call[3].shape[0]):
                a, b, out = (Sym(x.storage, x.offset + member * x.stride[0] * x.dtype.itemsize, x.shape[1:], x.stride[1:], x.dtype) for x in call[1:])
                lines.append(_product(a, b, out, place))
        elif call[0] in ("cumsum", "cummax"):
            kind, x, out, dim = call
            lines.append(_running(kind, x, out, dim, place))
        elif call[0] == "copy":
            _, x, out = call
            lines.append(_copy(x, out, place))
        elif call[0] == "sort":
            _, x, out = call
            rows = out.nbytes // 8 // max(x.shape[-1], 1)
            lines.append(f"frl_sort({rows}, {x.shape[-1]}, (const int64_t*)({place(x)}), (int64_t*)({place(out)}), {threads});")
        elif call[0] == "suffix_sums":
            _, x, factor, linked, out = call
            scalar, steps, stride = suffix_sums.NAMES[x.dtype], x.shape[0], int(factor.shape not in ((), (1,) * len(factor.shape)))
            given = ", ".join((f"(const {scalar}*)({place(x)})", f"(const {scalar}*)({place(factor)})", str(stride), f"(const uint8_t*)({place(linked)})"))
            lines.append(f"frl_suffix_sums({steps}, {out.nbytes // out.dtype.itemsize // max(steps, 1)}, {given}, ({scalar}*)({place(out)}));")
        elif call[0] == "loop":
            _, inner, given, results, others = call
            lines.append(inner.statement(*([place(x) for x in syms] for syms in (given, results, others))))
        elif call[0] == "philox":
            _, operands, out, c0, c2 = call
            if 0 in out.shape:
                continue
            shape, strides = philox.layout(*(torch.empty_strided(x.shape, x.stride, dtype=torch.int64, device="meta") for x in operands))
            integers = lambda name, values: f"const int64_t {name}[] = {{{', '.join(map(str, values or [1]))}}};"
            pointers = ", ".join(f"(const int64_t*)({place(x)})" for x in operands)
            lines.append(
                f"{{ {integers('shape', shape)} {integers('strides', strides)} const int64_t* const operands[] = {{{pointers}}}; "
                f"frl_philox({len(shape)}, shape, strides, operands, {c0}, {c2}, (int64_t*)({place(out)}), {threads}); }}"
            )
        else:
            _, name, args = call
            kinds = program.kernels[name][0]
            if len(kinds) != len(args) or not all(kind.endswith("*") for kind in kinds):
                raise Unsupported("a kernel with an argument that is no tensor")
            lines.append(f"kernel_{numbers[name]}({', '.join(f'({kind})({place(x)})' for kind, x in zip(kinds, args, strict=True))});")
    return lines


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
    return all(hasattr(library, name) for name, _ in _GEMM.values())


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


class _Build:
    """A library on its way."""

    def __init__(self, source: str) -> None:
        self._library = _compilers().submit(self._compile, source)

    @staticmethod
    def _compile(source: str) -> Any:
        with _flags():
            return _libraries().load_async(source, "cpu", needs_vec_isa=True)()

    def load(self) -> Callable[[Any, int, Any], int]:
        global _waited
        start = time.perf_counter()
        library = self._library.result()
        _waited += time.perf_counter() - start
        return library.frl_loop


class _Table(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("base", "step", "ring", "start")]


def _pointers(values: Sequence[int]) -> Any:
    return (ctypes.c_void_p * len(values))(*values)


@functools.lru_cache(1024)
def _integers(values: tuple[int, ...]) -> Any:
    """An array that nobody writes to."""
    return (ctypes.c_int64 * len(values))(*values)


def _round(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN


# -- the loop -------------------------------------------------------------------------------------------------------------------------------------------


class _Memory:
    """A block that goes back to its pool when nobody holds it any more: fresh pages cost as much as the work that is done in them."""

    def __init__(self, pool: dict[int, list[Tensor]], nbytes: int, shards: int) -> None:
        self._pool, self._kept = pool.setdefault(nbytes, []), max(2, shards)
        self.block = self._pool.pop() if self._pool else torch.empty(max(nbytes, 1), dtype=torch.uint8)
        self.sink: Tensor | None = None  # where results go that nobody reads

    def __del__(self) -> None:
        if len(self._pool) < self._kept:
            self._pool.append(self.block)


_LARGE = 1 << 20  # bytes from which a result is kept for its memory
_STREAMED = 32 << 20  # bytes of large results together from which they are written past the cache


class _Results:
    """Memory of large results, written again when nobody holds it any more: fresh pages cost more than what is written to them."""

    def __init__(self) -> None:
        self._storages: dict[int, deque[torch.UntypedStorage]] = {}  # by size; the one that was taken last is last
        self._lock = threading.Lock()
        self._taken = 0

    def take(self, like: Sym) -> Tensor:
        """A tensor that shares memory with nothing that is alive."""
        with self._lock:
            storages = self._storages.setdefault(like.nbytes, deque())
            self._taken += 1
            if self._taken % 64 == 0:
                self._trim()
            for _ in range(len(storages)):
                if not _held(storages[0]):
                    break
                storages.rotate(-1)
            else:
                storages.appendleft(torch.UntypedStorage(like.nbytes))
            storages.rotate(-1)
            return torch.empty(0, dtype=like.dtype).set_(storages[-1], 0, like.shape, _dense(like.shape))

    def _trim(self) -> None:
        """Give back what is more than the results that are alive."""
        for storages in self._storages.values():
            free = [x for x in storages if not _held(x)]
            for x in free[max(1, len(storages) - len(free)) :]:
                storages.remove(x)


def _held(storage: torch.UntypedStorage) -> bool:
    """Whether a tensor lies in it."""
    return torch._C._storage_Use_Count(storage._cdata) > 1


@functools.cache
def _empty() -> Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor]:
    """A new tensor of a shape, strides and a dtype: by the function that generated code calls, a quarter of the time of ``torch.empty``."""
    try:
        from torch._C._dynamo.guards import _empty_strided_cpu as empty  # pyright: ignore[reportMissingImports]

        empty((2, 3), (3, 1), torch.bool)
    except (ImportError, RuntimeError, TypeError):
        return lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype)
    return empty


@dataclass
class Pass:
    """A forward pass over some steps, for its backward pass."""

    length: int
    memory: list[_Memory]
    held: list[Any]  # tensors that pointers lead to
    base: list[list[int]]  # by shard
    step: list[int]
    ring: list[int]
    start: list[list[int]]


class _Side:
    """Layout of one program: where each storage lies and how far it moves with a step."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.kept: dict[int, int] = {}  # storage: slots, 0 for one in each step
        self.direct: dict[int, int] = {}  # storage: result that is written in place
        self.copies: list[tuple[Sym, int]] = []  # (result, storage that gets a copy)
        self._layouts: dict[int, tuple[dict[int, tuple[int, int, int]], int]] = {}

    def own(self, nbytes: int) -> Storage:
        self.program.storages.append(Storage(len(self.program.storages), nbytes))
        return self.program.storages[-1]

    def copied(self, x: Sym) -> Sym:
        """A copy of a result in a storage of its own."""
        if not x.contiguous:
            raise Unsupported(f"a result with strides {x.stride}")
        storage = self.own(x.nbytes)
        self.copies.append((x, storage.index))
        return Sym(storage, 0, x.shape, x.stride, x.dtype)

    def borrowed(self, x: Sym) -> bool:
        return x.storage.input is not None or x.storage.constant is not None

    def layout(self, length: int) -> tuple[dict[int, tuple[int, int, int]], int]:
        """``{storage: (offset, step, ring)}`` of what lies in memory of our own, and its size."""
        if length not in self._layouts:
            if len(self._layouts) > 8:
                self._layouts.clear()
            self._layouts[length] = self._lay_out(length)
        return self._layouts[length]

    def _lay_out(self, length: int) -> tuple[dict[int, tuple[int, int, int]], int]:
        places, end = {}, 0
        for s in self.program.storages:
            if s.input is not None or s.constant is not None or s.index in self.direct:
                continue
            slots = self.kept.get(s.index, 1)
            size = _round(s.nbytes)
            places[s.index] = (end, 0 if slots == 1 else size, slots if slots > 1 else 0)
            end += size * (slots or length)
        return places, end


def _check(failed: int) -> None:
    if failed:
        raise RuntimeError("a step divided an integer by zero")


class _Frame:
    """Memory and table of a single run, ready but for the places of inputs and results. One run at a time uses it."""

    def __init__(self, loop: Loop) -> None:
        side = loop.forward_side
        places, nbytes = side.layout(1)
        count = len(side.program.storages)
        self._block = torch.empty(max(nbytes, 1), dtype=torch.uint8)
        self._bases = (ctypes.c_void_p * count)()
        for index, (offset, _, _) in places.items():
            self._bases[index] = self._block.data_ptr() + offset
        for index, x in loop.constants:
            self._bases[index] = x.data_ptr()
        self._inputs = [(index, i) for index, i, _ in loop.inputs]
        self._results = [y.storage.index for y in loop.ys]
        self._still, self._start = _integers((0,) * count), _pointers([])
        self._table = _Table(*(ctypes.addressof(array) for array in (self._bases, self._still, self._still, self._start)))
        self._call, self._arguments = loop.call(0), (ctypes.c_int64(1), 1, ctypes.byref(self._table))

    def run(self, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        bases = self._bases
        for index, i in self._inputs:
            bases[index] = inputs[i].data_ptr()
        for index, x in zip(self._results, results, strict=True):
            bases[index] = x.data_ptr()
        _check(self._call(*self._arguments))


class Loop:
    """A step as a native loop over time.

    Args:
        forward: program of ``[params..., carry..., x...] -> [carry..., y..., saved...]``.
        counts: numbers of params, carry, x and y.
    """

    def __init__(self, forward: Program, counts: tuple[int, int, int, int]) -> None:
        self.counts = counts
        n_params, n_carry, n_x, n_y = counts
        side = self.forward_side = _Side(forward)
        self.n_inputs = n_params + n_carry + n_x
        outputs = forward.outputs
        saved = outputs[n_carry + n_y :]
        saved_storages = {x.storage.index for x in saved if not side.borrowed(x)}
        history = any(x.storage.input is not None and n_params <= x.storage.input < n_params + n_carry for x in saved)
        self.carry: list[Sym] = []
        taken: set[int] = set()
        for x in outputs[:n_carry]:
            if side.borrowed(x) or not x.contiguous or x.storage.index in taken:
                x = side.copied(x)
            taken.add(x.storage.index)
            self.carry.append(x)
            side.kept[x.storage.index] = 0 if history else 2
        for index in saved_storages:
            side.kept[index] = 0
        self.ys: list[Sym] = []
        for j, x in enumerate(outputs[n_carry : n_carry + n_y]):
            whole = not side.borrowed(x) and x.contiguous and x.offset == 0 and x.nbytes == x.storage.nbytes
            if not whole or x.storage.index in taken or x.storage.index in saved_storages:
                x = side.copied(x)
            taken.add(x.storage.index)
            side.direct[x.storage.index] = j
            self.ys.append(x)
        self.saved = saved
        storages = forward.storages
        self.constants = [(s.index, s.constant) for s in storages if s.constant is not None]
        self.inputs = [(s.index, s.input, s.nbytes if s.input >= n_params + n_carry else 0) for s in storages if s.input is not None]
        self._pool: dict[int, list[Tensor]] = {}
        # Large results of a single run, such as the parameters of a large network, leave the cache anyway.
        large = [y for y in self.ys if y.nbytes >= _LARGE and y.storage.index in side.direct] if self.n_inputs == n_params else []
        streamed = {y.storage.index for y in large} if sum(y.nbytes for y in large) >= _STREAMED else set()
        self._builds = [_Build(_source(forward, self._forward_body(), streamed))]
        self._calls: dict[int, Callable] = {}
        self._frames: list[_Frame] = []
        self._large = _Results()
        self._strides = [_dense(y.shape) for y in self.ys]
        self.backward_side: _Side | None = None

    # -- code --------------------------------------------------------------------------------------------------------------------------------------

    def _forward_body(self) -> list[str]:
        side = self.forward_side
        lines = ["for (int64_t t = 0; t < length; ++t) {"]
        lines += [f"  char* const s{s.index} = {self._at(s.index)};" for s in side.program.storages]
        lines += [f"  {line}" for line in _calls(side.program, lambda x: f"s{x.storage.index} + {x.offset}", {})]
        lines += [f"  std::memcpy(s{index}, s{x.storage.index} + {x.offset}, {x.nbytes});" for x, index in side.copies]
        return [*lines, "}"]

    def _at(self, index: int) -> str:
        """Where a storage of the forward program lies at step ``t``."""
        n_params, n_carry, _, _ = self.counts
        i = self.forward_side.program.storages[index].input
        if i is not None and n_params <= i < n_params + n_carry:
            out = self.carry[i - n_params]
            return f"(t ? place_of(f, {out.storage.index}, t - 1) + {out.offset} : f.start[{i - n_params}])"
        return f"place_of(f, {index}, t)"

    def add_backward(self, backward: Program, needs: Sequence[bool], out_needs: Sequence[bool], present: Sequence[bool]) -> None:
        """The backward program ``[saved..., cotangents...] -> gradients``.

        Args:
            backward: the program; it gives gradients for the needed inputs that are ``present``.
            needs: for each input of the forward program whether its gradient is wanted.
            out_needs: for each carry and y whether it has a cotangent.
            present: for each wanted gradient whether the program gives it; the others are zero.
        """
        n_params, n_carry, n_x, n_y = self.counts
        side = self.backward_side = _Side(backward)
        self.shift = len(self.forward_side.program.storages)  # storages of this side follow the other's in the table
        given = iter(backward.outputs)
        grads = [next(given) if here else None for here in present]
        kinds = [i for i, need in enumerate(needs) if need]
        n_saved = len(self.saved)
        self.wanted = kinds
        self.total: list[int | None] = []  # storage of the sum of a parameter's gradient
        self.carry_grads: dict[int, Sym | None] = {}
        self.x_grads: list[int | None] = []
        self.param_results: list[Sym] = []  # gradients of params and of xs that there are
        self.x_results: list[Sym] = []
        replaced: dict[int, str] = {}
        sums: list[str] = []
        uses: dict[int, int] = {}
        for call in backward.calls:
            for x in _symbols(call):
                uses[x.storage.index] = uses.get(x.storage.index, 0) + 1
        for x in backward.outputs:
            uses[x.storage.index] = uses.get(x.storage.index, 0) + 1
        taken: set[int] = set()
        for i, x in zip(kinds, grads, strict=True):
            if i < n_params:
                if x is None:
                    self.total.append(None)
                    continue
                if x.dtype not in _GEMM or not x.contiguous:
                    raise Unsupported(f"a gradient of {x.dtype} with strides {x.stride}")
                total = side.own(x.nbytes)
                side.direct[total.index] = -1
                self.total.append(total.index)
                self.param_results.append(x)
                made = [j for j, call in enumerate(backward.calls) if call[0] == "mm" and call[3].storage is x.storage]
                out = backward.calls[made[0]][3] if made else x
                if len(made) == 1 and uses[x.storage.index] == 2 and out.contiguous and (out.offset, out.nbytes) == (x.offset, x.nbytes):
                    replaced[made[0]] = f"b{total.index}"
                else:
                    scalar = _GEMM[x.dtype][1]
                    count = x.nbytes // x.dtype.itemsize
                    sums.append(f"accumulate(({scalar}*)b{total.index}, (const {scalar}*)(b{x.storage.index} + {x.offset}), {count});")
            elif i < n_params + n_carry:
                if x is not None and (side.borrowed(x) or not x.contiguous or x.storage.index in taken):
                    x = side.copied(x)
                if x is not None:
                    taken.add(x.storage.index)
                    side.kept[x.storage.index] = 2
                self.carry_grads[i - n_params] = x
            else:
                if x is None:
                    self.x_grads.append(None)
                    continue
                whole = not side.borrowed(x) and x.contiguous and x.offset == 0 and x.nbytes == x.storage.nbytes and x.storage.index not in taken
                if not whole:
                    x = side.copied(x)
                taken.add(x.storage.index)
                side.direct[x.storage.index] = len(self.x_grads)
                self.x_grads.append(x.storage.index)
                self.x_results.append(x)
        # A parameter's gradient must not share memory with what is kept or written in place.
        self.zero = side.own(max([1, *(x.nbytes for x in self.carry)]))
        side.direct[self.zero.index] = -1
        self._zeros = torch.zeros(self.zero.nbytes, dtype=torch.uint8)
        cotangents = [i for i, need in enumerate(out_needs) if need]
        self.ct_carry = [i for i in cotangents if i < n_carry]
        self.ct_packs = [i - n_carry for i in cotangents if i >= n_carry]
        lines = ["for (int64_t t = length - 1; t >= 0; --t) {"]
        for s in backward.storages:
            place = f"place_of(f, {self.shift + s.index}, t)"
            if s.input is not None and s.input < n_saved:
                x = self.saved[s.input]
                place = f"{self._at(x.storage.index)} + {x.offset}"
            elif s.input is not None and s.input < n_saved + len(self.ct_carry):
                k = self.ct_carry[s.input - n_saved]
                x = self.carry_grads.get(k)
                last = (
                    f"place_of(f, {self.shift + x.storage.index}, t + 1) + {x.offset}" if x is not None else f"place_of(f, {self.shift + self.zero.index}, t)"
                )
                place = f"(t == length - 1 ? f.start[{n_carry + s.input - n_saved}] : {last})"
            lines.append(f"  char* const b{s.index} = {place};")
        lines += [f"  {line}" for line in _calls(backward, lambda x: f"b{x.storage.index} + {x.offset}", replaced)]
        lines += [f"  {line}" for line in sums]
        lines += [f"  std::memcpy(b{index}, b{x.storage.index} + {x.offset}, {x.nbytes});" for x, index in side.copies]
        self._builds.append(_Build(_source(backward, [*lines, "}"])))

    def once(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Results of a single run of a program without carry and xs."""
        empty = _empty()
        if _dry.get():
            return [torch.zeros(y.shape, dtype=y.dtype) for y in self.ys]
        results = [self._large.take(y) if y.nbytes >= _LARGE else empty(y.shape, stride, y.dtype) for y, stride in zip(self.ys, self._strides, strict=True)]
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = _Frame(self)
        try:
            frame.run(inputs, results)
        finally:
            self._frames.append(frame)
        return results

    def members(self, inputs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Results ``[P, ...]`` of single runs of a program without carry and xs, one for each of P lists of inputs."""
        results = [torch.empty((len(inputs), *y.shape), dtype=y.dtype) for y in self.ys]
        self.forward([(row, (), ()) for row in inputs], list(zip(*(x.unbind(0) for x in results), strict=True)) or [() for _ in inputs], 1)
        return results

    # -- running -----------------------------------------------------------------------------------------------------------------------------------

    def call(self, which: int) -> Callable[[Any, int, Any], int]:
        """The library's function: 0 is the forward pass, 1 the backward pass."""
        if which not in self._calls:
            self._calls[which] = self._builds[which].load()
        return self._calls[which]

    def _launch(self, which: int, length: int, step: list[int], ring: list[int], shards: Sequence[tuple[list[int], list[int]]]) -> None:
        """Run a loop; ``shards`` are the bases and starts of each."""
        steps, rings, held = _integers(tuple(step)), _integers(tuple(ring)), []
        rows = (_Table * len(shards))()
        for row, (base, start) in zip(rows, shards, strict=True):
            bases, starts = _pointers(base), _pointers(start)
            held.append((bases, starts))
            row.base, row.step, row.ring, row.start = (ctypes.addressof(array) for array in (bases, steps, rings, starts))
        _check(self.call(which)(ctypes.c_int64(length), len(shards), ctypes.byref(rows)))

    def forward(
        self, shards: Sequence[tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]], ys: Sequence[Sequence[Tensor]] | None, length: int | None = None
    ) -> tuple[list[list[Tensor]], Pass]:
        """Run all steps of ``xs``.

        Args:
            shards: ``(params, carry, xs)`` of contiguous tensors for each shard.
            ys: for each shard ``[T, ...]`` for every y; ``None`` when they are not wanted.
            length: number of steps where there are no xs.

        Returns:
            Last carries, in memory of their own, and what the backward pass needs.
        """
        side = self.forward_side
        length = shards[0][2][0].shape[0] if length is None else length
        if _dry.get():
            for y in (y for shard in ys or () for y in shard):
                y.zero_()
            return [[torch.zeros(x.shape, dtype=x.dtype) for x in self.carry] for _ in shards], Pass(length, [], [shards], [], [], [], [])
        places, nbytes = side.layout(length)
        n = len(side.program.storages)
        step, ring = [0] * n, [0] * n
        for index, (_, stride, slots) in places.items():
            step[index], ring[index] = stride, slots
        result = Pass(length, [], [shards], [], step, ring, [])
        for number, (params, carry, xs) in enumerate(shards):
            memory = _Memory(self._pool, nbytes, len(shards))
            origin = memory.block.data_ptr()
            base = [0] * n
            for index, (offset, _, _) in places.items():
                base[index] = origin + offset
            for index, x in self.constants:
                base[index] = x.data_ptr()
            inputs = [*params, *carry, *xs]
            for index, i, per_step in self.inputs:
                base[index] = inputs[i].data_ptr()
                step[index] = per_step
            if ys is None:
                # No later step reads them: all steps write to one place, each y to its own, for the same step may read it.
                memory.sink = torch.empty(sum(_round(y.nbytes) for y in self.ys) + 1, dtype=torch.uint8)
            at = memory.sink.data_ptr() if memory.sink is not None else 0
            for j, y in enumerate(self.ys):
                if ys is None:
                    base[y.storage.index], step[y.storage.index] = at, 0
                    at += _round(y.nbytes)
                else:
                    base[y.storage.index], step[y.storage.index] = ys[number][j].data_ptr(), y.nbytes
            result.memory.append(memory)
            result.base.append(base)
            result.start.append([x.data_ptr() for x in carry])
        self._launch(0, length, step, ring, list(zip(result.base, result.start, strict=True)))
        last = []
        for memory in result.memory:
            last.append([self._read(memory, places, x, length - 1) for x in self.carry])
        return last, result

    def _read(self, memory: _Memory, places: dict[int, tuple[int, int, int]], x: Sym, t: int) -> Tensor:
        offset, step, ring = places[x.storage.index]
        start = offset + (t % ring if ring else t) * step + x.offset
        return memory.block[start : start + x.nbytes].clone().view(x.dtype).view(x.shape) if x.nbytes else torch.empty(x.shape, dtype=x.dtype)

    def backward(
        self,
        done: Pass,
        ct_carry: Sequence[Sequence[Tensor]],
        ct_packs: Sequence[Sequence[Tensor]],
        total: Sequence[Sequence[Tensor]],
        x_grads: Sequence[Sequence[Tensor]],
    ) -> list[list[Tensor]]:
        """Go back through the steps of a forward pass.

        Args:
            done: of :meth:`forward`.
            ct_carry: for each shard contiguous cotangents of the carries in ``self.ct_carry``.
            ct_packs: for each shard contiguous cotangents ``[T, ...]`` of the ys in ``self.ct_packs``.
            total: for each shard and present parameter the sum so far, which is added to.
            x_grads: for each shard and present x its gradient ``[T, ...]``, which is written.

        Returns:
            For each shard the gradients of the carries that have one, zeros where the step gives none.
        """
        side, length = self.backward_side, done.length
        assert side is not None
        if _dry.get():
            for g in (g for shard in x_grads for g in shard):
                g.zero_()
            return [[torch.zeros(self.carry[k].shape, dtype=self.carry[k].dtype) for k in self.carry_grads] for _ in ct_carry]
        places, nbytes = side.layout(length)
        n, n_saved = len(side.program.storages), len(self.saved)
        step, ring = [0] * n, [0] * n
        for index, (_, stride, slots) in places.items():
            step[index], ring[index] = stride, slots
        tables, memories = [], []
        for number, (cts, packs) in enumerate(zip(ct_carry, ct_packs, strict=True)):
            memory = _Memory(self._pool, nbytes, len(ct_carry))
            memories.append(memory)
            origin = memory.block.data_ptr()
            base = [origin + places[i][0] if i in places else 0 for i in range(n)]
            base[self.zero.index] = self._zeros.data_ptr()
            for s in side.program.storages:
                if s.constant is not None:
                    base[s.index] = s.constant.data_ptr()
                elif s.input is not None and s.input >= n_saved + len(self.ct_carry):
                    pack = packs[s.input - n_saved - len(self.ct_carry)]
                    base[s.index], step[s.index] = pack.data_ptr(), pack.stride(0) * pack.element_size() if length > 1 else 0
            for storage, x in zip([i for i in self.total if i is not None], total[number], strict=True):
                base[storage] = x.data_ptr()
            for storage, x in zip([i for i in self.x_grads if i is not None], x_grads[number], strict=True):
                base[storage], step[storage] = x.data_ptr(), x.stride(0) * x.element_size() if length > 1 else 0
            start = [*done.start[number], *(x.data_ptr() for x in cts)]
            tables.append(([*done.base[number], *base], start))
        self._launch(1, length, [*done.step, *step], [*done.ring, *ring], tables)
        return [
            [
                torch.zeros(self.carry[k].shape, dtype=self.carry[k].dtype) if x is None else self._read(memory, places, x, 0)
                for k, x in self.carry_grads.items()
            ]
            for memory in memories
        ]


# -- a loop inside another program -----------------------------------------------------------------------------------------------------------------


class LoopFunction:
    """A loop's function, which lies somewhere as a tensor does."""

    def __init__(self, loop: Loop, which: int) -> None:
        self._loop, self._which = loop, which

    def data_ptr(self) -> int:
        address = ctypes.cast(self._loop.call(self._which), ctypes.c_void_p).value
        assert address is not None
        return address


class LoopCall:
    """A pass of a loop over a number of steps as a call of another program. Inputs and results are lists of contiguous tensors.

    The forward pass takes ``params, carry, xs`` of all shards and gives for each shard the carry, then each y ``[S, T, ...]``, then for each shard the
    memory that the backward pass reads.

    The backward pass takes the same inputs, the memory of each shard, and for each shard the cotangents of its carry (``loop.ct_carry``) and of its ys
    (``loop.ct_packs``). It gives the gradients of the params ``[S, ...]`` and of the xs ``[S, T, ...]`` that there are, then for each shard those of the
    carry, then memory that nobody reads.

    Args:
        loop: the loop.
        length: number of steps T.
        shards: number of shards S, a thread each.
        backward: which pass.
    """

    def __init__(self, loop: Loop, length: int, shards: int, backward: bool) -> None:
        self.loop, self.length, self.shards, self.backward = loop, length, shards, backward
        self._side = loop.backward_side if backward else loop.forward_side
        self._places, self._nbytes = self._side.layout(length)  # type: ignore[union-attr]

    def constants(self) -> list[Any]:
        """What has an address of its own: the function, and the constants of the programs."""
        loop, found = self.loop, [LoopFunction(self.loop, int(self.backward)), *(x for _, x in self.loop.constants)]
        if self.backward:
            assert loop.backward_side is not None
            found += [loop._zeros, *(s.constant for s in loop.backward_side.program.storages if s.constant is not None)]
        return found

    def results(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes."""
        loop, lead = self.loop, (self.shards, self.length)
        memory = [((max(self._nbytes, 1),), torch.uint8)] * self.shards
        if not self.backward:
            return [*[(x.shape, x.dtype) for x in loop.carry] * self.shards, *[((*lead, *y.shape), y.dtype) for y in loop.ys], *memory]
        params = [((self.shards, *x.shape), x.dtype) for x in loop.param_results]
        xs = [((*lead, *x.shape), x.dtype) for x in loop.x_results]
        return [*params, *xs, *[(loop.carry[k].shape, loop.carry[k].dtype) for k in loop.carry_grads] * self.shards, *memory]

    def statement(self, given: list[str], results: list[str], others: list[str]) -> str:
        """C++ that makes the tables and calls the loop."""
        write = self._write_backward if self.backward else self._write_forward
        tables, steps, rings, after = write(given, results, others[1:])
        lines = [f"static const int64_t steps[] = {_list(steps)}, rings[] = {_list(rings)};"]
        for k, (bases, starts) in enumerate(tables):
            lines.append(f"char* const bases_{k}[] = {_list(bases)}; char* const starts_{k}[] = {_list(starts)};")
        rows = ", ".join(f"{{bases_{k}, steps, rings, starts_{k}}}" for k in range(len(tables)))
        function = f"((int (*)(int64_t, int, const Table*)) ({others[0]}))"
        lines.append(f"const Table tables[] = {{{rows}}};")
        if self.backward:  # gradients of params are sums
            lines += [f"std::memset({y}, 0, {self.shards * x.nbytes});" for x, y in zip(self.loop.param_results, results, strict=False)]
        lines.append(f'if ({function}({self.length}, {self.shards}, tables)) throw std::runtime_error("a loop failed");')
        return "\n".join(["{", *lines, *after, "}"])

    def _inputs(self, given: list[str], shard: int) -> list[str]:
        size = self.loop.n_inputs
        return [f"(char*)({x})" for x in given[shard * size : (shard + 1) * size]]

    def _steps(self, side: _Side, places: dict[int, tuple[int, int, int]]) -> tuple[list[int], list[int]]:
        n = len(side.program.storages)
        return [places[i][1] if i in places else 0 for i in range(n)], [places[i][2] if i in places else 0 for i in range(n)]

    def _forward_bases(self, inputs: list[str], memory: str, others: list[str], ys: list[str]) -> list[str]:
        loop, side = self.loop, self.loop.forward_side
        places, _ = side.layout(self.length)
        bases = ["nullptr"] * len(side.program.storages)
        for index, (offset, _, _) in places.items():
            bases[index] = f"(char*)({memory}) + {offset}"
        for (index, _), x in zip(loop.constants, others, strict=False):
            bases[index] = f"(char*)({x})"
        for index, i, _ in loop.inputs:
            bases[index] = inputs[i]
        for y, x in zip(loop.ys, ys, strict=True):
            bases[y.storage.index] = x
        return bases

    def _forward_steps(self) -> tuple[list[int], list[int]]:
        loop, side = self.loop, self.loop.forward_side
        steps, rings = self._steps(side, side.layout(self.length)[0])
        for index, _, per_step in loop.inputs:
            steps[index] = per_step
        for y in loop.ys:
            steps[y.storage.index] = y.nbytes
        return steps, rings

    def _starts(self, inputs: list[str]) -> list[str]:
        n_params, n_carry, _, _ = self.loop.counts
        return inputs[n_params : n_params + n_carry]

    def _write_forward(self, given: list[str], results: list[str], others: list[str]) -> tuple[list[Any], list[int], list[int], list[str]]:
        loop, n_carry = self.loop, len(self.loop.carry)
        ys = results[n_carry * self.shards : n_carry * self.shards + len(loop.ys)]
        memory, tables, after = results[-self.shards :], [], []
        for k in range(self.shards):
            inputs = self._inputs(given, k)
            here = [f"(char*)({x}) + {k * self.length * y.nbytes}" for x, y in zip(ys, loop.ys, strict=True)]
            tables.append((self._forward_bases(inputs, memory[k], others, here), self._starts(inputs)))
            after += self._copies(loop.carry, results[k * n_carry : (k + 1) * n_carry], self._places, memory[k], self.length - 1)
        return tables, *self._forward_steps(), after

    def _copies(self, carry: Sequence[Sym | None], results: list[str], places: dict[int, tuple[int, int, int]], memory: str, t: int) -> list[str]:
        """Carries out of the memory of step ``t``; zeros for one that is not there."""
        lines = []
        for x, like, result in zip(carry, self.loop.carry if not self.backward else [self.loop.carry[k] for k in self.loop.carry_grads], results, strict=True):
            if x is None:
                lines.append(f"std::memset({result}, 0, {like.nbytes});")
            else:
                offset, step, ring = places[x.storage.index]
                lines.append(f"std::memcpy({result}, (char*)({memory}) + {offset + (t % ring if ring else t) * step + x.offset}, {x.nbytes});")
        return lines

    def _write_backward(self, given: list[str], results: list[str], others: list[str]) -> tuple[list[Any], list[int], list[int], list[str]]:
        loop, side, length = self.loop, self.loop.backward_side, self.length
        assert side is not None
        n_inputs, n_saved, n_cts, n_packs = loop.n_inputs * self.shards, len(loop.saved), len(loop.ct_carry), len(loop.ct_packs)
        memory = given[n_inputs : n_inputs + self.shards]
        cotangents = given[n_inputs + self.shards :]
        params, results = results[: len(loop.param_results)], results[len(loop.param_results) :]
        xs, results = results[: len(loop.x_results)], results[len(loop.x_results) :]
        scratch = results[-self.shards :]
        forward_steps, forward_rings = self._forward_steps()
        steps, rings = self._steps(side, self._places)
        storages = side.program.storages
        before = [x for _, x in loop.constants]
        zeros, constants = others[len(before)], others[len(before) + 1 :]
        tables, after = [], []
        for k in range(self.shards):
            inputs = self._inputs(given, k)
            cts = [f"(char*)({x})" for x in cotangents[k * (n_cts + n_packs) : (k + 1) * (n_cts + n_packs)]]
            bases = [f"(char*)({scratch[k]}) + {self._places[i][0]}" if i in self._places else "nullptr" for i in range(len(storages))]
            bases[loop.zero.index] = f"(char*)({zeros})"
            own = iter(constants)
            for s in storages:
                if s.constant is not None:
                    bases[s.index] = f"(char*)({next(own)})"
                elif s.input is not None and s.input >= n_saved + n_cts:
                    bases[s.index] = cts[n_cts + s.input - n_saved - n_cts]
                    steps[s.index] = loop.ys[loop.ct_packs[s.input - n_saved - n_cts]].nbytes
            for index, x, result in zip([i for i in loop.total if i is not None], loop.param_results, params, strict=True):
                bases[index] = f"(char*)({result}) + {k * x.nbytes}"
            for index, x, result in zip([i for i in loop.x_grads if i is not None], loop.x_results, xs, strict=True):
                bases[index] = f"(char*)({result}) + {k * length * x.nbytes}"
                steps[index] = x.nbytes
            forward = self._forward_bases(inputs, memory[k], others, ["nullptr"] * len(loop.ys))
            tables.append(([*forward, *bases], [*self._starts(inputs), *cts[:n_cts]]))
            n = len(loop.carry_grads)
            after += self._copies(list(loop.carry_grads.values()), results[k * n : (k + 1) * n], self._places, scratch[k], 0)
        return tables, [*forward_steps, *steps], [*forward_rings, *rings], after


def _list(values: Sequence[Any]) -> str:
    return f"{{{', '.join(map(str, values or ['0']))}}}"


_loop_calls: list[LoopCall] = []
_numbers: dict[tuple[int, int, int, bool], int] = {}


def loop_number(loop: Loop, length: int, shards: int, backward: bool) -> int:
    """The number by which a graph knows a call of a loop."""
    key = (id(loop), length, shards, backward)
    if key not in _numbers:
        _loop_calls.append(LoopCall(loop, length, shards, backward))  # which keeps the loop, and so its identity
        _numbers[key] = len(_loop_calls) - 1
    return _numbers[key]


def loop_call(number: int) -> LoopCall:
    """See :func:`loop_number`."""
    return _loop_calls[number]
