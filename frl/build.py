"""The parts of a run file: environments, policy, normalizer and algorithm, built and checked; nothing is written."""

from __future__ import annotations

import importlib
import secrets
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from frl import rng
from frl.algorithms.registry import build_algo, is_differentiable
from frl.config import ConfigError, RunConfig, dump_run_config
from frl.envs.host import HostEnv
from frl.envs.registry import GYMNASIUM, build_learning_env, get_learning_env_factory
from frl.envs.vector import VecEnv
from frl.normalizers import empirical_normalizer, running_normalizer
from frl.optim import coerce_lr_scheduler_cfg, coerce_optimizer_cfg
from frl.policies import build_policy
from frl.train import LoopConfig
from frl.types import Algorithm, Normalizer, TrainState
from frl.warm_up import MOST_STEPS, eager_first_update

DTYPES = {"float32": torch.float32, "float64": torch.float64}
FINAL_SEED = 1_000_003  # added to eval_seed: the final evaluation plays episodes that no earlier one has played


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """Everything that a run file describes, built."""

    config: RunConfig
    env: VecEnv | HostEnv
    eval_env: VecEnv | HostEnv
    policy: Any
    normalizer: Normalizer | None
    algorithm: Algorithm
    loop_config: LoopConfig
    seed: int
    eval_seed: int

    def close(self) -> None:
        """Close host environments, with the processes that they have; functional ones hold nothing."""
        for env in (self.env, self.eval_env):
            if isinstance(env, HostEnv):
                env.close()

    def resumed(self, state: TrainState) -> TrainState:
        """A restored state as a run goes on from it.

        The state of a host environment cannot be saved: its rows begin new episodes, drawn from the restored key, and with them what the state has of the
        episodes that were under way. A warning says so.
        """
        if not isinstance(self.env, HostEnv):
            return state
        text = "keeps its state to itself: its rows begin new episodes, so the resumed run is another one than a run without a stop would have been"
        warnings.warn(f"{self.env.spec.name} {text}", RuntimeWarning)
        key, k_env = rng.split(state.key, 2)
        begun = {"reward_returns": torch.zeros_like(state.extra["reward_returns"])} if "reward_returns" in state.extra else {}
        return state._replace(key=key, env_state=self.env.reset(self.env.row_keys(k_env)), extra={**state.extra, **begun})


@dataclass(frozen=True, kw_only=True)
class ActorParts:
    """What of a run file acts: rows of its environment, policy and normalizer."""

    env: VecEnv | HostEnv
    policy: Any
    normalizer: Normalizer | None


def build_actor(config: RunConfig, *, num_envs: int, source: str = "RunConfig") -> ActorParts:
    """Build what acts, without what learns; arguments and errors of :func:`build_run`, and ``num_envs`` rows."""
    with ExitStack() as opened:
        _prepare(config, source)
        env = _build_env(config, source, num_envs, opened)
        policy, normalizer = _build_policy(config, source, env)
        opened.pop_all()
    return ActorParts(env=env, policy=policy, normalizer=normalizer)


def build_run(config: RunConfig, *, source: str = "RunConfig", schedule_updates: int | None = None, members: int = 1) -> RunParts:
    """Build environments, policy and algorithm of a run file; nothing is written.

    Args:
        config: of :func:`frl.load_run_config`.
        source: what messages call it, for a file its path.
        schedule_updates: length of a learning-rate schedule that has none of its own; the whole budget by default.
        members: how many states an update will have, in a population.

    Raises:
        ConfigError: names that are not registered and values that the parts refuse, with their key path.

    Host environments are open in what is returned: call ``close`` when the run is over.
    """
    with ExitStack() as opened:
        parts = _build(config, source, schedule_updates, members, opened)
        opened.pop_all()
    return parts


def _prepare(config: RunConfig, source: str) -> None:
    """Import the run's modules and look at its device."""
    cfg = config.trainer
    for module in cfg.imports:
        try:
            importlib.import_module(module)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name is not None and f"{module}.".startswith(f"{error.name}."):
                raise ConfigError(source, [f"trainer.imports: there is no module {module!r}"]) from error
            # The module is there, and what stands in it or what it imports itself is at fault.
            raise ImportError(f"{source}: trainer.imports: {module!r} cannot be imported: {type(error).__name__}: {error}") from error
    _check_device(cfg.device, source)
    with _refused(source, "trainer.learning_env.name"):
        get_learning_env_factory(cfg.learning_env.name)


def _check_device(name: str, source: str) -> None:
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (kind == "cpu" and index not in ("", "0")):
        raise ConfigError(source, [f"trainer.device: got {name!r}, expected cpu, cuda or a CUDA device by its number, such as cuda:0"])
    if kind == "cuda":
        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(index or 0) >= seen:
            raise ConfigError(source, [f"trainer.device: got {name!r}, but torch sees {seen or 'no'} CUDA device{'s' if seen > 1 else ''}"])


def _build_policy(config: RunConfig, source: str, env: VecEnv | HostEnv) -> tuple[Any, Normalizer | None]:
    blocks = dump_run_config(config)
    with _refused(source, "policy"):
        policy = build_policy(blocks["policy"], env.single_observation_space, env.single_action_space)
    if config.trainer.normalize_observations:
        return policy, running_normalizer(policy.obs_dim, mask=env.spec.normalize_mask, initial_count=1e-4)
    return policy, empirical_normalizer(policy.obs_dim) if getattr(policy, "actor_obs_normalization", False) else None


