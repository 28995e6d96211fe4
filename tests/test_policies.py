from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from frl import rng, tree
from frl.distributions import CategoricalParams, NormalParams
from frl.heads import action_noise
from frl.networks import Network, mlp
from frl.policies import (
    Policy,
    actor_only,
    build_policy,
    get_policy_class,
    get_registered_policy_names,
    observation_dim,
    register_policy,
    resolve_policy_obs_groups,
)
from tests.tolerances import tolerance

ACTOR = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "activation": "tanh", "orthogonal_init": [1.4, 0.01]}}
OBS = spaces.Box(-np.inf, np.inf, (4,), np.float32)
ACT = spaces.Box(np.array([0, -2], np.float32), np.array([10, 2], np.float32))


def _box(low, high, shape):
    return spaces.Box(low, high, shape, np.float32)


def _policies():
    tanh: dict[str, Any] = {"distribution": "tanh_normal", "action_low": ACT.low, "action_high": ACT.high}
    return [
        actor_only(4, 2, network=ACTOR),
        actor_only(4, 2, network=ACTOR, state_dependent_std=True, initial_log_std=-1.0),
        actor_only(4, 2, network=nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), **tanh),
        actor_only(4, 2, network=mlp(4, 4, [8], use_layernorm=True), state_dependent_std=True, **tanh),
    ]


POLICIES = _policies()
IDS = ["normal", "normal-net-std", "tanh-module", "tanh-net-std"]


# ---- laws of every policy ----


