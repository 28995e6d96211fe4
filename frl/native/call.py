"""A pass of a loop as a call of another program."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch

from frl.native.loop import Loop, Side
from frl.native.program import Sym, number_of


class LoopFunction:
    """A loop's function, which lies somewhere as a tensor does."""

    def __init__(self, loop: Loop, which: int) -> None:
        self._loop, self._which = loop, which

    def data_ptr(self) -> int:
        function: Any = self._loop.call(self._which)
        address = ctypes.cast(function, ctypes.c_void_p).value
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

    Attributes:
        number: by which a graph knows it.
    """

    def __init__(self, loop: Loop, length: int, shards: int, backward: bool) -> None:
        self.loop, self.length, self.shards, self.backward = loop, length, shards, backward
        self._side = loop.backward_side if backward else loop.forward_side
        self._places, self._nbytes = self._side.layout(length)  # type: ignore[union-attr]
        self.number = number_of(self)

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

    def _steps(self, side: Side, places: dict[int, tuple[int, int, int]]) -> tuple[list[int], list[int]]:
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
            after += self._copies(loop.carry, results[k * n_carry : (k + 1) * n_carry], memory[k], self.length - 1)
        return tables, *self._forward_steps(), after

    def _copies(self, carry: Sequence[Sym | None], results: list[str], memory: str, t: int) -> list[str]:
        """Carries, or their gradients, out of the memory of step ``t``; zeros for one that is not there."""
        lines, which = [], self.loop.carry_grads if self.backward else range(len(self.loop.carry))
        for x, k, result in zip(carry, which, results, strict=True):
            if x is None:
                lines.append(f"std::memset({result}, 0, {self.loop.carry[k].nbytes});")
            else:
                offset, step, ring = self._places[x.storage.index]
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
        zeros, *constants = others[len(loop.constants) :]
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
                    bases[s.index] = cts[s.input - n_saved]
                    steps[s.index] = loop.ys[loop.ct_packs[s.input - n_saved - n_cts]].nbytes
            for index, x, result in zip([i for i in loop.total if i is not None], loop.param_results, params, strict=True):
                bases[index] = f"(char*)({result}) + {k * x.nbytes}"
            for index, x, result in zip([i for i in loop.x_grads if i is not None], loop.x_results, xs, strict=True):
                bases[index] = f"(char*)({result}) + {k * length * x.nbytes}"
                steps[index] = x.nbytes
            forward = self._forward_bases(inputs, memory[k], others, ["nullptr"] * len(loop.ys))
            tables.append(([*forward, *bases], [*self._starts(inputs), *cts[:n_cts]]))
            n = len(loop.carry_grads)
            after += self._copies(list(loop.carry_grads.values()), results[k * n : (k + 1) * n], scratch[k], 0)
        return tables, [*forward_steps, *steps], [*forward_rings, *rings], after


def _list(values: Sequence[Any]) -> str:
    return f"{{{', '.join(map(str, values or ['0']))}}}"


_known: WeakValueDictionary[tuple[int, int, int, bool], LoopCall] = WeakValueDictionary()


def pass_of(loop: Loop, length: int, shards: int, backward: bool) -> LoopCall:
    """A pass of a loop; the same object for the same arguments."""
    key = (id(loop), length, shards, backward)
    found = _known.get(key)
    if found is None:
        _known[key] = found = LoopCall(loop, length, shards, backward)  # which keeps the loop, and so its identity
    return found
