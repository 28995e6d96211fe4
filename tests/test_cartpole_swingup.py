"""Cart-pole swing-up: a numpy loop over the mass matrix, gymnasium's accelerations and conservation laws are the oracles."""

from __future__ import annotations

import math

import gymnasium
import numpy as np
import pytest
import torch
from torch.func import grad, vmap

from frl import rng
from frl.envs.cartpole_swingup import CartPoleSwingUpState, cartpole_swingup
from tests.tolerances import tolerance

F64 = torch.float64


def state_of(*numbers, held=0.0, dtype=F64):
    return CartPoleSwingUpState(*(torch.tensor(x, dtype=dtype) for x in (*numbers, held)))


def numpy_step(q, v, force, p, substeps):
    """``q = (x, theta)``: ``M(q) q'' = f`` from the Lagrangian, velocities first."""
    m, half, h = p["mass_pole"], p["length"] / 2, p["dt"] / substeps
    for _ in range(substeps):
        coupling = m * half * np.cos(q[1])
        mass = np.array([[p["mass_cart"] + m, coupling], [coupling, 4 / 3 * m * half**2]])
        torque = np.array([force + m * half * v[1] ** 2 * np.sin(q[1]), m * p["gravity"] * half * np.sin(q[1])])
        v = v + h * np.linalg.solve(mass, torque)
        q = q + h * v
    return q, v