@pytest.mark.parametrize("policy", POLICIES, ids=IDS)
@given(lead=st.lists(st.integers(1, 3), max_size=3), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_any_leading_dimensions_follow_the_parameters_dtype(policy, lead, dtype):
    params = policy.init(rng.key(0), dtype=dtype)
    obs, noise = (rng.normal(rng.key(i), (*lead, n), dtype=dtype) for i, n in ((1, 4), (2, 2)))
    dist = policy.apply(params, obs)
    sample = policy.sample(dist, noise)
    for value in (dist.mean, dist.log_std, sample.action, policy.distribution.mode(dist)):
        assert value.shape == (*lead, 2)
        assert value.dtype == dtype
    assert policy.distribution.log_prob(dist, sample).shape == tuple(lead)
    single = policy.apply(params, obs.reshape(-1, 4)[0])
    for a, b in zip(tree.leaves(dist), tree.leaves(single), strict=True):
        torch.testing.assert_close(a.reshape(-1, 2)[0], b, rtol=0, atol=100 * tolerance(dtype))


@pytest.mark.parametrize("policy", POLICIES, ids=IDS)
def test_rows_in_the_last_dimension(policy, device):
    params = policy.init(rng.key(0), dtype=torch.float64, device=device)
    obs = rng.normal(rng.key(1, device=device), (6, 4), dtype=torch.float64)
    columns = torch.func.vmap(policy.apply, in_dims=(None, -1), out_dims=-1)(params, obs.T)
    for a, b in zip(columns, policy.apply(params, obs), strict=True):
        torch.testing.assert_close(a.T, b, rtol=0, atol=100 * tolerance(torch.float64))


@pytest.mark.parametrize("policy", POLICIES, ids=IDS)
def test_gradient_by_central_differences(policy):
    params = policy.init(rng.key(0), dtype=torch.float64)
    obs, noise = (rng.normal(rng.key(i), (5, n), dtype=torch.float64) for i, n in ((1, 4), (2, 2)))

    def loss(params):
        dist = policy.apply(params, obs)
        sample = policy.sample(dist, noise)
        return (sample.action.square().sum(-1) + policy.distribution.log_prob(dist, sample) + policy.distribution.entropy(dist, noise)).sum()

    leaves, structure = tree.flatten(params)
    direction = tree.unflatten(structure, [rng.normal(rng.key(10 + i), tuple(p.shape), dtype=torch.float64) for i, p in enumerate(leaves)])
    slope = sum((g * d).sum() for g, d in zip(tree.leaves(torch.func.grad(loss)(params)), tree.leaves(direction), strict=True))
    h = 1e-6
    ahead, behind = (loss(tree.map(lambda p, d, s=s: p + s * h * d, params, direction)) for s in (1, -1))
    torch.testing.assert_close(slope, (ahead - behind) / (2 * h), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("policy", POLICIES, ids=IDS)
def test_insertion_order_of_parameters_has_no_meaning(policy):
    params, obs = policy.init(rng.key(0)), rng.normal(rng.key(1), (5, 4))

    def reverse(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: reverse(value[name]) for name in reversed(list(value))}
        return tuple(reverse(item) for item in value) if isinstance(value, tuple) else value

    for a, b in zip(policy.apply(params, obs), policy.apply(reverse(params), obs), strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(params), tree.leaves(reverse(params)), strict=True))


@pytest.mark.parametrize("policy", [p for p, name in zip(POLICIES, IDS, strict=True) if name != "tanh-module"], ids=[i for i in IDS if i != "tanh-module"])
def test_init_is_a_function_of_the_key(policy):
    a, b, c = (policy.init(rng.key(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(c), strict=True))
    stacked = torch.func.vmap(policy.init)(rng.split(rng.key(3), 2))
    assert all(x.shape == (2, *y.shape) for x, y in zip(tree.leaves(stacked), tree.leaves(a), strict=True))


def test_apply_does_not_change_its_arguments():
    params, obs = POLICIES[0].init(rng.key(0)), rng.normal(rng.key(1), (5, 4))
    before = [x.clone() for x in (*tree.leaves(params), obs)]
    POLICIES[0].sample(POLICIES[0].apply(params, obs), torch.ones(5, 2))
    assert all(torch.equal(a, b) for a, b in zip(before, (*tree.leaves(params), obs), strict=True))


def test_compiled_equals_eager():
    policy = POLICIES[3]
    params, obs, noise = policy.init(rng.key(0)), rng.normal(rng.key(1), (4, 6)), rng.normal(rng.key(2), (2, 6))

    def row(params, obs, noise):
        dist = policy.apply(params, obs)
        sample = policy.sample(dist, noise)
        return sample.action, policy.distribution.log_prob(dist, sample)

    columns = torch.func.vmap(row, in_dims=(None, -1, -1), out_dims=-1)
    grad = torch.func.grad(lambda params: sum(x.sum() for x in columns(params, obs, noise)))
    compiled = torch.compile(grad, backend="aot_eager", fullgraph=True)(params)
    for a, b in zip(tree.leaves(compiled), tree.leaves(grad(params)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", POLICIES, ids=IDS)
def test_a_row_that_is_not_finite_is_a_value_and_leaves_the_others_alone(policy):
    params, obs, noise = policy.init(rng.key(0)), rng.normal(rng.key(1), (3, 4)), rng.normal(rng.key(2), (3, 2))
    broken = torch.cat([obs[:2], torch.full((1, 4), math.nan)])
    good, bad = (policy.sample(policy.apply(params, x), noise).action for x in (obs, broken))
    assert torch.equal(good[:2], bad[:2])
    assert bad[2].isnan().all()


def test_a_policy_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        POLICIES[0].name = "other"  # pyright: ignore[reportAttributeAccessIssue]


# ---- noise ----


@given(T=st.integers(1, 40), N=st.integers(1, 5), A=st.integers(1, 3), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_noise_of_a_row_does_not_depend_on_the_others_nor_on_the_horizon(T, N, A, dtype):
    small, large = action_noise(rng.key(1), T, N, A, dtype), action_noise(rng.key(1), T + 9, N + 2, A, dtype)
    assert small.shape == (T, N, A)
    assert small.dtype == dtype
    assert torch.equal(small, large[:T, :N])


def test_noise_is_standard_normal_and_different_everywhere(device):
    noise = POLICIES[0].noise(rng.key(1, device=device), 40, 50)
    assert noise.device.type == device.type
    assert noise.is_contiguous()
    assert noise.unique().numel() > 0.999 * noise.numel()
    assert noise.mean().abs() < 5 / math.sqrt(noise.numel())
    assert (noise.var() - 1).abs() < 5 * math.sqrt(2 / noise.numel())
    assert not torch.equal(noise, POLICIES[0].noise(rng.key(2, device=device), 40, 50))


# ---- log_std ----


def test_parameters_are_named():
    names = [name for name, _ in tree.items(POLICIES[0].init(rng.key(0)))]
    assert names == ["actor.layers.0.bias", "actor.layers.0.weight", "actor.layers.1.bias", "actor.layers.1.weight", "log_std"]
    assert "log_std" not in POLICIES[1].init(rng.key(0))


@pytest.mark.parametrize(("kwargs", "expected"), [({}, 0.0), ({"initial_log_std": -1.5}, -1.5), ({"initial_action_std": 0.25}, math.log(0.25))])
def test_initial_log_std(kwargs, expected):
    params = actor_only(4, 2, network=ACTOR, **kwargs).init(rng.key(0), dtype=torch.float64)
    assert torch.equal(params["log_std"], torch.full((2,), expected, dtype=torch.float64))
    state_dependent = actor_only(4, 2, network={"type": "mlp", "network_cfg": {"hidden_sizes": [], "orthogonal_init": 0.0}}, state_dependent_std=True, **kwargs)
    dist = state_dependent.apply(state_dependent.init(rng.key(0), dtype=torch.float64), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(dist.log_std, params["log_std"], rtol=0, atol=1e-15)
    assert not dist.mean.any()


def test_log_std_is_clamped_with_zero_gradient_outside_its_range():
    policy = actor_only(4, 3, network=ACTOR, log_std_range=(-2.0, 1.0))
    params = policy.init(rng.key(0))
    params = {**params, "log_std": torch.tensor([-2.5, 0.5, 1.5])}

    def log_std(params):
        return policy.apply(params, torch.ones(4)).log_std

    assert torch.equal(log_std(params), torch.tensor([-2.0, 0.5, 1.0]))
    grad = torch.func.grad(lambda p: log_std(p).exp().sum())(params)
    torch.testing.assert_close(grad["log_std"], torch.tensor([0.0, math.exp(0.5), 0.0]))


def test_state_dependent_log_std_is_clamped_too():
    policy = actor_only(1, 1, network=mlp(1, 2, []), state_dependent_std=True, log_std_range=(-2.0, 1.0))
    params = {"actor": {"layers": ({"weight": torch.tensor([[0.0], [1.0]]), "bias": torch.zeros(2)},)}}
    slope = torch.func.vmap(torch.func.grad(lambda x: policy.apply(params, x).log_std.sum()))
    x = torch.tensor([[-3.0], [0.5], [3.0]])
    assert torch.equal(policy.apply(params, x).log_std, torch.tensor([[-2.0], [0.5], [1.0]]))
    assert torch.equal(slope(x), torch.tensor([[0.0], [1.0], [0.0]]))


# ---- actor_only ----


def test_the_network_may_be_a_block_a_network_or_a_module():
    module = nn.Linear(4, 2)
    net = Network(init=lambda key, dtype=torch.float32, device=None: {"w": torch.ones((), dtype=dtype)}, apply=lambda p, x: p["w"] * x[..., :2])
    obs = rng.normal(rng.key(1), (5, 4))
    for network, expected in ((module, module(obs)), (net, obs[..., :2])):
        policy = actor_only(4, 2, network=network)
        assert torch.equal(policy.apply(policy.init(rng.key(0)), obs).mean, expected)


def test_squashed_actions_fill_the_box_in_every_path():
    policy = build_policy({"name": "actor_only", "actor": ACTOR, "distribution": "tanh_normal"}, OBS, ACT)
    for raw, action in ((0.0, [5.0, 0.0]), (50.0, [10.0, 2.0]), (-50.0, [0.0, -2.0])):
        dist = NormalParams(mean=torch.full((2,), raw), log_std=torch.zeros(2))
        assert torch.equal(policy.sample(dist, torch.zeros(2)).action, torch.tensor(action))
        assert torch.equal(policy.distribution.mode(dist), torch.tensor(action))
        assert ACT.contains(policy.distribution.mode(dist).numpy())


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"distribution": "tanh"}, ValueError, "unknown distribution 'tanh'.*tanh_normal"),
        ({"distribution": "tanh_normal"}, TypeError, "must be a Box, or from action_low and action_high"),
        ({"distribution": "tanh_normal", "action_low": -1.0}, ValueError, "needs the action box"),
        ({"action_low": -1.0, "action_high": 1.0}, ValueError, "no effect on a 'normal' distribution"),
        ({"initial_log_std": 2.5}, ValueError, r"2.5 lies outside the range \[-5, 2\]"),
        ({"initial_log_std": math.nan}, ValueError, "initial_log_std must be a finite number"),
        ({"initial_log_std": True}, ValueError, "initial_log_std must be a finite number"),
        ({"initial_action_std": 0.0}, ValueError, "initial_action_std must be a finite number above 0"),
        ({"initial_action_std": -1.0}, ValueError, "initial_action_std must be a finite number above 0"),
        ({"initial_action_std": 1.0, "initial_log_std": 0.0}, ValueError, "not both"),
        ({"log_std_range": (1.0, -1.0)}, ValueError, "non-decreasing"),
        ({"log_std_range": 2.0}, TypeError, "two numbers"),
        ({"log_std_range": (0.0, math.inf)}, ValueError, "finite"),
        ({"state_dependent_std": 1}, ValueError, "state_dependent_std"),
        ({"obs_dim": 0}, ValueError, "obs_dim"),
        ({"action_space": True}, ValueError, "action space"),
        ({"action_space": 0}, ValueError, "action space"),
        ({"action_space": spaces.MultiBinary(2)}, TypeError, "categorical actions need"),
        ({"action_space": spaces.Discrete(2), "initial_log_std": 0.0}, ValueError, "initial_log_std has no effect"),
        ({"action_space": spaces.Discrete(2), "action_low": -1.0}, ValueError, "action_low has no effect"),
        ({"action_space": spaces.Discrete(2), "distribution": "normal"}, ValueError, "does not fit the action space"),
        ({"action_space": spaces.Discrete(3), "network": nn.Linear(4, 2)}, ValueError, r"must map \[2, 4\] to \[2, 3\]"),
        ({"network": nn.Linear(4, 3)}, ValueError, r"must map \[2, 4\] to \[2, 2\], got \[2, 3\]"),
        ({"network": mlp(4, 2, []), "state_dependent_std": True}, ValueError, r"to \[2, 4\], got \[2, 2\]"),
        ({"network": nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))}, ValueError, "Dropout"),
        ({"network": "mlp"}, TypeError, "the actor must be"),
    ],
)
def test_bad_arguments_are_refused(kwargs, error, text):
    with pytest.raises(error, match=text):
        actor_only(**{"obs_dim": 4, "action_space": 2, "network": ACTOR, **kwargs})


