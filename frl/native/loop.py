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
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from frl.native.library import Build
from frl.native.program import Program, Storage, Sym, Unsupported, dense
from frl.native.source import GEMM, source, step_statements, symbols

_ALIGN = 64
_dry: ContextVar[bool] = ContextVar("dry", default=False)


@contextmanager
def dry_run() -> Iterator[None]:
    """Loops inside run nothing and give zeros: all that follows is captured, and nobody waits for the C++ compiler meanwhile."""
    token = _dry.set(True)
    try:
        yield
    finally:
        _dry.reset(token)


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
                storages.appendleft(_large_pages(torch.UntypedStorage(like.nbytes)))
            storages.rotate(-1)
            return torch.empty(0, dtype=like.dtype).set_(storages[-1], 0, like.shape, dense(like.shape))

    def _trim(self) -> None:
        """Give back what is more than the results that are alive."""
        for storages in self._storages.values():
            free = [x for x in storages if not _held(x)]
            for x in free[max(1, len(storages) - len(free)) :]:
                storages.remove(x)


@functools.cache
def _advise() -> Any:
    """The system's function that takes advice on memory, on Linux, which numbers the kinds of advice as below."""
    return getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


def _large_pages(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Memory that nobody has touched yet, in pages of two megabytes where the system has some."""
    advise, page = _advise(), 1 << 21
    start, end = -(-storage.data_ptr() // page) * page, (storage.data_ptr() + storage.nbytes()) // page * page
    if advise is not None and end > start:
        advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), 14)  # MADV_HUGEPAGE
    return storage


def _held(storage: torch.UntypedStorage) -> bool:
    """Whether a tensor lies in it."""
    return torch._C._storage_Use_Count(storage._cdata) > 1


@functools.cache
def _empty() -> Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor]:
    """A new tensor of a shape, strides and a dtype: by the function that generated code calls, a third of the time of ``torch.empty``."""
    try:
        from torch._C._dynamo.guards import _empty_strided_cpu as empty  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

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


class Side:
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
        side = self.forward_side = Side(forward)
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
        self._builds = [Build(functools.partial(source, forward, self._forward_body(), streamed))]
        self._calls: dict[int, Callable] = {}
        self._frames: list[_Frame] = []
        self._large = _Results()
        self._strides = [dense(y.shape) for y in self.ys]
        self.backward_side: Side | None = None

    # -- code --------------------------------------------------------------------------------------------------------------------------------------

    def _forward_body(self) -> list[str]:
        side = self.forward_side
        lines = ["for (int64_t t = 0; t < length; ++t) {"]
        lines += [f"  char* const s{s.index} = {self._at(s.index)};" for s in side.program.storages]
        lines += [f"  {line}" for line in step_statements(side.program, lambda x: f"s{x.storage.index} + {x.offset}", {})]
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
        side = self.backward_side = Side(backward)
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
            for x in symbols(call):
                uses[x.storage.index] = uses.get(x.storage.index, 0) + 1
        for x in backward.outputs:
            uses[x.storage.index] = uses.get(x.storage.index, 0) + 1
        taken: set[int] = set()
        for i, x in zip(kinds, grads, strict=True):
            if i < n_params:
                if x is None:
                    self.total.append(None)
                    continue
                if x.dtype not in GEMM or not x.contiguous:
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
                    scalar = GEMM[x.dtype][1]
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
        lines += [f"  {line}" for line in step_statements(backward, lambda x: f"b{x.storage.index} + {x.offset}", replaced)]
        lines += [f"  {line}" for line in sums]
        lines += [f"  std::memcpy(b{index}, b{x.storage.index} + {x.offset}, {x.nbytes});" for x, index in side.copies]
        self._builds.append(Build(functools.partial(source, backward, [*lines, "}"])))

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
