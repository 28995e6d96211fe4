"""Stochastic gradient descent with momentum.

Follows ``torch.optim.SGD`` option by option and step by step, as a pair of pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from frl.optim.transform import cast, dtypes, is_zero, map_unzip, new_count, read, zeros_like
from frl.types import Optimizer, Params, PyTree
from frl.validate import require_number, require_switch


class SGDState(NamedTuple):
    """State of :func:`sgd`."""

    count: Tensor  # [] int64, updates so far
    trace: PyTree  # like params: the momentum buffer, () without momentum


class _Step(NamedTuple):
    """The scalars of one update, in the precision of the leaves they serve."""

    rate: Tensor | float
    decay: Tensor | float
    momentum: Tensor | float
    dampening: Tensor | float


def sgd(
    learning_rate: float = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    foreach: bool | None = None,
    fused: bool | None = None,
    differentiable: bool = False,
) -> Optimizer:
    """SGD: ``-learning_rate * b``, ``b = momentum * b + (1 - dampening) * g``; the first ``b`` is ``g``.

    Args:
        learning_rate: at least 0, used when ``hyper`` has no ``"learning_rate"``.
        momentum: in [0, 1]; with 0 there is no buffer and the update is ``-learning_rate * g``. (``torch.optim`` also takes values above 1, which diverge.)
        dampening: in [0, 1]; not applied to the first gradient.
        weight_decay: at least 0; adds ``weight_decay * params`` to the gradient.
        nesterov: step along ``g + momentum * b``; needs momentum and no dampening.
        maximize: ascend.
        foreach, fused, differentiable: how ``torch.optim`` computes, not what; accepted so that its options load, and without effect here.

    ``hyper`` may hold ``"learning_rate"``, ``"weight_decay"`` and, where the optimizer was built with momentum, ``"momentum"`` and ``"dampening"`` as 0-d
    tensors, which take the place of the options.

    Raises:
        ValueError: for an option out of its range.
    Source: Sutskever, Martens, Dahl, Hinton 2013, equations 3 and 4, with the learning rate outside the buffer, as in ``torch.optim.SGD``.
    """
    learning_rate = require_number("sgd: learning_rate", learning_rate, at_least=0.0)
    weight_decay = require_number("sgd: weight_decay", weight_decay, at_least=0.0)
    momentum = require_number("sgd: momentum", momentum, at_least=0.0, at_most=1.0)
    dampening = require_number("sgd: dampening", dampening, at_least=0.0, at_most=1.0)
    nesterov, maximize = require_switch("sgd: nesterov", nesterov), require_switch("sgd: maximize", maximize)
    for name, value in {"foreach": foreach, "fused": fused, "differentiable": differentiable}.items():
        require_switch(f"sgd: {name}", value, optional=True)
    if nesterov and (momentum == 0 or dampening != 0):
        raise ValueError(f"sgd: nesterov needs momentum above 0 and no dampening, got momentum {momentum} and dampening {dampening}")

    def init(params: Params) -> SGDState:
        return SGDState(count=new_count(params), trace=zeros_like(params) if momentum else ())

    def scalars(hyper: Mapping[str, Tensor], dtype: torch.dtype) -> _Step:
        names = {"learning_rate": learning_rate, "weight_decay": weight_decay, "momentum": momentum, "dampening": dampening}
        return _Step(*(cast(read(hyper, name, default), dtype) for name, default in names.items()))

    def update(grads: Params, state: SGDState, params: Params, hyper: Mapping[str, Tensor]) -> tuple[Params, SGDState]:
        if not momentum and ("momentum" in hyper or "dampening" in hyper):
            raise ValueError(
                "sgd: hyper has 'momentum' or 'dampening' but the optimizer was built with momentum 0 and keeps no buffer; build it with momentum above 0"
            )
        steps = {dtype: scalars(hyper, dtype) for dtype in dtypes(params)}
        first = state.count == 0

        def leaf(param: Tensor, grad: Tensor, *trace: Tensor) -> tuple[Tensor, ...]:
            return _leaf(steps[param.dtype], nesterov, first, -grad if maximize else grad, param, *trace)

        traces = (state.trace,) if momentum else ()
        updates, *traces = map_unzip(leaf, 2 if momentum else 1, params, grads, *traces)
        return updates, SGDState(count=state.count + 1, trace=traces[0] if momentum else ())

    return Optimizer(init, update)


def _leaf(step: _Step, nesterov: bool, first: Tensor, grad: Tensor, param: Tensor, *trace: Tensor) -> tuple[Tensor, ...]:
    """Update and new buffer of one leaf; elementwise."""
    if not is_zero(step.decay):
        grad = grad + step.decay * param
    if not trace:
        return (-step.rate * grad,)
    buffer = step.momentum * trace[0]
    # The buffer starts from zeros, so the first gradient enters whole by itself unless there is dampening.
    buffer = buffer + (grad if is_zero(step.dampening) else torch.where(first, grad, (1 - step.dampening) * grad))
    direction = grad + step.momentum * buffer if nesterov else buffer
    return -step.rate * direction, buffer
