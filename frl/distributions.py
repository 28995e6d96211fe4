"""Action distributions as pure functions of their parameters.

Randomness comes in as ``noise``, standard normal or Gumbel, so a sample is a function of the parameters: differentiable where actions are continuous. A
:class:`Sample` keeps the value before squashing or the index before the offset (``raw``) beside the action: scores are computed from ``raw``, which stays
exact where an action has rounded to its bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from frl import rng

UNBOUNDED = 1e30  # A bound of at least this magnitude is none; spaces write "no bound" as infinity or as the largest float32.
_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class NormalParams(NamedTuple):
    """Parameters of a diagonal Gaussian (before squashing)."""

    mean: Tensor  # [..., A]
    log_std: Tensor  # [..., A] or [A]


class CategoricalParams(NamedTuple):
    """Parameters of one categorical distribution, or of several side by side."""

    logits: Tensor  # [..., n] or [..., sum(nvec)], unnormalised log probabilities; -inf for an impossible choice


class Sample(NamedTuple):
    """A draw: what the environment receives and what densities are computed from."""

    action: Tensor  # [..., A], or [...] of one categorical choice
    raw: Tensor  # the action before squashing, or before the offset of its space


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """A family of distributions over actions, as pure functions for any leading dimensions.

    Attributes:
        name: name of the family.
        action_dim: A; 1 for one categorical choice, whose action has no dimension of its own.
        noise_dim: numbers of noise that one sample takes.
        sample: ``(params, noise [..., noise_dim]) -> Sample``, reparameterised where actions are continuous.
        mode: ``(params) -> action``, the deterministic action: the image of the mean, or the most probable choice (the first of equals).
        log_prob: ``(params, sample or raw) -> [...]``, log density or probability of the action, computed from the raw value and summed over action dimensions.
        entropy: ``(params, noise=()) -> [...]`` [nat].
        kl: ``(p, q) -> [...]``, KL(p || q), exact.
        squash: ``(raw) -> action``.
        inverse: ``(action) -> raw``, finite for every action of the box: an action on a bound gives about the largest raw value that can be told from it. For
            actions recorded without their raw value; scores are then consistent with each other, not with those of the original samples.
        draw_noise: ``(key, shape, dtype) -> noise`` of the kind that ``sample`` takes.
    """

    name: str
    action_dim: int
    noise_dim: int
    sample: Callable[[Any, Tensor], Sample]
    mode: Callable[[Any], Tensor]
    log_prob: Callable[[Any, Sample | Tensor], Tensor]
    entropy: Callable[..., Tensor]
    kl: Callable[[Any, Any], Tensor]
    squash: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]
    draw_noise: Callable[..., Tensor] = rng.normal


def _raw_of(sample: Sample | Tensor) -> Tensor:
    return sample.raw if isinstance(sample, Sample) else sample


def _normal_raw(params: NormalParams, noise: Tensor) -> Tensor:
    return params.mean + torch.exp(params.log_std) * noise


def _normal_log_prob(params: NormalParams, raw: Tensor) -> Tensor:
    z = (raw - params.mean) * torch.exp(-params.log_std)
    return (-0.5 * z * z - params.log_std - _HALF_LOG_2PI).sum(-1)


def _normal_entropy(params: NormalParams) -> Tensor:
    # The zeros let the entropy depend on the mapped rows: vmap with out_dims=-1 returns garbage shapes for an output that does not (torch 2.13).
    return (params.log_std + (0.5 + _HALF_LOG_2PI) + torch.zeros_like(params.mean)).sum(-1)


def _normal_kl(p: NormalParams, q: NormalParams) -> Tensor:
    # expm1 instead of a difference of variances: exactly 0 for equal parameters, at any scale, without a stabilising epsilon.
    d = p.log_std - q.log_std
    z = (p.mean - q.mean) * torch.exp(-q.log_std)
    return (0.5 * (torch.expm1(2 * d) + z * z) - d).sum(-1)


def _checked_dim(action_dim: Any) -> int:
    if isinstance(action_dim, bool) or not isinstance(action_dim, int) or action_dim < 1:
        raise ValueError(f"action_dim must be an integer of at least 1, got {action_dim!r}")
    return action_dim


def diagonal_normal(action_dim: int) -> Distribution:
    """Independent Gaussians: ``action = raw = mean + exp(log_std) * noise``.

    Entropy ``sum(log_std + (1 + log 2 pi) / 2)``. ``KL(p || q) = sum(log(s_q / s_p) + (s_p^2 + (m_p - m_q)^2) / (2 s_q^2) - 1 / 2)``.

    Args:
        action_dim: A.

    Returns:
        A :class:`Distribution` over :class:`NormalParams`. Clipping an action to a box afterwards does not change its score, which is that of ``raw``.

    Raises:
        ValueError: for an ``action_dim`` that is not a positive integer.
    """

    def sample(params: NormalParams, noise: Tensor) -> Sample:
        raw = _normal_raw(params, noise)
        return Sample(action=raw, raw=raw)

    return Distribution(
        name="normal",
        action_dim=_checked_dim(action_dim),
        noise_dim=action_dim,
        sample=sample,
        mode=lambda params: params.mean,
        log_prob=lambda params, sample: _normal_log_prob(params, _raw_of(sample)),
        entropy=lambda params, noise=(): _normal_entropy(params),
        kl=_normal_kl,
        squash=lambda raw: raw,
        inverse=lambda action: action,
    )


def log1m_tanh_squared(u: Tensor) -> Tensor:
    """``log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2 u))``, finite and with exact gradients for every finite ``u``."""
    # The default threshold of softplus (20) would cost float64 seven digits.
    return 2 * (math.log(2) - u - F.softplus(-2 * u, threshold=40.0))


class _Box(NamedTuple):
    """Bounds by action dimension; unbounded dimensions have center 0, half width 1 and infinite bounds."""

    low: list[float]
    high: list[float]
    center: list[float]
    half: list[float]
    bounded: list[bool]


def _checked_box(low: Any, high: Any) -> _Box:
    lo, hi = np.atleast_1d(np.asarray(low, dtype=np.float64)), np.atleast_1d(np.asarray(high, dtype=np.float64))
    if lo.ndim != 1 or lo.shape != hi.shape or lo.size == 0:
        raise ValueError(f"low and high must be vectors of the same length, got shapes {lo.shape} and {hi.shape}")
    box = _Box([], [], [], [], [])
    for i, (a, b) in enumerate(zip(lo.tolist(), hi.tolist(), strict=True)):
        if not a < b:
            raise ValueError(f"action dimension {i} needs low < high, got low={a} and high={b}")
        free_low, free_high = a <= -UNBOUNDED, b >= UNBOUNDED
        if free_low != free_high or a >= UNBOUNDED or b <= -UNBOUNDED:
            raise ValueError(f"action dimension {i} has one bound only (low={a}, high={b}); tanh_normal needs both or none: give the other or use 'normal'")
        row = (-math.inf, math.inf, 0.0, 1.0) if free_low else (a, b, (a + b) / 2, (b - a) / 2)
        for column, value in zip(box[:4], row, strict=True):
            column.append(value)
        box.bounded.append(not free_low)
    return box


def _quadrature() -> tuple[list[float], list[float]]:
    # The trapezoidal rule beats Gauss-Hermite here: log(1 - tanh^2) has poles near the real axis for a large std, and equal spacing is finer in the middle.
    nodes = np.linspace(-6.0, 6.0, 48)
    weights = np.exp(-0.5 * nodes**2)
    return nodes.tolist(), (weights / weights.sum()).tolist()


def tanh_normal(low: Sequence[float] | np.ndarray, high: Sequence[float] | np.ndarray) -> Distribution:
    """Gaussians squashed into an action box: ``action = (low + high) / 2 + (high - low) / 2 * tanh(raw)``.

    ``log p(action) = log N(raw) - sum(log(1 - tanh(raw)^2) + log((high - low) / 2))``, from ``raw`` and finite for any of its values. Dimensions without bounds
    (infinite, or of magnitude at least 1e30, which covers the largest float32) are plain Gaussians; the sum skips them. Actions lie inside the box.

    The entropy is the Gaussian's plus the expected log-Jacobian. With ``noise`` the latter is taken at ``mean + std * noise``: an unbiased, reparameterised
    one-sample estimate, whose gradient is that of ``-log_prob``. Without, a quadrature with 48 nodes for each dimension (error below 1e-6 nat for std up to
    2.5, below 1e-2 up to 7.4). The KL is that of the Gaussians before squashing, which the one-to-one map leaves unchanged. The mode is the image of the
    mean, not the peak of the density.

    Args:
        low: [A] lower bounds.
        high: [A] upper bounds.

    Returns:
        A :class:`Distribution` over :class:`NormalParams`.

    Raises:
        ValueError: for bounds that are NaN, empty, of different lengths, or not ``low < high``, and for a dimension with one bound only.

    Source: Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications", appendix C; here with the stable form of the Jacobian and the box's scale.
    """
    box = _checked_box(low, high)
    uniform = all(len(set(column)) == 1 for column in box)
    squashed = any(box.bounded)
    nodes, weights = _quadrature()

    def constant(column: list[float], like: Tensor) -> Any:
        # Numbers when all dimensions agree: no tensor to make or to move.
        return column[0] if uniform else torch.tensor(column, dtype=like.dtype, device=like.device)

    def where_bounded(yes: Tensor, no: Any) -> Tensor:
        return yes if all(box.bounded) else torch.where(torch.tensor(box.bounded, device=yes.device), yes, no)

    def squash(raw: Tensor) -> Tensor:
        if not squashed:
            return raw
        inside = constant(box.center, raw) + constant(box.half, raw) * torch.tanh(raw)
        # center + half can exceed the bound by a rounding error.
        inside = torch.clamp(inside, constant(box.low, raw), constant(box.high, raw))
        return where_bounded(inside, raw)

    def inverse(action: Tensor) -> Tensor:
        if not squashed:
            return action
        eps = torch.finfo(action.dtype).eps
        unit = (action - constant(box.center, action)) / constant(box.half, action)
        return where_bounded(torch.atanh(torch.clamp(unit, eps - 1, 1 - eps)), action)

    def log_jacobian(raw: Tensor) -> Tensor:
        if not squashed:
            return torch.zeros_like(raw).sum(-1)
        log_half = [math.log(half) for half in box.half]
        return where_bounded(log1m_tanh_squared(raw) + constant(log_half, raw), 0.0).sum(-1)

    def sample(params: NormalParams, noise: Tensor) -> Sample:
        raw = _normal_raw(params, noise)
        return Sample(action=squash(raw), raw=raw)

    def log_prob(params: NormalParams, sample: Sample | Tensor) -> Tensor:
        raw = _raw_of(sample)
        return _normal_log_prob(params, raw) - log_jacobian(raw)

    def entropy(params: NormalParams, noise: Tensor | tuple[()] = ()) -> Tensor:
        exact = _normal_entropy(params)
        if isinstance(noise, Tensor):
            return exact + log_jacobian(_normal_raw(params, noise))
        mean, log_std = params.mean, torch.zeros_like(params.mean) + params.log_std
        shape = (len(nodes),) + (1,) * mean.ndim
        z = torch.tensor(nodes, dtype=mean.dtype, device=mean.device).reshape(shape)
        w = torch.tensor(weights, dtype=mean.dtype, device=mean.device).reshape(shape[:-1])
        return exact + (w * log_jacobian(mean + torch.exp(log_std) * z)).sum(0)

    return Distribution(
        name="tanh_normal",
        action_dim=len(box.low),
        noise_dim=len(box.low),
        sample=sample,
        mode=lambda params: squash(params.mean),
        log_prob=log_prob,
        entropy=entropy,
        kl=_normal_kl,
        squash=squash,
        inverse=inverse,
    )


def _entropy_of(log_p: Tensor) -> Tensor:
    # 0 log 0 is 0: the zero goes in before the product, so that no infinity meets a zero in the backward either.
    return -(torch.exp(log_p) * torch.where(torch.isneginf(log_p), 0.0, log_p)).sum(-1)


def _kl_of(log_p: Tensor, log_q: Tensor) -> Tensor:
    # A plain difference of logs: exactly 0 for equal parameters, and right in its second derivatives there.
    impossible = torch.isneginf(log_p)
    gap = torch.where(impossible, 0.0, log_p) - torch.where(impossible, 0.0, log_q)
    return (torch.exp(log_p) * gap).sum(-1)


def _checked_integer(name: str, value: Any, least: float = -math.inf) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name} must be an integer{'' if least == -math.inf else f' of at least {least:g}'}, got {value!r}")
    return int(value)


def _checked_integers(name: str, values: Any, least: float = -math.inf) -> list[int]:
    if isinstance(values, str) or not isinstance(values, (Sequence, np.ndarray)) or len(values) == 0:
        raise ValueError(f"{name} must be a non-empty list of integers, got {values!r}")
    return [_checked_integer(f"{name}[{i}]", value, least) for i, value in enumerate(values)]


def categorical(n: int, start: int = 0) -> Distribution:
    """One choice among ``n``: ``raw = argmax(logits + gumbel)``, ``action = start + raw``.

    ``log p = log softmax(logits)[raw]``, entropy ``-sum p log p``, ``KL(p || q) = sum p (log p - log q)``, all exact. Choices with a logit of -inf have
    probability 0, add nothing to entropy and KL and pass no gradient; the KL is infinite where only ``q`` excludes a choice. A sample carries no gradient.

    Args:
        n: number of choices.
        start: the environment's name of the first choice (``gymnasium.spaces.Discrete.start``).

    Returns:
        A :class:`Distribution` over :class:`CategoricalParams`. Noise is ``[..., n]`` Gumbel; ``action`` and ``raw`` are int64 ``[...]``, and a ``raw`` kept
        as whole floating numbers is scored too. The action is legal for any parameters, NaN included.

    Raises:
        ValueError: for an ``n`` that is not a positive integer or a ``start`` that is not an integer.

    Source: Maddison, Tarlow, Minka 2014, "A* Sampling" (the Gumbel-max trick).
    """
    n, start = _checked_integer("n", n, 1), _checked_integer("start", start)
    return _discrete("categorical", 1, n, start, table=lambda x, fill: x, total=lambda x: x)


def multi_categorical(nvec: Sequence[int] | np.ndarray, start: Sequence[int] | np.ndarray | None = None) -> Distribution:
    """``A`` independent choices among ``nvec[0], ..., nvec[A - 1]``: :func:`categorical` for each, scores summed.

    Args:
        nvec: [A] number of choices of each dimension.
        start: [A] the environment's names of the first choices; zeros when ``None``.

    Returns:
        A :class:`Distribution` over :class:`CategoricalParams` whose logits, and noise, are those of all dimensions in order, ``[..., sum(nvec)]``. ``action``
        and ``raw`` are int64 ``[..., A]``.

    Raises:
        ValueError: for anything but non-empty lists of integers of one length, ``nvec`` positive.
    """
    sizes = _checked_integers("nvec", nvec, 1)
    starts = [0] * len(sizes) if start is None else _checked_integers("start", start)
    if len(starts) != len(sizes):
        raise ValueError(f"start must have one entry for each of the {len(sizes)} dimensions of nvec, got {len(starts)}")
    widest = max(sizes)

    def table(x: Tensor, fill: float) -> Tensor:
        """``[..., sum(nvec)] -> [..., A, widest]``."""
        if min(sizes) == widest:
            return x.reshape(*x.shape[:-1], len(sizes), widest)
        parts = torch.split(x, sizes, -1)
        return torch.stack([F.pad(part, (0, widest - size), value=fill) for part, size in zip(parts, sizes, strict=True)], -2)

    offset = starts[0] if len(set(starts)) == 1 else starts
    return _discrete("multi_categorical", len(sizes), sum(sizes), offset, table=table, total=lambda x: x.sum(-1))


def _discrete(
    name: str, action_dim: int, noise_dim: int, start: int | list[int], *, table: Callable[..., Tensor], total: Callable[[Tensor], Tensor]
) -> Distribution:
    """``table`` lays the logits out with the choices of one dimension in the last place; ``total`` sums over dimensions, if there are several."""

    def offset(like: Tensor) -> Any:
        return start if isinstance(start, int) else torch.tensor(start, dtype=like.dtype, device=like.device)

    def squash(raw: Tensor) -> Tensor:
        return raw + offset(raw)

    def log_p(params: CategoricalParams) -> Tensor:
        return torch.log_softmax(table(params.logits, -math.inf), -1)

    def sample(params: CategoricalParams, noise: Tensor) -> Sample:
        raw = torch.argmax(table(params.logits, -math.inf) + table(noise, 0.0), -1)
        return Sample(action=squash(raw), raw=raw)

    def log_prob(params: CategoricalParams, sample: Sample | Tensor) -> Tensor:
        scores, index = log_p(params), _raw_of(sample).to(torch.int64).unsqueeze(-1)
        # Selected and not gathered: the gradient of a gather is a scatter, which keeps the loop around it from being vectorised.
        chosen = index == torch.arange(scores.shape[-1], device=scores.device)
        return total(torch.where(chosen, scores, 0.0).sum(-1))

    return Distribution(
        name=name,
        action_dim=action_dim,
        noise_dim=noise_dim,
        sample=sample,
        mode=lambda params: squash(torch.argmax(table(params.logits, -math.inf), -1)),
        log_prob=log_prob,
        entropy=lambda params, noise=(): total(_entropy_of(log_p(params))),
        kl=lambda p, q: total(_kl_of(log_p(p), log_p(q))),
        squash=squash,
        inverse=lambda action: action - offset(action),
        draw_noise=rng.gumbel,
    )
