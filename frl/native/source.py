"""The C++ of a program: its kernels, made fit for a loop, and statements for its calls."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from frl import philox, suffix_sums
from frl.native.program import C_TYPES, Program, Sym, Unsupported
from frl.one_operation import vectorised

_MOST_LOOPS = 8  # in one C++ function
_FAR, _AHEAD = 1 << 18, 2048  # elements of a loop whose memory is fetched ahead, and how far
GEMM = {torch.float32: ("sgemm_", "float"), torch.float64: ("dgemm_", "double")}

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

struct Table { char* const* base; const int64_t* step; const int64_t* ring; char* const* start; };
static inline char* place_of(const Table& f, int i, int64_t t) { return f.base[i] + (f.ring[i] ? t % f.ring[i] : t) * f.step[i]; }
""" + vectorised("""
template <typename T> static void accumulate(T* total, const T* x, int64_t n) { for (int64_t i = 0; i < n; ++i) total[i] += x[i]; }
""")

_VECTORS = """
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
    if constexpr (N == 1) return at::vec::Vectorized<T>::loadu(b);
    else return at::vec::VectorizedN<T, N>::loadu(b);
  } else return at::vec::convert<T, N, U, L>(x);
}
template <typename T, int N, typename U, int L> static inline at::vec::VecMask<T, N> frl_from(const at::vec::VectorizedN<U, L>& x) {
  if constexpr (sizeof(U) >= 4 && sizeof(T) >= 4 && at::vec::VecMask<T, N>::size() == at::vec::VectorizedN<U, L>::size())
    return frl_cast<T, N>(at::vec::VecMask<U, L>(x != at::vec::VectorizedN<U, L>(U(0))));
  else return at::vec::VecMask<T, N>::template from<U, L>(x);
}
#endif
"""

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
    if not (a.dtype == b.dtype == out.dtype and a.dtype in GEMM) or any(len(x.shape) != 2 for x in (a, b, out)):
        raise Unsupported(f"a product of {a.dtype} {a.shape} and {b.dtype} {b.shape}")
    name, scalar = GEMM[a.dtype]

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


def source(program: Program, body: list[str], streamed: set[int] | None = None, *, plain: bool = False) -> str:
    """A C++ file with the kernels of a program and ``run``, whose body is given.

    Args:
        program: what is done.
        body: statements.
        streamed: storages that are results which nobody reads before long.
        plain: leave the kernels as they were generated.
    """
    parts = [_PREFIX] if plain else [_PREFIX, _VECTORS]
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
        if plain:
            parts.append(text)
            continue
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
        blocks = [_prefetched(block) if streamed else block for block in _blocks(text)]
        parts.append(_in_functions("".join(map(_hoisted, blocks))))
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


def _prefetched(block: str) -> str:
    """A loop over memory that is in no cache: what it reads next is fetched over the borders of pages, where the processor stops by itself."""
    loops = re.findall(r"for\(int64_t x0=.*?; x0<static_cast<int64_t>\((\d+)L\)", block)
    read = sorted(set(re.findall(r"loadu\((\w+_ptr\d+) \+ static_cast<int64_t>\(x0\),", block)))
    first = re.search(r"\n +auto tmp\d+ =", block)
    if len(loops) != 1 or "x1" in block or int(loops[0]) < _FAR or not read or first is None:
        return block
    fetch = "".join(f"\n__builtin_prefetch({x} + x0 + {_AHEAD});" for x in read)
    return block[: first.start()] + fetch + block[first.start() :]


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
        for x in symbols(call):
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
    kind = C_TYPES[x.dtype]
    loops, source, target = _over(x, out)
    return f"{''.join(loops)}(({kind}*)({place(out)}))[0{''.join(target)}] = ((const {kind}*)({place(x)}))[0{''.join(source)}];"


def _running(kind: str, x: Sym, out: Sym, dim: int, place: Callable[[Sym], str]) -> str:
    """``cumsum`` or ``cummax`` along a dimension into a contiguous result."""
    loops, source, target = _over(x, out, dim)
    result, given = C_TYPES[out.dtype], C_TYPES[x.dtype]
    first, next_one = ("0", "so_far + z") if kind == "cumsum" else (f"std::numeric_limits<{result}>::lowest()", "std::max(so_far, z)")
    return (
        f"{''.join(loops)}{{ auto x = (const {given}*)({place(x)}){''.join(source)}; auto y = ({result}*)({place(out)}){''.join(target)}; "
        f"{result} so_far = {first}; for (int64_t j = 0; j < {x.shape[dim]}; ++j) "
        f"{{ const auto z = ({result})x[j * {x.stride[dim]}]; so_far = {next_one}; y[j * {out.stride[dim]}] = so_far; }} }}"
    )


def symbols(call: tuple) -> list[Sym]:
    """Tensors that a call reads or writes."""
    if call[0] == "kernel":
        return call[2]
    if call[0] == "outside":
        return [call[1], call[2], *call[3], *call[4]]
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


def step_statements(program: Program, place: Callable[[Sym], str], replaced: dict[int, str]) -> list[str]:
    """Statements of one step. A product whose call is in ``replaced`` is added to the place named there."""
    return statements(program, program.calls, program.threads, place, replaced)


def statements(program: Program, calls: Sequence[tuple], threads: int, place: Callable[[Sym], str], replaced: dict[int, str]) -> list[str]:
    """C++ for calls, see :func:`step_statements`."""
    numbers = {name: i for i, name in enumerate(program.kernels)}
    lines = []
    for i, call in enumerate(calls):
        if call[0] == "beside":
            lines.append(_side_by_side([statements(program, inner, 1, place, {}) for inner in call[1]]))
        elif call[0] == "mm":
            _, a, b, out = call
            if i in replaced:
                lines.append(_product(a, b, out, lambda x, i=i, out=out: replaced[i] if x.storage is out.storage else place(x), 1))
            else:
                lines.append(_product(a, b, out, place))
        elif call[0] == "addmm":
            _, a, b, out, bias = call
            if bias.dtype != out.dtype or len(bias.shape) > 2 or out.dtype not in GEMM:
                raise Unsupported(f"addmm with a bias {bias.shape} of {bias.dtype}")
            shape, stride = (1,) * (2 - len(bias.shape)) + bias.shape, (0,) * (2 - len(bias.shape)) + bias.stride
            r, c = (0 if n == 1 else s for n, s in zip(shape, stride, strict=True))
            scalar, (m, n), (p, q) = GEMM[out.dtype][1], out.shape, out.stride
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
        elif call[0] == "outside":
            _, function, context, given, results, told = call
            places = ", ".join(f"(char*)({place(x)})" for x in (*given, *results))
            lines.append(
                f"{{ const int64_t told[] = {{{', '.join(map(str, told))}}}; char* const tensors[] = {{{places}}}; "
                f"if (((int (*)(void*, const int64_t*, char* const*)) ({place(function)}))((void*)({place(context)}), told, tensors)) "
                'throw std::runtime_error("a call failed"); }'
            )
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
