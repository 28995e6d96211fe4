"""Recorded rollouts: what a policy did in an environment for T steps, scored and laid out as a TensorDict ``[N, T+1]``.

``make_recorder`` plays a policy and scores what was played outside the time loop, in one batched call: log-probabilities, distribution parameters and, with a
critic, the values of every observation and of the final ones. Index T is the bootstrap slot: observations and ``value`` are those after the last step,
every other field is 0 there. :mod:`frl.algorithms.transitions` takes a recording apart
again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from frl import compile as compiler
from frl import rng, tree
from frl.algorithms.play import make_play
from frl.distributions import NormalParams
from frl.envs.vector import VecEnv
from frl.normalizers import NormalizerState, variance
from frl.observations import flatten_observation_groups
from frl.types import Normalizer, Params, PyTree, Trajectory

if TYPE_CHECKING:
    from tensordict import TensorDict

PLAYED = ("obs", "action", "sample_log_prob", "reward", "done", "terminated", "truncated")
SMALLEST_STD = 1e-8


def flat_observations(obs: PyTree, groups: Sequence[str] | None) -> Tensor:
    """Observations ``[T, N, ...]`` as vectors ``[N, T, O]``."""
    steps, rows = tree.leaves(obs)[0].shape[:2]
    return flatten_observation_groups(tree.map(lambda x: x.flatten(0, 1), obs), groups).reshape(steps, rows, -1).movedim(1, 0)


def normalized(normalizer: Normalizer | None, state: PyTree, x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` as the networks see it, in their ``dtype``; its values as they are without a normalizer."""
    return (x if normalizer is None else normalizer.apply(normalizer.prepare(state, x.dtype), x)).to(dtype)


