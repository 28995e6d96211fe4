"""A run file (YAML 1.2 or JSON) becomes a checked, frozen :class:`RunConfig`, or a :class:`ConfigError` that names every problem.

File, JSON and command line agree: a value means the same however it is given. This is the front of several rooms: :mod:`frl.run_file` reads and writes text,
:mod:`frl.run_schema` has keys, defaults and ranges, :mod:`frl.run_values` the kinds of values, :mod:`frl.overrides` ``--set``, :mod:`frl.run_conflicts` what
single values cannot show, and :mod:`frl.run_problems` the words of a refusal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frl import run_schema as schema
from frl.overrides import apply_overrides
from frl.run_conflicts import conflicts
from frl.run_file import read_json, read_yaml
from frl.run_file import write_yaml as write_yaml
from frl.run_problems import ConfigError, not_a_section, plain_copy, problem_of, unknown_key
from frl.run_values import copied


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The three blocks of a run file, all defaults resolved. Built by :func:`parse_run_config`.

    Attributes:
        trainer: what to run and for how long.
        policy: a built-in policy's settings, or those of a registered one.
        algorithm: ``name`` and ``cfg``, a section for ``apg``, ``shac``, ``ppo`` and ``grpo`` and a plain mapping for any other name.
        population: members that are trained together, ``None`` for one.
    """

    trainer: schema.TrainerCfg
    policy: schema.PolicyCfg | schema.CustomPolicyCfg
    algorithm: schema.AlgorithmBlock
    population: schema.PopulationCfg | None = None

    def __post_init__(self) -> None:
        problems = list(conflicts(self.trainer, self.policy, self.algorithm))
        if problems:
            raise ConfigError("RunConfig", problems)


# ---- reading ----


