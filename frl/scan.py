"""The time loop: ``lax.scan``'s meaning, differentiable, compiled one step at a time.

The whole loop is one custom ``torch.autograd.Function``, so the cost of a ``torch.func`` transform is paid once for a rollout and not once for every
operation of every step. Inside it, a compiled step runs T times forward and its compiled backward runs T times in reverse, called directly: no guards, no
dispatch through transforms, no autograd engine. One step is compiled, so any number of steps runs without a new compilation.

Memory: ``"save"`` keeps what the backward of each step needs, O(T). ``"recompute"`` keeps the carry at about sqrt(T) boundaries and runs each stretch
forward again before going back through it, O(sqrt(T)) beside the O(T) of ``xs`` and ``ys``, with the same two
compiled callables.

Transforms: ``grad``, ``vjp`` (its pullback any number of times), ``jacrev``, ``vmap`` and their nestings; a second derivative falls back to an eager loop;
forward mode is refused. Under ``vmap`` a native loop runs once for each member, a thread each; where there is none, the mapped step is compiled. Under
``torch.compile`` the loop is an ordinary Python loop that the tracer unrolls.
"""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from frl import compile as compiler
from frl import tree
from frl.loop_operation import LoopForward
from frl.native.loop import Loop
from frl.native.program import Unsupported
from frl.one_operation import loops_in_use, only_shapes
from frl.packing import Packing
from frl.parts import FlatParts, PartsKernel

Carry = TypeVar("Carry")
MEMORY = ("save", "recompute")


