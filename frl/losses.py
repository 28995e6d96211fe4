"""Objectives and the measures around them: they know no network, environment or optimizer.

APG's loss is a function of a trajectory. The terms of PPO and GRPO are functions of samples, in any dimensions ``[...]``; a mask ``valid`` (bool ``[...]``,
``()`` for all) says which samples count, and what stands in the others reaches neither value nor gradient. Means are over all counted samples and 0 when
there are none.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from frl.compile import outside
from frl.distributions import NormalParams, diagonal_normal
from frl.numerics import masked_mean
from frl.returns import alive_mask, discounts
from frl.types import Trajectory

Absent: TypeAlias = tuple[()]


class ApgTerms(NamedTuple):
    """The parts of the APG loss, all 0-d."""

    loss: Tensor
    objective: Tensor
    entropy: Tensor


def apg_loss(
    trajectory: Trajectory, gamma: float | Tensor, ent_coef: float | Tensor = 0.0, *, complete: bool = False, objective_scale: Tensor | None = None
) -> ApgTerms:
    """``loss = -objective - ent_coef * entropy`` with ``objective = mean_n sum_t D_{n,t} r_{n,t} scale_n``.

    Segmented: ``D`` restarts at 1 after a done, so that the episode after an automatic reset counts too. Complete: nothing after a row's first done
    counts. The entropy bonus is discounted, masked and scaled by the same rule. With ``ent_coef`` 0 an
    infinite entropy does not spoil the loss.

    Args:
        trajectory: fields ``reward``, flags and, when recorded, ``entropy``, ``[T, N]``.
        gamma: discount in [0, 1].
        ent_coef: entropy coefficient.
        complete: see above.
        objective_scale: ``[]`` or ``[N]``, not differentiated; 1 when ``None``.
    """
    reward, entropy = trajectory.reward, trajectory.entropy
    counted, weight = outside(_apg_weights, trajectory.terminated, trajectory.truncated, gamma, objective_scale, reward.dtype, complete)
    # The same sums as returns.complete_discounted_return and segmented_discounted_return with the scale and the mean inside.
    objective = (torch.where(counted, reward, 0.0) * weight).sum()
    if isinstance(entropy, tuple):
        return ApgTerms(loss=-objective, objective=objective, entropy=torch.zeros_like(objective))
    bonus = (torch.where(counted, entropy, 0.0) * weight).sum()
    coefficient = torch.as_tensor(ent_coef, dtype=reward.dtype, device=reward.device)
    return ApgTerms(loss=-objective - coefficient * torch.where(coefficient != 0, bonus, 0.0), objective=objective, entropy=bonus)


def _apg_weights(
    terminated: Tensor, truncated: Tensor, gamma: float | Tensor, scale: Tensor | None, dtype: torch.dtype, complete: bool
) -> tuple[Tensor, Tensor]:
    """Which steps count, bool ``[T, N]``, and what each contributes to the mean over rows: ``D_{n,t} scale_n / N``."""
    done = terminated | truncated
    counted = alive_mask(done) if complete else torch.ones_like(done)
    weight = discounts(torch.zeros_like(done) if complete else done, gamma, dtype=dtype) / done.shape[1]
    return counted, weight if scale is None else weight * scale.detach().to(dtype)


def shac_loss(
    trajectory: Trajectory,
    final_value: Tensor,
    gamma: float | Tensor,
    ent_coef: float | Tensor = 0.0,
    *,
    segment_length: int | None = None,
    objective_scale: Tensor | None = None,
) -> ApgTerms:
    """:func:`apg_loss` of short windows that end in a value, averaged over rows and windows.

    ``objective = mean_n 1/K sum_t D_{n,t} (r_{n,t} + gamma b_{n,t} V_{n,t})``: ``b`` is 1 where a window or, by its time limit, an episode ends without having
    terminated, and ``D`` starts anew at 1 after every done and in every window. Where ``b`` is 0 the value may be anything, NaN included. With values of 0 and
    one window it is the loss of APG.

    Args:
        trajectory: ``reward``, flags and, when recorded, ``entropy``, ``[T, N]``.
        final_value: ``[T, N]`` value of the observation after each step and before any reset; the gradient flows through it.
        gamma: discount in [0, 1].
        ent_coef: entropy coefficient.
        segment_length: steps of one window, a divisor of T; all T when ``None``.
        objective_scale: ``[]`` or ``[N]``, not differentiated; 1 when ``None``.

    Source: Xu et al. 2022, "Accelerated policy learning with parallel differentiable simulation", section 4; there also divided by the steps of a window.
    """
    reward = trajectory.reward
    steps = reward.shape[0]
    length = segment_length or steps
    truncated, ends = outside(_window_ends, trajectory.terminated, trajectory.truncated, length)
    reward = reward + gamma * torch.where(ends, final_value, 0.0)
    scale = torch.full((), length / steps, dtype=reward.dtype, device=reward.device)
    scale = scale if objective_scale is None else scale * objective_scale
    return apg_loss(trajectory._replace(reward=reward, truncated=truncated), gamma, ent_coef, objective_scale=scale)


def _window_ends(terminated: Tensor, truncated: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Steps after which a row starts anew without having terminated, the ends of windows included, and those of them that count a value, ``[T, N]``."""
    last = torch.arange(1, truncated.shape[0] + 1, device=truncated.device) % length == 0
    cut = truncated | last[:, None]
    return cut, cut & ~terminated


