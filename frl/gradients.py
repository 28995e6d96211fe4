"""Row-wise gradient control: clip rows, clip an adjoint on its way back through time, and statistics of adjoints.

A row is one environment. Its gradient is measured and scaled alone, so that a row whose adjoint explodes or is not finite leaves every other row's gradient as
it was. :func:`clip_batched_gradient_norm` is the formula; :func:`clip_adjoint` and :func:`clip_adjoint_tree` put it into a backward pass. Statistics are plain
reductions over the gradient of a zero probe that was added to the action, since a backward pass cannot return them.

``rows`` says where the rows lie: ``0`` in the leading dimension, ``-1`` in the last (layout ``[features..., N]``), ``None`` when the tensor is a single row,
which is what a function that is lifted over rows by ``torch.func.vmap`` sees.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from frl import tree
from frl.compile import allow_in_graph, gradient_level
from frl.types import Metrics, PyTree

_FLOOR = 1e-12  # rows whose largest element is below this are measured as if it were this
_CEILING = 1e30  # far above any sqrt(features), far below overflow: keeps inf out of derivatives


def clip_batched_gradient_norm(gradient: Tensor, max_norm: float | Tensor | None, *, rows: int | None = 0) -> Tensor:
    """Scale each row ``x`` down to norm at most ``c = max_norm``, without forming a norm that may overflow.

    ``m = max(max|x|, 1e-12)``, ``s = ||x / m||``, ``out = x min(1, (c / m) / max(s, 1))``; a row with an element that is not finite becomes zero.

    Args:
        gradient: floating tensor with at least two dimensions (any number with ``rows=None``).
        max_norm: limit ``c``. ``None``, ``0`` and ``inf`` mean off: the input is returned as it is, rows that are not finite included. A 0-d tensor is not
            validated, for its value may change without a new compile: at most 0 or ``inf`` means off there too, and NaN makes the result NaN.
        rows: ``0``, ``-1`` or ``None``, see the module.

    Returns:
        Tensor of the same shape, dtype and device. Differentiable in both arguments.

    Raises:
        ValueError: for a negative, NaN or non-numeric limit, fewer than two dimensions, or a gradient that is not floating.
    """
    limit = _limit(max_norm)
    if limit is None:
        return gradient
    _check(gradient, rows)
    return _clip_rows((gradient,), limit, rows)[0]


def clip_adjoint(x: Tensor, max_norm: float | Tensor | None, *, rows: int | None = 0) -> Tensor:
    """Identity whose backward pass clips each row of the cotangent with :func:`clip_batched_gradient_norm`.

    The clip acts in the innermost ``torch.func`` gradient of ``x``; one outside it, and forward mode, see the identity, so that ``grad`` of ``grad`` and
    ``jacfwd(grad(f))`` are the exact derivative of the clipped gradient. ``max_norm`` gets no gradient from the first reverse pass; a second one differentiates
    the clip with respect to it. Autograd's own second pass (``create_graph=True``) knows no levels: it clips its cotangent here as well.

    Args:
        x: floating tensor with at least two dimensions (any number with ``rows=None``).
        max_norm: as in :func:`clip_batched_gradient_norm`; may be batched by ``vmap``.
        rows: ``0``, ``-1`` or ``None``, see the module.

    Returns:
        ``x``: a view when the clip is on, so that it must not be changed in place.

    Raises:
        ValueError: as :func:`clip_batched_gradient_norm`.
    """
    limit = _limit(max_norm)
    if limit is None:
        return x
    _check(x, rows)
    return _apply_clip(limit, rows, x)[0]


def clip_adjoint_tree(values: PyTree, max_norm: float | Tensor | None, *, rows: int | None = 0) -> PyTree:
    """:func:`clip_adjoint` for a pytree: one norm for each row over all floating leaves together.

    A row with a cotangent element that is not finite, in whatever leaf, is zeroed in all leaves. Leaves that are not floating pass untouched.

    Args:
        values: pytree of tensors whose floating leaves share the number of rows.
        max_norm: as in :func:`clip_adjoint`.
        rows: ``0``, ``-1`` or ``None``, see the module; leaves may have a single dimension.

    Returns:
        The same tree, with floating leaves as views.

    Raises:
        ValueError: for a bad limit, or floating leaves that disagree on the number of rows (listed by key path).
    """
    limit = _limit(max_norm)
    leaves, structure = tree.flatten(values)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if limit is None or not places:
        return values
    _check_rows(rows)
    if rows is not None and len({leaves[i].shape[rows] if leaves[i].ndim else None for i in places} | {None}) != 2:
        shapes = ", ".join(f"{name} {tuple(leaf.shape)}" for name, leaf in tree.items(values) if isinstance(leaf, Tensor))
        raise ValueError(f"floating leaves must share their number of rows in dimension {rows}, got {shapes}")
    for i, leaf in zip(places, _apply_clip(limit, rows, *(leaves[i] for i in places)), strict=True):
        leaves[i] = leaf
    return tree.unflatten(structure, leaves)


class BatchedGradientNormStats(NamedTuple):
    """Sums from which the adjoint metrics are made. Rows are ok when the row and its norm are finite; the others count as non-finite."""

    norm_sum: Tensor  # [] sum of the norms before clipping, ok rows
    norm_max: Tensor  # [] largest of them, 0 if none
    finite_rows: Tensor  # [] int64, ok rows
    rows: Tensor  # [] int64, all rows
    clipped_rows: Tensor  # [] int64, ok rows with a norm above the limit
    nonfinite_rows: Tensor  # [] int64, the others


def adjoint_statistics(gradient: Tensor, max_norm: float | Tensor | None) -> BatchedGradientNormStats:
    """Measure the rows of an adjoint before clipping.

    Args:
        gradient: ``[..., A]``, typically ``[T, N, A]``: every leading index is a row.
        max_norm: the limit that the rows are compared with, as in :func:`clip_batched_gradient_norm`; nothing is counted as clipped when it is off.

    Returns:
        Six 0-d tensors: norms in the gradient's dtype (at least float32), counts in int64. A row that is finite but whose norm overflows counts as non-finite
        and not as clipped, although the clip scales it rightly: its norm cannot enter a mean.
    """
    limit = _limit(max_norm)
    norms, ok = _row_norms(gradient.reshape(-1, gradient.shape[-1]))
    if limit is None:
        clipped = torch.zeros_like(ok)
    elif isinstance(limit, Tensor):
        clipped = ok & (limit > 0) & (norms > limit)
    else:
        clipped = ok & (norms > limit)
    return BatchedGradientNormStats(
        norm_sum=norms.sum(),
        norm_max=norms.amax() if norms.numel() else norms.sum(),
        finite_rows=ok.sum(),
        rows=torch.ones_like(ok).sum(),
        clipped_rows=clipped.sum(),
        nonfinite_rows=(~ok).sum(),
    )


def merge_stats(a: BatchedGradientNormStats, b: BatchedGradientNormStats) -> BatchedGradientNormStats:
    """The statistics of the rows of both (sum of sums, maximum of maxima). Associative and commutative up to rounding."""
    return BatchedGradientNormStats(
        norm_sum=a.norm_sum + b.norm_sum,
        norm_max=torch.maximum(a.norm_max, b.norm_max),
        finite_rows=a.finite_rows + b.finite_rows,
        rows=a.rows + b.rows,
        clipped_rows=a.clipped_rows + b.clipped_rows,
        nonfinite_rows=a.nonfinite_rows + b.nonfinite_rows,
    )


def stats_metrics(stats: BatchedGradientNormStats) -> Metrics:
    """The four adjoint metrics as 0-d tensors; a ratio without rows is 0."""
    rows = stats.rows.clamp(min=1)
    dtype = stats.norm_sum.dtype
    return {
        "action_adjoint_preclip_mean_norm": stats.norm_sum / stats.finite_rows.clamp(min=1),
        "action_adjoint_preclip_max_norm": stats.norm_max,
        "action_adjoint_clipped_fraction": stats.clipped_rows.to(dtype) / rows,
        "action_adjoint_nonfinite_fraction": stats.nonfinite_rows.to(dtype) / rows,
    }


def adjoint_norm_per_step(gradient: Tensor) -> Tensor:
    """Mean row norm of each time step, over the rows whose norm is finite (0 if none): how an adjoint grows on its way back through time.

    Args:
        gradient: ``[T, N, ...]``.

    Returns:
        ``[T]``, in the gradient's dtype (at least float32).
    """
    steps, count = gradient.shape[:2]
    norms, ok = _row_norms(gradient.reshape(steps * count, -1))
    return norms.reshape(steps, count).sum(1) / ok.reshape(steps, count).sum(1).clamp(min=1)


class _ClipAdjoint(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(limit: float | Tensor, rows: int | None, level: int, *xs: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        limit, ctx.rows, level = inputs[:3]
        ctx.clips = gradient_level(inputs[3:]) >= level
        ctx.limit = limit if not isinstance(limit, Tensor) else None
        ctx.save_for_backward(*([limit] if ctx.limit is None else []))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        limit = ctx.saved_tensors[0] if ctx.limit is None else ctx.limit
        return None, None, None, *(_clip_rows(cotangents, limit, ctx.rows) if ctx.clips else cotangents)

    @staticmethod
    def jvp(ctx: Any, _limit: Any, _rows: Any, _level: Any, *tangents: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(x.view_as(x) for x in tangents)


@allow_in_graph  # traced by Dynamo under torch.func.grad, the function's backward would be dropped without a word
def _apply_clip(limit: float | Tensor, rows: int | None, *xs: Tensor) -> tuple[Tensor, ...]:
    return _ClipAdjoint.apply(limit, rows, gradient_level(xs), *xs)  # pyright: ignore[reportReturnType]


def _clip_rows(gradients: tuple[Tensor, ...], limit: float | Tensor, rows: int | None) -> tuple[Tensor, ...]:
    """Scale row ``i`` of all tensors by one factor, from their joint norm."""
    matrix = _matrix(gradients, rows)
    if matrix.numel() == 0:
        return gradients
    finite, size, norm = _measure(matrix)
    off = None
    if isinstance(limit, Tensor):
        limit = limit.to(matrix.dtype)
        off = (limit <= 0) | torch.isinf(limit)
        limit = torch.where(off, 1, limit)
    scale = ((limit / size).clamp(max=_CEILING) / norm.clamp(min=1)).clamp(max=1)
    if off is not None:
        scale, finite = torch.where(off, 1, scale), finite | off
    clipped = []
    for gradient in gradients:
        shape = [1] * gradient.ndim
        if rows is not None:
            shape[rows] = -1
        clipped.append((torch.where(finite.reshape(shape), gradient, 0) * scale.reshape(shape)).to(gradient.dtype))
    return tuple(clipped)


def _matrix(gradients: tuple[Tensor, ...], rows: int | None) -> Tensor:
    """All features of each row: ``[N, D]``, in at least float32."""
    if rows is None:
        parts = [x.reshape(1, -1) for x in gradients]
    elif rows == 0:
        parts = [x.unsqueeze(-1).flatten(1) for x in gradients]
    else:
        parts = [x.unsqueeze(0).flatten(0, -2).mT for x in gradients]
    matrix = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return matrix.to(torch.promote_types(matrix.dtype, torch.float32))


def _measure(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Finite rows, magnitude ``m`` and scaled norm ``||x / m||``, each ``[N]``.

    The magnitude cancels in every use as long as it is at least the floor, and is constant otherwise, so that it is detached.
    """
    largest = matrix.detach().abs().amax(1)
    finite = torch.isfinite(largest)
    size = torch.where(finite, largest, 1).clamp(min=_FLOOR)
    safe = torch.where(finite.unsqueeze(1), matrix, 0) / size.unsqueeze(1)
    return finite, size, torch.linalg.vector_norm(safe, dim=1)


