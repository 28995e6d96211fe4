"""Quadrotor: a numpy loop over rotation matrices and the laws of a rigid body are the oracles."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, jacrev, vmap

from frl import rng, tree
from frl.envs.quadrotor import QuadrotorState, _turn, quadrotor
from tests.tolerances import tolerance

F64 = torch.float64
SEEDS = st.integers(0, 2**32 - 1)


def turned(v):
    """Rotation matrix of a rotation vector, by Rodrigues' formula."""
    angle = np.linalg.norm(v)
    cross = np.array([[0, -v[2], v[1]], [v[2], 0, -v[0]], [-v[1], v[0], 0]])
    if angle == 0:
        return np.eye(3)
    return np.eye(3) + np.sin(angle) / angle * cross + (1 - np.cos(angle)) / angle**2 * cross @ cross


def any_state(seed, kept=1):
    u = rng.uniform(rng.key(seed), (13 + 4 * kept,), low=-1.0, high=1.0, dtype=F64)
    q = u[0:4] / u[0:4].norm()
    return QuadrotorState(position=2 * u[4:7], attitude=q, velocity=u[7:10], rates=3 * u[10:13], commands=u[13:].reshape(kept, 4))


def matrix(env, state):
    return env.observe(state, env.default_params)[3:12].reshape(3, 3).numpy()


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_steps_equal_a_numpy_loop_over_rotation_matrices(seed, delay):
    p = {"gravity": 9.5, "mass": 0.9, "max_thrust": 20.0, "max_rate": 7.0, "max_yaw_rate": 3.0, "rate_lag": 0.04, "dt": 0.03, "sharpness": 4.0}
    env = quadrotor(action_delay=delay, dtype=F64, **p)
    kept = max(delay, 1)
    state, generator = any_state(seed, kept), np.random.default_rng(seed)
    x, v, w = (y.numpy() for y in (state.position, state.velocity, state.rates))
    r, given_commands = matrix(env, state), list(state.commands.numpy())  # newest first
    hover = np.array([2 * p["mass"] * p["gravity"] / p["max_thrust"] - 1, 0, 0, 0])
    for _ in range(40):
        action = generator.uniform(-1.5, 1.5, 4)
        state, outcome = env.step(state, torch.tensor(action), env.default_params)
        command = np.clip(action, -1, 1)
        given_commands.insert(0, command)
        acting = given_commands[delay]
        target = np.array([p["max_rate"], p["max_rate"], p["max_yaw_rate"]]) * acting[1:]
        w = target + (w - target) * math.exp(-p["dt"] / p["rate_lag"])
        r = r @ turned(p["dt"] * w)
        v = v + p["dt"] * (r[:, 2] * p["max_thrust"] * (1 + acting[0]) / 2 / p["mass"] - np.array([0, 0, p["gravity"]]))
        x = x + p["dt"] * v
        h = lambda y: np.sqrt(1 + y @ y) - 1
        effort, change = command - hover, command - given_commands[1]
        reward = -(h(p["sharpness"] * x) / p["sharpness"] + 0.1 * h(v) + 0.1 * h(w) + 0.02 * effort @ effort + 0.02 * change @ change)
        expected = np.concatenate([x, r.ravel(), v, w, *given_commands[:kept]])
        np.testing.assert_allclose(env.observe(state, env.default_params).numpy(), expected, rtol=1e-9, atol=1e-9)
        assert outcome.reward.item() == pytest.approx(reward, rel=1e-9)
        assert outcome.metrics["final_distance"].item() == pytest.approx(np.linalg.norm(x), rel=1e-9)
        assert outcome.metrics["final_speed"].item() == pytest.approx(np.linalg.norm(v), rel=1e-9)
        assert bool(outcome.metrics["success"]) == (np.linalg.norm(x) < 0.1)
        assert not outcome.terminated


