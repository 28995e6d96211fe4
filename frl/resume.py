"""Resuming a run: what a checkpoint of a run holds, whether it fits the run file, and the state to go on from."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from frl import checkpoint as checkpoints
from frl.build import last_update
from frl.checkpoint import CheckpointError
from frl.config import ConfigError, RunConfig, dump_run_config
from frl.fingerprint import changes
from frl.history import unpack_history
from frl.optim import coerce_lr_scheduler_cfg, scheduler_needs_horizon
from frl.provenance import moved
from frl.run_directory import Candidate, resume_candidates
from frl.saving import HISTORIES, LOOP_FIELDS
from frl.train import LoopState
from frl.types import TrainState


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint of a run."""

    path: Path
    tensors: dict[str, torch.Tensor]  # of the training state, by key path
    loop: dict[str, Any]  # what the loop remembers, histories included
    config: dict[str, Any]
    schedule: dict[str, Any]  # begin: updates made when the learning-rate schedule began; updates: its length
    environment: dict[str, Any]
    fingerprint: dict[str, Any]

    @classmethod
    def read(cls, path: Path, sha256: str | None = None) -> SavedRun:
        """Read a checkpoint file.

        Args:
            path: the file.
            sha256: the checksum that the manifest of its run has for it.

        Raises:
            CheckpointError: it is none, or none of a run, is damaged, or is not the file that the manifest means.
        """
        everything, metadata, digest = checkpoints.read_sealed(path)
        if sha256 is not None and digest != sha256:
            raise CheckpointError(f"{path} is not the file that its run wrote there: its checksum is {digest[:12]}..., the manifest has {sha256[:12]}...")
        parts = {name: metadata.get(name) for name in ("loop", "config", "schedule", "environment", "fingerprint")}
        missing = [name for name, part in parts.items() if not isinstance(part, dict)]
        for name, keys in (("loop", (*LOOP_FIELDS, *HISTORIES)), ("schedule", ("begin", "updates"))):
            missing += [] if name in missing else [f"{name}.{key}" for key in keys if key not in metadata[name]]
        missing += [f"loop.{name}" for name in HISTORIES if f"loop.{name}" not in everything]
        if missing:
            raise CheckpointError(f"{path} is not a checkpoint of a run: its metadata lack {', '.join(dict.fromkeys(missing))}")
        loop = dict(metadata["loop"])
        try:
            loop.update({name: unpack_history(everything[f"loop.{name}"], loop[name]) for name in HISTORIES})
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged ({error})") from error
        tensors = {name: x for name, x in everything.items() if not name.startswith("loop.")}
        return cls(path, tensors, **{**parts, "loop": loop})  # pyright: ignore[reportArgumentType]

    @classmethod
    def find(cls, resume: str | Path | None, run: str | Path | None) -> SavedRun | None:
        """The checkpoint that ``resume`` and ``run`` name (:func:`frl.run_directory.resume_candidates`), ``None`` without any.

        For ``"latest"`` a file that is missing or damaged is reported in a ``RuntimeWarning`` and the one before it is taken.

        Raises:
            ValueError, FileNotFoundError, CheckpointError: none of them can be read; the message has the reason of each.
        """
        candidates = resume_candidates(resume, run)
        reasons: list[str] = []
        for candidate in candidates:
            try:
                saved = _read(candidate)
            except (CheckpointError, FileNotFoundError) as error:
                if len(candidates) == 1:
                    raise
                reasons.append(str(error))
                continue
            if reasons:
                warnings.warn(f"{'; '.join(reasons)}. Going on from {saved.path}, after update {saved.loop['num_updates']}", RuntimeWarning, stacklevel=3)
            return saved
        if reasons:
            raise CheckpointError(f"no checkpoint of {run} can be read: {'; '.join(reasons)}")
        return None


def _read(candidate: Candidate) -> SavedRun:
    if not candidate.path.is_file():
        raise FileNotFoundError(f"checkpoint {candidate.path} does not exist")
    return SavedRun.read(candidate.path, candidate.sha256)


# Trainer keys that change neither the updates nor the environment record, or that a resumed run is expected to change.
_FREE_TRAINER_KEYS = frozenset(
    (
        *("exp_name", "output_dir", "imports", "use_wandb", "wandb_project_name", "iterations", "total_timesteps", "seed"),
        *("save_freq", "save_frequency_updates", "save_frequency_minutes", "keep_checkpoints", "device", "compile_mode", "threads"),
        *("enable_eval", "eval_freq", "eval_seed", "num_eval_envs", "num_eval_episodes", "evaluation_mode", "max_eval_steps", "final_eval_episodes"),
        *("best_eval_metric", "best_eval_mode"),
    )
)


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


def resume_state(
    saved: SavedRun, like: TrainState, config: RunConfig, environment: Mapping[str, Any], fingerprint: Mapping[str, Any], restart: bool
) -> tuple[TrainState, LoopState]:
    """The state and loop of a checkpoint, with the settings that the run file has now; differences are reported.

    Args:
        saved: the checkpoint.
        like: a fresh state of the run.
        config: the run file.
        environment: record of where the run takes place now.
        fingerprint: of the run as it was built.
        restart: begin the learning-rate schedule anew.

    Raises:
        CheckpointError: the checkpoint does not fit; lists every difference of the fingerprints and of the tensors by key path.
    """
    now = json.loads(json.dumps(dump_run_config(config)))
    changed = {path: (old, new) for path, old, new in changes(saved.config, now) if path.removeprefix("trainer.") not in _FREE_TRAINER_KEYS}
    tensors = saved.tensors
    if changed:
        # A changed setting holds from here on; what was left alone goes on with the value it had reached, such as an adapted learning rate.
        fresh = {
            f"hyper.{name}": x
            for name, x in like.hyper.items()
            if f"algorithm.cfg.{name}" in changed or f"trainer.{name}" in changed or f"hyper.{name}" not in tensors
        }
        known = {f"hyper.{name}" for name in like.hyper}
        tensors = {**{name: x for name, x in tensors.items() if name in known or not name.startswith("hyper.")}, **fresh}
    like = like._replace(metrics=_metrics_like(tensors))
    problems = [f"{path}: the checkpoint has {old!r}, the run file makes it {new!r}" for path, old, new in changes(saved.fingerprint, fingerprint)]
    problems += checkpoints.mismatches(tensors, like)
    if problems:
        raise CheckpointError("\n  ".join([f"{saved.path} does not fit the run file:", *problems]))
    state = checkpoints.restore(tensors, like, what=str(saved.path))
    if changed:
        text = ", ".join(f"{path} {old!r} -> {new!r}" for path, (old, new) in changed.items())
        warnings.warn(f"the run file differs from the one of {saved.path}; what it says now holds from here on: {text}", RuntimeWarning, stacklevel=3)
    differences = moved(saved.environment, environment)
    if differences:
        warnings.warn(f"{saved.path} comes from another setting, so the run may not go on bit for bit: {', '.join(differences)}", RuntimeWarning, stacklevel=3)
    loop = LoopState(**{name: saved.loop[name] for name in (*LOOP_FIELDS, *HISTORIES)})
    if loop.train_history:
        loop.last_train_metrics = {name: value for name, value in loop.train_history[-1].items() if name.startswith("train/")}
    if restart:
        zero = torch.zeros_like(state.counters["successful_updates"])
        state = state._replace(counters={**state.counters, "successful_updates": zero})
    return state, loop


def _metrics_like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Metrics are of the last update only; a checkpoint may hold others than a fresh state does."""
    return {name.removeprefix("metrics."): x for name, x in tensors.items() if name.startswith("metrics.")}
