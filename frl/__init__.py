"""On-policy reinforcement learning as pure functions on PyTorch.

Policies, optimizers, normalizers and environments are pure functions over explicit state; ``state, rollout = algorithm.collect(state)`` and ``state =
algorithm.update(state, rollout)``. Names load on first use, so that ``import frl`` stays light.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_ROOMS: dict[str, tuple[str, ...]] = {
    "frl.types": (
        "Algorithm",
        "LearningVecEnv",
        "Normalizer",
        "Optimizer",
        "Outcome",
        "Rollout",
        "TimeStep",
        "TrainState",
        "Trajectory",
    ),
    "frl.critic_policies": ("actor_critic", "join_parameter_groups", "optimization_parameter_groups"),
    "frl.advantages": ("compute_gae", "compute_gae_rollout", "explained_variance", "group_advantages", "normalize_advantage"),
    "frl.algorithms.apg": ("ApgConfig", "apg_gradient", "make_apg"),
    "frl.algorithms.grpo": ("GrpoConfig", "make_grpo"),
    "frl.algorithms.minibatch": ("Minibatches", "iterate_minibatches", "minibatch_indices", "transition_view"),
    "frl.algorithms.ppo": ("PpoConfig", "make_ppo"),
    "frl.algorithms.record": ("make_recorder",),
    "frl.algorithms.registry": ("build_algo", "get_registered_algo_names", "register_algo"),
    "frl.algorithms.shac": ("ShacConfig", "make_shac", "shac_gradient"),
    "frl.callbacks": ("Callback", "Event"),
    "frl.checkpoint": ("CheckpointError", "read_checkpoint", "save_checkpoint"),
    "frl.compile": ("compile_seconds", "graph_count", "jit"),
    "frl.config": ("ConfigError", "RunConfig", "load_run_config", "parse_run_config"),
    "frl.distributions": ("Distribution", "diagonal_normal", "tanh_normal"),
    "frl.export": ("export_policy",),
    "frl.envs.check": ("check_env",),
    "frl.envs.env": ("Env", "EnvSpec"),
    "frl.envs.gymnasium_env": ("gymnasium_env",),
    "frl.envs.host": ("HostEnv",),
    "frl.envs.host_rollout": ("host_rollout", "make_host_unroll"),
    "frl.envs.registry": ("build_learning_env", "get_registered_learning_env_names", "register_learning_env"),
    "frl.envs.schedule": ("DifferentiableRolloutSpec", "stratified_rollout_value"),
    "frl.envs.vector": ("VecEnv", "VecState", "make_vec_env"),
    "frl.evaluate": ("EvaluationResult", "evaluate_episodes", "make_evaluator"),
    "frl.gradients": (
        "BatchedGradientNormStats",
        "adjoint_norm_per_step",
        "adjoint_statistics",
        "clip_adjoint",
        "clip_adjoint_tree",
        "clip_batched_gradient_norm",
        "merge_stats",
        "stats_metrics",
    ),
    "frl.interrupts": ("Interrupted",),
    "frl.losses": (
        "adaptive_learning_rate",
        "apg_loss",
        "approx_kl",
        "clipped_surrogate_loss",
        "gaussian_kl",
        "grpo_loss",
        "k3",
        "ppo_loss",
        "shac_loss",
        "value_loss",
    ),
    "frl.networks": ("Network", "build_mlp_from_cfg", "mlp", "module_network"),
    "frl.normalizers": ("empirical_normalizer", "running_normalizer", "running_observation_normalizer"),
    "frl.observations": (
        "convert_policy_action_for_env",
        "dict_to_tensordict",
        "flatten_dict_observation",
        "flatten_observation_groups",
        "infer_policy_action",
        "prepare_policy_observation",
    ),
    "frl.optim": (
        "LRSchedulerCfg",
        "OptimizerCfg",
        "adam",
        "adamw",
        "apply_updates",
        "bind_scheduler_horizon",
        "build_lr_scheduler",
        "build_optimizer",
        "chain",
        "clip_by_global_norm",
        "get_registered_lr_scheduler_names",
        "get_registered_optimizer_names",
        "global_norm",
        "register_lr_scheduler",
        "register_optimizer",
        "rmsprop",
        "scheduler_needs_horizon",
        "sgd",
        "skip_nonfinite",
    ),
    "frl.policies": (
        "Policy",
        "actor_only",
        "build_policy",
        "get_policy_class",
        "get_registered_policy_names",
        "register_policy",
        "resolve_policy_obs_groups",
    ),
    "frl.members": ("copy_members", "perturb_hyper", "population", "select_members", "with_hyper"),
    "frl.plots": ("Curve", "plot_curves"),
    "frl.records": ("RunRecord", "find_runs", "read_run"),
    "frl.episode": ("Episode", "play_episode"),
    "frl.render": ("render_episode",),
    "frl.runtime": ("LoadedRun",),
    "frl.returns": ("alive_mask", "complete_discounted_return", "discounts", "segmented_discounted_return", "td_lambda_returns"),
    "frl.rollout": ("flatten_observation", "make_unroll"),
    "frl.build": ("build_run",),
    "frl.load": ("load_run",),
    "frl.run": ("train_from_config",),
    "frl.train": ("LoopConfig", "LoopState"),
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names}
# frl.scan and frl.train are modules: write `from frl.scan import scan`, `from frl.train import train`.
__all__ = [*sorted(_HOME), "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in ("compile", "envs", "numerics", "optim", "returns", "rng", "scan", "train", "tree"):
        return importlib.import_module(f"frl.{name}")
    raise AttributeError(f"module 'frl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