@pytest.mark.parametrize(("space", "width"), [(spaces.Discrete(3, start=-1), 3), (spaces.MultiDiscrete([2, 3], start=[5, 0]), 5)])
def test_discrete_actions_without_a_critic(space, width):
    policy = build_policy({"name": "actor_only", "actor": ACTOR}, OBS, space)
    params = policy.init(rng.key(0))
    assert set(params) == {"actor"}
    assert (policy.has_critic, policy.distribution.noise_dim) == (False, width)
    dist = policy.apply(params, torch.zeros(50, 4))
    assert isinstance(dist, CategoricalParams)
    assert dist.logits.shape == (50, width)
    actions = policy.sample(dist, policy.noise(rng.key(1), 1, 50)[0]).action
    assert all(space.contains(action.numpy().astype(space.dtype)) for action in actions)
    # The same head as a policy with a critic has.
    other = build_policy({"name": "actor_critic", "actor": ACTOR, "critic": ACTOR}, OBS, space)
    raw = policy.sample(dist, policy.noise(rng.key(1), 1, 50)[0]).raw
    assert torch.equal(policy.distribution.log_prob(dist, raw), other.distribution.log_prob(dist, raw))
    with pytest.raises(ValueError, match="action_std_range has no effect"):
        build_policy({"name": "actor_only", "actor": ACTOR, "action_std_range": [0.1, 1.0]}, OBS, space)


