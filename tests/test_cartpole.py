"""Cart-pole: gymnasium's CartPole-v1 is the oracle."""

from __future__ import annotations

import math

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, vmap

from frl import rng, tree
from frl.envs.cartpole import CartPoleParams, CartPoleState, cartpole
from frl.envs.registry import build_learning_env
from frl.envs.vector import make_vec_env
from frl.policies import build_policy
from frl.rollout import make_unroll
from tests.tolerances import tolerance

FLOAT64 = torch.float64
NET = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "activation": "tanh"}}


@pytest.fixture(scope="module")
def gym_env():
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=0)
    yield env
    env.close()


def _state(values, dtype, device=None):
    return CartPoleState(*(torch.tensor(float(x), dtype=dtype, device=device) for x in values))


@pytest.mark.parametrize("dtype", [FLOAT64, torch.float32])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_steps_equal_gymnasium(gym_env, device, dtype, seed):
    env = cartpole(dtype=dtype)
    params = tree.map(lambda x: x.to(device), env.default_params)
    generator = np.random.default_rng(seed)
    limit = tolerance(dtype, 32)
    oracle, ends = gym_env.unwrapped, 0
    state = _state(generator.uniform(-0.05, 0.05, 4), dtype, device)
    for _ in range(200):
        action = int(generator.integers(2))
        oracle.state, oracle.steps_beyond_terminated = np.array([x.item() for x in state]), None
        gym_obs, gym_reward, gym_terminated, _, _ = oracle.step(action)
        state, outcome = env.step(state, torch.tensor(action, device=device), params)
        np.testing.assert_allclose([x.item() for x in state], oracle.state, rtol=limit, atol=limit)
        np.testing.assert_allclose(env.observe(state, params).cpu().numpy(), gym_obs, rtol=limit, atol=limit + 1e-6)
        assert outcome.reward.item() == gym_reward == 1.0
        assert outcome.reward.dtype == dtype
        assert bool(outcome.terminated) is gym_terminated
        assert bool(outcome.metrics["success"]) is not gym_terminated
        if gym_terminated:
            ends += 1
            state = _state(generator.uniform(-0.05, 0.05, 4), dtype, device)
    assert ends >= 3


def test_whole_episodes_equal_gymnasium(gym_env):
    env = cartpole(dtype=FLOAT64)
    for seed in range(5):
        gym_env.reset(seed=seed)
        state, generator = _state(gym_env.unwrapped.state, FLOAT64), np.random.default_rng(seed)
        for _ in range(500):
            angle, speed = gym_env.unwrapped.state[2:]
            action = int(generator.integers(2)) if seed < 2 else int(angle + 0.5 * speed > 0)  # a poor and a good controller
            _, _, gym_terminated, gym_truncated, _ = gym_env.step(action)
            state, outcome = env.step(state, torch.tensor(action), env.default_params)
            assert bool(outcome.terminated) is gym_terminated
            # An upright pole is unstable: rounding errors grow along the episode, the controller keeps them bounded.
            np.testing.assert_allclose([x.item() for x in state], gym_env.unwrapped.state, rtol=0, atol=1e-10)
            if gym_terminated or gym_truncated:
                break
        assert gym_truncated is (seed >= 2)
        assert gym_terminated is not gym_truncated


@pytest.mark.parametrize(
    ("values", "action", "ends"),
    [
        ((2.39, 1.0, 0.0, 0.0), 1, True),
        ((-2.39, -1.0, 0.0, 0.0), 0, True),
        ((2.39, 0.1, 0.0, 0.0), 1, False),
        ((0.0, 0.0, 0.2, 1.0), 0, True),
        ((0.0, 0.0, -0.2, -1.0), 1, True),
        ((0.0, 0.0, 0.2, 0.1), 0, False),
    ],
)
def test_each_threshold_ends_the_episode_with_reward_one(gym_env, values, action, ends):
    env, oracle = cartpole(dtype=FLOAT64), gym_env.unwrapped
    oracle.state, oracle.steps_beyond_terminated = np.array(values), None
    _, outcome = env.step(_state(values, FLOAT64), torch.tensor(action), env.default_params)
    _, reward, terminated, _, _ = oracle.step(action)
    assert bool(outcome.terminated) is terminated is ends
    assert outcome.reward.item() == reward == 1.0


