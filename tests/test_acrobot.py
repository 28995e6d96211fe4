"""Acrobot: gymnasium's Acrobot-v1, a numpy loop from the Lagrangian and conservation of energy are the oracles."""

from __future__ import annotations

import math

import gymnasium
import numpy as np
import pytest
import torch
from torch.func import grad, vmap

from frl import rng
from frl.envs.acrobot import AcrobotState, acrobot
from tests.tolerances import tolerance

F64 = torch.float64
LINKS = {
    "gravity": 9.0,
    "mass_1": 1.2,
    "mass_2": 0.7,
    "length_1": 0.9,
    "length_2": 1.3,
    "center_1": 0.4,
    "center_2": 0.7,
    "inertia_1": 0.3,
    "inertia_2": 0.2,
    "max_torque": 3.0,
    "dt": 0.04,
}


def state_of(*numbers, held=0.0, dtype=F64):
    return AcrobotState(*(torch.tensor(x, dtype=dtype) for x in (*numbers, held)))


@pytest.mark.parametrize("choice", [0, 1, 2])
def test_steps_equal_gymnasium(choice):
    gym_env = gymnasium.make("Acrobot-v1").unwrapped
    gym_env.reset(seed=0)
    env = acrobot(max_torque=1.0, dt=0.2, dtype=F64)
    state, action = state_of(0.3, -0.2, 0.1, 0.4), torch.tensor([choice - 1.0], dtype=F64)
    for _ in range(15):
        before = np.array([x.item() for x in state[:4]])
        gym_env.state = before
        gym_env.step(choice)
        state, _ = env.step(state, action, env.default_params)
        got = np.array([x.item() for x in state[:4]])
        np.testing.assert_allclose(np.remainder(got[:2] - gym_env.state[:2] + math.pi, 2 * math.pi), math.pi, atol=1e-9)
        np.testing.assert_allclose(got[2:], gym_env.state[2:], atol=1e-9)
        np.testing.assert_allclose(env.observe(state, env.default_params), gym_env._get_ob(), atol=1e-6)
    gym_env.close()


def numpy_slope(y, torque, p):
    """``M(q) q'' = f`` from the Lagrangian with absolute angles ``a = q_1``, ``b = q_1 + q_2``; the elbow's torque acts on both."""
    q, w = y[:2], y[2:]
    a, b, u, v = q[0], q[0] + q[1], w[0], w[0] + w[1]
    coupling = p["mass_2"] * p["length_1"] * p["center_2"]
    mass = np.array(
        [
            [p["mass_1"] * p["center_1"] ** 2 + p["inertia_1"] + p["mass_2"] * p["length_1"] ** 2, coupling * np.cos(a - b)],
            [coupling * np.cos(a - b), p["mass_2"] * p["center_2"] ** 2 + p["inertia_2"]],
        ]
    )
    force = np.array(
        [
            -torque - coupling * v**2 * np.sin(a - b) - (p["mass_1"] * p["center_1"] + p["mass_2"] * p["length_1"]) * p["gravity"] * np.sin(a),
            torque + coupling * u**2 * np.sin(a - b) - p["mass_2"] * p["center_2"] * p["gravity"] * np.sin(b),
        ]
    )
    acceleration = np.linalg.solve(mass, force)
    return np.array([w[0], w[1], acceleration[0], acceleration[1] - acceleration[0]])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_steps_equal_a_numpy_loop(seed):
    env, generator = acrobot(success_height=0.3, dtype=F64, **LINKS), np.random.default_rng(seed)
    y, h = generator.uniform(-3, 3, 4), LINKS["dt"]
    state = state_of(*y)
    for _ in range(50):
        a = generator.uniform(-1.5, 1.5)
        state, outcome = env.step(state, torch.tensor([a], dtype=F64), env.default_params)
        a = np.clip(a, -1, 1)
        slope = lambda y: numpy_slope(y, 3.0 * a, LINKS)  # noqa: B023
        k_1 = slope(y)
        k_2 = slope(y + h / 2 * k_1)
        k_3 = slope(y + h / 2 * k_2)
        k_4 = slope(y + h * k_3)
        y = y + h / 6 * (k_1 + 2 * k_2 + 2 * k_3 + k_4)
        np.testing.assert_allclose(torch.stack(state[:4]), y, rtol=1e-8, atol=1e-8)
        up = [math.remainder(angle - math.pi, 2 * math.pi) for angle in (y[0], y[0] + y[1])]
        assert outcome.reward.item() == pytest.approx(-(up[0] ** 2 + up[1] ** 2 + 0.01 * (y[2] ** 2 + y[3] ** 2) + 0.01 * a**2), rel=1e-8)
        height = (-0.9 * np.cos(y[0]) - 1.3 * np.cos(y[0] + y[1])) / 2.2
        assert outcome.metrics["final_height"].item() == pytest.approx(height, abs=1e-8)
        assert not outcome.terminated


