"""A run file (YAML 1.2 or JSON) becomes a checked, frozen :class:`RunConfig`, or a :class:`ConfigError` that names every problem.

File, JSON and command line agree: a value means the same however it is given. YAML follows the 1.2 core schema to the letter, so ``1e-4`` is a number,
``on`` and ``no`` are text, and a key that appears twice is refused. Keys, defaults and ranges are in :mod:`frl.run_schema`.
"""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.tag import Tag

from frl import run_schema as schema
from frl.networks import ACTIVATIONS


class ConfigError(ValueError):
    """A run file or an override that cannot be used. ``problems`` holds one line each: key path, value, what is allowed, the nearest match."""

    def __init__(self, source: str, problems: Sequence[str] = ()) -> None:
        super().__init__(source, tuple(problems))
        self.source, self.problems = source, tuple(problems)

    def __str__(self) -> str:
        if len(self.problems) < 2:
            return ": ".join((self.source, *self.problems))
        return "\n  ".join([f"{self.source}: {len(self.problems)} problems", *self.problems])


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The three blocks of a run file, all defaults resolved. Built by :func:`parse_run_config`.

    Attributes:
        trainer: what to run and for how long.
        policy: a built-in policy's settings, or those of a registered one.
        algorithm: ``name`` and ``cfg``, a section for ``apg``, ``shac``, ``ppo`` and ``grpo`` and a plain mapping for any other name.
    """

    trainer: schema.TrainerCfg
    policy: schema.PolicyCfg | schema.CustomPolicyCfg
    algorithm: schema.AlgorithmBlock

    def __post_init__(self) -> None:
        problems = list(_conflicts(self.trainer, self.policy, self.algorithm))
        if problems:
            raise ConfigError("RunConfig", problems)


# ---- reading ----


class _CoreSchema(VersionedResolver):
    """The YAML 1.2 core schema. The library's own 1.2 rules also take underscores, binary numbers and dates."""

    _RULES = (
        ("null", r"~|null|Null|NULL|"),
        ("bool", r"true|True|TRUE|false|False|FALSE"),
        ("int", r"[-+]?[0-9]{1,300}|0o[0-7]{1,300}|0x[0-9a-fA-F]{1,300}"),
        ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
    )

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        name = {SequenceNode: "seq", MappingNode: "map"}.get(kind, "str")
        if kind is ScalarNode and implicit[0]:
            name = next((name for name, pattern in self._RULES if re.fullmatch(pattern, value)), "str")
        return Tag(suffix=f"tag:yaml.org,2002:{name}")


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver = _CoreSchema
    return yaml


def _scalar(kind: str, text: str) -> Any:
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    return float(re.sub(r"\.(?=[a-zA-Z])", "", text)) if kind == "float" else text


def _construct(node: Any, above: tuple[int, ...] = ()) -> Any:
    line = node.start_mark.line + 1
    kind = str(node.tag).removeprefix("tag:yaml.org,2002:")
    if id(node) in above:
        raise ValueError(f"line {line}: an alias refers to what contains it")
    above = (*above, id(node))
    if isinstance(node, MappingNode) and kind == "map":
        mapping = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                raise ValueError(f"line {line}: expected text as a key")
            key = _construct(key_node)
            if key in mapping:
                raise ValueError(f'line {key_node.start_mark.line + 1}: the key "{key}" appears twice in one mapping')
            mapping[key] = _construct(value_node, above)
        return mapping
    if isinstance(node, SequenceNode) and kind == "seq":
        return [_construct(item, above) for item in node.value]
    if isinstance(node, ScalarNode) and kind in ("null", "bool", "int", "float", "str"):
        try:
            return _scalar(kind, node.value)
        except ValueError:
            raise ValueError(f"line {line}: {node.value!r} is not of the tagged type {kind}") from None
    raise ValueError(f"line {line}: the tag {node.tag} is not supported")