# ---- registry and run-file block ----


def test_build_policy_reads_the_block():
    block = {
        "name": "Actor_Only",
        "actor": ACTOR,
        "critic": None,
        "actor_obs_normalization": False,
        "critic_obs_normalization": False,
        "initial_action_std": 0.5,
        "action_std_range": [0.1, 2.0],
        "action_dim": 2,
    }
    policy = build_policy(block, OBS, ACT)
    assert isinstance(policy, Policy)
    assert (policy.name, policy.obs_dim, policy.action_dim, policy.has_critic) == ("actor_only", 4, 2, False)
    params = policy.init(rng.key(0))
    torch.testing.assert_close(params["log_std"], torch.full((2,), math.log(0.5)))
    low = policy.apply({**params, "log_std": torch.full((2,), -9.0)}, torch.zeros(4)).log_std
    torch.testing.assert_close(low, torch.full((2,), math.log(0.1)))
    assert build_policy({"name": "actor_only", "actor": ACTOR}, 7, 3).obs_dim == 7


@pytest.mark.parametrize(
    ("block", "error", "text"),
    [
        ({"critic": ACTOR}, ValueError, "has no critic: remove critic"),
        ({"actor_obs_normalization": True}, ValueError, "actor_obs_normalization=True.*normalised by the trainer"),
        ({"critic_obs_normalization": True}, ValueError, "critic_obs_normalization=True"),
        ({"actor": None}, ValueError, "needs actor"),
        ({"inital_log_std": 0.0}, ValueError, "unknown key 'inital_log_std'.*did you mean 'initial_log_std'"),
        ({"obs_dim": 3}, ValueError, "unknown key 'obs_dim'"),
        ({"action_dim": 3}, ValueError, "action_dim 3 .* environment's 2"),
        ({"action_std_range": [0.0, 1.0]}, ValueError, "two positive numbers"),
        ({"action_std_range": [2.0, 1.0]}, ValueError, "non-decreasing"),
        ({"action_std_range": [0.1, 1.0], "log_std_range": [-1, 1]}, ValueError, "not both"),
        ({"name": "actor_olny"}, ValueError, "unknown policy 'actor_olny'; did you mean 'actor_only'"),
        ({"actor": {"type": "mlp", "network_cfg": {"hidden_sizes": [4], "activation": "rellu"}}}, ValueError, "did you mean 'relu'"),
    ],
)
def test_bad_blocks_are_refused(block, error, text):
    with pytest.raises(error, match=text):
        build_policy({"name": "actor_only", "actor": ACTOR, **block}, OBS, ACT)


