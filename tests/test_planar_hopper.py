"""Planar hopper: a numpy loop in complex numbers, momentum, energy and the laws of contact are the oracles."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, vmap

from frl import rng, tree
from frl.envs.planar_hopper import PlanarHopperState, planar_hopper
from tests.tolerances import tolerance

F64 = torch.float64
SEEDS = st.integers(0, 2**32 - 1)
NUMBERS = {
    "gravity": 9.0,
    "body_mass": 4.0,
    "body_inertia": 0.3,
    "foot_mass": 0.7,
    "leg_length": 0.6,
    "leg_stroke": 0.15,
    "leg_stiffness": 900.0,
    "leg_damping": 7.0,
    "hip_range": 0.5,
    "hip_stiffness": 50.0,
    "hip_damping": 3.0,
    "ground_stiffness": 8e3,
    "ground_softness": 0.02,
    "ground_speed": 0.8,
    "friction": 0.6,
    "slip_speed": 0.3,
    "dt": 0.03,
    "target_speed": 0.7,
}
FLIGHT = {"leg_damping": 0.0, "hip_damping": 0.0}


def state_of(body, velocity, foot, foot_velocity, elapsed=0.0):
    return PlanarHopperState(*(torch.tensor(x, dtype=F64) for x in (body, velocity, foot, foot_velocity, elapsed)))


def standing(height=0.0, **change):
    """Upright, the foot at ``height``."""
    state = state_of([0.0, height + 0.5, 0.0], [0.0, 0.0, 0.0], [0.0, height], [0.0, 0.0])
    return state._replace(**{name: torch.tensor(value, dtype=F64) for name, value in change.items()})


def in_flight(seed):
    u = rng.uniform(rng.key(seed), (10,), low=-1.0, high=1.0, dtype=F64)
    foot = torch.stack((0.2 * u[0], 5.0 + 0.1 * u[1]))
    body = torch.stack((0.1 * u[2], 5.5 + 0.05 * u[3], 0.3 * u[4]))
    return PlanarHopperState(body=body, body_velocity=u[5:8], foot=foot, foot_velocity=u[8:10], elapsed=torch.zeros((), dtype=F64))


@pytest.mark.parametrize("height", [0.02, 4.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_steps_equal_a_numpy_loop(seed, height):
    p, substeps = NUMBERS, 5
    env = planar_hopper(substeps=substeps, dtype=F64, crouch_height=0.5, fall_height=-10.0, fall_pitch=100.0, **p)
    generator, h = np.random.default_rng(seed), p["dt"] / substeps
    body, foot = complex(0.1, height + 0.55), complex(0.1 + generator.uniform(-0.2, 0.2), height)
    velocity, foot_velocity = complex(*generator.uniform(-1, 1, 2)), complex(*generator.uniform(-1, 1, 2))
    pitch, rate = generator.uniform(-0.5, 0.5, 2)
    state = state_of([body.real, body.imag, pitch], [velocity.real, velocity.imag, rate], [foot.real, foot.imag], [foot_velocity.real, foot_velocity.imag])
    loads = []
    for _ in range(25):
        action = generator.uniform(-1.5, 1.5, 2)
        state, outcome = env.step(state, torch.tensor(action), env.default_params)
        a = np.clip(action, -1, 1)
        for _ in range(substeps):
            leg, leg_rate = foot - body, foot_velocity - velocity
            along = leg / abs(leg)
            turning = leg_rate / along  # radial speed + i (tangential speed)
            angle = math.remainder(np.angle(1j * leg), 2 * math.pi)
            push = p["leg_stiffness"] * (p["leg_length"] + p["leg_stroke"] * a[0] - abs(leg)) - p["leg_damping"] * turning.real
            torque = p["hip_stiffness"] * (p["hip_range"] * a[1] - (angle - pitch)) - p["hip_damping"] * (turning.imag / abs(leg) - rate)
            force = along * complex(push, torque / abs(leg))
            depth = p["ground_softness"] * np.log1p(np.exp(-foot.imag / p["ground_softness"]))
            load = p["ground_stiffness"] * depth * (1 - np.tanh(foot_velocity.imag / p["ground_speed"]))
            loads.append(load)
            velocity -= h * (force / p["body_mass"] + 1j * p["gravity"])
            rate -= h * torque / p["body_inertia"]
            foot_velocity += h * ((force + 1j * load) / p["foot_mass"] - 1j * p["gravity"])
            slowed = foot_velocity.real / (1 + h * p["friction"] * load / p["foot_mass"] / math.hypot(foot_velocity.real, p["slip_speed"]))
            foot_velocity = complex(slowed, foot_velocity.imag)
            body, foot, pitch = body + h * velocity, foot + h * foot_velocity, pitch + h * rate
        got = np.concatenate([x.numpy().ravel() for x in state[:4]])
        expected = [body.real, body.imag, pitch, velocity.real, velocity.imag, rate, foot.real, foot.imag, foot_velocity.real, foot_velocity.imag]
        np.testing.assert_allclose(got, expected, rtol=1e-8, atol=1e-8)
        reward = 2 - (velocity.real - p["target_speed"]) ** 2 - 2 * pitch**2 - 50 * max(0.5 - body.imag, 0) ** 2 - 0.05 * a @ a
        assert outcome.reward.item() == pytest.approx(reward, rel=1e-8, abs=1e-8)
        leg, leg_rate = foot - body, (foot_velocity - velocity) / ((foot - body) / abs(foot - body))
        angle = math.remainder(np.angle(1j * leg), 2 * math.pi)
        polar = [abs(leg), angle - pitch, velocity.real, velocity.imag, rate, leg_rate.real, leg_rate.imag / abs(leg) - rate, foot.imag]
        np.testing.assert_allclose(env.observe(state, env.default_params), [body.imag, pitch, *polar], rtol=1e-7, atol=1e-7)
    assert (max(loads) > 50) == (height < 1), "one case bounces, the other flies"


@given(seed=SEEDS)
def test_momentum_in_flight(seed):
    env = planar_hopper(dtype=F64)
    p, state = env.default_params, in_flight(seed)
    actions = rng.uniform(rng.key(seed), (20, 2), low=-1.0, high=1.0, dtype=F64)

    def momenta(s):
        linear = p.body_mass * s.body_velocity[:2] + p.foot_mass * s.foot_velocity
        cross = lambda r, v: r[0] * v[1] - r[1] * v[0]
        angular = p.body_mass * cross(s.body, s.body_velocity) + p.foot_mass * cross(s.foot, s.foot_velocity) + p.body_inertia * s.body_velocity[2]
        return linear, angular

    calm = p._replace(gravity=torch.zeros((), dtype=F64))
    (linear, angular), fallen = momenta(state), state
    for action in actions:
        state, _ = env.step(state, action, calm)
        fallen, _ = env.step(fallen, action, p)
    torch.testing.assert_close(momenta(state)[0], linear, atol=1e-12, rtol=0)
    torch.testing.assert_close(momenta(state)[1], angular, atol=1e-11, rtol=0)
    weight = torch.tensor([0.0, -(5.0 + 0.5) * 9.81 * 20 * 0.02], dtype=F64)
    torch.testing.assert_close(momenta(fallen)[0], linear + weight, atol=1e-11, rtol=0)


def energy(s, p):
    leg = s.foot - s.body[:2]
    length, angle = leg.norm(), torch.atan2(leg[0], -leg[1])
    kinetic = p.body_mass * s.body_velocity[:2].square().sum() + p.foot_mass * s.foot_velocity.square().sum() + p.body_inertia * s.body_velocity[2].square()
    springs = p.leg_stiffness * (p.leg_length - length).square() + p.hip_stiffness * (angle - s.body[2]).square()
    ground = p.ground_stiffness * depth_energy(s.foot[1], p.ground_softness)
    return (kinetic + springs) / 2 + p.gravity * (p.body_mass * s.body[1] + p.foot_mass * s.foot[1]) + ground


def depth_energy(z, width):
    """Integral of the depth from ``z`` to infinity, by quadrature."""
    grid = torch.linspace(0, 40, 4001, dtype=F64)
    return width**2 * torch.trapezoid(torch.nn.functional.softplus(-(z / width + grid)), grid)


def test_energy_in_flight_is_conserved_to_first_order_without_damping():
    errors = []
    for substeps in (16, 32, 64):
        env = planar_hopper(substeps=substeps, dtype=F64, **FLIGHT)
        p, state = env.default_params, in_flight(7)
        start, worst = energy(state, p), 0.0
        for _ in range(20):
            state, _ = env.step(state, torch.zeros(2, dtype=F64), p)
            worst = max(worst, (energy(state, p) - start).abs().item())
        errors.append(worst)
    assert errors[2] < 0.2
    for big, small in zip(errors, errors[1:], strict=False):
        assert big / small == pytest.approx(2.0, rel=0.2)


def test_contact_takes_energy_and_gives_none():
    env = planar_hopper(substeps=200, dtype=F64, leg_damping=0.0)
    p, state = env.default_params, standing(0.3)
    energies, heights = [energy(state, p).item()], []
    for _ in range(100):
        state, _ = env.step(state, torch.zeros(2, dtype=F64), p)
        energies.append(energy(state, p).item())
        heights.append(state.foot[1].item())
    assert np.diff(energies).max() < 1e-3 * energies[0]
    assert energies[-1] < 0.9 * energies[0]
    assert min(heights) < 0.0 < 0.03 < max(heights[40:]), "it bounces"


def test_the_ground_carries_the_weight_at_rest():
    env = planar_hopper(dtype=F64, leg_damping=100.0)
    p, state = env.default_params, standing()
    for _ in range(500):
        state, _ = env.step(state, torch.zeros(2, dtype=F64), p)
    weight = (5.0 + 0.5) * 9.81
    load = 1e4 * 0.01 * math.log1p(math.exp(-state.foot[1].item() / 0.01))
    assert load == pytest.approx(weight, rel=1e-6)
    assert (state.body[1] - state.foot[1]).item() == pytest.approx(0.5 - 5.0 * 9.81 / 1500.0, rel=1e-6)
    assert state.body_velocity.abs().max() < 1e-9


@given(seed=SEEDS, friction=st.sampled_from([0.0, 0.5, 50.0]), height=st.sampled_from([-0.05, 0.0, 0.02]))
def test_friction_slows_within_its_cone_and_never_reverses(seed, friction, height):
    env = planar_hopper(substeps=1, friction=friction, hip_stiffness=0.0, hip_damping=0.0, leg_stiffness=0.0, leg_damping=0.0, dtype=F64)
    u, w = rng.uniform(rng.key(seed), (2,), low=-3.0, high=3.0, dtype=F64).tolist()
    new, _ = env.step(standing(height, foot_velocity=[u, w]), torch.zeros(2, dtype=F64), env.default_params)
    slowed = new.foot_velocity[0].item()
    load = 1e4 * 0.01 * math.log1p(math.exp(-height / 0.01)) * (1 - math.tanh(w))
    assert 0 <= slowed / u <= 1
    assert abs(slowed - u) <= 0.02 * friction * load / 0.5 * (1 + 1e-12)
    upward = (new.foot_velocity[1].item() - w) / 0.02 + 9.81
    assert upward * 0.5 == pytest.approx(load, rel=1e-9)
    assert load >= 0, "no adhesion"


@given(seed=SEEDS)
def test_mirror_image(seed):
    env = planar_hopper(target_speed=0.0, dtype=F64)
    state = in_flight(seed)
    low = torch.tensor([0.0, 5.0], dtype=F64)
    state = state._replace(foot=state.foot - low, body=state.body - torch.tensor([0.0, 5.0, 0.0], dtype=F64))
    flip = torch.tensor([-1.0, 1.0], dtype=F64)
    flip3 = torch.tensor([-1.0, 1.0, -1.0], dtype=F64)
    mirrored = state._replace(
        body=flip3 * state.body, body_velocity=flip3 * state.body_velocity, foot=flip * state.foot, foot_velocity=flip * state.foot_velocity
    )
    action = torch.tensor([0.4, -0.7], dtype=F64)
    for _ in range(10):
        state, outcome = env.step(state, action, env.default_params)
        mirrored, reflected = env.step(mirrored, action * flip.flip(0), env.default_params)
    torch.testing.assert_close(mirrored.body, flip3 * state.body)
    torch.testing.assert_close(mirrored.foot, flip * state.foot)
    torch.testing.assert_close(reflected.reward, outcome.reward)


def test_contact_has_a_gradient_before_and_while_it_takes_place():
    env = planar_hopper(dtype=F64)

    def velocity(height):
        state = standing()
        state = state._replace(foot=torch.stack((torch.zeros_like(height), height)))
        return env.step(state, torch.zeros(2, dtype=F64), env.default_params)[0].foot_velocity[1]

    for height in (0.05, 0.01, 0.0, -0.02):
        h = torch.tensor(height, dtype=F64)
        slope = grad(velocity)(h)
        assert slope.item() == pytest.approx(((velocity(h + 1e-6) - velocity(h - 1e-6)) / 2e-6).item(), rel=1e-5)
        assert slope.abs() > 0.1


def test_a_leg_of_no_length_has_finite_gradients():
    env = planar_hopper(dtype=F64)

    def total(body, foot):
        state = standing(0.3)._replace(body=body, foot=foot)
        new, outcome = env.step(state, torch.tensor([0.1, 0.2], dtype=F64), env.default_params)
        return outcome.reward + env.observe(state, env.default_params).sum() + env.observe(new, env.default_params).sum()

    gradients = grad(total, argnums=(0, 1))(torch.tensor([0.2, 0.3, 0.1], dtype=F64), torch.tensor([0.2, 0.3], dtype=F64))
    assert all(torch.isfinite(x).all() for x in gradients)


def test_falls_end_the_episode():
    env = planar_hopper(dtype=F64)
    step = lambda **change: env.step(standing(0.05, **change), torch.zeros(2, dtype=F64), env.default_params)[1]
    assert not step().terminated
    for change in ({"body": [0.0, 0.2, 0.0]}, {"body": [0.0, 0.6, 1.1]}, {"body": [0.0, 0.6, -1.1]}):
        outcome = step(**change)
        assert outcome.terminated
        assert outcome.metrics["fallen"]
        assert not outcome.metrics["success"]


def test_success_means_standing_and_having_come_far_enough():
    env = planar_hopper(dtype=F64)

    def play(env, x, elapsed, pitch=0.0):
        state = standing(body=[x, 1.5, pitch], foot=[x, 1.0], elapsed=elapsed)
        return env.step(state, torch.zeros(2, dtype=F64), env.default_params)[1]

    good = play(env, 3.8, 249.0).metrics
    assert good["success"]
    assert good["travelled"].item() == pytest.approx(3.8, abs=0.1)
    assert not play(env, 3.7, 249.0).metrics["success"]
    assert not play(env, 3.8, 249.0, pitch=1.2).metrics["success"]
    backwards = planar_hopper(target_speed=-1.0, dtype=F64)
    assert play(backwards, -3.8, 249.0).metrics["success"]
    assert not play(backwards, 3.8, 249.0).metrics["success"]


def test_reset_distribution():
    env = planar_hopper(initial_pitch=0.2, initial_speed=0.3)
    p = env.default_params
    s = vmap(env.reset, in_dims=(0, None))(rng.split(rng.key(0), 20000), p)
    for x, half in ((s.body[:, 2], 0.2), (s.body_velocity[:, :2], 0.3)):
        assert x.abs().max() <= half * (1 + tolerance(torch.float32))
        assert x.var().item() == pytest.approx(half**2 / 3, rel=0.03)
    assert s.foot[:, 1].min() >= 0
    assert s.foot[:, 1].max() <= 0.1
    obs = vmap(env.observe, in_dims=(0, None))(s, p)
    torch.testing.assert_close(obs[:, 2], torch.full((20000,), 0.5), atol=1e-6, rtol=0)
    assert obs[:, [3, 6, 7, 8]].abs().max() < 1e-6, "leg along the body, nothing turns"
    assert not s.elapsed.any()


def test_place_along_the_ground_does_not_matter():
    env = planar_hopper(dtype=F64)
    state = in_flight(2)
    shift = torch.tensor([7.0, 0.0, 0.0], dtype=F64)
    moved = state._replace(body=state.body + shift, foot=state.foot + shift[:2])
    torch.testing.assert_close(env.observe(moved, env.default_params), env.observe(state, env.default_params))
    new, _ = env.step(moved, torch.ones(2, dtype=F64), env.default_params)
    old, _ = env.step(state, torch.ones(2, dtype=F64), env.default_params)
    torch.testing.assert_close(new.body - shift, old.body)
    tree.check_same(new, state, "state")


def test_scene_shows_the_leg():
    env = planar_hopper()
    scene = env.scene(standing(0.2, body=[3.0, 0.9, 0.4], foot=[3.1, 0.2]), env.default_params)
    leg, foot = scene.shapes[-2:]
    np.testing.assert_allclose(leg.points, [(3.0, 0.9), (3.1, 0.2)])
    assert foot.center == (3.1, 0.2)
    assert scene.xlim[0] < 3.0 < scene.xlim[1]


POSITIVE = ("body_mass", "body_inertia", "foot_mass", "leg_length", "ground_softness", "ground_speed", "slip_speed", "dt", "fall_pitch", "success_fraction")
RANGES = ("gravity", "leg_stroke", "leg_stiffness", "leg_damping", "hip_range", "hip_stiffness", "hip_damping", "ground_stiffness", "friction")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("substeps", v) for v in (0, True, 1.5)],
        *[(n, v) for n in POSITIVE for v in (0.0, math.nan, True)],
        *[(n, v) for n in (*RANGES, "initial_height", "initial_pitch", "initial_speed") for v in (-1.0, math.inf, "1")],
        ("target_speed", math.nan),
        ("crouch_height", math.inf),
        ("fall_height", math.inf),
        ("dtype", torch.float16),
    ],
)
def test_arguments_are_checked(name, value):
    with pytest.raises(ValueError, match=name):
        planar_hopper(**{name: value})


def test_action_of_a_wrong_shape_is_refused():
    env = planar_hopper()
    with pytest.raises(ValueError, match=r"shape \(2,\), got \(1,\)"):
        env.step(env.reset(rng.key(0), env.default_params), torch.zeros(1), env.default_params)
