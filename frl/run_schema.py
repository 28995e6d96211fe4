"""The keys of a run file: one frozen model per section, with defaults and ranges.

The kinds of values are in :mod:`frl.run_values`; :mod:`frl.config` turns refusals into messages and checks what spans several sections.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, PlainValidator
from pydantic import ValidationError as ValidationError  # for frl.config

from frl.run_values import (
    LARGEST_INT,
    Coefficient,
    Count,
    Fraction,
    Free,
    Name,
    Positive,
    Switch,
    free_text,
    integer,
    interval,
    name_list,
    norm_limit,
    number,
    read_gains,
    read_hyper,
    read_seeds,
    read_sizes,
    section,
    word,
)

BLOCKS = ("trainer", "policy", "algorithm")
OPTIONAL_BLOCKS = ("population",)
BUILTIN_POLICIES = ("actor_only", "actor_critic")

_SIMULATOR = "belongs to the simulator path, which frl does not have; describe the task with trainer.learning_env"
REFUSED = {
    **{f"trainer.{key}": _SIMULATOR for key in ("gym_config", "headless", "renderer", "gpu_id", "events")},
    "algorithm.cfg.device": "is not set here; set trainer.device",
    "algorithm.cfg.optimizer.lr": "is spelled learning_rate",
    "algorithm.cfg.critic_optimizer.lr": "is spelled learning_rate",
}

_STANDARD_ONLY = ("buffer_size", "rollout_steps")
_DIFFERENTIABLE_ONLY = (
    *("segment_length", "update_horizon", "rollout_mode", "gradient_accumulation_steps", "deterministic_actions"),
    *("action_adjoint_max_norm", "state_adjoint_max_norm", "scan_memory"),
)


class Section(BaseModel):
    """Base of all sections: immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# ---- trainer ----


class LearningEnvCfg(Section):
    """``name`` of a registered environment and what its factory takes. A run file may give the name alone."""

    name: Name
    cfg: Free = {}


