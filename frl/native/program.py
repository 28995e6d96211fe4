"""What a step does: the calls of the function that Inductor generated for it, in order, and where every buffer lies."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

C_TYPES = {torch.float32: "float", torch.float64: "double", torch.int64: "int64_t", torch.int32: "int32_t", torch.bool: "bool"}


class Unsupported(Exception):
    """A step that has no native loop."""


@dataclass
class Storage:
    """Memory that a step uses."""

    index: int
    nbytes: int
    input: int | None = None  # position among the inputs
    constant: Any = None  # something that has a data_ptr()


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


class Outside(NamedTuple):
    """A call of a C function of somebody else's: ``int function(void* context, const int64_t* numbers, char* const* tensors)``, 0 when all went well.

    Attributes:
        function, context: objects with a ``data_ptr``.
        inputs: tensors, which the function finds contiguous.
        results: shapes and dtypes of contiguous results, whose places follow the inputs'.
        numbers: what else it is told.
    """

    function: Any
    context: Any
    inputs: list[Sym]
    results: list[tuple[tuple[int, ...], torch.dtype]]
    numbers: list[int]


# Operators ``frl::name`` of others that native code calls: what they do with the arguments of the operator.
OUTSIDE: dict[str, Callable[..., Outside]] = {}


@dataclass
class Program:
    """Calls in order: ``("mm", a, b, out)``, ``("addmm", a, b, out, bias)``, ``("bmm", a, b, out)``, ``("philox", operands, out, c0, c2)``,
    ``("cumsum", x, out, dim)``, ``("cummax", x, out, dim)``, ``("copy", x, out)``, ``("sort", x, out)``, ``("suffix_sums", x, factor, linked, out)``,
    ``("kernel", name, arguments)``, ``("loop", call, given, results, others)``: a :class:`frl.native.call.LoopCall`, its inputs, its outputs and what else
    it needs, ``("outside", function, context, inputs, results, numbers)``: see :class:`Outside`, and ``("beside", lists)``: lists of calls that run side
    by side, a thread each."""

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


def dense(shape: Sequence[int]) -> tuple[int, ...]:
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
        out = empty((shape := (4, *torch.broadcast_shapes(*(x.shape for x in operands)))), dense(shape), torch.int64)
        program.calls.append(("philox", operands, out, c0, c2))
        return out

    def sums(*args: Any) -> Sym:
        x, factor, linked = map(known, args)
        out = empty(x.shape, dense(x.shape), x.dtype)
        if not (x.contiguous and factor.contiguous and linked.contiguous):
            raise Unsupported("suffix sums of tensors that are not contiguous")
        program.calls.append(("suffix_sums", x, factor, linked, out))
        return out

    def laid_out(x: Sym, result: Callable[[Tensor], Tensor]) -> Sym:
        """A result of an operation of torch's on ``x``, with the strides that torch would give it: what reads it counts on them."""
        y = result(torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device="meta"))
        return empty(y.shape, y.stride(), y.dtype)

    def cumsum(x: Any, dim: int, dtype: torch.dtype | None = None) -> Sym:
        x = known(x)
        out = laid_out(x, lambda x: torch.cumsum(x, dim, dtype=dtype))
        if x.dtype not in C_TYPES or out.dtype not in C_TYPES or not x.shape:
            raise Unsupported(f"cumsum of {x.dtype} {x.shape}")
        program.calls.append(("cumsum", x, out, dim % len(x.shape)))
        return out

    def cummax(x: Any, dim: int) -> tuple[Sym]:
        x = known(x)
        if x.dtype != torch.int64 or not x.shape:
            raise Unsupported(f"cummax of {x.dtype} {x.shape}")
        out = laid_out(x, lambda x: torch.cummax(x, dim).values)
        program.calls.append(("cummax", x, out, dim % len(x.shape)))
        return (out,)  # values alone, see sort

    def sort(x: Any, *, stable: bool, dim: int, descending: bool) -> tuple[Sym]:
        x = known(x)
        if x.dtype != torch.int64 or not x.shape or dim % len(x.shape) != len(x.shape) - 1 or descending:
            raise Unsupported(f"sort of {x.dtype} {x.shape} along {dim}")
        out = laid_out(x, lambda x: torch.sort(x, stable=stable, dim=dim).values)
        if x.contiguous and out.contiguous:
            program.calls.append(("sort", x, out))
        else:
            rows, in_order = (empty(x.shape, dense(x.shape), x.dtype) for _ in range(2))
            program.calls += [("copy", x, rows), ("sort", rows, in_order), ("copy", in_order, out)]
        return (out,)  # values alone: code that reads the order too finds no second result

    def loop(inputs: Sequence[Any], number: int) -> tuple[Sym, ...]:
        call, given = loop_call(number), list(map(known, inputs))
        if not all(x.contiguous for x in given):
            raise Unsupported("a loop over tensors that are not contiguous")
        results = [empty(shape, dense(shape), dtype) for shape, dtype in call.results()]
        others = [Sym(new(0, constant=x), 0, (), (), torch.uint8) for x in call.constants()]
        program.calls.append(("loop", call, given, results, others))
        return tuple(results)

    names = dict(call.__globals__)  # pyright: ignore[reportFunctionMemberAccess]
    for name, kernel in [*names.get("_frl_kernels", {}).items(), *((n, k) for n, k in names.items() if isinstance(k, _Kernel))]:

        def record(*args: Any, name: str = name, kernel: _Kernel = kernel) -> None:
            program.kernels[name] = (kernel.types, kernel.source)
            program.calls.append(("kernel", name, [known(x) for x in args]))

        names[name] = record

    def outside(name: str) -> Callable[..., tuple[Sym, ...]]:
        def call(*args: Any) -> tuple[Sym, ...]:
            told = OUTSIDE[name](*(known(x) if isinstance(x, Sym | Tensor) else x for x in args))
            given = []
            for x in told.inputs:
                if not x.contiguous:
                    x, there = empty(x.shape, dense(x.shape), x.dtype), x
                    program.calls.append(("copy", there, x))
                given.append(x)
            results = [empty(shape, dense(shape), dtype) for shape, dtype in told.results]
            function, context = (Sym(new(0, constant=x), 0, (), (), torch.uint8) for x in (told.function, told.context))
            program.calls.append(("outside", function, context, given, results, told.numbers))
            return tuple(results)

        return call

    ours = _Torch(cumsum, cummax, sort, philox=random_words, suffix_sums=sums, loop=loop, **{name: outside(name) for name in OUTSIDE})
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


# -- loops inside -----------------------------------------------------------------------------------------------------------------------------------

_loop_calls: WeakValueDictionary[int, Any] = WeakValueDictionary()
_count = itertools.count()


def number_of(call: Any) -> int:
    """A number by which a graph knows a call of a loop (:class:`frl.native.call.LoopCall`); whoever has the graph keeps the call."""
    number = next(_count)
    _loop_calls[number] = call
    return number


def loop_call(number: int) -> Any:
    """See :func:`number_of`."""
    return _loop_calls[number]
