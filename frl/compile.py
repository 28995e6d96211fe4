"""The one seam for compilation: everything else is plain functions that also run eagerly.

Two things are offered. ``jit(fn)`` compiles a pure function of pytrees for use outside differentiation. ``Kernel`` compiles one differentiable step as a
pair of raw callables, forward (outputs and saved values) and backward (saved values and cotangents), so that a time loop can call them without
guards, dispatch or an autograd engine per step; ``frl.scan`` is built on it.

Modes: ``"inductor"`` (the compiler behind ``torch.compile``: AOTAutograd, then Inductor), ``"aot_eager"`` (the same capture and partition, run without
Inductor: fast to compile, for tests), ``"dynamo"`` (``torch.compile`` itself, differentiated by the autograd engine: slower, through public
interfaces only) and ``"eager"`` (no capture: the oracle). Where the C++ tool chain is missing or a torch release has moved the interfaces, one warning
is given and the function runs eagerly.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import CellType
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import Function

from frl import tree
from frl.native import library
from frl.native.loop import Loop, dry_run
from frl.native.program import Program, Unsupported, compile_kernels, deferring_kernels, trace
from frl.one_operation import as_one_operation, for_shapes, in_use, only_shapes, with_loops

MODES = ("inductor", "aot_eager", "dynamo", "eager")

_graphs = 0
_seconds = 0.0
_warned = False
_broken = False
_proven = False  # the C++ compiler has made a library
_careful = False  # probe the compiler's vector instruction sets before use
_APART = 1 << 18  # elements from which a loop goes over one tensor's memory, and not over several tensors' side by side
_ONE_THREAD = 8192  # elements of the largest tensor of a small graph


def graph_count() -> int:
    """Number of graphs compiled so far in this process; constant after warm-up."""
    return _graphs


def compile_seconds() -> float:
    """Wall-clock seconds spent compiling so far in this process, or waiting for it."""
    return _seconds + library.waited_seconds()


def check_mode(mode: str) -> str:
    """``mode`` itself, or ``ValueError`` that lists the known ones."""
    if mode not in MODES:
        raise ValueError(f"unknown compile mode {mode!r} (known: {', '.join(MODES)})")
    return mode


def allow_in_graph(fn: Callable) -> Callable:
    """Mark ``fn`` so that ``torch.compile`` records a call of it as one node instead of tracing into it."""
    return torch.compiler.allow_in_graph(fn)  # pyright: ignore[reportReturnType]


def is_tracing() -> bool:
    """Whether ``torch.compile`` is tracing the caller."""
    return torch.compiler.is_compiling()


def is_transformed(x: Tensor) -> bool:
    """Whether ``x`` carries history of a ``torch.func`` transform or of autograd, so that a compiled call would lose it.

    A wrapper of ``grad`` or ``vjp`` that is not tracked (a constant touched inside the transform) carries none; :func:`plain` takes it off.
    """
    if x.requires_grad:
        return True
    if not functorch.is_functorch_wrapped_tensor(x):
        return False
    if any(level.key() == functorch.TransformType.Jvp for level in functorch.get_interpreter_stack() or ()):
        return True
    while functorch.is_gradtrackingtensor(x):
        x = functorch.get_unwrapped(x)
        if x.requires_grad:
            return True
    return functorch.is_functorch_wrapped_tensor(x)


def is_tracked(x: Tensor) -> bool:
    """Whether a gradient may be asked for ``x``: by autograd, or by a ``grad`` or ``vjp`` level below or above any ``vmap``."""
    while functorch.is_functorch_wrapped_tensor(x):
        if any(level.key() == functorch.TransformType.Jvp for level in functorch.get_interpreter_stack() or ()):
            return True
        if functorch.is_gradtrackingtensor(x) and x.requires_grad:
            return True
        x = functorch.get_unwrapped(x)
    return x.requires_grad and torch.is_grad_enabled()


def gradient_level(xs: Sequence[Tensor]) -> int:
    """Level of the innermost ``grad`` or ``vjp`` that any of ``xs`` is differentiated by; 0 for autograd's own, or none."""
    level = 0
    for x in xs:
        while functorch.is_functorch_wrapped_tensor(x):
            if functorch.is_gradtrackingtensor(x) and x.requires_grad:
                level = max(level, functorch.maybe_get_level(x))
                break
            x = functorch.get_unwrapped(x)
    return level


def cut(x: Tensor) -> Tensor:
    """``x`` as a constant of the innermost active gradient and as it was for those outside: ``detach`` in an update that is itself differentiated."""
    grads = [] if is_tracing() else [level.level() for level in functorch.get_interpreter_stack() or () if level.key() == functorch.TransformType.Grad]
    return _cut(x, max(grads)) if grads else x.detach()


def _cut(x: Tensor, level: int) -> Tensor:
    if not functorch.is_functorch_wrapped_tensor(x) or functorch.maybe_get_level(x) < level:
        return x
    inner = functorch.get_unwrapped(x)
    if functorch.is_gradtrackingtensor(x):
        return inner
    return functorch._add_batch_dim(_cut(inner, level), functorch.maybe_get_bdim(x), functorch.maybe_get_level(x))


