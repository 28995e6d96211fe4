"""A run: from a run file to a directory that holds everything about it.

``<output_dir>/<exp_name>_<stamp>/`` has ``configs/train.yaml`` (every default resolved), ``checkpoints/*.safetensors``, ``metrics.jsonl``, ``logs/``
(TensorBoard), ``summary.json`` and ``run-manifest.json``, which names the latest and the best checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from frl import checkpoint as checkpoints
from frl import compile as compiler
from frl import rng
from frl.build import DTYPES, FINAL_SEED, build_run, last_update
from frl.config import RunConfig, dump_run_config, load_run_config, write_yaml
from frl.evaluate import EvaluationResult, make_evaluator
from frl.logs import Progress, RunLog
from frl.resume import SavedRun, bind_schedule, loop_json, resume_state
from frl.run_directory import MANIFEST, MANIFEST_VERSION, RunDirectory, environment_record, resolve_resume, write_json
from frl.train import LoopState, train
from frl.types import TrainState


def train_from_config(
    path: str | Path | RunConfig,
    *,
    resume: str | Path | None = None,
    run: str | Path | None = None,
    resume_scheduler: str = "restore",
    profile: bool = False,
    overrides: Sequence[str] = (),
    progress: bool = False,
) -> dict[str, Any]:
    """Train what a run file describes and return the summary that ``summary.json`` holds.

    Args:
        path: a ``.yaml``, ``.yml`` or ``.json`` run file, or a ``RunConfig``.
        resume: checkpoint file, or ``"latest"`` / ``"best"`` of ``run``.
        run: run directory to resume from; the resumed run gets a directory of its own.
        resume_scheduler: ``"restore"`` continues the learning-rate schedule over the length it began with, ``"restart"`` begins it anew over the updates
            that remain. A schedule whose length was that of the budget is not restored into a longer budget.
        profile: write a trace of a few updates to ``profile.json`` in the run directory (open it in Perfetto or ``chrome://tracing``).
        overrides: ``"trainer.num_envs=32"`` and the like, for a run file.
        progress: show a live line on a terminal.

    Returns:
        ``global_step, num_updates, elapsed_time_sec, training_fps, last_train_metrics, last_eval_metrics`` (of the final evaluation, on episodes that no
        earlier evaluation has played), ``best_eval_metrics`` (the same for the best state), ``train_history, eval_history, latest_checkpoint_path,
        best_checkpoint_path, compile_seconds, seconds_to_first_update, run_directory``.

    Raises:
        ConfigError, ValueError, TypeError: the file or a combination of options is wrong; nothing has been written then.
        CheckpointError: the checkpoint does not fit.

    A resumed run takes its settings from the run file: what differs from the checkpoint's is said in a ``RuntimeWarning``, and hyper-parameters that the file
    left alone go on with the values they had reached. So is another machine, thread count or compile mode, with which a run is no longer the same bit for bit.
    """
    if resume_scheduler not in ("restore", "restart"):
        raise ValueError(f"resume_scheduler must be 'restore' or 'restart', got {resume_scheduler!r}")
    if resume_scheduler == "restart" and resume is None:
        raise ValueError("resume_scheduler='restart' needs resume")
    source = resolve_resume(resume, run)
    if isinstance(path, RunConfig) and overrides:
        raise ValueError("overrides belong to a run file; change the RunConfig itself")
    label = "RunConfig" if isinstance(path, RunConfig) else str(path)
    config = path if isinstance(path, RunConfig) else load_run_config(path, overrides)
    started = time.perf_counter()
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        if config.trainer.threads is not None:
            torch.set_num_threads(config.trainer.threads)
        torch.use_deterministic_algorithms(config.trainer.torch_deterministic or deterministic)
        with ExitStack() as opened:
            return _run(config, label, source, resume_scheduler == "restart", profile, progress, started, opened)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


def _run(config: RunConfig, label: str, source: Path | None, restart: bool, profile: bool, progress: bool, started: float, opened: ExitStack) -> dict[str, Any]:
    compiled = compiler.compile_seconds()
    cfg = config.trainer
    saved = None if source is None else SavedRun.read(source)
    schedule = bind_schedule(config, label, saved, restart)
    parts = build_run(config, source=label, schedule_updates=schedule["updates"])
    opened.callback(parts.close)
    environment = environment_record(parts.env.device, cfg.compile_mode)
    state = parts.algorithm.init(rng.key(parts.seed, parts.env.device))
    loop = LoopState()
    if saved is not None:
        state, loop = resume_state(saved, state, config, environment, restart)
        state = parts.resumed(state)
    evaluate = make_evaluator(
        parts.eval_env,
        parts.policy,
        parts.normalizer,
        clip_actions=cfg.clip_actions_to_space,
        mode=cfg.evaluation_mode,
        max_steps=cfg.max_eval_steps,
        dtype=DTYPES[cfg.dtype],
        compile_mode=cfg.compile_mode,
    )
    name = cfg.exp_name or f"{cfg.learning_env.name}_{config.algorithm.name}"
    directory = RunDirectory.create(cfg.output_dir, name)
    write_yaml(_made(directory.path / "configs") / "train.yaml", dump_run_config(config))
    write_json(directory.path / "environment.json", {**environment, "seed": parts.seed, "resumed_from": source})
    latest: dict[str, Path | None] = {"latest": None, "best": None}

    def save(state: TrainState, loop: LoopState, kind: str) -> None:
        target = directory.checkpoint(kind, loop.global_step)
        metadata = {"loop": loop_json(loop), "config": dump_run_config(config), "schedule": schedule, "environment": environment}
        checkpoints.save_checkpoint(target, state, metadata)
        latest["latest"] = target
        if kind == "best":
            latest["best"] = target
        files = {key: value.relative_to(directory.path).as_posix() if value else None for key, value in latest.items()}
        write_json(directory.path / MANIFEST, {"schema_version": MANIFEST_VERSION, "configs": {"train": "configs/train.yaml"}, "checkpoints": files})

    first: list[float] = []
    with ExitStack() as stack:
        log = RunLog(directory.path, name, wandb_project=cfg.wandb_project_name if cfg.use_wandb else None, config=dump_run_config(config))
        stack.callback(log.close)
        total = parts.loop_config.total_updates or parts.loop_config.total_timesteps or 0
        bar = stack.enter_context(Progress(total, enabled=progress))
        tracer = None
        if profile:
            remaining = last_update(config, int(state.counters["updates"]), int(state.counters["env_steps"])) - int(state.counters["updates"])
            tracer = _Tracer(directory.path / "profile.json", after=max(0, min(2, remaining - 1)))
            stack.callback(tracer.close)

        def on_update(state: TrainState, loop: LoopState) -> None:
            if not first:
                first.append(time.perf_counter() - started)
            if tracer is not None:
                tracer.step()
            done = loop.num_updates if parts.loop_config.total_updates is not None else loop.global_step
            bar.update(done, _line(loop))

        state, loop = train(parts.algorithm, state, parts.loop_config, evaluate=evaluate, loop=loop, on_record=log.write, on_update=on_update, on_save=save)
        if tracer is not None:
            tracer.close()
        save(state, loop, "last")
        trained = time.perf_counter() - started
        best_metrics: dict[str, float] = {}
        if cfg.final_eval_episodes:
            final = _final(evaluate, state, cfg.final_eval_episodes, parts.eval_seed)
            loop.last_eval_metrics = final.metrics
            log.write({f"final_{k}": v for k, v in final.metrics.items()}, loop.global_step)
            if loop.best_state is not None:
                best_metrics = _final(evaluate, loop.best_state, cfg.final_eval_episodes, parts.eval_seed).metrics
    summary = {
        "global_step": loop.global_step,
        "num_updates": loop.num_updates,
        "skipped_updates": loop.skipped_updates,
        "elapsed_time_sec": trained,
        "training_fps": loop.steps_per_second,
        "compile_seconds": compiler.compile_seconds() - compiled,
        "seconds_to_first_update": first[0] if first else math.nan,
        "last_train_metrics": loop.last_train_metrics,
        "last_eval_metrics": loop.last_eval_metrics,
        "best_eval_metrics": best_metrics,
        "best_eval_value": loop.best_eval_value,
        "latest_checkpoint_path": str(latest["latest"]) if latest["latest"] else None,
        "best_checkpoint_path": str(latest["best"]) if latest["best"] else None,
        "run_directory": str(directory.path),
        "seed": parts.seed,
        "train_history": loop.train_history,
        "eval_history": loop.eval_history,
    }
    write_json(directory.path / "summary.json", summary)
    return summary


def _final(evaluate: Any, state: TrainState, episodes: int, eval_seed: int) -> EvaluationResult:
    return evaluate(state.params, state.norm_state, num_episodes=episodes, seed=eval_seed + FINAL_SEED)


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _line(loop: LoopState) -> dict[str, str]:
    last = loop.train_history[-1]
    shown = {"steps": f"{loop.global_step:,}", "return": last.get("charts/episode_reward_avg_100", math.nan), "speed": loop.steps_per_second}
    text = {"steps": str(shown["steps"])}
    if math.isfinite(float(shown["return"])):
        text["return"] = f"{shown['return']:.2f}"
    success = loop.last_eval_metrics.get("eval/success_rate", last.get("train/success_rate", math.nan))
    if success is not None and math.isfinite(success):
        text["success"] = f"{success:.2f}"
    if math.isfinite(float(shown["speed"])):
        text["speed"] = f"{float(shown['speed']) / 1e3:.0f}k steps/s"
    return text


class _Tracer:
    """A torch profiler trace of three updates, or of those that there are, after the first ``after``."""

    def __init__(self, path: Path, after: int) -> None:
        self._path, self._after, self._count = path, after, 0
        self._profiler: Any = None
        if after == 0:
            self._start()

    def _start(self) -> None:
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as make

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profiler = make(activities=activities)
        self._profiler.start()

    def step(self) -> None:
        """Call after every update."""
        self._count += 1
        if self._count == self._after:
            self._start()
        elif self._count == self._after + 3:
            self.close()

    def close(self) -> None:
        """Stop and write, if that has not been done."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self._path))
            self._profiler = None
