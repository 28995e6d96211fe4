"""Optimizers, gradient transforms and learning-rate schedules as pure functions.

``optimizer = chain(clip_by_global_norm(0.5), adam(3e-4))``, ``state = optimizer.init(params)``, then for each update
``updates, state = optimizer.update(grads, state, params, {"learning_rate": schedule(base, step)})`` and ``params = apply_updates(params, updates)``.
"""

from __future__ import annotations

from frl.optim.adam import AdamState, adam, adamw
from frl.optim.registry import (
    LRSchedulerCfg,
    OptimizerCfg,
    bind_scheduler_horizon,
    build_lr_scheduler,
    build_optimizer,
    coerce_lr_scheduler_cfg,
    coerce_optimizer_cfg,
    get_registered_lr_scheduler_names,
    get_registered_optimizer_names,
    register_lr_scheduler,
    register_optimizer,
    scheduler_needs_horizon,
)
from frl.optim.rmsprop import RMSpropState, rmsprop
from frl.optim.schedules import Schedule, constant_schedule, cosine_schedule, exponential_schedule, linear_schedule, step_schedule
from frl.optim.sgd import SGDState, sgd
from frl.optim.transform import SkipState, apply_updates, chain, clip_by_global_norm, clip_global_norm, global_norm, skip_nonfinite

__all__ = [
    "AdamState",
    "LRSchedulerCfg",
    "OptimizerCfg",
    "RMSpropState",
    "SGDState",
    "Schedule",
    "SkipState",
    "adam",
    "adamw",
    "apply_updates",
    "bind_scheduler_horizon",
    "build_lr_scheduler",
    "build_optimizer",
    "chain",
    "clip_by_global_norm",
    "clip_global_norm",
    "coerce_lr_scheduler_cfg",
    "coerce_optimizer_cfg",
    "constant_schedule",
    "cosine_schedule",
    "exponential_schedule",
    "get_registered_lr_scheduler_names",
    "get_registered_optimizer_names",
    "global_norm",
    "linear_schedule",
    "register_lr_scheduler",
    "register_optimizer",
    "rmsprop",
    "scheduler_needs_horizon",
    "sgd",
    "skip_nonfinite",
    "step_schedule",
]
