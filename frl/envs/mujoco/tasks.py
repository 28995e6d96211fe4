"""Gymnasium's MuJoCo tasks, version 5, as functional environments: ``mujoco:Hopper-v5`` and its kin.

Model, frame skip, observation, reward, termination and distribution of the first state are gymnasium's; given the same state and action a step gives its
numbers. Two things differ by design. The constraint solver starts cold at every step, where gymnasium's starts from the step before, which moves the last
digits of a contact. And names in gymnasium's ``info`` are metrics.

A reward that is constant almost everywhere, such as one point for every step in which the pole is up, has the gradient zero, and the end of an episode has none
at all. Where a task's reward has such a part, ``smooth=True`` leaves its value alone and lends it the gradient of a smooth function of the state, named in the
task's docstring: returns stay gymnasium's, and :func:`frl.check_env` then finds, rightly, that gradient and differences disagree.

Source: gymnasium 1.x, ``gymnasium/envs/mujoco``.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frl import rng
from frl.envs.check import require_number
from frl.envs.env import Env
from frl.envs.mujoco.engine import require_mujoco
from frl.envs.mujoco.env import MujocoState, mujoco_env
from frl.envs.mujoco.model import gymnasium_model
from frl.numerics import safe_norm
from frl.types import Outcome, PyTree

PREFIX = "mujoco:"


def _lend(value: Tensor, smooth: Tensor) -> Tensor:
    """``value`` with the gradient of ``smooth``."""
    return value.detach() + (smooth - smooth.detach())


def _centred(key: Tensor, size: int, like: Tensor) -> Tensor:
    """Uniform in [-1, 1)."""
    return 2.0 * rng.uniform(key, (size,), dtype=like.dtype) - 1.0


def _noisy(model: Any, *, normal_velocity: bool = False) -> Callable[[Tensor, PyTree], tuple[Tensor, Tensor]]:
    """The model's start with noise of ``reset_noise_scale``: uniform positions; velocities uniform or normal."""
    start, nq, nv = torch.from_numpy(model.qpos0.copy()), int(model.nq), int(model.nv)

    def reset(key: Tensor, env_params: PyTree) -> tuple[Tensor, Tensor]:
        scale = env_params["reset_noise_scale"]
        keys = rng.split(key, 2)
        velocity = rng.normal(keys[1], (nv,), dtype=scale.dtype) if normal_velocity else _centred(keys[1], nv, scale)
        return start.to(dtype=scale.dtype, device=scale.device) + scale * _centred(keys[0], nq, scale), scale * velocity

    return reset


def _numbers(**values: Any) -> dict[str, float]:
    """Weights of rewards: finite numbers."""
    return {name: require_number(name, value) for name, value in values.items()}


def _range(name: str, pair: Any) -> tuple[float, float]:
    """An open interval, possibly unbounded."""
    try:
        low, high = (float(x) for x in pair)
    except (TypeError, ValueError):
        low = high = math.nan
    if not low < high:
        raise ValueError(f"{name} must be two numbers [low, high] with low < high, got {pair!r}")
    return low, high


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return value


