"""Planar reach: forward kinematics with complex numbers and the Jacobian in closed form are the oracles."""

from __future__ import annotations

import cmath
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, vmap

import frl
from frl import rng
from frl.envs.planar_reach import PlanarReachState, planar_reach
from tests.tolerances import tolerance

F64 = torch.float64
SEEDS = st.integers(0, 2**32 - 1)


def tip_of(joints, l_1, l_2):
    """``-i l exp(i q)`` hangs down at 0 and turns counter-clockwise."""
    tip = -1j * (l_1 * cmath.exp(1j * joints[0]) + l_2 * cmath.exp(1j * (joints[0] + joints[1])))
    return np.array([tip.real, tip.imag])


def state_of(joints, target, first=1.0, smallest=None):
    number = lambda x: torch.tensor(x, dtype=F64)
    return PlanarReachState(
        joints=number(joints), target=number(target), last_action=number([0.0, 0.0]), initial_distance=number(first), min_distance=number(smallest or first)
    )


def test_kinematics_by_hand():
    env = planar_reach(dtype=F64)
    tip = lambda *joints: env.observe(state_of(joints, [0.0, 0.0]), env.default_params)[2:4].tolist()
    assert tip(0.0, 0.0) == pytest.approx([0.0, -1.8])
    assert tip(math.pi / 2, 0.0) == pytest.approx([1.8, 0.0])
    assert tip(0.0, math.pi / 2) == pytest.approx([0.8, -1.0])
    assert tip(math.pi / 2, -math.pi / 2) == pytest.approx([1.0, -0.8])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_steps_equal_a_numpy_loop(seed):
    env = planar_reach(link_1=0.7, link_2=0.4, action_scale=0.3, joint_limit=1.1, success_threshold=0.2, dtype=F64)
    state, generator = env.reset(rng.key(seed), env.default_params), np.random.default_rng(seed)
    q, target = state.joints.numpy(), state.target.numpy()
    first = smallest = np.linalg.norm(tip_of(q, 0.7, 0.4) - target)
    for _ in range(40):
        action = generator.uniform(-1.5, 1.5, 2)
        state, outcome = env.step(state, torch.tensor(action), env.default_params)
        q = np.clip(q + 0.3 * action, -1.1, 1.1)
        tip = tip_of(q, 0.7, 0.4)
        distance = np.linalg.norm(tip - target)
        smallest = min(smallest, distance)
        assert outcome.reward.item() == pytest.approx(-(distance**2), rel=1e-10)
        np.testing.assert_allclose(env.observe(state, env.default_params), [*q, *tip, *target, *action], rtol=1e-10, atol=1e-10)
        got = {name: value.item() for name, value in outcome.metrics.items()}
        assert got["final_distance"] == pytest.approx(distance, rel=1e-10)
        assert got["min_distance"] == pytest.approx(smallest, rel=1e-10)
        assert got["initial_distance"] == pytest.approx(first, rel=1e-10)
        assert got["success"] == (smallest < 0.25 * first)
        assert got["reached"] == (smallest < 0.2)
        assert not outcome.terminated


@given(seed=SEEDS)
def test_gradient_is_the_jacobian(seed):
    env = planar_reach(dtype=F64)
    u = rng.uniform(rng.key(seed), (6,), low=-1.0, high=1.0, dtype=F64)
    state = state_of(u[:2].tolist(), u[2:4].tolist())
    action = u[4:]
    slope = grad(lambda a: env.step(state, a, env.default_params)[1].reward)(action)
    q = (state.joints + 0.2 * action).tolist()
    tip = tip_of(q, 1.0, 0.8)
    elbow = 0.8 * np.array([math.cos(q[0] + q[1]), math.sin(q[0] + q[1])])
    jacobian = np.stack([np.array([math.cos(q[0]), math.sin(q[0])]) + elbow, elbow], axis=1)
    np.testing.assert_allclose(slope, -2 * 0.2 * jacobian.T @ (tip - state.target.numpy()), rtol=1e-9, atol=1e-12)


def test_the_last_action_carries_its_gradient():
    env = planar_reach(dtype=F64)
    state = state_of([0.1, 0.2], [1.0, 0.0])
    slope = grad(lambda a: env.observe(env.step(state, a, env.default_params)[0], env.default_params)[6:].sum())(torch.zeros(2, dtype=F64))
    assert slope.tolist() == [1.0, 1.0]


def test_limits_stop_the_joints():
    env = planar_reach(dtype=F64)
    state = state_of([math.pi - 0.1, 0.0], [1.0, 1.0])

    def joint(a):
        return env.step(state, a, env.default_params)[0].joints[0]

    assert joint(torch.tensor([1.0, 0.0], dtype=F64)).item() == pytest.approx(math.pi)
    assert not grad(joint)(torch.tensor([1.0, 0.0], dtype=F64)).any()
    assert grad(joint)(torch.tensor([0.4, 0.0], dtype=F64)).tolist() == pytest.approx([0.2, 0.0])