def closes_over_history(fn: Callable, depth: int = 4) -> bool:
    """Whether ``fn`` closes over a tensor that carries history: a compiled call would lose it without a word."""
    empty = CellType()
    held: list[Any] = [cell.cell_contents for cell in getattr(fn, "__closure__", None) or () if cell != empty]
    held += [*(getattr(fn, "__defaults__", None) or ()), *(getattr(fn, "__kwdefaults__", None) or {}).values()]
    held += [getattr(fn, "func", None), *getattr(fn, "args", ()), *(getattr(fn, "keywords", None) or {}).values()]
    for leaf in tree.leaves(held):
        if isinstance(leaf, Tensor) and is_transformed(leaf):
            return True
        if depth and callable(leaf) and not isinstance(leaf, type) and closes_over_history(leaf, depth - 1):
            return True
    return False


def plain(x: Tensor) -> Tensor:
    """The tensor below wrappers that carry no history (see :func:`is_transformed`)."""
    while functorch.is_gradtrackingtensor(x):
        x = functorch.get_unwrapped(x)
    return x


def outside(fn: Callable, *args: Any) -> Any:
    """``fn(*args)``, below the transform levels when no argument carries history.

    Constants of a differentiated function then cost what they cost outside it.
    """
    if functorch.peek_interpreter_stack() is None:
        return fn(*args)
    leaves, structure = tree.flatten(args)
    if any(isinstance(x, Tensor) and is_transformed(x) for x in leaves):
        return fn(*args)
    with below_transforms():
        return fn(*tree.unflatten(structure, [plain(x) if isinstance(x, Tensor) else x for x in leaves]))


def map_outside(fn: Callable[[Tensor], Tensor], values: Any) -> Any:
    """``tree.map(fn, values)`` that treats the leaves without history as :func:`outside` does."""
    if functorch.peek_interpreter_stack() is None:
        return tree.map(fn, values)
    leaves, structure = tree.flatten(values)
    constant = [not is_transformed(x) for x in leaves]
    with below_transforms():
        leaves = [fn(plain(x)) if flag else x for x, flag in zip(leaves, constant, strict=True)]
    return tree.unflatten(structure, [x if flag else fn(x) for x, flag in zip(leaves, constant, strict=True)])


def only_gradients() -> bool:
    """Whether every active ``torch.func`` transform is ``grad`` or ``vjp`` (or there is none): no tensor is mapped and none has a tangent."""
    return all(level.key() == functorch.TransformType.Grad for level in functorch.get_interpreter_stack() or ())


def only_one_gradient(leaves: Sequence[Tensor]) -> bool:
    """Whether at most one ``grad`` or ``vjp`` level is active and autograd records none of ``leaves``: nobody can differentiate a backward pass."""
    levels = functorch.get_interpreter_stack() or ()
    return len(levels) <= 1 and only_gradients() and not any(plain(x).requires_grad for x in leaves)


def has_lower_history(x: Tensor) -> bool:
    """Whether ``x``, seen from inside a backward pass, carries history that belongs to an outer transform or to an engine that records this backward."""
    if functorch.is_gradtrackingtensor(x):
        x = functorch.get_unwrapped(x)  # the level whose backward this is
        return is_transformed(x)
    if functorch.is_functorch_wrapped_tensor(x):
        return True
    return x.requires_grad and torch.is_grad_enabled()


@contextlib.contextmanager
def below_transforms() -> Iterator[None]:
    """Run plain tensors through compiled code as if no ``torch.func`` transform were active (they carry no history, so nothing is lost)."""
    if functorch.peek_interpreter_stack() is None:
        yield
        return
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        yield


def _signature(leaves: Sequence[Any]) -> tuple:
    return tuple((x.shape, x.dtype, x.device) if isinstance(x, Tensor) else (type(x), x) for x in leaves)


_one_at_a_time = threading.Lock()
_turn = threading.local()


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """This thread's turn to compile, and that of the threads it starts for it: Inductor keeps some of its state, and we some of its functions, for all."""
    if getattr(_turn, "here", False):
        yield
        return
    with _one_at_a_time:
        _turn.here = True
        try:
            yield
        finally:
            _turn.here = False


def in_clean_thread(fn: Callable[[], Any]) -> Any:
    """Run ``fn`` in a thread of its own: capture must not see the caller's transform levels, grad mode or autocast."""
    box: list[Any] = []
    threads, here = torch.get_num_threads(), getattr(_turn, "here", False)

    def run() -> None:
        _turn.here = here
        try:
            # A new thread starts with its own OpenMP team size; kernels bake it in.
            torch.set_num_threads(threads)
            box.append((True, fn()))
        except BaseException as error:
            box.append((False, error))

    thread = threading.Thread(target=run, name="frl-compile")
    thread.start()
    thread.join()
    ok, value = box[0]
    if ok:
        return value
    raise value