def inverted_pendulum(
    *,
    max_episode_steps: int | None = 1000,
    reset_noise_scale: float = 0.01,
    smooth: bool = False,
    dtype: torch.dtype = torch.float32,
    threads: int | None = None,
    centered: bool = True,
    gradient_integrator: str | None = None,
) -> Env:
    """``InvertedPendulum-v5``: keep a pole on a cart upright. A step is worth 1 while ``|angle| <= 0.2``, and 0 when it ends the episode.

    That reward has no gradient. With ``smooth`` it is lent that of ``1 - (angle / 0.2)^2 - (x / 1)^2 / 10``: upright, and away from the ends of the rail.

    Observation ``[4]``: position of the cart [m], angle of the pole [rad], and their velocities. Action: force on the cart, within +-3.

    Args:
        max_episode_steps: time limit [steps], or ``None``.
        reset_noise_scale: half-width of the uniform noise on the first state.
        smooth: lend the reward a gradient; without it the environment is not differentiable.
        dtype: of the default parameters.
        threads, centered, gradient_integrator: see :class:`~frl.envs.mujoco.simulator.Simulator`.
    """
    smooth = _switch("smooth", smooth)

    def outcome(before: MujocoState, action: Tensor, after: MujocoState, env_params: PyTree) -> Outcome:
        x, angle = after.qpos[0], after.qpos[1]
        terminated = angle.detach().abs() > env_params["max_angle"]
        reward = (~terminated).to(angle.dtype)
        if smooth:
            reward = _lend(reward, 1.0 - (angle / env_params["max_angle"]).square() - 0.1 * x.square())
        return Outcome(reward=reward, terminated=terminated, metrics={"reward_survive": reward.detach()})

    model = gymnasium_model("inverted_pendulum")
    return mujoco_env(
        f"{PREFIX}InvertedPendulum-v5",
        model,
        outcome,
        frame_skip=2,
        max_episode_steps=max_episode_steps,
        params={"max_angle": 0.2},
        reset=_noisy(model),
        reset_noise_scale=reset_noise_scale,
        differentiable=smooth,
        dtype=dtype,
        threads=threads,
        centered=centered,
        gradient_integrator=gradient_integrator,
    )


def inverted_double_pendulum(
    *,
    max_episode_steps: int | None = 1000,
    healthy_reward: float = 10.0,
    reset_noise_scale: float = 0.1,
    dtype: torch.dtype = torch.float32,
    threads: int | None = None,
    centered: bool = True,
    gradient_integrator: str | None = None,
) -> Env:
    """``InvertedDoublePendulum-v5``: keep two poles on a cart upright.

    With the tip at ``(x, y)``::

        reward = healthy_reward [y > 1] - 0.01 x^2 - (y - 2)^2 - 0.001 omega_1^2 - 0.005 omega_2^2

    and the episode ends when ``y <= 1``. The bonus is constant and has no gradient; the penalties have one. As in gymnasium, the tip and the constraint force
    are those that ``mj_step`` leaves, which lag behind the state by a fraction of a step.

    Observation ``[9]``: position of the cart, sines and then cosines of the two angles, velocities clipped to +-10, force on the cart of the rail's ends
    clipped to +-10. Action: force on the cart, within +-1.

    Args:
        max_episode_steps: time limit [steps], or ``None``.
        healthy_reward: bonus of a step.
        reset_noise_scale: half-width of the uniform noise on positions, standard deviation of the normal noise on velocities.
        dtype: of the default parameters.
        threads, centered, gradient_integrator: see :class:`~frl.envs.mujoco.simulator.Simulator`.
    """

    def read(model: Any, data: Any) -> np.ndarray:
        tip = data.site_xpos[0]
        return np.array((tip[0], tip[2], data.qfrc_constraint[0]))

    def first_readings(qpos: Tensor, qvel: Tensor) -> Tensor:
        lower, upper = qpos[1], qpos[1] + qpos[2]
        x = qpos[0] + 0.6 * (torch.sin(lower) + torch.sin(upper))
        return torch.stack((x, 0.6 * (torch.cos(lower) + torch.cos(upper)), torch.zeros_like(x)))

    def observe(state: MujocoState, env_params: PyTree) -> Tensor:
        angles = state.qpos[1:]
        return torch.cat((state.qpos[:1], torch.sin(angles), torch.cos(angles), state.qvel.clamp(-10.0, 10.0), state.readings[2:].clamp(-10.0, 10.0)))

    def outcome(before: MujocoState, action: Tensor, after: MujocoState, env_params: PyTree) -> Outcome:
        x, y = after.readings[0], after.readings[1]
        terminated = y.detach() <= 1.0
        bonus = env_params["healthy_reward"] * (~terminated).to(y.dtype)
        distance = 0.01 * x.square() + (y - 2.0).square()
        velocity = 1e-3 * after.qvel[1].square() + 5e-3 * after.qvel[2].square()
        metrics = {"reward_survive": bonus.detach(), "distance_penalty": -distance.detach(), "velocity_penalty": -velocity.detach()}
        return Outcome(reward=bonus - distance - velocity, terminated=terminated, metrics=metrics)

    model = gymnasium_model("inverted_double_pendulum")
    return mujoco_env(
        f"{PREFIX}InvertedDoublePendulum-v5",
        model,
        outcome,
        frame_skip=5,
        max_episode_steps=max_episode_steps,
        params=_numbers(healthy_reward=healthy_reward),
        observe=observe,
        reset=_noisy(model, normal_velocity=True),
        reset_noise_scale=reset_noise_scale,
        read=read,
        settle=False,
        first_readings=first_readings,
        dtype=dtype,
        threads=threads,
        centered=centered,
        gradient_integrator=gradient_integrator,
    )


