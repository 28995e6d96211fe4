"""Run files: what is accepted, what is refused and with which words."""

from __future__ import annotations

import copy
import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frl.config import ConfigError, RunConfig, apply_overrides, dump_run_config, load_run_config, parse_run_config, write_yaml

MLP = {"type": "mlp", "network_cfg": {"hidden_sizes": [8, 8]}}

APG_YAML = """\
trainer:
  exp_name: reach_apg_check
  learning_env: {name: PointMassRL, cfg: {max_episode_steps: 60, success_threshold: 0.05, workspace_half: .5}}
  seed: 11
  device: cpu
  num_envs: 48
  iterations: 120
  rollout_mode: complete
  update_horizon: 60
  gradient_accumulation_steps: 3
  deterministic_actions: true
  clip_actions_to_space: true
  action_adjoint_max_norm: 2.5
  normalize_observations: true
  enable_eval: true
  eval_freq: 17280
  num_eval_envs: 8
  num_eval_episodes: 32
  best_eval_metric: eval/success_rate
  best_eval_mode: max
  save_frequency_updates: 10
  use_wandb: false
policy:
  name: actor_only
  initial_log_std: -1.0
  actor:
    type: mlp
    network_cfg: {hidden_sizes: [32, 24], activation: gelu, last_activation: tanh, orthogonal_init: [1.3, 1.3, 0.05]}
algorithm:
  name: apg
  cfg:
    optimizer: {name: AdamW, learning_rate: 7e-4, kwargs: {weight_decay: 2E-4}}
    lr_scheduler: {name: cosine, kwargs: {eta_min: 2e-5}}
    gamma: .97
    max_grad_norm: 2.0
    max_grad_norm_before_clip: 40.0
    ent_coef: 0.002
    skip_nonfinite_updates: false
"""


def minimal(algorithm: str = "apg") -> dict[str, Any]:
    policy: dict[str, Any] = {"name": "actor_only", "actor": copy.deepcopy(MLP)}
    if algorithm in ("ppo", "shac"):
        policy = {"name": "actor_critic", "actor": copy.deepcopy(MLP), "critic": copy.deepcopy(MLP)}
    return {"trainer": {"learning_env": "PointMassRL"}, "policy": policy, "algorithm": {"name": algorithm}}


def with_set(*overrides: str, algorithm: str = "apg") -> RunConfig:
    return parse_run_config(apply_overrides(minimal(algorithm), overrides))


def with_value(path: str, value: Any, algorithm: str = "apg") -> RunConfig:
    mapping = minimal(algorithm)
    section: Any = mapping
    *above, key = path.split(".")
    for name in above:
        section = section.setdefault(name, {})
    section[key] = value
    return parse_run_config(mapping)


def refusal(*overrides: str, algorithm: str = "apg") -> str:
    with pytest.raises(ConfigError) as caught:
        with_set(*overrides, algorithm=algorithm)
    return str(caught.value)


