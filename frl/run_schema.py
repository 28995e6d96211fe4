"""The keys of a run file: one frozen model per section, with defaults and ranges.

Only this module imports pydantic. Values are never converted from another type: ``true`` is not a number, ``"0.1"`` is not a number, ``1.5`` is not an
integer, while ``1e6`` is one. :mod:`frl.config` reads files, turns refusals into messages and checks what spans several sections.
"""

from __future__ import annotations

import difflib
import json
import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainValidator
from pydantic import ValidationError as ValidationError  # for frl.config

BLOCKS = ("trainer", "policy", "algorithm")
BUILTIN_POLICIES = ("actor_only", "actor_critic")
LARGEST_INT = 2**53 - 1  # the largest integer that a float, and so ``1e6`` or JSON, carries exactly
OFF_WORDS = ("off", "no", "false")
_SWITCH_WORDS = ("yes", "no", "on", "off", "y", "n", "true", "false", "0", "1")

_SIMULATOR = "belongs to the simulator path, which frl does not have; describe the task with trainer.learning_env"
REFUSED = {
    **{f"trainer.{key}": _SIMULATOR for key in ("gym_config", "headless", "renderer", "gpu_id", "events")},
    "algorithm.cfg.device": "is not set here; set trainer.device",
    "algorithm.cfg.optimizer.lr": "is spelled learning_rate",
    "algorithm.cfg.critic_optimizer.lr": "is spelled learning_rate",
    "population": "is not supported yet by this version",
}

_STANDARD_ONLY = ("buffer_size", "rollout_steps")
_DIFFERENTIABLE_ONLY = (
    *("segment_length", "update_horizon", "rollout_mode", "gradient_accumulation_steps", "deterministic_actions"),
    *("action_adjoint_max_norm", "state_adjoint_max_norm", "scan_memory"),
)


# ---- one value ----


def describe(value: Any) -> str:
    """A value as a run file would spell it, with its kind where that is not obvious."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"{str(value).lower()} (a boolean)"
    if isinstance(value, str):
        return f"{json.dumps(value[:60], ensure_ascii=False)} (text)"
    if isinstance(value, Mapping | BaseModel):
        return "a mapping"
    if isinstance(value, list | tuple):
        return f"a list, {list(value)!r:.60}"
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: ".inf", -math.inf: "-.inf"}.get(value, ".nan")
    return f"{value!r:.60}"


def _refuse(expected: str, hint: str = "") -> ValueError:
    return ValueError(f"expected {expected}" + (f"; {hint}" if hint else ""))


def _number_hint(value: Any) -> str:
    if not isinstance(value, str):
        return ""
    try:
        float(value)
    except ValueError:
        return ""
    if "_" in value:
        return "write the number without underscores"
    return "write .inf" if "inf" in value.lower() else "remove the quotes"


def _real(value: Any, integral: bool = False) -> float | int | None:
    """The number, or ``None`` for what is not one (``true`` and text included) or, with ``integral``, is not whole."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    if integral and isinstance(value, numbers.Integral):
        return int(value)
    try:
        number = float(value)
    except OverflowError:
        return None
    if integral:
        return int(number) if number.is_integer() else None
    return number


def _integer(low: int, *, none: bool = False, high: int = LARGEST_INT) -> PlainValidator:
    text = f"an integer >= {low}" + (" or null" if none else "")

    def check(value: Any) -> int | None:
        if value is None and none:
            return None
        number = _real(value, integral=True)
        if number is None or number < low:
            raise _refuse(text, _number_hint(value))
        if number > high:
            raise _refuse(f"{text}, at most {high}")
        return int(number)

    return PlainValidator(check)


def _number(low: float = -math.inf, high: float = math.inf, *, open_low: bool = False, none: bool = False) -> PlainValidator:
    bounds = " in [" + f"{low:g}, {high:g}]" if high < math.inf else (f" {'>' if open_low else '>='} {low:g}" if low > -math.inf else "")
    text = f"a finite number{bounds}" + (" or null" if none else "")

    def check(value: Any) -> float | None:
        if value is None and none:
            return None
        number = _real(value)
        if number is None or not math.isfinite(number) or not low <= number <= high or (open_low and number == low):
            raise _refuse(text, _number_hint(value))
        return float(number)

    return PlainValidator(check)


