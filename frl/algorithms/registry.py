"""Names of algorithms and how a run file's blocks become one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from frl.algorithms.apg import ApgConfig, make_apg
from frl.algorithms.grpo import GrpoConfig, make_grpo
from frl.algorithms.ppo import PpoConfig, make_ppo
from frl.algorithms.shac import ShacConfig, make_shac
from frl.normalizers import empirical_normalizer, running_normalizer
from frl.optim import bind_scheduler_horizon, build_lr_scheduler, build_optimizer, coerce_lr_scheduler_cfg, coerce_optimizer_cfg, scheduler_needs_horizon
from frl.registry import Registry
from frl.types import Algorithm, Normalizer

_REGISTRY = Registry("algorithm")


class _Entry(NamedTuple):
    """A registered algorithm."""

    factory: Callable[..., Algorithm]
    differentiable: bool


def register_algo(name: str, factory: Callable[..., Algorithm] | None = None, *, override: bool = False, differentiable: bool = False) -> Any:
    """Register an algorithm factory, directly or as a decorator.

    :func:`build_algo` calls it as ``factory(env, policy, cfg, trainer=..., normalizer=..., total_updates=..., dtype=...)``.

    Args:
        name: case-insensitive.
        factory: see above.
        override: replace what the name stands for.
        differentiable: it differentiates through the environment, so that a host environment is refused.
    """
    if factory is None:
        return lambda item: register_algo(name, item, override=override, differentiable=differentiable)
    _REGISTRY.register(name, _Entry(factory, differentiable), override=override)
    return factory


def is_differentiable(name: str) -> bool:
    """Whether the algorithm differentiates through the environment; ``ValueError`` for an unknown name."""
    return _REGISTRY.get(name).differentiable


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
    factory = _REGISTRY.get(name).factory
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


def _builtin(
    name: str,
    make: Callable[..., Algorithm],
    config: Any,
    keys: Mapping[str, str],
    *,
    adapt: Callable[[dict[str, Any]], dict[str, Any]] = lambda cfg: {},
    more: Callable[..., dict[str, Any]] = lambda policy, trainer, normalizer: {},
    differentiable: bool = False,
) -> None:
    """Register ``make(env, policy, optimizer, config(**settings), ...)``.

    Args:
        name: of the algorithm.
        make: its factory.
        config: its settings.
        keys: those of the ``trainer`` block that it reads, by their names there.
        adapt: takes from ``algorithm.cfg`` what is none of the settings, and returns further arguments of ``make``.
        more: further arguments of ``make``.
        differentiable: see :func:`register_algo`.
    """

    def build(
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
        taken = adapt(cfg)
        refuse_unknown(cfg, config.__dataclass_fields__, f"algorithm.cfg of {name}")
        options = {own: trainer[key] for key, own in keys.items() if key in trainer}
        return make(
            env,
            policy,
            optimizer,
            config(**{**options, **cfg}),
            normalizer=normalizer,
            schedule=schedule,
            learning_rate=rate,
            dtype=dtype,
            **taken,
            **more(policy, trainer, normalizer),
        )

    register_algo(name, build, differentiable=differentiable)


def _apg_cfg(cfg: dict[str, Any]) -> dict[str, Any]:
    cfg.pop("batch_size", None)  # belongs to every algorithm's block; one rollout is APG's batch
    return {}


def _shac_cfg(cfg: dict[str, Any]) -> dict[str, Any]:
    critic = cfg.pop("critic_optimizer", None)
    if critic is None:
        return {}
    critic = coerce_optimizer_cfg(critic)
    return {"critic_optimizer": build_optimizer(critic), "critic_learning_rate": critic.learning_rate}


def _grpo_cfg(cfg: dict[str, Any]) -> dict[str, Any]:
    if not cfg.pop("reset_every_rollout", True):
        raise ValueError("reset_every_rollout must be true for grpo: the rows of a group must share one start state, got false")
    return {}


def _critic_normalizer(policy: Any, trainer: Mapping[str, Any], normalizer: Normalizer | None) -> dict[str, Normalizer | None]:
    """The actor's own where both see the same; none where neither trainer nor policy asks for one."""
    everything = trainer.get("normalize_observations", False)
    if not policy.has_critic or not (everything or policy.critic_obs_normalization):
        return {"critic_normalizer": None}
    if normalizer is not None and not policy.uses_separate_critic_obs:
        return {"critic_normalizer": normalizer}
    size = policy.critic_obs_dim
    return {"critic_normalizer": running_normalizer(size, initial_count=1e-4) if everything else empirical_normalizer(size)}


_WINDOW_KEYS = (
    *("segment_length", "update_horizon", "stagger_episodes", "deterministic_actions", "clip_actions_to_space"),
    *("action_adjoint_max_norm", "state_adjoint_max_norm", "compile_mode"),
)
_SHAC_KEYS = {**{key: key for key in _WINDOW_KEYS}, "scan_memory": "memory"}
_APG_KEYS = {**_SHAC_KEYS, **{key: key for key in ("rollout_mode", "gradient_accumulation_steps")}}
_RECORDED_KEYS = {key: key for key in ("buffer_size", "clip_actions_to_space", "compile_mode")}
_builtin("apg", make_apg, ApgConfig, _APG_KEYS, adapt=_apg_cfg, differentiable=True)
_builtin("shac", make_shac, ShacConfig, _SHAC_KEYS, adapt=_shac_cfg, more=_critic_normalizer, differentiable=True)
_builtin("ppo", make_ppo, PpoConfig, {**_RECORDED_KEYS, "stagger_episodes": "stagger_episodes"}, more=_critic_normalizer)
_builtin("grpo", make_grpo, GrpoConfig, _RECORDED_KEYS, adapt=_grpo_cfg)
