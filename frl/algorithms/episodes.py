"""Statistics of finished episodes, kept in the training state: a ring of the last 100 returns and lengths."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from frl.numerics import masked_mean
from frl.types import Metrics, Trajectory

WINDOW = 100
METRICS = ("episode_return", "episode_length", "nonfinite", "success")  # what track reads


class EpisodeWindow(NamedTuple):
    """The most recent finished episodes."""

    returns: Tensor  # [100] undiscounted
    lengths: Tensor  # [100] steps
    count: Tensor  # [] int64, episodes finished so far


def init(dtype: torch.dtype, device: torch.device) -> EpisodeWindow:
    """An empty window."""
    empty = torch.zeros(WINDOW, dtype=dtype, device=device)
    return EpisodeWindow(returns=empty, lengths=empty, count=torch.zeros((), dtype=torch.int64, device=device))


def push(window: EpisodeWindow, finished: Tensor, returns: Tensor, lengths: Tensor) -> EpisodeWindow:
    """Add the episodes marked in ``finished [T, N]``, in time order; ``returns`` and ``lengths`` are those at each step."""
    mask = finished.reshape(-1)
    rank = mask.to(torch.int64).cumsum(0) - 1
    total = mask.sum()
    # Older episodes than the last 100 of this batch would be overwritten anyway; they go to a slot that is cut off, as do steps that finish nothing.
    kept = mask & (rank >= total - WINDOW)
    slot = torch.where(kept, (window.count + rank) % WINDOW, WINDOW)
    pad = torch.zeros(1, dtype=window.returns.dtype, device=window.returns.device)

    def put(old: Tensor, new: Tensor) -> Tensor:
        return torch.cat((old, pad)).scatter(0, slot, new.reshape(-1).to(old.dtype))[:WINDOW]

    return EpisodeWindow(returns=put(window.returns, returns), lengths=put(window.lengths, lengths), count=window.count + total)


def window_means(window: EpisodeWindow) -> tuple[Tensor, Tensor]:
    """Mean return and mean length over the window; NaN while it is empty."""
    valid = torch.arange(WINDOW, device=window.count.device) < window.count
    nan = torch.full((), float("nan"), dtype=window.returns.dtype, device=window.returns.device)
    some = window.count > 0
    return torch.where(some, masked_mean(window.returns, valid), nan), torch.where(some, masked_mean(window.lengths, valid), nan)


def track(window: EpisodeWindow, trajectory: Trajectory, *, complete: bool) -> tuple[EpisodeWindow, EpisodeSums]:
    """Window and metrics after one rollout.

    In a complete rollout a row's first episode counts alone: what follows is outside the objective. Rows reset because they were not finite are counted
    apart and never enter a mean.
    """
    metrics = trajectory.metrics
    bad = metrics["nonfinite"]
    finished = (trajectory.terminated | trajectory.truncated) & ~bad
    if complete:
        finished = finished & trajectory.alive
    window = push(window, finished, metrics["episode_return"], metrics["episode_length"])
    dtype = window.returns.dtype
    won = (metrics["success"].to(dtype) * finished).sum() if "success" in metrics else torch.full((), float("nan"), dtype=dtype, device=bad.device)
    return window, EpisodeSums(episodes=finished.sum(), nonfinite_rows=bad.sum(), successes=won)


class EpisodeSums(NamedTuple):
    """What one rollout adds; sums of several rollouts are sums of their fields."""

    episodes: Tensor  # [] int64
    nonfinite_rows: Tensor  # [] int64
    successes: Tensor  # [], NaN without a success metric


def no_sums(dtype: torch.dtype, device: torch.device) -> EpisodeSums:
    """Nothing yet."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return EpisodeSums(episodes=zero, nonfinite_rows=zero, successes=zero.to(dtype))


def episode_metrics(window: EpisodeWindow, sums: EpisodeSums) -> Metrics:
    """Metrics of an update: always these names."""
    mean_return, mean_length = window_means(window)
    rate = torch.where(sums.episodes > 0, sums.successes / sums.episodes.clamp(min=1), torch.nan)
    return {
        "episodes": sums.episodes,
        "nonfinite_rows": sums.nonfinite_rows,
        "episode_reward_avg_100": mean_return,
        "episode_length_avg_100": mean_length,
        "success_rate": rate,
    }
