"""A run: from a run file to a directory that holds everything about it.

``<output_dir>/<exp_name>_<stamp>/`` has ``configs/train.yaml`` (every default resolved), ``environment.json``, ``checkpoints/*.safetensors``,
``metrics.jsonl``, ``logs/`` (TensorBoard), ``summary.json`` and ``run-manifest.json``, which names the checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from frl import compile as compiler
from frl import logs, rng
from frl.build import DTYPES, FINAL_SEED, build_run, last_update
from frl.callbacks import Callbacks, as_callbacks
from frl.checkpoint import CheckpointError
from frl.config import RunConfig, dump_run_config, load_run_config, write_yaml
from frl.evaluate import make_evaluator
from frl.fingerprint import fingerprint
from frl.interrupts import Interrupted, Interrupts
from frl.population_run import train_population
from frl.profiling import Profile
from frl.provenance import environment_record
from frl.resume import SavedRun, bind_schedule, resume_state
from frl.run_directory import RunDirectory, write_json
from frl.saving import Saver
from frl.train import LoopState, train
from frl.types import TrainState
from frl.validate import require_count


def train_from_config(
    path: str | Path | RunConfig,
    *,
    resume: str | Path | None = None,
    run: str | Path | None = None,
    resume_scheduler: str = "restore",
    stop_after: int | None = None,
    profile: bool = False,
    overrides: Sequence[str] = (),
    callbacks: Callbacks = (),
    progress: bool = False,
) -> dict[str, Any]:
    """Train what a run file describes and return the summary that ``summary.json`` holds.

    Args:
        path: a ``.yaml``, ``.yml`` or ``.json`` run file, or a ``RunConfig``.
        resume: checkpoint file, or ``"latest"`` / ``"best"`` of ``run``. Where the latest is missing or damaged, that is reported and the one before is used.
        run: run directory to resume from; the resumed run gets a directory of its own.
        resume_scheduler: ``"restore"`` continues the learning-rate schedule over the length it began with, ``"restart"`` begins it anew over the updates
            that remain. A schedule whose length was that of the budget is not restored into a longer budget.
        stop_after: stop after so many updates of this process, to go on later with ``resume``; budget and schedules stay where they are.
        profile: write a trace of a few updates to ``profile.json`` in the run directory (open it in Perfetto or ``chrome://tracing``), and the seconds of
            each part of the loop to the summary.
        overrides: ``"trainer.num_envs=32"`` and the like, for a run file.
        callbacks: functions that are shown the state (:mod:`frl.callbacks`).
        progress: show a live line on a terminal.

    Returns:
        ``status`` (``"finished"``, or ``"stopped"`` by ``stop_after``), ``global_step, num_updates, elapsed_time_sec, training_fps, last_train_metrics,
        last_eval_metrics`` (of the final evaluation of a finished run, on episodes that no earlier evaluation has played), ``best_eval_metrics`` (the same
        for the best state), ``train_history, eval_history, latest_checkpoint_path, best_checkpoint_path, compile_seconds, seconds_to_first_update,
        run_directory, resumed_from, failed_saves, phases``.

    Raises:
        ConfigError, ValueError, TypeError: the file or a combination of options is wrong; nothing has been written then.
        CheckpointError: the checkpoint does not fit, or the last state could not be saved.
        Interrupted: Ctrl-C or SIGTERM came: the update was finished and its state saved, and the run can be resumed. A second signal ends the process at
            once. When anything else ends a run, its last good state is saved too.

    With a ``population`` in the run file see :func:`frl.population_run.train_population`, whose summary is that of the best member with a ranking.

    A resumed run takes its settings from the run file: what differs from the checkpoint's is said in a ``RuntimeWarning``, and hyper-parameters that the file
    left alone go on with the values they had reached. So is another machine, version, thread count or compile mode, with which a run may not be the same bit
    for bit.
    """
    if resume_scheduler not in ("restore", "restart"):
        raise ValueError(f"resume_scheduler must be 'restore' or 'restart', got {resume_scheduler!r}")
    if resume_scheduler == "restart" and resume is None:
        raise ValueError("resume_scheduler='restart' needs resume")
    if stop_after is not None:
        require_count("stop_after", stop_after)
    if isinstance(path, RunConfig) and overrides:
        raise ValueError("overrides belong to a run file; change the RunConfig itself")
    callbacks = as_callbacks(callbacks)
    label = "RunConfig" if isinstance(path, RunConfig) else str(path)
    config = path if isinstance(path, RunConfig) else load_run_config(path, overrides)
    if config.population is not None:
        if profile or callbacks or resume_scheduler != "restore":
            raise ValueError("a population takes neither callbacks nor a profile, and its learning-rate schedules go on as they are")
        return train_population(config, label, resume=resume, run=run, stop_after=stop_after, progress=progress)
    saved = SavedRun.find(resume, run)
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        if config.trainer.threads is not None:
            torch.set_num_threads(config.trainer.threads)
        torch.use_deterministic_algorithms(config.trainer.torch_deterministic or deterministic)
        with ExitStack() as opened:
            return _Run(config, label, saved, resume_scheduler == "restart", stop_after, profile, callbacks, opened).go(progress)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


class _Run:
    """One run of this process. Nothing is written before its directory is made, when everything else is known to fit."""

    def __init__(
        self,
        config: RunConfig,
        label: str,
        saved: SavedRun | None,
        restart: bool,
        stop_after: int | None,
        profile: bool,
        callbacks: Callbacks,
        opened: ExitStack,
    ) -> None:
        self.started, self.compiled = time.perf_counter(), compiler.compile_seconds()
        self.config, self.callbacks = config, callbacks
        cfg = config.trainer
        if cfg.use_wandb:
            logs.require_wandb()
        schedule = bind_schedule(config, label, saved, restart)
        self.parts = build_run(config, source=label, schedule_updates=schedule["updates"])
        opened.callback(self.parts.close)
        self.loop_config = dataclasses.replace(self.parts.loop_config, stop_after_updates=stop_after)
        environment, identity = environment_record(self.parts.env.device, cfg.compile_mode), fingerprint(self.parts)
        self.state, self.loop = self.parts.algorithm.init(rng.key(self.parts.seed, self.parts.env.device)), LoopState()
        if saved is not None:
            self.state, self.loop = resume_state(saved, self.state, config, environment, identity, restart)
            self.state = self.parts.resumed(self.state)
        self.resumed_from = None if saved is None else str(saved.path)
        self.first_update = int(self.state.counters["updates"])
        self.seconds_to_first_update = math.nan
        self.evaluate = make_evaluator(
            self.parts.eval_env,
            self.parts.policy,
            self.parts.normalizer,
            clip_actions=cfg.clip_actions_to_space,
            mode=cfg.evaluation_mode,
            max_steps=cfg.max_eval_steps,
            dtype=DTYPES[cfg.dtype],
            compile_mode=cfg.compile_mode,
        )
        name = cfg.exp_name or f"{cfg.learning_env.name}_{config.algorithm.name}"
        settings = dump_run_config(config)
        directory = RunDirectory.create(cfg.output_dir, name)
        self.directory = directory.path
        (self.directory / "configs").mkdir()
        write_yaml(self.directory / "configs" / "train.yaml", settings)
        write_json(self.directory / "environment.json", {**environment, "seed": self.parts.seed, "resumed_from": self.resumed_from})
        metadata = {"config": settings, "schedule": schedule, "environment": environment, "fingerprint": identity, "run": directory.path.name}
        self.saver = Saver(directory, cfg.keep_checkpoints, metadata)
        self.log = logs.RunLog(self.directory, name, wandb_project=cfg.wandb_project_name if cfg.use_wandb else None, config=settings)
        self.profile = self._profiled(stop_after) if profile else None

    def go(self, progress: bool) -> dict[str, Any]:
        """Train, save, evaluate; the summary."""
        with contextlib.closing(self.log), contextlib.closing(self.saver):
            with Interrupts() as interrupts:
                try:
                    self._train(interrupts, progress)
                    self.saver.save_last(self.state, self.loop)
                except BaseException as error:
                    # A signal goes to every process of a terminal: what ended this one may be the end of a worker or of a compiler.
                    status = "failed" if interrupts.received is None or isinstance(error, CheckpointError) else "interrupted"
                    summary = self._rescue(error, status)
                    if interrupts.received is not None and summary is not None and status == "interrupted":
                        raise Interrupted(interrupts.received, summary) from error
                    raise
            finished = self.loop_config.reached(self.loop)
            summary = self._summary("finished" if finished else "interrupted" if interrupts() else "stopped")
            if interrupts.received is not None and not finished:
                raise Interrupted(interrupts.received, summary)
            if finished and self.config.trainer.final_eval_episodes:
                summary = self._summary("finished", best_eval_metrics=self._final_evaluation())
        return summary

    def _train(self, interrupts: Interrupts, progress: bool) -> None:
        self._repeat_history()
        budget = self.loop_config.total_updates
        with ExitStack() as stack:
            bar = stack.enter_context(logs.Progress(budget or self.loop_config.total_timesteps or 0, enabled=progress))
            if self.profile is not None:
                stack.callback(self.profile.close)

            def on_update(state: TrainState, loop: LoopState) -> None:
                self.state = state
                if math.isnan(self.seconds_to_first_update):
                    self.seconds_to_first_update = time.perf_counter() - self.started
                if self.profile is not None:
                    self.profile.step()
                self.saver.poll()
                bar.update(loop.num_updates if budget is not None else loop.global_step, _line(loop))

            self.state, self.loop = train(
                self.parts.algorithm,
                self.state,
                self.loop_config,
                evaluate=self.evaluate,
                loop=self.loop,
                callbacks=self.callbacks,
                on_record=self.log.write,
                on_update=on_update,
                on_save=self.saver.save,
                stop=interrupts,
                phases=None if self.profile is None else self.profile.phases,
            )

    def _repeat_history(self) -> None:
        """What a resumed run logged before, so that its own files show all of it."""
        every = self.loop_config.log_frequency_updates
        records = [record for record in self.loop.train_history if record["num_updates"] % every == 0] + self.loop.eval_history
        for record in sorted(records, key=lambda record: record["global_step"]):
            self.log.write({k: v for k, v in record.items() if k != "global_step"}, int(record["global_step"]), timed=False)

    def _rescue(self, error: BaseException, status: str) -> dict[str, Any] | None:
        """Save the last good state of a run that ends before its time, and say so in the summary, which is ``None`` where it cannot be written."""
        if self.loop.num_updates > self.first_update and not isinstance(error, CheckpointError):
            try:
                self.saver.save_last(self.state, self.loop)
            except (CheckpointError, OSError) as another:
                warnings.warn(str(another), RuntimeWarning, stacklevel=2)
        with contextlib.suppress(OSError):
            return self._summary(status, error=f"{type(error).__name__}: {error}")
        return None

    def _final_evaluation(self) -> dict[str, float]:
        """Evaluate the last state on episodes that chose nothing; the same for the best state is returned."""
        cfg = self.config.trainer

        def final(state: TrainState) -> dict[str, float]:
            seed = self.parts.eval_seed + FINAL_SEED
            return self.evaluate(state.params, state.norm_state, num_episodes=cfg.final_eval_episodes, seed=seed).metrics

        self.loop.last_eval_metrics = final(self.state)
        self.log.write({f"final_{k}": v for k, v in self.loop.last_eval_metrics.items()}, self.loop.global_step)
        return {} if self.loop.best_state is None else final(self.loop.best_state)

    def _profiled(self, stop_after: int | None) -> Profile:
        last = last_update(self.config, self.first_update, int(self.state.counters["env_steps"]))
        remaining = min(last - self.first_update, last if stop_after is None else stop_after)
        return Profile(self.directory / "profile.json", self.parts.env.device, after=max(0, min(2, remaining - 1)))

    def _summary(self, status: str, *, best_eval_metrics: dict[str, float] | None = None, error: str | None = None) -> dict[str, Any]:
        """Write the summary."""
        loop, latest, best = self.loop, self.saver.latest, self.saver.best
        summary = {
            "status": status,
            "error": error,
            "global_step": loop.global_step,
            "num_updates": loop.num_updates,
            "skipped_updates": loop.skipped_updates,
            "elapsed_time_sec": time.perf_counter() - self.started,
            "training_fps": loop.steps_per_second,
            "compile_seconds": compiler.compile_seconds() - self.compiled,
            "seconds_to_first_update": self.seconds_to_first_update,
            "last_train_metrics": loop.last_train_metrics,
            "last_eval_metrics": loop.last_eval_metrics,
            "best_eval_metrics": best_eval_metrics or {},
            "best_eval_value": loop.best_eval_value,
            "latest_checkpoint_path": str(latest) if latest else None,
            "best_checkpoint_path": str(best) if best else None,
            "failed_saves": self.saver.failures,
            "run_directory": str(self.directory),
            "resumed_from": self.resumed_from,
            "seed": self.parts.seed,
            "phases": [] if self.profile is None else self.profile.phases.table(),
            "train_history": loop.train_history,
            "eval_history": loop.eval_history,
        }
        write_json(self.directory / "summary.json", summary)
        return summary


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
