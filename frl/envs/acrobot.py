"""Acrobot: swing a double pendulum up and balance it with a motor at the elbow alone.

The links and equations of gymnasium's ``Acrobot-v1`` with a continuous torque, a smooth cost and a shorter step, so that a policy can also balance.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor

from frl import rng
from frl.envs.check import require_count, require_number, space_dtype
from frl.envs.env import Env, EnvSpec
from frl.envs.pendulum import wrap_angle
from frl.envs.scene import Circle, Line, Scene
from frl.numerics import clip
from frl.types import Outcome

SPEED_WEIGHT, EFFORT_WEIGHT = 0.01, 0.01  # relative to the squared angles

Motion = tuple[Tensor, Tensor, Tensor, Tensor]  # angle_1, angle_2 [rad], speed_1, speed_2 [rad/s], each []


class AcrobotParams(NamedTuple):
    """Physical parameters, each ``[]``."""

    gravity: Tensor  # [m/s^2]
    mass_1: Tensor  # of the link at the base [kg]
    mass_2: Tensor  # of the link at the tip [kg]
    length_1: Tensor  # [m]
    length_2: Tensor  # [m]
    center_1: Tensor  # from the base to the centre of mass of link 1 [m]
    center_2: Tensor  # from the elbow to the centre of mass of link 2 [m]
    inertia_1: Tensor  # about its centre of mass [kg m^2]
    inertia_2: Tensor  # [kg m^2]
    max_torque: Tensor  # torque at full action [N m]
    dt: Tensor  # step size [s]
    initial_angle: Tensor  # both angles start uniformly within +- this of hanging [rad]
    initial_speed: Tensor  # both speeds start uniformly within +- this [rad/s]
    success_height: Tensor  # up: the tip is above this part of the arm's length
    success_time: Tensor  # how long it has to be up [s]


class AcrobotState(NamedTuple):
    """State of one row."""

    angle_1: Tensor  # [] of link 1, rad, 0 hangs down, not wrapped
    angle_2: Tensor  # [] of link 2 relative to link 1, rad, not wrapped
    speed_1: Tensor  # [] rad/s
    speed_2: Tensor  # [] rad/s
    held: Tensor  # [] steps up until now, without interruption; carries no gradient


def acrobot(
    *,
    max_episode_steps: int | None = 200,
    gravity: float = 9.8,
    mass_1: float = 1.0,
    mass_2: float = 1.0,
    length_1: float = 1.0,
    length_2: float = 1.0,
    center_1: float = 0.5,
    center_2: float = 0.5,
    inertia_1: float = 1.0,
    inertia_2: float = 1.0,
    max_torque: float = 5.0,
    dt: float = 0.05,
    initial_angle: float = 0.1,
    initial_speed: float = 0.1,
    success_height: float = 0.9,
    success_time: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Env:
    """Build the acrobot task.

    With the action ``a`` clamped to ``[-1, 1]``, ``tau = max_torque a``, masses ``m``, lengths ``l``, centres of mass ``c``, inertias ``I``, angles ``q`` from
    hanging and speeds ``w``::

        d_1 = m_1 c_1^2 + m_2 (l_1^2 + c_2^2 + 2 l_1 c_2 cos(q_2)) + I_1 + I_2
        d_2 = m_2 (c_2^2 + l_1 c_2 cos(q_2)) + I_2
        p_2 = m_2 c_2 g sin(q_1 + q_2)
        p_1 = -m_2 l_1 c_2 (w_2^2 + 2 w_1 w_2) sin(q_2) + (m_1 c_1 + m_2 l_1) g sin(q_1) + p_2
        q_2'' = (tau + d_2 / d_1 p_1 - m_2 l_1 c_2 w_1^2 sin(q_2) - p_2) / (m_2 c_2^2 + I_2 - d_2^2 / d_1)
        q_1'' = -(d_2 q_2'' + p_1) / d_1

    in one step of the classical Runge-Kutta method. After the step, with the angles of the links from upright, ``u_1 = wrap(q_1 - pi)`` and
    ``u_2 = wrap(q_1 + q_2 - pi)`` in ``[-pi, pi)``::

        reward = -(u_1^2 + u_2^2 + 0.01 (w_1^2 + w_2^2) + 0.01 a^2)

    ``wrap`` has slope 1 everywhere, so the reward has a kink where a link hangs straight down. No episode terminates.

    Observation ``[6]``: ``cos(q_1)``, ``sin(q_1)``, ``cos(q_2)``, ``sin(q_2)``, ``w_1``, ``w_2``.
    Metrics (cut from the graph): ``success`` (the tip was above ``success_height`` in every step of the last ``success_time``), ``final_height`` of the tip
    [part of the arm's length, -1 to 1], ``held_time`` [s] for which it has been up.

    Args:
        max_episode_steps: time limit [steps], or ``None``.
        gravity: [m/s^2], at least 0.
        mass_1: of the link at the base [kg].
        mass_2: of the link at the tip [kg].
        length_1: [m].
        length_2: [m].
        center_1: from the base to the centre of mass of link 1 [m].
        center_2: from the elbow to the centre of mass of link 2 [m].
        inertia_1: about its centre of mass [kg m^2].
        inertia_2: [kg m^2].
        max_torque: torque at full action [N m].
        dt: step size [s].
        initial_angle: half-width of the reset distribution of both angles around hanging [rad], at least 0.
        initial_speed: half-width of the reset distribution of both speeds [rad/s], at least 0.
        success_height: tolerance of the success metric, below 1.
        success_time: duration of the success metric [s].
        dtype: ``torch.float32`` or ``torch.float64``, of the default parameters; states follow their parameters.

    Raises:
        ValueError: an argument is outside its range.

    Source: Sutton and Barto, "Reinforcement learning", 1998, section 11.3, as in gymnasium's ``envs/classic_control/acrobot.py``. That task has torques of -1,
    0 and 1 N m, steps of 0.2 s, bounded speeds, and ends when the tip passes one link's length above the base.
    """
    if max_episode_steps is not None:
        require_count("max_episode_steps", max_episode_steps)
    values = {
        "gravity": require_number("gravity", gravity, at_least=0.0),
        "mass_1": require_number("mass_1", mass_1, above=0.0),
        "mass_2": require_number("mass_2", mass_2, above=0.0),
        "length_1": require_number("length_1", length_1, above=0.0),
        "length_2": require_number("length_2", length_2, above=0.0),
        "center_1": require_number("center_1", center_1, above=0.0),
        "center_2": require_number("center_2", center_2, above=0.0),
        "inertia_1": require_number("inertia_1", inertia_1, above=0.0),
        "inertia_2": require_number("inertia_2", inertia_2, above=0.0),
        "max_torque": require_number("max_torque", max_torque, above=0.0),
        "dt": require_number("dt", dt, above=0.0),
        "initial_angle": require_number("initial_angle", initial_angle, at_least=0.0),
        "initial_speed": require_number("initial_speed", initial_speed, at_least=0.0),
        "success_height": require_number("success_height", success_height, at_most=0.999),
        "success_time": require_number("success_time", success_time, above=0.0),
    }
    box_dtype = space_dtype(dtype)
    return Env(
        spec=EnvSpec(name="acrobot", max_episode_steps=max_episode_steps, dt=values["dt"], differentiable=True),
        observation_space=spaces.Box(-math.inf, math.inf, (6,), dtype=box_dtype),
        action_space=spaces.Box(-1.0, 1.0, (1,), dtype=box_dtype),
        default_params=AcrobotParams(**{name: torch.tensor(value, dtype=dtype) for name, value in values.items()}),
        reset=_reset,
        observe=_observe,
        step=_step,
        scene=_scene,
    )


def _reset(key: Tensor, env_params: AcrobotParams) -> AcrobotState:
    p = env_params
    centred = 2.0 * rng.uniform(key, (4,), dtype=p.initial_angle.dtype) - 1.0
    return AcrobotState(
        angle_1=centred[0] * p.initial_angle,
        angle_2=centred[1] * p.initial_angle,
        speed_1=centred[2] * p.initial_speed,
        speed_2=centred[3] * p.initial_speed,
        held=torch.zeros_like(centred[0]),
    )


def _observe(env_state: AcrobotState, env_params: AcrobotParams) -> Tensor:
    s = env_state
    return torch.stack((torch.cos(s.angle_1), torch.sin(s.angle_1), torch.cos(s.angle_2), torch.sin(s.angle_2), s.speed_1, s.speed_2))


def _derivative(motion: Motion, torque: Tensor, p: AcrobotParams) -> Motion:
    q_1, q_2, w_1, w_2 = motion
    sin_2, coupling = torch.sin(q_2), p.mass_2 * p.length_1 * p.center_2
    bent = coupling * torch.cos(q_2)
    d_2 = p.mass_2 * p.center_2.square() + p.inertia_2 + bent
    d_1 = p.mass_1 * p.center_1.square() + p.mass_2 * p.length_1.square() + p.inertia_1 + d_2 + bent
    p_2 = p.mass_2 * p.center_2 * p.gravity * torch.sin(q_1 + q_2)
    p_1 = -coupling * (w_2.square() + 2.0 * w_1 * w_2) * sin_2 + (p.mass_1 * p.center_1 + p.mass_2 * p.length_1) * p.gravity * torch.sin(q_1) + p_2
    ratio = d_2 / d_1
    a_2 = (torque + ratio * p_1 - coupling * w_1.square() * sin_2 - p_2) / (p.mass_2 * p.center_2.square() + p.inertia_2 - d_2 * ratio)
    return w_1, w_2, -(ratio * a_2 + p_1 / d_1), a_2


def _runge_kutta(motion: Motion, torque: Tensor, p: AcrobotParams) -> Motion:
    def moved(by: Motion, time: Tensor) -> Motion:
        q_1, q_2, w_1, w_2 = (x + time * slope for x, slope in zip(motion, by, strict=True))
        return q_1, q_2, w_1, w_2

    first = _derivative(motion, torque, p)
    second = _derivative(moved(first, 0.5 * p.dt), torque, p)
    third = _derivative(moved(second, 0.5 * p.dt), torque, p)
    fourth = _derivative(moved(third, p.dt), torque, p)
    a, b, c, d = (k_1 + 2.0 * (k_2 + k_3) + k_4 for k_1, k_2, k_3, k_4 in zip(first, second, third, fourth, strict=True))
    return moved((a, b, c, d), p.dt / 6.0)


def _step(env_state: AcrobotState, action: Tensor, env_params: AcrobotParams) -> tuple[AcrobotState, Outcome]:
    if action.shape != (1,):
        raise ValueError(f"action of one row must have shape (1,), got {tuple(action.shape)}")
    s, p = env_state, env_params
    push = clip(action[0], -1.0, 1.0)
    q_1, q_2, w_1, w_2 = _runge_kutta((s.angle_1, s.angle_2, s.speed_1, s.speed_2), p.max_torque * push, p)
    first, second = wrap_angle(q_1 - math.pi), wrap_angle(q_1 + q_2 - math.pi)
    reward = -(first.square() + second.square() + SPEED_WEIGHT * (w_1.square() + w_2.square()) + EFFORT_WEIGHT * push.square())
    height = (p.length_1 * torch.cos(first.detach()) + p.length_2 * torch.cos(second.detach())) / (p.length_1 + p.length_2)
    held = torch.where(height > p.success_height, s.held + 1.0, 0.0)
    held_time = held * p.dt
    # Half a step of slack: a sum of rounded steps may fall short of the time by a rounding error.
    success = held_time > p.success_time - 0.5 * p.dt
    new = AcrobotState(angle_1=q_1, angle_2=q_2, speed_1=w_1, speed_2=w_2, held=held)
    return new, Outcome(reward=reward, terminated=torch.zeros_like(success), metrics={"success": success, "final_height": height, "held_time": held_time})


def _scene(env_state: AcrobotState, env_params: AcrobotParams) -> Scene:
    s, p = env_state, env_params
    q_1, q_2, l_1, l_2 = (float(x) for x in (s.angle_1, s.angle_1 + s.angle_2, p.length_1, p.length_2))
    reach = 1.1 * (l_1 + l_2)
    line = float(p.success_height) * (l_1 + l_2)
    elbow = (l_1 * math.sin(q_1), -l_1 * math.cos(q_1))
    tip = (elbow[0] + l_2 * math.sin(q_2), elbow[1] - l_2 * math.cos(q_2))
    return Scene(
        xlim=(-reach, reach),
        ylim=(-reach, reach),
        shapes=[
            Line([(-reach, line), (reach, line)], color="tab:green", width=1.0),
            Line([(0.0, 0.0), elbow], color="tab:blue", width=5.0),
            Line([elbow, tip], color="tab:orange", width=5.0),
            Circle((0.0, 0.0), 0.05 * l_1, color="black"),
            Circle(elbow, 0.05 * l_1, color="tab:red"),
        ],
        caption=f"up for {float(s.held * p.dt):.1f} s",
    )