def _no_tool_chain(error: BaseException | None) -> bool:
    """Whether the compiler or its interfaces are missing, which fails every kernel, rather than this one function."""
    from torch._inductor import exc

    while error is not None:
        if isinstance(error, (exc.InvalidCxxCompiler, exc.CppCompileError, ImportError, AttributeError, OSError)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _fall_back(error: BaseException, what: str) -> None:
    global _warned, _broken
    missing = _no_tool_chain(error)
    _broken = _broken or missing
    if not (missing and _warned):
        _warned = _warned or missing
        text = str(error).strip().splitlines()
        why = (
            "A C++ compiler (g++ or clang++) is needed for speed; results are the same."
            if missing
            else "It cannot be captured as a graph; results are the same."
        )
        warnings.warn(
            f"frl could not compile {what} and runs it eagerly from now on ({type(error).__name__}: {text[0][:200] if text else ''}). {why}",
            RuntimeWarning,
            stacklevel=3,
        )


def _fresh(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous outputs that share no storage with an input or with each other: raw kernels know nothing of aliasing."""
    # Under functionalisation a view has a storage of its own and detach() is no view: both are asked.
    seen = {x.untyped_storage()._cdata for x in inputs}
    result = []
    for y in outputs:
        z = y.contiguous()
        if z._is_view() or z.untyped_storage()._cdata in seen:
            z = z.clone(memory_format=torch.contiguous_format)
        seen.add(z.untyped_storage()._cdata)
        result.append(z)
    return result


def _attempt(make: Callable[[], Any], what: str, quiet: bool = False) -> Any:
    """``make()`` in a clean thread, or ``None`` after one warning when it cannot be compiled; ``quiet`` without one unless the compiler is missing."""
    global _careful
    try:
        with _compiling(), _Timer():
            return in_clean_thread(lambda: _believing_processor(make))
    except Exception as error:
        if not _careful:
            _careful = True
            return _attempt(make, what, quiet)
        if not quiet or _no_tool_chain(error):
            _fall_back(error, what)
        return None


def _believing_processor(make: Callable[[], Any]) -> Any:
    """``make()`` without Inductor's test programs for every vector instruction set that it considers, seven seconds in all."""
    from torch._inductor import config

    if _careful or config.cpp.vec_isa_ok is not None:
        return make()
    with config.patch({"cpp.vec_isa_ok": True}):
        return make()


class _Timer:
    def __enter__(self) -> None:
        import time

        self.start = time.perf_counter() - library.waited_seconds()

    def __exit__(self, *_: object) -> None:
        import time

        global _seconds, _graphs
        _seconds += time.perf_counter() - library.waited_seconds() - self.start
        _graphs += 1


def _generate(
    graph: Any, examples: Sequence[Tensor], *, backward: bool = False, inference: bool = False, threads: int | None = None
) -> Callable[[list], Sequence]:
    """The function that Inductor writes for a graph, its CPU kernels still being source."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    outputs = next(iter(reversed(graph.graph.nodes)))
    outputs.meta["user_visible_output_idxs"] = list(range(len(outputs.args[0])))
    options: dict[str, Any] = {"size_asserts": False, "alignment_asserts": False}
    if threads is not None:
        options["cpp.threads"] = threads
    if _largest(graph) > _APART:
        options["cpp.max_horizontal_fusion_size"] = 1
    with config.patch(options), deferring_kernels(), _one_handler(), _apart(), _wide_tiles(), torch.no_grad():
        code = compile_fx_inner(graph, examples, is_backward=backward, is_inference=inference)
    return getattr(code, "current_callable", None) or code


def _one_if_small(graph: Any) -> int | None:
    """1 for a graph without a tensor that is worth two threads: they would meet after every operation."""
    return 1 if _largest(graph) <= _ONE_THREAD else None


def _largest(graph: Any) -> int:
    """Elements of the largest tensor of a graph; the memory of loops, which are bytes, is nothing that its kernels go over."""
    values = [value for node in graph.graph.nodes if isinstance(value := node.meta.get("val"), Tensor)]
    return max((value.numel() for value in values if value.dtype != torch.uint8), default=0)


def _one_handler() -> Any:
    """A context in which Inductor fills its table of dtype rules once, and not again for every operation that it writes (a tenth of its time)."""
    from unittest import mock

    try:
        from torch._inductor.dtype_propagation import DtypePropagationOpsHandler as Handler

        only = Handler()
    except (ImportError, AttributeError, TypeError):
        return contextlib.nullcontext()
    return mock.patch.object(Handler, "__init__", return_value=None) if Handler() is only else contextlib.nullcontext()


def _apart() -> Any:
    """A context in which Inductor does not put products and biases on a CPU together again."""
    from unittest import mock

    try:
        from torch._inductor.fx_passes import post_grad

        apart = post_grad.should_prefer_unfused_addmm
    except (ImportError, AttributeError):
        return contextlib.nullcontext()
    on_cpu = lambda match: match.kwargs["inp"].meta["val"].device.type == "cpu"
    return mock.patch.object(post_grad, "should_prefer_unfused_addmm", lambda match: on_cpu(match) or apart(match))


def _wide_tiles() -> Any:
    """A context in which Inductor tiles no dimension that is shorter than a vector beside one that is not: such tiles are worked through number by number."""
    from unittest import mock

    try:
        from torch._inductor.codegen.cpp import TilingSelect

        select = TilingSelect._select_tiling_indices
    except (ImportError, AttributeError):
        return contextlib.nullcontext()

    def wide(self: Any, fns: Any, sizes: Any, factor: int) -> list[int]:
        found = select(self, fns, sizes, factor)
        group, reduced = max(sizes, key=lambda pair: len(pair[1]))
        ranges = (*group, *reduced)
        long = [i for i in found if i < len(ranges) and ranges[i] >= factor]
        return long if len(long) == 1 else found

    return mock.patch.object(TilingSelect, "_select_tiling_indices", wide)


def _finished(call: Callable[[list], Sequence]) -> Callable[[list], Sequence]:
    """The function with its kernels compiled."""
    if hasattr(call, "__globals__"):
        compile_kernels(call)
    return call


def _boxed(graph: Any) -> Callable[[list], Sequence]:
    def call(args: list) -> Sequence:
        return graph(*args)

    return call


def _fake(tensors: Sequence[Tensor], device: str | None = None) -> list[Tensor]:
    """Shapes without data. A tensor that the function closes over is no argument: it becomes a constant of the graph."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    if device is not None:
        with mode:
            return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device) for x in tensors]
    return [mode.from_tensor(x.detach()) for x in tensors]


