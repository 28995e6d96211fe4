"""Running mean and variance of observations as pure functions.

Statistics are count, mean and sum of squared deviations in float64, merged by Chan's formula, so that any split of the data gives the same result and a large
offset costs no digits. ``apply`` works in the dtype of the observations: a float32 observation is centred by a mean in two parts (its rounding and the rest),
which is exact to float32 even where the mean is a million standard deviations. Statistics are constants: gradients flow through observations alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from frl.numerics import safe_div
from frl.types import Normalizer
from frl.validate import require_count, require_number

# Beyond this magnitude the sum of squared deviations could overflow float64, which would spoil the statistics like an infinity does.
_LARGEST = 1e145
# Observation dtypes whose values float32 holds exactly.
_NARROW = (torch.float16, torch.bfloat16, torch.float32, torch.uint8, torch.int8, torch.int16, torch.bool)


class NormalizerState(NamedTuple):
    """Statistics of the rows seen so far."""

    count: Tensor  # [] float64, rows, those of a prior with a mean included
    mean: Tensor  # [O] float64
    m2: Tensor  # [O] float64, sum of squared deviations from the mean
    prior: Tensor  # [] float64, rows of a prior without a mean: its variance is 1 wherever the rows lie
    rejected: Tensor  # [] int64, rows left out because an element was not finite


class NormalizerView(NamedTuple):
    """What ``apply`` needs of a state, in one floating dtype: prepare it outside a loop."""

    mean: Tensor  # [O], rounded; 0 for features that pass unchanged
    residual: Tensor  # [O], what rounding took off the mean
    scale: Tensor  # [O], 1 / (std + epsilon); 1 for features that pass unchanged
    bound: Tensor | tuple[()]  # [O], largest magnitude of the output; () without a clip


def variance(state: NormalizerState) -> Tensor:
    """Population variance ``(m2 + prior) / (count + prior)``, float64 ``[O]``; 1 while nothing has been counted."""
    return safe_div(state.m2 + state.prior, state.count + state.prior, default=1.0)


def merge(a: NormalizerState, b: NormalizerState) -> NormalizerState:
    """Statistics of the rows of both, associative and, to rounding, commutative; prior counts of both are counted.

    With ``d = mean_b - mean_a``: ``mean = mean_a + d n_b / n``, ``m2 = m2_a + m2_b + d^2 n_a n_b / n``.

    Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
    """
    total = a.count + b.count
    share = safe_div(b.count, total)
    delta = b.mean - a.mean
    m2 = a.m2 + b.m2 + delta * delta * (a.count * share)
    return NormalizerState(count=total, mean=a.mean + delta * share, m2=m2, prior=a.prior + b.prior, rejected=a.rejected + b.rejected)


def _batch(obs: Tensor, mask: Tensor | tuple[()]) -> NormalizerState:
    """Statistics of one batch in two passes; rows that do not count enter as exact zeros."""
    given = obs.detach().reshape(-1, obs.shape[-1])
    rows = given.to(torch.float64)
    usable = (given.abs() <= _LARGEST if obs.dtype == torch.float64 else torch.isfinite(given)).all(-1)  # narrower dtypes end below the limit
    wanted = torch.ones_like(usable) if isinstance(mask, tuple) else mask.expand(obs.shape[:-1]).reshape(-1)
    keep = (wanted & usable).unsqueeze(-1)
    count = keep.sum().to(torch.float64)
    mean = torch.where(keep, rows, 0.0).sum(0) / count.clamp(min=1.0)
    deviation = torch.where(keep, rows - mean, 0.0)
    return NormalizerState(count=count, mean=mean, m2=(deviation * deviation).sum(0), prior=torch.zeros_like(count), rejected=(wanted & ~usable).sum())


def _check_mask(mask: Sequence[bool] | Tensor | None, size: int) -> tuple[bool, ...]:
    if mask is None:
        return (True,) * size
    shape = tuple(mask.shape) if isinstance(mask, Tensor) else (len(mask),)
    if shape != (size,):
        raise ValueError(f"mask must have one entry for each of the {size} features, got shape {shape}")
    return tuple(bool(flag) for flag in mask)


def running_normalizer(
    size: int,
    *,
    mask: Sequence[bool] | Tensor | None = None,
    initial_count: float = 0.0,
    initial_mean: float | None = None,
    epsilon: float = 1e-8,
    std_floor: float = 0.0,
    clip: float | None = None,
    dtype: torch.dtype | None = None,
) -> Normalizer:
    """Normalise observations by their running statistics: ``(obs - mean) / (max(std, std_floor) + epsilon)``, clipped to ``[-clip, clip]``.

    A feature whose denominator is 0 (constant so far, with ``epsilon`` and ``std_floor`` 0) is centred and not scaled. A constant feature that later moves by
    ``d`` comes out as ``d / epsilon``: set ``std_floor`` or ``clip`` where that can happen. The returned functions are

    - ``init(device=None) -> state``;
    - ``update(state, obs [..., O], mask=()) -> state``: rows with a true entry in the bool ``mask [...]`` (all for ``()``) are counted, but those with an
      element that is not finite (or beyond 1e145), in any feature, are left out as if absent and counted in ``state.rejected``;
    - ``apply(state, obs [..., O]) -> [..., O]``, also with a view in the place of the state;
    - ``prepare(state, dtype) -> view``, for loops.

    Args:
        size: number of features O.
        mask: features to normalise, all when ``None``; the others pass unchanged. Statistics cover all of them.
        initial_count: weight, in rows, of a prior with variance 1.
        initial_mean: mean of that prior. ``None`` gives it no mean: it weighs in the variance alone, wherever the observations lie. With a mean, observations
            at a distance ``d`` from it have a variance that is too large by about ``d^2 initial_count / n`` after ``n`` rows.
        epsilon: added to the standard deviation.
        std_floor: smallest standard deviation to divide by.
        clip: largest magnitude of a normalised feature; ``None`` for no limit.
        dtype: output dtype; ``None`` gives floating observations their own and others float32.

    Raises:
        ValueError: an argument is not a number (``bool`` is none) or out of range, or ``mask`` does not fit ``size``.
    """
    size = require_count("size", size)
    flags = _check_mask(mask, size)
    require_number("initial_count", initial_count, at_least=0.0)
    if initial_mean is not None:
        require_number("initial_mean", initial_mean)
    require_number("epsilon", epsilon, at_least=0.0)
    require_number("std_floor", std_floor, at_least=0.0)
    if clip is not None:
        require_number("clip", clip, above=0.0)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be a floating torch dtype or None, got {dtype}")

    def check_size(obs: Tensor) -> None:
        if obs.ndim == 0 or obs.shape[-1] != size:
            raise ValueError(f"the last dimension of obs must be {size}, got shape {tuple(obs.shape)}")

    def init(device: torch.device | str | None = None) -> NormalizerState:
        weights = (0.0, initial_count) if initial_mean is None else (initial_count, 0.0)
        count, prior = (torch.full((), weight, dtype=torch.float64, device=device) for weight in weights)
        return NormalizerState(
            count=count,
            mean=torch.full((size,), initial_mean or 0.0, dtype=torch.float64, device=device),
            m2=torch.full((size,), weights[0], dtype=torch.float64, device=device),
            prior=prior,
            rejected=torch.zeros((), dtype=torch.int64, device=device),
        )

    def update(state: NormalizerState, obs: Tensor, mask: Tensor | tuple[()] = ()) -> NormalizerState:
        check_size(obs)
        batch = _batch(obs, mask)
        pooled = merge(state, batch)
        # Selected rather than computed, so that an empty batch leaves every bit as it was.
        some = batch.count > 0
        return pooled._replace(mean=torch.where(some, pooled.mean, state.mean), m2=torch.where(some, pooled.m2, state.m2))

    def prepare(state: NormalizerState, dtype: torch.dtype) -> NormalizerView:
        mean, std = state.mean.detach(), torch.sqrt(variance(state).detach())
        # Kept finite in the narrow dtype: the centre of a feature must come out as 0, and 0 times infinity does not.
        scale = safe_div(torch.ones_like(std), std.clamp(min=std_floor) + epsilon, default=1.0).clamp(max=torch.finfo(dtype).max)
        bound = () if clip is None else torch.full_like(mean, clip, dtype=dtype)
        if not all(flags):
            # Filled run by run: a tensor made from a Python list would be copied from the host at each call.
            runs = [torch.full((len(list(run)),), flag, dtype=torch.bool, device=mean.device) for flag, run in groupby(flags)]
            chosen = torch.cat(runs)
            mean, scale = torch.where(chosen, mean, 0.0), torch.where(chosen, scale, 1.0)
            bound = bound if isinstance(bound, tuple) else torch.where(chosen, bound, math.inf)
        rounded = mean.to(dtype)
        return NormalizerView(mean=rounded, residual=(mean - rounded.to(torch.float64)).to(dtype), scale=scale.to(dtype), bound=bound)

    def apply(state: NormalizerState | NormalizerView, obs: Tensor) -> Tensor:
        check_size(obs)
        view = state if isinstance(state, NormalizerView) else prepare(state, torch.float32 if obs.dtype in _NARROW else torch.float64)
        out = ((obs.to(torch.promote_types(obs.dtype, view.mean.dtype)) - view.mean) - view.residual) * view.scale
        if not isinstance(view.bound, tuple):
            out = torch.clamp(out, min=-view.bound, max=view.bound)
        return out.to(dtype or (obs.dtype if obs.dtype.is_floating_point else torch.float32))

    return Normalizer(init=init, update=update, apply=apply, prepare=prepare)


def running_observation_normalizer(size: int, mask: Sequence[bool] | Tensor | None = None, *, initial_count: float = 1e-4) -> Normalizer:
    """The reference's trainer-owned normaliser: a prior of 1e-4 rows with mean 0, epsilon 1e-8, a feature mask, no clip.

    Differs from what run files get (``running_normalizer(size, mask=mask, initial_count=1e-4)``) in the mean of the prior, which is the reference's and spoils
    the variance of features that lie far from 0: 1e5 instead of 1 after 1000 rows around 1e6.
    """
    return running_normalizer(size, mask=mask, initial_count=initial_count, initial_mean=0.0, epsilon=1e-8)


def empirical_normalizer(size: int, *, epsilon: float = 1e-2) -> Normalizer:
    """The reference's policy-owned normaliser: no prior, so that the first batch replaces it, and epsilon 1e-2."""
    return running_normalizer(size, initial_count=0.0, epsilon=epsilon)