def _row_norms(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Norms of the rows of ``[N, D]``, 0 where not finite, and where they are finite."""
    finite, size, norm = _measure(_matrix((matrix,), 0))
    norm = size * norm
    ok = finite & torch.isfinite(norm)
    return torch.where(ok, norm, 0), ok


def _limit(max_norm: Any) -> float | Tensor | None:
    """``None`` when the clip is off."""
    if isinstance(max_norm, Tensor):
        if max_norm.ndim:
            raise ValueError(f"max_norm must be a number or a 0-d tensor, got shape {tuple(max_norm.shape)}")
        return max_norm
    if max_norm is None:
        return None
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)) or math.isnan(max_norm) or max_norm < 0:
        raise ValueError(f"max_norm must be a number of at least 0 (None, 0 or inf for off), got {max_norm!r}")
    return None if max_norm == 0 or math.isinf(max_norm) else float(max_norm)


def _check_rows(rows: Any) -> None:
    if rows is not None and (isinstance(rows, bool) or rows not in (0, -1)):
        raise ValueError(f"rows must be 0, -1 or None, got {rows!r}")


def _check(x: Tensor, rows: int | None) -> None:
    _check_rows(rows)
    if not x.is_floating_point():
        raise ValueError(f"gradient must be a floating tensor, got {x.dtype}")
    if rows is not None and x.ndim < 2:
        raise ValueError(f"gradient must have at least two dimensions, rows and features, got shape {tuple(x.shape)}; rows=None is for a single row")