def test_a_block_needs_a_name_and_is_a_mapping():
    with pytest.raises(ValueError, match="needs a name"):
        build_policy({"actor": ACTOR}, OBS, ACT)
    with pytest.raises(TypeError, match="mapping"):
        build_policy([], OBS, ACT)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("space", [spaces.MultiBinary(2), spaces.MultiDiscrete([[2, 2]]), _box(-1, 1, (2, 2)), spaces.Box(0, 5, (2,), np.int64)])
def test_other_action_spaces_are_refused(space):
    with pytest.raises(TypeError, match="continuous action space|categorical actions need"):
        build_policy({"name": "actor_only", "actor": ACTOR}, OBS, space)


@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.Tuple((OBS, OBS)), _box(0, 1, (8, 8))])
def test_other_observation_spaces_are_refused(space):
    with pytest.raises(TypeError, match="observation space must be"):
        build_policy({"name": "actor_only", "actor": ACTOR}, space, ACT)


def test_tanh_normal_needs_a_box_with_both_bounds_or_none():
    block = {"name": "actor_only", "actor": ACTOR, "distribution": "tanh_normal"}
    with pytest.raises(TypeError, match="must be a Box"):
        build_policy(block, OBS, 2)
    with pytest.raises(ValueError, match="action dimension 0 has one bound only"):
        build_policy(block, OBS, _box(0, np.inf, (1,)))
    free = build_policy(block, OBS, _box(-np.inf, np.inf, (2,)))
    raw = torch.tensor([300.0, -7.0])
    assert torch.equal(free.distribution.squash(raw), raw)