def saved(tmp_path: Path, text: str, name: str = "run.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def file_refusal(tmp_path: Path, text: str, name: str = "run.yaml") -> str:
    path = saved(tmp_path, text, name)
    with pytest.raises(ConfigError) as caught:
        load_run_config(path)
    assert str(path) in str(caught.value)
    assert list(tmp_path.iterdir()) == [path]  # a refused file leaves nothing behind
    return str(caught.value)


# ---- a whole file ----


def test_a_full_file_loads(tmp_path: Path) -> None:
    config = load_run_config(saved(tmp_path, APG_YAML))
    assert config.trainer.learning_env.cfg == {"max_episode_steps": 60, "success_threshold": 0.05, "workspace_half": 0.5}
    assert (config.trainer.num_envs, config.trainer.update_horizon, config.trainer.gradient_accumulation_steps) == (48, 60, 3)
    assert config.policy.name == "actor_only"
    assert config.algorithm.cfg.optimizer.learning_rate == 7e-4
    assert config.algorithm.cfg.optimizer.kwargs == {"weight_decay": 2e-4}
    assert config.algorithm.cfg.lr_scheduler.kwargs == {"eta_min": 2e-5}
    assert (config.algorithm.cfg.gamma, config.algorithm.cfg.max_grad_norm_before_clip) == (0.97, 40.0)
    assert config.algorithm.cfg.skip_nonfinite_updates is False


def test_defaults() -> None:
    trainer = parse_run_config(minimal()).trainer
    assert (trainer.exp_name, trainer.seed, trainer.eval_seed, trainer.device, trainer.num_envs) == ("PointMassRL_apg", 1, 10001, "cpu", 64)
    assert (trainer.iterations, trainer.total_timesteps, trainer.num_eval_envs, trainer.num_eval_episodes) == (250, None, 16, 5)
    assert (trainer.segment_length, trainer.update_horizon, trainer.rollout_mode) == (16, 16, "segmented")
    assert (trainer.best_eval_metric, trainer.best_eval_mode, trainer.wandb_project_name) == ("eval/avg_reward", "max", "frl")
    apg = parse_run_config(minimal()).algorithm.cfg
    assert (apg.gamma, apg.max_grad_norm, apg.ent_coef, apg.skip_nonfinite_updates, apg.max_grad_norm_before_clip) == (0.99, 0.5, 0.0, True, 0.0)
    assert (apg.optimizer.name, apg.optimizer.learning_rate, apg.lr_scheduler.name) == ("adam", 3e-4, None)
    ppo = parse_run_config(minimal("ppo")).algorithm.cfg
    assert (ppo.n_epochs, ppo.batch_size, ppo.clip_coef, ppo.vf_coef, ppo.gae_lambda, ppo.schedule) == (10, 64, 0.2, 0.5, 0.95, "fixed")
    assert parse_run_config(minimal("ppo")).trainer.buffer_size == 256
    shac = parse_run_config(minimal("shac"))
    cfg = shac.algorithm.cfg
    assert (cfg.n_epochs, cfg.num_mini_batches, cfg.td_lambda, cfg.target_tau, cfg.max_grad_norm) == (16, 4, 0.95, 0.8, 1.0)
    assert (shac.trainer.segment_length, shac.trainer.update_horizon) == (16, 16)
    grpo = parse_run_config(minimal("grpo")).algorithm.cfg
    assert (grpo.group_size, grpo.kl_coef, grpo.eps, grpo.ent_coef) == (4, 0.02, 1e-8, 0.0)


def test_defaults_follow_other_keys() -> None:
    trainer = with_set("trainer.seed=5", "trainer.segment_length=8", "algorithm.name=APG").trainer
    assert (trainer.eval_seed, trainer.update_horizon, trainer.exp_name) == (10005, 8, "PointMassRL_apg")
    assert with_set("trainer.seed=-1").trainer.eval_seed is None
    assert with_set("trainer.learning_env=some/env name").trainer.exp_name == "some_env_name_apg"


def test_json_and_yaml_agree(tmp_path: Path) -> None:
    from_yaml = load_run_config(saved(tmp_path, APG_YAML))
    text = json.dumps(dump_run_config(from_yaml)).replace("0.0007", "7e-4")
    assert "7e-4" in text
    assert load_run_config(saved(tmp_path, text, "run.json")) == from_yaml


def test_input_is_not_changed_and_not_shared() -> None:
    mapping = minimal()
    mapping["trainer"]["learning_env"] = {"name": "PointMassRL", "cfg": {"a": [1, 2]}}
    before = copy.deepcopy(mapping)
    config = parse_run_config(mapping)
    apply_overrides(mapping, ["trainer.learning_env.cfg.a=[3]", "trainer.seed=4"])
    dump_run_config(config)["trainer"]["learning_env"]["cfg"]["a"].append(9)
    assert mapping == before
    mapping["trainer"]["learning_env"]["cfg"]["a"].append(3)
    assert config.trainer.learning_env.cfg == {"a": [1, 2]}


def test_config_is_frozen() -> None:
    config = parse_run_config(minimal())
    with pytest.raises(Exception, match="frozen"):
        config.trainer.seed = 3  # type: ignore[misc]
    with pytest.raises(Exception, match="trainer"):
        config.trainer = config.trainer  # type: ignore[misc]


# ---- round trip ----

_limits = st.sampled_from([None, math.inf, 0.25, 3])
_rates = st.sampled_from([0, 1e-4, 3e-4, 2.5e-17, 1e6, 0.1])
_awkward_text = st.sampled_from(
    ["plain", "1e-4", "007", "on", "true", "null", "~", "2024-01-01", "a: b", "# no", "1_000", ".inf", "é", " x ", "'", '"', "-", "0o7"]
)
_trainers = st.fixed_dictionaries(
    {
        "learning_env": st.one_of(
            st.just("Pendulum"), st.fixed_dictionaries({"name": st.just("E"), "cfg": st.dictionaries(_awkward_text, _awkward_text | _rates)})
        )
    },
    optional={
        "exp_name": _awkward_text.filter(lambda text: text.strip() == text and not text.startswith(".")),
        "seed": st.integers(-1, 2**40),
        "num_envs": st.sampled_from([8, 16, 1e2]),
        "total_timesteps": st.sampled_from([None, 1e6, 10]),
        "enable_eval": st.booleans(),
        "eval_seed": st.integers(0, 99),
        "normalize_observations": st.booleans(),
        "threads": st.sampled_from([None, 1, 2]),
        "dtype": st.sampled_from(["float32", "float64"]),
        "imports": st.lists(st.sampled_from(["a", "b.c"])),
        "output_dir": _awkward_text,
    },
)
_apg_trainers = st.fixed_dictionaries(
    {},
    optional={
        "segment_length": st.sampled_from([4, 8]),
        "update_horizon": st.sampled_from([None, 16, 32]),
        "rollout_mode": st.sampled_from(["segmented", "complete"]),
        "action_adjoint_max_norm": st.sampled_from([0, None, math.inf, 1.5]),
        "state_adjoint_max_norm": _limits,
        "scan_memory": st.sampled_from(["save", "recompute"]),
    },
)
_shared_cfg = {
    "optimizer": st.fixed_dictionaries(
        {}, optional={"name": st.sampled_from(["adam", "SGD"]), "learning_rate": _rates, "kwargs": st.just({"betas": [0.9, 0.99]})}
    ),
    "lr_scheduler": st.sampled_from([None, {}, {"name": "step", "kwargs": {"step_size": 3}}]),
    "gamma": st.sampled_from([0, 0.5, 1]),
    "max_grad_norm": _limits,
    "batch_size": st.integers(1, 9),
}
_cfgs = {
    "apg": st.fixed_dictionaries({}, optional={**_shared_cfg, "max_grad_norm_before_clip": _limits, "skip_nonfinite_updates": st.booleans()}),
    "ppo": st.fixed_dictionaries({}, optional={**_shared_cfg, "gae_lambda": st.sampled_from([0, 0.9]), "num_mini_batches": st.sampled_from([None, 4])}),
    "grpo": st.fixed_dictionaries({}, optional={**_shared_cfg, "group_size": st.sampled_from([2, 4]), "kl_coef": st.sampled_from([0, 0.1])}),
    "shac": st.fixed_dictionaries(
        {},
        optional={
            **_shared_cfg,
            "critic_optimizer": st.sampled_from([None, {"name": "sgd", "learning_rate": 0.1}]),
            "critic_max_grad_norm": _limits,
            "max_grad_norm_before_clip": _limits,
            "num_mini_batches": st.sampled_from([None, 1]),
            "td_lambda": st.sampled_from([0, 0.9, 1]),
            "normalize_values": st.booleans(),
        },
    ),
    "mine": st.dictionaries(_awkward_text, st.one_of(_awkward_text, _rates, st.lists(st.booleans()))),
}
_networks = st.fixed_dictionaries(
    {
        "network_cfg": st.fixed_dictionaries(
            {"hidden_sizes": st.just([4])}, optional={"activation": st.just("tanh"), "orthogonal_init": st.sampled_from([None, 1, [1, 0.1]])}
        )
    }
)
_deviations = st.sampled_from([{}, {"initial_log_std": -1}, {"initial_action_std": 0.5, "action_std_range": [0.1, 1]}, {"log_std_range": [-5, 2]}])


@st.composite
def run_files(draw: st.DrawFn) -> dict[str, Any]:
    name = draw(st.sampled_from(sorted(_cfgs)))
    policy: dict[str, Any] = {"name": draw(st.sampled_from(["actor_critic", "theirs"] + ["actor_only"] * (name not in ("ppo", "shac"))))}
    if policy["name"] == "theirs":
        policy.update(draw(st.dictionaries(st.sampled_from(["width", "kind", "actor"]), _awkward_text | st.none())))
    else:
        policy.update(actor=draw(_networks), **draw(_deviations))
    if policy["name"] == "actor_critic":
        policy.update(critic=draw(_networks), obs_groups=draw(st.sampled_from([None, {"actor": ["a"]}, {"actor": ["a"], "critic": ["a", "b"]}])))
    trainer = {**draw(_trainers), **(draw(_apg_trainers) if name in ("apg", "mine") else {})}
    return {"trainer": trainer, "policy": policy, "algorithm": {"name": name, "cfg": draw(_cfgs[name])}}


@given(run_files())
def test_dump_loads_back_equal(tmp_path_factory: pytest.TempPathFactory, mapping: dict[str, Any]) -> None:
    config = parse_run_config(mapping)
    dumped = dump_run_config(config)
    assert parse_run_config(dumped) == config
    assert dump_run_config(parse_run_config(dumped)) == dumped
    path = tmp_path_factory.mktemp("round") / "run.yaml"
    write_yaml(path, dumped)
    assert load_run_config(path) == config
    path.with_suffix(".json").write_text(json.dumps(dumped), encoding="utf-8")
    assert load_run_config(path.with_suffix(".json")) == config


def test_dump_holds_plain_values_and_only_keys_that_apply() -> None:
    def kinds(value: Any) -> set[type]:
        inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        return {type(value)}.union(*(kinds(item) for item in inner))

    mapping = minimal("ppo")
    mapping["trainer"].update(num_envs=np.int64(8), iterations=(2e1))
    mapping["policy"]["actor"]["network_cfg"]["hidden_sizes"] = (np.int32(4), 4)
    mapping["algorithm"]["cfg"] = {"gamma": np.float32(0.5)}
    dumped = dump_run_config(parse_run_config(mapping))
    assert kinds(dumped) <= {dict, list, str, int, float, bool, type(None)}
    assert dumped["trainer"]["num_envs"] == 8
    assert "update_horizon" not in dumped["trainer"]
    assert "buffer_size" in dumped["trainer"]
    assert "buffer_size" not in dump_run_config(parse_run_config(minimal()))["trainer"]


@pytest.mark.parametrize(
    "text",
    [
        "1e-4",
        "1E5",
        "yes",
        "007",
        "0x1F",
        "0o17",
        ".5",
        "+1",
        "2024-01-01",
        "null",
        "True",
        ".NaN",
        "a # b",
        "x: y",
        "",
        "1_0",
        "<<",
        "=",
        "word " * 60,
        "a\nb\n",
        "\t",
        "\u2028",
    ],
)
def test_text_survives_yaml(tmp_path: Path, text: str) -> None:
    mapping = minimal()
    mapping["trainer"]["learning_env"] = {"name": "E", "cfg": {"word": text, text or "empty": [text, 1e-4, 1e22, -0.0, math.inf]}}
    write_yaml(tmp_path / "run.yaml", mapping)
    assert load_run_config(tmp_path / "run.yaml").trainer.learning_env.cfg == mapping["trainer"]["learning_env"]["cfg"]


# ---- numbers ----


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("algorithm.cfg.optimizer.learning_rate", "1e-4", 0.0001),
        ("algorithm.cfg.optimizer.learning_rate", "3E-4", 0.0003),
        ("algorithm.cfg.ent_coef", ".2", 0.2),
        ("algorithm.cfg.ent_coef", "+1.", 1.0),
        ("algorithm.cfg.gamma", "1", 1.0),
        ("trainer.total_timesteps", "1e6", 1_000_000),
        ("trainer.num_envs", "0x20", 32),
        ("trainer.seed", "-1", -1),
        ("trainer.normalize_observations", "true", True),
        ("trainer.normalize_observations", "False", False),
        ("trainer.total_timesteps", "null", None),
        ("trainer.exp_name", "on", "on"),
        ("trainer.exp_name", '"007"', "007"),
    ],
)
def test_file_and_override_read_values_alike(tmp_path: Path, path: str, text: str, expected: Any) -> None:
    def value(config: RunConfig) -> Any:
        found: Any = config
        for name in path.split("."):
            found = getattr(found, name)
        return found

    base = minimal()
    *above, key = path.split(".")
    lines = "".join("  " * depth + name + ":\n" for depth, name in enumerate(above)) + "  " * len(above) + f"{key}: {text}\n"
    lines = lines.replace("trainer:\n", "trainer:\n  learning_env: PointMassRL\n").replace("algorithm:\n", "algorithm:\n  name: apg\n")
    rest = {block: section for block, section in base.items() if block != above[0]}
    write_yaml(tmp_path / "rest.yaml", rest)
    from_file = load_run_config(saved(tmp_path, lines + (tmp_path / "rest.yaml").read_text()))
    from_override = parse_run_config(apply_overrides(base, [f"{path}={text}"]))
    for config in (from_file, from_override):
        assert value(config) == expected
        assert type(value(config)) is type(expected)


