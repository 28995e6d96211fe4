"""Evaluation: play an exact number of episodes with a fixed policy and report every one of them.

Each row plays its own quota, so that short episodes are not over-represented; quotas differ by at most one and add up to the number asked for. The
normalizer is frozen and nothing of the training state changes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frl import rng
from frl.algorithms.play import check_fit, make_begin, make_play
from frl.types import Normalizer, Params, PyTree
from frl.validate import require_count

MODES = ("per_env_quota", "first_n")
_OWN = ("row", "truncated", "episode_return", "episode_length", "success", "nonfinite", "valid")  # what is no value of the environment's
_DOMAIN = 0x6576616C  # keeps the episodes of an evaluation seed apart from training with the same seed


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """What an evaluation found.

    Attributes:
        metrics: ``eval/avg_reward``, ``eval/avg_length``, ``eval/success_rate`` (NaN when the environment reports no success), ``eval/metrics/<name>``,
            standard deviations ``eval/std_reward``, and the half-width ``eval/ci95_reward`` of a 95 % confidence interval of the mean.
        returns: ``[episodes]`` undiscounted.
        lengths: ``[episodes]`` steps.
        rows: ``[episodes]`` the row that played it.
        truncated: ``[episodes]`` ended by the time limit alone.
        success: ``[episodes]`` or ``None``.
        values: ``{name: [episodes]}`` the environment's metrics at the last step.
        unfinished: episodes asked for that the step cap cut off.
    """

    metrics: dict[str, float]
    returns: np.ndarray
    lengths: np.ndarray
    rows: np.ndarray
    truncated: np.ndarray
    success: np.ndarray | None
    values: dict[str, np.ndarray] = field(default_factory=dict)
    unfinished: int = 0

    @property
    def episodes(self) -> int:
        return len(self.returns)


def episode_keys(seed: int | Tensor, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Keys of the environment and of the noise for an evaluation seed (an int, or a key itself)."""
    key = seed.to(device) if isinstance(seed, Tensor) else rng.fold_in(rng.key(seed, device), _DOMAIN)
    k_env, k_noise = rng.split(key, 2)
    return k_env, k_noise