def test_observation_groups_select_entries_of_a_dict():
    space = spaces.Dict({"b": _box(-1, 1, (2,)), "a": _box(-1, 1, (3, 2)), "robot": spaces.Dict({"q": _box(-1, 1, (4,)), "v": _box(-1, 1, (5,))})})
    assert observation_dim(space) == 17
    assert observation_dim(space, ["a", "robot.q"]) == 10
    policy = build_policy({"name": "actor_only", "actor": ACTOR, "obs_groups": {"actor": ["robot", "b"]}}, space, ACT)
    assert policy.obs_dim == 11
    assert policy.obs_groups == ("robot", "b")
    with pytest.raises(ValueError, match="has no critic: remove obs_groups.critic"):
        build_policy({"name": "actor_only", "actor": ACTOR, "obs_groups": {"actor": ["a"], "critic": ["b"]}}, space, ACT)
    with pytest.raises(KeyError, match="robot.x"):
        observation_dim(space, ["robot.x"])
    with pytest.raises(TypeError, match="need a Dict observation space"):
        build_policy({"name": "actor_only", "actor": ACTOR, "obs_groups": {"actor": ["b"]}}, OBS, ACT)


def test_resolve_policy_obs_groups():
    assert resolve_policy_obs_groups({}) == (None, None)
    assert resolve_policy_obs_groups({"obs_groups": {"actor": ["a"]}}) == (("a",), ("a",))
    assert resolve_policy_obs_groups({"obs_groups": {"actor": ["a"], "critic": ["b", "a"]}}) == (("a",), ("b", "a"))


@pytest.mark.parametrize(
    ("groups", "error"),
    [
        (["a"], TypeError),
        ({"actor": "a"}, TypeError),
        ({"actor": 3}, TypeError),
        ({"actor": ["a", 1]}, TypeError),
        ({"actor": []}, ValueError),
        ({"critic": ["a"]}, ValueError),
        ({}, ValueError),
        ({"actor": ["a"], "critic": []}, ValueError),
        ({"actor": ["a"], "critics": ["a"]}, ValueError),
    ],
)
def test_bad_obs_groups_are_refused(groups, error):
    with pytest.raises(error, match="obs_groups"):
        resolve_policy_obs_groups({"obs_groups": groups})


def test_custom_policies_are_called_by_signature():
    calls: dict[str, Any] = {}

    @register_policy("Test_Custom", override=True)
    def custom(obs_space, action_dim, *, obs_dim, gain=1.0):
        calls.update(obs_space=obs_space, action_dim=action_dim, obs_dim=obs_dim, gain=gain)
        return dataclasses.replace(POLICIES[0], name="test_custom")

    assert get_policy_class("TEST_CUSTOM") is custom
    assert {"actor_only", "test_custom"} <= set(get_registered_policy_names())
    assert build_policy({"name": "test_custom", "gain": 2.0}, OBS, ACT).name == "test_custom"
    assert calls == {"obs_space": OBS, "action_dim": 2, "obs_dim": 4, "gain": 2.0}
    with pytest.raises(ValueError, match="unknown key 'gian'.*did you mean 'gain'"):
        build_policy({"name": "test_custom", "gian": 2.0}, OBS, ACT)
    with pytest.raises(ValueError, match="already registered"):
        register_policy("test_custom", custom)


def test_spaces_are_only_asked_for_what_the_factory_names():
    seen: dict[str, Any] = {}

    def for_anything(observation_space, action_space, **rest):
        seen.update(observation_space=observation_space, action_space=action_space, **rest)
        return POLICIES[0]

    register_policy("test_anything", for_anything, override=True)
    build_policy({"name": "test_anything", "level": 3}, spaces.Discrete(3), spaces.Discrete(2))
    assert seen == {"observation_space": spaces.Discrete(3), "action_space": spaces.Discrete(2), "level": 3}