def _decompositions() -> dict:
    from torch._inductor.decomposition import select_decomp_table

    return {**select_decomp_table(), torch.ops.aten.tanh.default: _tanh, torch.ops.aten.mm.default: _thin_mm, torch.ops.aten.addmm.default: _split_addmm}


def _thin_mm(a: Tensor, b: Tensor) -> Tensor:
    """A product over at most four terms as sums that fuse with what is around them: the library call for it is slower than writing its result.

    A product with few columns is computed transposed, which the library does several times as fast.
    """
    if 1 < b.shape[1] < 16 <= a.shape[0] and a.shape[1] > 16:
        return torch.mm(b.t(), a.t()).t()
    if a.shape[1] > 4 or a.shape[1] == 0 or not a.is_floating_point() or b.stride(1) != 1:
        return NotImplemented
    out = a[:, 0:1] * b[0:1]
    for k in range(1, a.shape[1]):
        out = out + a[:, k : k + 1] * b[k : k + 1]
    return out


def _split_addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """The bias goes with what follows a product: the library would have it written first, read and added to."""
    if (beta, alpha) != (1, 1):
        return NotImplemented
    return bias + torch.mm(a, b)


def _tanh(x: Tensor) -> Tensor:
    """``tanh`` in float32 as a ratio of polynomials, within 5 ulp: a tenth of the time of the library call that Inductor would emit.

    Source: the coefficients that Eigen and XLA use. Other dtypes keep ``torch.tanh``.
    """
    if x.dtype != torch.float32:
        return NotImplemented
    y = x.clamp(-7.90531110763549805, 7.90531110763549805)
    z = y * y
    p = z * -2.76076847742355e-16 + 2.00018790482477e-13
    for c in (-8.60467152213735e-11, 5.12229709037114e-08, 1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03):
        p = p * z + c
    q = z * 1.19825839466702e-06 + 1.18534705686654e-04
    for c in (2.26843463243900e-03, 4.89352518554385e-03):
        q = q * z + c
    return torch.where(x.abs() < 0.0004, x, y * p / q)


