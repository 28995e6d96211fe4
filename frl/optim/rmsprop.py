"""RMSprop.

Follows ``torch.optim.RMSprop`` option by option and step by step, as a pair of pure functions that stay differentiable where the mean square is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from frl.optim.transform import cast, dtypes, is_zero, map_unzip, new_count, read, zeros_like
from frl.types import Optimizer, Params, PyTree
from frl.validate import require_number, require_switch


class RMSpropState(NamedTuple):
    """State of :func:`rmsprop`."""

    count: Tensor  # [] int64, updates so far
    square: PyTree  # like params: mean of the squared gradients
    mean: PyTree  # like params: mean of the gradients (centered), else ()
    trace: PyTree  # like params: the momentum buffer, () without momentum


class _Step(NamedTuple):
    """The scalars of one update, in the precision of the leaves they serve."""

    rate: Tensor | float
    alpha: Tensor | float
    eps: Tensor | float
    decay: Tensor | float
    momentum: Tensor | float


def rmsprop(
    learning_rate: float = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
    maximize: bool = False,
    capturable: bool = False,
    foreach: bool | None = None,
    differentiable: bool = False,
) -> Optimizer:
    """RMSprop: ``-learning_rate * b``, ``b = momentum * b + g / (sqrt(v) + eps)``, ``v = alpha * v + (1 - alpha) * g^2``.

    Args:
        learning_rate: at least 0, used when ``hyper`` has no ``"learning_rate"``.
        alpha: decay of the means, in [0, 1). (``torch.optim`` also takes 1 and above, where the mean is frozen or grows.)
        eps: at least 0; with 0, a divisor of 0 counts as 1, so that an element without a gradient stays (``torch.optim``: NaN).
        weight_decay: at least 0; adds ``weight_decay * params`` to the gradient.
        momentum: in [0, 1]; with 0 there is no buffer.
        centered: divide by the standard deviation: ``v - m^2`` with ``m`` the mean gradient takes the place of ``v``. Where rounding makes it negative it
            counts as 0 (``torch.optim``: NaN).
        maximize: ascend.
        capturable, foreach, differentiable: how ``torch.optim`` computes, not what; accepted so that its options load, and without effect here.

    ``hyper`` may hold ``"learning_rate"``, ``"alpha"``, ``"eps"``, ``"weight_decay"`` and, where the optimizer was built with momentum, ``"momentum"`` as 0-d
    tensors, which take the place of the options.

    Raises:
        ValueError: for an option out of its range.
    Source: Tieleman and Hinton 2012, lecture 6.5; centered: Graves 2013, equations 38 to 45, with ``eps`` outside the root, as in ``torch.optim.RMSprop``.
    """
    learning_rate, eps = require_number("rmsprop: learning_rate", learning_rate, at_least=0.0), require_number("rmsprop: eps", eps, at_least=0.0)
    alpha, momentum = require_number("rmsprop: alpha", alpha, at_least=0.0, below=1.0), require_number("rmsprop: momentum", momentum, at_least=0.0, at_most=1.0)
    weight_decay = require_number("rmsprop: weight_decay", weight_decay, at_least=0.0)
    centered, maximize = require_switch("rmsprop: centered", centered), require_switch("rmsprop: maximize", maximize)
    for name, value in {"capturable": capturable, "foreach": foreach, "differentiable": differentiable}.items():
        require_switch(f"rmsprop: {name}", value, optional=True)

    def init(params: Params) -> RMSpropState:
        mean, trace = zeros_like(params) if centered else (), zeros_like(params) if momentum else ()
        return RMSpropState(count=new_count(params), square=zeros_like(params), mean=mean, trace=trace)

    def scalars(hyper: Mapping[str, Tensor], dtype: torch.dtype) -> _Step:
        names = {"learning_rate": learning_rate, "alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
        return _Step(*(cast(read(hyper, name, default), dtype) for name, default in names.items()))

    def update(grads: Params, state: RMSpropState, params: Params, hyper: Mapping[str, Tensor]) -> tuple[Params, RMSpropState]:
        if not momentum and "momentum" in hyper:
            raise ValueError("rmsprop: hyper has 'momentum' but the optimizer was built with momentum 0 and keeps no buffer; build it with momentum above 0")
        steps = {dtype: scalars(hyper, dtype) for dtype in dtypes(params)}

        def leaf(param: Tensor, grad: Tensor, square: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            mean, trace = rest[:1] if centered else (), rest[-1:] if momentum else ()
            return _leaf(steps[param.dtype], -grad if maximize else grad, param, square, mean, trace)

        means, traces = (state.mean,) if centered else (), (state.trace,) if momentum else ()
        updates, square, *rest = map_unzip(leaf, 2 + len(means) + len(traces), params, grads, state.square, *means, *traces)
        mean, trace = rest[0] if centered else (), rest[-1] if momentum else ()
        return updates, RMSpropState(count=state.count + 1, square=square, mean=mean, trace=trace)

    return Optimizer(init, update)


def _leaf(step: _Step, grad: Tensor, param: Tensor, square: Tensor, mean: tuple[Tensor, ...], trace: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Update and new averages of one leaf; elementwise. ``mean`` and ``trace`` hold one tensor or none."""
    if not is_zero(step.decay):
        grad = grad + step.decay * param
    square = step.alpha * square + (1 - step.alpha) * (grad * grad)
    mean = tuple(step.alpha * previous + (1 - step.alpha) * grad for previous in mean)
    spread = square - mean[0] * mean[0] if mean else square
    # sqrt has an infinite slope at 0: the root is replaced there, value and gradient. NaN is not <= 0 and stays.
    zero = spread <= 0
    floor = 1.0 if is_zero(step.eps) else step.eps
    direction = grad / torch.where(zero, floor, torch.sqrt(torch.where(zero, 1.0, spread)) + step.eps)
    trace = tuple(step.momentum * previous + direction for previous in trace)
    return -step.rate * (trace[0] if trace else direction), square, *mean, *trace