def _build(config: RunConfig, source: str, schedule_updates: int | None, members: int, opened: ExitStack) -> RunParts:
    cfg = config.trainer
    _prepare(config, source)
    if not isinstance(config.algorithm.cfg, Mapping):  # a registered algorithm reads its own settings
        blocks = config.algorithm.cfg.model_dump()
        for key, coerce in (("optimizer", coerce_optimizer_cfg), ("critic_optimizer", coerce_optimizer_cfg), ("lr_scheduler", coerce_lr_scheduler_cfg)):
            with _refused(source, f"algorithm.cfg.{key}"):
                coerce(blocks.get(key))
    seed = secrets.randbelow(2**31) if cfg.seed == -1 else cfg.seed
    eval_seed = seed + 10_000 if cfg.eval_seed is None else cfg.eval_seed
    dtype = DTYPES[cfg.dtype]
    env = _build_env(config, source, cfg.num_envs, opened)
    _check_trainable(config, source, env)
    eval_env = _build_env(config, source, cfg.num_eval_envs, opened)
    policy, normalizer = _build_policy(config, source, env)
    blocks = dump_run_config(config)
    algo_cfg = dict(blocks["algorithm"].get("cfg", {}))
    updates, timesteps = _budget(config)
    horizon = _steps_per_update(config)

    def build(compile_mode: str) -> Algorithm:
        return build_algo(
            config.algorithm.name,
            algo_cfg,
            env=env,
            policy=policy,
            trainer={**blocks["trainer"], "compile_mode": compile_mode},
            normalizer=normalizer,
            total_updates=last_update(config) if schedule_updates is None else schedule_updates,
            dtype=dtype,
        )

    with _refused(source, "algorithm"):
        algorithm = build(cfg.compile_mode)
        if cfg.eager_first_update and cfg.compile_mode != "eager" and isinstance(env, VecEnv) and horizon * members <= MOST_STEPS:
            algorithm = eager_first_update(algorithm, build("eager"))
    loop_config = LoopConfig(
        total_updates=updates,
        total_timesteps=timesteps,
        eval_frequency_steps=cfg.eval_freq if cfg.enable_eval else 0,
        num_eval_episodes=cfg.num_eval_episodes,
        eval_seed=eval_seed,
        best_eval_metric=cfg.best_eval_metric,
        best_eval_mode=cfg.best_eval_mode,
        save_frequency_updates=cfg.save_frequency_updates,
        save_frequency_steps=cfg.save_freq,
        save_frequency_seconds=60.0 * cfg.save_frequency_minutes,
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


def _build_env(config: RunConfig, source: str, rows: int, opened: ExitStack) -> VecEnv | HostEnv:
    """Rows of the run's environment, closed with ``opened`` if they need to be."""
    cfg = config.trainer
    name, dtype = cfg.learning_env.name, DTYPES[cfg.dtype]
    with _refused(source, "trainer.learning_env.cfg"):
        elsewhere = {"num_envs": "trainer.num_envs", "device": "trainer.device", "dtype": "trainer.dtype"}
        if name.lower().startswith(GYMNASIUM):
            elsewhere["seed"] = "trainer.seed, from which every row is seeded"
        for key in sorted(set(elsewhere) & set(cfg.learning_env.cfg)):
            raise ValueError(f"takes no {key!r}; set {elsewhere[key]}")
        env = build_learning_env(name, num_envs=rows, device=cfg.device, dtype=None if dtype == torch.float32 else dtype, **cfg.learning_env.cfg)
    if isinstance(env, HostEnv):
        opened.callback(env.close)
    elif not isinstance(env, VecEnv):
        raise ConfigError(source, [f"trainer.learning_env.name: {name!r} made a {type(env).__name__}, which is neither a functional nor a host environment"])
    return env


def _check_trainable(config: RunConfig, source: str, env: VecEnv | HostEnv) -> None:
    """Refuse a host environment for an algorithm that differentiates through its environment."""
    name, algorithm = config.trainer.learning_env.name, config.algorithm.name
    with _refused(source, "algorithm.name"):
        through = is_differentiable(algorithm)
    if through and isinstance(env, HostEnv):
        text = f"{name!r} is a host environment, through which algorithm {algorithm!r} cannot differentiate; take a functional one, or ppo or grpo"
        raise ConfigError(source, [f"trainer.learning_env.name: {text}"])


def _steps_per_update(config: RunConfig) -> int:
    cfg = config.trainer
    if config.algorithm.name in ("apg", "shac"):
        return (cfg.update_horizon or cfg.segment_length) * cfg.num_envs * cfg.gradient_accumulation_steps
    return cfg.buffer_size * cfg.num_envs


def _budget(config: RunConfig) -> tuple[int | None, int | None]:
    """``(total updates, total environment steps)``, one of them ``None``."""
    cfg = config.trainer
    if cfg.total_timesteps is not None:
        return None, cfg.total_timesteps
    return cfg.iterations, None


def last_update(config: RunConfig, done: int = 0, steps: int = 0) -> int:
    """The update with which the budget ends, after ``done`` updates of ``steps`` environment steps in all."""
    updates, timesteps = _budget(config)
    return updates if updates is not None else done + max(0, -(-((timesteps or 0) - steps) // _steps_per_update(config)))
