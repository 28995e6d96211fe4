"""The time loop as one operation in a graph (:mod:`frl.one_operation`).

What comes before it, the loop, its backward pass and what comes after become one native program.

The operation exists while a graph is captured and is replaced when the program is written (:func:`frl.native.program.trace`); nobody calls it with tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from frl.native.call import pass_of
from frl.native.loop import Loop
from frl.native.program import loop_call
from frl.one_operation import loops_in_use


@torch.library.custom_op("frl::loop", mutates_args=(), device_types="cpu")
def _loop(inputs: Sequence[Tensor], number: int) -> list[Tensor]:
    raise RuntimeError("a loop of a graph was called with tensors; this is a fault in frl")


@_loop.register_fake
def _(inputs: Sequence[Tensor], number: int) -> list[Tensor]:
    return [inputs[0].new_empty(shape, dtype=dtype) for shape, dtype in loop_call(number).results()]


class LoopForward:
    """A forward pass of a native loop in a graph, and what its backward pass needs.

    Args:
        loop: the loop.
        shards: ``(params, carry, xs)`` of contiguous tensors.
    """

    def __init__(self, loop: Loop, shards: Sequence[tuple[list[Tensor], list[Tensor], list[Tensor]]]) -> None:
        self._loop, self._size = loop, len(shards)
        self._length = shards[0][2][0].shape[0]
        self._inputs = [x for params, carry, xs in shards for x in (*params, *carry, *xs)]
        results = self._call(self._inputs, backward=False)
        n_carry, count = loop.counts[1], loop.counts[1] * self._size
        self.carries = [results[i * n_carry : (i + 1) * n_carry] for i in range(self._size)]
        self.ys = results[count : count + len(loop.ys)]  # [S, T, ...]
        self._memory = results[count + len(loop.ys) :]

    def _call(self, given: Sequence[Tensor], *, backward: bool) -> list[Tensor]:
        call, graph = pass_of(self._loop, self._length, self._size, backward), loops_in_use()
        assert graph is not None
        graph.calls.append(call)
        return _loop(given, call.number)

    def backward(self, cotangents: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]]:
        """Gradients, where there are some: of the params ``[S, ...]``, of the xs ``[S, T, ...]``, and of each shard's carry.

        Args:
            cotangents: for each shard those of its carry and of its ys, contiguous.
        """
        given = [*self._inputs, *self._memory, *(x for row in cotangents for x in row)]
        results = self._call(given, backward=True)
        n_params, n_x, n_carry = len(self._loop.param_results), len(self._loop.x_results), len(self._loop.carry_grads)
        params, xs, rest = results[:n_params], results[n_params : n_params + n_x], results[n_params + n_x :]
        return params, xs, [rest[i * n_carry : (i + 1) * n_carry] for i in range(self._size)]