def make_evaluator(
    env: Any,
    policy: Any,
    normalizer: Normalizer | None = None,
    *,
    deterministic: bool = True,
    clip_actions: bool = False,
    mode: str = "per_env_quota",
    max_steps: int | None = None,
    chunk: int = 50,
    dtype: torch.dtype = torch.float32,
    compile_mode: str = "inductor",
) -> Callable[..., EvaluationResult]:
    """Build ``evaluate(params, norm_state, *, num_episodes, seed, env_params=None, on_step=None) -> EvaluationResult``.

    Args:
        env: rows to play on (:func:`frl.make_vec_env`, or a :class:`frl.HostEnv`, which is reset and played: not the one that a training goes on in). They
            need not be those of training: what fits the policy can be played.
        policy, normalizer: as trained.
        deterministic: act by the mode of the distribution.
        clip_actions: as in training.
        mode: ``"per_env_quota"``, or ``"first_n"``: the first episodes to finish (over-represents short ones; for comparison with other systems).
        max_steps: cap on vector steps; needed for an environment without a time limit. Episodes cut off by it are reported as unfinished, never dropped
            silently.
        chunk: vector steps between looks at the results.
        dtype: of the noise.
        compile_mode: a mode of :mod:`frl.compile`.

    Raises:
        TypeError, ValueError: for bad counts, an unknown mode, an environment that the policy does not fit, or one without any limit.
    """
    if mode not in MODES:
        raise ValueError(f"evaluation mode must be one of {', '.join(MODES)}, got {mode!r}")
    if max_steps is not None:
        max_steps = require_count("max_steps", max_steps)
    check_fit(env, policy, "evaluation")
    limit = env.spec.max_episode_steps
    if limit is None and max_steps is None:
        raise ValueError(f"environment {env.spec.name!r} has no time limit, so an episode may never end; pass max_steps")
    if limit is not None and getattr(env, "autoreset", None) == "next_step":
        limit += 1  # vector steps of an episode: the one that resets its row is none of the episode's
    chunk = min(require_count("chunk", chunk), limit or chunk)
    unroll = make_play(env, policy, normalizer, record=("metrics",), length=chunk, deterministic=deterministic, clip_actions=clip_actions, mode=compile_mode)
    begin = make_begin(env, mode=compile_mode)

    def evaluate(
        params: Params,
        norm_state: PyTree = (),
        *,
        num_episodes: int,
        seed: int | Tensor = 0,
        env_params: PyTree = None,
        on_step: Callable[[dict[str, Any]], None] | None = None,
    ) -> EvaluationResult:
        num_episodes = require_count("num_episodes", num_episodes)
        k_env, k_noise = episode_keys(seed, env.device)
        env_params = env.default_params if env_params is None else env_params
        rows = env.num_envs
        quota = np.full(rows, num_episodes // rows) + (np.arange(rows) < num_episodes % rows)
        longest = math.inf if limit is None else limit * (int(quota.max()) if mode == "per_env_quota" else num_episodes)
        cap = min(longest, math.inf if max_steps is None else max_steps)
        state = begin(env.row_keys(k_env), env_params)
        finished = np.zeros(rows, dtype=np.int64)
        found: list[dict[str, np.ndarray]] = []
        played, total = 0, 0
        with torch.no_grad():
            while played < cap and total < num_episodes:
                if deterministic:
                    noise = torch.zeros(chunk, rows, policy.distribution.noise_dim, dtype=dtype, device=env.device)
                else:
                    noise = policy.noise(rng.fold_in(k_noise, played), chunk, rows, dtype=dtype)
                state, trajectory = unroll(params, norm_state, state, env_params, noise)
                host = {name: x.cpu().numpy() for name, x in trajectory.metrics.items()}
                host["truncated"] = (trajectory.truncated & ~trajectory.terminated).cpu().numpy()
                done = (trajectory.terminated | trajectory.truncated).cpu().numpy()
                done = done[: int(min(chunk, cap - played))]
                if on_step is not None:
                    for t in range(len(done)):
                        on_step({"done": done[t], **{name: x[t] for name, x in host.items()}})
                order = finished + done.cumsum(0)
                within = order <= quota if mode == "per_env_quota" else (done.ravel().cumsum() <= num_episodes - total).reshape(done.shape)
                taken = done & within
                finished = order[-1]
                t, row = np.nonzero(taken)
                found.append({"row": row, **{name: values[t, row] for name, values in host.items()}})
                total += len(t)
                played += len(done)
        return _summarise(_joined(found), num_episodes - total)

    return evaluate


def wilson_interval(successes: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Confidence interval of a rate, ``successes`` of ``count``: 95 % with ``z = 1.96``; also where all or none succeeded.

    Source: Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
    """
    rate, spread = successes / count, z * z / count
    centre = (rate + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(rate * (1 - rate) / count + spread / (4 * count))
    return min(rate, max(0.0, centre - half)), max(rate, min(1.0, centre + half))  # rounding does not leave the rate outside


def _joined(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Parts in a row. A host environment may come to report a metric late: earlier episodes have NaN there, or False."""
    joined = {}
    for name, last in parts[-1].items():
        filler = False if last.dtype == bool else math.nan
        joined[name] = np.concatenate([part[name] if name in part else np.full(len(part["row"]), filler) for part in parts])
    return joined


def _summarise(episodes: dict[str, np.ndarray], unfinished: int) -> EvaluationResult:
    returns, lengths = episodes["episode_return"].astype(np.float64), episodes["episode_length"]
    success = episodes["success"].astype(bool) if "success" in episodes else None
    n = len(returns)

    def mean(x: np.ndarray | None) -> float:
        return float(np.mean(x)) if x is not None and n else math.nan

    std = float(np.std(returns, ddof=1)) if n > 1 else math.nan
    metrics = {
        "eval/avg_reward": mean(returns),
        "eval/avg_length": mean(lengths),
        "eval/success_rate": mean(success),
        "eval/std_reward": std,
        "eval/ci95_reward": 1.96 * std / math.sqrt(n) if n > 1 else math.nan,
        "eval/episodes": float(n),
        "eval/unfinished": float(unfinished),
    }
    named = {k: v for k, v in episodes.items() if k not in _OWN}
    metrics.update({f"eval/metrics/{name}": mean(values) for name, values in named.items()})
    return EvaluationResult(
        metrics=metrics,
        returns=returns,
        lengths=lengths,
        rows=episodes["row"],
        truncated=episodes["truncated"],
        success=success,
        values=named,
        unfinished=unfinished,
    )


_recent: OrderedDict[tuple, tuple[tuple, Callable[..., EvaluationResult]]] = OrderedDict()


def evaluate_episodes(
    *,
    policy: Any,
    params: Params,
    env: Any,
    num_episodes: int,
    seed: int | Tensor = 0,
    normalizer: Normalizer | None = None,
    norm_state: PyTree = (),
    env_params: PyTree = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    **options: Any,
) -> EvaluationResult:
    """Play exactly ``num_episodes`` episodes; :func:`make_evaluator` with its options, built once for the same env, policy and normalizer.

    Args:
        policy, params, normalizer, norm_state: as trained.
        env: rows to play on.
        num_episodes: positive integer.
        seed: int, or a key; the same seed gives the same episodes.
        env_params: other than the environment's defaults.
        on_step: called with the numpy values of every vector step.
        **options: of :func:`make_evaluator`.
    """
    num_episodes = require_count("num_episodes", num_episodes)
    objects = (env, policy, normalizer)
    key = (*(id(x) for x in objects), tuple(sorted(options.items(), key=lambda item: item[0])))
    if key not in _recent:
        # The objects are kept with the evaluator, so that an id is not used again while its entry lives.
        _recent[key] = (objects, make_evaluator(env, policy, normalizer, **options))
        if len(_recent) > 8:
            _recent.popitem(last=False)
    evaluate = _recent[key][1]
    return evaluate(params, norm_state, num_episodes=num_episodes, seed=seed, env_params=env_params, on_step=on_step)
