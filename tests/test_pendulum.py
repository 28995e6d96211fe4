"""Pendulum: gymnasium's Pendulum-v1 is the oracle."""

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
from frl.envs.pendulum import PendulumState, pendulum, wrap_angle
from tests.tolerances import tolerance


@pytest.fixture(scope="module")
def gym_env():
    env = gymnasium.make("Pendulum-v1")
    env.reset(seed=0)
    yield env
    env.close()


@pytest.mark.parametrize(("dtype", "ops"), [(torch.float64, 16), (torch.float32, 16)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_steps_equal_gymnasium(gym_env, device, dtype, ops, seed):
    env = pendulum(dtype=dtype)
    params = tree.map(lambda x: x.to(device), env.default_params)
    generator = np.random.default_rng(seed)
    state = PendulumState(*(torch.tensor(x, dtype=dtype, device=device) for x in (generator.uniform(-9, 9), generator.uniform(-8, 8))))
    limit = tolerance(dtype, ops)
    for _ in range(150):
        torque = generator.uniform(-3.0, 3.0)
        action = torch.tensor([torque], dtype=dtype, device=device)
        gym_env.unwrapped.state = np.array([x.item() for x in state])
        gym_obs, gym_reward, gym_terminated, _, _ = gym_env.unwrapped.step(action.cpu().numpy().astype(np.float64))
        state, outcome = env.step(state, action, params)
        angle, speed = gym_env.unwrapped.state
        # Rounding of the angle, of up to a few turns, is amplified by the slope 2 pi of its square.
        assert state.angle.item() == pytest.approx(angle, abs=10 * limit)
        assert state.angular_velocity.item() == pytest.approx(speed, abs=10 * limit)
        assert outcome.reward.item() == pytest.approx(gym_reward, abs=100 * limit)
        assert bool(outcome.terminated) is gym_terminated
        np.testing.assert_allclose(env.observe(state, params).cpu().numpy(), gym_obs, atol=10 * limit + 1e-6)


def test_spaces_and_limit_equal_gymnasium(gym_env):
    env = pendulum()
    assert env.observation_space == gym_env.observation_space
    assert env.action_space == gym_env.action_space
    assert env.spec.max_episode_steps == gym_env.spec.max_episode_steps
    assert env.spec.dt == gym_env.unwrapped.dt


def test_reset_distribution():
    env = pendulum()
    keys = rng.split(rng.key(0), 20000)
    state = vmap(env.reset, in_dims=(0, None))(keys, env.default_params)
    for x, half in ((state.angle, math.pi), (state.angular_velocity, 1.0)):
        assert x.abs().max() <= half * (1 + tolerance(torch.float32))
        assert abs(x.mean().item()) < 0.03 * half
        assert x.var().item() == pytest.approx(half**2 / 3, rel=0.03)
    again = vmap(env.reset, in_dims=(0, None))(keys[:7], env.default_params)
    for few, many in zip(again, state, strict=True):
        assert torch.equal(few, many[:7])


@given(angle=st.floats(-50, 50))
def test_wrap_angle(angle):
    x = torch.tensor(angle, dtype=torch.float64)
    y = wrap_angle(x)
    assert -math.pi <= y.item() <= math.pi
    assert math.remainder(y.item() - angle, 2 * math.pi) == pytest.approx(0.0, abs=1e-12)
    assert grad(wrap_angle)(x).item() == 1.0


@given(seed=st.integers(0, 2**32 - 1))
def test_gradient_is_the_derivative(seed):
    env = pendulum(dtype=torch.float64)
    u = rng.uniform(rng.key(seed), (5,), low=-1.0, high=1.0, dtype=torch.float64)

    def total(x):  # three steps from above the horizontal: no wrap, no bound
        state, rewards = PendulumState(angle=x[0], angular_velocity=x[1]), []
        for t in range(3):
            state, outcome = env.step(state, x[2 + t : 3 + t], env.default_params)
            rewards.append(outcome.reward)
        return torch.stack(rewards).sum() + env.observe(state, env.default_params).sum()

    x, h = 1.5 * u, 1e-5
    central = torch.stack([(total(x + h * e) - total(x - h * e)) / (2 * h) for e in torch.eye(5, dtype=x.dtype)])
    torch.testing.assert_close(grad(total)(x), central, atol=1e-8, rtol=1e-7)


def test_bounds_pass_no_gradient():
    env = pendulum()

    def speed(action, omega):
        state = PendulumState(angle=torch.tensor(0.0), angular_velocity=omega)
        return env.step(state, action, env.default_params)[0].angular_velocity

    slope = grad(speed)(torch.tensor([1.0]), torch.tensor(0.0))
    assert slope.item() == pytest.approx(0.15, rel=tolerance(torch.float32, 4))
    assert not grad(speed)(torch.tensor([2.1]), torch.tensor(0.0)).any(), "saturated torque"
    assert not grad(speed)(torch.tensor([1.0]), torch.tensor(7.99)).any(), "saturated speed"
    assert speed(torch.tensor([1.0]), torch.tensor(7.99)) == 8.0


def test_success_means_upright_and_still():
    env = pendulum()

    def success(angle, omega):
        _, outcome = env.step(PendulumState(torch.tensor(angle), torch.tensor(omega)), torch.zeros(1), env.default_params)
        return bool(outcome.metrics["success"])

    assert success(0.01, 0.0)
    assert success(2 * math.pi + 0.01, 0.0)
    assert not success(0.5, 0.0)
    assert not success(0.0, 1.0)
    assert not success(math.pi, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_follows(dtype):
    env = pendulum(dtype=dtype)
    state = env.reset(rng.key(1), env.default_params)
    new, outcome = env.step(state, torch.zeros(1, dtype=dtype), env.default_params)
    tree.check_same(new, state, "state")
    assert outcome.reward.dtype == new.angle.dtype == env.observe(new, env.default_params).dtype == dtype
    assert env.observation_space.contains(env.observe(new, env.default_params).numpy())


def test_rows_are_independent_and_compiled_equals_eager():
    env = pendulum()
    state = vmap(env.reset, in_dims=(0, None))(rng.split(rng.key(4), 9), env.default_params)
    action = rng.uniform(rng.key(5), (9, 1), low=-3.0, high=3.0)

    def step(state, action, dim):
        return vmap(env.step, in_dims=(dim, dim, None), out_dims=dim)(state, action, env.default_params)

    eager = step(state, action, 0)
    part = step(tree.map(lambda x: x[4:6], state), action[4:6], 0)
    order = torch.tensor([3, 1, 8, 0, 2, 7, 6, 4, 5])
    moved = step(tree.index(state, order), action[order], 0)
    compiled = torch.compile(lambda s, a: step(s, a, -1), backend="aot_eager", fullgraph=True)(state, action.T)
    for whole, some, permuted, graph in zip(*map(tree.leaves, (eager, part, moved, compiled)), strict=True):
        assert torch.equal(whole[4:6], some)
        assert torch.equal(whole[order], permuted)
        torch.testing.assert_close(graph, whole, atol=tolerance(torch.float32, 8), rtol=tolerance(torch.float32, 8))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("max_episode_steps", v) for v in (0, True, 1.5)],
        *[(n, v) for n in ("mass", "length", "dt", "max_speed", "max_torque", "success_angle", "success_speed") for v in (0.0, -1.0, math.nan, math.inf, True)],
        *[(n, v) for n in ("gravity", "initial_angle", "initial_speed") for v in (-1.0, math.inf, True, "1")],
        ("dtype", torch.float16),
    ],
)
def test_arguments_are_checked(name, value):
    with pytest.raises(ValueError, match=name):
        pendulum(**{name: value})


def test_action_of_a_wrong_shape_is_refused():
    env = pendulum()
    with pytest.raises(ValueError, match=r"shape \(1,\), got \(\)"):
        env.step(env.reset(rng.key(0), env.default_params), torch.zeros(()), env.default_params)