def energy(s, p):
    a, b = s.angle_1, s.angle_1 + s.angle_2
    u, v = s.speed_1, s.speed_1 + s.speed_2
    first = (p.mass_1 * p.center_1.square() + p.inertia_1) * u.square() / 2 - p.mass_1 * p.gravity * p.center_1 * torch.cos(a)
    x = p.length_1 * u * torch.cos(a) + p.center_2 * v * torch.cos(b)
    y = p.length_1 * u * torch.sin(a) + p.center_2 * v * torch.sin(b)
    second = p.mass_2 * (x.square() + y.square()) / 2 + p.inertia_2 * v.square() / 2
    return first + second - p.mass_2 * p.gravity * (p.length_1 * torch.cos(a) + p.center_2 * torch.cos(b))


def test_energy_is_conserved_to_the_order_of_the_method():
    errors = []
    for dt in (0.04, 0.02, 0.01):
        env = acrobot(dtype=F64, **{**LINKS, "dt": dt})
        p, state = env.default_params, state_of(1.5, -0.7, 0.3, 0.8)
        start, worst = energy(state, p), 0.0
        for _ in range(round(2.0 / dt)):
            state, _ = env.step(state, torch.zeros(1, dtype=F64), p)
            worst = max(worst, (energy(state, p) - start).abs().item())
        errors.append(worst)
    assert errors[0] < 1e-2
    # Energy errors of a fourth-order method fall by 2^4 to 2^5 when the step is halved.
    for big, small in zip(errors, errors[1:], strict=False):
        assert 12 < big / small < 40


def test_angular_momentum_is_conserved_without_gravity():
    env = acrobot(dtype=F64, **{**LINKS, "gravity": 0.0, "dt": 0.01})
    p = env.default_params

    def momentum(s):  # about the base
        a, b = s.angle_1, s.angle_1 + s.angle_2
        u, v = s.speed_1, s.speed_1 + s.speed_2
        elbow = p.length_1.square() * u + p.length_1 * p.center_2 * (u + v) * torch.cos(a - b) + p.center_2.square() * v
        return (p.mass_1 * p.center_1.square() + p.inertia_1) * u + p.mass_2 * elbow + p.inertia_2 * v

    state = state_of(0.4, 1.0, -1.0, 2.0)
    start = momentum(state)
    for t in range(100):  # whatever the elbow does
        state, _ = env.step(state, torch.tensor([math.sin(0.2 * t)], dtype=F64), p)
    assert momentum(state).item() == pytest.approx(start.item(), abs=1e-6)


def test_reset_distribution():
    env = acrobot(initial_angle=0.5, initial_speed=0.2)
    s = vmap(env.reset, in_dims=(0, None))(rng.split(rng.key(0), 20000), env.default_params)
    for x, half in ((s.angle_1, 0.5), (s.angle_2, 0.5), (s.speed_1, 0.2), (s.speed_2, 0.2)):
        assert x.abs().max() <= half * (1 + tolerance(torch.float32))
        assert x.var().item() == pytest.approx(half**2 / 3, rel=0.03)
    assert not s.held.any()


def test_success_means_up_for_a_second():
    env = acrobot(gravity=0.0)
    up = state_of(math.pi, 2 * math.pi, 0.0, 0.0, dtype=torch.float32)

    def play(state, steps):
        for _ in range(steps):
            state, outcome = env.step(state, torch.zeros(1), env.default_params)
        return state, outcome

    state, outcome = play(up, 19)
    assert not outcome.metrics["success"]
    state, outcome = play(state, 1)
    assert outcome.metrics["success"]
    assert outcome.metrics["final_height"].item() == pytest.approx(1.0)
    bent, outcome = play(state._replace(angle_2=torch.tensor(1.0)), 1)
    assert not outcome.metrics["success"]
    assert not bent.held


def test_saturated_torque_passes_no_gradient():
    env = acrobot(dtype=F64)

    def reward(action):
        return env.step(state_of(1.0, 0.5, 0.1, 0.2), action, env.default_params)[1].reward

    assert grad(reward)(torch.tensor([-1.0], dtype=F64)).abs() > 1e-4
    assert not grad(reward)(torch.tensor([-1.1], dtype=F64)).any()


def test_scene_shows_both_links():
    env = acrobot()
    scene = env.scene(state_of(math.pi / 2, math.pi / 2, 0.0, 0.0, held=10.0), env.default_params)
    np.testing.assert_allclose(scene.shapes[2].points, [(1.0, 0.0), (1.0, 1.0)], atol=1e-6)
    assert "0.5 s" in scene.caption


POSITIVE = ("mass_1", "mass_2", "length_1", "length_2", "center_1", "center_2", "inertia_1", "inertia_2", "max_torque", "dt", "success_time")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(n, v) for n in POSITIVE for v in (0.0, math.nan, True)],
        *[(n, v) for n in ("gravity", "initial_angle", "initial_speed") for v in (-1.0, math.inf, "1")],
        ("success_height", 1.0),
        ("dtype", torch.float16),
    ],
)
def test_arguments_are_checked(name, value):
    with pytest.raises(ValueError, match=name):
        acrobot(**{name: value})


def test_action_of_a_wrong_shape_is_refused():
    env = acrobot()
    with pytest.raises(ValueError, match=r"shape \(1,\), got \(\)"):
        env.step(env.reset(rng.key(0), env.default_params), torch.zeros(()), env.default_params)