def test_the_smallest_distance_counts():
    env = planar_reach(dtype=F64)
    at = lambda target, **numbers: env.step(state_of([0.0, 0.0], target, **numbers), torch.zeros(2, dtype=F64), env.default_params)[1].metrics
    near = at([0.0, -1.7])
    assert near["success"]
    assert not near["reached"]
    assert at([0.0, -1.78])["reached"]
    gone = at([0.0, 1.8], smallest=0.04)
    assert gone["success"]
    assert gone["reached"]
    assert gone["min_distance"].item() == pytest.approx(0.04)
    assert gone["final_distance"].item() == pytest.approx(3.6)
    assert not at([0.0, -1.5], first=1.0)["success"]


def test_reset_distribution():
    env = planar_reach()
    p = env.default_params
    s = vmap(env.reset, in_dims=(0, None))(rng.split(rng.key(0), 20000), p)
    assert s.joints.abs().max() <= 0.5 * (1 + tolerance(torch.float32, 2))
    assert s.joints.var().item() == pytest.approx(0.25 / 3, rel=0.03)
    # Targets are places of the tip: the law of cosines gives back joints within their range.
    elbow = torch.arccos(((s.target.square().sum(-1) - 1.0 - 0.64) / 1.6).clamp(-1, 1))
    assert elbow.max() <= 1.0 + 1e-3
    assert elbow.square().mean().item() == pytest.approx(1 / 3, rel=0.03)
    obs = vmap(env.observe, in_dims=(0, None))(s, p)
    torch.testing.assert_close(s.initial_distance, (obs[:, 2:4] - s.target).norm(dim=-1))
    assert torch.equal(s.min_distance, s.initial_distance)
    assert not s.last_action.any()


def test_a_start_at_the_target_has_finite_gradients():
    env = planar_reach(initial_joint_scale=0.0, target_joint_scale=0.0, dtype=F64)

    def total(p, a):
        state = env.reset(rng.key(0), p)
        return env.step(state, a, p)[1].reward + env.observe(state, p).sum()

    gradients = grad(total, argnums=(0, 1))(env.default_params, torch.zeros(2, dtype=F64))
    assert all(torch.isfinite(x).all() for x in (*gradients[0], gradients[1]))


def test_scene_shows_arm_and_target():
    env = planar_reach()
    scene = env.scene(state_of([math.pi / 2, 0.0], [0.3, -1.0]), env.default_params)
    np.testing.assert_allclose(scene.shapes[1].points, [(0.0, 0.0), (1.0, 0.0), (1.8, 0.0)], atol=1e-9)
    assert scene.shapes[0].center == (0.3, -1.0)
    assert "1.80 m" in scene.caption


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(n, v) for n in ("link_1", "link_2", "action_scale", "joint_limit", "success_fraction", "success_threshold") for v in (0.0, math.nan, True)],
        *[(n, v) for n in ("initial_joint_scale", "target_joint_scale") for v in (-1.0, math.inf, "1")],
        ("initial_joint_scale", 3.2),
        ("dtype", torch.float16),
    ],
)
def test_arguments_are_checked(name, value):
    with pytest.raises(ValueError, match=name):
        planar_reach(**{name: value})


def test_action_of_a_wrong_shape_is_refused():
    env = planar_reach()
    with pytest.raises(ValueError, match=r"shape \(2,\), got \(3,\)"):
        env.step(env.reset(rng.key(0), env.default_params), torch.zeros(3), env.default_params)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_training_brings_the_mean_smallest_distance_below_a_quarter(seed):
    """The acceptance test of the reference: 32 rows, 300 updates of 16 steps."""
    env = frl.build_learning_env("planar_reach", num_envs=32, action_scale=0.25)
    policy = frl.actor_only(8, 2, network=frl.mlp(8, 2, [64, 64], activation="tanh", last_activation="tanh"))
    apg = frl.make_apg(env, policy, frl.adam(), frl.ApgConfig(segment_length=16, deterministic_actions=True, max_grad_norm=10.0), learning_rate=3e-3)
    evaluate = frl.make_evaluator(frl.build_learning_env("planar_reach", num_envs=128, action_scale=0.25), policy)
    state = apg.init(rng.key(seed))
    before = evaluate(state.params, num_episodes=512, seed=10029).metrics
    for _ in range(300):
        state, rollout = apg.collect(state)
        state = apg.update(state, rollout)
    after = evaluate(state.params, num_episodes=512, seed=10029).metrics
    assert not state.counters["skipped_updates"]
    assert after["eval/metrics/min_distance"] < 0.25 * before["eval/metrics/min_distance"]
    assert after["eval/avg_reward"] > before["eval/avg_reward"]
    assert after["eval/success_rate"] > before["eval/success_rate"]
    assert after["eval/metrics/reached"] > before["eval/metrics/reached"]