def reacher(
    *,
    max_episode_steps: int | None = 50,
    reward_dist_weight: float = 1.0,
    reward_control_weight: float = 1.0,
    dtype: torch.dtype = torch.float32,
    threads: int | None = None,
    centered: bool = True,
    gradient_integrator: str | None = None,
) -> Env:
    """``Reacher-v5``: move the tip of a planar arm to a target.

    ``reward = -reward_dist_weight |tip - target| - reward_control_weight |action|^2``, smooth but where the tip is exactly on the target. As in gymnasium, the
    tip is where ``mj_step`` leaves it, a fraction of a step behind the state. It never terminates.

    Observation ``[10]``: cosines and then sines of the two angles, the target's position [m], angular velocities [rad/s], tip minus target [m].
    Action: torques, within +-1.

    Args:
        max_episode_steps: time limit [steps], or ``None``.
        reward_dist_weight, reward_control_weight: see above.
        dtype: of the default parameters.
        threads, centered, gradient_integrator: see :class:`~frl.envs.mujoco.simulator.Simulator`.
    """
    model = gymnasium_model("reacher")
    tip, target = model.body("fingertip").id, model.body("target").id
    start = torch.from_numpy(model.qpos0.copy())

    def read(model: Any, data: Any) -> np.ndarray:
        return data.xpos[tip] - data.xpos[target]

    def first_readings(qpos: Tensor, qvel: Tensor) -> Tensor:
        inner, outer = qpos[0], qpos[0] + qpos[1]
        x = 0.1 * torch.cos(inner) + 0.11 * torch.cos(outer) - qpos[2]
        y = 0.1 * torch.sin(inner) + 0.11 * torch.sin(outer) - qpos[3]
        return torch.stack((x, y, torch.zeros_like(x)))

    def reset(key: Tensor, env_params: PyTree) -> tuple[Tensor, Tensor]:
        like = env_params["reward_dist_weight"]
        keys = rng.split(key, 3)
        angles = start[:2].to(dtype=like.dtype, device=like.device) + 0.1 * _centred(keys[0], 2, like)
        # Uniform in the disc, which gymnasium draws from the square until one lies inside.
        u = rng.uniform(keys[1], (2,), dtype=like.dtype)
        radius, turn = 0.2 * torch.sqrt(u[0]), 2.0 * math.pi * u[1]
        velocities = 0.005 * _centred(keys[2], 2, like)
        goal = torch.stack((radius * torch.cos(turn), radius * torch.sin(turn)))
        return torch.cat((angles, goal)), torch.cat((velocities, torch.zeros_like(velocities)))

    def observe(state: MujocoState, env_params: PyTree) -> Tensor:
        angles = state.qpos[:2]
        return torch.cat((torch.cos(angles), torch.sin(angles), state.qpos[2:], state.qvel[:2], state.readings[:2]))

    def outcome(before: MujocoState, action: Tensor, after: MujocoState, env_params: PyTree) -> Outcome:
        distance = -env_params["reward_dist_weight"] * safe_norm(after.readings)
        control = -env_params["reward_control_weight"] * action.square().sum()
        metrics = {"reward_dist": distance.detach(), "reward_ctrl": control.detach()}
        return Outcome(reward=distance + control, terminated=torch.zeros_like(distance, dtype=torch.bool), metrics=metrics)

    return mujoco_env(
        f"{PREFIX}Reacher-v5",
        model,
        outcome,
        frame_skip=2,
        max_episode_steps=max_episode_steps,
        params=_numbers(reward_dist_weight=reward_dist_weight, reward_control_weight=reward_control_weight),
        observe=observe,
        reset=reset,
        read=read,
        settle=False,
        first_readings=first_readings,
        view="xy",
        dtype=dtype,
        threads=threads,
        centered=centered,
        gradient_integrator=gradient_integrator,
    )


