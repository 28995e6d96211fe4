"""Registries: names, collisions, nearest matches, entry points, and the environments' own registry."""

# The stubs of torch.func know neither argnums nor has_aux, and wrong arguments are passed on purpose.
# pyright: reportCallIssue=false, reportAssignmentType=false, reportArgumentType=false, reportUnusedExpression=false

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frl import registry as room
from frl.envs import registry as env_registry
from frl.envs.registry import build_learning_env, get_learning_env_factory, get_registered_learning_env_names, register_learning_env
from frl.envs.vector import VecEnv
from frl.registry import Registry
from tests.strategies import toy_env

NAMES = st.text(st.characters(whitelist_categories=("Ll", "Lu", "Nd"), max_codepoint=127), min_size=1, max_size=8)


@given(st.lists(NAMES, max_size=6, unique_by=lambda name: name.lower()))
def test_what_is_registered_is_found_in_any_case(names):
    table = Registry("thing")
    for i, name in enumerate(names):
        assert table.register(name, i + 1) == i + 1
    for i, name in enumerate(names):
        for spelling in (name, name.lower(), name.upper(), name.swapcase()):
            assert table.get(spelling) == i + 1
    assert table.names() == sorted(name.lower() for name in names)


def test_decorator_form_returns_the_object():
    table = Registry("thing")

    @table.register("Made")
    def made():
        return 3

    assert made() == 3
    assert table.get("made") is made


def test_a_taken_name_is_refused_unless_overridden():
    table = Registry("thing")
    table.register("Name", 1)
    with pytest.raises(ValueError, match=r"thing 'nAME' is already registered.*override"):
        table.register("nAME", 2)
    assert table.get("name") == 1
    table.register("nAME", 2, override=True)
    assert table.get("name") == 2


@pytest.mark.parametrize("name", ["", "  ", None, 3])
def test_a_name_must_be_a_non_empty_string(name):
    with pytest.raises(ValueError, match="thing name must be a non-empty string"):
        Registry("thing").register(name, 1)


@pytest.mark.parametrize("name", ["pont_mass", None, 3, "zzz"])
def test_an_unknown_name_lists_the_known_ones_and_the_nearest(name):
    table = Registry("thing")
    table.register("point_mass", 1)
    table.register("pendulum", 2)
    with pytest.raises(ValueError, match=r"unknown thing .*known: pendulum, point_mass") as error:
        table.get(name)
    assert ("did you mean 'point_mass'" in str(error.value)) == (name == "pont_mass")


class Point:
    def __init__(self, name, load):
        self.name, self.load, self.loads = name, load, 0

    def __call__(self):
        raise AssertionError


def with_points(monkeypatch, *points):
    calls = []

    def entry_points(group):
        calls.append(group)
        return list(points)

    monkeypatch.setattr(room, "entry_points", entry_points)
    return calls


def test_entry_points_are_loaded_on_the_first_unknown_name_and_once(monkeypatch):
    loaded = []
    calls = with_points(monkeypatch, Point("Plugin", lambda: loaded.append("Plugin") or "the factory"))
    table = Registry("thing", group="some.group")
    table.register("own", 1)
    assert table.get("own") == 1
    assert (calls, loaded) == ([], [])
    assert table.get("plugin") == "the factory"
    assert table.names() == ["own", "plugin"]
    assert table.get("PLUGIN") == "the factory"
    assert (calls, loaded) == (["some.group"], ["Plugin"])


def test_a_module_may_register_itself_and_own_names_win(monkeypatch):
    table = Registry("thing", group="some.group")
    with_points(monkeypatch, Point("self", lambda: table.register("self", "registered") and "the module"), Point("OWN", lambda: "theirs"))
    table.register("own", "ours")
    assert table.names() == ["own", "self"]
    assert table.get("self") == "registered"
    assert table.get("own") == "ours"


def test_a_registry_without_a_group_looks_nowhere(monkeypatch):
    calls = with_points(monkeypatch)
    with pytest.raises(ValueError, match="unknown thing"):
        Registry("thing").get("x")
    assert calls == []


# -- environments ----------------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def table(monkeypatch):
    """A copy of the environments' registry that is thrown away."""
    copy = Registry("environment")
    copy._table = dict(env_registry._REGISTRY._table)
    monkeypatch.setattr(env_registry, "_REGISTRY", copy)
    return copy


def test_built_in_environments_are_known():
    names = get_registered_learning_env_names()
    assert {"double_integrator", "pendulum", "point_mass"} <= set(names)
    assert names == sorted(names)


def test_build_lifts_an_environment_to_rows(table):
    vec = build_learning_env("Point_Mass", num_envs=3, max_episode_steps=7)
    assert isinstance(vec, VecEnv)
    assert (vec.num_envs, vec.env.spec.max_episode_steps, vec.device) == (3, 7, torch.device("cpu"))
    state = vec.reset(vec.row_keys(torch.tensor([0, 1])), vec.default_params)
    assert vec.observe(state, vec.default_params).shape == (3, 14)
    assert vec.single_observation_space.shape == (14,)
    assert vec.single_action_space.shape == (2,)


def test_the_reference_name_of_point_mass_is_an_alias(table):
    assert get_learning_env_factory("PointMassRL") is get_learning_env_factory("point_mass")
    assert build_learning_env("PointMassRL", num_envs=2).env.spec.name == "point_mass"


def test_an_environment_registered_under_the_alias_is_reachable_or_refused(table):
    mine = lambda: toy_env()
    try:
        register_learning_env("PointMassRL", mine)
    except ValueError:
        return
    assert get_learning_env_factory("PointMassRL") is mine


def test_a_factory_may_take_the_number_of_rows_and_return_what_it_likes(table):
    @register_learning_env("mine")
    def mine(*, num_envs, device, size=1):
        return ("built", num_envs, device, size)

    assert build_learning_env("MINE", num_envs=4, size=2) == ("built", 4, torch.device("cpu"), 2)
    register_learning_env("open", lambda **cfg: cfg)
    assert build_learning_env("open", num_envs=4, anything=1)["anything"] == 1


def test_wrong_builds_are_refused_by_name(table):
    with pytest.raises(ValueError, match=r"unknown environment 'point_mas'; did you mean 'point_mass'"):
        build_learning_env("point_mas", num_envs=1)
    with pytest.raises(TypeError, match=r"takes no 'masss'.*known: .*mass"):
        build_learning_env("point_mass", num_envs=1, masss=2.0)
    with pytest.raises(ValueError, match="mass"):
        build_learning_env("point_mass", num_envs=1, mass=-1.0)
    for count in (0, -1, True, 2.0):
        with pytest.raises(ValueError, match="num_envs must be a positive integer"):
            build_learning_env("point_mass", num_envs=count)
    with pytest.raises(ValueError, match="already registered"):
        register_learning_env("POINT_MASS", lambda: None)
