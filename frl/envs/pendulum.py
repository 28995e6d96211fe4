"""Pendulum: swing a rod up and keep it upright with a bounded torque.

The dynamics, reward and reset of gymnasium's ``Pendulum-v1``, as differentiable functions of the state, the torque and the parameters.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from frl import rng
from frl.envs.check import require_count, require_number, space_dtype
from frl.envs.env import Env, EnvSpec
from frl.envs.scene import Circle, Line, Scene
from frl.types import Outcome


class PendulumParams(NamedTuple):
    """Physical parameters, each ``[]``."""

    gravity: Tensor  # [m/s^2]
    mass: Tensor  # [kg]
    length: Tensor  # [m]
    dt: Tensor  # step size [s]
    max_speed: Tensor  # bound on the angular velocity [rad/s]
    max_torque: Tensor  # bound on the torque [N m]
    initial_angle: Tensor  # the first angle is uniform within +- this [rad]
    initial_speed: Tensor  # the first angular velocity is uniform within +- this [rad/s]
    success_angle: Tensor  # upright: |angle| below this [rad]
    success_speed: Tensor  # still: |angular velocity| below this [rad/s]


class PendulumState(NamedTuple):
    """State of one row."""

    angle: Tensor  # [] rad, 0 is upright, not wrapped
    angular_velocity: Tensor  # [] rad/s


def pendulum(
    *,
    max_episode_steps: int | None = 200,
    gravity: float = 10.0,
    mass: float = 1.0,
    length: float = 1.0,
    dt: float = 0.05,
    max_speed: float = 8.0,
    max_torque: float = 2.0,
    initial_angle: float = math.pi,
    initial_speed: float = 1.0,
    success_angle: float = 0.1,
    success_speed: float = 0.5,
    dtype: torch.dtype = torch.float32,
) -> Env:
    """Build the pendulum swing-up task.

    With the torque ``u`` clamped to ``+-max_torque`` and ``wrap`` the angle in ``[-pi, pi)``::

        reward = -(wrap(theta)^2 + 0.1 omega^2 + 0.001 u^2)                          at the state before the step
        omega' = clamp(omega + (3 g / (2 l) sin(theta) + 3 u / (m l^2)) dt, +-max_speed)
        theta' = theta + omega' dt

    Gradients are those of ``torch.clamp``; ``wrap`` has slope 1 everywhere, so the reward has a kink where the rod hangs straight down. It never terminates.

    Observation ``[3]``: ``cos(theta)``, ``sin(theta)``, ``omega``.
    Metrics (cut from the graph): ``success`` (upright and still after the step, this library's addition), ``final_angle`` [rad, absolute and wrapped].

    Args:
        max_episode_steps: time limit [steps], or ``None``.
        gravity: [m/s^2], at least 0.
        mass: [kg].
        length: [m].
        dt: step size [s].
        max_speed: bound on the angular velocity [rad/s].
        max_torque: bound on the torque [N m].
        initial_angle: half-width of the reset distribution of the angle [rad], at least 0.
        initial_speed: half-width of the reset distribution of the angular velocity [rad/s], at least 0.
        success_angle: tolerance of the success metric [rad].
        success_speed: tolerance of the success metric [rad/s].
        dtype: ``torch.float32`` or ``torch.float64``, of the default parameters; states follow their parameters.

    Raises:
        ValueError: an argument is outside its range.

    Source: gymnasium, ``envs/classic_control/pendulum.py``, ``Pendulum-v1``.
    """
    if max_episode_steps is not None:
        require_count("max_episode_steps", max_episode_steps)
    values = {
        "gravity": require_number("gravity", gravity, at_least=0.0),
        "mass": require_number("mass", mass, above=0.0),
        "length": require_number("length", length, above=0.0),
        "dt": require_number("dt", dt, above=0.0),
        "max_speed": require_number("max_speed", max_speed, above=0.0),
        "max_torque": require_number("max_torque", max_torque, above=0.0),
        "initial_angle": require_number("initial_angle", initial_angle, at_least=0.0),
        "initial_speed": require_number("initial_speed", initial_speed, at_least=0.0),
        "success_angle": require_number("success_angle", success_angle, above=0.0),
        "success_speed": require_number("success_speed", success_speed, above=0.0),
    }
    box_dtype = space_dtype(dtype)
    high = np.array([1.0, 1.0, values["max_speed"]], dtype=box_dtype)
    return Env(
        spec=EnvSpec(name="pendulum", max_episode_steps=max_episode_steps, dt=values["dt"], differentiable=True),
        observation_space=spaces.Box(-high, high, dtype=box_dtype),
        action_space=spaces.Box(-values["max_torque"], values["max_torque"], (1,), dtype=box_dtype),
        default_params=PendulumParams(**{name: torch.tensor(value, dtype=dtype) for name, value in values.items()}),
        reset=_reset,
        observe=_observe,
        step=_step,
        scene=_scene,
    )


def wrap_angle(angle: Tensor) -> Tensor:
    """The same angle in ``[-pi, pi)``: ``(angle + pi) mod 2 pi - pi``, with slope 1."""
    return torch.remainder(angle + math.pi, 2 * math.pi) - math.pi


def _reset(key: Tensor, env_params: PendulumParams) -> PendulumState:
    centred = 2.0 * rng.uniform(key, (2,), dtype=env_params.initial_angle.dtype) - 1.0
    return PendulumState(angle=centred[0] * env_params.initial_angle, angular_velocity=centred[1] * env_params.initial_speed)


def _observe(env_state: PendulumState, env_params: PendulumParams) -> Tensor:
    return torch.stack((torch.cos(env_state.angle), torch.sin(env_state.angle), env_state.angular_velocity))


def _step(env_state: PendulumState, action: Tensor, env_params: PendulumParams) -> tuple[PendulumState, Outcome]:
    if action.shape != (1,):
        raise ValueError(f"action of one row must have shape (1,), got {tuple(action.shape)}")
    p, theta, omega = env_params, env_state.angle, env_state.angular_velocity
    torque = torch.clamp(action[0], -p.max_torque, p.max_torque)
    reward = -(wrap_angle(theta).square() + 0.1 * omega.square() + 0.001 * torque.square())
    acceleration = 3.0 * p.gravity / (2.0 * p.length) * torch.sin(theta) + 3.0 / (p.mass * p.length.square()) * torque
    new_omega = torch.clamp(omega + acceleration * p.dt, -p.max_speed, p.max_speed)
    new_theta = theta + new_omega * p.dt
    final_angle = wrap_angle(new_theta.detach()).abs()
    success = (final_angle < p.success_angle) & (new_omega.abs() < p.success_speed)
    outcome = Outcome(reward=reward, terminated=torch.zeros_like(success), metrics={"success": success, "final_angle": final_angle})
    return PendulumState(angle=new_theta, angular_velocity=new_omega), outcome


def _scene(env_state: PendulumState, env_params: PendulumParams) -> Scene:
    """The rod, with positive angles to the left of upright as gymnasium draws them, and the place of its free end when upright (green)."""
    angle, length = float(env_state.angle), float(env_params.length)
    tip = (-length * math.sin(angle), length * math.cos(angle))
    reach = 1.2 * length
    return Scene(
        xlim=(-reach, reach),
        ylim=(-reach, reach),
        shapes=[
            Circle(center=(0.0, length), radius=0.1 * length, color="tab:green", filled=False),
            Line(points=[(0.0, 0.0), tip], color="tab:blue", width=8.0),
            Circle(center=tip, radius=0.07 * length),
            Circle(center=(0.0, 0.0), radius=0.04 * length, color="black"),
        ],
        caption=f"angular velocity {float(env_state.angular_velocity):+.1f} rad/s",
    )
