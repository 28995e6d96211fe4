"""Gradient transforms, and what every optimizer of this package is made of.

A transform is an :class:`frl.types.Optimizer`: ``init(params) -> state`` and ``update(grads, state, params, hyper) -> (updates, state)``. Updates are *added*
to the parameters (:func:`apply_updates`), so a transform that only reshapes gradients, such as clipping, comes before the optimizer in a :func:`chain`. A
number that changes at run time is read from ``hyper`` (0-d tensors, one per member under ``vmap``); the rest are floats fixed and checked in the factory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from frl import tree
from frl.types import Optimizer, Params, PyTree
from frl.validate import require_number

# ---- what changes at run time ----


def read(hyper: Mapping[str, Tensor], name: str, default: float) -> Tensor | float:
    """``hyper[name]`` where it is present, else ``default``; ``ValueError`` for anything that is not a 0-d tensor, since a Python float would recompile."""
    if name not in hyper:
        return default
    value = hyper[name]
    if not isinstance(value, Tensor) or value.ndim != 0:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"hyper[{name!r}] must be a 0-d tensor (vmap over the members of a population), got {got}")
    return value


def cast(value: Tensor | float, dtype: torch.dtype) -> Tensor | float:
    """A 0-d tensor in ``dtype``, so that it cannot promote a 0-d parameter; floats stay floats."""
    return value.to(dtype) if isinstance(value, Tensor) else value


def is_zero(value: Tensor | float) -> bool:
    """Whether ``value`` is known to be 0 when the function is traced."""
    return not isinstance(value, Tensor) and value == 0


# ---- trees ----


def zeros_like(params: Params) -> Params:
    """A tree of zeros with the shapes, dtypes and devices of ``params``."""
    return tree.map(torch.zeros_like, params)


def new_count(params: Params) -> Tensor:
    """0-d int64 zero on the device of ``params`` (one per member under ``vmap``)."""
    first = tree.leaves(params)[:1]
    return first[0].new_zeros((), dtype=torch.int64) if first else torch.zeros((), dtype=torch.int64)


def dtypes(params: Params) -> dict[torch.dtype, torch.dtype]:
    """``{dtype of a leaf: dtype for scalar arithmetic}``: half precision cannot count updates, so scalars have at least single precision."""
    return {x.dtype: torch.promote_types(x.dtype, torch.float32) for x in tree.leaves(params)}


def map_unzip(fn: Callable[..., tuple[Tensor, ...]], width: int, first: PyTree, *rest: PyTree) -> list[PyTree]:
    """Apply ``fn`` to matching leaves; it returns ``width`` tensors, which become ``width`` trees."""
    results = tree.map(fn, first, *rest)
    return [tree.map(lambda _, values, i=i: values[i], first, results) for i in range(width)]


def apply_updates(params: Params, updates: Params) -> Params:
    """``params + updates``, leaf by leaf, in the dtype of ``params``."""
    return tree.map(lambda p, u: p + u.to(p.dtype), params, updates)


# ---- transforms ----


def chain(*optimizers: Optimizer) -> Optimizer:
    """Run transforms in order: each receives the updates of the one before it. The state is the tuple of their states; without any it is the identity.

    Args:
        optimizers: for example ``clip_by_global_norm(0.5), adam()``. All of them see the same ``hyper``.
    """
    for position, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, Optimizer):
            raise ValueError(f"chain: argument {position} must be an Optimizer(init, update), got {type(optimizer).__name__}")

    def init(params: Params) -> PyTree:
        return tuple(optimizer.init(params) for optimizer in optimizers)

    def update(grads: Params, state: PyTree, params: Params, hyper: Mapping[str, Tensor]) -> tuple[Params, PyTree]:
        updates, states = grads, []
        for optimizer, inner in zip(optimizers, state, strict=True):
            updates, inner = optimizer.update(updates, inner, params, hyper)
            states.append(inner)
        return updates, tuple(states)

    return Optimizer(init, update)


_FAR = 2.0**64  # norms beyond it are divided out in two steps: limit / norm would lose digits in float32


def _scaled_norm(grads: PyTree) -> tuple[Tensor, Tensor, torch.dtype]:
    """``(scale, ratio, dtype)``: a product that is the global norm, and the dtype that is asked for. The norm's gradient at 0 is 0.

    Squares of narrower numbers neither overflow nor underflow in float64; those of float64 are taken of numbers divided by the largest.
    """
    parts = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tree.floating(grads) if x.numel() > 0]
    if not parts:
        return torch.ones(()), torch.zeros(()), torch.get_default_dtype()
    narrow = all(x.dtype == torch.float32 for x in parts)
    if narrow:
        total = torch.stack([torch.square(x.to(torch.float64)).sum() for x in parts]).sum()
        scale = torch.ones_like(total)
    else:
        # The scale cancels in the product, so it is a constant for differentiation; a scale of 1 lets infinities and NaN through as themselves.
        largest = torch.stack([x.detach().abs().amax() for x in parts]).amax()
        scale = torch.where(torch.isfinite(largest) & (largest > 0), largest, 1.0)
        total = torch.stack([torch.square(x / scale).sum() for x in parts]).sum()
    zero = total == 0
    ratio = torch.where(zero, 0.0, torch.sqrt(torch.where(zero, 1.0, total)))
    if narrow:
        scale = torch.where(ratio.detach() > _FAR, _FAR, 1.0).to(ratio.dtype)
        ratio = ratio / scale
    return scale, ratio, torch.float32 if narrow else ratio.dtype


def global_norm(grads: PyTree) -> Tensor:
    """Global 2-norm over all floating leaves, 0-d.

    Squares neither overflow nor underflow. The gradient at 0 is 0; an infinite element gives infinity, a NaN gives NaN.
    """
    scale, ratio, dtype = _scaled_norm(grads)
    return (scale * ratio).to(dtype)


def clip_global_norm(grads: PyTree, max_norm: Tensor | float) -> tuple[PyTree, Tensor]:
    """Scale all leaves by ``min(1, max_norm / (norm + 1e-6))``.

    Args:
        grads: tree of gradients.
        max_norm: 0-d tensor or float. Infinity leaves the gradients alone. A limit that is not above 0 cannot be refused in compiled code: the result is NaN.

    Returns:
        ``(clipped, norm)``, the norm being that of ``grads`` before clipping, 0-d. Gradients within the limit come back bit for bit; finite gradients whose
        norm overflows are clipped rightly; an infinite or NaN element against a finite limit leaves NaN.

    Source: Pascanu, Mikolov, Bengio 2013, Algorithm 1, with the small constant and the clamp of ``torch.nn.utils.clip_grad_norm_``.
    """
    scale, ratio, dtype = _scaled_norm(grads)
    limit = max_norm.to(dtype) if isinstance(max_norm, Tensor) else ratio.new_full((), max_norm, dtype=dtype)
    limit = torch.where(limit > 0, limit, torch.nan)
    norm = (scale * ratio).to(dtype)
    within = norm + 1e-6 <= limit
    # Down by the scale first: where the norm overflows, limit / norm would be 0. Its inverse is exact, a power of two, unless a leaf is float64.
    factor = limit / (ratio + 1e-6 / scale)

    def clipped(x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)  # in which the factor has its digits
        down = x / scale if dtype == torch.float64 else x.to(wide) * (1 / scale).to(wide)
        return torch.where(within, x, (down.to(wide) * factor.to(wide)).to(x.dtype))

    return tree.map(clipped, grads), norm


def clip_by_global_norm(max_norm: float | None) -> Optimizer:
    """Transform that clips the global norm (see :func:`clip_global_norm`). Its state is ``()``.

    Args:
        max_norm: limit above 0; ``None`` or infinity means off. ``hyper["max_grad_norm"]``, where present, takes its place.

    Raises:
        ValueError: for 0 (which would freeze learning), a negative number, NaN, ``bool`` or anything that is not a number.
    """
    off = max_norm is None or (isinstance(max_norm, Real) and float(max_norm) == math.inf)
    default = math.inf if off else require_number("clip_by_global_norm: max_norm (None or infinity means off)", max_norm, above=0.0)

    def update(grads: Params, state: PyTree, params: Params, hyper: Mapping[str, Tensor]) -> tuple[Params, PyTree]:
        limit = read(hyper, "max_grad_norm", default)
        if not isinstance(limit, Tensor) and math.isinf(limit):
            return grads, state
        return clip_global_norm(grads, limit)[0], state

    return Optimizer(lambda params: (), update)


class SkipState(NamedTuple):
    """State of :func:`skip_nonfinite`."""

    inner: PyTree  # state of the wrapped optimizer, after its last accepted update
    skipped: Tensor  # [] int64, updates refused so far


def skip_nonfinite(optimizer: Optimizer) -> Optimizer:
    """Refuse an update that is not finite: the updates are 0, the inner state stays bit for bit and ``skipped`` counts it.

    An update is refused when an element of the gradients or of the inner updates is not finite, or when it would make a finite element of the inner state
    infinite or NaN (a squared gradient that overflows). Put clipping inside, ``skip_nonfinite(chain(clip, adam))``, so that the raw gradients are judged.
    """

    def init(params: Params) -> SkipState:
        return SkipState(inner=optimizer.init(params), skipped=new_count(params))

    def update(grads: Params, state: SkipState, params: Params, hyper: Mapping[str, Tensor]) -> tuple[Params, SkipState]:
        finite = tree.all_finite(grads)
        # Zeros instead of the refused gradients: the branch that is not taken must not send NaN back through torch.where.
        safe = tree.where(finite, grads, zeros_like(grads))
        updates, inner = optimizer.update(safe, state.inner, params, hyper)
        finite = finite & tree.all_finite(updates) & _stays_finite(inner, state.inner)
        skipped = state.skipped + (~finite).to(state.skipped.dtype)
        return tree.where(finite, updates, zeros_like(updates)), SkipState(inner=tree.where(finite, inner, state.inner), skipped=skipped)

    return Optimizer(init, update)


def _stays_finite(new: PyTree, old: PyTree) -> Tensor:
    """0-d bool: no floating element that was finite in ``old`` has ceased to be in ``new``."""
    flags = [(torch.isfinite(a) | ~torch.isfinite(b)).all() for a, b in zip(tree.floating(new), tree.floating(old), strict=True)]
    return torch.stack(flags).all() if flags else torch.ones((), dtype=torch.bool)