def load_run_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a ``.yaml``, ``.yml`` or ``.json`` run file, apply ``key.path=value`` overrides, check it.

    Raises:
        ConfigError: the file cannot be read, an override does not fit, or a value is refused; all problems in one message.
    """
    path = Path(path)
    readers = {".yaml": read_yaml, ".yml": read_yaml, ".json": read_json}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(str(path), [f'expected a file that ends in .yaml, .yml or .json, got "{path.suffix}"'])
    try:
        mapping = reader(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read: {error.strerror or error}"]) from None
    except UnicodeDecodeError:
        raise ConfigError(str(path), ["expected UTF-8 text"]) from None
    except ValueError as error:
        raise ConfigError(str(path), [str(error)]) from None
    if mapping is None:
        raise ConfigError(str(path), ["the file is empty; expected the blocks trainer, policy, algorithm"])
    if not overrides:
        return parse_run_config(mapping, source=str(path))
    mapping = apply_overrides(plain_copy(mapping, str(path)), overrides)
    return parse_run_config(mapping, source=f"{path} with --set")


# ---- checking ----


def parse_run_config(mapping: Mapping[str, Any], *, source: str = "<mapping>") -> RunConfig:
    """Check a mapping with the blocks ``trainer``, ``policy``, ``algorithm`` and resolve every default.

    Args:
        mapping: plain Python values; it is not changed.
        source: what messages call it, for a file its path.

    Raises:
        ConfigError: all problems, one per line.
    """
    data = plain_copy(mapping, source)
    if not data:
        raise ConfigError(source, ["the mapping is empty; expected the blocks trainer, policy, algorithm"])
    algorithm_name, policy_name = schema.block_names(data)
    table = schema.sections(algorithm_name, policy_name)
    problems = [unknown_key("", key, table) for key in data if key not in (*schema.BLOCKS, *schema.OPTIONAL_BLOCKS)]
    blocks: dict[str, dict[str, Any]] = {}
    for block in schema.BLOCKS:
        if block not in data:
            problems.append(f"{block}: missing, expected a block with the keys {', '.join(table[block] or ('name', '...'))}")
        elif not isinstance(data[block], dict):
            problems.append(not_a_section(block, data[block], table))
        else:
            blocks[block] = data[block]

    trainer = policy = algorithm = None
    if "trainer" in blocks:
        trainer = _trainer(blocks["trainer"], algorithm_name, table, problems)
    if "policy" in blocks:
        model = schema.PolicyCfg if policy_name in schema.BUILTIN_POLICIES else schema.CustomPolicyCfg
        policy = _validate(model, blocks["policy"], "policy", table, problems)
    if "algorithm" in blocks:
        algorithm = _algorithm(blocks["algorithm"], algorithm_name, table, problems)
    population = _population(data["population"], table, problems) if data.get("population") is not None else None
    if trainer is not None and policy is not None and algorithm is not None:
        problems.extend(conflicts(trainer, policy, algorithm))
        if not problems:
            return RunConfig(trainer=_resolved(trainer, algorithm.name), policy=_resolved_policy(policy), algorithm=algorithm, population=population)
    raise ConfigError(source, problems)


def _validate(model: Any, data: Any, path: str, table: Mapping, problems: list[str]) -> Any:
    try:
        return model.model_validate(data)
    except schema.ValidationError as error:
        problems.extend(problem_of(path, item, table) for item in error.errors(include_url=False))
        return None


def _trainer(data: dict[str, Any], algorithm: str, table: Mapping, problems: list[str]) -> schema.TrainerCfg | None:
    for key in schema.inapplicable(algorithm):
        if key in data:
            steps = "update_horizon" if algorithm in ("apg", "shac") else "buffer_size"
            problems.append(f"trainer.{key}: has no effect with algorithm {algorithm}, whose rollouts are {steps} steps long; remove it")
    if "rollout_steps" in data:
        if "buffer_size" in data:
            problems.append("trainer.rollout_steps: set it or trainer.buffer_size, not both: they are one setting")
        data = {"buffer_size" if key == "rollout_steps" else key: value for key, value in data.items()}
        found: list[str] = []
        trainer = _validate(schema.TrainerCfg, data, "trainer", table, found)
        problems.extend(text.replace("trainer.buffer_size:", "trainer.rollout_steps:", 1) for text in found)
        return trainer
    return _validate(schema.TrainerCfg, data, "trainer", table, problems)


def _algorithm(data: dict[str, Any], name: str, table: Mapping, problems: list[str]) -> schema.AlgorithmBlock | None:
    block = _validate(schema.AlgorithmBlock, data, "algorithm", table, problems)
    cfg = {} if data.get("cfg") is None else data["cfg"]
    if not isinstance(cfg, dict):
        problems.append(not_a_section("algorithm.cfg", cfg, table))
        return None
    if name in schema.ALGORITHM_CFGS:
        cfg = _validate(schema.ALGORITHM_CFGS[name], cfg, "algorithm.cfg", table, problems)
        if isinstance(cfg, schema.SHACCfg) and cfg.critic_optimizer is None:
            cfg = cfg.model_copy(update={"critic_optimizer": cfg.optimizer})
    return None if block is None or cfg is None else block.model_copy(update={"cfg": cfg})


def _population(data: Any, table: Mapping, problems: list[str]) -> schema.PopulationCfg | None:
    if not isinstance(data, dict):
        problems.append(not_a_section("population", data, table))
        return None
    cfg = _validate(schema.PopulationCfg, data, "population", table, problems)
    if cfg is None:
        return None
    if cfg.seeds is not None and len(cfg.seeds) != cfg.size:
        problems.append(f"population.seeds: expected {cfg.size} seeds, one for each member, got {len(cfg.seeds)}")
    for name, values in cfg.hyper.items():
        if cfg.size % len(values):
            problems.append(f"population.hyper.{name}: {cfg.size} members are no multiple of {len(values)} values")
    return cfg


def _resolved(trainer: schema.TrainerCfg, algorithm: str) -> schema.TrainerCfg:
    changes: dict[str, Any] = {}
    if trainer.exp_name is None:
        changes["exp_name"] = re.sub(r"[^\w-]+", "_", f"{trainer.learning_env.name}_{algorithm}")[:200]
    if trainer.eval_seed is None and trainer.seed >= 0:
        changes["eval_seed"] = trainer.seed + 10_000
    if trainer.update_horizon is None and "update_horizon" not in schema.inapplicable(algorithm):
        changes["update_horizon"] = trainer.segment_length
    return trainer.model_copy(update=changes)


def _resolved_policy(policy: Any) -> Any:
    groups = policy.obs_groups
    if groups is None or groups.critic is not None or policy.name != "actor_critic":
        return policy
    return policy.model_copy(update={"obs_groups": groups.model_copy(update={"critic": groups.actor})})


# ---- writing ----


def dump_run_config(config: RunConfig) -> dict[str, Any]:
    """Plain Python values of a config, every default resolved; :func:`parse_run_config` gives an equal config back.

    Trainer keys that have no effect with the algorithm, and policy settings left to the policy's own default, do not appear.
    """
    skipped = set(schema.inapplicable(config.algorithm.name))
    policy = config.policy
    builtin = isinstance(policy, schema.PolicyCfg)
    dumped = {
        "trainer": config.trainer.model_dump(exclude=skipped),
        "policy": policy.model_dump(exclude_none=True) if builtin else policy.model_dump(exclude_unset=True),
        "algorithm": config.algorithm.model_dump(),
        **({} if config.population is None else {"population": config.population.model_dump()}),
    }
    return copied(dumped)