def swimmer(
    *,
    max_episode_steps: int | None = 1000,
    forward_reward_weight: float = 1.0,
    ctrl_cost_weight: float = 1e-4,
    reset_noise_scale: float = 0.1,
    dtype: torch.dtype = torch.float32,
    threads: int | None = None,
    centered: bool = True,
    gradient_integrator: str | None = None,
) -> Env:
    """``Swimmer-v5``: swim forward by bending three links in a viscous fluid.

    ``reward = forward_reward_weight (x' - x) / dt - ctrl_cost_weight |action|^2``. It never terminates.

    Observation ``[8]``: angles of the body and of the two joints [rad], all five velocities. Action: torques of the joints, within +-1.

    Args:
        max_episode_steps: time limit [steps], or ``None``.
        forward_reward_weight, ctrl_cost_weight: see above.
        reset_noise_scale: half-width of the uniform noise on the first state.
        dtype: of the default parameters.
        threads, centered, gradient_integrator: see :class:`~frl.envs.mujoco.simulator.Simulator`.
    """
    model = gymnasium_model("swimmer")
    dt = 4 * float(model.opt.timestep)

    def observe(state: MujocoState, env_params: PyTree) -> Tensor:
        return torch.cat((state.qpos[2:], state.qvel))

    def outcome(before: MujocoState, action: Tensor, after: MujocoState, env_params: PyTree) -> Outcome:
        velocity = (after.qpos[:2] - before.qpos[:2]) / dt
        forward = env_params["forward_reward_weight"] * velocity[0]
        control = -env_params["ctrl_cost_weight"] * action.square().sum()
        place, pace = after.qpos.detach(), velocity.detach()
        metrics = {
            **{"x_position": place[0], "y_position": place[1], "distance_from_origin": safe_norm(place[:2])},
            **{"x_velocity": pace[0], "y_velocity": pace[1], "reward_forward": forward.detach(), "reward_ctrl": control.detach()},
        }
        return Outcome(reward=forward + control, terminated=torch.zeros_like(forward, dtype=torch.bool), metrics=metrics)

    return mujoco_env(
        f"{PREFIX}Swimmer-v5",
        model,
        outcome,
        frame_skip=4,
        max_episode_steps=max_episode_steps,
        params=_numbers(forward_reward_weight=forward_reward_weight, ctrl_cost_weight=ctrl_cost_weight),
        observe=observe,
        reset=_noisy(model),
        reset_noise_scale=reset_noise_scale,
        view="xy",
        dtype=dtype,
        threads=threads,
        centered=centered,
        gradient_integrator=gradient_integrator,
    )


