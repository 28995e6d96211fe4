"""Environments from MuJoCo models: built in a few lines, compiled, differentiated, checked, and robust to simulations that diverge."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import numpy as np
import pytest
import torch

import frl
from frl import compile as compiler
from frl import rng, tree
from frl.cli import main
from frl.envs.check import check_env
from frl.envs.mujoco import MujocoState, Simulator, load_model, mujoco_env, pixels
from frl.envs.mujoco.model import gymnasium_model
from frl.envs.mujoco.scene import image, outlines
from frl.envs.mujoco.tasks import half_cheetah, hopper, inverted_pendulum, reacher
from frl.envs.registry import build_learning_env, get_learning_env_factory
from frl.envs.scene import Line, Picture, Polygon
from frl.types import Outcome, Rollout

pytest.importorskip("mujoco")

F64 = torch.float64

BALL = """
<mujoco>
  <option timestep="0.005" integrator="implicitfast"/>
  <worldbody>
    <geom type="plane" size="5 5 .1"/>
    <body name="ball" pos="0 0 1"><freejoint/><geom size=".1" mass="1"/><site name="mark" pos=".1 0 0"/></body>
  </worldbody>
  <actuator><motor site="mark" gear="1 0 0 0 0 0"/><motor site="mark" gear="0 0 1 0 0 0"/></actuator>
  <keyframe><key name="low" qpos="0 0 .2 1 0 0 0" qvel="1 0 0 0 0 0"/></keyframe>
</mujoco>
"""
# Pushed harder than 1e10 N it is gone.
RAIL = """
<mujoco>
  <worldbody><body><joint name="rail" type="slide" axis="1 0 0"/><geom size=".1" mass="1"/></body></worldbody>
  <actuator><motor joint="rail" gear="1e10"/></actuator>
