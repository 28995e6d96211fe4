"""Pictures of episodes: what is played is what evaluation plays, what is drawn is where the environment says it is."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import frl
from frl import render, rng, tree
from frl.envs.env import Env
from frl.envs.registry import get_learning_env_factory, get_registered_learning_env_names
from frl.envs.scene import Circle, Line, Picture, Polygon, Scene
from frl.episode import Episode, play_episode
from frl.render import render_episode

BUILT_IN = [
    name for name in get_registered_learning_env_names() if get_learning_env_factory(name).__module__.startswith("frl.envs.") and not name.startswith("mujoco:")
]


def built(name: str, **cfg: Any) -> Any:
    return frl.build_learning_env(name, num_envs=1, **cfg)


def idle(env: Any) -> Any:
    """A policy that does nothing: zeros, or the first choice."""
    space = env.single_action_space
    if hasattr(space, "n"):
        return lambda obs, key: torch.full((1,), int(space.start))
    return lambda obs, key: torch.zeros(1, *space.shape)


def frames(path: Path) -> list[np.ndarray]:
    with Image.open(path) as image:
        found = []
        for i in range(getattr(image, "n_frames", 1)):
            image.seek(i)
            found.append(np.asarray(image.convert("RGB")))
        return found


# ---- playing ----


@pytest.mark.parametrize(("name", "cfg"), [("point_mass", {}), ("cartpole", {}), ("pendulum", {"max_episode_steps": 30}), ("probe_two_lengths", {})])
@pytest.mark.parametrize("seed", [0, 7])
def test_the_first_episode_of_an_evaluation(name: str, cfg: dict[str, Any], seed: int):
    env = built(name, **cfg)
    policy = frl.build_policy(
        {"name": "actor_critic", **{role: {"type": "mlp", "network_cfg": {"hidden_sizes": [4]}} for role in ("actor", "critic")}},
        env.single_observation_space,
        env.single_action_space,
    )
    params = policy.init(rng.key(1))
    episode = play_episode(env, lambda obs, key: frl.infer_policy_action(policy, params, obs), seed=seed)
    rows = frl.build_learning_env(name, num_envs=3, **cfg)
    result = frl.make_evaluator(rows, policy, compile_mode="eager")(params, num_episodes=3, seed=seed)
    (first,) = np.flatnonzero(result.rows == 0)
    assert episode.length == result.lengths[first]
    assert episode.episode_return == pytest.approx(result.returns[first], rel=1e-5)
    assert episode.ending == ("truncated" if result.truncated[first] else "terminated")
    assert len(episode.obs) == len(episode.scenes) == episode.length + 1 == len(episode.actions) + 1


def test_the_last_state_is_that_of_the_end():
    """The goal is reached in the last picture: not that of a new episode."""
    env = built("point_mass", success_threshold=0.1)
    episode = play_episode(env, lambda obs, key: (8 * (obs[:, 4:6] - obs[:, :2]) - obs[:, 2:4]).clamp(-1, 1), seed=3)
    assert episode.ending == "terminated"
    assert np.hypot(*(episode.obs[-1, 4:6] - episode.obs[-1, :2])) < 0.1 < np.hypot(*(episode.obs[-2, 4:6] - episode.obs[-2, :2]))
    assert (episode.obs[0, 4:6] == episode.obs[-1, 4:6]).all()


def test_every_step_has_another_key():
    seen: list[Tensor] = []
    env = built("pendulum", max_episode_steps=6)
    play_episode(env, lambda obs, key: (seen.append(key), torch.zeros(1, 1))[1], seed=1)
    assert len({tuple(key.tolist()) for key in seen}) == 6


def test_caps_and_endless_environments():
    env = built("pendulum", max_episode_steps=None)
    with pytest.raises(ValueError, match="no time limit"):
        play_episode(env, idle(env))
    assert (play_episode(env, idle(env), max_steps=4).length, play_episode(env, idle(env), max_steps=4).ending) == (4, "cut off")
    with pytest.raises(ValueError, match="max_steps must be a positive integer"):
        play_episode(env, idle(env), max_steps=0)
    limited = built("pendulum", max_episode_steps=3)
    assert play_episode(limited, idle(limited), max_steps=3).ending == "truncated"


def test_a_state_that_is_not_finite_ends_an_episode():
    inner = get_learning_env_factory("double_integrator")()

    def step(state: Any, action: Tensor, params: Any) -> Any:
        state, outcome = inner.step(state, action, params)
        return state._replace(velocity=state.velocity / 0), outcome

    env = frl.make_vec_env(dataclasses.replace(inner, step=step), 1)
    episode = play_episode(env, idle(env))
    assert (episode.length, episode.ending) == (1, "terminated")


@pytest.mark.parametrize("name", ["gymnasium:CartPole-v1", "gymnasium:Pendulum-v1"])
def test_host_environments(name: str):
    with built(name) as env:
        first, again, other = (play_episode(env, idle(env), seed=seed) for seed in (2, 2, 3))
        assert first.scenes == ()
        assert math.isnan(first.dt)
        assert np.array_equal(first.obs, again.obs)
        assert not np.array_equal(first.obs, other.obs)
        if "CartPole" in name:  # the end is seen, not the reset after it
            assert first.ending == "terminated"
            assert np.abs(first.obs[-1, [0, 2]] / [2.4, 0.2095]).max() > 1 > np.abs(first.obs[:-1, [0, 2]] / [2.4, 0.2095]).max()
            assert first.episode_return == first.length
        else:
            assert (first.length, first.ending) == (200, "truncated")
    with frl.build_learning_env(name, num_envs=2) as two, pytest.raises(ValueError, match="num_envs=1"):
        play_episode(two, idle(two))


# ---- scenes ----


def scene_of(env: Env, **state: Any) -> Scene:
    start = env.reset(rng.key(0), env.default_params)
    assert env.scene is not None
    return env.scene(start._replace(**{name: torch.as_tensor(value, dtype=torch.float32) for name, value in state.items()}), env.default_params)


def circles(scene: Scene, **properties: Any) -> list[Circle]:
    return [s for s in scene.shapes if isinstance(s, Circle) and all(getattr(s, name) == value for name, value in properties.items())]


def numbers(scene: Scene) -> list[float]:
    out = [*scene.xlim, *scene.ylim]
    for shape in scene.shapes:
        out += [*shape.center, shape.radius] if isinstance(shape, Circle) else [x for point in shape.points for x in point]
    return out


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_environment_can_be_drawn(name: str, tmp_path: Path):
    env = built(name)
    limit = env.env.spec.max_episode_steps or 5
    episode = play_episode(env, idle(env), max_steps=min(5, limit))
    for scene in episode.scenes:
        assert all(isinstance(x, (int, float)) and math.isfinite(x) for x in numbers(scene))
        assert scene.xlim[0] < scene.xlim[1]
        assert scene.ylim[0] < scene.ylim[1]
    gif, png = (render_episode(episode, tmp_path / f"a{suffix}", width=100, frames=2) for suffix in (".gif", ".png"))
    assert all(len(np.unique(frame.reshape(-1, 3), axis=0)) > 1 for frame in [*frames(gif), *frames(png)])


@pytest.mark.parametrize("name", ["point_mass", "double_integrator", "pendulum", "cartpole", "probe_delayed_reward"])
def test_a_scene_changes_nothing_and_repeats(name: str):
    env = get_learning_env_factory(name)()
    assert env.scene is not None
    state = env.reset(rng.key(5), env.default_params)
    before = tree.map(torch.clone, state)
    assert env.scene(state, env.default_params) == env.scene(state, env.default_params)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(before), tree.leaves(state), strict=True))


def test_the_scene_of_point_mass():
    env = get_learning_env_factory("point_mass")(workspace_half=2.0, success_threshold=0.05)
    scene = scene_of(env, position=[0.5, -1.0], goal=[1.0, 1.5], last_action=[1.0, 0.0], obstacles=[[0.1, 0.2], [-0.5, 0.75]], radii=[0.125, 0.0625])
    assert [(c.center, c.radius) for c in circles(scene, color="silver")] == [
        (pytest.approx((0.1, 0.2)), 0.125),
        (pytest.approx((-0.5, 0.75)), 0.0625),
    ]
    assert circles(scene, color="tab:blue")[0].center == (0.5, -1.0)
    assert circles(scene, color="tab:green", filled=True)[0] == Circle(center=(1.0, 1.5), radius=pytest.approx(0.05), color="tab:green")
    (thrust,) = [s for s in scene.shapes if isinstance(s, Line) and s.color == "tab:orange"]
    assert thrust.points[0] == (0.5, -1.0)
    assert thrust.points[1][0] > 0.5
    assert thrust.points[1][1] == -1.0
    assert scene.xlim[1] > 2.0
    assert scene.caption == f"distance {math.hypot(0.5, 2.5):.2f} m"


@pytest.mark.parametrize(("angle", "tip"), [(0.0, (0.0, 2.0)), (math.pi / 2, (-2.0, 0.0)), (math.pi, (0.0, -2.0)), (-math.pi / 2, (2.0, 0.0))])
def test_the_scene_of_pendulum(angle: float, tip: tuple[float, float]):
    """Positive angles turn to the left, as in gymnasium, which rotates the rod counter-clockwise from upright."""
    scene = scene_of(get_learning_env_factory("pendulum")(length=2.0), angle=angle)
    (rod,) = [s for s in scene.shapes if isinstance(s, Line)]
    assert rod.points == [(0.0, 0.0), pytest.approx(tip, abs=1e-6)]


def test_the_scene_of_cartpole():
    env = get_learning_env_factory("cartpole")()
    upright, leaning = scene_of(env, x=1.0, theta=0.0), scene_of(env, x=1.0, theta=0.2)
    (cart,) = [s for s in upright.shapes if isinstance(s, Polygon)]
    assert sum(x for x, _ in cart.points) / 4 == pytest.approx(1.0)
    poles = [next(s for s in scene.shapes if isinstance(s, Line) and s.color == "tab:orange") for scene in (upright, leaning)]
    assert poles[0].points[1] == pytest.approx((1.0, poles[0].points[0][1] + 1.0))  # two half-lengths
    assert poles[1].points[1][0] == pytest.approx(1.0 + math.sin(0.2))  # to the right, where x grows
    assert math.dist(*poles[1].points) == pytest.approx(1.0)


def test_the_scene_of_double_integrator():
    scene = scene_of(get_learning_env_factory("double_integrator")(dimensions=2), position=[0.25, -7.0], velocity=[0.5, -0.25])
    masses = [s for s in scene.shapes if isinstance(s, Polygon)]
    assert [sum(x for x, _ in mass.points) / 4 for mass in masses] == [pytest.approx(0.25), pytest.approx(-7.0)]
    assert masses[0].points[0][1] > masses[1].points[0][1]  # the first axis is on top
    assert scene.xlim[0] < -7.0  # a mass never leaves the picture
    arrows = [s for s in scene.shapes if isinstance(s, Line) and s.color == "tab:orange"]
    assert [a.points[1][0] - a.points[0][0] for a in arrows] == [pytest.approx(0.5), pytest.approx(-0.25)]


def test_the_scene_of_a_probe():
    env = get_learning_env_factory("probe_delayed_reward")(length=4)
    assert circles(scene_of(env, number=3.0))[0].center == (0.75, 0.0)


# ---- drawing ----


def drawn(tmp_path: Path, shapes: list[Any], name: str = "a.png", width: int = 100) -> np.ndarray:
    scene = Scene(xlim=(0.0, 10.0), ylim=(0.0, 5.0), shapes=shapes)
    episode = Episode(name="x", dt=0.1, obs=np.zeros((2, 1)), actions=np.zeros((1, 1)), rewards=np.zeros(1), ending="terminated", scenes=(scene, scene))
    return frames(render_episode(episode, tmp_path / name, width=width, frames=2))[0][:, :width]


def test_shapes_are_where_they_should_be(tmp_path: Path):
    image = drawn(tmp_path, [Circle(center=(2.0, 4.0), radius=0.9, color="red"), Polygon(points=[(6, 0), (9, 0), (9, 2), (6, 2)], color="blue")])
    assert image[10, 20].tolist() == [255, 0, 0]  # 10 pixels to the metre, rows from the top
    assert image[40, 75].tolist() == [0, 0, 255]
    assert image[25, 50].tolist() == image[40, 20].tolist() == image[10, 75].tolist() == [255, 255, 255]
    assert (image[45, 60:90] == [0, 0, 255]).all(-1).sum() in (29, 30)
    ring = drawn(tmp_path, [Circle(center=(5.0, 2.5), radius=2.0, color="red", filled=False)])
    assert ring[25, 50].tolist() == [255, 255, 255]
    assert ring[25, 30].tolist() != [255, 255, 255]


def test_a_picture_is_where_it_should_be_and_not_upside_down(tmp_path: Path):
    pixels = np.zeros((2, 1, 3), dtype=np.uint8)
    pixels[0], pixels[1] = (255, 0, 0), (0, 0, 255)
    image = drawn(tmp_path, [Picture(pixels=pixels, lower_left=(2.0, 1.0), upper_right=(6.0, 5.0))])
    assert image[5, 40].tolist() == [255, 0, 0]
    assert image[35, 40].tolist() == [0, 0, 255]
    assert image[45, 40].tolist() == image[20, 15].tolist() == image[20, 65].tolist() == [255, 255, 255]


def test_later_shapes_cover_earlier_ones(tmp_path: Path):
    disc, line = Circle(center=(5.0, 2.5), radius=2.0, color="red"), Line(points=[(0.0, 2.5), (10.0, 2.5)], color="blue", width=6.0)
    assert drawn(tmp_path, [disc, line])[25, 50].tolist() == [0, 0, 255]
    assert drawn(tmp_path, [line, disc])[25, 50].tolist() == [255, 0, 0]


@pytest.mark.parametrize("width", [64, 200, 360])
def test_a_caption_fits(tmp_path: Path, width: int):
    scene = Scene(xlim=(0.0, 10.0), ylim=(0.0, 5.0), shapes=[], caption="WMWMWMWM of which +1.85 m into the picture, and farther from the target than at first")
    episode = Episode(name="x", dt=0.1, obs=np.zeros((2, 1)), actions=np.zeros((1, 1)), rewards=np.zeros(1), ending="terminated", scenes=(scene, scene))
    (image,) = frames(render_episode(episode, tmp_path / "a.png", width=width, frames=1))
    written = np.flatnonzero((image < 250).any((0, 2)))
    assert width / 2 < written[-1] < width - 1


def test_a_gif_keeps_its_colors(tmp_path: Path):
    """Thin lines in rare colors and the white of the paper, which common palettes lose."""
    blends = [Circle(center=(i, 4.0), radius=0.4, color=(0.02 * i, 0.1 * i, 1 - 0.1 * i)) for i in range(10)]  # pyright: ignore[reportArgumentType]
    image = drawn(tmp_path, [*blends, Line(points=[(0.0, 1.0), (10.0, 1.0)], color="tab:green", width=3.0)], "a.gif", width=300)
    assert image[75, 150].tolist() == [255, 255, 255]
    assert image[120, 150].tolist() == [44, 160, 44]


def episode_of(length: int, dt: float, scenes: bool = True) -> Episode:
    places = tuple(Scene(xlim=(0.0, 2.0), ylim=(0.0, 1.0), shapes=[Circle(center=(2 * t / max(1, length), 0.5), radius=0.2)]) for t in range(length + 1))
    rewards = np.arange(length, dtype=float)
    return Episode(
        name="x", dt=dt, obs=np.random.default_rng(0).normal(size=(length + 1, 3)), actions=np.ones((length, 2)), rewards=rewards, ending="truncated",
        scenes=places if scenes else (),
    )  # fmt: skip


@pytest.mark.parametrize(("length", "dt", "fps"), [(40, 0.05, 25.0), (40, 0.01, 25.0), (50, 1 / 60, 30.0), (3, 1.0, 25.0), (130, 0.04, 25.0)])
def test_a_gif_takes_the_time_of_the_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, dt: float, fps: float):
    monkeypatch.setattr(render, "_MOST_FRAMES", 60)
    path = render_episode(episode_of(length, dt), tmp_path / "a.gif", fps=fps, width=64)
    with Image.open(path) as image:
        durations = []
        for i in range(image.n_frames):
            image.seek(i)
            durations.append(image.info["duration"] / 1000)
    assert max(durations[:-1]) - min(durations[:-1]) < 1e-9
    assert durations[0] >= 1 / fps - 0.005
    assert len(durations) <= 61
    stride = math.ceil(length / (len(durations) - 1))
    assert durations[0] == pytest.approx(stride * dt, abs=0.0051)  # hundredths of a second
    assert durations[-1] >= 1.0  # the end can be seen


def test_frames_of_a_png(tmp_path: Path):
    (image,) = frames(render_episode(episode_of(10, 0.1), tmp_path / "a.png", frames=4, width=200))
    assert image.shape[1] == 400  # wide scenes in two columns
    blue = np.array([31, 119, 180])
    centres = []
    for row in (0, 1):
        for column in (0, 1):
            part = image[row * 124 : row * 124 + 100, column * 200 : column * 200 + 200]
            hit = np.argwhere((part == blue).all(-1))
            centres.append(round(float(hit[:, 1].mean())))
    assert centres[0] < 20 < centres[1] < centres[2] < 180 < centres[3]
    single = frames(render_episode(episode_of(10, 0.1), tmp_path / "b.png", frames=1, width=80))[0]
    assert single.shape[1] == 80


@pytest.mark.parametrize("dt", [0.1, math.nan])
def test_without_scenes_signals_are_plotted(tmp_path: Path, dt: float):
    episode = episode_of(9, dt, scenes=False)
    (whole,) = frames(render_episode(episode, tmp_path / "a.png"))
    moving = frames(render_episode(episode, tmp_path / "a.gif"))
    assert len(moving) > 5
    assert all(frame.shape == whole.shape for frame in moving)

    def blue(image: np.ndarray) -> int:
        return int((np.abs(image.astype(int) - [31, 119, 180]).sum(-1) < 30).sum())

    grown = [blue(frame) for frame in moving]
    assert grown[-1] > 2 * grown[0]
    assert abs(grown[-1] - blue(whole)) < 0.3 * blue(whole)


def test_what_cannot_be_drawn(tmp_path: Path):
    episode = episode_of(2, 0.1)
    for name, options, message in [
        ("a.jpg", {}, r"\.gif or \.png, got 'a\.jpg'"),
        ("a", {}, "picture ends in"),
        ("a.gif", {"fps": 0}, "fps must be above 0"),
        ("a.gif", {"fps": math.nan}, "fps"),
        ("a.png", {"frames": 0}, "frames must be at least 1"),
        ("a.png", {"width": 10}, "width must be at least 64"),
    ]:
        with pytest.raises(ValueError, match=message):
            render_episode(episode, tmp_path / name, **options)  # pyright: ignore[reportArgumentType]
    assert not list(tmp_path.iterdir())