@pytest.mark.parametrize("value", [1.5, "3", "1e6", True, math.inf, -math.inf, math.nan, 0, -4, None, [3], 1e300])
def test_counts_are_whole_positive_numbers(value: Any) -> None:
    for key in ("num_envs", "iterations", "num_eval_episodes"):
        with pytest.raises(ConfigError, match=rf"trainer\.{key}: got "):
            with_value(f"trainer.{key}", value)


@pytest.mark.parametrize("value", [0, -5, math.inf, 2.7, True, "4"])
def test_step_cap_of_an_evaluation(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.max_eval_steps: got .*expected an integer >= 1 or null"):
        with_value("trainer.max_eval_steps", value)
    assert with_value("trainer.max_eval_steps", None).trainer.max_eval_steps is None
    assert with_value("trainer.final_eval_episodes", 0).trainer.final_eval_episodes == 0


def test_quoted_numbers_are_refused_with_a_hint(tmp_path: Path) -> None:
    assert "remove the quotes" in refusal("algorithm.cfg.optimizer.learning_rate='1e-4'")
    mapping = minimal()
    mapping["algorithm"]["cfg"] = {"optimizer": {"learning_rate": "1e-4"}}
    message = file_refusal(tmp_path, json.dumps(mapping), "run.json")
    assert 'algorithm.cfg.optimizer.learning_rate: got "1e-4" (text), expected a finite number >= 0' in message
    assert "without underscores" in refusal("trainer.num_envs=1_000")
    assert refusal("trainer.num_envs=nan").endswith("expected an integer >= 1")  # plain text in YAML 1.2, and there are no quotes to remove


@pytest.mark.parametrize("value", [-1, 0, 0.0, math.nan, True, False, "1.0", -math.inf])
def test_gradient_norm_limit(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.cfg\.max_grad_norm: got "):
        with_value("algorithm.cfg.max_grad_norm", value)


def test_off_has_one_stored_spelling() -> None:
    assert "null or .inf" in refusal("algorithm.cfg.max_grad_norm=0")
    for off in ("null", ".inf"):
        assert with_set(f"algorithm.cfg.max_grad_norm={off}").algorithm.cfg.max_grad_norm is None
    for off in ("null", ".inf", "0"):
        assert with_set(f"trainer.action_adjoint_max_norm={off}").trainer.action_adjoint_max_norm == 0.0
        assert with_set(f"algorithm.cfg.max_grad_norm_before_clip={off}").algorithm.cfg.max_grad_norm_before_clip == 0.0


@pytest.mark.parametrize(
    ("algorithm", "path", "values"),
    [
        ("apg", "algorithm.cfg.gamma", [99, -0.1, "0.9", True, math.inf]),
        ("apg", "algorithm.cfg.ent_coef", [-1, math.inf]),
        ("apg", "algorithm.cfg.max_grad_norm_before_clip", [-1, True]),
        ("apg", "algorithm.cfg.optimizer.learning_rate", [-1e-4, math.inf, None]),
        ("apg", "trainer.action_adjoint_max_norm", [-0.5, True, "1"]),
        ("apg", "trainer.segment_length", [0, 1.5]),
        ("ppo", "algorithm.cfg.gae_lambda", [1.5, -1]),
        ("ppo", "algorithm.cfg.clip_coef", [-0.2, True]),
        ("ppo", "algorithm.cfg.n_epochs", [0, 2.5]),
        ("ppo", "algorithm.cfg.action_bound_coef", [-1]),
        ("ppo", "algorithm.cfg.minimum_learning_rate", [0, -1]),
        ("ppo", "algorithm.cfg.num_mini_batches", [0, True]),
        ("ppo", "algorithm.cfg.batch_size", [0]),
        ("shac", "algorithm.cfg.td_lambda", [1.5, -1, True]),
        ("shac", "algorithm.cfg.target_tau", [1.5, -1]),
        ("shac", "algorithm.cfg.critic_max_grad_norm", [-1, 0, True]),
        ("shac", "algorithm.cfg.critic_optimizer.learning_rate", [-1, None]),
        ("shac", "algorithm.cfg.temperature_learning_rate", [-1, math.inf]),
        ("shac", "algorithm.cfg.target_entropy", ["auto", math.inf, True]),
        ("shac", "algorithm.cfg.learn_temperature", ["yes", 1]),
        ("grpo", "algorithm.cfg.eps", [-1]),
        ("grpo", "algorithm.cfg.kl_coef", [-0.1]),
        ("grpo", "algorithm.cfg.group_size", [1, 0, 2.5]),
        ("ppo", "policy.initial_action_std", [0, -1]),
        ("ppo", "policy.action_std_range", [[1, 0.5], [0, 1], [1], 1, [True, 2]]),
        ("ppo", "policy.log_std_range", [[2, -5], [-math.inf, 1]]),
        ("apg", "policy.actor.network_cfg.hidden_sizes", [[0], [1.5], 64, ["8"]]),
        ("apg", "policy.actor.network_cfg.orthogonal_init", [-1, [1, "a", 1], True]),
    ],
)
def test_values_out_of_range_name_field_and_value(algorithm: str, path: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=path.replace(".", r"\.") + ": got .*expected"):
            with_value(path, value, algorithm)


def test_nan_is_refused_where_keys_are_free(tmp_path: Path) -> None:
    assert "trainer.learning_env.cfg.a[1]: got .nan" in refusal("trainer.learning_env.cfg.a=[0, .nan]")
    assert "algorithm.cfg.optimizer.kwargs.weight_decay: got .inf" in refusal("algorithm.cfg.optimizer.kwargs.weight_decay=.inf")
    mapping = minimal()
    mapping["trainer"]["learning_env"] = {"name": "E", "cfg": {"a": math.nan}}
    assert "trainer.learning_env.cfg.a" in file_refusal(tmp_path, json.dumps(mapping), "run.json")
    with pytest.raises(ConfigError, match=r"trainer\.learning_env\.cfg\.f: got .*expected null, a boolean"):
        with_value("trainer.learning_env", {"name": "E", "cfg": {"f": print}})


# ---- booleans and words ----


@pytest.mark.parametrize("text", ["no", "yes", "on", "off", "0", "1", '"false"', "'true'", "n"])
def test_only_true_and_false_are_booleans(text: str) -> None:
    message = refusal(f"trainer.normalize_observations={text}")
    assert "trainer.normalize_observations: got " in message
    assert "expected true or false; write it as a plain true or false" in message


def test_flags_need_a_value() -> None:
    assert "expected true or false" in refusal("trainer.normalize_observations=maybe")
    assert "expected key.path=value" in refusal("trainer.normalize_observations")
    assert "expected key.path=value" in refusal("--no-normalize_observations")
    assert "trainer.normalize_observations: got null" in refusal("trainer.normalize_observations=")


def test_words_are_not_switches(tmp_path: Path) -> None:
    assert "write null to switch it off" in refusal("algorithm.cfg.lr_scheduler=off")
    assert "write null to switch it off" in refusal("algorithm.cfg.lr_scheduler.name=no")
    assert "write null to switch it off" in refusal("algorithm.cfg.lr_scheduler.name=false")
    assert "write null to switch it off" in refusal("policy.actor.network_cfg.last_activation=off")
    for text in ("true", "off", "no", "Complete"):
        assert "expected one of segmented, complete" in refusal(f"trainer.rollout_mode={text}")
    assert 'did you mean "complete"?' in refusal("trainer.rollout_mode=complet")
    assert "expected one of max, min" in refusal("trainer.best_eval_mode=no")
    assert "quote it to make it text" in refusal("trainer.exp_name=007")
    assert "got true (a boolean)" in refusal("trainer.num_envs=true")
    assert with_set("algorithm.cfg.lr_scheduler=null").algorithm.cfg.lr_scheduler.name is None
    text = APG_YAML.replace("lr_scheduler: {name: cosine, kwargs: {eta_min: 2e-5}}", "lr_scheduler: off")
    assert 'algorithm.cfg.lr_scheduler: got "off" (text)' in file_refusal(tmp_path, text)


def test_names_are_case_insensitive_where_registries_are() -> None:
    config = with_set("algorithm.name=APG", "policy.name=Actor_Only", "algorithm.cfg.optimizer.name=AdamW", "policy.actor.network_cfg.activation=TanH")
    assert (config.algorithm.name, config.policy.name, config.algorithm.cfg.optimizer.name) == ("apg", "actor_only", "adamw")
    assert 'did you mean "tanh"?' in refusal("policy.actor.network_cfg.activation=tahn")


@pytest.mark.parametrize("name", ["../x", "a/b", "a\\b", ".", "", "..", " x"])
def test_experiment_names_stay_inside_the_output_directory(name: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.exp_name"):
        with_value("trainer.exp_name", name)


# ---- keys ----


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("learning_rate=1e-4", "learning_rate: unknown key here; it belongs at algorithm.cfg.optimizer.learning_rate"),
        ("algorithm.cfg.learning_rate=1e-4", "algorithm.cfg.learning_rate: unknown key here; it belongs at algorithm.cfg.optimizer.learning_rate"),
        ("num_envs=3", "it belongs at trainer.num_envs"),
        ("algorithm.cfg.seed=3", "it belongs at trainer.seed"),
        ("trainer.num-envs=3", 'trainer.num-envs: unknown key; did you mean "num_envs"?'),
        ("trainer.num_env=3", 'trainer.num_env: unknown key; did you mean "num_envs"?'),
        ("algorithm.cfg.gamm=0.9", 'algorithm.cfg.gamm: unknown key; did you mean "gamma"?'),
        ("policy.actor.network_cfg.hiden_sizes=[3]", 'did you mean "hidden_sizes"?'),
        ("polcy.name=x", 'polcy: unknown key; did you mean "policy"?'),
        ("trainer.max_grad_nrm=1", 'did you mean "algorithm.cfg.max_grad_norm"?'),
        ("trainer.zzzz=1", "known keys: exp_name,"),
        ("trainer.seed.x=1", "trainer.seed.x: trainer.seed is a single value and has no keys"),
        ("algorithm.cfg.clip_coef=.1", "algorithm.cfg.clip_coef: has no effect with this algorithm; it is a setting of ppo, grpo"),
        ("algorithm.cfg.gae_lambda=.1", "it is a setting of ppo"),
        ("algorithm.cfg.device=cpu", "algorithm.cfg.device: is not set here; set trainer.device"),
        ("trainer.gym_config=x.yaml", "trainer.gym_config: belongs to the simulator path"),
        ("trainer.headless=true", "trainer.headless: belongs to the simulator path"),
    ],
)
def test_unknown_keys(override: str, expected: str) -> None:
    assert expected in refusal(override)
    path, _, _ = override.partition("=")
    if "seed.x" not in path:  # the same words for a key that stands in the mapping
        with pytest.raises(ConfigError) as caught:
            with_value(path, 1)
        assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("population={size: 0}", "population.size"),
        ("population=3", "population: got 3, expected a mapping with the keys size, seeds, hyper, chunk"),
        ("population={size: 3, seeds: [1, 2]}", "population.seeds: expected 3 seeds, one for each member, got 2"),
        ("population={size: 2, seeds: [1, 1]}", "different seeds"),
        ("population={size: 3, hyper: {gamma: [0.9, 0.99]}}", "population.hyper.gamma: 3 members are no multiple of 2 values"),
        ("population={size: 2, hyper: {gamma: [a, b]}}", "a non-empty list of numbers for gamma"),
        ("population={sizes: 2}", "size"),
    ],
)
def test_a_population_is_checked(override: str, expected: str) -> None:
    assert expected in refusal(override)