</mujoco>
"""


def near(before: MujocoState, action: torch.Tensor, after: MujocoState, env_params: Any) -> Outcome:
    reward = -after.qpos[:3].square().sum() - env_params["effort"] * action.square().sum()
    return Outcome(reward=reward, terminated=after.qpos[2].detach() < 0.05, metrics={"height": after.qpos[2].detach()})


def ball(**options: Any) -> frl.Env:
    return mujoco_env("ball", BALL, near, params={"effort": 0.1}, **{"frame_skip": 4, "dtype": F64, **options})


def rail(**options: Any) -> frl.Env:
    def outcome(before: MujocoState, action: torch.Tensor, after: MujocoState, env_params: Any) -> Outcome:
        return Outcome(reward=-(after.qpos[0] - 1e6).square() * 1e-12, terminated=torch.zeros((), dtype=torch.bool), metrics={})

    return mujoco_env("rail", RAIL, outcome, **{"frame_skip": 2, "max_episode_steps": 20, **options})


# ---- a model of one's own ----


def test_an_env_of_ones_own_model():
    env = ball()
    assert env.spec.dt == pytest.approx(0.02)
    assert env.observation_space.shape == (13,)
    assert env.action_space.shape == (2,)
    assert not np.isfinite(env.action_space.high).any()
    assert set(env.default_params) == {"effort", "reset_noise_scale"}
    state = env.reset(rng.key(0), env.default_params)
    assert float(torch.linalg.vector_norm(state.qpos[3:])) == pytest.approx(1.0, abs=1e-15)
    assert state.act == state.readings == ()
    report = check_env(env, num_envs=8, num_steps=4)
    assert report.passed, report.text()
    keyed = ball(keyframe="low", reset_noise_scale=0.0)
    state = keyed.reset(rng.key(0), keyed.default_params)
    assert state.qpos.tolist() == [0, 0, 0.2, 1, 0, 0, 0]
    assert state.qvel.tolist() == [1, 0, 0, 0, 0, 0]


def test_readings_are_part_of_the_state():
    env = ball(read=lambda model, data: data.site("mark").xpos.copy())
    state = env.reset(rng.key(1), env.default_params)
    assert env.observation_space.shape == (16,)
    for _ in range(2):
        w, x, y, z = state.qpos[3:].tolist()
        turned = torch.tensor([1 - 2 * (y * y + z * z), 2 * (x * y + w * z), 2 * (x * z - w * y)], dtype=F64)  # the first axis
        torch.testing.assert_close(state.readings, state.qpos[:3] + 0.1 * turned, rtol=1e-12, atol=1e-12)
        state, _ = env.step(state, torch.tensor([1.0, 3.0], dtype=F64), env.default_params)


def test_what_cannot_be_an_env_is_refused():
    with pytest.raises(ValueError, match="no actuators"):
        mujoco_env("still", "<mujoco><worldbody><body><freejoint/><geom size='.1'/></body></worldbody></mujoco>", near)
    with pytest.raises(ValueError, match="there is no MuJoCo model file 'nowhere.xml'"):
        mujoco_env("nowhere", "nowhere.xml", near)
    with pytest.raises(ValueError, match=r"no keyframe 'high' \(known: low\)"):
        ball(keyframe="high")
    with pytest.raises(ValueError, match="no keyframe 3"):
        ball(keyframe=3)
    with pytest.raises(ValueError, match="view"):
        ball(view="yz")
    with pytest.raises(ValueError, match="reset_noise_scale"):
        ball(reset_noise_scale=-1.0)
    env = ball()
    state = env.reset(rng.key(0), env.default_params)
    with pytest.raises(ValueError, match=r"action of one row must have shape \(2,\), got \(3,\)"):
        env.step(state, torch.zeros(3), env.default_params)


# ---- names ----


def test_tasks_are_found_by_name_in_any_case():
    assert build_learning_env("mujoco:hopper-V5", num_envs=2).env.spec.name == "mujoco:Hopper-v5"
    with pytest.raises(ValueError, match=r"unknown environment 'mujoco:Hoper-v5'; did you mean 'mujoco:Hopper-v5'\?"):
        get_learning_env_factory("mujoco:Hoper-v5")
    with pytest.raises(TypeError, match="did you mean 'healthy_reward'"):
        build_learning_env("mujoco:Hopper-v5", healthy_rewards=1.0)
    for key, value in (
        ("healthy_z_range", [1.0, 0.0]),
        ("healthy_z_range", 3),
        ("healthy_reward", math.nan),
        ("smooth", 1),
        ("smooth_weight", -1.0),
        ("threads", 0),
    ):
        with pytest.raises(ValueError, match=key):
            build_learning_env("mujoco:Hopper-v5", **{key: value})


def test_tasks_are_listed(capsys: pytest.CaptureFixture[str]):
    assert main(["list"]) == 0
    assert "mujoco:Hopper-v5" in capsys.readouterr().out


def test_without_the_extra_one_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "mujoco" else found(name, *rest))
    message = "needs MuJoCo, which is not installed; install it with: pip install 'frl\\[mujoco\\]'$"
    with pytest.raises(ModuleNotFoundError, match=f"^environment 'mujoco:Hopper-v5' {message}"):
        build_learning_env("mujoco:Hopper-v5")
    with pytest.raises(ModuleNotFoundError, match=message):
        ball()


# ---- compiled and differentiated ----


def rolled(env: frl.Env, rows: int, steps: int, mode: str, **options: Any) -> tuple[Any, Any, Rollout]:
    vec = frl.make_vec_env(env, rows)
    observations, actions = env.observation_space.shape[0], env.action_space.shape[0]
    network = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "activation": "tanh"}}
    policy = frl.actor_only(observations, actions, network=network, initial_log_std=-1.0)
    params = policy.init(rng.key(0), dtype=F64)
    start = vec.reset(vec.row_keys(rng.key(1)), vec.default_params)
    noise = policy.noise(rng.key(2), steps, rows, dtype=F64)
    unroll = frl.make_unroll(vec, policy, mode=mode, horizon=steps, **options)
    return unroll, params, Rollout(env_state=start, env_params=vec.default_params, noise=noise, objective_scale=torch.ones((), dtype=F64))


def marked(dtype: torch.dtype) -> frl.Env:
    """Quaternions and readings in one."""
    return ball(read=lambda model, data: data.site("mark").xpos.copy(), dtype=dtype)


@pytest.mark.parametrize("build", [marked, pytest.param(hopper, marks=pytest.mark.slow), pytest.param(reacher, marks=pytest.mark.slow)])
def test_the_compiled_loop_calls_the_simulator_once_for_a_step_of_all_rows(build: Any, monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[str, int]] = []
    step, pull_back = Simulator.step, Simulator.pull_back
    monkeypatch.setattr(Simulator, "step", lambda self, state, *rest: calls.append(("step", len(state))) or step(self, state, *rest))
    monkeypatch.setattr(Simulator, "pull_back", lambda self, state, *rest: calls.append(("pull_back", len(state))) or pull_back(self, state, *rest))
    env, rows, steps = build(dtype=F64), 3, 4
    gradients = {}

    def in_the_loop() -> list[tuple[str, int]]:
        return [call for call in calls if call[1] == rows]  # readings of fresh states are drawn for all steps in one call

    for mode in ("eager", "aot_eager"):
        unroll, params, rollout = rolled(env, rows, steps, mode)
        frl.apg_gradient(unroll, params, (), rollout)
        graphs = compiler.graph_count()
        calls.clear()
        gradients[mode], aux = frl.apg_gradient(unroll, params, (), rollout)
        assert in_the_loop() == [("step", rows)] * steps + [("pull_back", rows)] * steps
        assert compiler.graph_count() == graphs
        unroll(params, (), rollout.env_state, rollout.env_params, rollout.noise)
        calls.clear()
        unroll(params, (), rollout.env_state, rollout.env_params, rollout.noise)
        assert in_the_loop() == [("step", rows)] * steps
    # A difference in the last digit of a state comes out divided by the step of the difference quotients.
    for a, b in zip(tree.leaves(gradients["eager"]), tree.leaves(gradients["aot_eager"]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    # And it is the derivative of the loss.
    unroll, params, rollout = rolled(env, rows, steps, "eager")
    leaves, structure = tree.flatten(params)
    direction = [torch.randn(x.shape, dtype=F64, generator=torch.Generator().manual_seed(i)) for i, x in enumerate(leaves)]

    def loss(size: float) -> float:
        moved = tree.unflatten(structure, [x + size * d for x, d in zip(leaves, direction, strict=True)])
        return float(frl.apg_gradient(unroll, moved, (), rollout)[1]["loss"])

    slope = sum(float((g * d).sum()) for g, d in zip(tree.leaves(gradients["aot_eager"]), direction, strict=True))
    assert slope == pytest.approx((loss(1e-5) - loss(-1e-5)) / 2e-5, rel=1e-5)


@pytest.mark.parametrize(("build", "steps"), [(hopper, 8), (half_cheetah, 3)])
def test_the_check_command_finds_the_gradient_right_through_contacts(build: Any, steps: int):
    report = check_env(build(), num_envs=24, num_steps=steps)
    assert report.passed, report.text()
    assert report.compared_rows >= 22


def test_a_wrong_gradient_does_not_pass_as_a_kink(monkeypatch: pytest.MonkeyPatch):
    right = Simulator._difference
    monkeypatch.setattr(Simulator, "_difference", lambda self, *rest: tuple(1.001 * x for x in right(self, *rest)))
    report = check_env(hopper(), num_envs=12, num_steps=4)
    assert not report.passed
    assert any("gradient is wrong" in problem for problem in report.problems)


# ---- smooth ----


@pytest.mark.parametrize("build", [inverted_pendulum, hopper])
def test_smooth_lends_a_gradient_and_leaves_returns_alone(build: Any):
    hard, soft = build(dtype=F64), build(dtype=F64, smooth=True)
    keys = rng.split(rng.key(0), 8)
    params = hard.default_params
    states = torch.func.vmap(hard.reset, in_dims=(0, None))(keys, params)
    # Some fall in the step.
    leaning = torch.eye(states.qpos.shape[1], dtype=F64)[2 if build is hopper else 1]
    states = states._replace(qpos=states.qpos + torch.linspace(0.0, 0.21, 8, dtype=F64)[:, None] * leaning)
    actions = torch.full((8, hard.action_space.shape[0]), 0.3, dtype=F64)

    def outcome(env: frl.Env, actions: torch.Tensor) -> Outcome:
        return torch.func.vmap(env.step, in_dims=(0, 0, None))(states, actions, params)[1]

    outcomes = [outcome(env, actions) for env in (hard, soft)]
    assert 0 < int(outcomes[0].terminated.sum()) < 8
    for a, b in zip(tree.leaves(outcomes[0]), tree.leaves(outcomes[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    slopes = [torch.func.grad(lambda actions, env=env: outcome(env, actions).reward.sum())(actions) for env in (hard, soft)]
    assert bool((slopes[0] != slopes[1]).any(1)[-4:].all())
    if build is inverted_pendulum:
        assert not hard.spec.differentiable
        assert soft.spec.differentiable
        assert bool((slopes[0] == 0).all())
        # Pushing the cart towards the side on which the pole leans lifts the pole.
        assert bool((slopes[1][-2:] > 0).all())


def test_hoppers_lent_gradient_has_a_weight():
    params = hopper(dtype=F64).default_params
    states = torch.func.vmap(hopper(dtype=F64).reset, in_dims=(0, None))(rng.split(rng.key(0), 4), params)
    states = states._replace(qpos=states.qpos + torch.tensor([0.0, -0.3, 0.1, 0.0, 0.0, 0.0], dtype=F64))

    def slope(weight: float, **options: Any) -> torch.Tensor:
        env = hopper(dtype=F64, smooth_weight=weight, **options)
        step = torch.func.vmap(env.step, in_dims=(0, 0, None))
        return torch.func.grad(lambda actions: step(states, actions, env.default_params)[1].reward.sum())(torch.full((4, 3), 0.3, dtype=F64))

    hard, none, one, two = slope(1.0), slope(0.0, smooth=True), slope(1.0, smooth=True), slope(2.0, smooth=True)
    torch.testing.assert_close(none, hard, rtol=1e-12, atol=1e-12)
    assert bool((one != hard).all())
    torch.testing.assert_close(two - hard, 2 * (one - hard), rtol=1e-9, atol=1e-12)


# ---- simulations that diverge ----


def test_a_diverged_row_is_reset_and_counted_and_spoils_nothing():
    vec = frl.make_vec_env(rail(), 3)
    state = vec.reset(vec.row_keys(rng.key(0)), vec.default_params)
    state, step = vec.step(state, torch.tensor([[0.1], [50.0], [0.1]]), vec.default_params)
    assert step.metrics["nonfinite"].tolist() == step.terminated.tolist() == [False, True, False]
    assert bool(torch.isfinite(step.final_obs).all())
    assert bool(torch.isfinite(step.obs).all())
    assert bool(torch.isfinite(step.reward).all())
    assert state.elapsed.tolist() == [1, 0, 1]
    assert state.env.fault.tolist() == [0, 0, 0]

    def total(action: torch.Tensor) -> torch.Tensor:
        start = vec.reset(vec.row_keys(rng.key(0)), vec.default_params)
        start, one = vec.step(start, action, vec.default_params)
        _, two = vec.step(start, action, vec.default_params)
        return (one.reward + two.reward).sum()

    gradient = torch.func.grad(total)(torch.tensor([[0.1], [50.0], [0.1]]))[:, 0]
    assert bool(torch.isfinite(gradient).all())
    assert gradient[1] == 0
    assert bool((gradient[[0, 2]] != 0).all())


def test_training_goes_on_when_simulations_diverge():
    vec = frl.make_vec_env(rail(), 8)
    network = {"type": "mlp", "network_cfg": {"hidden_sizes": [4], "activation": "tanh"}}
    policy = frl.actor_only(2, 1, network=network, initial_log_std=0.5)
    apg = frl.make_apg(vec, policy, frl.adam(), frl.ApgConfig(segment_length=8, compile_mode="eager"))
    state = apg.init(rng.key(0))
    start = state.params
    for _ in range(3):
        state, rollout = apg.collect(state)
        state = apg.update(state, rollout)
    assert int(state.counters["nonfinite_rows"]) > 0
    assert int(state.counters["skipped_updates"]) == 0
    assert any(bool((a != b).any()) for a, b in zip(tree.leaves(state.params), tree.leaves(start), strict=True))
    assert all(bool(torch.isfinite(x).all()) for x in tree.floating((state.params, state.env_state)))


# ---- pictures ----


def test_outlines_show_the_robot_above_the_ground_and_follow_it():
    model = gymnasium_model("hopper")
    qpos = model.qpos0.copy()
    scene = outlines(model, qpos, "xz")
    ground, *marks = (shape for shape in scene.shapes if isinstance(shape, Line))
    parts = [np.array(shape.points) for shape in scene.shapes if isinstance(shape, Polygon)]
    assert len(parts) == 4
    assert {y for _, y in ground.points} == {0.0}
    points = np.concatenate(parts)
    assert 0.0 < points[:, 1].min() < 0.1
    assert 1.4 < points[:, 1].max() < 1.6  # the torso's upper end: 1.25 + 0.2 + 0.05
    assert scene.xlim[0] < points[:, 0].min()
    assert points[:, 0].max() < scene.xlim[1]
    for part in parts:  # convex, counter-clockwise
        edges = np.roll(part, -1, axis=0) - part
        after = np.roll(edges, -1, axis=0)
        assert (edges[:, 0] * after[:, 1] - edges[:, 1] * after[:, 0] > 0).all()
    # Elsewhere the robot is in the same place of the picture, and the marks have moved.
    qpos[0] += 7.25
    moved = outlines(model, qpos, "xz")
    assert moved.caption == "x = 7.25 m"
    np.testing.assert_allclose(np.concatenate([shape.points for shape in moved.shapes if isinstance(shape, Polygon)]), points, atol=1e-8)
    assert {round(mark.points[0][0] % 1.0, 9) for mark in marks} == {0.0}
    assert {round(shape.points[0][0] % 1.0, 9) for shape in moved.shapes if isinstance(shape, Line)} >= {0.75}


def test_outlines_from_above_show_the_arm_and_its_target():
    scene = outlines(gymnasium_model("reacher"), np.array([math.pi / 2, 0.0, 0.1, 0.05]), "xy")
    centres = [np.array(shape.points).mean(0) for shape in scene.shapes if isinstance(shape, Polygon)]
    assert min(np.linalg.norm(c - (0.0, 0.21)) for c in centres) < 1e-3  # the fingertip
    assert min(np.linalg.norm(c - (0.1, 0.05)) for c in centres) < 1e-3  # the target
    assert scene.caption == ""


def test_outlines_know_every_kind_of_geom():
    kinds = ("sphere", "capsule", "cylinder", "box", "ellipsoid")
    for kind in kinds:
        xml = f'<mujoco><worldbody><body pos="0 0 2" euler="0 90 0"><freejoint/><geom type="{kind}" size=".1 .2 .3"/></body></worldbody></mujoco>'
        model = load_model(xml)
        (shape,) = outlines(model, model.qpos0, "xz").shapes
        assert isinstance(shape, Polygon)
        low, high = np.array(shape.points).min(0), np.array(shape.points).max(0)
        along, across = {"sphere": (0.2, 0.2), "capsule": (0.6, 0.2), "cylinder": (0.4, 0.2), "box": (0.6, 0.2), "ellipsoid": (0.6, 0.2)}[kind]
        np.testing.assert_allclose(high - low, (along, across), rtol=0.02)


def test_a_scene_is_an_image_where_mujoco_can_render_and_outlines_elsewhere(monkeypatch: pytest.MonkeyPatch):
    env = hopper()
    state = env.reset(rng.key(0), env.default_params)
    assert env.scene is not None
    monkeypatch.setattr(pixels, "_offscreen", lambda: (_ for _ in ()).throw(RuntimeError("none")))
    assert any(isinstance(shape, Polygon) for shape in env.scene(state, env.default_params).shapes)
    monkeypatch.undo()
    try:
        camera = pixels.Camera(gymnasium_model("hopper"), "xz")
    except RuntimeError as error:
        pytest.skip(str(error))
    (picture,) = image(camera, state.qpos.numpy()).shapes
    assert isinstance(picture, Picture)
    assert picture.pixels.shape == (pixels.HEIGHT, pixels.WIDTH, 3)
    assert picture.pixels.std() > 10
    assert (camera(np.array([0.0, 1.25, 1.0, -1.0, -1.0, 0.5])) != picture.pixels).any()