class TrainerCfg(Section):
    """What to run, for how long, and what to keep of it.

    Attributes:
        exp_name: part of a directory name; null: ``<env>_<algo>``.
        seed: -1 draws one when the run starts, and ``eval_seed`` then stays null for the run to fill.
        iterations: updates; ``total_timesteps`` [env steps] overrides it.
        buffer_size: steps per rollout of ppo and grpo (alias ``rollout_steps``).
        eval_freq, save_freq: every so many env steps, 0 never. save_frequency_updates: every so many updates, 0 never.
        save_frequency_minutes: also when so many minutes have passed since the last save, 0 never; it changes no bit of the training.
        keep_checkpoints: how many of the newest checkpoints are kept, beside the best one; null keeps all.
        max_eval_steps: step cap of an evaluation; null: derived from the time limit.
        final_eval_episodes: episodes of the last evaluation, on seeds that never picked the best checkpoint; 0 off.
        update_horizon: steps per update of differentiable algorithms; null: ``segment_length``.
        stagger_episodes: training rows begin at different times of their episodes, their first ones end early; a functional environment with a time limit.
        action_adjoint_max_norm, state_adjoint_max_norm: row norm limits of the adjoint at every step; 0, null and .inf switch them off.
        scan_memory: what the backward pass of a rollout keeps, ``save`` activations or ``recompute`` them.
        threads: torch threads, set before the first compile; null leaves them.
        imports: modules to import first, which register environments, policies or algorithms.
    """

    exp_name: Annotated[str | None, free_text("text usable as part of a directory name", pattern=r"[^/\\\s.][^/\\\n\r\t]{0,199}", none=True)] = None
    learning_env: Annotated[LearningEnvCfg, section(scalar=lambda name: {"name": name})]
    seed: Annotated[int, integer(-1, high=LARGEST_INT - 10_000)] = 1
    device: Annotated[str, free_text("a device such as cpu, cuda or cuda:0", pattern=r"[a-z]+(:[0-9]+)?")] = "cpu"
    dtype: Annotated[str, word("float32", "float64")] = "float32"
    num_envs: Positive = 64
    iterations: Positive = 250
    buffer_size: Positive = 256
    total_timesteps: Annotated[int | None, integer(1, none=True)] = None
    enable_eval: Switch = False
    eval_freq: Count = 0
    num_eval_envs: Positive = 16
    num_eval_episodes: Positive = 5
    eval_seed: Annotated[int | None, integer(0, none=True)] = None
    evaluation_mode: Annotated[str, word("per_env_quota", "first_n")] = "per_env_quota"
    max_eval_steps: Annotated[int | None, integer(1, none=True)] = None
    final_eval_episodes: Count = 256
    best_eval_metric: Annotated[str, free_text("the name of an evaluation metric, such as eval/avg_reward", pattern=r"eval/\S+")] = "eval/avg_reward"
    best_eval_mode: Annotated[str, word("max", "min")] = "max"
    save_freq: Count = 0
    save_frequency_updates: Count = 0
    save_frequency_minutes: Coefficient = 5.0
    keep_checkpoints: Annotated[int | None, integer(1, none=True)] = 5
    use_wandb: Switch = False
    wandb_project_name: Name = "frl"
    torch_deterministic: Switch = False
    distributed: Switch = False
    segment_length: Positive = 16
    update_horizon: Annotated[int | None, integer(1, none=True)] = None
    rollout_mode: Annotated[str, word("segmented", "complete")] = "segmented"
    gradient_accumulation_steps: Positive = 1
    stagger_episodes: Switch = False
    deterministic_actions: Switch = False
    clip_actions_to_space: Switch = False
    action_adjoint_max_norm: Annotated[float, norm_limit(0.0)] = 0.0
    state_adjoint_max_norm: Annotated[float, norm_limit(0.0)] = 0.0
    normalize_observations: Switch = False
    output_dir: Annotated[str, free_text("a directory (text)")] = "outputs"
    imports: Annotated[tuple[str, ...], name_list("a list of module names", r"[^\W\d]\w*(\.[^\W\d]\w*)*", empty=True)] = ()
    compile_mode: Annotated[str, word("inductor", "aot_eager", "eager")] = "inductor"
    eager_first_update: Switch = True
    threads: Annotated[int | None, integer(1, none=True)] = None
    scan_memory: Annotated[str, word("save", "recompute")] = "save"


# ---- policy ----


class MLPCfg(Section):
    """Sizes and functions of a perceptron; ``orthogonal_init``: one gain, or one per linear layer."""

    hidden_sizes: Annotated[tuple[int, ...], PlainValidator(read_sizes)]
    activation: Annotated[str, free_text("the name of an activation", lower=True)] = "elu"
    last_activation: Annotated[str | None, free_text("the name of an activation", off=True, lower=True)] = None
    use_layernorm: Switch = False
    dropout_p: Fraction = 0.0
    orthogonal_init: Annotated[float | tuple[float, ...] | None, PlainValidator(read_gains)] = None


class NetworkCfg(Section):
    """The kind of a network and its settings."""

    type: Annotated[str, word("mlp", lower=True)] = "mlp"
    network_cfg: MLPCfg


class ObsGroupsCfg(Section):
    """Observation keys of each network; without ``critic`` it reads what the actor reads."""

    actor: Annotated[tuple[str, ...], name_list("a non-empty list of observation names", r"(?s).+", empty=False)]
    critic: Annotated[tuple[str, ...] | None, name_list("a non-empty list of observation names", r"(?s).+", empty=False)] = None


class PolicyCfg(Section):
    """A built-in policy. A null setting of the standard deviation or distribution leaves it to the policy's own default."""

    name: Annotated[str, free_text("a policy name (text)", lower=True)] = "actor_only"
    actor: NetworkCfg
    critic: NetworkCfg | None = None
    obs_groups: ObsGroupsCfg | None = None
    actor_obs_normalization: Switch = False
    critic_obs_normalization: Switch = False
    initial_action_std: Annotated[float | None, number(0, open_low=True, none=True)] = None
    action_std_range: Annotated[tuple[float, float] | None, interval(positive=True)] = None
    initial_log_std: Annotated[float | None, number(none=True)] = None
    log_std_range: Annotated[tuple[float, float] | None, interval(positive=False)] = None
    action_dim: Annotated[int | None, integer(1, none=True)] = None
    distribution: Annotated[str | None, free_text("the name of a distribution", none=True, lower=True)] = None
    state_dependent_std: Switch = False


