"""Pairs of settings of a run file that contradict each other, which single values cannot show."""

from __future__ import annotations

import math
from collections.abc import Iterator

from frl import run_schema as schema
from frl import run_values as values
from frl.networks import ACTIVATIONS


def conflicts(trainer: schema.TrainerCfg, policy: schema.PolicyCfg | schema.CustomPolicyCfg, algorithm: schema.AlgorithmBlock) -> Iterator[str]:
    """What single values cannot show: pairs of settings that contradict each other."""
    cfg = algorithm.cfg
    if trainer.distributed:
        yield "trainer.distributed: got true, expected false: frl trains in one process; more rows (trainer.num_envs) take the place of more processes"
    for section in ("optimizer", "critic_optimizer", "lr_scheduler"):
        kwargs = getattr(getattr(cfg, section, None), "kwargs", {})
        for key, value in kwargs.items():
            if key in ("lr", "learning_rate"):
                owner = section if section.endswith("optimizer") else "optimizer"
                yield f"algorithm.cfg.{section}.kwargs.{key}: set algorithm.cfg.{owner}.learning_rate instead"
            elif isinstance(value, float) and math.isinf(value):
                yield f"algorithm.cfg.{section}.kwargs.{key}: got {values.describe(value)}, expected a finite value"
    if isinstance(cfg, schema.AlgorithmCfg) and cfg.lr_scheduler.kwargs and cfg.lr_scheduler.name is None:
        yield "algorithm.cfg.lr_scheduler.kwargs: has no effect without algorithm.cfg.lr_scheduler.name"
    if algorithm.name not in ("ppo", "grpo"):
        yield from _rollout_conflicts(trainer)
    if isinstance(policy, schema.PolicyCfg):
        yield from _policy_conflicts(policy, algorithm.name)
    if isinstance(cfg, schema.PPOCfg):
        yield from _ppo_conflicts(trainer, cfg)
    if isinstance(cfg, schema.SHACCfg):
        yield from _shac_conflicts(trainer, cfg)
    if isinstance(cfg, schema.GRPOCfg):
        if trainer.num_envs % cfg.group_size:
            yield f"trainer.num_envs: got {trainer.num_envs}, expected a multiple of algorithm.cfg.group_size, which is {cfg.group_size}"
        if not cfg.reset_every_rollout:
            yield "algorithm.cfg.reset_every_rollout: got false, expected true: rows of a group must share one start state"


def _rollout_conflicts(trainer: schema.TrainerCfg) -> Iterator[str]:
    horizon, length = trainer.update_horizon or trainer.segment_length, trainer.segment_length
    if trainer.rollout_mode == "segmented":
        if horizon < length or horizon % length:
            yield f"trainer.update_horizon: got {horizon}, expected a multiple of trainer.segment_length, which is {length} (rollout_mode: segmented)"
        if trainer.gradient_accumulation_steps > 1:
            yield (
                f"trainer.gradient_accumulation_steps: got {trainer.gradient_accumulation_steps}, expected 1: it has no effect with "
                "rollout_mode: segmented; raise update_horizon, or set rollout_mode: complete"
            )
    elif trainer.stagger_episodes:
        yield "trainer.stagger_episodes: has no effect with rollout_mode: complete, whose rollouts begin with new episodes; set rollout_mode: segmented"