class Kernel:
    """One function of a flat list of tensors, compiled for given shapes.

    Args:
        fn: list of tensors -> list of tensors, pure.
        examples: tensors with the shapes, dtypes and devices of the inputs.
        needs: for each input whether the backward is to return its gradient.
        mode: see the module.
        quiet: it is a native program, or else nobody calls it: no warning is due.

    Attributes:
        out_needs: for each output whether it depends differentiably on an input that needs a gradient; ``backward`` takes cotangents for these only.
        present: for each input that needs a gradient whether the captured backward gives one; it is zero otherwise.
    """

    def __init__(
        self, fn: Callable[[list[Tensor]], Sequence[Tensor]], examples: Sequence[Tensor], needs: Sequence[bool], mode: str, *, quiet: bool = False
    ) -> None:
        self.fn = fn
        self._quiet = quiet
        self.needs = tuple(needs)
        self.mode = check_mode(mode)
        with below_transforms():
            self.examples = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in examples]
        self.out_needs = output_needs(fn, self.examples, self.needs)
        self._forward: Callable[[list], Sequence] | None = None
        self._backward: Any = None
        self._infer: Callable[[list], Sequence] | None = None
        self._beside: Callable[[Sequence[list[Tensor]]], Sequence[Tensor]] | None = None
        self._dynamo: Callable | None = None
        self._generated: dict[str, Any] = {}
        self._loops = False  # whether time loops are operations of its graph
        self._loop_calls: list[Any] = []  # which the graph knows by numbers
        self._backward_graph: Any = None
        self._n_out = len(self.out_needs)
        self._name = getattr(fn, "__name__", "a step")
        self.present: list[bool] = []

    # -- inference -----------------------------------------------------------------------------------------------------------------------------
    def infer(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        """Outputs alone, without a graph."""
        return self.prepare()(inputs)

    def prepare(self) -> Callable[[list], Sequence]:
        """What ``infer`` calls; the C++ compiler may still be at work on it."""
        if self._infer is None:
            self._infer = self._make_infer()
        return self._infer

    def _make_infer(self) -> Callable[[list], Sequence]:
        if self.mode == "eager" or _broken:
            return self._eager_infer
        if self.mode == "dynamo":
            return lambda inputs: _fresh(torch.no_grad()(self._torch_compile())(inputs), inputs)
        if (loop := self.loop((len(self.examples), 0, 0, self._n_out), differentiable=False, shards=1)) is not None:
            return loop.once
        if self._loops or _broken:  # loops have code of their own
            return self._eager_infer
        return self._eager_infer if self._quiet else _attempt(self._capture_infer, self._name) or self._eager_infer

    def _eager_infer(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        with torch.no_grad():
            return _fresh(self.fn(list(inputs)), inputs)

    def _capture_infer(self) -> Callable[[list], Sequence]:
        if "infer" in self._generated:
            return _finished(self._generated.pop("infer"))
        graph = self._graph(None)
        if self.mode == "aot_eager":
            return _boxed(graph)
        return _finished(_generate(graph, _fake(self.examples), inference=True))

    def _graph(self, threads: int | None) -> Any:
        """What the function does without a gradient; loops inside are operations whose code is for so many threads."""
        from torch._functorch.aot_autograd import aot_export_joint_simple

        def flat(*args: Tensor) -> list[Tensor]:
            return _fresh(self.fn(list(args)), args)

        with self._one_operation() as on, with_loops(threads, on) as loops:
            try:
                return aot_export_joint_simple(
                    flat, tuple(_fake(self.examples)), trace_joint=False, decompositions=_decompositions() if self.mode == "inductor" else None
                )
            finally:
                self._loops = self._loops or loops.met
                self._loop_calls += loops.calls

    def _one_operation(self) -> Any:
        """Random words and the like are one operation in graphs for Inductor on a CPU."""
        on = self.mode == "inductor" and all(x.device.type == "cpu" for x in self.examples)
        return as_one_operation(on)

    def infer_members(self, members: Sequence[list[Tensor]]) -> Sequence[Tensor]:
        """Outputs ``[P, ...]`` of P lists of contiguous inputs, side by side on one thread each where the function is a native loop."""
        return self._prepare_members()(members)

    def _prepare_members(self) -> Callable[[Sequence[list[Tensor]]], Sequence[Tensor]]:
        if self._beside is None:
            side_by_side, counts = torch.get_num_threads() > 1, (len(self.examples), 0, 0, self._n_out)
            loop = self.loop(counts, differentiable=False, shards=2) if side_by_side else getattr(self.prepare(), "__self__", None)
            self._beside = loop.members if isinstance(loop, Loop) else self._one_by_one
        return self._beside

    def is_native(self, members: bool) -> bool:
        """Whether ``infer``, or ``infer_members``, calls a native program."""
        call = self._prepare_members() if members else self.prepare()
        return isinstance(getattr(call, "__self__", None), Loop)

    def _one_by_one(self, members: Sequence[list[Tensor]]) -> Sequence[Tensor]:
        return [torch.stack(column) for column in zip(*map(self.infer, members), strict=True)]

    # -- a native loop -------------------------------------------------------------------------------------------------------------------------
    def loop(self, counts: tuple[int, int, int, int], *, differentiable: bool, shards: int) -> Loop | None:
        """The function as a native loop over time, or ``None`` where that is not possible.

        Args:
            counts: numbers of params, carry, x and y among the inputs and outputs.
            differentiable: with a backward pass.
            shards: number of threads that will run loops side by side; each then uses one thread.
        """
        if self.mode != "inductor" or _broken or any(x.device.type != "cpu" for x in self.examples) or not library.has_products():
            return None
        if differentiable and not any(self.out_needs):
            return None
        threads = 1 if shards > 1 else None

        def make() -> Loop | None:
            global _proven
            if not _proven:  # a missing compiler shows here, where there is a way back; libraries are waited for when they are needed
                library.prove_compiler()
                _proven = True
            try:
                loop = build()
            except Unsupported:
                return None  # what was generated is kept for the calls from Python
            return loop

        def build() -> Loop:
            if not differentiable:
                return Loop(self.program(threads), counts)
            forward, backward = self._joint()
            number = threads or _one_if_small(forward)
            call = _generate(forward, _fake(self.examples), threads=number)
            self._generated = {"forward": call, "backward": backward} if number is None else {}
            program = trace(call, self.examples, number)
            loop = Loop(program, counts)
            saved = [torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device="meta") for x in program.outputs[self._n_out :]]
            given = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x, need in zip(program.outputs, self.out_needs, strict=False) if need]
            examples = _fake([*saved, *given], "cpu")
            program = trace(_generate(backward, examples, backward=True, threads=number), examples, number)
            loop.add_backward(program, self.needs, self.out_needs, self.present)
            return loop

        return _attempt(make, self._name, self._quiet)

    def program(self, threads: int | None) -> Program:
        """What the function does without a gradient, by native code for so many threads (torch's number by default).

        Raises:
            Unsupported: it does something that native code has no words for.
        """
        graph = self._graph(threads)
        threads = threads or _one_if_small(graph)
        call = _generate(graph, _fake(self.examples), inference=True, threads=threads)
        self._generated = {"infer": call} if threads is None else {}
        return trace(call, self.examples, threads)

    def _torch_compile(self) -> Callable:
        if self._dynamo is None:
            fn = self.fn

            def step(inputs: list[Tensor]) -> list[Tensor]:
                return [y.contiguous() for y in fn(inputs)]

            global _graphs
            _graphs += 1
            self._dynamo = torch.compile(step, fullgraph=True, dynamic=False)
        return self._dynamo

    # -- differentiable ------------------------------------------------------------------------------------------------------------------------
    def forward(self, inputs: list[Tensor]) -> tuple[Sequence[Tensor], Any]:
        """``(outputs, saved)``; ``saved`` may be used by ``backward`` any number of times."""
        if not any(self.out_needs):
            return self.infer(inputs), ()
        if self._forward is None:
            self._make_differentiable()
        if self._backward_graph is None:
            return self._engine_forward(inputs)
        assert self._forward is not None
        values = self._forward(inputs)
        return values[: self._n_out], values[self._n_out :]

    def backward(self, saved: Any, cotangents: list[Tensor]) -> Sequence[Tensor]:
        """Gradients of the inputs that need one, in order."""
        if not any(self.out_needs):
            return [torch.zeros_like(x) for x, need in zip(self.examples, self.needs, strict=True) if need]
        if self._backward_graph is None:
            return self._engine_backward(saved, cotangents)
        if self._backward is None:
            self._backward = _attempt(lambda: self._compile_backward([*saved, *cotangents]), f"the backward of {self._name}") or _boxed(self._backward_graph)
        grads = self._backward([*saved, *cotangents])
        if all(self.present):
            return grads
        # An input that is never read has no gradient in the graph; its gradient is zero.
        wanted = [x for x, need in zip(self.examples, self.needs, strict=True) if need]
        values = iter(grads)
        return [next(values) if present else torch.zeros_like(x) for x, present in zip(wanted, self.present, strict=True)]

    def _make_differentiable(self) -> None:
        if self.mode in ("eager", "dynamo") or _broken:
            self._forward = _boxed(None)
            return
        compiled = _attempt(self._capture_joint, self._name)
        self._forward, self._backward_graph = compiled or (_boxed(None), None)

    def _capture_joint(self) -> tuple[Callable[[list], Sequence], Any]:
        if "forward" in self._generated:
            return _finished(self._generated.pop("forward")), self._generated.pop("backward")
        forward, backward = self._joint()
        if self.mode == "aot_eager":
            self._backward = _boxed(backward)
            return _boxed(forward), backward
        return _finished(_generate(forward, _fake(self.examples))), backward

    def _joint(self) -> tuple[Any, Any]:
        """Graphs of the forward (outputs, saved values) and the backward (saved values, cotangents -> gradients that are there)."""
        from torch._functorch.aot_autograd import aot_export_joint_simple
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        def flat(*args: Tensor) -> list[Tensor]:
            outputs = _fresh(self.fn(list(args)), args)
            return [y if need else y.detach().clone() for y, need in zip(outputs, self.out_needs, strict=True)]

        examples = tuple(x.requires_grad_(need) for x, need in zip(_fake(self.examples), self.needs, strict=True))
        with torch.enable_grad(), self._one_operation():
            joint: Any = aot_export_joint_simple(flat, examples, trace_joint=True, decompositions=_decompositions() if self.mode == "inductor" else None)
        forward, backward = min_cut_rematerialization_partition(joint, None, num_fwd_outputs=self._n_out)
        self._align(forward, backward)
        return forward, backward

    def _align(self, forward: Any, backward: Any) -> None:
        """Order the forward's saved outputs as the backward's placeholders (saved values by name, then cotangents)."""
        out = next(iter(reversed(forward.graph.nodes)))
        values = list(out.args[0])
        saved = {node.name: node for node in values[self._n_out :]}
        names = [node.name for node in backward.graph.nodes if node.op == "placeholder"]
        wanted = [name for name in names if "tangents" not in name]
        order = [saved[name] for name in wanted]
        if names != wanted + [name for name in names if "tangents" in name]:
            raise RuntimeError("the backward's placeholders are not saved values followed by cotangents")
        out.args = ((*values[: self._n_out], *order),)
        forward.recompile()
        results = list(next(iter(reversed(backward.graph.nodes))).args[0])
        wanted = [node for node, need in zip(results, self.needs, strict=True) if need]
        self.present = [node is not None for node in wanted]
        end = backward.graph.output_node()
        kept = []
        for node in wanted:
            if node is None:
                continue
            if not node.meta["val"].is_contiguous():
                # This step's gradient is the next call's cotangent, and a compiled backward reads every argument with the strides it was compiled for.
                with backward.graph.inserting_before(end):
                    value = node.meta["val"]
                    node = backward.graph.call_function(torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
                    node.meta["val"] = value.contiguous()
            kept.append(node)
        end.args = (tuple(kept),)
        backward.recompile()
        if not any("tangents" in name for name in names):
            raise RuntimeError("the backward takes no cotangents")

    def _compile_backward(self, examples: Sequence[Tensor]) -> Callable[[list], Sequence]:
        return _finished(_generate(self._backward_graph, _fake(examples), backward=True))

    # -- the autograd engine -------------------------------------------------------------------------------------------------------------------
    def _engine_forward(self, inputs: list[Tensor]) -> tuple[Sequence[Tensor], Any]:
        fn = self._torch_compile() if self.mode == "dynamo" and not _broken else self.fn
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(need) for x, need in zip(inputs, self.needs, strict=True)]
            outputs = list(fn(list(leaves)))
        return [y.detach() for y in _fresh(outputs, leaves)], (leaves, outputs)

    def _engine_backward(self, saved: Any, cotangents: list[Tensor]) -> Sequence[Tensor]:
        leaves, outputs = saved
        wanted = [x for x, need in zip(leaves, self.needs, strict=True) if need]
        roots = [y for y, need in zip(outputs, self.out_needs, strict=True) if need]
        grads = torch.autograd.grad(roots, wanted, cotangents, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, wanted, strict=True)]