def hopper(
    *,
    max_episode_steps: int | None = 1000,
    forward_reward_weight: float = 1.0,
    ctrl_cost_weight: float = 1e-3,
    healthy_reward: float = 1.0,
    terminate_when_unhealthy: bool = True,
    healthy_state_range: tuple[float, float] = (-100.0, 100.0),
    healthy_z_range: tuple[float, float] = (0.7, math.inf),
    healthy_angle_range: tuple[float, float] = (-0.2, 0.2),
    reset_noise_scale: float = 5e-3,
    smooth: bool = False,
    smooth_weight: float = 10.0,
    dtype: torch.dtype = torch.float32,
    threads: int | None = None,
    centered: bool = True,
    gradient_integrator: str | None = None,
) -> Env:
    """``Hopper-v5``: hop forward on one leg.

    ``reward = forward_reward_weight (x' - x) / dt + healthy_reward [healthy] - ctrl_cost_weight |action|^2``; healthy is a state whose height, angle and other
    coordinates lie within their ranges, and the episode ends outside.

    The bonus of being healthy is constant and has no gradient, nor has the end of the episode. With ``smooth`` the bonus is lent the gradient of
    ``-smooth_weight (max(0, (z_low + 0.4 - z) / 0.4)^2 + (angle / angle_high)^2)``: away from the floor, and upright. A fall costs all rewards that would
    have followed; with a weight near 1 step's reward, gradients do not see that and end at one long leap.

    Observation ``[11]``: height [m], angles of torso and joints [rad], all six velocities clipped to +-10. Action: torques of the joints, within +-1.

    Args:
        max_episode_steps: time limit [steps], or ``None``.
        forward_reward_weight, ctrl_cost_weight, healthy_reward: see above.
        terminate_when_unhealthy: end the episode outside the ranges.
        healthy_state_range: of all coordinates but the horizontal position and the height.
        healthy_z_range: of the height of the torso [m].
        healthy_angle_range: of the angle of the torso [rad].
        reset_noise_scale: half-width of the uniform noise on the first state.
        smooth: lend the bonus a gradient.
        smooth_weight: of that gradient; nothing without ``smooth``.
        dtype: of the default parameters.
        threads, centered, gradient_integrator: see :class:`~frl.envs.mujoco.simulator.Simulator`.
    """
    smooth, terminate = _switch("smooth", smooth), _switch("terminate_when_unhealthy", terminate_when_unhealthy)
    model = gymnasium_model("hopper")
    dt = 4 * float(model.opt.timestep)
    ranges = {"state": healthy_state_range, "z": healthy_z_range, "angle": healthy_angle_range}
    limits: dict[str, float] = {}
    for what, pair in ranges.items():
        limits[f"healthy_{what}_low"], limits[f"healthy_{what}_high"] = _range(f"healthy_{what}_range", pair)

    def observe(state: MujocoState, env_params: PyTree) -> Tensor:
        return torch.cat((state.qpos[1:], state.qvel.clamp(-10.0, 10.0)))

    def outcome(before: MujocoState, action: Tensor, after: MujocoState, env_params: PyTree) -> Outcome:
        def within(x: Tensor, what: str) -> Tensor:
            return ((env_params[f"healthy_{what}_low"] < x) & (x < env_params[f"healthy_{what}_high"])).all()

        z, angle = after.qpos[1], after.qpos[2]
        rest = torch.cat((after.qpos[2:], after.qvel)).detach()
        healthy = within(rest, "state") & within(z.detach(), "z") & within(angle.detach(), "angle")
        velocity = (after.qpos[0] - before.qpos[0]) / dt
        forward = env_params["forward_reward_weight"] * velocity
        survive = env_params["healthy_reward"] * healthy.to(z.dtype)
        if smooth:
            low = torch.relu(env_params["healthy_z_low"] + 0.4 - z) / 0.4
            lean = angle / env_params["healthy_angle_high"]
            survive = _lend(survive, -env_params["smooth_weight"] * (low.square() + lean.square()))
        control = -env_params["ctrl_cost_weight"] * action.square().sum()
        metrics = {
            **{"x_position": after.qpos[0].detach(), "z_distance_from_origin": z.detach() - float(model.qpos0[1]), "x_velocity": velocity.detach()},
            **{"reward_forward": forward.detach(), "reward_ctrl": control.detach(), "reward_survive": survive.detach()},
        }
        return Outcome(reward=forward + survive + control, terminated=~healthy if terminate else torch.zeros_like(healthy), metrics=metrics)

    weights = _numbers(forward_reward_weight=forward_reward_weight, ctrl_cost_weight=ctrl_cost_weight, healthy_reward=healthy_reward)
    weights["smooth_weight"] = require_number("smooth_weight", smooth_weight, at_least=0.0)
    return mujoco_env(
        f"{PREFIX}Hopper-v5",
        model,
        outcome,
        frame_skip=4,
        max_episode_steps=max_episode_steps,
        params={**weights, **limits},
        observe=observe,
        reset=_noisy(model),
        reset_noise_scale=reset_noise_scale,
        dtype=dtype,
        threads=threads,
        centered=centered,
        gradient_integrator=gradient_integrator,
    )


