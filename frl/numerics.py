"""Numerical safety: right values and right gradients at 0 and at infinity.

``torch.where`` selects values, but its backward multiplies the derivative of the branch that was not taken by zero, and zero times infinity is NaN. So every
function here selects twice: the input of the delicate operation is replaced by a harmless number first, then the output is selected. A NaN that goes in where
it counts comes out: hiding a fault is left to :func:`coalesce_nonfinite` and to masks.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor

Dim: TypeAlias = int | tuple[int, ...]


def safe_sqrt(x: Tensor) -> Tensor:
    """Square root that is 0 with gradient 0 for ``x <= 0``."""
    outside = x <= 0
    return torch.where(outside, 0.0, torch.sqrt(torch.where(outside, 1.0, x)))


def safe_log(x: Tensor) -> Tensor:
    """``log(max(x, tiny))`` with the dtype's smallest normal number: finite for ``x <= 0``, where the gradient is 0."""
    return torch.log(torch.clamp(x, min=torch.finfo(x.dtype).tiny))


def safe_div(a: Tensor, b: Tensor, default: Tensor | float = 0.0) -> Tensor:
    """``a / b``, and ``default`` where ``b == 0``, with gradient 0 for ``a`` and ``b`` there."""
    zero = b == 0
    return torch.where(zero, default, a / torch.where(zero, 1.0, b))


def safe_norm(x: Tensor, dim: Dim = -1, keepdim: bool = False) -> Tensor:
    """2-norm with gradient 0 at 0; the squares neither overflow nor underflow: ``m |x / m|`` with ``m = max |x_i|``.

    Args:
        x: floating ``[...]``; reduced dimensions are not empty.
        dim: dimension or dimensions to reduce.
        keepdim: keep them with size 1.

    Returns:
        ``[...]`` without ``dim``: 0 for a zero vector, infinity if an element is infinite, NaN if one is NaN, with gradient 0 in these three cases;
        else the gradient is ``x / norm``.
    """
    largest = x.detach().abs().amax(dim, keepdim=True)
    ordinary = (largest > 0) & (largest < math.inf)
    # The result does not depend on the scale, so that holding it constant leaves derivatives of every order exact.
    scale = torch.where(ordinary, largest, 1.0)
    unit = torch.where(ordinary, x, 1.0) / scale
    norm = torch.where(ordinary, scale * torch.sqrt((unit * unit).sum(dim, keepdim=True)), largest)
    return norm if keepdim else norm.squeeze(dim)


def log1mexp(x: Tensor) -> Tensor:
    """``log(1 - exp(x))`` for ``x <= 0`` without cancellation: -infinity at 0, 0 at -infinity, NaN for ``x > 0``.

    Source: Maechler, "Accurately computing log(1 - exp(-|a|))", 2012: ``log(-expm1(x))`` above ``-log 2``, ``log1p(-exp(x))`` below.
    """
    near = x > -math.log(2.0)
    # 0 - expm1 and not its negation: at x = 0 the argument is +0, and the gradient has the sign of the limit.
    above = torch.log(0.0 - torch.expm1(torch.where(near, x, -1.0)))
    below = torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    return torch.where(near, above, below)


def clip(x: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """``x`` within [low, high]; the gradient is 1 inside and on the bounds, 0 outside. ``torch.clamp``'s at a bound differs between releases."""
    return torch.where(x < low, low, torch.where(x > high, high, x))


def clamp_log_std(log_std: Tensor, low: float = -5.0, high: float = 2.0) -> Tensor:
    """``log_std`` clamped to [low, high]; the gradient is 0 outside, 1 inside and on the bounds."""
    return torch.clamp(log_std, min=low, max=high)


def coalesce_nonfinite(x: Tensor, value: float = 0.0) -> Tensor:
    """``x`` with NaN and infinities replaced by ``value``; the gradient is 0 there."""
    return torch.where(torch.isfinite(x), x, value)


def _masked(x: Tensor, mask: Tensor, dim: Dim | None) -> tuple[Tensor, Tensor, Dim]:
    """Values with 0 where masked out (integers and booleans as float32), the mask in the same shape, and the dimensions to reduce."""
    x, mask = torch.broadcast_tensors(x if x.is_floating_point() else x.to(torch.float32), mask)
    return torch.where(mask, x, 0.0), mask, tuple(range(x.ndim)) if dim is None else dim


def masked_mean(x: Tensor, mask: Tensor, dim: Dim | None = None, keepdim: bool = False) -> Tensor:
    """Mean of the elements whose ``mask`` is true, 0 if there is none; the others reach neither value nor gradient, even if not finite.

    Args:
        x: ``[...]``; integers and booleans are averaged in float32.
        mask: bool, broadcasts with ``x``.
        dim: dimension or dimensions to reduce, all when ``None``.
        keepdim: keep them with size 1.
    """
    x, mask, dim = _masked(x, mask, dim)
    return x.sum(dim, keepdim) / mask.sum(dim, keepdim).clamp(min=1).to(x.dtype)


def masked_var(x: Tensor, mask: Tensor, dim: Dim | None = None, keepdim: bool = False, *, correction: int = 0) -> Tensor:
    """Variance ``sum (x - mean)^2 / (n - correction)`` of the ``n`` elements whose ``mask`` is true, in two passes; 0 if there are at most ``correction``.

    Args as for :func:`masked_mean`; ``correction`` is 0 for the population variance, 1 for the unbiased one.
    """
    x, mask, dim = _masked(x, mask, dim)
    count = mask.sum(dim, keepdim=True)
    mean = x.sum(dim, keepdim=True) / count.clamp(min=1).to(x.dtype)
    deviation = torch.where(mask, x - mean, 0.0)
    var = (deviation * deviation).sum(dim, keepdim=True) / (count - correction).clamp(min=1).to(x.dtype)
    return var if keepdim else var.squeeze(dim)


def masked_std(x: Tensor, mask: Tensor, dim: Dim | None = None, keepdim: bool = False, *, correction: int = 0) -> Tensor:
    """Square root of :func:`masked_var`, with gradient 0 where the variance is 0."""
    return safe_sqrt(masked_var(x, mask, dim, keepdim, correction=correction))
