"""Policies with a critic, for continuous and discrete actions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributions import Categorical, Independent, Normal

from frl import rng, tree
from frl.critic_policies import actor_critic, join_parameter_groups, optimization_parameter_groups
from frl.distributions import CategoricalParams, NormalParams
from frl.envs.env import Env, EnvSpec
from frl.envs.vector import make_vec_env
from frl.heads import categorical_head
from frl.networks import mlp
from frl.policies import Policy, build_policy, get_registered_policy_names, register_policy
from frl.rollout import make_unroll
from frl.types import Outcome
from tests.tolerances import tolerance

NET = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "activation": "tanh"}}
BLOCK = {"name": "actor_critic", "actor": NET, "critic": NET}
OBS = spaces.Box(-np.inf, np.inf, (4,), np.float32)
ACT = spaces.Box(np.array([0, -2], np.float32), np.array([10, 2], np.float32))
MULTI = spaces.MultiDiscrete([2, 3], start=[-1, 10])
FLOAT64 = torch.float64

POLICIES = [
    actor_critic(4, ACT, actor=NET, critic=NET),
    actor_critic(4, ACT, actor=NET, critic=mlp(6, 1, [8]), critic_obs_dim=6, distribution="tanh_normal"),
    actor_critic(4, 2, actor=nn.Linear(4, 4), critic=nn.Linear(4, 1), state_dependent_std=True),
    actor_critic(4, spaces.Discrete(3, start=-1), actor=NET, critic=NET, critic_obs_dim=5),
    actor_critic(4, MULTI, actor=NET, critic=NET),
]
IDS = ["normal", "tanh", "module-net-std", "discrete", "multi-discrete"]
EVERY = pytest.mark.parametrize("policy", POLICIES, ids=IDS)


def _inputs(policy, lead, dtype=FLOAT64, device=None):
    """Observation, critic observation and noise."""
    noise = policy.noise(rng.key(3, device=device), 1, math.prod(lead), dtype=dtype)[0].reshape(*lead, -1)
    obs, critic_obs = (rng.normal(rng.key(i, device=device), (*lead, n), dtype=dtype) for i, n in ((1, policy.obs_dim), (2, policy.critic_obs_dim)))
    return obs, critic_obs, noise


# ---- laws of every policy ----


@EVERY
@given(lead=st.lists(st.integers(1, 3), max_size=3), dtype=st.sampled_from([torch.float32, FLOAT64]))
def test_any_leading_dimensions_follow_the_parameters_dtype(policy, lead, dtype):
    params = policy.init(rng.key(0), dtype=dtype)
    obs, critic_obs, noise = _inputs(policy, tuple(lead), dtype)
    dist, value = policy.apply(params, obs), policy.value(params, critic_obs)
    sample = policy.sample(dist, noise)
    assert policy.distribution.log_prob(dist, sample).shape == tuple(lead)
    assert value.shape == tuple(lead)
    assert value.dtype == dtype
    assert sample.action.shape == policy.distribution.mode(dist).shape
    for leaf in tree.leaves(dist):
        assert leaf.shape[:-1] == tuple(lead)
        assert leaf.dtype == dtype
    first = policy.value(params, critic_obs.reshape(-1, policy.critic_obs_dim)[0])
    torch.testing.assert_close(value.reshape(-1)[0], first, rtol=0, atol=100 * tolerance(dtype))


@EVERY
def test_rows_in_the_last_dimension_equal_rows_first(policy, device):
    params = policy.init(rng.key(0), dtype=FLOAT64, device=device)
    inputs = _inputs(policy, (6,), device=device)

    def row(obs, critic_obs, noise):
        dist = policy.apply(params, obs)
        sample = policy.sample(dist, noise)
        return sample.action, policy.distribution.log_prob(dist, sample), policy.value(params, critic_obs), *dist

    for a, b in zip(torch.func.vmap(row, in_dims=-1, out_dims=-1)(*(x.T for x in inputs)), row(*inputs), strict=True):
        torch.testing.assert_close(a.movedim(-1, 0), b, rtol=0, atol=100 * tolerance(FLOAT64))


@EVERY
def test_gradient_by_central_differences(policy):
    params = policy.init(rng.key(0), dtype=FLOAT64)
    obs, critic_obs, noise = _inputs(policy, (5,))
    sample = policy.sample(policy.apply(params, obs), noise)

    def loss(params):
        dist = policy.apply(params, obs)
        return (policy.distribution.log_prob(dist, sample) + policy.distribution.entropy(dist) + policy.value(params, critic_obs).square()).sum()

    leaves, structure = tree.flatten(params)
    direction = tree.unflatten(structure, [rng.normal(rng.key(10 + i), tuple(p.shape), dtype=FLOAT64) for i, p in enumerate(leaves)])
    slope = sum((g * d).sum() for g, d in zip(tree.leaves(torch.func.grad(loss)(params)), tree.leaves(direction), strict=True))
    h = 1e-6
    ahead, behind = (loss(tree.map(lambda p, d, s=s: p + s * h * d, params, direction)) for s in (1, -1))
    torch.testing.assert_close(slope, (ahead - behind) / (2 * h), rtol=1e-6, atol=1e-6)


@EVERY
def test_actor_and_critic_share_nothing(policy):
    params = policy.init(rng.key(0))
    obs, critic_obs, noise = _inputs(policy, (3,), torch.float32)
    dist = policy.apply(params, obs)
    sample = policy.sample(dist, noise)
    value_grad = torch.func.grad(lambda p: policy.value(p, critic_obs).sum())(params)
    score_grad = torch.func.grad(lambda p: policy.distribution.log_prob(policy.apply(p, obs), sample).sum())(params)
    assert not any(x.any() for x in tree.leaves({name: part for name, part in value_grad.items() if name != "critic"}))
    assert not any(x.any() for x in tree.leaves(score_grad["critic"]))
    assert all(x.any() for x in (*tree.leaves(value_grad["critic"]), *tree.leaves(score_grad["actor"])))


@pytest.mark.parametrize("policy", [p for p, name in zip(POLICIES, IDS, strict=True) if name != "module-net-std"])
def test_init_is_a_function_of_the_key(policy):
    a, b, c = (policy.init(rng.key(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))
    assert not torch.equal(a["critic"]["layers"][0]["weight"], c["critic"]["layers"][0]["weight"])
    assert a["actor"]["layers"][0]["weight"].unique().numel() == 32
    assert not torch.equal(a["actor"]["layers"][0]["weight"], a["critic"]["layers"][0]["weight"][:, :4])
    stacked = torch.func.vmap(policy.init)(rng.split(rng.key(3), 2))
    assert all(x.shape == (2, *y.shape) for x, y in zip(tree.leaves(stacked), tree.leaves(a), strict=True))


def test_compiled_equals_eager():
    policy = POLICIES[3]
    params, inputs = policy.init(rng.key(0)), _inputs(policy, (6,), torch.float32)

    assert policy.value is not None
    value = policy.value

    def row(params, obs, critic_obs, noise):
        dist = policy.apply(params, obs)
        sample = policy.sample(dist, noise)
        return policy.distribution.log_prob(dist, sample) + value(params, critic_obs), sample.action

    def loss(params):
        score, action = torch.func.vmap(row, in_dims=(None, -1, -1, -1), out_dims=-1)(params, *(x.T for x in inputs))
        return score.sum(), action

    grad = torch.func.grad(loss, has_aux=True)
    compiled = torch.compile(grad, backend="aot_eager", fullgraph=True)
    got, expected = compiled(params), grad(params)
    for a, b in zip(tree.leaves(got), tree.leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@given(T=st.integers(1, 40), N=st.integers(1, 5), dtype=st.sampled_from([torch.float32, FLOAT64]))
def test_gumbel_noise_of_a_row_does_not_depend_on_the_others_nor_on_the_horizon(T, N, dtype):
    policy = POLICIES[4]
    small, large = policy.noise(rng.key(1), T, N, dtype=dtype), policy.noise(rng.key(1), T + 9, N + 2, dtype=dtype)
    assert small.shape == (T, N, 5)
    assert small.dtype == dtype
    assert torch.equal(small, large[:T, :N])


def test_noise_is_of_the_kind_that_the_actions_take(device):
    gumbel, normal = (POLICIES[i].noise(rng.key(1, device=device), 100, 50) for i in (3, 0))
    assert gumbel.shape == (100, 50, 3)
    assert normal.shape == (100, 50, 2)
    for noise, mean, var in ((gumbel, 0.5772157, math.pi**2 / 6), (normal, 0.0, 1.0)):
        assert noise.device.type == device.type
        assert abs(noise.mean().item() - mean) < 5 * math.sqrt(var / noise.numel())
        assert noise.var().item() == pytest.approx(var, rel=0.1)


# ---- continuous actions ----


def test_parameters_and_their_defaults():
    policy = POLICIES[0]
    params = policy.init(rng.key(0))
    assert list(params) == ["actor", "critic", "log_std"]
    assert torch.equal(params["log_std"], torch.zeros(2))
    assert (policy.name, policy.obs_dim, policy.action_dim, policy.critic_obs_dim, policy.has_critic) == ("actor_critic", 4, 2, 4, True)
    assert not policy.uses_separate_critic_obs
    assert (policy.actor_obs_normalization, policy.critic_obs_normalization) == (False, False)
    assert "log_std" not in POLICIES[2].init(rng.key(0))
    assert "log_std" not in POLICIES[3].init(rng.key(0))


def test_std_is_clamped_with_zero_gradient_outside_its_range():
    policy = POLICIES[0]
    params = policy.init(rng.key(0), dtype=FLOAT64)

    def std(params):
        return policy.apply(params, torch.ones(4, dtype=FLOAT64)).log_std.exp()

    params = {**params, "log_std": torch.tensor([-20.0, 20.0], dtype=FLOAT64)}
    torch.testing.assert_close(std(params), torch.tensor([1e-6, 1e6], dtype=FLOAT64), rtol=1e-12, atol=0)
    assert not torch.func.grad(lambda p: std(p).sum())(params)["log_std"].any()
    narrow = actor_critic(4, ACT, actor=NET, critic=NET, initial_action_std=0.5, action_std_range=(0.2, 2.0))
    start = narrow.init(rng.key(0))
    torch.testing.assert_close(start["log_std"], torch.full((2,), math.log(0.5)))
    low = narrow.apply({**start, "log_std": torch.full((2,), -9.0)}, torch.zeros(4)).log_std
    torch.testing.assert_close(low, torch.full((2,), math.log(0.2)))


def test_scores_against_torch():
    normal, discrete = POLICIES[0], POLICIES[3]
    for policy in (normal, discrete):
        params = policy.init(rng.key(0), dtype=FLOAT64)
        obs, _, noise = _inputs(policy, (7,))
        dist = policy.apply(params, obs)
        sample = policy.sample(dist, noise)
        oracle: Any = Categorical(logits=dist.logits) if policy is discrete else Independent(Normal(dist.mean, dist.log_std.exp()), 1)
        torch.testing.assert_close(policy.distribution.log_prob(dist, sample), oracle.log_prob(sample.raw), rtol=0, atol=1e-12)
        torch.testing.assert_close(policy.distribution.entropy(dist), oracle.entropy(), rtol=0, atol=1e-12)


def test_the_score_is_that_of_the_sample_not_of_the_clipped_action():
    policy = actor_critic(4, spaces.Box(-1, 1, (1,), np.float32), actor=NET, critic=NET, initial_action_std=5.0)
    params = policy.init(rng.key(0))
    dist = policy.apply(params, torch.zeros(4))._replace(mean=torch.zeros(1))
    sample = policy.sample(dist, torch.tensor([0.6]))
    assert sample.raw.item() == pytest.approx(3.0)
    clipped = sample._replace(action=sample.action.clamp(-1, 1))
    assert torch.exp(policy.distribution.log_prob(dist, clipped) - policy.distribution.log_prob(dist, sample)) == 1


def test_squashed_actions_fill_the_box_in_every_path():
    policy = build_policy({**BLOCK, "distribution": "tanh_normal"}, OBS, ACT)
    for raw, action in ((0.0, [5.0, 0.0]), (50.0, [10.0, 2.0]), (-50.0, [0.0, -2.0])):
        dist = NormalParams(mean=torch.full((2,), raw), log_std=torch.zeros(2))
        assert torch.equal(policy.sample(dist, torch.zeros(2)).action, torch.tensor(action))
        assert torch.equal(policy.distribution.mode(dist), torch.tensor(action))


@pytest.mark.parametrize("std", [0.2, 0.05, 0.02, 0.01])
def test_kl_of_identical_policies_is_exactly_zero(std):
    policy = actor_critic(4, ACT, actor=NET, critic=NET, initial_action_std=std)
    dist = policy.apply(policy.init(rng.key(0)), rng.normal(rng.key(1), (9, 4)))
    assert not policy.distribution.kl(dist, dist).any()
    shifted = dist._replace(mean=dist.mean + torch.tensor([std, 0.0]))
    torch.testing.assert_close(policy.distribution.kl(dist, shifted), torch.full((9,), 0.5), rtol=1e-3, atol=0)


# ---- discrete actions: the environment gets its own names of the choices ----


def _recall(space) -> Env:
    """An environment whose state is the last action it was given."""

    def step(env_state, action, env_params):
        seen = action.reshape(-1).to(torch.float32)
        return {"seen": seen}, Outcome(reward=seen.sum() * env_params, terminated=seen[0] > 1e9, metrics={})

    size = 1 if isinstance(space, spaces.Discrete) else space.shape[0]
    return Env(
        spec=EnvSpec(name="recall", max_episode_steps=7, dt=1.0, differentiable=False),
        observation_space=spaces.Box(-np.inf, np.inf, (size,), np.float32),
        action_space=space,
        default_params=torch.ones(()),
        reset=lambda key, env_params: {"seen": rng.normal(key, (size,))},
        observe=lambda env_state, env_params: env_state["seen"],
        step=step,
    )


@pytest.mark.parametrize("space", [spaces.Discrete(3, start=-1), spaces.Discrete(2, start=10), spaces.Discrete(1, start=2), MULTI], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_environment_receives_only_legal_actions(space, deterministic):
    vec = make_vec_env(_recall(space), 5)
    policy = build_policy(BLOCK, vec.single_observation_space, space)
    params = policy.init(rng.key(0))
    state = vec.reset(vec.row_keys(rng.key(1)), vec.default_params)
    unroll = make_unroll(vec, policy, deterministic=deterministic, record=("obs", "final_obs", "action", "log_prob", "entropy"), mode="eager")
    with torch.no_grad():
        _, trajectory = unroll(params, (), state, vec.default_params, policy.noise(rng.key(2), 20, 5))
    actions = trajectory.action.flatten(0, 1)
    assert actions.dtype == torch.int64
    for action in actions:
        assert space.contains(action.numpy())
    assert torch.equal(trajectory.final_obs.flatten(), actions.flatten().to(torch.float32)), "the action recorded is the one received"
    if not deterministic:
        names = range(space.start, space.start + space.n) if isinstance(space, spaces.Discrete) else [-1, 0, 10, 11, 12]
        assert set(actions.unique().tolist()) == set(names), "every choice is played"
        raw = policy.distribution.inverse(trajectory.action)
        again = policy.distribution.log_prob(policy.apply(params, trajectory.obs), raw)
        torch.testing.assert_close(again, trajectory.log_prob, rtol=0, atol=1e-5)


def test_a_row_that_is_not_finite_still_plays_a_legal_action_and_leaves_the_others_alone():
    policy = POLICIES[3]
    params = policy.init(rng.key(0))
    obs, _, noise = _inputs(policy, (3,), torch.float32)
    broken = torch.cat([obs[:2], torch.full((1, 4), math.nan)])
    good, bad = (policy.sample(policy.apply(params, x), noise) for x in (obs, broken))
    assert torch.equal(good.action[:2], bad.action[:2])
    assert -1 <= bad.action[2] <= 1
    assert policy.distribution.log_prob(policy.apply(params, broken), bad)[2].isnan()


# ---- observations ----


def test_asymmetric_critic():
    box = lambda *shape: spaces.Box(-1, 1, shape, np.float32)
    space = spaces.Dict({"b": box(2), "a": box(3, 2), "robot": spaces.Dict({"q": box(4), "v": box(5)})})
    policy = build_policy({**BLOCK, "obs_groups": {"actor": ["robot.q", "b"], "critic": ["robot", "a"]}}, space, ACT)
    assert (policy.obs_dim, policy.critic_obs_dim) == (6, 15)
    assert (policy.obs_groups, policy.critic_obs_groups) == (("robot.q", "b"), ("robot", "a"))
    assert policy.uses_separate_critic_obs
    params = policy.init(rng.key(0))
    assert policy.value is not None
    assert policy.value(params, torch.zeros(7, 15)).shape == (7,)
    shared = build_policy({**BLOCK, "obs_groups": {"actor": ["b", "a"]}}, space, ACT)
    assert (shared.obs_dim, shared.critic_obs_dim) == (8, 8)
    assert shared.critic_obs_groups == ("b", "a")
    assert not shared.uses_separate_critic_obs
    assert build_policy(BLOCK, space, ACT).critic_obs_dim == 17
    direct = actor_critic(4, ACT, actor=NET, critic=NET, obs_groups=("b", "c"))
    assert direct.critic_obs_groups == ("b", "c")
    assert not direct.uses_separate_critic_obs
    with pytest.raises(KeyError, match="robot.x"):
        build_policy({**BLOCK, "obs_groups": {"actor": ["b"], "critic": ["robot.x"]}}, space, ACT)


@pytest.mark.parametrize("obs", [torch.full((3, 4), 1e8 + 1, dtype=FLOAT64), torch.ones(3, 4, dtype=torch.uint8), torch.ones(3, 4, dtype=torch.int64)], ids=str)
def test_observations_of_any_dtype_are_taken_in_the_dtype_of_the_weights(obs):
    for policy in (POLICIES[0], POLICIES[4]):
        params = policy.init(rng.key(0))
        assert all(leaf.dtype == torch.float32 for leaf in tree.leaves(policy.apply(params, obs)))
        assert policy.value is not None
        assert policy.value(params, obs).dtype == torch.float32


@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.MultiBinary(2)])
def test_observation_spaces_without_features_are_refused(space):
    with pytest.raises(TypeError, match="observation space must be"):
        build_policy(BLOCK, space, ACT)


# ---- parameter groups ----


@EVERY
def test_parameter_groups_partition_the_parameters(policy):
    params = policy.init(rng.key(0))
    groups = policy.optimization_parameter_groups(params)
    assert list(groups) == ["actor", "critic"]
    assert set(groups["actor"]) == set(params) - {"critic"}
    assert set(groups["critic"]) == {"critic"}
    joined = join_parameter_groups(groups)
    tree.check_same(joined, params)
    assert all(a is b for a, b in zip(tree.leaves(joined), tree.leaves(params), strict=True))


def test_groups_may_be_clipped_separately():
    policy = POLICIES[0]
    grads = tree.map(torch.ones_like, policy.init(rng.key(0)))
    groups = {"actor": 1.0, "critic": 2.0}
    scaled = join_parameter_groups({name: tree.map(lambda x, s=groups[name]: s * x, part) for name, part in optimization_parameter_groups(grads).items()})
    assert scaled["log_std"].tolist() == [1.0, 1.0]
    assert all((x == 2).all() for x in tree.leaves(scaled["critic"]))


# ---- run-file block and refusals ----


def test_build_policy_reads_the_block():
    block = {
        **BLOCK,
        "name": "Actor_Critic",
        "obs_groups": None,
        "actor_obs_normalization": True,
        "critic_obs_normalization": True,
        "initial_action_std": 0.5,
        "action_std_range": [0.1, 2.0],
        "state_dependent_std": False,
        "action_dim": 2,
    }
    policy = build_policy(block, OBS, ACT)
    assert isinstance(policy, Policy)
    assert (policy.actor_obs_normalization, policy.critic_obs_normalization) == (True, True)
    torch.testing.assert_close(policy.init(rng.key(0))["log_std"], torch.full((2,), math.log(0.5)))
    assert build_policy({**BLOCK, "initial_log_std": -2.0, "log_std_range": [-3, 0]}, 7, 3).init(rng.key(0))["log_std"].tolist() == [-2.0] * 3
    assert build_policy({**BLOCK, "action_dim": 1}, OBS, spaces.Discrete(5)).distribution.noise_dim == 5
    assert build_policy({**BLOCK, "action_dim": 2, "distribution": "categorical"}, OBS, MULTI).distribution.name == "multi_categorical"


DISCRETE = spaces.Discrete(2)


@pytest.mark.parametrize(
    ("block", "space", "error", "text"),
    [
        ({"actor": None}, ACT, ValueError, "needs actor"),
        ({"critic": None}, ACT, ValueError, "needs critic"),
        ({"inital_action_std": 1.0}, ACT, ValueError, "unknown key 'inital_action_std'.*did you mean 'initial_action_std'"),
        ({"observation_space": OBS}, ACT, ValueError, "unknown key 'observation_space'"),
        ({"action_dim": 3}, ACT, ValueError, "action_dim 3 .* environment's 2"),
        ({"action_dim": 2}, DISCRETE, ValueError, "action_dim 2 .* environment's 1"),
        ({"initial_action_std": 0.0}, ACT, ValueError, "must be a finite number above 0"),
        ({"initial_action_std": 3.0, "action_std_range": [0.1, 1.0]}, ACT, ValueError, "lies outside the range"),
        ({"action_std_range": [0.0, 1.0]}, ACT, ValueError, "two positive numbers"),
        ({"action_std_range": [2.0, 1.0]}, ACT, ValueError, "non-decreasing"),
        ({"action_std_range": [0.1, math.inf]}, ACT, ValueError, "finite"),
        ({"action_std_range": [0.1, 1.0], "log_std_range": [-1, 1]}, ACT, ValueError, "not both"),
        ({"initial_action_std": 1.0, "initial_log_std": 0.0}, ACT, ValueError, "not both"),
        ({"actor_obs_normalization": 1}, ACT, ValueError, "actor_obs_normalization must be true or false"),
        ({"critic_obs_normalization": "yes"}, ACT, ValueError, "critic_obs_normalization must be true or false"),
        ({"distribution": "categorical"}, ACT, ValueError, "unknown distribution 'categorical'"),
        ({"distribution": "tanh_normal"}, 2, TypeError, "must be a Box"),
        ({"distribution": "normal"}, DISCRETE, ValueError, "does not fit the action space"),
        ({"initial_action_std": 1.0}, DISCRETE, ValueError, "initial_action_std has no effect"),
        ({"initial_log_std": 0.0}, MULTI, ValueError, "initial_log_std has no effect"),
        ({"action_std_range": [0.1, 1.0]}, DISCRETE, ValueError, "action_std_range has no effect"),
        ({"state_dependent_std": True}, DISCRETE, ValueError, "state_dependent_std has no effect"),
        ({}, spaces.MultiBinary(2), TypeError, "categorical actions need"),
        ({}, spaces.MultiDiscrete(np.array([[2, 3], [2, 3]])), TypeError, "categorical actions need"),
        ({}, spaces.Dict({"a": DISCRETE}), TypeError, "categorical actions need"),
        ({}, spaces.Box(0, 5, (2,), np.int64), TypeError, "continuous action space"),
        ({"obs_groups": {"actor": ["b"]}}, ACT, TypeError, "need a Dict observation space"),
    ],
)
def test_bad_blocks_are_refused(block, space, error, text):
    with pytest.raises(error, match=text):
        build_policy({**BLOCK, **block}, OBS, space)


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"actor": nn.Linear(4, 3)}, ValueError, r"the actor must map \[2, 4\] to \[2, 2\], got \[2, 3\]"),
        ({"critic": nn.Linear(4, 2)}, ValueError, r"the critic must map \[2, 4\] to \[2, 1\], got \[2, 2\]"),
        ({"critic": "mlp"}, TypeError, "the critic must be"),
        ({"critic_obs_groups": ("b",)}, ValueError, "give critic_obs_dim"),
        ({"critic_obs_dim": 0}, ValueError, "critic_obs_dim"),
        ({"obs_dim": True}, ValueError, "obs_dim"),
        ({"action_space": True}, ValueError, "action space"),
    ],
)
def test_bad_arguments_are_refused(kwargs, error, text):
    with pytest.raises(error, match=text):
        actor_critic(**{"obs_dim": 4, "action_space": ACT, "actor": NET, "critic": NET, **kwargs})


def test_the_registry_knows_the_built_in_policies():
    assert {"actor_only", "actor_critic"} <= set(get_registered_policy_names())
    with pytest.raises(ValueError, match="already registered"):
        register_policy("Actor_Critic", lambda obs_dim: POLICIES[0])


def test_a_custom_policy_may_ask_for_the_critic_observation():
    seen: dict[str, Any] = {}

    def custom(obs_dim, critic_obs_dim):
        seen.update(obs_dim=obs_dim, critic_obs_dim=critic_obs_dim)
        return POLICIES[0]

    register_policy("test_critic_obs", custom, override=True)
    space = spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Box(-1, 1, (3,))})
    build_policy({"name": "test_critic_obs"}, 4, 2)
    assert seen == {"obs_dim": 4, "critic_obs_dim": 4}
    with pytest.raises(ValueError, match="unknown key 'obs_groups'"):
        build_policy({"name": "test_critic_obs", "obs_groups": {"actor": ["a"]}}, space, 2)


def test_categorical_head_passes_the_output_on():
    head = categorical_head(MULTI)
    out = rng.normal(rng.key(0), (3, 5))
    assert head.width == 5
    assert head.init(torch.float32, None) == {}
    assert head.read({}, out) == CategoricalParams(logits=out)