def describe_outputs(fn: Callable[[list[Tensor]], Sequence[Tensor]], examples: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    """Outputs of one eager run of ``fn`` on ``examples``; ``requires_grad`` tells which depend differentiably on an input marked in ``needs``."""

    def run() -> list[Tensor]:
        with torch.enable_grad(), for_shapes(not any(needs)):
            leaves = [x.detach().requires_grad_(need) for x, need in zip(examples, needs, strict=True)]
            versions = [x._version for x in leaves]
            outputs, name = list(fn(list(leaves))), getattr(fn, "__name__", "the function")
            for y in outputs:
                if not isinstance(y, Tensor):
                    raise TypeError(f"{name} must return tensors, got {type(y).__name__} {y!r}; make it a 0-d tensor")
            if any(x._version != v for x, v in zip(leaves, versions, strict=True)):
                raise ValueError(f"{name} changes an argument in place; write x = x + 1 for x += 1")
            return outputs

    return in_clean_thread(run)


def output_needs(fn: Callable[[list[Tensor]], Sequence[Tensor]], examples: Sequence[Tensor], needs: Sequence[bool]) -> tuple[bool, ...]:
    """For each output of ``fn`` whether it depends differentiably on an input marked in ``needs``."""
    return tuple(y.requires_grad for y in describe_outputs(fn, examples, needs))


def captured_ahead(first: Callable[[Any], tuple[Any, Any]], second: Callable[[Any, Any], Any], *, mode: str) -> Callable[[Any], tuple[Any, Any]]:
    """``first``, which before its first call captures the graphs of ``second(*first(x))`` without running them.

    The C++ compiler then works in the background while Python captures graph after graph, instead of both waiting for each other. Pure functions only.
    """
    if mode != "inductor":
        return first
    begun: list[bool] = []

    def call(x: Any) -> tuple[Any, Any]:
        if not begun:
            begun.append(True)
            with dry_run():
                second(*first(x))
        return first(x)

    return call


def whole(fn: Callable, *, mode: str = "inductor") -> Callable:
    """A function that is made of compiled parts, such as loops, as one native program where that is possible, and as it is elsewhere.

    A program costs one call, and its parts hand each other memory instead of tensors. See :func:`jit`.
    """
    if mode != "inductor":
        return fn
    return _jit(fn, mode, whole=True)


def jit(fn: Callable, *, mode: str = "inductor") -> Callable:
    """Compile a pure function of pytrees of tensors; other leaves are static. A time loop inside, with a gradient through it or without, is part of the code.

    The compiled function is called when no gradient or tangent may be asked for an argument; otherwise ``fn`` itself runs, so a jitted function can be
    differentiated like the original. Under ``vmap`` the mapped function is compiled; on a CPU the code compiled for one member runs for each. One graph
    for each combination of tree structure, shapes, dtypes, devices and static leaves.

    Args:
        fn: pure function; positional arguments and result are pytrees.
        mode: see the module.

    Returns:
        A function of the same signature, with the original as ``.eager``.
    """
    return _jit(fn, check_mode(mode))


def _jit(fn: Callable, mode: str, whole: bool = False) -> Callable:
    cache: dict[Any, tuple[_Compiled, list] | None] = {}

    def entry_of(structure: Any, leaves: list[Any], tensors: list[Tensor], transformed: bool) -> tuple[_Compiled, list] | None:
        if whole and (_broken or not library.has_products() or any(x.device.type != "cpu" for x in tensors)):
            return None
        out_structure: list = []
        static = [None if isinstance(x, Tensor) else x for x in leaves]

        def flat(inputs: list[Tensor]) -> list[Tensor]:
            values = iter(inputs)
            result = fn(*tree.unflatten(structure, [next(values) if x is None else x for x in static]))
            out_leaves, out = tree.flatten(result)
            out_structure[:] = [out]
            return out_leaves

        flat.__name__ = getattr(fn, "__name__", "fn")
        with below_transforms():
            examples = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in tensors]
            compiled = _Compiled(flat, examples, mode, quiet=whole)
            native = not whole or compiled.kernel.is_native(members=transformed)
        return (compiled, out_structure) if native else None  # its parts are compiled by themselves

    def call(*args: Any) -> Any:
        leaves, structure = tree.flatten(args)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if mode == "eager" or is_tracing() or in_use() or only_shapes():
            return fn(*args)
        alone = functorch.peek_interpreter_stack() is None  # no transform is active
        transformed = any(x.requires_grad for x in tensors) if alone else any(map(is_transformed, tensors))
        if transformed and (mode == "dynamo" or any(map(is_tracked, tensors))):
            return fn(*args)
        key = (structure, _signature(leaves))
        if key not in cache and closes_over_history(fn):
            return fn(*args)  # a compiled call would lose what it closes over
        if key not in cache:
            with _compiling():
                if key not in cache:  # nor has another thread put it there meanwhile
                    cache[key] = entry_of(structure, leaves, tensors, transformed)
        if (entry := cache[key]) is None:
            return fn(*args)
        compiled, out_structure = entry
        if transformed:
            values = _Call.apply(compiled, *tensors)
        elif alone:
            values = compiled(tensors)
        else:
            with below_transforms():
                values = compiled([plain(x) for x in tensors])
        return tree.unflatten(out_structure[0], values)

    call.eager = fn  # type: ignore[attr-defined]
    call.__name__ = getattr(fn, "__name__", "fn")
    call.__doc__ = fn.__doc__
    return call