@given(seed=SEEDS, size=st.sampled_from([0.0, 1e-12, 1e-3, 0.06, 0.0632, 0.0634, 0.5, 3.0, 6.28, 40.0]))
def test_turning_by_a_vector(seed, size):
    direction = rng.normal(rng.key(seed), (3,), dtype=F64)
    v = size * direction / direction.norm()
    w, x, y, z = (value.item() for value in _turn(*v.unbind()))
    assert w == pytest.approx(math.cos(size / 2), abs=1e-14)
    np.testing.assert_allclose([x, y, z], np.sinc(size / 2 / math.pi) / 2 * v.numpy(), rtol=1e-13, atol=1e-15)
    # The derivative of w^2 + |xyz|^2 = 1 is zero, and that of the vector at 0 is one half.
    slope = jacrev(lambda v: torch.stack(_turn(*v.unbind())))(v)
    assert torch.isfinite(slope).all()
    torch.testing.assert_close(torch.tensor([w, x, y, z], dtype=F64) @ slope, torch.zeros(3, dtype=F64), atol=1e-12, rtol=0)
    if size < 1e-9:
        torch.testing.assert_close(slope[1:], 0.5 * torch.eye(3, dtype=F64))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_attitude_stays_a_unit_quaternion(dtype):
    env = quadrotor(dtype=dtype)
    state = env.reset(rng.key(0), env.default_params)
    for t in range(1000):
        action = torch.tensor([0.1, math.sin(0.1 * t), math.cos(0.17 * t), 1.0], dtype=dtype)
        state, _ = env.step(state, action, env.default_params)
        assert state.attitude.norm().item() == pytest.approx(1.0, abs=tolerance(dtype, 1))
    # A length that is off is mended in one step.
    mended, _ = env.step(state._replace(attitude=1.01 * state.attitude), torch.zeros(4, dtype=dtype), env.default_params)
    assert mended.attitude.norm().item() == pytest.approx(1.0, abs=tolerance(dtype, 1))


def test_constant_rates_turn_exactly():
    """A full turn in 50 steps, whatever the step size."""
    env = quadrotor(action_delay=0, dt=0.04, max_yaw_rate=math.pi, dtype=F64)
    state = any_state(3)._replace(rates=torch.tensor([0.0, 0.0, math.pi], dtype=F64))
    before = matrix(env, state)
    for _ in range(50):
        state, _ = env.step(state, torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=F64), env.default_params)
    np.testing.assert_allclose(matrix(env, state), before, atol=1e-12)


def test_free_fall_conserves_energy_and_horizontal_momentum():
    errors = []
    for dt in (0.02, 0.01):
        env = quadrotor(action_delay=0, dt=dt, dtype=F64)
        state, p = any_state(1), env.default_params
        energy = lambda s: p.mass * (s.velocity.square().sum() / 2 + p.gravity * s.position[2])  # noqa: B023
        start, first = energy(state), state.velocity
        for _ in range(round(1.0 / dt)):
            state, _ = env.step(state, torch.tensor([-1.0, 0.5, -0.5, 1.0], dtype=F64), p)
        torch.testing.assert_close(state.velocity[:2], first[:2], rtol=0, atol=1e-15)
        errors.append((energy(state) - start).abs().item())
    assert errors[0] / errors[1] == pytest.approx(2.0, rel=1e-3), "first order in the step"
    assert errors[1] < 0.5


def test_hover_is_an_equilibrium():
    for seed in range(3):
        env = quadrotor(action_delay=2, initial_tilt=0.0, initial_speed=0.0, initial_rate=0.0, dtype=F64)
        state = env.reset(rng.key(seed), env.default_params)
        hover, start = state.commands[0], state.position
        for _ in range(200):
            state, outcome = env.step(state, hover, env.default_params)
        torch.testing.assert_close(state.position, start, atol=1e-12, rtol=0)
        at_goal = state._replace(position=torch.zeros(3, dtype=F64))
        assert env.step(at_goal, hover, env.default_params)[1].reward.item() == pytest.approx(0.0, abs=1e-12)


@given(seed=SEEDS, heading=st.floats(-3, 3))
def test_the_world_has_no_preferred_heading(seed, heading):
    env = quadrotor(action_delay=0, dtype=F64)
    state = any_state(seed)
    action = rng.uniform(rng.key(seed), (4,), low=-1.0, high=1.0, dtype=F64)
    about_z = torch.tensor(turned(np.array([0.0, 0.0, heading])))
    half = torch.tensor([math.cos(heading / 2), math.sin(heading / 2)], dtype=F64)
    w, x, y, z = state.attitude.unbind()
    q = torch.stack((half[0] * w - half[1] * z, half[0] * x - half[1] * y, half[0] * y + half[1] * x, half[0] * z + half[1] * w))
    new, outcome = env.step(state, action, env.default_params)
    other, same = env.step(state._replace(position=about_z @ state.position, velocity=about_z @ state.velocity, attitude=q), action, env.default_params)
    torch.testing.assert_close(other.position, about_z @ new.position)
    torch.testing.assert_close(other.velocity, about_z @ new.velocity)
    torch.testing.assert_close(same.reward, outcome.reward)


def test_commands_arrive_late():
    env = quadrotor(action_delay=2, dtype=F64)
    state, p = env.reset(rng.key(0), env.default_params), env.default_params

    def heights(first):
        s, out = state, []
        for t in range(4):
            s, _ = env.step(s, first if t == 0 else state.commands[0], p)
            out.append(s.position[2])
        return torch.stack(out)

    slope = jacrev(heights)(state.commands[0])[:, 0]
    assert not slope[:2].any()
    assert (slope[2:].abs() > 1e-6).all()