@pytest.mark.parametrize("substeps", [1, 4])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_steps_equal_a_numpy_loop(seed, substeps):
    numbers = {"gravity": 9.0, "mass_cart": 3.0, "mass_pole": 0.7, "length": 1.3, "max_force": 20.0, "dt": 0.02}
    weights = {"position_weight": 0.07, "velocity_weight": 0.03, "angular_velocity_weight": 0.2}
    env = cartpole_swingup(substeps=substeps, dtype=F64, **numbers, **weights)
    generator = np.random.default_rng(seed)
    q, v = generator.uniform(-4, 4, 2), generator.uniform(-3, 3, 2)
    state = state_of(*q, *v)
    for _ in range(60):
        a = generator.uniform(-1.5, 1.5)
        state, outcome = env.step(state, torch.tensor([a], dtype=F64), env.default_params)
        q, v = numpy_step(q, v, numbers["max_force"] * np.clip(a, -1, 1), numbers, substeps)
        np.testing.assert_allclose(torch.stack(state[:4]).numpy(), [*q, *v], rtol=1e-10, atol=1e-10)
        wrapped = math.remainder(q[1], 2 * math.pi)
        assert outcome.reward.item() == pytest.approx(-(wrapped**2 + 0.2 * v[1] ** 2 + 0.07 * q[0] ** 2 + 0.03 * v[0] ** 2), rel=1e-9)
        assert outcome.metrics["final_angle"].item() == pytest.approx(abs(wrapped), abs=1e-9)
        assert not outcome.terminated
        obs = env.observe(state, env.default_params).numpy()
        np.testing.assert_allclose(obs, [q[0], v[0], np.sin(q[1]), np.cos(q[1]), v[1]], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("push", [-1.0, 1.0])
def test_accelerations_equal_gymnasium(push):
    gym_env = gymnasium.make("CartPole-v1").unwrapped
    gym_env.reset(seed=0)
    env = cartpole_swingup(substeps=1, dt=0.02, gravity=9.8, mass_cart=1.0, mass_pole=0.1, length=1.0, max_force=10.0, dtype=F64)
    for seed in range(5):
        x, theta, v, omega = np.random.default_rng(seed).uniform(-3, 3, 4)
        gym_env.state = np.array([x, v, theta, omega])
        gym_env.steps_beyond_terminated = None
        obs = np.array(gym_env.step(int(push > 0))[0], dtype=np.float32)
        new, _ = env.step(state_of(x, theta, v, omega), torch.tensor([push], dtype=F64), env.default_params)
        assert new.velocity.item() == pytest.approx(obs[1], rel=1e-6)
        assert new.angular_velocity.item() == pytest.approx(obs[3], rel=1e-6)
    gym_env.close()


def energy(s, p):
    m, half = p.mass_pole, p.length / 2
    speed = (s.velocity + half * s.angular_velocity * torch.cos(s.angle)).square() + (half * s.angular_velocity * torch.sin(s.angle)).square()
    kinetic = p.mass_cart * s.velocity.square() / 2 + m * speed / 2 + m * half.square() / 3 * s.angular_velocity.square() / 2
    return kinetic + m * p.gravity * half * torch.cos(s.angle)


def momentum(s, p):
    return (p.mass_cart + p.mass_pole) * s.velocity + p.mass_pole * p.length / 2 * s.angular_velocity * torch.cos(s.angle)


def test_energy_and_momentum_are_conserved_to_first_order_without_force():
    errors = []
    for substeps in (8, 16, 32):
        env = cartpole_swingup(substeps=substeps, mass_cart=1.0, mass_pole=0.5, dtype=F64)
        p, state = env.default_params, state_of(0.3, 2.0, -0.4, 1.5)
        energies, momenta = [energy(state, p)], [momentum(state, p)]
        for _ in range(120):
            state, _ = env.step(state, torch.zeros(1, dtype=F64), p)
            energies.append(energy(state, p))
            momenta.append(momentum(state, p))
        errors.append([(torch.stack(series) - series[0]).abs().max().item() for series in (energies, momenta)])
    first, second, third = np.array(errors)
    assert (third < [0.02, 0.02]).all()
    np.testing.assert_allclose(first / second, 2.0, rtol=0.15)
    np.testing.assert_allclose(second / third, 2.0, rtol=0.15)


def test_work_of_the_force_is_the_gain_of_energy():
    env = cartpole_swingup(substeps=200, dtype=F64)
    p, state, work = env.default_params, state_of(0.0, 3.0, 0.0, 0.0), 0.0
    start = energy(state, p)
    for t in range(30):
        a = 0.4 * math.sin(0.3 * t)
        x = state.position
        state, _ = env.step(state, torch.tensor([a], dtype=F64), p)
        work += 1000.0 * a * (state.position - x).item()
    assert (energy(state, p) - start).item() == pytest.approx(work, rel=5e-3)


def test_mirror_image():
    env = cartpole_swingup(dtype=F64)
    action = torch.tensor([0.3], dtype=F64)
    new, outcome = env.step(state_of(0.2, 1.0, 0.5, -2.0), action, env.default_params)
    mirrored, reflected = env.step(state_of(-0.2, -1.0, -0.5, 2.0), -action, env.default_params)
    torch.testing.assert_close(torch.stack(mirrored[:4]), -torch.stack(new[:4]))
    torch.testing.assert_close(reflected.reward, outcome.reward)


def test_reset_distribution():
    env = cartpole_swingup()
    s = vmap(env.reset, in_dims=(0, None))(rng.split(rng.key(0), 20000), env.default_params)
    for x, half in ((s.position, math.pi / 2), (s.angle + math.pi, math.pi / 2), (s.velocity, 0.25), (s.angular_velocity, 0.25)):
        assert x.abs().max() <= half * (1 + tolerance(torch.float32, 8))
        assert abs(x.mean().item()) < 0.03 * half
        assert x.var().item() == pytest.approx(half**2 / 3, rel=0.03)
    assert not s.held.any()


def test_success_means_upright_and_still_for_two_seconds():
    env = cartpole_swingup()
    p, action = env.default_params, torch.zeros(1)
    upright = state_of(0.7, 2 * math.pi, 0.0, 0.0, dtype=torch.float32)
    # Balanced exactly, but for rounding: without gravity it stays.
    calm = p._replace(gravity=torch.tensor(0.0))

    def play(state, steps):
        for _ in range(steps):
            state, outcome = env.step(state, action, calm)
        return state, outcome

    state, outcome = play(upright, 119)
    assert not outcome.metrics["success"]
    assert outcome.metrics["held_time"].item() == pytest.approx(119 / 60, rel=1e-5)
    state, outcome = play(state, 1)
    assert outcome.metrics["success"]
    _, outcome = play(state._replace(velocity=torch.tensor(-2.0)), 1)
    assert outcome.metrics["success"], "still is said of the pole"
    assert outcome.metrics["final_position"].item() == pytest.approx(abs(0.7 - 2 / 60), rel=1e-4)
    for change in ({"angle": torch.tensor(0.21)}, {"angular_velocity": torch.tensor(-0.6)}):
        moved, outcome = play(state._replace(**change), 1)
        assert not outcome.metrics["success"]
        assert not moved.held
        _, outcome = play(moved._replace(angle=torch.tensor(0.0), angular_velocity=torch.tensor(0.0)), 1)
        assert not outcome.metrics["success"], "the two seconds begin anew"


def test_saturated_force_passes_no_gradient():
    env = cartpole_swingup(dtype=F64)

    def reward(action):
        return env.step(state_of(0.0, 2.0, 0.1, 0.2), action, env.default_params)[1].reward

    assert grad(reward)(torch.tensor([0.5], dtype=F64)).abs() > 1e-3
    assert grad(reward)(torch.tensor([1.0], dtype=F64)).abs() > 1e-3, "the bound itself"
    assert not grad(reward)(torch.tensor([1.1], dtype=F64)).any()


def test_scene_shows_the_pole_where_it_is():
    env = cartpole_swingup()
    scene = env.scene(state_of(0.5, math.pi / 2, 0.0, 0.0, held=60.0), env.default_params)
    pole = scene.shapes[-1]
    np.testing.assert_allclose(pole.points, [(0.5, 0.0), (1.5, 0.0)], atol=1e-9)
    assert "1.0 s" in scene.caption
    far = env.scene(state_of(20.0, 0.0, 0.0, 0.0), env.default_params)
    assert far.xlim[0] < 20.0 < far.xlim[1]


POSITIVE = ("mass_cart", "mass_pole", "length", "max_force", "dt", "success_angle", "success_speed", "success_time")

NOT_NEGATIVE = ("gravity", "position_weight", "velocity_weight", "angular_velocity_weight", "initial_position", "initial_angle", "initial_speed")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("substeps", v) for v in (0, True, 1.5)],
        *[(n, v) for n in POSITIVE for v in (0.0, math.nan, True)],
        *[(n, v) for n in NOT_NEGATIVE for v in (-1.0, math.inf, "1")],
        ("dtype", torch.float16),
    ],
)
def test_arguments_are_checked(name, value):
    with pytest.raises(ValueError, match=name):
        cartpole_swingup(**{name: value})


def test_action_of_a_wrong_shape_is_refused():
    env = cartpole_swingup()
    with pytest.raises(ValueError, match=r"shape \(1,\), got \(2,\)"):
        env.step(env.reset(rng.key(0), env.default_params), torch.zeros(2), env.default_params)