def test_spaces_and_limit_equal_gymnasium(gym_env):
    env = cartpole()
    assert env.observation_space == gym_env.observation_space
    assert env.action_space == gym_env.action_space
    assert env.spec.max_episode_steps == gym_env.spec.max_episode_steps
    assert env.spec.dt == gym_env.unwrapped.tau
    assert not env.spec.differentiable
    for ours, theirs in (("theta_threshold", "theta_threshold_radians"), ("x_threshold", "x_threshold"), ("masspole", "masspole"), ("length", "length")):
        assert getattr(cartpole(dtype=FLOAT64).default_params, ours).item() == getattr(gym_env.unwrapped, theirs)


def test_reset_distribution():
    env = cartpole(dtype=FLOAT64)
    keys = rng.split(rng.key(0), 20000)
    state = vmap(env.reset, in_dims=(0, None))(keys, env.default_params)
    numbers = torch.stack(tuple(state))
    assert numbers.abs().max() < 0.05
    assert (numbers.mean(-1).abs() < 0.0015).all()
    torch.testing.assert_close(numbers.var(-1), torch.full((4,), 0.05**2 / 3, dtype=FLOAT64), rtol=0.03, atol=0)
    assert (torch.corrcoef(numbers) - torch.eye(4)).abs().max() < 0.03
    again = vmap(env.reset, in_dims=(0, None))(keys[:7], env.default_params)
    assert all(torch.equal(few, many[:7]) for few, many in zip(again, state, strict=True))
    assert vmap(env.reset, in_dims=(0, None))(keys, env.default_params._replace(initial_range=torch.tensor(0.0, dtype=FLOAT64))).x.abs().max() == 0


@given(seed=st.integers(0, 2**32 - 1), action=st.integers(0, 1))
def test_gradient_of_the_dynamics_is_the_derivative(seed, action):
    env = cartpole(dtype=FLOAT64)
    u = rng.uniform(rng.key(seed), (11,), low=-1.0, high=1.0, dtype=FLOAT64)
    # Derivatives in the state and, as for system identification, in every physical parameter.
    scale = torch.tensor([1.0, 2.0, 0.2, 2.0, 2.0, 0.3, 0.05, 0.2, 3.0, 0.005], dtype=FLOAT64)
    names = ("gravity", "masscart", "masspole", "length", "force_mag", "tau")
    start = torch.cat([torch.zeros(4, dtype=FLOAT64), torch.stack([getattr(env.default_params, name) for name in names])])

    def total(x):
        params = env.default_params._replace(**dict(zip(names, x[4:], strict=True)))
        state = CartPoleState(*x[:4])
        for t in range(3):
            state, _ = env.step(state, torch.tensor((action + t) % 2), params)
        return (env.observe(state, params) * torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=FLOAT64)).sum()

    x, h = start + scale * u[:10], 1e-6
    central = torch.stack([(total(x + h * e) - total(x - h * e)) / (2 * h) for e in torch.eye(10, dtype=FLOAT64)])
    torch.testing.assert_close(grad(total)(x), central, atol=1e-7, rtol=1e-6)


def test_step_does_not_change_its_arguments():
    env = cartpole()
    state = env.reset(rng.key(0), env.default_params)
    before = [x.clone() for x in (*state, *env.default_params)]
    env.step(state, torch.tensor(1), env.default_params)
    assert all(torch.equal(a, b) for a, b in zip(before, (*state, *env.default_params), strict=True))


def test_rows_last_equal_rows_first_and_do_not_depend_on_each_other(device):
    env = cartpole()
    few, many = (make_vec_env(env, n, device) for n in (3, 5))
    key = rng.key(0, device=device)
    states = [vec.reset(vec.row_keys(key), vec.default_params) for vec in (few, many)]
    last = tree.map(lambda x: x.movedim(0, -1), states[1])
    for t in range(60):
        action = rng.randint(rng.key(t, device=device), (5,), 0, 2)
        states = [vec.step(state, action[: vec.num_envs], vec.default_params)[0] for vec, state in zip((few, many), states, strict=True)]
        last, _ = many.step(last, action, many.default_params, rows=-1)
        for a, b, c in zip(*(tree.leaves(s) for s in states), tree.leaves(last), strict=True):
            assert torch.equal(a, b[:3])
            assert torch.equal(b, c.movedim(-1, 0))
    assert (states[1].elapsed < 60).all(), "every row was reset"