def test_gradient_with_a_delay_is_the_derivative():
    env = quadrotor(action_delay=2, dtype=F64)
    actions = rng.uniform(rng.key(1), (6, 4), low=-0.8, high=0.8, dtype=F64)

    def total(actions):
        s, out = any_state(5, 2), []
        for a in actions:
            s, outcome = env.step(s, a, env.default_params)
            out.append(outcome.reward)
        return torch.stack(out).sum()

    h, slope = 1e-5, grad(total)(actions)
    for t, i in ((0, 0), (1, 2), (3, 1), (5, 3)):
        shift = torch.zeros_like(actions)
        shift[t, i] = h
        central = (total(actions + shift) - total(actions - shift)) / (2 * h)
        assert slope[t, i].item() == pytest.approx(central.item(), rel=1e-6, abs=1e-9)


def test_reward_has_a_slope_far_away_and_none_at_rest():
    env = quadrotor(action_delay=0, dtype=F64)
    p = env.default_params
    hover = env.reset(rng.key(0), p).commands

    def reward(position):
        state = QuadrotorState(
            position=position,
            attitude=torch.tensor([1.0, 0, 0, 0], dtype=F64),
            velocity=torch.zeros(3, dtype=F64),
            rates=torch.zeros(3, dtype=F64),
            commands=hover,
        )
        return env.step(state, hover[0], p)[1].reward

    far = grad(reward)(torch.tensor([100.0, 0.0, 0.0], dtype=F64))
    assert far[0].item() == pytest.approx(-1.0, rel=1e-3)
    assert grad(reward)(torch.zeros(3, dtype=F64)).abs().max() < 1e-15


def test_reset_distribution():
    env = quadrotor(initial_tilt=0.4, initial_yaw=1.0, initial_speed=0.3, initial_rate=0.6)
    s = vmap(env.reset, in_dims=(0, None))(rng.split(rng.key(0), 20000), env.default_params)
    for x, half in ((s.position[:, :2], 2.0), (s.position[:, 2], 1.0), (s.velocity, 0.3), (s.rates, 0.6)):
        assert x.abs().max() <= half * (1 + tolerance(torch.float32, 2))
        assert x.var().item() == pytest.approx(half**2 / 3, rel=0.03)
    w, x, y, z = s.attitude.unbind(-1)
    up = 1 - 2 * (x**2 + y**2)
    assert torch.rad2deg(torch.arccos(up)).max() <= math.degrees(0.4 * math.sqrt(2)) + 0.1
    heading = torch.atan2(2 * (x * y + w * z), 1 - 2 * (y**2 + z**2))
    assert heading.var().item() == pytest.approx(1 / 3, rel=0.05)
    torch.testing.assert_close(s.commands, env.reset(rng.key(1), env.default_params).commands.expand(20000, 1, 4))
    assert s.commands[0, 0].tolist() == pytest.approx([2 * 0.75 * 9.81 / 14.0 - 1, 0, 0, 0], abs=1e-6)


def test_buffers_are_of_the_delay():
    for delay, kept in ((0, 1), (1, 1), (2, 2), (5, 5)):
        env = quadrotor(action_delay=delay)
        state = env.reset(rng.key(0), env.default_params)
        assert state.commands.shape == (kept, 4)
        assert env.observe(state, env.default_params).shape == env.observation_space.shape == (18 + 4 * kept,)
        new, _ = env.step(state, torch.full((4,), 0.3), env.default_params)
        tree.check_same(new, state, "state")


def test_scene_is_where_the_quadrotor_is():
    env = quadrotor()
    state = env.reset(rng.key(2), env.default_params)
    scene = env.scene(state, env.default_params)
    centre = (float(state.position[0]), float(state.position[2]))
    assert [shape.points[0] for shape in scene.shapes if hasattr(shape, "points")] == [centre] * 5
    assert f"{state.position.norm():.2f} m" in scene.caption


POSITIVE = ("mass", "max_thrust", "max_rate", "max_yaw_rate", "rate_lag", "dt", "sharpness", "success_distance")
RANGES = ("gravity", "initial_position", "initial_height", "initial_yaw", "initial_tilt", "initial_speed", "initial_rate")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("action_delay", v) for v in (-1, True, 1.5)],
        *[(n, v) for n in POSITIVE for v in (0.0, math.nan, True)],
        *[(n, v) for n in RANGES for v in (-1.0, math.inf, "1")],
        ("dtype", torch.float16),
    ],
)
def test_arguments_are_checked(name, value):
    with pytest.raises(ValueError, match=name):
        quadrotor(**{name: value})


def test_action_of_a_wrong_shape_is_refused():
    env = quadrotor()
    with pytest.raises(ValueError, match=r"shape \(4,\), got \(1,\)"):
        env.step(env.reset(rng.key(0), env.default_params), torch.zeros(1), env.default_params)