class _Compiled:
    """A function of a flat list of tensors with its kernel, and what it is under ``vmap``."""

    def __init__(self, flat: Callable[[list[Tensor]], Sequence[Tensor]], examples: list[Tensor], mode: str, quiet: bool = False) -> None:
        self.flat, self.mode = flat, mode
        self.kernel = Kernel(flat, examples, [False] * len(examples), mode, quiet=quiet)
        self.by_members = mode == "inductor" and all(x.device.type == "cpu" for x in examples)  # under vmap
        self._mapped: dict[tuple, Callable[[Sequence[Tensor]], Sequence[Tensor]]] = {}

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return self.kernel.infer([x.contiguous() for x in tensors])

    def mapped(self, in_dims: tuple[int | None, ...], size: int) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
        """The function mapped over a leading dimension of the inputs whose entry of ``in_dims`` is 0; results have it first."""
        if (in_dims, size) not in self._mapped:
            examples = self.kernel.examples
            if self.by_members:
                self._mapped[in_dims, size] = _Members(self, in_dims, size)
            else:
                flat, n_out = self.flat, len(self.kernel.out_needs)

                def vmapped(inputs: list[Tensor]) -> list[Tensor]:
                    def one(*x: Any) -> tuple:
                        return tuple(flat(list(x)))

                    return list(torch.func.vmap(one, in_dims=in_dims, out_dims=(0,) * n_out)(*inputs))

                vmapped.__name__ = getattr(flat, "__name__", "fn")
                with below_transforms():
                    given = [x if d is None else x.expand(size, *x.shape) for x, d in zip(examples, in_dims, strict=True)]
                    self._mapped[in_dims, size] = _Compiled(vmapped, given, self.mode)
        return self._mapped[in_dims, size]