def _compose(text: str) -> Any:
    """The node tree of one YAML document, ``None`` for an empty one; ``ValueError`` with the line otherwise."""
    try:
        return _yaml().compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{where}not valid YAML: {error.problem or error.context}") from None
    except (YAMLError, RecursionError) as error:
        raise ValueError(f"not valid YAML: {str(error).splitlines()[0]}") from None


def _read_yaml(text: str) -> Any:
    node = _compose(text)
    return None if node is None else _construct(node)


def _read_json(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f'the key "{twice}" appears twice in one mapping')
        return mapping

    try:
        return json.loads(text, object_pairs_hook=unique) if text.strip() else None
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError("not valid JSON: nested too deeply") from None


def load_run_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a ``.yaml``, ``.yml`` or ``.json`` run file, apply ``key.path=value`` overrides, check it.

    Raises:
        ConfigError: the file cannot be read, an override does not fit, or a value is refused; all problems in one message.
    """
    path = Path(path)
    readers = {".yaml": _read_yaml, ".yml": _read_yaml, ".json": _read_json}
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
    mapping = apply_overrides(_checked(mapping, str(path)), overrides)
    return parse_run_config(mapping, source=f"{path} with --set")


# ---- overrides ----


def apply_overrides(mapping: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of ``mapping`` with ``key.path=value`` applied in order; values are YAML 1.2 scalars or flow collections, typed later by the schema.

    Example:
        >>> apply_overrides({"trainer": {"num_envs": 64}}, ["trainer.num_envs=32", "algorithm.cfg.gamma=.9"])
        {'trainer': {'num_envs': 32}, 'algorithm': {'cfg': {'gamma': 0.9}}}

    Raises:
        ConfigError: not of the form ``key.path=value``, not YAML, or no such key; the nearest key is named.
    """
    result = _checked(mapping, "--set")
    problems: list[str] = []
    paths: list[tuple[str, ...]] = []
    for text in overrides:
        name, equals, raw = text.partition("=")
        keys = tuple(name.strip().split("."))
        if not equals or not all(keys):
            problems.append(f"{text}: expected key.path=value, such as trainer.num_envs=32")
            continue
        try:
            _assign(result, keys, _override_value(raw))
            paths.append(keys)
        except ValueError as error:
            problems.append(f"{text}: {error}")
    algorithm, policy = _block_names(result)
    table = schema.sections(algorithm, policy)
    for keys in paths:
        problems.extend(_unreachable(keys, table))
    if problems:
        raise ConfigError("--set", problems)
    return result


def _override_value(raw: str) -> Any:
    node = _compose(raw)
    plain = node is None or (isinstance(node, ScalarNode) and not node.style)
    if plain and (node.value if node else "") != raw.strip():
        raise ValueError("the value is ambiguous in YAML; put it in quotes")
    return None if node is None else _construct(node)


def _assign(mapping: dict[str, Any], keys: tuple[str, ...], value: Any) -> None:
    for depth, key in enumerate(keys[:-1]):
        if keys[: depth + 1] == ("trainer", "learning_env") and isinstance(mapping.get(key), str):
            mapping[key] = {"name": mapping[key]}
        if mapping.get(key) is None:
            mapping[key] = {}
        mapping = mapping[key]
        if not isinstance(mapping, dict):
            raise ValueError(f"{'.'.join(keys[: depth + 1])} is {schema.describe(mapping)} and has no keys")
    # The two spellings of one setting: the override takes the place of either.
    other = {"trainer.buffer_size": "rollout_steps", "trainer.rollout_steps": "buffer_size"}.get(".".join(keys), "")
    mapping.pop(other, None)
    mapping[keys[-1]] = value


def _unreachable(keys: tuple[str, ...], table: Mapping[str, tuple[str, ...] | None]) -> Iterator[str]:
    section = ""
    for key in keys:
        if section not in table:
            yield f"{'.'.join(keys)}: {section} is a single value and has no keys"
            return
        known = table[section]
        if known is None:
            return
        if key not in known:
            yield _unknown(section, key, table)
            return
        section = f"{section}.{key}" if section else key