def test_unknown_keys_of_a_file_at_any_depth(tmp_path: Path) -> None:
    for good, bad, near in [
        ("  num_envs", "  num-envs", "num_envs"),
        ("    gamma", "    gamm", "gamma"),
        ("hidden_sizes", "hidden-sizes", "hidden_sizes"),
        ("learning_rate", "learning-rate", "learning_rate"),
        ("{name: PointMassRL", "{nam: PointMassRL", "name"),
    ]:
        assert f'did you mean "{near}"?' in file_refusal(tmp_path, APG_YAML.replace(good, bad, 1))


def test_all_problems_are_listed_at_once() -> None:
    mapping = minimal()
    mapping["trainer"].update(num_envs=True, gamm=1)
    mapping["algorithm"]["cfg"] = {"gamma": 99, "device": "cpu"}
    del mapping["policy"]["actor"]["network_cfg"]["hidden_sizes"]
    with pytest.raises(ConfigError) as caught:
        parse_run_config(mapping, source="here")
    error = caught.value
    assert len(error.problems) == 5
    assert str(error).startswith("here: 5 problems\n")
    assert len(str(error).splitlines()) == 6
    assert any("policy.actor.network_cfg.hidden_sizes: missing" in line for line in error.problems)
    assert isinstance(error, ValueError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


# ---- the file as a whole ----


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "the file is empty"),
        ("# nothing\n", "the file is empty"),
        ("- a\n- b\n", "expected a mapping with the blocks trainer, policy, algorithm at the top level, got a list"),
        ("trainer", "at the top level"),
        ("{}", "empty"),
        (APG_YAML.replace("policy:", "policies:"), "policy: missing"),
        (APG_YAML + "    gamma: 0.5\n", 'the key "gamma" appears twice'),
        (APG_YAML + "---\na: 1\n", "not valid YAML"),
        (APG_YAML.replace("{name: cosine", "{name: cosine: x"), "line 33, column 32"),
        (APG_YAML.replace("7e-4", "!!python/object:os.system x"), "is not supported"),
        (APG_YAML.replace("seed: 11", "seed: !!int x"), "is not of the tagged type int"),
        (APG_YAML.replace("cfg: {max_episode_steps: 60,", "cfg: &a {self: *a,"), "an alias refers to what contains it"),
        (APG_YAML.replace("seed: 11", "3: 11"), "trainer.3: got 3, expected text as the key"),
        (APG_YAML.replace("seed: 11", "<<: {seed: 11}"), "has no merge key"),
        (APG_YAML.replace("trainer:", "trainer: 3\nx:"), "trainer: got 3, expected a mapping with the keys exp_name"),
        (APG_YAML.replace("  name: apg\n", ""), "algorithm.name: missing, expected one of apg, ppo, grpo"),
        (APG_YAML.replace("  learning_env:", "  x:"), "trainer.learning_env: missing"),
    ],
)
def test_files_that_are_not_run_files(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in file_refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "expected"), [("", "empty"), ("[1]", "a list"), ('{"trainer": {}, "trainer": {}}', "appears twice"), ("{", "line 1"), ("null", "empty")]
)
def test_json_files_that_are_not_run_files(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in file_refusal(tmp_path, text, "run.json")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml: cannot be read"):
        load_run_config(tmp_path / "gone.yaml")
    with pytest.raises(ConfigError, match="ends in .yaml, .yml or .json"):
        load_run_config(saved(tmp_path, "", "run.toml"))
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff\xfe\xfa")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_run_config(tmp_path / "latin.yaml")


def test_anchors_and_byte_order_marks_are_read(tmp_path: Path) -> None:
    text = "\ufeff" + APG_YAML.replace("seed: 11", "seed: &seed 11\n  eval_seed: *seed")
    assert load_run_config(saved(tmp_path, text)).trainer.eval_seed == 11


# ---- overrides ----


def test_overrides_apply_in_order_and_reach_everything(tmp_path: Path) -> None:
    overrides = ["trainer.num_envs=8", "trainer.num_envs=9", "trainer.learning_env.cfg.goal=[0.1, .2]", "policy.actor.network_cfg.hidden_sizes=[3]"]
    overrides += ["policy.actor.network_cfg.orthogonal_init=null", "algorithm.cfg.optimizer.kwargs={weight_decay: 1e-3}"]
    config = load_run_config(saved(tmp_path, APG_YAML), overrides)
    assert config.trainer.num_envs == 9
    assert config.trainer.learning_env.cfg["goal"] == [0.1, 0.2]
    assert config.policy.actor.network_cfg.hidden_sizes == (3,)  # type: ignore[union-attr]
    assert config.algorithm.cfg.optimizer.kwargs == {"weight_decay": 1e-3}
    assert with_set("trainer.learning_env.cfg.mass=2").trainer.learning_env.cfg == {"mass": 2}  # a name alone becomes a mapping
    assert with_set("trainer.device=cuda:0").trainer.device == "cuda:0"


@pytest.mark.parametrize(
    "override", ["trainer.exp_name=a # b", "trainer.exp_name=# b", "trainer.exp_name=a: b: c", "trainer.exp_name=[", "=3", "trainer..seed=3", "trainer.=3"]
)
def test_overrides_that_cannot_be_read(override: str) -> None:
    assert f"--set: {override}: " in refusal(override)


def test_an_override_is_checked_against_the_chosen_algorithm() -> None:
    config = with_set("algorithm.cfg.clip_coef=.1", "algorithm.name=grpo", "trainer.rollout_steps=32")
    assert (config.algorithm.cfg.clip_coef, config.trainer.buffer_size) == (0.1, 32)
    assert with_set("trainer.buffer_size=8", "trainer.rollout_steps=16", algorithm="grpo").trainer.buffer_size == 16


# ---- settings that contradict each other ----


@pytest.mark.parametrize(
    ("algorithm", "overrides", "expected"),
    [
        ("apg", ["trainer.update_horizon=24"], "trainer.update_horizon: got 24, expected a multiple of trainer.segment_length, which is 16"),
        ("apg", ["trainer.update_horizon=8"], "trainer.update_horizon: got 8"),
        ("apg", ["trainer.gradient_accumulation_steps=2"], "it has no effect with rollout_mode: segmented"),
        ("apg", ["trainer.distributed=true"], "trainer.distributed: got true, expected false"),
        ("apg", ["trainer.buffer_size=8"], "trainer.buffer_size: has no effect with algorithm apg"),
        ("apg", ["trainer.rollout_steps=8"], "trainer.rollout_steps: has no effect with algorithm apg"),
        ("apg", ["trainer.best_eval_metric=success_rate"], "trainer.best_eval_metric"),
        ("apg", ["algorithm.cfg.optimizer.kwargs.lr=1"], "algorithm.cfg.optimizer.kwargs.lr: set algorithm.cfg.optimizer.learning_rate instead"),
        ("apg", ["algorithm.cfg.lr_scheduler.kwargs.gamma=1"], "has no effect without algorithm.cfg.lr_scheduler.name"),
        ("apg", ["policy.name=actor_critic"], "policy.critic: missing"),
        ("apg", ["policy.critic={network_cfg: {hidden_sizes: []}}"], 'policy.critic: policy "actor_only" has no critic'),
        ("apg", ["policy.initial_log_std=0", "policy.initial_action_std=1"], "not both"),
        ("apg", ["policy.obs_groups={critic: [a]}"], "policy.obs_groups.actor: missing"),
        ("apg", ["policy.obs_groups={actor: []}"], "expected a non-empty list of observation names"),
        ("apg", ["policy.obs_groups={actor: a}"], "write it as a list"),
        ("apg", ["policy.actor.network_cfg.orthogonal_init=[1, 1]"], "got 2 gains, expected 3, one per linear layer"),
        ("apg", ["policy.actor.type=cnn"], "expected one of mlp"),
        ("apg", ["trainer.imports=a.b"], "write it as a list: [name]"),
        ("ppo", ["trainer.segment_length=8"], "trainer.segment_length: has no effect with algorithm ppo"),
        ("ppo", ["policy={name: actor_only, actor: {network_cfg: {hidden_sizes: [8]}}}"], "expected a policy with a critic"),
        ("ppo", ["algorithm.cfg.schedule=adaptive"], "algorithm.cfg.desired_kl: got null, expected a number > 0"),
        ("ppo", ["algorithm.cfg.schedule=Adaptive"], "expected one of fixed, adaptive"),
        ("ppo", ["algorithm.cfg.desired_kl=0", "algorithm.cfg.schedule=adaptive"], "expected a finite number > 0"),
        ("ppo", ["algorithm.cfg.desired_kl=.01"], "has no effect with schedule: fixed"),
        ("ppo", ["algorithm.cfg.maximum_learning_rate=1e-6"], "expected at least algorithm.cfg.minimum_learning_rate"),
        ("ppo", ["algorithm.cfg.num_mini_batches=1000", "trainer.num_envs=2"], "expected at most num_envs * buffer_size = 512"),
        (
            "shac",
            ["policy={name: actor_only, actor: {network_cfg: {hidden_sizes: [8]}}}"],
            'expected a policy with a critic, such as actor_critic, for algorithm "shac"',
        ),
        ("shac", ["trainer.rollout_mode=complete"], "trainer.rollout_mode: has no effect with algorithm shac, whose rollouts are update_horizon steps long"),
        ("shac", ["trainer.gradient_accumulation_steps=2"], "trainer.gradient_accumulation_steps: has no effect"),
        ("shac", ["trainer.buffer_size=2"], "trainer.buffer_size: has no effect"),
        ("shac", ["trainer.update_horizon=20"], "trainer.update_horizon: got 20, expected a multiple of trainer.segment_length"),
        ("shac", ["algorithm.cfg.num_mini_batches=1000", "trainer.num_envs=2"], "expected at most num_envs * update_horizon = 32"),
        ("shac", ["algorithm.cfg.learn_temperature=true"], "algorithm.cfg.ent_coef: got 0, expected a number > 0"),
        ("shac", ["algorithm.cfg.target_entropy=-1"], "algorithm.cfg.target_entropy: has no effect without learn_temperature"),
        ("shac", ["algorithm.cfg.normalize_entropy=true"], "algorithm.cfg.normalize_entropy: has no effect without learn_temperature"),
        (
            "shac",
            ["algorithm.cfg.ent_coef=1", "algorithm.cfg.learn_temperature=true", "algorithm.cfg.normalize_entropy=true", "algorithm.cfg.target_entropy=0"],
            "algorithm.cfg.target_entropy: got 0, expected another number",
        ),
        ("shac", ["algorithm.cfg.critic_optimizer.kwargs.lr=1"], "set algorithm.cfg.critic_optimizer.learning_rate instead"),
        ("shac", ["algorithm.cfg.critic_optimizer.lr=1"], "algorithm.cfg.critic_optimizer.lr: is spelled learning_rate"),
        ("apg", ["trainer.rollout_mode=complete", "trainer.stagger_episodes=true"], "trainer.stagger_episodes: has no effect with rollout_mode: complete"),
        ("grpo", ["trainer.stagger_episodes=true"], "trainer.stagger_episodes: has no effect with algorithm grpo"),
        ("grpo", ["trainer.num_envs=10"], "trainer.num_envs: got 10, expected a multiple of algorithm.cfg.group_size, which is 4"),
        ("grpo", ["algorithm.cfg.group_size=1"], "algorithm.cfg.group_size: got 1"),
        ("grpo", ["algorithm.cfg.reset_every_rollout=false"], "rows of a group must share one start state"),
    ],
)
def test_contradictions(algorithm: str, overrides: list[str], expected: str) -> None:
    assert expected in refusal(*overrides, algorithm=algorithm)


def test_the_critic_has_the_optimizer_of_the_actor_by_default() -> None:
    config = with_set("algorithm.cfg.optimizer={name: sgd, learning_rate: .1}", algorithm="shac")
    assert config.algorithm.cfg.critic_optimizer == config.algorithm.cfg.optimizer
    assert dump_run_config(config)["algorithm"]["cfg"]["critic_optimizer"]["learning_rate"] == 0.1
    own = with_set("algorithm.cfg.critic_optimizer.learning_rate=.2", algorithm="shac").algorithm.cfg
    assert (own.optimizer.learning_rate, own.critic_optimizer.learning_rate) == (3e-4, 0.2)


def test_two_controllers_of_the_learning_rate_are_refused() -> None:
    adaptive = ["algorithm.cfg.schedule=adaptive", "algorithm.cfg.desired_kl=.01"]
    assert with_set(*adaptive, algorithm="ppo").algorithm.cfg.desired_kl == 0.01
    message = refusal(*adaptive, "algorithm.cfg.lr_scheduler={name: linear}", algorithm="ppo")
    assert 'algorithm.cfg.lr_scheduler.name: got "linear", expected null with schedule: adaptive' in message


def test_alias_of_the_rollout_length() -> None:
    assert with_value("trainer.rollout_steps", 32, "ppo").trainer.buffer_size == 32
    with pytest.raises(ConfigError, match=r"trainer\.rollout_steps: got 0"):
        with_value("trainer.rollout_steps", 0, "ppo")
    mapping = minimal("ppo")
    mapping["trainer"].update(rollout_steps=3, buffer_size=3)
    with pytest.raises(ConfigError, match="not both"):
        parse_run_config(mapping)


def test_a_config_changed_in_python_is_checked_again() -> None:
    config = parse_run_config(minimal("grpo"))
    with pytest.raises(ConfigError, match=r"trainer\.num_envs: got 9"):
        RunConfig(trainer=config.trainer.model_copy(update={"num_envs": 9}), policy=config.policy, algorithm=config.algorithm)


# ---- what belongs to others ----


def test_registered_algorithms_and_policies_keep_their_own_keys() -> None:
    mapping = {
        "trainer": {"learning_env": "PointMassRL", "buffer_size": 8, "segment_length": 4, "update_horizon": 4, "imports": ["my_package.things"]},
        "policy": {"name": "Mine", "width": 3, "obs_groups": {"actor": ["a"]}, "nested": {"x": None, "y": [1, 2.5]}},
        "algorithm": {"name": "Theirs", "cfg": {"tau": 0.5, "limit": math.inf, "deep": {"list": [1]}}},
    }
    config = parse_run_config(mapping)
    assert (config.algorithm.name, config.algorithm.cfg) == ("theirs", mapping["algorithm"]["cfg"])
    dumped = dump_run_config(config)
    assert dumped["policy"] == {"name": "mine", "width": 3, "obs_groups": {"actor": ["a"]}, "nested": {"x": None, "y": [1, 2.5]}}
    assert parse_run_config(dumped) == config
    assert apply_overrides(mapping, ["algorithm.cfg.new.key=1", "policy.height=2"])["algorithm"]["cfg"]["new"] == {"key": 1}


def test_the_critic_reads_what_the_actor_reads_by_default() -> None:
    config = with_set("policy.obs_groups={actor: [state, goal]}", algorithm="ppo")
    assert config.policy.obs_groups.critic == ("state", "goal")  # type: ignore[union-attr]