def _norm_limit(off: float | None) -> PlainValidator:
    """A limit where null and infinity mean off, stored as ``off``; 0 means off only where ``off`` is 0."""
    text = "a number > 0, or null or .inf to switch it off" if off is None else "a number >= 0 (0, null and .inf switch it off)"

    def check(value: Any) -> float | None:
        if value is None or value == math.inf:
            return off
        number = _real(value)
        if number is None or not 0 <= number < math.inf or (off is None and number == 0):
            hint = "0 would freeze learning" if not isinstance(value, bool) and value == 0 else _number_hint(value)
            raise _refuse(text, hint)
        return float(number)

    return PlainValidator(check)


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        spelled = str(value).lower() in _SWITCH_WORDS
        raise _refuse("true or false", "write it as a plain true or false, without quotes" if spelled else "")
    return value


def _text(what: str = "text", *, pattern: str = r"(?s).*\S.*", none: bool = False, off: bool = False, lower: bool = False) -> PlainValidator:
    """Text; with ``none`` also null; with ``off`` null switches something off, which words such as ``off`` do not."""
    text = what + (" or null" if none or off else "")

    def check(value: Any) -> str | None:
        if value is None and (none or off):
            return None
        if off and (value is False or (isinstance(value, str) and value.lower() in OFF_WORDS)):
            raise _refuse(text, "write null to switch it off")
        if not isinstance(value, str):
            raise _refuse(text, "quote it to make it text" if isinstance(value, numbers.Real) else "")
        if not re.fullmatch(pattern, value):
            raise _refuse(text)
        return value.lower() if lower else value

    return PlainValidator(check)


def _word(*allowed: str, lower: bool = False) -> PlainValidator:
    text = "one of " + ", ".join(allowed)

    def check(value: Any) -> str:
        word = value.lower() if lower and isinstance(value, str) else value
        if isinstance(word, str) and word in allowed:
            return word
        raise _refuse(text, nearest_hint(value, allowed))

    return PlainValidator(check)


def nearest_hint(value: Any, allowed: Sequence[str], cutoff: float = 0.6) -> str:
    """``did you mean "x"?`` or nothing."""
    near = difflib.get_close_matches(str(value).lower().replace("-", "_"), list(allowed), n=1, cutoff=cutoff)
    return f'did you mean "{near[0]}"?' if near and isinstance(value, str) else ""


def _listed(value: Any, what: str, hint: str = "") -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise _refuse(what, hint)
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    what = "a list of integers >= 1, such as [64, 64]"
    sizes = [_real(item, integral=True) for item in _listed(value, what)]
    if any(size is None or not 1 <= size <= LARGEST_INT for size in sizes):
        raise _refuse(what)
    return tuple(int(size) for size in sizes if size is not None)


def _gains(value: Any) -> float | tuple[float, ...] | None:
    what = "a finite number >= 0, a list of them (one per linear layer) or null"
    if value is None:
        return None
    numbers_ = [_real(item) for item in (value if isinstance(value, list | tuple) else [value])]
    if not numbers_ or any(number is None or not 0 <= number < math.inf for number in numbers_):
        raise _refuse(what, _number_hint(value))
    gains = tuple(float(number) for number in numbers_ if number is not None)
    return gains if isinstance(value, list | tuple) else gains[0]


def _interval(*, positive: bool) -> PlainValidator:
    what = f"a list [low, high] of two finite {'positive ' if positive else ''}numbers with low <= high, or null"

    def check(value: Any) -> tuple[float, float] | None:
        if value is None:
            return None
        pair = [_real(item) for item in _listed(value, what)]
        low, high = pair if len(pair) == 2 else (None, None)
        if low is None or high is None or not (0 if positive else -math.inf) < low <= high < math.inf or low == -math.inf:
            raise _refuse(what)
        return float(low), float(high)

    return PlainValidator(check)


def _names(what: str, pattern: str, *, empty: bool) -> PlainValidator:
    def check(value: Any) -> tuple[str, ...]:
        items = _listed(value, what, "write it as a list: [name]" if isinstance(value, str) else "")
        if not (items or empty) or any(not isinstance(item, str) or not re.fullmatch(pattern, item) for item in items):
            raise _refuse(what)
        return tuple(items)

    return PlainValidator(check)


