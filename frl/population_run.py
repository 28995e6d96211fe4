"""A run file with a population: P members trained together, each with a run directory of its own.

``<output_dir>/<exp_name>_<stamp>/`` has ``configs/population.yaml``, ``population.json`` with the ranking, and ``members/00`` and so on, each of which is a run
directory like any other: settings with the member's own seed and hyper-parameters, metrics, best and last checkpoint, summary. So whatever reads a run reads
a member; ``frl plot`` of the whole directory draws all members with a band, and ``frl eval`` takes the best one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from frl import compile as compiler
from frl import logs, rng, tree
from frl.build import DTYPES, FINAL_SEED, RunParts, build_run
from frl.checkpoint import CheckpointError
from frl.config import ConfigError, RunConfig, dump_run_config, parse_run_config, write_yaml
from frl.envs.host import HostEnv
from frl.evaluate import make_evaluator
from frl.fingerprint import fingerprint
from frl.interrupts import Interrupted, Interrupts
from frl.members import population, select_members, with_hyper
from frl.provenance import environment_record
from frl.resume import SavedRun, bind_schedule, resume_state
from frl.run_directory import POPULATION, RunDirectory, write_json
from frl.saving import Saver
from frl.train import LoopConfig, LoopState, advance, is_best
from frl.types import TrainState


def train_population(
    config: RunConfig, label: str, *, resume: str | Path | None = None, run: str | Path | None = None, stop_after: int | None = None, progress: bool = False
) -> dict[str, Any]:
    """Train the members that a run file describes.

    Args:
        config: with a ``population``.
        label: what messages call it.
        resume: ``"latest"`` of ``run``, the directory of an earlier run of as many members.
        run: see ``resume``.
        stop_after: stop after so many updates of this process.
        progress: show a live line on a terminal.

    Returns:
        The summary of the best member, with ``run_directory`` and ``members``: a ranking, best first, of ``member``, ``seed``, ``hyper``, ``score``,
        ``best_global_step``, ``skipped_updates`` and ``directory``. The score is the value of ``trainer.best_eval_metric`` that the member's best state has in
        the final evaluation, or else in the one that chose it, or else the mean return of its last 100 training episodes.

    Raises:
        ConfigError: a hyper-parameter that the algorithm does not have, or a value that it refuses; a host environment.
        ValueError: something else than ``"latest"`` to resume from.
        CheckpointError: the checkpoints do not fit, or a last state could not be saved.
        Interrupted: as :func:`frl.train_from_config`.
    """
    if resume not in (None, "latest") or (resume is None) != (run is None):
        raise ValueError(f"a population is resumed from 'latest' of a run directory, got resume={resume!r} and run={run!r}")
    cfg, threads, deterministic = config.trainer, torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        if cfg.threads is not None:
            torch.set_num_threads(cfg.threads)
        torch.use_deterministic_algorithms(cfg.torch_deterministic or deterministic)
        with ExitStack() as opened:
            return _PopulationRun(config, label, None if run is None else Path(run), stop_after, opened).go(progress)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


def member_configs(config: RunConfig, label: str) -> list[RunConfig]:
    """Run files of the members, each of which describes a solo run."""
    assert config.population is not None
    blocks = dump_run_config(config)
    cfg = blocks.pop("population")
    if cfg["seeds"] is None and config.trainer.seed < 0:
        raise ConfigError(label, ["trainer.seed: a population whose members have no seeds of their own needs one, got -1"])
    result = []
    for i in range(cfg["size"]):
        member = dump_run_config(config)
        del member["population"]
        member["trainer"]["seed"] = cfg["seeds"][i] if cfg["seeds"] is not None else config.trainer.seed + i
        for name, values in cfg["hyper"].items():
            block = _block_of(member, name, label)
            block[name.split(".")[-1]] = values[i % len(values)]
        result.append(parse_run_config(member, source=f"{label}, member {i}"))
    return result


def _block_of(member: dict[str, Any], name: str, label: str) -> dict[str, Any]:
    """The section of a run file that has a hyper-parameter."""
    *above, key = name.split(".")
    for root in (member["algorithm"]["cfg"], member["trainer"]):
        block: Any = root
        for part in above:
            block = block.get(part) if isinstance(block, dict) else None
        if isinstance(block, dict) and key in block:
            return block
    raise ConfigError(label, [f"population.hyper.{name}: there is no such setting below algorithm.cfg or trainer"])


class _Member:
    """What a member has of its own beside its part of the state: a directory, a log, checkpoints, and a loop's memory."""

    def __init__(self, config: RunConfig, directory: RunDirectory, metadata: dict[str, Any], opened: ExitStack) -> None:
        self.config, self.directory, self.loop = config, directory, LoopState()
        settings = dump_run_config(config)
        (directory.path / "configs").mkdir(parents=True)
        write_yaml(directory.path / "configs" / "train.yaml", settings)
        write_json(directory.path / "environment.json", {**metadata["environment"], "seed": config.trainer.seed})
        self.saver = opened.enter_context(contextlib.closing(Saver(directory, config.trainer.keep_checkpoints, {**metadata, "config": settings})))
        self.log = opened.enter_context(contextlib.closing(logs.RunLog(directory.path, directory.name)))
        self.final: dict[str, float] = {}