class PpoTerms(NamedTuple):
    """The parts of the PPO loss, all 0-d."""

    loss: Tensor
    actor_loss: Tensor
    value_loss: Tensor
    action_bound_loss: Tensor
    entropy: Tensor
    approx_kl: Tensor
    clip_fraction: Tensor


class GrpoTerms(NamedTuple):
    """The parts of the GRPO loss, all 0-d."""

    loss: Tensor
    actor_loss: Tensor
    entropy: Tensor
    approx_ref_kl: Tensor
    approx_kl: Tensor
    clip_fraction: Tensor


def ppo_loss(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    value: Tensor,
    returns: Tensor,
    entropy: Tensor,
    clip_coef: float | Tensor,
    vf_coef: float | Tensor = 0.5,
    ent_coef: float | Tensor = 0.0,
    action_bound_coef: float | Tensor = 0.0,
    old_value: Tensor | Absent = (),
    clip_value_loss: bool = False,
    action_mean: Tensor | Absent = (),
    valid: Tensor | Absent = (),
) -> PpoTerms:
    """``loss = actor_loss + vf_coef value_loss + action_bound_coef action_bound_loss - ent_coef entropy``.

    Coefficients are numbers or 0-d tensors. A term whose coefficient is 0 adds nothing, even when it is not finite.

    Args:
        log_prob: ``[...]`` of the recorded actions under the current parameters.
        old_log_prob: ``[...]`` as recorded.
        advantage: ``[...]``.
        value: ``[...]`` under the current parameters.
        returns: ``[...]``, what the critic learns.
        entropy: ``[...]`` under the current parameters.
        clip_coef: width of the ratio's clip and of the value's.
        vf_coef, ent_coef, action_bound_coef: see above.
        old_value: ``[...]`` as recorded, for ``clip_value_loss``.
        clip_value_loss: see :func:`value_loss`.
        action_mean: ``[..., A]``; without it the bound loss is 0.
        valid: see the module.

    Returns:
        :class:`PpoTerms`; ``approx_kl`` is the estimate of ``KL(old || new)`` by :func:`k3`.

    Source: Schulman et al. 2017, "Proximal policy optimization algorithms", equations 7 and 9; there ``value_loss`` is also without a factor 1/2.
    """
    actor = clipped_surrogate_loss(log_prob, old_log_prob, advantage, clip_coef, valid)
    critic = value_loss(value, returns, old_value=old_value, clip_coef=clip_coef if clip_value_loss else (), valid=valid)
    bound = action_bound_loss(action_mean, valid) if isinstance(action_mean, Tensor) else torch.zeros_like(actor)
    mean_entropy = _mean(entropy, valid)
    loss = actor + _times(vf_coef, critic) + _times(action_bound_coef, bound) - _times(ent_coef, mean_entropy)
    return PpoTerms(
        loss=loss,
        actor_loss=actor,
        value_loss=critic,
        action_bound_loss=bound,
        entropy=mean_entropy,
        approx_kl=approx_kl(log_prob, old_log_prob, valid),
        clip_fraction=clip_fraction(log_prob, old_log_prob, clip_coef, valid),
    )