def scale_of(state: NormalizerState, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, 0-d, of a scalar's statistics; a deviation that is only rounding counts as 1."""
    mean, std = state.mean[0], torch.sqrt(variance(state)[0])
    std = torch.where(std <= 1e-6 * mean.abs(), 1.0, std)
    return mean.to(dtype), std.to(dtype)


def distribution_fields(dist: Any) -> dict[str, Tensor]:
    """Parameters of a distribution as fields of a recording: ``action_mean`` and ``action_std`` of a Gaussian, ``action_<name>`` of another."""
    if isinstance(dist, NormalParams):
        return {"action_mean": dist.mean, "action_std": torch.exp(dist.log_std)}
    return {f"action_{name}": value for name, value in dist._asdict().items()}


def distribution_names(policy: Any) -> tuple[str, ...]:
    """Names of :func:`distribution_fields` for a policy."""
    with torch.no_grad():
        return tuple(distribution_fields(policy.apply(policy.init(rng.key(0)), torch.zeros(policy.obs_dim))))


def recorded_distribution(like: Any, fields: Mapping[str, Tensor]) -> Any:
    """The recorded parameters, of the kind of ``like``. Inverse of :func:`distribution_fields`."""
    if isinstance(like, NormalParams):
        return NormalParams(mean=fields["action_mean"], log_std=torch.log(fields["action_std"].clamp(min=SMALLEST_STD)))
    return type(like)(**{name: fields[f"action_{name}"] for name in like._fields})


def make_recorder(
    env: Any,
    policy: Any,
    *,
    length: int,
    normalizer: Normalizer | None = None,
    critic_normalizer: Normalizer | None = None,
    critic: bool = True,
    clip_actions: bool = False,
    mode: str = "inductor",
) -> Callable[..., tuple[Any, TensorDict]]:
    """Build ``record(params, statistics, env_state, env_params, noise) -> (env_state, rollout)``.

    Args:
        env: N rows of an environment, functional or a host's (:class:`frl.HostEnv`).
        policy: what acts; its log-probability is that of the sample before squashing, clipping and a start offset, which is what ``action`` holds.
        length: T, the usual number of steps.
        normalizer: of the actor's observation.
        critic_normalizer: of the critic's; the same object as ``normalizer`` where they share statistics.
        critic: record values.
        clip_actions: clamp actions to the action space before the step.
        mode: a mode of :mod:`frl.compile`.

    Returns:
        ``record``: ``statistics`` has the entries ``actor``, ``critic`` (normalizer states) and ``value`` (statistics of the returns that the critic's
        output is scaled by), ``()`` where there are none; noise is ``[T, N, ...]``. The rollout has ``obs``, ``critic_obs`` (where it is another), ``action``,
        ``env_action`` (where the environment got another), ``sample_log_prob``, ``reward``, ``done``, ``terminated``, ``truncated``, ``valid`` (false where
        the row's state or reward was not finite, or the step only reset the row), the parameters of the action distribution, ``metrics`` of the
        environment, and with a critic ``value`` and ``final_value``, what the state after each step and before any reset is worth: 0 where the episode
        terminated.
    """
    names = ["obs", "raw", "metrics", *(["final_obs"] if critic else [])]
    probe = torch.zeros(1)
    # A distribution whose actions are its samples says so by returning its argument.
    same = policy.distribution.squash(probe) is probe and not clip_actions
    names = names if same else [*names, "action"]
    unroll = make_play(env, policy, normalizer, record=names, length=length, clip_actions=clip_actions, mode=mode)

    def score(params: Params, statistics: dict[str, PyTree], env_state: PyTree, env_params: PyTree, played: Trajectory) -> dict[str, Any]:
        (steps, rows), dtype = played.reward.shape, played.reward.dtype

        def by_row(x: Tensor) -> Tensor:
            return x.movedim(1, 0)

        def padded(x: Tensor) -> Tensor:
            return torch.cat([x, torch.zeros_like(x[:, :1])], 1)

        def seen(groups: Sequence[str] | None) -> Tensor:
            last = flatten_observation_groups(env.observe(env_state, env_params), groups)
            return torch.cat([flat_observations(played.obs, groups), last.unsqueeze(1)], 1)

        obs = seen(policy.obs_groups)
        # Two dimensions, as in a minibatch: the same matrix products score the actions again there.
        dist = policy.apply(params, normalized(normalizer, statistics["actor"], obs[:, :-1].reshape(rows * steps, -1), dtype))
        raw = by_row(played.raw)
        log_prob = policy.distribution.log_prob(dist, raw.reshape(rows * steps, *raw.shape[2:]))
        fields = {
            "action": raw,
            "sample_log_prob": log_prob.reshape(rows, steps),
            "reward": by_row(played.reward),
            "done": by_row(played.terminated | played.truncated),
            "terminated": by_row(played.terminated),
            "truncated": by_row(played.truncated),
            "valid": by_row(_counts(played.metrics)),
            **{name: x.reshape(rows, steps, *x.shape[1:]) for name, x in distribution_fields(dist).items()},
        }
        if not same:
            fields["env_action"] = by_row(played.action)
        whole = {"obs": obs}
        if critic:
            critic_obs = seen(policy.critic_obs_groups) if policy.uses_separate_critic_obs else obs
            if policy.uses_separate_critic_obs:
                whole["critic_obs"] = critic_obs

            def value(x: Tensor) -> Tensor:
                flat = normalized(critic_normalizer, statistics["critic"], x.reshape(-1, x.shape[-1]), dtype)
                out = policy.value(params, flat).reshape(x.shape[:-1])
                if isinstance(statistics["value"], NormalizerState):
                    mean, std = scale_of(statistics["value"], out.dtype)
                    out = out * std + mean
                return out

            whole["value"] = value(critic_obs)
            final_obs = flat_observations(played.final_obs, policy.critic_obs_groups)
            cut = fields["truncated"] & ~fields["terminated"]
            fields["final_value"] = _final_values(value, whole["value"], final_obs, fields["done"], cut, _most_cuts(env, steps))
        metrics = {name: padded(by_row(x)) for name, x in played.metrics.items()}
        return {**whole, **{name: padded(x) for name, x in fields.items()}, "metrics": metrics}

    score = compiler.jit(score, mode=mode)

    def record(params: Params, statistics: dict[str, PyTree], env_state: PyTree, env_params: PyTree, noise: Tensor) -> tuple[Any, TensorDict]:
        from tensordict import TensorDict

        usual = isinstance(env, VecEnv) and noise.shape[0] == length
        with torch.no_grad():
            env_state, fields = (at_once if usual else play_and_score)(params, statistics, env_state, env_params, noise)
        return env_state, TensorDict(fields, batch_size=fields["reward"].shape)

    def play_and_score(params: Params, statistics: dict[str, PyTree], env_state: PyTree, env_params: PyTree, noise: Tensor) -> tuple[Any, dict[str, Any]]:
        env_state, trajectory = unroll(params, statistics["actor"], env_state, env_params, noise)
        played = trajectory._replace(alive=(), initial_obs=())  # pyright: ignore[reportArgumentType]
        return env_state, score(params, statistics, env_state, env_params, played)

    at_once = compiler.whole(play_and_score, mode=mode)

    return record


def _counts(metrics: Mapping[str, Tensor]) -> Tensor:
    """Steps that were finite, and more than the reset of a row."""
    return ~metrics["nonfinite"] & metrics["valid"] if "valid" in metrics else ~metrics["nonfinite"]


def _most_cuts(env: Any, steps: int) -> int:
    """How often a row can be truncated in so many steps; a functional environment is so by its time limit alone."""
    if not isinstance(env, VecEnv):
        return steps
    limit = env.spec.max_episode_steps
    return 0 if limit is None else (steps - 1) // limit + 1


def _final_values(value: Callable[[Tensor], Tensor], values: Tensor, final_obs: Tensor, done: Tensor, cut: Tensor, most: int) -> Tensor:
    """Values after each step ``[N, T]``: that of the next observation where the episode goes on, of the final one where it was cut, 0 where it terminated.

    The critic sees the final observations of the cut steps alone, at most ``most`` of a row.
    """
    going_on = torch.where(done, 0, values[:, 1:])
    if most == 0:
        return going_on
    rank = torch.cumsum(cut, 1) - 1
    time = torch.arange(cut.shape[1], device=cut.device).expand(cut.shape)
    # Steps that are not cut all go to a place behind the others.
    places = torch.zeros(cut.shape[0], most + 1, dtype=torch.int64, device=cut.device).scatter(1, torch.where(cut, rank, most), time)[:, :most]
    seen = torch.gather(final_obs, 1, places.unsqueeze(-1).expand(*places.shape, final_obs.shape[-1]))
    return torch.where(cut, torch.gather(value(seen), 1, rank.clamp(min=0)), going_on)