class _PopulationRun:
    """One run of this process; nothing is written before everything is known to fit."""

    def __init__(self, config: RunConfig, label: str, resumed: Path | None, stop_after: int | None, opened: ExitStack) -> None:
        self.started, self.compiled, self.opened = time.perf_counter(), compiler.compile_seconds(), opened
        assert config.population is not None
        self.config, self.population, self.size = config, config.population, config.population.size
        configs = member_configs(config, label)
        saved = [None if resumed is None else SavedRun.find("latest", resumed / "members" / _number(i)) for i in range(self.size)]
        schedule = bind_schedule(configs[0], label, saved[0], False)
        self.parts: RunParts = build_run(configs[0], source=label, schedule_updates=schedule["updates"], members=len(configs))
        opened.callback(self.parts.close)
        if isinstance(self.parts.env, HostEnv):
            raise ConfigError(label, ["population: the rows of a host environment cannot be played by several members; take a functional environment"])
        self.loop_config: LoopConfig = dataclasses.replace(self.parts.loop_config, stop_after_updates=stop_after)
        self.algorithm = population(self.parts.algorithm, self.size, chunk=self.population.chunk)
        self.state = self._first_state(configs, label)
        environment, identity = environment_record(self.parts.env.device, config.trainer.compile_mode), fingerprint(self.parts)
        loops = [LoopState() for _ in configs]
        if resumed is not None:
            pairs = [
                resume_state(one, select_members(self.state, i), configs[i], environment, identity, False) for i, one in enumerate(saved) if one is not None
            ]
            self.state, loops = tree.stack([state for state, _ in pairs]), [loop for _, loop in pairs]
            updates = {loop.num_updates for loop in loops}
            if len(updates) > 1:
                raise CheckpointError(f"the newest checkpoints of {resumed / 'members'} are of different updates: {sorted(updates)}")
        self.last = None if stop_after is None else loops[0].num_updates + stop_after
        name = config.trainer.exp_name or f"{config.trainer.learning_env.name}_{config.algorithm.name}"
        self.directory = RunDirectory.create(config.trainer.output_dir, name)
        (self.directory.path / "configs").mkdir()
        write_yaml(self.directory.path / "configs" / "population.yaml", dump_run_config(config))
        self.members = []
        for i, (one, loop) in enumerate(zip(configs, loops, strict=True)):
            path = self.directory.path / "members" / _number(i)
            metadata = {"schedule": schedule, "environment": environment, "fingerprint": identity, "run": path.name}
            member = _Member(one, RunDirectory(path, name), metadata, opened)
            member.loop = loop
            self.members.append(member)

    def _first_state(self, configs: list[RunConfig], label: str) -> TrainState:
        device = self.parts.env.device
        state = self.algorithm.init(torch.stack([rng.key(one.trainer.seed, device) for one in configs]))
        values = {name: [row[i % len(row)] for i in range(self.size)] for name, row in self.population.hyper.items()}
        try:
            return with_hyper(state, values)
        except ValueError as error:
            raise ConfigError(label, [f"population.hyper: {error}"]) from error

    # -- the loop ------------------------------------------------------------------------------------------------------------------------------------

    def go(self, progress: bool) -> dict[str, Any]:
        cfg = self.config.trainer
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
        self.seconds_to_first_update = math.nan
        with Interrupts() as interrupts:
            try:
                self._train(interrupts, progress)
            finally:
                for i, member in enumerate(self.members):
                    if member.loop.num_updates:
                        member.saver.save_last(select_members(self.state, i), member.loop)
        finished = self.loop_config.reached(self.members[0].loop)
        if finished and cfg.final_eval_episodes and interrupts.received is None:
            self._final_evaluation()
        summary = self._summary("finished" if finished else "interrupted" if interrupts() else "stopped")
        if interrupts.received is not None and not finished:
            raise Interrupted(interrupts.received, summary)
        return summary

    def _train(self, interrupts: Interrupts, progress: bool) -> None:
        config, first = self.loop_config, self.members[0].loop
        every = config.eval_frequency_steps
        next_eval = (first.global_step // every + 1) * every if every else math.inf
        budget = config.total_updates
        bar = self.opened.enter_context(logs.Progress(budget or config.total_timesteps or 0, enabled=progress))
        while not self._over() and not interrupts():
            started, graphs, before = time.perf_counter(), compiler.graph_count(), first.global_step
            state, rollout = self.algorithm.collect(self.state)
            self.state = self.algorithm.update(state, rollout)
            records = [advance(member.loop, host, config) for member, host in zip(self.members, self._to_host(), strict=True)]
            if compiler.graph_count() == graphs:
                first.steady_seconds += time.perf_counter() - started
                first.steady_steps += (first.global_step - before) * self.size
            if math.isnan(self.seconds_to_first_update):
                self.seconds_to_first_update = time.perf_counter() - self.started
            if first.num_updates % config.log_frequency_updates == 0 or self._over() or interrupts():
                for member, record in zip(self.members, records, strict=True):
                    record["charts/SPS"] = first.steps_per_second
                    member.log.write({k: v for k, v in record.items() if k != "global_step"}, member.loop.global_step)
            due = first.global_step >= next_eval
            if due:
                next_eval = (first.global_step // every + 1) * every
            for i, member in enumerate(self.members):
                best = due and self._evaluated(i, member)
                if best or (config.save_frequency_updates and first.num_updates % config.save_frequency_updates == 0):
                    member.saver.save(select_members(self.state, i), member.loop, "best" if best else "periodic")
                member.saver.poll()
            scores = [s for s in (member.loop.best_eval_value for member in self.members) if s is not None]
            shown = {"members": str(self.size), "speed": f"{first.steps_per_second / 1e3:.0f}k steps/s"} | ({"best": f"{max(scores):.3g}"} if scores else {})
            bar.update(first.num_updates if budget is not None else first.global_step, shown)

    def _over(self) -> bool:
        loop = self.members[0].loop
        return self.loop_config.reached(loop) or (self.last is not None and loop.num_updates >= self.last)

    def _to_host(self) -> list[dict[str, float]]:
        """Metrics and counters of every member, in one transfer."""
        values = {**self.state.metrics, **{f"counter/{k}": v for k, v in self.state.counters.items()}}
        rows = torch.stack([x.detach().to(torch.float64) for x in values.values()], 1).tolist()
        return [dict(zip(values, row, strict=True)) for row in rows]

    def _evaluated(self, i: int, member: _Member) -> bool:
        """Evaluate a member; whether it is better than it was."""
        config, state = self.loop_config, select_members(self.state, i)
        result = self.evaluate(state.params, state.norm_state, num_episodes=config.num_eval_episodes, seed=self.parts.eval_seed)
        member.loop.last_eval_metrics = result.metrics
        member.loop.eval_history.append({"global_step": member.loop.global_step, **result.metrics})
        member.log.write(result.metrics, member.loop.global_step)
        return is_best(result.metrics, state, member.loop, config)

    def _final_evaluation(self) -> None:
        """The last and the best state of every member on episodes that chose nothing."""
        count, seed = self.config.trainer.final_eval_episodes, self.parts.eval_seed + FINAL_SEED
        for i, member in enumerate(self.members):
            last, best = select_members(self.state, i), member.loop.best_state
            member.loop.last_eval_metrics = self.evaluate(last.params, last.norm_state, num_episodes=count, seed=seed).metrics
            member.log.write({f"final_{k}": v for k, v in member.loop.last_eval_metrics.items()}, member.loop.global_step)
            member.final = member.loop.last_eval_metrics if best is None else self.evaluate(best.params, best.norm_state, num_episodes=count, seed=seed).metrics

    # -- summaries -----------------------------------------------------------------------------------------------------------------------------------

    def _score(self, member: _Member) -> float:
        cfg, loop = self.config.trainer, member.loop
        values = (member.final.get(cfg.best_eval_metric), loop.best_eval_value, (loop.train_history or [{}])[-1].get("charts/episode_reward_avg_100"))
        return next((x for x in values if x is not None and math.isfinite(x)), math.nan)

    def _summary(self, status: str) -> dict[str, Any]:
        scores = [self._score(member) for member in self.members]
        sign = -1.0 if self.config.trainer.best_eval_mode == "max" else 1.0
        order = sorted(range(self.size), key=lambda i: (math.isnan(scores[i]), sign * scores[i] if math.isfinite(scores[i]) else 0.0, i))
        for i, member in enumerate(self.members):
            write_json(member.directory.path / "summary.json", self._of_member(member, status, scores[i]))
        ranking = [
            {
                "member": i,
                "seed": self.members[i].config.trainer.seed,
                "hyper": {name: values[i % len(values)] for name, values in self.population.hyper.items()},
                "score": scores[i],
                "best_global_step": self.members[i].loop.best_global_step,
                "skipped_updates": self.members[i].loop.skipped_updates,
                "directory": f"members/{_number(i)}",
            }
            for i in order
        ]
        write_json(self.directory.path / POPULATION, {"status": status, "score": self.config.trainer.best_eval_metric, "members": ranking})
        best = self.members[order[0]]
        first = self.members[0].loop
        return {
            **self._of_member(best, status, scores[order[0]]),
            "members": ranking,
            "score_name": self.config.trainer.best_eval_metric,
            "training_fps": first.steps_per_second,
            "run_directory": str(self.directory.path),
        }

    def _of_member(self, member: _Member, status: str, score: float) -> dict[str, Any]:
        loop, latest, best = member.loop, member.saver.latest, member.saver.best
        return {
            "status": status,
            "error": None,
            "score": score,
            "global_step": loop.global_step,
            "num_updates": loop.num_updates,
            "skipped_updates": loop.skipped_updates,
            "elapsed_time_sec": time.perf_counter() - self.started,
            "training_fps": self.members[0].loop.steps_per_second,
            "compile_seconds": compiler.compile_seconds() - self.compiled,
            "seconds_to_first_update": self.seconds_to_first_update,
            "last_train_metrics": loop.last_train_metrics,
            "last_eval_metrics": loop.last_eval_metrics,
            "best_eval_metrics": member.final,
            "best_eval_value": loop.best_eval_value,
            "latest_checkpoint_path": str(latest) if latest else None,
            "best_checkpoint_path": str(best) if best else None,
            "failed_saves": member.saver.failures,
            "run_directory": str(member.directory.path),
            "seed": member.config.trainer.seed,
            "phases": [],
            "train_history": loop.train_history,
            "eval_history": loop.eval_history,
        }


def _number(i: int) -> str:
    return f"{i:02d}"