# ---- checking ----


def _checked(mapping: Any, source: str) -> dict[str, Any]:
    """A copy that holds plain Python values only; ``ConfigError`` for anything else, NaN included."""
    if not isinstance(mapping, Mapping):
        raise ConfigError(source, [f"expected a mapping with the blocks trainer, policy, algorithm at the top level, got {schema.describe(mapping)}"])
    problems = [f"{path}: got {schema.describe(value)}, {text}" for path, value, text in _not_plain(mapping)]
    if problems:
        raise ConfigError(source, problems)
    return schema.copied(mapping)


def parse_run_config(mapping: Mapping[str, Any], *, source: str = "<mapping>") -> RunConfig:
    """Check a mapping with the blocks ``trainer``, ``policy``, ``algorithm`` and resolve every default.

    Args:
        mapping: plain Python values; it is not changed.
        source: what messages call it, for a file its path.

    Raises:
        ConfigError: all problems, one per line.
    """
    data = _checked(mapping, source)
    if not data:
        raise ConfigError(source, ["the mapping is empty; expected the blocks trainer, policy, algorithm"])
    algorithm_name, policy_name = _block_names(data)
    table = schema.sections(algorithm_name, policy_name)
    problems = [_unknown("", key, table) for key, value in data.items() if key not in schema.BLOCKS and not (key == "population" and value is None)]
    blocks: dict[str, dict[str, Any]] = {}
    for block in schema.BLOCKS:
        if block not in data:
            problems.append(f"{block}: missing, expected a block with the keys {', '.join(table[block] or ('name', '...'))}")
        elif not isinstance(data[block], dict):
            problems.append(_not_a_section(block, data[block], table))
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
    if trainer is not None and policy is not None and algorithm is not None:
        problems.extend(_conflicts(trainer, policy, algorithm))
        if not problems:
            return RunConfig(trainer=_resolved(trainer, algorithm.name), policy=_resolved_policy(policy), algorithm=algorithm)
    raise ConfigError(source, problems)


def _block_names(data: Mapping[str, Any]) -> tuple[str, str]:
    """Names of algorithm and policy as far as they can be read, in lower case."""
    names = []
    for block, default in (("algorithm", ""), ("policy", "actor_only")):
        section = data.get(block)
        name = section.get("name", default) if isinstance(section, Mapping) else default
        names.append(name.lower() if isinstance(name, str) else default)
    return names[0], names[1]


def _validate(model: Any, data: Any, path: str, table: Mapping, problems: list[str]) -> Any:
    try:
        return model.model_validate(data)
    except schema.ValidationError as error:
        problems.extend(_problem(path, item, table) for item in error.errors(include_url=False))
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
        problems.append(_not_a_section("algorithm.cfg", cfg, table))
        return None
    if name in schema.ALGORITHM_CFGS:
        cfg = _validate(schema.ALGORITHM_CFGS[name], cfg, "algorithm.cfg", table, problems)
        if isinstance(cfg, schema.SHACCfg) and cfg.critic_optimizer is None:
            cfg = cfg.model_copy(update={"critic_optimizer": cfg.optimizer})
    return None if block is None or cfg is None else block.model_copy(update={"cfg": cfg})


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


# ---- messages ----


def _problem(path: str, error: Any, table: Mapping) -> str:
    """One line for one of pydantic's errors."""
    *above, key = (path, *(str(part) for part in error["loc"]))
    section, where = ".".join(above), ".".join((*above, key))
    if error["type"] == "extra_forbidden":
        return _unknown(section, key, table)
    if error["type"] == "missing":
        expected = {"algorithm.name": f"one of {', '.join(schema.ALGORITHM_CFGS)} or the name of a registered algorithm"}.get(where)
        keys = ", ".join(table.get(where) or ())
        return f"{where}: missing" + (f", expected {expected or f'the keys {keys}'}" if expected or keys else "")
    if error["type"] in ("model_type", "model_attributes_type"):
        return _not_a_section(where, error["input"], table)
    reason = error.get("ctx", {}).get("error", error["msg"])
    return f"{where}: got {schema.describe(error['input'])}, {reason}"


