"""A step of a time loop in parts: one function of several pieces of its input, a thread each, and then the rest of the step, which sees all results.

A gradient step on a minibatch is such a step: every piece of the minibatch gives its own gradient, and the optimizer takes their sum. A thread works through
all layers of its rows, which stay in its cache, and the threads meet once in a step and not after every operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from frl import compile as compiler
from frl.native.program import Program, Storage, Sym, Unsupported

_LEAST = 256  # samples of a part: below that meeting costs more than it saves


def part_count(samples: int, device: torch.device) -> int:
    """In how many parts a step on so many samples is best made: one for each of torch's threads on a CPU, one where a part would be small."""
    return max(1, min(torch.get_num_threads(), samples // _LEAST)) if device.type == "cpu" else 1


def in_parts(
    part: Callable[[Any, Any, Any], Any], rest: Callable[[Any, Any, Any, Sequence[Any]], tuple[Any, Any]]
) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """A step of :func:`frl.scan.scan` that runs ``part`` on each of several pieces of its input, and ``rest`` with all results.

    Args:
        part: ``(params, carry, piece) -> result``, pure.
        rest: ``(params, carry, x, results) -> (carry, y)``, pure.

    Returns:
        ``step(params, carry, x)``; x is ``{"parts": (piece, ...), "rest": x}``, the pieces alike in structure, shapes and dtypes. Not differentiated, it
        runs the parts side by side.
    """

    def step(params: Any, carry: Any, x: dict[str, Any]) -> tuple[Any, Any]:
        return rest(params, carry, x["rest"], [part(params, carry, piece) for piece in x["parts"]])

    step.part, step.rest = part, rest  # type: ignore[attr-defined]
    return step


class FlatParts(NamedTuple):
    """The two functions of a step over flat lists of tensors."""

    part: Callable[[list[Tensor]], list[Tensor]]  # [params, carry, piece] -> results
    rest: Callable[[list[Tensor]], list[Tensor]]  # [params, carry, x, results of the first part, of the second, ...] -> [carry, y]
    shared: int  # params and carry
    pieces: list[list[int]]  # where the leaves of each piece are among the inputs of the step
    others: list[int]  # and those of x


class PartsKernel(compiler.Kernel):
    """The kernel of such a step."""

    def __init__(self, fn: Callable, parts: FlatParts, examples: Sequence[Tensor], needs: Sequence[bool], mode: str) -> None:
        super().__init__(fn, examples, needs, mode)
        self._parts = parts

    def program(self, threads: int | None) -> Program:
        if threads is None and torch.get_num_threads() >= len(self._parts.pieces) > 1:
            try:
                return self._side_by_side()
            except Unsupported:
                pass
        return super().program(threads)

    def _side_by_side(self) -> Program:
        parts = self._parts
        shared, first = self.examples[: parts.shared], [self.examples[i] for i in parts.pieces[0]]
        one = compiler.Kernel(parts.part, [*shared, *first], [False] * (len(shared) + len(first)), self.mode)
        results = compiler.describe_outputs(parts.part, one.examples, one.needs)
        given = [*shared, *(self.examples[i] for i in parts.others), *(x for _ in parts.pieces for x in results)]
        whole = compiler.Kernel(parts.rest, given, [False] * len(given), self.mode)
        return _joined(one.program(1), whole.program(None), parts, len(self.examples))


def _joined(part: Program, rest: Program, parts: FlatParts, n_inputs: int) -> Program:
    """One program of all parts side by side and the rest."""
    storages: list[Storage] = []

    def new(like: Storage, **facts: Any) -> Storage:
        storages.append(Storage(len(storages), like.nbytes, **facts))
        return storages[-1]

    def moved(x: Any, table: dict[int, tuple[Storage, int]]) -> Any:
        if isinstance(x, Sym):
            storage, shift = table[x.storage.index]
            return Sym(storage, x.offset + shift, x.shape, x.stride, x.dtype)
        if isinstance(x, list | tuple):
            return type(x)(moved(y, table) for y in x)
        return x

    def table_of(program: Program, known: dict[int, tuple[Storage, int]]) -> dict[int, tuple[Storage, int]]:
        """Where the storages of a program went: those that are known, and new ones for all others."""
        return {s.index: known[s.index] if s.index in known else (new(s, constant=s.constant), 0) for s in program.storages}

    def renamed(call: tuple) -> tuple:
        return ("kernel", f"part_{call[1]}", *call[2:]) if call[0] == "kernel" else call

    inputs: list[Any] = [None] * n_inputs

    def input_of(x: Sym, at: int) -> tuple[Storage, int]:
        if inputs[at] is None:
            inputs[at] = Sym(new(x.storage, input=at), 0, x.shape, x.stride, x.dtype)
        return inputs[at].storage, 0

    lists, results = [], []
    for at in parts.pieces:
        places = [*range(parts.shared), *at]
        table = table_of(part, {x.storage.index: input_of(x, i) for x, i in zip(part.inputs, places, strict=True)})
        lists.append([renamed(moved(call, table)) for call in part.calls])
        results += [moved(x, table) for x in part.outputs]
    places = [*range(parts.shared), *parts.others]
    known = {x.storage.index: input_of(x, i) for x, i in zip(rest.inputs, places, strict=False)}
    for x, result in zip(rest.inputs[len(places) :], results, strict=True):
        if not result.contiguous or (result.shape, result.dtype) != (x.shape, x.dtype):
            raise Unsupported(f"a result of a part with strides {result.stride}")
        known[x.storage.index] = result.storage, result.offset
    table = table_of(rest, known)
    calls = [moved(call, table) for call in rest.calls]
    kernels = {**{f"part_{name}": kernel for name, kernel in part.kernels.items()}, **rest.kernels}
    return Program(storages, inputs, [moved(x, table) for x in rest.outputs], [("beside", lists), *calls], kernels, rest.threads)