class CustomPolicyCfg(Section):
    """A registered policy of the user's: every key but these goes to its factory as it is."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: Annotated[str, free_text("a policy name (text)", lower=True)]
    obs_groups: ObsGroupsCfg | None = None


# ---- algorithm ----


class OptimizerCfg(Section):
    """``name`` and ``kwargs`` as :mod:`frl.optim` knows them."""

    name: Annotated[str, free_text("the name of an optimizer", lower=True)] = "adam"
    learning_rate: Coefficient = 3e-4
    kwargs: Free = {}


class LRSchedulerCfg(Section):
    """``name`` and ``kwargs`` as :mod:`frl.optim` knows them; null: a constant rate."""

    name: Annotated[str | None, free_text("the name of a schedule", off=True, lower=True)] = None
    kwargs: Free = {}


class AlgorithmCfg(Section):
    """What all algorithms share. ``max_grad_norm``: null or .inf switch clipping off and are stored as None."""

    optimizer: Annotated[OptimizerCfg, section()] = OptimizerCfg()
    lr_scheduler: Annotated[LRSchedulerCfg, section()] = LRSchedulerCfg()
    batch_size: Positive = 64
    gamma: Fraction = 0.99
    max_grad_norm: Annotated[float | None, norm_limit(None)] = 0.5


class APGCfg(AlgorithmCfg):
    """Analytic policy gradient. ``batch_size`` is accepted because all algorithms share it, and unused."""

    ent_coef: Coefficient = 0.0
    skip_nonfinite_updates: Switch = True
    max_grad_norm_before_clip: Annotated[float, norm_limit(0.0)] = 0.0


class PPOCfg(AlgorithmCfg):
    """Proximal policy optimization. ``num_mini_batches`` takes precedence over ``batch_size``."""

    gae_lambda: Fraction = 0.95
    n_epochs: Positive = 10
    clip_coef: Coefficient = 0.2
    ent_coef: Coefficient = 0.01
    vf_coef: Coefficient = 0.5
    action_bound_coef: Coefficient = 0.0
    use_clipped_value_loss: Switch = False
    schedule: Annotated[str, word("fixed", "adaptive")] = "fixed"
    desired_kl: Annotated[float | None, number(0, open_low=True, none=True)] = None
    minimum_learning_rate: Annotated[float, number(0, open_low=True)] = 1e-5
    maximum_learning_rate: Annotated[float, number(0, open_low=True)] = 1e-2
    early_stop_kl: Annotated[float | None, number(0, open_low=True, none=True)] = None
    num_mini_batches: Annotated[int | None, integer(1, none=True)] = None
    normalize_advantage_per_mini_batch: Switch = False
    normalize_rewards: Switch = False
    normalize_values: Switch = False
    truncation_bootstrap: Annotated[str, word("final_obs", "pre_step")] = "final_obs"


class GRPOCfg(AlgorithmCfg):
    """Group-relative policy optimization. ``kl_estimator``: exact between Gaussians, or the sampled ``k3``."""

    n_epochs: Positive = 10
    clip_coef: Coefficient = 0.2
    ent_coef: Coefficient = 0.0
    kl_coef: Coefficient = 0.02
    kl_estimator: Annotated[str, word("exact", "k3")] = "exact"
    group_size: Annotated[int, integer(2)] = 4
    eps: Coefficient = 1e-8
    reset_every_rollout: Switch = True
    truncate_at_first_done: Switch = True


class SHACCfg(AlgorithmCfg):
    """Short-horizon actor-critic. ``critic_optimizer``: null takes that of the actor. ``num_mini_batches`` takes precedence over ``batch_size``."""

    critic_optimizer: OptimizerCfg | None = None
    max_grad_norm: Annotated[float | None, norm_limit(None)] = 1.0
    max_grad_norm_before_clip: Annotated[float, norm_limit(0.0)] = 0.0
    critic_max_grad_norm: Annotated[float | None, norm_limit(None)] = None
    td_lambda: Fraction = 0.95
    target_tau: Fraction = 0.8
    n_epochs: Positive = 16
    num_mini_batches: Annotated[int | None, integer(1, none=True)] = 4
    normalize_values: Switch = True
    ent_coef: Coefficient = 0.0
    learn_temperature: Switch = False
    temperature_learning_rate: Coefficient = 5e-3
    target_entropy: Annotated[float | None, number(none=True)] = None
    normalize_entropy: Switch = False
    skip_nonfinite_updates: Switch = True


# ---- population ----


class PopulationCfg(Section):
    """Members that are trained together.

    Attributes:
        size: P.
        seeds: one for each member; null: ``trainer.seed``, ``trainer.seed + 1`` and so on.
        hyper: ``{name of a hyper-parameter: values}``, by the paths below ``algorithm.cfg`` (or ``trainer``): member i takes value ``i mod L`` of L, and P is
            a multiple of L.
        chunk: members whose updates share memory of activations; null: all.
    """

    size: Positive
    seeds: Annotated[tuple[int, ...] | None, PlainValidator(read_seeds)] = None
    hyper: Annotated[dict[str, tuple[float, ...]], PlainValidator(read_hyper)] = {}
    chunk: Annotated[int | None, integer(1, none=True)] = None


ALGORITHM_CFGS: dict[str, type[AlgorithmCfg]] = {"apg": APGCfg, "ppo": PPOCfg, "grpo": GRPOCfg, "shac": SHACCfg}


class AlgorithmBlock(Section):
    """The name of an algorithm and its settings: a section for a built-in one, a plain mapping for a registered one of the user's."""

    name: Annotated[str, free_text("an algorithm name (text)", lower=True)]
    cfg: Any = {}


