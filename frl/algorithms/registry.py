"""Names of algorithms and how a run file's blocks become one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from frl.algorithms.apg import ApgConfig, make_apg
from frl.algorithms.grpo import GrpoConfig, make_grpo
from frl.algorithms.ppo import PpoConfig, make_ppo
from frl.normalizers import empirical_normalizer, running_normalizer
from frl.optim import bind_scheduler_horizon, build_lr_scheduler, build_optimizer, coerce_lr_scheduler_cfg, coerce_optimizer_cfg, scheduler_needs_horizon
from frl.registry import Registry
from frl.types import Algorithm, Normalizer

_REGISTRY = Registry("algorithm")

_TRAINER_TO_APG = {"scan_memory": "memory"}
_APG_TRAINER_KEYS = (
    *("segment_length", "update_horizon", "rollout_mode", "gradient_accumulation_steps", "deterministic_actions", "clip_actions_to_space"),
    *("action_adjoint_max_norm", "state_adjoint_max_norm", "scan_memory", "compile_mode"),
)
_RECORDED_TRAINER_KEYS = ("buffer_size", "clip_actions_to_space", "compile_mode")


def register_algo(name: str, factory: Callable[..., Algorithm] | None = None, *, override: bool = False) -> Any:
    """Register an algorithm factory, directly or as a decorator.

    :func:`build_algo` calls it as ``factory(env, policy, cfg, trainer=..., normalizer=..., total_updates=..., dtype=...)``.
    """
    return _REGISTRY.register(name, factory, override=override)


def get_registered_algo_names() -> list[str]:
    """Sorted names of the registered algorithms."""
    return _REGISTRY.names()


def build_algo(
    name: str,
    cfg: Mapping[str, Any] | None,
    *,
    env: Any,
    policy: Any,
    trainer: Mapping[str, Any] | None = None,
    normalizer: Normalizer | None = None,
    total_updates: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Algorithm:
    """Build an algorithm from the ``algorithm`` block of a run file.

    Args:
        name: registered name, case-insensitive.
        cfg: ``algorithm.cfg``; unknown keys are errors.
        env, policy: what it trains.
        trainer: keys of the ``trainer`` block that concern the algorithm (rollout mode, horizons, adjoint limits, ...).
        normalizer: observation normalizer.
        total_updates: binds the horizon of a learning-rate schedule that has none.
        dtype: of parameters and noise.
    """
    factory = _REGISTRY.get(name)
    return factory(env, policy, dict(cfg or {}), trainer=dict(trainer or {}), normalizer=normalizer, total_updates=total_updates, dtype=dtype)


def take_optimizer(cfg: dict[str, Any], total_updates: int | None) -> tuple[Any, Any, float]:
    """Pop ``optimizer`` and ``lr_scheduler`` from a config: ``(optimizer, schedule or None, learning rate)``."""
    optimizer_cfg = coerce_optimizer_cfg(cfg.pop("optimizer", None))
    schedule_cfg = coerce_lr_scheduler_cfg(cfg.pop("lr_scheduler", None))
    if scheduler_needs_horizon(schedule_cfg):
        if total_updates is None:
            raise ValueError(f"lr_scheduler {schedule_cfg.name!r} needs its horizon: give it in lr_scheduler.kwargs, or a number of updates")
        schedule_cfg = bind_scheduler_horizon(schedule_cfg, total_updates)
    schedule = build_lr_scheduler(schedule_cfg) if schedule_cfg.name is not None else None
    return build_optimizer(optimizer_cfg), schedule, optimizer_cfg.learning_rate


def refuse_unknown(cfg: Mapping[str, Any], known: Any, what: str) -> None:
    """``TypeError`` for a key that is not among ``known``."""
    unknown = sorted(set(cfg) - set(known))
    if unknown:
        raise TypeError(f"{what} takes no {unknown[0]!r} (known: {', '.join(sorted(known))})")


@register_algo("apg")
def _apg(
    env: Any,
    policy: Any,
    cfg: dict[str, Any],
    *,
    trainer: dict[str, Any],
    normalizer: Normalizer | None,
    total_updates: int | None,
    dtype: torch.dtype,
) -> Algorithm:
    optimizer, schedule, rate = take_optimizer(cfg, total_updates)
    cfg.pop("batch_size", None)  # belongs to every algorithm's block; one rollout is APG's batch
    options = {_TRAINER_TO_APG.get(key, key): trainer[key] for key in _APG_TRAINER_KEYS if key in trainer}
    refuse_unknown(cfg, ApgConfig.__dataclass_fields__, "algorithm.cfg of apg")
    config = ApgConfig(**{**options, **cfg})
    return make_apg(env, policy, optimizer, config, normalizer=normalizer, schedule=schedule, learning_rate=rate, dtype=dtype)


@register_algo("ppo")
def _ppo(
    env: Any,
    policy: Any,
    cfg: dict[str, Any],
    *,
    trainer: dict[str, Any],
    normalizer: Normalizer | None,
    total_updates: int | None,
    dtype: torch.dtype,
) -> Algorithm:
    optimizer, schedule, rate = take_optimizer(cfg, total_updates)
    refuse_unknown(cfg, PpoConfig.__dataclass_fields__, "algorithm.cfg of ppo")
    config = PpoConfig(**{**{key: trainer[key] for key in _RECORDED_TRAINER_KEYS if key in trainer}, **cfg})
    return make_ppo(
        env,
        policy,
        optimizer,
        config,
        normalizer=normalizer,
        critic_normalizer=_critic_normalizer(policy, trainer, normalizer),
        schedule=schedule,
        learning_rate=rate,
        dtype=dtype,
    )


def _critic_normalizer(policy: Any, trainer: Mapping[str, Any], normalizer: Normalizer | None) -> Normalizer | None:
    """The actor's own where both see the same; none where neither trainer nor policy asks for one."""
    everything = trainer.get("normalize_observations", False)
    if not policy.has_critic or not (everything or policy.critic_obs_normalization):
        return None
    if normalizer is not None and not policy.uses_separate_critic_obs:
        return normalizer
    size = policy.critic_obs_dim
    return running_normalizer(size, initial_count=1e-4) if everything else empirical_normalizer(size)


@register_algo("grpo")
def _grpo(
    env: Any,
    policy: Any,
    cfg: dict[str, Any],
    *,
    trainer: dict[str, Any],
    normalizer: Normalizer | None,
    total_updates: int | None,
    dtype: torch.dtype,
) -> Algorithm:
    optimizer, schedule, rate = take_optimizer(cfg, total_updates)
    if not cfg.pop("reset_every_rollout", True):
        raise ValueError("reset_every_rollout must be true for grpo: the rows of a group must share one start state, got false")
    refuse_unknown(cfg, GrpoConfig.__dataclass_fields__, "algorithm.cfg of grpo")
    config = GrpoConfig(**{**{key: trainer[key] for key in _RECORDED_TRAINER_KEYS if key in trainer}, **cfg})
    return make_grpo(env, policy, optimizer, config, normalizer=normalizer, schedule=schedule, learning_rate=rate, dtype=dtype)