def _policy_conflicts(policy: schema.PolicyCfg, algorithm: str) -> Iterator[str]:
    if policy.name == "actor_critic" and policy.critic is None:
        yield 'policy.critic: missing, expected a network {type: mlp, network_cfg: {...}} for policy "actor_critic"'
    if policy.name == "actor_only" and policy.critic is not None:
        yield 'policy.critic: policy "actor_only" has no critic; set policy.name: actor_critic or remove it'
    if policy.name == "actor_only" and algorithm in ("ppo", "shac"):
        yield f'policy.name: got "actor_only", expected a policy with a critic, such as actor_critic, for algorithm "{algorithm}"'
    if policy.name == "actor_only" and policy.obs_groups is not None and policy.obs_groups.critic is not None:
        yield 'policy.obs_groups.critic: policy "actor_only" has no critic; remove it'
    if policy.initial_action_std is not None and policy.initial_log_std is not None:
        yield "policy.initial_log_std: set it or policy.initial_action_std, not both"
    if policy.action_std_range is not None and policy.log_std_range is not None:
        yield "policy.log_std_range: set it or policy.action_std_range, not both"
    for which, network in (("actor", policy.actor), ("critic", policy.critic)):
        if network is not None:
            for problem in _network_conflicts(network.network_cfg):
                yield f"policy.{which}.network_cfg.{problem}"


def _network_conflicts(cfg: schema.MLPCfg) -> Iterator[str]:
    names = ACTIVATIONS.names()
    for key in ("activation", "last_activation"):
        name = getattr(cfg, key)
        if name is not None and name not in names:
            hint = values.nearest_hint(name, names)
            yield f"{key}: got {values.describe(name)}, expected one of {', '.join(names)}" + (f"; {hint}" if hint else "")
    if isinstance(cfg.orthogonal_init, tuple) and len(cfg.orthogonal_init) != len(cfg.hidden_sizes) + 1:
        yield f"orthogonal_init: got {len(cfg.orthogonal_init)} gains, expected {len(cfg.hidden_sizes) + 1}, one per linear layer"


def _ppo_conflicts(trainer: schema.TrainerCfg, cfg: schema.PPOCfg) -> Iterator[str]:
    if cfg.schedule == "adaptive":
        if cfg.desired_kl is None:
            yield "algorithm.cfg.desired_kl: got null, expected a number > 0 with schedule: adaptive"
        if cfg.lr_scheduler.name is not None:
            yield (
                f'algorithm.cfg.lr_scheduler.name: got "{cfg.lr_scheduler.name}", expected null with schedule: adaptive, '
                "which sets the learning rate itself; use one of the two"
            )
    elif cfg.desired_kl is not None:
        yield "algorithm.cfg.desired_kl: has no effect with schedule: fixed; set schedule: adaptive or remove it"
    if cfg.maximum_learning_rate < cfg.minimum_learning_rate:
        yield (
            f"algorithm.cfg.maximum_learning_rate: got {cfg.maximum_learning_rate:g}, expected at least "
            f"algorithm.cfg.minimum_learning_rate, which is {cfg.minimum_learning_rate:g}"
        )
    transitions = trainer.num_envs * trainer.buffer_size
    if cfg.num_mini_batches is not None and cfg.num_mini_batches > transitions:
        yield f"algorithm.cfg.num_mini_batches: got {cfg.num_mini_batches}, expected at most num_envs * buffer_size = {transitions}"


def _shac_conflicts(trainer: schema.TrainerCfg, cfg: schema.SHACCfg) -> Iterator[str]:
    transitions = trainer.num_envs * (trainer.update_horizon or trainer.segment_length)
    if cfg.num_mini_batches is not None and cfg.num_mini_batches > transitions:
        yield f"algorithm.cfg.num_mini_batches: got {cfg.num_mini_batches}, expected at most num_envs * update_horizon = {transitions}"
    if cfg.learn_temperature:
        if cfg.ent_coef == 0:
            yield "algorithm.cfg.ent_coef: got 0, expected a number > 0 with learn_temperature: true, which starts there"
        if cfg.normalize_entropy and cfg.target_entropy == 0:
            yield "algorithm.cfg.target_entropy: got 0, expected another number or null with normalize_entropy: true, which divides by it"
        return
    for key, off in (("target_entropy", None), ("normalize_entropy", False)):
        if getattr(cfg, key) != off:
            yield f"algorithm.cfg.{key}: has no effect without learn_temperature: true; remove it"