# ---- the schema as a table ----


def block_names(data: Mapping[str, Any]) -> tuple[str, str]:
    """Names of algorithm and policy as far as they can be read, in lower case."""
    names = []
    for block, default in (("algorithm", ""), ("policy", "actor_only")):
        section = data.get(block)
        name = section.get("name", default) if isinstance(section, Mapping) else default
        names.append(name.lower() if isinstance(name, str) else default)
    return names[0], names[1]


def inapplicable(algorithm: str) -> tuple[str, ...]:
    """Trainer keys that change nothing for a built-in algorithm."""
    shac = (*_STANDARD_ONLY, "rollout_mode", "gradient_accumulation_steps")
    return {"apg": _STANDARD_ONLY, "shac": shac, "ppo": _DIFFERENTIABLE_ONLY, "grpo": (*_DIFFERENTIABLE_ONLY, "stagger_episodes")}.get(algorithm, ())


def sections(algorithm: str, policy: str) -> dict[str, tuple[str, ...] | None]:
    """``{key path of a section: its keys}`` for the named algorithm and policy; ``None`` where keys are free."""
    table: dict[str, tuple[str, ...] | None] = {"": (*BLOCKS, *OPTIONAL_BLOCKS)}

    def walk(model: type[BaseModel], path: str) -> None:
        table[path] = tuple(model.model_fields)
        for key, info in model.model_fields.items():
            for kind in (info.annotation, *get_args(info.annotation)):
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    walk(kind, f"{path}.{key}")
                elif getattr(kind, "__origin__", None) is dict:
                    table[f"{path}.{key}"] = None

    walk(TrainerCfg, "trainer")
    walk(PopulationCfg, "population")
    table["population.hyper"] = None
    table["trainer"] = (*TrainerCfg.model_fields, "rollout_steps")
    if policy in BUILTIN_POLICIES:
        walk(PolicyCfg, "policy")
    else:
        table["policy"] = None
    table["algorithm"] = tuple(AlgorithmBlock.model_fields)
    if algorithm in ALGORITHM_CFGS:
        walk(ALGORITHM_CFGS[algorithm], "algorithm.cfg")
    else:
        table["algorithm.cfg"] = None
    return table
