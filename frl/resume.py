"""Resuming a run: what a checkpoint of a run holds, whether it fits the run file, and the state to go on from."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from frl import checkpoint as checkpoints
from frl.build import last_update
from frl.config import ConfigError, RunConfig, dump_run_config
from frl.optim import coerce_lr_scheduler_cfg, scheduler_needs_horizon
from frl.train import LoopState
from frl.types import TrainState

_LOOP_FIELDS = ("global_step", "num_updates", "best_eval_value", "best_global_step", "next_eval_step", "train_history", "eval_history", "last_eval_metrics")


def loop_json(loop: LoopState) -> dict[str, Any]:
    """What a checkpoint keeps of the loop, as JSON values."""
    return {name: getattr(loop, name) for name in _LOOP_FIELDS}


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint of a run."""

    path: Path
    tensors: dict[str, torch.Tensor]
    loop: dict[str, Any]
    config: dict[str, Any]
    schedule: dict[str, Any]  # begin: updates made when the learning-rate schedule began; updates: its length
    environment: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> SavedRun:
        """Read a checkpoint file; :class:`CheckpointError` when it is none, or none of a run."""
        tensors, metadata = checkpoints.read_checkpoint(path)
        parts = {name: metadata.get(name) for name in ("loop", "config", "schedule", "environment")}
        missing = [name for name, part in parts.items() if not isinstance(part, dict)]
        for name, keys in (("loop", _LOOP_FIELDS), ("schedule", ("begin", "updates"))):
            missing += [] if name in missing else [f"{name}.{key}" for key in keys if key not in metadata[name]]
        if missing:
            raise checkpoints.CheckpointError(f"{path} is not a checkpoint of a run: its metadata lack {', '.join(missing)}")
        return cls(path, tensors, **parts)  # pyright: ignore[reportArgumentType]


# Trainer keys that change neither the updates nor the environment record, or that a resumed run is expected to change.
_FREE_TRAINER_KEYS = frozenset(
    (
        *(
            "exp_name",
            "output_dir",
            "imports",
            "use_wandb",
            "wandb_project_name",
            "iterations",
            "total_timesteps",
            "seed",
            "save_freq",
            "save_frequency_updates",
        ),
        *("enable_eval", "eval_freq", "eval_seed", "num_eval_envs", "num_eval_episodes", "evaluation_mode", "max_eval_steps", "final_eval_episodes"),
        *("best_eval_metric", "best_eval_mode", "device", "compile_mode", "threads"),
    )
)
_COMPARED = ("torch", "machine", "device", "threads", "compile_mode")


def bind_schedule(config: RunConfig, label: str, saved: SavedRun | None, restart: bool) -> dict[str, int]:
    """``begin``: updates made when the learning-rate schedule begins; ``updates``: the length of one that has none of its own.

    Raises:
        ConfigError: a schedule that has begun would end before the budget.
    """
    done, steps = (saved.loop["num_updates"], saved.loop["global_step"]) if saved is not None else (0, 0)
    last = last_update(config, done, steps)
    if saved is None or restart:
        return {"begin": done, "updates": max(1, last - done)}
    begin, length = saved.schedule["begin"], saved.schedule["updates"]
    if not (_is_open(dump_run_config(config)) and _is_open(saved.config)):
        return {"begin": begin, "updates": max(1, last - begin)}
    if last > begin + length:
        key = "iterations" if config.trainer.total_timesteps is None else "total_timesteps"
        raise ConfigError(
            label,
            [
                f"trainer.{key}: goes on to update {last}, but the learning-rate schedule of {saved.path} was begun with an end at update {begin + length}; "
                "begin it anew over the updates that remain with resume_scheduler='restart' (--resume-scheduler restart), or keep the budget"
            ],
        )
    return {"begin": begin, "updates": length}


def _is_open(blocks: Mapping[str, Any]) -> bool:
    """Whether the length of the learning-rate schedule is left to the budget."""
    try:
        return scheduler_needs_horizon(coerce_lr_scheduler_cfg(blocks["algorithm"]["cfg"].get("lr_scheduler")))
    except (ValueError, TypeError, KeyError, AttributeError):
        return False  # refused elsewhere, or the own matter of a registered algorithm


def _changes(before: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """``(key path, value before, value now)`` of every setting that differs."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in {**before, **now}:
            yield from _changes(before.get(key), now.get(key), f"{path}.{key}" if path else key)
    elif before != now:
        yield path, before, now


def resume_state(saved: SavedRun, like: TrainState, config: RunConfig, environment: Mapping[str, Any], restart: bool) -> tuple[TrainState, LoopState]:
    """The state and loop of a checkpoint, with the settings that the run file has now; differences are reported."""
    now = json.loads(json.dumps(dump_run_config(config)))
    changes = {path: (old, new) for path, old, new in _changes(saved.config, now) if path.removeprefix("trainer.") not in _FREE_TRAINER_KEYS}
    tensors = saved.tensors
    if changes:
        # A changed setting holds from here on; what was left alone goes on with the value it had reached, such as an adapted learning rate.
        fresh = {
            f"hyper.{name}": x
            for name, x in like.hyper.items()
            if f"algorithm.cfg.{name}" in changes or f"trainer.{name}" in changes or f"hyper.{name}" not in tensors
        }
        known = {f"hyper.{name}" for name in like.hyper}
        tensors = {**{name: x for name, x in tensors.items() if name in known or not name.startswith("hyper.")}, **fresh}
    state = checkpoints.restore(tensors, like._replace(metrics=_metrics_like(tensors)), what=str(saved.path))
    if changes:
        text = ", ".join(f"{path} {old!r} -> {new!r}" for path, (old, new) in changes.items())
        warnings.warn(f"the run file differs from the one of {saved.path}; what it says now holds from here on: {text}", RuntimeWarning)
    moved = [f"{name} {saved.environment.get(name)!r} -> {environment[name]!r}" for name in _COMPARED if saved.environment.get(name) != environment[name]]
    if moved:
        warnings.warn(f"{saved.path} comes from another setting, so the run does not go on bit for bit: {', '.join(moved)}", RuntimeWarning)
    loop = LoopState(**{name: saved.loop[name] for name in _LOOP_FIELDS})
    if restart:
        zero = torch.zeros_like(state.counters["successful_updates"])
        state = state._replace(counters={**state.counters, "successful_updates": zero})
    return state, loop


def _metrics_like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Metrics are of the last update only; a checkpoint may hold others than a fresh state does."""
    return {name.removeprefix("metrics."): x for name, x in tensors.items() if name.startswith("metrics.")}
