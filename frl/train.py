"""The training loop: collect, update, look, repeat. All that learns is in the state; all that the loop itself remembers is in ``LoopState``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from frl import compile as compiler
from frl.evaluate import EvaluationResult
from frl.types import Algorithm, Metrics, TrainState

_CHARTS = {"episode_reward_avg_100": "charts/episode_reward_avg_100", "episode_length_avg_100": "charts/episode_length_avg_100"}


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """When the loop does what.

    Attributes:
        total_updates: stop when the state has had so many updates (absolute, so that a resumed run counts what it had).
        total_timesteps: or when it has had so many environment steps; whole updates, so the last one may overshoot.
        eval_frequency_steps: environment steps between evaluations; 0 is never.
        num_eval_episodes: episodes of each.
        eval_seed: their seed, the same each time.
        best_eval_metric, best_eval_mode: what makes a state the best, ``"max"`` or ``"min"``.
        save_frequency_updates: updates between periodic saves; 0 is never.
        log_frequency_updates: updates between log records.
        skip_nonfinite_updates: raise ``FloatingPointError`` on a skipped update when false.
    """

    total_updates: int | None = None
    total_timesteps: int | None = None
    eval_frequency_steps: int = 0
    num_eval_episodes: int = 5
    eval_seed: int = 10_000
    best_eval_metric: str = "eval/avg_reward"
    best_eval_mode: str = "max"
    save_frequency_updates: int = 0
    log_frequency_updates: int = 1
    skip_nonfinite_updates: bool = True

    def __post_init__(self) -> None:
        budgets = [self.total_updates, self.total_timesteps]
        if sum(b is not None for b in budgets) != 1:
            raise ValueError(f"give exactly one of total_updates and total_timesteps, got {budgets}")
        for name in ("total_updates", "total_timesteps", "eval_frequency_steps", "save_frequency_updates"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")
        for name in ("num_eval_episodes", "log_frequency_updates"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.best_eval_mode not in ("max", "min"):
            raise ValueError(f"best_eval_mode must be 'max' or 'min', got {self.best_eval_mode!r}")


@dataclass
class LoopState:
    """What the loop remembers beside the training state; JSON values only.

    ``best_state`` is the training state of the best evaluation, kept in memory for the end of the run.
    """

    global_step: int = 0
    num_updates: int = 0
    best_eval_value: float | None = None
    best_global_step: int | None = None
    next_eval_step: int | None = None
    train_history: list[dict[str, float]] = field(default_factory=list)
    eval_history: list[dict[str, float]] = field(default_factory=list)
    last_train_metrics: dict[str, float] = field(default_factory=dict)
    last_eval_metrics: dict[str, float] = field(default_factory=dict)
    skipped_updates: int = 0
    steady_seconds: float = 0.0
    steady_steps: int = 0
    best_state: TrainState | None = None

    @property
    def steps_per_second(self) -> float:
        """Environment steps per second of updates that compiled nothing; evaluation and saving are outside."""
        return self.steady_steps / self.steady_seconds if self.steady_seconds else math.nan


def metrics_to_host(metrics: Metrics) -> dict[str, float]:
    """0-d tensors as floats, in one transfer."""
    if not metrics:
        return {}
    values = torch.stack([x.detach().to(torch.float64) for x in metrics.values()]).tolist()
    return dict(zip(metrics, values, strict=True))


def train(
    algorithm: Algorithm,
    state: TrainState,
    config: LoopConfig,
    *,
    evaluate: Callable[..., EvaluationResult] | None = None,
    loop: LoopState | None = None,
    on_record: Callable[[dict[str, float], int], None] | None = None,
    on_update: Callable[[TrainState, LoopState], None] | None = None,
    on_save: Callable[[TrainState, LoopState, str], None] | None = None,
) -> tuple[TrainState, LoopState]:
    """Run updates until the budget is reached.

    Args:
        algorithm: the triple.
        state: where to start; not changed.
        config: see :class:`LoopConfig`.
        evaluate: ``(params, norm_state, num_episodes=, seed=) -> EvaluationResult`` (:func:`frl.make_evaluator`).
        loop: continue this one.
        on_record: receives each record of scalars and its environment step.
        on_update: sees the state after every update.
        on_save: ``(state, loop, "best" | "periodic")``.

    Returns:
        The last state and the loop's own.

    Raises:
        FloatingPointError: an update was not finite and ``skip_nonfinite_updates`` is false; the state before it is lost to nobody, for it was never changed.
    """
    loop = loop or LoopState()
    every = config.eval_frequency_steps
    loop.num_updates, loop.global_step = int(state.counters["updates"]), int(state.counters["env_steps"])
    if every:  # not the loop's own: a best state is saved before its next evaluation is set, and the frequency may be another one now
        loop.next_eval_step = (loop.global_step // every + 1) * every

    def unfinished() -> bool:
        return loop.num_updates < config.total_updates if config.total_updates is not None else loop.global_step < (config.total_timesteps or 0)

    while unfinished():
        started, graphs, before = time.perf_counter(), compiler.graph_count(), loop.global_step
        state, rollout = algorithm.collect(state)
        state = algorithm.update(state, rollout)
        # The one transfer of an update: metrics and counters together.
        host = metrics_to_host({**state.metrics, **{f"counter/{k}": v for k, v in state.counters.items()}})
        counters = {k.removeprefix("counter/"): v for k, v in host.items() if k.startswith("counter/")}
        metrics = {k: v for k, v in host.items() if not k.startswith("counter/")}
        loop.num_updates, loop.global_step = int(counters["updates"]), int(counters["env_steps"])
        if compiler.graph_count() == graphs:
            loop.steady_seconds += time.perf_counter() - started
            loop.steady_steps += loop.global_step - before
        loop.skipped_updates = int(counters.get("skipped_updates", 0))
        if metrics.get("skipped_update") == 1.0 and metrics.get("skipped_excessive_gradient") == 0.0 and not config.skip_nonfinite_updates:
            raise FloatingPointError(
                f"update {loop.num_updates} has a loss or gradient that is not finite (loss {metrics.get('loss')}); parameters are unchanged"
            )
        loop.last_train_metrics = {f"train/{k}": v for k, v in metrics.items() if k not in _CHARTS}
        record: dict[str, Any] = {"global_step": loop.global_step, "num_updates": loop.num_updates, "charts/SPS": loop.steps_per_second}
        record.update({_CHARTS[k]: v for k, v in metrics.items() if k in _CHARTS})
        record.update(loop.last_train_metrics)
        loop.train_history.append(record)
        if on_record is not None and (loop.num_updates % config.log_frequency_updates == 0 or not unfinished()):
            on_record({k: v for k, v in record.items() if k != "global_step"}, loop.global_step)
        if on_update is not None:
            on_update(state, loop)
        saved = False
        if every and evaluate is not None and loop.next_eval_step is not None and loop.global_step >= loop.next_eval_step:
            saved = _evaluate(state, loop, config, evaluate, on_record, on_save)
            loop.next_eval_step = (loop.global_step // every + 1) * every
        if on_save is not None and not saved and config.save_frequency_updates and loop.num_updates % config.save_frequency_updates == 0:
            on_save(state, loop, "periodic")
    return state, loop


def _evaluate(state: TrainState, loop: LoopState, config: LoopConfig, evaluate: Callable, on_record: Callable | None, on_save: Callable | None) -> bool:
    """Evaluate, remember, and save a new best; whether it saved."""
    result = evaluate(state.params, state.norm_state, num_episodes=config.num_eval_episodes, seed=config.eval_seed)
    loop.last_eval_metrics = result.metrics
    loop.eval_history.append({"global_step": loop.global_step, **result.metrics})
    if on_record is not None:
        on_record(result.metrics, loop.global_step)
    value = result.metrics.get(config.best_eval_metric, math.nan)
    if not math.isfinite(value):
        return False
    sign = 1 if config.best_eval_mode == "max" else -1
    if loop.best_eval_value is not None and sign * value <= sign * loop.best_eval_value:
        return False
    loop.best_eval_value, loop.best_global_step, loop.best_state = value, loop.global_step, state
    if on_save is not None:
        on_save(state, loop, "best")
        return True
    return False