def grpo_loss(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    entropy: Tensor,
    clip_coef: float | Tensor,
    ent_coef: float | Tensor = 0.0,
    kl: Tensor | Absent = (),
    kl_coef: float | Tensor = 0.0,
    valid: Tensor | Absent = (),
) -> GrpoTerms:
    """``loss = actor_loss + kl_coef mean(kl) - ent_coef entropy``; a term whose coefficient is 0 adds nothing, even when it is not finite.

    Samples of a tied group have advantage 0: they give no policy gradient, and the KL term still pulls them towards the reference policy.

    Args:
        log_prob, old_log_prob, advantage, entropy, clip_coef, ent_coef: as :func:`ppo_loss`, with the advantages of :func:`frl.advantages.group_advantages`.
        kl: ``[...]`` divergence of the policy from the reference policy at each sample: exact (``distribution.kl(new, reference)``) or ``k3(log_prob,
            ref_log_prob)``, whose gradients differ (see :func:`k3`). Absent without a reference policy.
        kl_coef: see above.
        valid: the mask of the returns: steps up to and including a row's first done.

    Returns:
        :class:`GrpoTerms`; ``approx_ref_kl`` is the mean of ``kl``.

    Source: Shao et al. 2024, "DeepSeekMath", equation 3, averaged over all counted samples.
    """
    actor = clipped_surrogate_loss(log_prob, old_log_prob, advantage, clip_coef, valid)
    mean_kl = _mean(kl, valid) if isinstance(kl, Tensor) else torch.zeros_like(actor)
    mean_entropy = _mean(entropy, valid)
    return GrpoTerms(
        loss=actor + _times(kl_coef, mean_kl) - _times(ent_coef, mean_entropy),
        actor_loss=actor,
        entropy=mean_entropy,
        approx_ref_kl=mean_kl,
        approx_kl=approx_kl(log_prob, old_log_prob, valid),
        clip_fraction=clip_fraction(log_prob, old_log_prob, clip_coef, valid),
    )


def probability_ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """``exp(log_prob - old_log_prob)``; where the difference exceeds 20 its tangent there, so that value and gradient stay finite."""
    return _exp(log_prob - old_log_prob)


def clipped_surrogate_loss(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip_coef: float | Tensor, valid: Tensor | Absent = ()) -> Tensor:
    """``-mean(min(rho A, clip(rho, 1 - c, 1 + c) A))``: the gradient is 0 where the ratio ``rho`` left the interval on the side that ``A`` rewards, 0-d."""
    log_prob, old_log_prob, advantage = _counted(valid, log_prob, old_log_prob, advantage)
    ratio = probability_ratio(log_prob, old_log_prob)
    width = _number(clip_coef, ratio)
    clipped = torch.clamp(ratio, 1 - width, 1 + width)
    return -_mean(torch.minimum(ratio * advantage, clipped * advantage), valid)


def clip_fraction(log_prob: Tensor, old_log_prob: Tensor, clip_coef: float | Tensor, valid: Tensor | Absent = ()) -> Tensor:
    """Share of samples whose ratio is outside ``[1 - c, 1 + c]``, 0-d."""
    outside = (probability_ratio(log_prob, old_log_prob) - 1).abs() > clip_coef
    return _mean(outside.to(log_prob.dtype), valid)


def value_loss(
    value: Tensor, returns: Tensor, *, old_value: Tensor | Absent = (), clip_coef: float | Tensor | Absent = (), valid: Tensor | Absent = ()
) -> Tensor:
    """``mean((V - R)^2)``, or with ``clip_coef`` ``mean(max((V - R)^2, (V_old + clamp(V - V_old, -c, c) - R)^2))``, 0-d; no factor 1/2.

    Raises:
        ValueError: for ``clip_coef`` without ``old_value``.
    """
    value, returns = _counted(valid, value, returns)
    error = (value - returns) ** 2
    if not isinstance(clip_coef, tuple):
        if not isinstance(old_value, Tensor):
            raise ValueError("the clipped value loss needs old_value, the values recorded with the rollout")
        (old_value,) = _counted(valid, old_value)
        width = _number(clip_coef, value)
        near = old_value + torch.clamp(value - old_value, -width, width)
        error = torch.maximum(error, (near - returns) ** 2)
    return _mean(error, valid)


def action_bound_loss(action_mean: Tensor, valid: Tensor | Absent = ()) -> Tensor:
    """``mean(max(mu - 1, 0)^2) + mean(min(mu + 1, 0)^2)`` over samples and action dimensions (``[..., A]``): mean actions outside [-1, 1], 0-d."""
    mask = valid.unsqueeze(-1) if isinstance(valid, Tensor) else ()
    (mean,) = _counted(mask, action_mean)
    return _mean(torch.clamp(mean - 1, min=0) ** 2, mask) + _mean(torch.clamp(mean + 1, max=0) ** 2, mask)


