"""The training loop: collect, update, look, repeat. All that learns is in the state; all that the loop itself remembers is in ``LoopState``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from frl import compile as compiler
from frl.callbacks import Callbacks, Event, Watchers
from frl.evaluate import EvaluationResult
from frl.phases import Phases
from frl.types import Algorithm, Metrics, TrainState
from frl.validate import require_choice, require_count, require_number

_CHARTS = {"episode_reward_avg_100": "charts/episode_reward_avg_100", "episode_length_avg_100": "charts/episode_length_avg_100"}


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """When the loop does what.

    Attributes:
        total_updates: stop when the state has had so many updates (absolute, so that a resumed run counts what it had).
        total_timesteps: or when it has had so many environment steps; whole updates, so the last one may overshoot.
        stop_after_updates: or, before that, after so many updates of this call; the budget, and what is scheduled over it, stays where it is.
        eval_frequency_steps: environment steps between evaluations; 0 is never.
        num_eval_episodes: episodes of each.
        eval_seed: their seed, the same each time.
        best_eval_metric, best_eval_mode: what makes a state the best, ``"max"`` or ``"min"``.
        save_frequency_updates: updates between periodic saves; 0 is never.
        save_frequency_steps: or environment steps between them: a save is due whenever another multiple of it has been passed.
        save_frequency_seconds: or seconds on the clock since the last save of any kind; 0 is never.
        log_frequency_updates: updates between log records.
        skip_nonfinite_updates: raise ``FloatingPointError`` on a skipped update when false.
    """

    total_updates: int | None = None
    total_timesteps: int | None = None
    stop_after_updates: int | None = None
    eval_frequency_steps: int = 0
    num_eval_episodes: int = 5
    eval_seed: int = 10_000
    best_eval_metric: str = "eval/avg_reward"
    best_eval_mode: str = "max"
    save_frequency_updates: int = 0
    save_frequency_steps: int = 0
    save_frequency_seconds: float = 0.0
    log_frequency_updates: int = 1
    skip_nonfinite_updates: bool = True

    def __post_init__(self) -> None:
        budgets = [self.total_updates, self.total_timesteps]
        if sum(b is not None for b in budgets) != 1:
            raise ValueError(f"give exactly one of total_updates and total_timesteps, got {budgets}")
        for name in ("total_updates", "total_timesteps", "eval_frequency_steps", "save_frequency_updates", "save_frequency_steps"):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name), 0)
        for name in ("num_eval_episodes", "log_frequency_updates"):
            require_count(name, getattr(self, name))
        if self.stop_after_updates is not None:
            require_count("stop_after_updates", self.stop_after_updates)
        require_number("save_frequency_seconds", self.save_frequency_seconds, at_least=0.0)
        require_choice("best_eval_mode", self.best_eval_mode, ("max", "min"))

    def reached(self, loop: LoopState) -> bool:
        """Whether the budget is used up."""
        if self.total_updates is not None:
            return loop.num_updates >= self.total_updates
        return loop.global_step >= (self.total_timesteps or 0)


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
    callbacks: Callbacks = (),
    on_record: Callable[[dict[str, float], int], None] | None = None,
    on_update: Callable[[TrainState, LoopState], None] | None = None,
    on_save: Callable[[TrainState, LoopState, str], None] | None = None,
    stop: Callable[[], bool] | None = None,
    phases: Phases | None = None,
) -> tuple[TrainState, LoopState]:
    """Run updates until the budget is reached, or until asked to stop.

    Args:
        algorithm: the triple.
        state: where to start; not changed.
        config: see :class:`LoopConfig`.
        evaluate: ``(params, norm_state, num_episodes=, seed=) -> EvaluationResult`` (:func:`frl.make_evaluator`).
        loop: continue this one.
        callbacks: functions of an :class:`~frl.callbacks.Event`, called after every update, or :class:`~frl.callbacks.Callback` s.
        on_record: receives each record of scalars and its environment step.
        on_update: sees the state and the loop after every update.
        on_save: ``(state, loop, "best" | "periodic")``.
        stop: asked after every update; true ends the loop there.
        phases: counts the seconds of each part.

    Returns:
        The last state and the loop's own.

    Raises:
        FloatingPointError: an update was not finite and ``skip_nonfinite_updates`` is false; the state before it is lost to nobody, for it was never changed.
        RuntimeError: a callback changed the state in place.
    """
    loop, phases, watchers = loop or LoopState(), phases or Phases(), Watchers(callbacks)
    every = config.eval_frequency_steps
    loop.num_updates, loop.global_step = int(state.counters["updates"]), int(state.counters["env_steps"])
    loop.skipped_updates = int(state.counters.get("skipped_updates", 0))
    if every:  # not the loop's own: a best state is saved before its next evaluation is set, and the frequency may be another one now
        loop.next_eval_step = (loop.global_step // every + 1) * every
    last = None if config.stop_after_updates is None else loop.num_updates + config.stop_after_updates

    def over() -> bool:
        return config.reached(loop) or (last is not None and loop.num_updates >= last)

    def log(record: dict[str, float]) -> None:
        if on_record is not None:
            with phases("logging"):
                on_record({k: v for k, v in record.items() if k != "global_step"}, loop.global_step)

    def show(kind: str, state: TrainState, metrics: dict[str, float], before: int, result: EvaluationResult | None = None) -> None:
        if watchers:
            with phases("callbacks"):
                watchers.show(before, Event(kind=kind, state=state, metrics=metrics, global_step=loop.global_step, num_updates=loop.num_updates, result=result))

    stopped, saved_at = False, time.monotonic()
    while not over() and not stopped:
        started, graphs, before = time.perf_counter(), compiler.graph_count(), loop.global_step
        with phases("collect"):
            state, rollout = algorithm.collect(state)
        with phases("update"):
            state = algorithm.update(state, rollout)
            # The one transfer of an update: metrics and counters together.
            host = metrics_to_host({**state.metrics, **{f"counter/{k}": v for k, v in state.counters.items()}})
        record = advance(loop, host, config)
        if compiler.graph_count() == graphs:
            loop.steady_seconds += time.perf_counter() - started
            loop.steady_steps += loop.global_step - before
        record["charts/SPS"] = loop.steps_per_second
        if on_update is not None:
            on_update(state, loop)
        stopped = stop is not None and stop()
        if loop.num_updates % config.log_frequency_updates == 0 or over() or stopped:
            log(record)
        show("update", state, record, before)
        best = False
        # Also in a loop that ends here: what is due at an update belongs to it, and a resumed run does not do it again.
        if every and evaluate is not None and loop.next_eval_step is not None and loop.global_step >= loop.next_eval_step:
            with phases("evaluation"):
                result = evaluate(state.params, state.norm_state, num_episodes=config.num_eval_episodes, seed=config.eval_seed)
            # Your own evaluator may give numpy's numbers; what the loop remembers is saved and is plain.
            metrics = loop.last_eval_metrics = {name: float(value) for name, value in result.metrics.items()}
            loop.eval_history.append({"global_step": loop.global_step, **metrics})
            loop.next_eval_step = (loop.global_step // every + 1) * every
            log(metrics)
            show("evaluation", state, metrics, before, result)
            best = is_best(metrics, state, loop, config)
        if on_save is not None and (best or _save_due(config, before, loop, saved_at)):
            with phases("saving"):
                on_save(state, loop, "best" if best else "periodic")
            saved_at = time.monotonic()
    return state, loop


def advance(loop: LoopState, host: dict[str, float], config: LoopConfig) -> dict[str, float]:
    """Take the metrics and counters of an update into the loop; the record of the update, which is now the last of the history."""
    counters = {k.removeprefix("counter/"): v for k, v in host.items() if k.startswith("counter/")}
    metrics = {k: v for k, v in host.items() if not k.startswith("counter/")}
    if metrics.get("skipped_update") == 1.0 and metrics.get("skipped_excessive_gradient") == 0.0 and not config.skip_nonfinite_updates:
        raise FloatingPointError(
            f"update {int(counters['updates'])} has a loss or gradient that is not finite (loss {metrics.get('loss')}); parameters are unchanged"
        )
    loop.num_updates, loop.global_step = int(counters["updates"]), int(counters["env_steps"])
    loop.skipped_updates = int(counters.get("skipped_updates", 0))
    loop.last_train_metrics = {f"train/{k}": v for k, v in metrics.items() if k not in _CHARTS}
    record: dict[str, Any] = {"global_step": loop.global_step, "num_updates": loop.num_updates, "charts/SPS": math.nan}
    record.update({_CHARTS[k]: v for k, v in metrics.items() if k in _CHARTS})
    record.update(loop.last_train_metrics)
    loop.train_history.append(record)
    return record


def is_best(metrics: dict[str, float], state: TrainState, loop: LoopState, config: LoopConfig) -> bool:
    """Whether an evaluation beats those before; the first finite value does. What it was is remembered."""
    value = metrics.get(config.best_eval_metric, math.nan)
    sign = 1 if config.best_eval_mode == "max" else -1
    if not math.isfinite(value) or (loop.best_eval_value is not None and sign * value <= sign * loop.best_eval_value):
        return False
    loop.best_eval_value, loop.best_global_step, loop.best_state = value, loop.global_step, state
    return True


def _save_due(config: LoopConfig, before: int, loop: LoopState, saved_at: float) -> bool:
    updates, steps, seconds = config.save_frequency_updates, config.save_frequency_steps, config.save_frequency_seconds
    by_updates = updates and loop.num_updates % updates == 0
    by_steps = steps and loop.global_step // steps > before // steps
    return bool(by_updates or by_steps or (seconds and time.monotonic() - saved_at >= seconds))