def copied(value: Any) -> Any:
    """A copy of a plain value that shares no container with it."""
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [copied(item) for item in value]
    if isinstance(value, bool | None | str):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _free(value: Any) -> dict[str, Any]:
    """A mapping whose keys belong to whoever reads it."""
    if value is not None and not isinstance(value, Mapping):
        raise _refuse("a mapping or null")
    return copied(value or {})


def _section(*, scalar: Callable[[Any], Any] | None = None) -> BeforeValidator:
    """null stands for the section's defaults; ``scalar`` may turn a short form into the mapping."""
    return BeforeValidator(lambda value: {} if value is None else scalar(value) if scalar and isinstance(value, str) else value)


Free = Annotated[dict[str, Any], PlainValidator(_free)]
Switch = Annotated[bool, PlainValidator(_switch)]
Name = Annotated[str, _text("a name (text)")]
Fraction = Annotated[float, _number(0, 1)]
Coefficient = Annotated[float, _number(0)]
Count = Annotated[int, _integer(0)]
Positive = Annotated[int, _integer(1)]


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
        max_eval_steps: step cap of an evaluation; null: derived from the time limit.
        final_eval_episodes: episodes of the last evaluation, on seeds that never picked the best checkpoint; 0 off.
        update_horizon: steps per update of differentiable algorithms; null: ``segment_length``.
        action_adjoint_max_norm, state_adjoint_max_norm: row norm limits of the adjoint at every step; 0, null and .inf switch them off.
        scan_memory: what the backward pass of a rollout keeps, ``save`` activations or ``recompute`` them.
        threads: torch threads, set before the first compile; null leaves them.
        imports: modules to import first, which register environments, policies or algorithms.
    """

    exp_name: Annotated[str | None, _text("text usable as part of a directory name", pattern=r"[^/\\\s.][^/\\\n\r\t]{0,199}", none=True)] = None
    learning_env: Annotated[LearningEnvCfg, _section(scalar=lambda name: {"name": name})]
    seed: Annotated[int, _integer(-1, high=LARGEST_INT - 10_000)] = 1
    device: Annotated[str, _text("a device such as cpu, cuda or cuda:0", pattern=r"[a-z]+(:[0-9]+)?")] = "cpu"
    dtype: Annotated[str, _word("float32", "float64")] = "float32"
    num_envs: Positive = 64
    iterations: Positive = 250
    buffer_size: Positive = 256
    total_timesteps: Annotated[int | None, _integer(1, none=True)] = None
    enable_eval: Switch = False
    eval_freq: Count = 0
    num_eval_envs: Positive = 16
    num_eval_episodes: Positive = 5
    eval_seed: Annotated[int | None, _integer(0, none=True)] = None
    evaluation_mode: Annotated[str, _word("per_env_quota", "first_n")] = "per_env_quota"
    max_eval_steps: Annotated[int | None, _integer(1, none=True)] = None
    final_eval_episodes: Count = 256
    best_eval_metric: Annotated[str, _text("the name of an evaluation metric, such as eval/avg_reward", pattern=r"eval/\S+")] = "eval/avg_reward"
    best_eval_mode: Annotated[str, _word("max", "min")] = "max"
    save_freq: Count = 0
    save_frequency_updates: Count = 0
    use_wandb: Switch = False
    wandb_project_name: Name = "frl"
    torch_deterministic: Switch = False
    distributed: Switch = False
    segment_length: Positive = 16
    update_horizon: Annotated[int | None, _integer(1, none=True)] = None
    rollout_mode: Annotated[str, _word("segmented", "complete")] = "segmented"
    gradient_accumulation_steps: Positive = 1
    deterministic_actions: Switch = False
    clip_actions_to_space: Switch = False
    action_adjoint_max_norm: Annotated[float, _norm_limit(0.0)] = 0.0
    state_adjoint_max_norm: Annotated[float, _norm_limit(0.0)] = 0.0
    normalize_observations: Switch = False
    output_dir: Annotated[str, _text("a directory (text)")] = "outputs"
    imports: Annotated[tuple[str, ...], _names("a list of module names", r"[^\W\d]\w*(\.[^\W\d]\w*)*", empty=True)] = ()
    compile_mode: Annotated[str, _word("inductor", "aot_eager", "eager")] = "inductor"
    threads: Annotated[int | None, _integer(1, none=True)] = None
    scan_memory: Annotated[str, _word("save", "recompute")] = "save"


# ---- policy ----


class MLPCfg(Section):
    """Sizes and functions of a perceptron; ``orthogonal_init``: one gain, or one per linear layer."""

    hidden_sizes: Annotated[tuple[int, ...], PlainValidator(_sizes)]
    activation: Annotated[str, _text("the name of an activation", lower=True)] = "elu"
    last_activation: Annotated[str | None, _text("the name of an activation", off=True, lower=True)] = None
    use_layernorm: Switch = False
    dropout_p: Fraction = 0.0
    orthogonal_init: Annotated[float | tuple[float, ...] | None, PlainValidator(_gains)] = None


class NetworkCfg(Section):
    """The kind of a network and its settings."""

    type: Annotated[str, _word("mlp", lower=True)] = "mlp"
    network_cfg: MLPCfg


class ObsGroupsCfg(Section):
    """Observation keys of each network; without ``critic`` it reads what the actor reads."""

    actor: Annotated[tuple[str, ...], _names("a non-empty list of observation names", r"(?s).+", empty=False)]
    critic: Annotated[tuple[str, ...] | None, _names("a non-empty list of observation names", r"(?s).+", empty=False)] = None


class PolicyCfg(Section):
    """A built-in policy. A null setting of the standard deviation or distribution leaves it to the policy's own default."""

    name: Annotated[str, _text("a policy name (text)", lower=True)] = "actor_only"
    actor: NetworkCfg
    critic: NetworkCfg | None = None
    obs_groups: ObsGroupsCfg | None = None
    actor_obs_normalization: Switch = False
    critic_obs_normalization: Switch = False
    initial_action_std: Annotated[float | None, _number(0, open_low=True, none=True)] = None
    action_std_range: Annotated[tuple[float, float] | None, _interval(positive=True)] = None
    initial_log_std: Annotated[float | None, _number(none=True)] = None
    log_std_range: Annotated[tuple[float, float] | None, _interval(positive=False)] = None
    action_dim: Annotated[int | None, _integer(1, none=True)] = None
    distribution: Annotated[str | None, _text("the name of a distribution", none=True, lower=True)] = None
    state_dependent_std: Switch = False


