"""A run: from a run file to a directory that holds everything about it.

``<output_dir>/<exp_name>_<stamp>/`` has ``configs/train.yaml`` (every default resolved), ``checkpoints/*.safetensors``, ``metrics.jsonl``, ``logs/``
(TensorBoard), ``summary.json`` and ``run-manifest.json``, which names the latest and the best checkpoint.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import platform
import secrets
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch

from frl import checkpoint as checkpoints
from frl import compile as compiler
from frl import rng, tree
from frl.algorithms.registry import build_algo
from frl.config import ConfigError, RunConfig, dump_run_config, load_run_config, write_yaml
from frl.envs.registry import build_learning_env, get_learning_env_factory
from frl.envs.vector import VecEnv
from frl.evaluate import EvaluationResult, make_evaluator
from frl.logs import Progress, RunLog
from frl.normalizers import empirical_normalizer, running_normalizer
from frl.optim import coerce_lr_scheduler_cfg, coerce_optimizer_cfg, scheduler_needs_horizon
from frl.policies import build_policy
from frl.train import LoopConfig, LoopState, train
from frl.types import Algorithm, Normalizer, TrainState

MANIFEST = "run-manifest.json"
MANIFEST_VERSION = 1
_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_FINAL_SEED = 1_000_003  # added to eval_seed: the final evaluation plays episodes that no earlier one has played


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """Everything that a run file describes, built."""

    config: RunConfig
    env: VecEnv
    eval_env: VecEnv
    policy: Any
    normalizer: Normalizer | None
    algorithm: Algorithm
    loop_config: LoopConfig
    seed: int
    eval_seed: int


def build_run(config: RunConfig, *, source: str = "RunConfig", schedule_updates: int | None = None) -> RunParts:
    """Build environments, policy and algorithm of a run file; nothing is written.

    Args:
        config: of :func:`frl.load_run_config`.
        source: what messages call it, for a file its path.
        schedule_updates: length of a learning-rate schedule that has none of its own; the whole budget by default.

    Raises:
        ConfigError: names that are not registered and values that the parts refuse, with their key path.
    """
    cfg = config.trainer
    for module in cfg.imports:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # the module is there, and what it imports itself is not
            raise ConfigError(source, [f"trainer.imports: there is no module {module!r}"]) from error
    if cfg.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(source, [f"trainer.device: got {cfg.device!r}, but torch sees no CUDA device"])
    if not isinstance(config.algorithm.cfg, Mapping):  # a registered algorithm reads its own settings
        blocks = config.algorithm.cfg.model_dump()
        for key, coerce in (("optimizer", coerce_optimizer_cfg), ("lr_scheduler", coerce_lr_scheduler_cfg)):
            with _refused(source, f"algorithm.cfg.{key}"):
                coerce(blocks[key])
    seed = secrets.randbelow(2**31) if cfg.seed == -1 else cfg.seed
    eval_seed = seed + 10_000 if cfg.eval_seed is None else cfg.eval_seed
    dtype = _DTYPES[cfg.dtype]
    name, env_cfg = cfg.learning_env.name, dict(cfg.learning_env.cfg)
    with _refused(source, "trainer.learning_env.name"):
        get_learning_env_factory(name)
    with _refused(source, "trainer.learning_env.cfg"):
        env = build_learning_env(name, num_envs=cfg.num_envs, device=cfg.device, **env_cfg)
        eval_env = build_learning_env(name, num_envs=cfg.num_eval_envs, device=cfg.device, **env_cfg)
    for vec in (env, eval_env):
        if not isinstance(vec, VecEnv):
            text = f"{name!r} is not a functional environment, which algorithm {config.algorithm.name!r} needs"
            raise ConfigError(source, [f"trainer.learning_env.name: {text}"])
    if dtype != torch.float32:
        env, eval_env = _cast(env, dtype), _cast(eval_env, dtype)
    blocks = dump_run_config(config)
    with _refused(source, "policy"):
        policy = build_policy(blocks["policy"], env.single_observation_space, env.single_action_space)
    normalizer = None
    if cfg.normalize_observations:
        normalizer = running_normalizer(policy.obs_dim, mask=env.env.spec.normalize_mask, initial_count=1e-4)
    elif getattr(policy, "actor_obs_normalization", False):
        normalizer = empirical_normalizer(policy.obs_dim)
    algo_cfg = dict(blocks["algorithm"].get("cfg", {}))
    updates, timesteps = _budget(config)
    horizon = _steps_per_update(config)
    with _refused(source, "algorithm"):
        algorithm = build_algo(
            config.algorithm.name,
            algo_cfg,
            env=env,
            policy=policy,
            trainer=blocks["trainer"],
            normalizer=normalizer,
            total_updates=_last_update(config) if schedule_updates is None else schedule_updates,
            dtype=dtype,
        )
    loop_config = LoopConfig(
        total_updates=updates,
        total_timesteps=timesteps,
        eval_frequency_steps=cfg.eval_freq if cfg.enable_eval else 0,
        num_eval_episodes=cfg.num_eval_episodes,
        eval_seed=eval_seed,
        best_eval_metric=cfg.best_eval_metric,
        best_eval_mode=cfg.best_eval_mode,
        save_frequency_updates=cfg.save_frequency_updates,
        log_frequency_updates=max(1, (updates if updates is not None else (timesteps or 0) // horizon) // 250),
        skip_nonfinite_updates=algo_cfg.get("skip_nonfinite_updates", True),
    )
    return RunParts(
        config=config,
        env=env,
        eval_env=eval_env,
        policy=policy,
        normalizer=normalizer,
        algorithm=algorithm,
        loop_config=loop_config,
        seed=seed,
        eval_seed=eval_seed,
    )


@contextmanager
def _refused(source: str, where: str) -> Iterator[None]:
    """What a part refuses is a problem of the run file, at ``where``."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(source, [f"{where}: {' '.join(str(error).split())}"]) from error