def k3(log_prob: Tensor, other_log_prob: Tensor) -> Tensor:
    """``exp(d) - d - 1`` with ``d = other_log_prob - log_prob``, at least 0; for actions of the policy its mean is ``KL(policy || other)``.

    Finite in value and gradient for every finite ``d``: above 20 the exponential goes on as its tangent. Only the value estimates that divergence. The
    gradient of the samples' mean with respect to the policy (the actions held fixed) is that of the other direction, ``KL(other || policy)``, as usual in
    GRPO; for that of ``KL(policy || other)`` multiply by the ratio to the sampling policy, :func:`probability_ratio`, not detached.

    Args:
        log_prob: ``[...]`` under the policy that the actions come from.
        other_log_prob: ``[...]`` of the same actions under the other one.

    Source: Schulman 2020, "Approximating KL divergence", estimator k3.
    """
    d = other_log_prob - log_prob
    # expm1 keeps the digits of a small d that exp(d) - 1 loses; where a device does not round it correctly it may be an ulp below d.
    low, excess = _split(d)
    return torch.clamp(torch.expm1(low) + torch.exp(low) * excess - d, min=0)


def approx_kl(log_prob: Tensor, old_log_prob: Tensor, valid: Tensor | Absent = ()) -> Tensor:
    """Estimate of ``KL(old || new)`` from actions of the old policy by :func:`k3`, 0-d."""
    log_prob, old_log_prob = _counted(valid, log_prob, old_log_prob)
    return _mean(k3(old_log_prob, log_prob), valid)


def gaussian_kl(old_mean: Tensor, old_std: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """``KL(old || new)`` of diagonal Gaussians given by mean and std ``[..., A]``, exact: ``[...]``; 0 for equal ones. Stds are at least 1e-8."""
    old = NormalParams(mean=old_mean, log_std=torch.log(torch.clamp(old_std, min=1e-8)))
    new = NormalParams(mean=mean, log_std=torch.log(torch.clamp(std, min=1e-8)))
    return diagonal_normal(mean.shape[-1]).kl(old, new)


def adaptive_learning_rate(
    learning_rate: Tensor, kl: Tensor, desired_kl: float | Tensor, minimum: float | Tensor = 1e-5, maximum: float | Tensor = 1e-2, factor: float = 1.5
) -> Tensor:
    """The rate for a measured KL: ``max(minimum, lr / 1.5)`` where ``kl > 2 desired``, ``min(maximum, 1.5 lr)`` where ``0 < kl < desired / 2``, else ``lr``.

    A rate that starts inside [minimum, maximum] stays inside; each bound acts only in its own branch, so a start outside is not pulled in by the other. A
    KL that is NaN, 0 or negative changes nothing, an infinite one lowers the rate.

    Args:
        learning_rate: ``[]`` or ``[...]``.
        kl: same shape.
        desired_kl: positive.
        minimum: positive.
        maximum: at least ``minimum``.
        factor: above 1.

    Returns:
        The shape and dtype of ``learning_rate``.

    Source: the step-size rule of Rudin et al. 2022, "Learning to walk in minutes using massively parallel deep reinforcement learning".
    """
    lower = torch.maximum(learning_rate / factor, _number(minimum, learning_rate))
    higher = torch.minimum(learning_rate * factor, _number(maximum, learning_rate))
    return torch.where(kl > 2 * desired_kl, lower, torch.where((kl > 0) & (kl < 0.5 * desired_kl), higher, learning_rate))


def _counted(valid: Tensor | Absent, *xs: Tensor) -> tuple[Tensor, ...]:
    """The samples with zeros for those that are not counted: a mean that skips them would still multiply their derivatives by zero."""
    return tuple(torch.where(valid, x, 0) for x in xs) if isinstance(valid, Tensor) else xs


def _mean(x: Tensor, valid: Tensor | Absent) -> Tensor:
    return masked_mean(x, valid) if isinstance(valid, Tensor) else x.mean()


def _number(value: float | Tensor, like: Tensor) -> Tensor:
    return value.to(like.dtype) if isinstance(value, Tensor) else torch.full((), value, dtype=like.dtype, device=like.device)


def _times(coefficient: float | Tensor, term: Tensor) -> Tensor:
    """The product, 0 for a coefficient of 0 and a term that is not finite; the derivative in the coefficient is the term, at 0 too."""
    factor = _number(coefficient, term)
    return factor * torch.where((factor != 0) | torch.isfinite(term), term, 0)


def _split(d: Tensor) -> tuple[Tensor, Tensor]:
    """``d`` up to the limit of the exponential, and what exceeds it."""
    limit = min(20.0, 0.5 * math.log(torch.finfo(d.dtype).max))
    # relu and not d - low, which is NaN at minus infinity; its derivative at the limit is 0 where that of the clamp is 1.
    return torch.clamp(d, max=limit), torch.relu(d - limit)


def _exp(d: Tensor) -> Tensor:
    low, excess = _split(d)
    return torch.exp(low) * (1 + excess)
