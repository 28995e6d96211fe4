"""Double integrator: returns, gradients and the best policy against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, vmap

from frl import rng, tree
from frl.envs.double_integrator import DoubleIntegratorState, double_integrator, lqr_gain, optimal_return
from tests.tolerances import tolerance

F64 = torch.float64


def play(env, state, gains, gamma, params=None):
    """Discounted return of ``a_t = -(K_t[0] x_t + K_t[1] v_t)``; gains [T, 2]."""
    params = env.default_params if params is None else params
    total = torch.zeros((), dtype=state.position.dtype)
    for t in range(gains.shape[0]):
        action = -(gains[t, 0] * state.position + gains[t, 1] * state.velocity)
        state, outcome = env.step(state, action, params)
        total = total + gamma**t * outcome.reward
    return total


def matrices(env):
    mass, dt, q_x, q_v, r = (x.item() for x in env.default_params[:5])
    return np.array([[1.0, dt], [0.0, 1.0]]), np.array([[dt**2 / (2 * mass)], [dt / mass]]), np.diag([q_x, q_v]), r


def draw(seed, n=1):
    u = rng.uniform(rng.key(seed), (2 * n,), low=-1.0, high=1.0, dtype=F64)
    return DoubleIntegratorState(position=u[:n], velocity=u[n:])


def test_one_step_by_hand():
    env = double_integrator(dimensions=2, mass=2.0, dt=0.5, position_weight=1.0, velocity_weight=0.5, action_weight=0.25, dtype=F64)
    state = DoubleIntegratorState(position=torch.tensor([1.0, -2.0], dtype=F64), velocity=torch.tensor([0.5, 1.0], dtype=F64))
    new, outcome = env.step(state, torch.tensor([4.0, -8.0], dtype=F64), env.default_params)
    assert new.position.tolist() == [1.0 + 0.25 + 0.25, -2.0 + 0.5 - 0.5]
    assert new.velocity.tolist() == [1.5, -1.0]
    assert outcome.reward.item() == -(5.0 + 0.5 * 1.25 + 0.25 * 80.0)
    assert not outcome.terminated
    assert outcome.metrics["final_distance"].item() == pytest.approx(math.hypot(1.5, -2.0))
    assert env.observe(new, env.default_params).tolist() == [1.5, -2.0, 1.5, -1.0]


@given(seed=st.integers(0, 2**32 - 1), gamma=st.floats(0.5, 1.0))
def test_gradient_with_respect_to_a_linear_gain(seed, gamma):
    """dJ/dK = -2 sum_t gamma^t ((r + gamma B'P_{t+1}B) K - gamma B'P_{t+1}A) z_t z_t', with P the cost of going on with K."""
    env, horizon = double_integrator(mass=1.3, dt=0.2, dtype=F64), 12
    a, b, q, r = matrices(env)
    state = draw(seed)
    gain = rng.uniform(rng.fold_in(rng.key(seed), 1), (2,), low=-0.5, high=1.5, dtype=F64)
    k = gain.numpy()[None]
    costs = [np.zeros((2, 2))]
    for _ in range(horizon):
        costs.insert(0, q + r * k.T @ k + gamma * (a - b @ k).T @ costs[0] @ (a - b @ k))
    z = np.array([[state.position.item()], [state.velocity.item()]])
    want_return, want = -(z.T @ costs[0] @ z).item(), np.zeros((1, 2))
    for t in range(horizon):
        p = costs[t + 1]
        want -= 2 * gamma**t * ((r + gamma * b.T @ p @ b) @ k - gamma * b.T @ p @ a) @ z @ z.T
        z = (a - b @ k) @ z

    def value(gain):
        return play(env, state, gain.expand(horizon, 2), gamma)

    assert value(gain).item() == pytest.approx(want_return, rel=1e-12, abs=1e-12)
    np.testing.assert_allclose(grad(value)(gain).numpy(), want[0], rtol=1e-10, atol=1e-10)


@given(seed=st.integers(0, 2**32 - 1), gamma=st.floats(0.5, 1.0), n=st.integers(1, 3), horizon=st.integers(1, 30))
def test_riccati_gains_reach_the_optimal_return(seed, gamma, n, horizon):
    env = double_integrator(dimensions=n, dtype=F64)
    state = draw(seed, n)
    gains = lqr_gain(env.default_params, horizon, gamma)
    best = optimal_return(state, env.default_params, horizon, gamma)
    assert gains.shape == (horizon, 2)
    assert not gains[-1].any(), "the last action only costs"
    assert play(env, state, gains, gamma).item() == pytest.approx(best.item(), rel=1e-11, abs=1e-12)
    slope = grad(lambda k: play(env, state, k, gamma))(gains)
    torch.testing.assert_close(slope, torch.zeros_like(slope), atol=1e-10, rtol=0)
    other = gains + 0.1 * rng.normal(rng.fold_in(rng.key(seed), 2), (horizon, 2)).to(F64)
    assert play(env, state, other, gamma) < best


def test_long_horizon_gain_solves_the_algebraic_equation():
    env, gamma = double_integrator(dtype=F64), 0.99
    a, b, q, r = matrices(env)
    p = np.zeros((2, 2))
    for _ in range(5000):
        p = q + gamma * a.T @ p @ a - gamma**2 * a.T @ p @ b @ b.T @ p @ a / (r + gamma * (b.T @ p @ b).item())
    want = gamma * b.T @ p @ a / (r + gamma * (b.T @ p @ b).item())
    np.testing.assert_allclose(lqr_gain(env.default_params, 1000, gamma)[0].numpy(), want[0], rtol=1e-9)


def test_optimal_return_is_differentiable_and_takes_leading_dimensions():
    env = double_integrator(dimensions=2, dtype=F64)
    states = tree.stack([draw(s, 2) for s in range(3)])
    together = optimal_return(states, env.default_params, 10, 0.95)
    alone = torch.stack([optimal_return(tree.index(states, i), env.default_params, 10, 0.95) for i in range(3)])
    torch.testing.assert_close(together, alone, atol=0, rtol=tolerance(F64, 8))
    heavier = env.default_params._replace

    def of_mass(mass):
        return optimal_return(draw(0, 2), heavier(mass=mass), 10, 0.95)

    mass, h = env.default_params.mass, 1e-5
    central = (of_mass(mass + h) - of_mass(mass - h)) / (2 * h)
    torch.testing.assert_close(grad(of_mass)(mass), central, atol=1e-8, rtol=1e-7)
    # The best gains are a stationary point, so the derivative along fixed gains is the same one.
    gains = lqr_gain(env.default_params, 10, 0.95)
    along = grad(lambda m: play(env, draw(0, 2), gains, 0.95, heavier(mass=m)))(mass)
    torch.testing.assert_close(along, central, atol=1e-8, rtol=1e-7)


def test_float32_environment_agrees_with_the_float64_solution():
    env = double_integrator()
    state = env.reset(rng.key(0), env.default_params)
    gains = lqr_gain(env.default_params, 20, 0.99)
    assert gains.dtype == F64
    got = play(env, state, gains.float(), 0.99)
    assert got.dtype == torch.float32
    best = optimal_return(state, env.default_params, 20, 0.99)
    assert got.item() == pytest.approx(best.item(), rel=tolerance(torch.float32, 200))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dimensions", [1, 3])
def test_reset_shapes_and_dtype(device, dtype, dimensions):
    env = double_integrator(dimensions=dimensions, initial_position=2.0, initial_velocity=0.25, dtype=dtype)
    params = tree.map(lambda x: x.to(device), env.default_params)
    state = vmap(env.reset, in_dims=(0, None))(rng.split(rng.key(0).to(device), 2000), params)
    for x, half in ((state.position, 2.0), (state.velocity, 0.25)):
        assert x.shape == (2000, dimensions)
        assert x.dtype == dtype
        assert 0.98 * half < x.abs().max() <= half * (1 + tolerance(dtype))
    new, outcome = vmap(env.step, in_dims=(0, 0, None))(state, state.position, params)
    tree.check_same(new, state, "state")
    assert outcome.reward.dtype == dtype
    obs = vmap(env.observe, in_dims=(0, None))(new, params)[0].cpu().numpy()
    assert env.observation_space.contains(obs)
    assert env.action_space.shape == (dimensions,)
    assert not env.action_space.is_bounded()


def test_success_means_at_rest_at_the_origin():
    env = double_integrator(success_threshold=0.05)

    def success(x, v):
        _, outcome = env.step(DoubleIntegratorState(torch.tensor([x]), torch.tensor([v])), torch.zeros(1), env.default_params)
        return bool(outcome.metrics["success"])

    assert success(0.01, -0.01)
    assert not success(0.1, 0.0)
    assert not success(0.0, 0.1)


def test_rows_are_independent_and_compiled_equals_eager():
    env = double_integrator(dimensions=2)
    state = vmap(env.reset, in_dims=(0, None))(rng.split(rng.key(4), 9), env.default_params)
    action = rng.uniform(rng.key(5), (9, 2), low=-3.0, high=3.0)

    def step(state, action, dim):
        return vmap(env.step, in_dims=(dim, dim, None), out_dims=dim)(state, action, env.default_params)

    eager = step(state, action, 0)
    part = step(tree.map(lambda x: x[4:6], state), action[4:6], 0)
    order = torch.tensor([3, 1, 8, 0, 2, 7, 6, 4, 5])
    moved = step(tree.index(state, order), action[order], 0)
    compiled = torch.compile(lambda s, a: step(s, a, -1), backend="aot_eager", fullgraph=True)(tree.map(lambda x: x.T, state), action.T)
    for whole, some, permuted, graph in zip(*map(tree.leaves, (eager, part, moved, compiled)), strict=True):
        assert torch.equal(whole[4:6], some)
        assert torch.equal(whole[order], permuted)
        torch.testing.assert_close(graph.movedim(-1, 0), whole, atol=tolerance(torch.float32, 8), rtol=tolerance(torch.float32, 8))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(n, v) for n in ("dimensions", "max_episode_steps") for v in (0, -3, True, 1.5)],
        *[(n, v) for n in ("mass", "dt", "action_weight", "success_threshold") for v in (0.0, -1.0, math.nan, math.inf, True)],
        *[(n, v) for n in ("position_weight", "velocity_weight", "initial_position", "initial_velocity") for v in (-1.0, math.inf, True, "1")],
        ("dtype", torch.bfloat16),
    ],
)
def test_arguments_are_checked(name, value):
    with pytest.raises(ValueError, match=name):
        double_integrator(**{name: value})


@pytest.mark.parametrize(
    ("horizon", "gamma", "name"), [(0, 0.9, "horizon"), (True, 0.9, "horizon"), (5, 0.0, "gamma"), (5, 1.1, "gamma"), (5, math.nan, "gamma")]
)
def test_solution_arguments_are_checked(horizon, gamma, name):
    with pytest.raises(ValueError, match=name):
        lqr_gain(double_integrator().default_params, horizon, gamma)


def test_action_of_a_wrong_shape_is_refused():
    env = double_integrator(dimensions=2)
    with pytest.raises(ValueError, match=r"shape \(2,\), got \(1,\)"):
        env.step(env.reset(rng.key(0), env.default_params), torch.zeros(1), env.default_params)