def scan(
    step: Callable[[Any, Carry, Any], tuple[Carry, Any]],
    params: Any,
    carry: Carry,
    xs: Any,
    *,
    unroll: int = 1,
    memory: str = "save",
    mode: str = "inductor",
) -> tuple[Carry, Any]:
    """Run ``carry, y = step(params, carry, x)`` over the leading dimension of ``xs``.

    Args:
        step: pure function of pytrees of tensors. Define it once and pass the same object again: graphs are kept by its identity.
        params: pytree of tensors that every step sees (parameters, statistics, environment parameters). Differentiable.
        carry: pytree of tensors; ``step`` returns one of the same structure, shapes and dtypes. Differentiable in its floating leaves.
        xs: pytree of tensors ``[T, ...]``, T >= 1. Differentiable in its floating leaves.
        unroll: steps compiled together (a remainder runs by single steps).
        memory: ``"save"`` or ``"recompute"``, see the module.
        mode: a mode of :mod:`frl.compile`; ``"eager"`` is a plain Python loop and differentiable any number of times in both directions.

    Returns:
        ``(carry, ys)``: the last carry, and the ``y`` of all steps stacked to ``[T, ...]``.

    Raises:
        ValueError: for an empty or ragged ``xs``, an unknown mode, or a step whose carry changes structure, shape or dtype.
    """
    compiler.check_mode(mode)
    if memory not in MEMORY:
        raise ValueError(f"unknown scan memory {memory!r} (known: {', '.join(MEMORY)})")
    if isinstance(unroll, bool) or not isinstance(unroll, int) or unroll < 1:
        raise ValueError(f"unroll must be a positive integer, got {unroll!r}")
    length = _length(xs)
    if only_shapes():
        carry, ys = _loop(step, params, carry, xs, 1)
        return carry, tree.map(lambda y: y.expand(length, *y.shape[1:]), ys)
    if mode == "eager" or compiler.is_tracing():
        return _loop(step, params, carry, xs, length)
    if unroll > 1 and length >= unroll:
        whole = length - length % unroll
        main = tree.map(lambda x: x[:whole].reshape(whole // unroll, unroll, *x.shape[1:]), xs)
        carry, ys = _scan(_chunk(step, unroll), params, carry, main, memory, mode)
        ys = tree.map(lambda y: y.reshape(whole, *y.shape[2:]), ys)
        if whole == length:
            return carry, ys
        carry, rest = _scan(step, params, carry, tree.map(lambda x: x[whole:], xs), memory, mode)
        return carry, tree.map(lambda a, b: torch.cat((a, b)), ys, rest)
    return _scan(step, params, carry, xs, memory, mode)


def scan_shards(
    step: Callable[[Any, Carry, Any], tuple[Carry, Any]],
    params: Any,
    carries: Sequence[Carry],
    xs: Sequence[Any],
    *,
    memory: str = "save",
    mode: str = "inductor",
) -> list[tuple[Carry, Any]]:
    """``[scan(step, params, c, x) for c, x in zip(carries, xs)]``, side by side on one thread each where the step has a native loop.

    Args:
        step, params, memory, mode: see :func:`scan`.
        carries, xs: one for each shard, alike in structure, shapes and dtypes.

    Raises:
        ValueError: as :func:`scan`, and for shards that differ.
    """
    first = (carries[0], xs[0])
    for other in zip(carries[1:], xs[1:], strict=True):
        tree.check_same(other, first, "a shard")
    if len(carries) > 1 and mode == "inductor" and not compiler.is_tracing() and not only_shapes():
        p, p_tree = tree.flatten(params)
        c, c_tree = tree.flatten(tuple(carries))
        x, x_tree = tree.flatten(tuple(xs))
        leaves = [*p, *c, *x]
        if all(isinstance(leaf, Tensor) for leaf in leaves) and compiler.only_one_gradient(leaves):
            _length(xs)
            size, n_c, n_x = len(carries), len(c) // len(carries), len(x) // len(carries)
            needs = _needs(leaves)
            one = lambda flags, n: [any(flags[i::n]) for i in range(n)]
            merged = (*needs[: len(p)], *one(needs[len(p) : len(p) + len(c)], n_c), *one(needs[len(p) + len(c) :], n_x))
            trees = (p_tree, tree.flatten(carries[0])[1], tree.flatten(xs[0])[1])
            plan, y_tree = _plan(step, trees, (len(p), n_c, n_x), [*p, *c[:n_c], *x[:n_x]], merged, memory, mode)
            if (loop := plan.loop(plan.differentiable, size)) is not None:
                outputs = _run(_Shards(plan, loop, size), leaves)
                n_out = len(outputs) // size
                parts = [outputs[i * n_out : (i + 1) * n_out] for i in range(size)]
                return [(tree.unflatten(trees[1], part[:n_c]), tree.unflatten(y_tree, part[n_c:])) for part in parts]
    return [scan(step, params, c, x, memory=memory, mode=mode) for c, x in zip(carries, xs, strict=True)]


def _length(xs: Any) -> int:
    leaves = tree.leaves(xs)
    if not leaves:
        raise ValueError("xs has no leaves, so scan does not know how many steps to run; pass at least one tensor [T, ...]")
    if any(not isinstance(x, Tensor) or x.ndim == 0 for x in leaves) or len({x.shape[0] for x in leaves}) != 1:
        lengths = {name: x.shape[0] if isinstance(x, Tensor) and x.ndim else None for name, x in tree.items(xs)}
        raise ValueError(f"every leaf of xs needs the same leading dimension T, got {lengths}")
    length = leaves[0].shape[0]
    if length == 0:
        raise ValueError("scan needs at least one step, got xs with leading dimension 0")
    return length


def _loop(step: Callable, params: Any, carry: Any, xs: Any, length: int) -> tuple[Any, Any]:
    ys = []
    for t in range(length):
        new, y = step(params, carry, tree.index(xs, t))
        if t == 0:
            tree.check_same(new, carry, "the carry that step returns")
        carry = new
        ys.append(y)
    return carry, tree.stack(ys)


_chunks: OrderedDict[tuple[Callable, int], Callable] = OrderedDict()


def _chunk(step: Callable, size: int) -> Callable:
    """``size`` steps as one step; the same object for the same arguments."""
    key = (step, size)
    if key not in _chunks:

        def chunk(params: Any, carry: Any, xs: Any) -> tuple[Any, Any]:
            return _loop(step, params, carry, xs, size)

        _chunks[key] = chunk
        if len(_chunks) > _CACHE_LIMIT:
            _chunks.popitem(last=False)
    return _chunks[key]


# -- kernels, kept by the identity of the step ---------------------------------------------------------------------------------------------------------

_CACHE_LIMIT = 256
_plans: OrderedDict[Any, tuple[_Plan, Any]] = OrderedDict()
_per_code: dict[Any, int] = {}


class _Plan:
    """A step over flat lists with its compiled kernels, for given shapes and a given set of inputs that need gradients."""

    def __init__(
        self,
        flat: Callable,
        counts: tuple[int, int, int, int],
        examples: Sequence[Tensor],
        needs: tuple[bool, ...],
        memory: str,
        mode: str,
        parts: FlatParts | None = None,
    ) -> None:
        self.flat = flat  # list of tensors (params, carry, x) -> list of tensors (carry, y)
        self.counts = counts  # leaves of params, carry, x, y
        self.memory = memory
        self.mode = mode
        self.examples = [x.detach() for x in examples]
        self.call_needs = needs
        self.mapped: dict[tuple, _Plan] = {}
        n_params, n_carry, _, _ = counts
        closed = list(needs)
        if any(needs):
            # A carry leaf needs a gradient when any earlier step can have made it depend on something that does.
            while True:
                out = compiler.output_needs(flat, self.examples, closed)
                grown = [a or b for a, b in zip(closed[n_params : n_params + n_carry], out[:n_carry], strict=True)]
                if grown == closed[n_params : n_params + n_carry]:
                    break
                closed[n_params : n_params + n_carry] = grown
        self.needs = tuple(closed)
        out = compiler.describe_outputs(flat, self.examples, self.needs)
        self.pack = Packing(out[n_carry:])
        self.carry_needed = [i for i, need in enumerate(self.needs[n_params : n_params + n_carry]) if need]
        self.y_needs = tuple(y.requires_grad for y in out[n_carry:])
        self.output_flags = (*self.needs[n_params : n_params + n_carry], *self.y_needs)  # outputs that are differentiable

        def packed(inputs: list[Tensor]) -> list[Tensor]:
            outputs = flat(inputs)
            return [*outputs[:n_carry], *self.pack.join(outputs[n_carry:])]

        packed.__name__ = getattr(flat, "__name__", "step")
        if parts is None:
            self.kernel = compiler.Kernel(packed, self.examples, self.needs, mode)
        else:

            def rest(inputs: list[Tensor]) -> list[Tensor]:
                outputs = parts.rest(inputs)
                return [*outputs[:n_carry], *self.pack.join(outputs[n_carry:])]

            self.kernel = PartsKernel(packed, parts._replace(rest=rest), self.examples, self.needs, mode)
        self.packs = out[n_carry:] and [x[0] for x in self.pack.join_stacked([y.detach().unsqueeze(0) for y in out[n_carry:]])]
        self._loops: dict[tuple[bool, int], Loop | None] = {}

    def loop(self, differentiable: bool, shards: int = 1) -> Loop | None:
        """The step as a native loop, where that is possible. One that runs beside others, or for a program of one thread, has one thread."""
        graph = loops_in_use()
        if graph is not None:
            graph.met = True
            shards = 2 if graph.threads == 1 else shards
        key = (differentiable, shards)
        if key not in self._loops:
            counts = (*self.counts[:3], len(self.pack.groups))
            self._loops[key] = self.kernel.loop(counts, differentiable=differentiable, shards=shards)
        if graph is not None and (self._loops[key] is None or (differentiable and self.memory != "save")):
            raise Unsupported("a loop that is not native, or that goes forward again on its way back")
        return self._loops[key]

    def beside(self, differentiable: bool) -> Loop | None:
        """The step as a native loop of which several run side by side, one thread each."""
        return self.loop(differentiable, 2 if torch.get_num_threads() > 1 else 1)

    @property
    def differentiable(self) -> bool:
        return any(self.call_needs)

    def split(self, leaves: Sequence[Any]) -> tuple[list, list, list]:
        n_params, n_carry, _, _ = self.counts
        return list(leaves[:n_params]), list(leaves[n_params : n_params + n_carry]), list(leaves[n_params + n_carry :])

    def vmapped(self, in_dims: tuple[int | None, ...], size: int) -> _Plan:
        """The plan of the step mapped over a leading dimension of the inputs whose entry of ``in_dims`` is 0."""
        if (in_dims, size) not in self.mapped:
            flat, n_out = self.flat, self.counts[1] + self.counts[3]

            def step(inputs: list[Tensor]) -> list[Tensor]:
                return list(torch.func.vmap(lambda *leaves: tuple(flat(list(leaves))), in_dims=in_dims, out_dims=(0,) * n_out)(*inputs))

            with compiler.below_transforms():
                examples = [x if d is None else x.expand(size, *x.shape) for x, d in zip(self.examples, in_dims, strict=True)]
                self.mapped[in_dims, size] = _Plan(step, self.counts, examples, self.call_needs, self.memory, self.mode)
        return self.mapped[in_dims, size]

    # The loops below see plain tensors only.

    def run(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Forward without a graph: last carry leaves, then stacked y leaves."""
        params, carry, xs = self.split([x.contiguous() for x in leaves])
        if (loop := self.loop(False)) is not None:
            return self._outputs(_native_run(self, loop, [(params, carry, xs)]))
        rows = list(zip(*[x.unbind(0) for x in xs], strict=True))
        n_carry = self.counts[1]
        ys = []
        for row in rows:
            out = self.kernel.infer([*params, *carry, *row])
            carry = list(out[:n_carry])
            ys.append(out[n_carry:])
        return [*carry, *self.pack.split_stacked([torch.stack(y) for y in zip(*ys, strict=True)])]

    def _outputs(self, run: NativeRun) -> list[Tensor]:
        [carry], packs = run.forward()
        return [*carry, *self.pack.split_stacked([x[0] for x in packs])]

    def run_saving(self, leaves: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        if not self.differentiable:
            return self.run(leaves), _Residual([], [], [], [], 1)
        params, carry, xs = self.split([x.contiguous() for x in leaves])
        if (loop := self.loop(True)) is not None:
            run = _native_run(self, loop, [(params, carry, xs)])
            return self._outputs(run), run
        rows = list(zip(*[x.unbind(0) for x in xs], strict=True))
        n_carry, keep = self.counts[1], self.memory == "save"
        stride = 1 if keep else max(1, math.isqrt(len(rows)))
        saved: list[Any] = []
        starts: list[list[Tensor]] = []
        ys = []
        forward = self.kernel.forward
        for t, row in enumerate(rows):
            if not keep and t % stride == 0:
                starts.append(carry)
            out, residual = forward([*params, *carry, *row])
            carry = list(out[:n_carry])
            ys.append(out[n_carry:])
            if keep:
                saved.append(residual)
        # The last carry may be one of the tensors saved for the backward; what is handed out is the caller's to change.
        outputs = [*(c.clone() for c in carry), *self.pack.split_stacked([torch.stack(y) for y in zip(*ys, strict=True)])]
        return outputs, _Residual(params, rows, saved, starts, stride)

    def pull_back(self, residual: Any, cotangents: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the inputs that need one (params, carry, xs), in order."""
        if isinstance(residual, NativeRun):
            cts = {i: cotangents[i].contiguous() for i in self.carry_needed}
            packs = self.pack.join_stacked(cotangents[self.counts[1] :], tracked_only=True)
            params, [carry], xs = residual.backward([cts], [packs])
            return [*(g[0] for g in params), *carry, *(g[0] for g in xs)]
        kernel = self.kernel
        n_params, n_carry, _, _ = self.counts
        carry_needs = self.needs[n_params : n_params + n_carry]
        ct_carry = [c.contiguous() for c, need in zip(cotangents[:n_carry], carry_needs, strict=True) if need]
        ct_packs = self.pack.join_stacked(cotangents[n_carry:], tracked_only=True)
        ct_rows: list[tuple] = list(zip(*[c.unbind(0) for c in ct_packs], strict=True)) if ct_packs else [()] * len(residual.rows)
        # A carry leaf that the step replaces by something constant needs a gradient as an input and takes no cotangent as an output.
        live = [out for need, out in zip(carry_needs, kernel.out_needs[:n_carry], strict=True) if need]
        n_diff_params = sum(self.needs[:n_params])
        n_diff_carry = len(live)
        total: list[Tensor] | None = None
        x_grads: list[Sequence[Tensor]] = []
        for t in reversed(range(len(residual.rows))):
            cts = [c for c, use in zip(ct_carry, live, strict=True) if use]
            grads = kernel.backward(residual.at(self, t), [*cts, *ct_rows[t]])
            if total is None:
                # Kernels may hand out one buffer for two results; sums are made in buffers of our own.
                total = [g.clone() for g in grads[:n_diff_params]]
            elif n_diff_params:
                torch._foreach_add_(total, list(grads[:n_diff_params]))  # pyright: ignore[reportPrivateImportUsage]
            ct_carry = [g.contiguous() for g in grads[n_diff_params : n_diff_params + n_diff_carry]]
            x_grads.append(grads[n_diff_params + n_diff_carry :])
        stacked = [torch.stack(g[::-1]) for g in zip(*x_grads, strict=True)]
        # A step that passes a carry leaf through hands its cotangent back as it came; autograd wants results of our own.
        return [*(total or []), *(g.clone() for g in ct_carry), *stacked]


def _native_run(plan: _Plan, loop: Loop, shards: list[tuple[list[Tensor], list[Tensor], list[Tensor]]]) -> NativeRun:
    return (NativeRun if loops_in_use() is None else CapturedRun)(plan, loop, shards)


class NativeRun:
    """One run of a native loop over shards; holds what its backward pass needs.

    Args:
        plan: the step.
        loop: its loop.
        shards: ``(params, carry, xs)`` of contiguous tensors.
    """

    def __init__(self, plan: _Plan, loop: Loop, shards: list[tuple[list[Tensor], list[Tensor], list[Tensor]]]) -> None:
        self.plan, self.loop = plan, loop
        self.params, self.xs = [params for params, _, _ in shards], [xs for _, _, xs in shards]
        self.length = shards[0][2][0].shape[0]
        whole = plan.memory == "save" or not plan.differentiable
        self.stride = self.length if whole else max(1, math.isqrt(self.length))
        self.starts = [[carry for _, carry, _ in shards]]
        self.done: Any = None

    def _forward(self, start: int, carries: list[list[Tensor]], ys: list[list[Tensor]] | None) -> tuple[list[list[Tensor]], Any]:
        part = slice(start, start + self.stride)
        shards = [(params, carry, [x[part] for x in xs]) for params, carry, xs in zip(self.params, carries, self.xs, strict=True)]
        return self.loop.forward(shards, ys and [[y[part] for y in row] for row in ys])

    def _blocks(self, like: Sequence[Tensor], *lead: int, zero: bool = False) -> tuple[list[Tensor], list[list[Tensor]]]:
        """``[S, *lead, ...]`` for every tensor of ``like``, and the parts of each shard."""
        blocks = [(x.new_zeros if zero else x.new_empty)((len(self.xs), *lead, *x.shape)) for x in like]
        return blocks, [[x[i] for x in blocks] for i in range(len(self.xs))]

    def forward(self) -> tuple[list[list[Tensor]], list[Tensor]]:
        """For each shard the last carry leaves; the packs of y of all shards, ``[S, T, ...]``."""
        packs, ys = self._blocks(self.plan.packs, self.length)
        carries = self.starts[0]
        for start in range(0, self.length, self.stride):
            if start:
                self.starts.append(carries)
            carries, done = self._forward(start, carries, ys)
            if self.stride == self.length and self.plan.differentiable:
                self.done = done
        return carries, packs

    def backward(self, carries: list[dict[int, Tensor]], packs: list[list[Tensor]]) -> tuple[list[Tensor], list[list[Tensor]], list[Tensor]]:
        """Go back through the loop.

        Args:
            carries: for each shard the contiguous cotangents of the carry leaves that need a gradient, by position.
            packs: for each shard the contiguous cotangents ``[T, ...]`` of its tracked packs of y.

        Returns:
            Gradients where they are needed: of the params ``[S, ...]``, for each shard of its carry leaves, of the xs ``[S, T, ...]``.
        """
        loop, needed, of_params, of_xs = self.loop, *self._layout()
        like, here = self._like(), self.plan.kernel.present
        given = lambda of: [x for x, there in zip(like[of], here[of], strict=True) if there]
        sums, total = self._blocks(given(of_params), zero=True)
        grads, x_grads = self._blocks(given(of_xs), self.length)
        for start in reversed(range(0, self.length, self.stride)):
            part = slice(start, start + self.stride)
            done = self.done or self._forward(start, self.starts[start // self.stride], None)[1]
            rows = loop.backward(
                done,
                [[carry[i] for i in loop.ct_carry] for carry in carries],
                [[pack[part] for pack in row] for row in packs],
                total,
                [[x[part] for x in row] for row in x_grads],
            )
            carries = [dict(zip(needed, row, strict=True)) for row in rows]
        return self._filled(sums, of_params), [list(carry.values()) for carry in carries], self._filled(grads, of_xs, self.length)

    def _like(self) -> list[Tensor]:
        return [x for x, need in zip(self.plan.examples, self.plan.needs, strict=True) if need]

    def _layout(self) -> tuple[list[int], slice, slice]:
        """Carry leaves that need a gradient; where the params and the xs are among all that need one."""
        n_params, n_carry, _, _ = self.plan.counts
        needed = [i for i, need in enumerate(self.plan.needs[n_params : n_params + n_carry]) if need]
        n_diff = sum(self.plan.needs[:n_params])
        return needed, slice(n_diff), slice(n_diff + len(needed), None)

    def _filled(self, values: Sequence[Tensor], of: slice, *lead: int) -> list[Tensor]:
        """Gradients with zeros for those that the backward pass does not give."""
        there = iter(values)
        flags = self.plan.kernel.present[of]
        return [next(there) if flag else x.new_zeros((len(self.xs), *lead, *x.shape)) for x, flag in zip(self._like()[of], flags, strict=True)]


class CapturedRun(NativeRun):
    """A run in a graph that is being captured."""

    def forward(self) -> tuple[list[list[Tensor]], list[Tensor]]:
        self.done = LoopForward(self.loop, list(zip(self.params, self.starts[0], self.xs, strict=True)))
        return self.done.carries, self.done.ys

    def backward(self, carries: list[dict[int, Tensor]], packs: list[list[Tensor]]) -> tuple[list[Tensor], list[list[Tensor]], list[Tensor]]:
        _, of_params, of_xs = self._layout()
        rows = [[*(carry[i] for i in self.loop.ct_carry), *row] for carry, row in zip(carries, packs, strict=True)]
        params, xs, grads = self.done.backward([[x.contiguous() for x in row] for row in rows])
        return self._filled(params, of_params), grads, self._filled(xs, of_xs, self.length)


class _Residual:
    """What the backward needs of the forward; opaque to transforms."""

    def __init__(self, params: list[Tensor], rows: list[tuple], saved: list[Any], starts: list[list[Tensor]], stride: int) -> None:
        self.params, self.rows, self.saved, self.starts, self.stride = params, rows, saved, starts, stride
        self._stretch: list[Any] = []
        self._stretch_start = -1

    def at(self, plan: _Plan, t: int) -> Any:
        """Saved values of step ``t``; steps are asked for in reverse."""
        if self.saved:
            return self.saved[t]
        start = t - t % self.stride
        if start != self._stretch_start:
            self._stretch = []
            carry, n_carry = self.starts[start // self.stride], plan.counts[1]
            for row in self.rows[start : start + self.stride]:
                out, residual = plan.kernel.forward([*self.params, *carry, *row])
                carry = list(out[:n_carry])
                self._stretch.append(residual)
            self._stretch_start = start
        value = self._stretch[t - start]
        if t == start:
            self._stretch, self._stretch_start = [], -1
        return value


def _scan(step: Callable, params: Any, carry: Any, xs: Any, memory: str, mode: str) -> tuple[Any, Any]:
    p, p_tree = tree.flatten(params)
    c, c_tree = tree.flatten(carry)
    x, x_tree = tree.flatten(xs)
    leaves = [*p, *c, *x]
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        for name, leaf in tree.items({"params": params, "carry": carry, "xs": xs}):
            if isinstance(leaf, Tensor):
                continue
            raise ValueError(f"scan takes tensors only, got {type(leaf).__name__} at {name}; make it a 0-d tensor, or close over it if it never changes")
    plan, y_tree = _plan(step, (p_tree, c_tree, x_tree), (len(p), len(c), len(x)), leaves, _needs(leaves), memory, mode)
    # When nothing is recorded, needs is all False and the loop is an ordinary function.
    if plan.differentiable and not compiler.only_gradients() or not plan.differentiable and any(compiler.is_transformed(leaf) for leaf in leaves):
        outputs = list(_Scan.apply(plan, *leaves)[:-1])
    else:
        outputs = _run(plan, leaves)
    n_carry = len(c)
    return tree.unflatten(c_tree, outputs[:n_carry]), tree.unflatten(y_tree, outputs[n_carry:])


def _needs(leaves: Sequence[Tensor]) -> tuple[bool, ...]:
    return tuple((leaf.is_floating_point() or leaf.is_complex()) and compiler.is_tracked(leaf) for leaf in leaves)


def _plan(step: Callable, trees: tuple, counts: tuple, leaves: Sequence[Tensor], needs: tuple[bool, ...], memory: str, mode: str) -> tuple[_Plan, Any]:
    """The plan for these shapes and needs, and the structure of y."""
    before_x = counts[0] + counts[1]
    shapes = tuple((leaf.shape if i < before_x else leaf.shape[1:], leaf.dtype, leaf.device) for i, leaf in enumerate(leaves))
    key = (step, *trees, shapes, needs, memory, mode)
    if key not in _plans:
        make = lambda: _make_plan(step, trees, counts, shapes, needs, memory, mode)
        _plans[key] = make() if loops_in_use() is None else compiler.in_clean_thread(make)
        if len(_plans) > _CACHE_LIMIT:
            _plans.popitem(last=False)
    return _plans[key]


def _run(plan: _Plan | _Shards, leaves: list[Tensor]) -> list[Tensor]:
    """Outputs where no transform but ``grad`` is active, or nothing is recorded."""
    if plan.differentiable:
        return _apply_light(plan, leaves)
    with compiler.below_transforms():
        return plan.run([compiler.plain(x) for x in leaves])


class _Shards:
    """A plan's native loop over several carries and xs, as a plan over all of them: leaves are params, carries, xs; outputs go shard by shard."""

    def __init__(self, plan: _Plan, loop: Loop, size: int) -> None:
        self.plan, self.native, self.size = plan, loop, size
        self.needs = self._repeat(plan.needs)
        self.call_needs = self._repeat(plan.call_needs)
        self.output_flags = plan.output_flags * size
        self.differentiable = plan.differentiable

    def _repeat(self, flags: Sequence[bool]) -> tuple[bool, ...]:
        params, carry, xs = self.plan.split(flags)
        return (*params, *carry * self.size, *xs * self.size)

    def _native(self, leaves: Sequence[Tensor]) -> NativeRun:
        n_params, n_carry, n_x, _ = self.plan.counts
        leaves = [x.contiguous() for x in leaves]
        params, rest = leaves[:n_params], leaves[n_params:]
        carries, xs = rest[: n_carry * self.size], rest[n_carry * self.size :]
        shards = [(params, carries[i * n_carry : (i + 1) * n_carry], xs[i * n_x : (i + 1) * n_x]) for i in range(self.size)]
        return _native_run(self.plan, self.native, shards)

    def _outputs(self, run: NativeRun) -> list[Tensor]:
        carries, packs = run.forward()
        return [y for i, carry in enumerate(carries) for y in (*carry, *self.plan.pack.split_stacked([x[i] for x in packs]))]

    def run(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        return self._outputs(self._native(leaves))

    def run_saving(self, leaves: Sequence[Tensor]) -> tuple[list[Tensor], NativeRun]:
        run = self._native(leaves)
        return self._outputs(run), run

    def pull_back(self, residual: NativeRun, cotangents: Sequence[Tensor]) -> list[Tensor]:
        plan, n_carry = self.plan, self.plan.counts[1]
        size = len(cotangents) // self.size
        parts = [cotangents[i * size : (i + 1) * size] for i in range(self.size)]
        carries = [{i: cts[i].contiguous() for i in plan.carry_needed} for cts in parts]
        packs = [plan.pack.join_stacked(cts[n_carry:], tracked_only=True) for cts in parts]
        params, carry, xs = residual.backward(carries, packs)
        return [*(g.sum(0) for g in params), *(g for row in carry for g in row), *(x[i] for i in range(self.size) for x in xs)]


class _Members:
    """A plan's native loop for each member of a leading dimension, as a plan over all of them: every leaf and output has members first.

    The loop is the one that runs a member alone, so that a member's result is that of the member alone, and what a member works on stays in the cache.
    """

    def __init__(self, plan: _Plan, dims: tuple[int | None, ...], size: int) -> None:
        self.plan, self.dims, self.size = plan, dims, size
        self.counts, self.needs, self.call_needs = plan.counts, plan.needs, plan.call_needs
        self.output_flags, self.differentiable = plan.output_flags, plan.differentiable

    def _native(self, leaves: Sequence[Tensor]) -> NativeRun:
        loop = self.plan.beside(self.differentiable)
        assert loop is not None
        columns = [[x] * self.size if d is None else x.unbind(0) for x, d in zip((x.contiguous() for x in leaves), self.dims, strict=True)]
        return _native_run(self.plan, loop, [self.plan.split(row) for row in zip(*columns, strict=True)])

    def _outputs(self, run: NativeRun) -> list[Tensor]:
        carries, packs = run.forward()
        return [*map(torch.stack, zip(*carries, strict=True)), *self.plan.pack.split_stacked(packs, lead=2)]

    def run(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        return self._outputs(self._native(leaves))

    def run_saving(self, leaves: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        run = self._native(leaves)
        return self._outputs(run), _MemberRun(self, run)

    def pull_back(self, residual: _MemberRun, cotangents: Sequence[Tensor]) -> list[Tensor]:
        plan = self.plan
        given = {i: cotangents[i].contiguous() for i in plan.carry_needed}
        carries = [{i: x[member] for i, x in given.items()} for member in range(self.size)]
        packs = plan.pack.join_stacked(cotangents[plan.counts[1] :], tracked_only=True, lead=2)
        params, carry, xs = residual.run.backward(carries, [[x[member] for x in packs] for member in range(self.size)])
        return [*params, *map(torch.stack, zip(*carry, strict=True)), *xs]


class _MemberRun:
    """What the backward of a run of members needs; opaque to transforms."""

    def __init__(self, plan: _Members, run: NativeRun) -> None:
        self.plan, self.run = plan, run


def _make_plan(step: Callable, trees: tuple, counts: tuple, shapes: tuple, needs: tuple, memory: str, mode: str) -> tuple[_Plan, Any]:
    code = getattr(step, "__code__", None)
    _per_code[code] = _per_code.get(code, 0) + 1
    if code is not None and _per_code[code] == 65:
        warnings.warn(
            f"scan has prepared {step.__name__!r} 65 times; define the step once and pass the same function object again", RuntimeWarning, stacklevel=4
        )
    p_tree, c_tree, x_tree = trees
    n_p, n_c, _ = counts
    y_tree: list[Any] = []
    templates = [tree.unflatten(t, range(n)) for t, n in zip(trees, counts, strict=True)]

    def flat(inputs: list[Tensor]) -> list[Tensor]:
        parts = inputs[:n_p], inputs[n_p : n_p + n_c], inputs[n_p + n_c :]
        carry, y = step(*[tree.map(lambda i, part=part: part[i], template) for template, part in zip(templates, parts, strict=True)])
        new, new_tree = tree.flatten(carry)
        if not compiler.is_tracing() and (
            new_tree != c_tree
            or any(not isinstance(a, Tensor) or a.shape != b.shape or a.dtype != b.dtype for a, b in zip(new, inputs[n_p : n_p + n_c], strict=True))
        ):
            tree.check_same(carry, tree.unflatten(c_tree, inputs[n_p : n_p + n_c]), "the carry that step returns")
        y_leaves, y_tree[:] = (lambda pair: (pair[0], [pair[1]]))(tree.flatten(y))
        return [*new, *y_leaves]

    flat.__name__ = getattr(step, "__name__", "step")
    if compiler.closes_over_history(step):
        raise ValueError(f"scan's step {flat.__name__!r} closes over a tensor that is being differentiated or mapped; pass it in through params")
    with compiler.below_transforms():
        examples = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in shapes]
        n_out = len(compiler.output_needs(flat, examples, [False] * len(examples)))
        parts = _flat_parts(step, templates, n_p, n_c) if hasattr(step, "part") else None
        plan = _Plan(flat, (*counts, n_out - n_c), examples, needs, memory, mode, parts)
    return plan, y_tree[0]


def _flat_parts(step: Any, templates: Sequence[Any], n_p: int, n_c: int) -> FlatParts:
    """A step in parts (:func:`frl.parts.in_parts`) over flat lists; ``templates`` are params, carry and x with positions for leaves."""
    p_template, c_template, x_template = templates
    pieces, others = [tree.leaves(piece) for piece in x_template["parts"]], tree.leaves(x_template["rest"])
    results_tree: list[Any] = []

    def shared(inputs: list[Tensor]) -> tuple[Any, Any]:
        return tree.map(lambda i: inputs[i], p_template), tree.map(lambda i: inputs[n_p + i], c_template)

    def part(inputs: list[Tensor]) -> list[Tensor]:
        piece = tree.unflatten(tree.flatten(x_template["parts"][0])[1], inputs[n_p + n_c :])
        leaves, results_tree[:] = (lambda pair: (pair[0], [pair[1]]))(tree.flatten(step.part(*shared(inputs), piece)))
        return leaves

    def rest(inputs: list[Tensor]) -> list[Tensor]:
        given, results = inputs[n_p + n_c : n_p + n_c + len(others)], inputs[n_p + n_c + len(others) :]
        size = len(results) // len(pieces)
        all_results = [tree.unflatten(results_tree[0], results[k * size : (k + 1) * size]) for k in range(len(pieces))]
        carry, y = step.rest(*shared(inputs), tree.unflatten(tree.flatten(x_template["rest"])[1], given), all_results)
        return [*tree.leaves(carry), *tree.leaves(y)]

    part.__name__ = rest.__name__ = getattr(step, "__name__", "step")
    at = lambda positions: [n_p + n_c + i for i in positions]
    return FlatParts(part, rest, n_p + n_c, [at(piece) for piece in pieces], at(others))


# -- differentiation ---------------------------------------------------------------------------------------------------------------------------------


class _Scan(Function):
    """The loop as one differentiable operation: outputs are the last carry, the stacked y, and the residual (opaque)."""

    @staticmethod
    def forward(plan: _Plan, *leaves: Tensor) -> tuple:
        outputs, residual = plan.run_saving(leaves)
        return (*outputs, residual)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        plan, *leaves = inputs
        ctx.plan, ctx.residual = plan, output[-1]
        ctx.save_for_backward(*leaves)
        ctx.mark_non_differentiable(*(y for y, need in zip(output[:-1], plan.output_flags, strict=True) if not need))

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple:
        plan, leaves = ctx.plan, ctx.saved_tensors
        given = [c for c, need in zip(cotangents[:-1], plan.output_flags, strict=True) if need]
        grads = iter(_PullBack.apply(plan, ctx.residual, *leaves, *given))
        # The plan's needs can exceed the call's: a carry leaf that only later steps make differentiable gets a gradient nobody asked for.
        result = [next(grads) if need else None for need in plan.needs]
        return (None, *(g if asked else None for g, asked in zip(result, plan.call_needs, strict=True)))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError("frl.scan has no forward-mode derivative when compiled; pass mode='eager' for torch.func.jvp")

    @staticmethod
    def vmap(info: Any, in_dims: tuple, plan: _Plan, *leaves: Tensor) -> tuple:
        if isinstance(plan, _Members):
            raise RuntimeError("members of members are mapped by the step; this is a fault in frl")
        if compiler.only_gradients() and plan.beside(plan.differentiable) is not None:
            moved, dims = _batch_inputs(plan, leaves, in_dims[1:], info.batch_size, x_at=0)
            outputs = _Scan.apply(_Members(plan, dims, info.batch_size), *moved)
            return outputs, (*([0] * (len(outputs) - 1)), None)
        moved, dims = _batch_inputs(plan, leaves, in_dims[1:], info.batch_size)
        outputs = _Scan.apply(plan.vmapped(dims, info.batch_size), *moved)
        n_carry = plan.counts[1]
        return outputs, (*([0] * n_carry), *([1] * (len(outputs) - 1 - n_carry)), None)


class _Constants:
    """Tensors that travel through a custom function without its machinery seeing them: they carry no history."""

    def __init__(self, values: list[Any], residual: Any = None) -> None:
        self.values = values
        self.residual = residual
        self.versions = [None if x is None or x.is_inference() else x._version for x in values]

    def check(self) -> None:
        """Saved tensors of autograd are checked by it; these are checked here."""
        if any(v is not None and x._version != v for x, v in zip(self.values, self.versions, strict=True)):
            raise RuntimeError("one of the tensors that frl.scan needs for its gradient has been modified by an inplace operation")


def _apply_light(plan: _Plan | _Shards, leaves: list[Tensor]) -> list[Tensor]:
    """The differentiable loop when only ``grad`` and ``vjp`` levels are active: what carries no history goes in and comes out beside the transforms."""
    asked = plan.call_needs
    constants = _Constants([None if need else compiler.plain(x) for x, need in zip(leaves, asked, strict=True)])
    *tracked, rest = _LightScan.apply(plan, constants, *(x for x, need in zip(leaves, asked, strict=True) if need))
    tracked = iter(tracked)
    return [next(tracked) if x is None else x for x in rest.values]


_taken_once: ContextVar[bool] = ContextVar("taken_once", default=False)


@contextmanager
def gradient_taken_once() -> Iterator[None]:
    """For a caller who takes one gradient through the loops inside and gives nobody the means to differentiate it at the same level: spares the guard."""
    token = _taken_once.set(True)
    try:
        yield
    finally:
        _taken_once.reset(token)


class _LightScan(Function):
    """As ``_Scan`` with constant inputs and outputs in opaque boxes. The last output's box also holds the residual."""

    @staticmethod
    def forward(plan: _Plan | _Shards, constants: _Constants, *tracked: Tensor) -> tuple:
        outputs, residual = plan.run_saving(_merge(constants, tracked))
        flags = plan.output_flags
        box = _Constants([None if flag else x for x, flag in zip(outputs, flags, strict=True)], residual)
        return (*(x for x, flag in zip(outputs, flags, strict=True) if flag), box)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.plan, ctx.constants, *tracked = inputs
        ctx.residual = output[-1].residual
        ctx.guarded = not _taken_once.get()
        ctx.save_for_backward(*tracked)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple:
        plan, tracked = ctx.plan, ctx.saved_tensors
        ctx.constants.check()
        given = cotangents[:-1]
        if any(compiler.has_lower_history(x) for x in (*tracked, *given)):
            if isinstance(plan, _Shards):
                raise RuntimeError("a loop over shards was entered with one gradient and is differentiated by two; this is a fault in frl")
            grads = _PullBack.apply(plan, ctx.residual, *_merge(ctx.constants, tracked), *given)
        else:
            with compiler.below_transforms():
                plain = [compiler.plain(x.detach()) for x in given]
                grads = plan.pull_back(ctx.residual, _spread(plan, ctx.constants.values, plain))
            if ctx.guarded:
                # Nothing outside can differentiate this backward; should something inside the same level try, it gets an error and not a zero.
                grads = _Once.apply(tracked[0], *grads)
        wanted = [asked for need, asked in zip(plan.needs, plan.call_needs, strict=True) if need]
        return (None, None, *(g for g, asked in zip(grads, wanted, strict=True) if asked))

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> Any:
        raise RuntimeError("frl.scan was entered without vmap and is mapped inside; this is a fault in frl")


class _Once(Function):
    """Identity on gradients that refuses to be differentiated."""

    @staticmethod
    def forward(anchor: Tensor, *grads: Tensor) -> tuple:
        return tuple(g.view_as(g) for g in grads)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        raise RuntimeError(
            "frl.scan cannot be differentiated twice at one transform level (torch.autograd.grad inside torch.func.grad); nest torch.func.grad instead"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple, anchor: Tensor, *grads: Tensor) -> Any:
        return grads, in_dims[1:]


def _merge(constants: _Constants, tracked: Sequence[Tensor]) -> list[Tensor]:
    values = iter(tracked)
    return [next(values) if x is None else x for x in constants.values]


class _PullBack(Function):
    """The backward loop as an operation of its own, so that differentiating it again is right (by an eager loop) instead of silently zero."""

    @staticmethod
    def forward(plan: _Plan, residual: _Residual, *tensors: Tensor) -> tuple:
        n_in = sum(plan.counts[:3])
        return tuple(plan.pull_back(residual, _spread(plan, tensors[:n_in], tensors[n_in:])))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        plan, _, *tensors = inputs
        ctx.plan = plan
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple:
        plan, tensors = ctx.plan, ctx.saved_tensors
        differentiable = [i for i, x in enumerate(tensors) if x.is_floating_point()]

        def again(*values: Tensor) -> tuple:
            full = list(tensors)
            for i, value in zip(differentiable, values, strict=True):
                full[i] = value
            return _eager_pull_back(plan, full)

        _, pull = torch.func.vjp(again, *(tensors[i] for i in differentiable))[:2]
        grads: list[Tensor | None] = [None] * len(tensors)
        for i, g in zip(differentiable, pull(tuple(cotangents)), strict=True):
            grads[i] = g
        return (None, None, *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError("frl.scan has no forward-over-reverse derivative when compiled; pass mode='eager'")

    @staticmethod
    def vmap(info: Any, in_dims: tuple, plan: _Plan, residual: _Residual, *tensors: Tensor) -> tuple:
        n_in = sum(plan.counts[:3])
        dims = in_dims[2:]
        n_params, n_carry, _, _ = plan.counts
        if all(d is None for d in dims[:n_in]):
            # Only the cotangents are mapped (a Jacobian by rows): the forward ran once, so pull back row by row.
            rows = []
            for b in range(info.batch_size):
                given = [x if d is None else x.select(d, b) for x, d in zip(tensors[n_in:], dims[n_in:], strict=True)]
                rows.append(_PullBack.apply(plan, residual, *tensors[:n_in], *given))
            return tuple(torch.stack(column) for column in zip(*rows, strict=True)), (0,) * len(rows[0])
        members = residual.plan if isinstance(residual, _MemberRun) and residual.plan is not plan else None
        if isinstance(plan, _Members):
            raise RuntimeError("members of members are mapped by the step; this is a fault in frl")
        x_at = 1 if members is None else 0
        moved, in_flat = _batch_inputs(plan, tensors[:n_in], dims[:n_in], info.batch_size, x_at)
        mapped = plan.vmapped(in_flat, info.batch_size) if members is None else members
        given = []
        carry_needs = plan.needs[n_params : n_params + n_carry]
        positions = [0] * sum(carry_needs) + [x_at] * (len(tensors) - n_in - sum(carry_needs))
        for x, d, at in zip(tensors[n_in:], dims[n_in:], positions, strict=True):
            given.append(x.unsqueeze(at).expand(*x.shape[:at], info.batch_size, *x.shape[at:]) if d is None else x.movedim(d, at))
        grads = _PullBack.apply(mapped, residual, *moved, *given)
        out: list[Tensor] = []
        out_dims: list[int | None] = []
        for i, g in zip([i for i, need in enumerate(plan.needs) if need], grads, strict=True):
            # The mapped step sums the gradient of an unmapped input over the members; only mapped inputs have one per member.
            out.append(g)
            out_dims.append(x_at if i >= n_params + n_carry else 0)
        return tuple(out), tuple(out_dims)


def _batch_inputs(plan: _Plan, leaves: Sequence[Tensor], dims: Sequence[int | None], size: int, x_at: int = 1) -> tuple[list[Tensor], tuple[int | None, ...]]:
    """Move mapped dimensions to where the mapped step expects them, and map whatever must be: the carry always, and anything that needs a gradient."""
    n_params, n_carry, _, _ = plan.counts
    moved: list[Tensor] = []
    flat_dims: list[int | None] = []
    for i, (x, d) in enumerate(zip(leaves, dims, strict=True)):
        at = x_at if i >= n_params + n_carry else 0
        if d is not None:
            moved.append(x.movedim(d, at))
            flat_dims.append(0)
        elif plan.needs[i] or n_params <= i < n_params + n_carry:
            moved.append(x.unsqueeze(at).expand(*x.shape[:at], size, *x.shape[at:]))
            flat_dims.append(0)
        else:
            moved.append(x)
            flat_dims.append(None)
    return moved, tuple(flat_dims)


def _spread(plan: _Plan | _Shards | _Members, leaves: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """Cotangents at their places among all outputs; the places of non-differentiable outputs are never read."""
    values = iter(given)
    return [next(values) if need else leaves[0] for need in plan.output_flags]


def _eager_pull_back(plan: _Plan | _Members, tensors: Sequence[Tensor]) -> tuple:
    """The same function as ``_PullBack`` computed by differentiating an eager loop."""
    if isinstance(plan, _Members):
        dims = (*plan.dims, *([0] * (len(tensors) - len(plan.dims))))

        def one(*values: Any) -> tuple:
            return _eager_pull_back(plan.plan, values)

        return torch.func.vmap(one, in_dims=dims)(*tensors)
    n_in = sum(plan.counts[:3])
    n_params, n_carry, _, _ = plan.counts
    leaves, given = list(tensors[:n_in]), tensors[n_in:]
    wanted = [i for i, need in enumerate(plan.needs) if need]
    flags = plan.output_flags

    def forward(*values: Tensor) -> tuple:
        full = list(leaves)
        for i, value in zip(wanted, values, strict=True):
            full[i] = value
        params, carry, xs = plan.split(full)
        ys = []
        for row in zip(*[x.unbind(0) for x in xs], strict=True):
            out = plan.flat([*params, *carry, *row])
            carry = list(out[:n_carry])
            ys.append(out[n_carry:])
        outputs = [*carry, *(torch.stack(y) for y in zip(*ys, strict=True))]
        return tuple(y for y, need in zip(outputs, flags, strict=True) if need)

    _, pull = torch.func.vjp(forward, *(leaves[i] for i in wanted))[:2]
    return pull(tuple(given))
