"""Adam and AdamW.

Both follow ``torch.optim`` option by option and step by step; their state is explicit and their update is differentiable, also where the second moment is 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from frl.optim.transform import cast, dtypes, is_zero, map_unzip, new_count, read, zeros_like
from frl.types import Optimizer, Params, PyTree
from frl.validate import require_number, require_switch


class AdamState(NamedTuple):
    """State of :func:`adam` and :func:`adamw`."""

    count: Tensor  # [] int64, updates so far
    mu: PyTree  # like params: mean of the gradients
    nu: PyTree  # like params: mean of their squares
    nu_max: PyTree  # like params: largest nu so far (amsgrad), else ()


class _Step(NamedTuple):
    """The scalars of one update, in the precision of the leaves they serve."""

    beta1: Tensor | float
    beta2: Tensor | float
    eps: Tensor | float
    size: Tensor | float  # learning rate / (1 - beta1^t)
    root: Tensor | float  # 1 / sqrt(1 - beta2^t)
    decay: Tensor | float  # coefficient of the parameters: in the gradient (L2) or in the update (decoupled)


def adam(
    learning_rate: float = 3e-4,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
    decoupled_weight_decay: bool = False,
    foreach: bool | None = None,
    fused: bool | None = None,
    capturable: bool = False,
    differentiable: bool = False,
) -> Optimizer:
    """Adam: ``-learning_rate * m_hat / (sqrt(v_hat) + eps)``, ``m_hat = m / (1 - beta1^t)``, ``v_hat = v / (1 - beta2^t)``.

    Args:
        learning_rate: at least 0, used when ``hyper`` has no ``"learning_rate"``.
        betas: decay of the two means, each in [0, 1).
        eps: at least 0; with 0, a divisor of 0 counts as 1, so that an element without a gradient stays (``torch.optim``: NaN).
        weight_decay: at least 0; adds ``weight_decay * params`` to the gradient (L2).
        amsgrad: divide by the largest ``v`` so far.
        maximize: ascend.
        decoupled_weight_decay: decay the parameters, not the gradient: :func:`adamw`.
        foreach, fused, capturable, differentiable: how ``torch.optim`` computes, not what; accepted so that its options load, and without effect here.

    ``hyper`` may hold ``"learning_rate"``, ``"beta1"``, ``"beta2"``, ``"eps"`` and ``"weight_decay"`` as 0-d tensors, which take the place of the options.

    Raises:
        ValueError: for an option out of its range.
    Source: Kingma and Ba 2015, Algorithm 1; Reddi, Kale, Kumar 2018, Algorithm 2 (amsgrad, without its projection).
    """
    flags = {"foreach": foreach, "fused": fused, "capturable": capturable, "differentiable": differentiable}
    return _make("adam", learning_rate, betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay, flags)


def adamw(
    learning_rate: float = 3e-4,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
    maximize: bool = False,
    foreach: bool | None = None,
    fused: bool | None = None,
    capturable: bool = False,
    differentiable: bool = False,
) -> Optimizer:
    """Adam with decoupled weight decay: the update of :func:`adam` minus ``learning_rate * weight_decay * params``. Options and ``hyper`` as there.

    Source: Loshchilov and Hutter 2019, Algorithm 2, the schedule multiplier being the learning rate itself, as in ``torch.optim.AdamW``.
    """
    flags = {"foreach": foreach, "fused": fused, "capturable": capturable, "differentiable": differentiable}
    return _make("adamw", learning_rate, betas, eps, weight_decay, amsgrad, maximize, True, flags)


def _make(
    owner: str, learning_rate: Any, betas: Any, eps: Any, weight_decay: Any, amsgrad: Any, maximize: Any, decoupled: Any, flags: dict[str, Any]
) -> Optimizer:
    learning_rate = require_number(f"{owner}: learning_rate", learning_rate, at_least=0.0)
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"{owner}: betas must be two numbers in [0, 1), got {betas!r}")
    beta1, beta2 = (require_number(f"{owner}: betas[{i}]", beta, at_least=0.0, below=1.0) for i, beta in enumerate(betas))
    eps, weight_decay = require_number(f"{owner}: eps", eps, at_least=0.0), require_number(f"{owner}: weight_decay", weight_decay, at_least=0.0)
    amsgrad, maximize = require_switch(f"{owner}: amsgrad", amsgrad), require_switch(f"{owner}: maximize", maximize)
    decoupled = require_switch(f"{owner}: decoupled_weight_decay", decoupled)
    for name, value in flags.items():
        require_switch(f"{owner}: {name}", value, optional=True)

    def init(params: Params) -> AdamState:
        return AdamState(count=new_count(params), mu=zeros_like(params), nu=zeros_like(params), nu_max=zeros_like(params) if amsgrad else ())

    def scalars(count: Tensor, hyper: Mapping[str, Tensor], wide: torch.dtype, dtype: torch.dtype) -> _Step:
        names = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
        rate, b1, b2, small, decay = (cast(read(hyper, name, default), wide) for name, default in names.items())
        size = rate / _one_minus_power(b1, count, wide)
        root = torch.rsqrt(_one_minus_power(b2, count, wide))
        decay = rate * decay if decoupled and not is_zero(decay) else decay
        return _Step(*(cast(value, dtype) for value in (b1, b2, small, size, root, decay)))

    def update(grads: Params, state: AdamState, params: Params, hyper: Mapping[str, Tensor]) -> tuple[Params, AdamState]:
        count = state.count + 1
        steps = {dtype: scalars(count, hyper, wide, dtype) for dtype, wide in dtypes(params).items()}

        def leaf(param: Tensor, grad: Tensor, mu: Tensor, nu: Tensor, *nu_max: Tensor) -> tuple[Tensor, ...]:
            return _leaf(steps[param.dtype], decoupled, -grad if maximize else grad, param, mu, nu, *nu_max)

        peak = (state.nu_max,) if amsgrad else ()
        updates, mu, nu, *peak = map_unzip(leaf, 4 if amsgrad else 3, params, grads, state.mu, state.nu, *peak)
        return updates, AdamState(count=count, mu=mu, nu=nu, nu_max=peak[0] if amsgrad else ())

    return Optimizer(init, update)


def _one_minus_power(beta: Tensor | float, count: Tensor, dtype: torch.dtype) -> Tensor:
    """``1 - beta^count``. A constant goes through ``expm1``, which keeps the digits that ``1 - 0.999`` loses in single precision."""
    steps = count.to(dtype)
    if isinstance(beta, Tensor):
        return 1 - torch.pow(beta, steps)
    return -torch.expm1(steps * (math.log(beta) if beta > 0 else -math.inf))


def _leaf(step: _Step, decoupled: bool, grad: Tensor, param: Tensor, mu: Tensor, nu: Tensor, *nu_max: Tensor) -> tuple[Tensor, ...]:
    """Update and new moments of one leaf; elementwise."""
    if not decoupled and not is_zero(step.decay):
        grad = grad + step.decay * param
    mu = step.beta1 * mu + (1 - step.beta1) * grad
    nu = step.beta2 * nu + (1 - step.beta2) * (grad * grad)
    peak = tuple(torch.maximum(previous, nu) for previous in nu_max)
    second = peak[0] if peak else nu
    # sqrt has an infinite slope at 0, where the update's slope is finite: the root is replaced there, value and gradient. NaN is not <= 0 and stays.
    zero = second <= 0
    floor = 1.0 if is_zero(step.eps) else step.eps
    denominator = torch.where(zero, floor, torch.sqrt(torch.where(zero, 1.0, second)) * step.root + step.eps)
    update = -step.size * mu / denominator
    if decoupled and not is_zero(step.decay):
        update = update - step.decay * param
    return update, mu, nu, *peak
