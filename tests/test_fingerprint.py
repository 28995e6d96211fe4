"""What must be the same for a checkpoint to fit: every difference is listed by key path, and nothing has been touched by then."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from frl.build import build_run
from frl.checkpoint import CheckpointError
from frl.config import parse_run_config
from frl.fingerprint import changes, describe_space, fingerprint
from frl.run import train_from_config
from tests.tiny_runs import directories, mapping, tiny


def test_the_fingerprint(tmp_path: Path):
    found = fingerprint(build_run(tiny(tmp_path)))
    assert found["algorithm"] == "apg"
    assert found["policy"]["actor"]["network_cfg"]["hidden_sizes"] == [3]
    assert found["environment"]["name"] == "double_integrator"
    assert found["environment"]["action_space"]["type"] == "Box"
    assert fingerprint(build_run(tiny(tmp_path, seed=5, num_envs=4, iterations=9, algorithm={"gamma": 0.5}))) == found


def altered(raw: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    raw = copy.deepcopy(raw)
    *above, key = path.split(".")
    place: Any = raw
    for name in above:
        place = place.setdefault(name, {})
    place[key] = value
    return raw


@pytest.mark.parametrize(
    ("changed", "listed"),
    [
        ({"policy.actor.network_cfg.activation": "tanh"}, ["policy.actor.network_cfg.activation: the checkpoint has 'elu', the run file makes it 'tanh'"]),
        ({"policy.log_std_range": [-3, 1]}, ["policy.log_std_range"]),
        ({"policy.actor.network_cfg.hidden_sizes": [5]}, ["policy.actor.network_cfg.hidden_sizes", "params.actor.layers.0.weight: got shape (3, 2)"]),
        ({"trainer.normalize_observations": True}, ["normalize_observations", "norm_state.mean: missing"]),
        ({"trainer.learning_env": {"name": "aged_double_integrator", "cfg": {"max_episode_steps": 3}}}, ["env_state"]),
        (
            {"trainer.learning_env": {"name": "double_integrator", "cfg": {"max_episode_steps": 3, "dimensions": 2}}},
            ["environment.action_space.shape", "params."],
        ),
        ({"trainer.learning_env": {"name": "pendulum", "cfg": {"max_episode_steps": 3}}}, ["environment.name", "environment.observation_space", "env_state"]),
        ({"trainer.dtype": "float64"}, ["params.log_std: got torch.float32, expected torch.float64"]),
        ({"trainer.num_envs": 4}, ["env_state"]),
        (
            {"policy.name": "actor_critic", "policy.critic": {"network_cfg": {"hidden_sizes": [3]}}, "algorithm": {"name": "grpo"}, "trainer.num_envs": 4},
            ["algorithm: the checkpoint has 'apg', the run file makes it 'grpo'", "policy.name", "policy.critic", "params.critic"],
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_listed_and_nothing_is_written(tmp_path: Path, changed: dict[str, Any], listed: list[str]):
    raw = mapping(tmp_path)
    done = train_from_config(parse_run_config(raw))
    for path, value in changed.items():
        raw = altered(raw, path, value)
    if raw["algorithm"]["name"] == "grpo":
        del raw["trainer"]["segment_length"]
    with pytest.raises(CheckpointError) as caught:
        train_from_config(parse_run_config(raw), resume="latest", run=done["run_directory"])
    text = str(caught.value)
    assert text.startswith(done["latest_checkpoint_path"])
    assert all(any(line.strip().startswith(words) for line in text.splitlines()[1:]) for words in listed), text
    assert len(directories(tmp_path)) == 1


def test_what_shapes_the_first_parameters_only_may_change(tmp_path: Path):
    done = train_from_config(tiny(tmp_path))
    raw = altered(mapping(tmp_path, iterations=3), "policy.initial_log_std", -1.0)
    with pytest.warns(RuntimeWarning, match=r"policy\.initial_log_std"):
        assert train_from_config(parse_run_config(raw), resume="latest", run=done["run_directory"])["num_updates"] == 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (spaces.Box(-1, 1, (2,)), spaces.Box(-1, 2, (2,))),
        (spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (3,))),
        (spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (2,), np.float64)),
        (spaces.Box(-np.inf, np.inf, (1,)), spaces.Box(0, np.inf, (1,))),
        (spaces.Discrete(3), spaces.Discrete(3, start=1)),
        (spaces.Discrete(3), spaces.Box(0, 2, (1,))),
        (spaces.MultiDiscrete([2, 3]), spaces.MultiDiscrete([3, 2])),
        (spaces.MultiBinary(2), spaces.MultiBinary(3)),
        (spaces.Dict({"a": spaces.Discrete(2)}), spaces.Dict({"b": spaces.Discrete(2)})),
        (spaces.Dict({"a": spaces.Discrete(2)}), spaces.Dict({"a": spaces.Discrete(3)})),
        (spaces.Tuple([spaces.Discrete(2)]), spaces.Tuple([spaces.Discrete(3)])),
    ],
)
def test_spaces_that_differ_are_told_apart(one: spaces.Space, other: spaces.Space):
    assert describe_space(one) == describe_space(one)
    assert describe_space(one) != describe_space(other)


def test_the_order_of_a_dict_space_does_not_matter():
    a, b = spaces.Discrete(2), spaces.Box(0, 1, (1,))
    assert describe_space(spaces.Dict([("x", a), ("y", b)])) == describe_space(spaces.Dict([("y", b), ("x", a)]))


def test_changes():
    before = {"a": 1, "b": {"c": 2, "d": [1, 2]}, "gone": True}
    now = {"a": 1, "b": {"c": 3, "d": [1, 2]}, "new": None, "more": {"x": 1}}
    assert list(changes(before, now)) == [("b.c", 2, 3), ("gone", True, None), ("more", None, {"x": 1})]