def test_parameters_may_differ_by_row():
    vec = make_vec_env(cartpole(), 3)
    params = vec.default_params._replace(force_mag=torch.tensor([0.0, 10.0, 20.0]), initial_range=torch.zeros(()))
    state = vec.reset(vec.row_keys(rng.key(0)), params)
    state, _ = vec.step(state, torch.ones(3, dtype=torch.int64), params)
    assert state.env.x_dot[0] == 0
    torch.testing.assert_close(state.env.x_dot[2], 2 * state.env.x_dot[1])


def test_compiled_equals_eager():
    vec = make_vec_env(cartpole(), 4)
    state = vec.reset(vec.row_keys(rng.key(0)), vec.default_params)

    def step(state, action, fresh):
        return vec.step(state, action, vec.default_params, fresh=fresh)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for t in range(30):
        action, fresh = rng.randint(rng.key(t), (4,), 0, 2), tree.index(vec.draw_resets(state, 1, vec.default_params), 0)
        got, expected = compiled(state, action, fresh), step(state, action, fresh)
        for a, b in zip(tree.leaves(got), tree.leaves(expected), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        state = expected[0]


def test_an_episode_is_cut_at_its_limit():
    vec = build_learning_env("CartPole", num_envs=2, max_episode_steps=5, force_mag=0.0, initial_range=0.0)
    state = vec.reset(vec.row_keys(rng.key(0)), vec.default_params)
    for t in range(1, 11):
        state, step = vec.step(state, torch.ones(2, dtype=torch.int64), vec.default_params)
        assert step.truncated.all() == (t % 5 == 0)
        assert not step.terminated.any()
        assert (step.metrics["episode_return"] == (t - 1) % 5 + 1).all()
        assert step.metrics["success"].all()


def test_a_categorical_policy_plays_it():
    vec = make_vec_env(cartpole(), 4)
    policy = build_policy({"name": "actor_critic", "actor": NET, "critic": NET}, vec.single_observation_space, vec.single_action_space)
    params = policy.init(rng.key(0))
    unroll = make_unroll(vec, policy, mode="eager")
    state = vec.reset(vec.row_keys(rng.key(1)), vec.default_params)
    _, trajectory = unroll(params, (), state, vec.default_params, policy.noise(rng.key(2), 80, 4))
    assert trajectory.action.shape == (80, 4)
    assert set(trajectory.action.unique().tolist()) == {0, 1}
    assert trajectory.terminated.any(0).all()
    lengths = trajectory.metrics["episode_length"][trajectory.terminated]
    assert (lengths == trajectory.metrics["episode_return"][trajectory.terminated]).all()
    assert 8 <= lengths.min() <= lengths.max() < 80


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"max_episode_steps": 0}, "max_episode_steps"),
        ({"gravity": -1.0}, "gravity"),
        ({"masscart": 0.0}, "masscart"),
        ({"masspole": math.nan}, "masspole"),
        ({"length": math.inf}, "length"),
        ({"force_mag": True}, "force_mag"),
        ({"tau": 0.0}, "tau"),
        ({"theta_threshold": 0.0}, "theta_threshold"),
        ({"x_threshold": -2.4}, "x_threshold"),
        ({"initial_range": -0.1}, "initial_range"),
        ({"dtype": torch.float16}, "dtype"),
    ],
)
def test_bad_arguments_are_refused(kwargs, text):
    with pytest.raises(ValueError, match=text):
        cartpole(**kwargs)


def test_an_action_of_another_shape_is_refused():
    env = cartpole()
    state = env.reset(rng.key(0), env.default_params)
    with pytest.raises(ValueError, match=r"shape \(\), got \(1,\)"):
        env.step(state, torch.ones(1, dtype=torch.int64), env.default_params)
    assert len(CartPoleParams._fields) == len(env.default_params)
