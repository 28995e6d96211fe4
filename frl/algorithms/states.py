"""Training states of algorithms on recorded rollouts: the first one, and the one after an update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from frl import rng, tree
from frl.algorithms import episodes
from frl.algorithms.transitions import by_time
from frl.returns import alive_mask
from frl.types import Metrics, Normalizer, Optimizer, PyTree, TrainState, Trajectory

COUNTERS = ("updates", "successful_updates", "skipped_updates", "env_steps", "rollouts", "nonfinite_rows")


def first_state(
    key: Tensor,
    env: Any,
    policy: Any,
    optimizer: Optimizer,
    normalizer: Normalizer | None,
    *,
    hyper: Mapping[str, float | None],
    metrics: Sequence[str],
    dtype: torch.dtype,
    group_size: int = 1,
    stagger: bool = False,
) -> TrainState:
    """The state before the first update.

    Args:
        key: int64 ``[2]``.
        env: rows of an environment, which begin their first episodes; a host's environment is reset.
        policy, optimizer, normalizer: of the algorithm.
        hyper: start values; ``None`` stands for no limit.
        metrics: names of what an update reports beside the statistics of episodes; NaN until then.
        dtype: of parameters and hyper-parameters.
        group_size: so many rows in a row begin in the same state.
        stagger: rows begin at different times of their episodes (:meth:`frl.VecEnv.stagger`).
    """
    key = key.to(env.device)
    k_params, k_env, k_run = rng.split(key, 3)
    params = policy.init(k_params, dtype=dtype, device=env.device)
    window = episodes.init(dtype, env.device)
    number = lambda x: torch.as_tensor(math.inf if x is None else float(x), dtype=dtype, device=env.device)
    zero = torch.zeros((), dtype=torch.int64, device=env.device)
    env_state = env.reset(group_keys(k_env, env.num_envs, group_size), env.default_params)
    return TrainState(
        params=params,
        opt_state=optimizer.init(params),
        norm_state=normalizer.init(device=env.device) if normalizer is not None else (),
        env_state=env.stagger(env_state) if stagger else env_state,
        key=k_run,
        hyper={name: number(x) for name, x in hyper.items()},
        counters={name: zero for name in COUNTERS},
        metrics={**episodes.episode_metrics(window, episodes.no_sums(dtype, env.device)), **{name: number(math.nan) for name in metrics}},
        extra={"episodes": window},
    )


def group_keys(key: Tensor, num_envs: int, group_size: int = 1) -> Tensor:
    """Keys of rows ``[N, 2]``: row i's is ``fold_in(key, i // G)``."""
    return rng.fold_in(key, torch.arange(num_envs, device=key.device) // group_size)


def finish_update(
    state: TrainState,
    carry: dict[str, Any],
    fine: Tensor,
    metrics: Metrics,
    fields: dict[str, Any],
    *,
    rate_in_hyper: bool,
    complete: bool,
    norm_state: PyTree,
    extra: dict[str, PyTree],
    key: Tensor,
) -> TrainState:
    """The state after an update: new values where all was finite, else the old ones, and counters and episode statistics in either case.

    Args:
        state: before the update.
        carry: of the last minibatch.
        fine: 0-d bool, what else must hold for the update to count.
        metrics: of the update.
        fields: the rollout (:func:`frl.algorithms.transitions.read_rollout`).
        rate_in_hyper: the learning rate is a state of its own.
        complete: count a row's first episode alone.
        norm_state, extra: new values, taken when the update counts.
        key: the next key.
    """
    ok = carry["ok"] & fine & tree.all_finite(carry["params"]) & torch.isfinite(carry["rate"])
    old_extra = {name: state.extra[name] for name in extra}
    hyper = dict(state.hyper)
    if rate_in_hyper:
        hyper["optimizer.learning_rate"] = torch.where(ok, carry["rate"], hyper["optimizer.learning_rate"])
    played = _trajectory(fields, complete)
    window, dtype = state.extra["episodes"], metrics["loss"].dtype
    sums = episodes.no_sums(dtype, ok.device)
    if "metrics" in fields:
        window, sums = episodes.track(window, played, complete=complete)
    steps = played.metrics["valid"].sum() if "valid" in played.metrics else played.reward.numel()
    added = {"updates": 1, "successful_updates": ok, "skipped_updates": ~ok, "env_steps": steps, "rollouts": 1, "nonfinite_rows": sums.nonfinite_rows}
    return TrainState(
        params=tree.where(ok, carry["params"], state.params),
        opt_state=tree.where(ok, carry["opt_state"], state.opt_state),
        norm_state=tree.where(ok, norm_state, state.norm_state),
        env_state=(),
        key=key,
        hyper=hyper,
        counters={name: state.counters[name] + added[name] for name in state.counters},
        metrics={**episodes.episode_metrics(window, sums), **metrics, "skipped_update": (~ok).to(dtype), "learning_rate": carry["rate"]},
        extra={**state.extra, **tree.where(ok, extra, old_extra), "episodes": window},
    )


def _trajectory(fields: dict[str, Any], complete: bool) -> Trajectory:
    """What the statistics of episodes need, time first."""
    terminated, truncated = by_time(fields["terminated"]), by_time(fields["truncated"])
    return Trajectory(
        obs=(),
        final_obs=(),
        action=(),  # pyright: ignore[reportArgumentType]
        raw=(),  # pyright: ignore[reportArgumentType]
        log_prob=(),  # pyright: ignore[reportArgumentType]
        entropy=(),  # pyright: ignore[reportArgumentType]
        reward=by_time(fields["reward"]),
        terminated=terminated,
        truncated=truncated,
        alive=alive_mask(terminated | truncated) if complete else (),  # pyright: ignore[reportArgumentType]
        metrics=tree.map(by_time, fields.get("metrics", {})),
        initial_obs=(),
    )