def half_cheetah(
    *,
    max_episode_steps: int | None = 1000,
    forward_reward_weight: float = 1.0,
    ctrl_cost_weight: float = 0.1,
    reset_noise_scale: float = 0.1,
    dtype: torch.dtype = torch.float32,
    threads: int | None = None,
    centered: bool = True,
    gradient_integrator: str | None = None,
) -> Env:
    """``HalfCheetah-v5``: run forward on two legs.

    ``reward = forward_reward_weight (x' - x) / dt - ctrl_cost_weight |action|^2``, which has a gradient everywhere but at the onset of contacts. It never
    terminates.

    Observation ``[17]``: height [m], angles of torso and joints [rad], all nine velocities. Action: torques of the joints, within +-1.

    Args:
        max_episode_steps: time limit [steps], or ``None``.
        forward_reward_weight, ctrl_cost_weight: see above.
        reset_noise_scale: half-width of the uniform noise on positions, standard deviation of the normal noise on velocities.
        dtype: of the default parameters.
        threads, centered, gradient_integrator: see :class:`~frl.envs.mujoco.simulator.Simulator`.
    """
    model = gymnasium_model("half_cheetah")
    dt = 5 * float(model.opt.timestep)

    def observe(state: MujocoState, env_params: PyTree) -> Tensor:
        return torch.cat((state.qpos[1:], state.qvel))

    def outcome(before: MujocoState, action: Tensor, after: MujocoState, env_params: PyTree) -> Outcome:
        velocity = (after.qpos[0] - before.qpos[0]) / dt
        forward = env_params["forward_reward_weight"] * velocity
        control = -env_params["ctrl_cost_weight"] * action.square().sum()
        metrics = {
            **{"x_position": after.qpos[0].detach(), "x_velocity": velocity.detach()},
            **{"reward_forward": forward.detach(), "reward_ctrl": control.detach()},
        }
        return Outcome(reward=forward + control, terminated=torch.zeros_like(forward, dtype=torch.bool), metrics=metrics)

    return mujoco_env(
        f"{PREFIX}HalfCheetah-v5",
        model,
        outcome,
        frame_skip=5,
        max_episode_steps=max_episode_steps,
        params=_numbers(forward_reward_weight=forward_reward_weight, ctrl_cost_weight=ctrl_cost_weight),
        observe=observe,
        reset=_noisy(model, normal_velocity=True),
        reset_noise_scale=reset_noise_scale,
        gradient_tolerance=1e-4,  # its contacts are the stiffest
        dtype=dtype,
        threads=threads,
        centered=centered,
        gradient_integrator=gradient_integrator,
    )


TASKS: dict[str, Callable[..., Env]] = {
    "InvertedPendulum-v5": inverted_pendulum,
    "InvertedDoublePendulum-v5": inverted_double_pendulum,
    "Reacher-v5": reacher,
    "Swimmer-v5": swimmer,
    "Hopper-v5": hopper,
    "HalfCheetah-v5": half_cheetah,
}


def get_task(name: str) -> Callable[..., Env]:
    """The factory of ``"Hopper-v5"`` and its kin, case-insensitive.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
        ModuleNotFoundError: MuJoCo is not installed.
    """
    known = {task.lower(): factory for task, factory in TASKS.items()}
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"; did you mean {next(PREFIX + task for task in TASKS if task.lower() == near[0])!r}?" if near else ""
        raise ValueError(f"unknown environment {PREFIX + name!r}{hint} (known: {', '.join(PREFIX + task for task in TASKS)})")
    require_mujoco(f"environment {PREFIX + name!r}")
    return known[name.lower()]
