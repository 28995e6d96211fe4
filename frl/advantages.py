"""Advantages: how much better a step turned out than expected, by a critic (GAE) or by comparison within a group (GRPO).

The advantages of a batch are put on one scale by :func:`normalize_advantage`. The functions take arrays and know no network or environment. Time comes
first, ``[T, ...]``; :func:`compute_gae_rollout` does the same for recorded TensorDicts ``[N, T+1]``. There is no loop over time, and what happens after a
done reaches nothing before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from frl.numerics import masked_mean, masked_std, masked_var, safe_div
from frl.returns import discounted_suffix_sums, unit_number

if TYPE_CHECKING:
    from tensordict import TensorDict

Absent: TypeAlias = tuple[()]

BOOTSTRAPS = ("final_obs", "pre_step")


class Gae(NamedTuple):
    """Advantages and the returns that a critic learns."""

    advantage: Tensor  # [T, ...]
    returns: Tensor  # [T, ...] advantage + value


class GroupAdvantages(NamedTuple):
    """Advantages within groups, and how many groups told nothing."""

    advantage: Tensor  # [..., N]
    tied_fraction: Tensor  # [] of the groups at a step with at least two counted rows, those whose returns are equal


def compute_gae(
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    truncated: Tensor | Absent,
    *,
    gamma: float | Tensor,
    gae_lambda: float | Tensor,
    final_value: Tensor | Absent = (),
    bootstrap: str = "final_obs",
    valid: Tensor | Absent = (),
) -> Gae:
    """Generalised advantage estimation: ``delta_t = r_t + gamma V'_t - V_t``, ``A_t = delta_t + gamma lambda (1 - done_t) A_{t+1}``, ``R_t = A_t + V_t``.

    ``V'_t`` is what the state after the step is worth: ``V_{t+1}`` where the episode goes on, 0 where it terminated, ``final_value_t`` where it was only
    truncated. Termination wins when both flags are set, and the sum is cut at either. Where ``V_{t+1}`` or ``final_value_t`` is not used it may be
    anything, NaN included.

    With ``bootstrap="pre_step"`` a truncated step takes ``V_t`` for ``V'_t`` even when it also terminated: biased, and there to reproduce the reference's
    figures.

    A step that ``valid`` leaves out is a hole: its advantage and return are 0, none of its entries is read but ``value``, and nothing flows through it: the
    step before it bootstraps from ``value`` there unless it is done. So the reset steps of environments that reset at the step after a done (gymnasium's
    ``NEXT_STEP``) disappear; in such an environment the observation that follows a truncated step is the final one, hence ``final_value=value[1:]``.

    Args:
        reward: floating ``[T, ...]``.
        value: floating ``[T+1, ...]``: values of the observations that were acted on, and of the one after the last step.
        terminated: bool ``[T, ...]``.
        truncated: bool ``[T, ...]``, or ``()`` where no time limit exists.
        gamma: discount in [0, 1]. A tensor (0-d, or one that broadcasts with a step) is not validated and may require a gradient; the same holds for the
            next.
        gae_lambda: 0 gives the one-step error, 1 the discounted return minus the value.
        final_value: floating ``[T, ...]``, the value of the observation after each step and before any reset.
        bootstrap: ``"final_obs"`` or ``"pre_step"``.
        valid: bool ``[T, ...]``; ``()`` counts every step.

    Returns:
        :class:`Gae`, ``(advantage, returns)``, each ``[T, ...]`` in the dtype that ``reward`` and ``value`` promote to. Gradients flow through all inputs;
        detach those through which they should not.

    Raises:
        ValueError: for shapes or dtypes other than these, ``T = 0``, numbers outside [0, 1], an unknown ``bootstrap``, and truncation flags without
            ``final_value`` under ``"final_obs"``.

    Source: Schulman et al. 2016, "High-dimensional continuous control using generalized advantage estimation", equation 16; time limits after Pardo et al.
    2018, "Time limits in reinforcement learning", section 3.
    """
    _check_steps(reward, value, terminated, truncated, final_value, valid)
    if bootstrap not in BOOTSTRAPS:
        raise ValueError(f"bootstrap must be one of {', '.join(BOOTSTRAPS)}, got {bootstrap!r}")
    if isinstance(truncated, Tensor) and bootstrap == "final_obs" and not isinstance(final_value, Tensor):
        raise ValueError(
            'bootstrap="final_obs" needs final_value, the value of the observation before the reset, for steps that are truncated; pass it, '
            'or truncated=() where there is no time limit, or bootstrap="pre_step" for the reference\'s biased rule'
        )
    dtype = torch.promote_types(reward.dtype, value.dtype)
    reward, value = reward.to(dtype), value.to(dtype)
    gamma = unit_number("gamma", gamma, dtype, reward.device)
    gae_lambda = unit_number("gae_lambda", gae_lambda, dtype, reward.device)

    now = value[:-1]
    after = torch.where(terminated, 0, value[1:])
    done = terminated
    if isinstance(truncated, Tensor):
        done = terminated | truncated
        if bootstrap == "pre_step":
            after = torch.where(truncated, now, after)
        elif isinstance(final_value, Tensor):
            after = torch.where(truncated & ~terminated, final_value.to(dtype), after)
    if isinstance(valid, Tensor):
        # The inputs are cleared, not the result: the gradient of gamma would meet zero times whatever stands in a hole.
        reward, now, after = (torch.where(valid, x, 0) for x in (reward, now, after))
        done = done | ~valid
    advantage = discounted_suffix_sums(reward + gamma * after - now, gamma * gae_lambda, ~done)
    return Gae(advantage=advantage, returns=advantage + now)


def compute_gae_rollout(rollout: TensorDict, gamma: float | Tensor, gae_lambda: float | Tensor, *, bootstrap: str = "final_obs") -> TensorDict:
    """:func:`compute_gae` over a recorded rollout: a new TensorDict with ``advantage`` and ``return``; the given one stays as it is.

    Args:
        rollout: TensorDict ``[N, T+1]`` (or with further leading dimensions) with ``reward``, ``value``, ``terminated`` and ``truncated``; ``final_value``,
            needed for ``"final_obs"``, and the mask ``valid`` are used when present. Where ``done`` is recorded too, a done that neither flag explains
            counts as a termination. Slot T holds the bootstrap value; its other entries are padding.
        gamma: discount in [0, 1].
        gae_lambda: in [0, 1].
        bootstrap: ``"final_obs"``, or ``"pre_step"``, the reference's rule.

    Returns:
        TensorDict with the same tensors, not copied, and ``advantage`` and ``return`` ``[N, T+1]``, 0 in slot T.

    Raises:
        ValueError: as :func:`compute_gae`, and for missing fields or ones that are not ``[N, T+1]``.
    """
    batch = tuple(rollout.batch_size)
    if len(batch) < 2 or batch[-1] < 2:
        raise ValueError(f"a rollout has batch size [N, T+1] with T of at least 1, got {list(batch)}")

    def steps(name: str) -> Tensor | Absent:
        found = rollout.get(name, None)
        if found is None:
            return ()
        if tuple(found.shape) != batch:
            raise ValueError(f"rollout field {name!r} must have shape {list(batch)}, got {list(found.shape)}")
        return found.movedim(-1, 0)

    fields = {name: steps(name) for name in ("reward", "value", "terminated", "truncated", "final_value", "valid", "done")}
    missing = [name for name in ("reward", "value", "terminated", "truncated") if not isinstance(fields[name], Tensor)]
    if missing:
        raise ValueError(f"the rollout has no {', '.join(missing)}; GAE needs reward, value, terminated and truncated")
    value = fields.pop("value")
    past = {name: x[:-1] for name, x in fields.items() if isinstance(x, Tensor)}
    if "done" in past:
        past["terminated"] = past["terminated"] | (past.pop("done") & ~past["truncated"])
    gae = compute_gae(value=value, gamma=gamma, gae_lambda=gae_lambda, bootstrap=bootstrap, **past)  # pyright: ignore[reportArgumentType]
    out = rollout.clone(recurse=False)
    for name, x in (("advantage", gae.advantage), ("return", gae.returns)):
        out.set(name, torch.cat([x, torch.zeros_like(x[:1])]).movedim(0, -1))
    return out


def group_advantages(returns_to_go: Tensor, mask: Tensor, group_size: int, eps: float = 1e-8) -> GroupAdvantages:
    """Returns compared within groups of neighbouring rows, step by step: ``A = (G - mean) / (std + eps)`` over the counted rows of a group.

    Mean and (population) standard deviation are those of the rows that ``mask`` counts. A return that is not finite is not counted either, so one bad row
    leaves the others of its group as they would be without it. Rows that are not counted get 0. A group whose std is at most ``1e-6 max(1, |mean|)`` is
    tied: its advantages are exactly 0, not rounding errors scaled up; that includes a row which is the only one left.

    Args:
        returns_to_go: floating ``[T, N]``, or any dimensions that end with rows; rows ``g G ... (g+1) G - 1`` are group ``g``.
        mask: bool, same shape: up to and including the first done, say (:func:`frl.returns.alive_mask`).
        group_size: G, at least 2; divides N.
        eps: at least 0, added to the std.

    Returns:
        :class:`GroupAdvantages`.

    Raises:
        ValueError: for shapes or dtypes other than these, or a bad ``group_size`` or ``eps``.

    Source: Shao et al. 2024, "DeepSeekMath", section 4.1; there one return for each row, here one for each row and step.
    """
    if not returns_to_go.is_floating_point() or mask.dtype != torch.bool or returns_to_go.shape != mask.shape or mask.ndim == 0:
        got = f"{returns_to_go.dtype} {list(returns_to_go.shape)} and {mask.dtype} {list(mask.shape)}"
        raise ValueError(f"returns_to_go must be floating and mask bool, both [..., N], got {got}")
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 2:
        raise ValueError(f"group_size must be an integer of at least 2, got {group_size!r}")
    rows = mask.shape[-1]
    if rows == 0 or rows % group_size:
        raise ValueError(f"the number of rows must be a multiple of group_size, got {rows} rows and group_size {group_size}")
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < float("inf"):
        raise ValueError(f"eps must be a finite number of at least 0, got {eps!r}")
    shape = (*mask.shape[:-1], rows // group_size, group_size)
    returns, counted = returns_to_go.reshape(shape), (mask & torch.isfinite(returns_to_go)).reshape(shape)
    mean = masked_mean(returns, counted, -1, keepdim=True)
    std = masked_std(returns, counted, -1, keepdim=True)
    tied = std <= 1e-6 * mean.abs().clamp(min=1)
    told = counted & ~tied
    deviation = torch.where(told, returns, mean) - mean
    advantage = torch.where(told, deviation / torch.where(tied, 1, std + eps), 0)
    compared = counted.sum(-1, keepdim=True) >= 2
    return GroupAdvantages(advantage=advantage.reshape(mask.shape), tied_fraction=masked_mean(tied.to(returns.dtype), compared))


def normalize_advantage(advantage: Tensor, valid: Tensor | Absent = (), eps: float = 1e-8) -> Tensor:
    """``(A - mean) / (std + eps)`` with the unbiased (n - 1) standard deviation over all counted samples; 0 for the others.

    Advantages that are equal, or differ by no more than rounding (std at most 16 units in the last place of the largest), become exactly 0, and so does a
    single sample. NaN comes out as NaN.

    Args:
        advantage: floating ``[...]``.
        valid: bool ``[...]``; ``()`` counts every sample.
        eps: added to the std.
    """
    mask = _mask(advantage, valid)
    mean, std = masked_mean(advantage, mask), masked_std(advantage, mask, correction=1)
    told = mask & ~(std <= _rounding(advantage, mask))
    return torch.where(told, torch.where(told, advantage, mean) - mean, 0) / torch.where(std == 0, 1, std + eps)


def explained_variance(value: Tensor, returns: Tensor, valid: Tensor | Absent = ()) -> Tensor:
    """``1 - Var(R - V) / Var(R)``, 0-d: 1 for a critic that is right up to a constant, below 0 for one that is worse than a constant.

    Where the returns vary by no more than rounding it is 1 if the errors do so too, else 0.

    Args:
        value: floating ``[...]``.
        returns: floating ``[...]``.
        valid: bool ``[...]``; ``()`` counts every sample.
    """
    mask = _mask(returns, valid)
    error, spread = masked_var(returns - value, mask), masked_var(returns, mask)
    least = _rounding(returns, mask) ** 2
    return torch.where(spread <= least, (error <= least).to(error.dtype), 1 - safe_div(error, spread))


def _mask(x: Tensor, valid: Tensor | Absent) -> Tensor:
    return valid if isinstance(valid, Tensor) else torch.ones_like(x, dtype=torch.bool)


def _rounding(x: Tensor, mask: Tensor) -> Tensor:
    """What a standard deviation must exceed to be more than rounding: 16 units in the last place of the largest counted element."""
    return 16 * torch.finfo(x.dtype).eps * torch.where(mask, x, 0).detach().abs().amax()


def _check_steps(reward: Tensor, value: Tensor, terminated: Tensor, truncated: Tensor | Absent, final_value: Tensor | Absent, valid: Tensor | Absent) -> None:
    if reward.ndim == 0 or reward.shape[0] == 0:
        raise ValueError(f"at least one step is needed, got reward of shape {list(reward.shape)}")
    steps = tuple(reward.shape)
    for name, x in {"reward": reward, "final_value": final_value, "terminated": terminated, "truncated": truncated, "valid": valid}.items():
        if not isinstance(x, Tensor):
            continue
        if tuple(x.shape) != steps:
            raise ValueError(f"{name} must have the shape of reward, {list(steps)}, got {list(x.shape)}")
        number = name in ("reward", "final_value")
        if not (x.is_floating_point() if number else x.dtype == torch.bool):
            raise ValueError(f"{name} must be {'floating' if number else 'bool'}, got {x.dtype}")
    if tuple(value.shape) != (steps[0] + 1, *steps[1:]) or not value.is_floating_point():
        raise ValueError(f"value must be floating with one entry more than reward, {[steps[0] + 1, *steps[1:]]}, got {value.dtype} {list(value.shape)}")