class _Members:
    """A compiled function for each member of a leading dimension: on a CPU the members of a population run one by one, a thread each, by the code that is
    compiled for one. What a member works on stays in the cache, and its result is that of the member alone, bit for bit.
    """

    def __init__(self, one: _Compiled, in_dims: tuple[int | None, ...], size: int) -> None:
        self.one, self.in_dims, self.size = one, in_dims, size

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        tensors = [x.contiguous() for x in tensors]
        columns = [[x] * self.size if d is None else x.unbind(0) for x, d in zip(tensors, self.in_dims, strict=True)]
        return self.one.kernel.infer_members([list(row) for row in zip(*columns, strict=True)])

    def mapped(self, in_dims: tuple[int | None, ...], size: int) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
        """As :meth:`_Compiled.mapped`: a member of a member is a member."""
        outer = _Members(self.one, tuple(0 if a == 0 or b == 0 else None for a, b in zip(in_dims, self.in_dims, strict=True)), size * self.size)

        def call(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            joined = []
            for x, a, b in zip(tensors, in_dims, self.in_dims, strict=True):
                if a is None and b is None:
                    joined.append(x)
                    continue
                x = x if a == 0 else x.expand(size, *x.shape)
                x = x if b == 0 else x.unsqueeze(1).expand(size, self.size, *x.shape[1:])
                joined.append(x.flatten(0, 1))
            return [y.unflatten(0, (size, self.size)) for y in outer(joined)]

        return call


class _Call(Function):
    """A compiled function as one operation that ``vmap`` knows; nothing it is given carries a gradient."""

    @staticmethod
    def forward(compiled: Callable[[Sequence[Tensor]], Sequence[Tensor]], *tensors: Tensor) -> tuple:
        return tuple(compiled(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        raise RuntimeError("a compiled call was entered without a gradient and is differentiated; this is a fault in frl")

    @staticmethod
    def vmap(info: Any, in_dims: tuple, compiled: Any, *tensors: Tensor) -> tuple:
        dims = in_dims[1:]
        mapped = compiled.mapped(tuple(None if d is None else 0 for d in dims), info.batch_size)
        outputs = _Call.apply(mapped, *(x if d is None else x.movedim(d, 0) for x, d in zip(tensors, dims, strict=True)))
        return outputs, (0,) * len(outputs)