def _not_a_section(where: str, value: Any, table: Mapping) -> str:
    keys = table.get(where) or ()
    hint = ""
    if isinstance(value, str) and "name" in keys:
        hint = "; write null to switch it off" if value.lower() in (*schema.OFF_WORDS, "none") else f"; write {{name: {value}}}"
    return f"{where}: got {schema.describe(value)}, expected a mapping" + (f" with the keys {', '.join(keys)}" if keys else "") + hint


def _unknown(section: str, key: str, table: Mapping) -> str:
    """Why a key is not known: refused by name, misspelled, in the wrong place, or none of these."""
    where = f"{section}.{key}" if section else key
    if where in schema.REFUSED:
        return f"{where}: {schema.REFUSED[where]}"
    if key == "<<":
        return f"{where}: YAML 1.2 has no merge key; write the keys out"
    known = table.get(section) or ()
    plain = key.replace("-", "_").lower()
    leaves = {f"{at}.{leaf}".lstrip("."): leaf for at, keys in table.items() for leaf in keys or () if leaf not in ("name", "cfg", "type")}
    elsewhere = [path for path, leaf in leaves.items() if leaf == plain]
    others = [name for name, model in schema.ALGORITHM_CFGS.items() if section == "algorithm.cfg" and plain in model.model_fields]
    if plain not in known and elsewhere:
        return f"{where}: unknown key here; it belongs at {' or '.join(elsewhere)}"
    if plain not in known and others:
        return f"{where}: has no effect with this algorithm; it is a setting of {', '.join(others)}"
    hint = schema.nearest_hint(key, known)
    if not hint:
        near = next((path for path, leaf in leaves.items() if schema.nearest_hint(key, [leaf], cutoff=0.8)), None)
        hint = f'did you mean "{near}"?' if near else f"known keys: {', '.join(known)}"
    return f"{where}: unknown key; {hint}"


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
    }
    return schema.copied(dumped)


def write_yaml(path: str | Path, mapping: Mapping[str, Any]) -> None:
    """Write plain Python values as YAML 1.2, key order kept, so that they read back equal."""
    yaml = _yaml()
    yaml.sort_base_mapping_type_on_output = False  # pyright: ignore[reportAttributeAccessIssue]
    yaml.default_flow_style = None  # pyright: ignore[reportAttributeAccessIssue]
    yaml.allow_unicode, yaml.width = True, 4096
    text = StringIO()
    yaml.dump(schema.copied(mapping), text)
    Path(path).write_text(text.getvalue(), encoding="utf-8")


# ---- what single values cannot show ----


def _not_plain(value: Any, path: str = "") -> Iterator[tuple[str, Any, str]]:
    """``(key path, value, what is wrong)`` for everything in a value that a run file cannot hold, NaN included."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            name = f"{path}.{key}" if path else str(key)
            if not isinstance(key, str):
                yield name, key, "expected text as the key; quote it"
            yield from _not_plain(item, name)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _not_plain(item, f"{path}[{index}]")
    elif isinstance(value, numbers.Real):
        if not isinstance(value, numbers.Integral) and math.isnan(value):
            yield path, value, "NaN is refused everywhere"
    elif not (value is None or isinstance(value, str)):
        yield path, type(value).__name__, "expected null, a boolean, a number, text, a list or a mapping"


def _conflicts(trainer: schema.TrainerCfg, policy: schema.PolicyCfg | schema.CustomPolicyCfg, algorithm: schema.AlgorithmBlock) -> Iterator[str]:
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
                yield f"algorithm.cfg.{section}.kwargs.{key}: got {schema.describe(value)}, expected a finite value"
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
            hint = schema.nearest_hint(name, names)
            yield f"{key}: got {schema.describe(name)}, expected one of {', '.join(names)}" + (f"; {hint}" if hint else "")
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
