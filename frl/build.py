"""The parts of a run file: environments, policy, normalizer and algorithm, built and checked; nothing is written."""

from __future__ import annotations

import dataclasses
import importlib
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from frl import tree
from frl.algorithms.registry import build_algo
from frl.config import ConfigError, RunConfig, dump_run_config
from frl.envs.registry import build_learning_env, get_learning_env_factory
from frl.envs.vector import VecEnv
from frl.normalizers import empirical_normalizer, running_normalizer
from frl.optim import coerce_lr_scheduler_cfg, coerce_optimizer_cfg
from frl.policies import build_policy
from frl.train import LoopConfig
from frl.types import Algorithm, Normalizer

DTYPES = {"float32": torch.float32, "float64": torch.float64}


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
    dtype = DTYPES[cfg.dtype]
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
            total_updates=last_update(config) if schedule_updates is None else schedule_updates,
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


def last_update(config: RunConfig, done: int = 0, steps: int = 0) -> int:
    """The update with which the budget ends, after ``done`` updates of ``steps`` environment steps in all."""
    updates, timesteps = _budget(config)
    return updates if updates is not None else done + max(0, -(-((timesteps or 0) - steps) // _steps_per_update(config)))