def _cast(vec: VecEnv, dtype: torch.dtype) -> VecEnv:
    params = tree.map(lambda x: x.to(dtype) if x.is_floating_point() else x, vec.env.default_params)
    return dataclasses.replace(vec, env=dataclasses.replace(vec.env, default_params=params))


def _steps_per_update(config: RunConfig) -> int:
    cfg = config.trainer
    if config.algorithm.name == "apg":
        return (cfg.update_horizon or cfg.segment_length) * cfg.num_envs * cfg.gradient_accumulation_steps
    return cfg.buffer_size * cfg.num_envs


def _budget(config: RunConfig) -> tuple[int | None, int | None]:
    """``(total updates, total environment steps)``, one of them ``None``."""
    cfg = config.trainer
    if cfg.total_timesteps is not None:
        return None, cfg.total_timesteps
    return cfg.iterations, None


def _last_update(config: RunConfig, done: int = 0, steps: int = 0) -> int:
    """The update with which the budget ends, after ``done`` updates of ``steps`` environment steps in all."""
    updates, timesteps = _budget(config)
    return updates if updates is not None else done + max(0, -(-((timesteps or 0) - steps) // _steps_per_update(config)))


# -- the run directory -------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunDirectory:
    """Paths of a run."""

    path: Path
    name: str

    @classmethod
    def create(cls, output_dir: str | Path, name: str) -> RunDirectory:
        """A new directory, named by experiment and time."""
        now = time.time_ns()
        stamp = datetime.fromtimestamp(now // 10**9).strftime("%Y%m%d_%H%M%S")
        path = Path(output_dir) / f"{name}_{stamp}_{now % 10**9:09d}"
        path.mkdir(parents=True, exist_ok=False)
        return cls(path, name)

    def checkpoint(self, kind: str, step: int) -> Path:
        infix = "best_step" if kind == "best" else "step"
        return self.path / "checkpoints" / f"{self.name}_{infix}_{step}.safetensors"


def _write_json(path: Path, value: Any) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(_json(value), indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def _environment_record(device: torch.device, compile_mode: str) -> dict[str, Any]:
    return {
        "device": f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device),
        "compile_mode": compile_mode,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu_count": os.cpu_count(),
        "machine": platform.machine(),
        "created_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def resolve_resume(resume: str | Path | None, run: str | Path | None) -> Path | None:
    """The checkpoint that ``resume`` and ``run`` name.

    Args:
        resume: a file, or ``"latest"`` or ``"best"`` of the run directory ``run``.
        run: a run directory.

    Raises:
        ValueError: a combination that means nothing.
        FileNotFoundError: the run directory, its manifest or the checkpoint is missing.
        CheckpointError: the manifest is damaged, of another version, or names a file outside the run directory.
    """
    if resume is None:
        if run is not None:
            raise ValueError("run names a directory to resume from and needs resume='latest' or resume='best'")
        return None
    if str(resume) in ("latest", "best"):
        if run is None:
            raise ValueError(f"resume={str(resume)!r} needs run, the directory of the run to resume")
        manifest = Path(run) / MANIFEST
        if not manifest.is_file():
            raise FileNotFoundError(f"{manifest} does not exist, so {run} is not a run directory")
        path = Path(run) / _manifest_entry(manifest, str(resume))
    else:
        if run is not None:
            raise ValueError("give resume as a file, or as 'latest' or 'best' together with run, not a file and run")
        path = Path(resume)
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint {path} does not exist")
    return path


def _manifest_entry(manifest: Path, kind: str) -> str:
    """Relative path of the ``"latest"`` or ``"best"`` checkpoint."""
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
    except ValueError as error:
        raise checkpoints.CheckpointError(f"{manifest} is damaged ({error})") from error
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != MANIFEST_VERSION or isinstance(version, bool):
        raise checkpoints.CheckpointError(f"{manifest} has schema version {version!r}, this version reads {MANIFEST_VERSION}")
    files = content.get("checkpoints")
    entry = files.get(kind) if isinstance(files, dict) else None
    if not entry:
        raise FileNotFoundError(f"{manifest} names no {kind} checkpoint")
    systems = (PurePosixPath, PureWindowsPath)  # a directory may have come from the other
    if not isinstance(entry, str) or any(make(entry).anchor or ".." in make(entry).parts for make in systems):
        raise checkpoints.CheckpointError(f"{manifest} names the checkpoint {entry!r}, expected a path inside the run directory")
    return entry


# -- training from a file ------------------------------------------------------------------------------------------------------------------------------


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
        return _run(config, label, source, resume_scheduler == "restart", profile, progress, started)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


def _run(config: RunConfig, label: str, source: Path | None, restart: bool, profile: bool, progress: bool, started: float) -> dict[str, Any]:
    compiled = compiler.compile_seconds()
    cfg = config.trainer
    saved = None if source is None else _Saved.read(source)
    schedule = _schedule(config, label, saved, restart)
    parts = build_run(config, source=label, schedule_updates=schedule["updates"])
    environment = _environment_record(parts.env.device, cfg.compile_mode)
    state = parts.algorithm.init(rng.key(parts.seed, parts.env.device))
    loop = LoopState()
    if saved is not None:
        state, loop = _resume(saved, state, config, environment, restart)
    evaluate = make_evaluator(
        parts.eval_env,
        parts.policy,
        parts.normalizer,
        clip_actions=cfg.clip_actions_to_space,
        mode=cfg.evaluation_mode,
        max_steps=cfg.max_eval_steps,
        dtype=_DTYPES[cfg.dtype],
        compile_mode=cfg.compile_mode,
    )
    name = cfg.exp_name or f"{cfg.learning_env.name}_{config.algorithm.name}"
    directory = RunDirectory.create(cfg.output_dir, name)
    write_yaml(_made(directory.path / "configs") / "train.yaml", dump_run_config(config))
    _write_json(directory.path / "environment.json", {**environment, "seed": parts.seed, "resumed_from": source})
    latest: dict[str, Path | None] = {"latest": None, "best": None}

    def save(state: TrainState, loop: LoopState, kind: str) -> None:
        target = directory.checkpoint(kind, loop.global_step)
        metadata = {"loop": _loop_json(loop), "config": dump_run_config(config), "schedule": schedule, "environment": environment}
        checkpoints.save_checkpoint(target, state, metadata)
        latest["latest"] = target
        if kind == "best":
            latest["best"] = target
        files = {key: value.relative_to(directory.path).as_posix() if value else None for key, value in latest.items()}
        _write_json(directory.path / MANIFEST, {"schema_version": MANIFEST_VERSION, "configs": {"train": "configs/train.yaml"}, "checkpoints": files})

    first: list[float] = []
    with ExitStack() as stack:
        log = RunLog(directory.path, name, wandb_project=cfg.wandb_project_name if cfg.use_wandb else None, config=dump_run_config(config))
        stack.callback(log.close)
        total = parts.loop_config.total_updates or parts.loop_config.total_timesteps or 0
        bar = stack.enter_context(Progress(total, enabled=progress))
        tracer = None
        if profile:
            remaining = _last_update(config, int(state.counters["updates"]), int(state.counters["env_steps"])) - int(state.counters["updates"])
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
    _write_json(directory.path / "summary.json", summary)
    return summary


def _final(evaluate: Any, state: TrainState, episodes: int, eval_seed: int) -> EvaluationResult:
    return evaluate(state.params, state.norm_state, num_episodes=episodes, seed=eval_seed + _FINAL_SEED)


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


_LOOP_FIELDS = ("global_step", "num_updates", "best_eval_value", "best_global_step", "next_eval_step", "train_history", "eval_history", "last_eval_metrics")


def _loop_json(loop: LoopState) -> dict[str, Any]:
    return {name: getattr(loop, name) for name in _LOOP_FIELDS}


@dataclass(frozen=True)
class _Saved:
    """A checkpoint of a run."""

    path: Path
    tensors: dict[str, torch.Tensor]
    loop: dict[str, Any]
    config: dict[str, Any]
    schedule: dict[str, Any]  # begin: updates made when the learning-rate schedule began; updates: its length
    environment: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> _Saved:
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


def _schedule(config: RunConfig, label: str, saved: _Saved | None, restart: bool) -> dict[str, int]:
    """``begin``: updates made when the learning-rate schedule begins; ``updates``: the length of one that has none of its own.

    Raises:
        ConfigError: a schedule that has begun would end before the budget.
    """
    done, steps = (saved.loop["num_updates"], saved.loop["global_step"]) if saved is not None else (0, 0)
    last = _last_update(config, done, steps)
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


def _resume(saved: _Saved, like: TrainState, config: RunConfig, environment: Mapping[str, Any], restart: bool) -> tuple[TrainState, LoopState]:
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