class CustomPolicyCfg(Section):
    """A registered policy of the user's: every key but these goes to its factory as it is."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: Annotated[str, _text("a policy name (text)", lower=True)]
    obs_groups: ObsGroupsCfg | None = None


# ---- algorithm ----


class OptimizerCfg(Section):
    """``name`` and ``kwargs`` as :mod:`frl.optim` knows them."""

    name: Annotated[str, _text("the name of an optimizer", lower=True)] = "adam"
    learning_rate: Coefficient = 3e-4
    kwargs: Free = {}


class LRSchedulerCfg(Section):
    """``name`` and ``kwargs`` as :mod:`frl.optim` knows them; null: a constant rate."""

    name: Annotated[str | None, _text("the name of a schedule", off=True, lower=True)] = None
    kwargs: Free = {}


class AlgorithmCfg(Section):
    """What all algorithms share. ``max_grad_norm``: null or .inf switch clipping off and are stored as None."""

    optimizer: Annotated[OptimizerCfg, _section()] = OptimizerCfg()
    lr_scheduler: Annotated[LRSchedulerCfg, _section()] = LRSchedulerCfg()
    batch_size: Positive = 64
    gamma: Fraction = 0.99
    max_grad_norm: Annotated[float | None, _norm_limit(None)] = 0.5


class APGCfg(AlgorithmCfg):
    """Analytic policy gradient. ``batch_size`` is accepted because all algorithms share it, and unused."""

    ent_coef: Coefficient = 0.0
    skip_nonfinite_updates: Switch = True
    max_grad_norm_before_clip: Annotated[float, _norm_limit(0.0)] = 0.0


class PPOCfg(AlgorithmCfg):
    """Proximal policy optimization. ``num_mini_batches`` takes precedence over ``batch_size``."""

    gae_lambda: Fraction = 0.95
    n_epochs: Positive = 10
    clip_coef: Coefficient = 0.2
    ent_coef: Coefficient = 0.01
    vf_coef: Coefficient = 0.5
    action_bound_coef: Coefficient = 0.0
    use_clipped_value_loss: Switch = False
    schedule: Annotated[str, _word("fixed", "adaptive")] = "fixed"
    desired_kl: Annotated[float | None, _number(0, open_low=True, none=True)] = None
    minimum_learning_rate: Annotated[float, _number(0, open_low=True)] = 1e-5
    maximum_learning_rate: Annotated[float, _number(0, open_low=True)] = 1e-2
    early_stop_kl: Annotated[float | None, _number(0, open_low=True, none=True)] = None
    num_mini_batches: Annotated[int | None, _integer(1, none=True)] = None
    normalize_advantage_per_mini_batch: Switch = False
    normalize_rewards: Switch = False
    normalize_values: Switch = False
    truncation_bootstrap: Annotated[str, _word("final_obs", "pre_step")] = "final_obs"


class GRPOCfg(AlgorithmCfg):
    """Group-relative policy optimization. ``kl_estimator``: exact between Gaussians, or the sampled ``k3``."""

    n_epochs: Positive = 10
    clip_coef: Coefficient = 0.2
    ent_coef: Coefficient = 0.0
    kl_coef: Coefficient = 0.02
    kl_estimator: Annotated[str, _word("exact", "k3")] = "exact"
    group_size: Annotated[int, _integer(2)] = 4
    eps: Coefficient = 1e-8
    reset_every_rollout: Switch = True
    truncate_at_first_done: Switch = True


class SHACCfg(AlgorithmCfg):
    """Short-horizon actor-critic. ``critic_optimizer``: null takes that of the actor. ``num_mini_batches`` takes precedence over ``batch_size``."""

    critic_optimizer: OptimizerCfg | None = None
    max_grad_norm: Annotated[float | None, _norm_limit(None)] = 1.0
    max_grad_norm_before_clip: Annotated[float, _norm_limit(0.0)] = 0.0
    critic_max_grad_norm: Annotated[float | None, _norm_limit(None)] = None
    td_lambda: Fraction = 0.95
    target_tau: Fraction = 0.8
    n_epochs: Positive = 16
    num_mini_batches: Annotated[int | None, _integer(1, none=True)] = 4
    normalize_values: Switch = True
    ent_coef: Coefficient = 0.0
    learn_temperature: Switch = False
    temperature_learning_rate: Coefficient = 5e-3
    target_entropy: Annotated[float | None, _number(none=True)] = None
    normalize_entropy: Switch = False
    skip_nonfinite_updates: Switch = True


ALGORITHM_CFGS: dict[str, type[AlgorithmCfg]] = {"apg": APGCfg, "ppo": PPOCfg, "grpo": GRPOCfg, "shac": SHACCfg}


class AlgorithmBlock(Section):
    """The name of an algorithm and its settings: a section for a built-in one, a plain mapping for a registered one of the user's."""

    name: Annotated[str, _text("an algorithm name (text)", lower=True)]
    cfg: Any = {}


# ---- the schema as a table ----


def inapplicable(algorithm: str) -> tuple[str, ...]:
    """Trainer keys that change nothing for a built-in algorithm."""
    shac = (*_STANDARD_ONLY, "rollout_mode", "gradient_accumulation_steps")
    return {"apg": _STANDARD_ONLY, "shac": shac, "ppo": _DIFFERENTIABLE_ONLY, "grpo": _DIFFERENTIABLE_ONLY}.get(algorithm, ())


def sections(algorithm: str, policy: str) -> dict[str, tuple[str, ...] | None]:
    """``{key path of a section: its keys}`` for the named algorithm and policy; ``None`` where keys are free."""
    table: dict[str, tuple[str, ...] | None] = {"": BLOCKS}

    def walk(model: type[BaseModel], path: str) -> None:
        table[path] = tuple(model.model_fields)
        for key, info in model.model_fields.items():
            for kind in (info.annotation, *get_args(info.annotation)):
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    walk(kind, f"{path}.{key}")
                elif getattr(kind, "__origin__", None) is dict:
                    table[f"{path}.{key}"] = None

    walk(TrainerCfg, "trainer")
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
