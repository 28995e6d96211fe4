"""Quadrotor: fly to a point and hover there, from anywhere around it, by commanding thrust and body rates.

A rigid body whose attitude is a unit quaternion and whose rate controller is a first-order lag; commands may arrive late. World axes have z up, body axes have
the rotors' thrust along z.
"""

from __future__ import annotations

import math
from numbers import Integral
from typing import NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor

from frl import rng
from frl.envs.check import require_count, require_number, space_dtype
from frl.envs.env import Env, EnvSpec
from frl.envs.scene import Circle, Line, Scene
from frl.numerics import clip
from frl.types import Outcome

VELOCITY_WEIGHT, RATE_WEIGHT, EFFORT_WEIGHT, SMOOTHNESS_WEIGHT = 0.1, 0.1, 0.02, 0.02  # relative to the distance in metres
SMALL = 1e-3  # squared half angles below this are turned by a series, whose error is then below 1e-16

Quaternion = tuple[Tensor, Tensor, Tensor, Tensor]  # w, x, y, z, each [...]


class QuadrotorParams(NamedTuple):
    """Physical parameters, each ``[]``."""

    gravity: Tensor  # [m/s^2]
    mass: Tensor  # [kg]
    max_thrust: Tensor  # of all rotors together [N]
    max_rate: Tensor  # largest command for the rates around body x and y [rad/s]
    max_yaw_rate: Tensor  # around body z [rad/s]
    rate_lag: Tensor  # time constant of the rate controller [s]
    dt: Tensor  # step size [s]
    sharpness: Tensor  # the position cost grows linearly beyond 1 / this [1/m]
    initial_position: Tensor  # x and y start uniformly within +- this [m]
    initial_height: Tensor  # z starts uniformly within +- this [m]
    initial_yaw: Tensor  # the heading starts uniformly within +- this [rad]
    initial_tilt: Tensor  # roll and pitch start uniformly within +- this [rad]
    initial_speed: Tensor  # each velocity starts uniformly within +- this [m/s]
    initial_rate: Tensor  # each body rate starts uniformly within +- this [rad/s]
    success_distance: Tensor  # at the goal: closer than this [m]


class QuadrotorState(NamedTuple):
    """State of one row; the goal is the origin."""

    position: Tensor  # [3] world, m
    attitude: Tensor  # [4] unit quaternion (w, x, y, z), body to world
    velocity: Tensor  # [3] world, m/s
    rates: Tensor  # [3] body, rad/s
    commands: Tensor  # [max(delay, 1), 4] the last commands, newest first, within [-1, 1]


def quadrotor(
    *,
    max_episode_steps: int | None = 150,
    action_delay: int = 1,
    gravity: float = 9.81,
    mass: float = 0.75,
    max_thrust: float = 14.0,
    max_rate: float = 6.0,
    max_yaw_rate: float = 4.0,
    rate_lag: float = 0.05,
    dt: float = 0.02,
    sharpness: float = 5.0,
    initial_position: float = 2.0,
    initial_height: float = 1.0,
    initial_yaw: float = math.pi,
    initial_tilt: float = 0.3,
    initial_speed: float = 0.2,
    initial_rate: float = 0.2,
    success_distance: float = 0.1,
    dtype: torch.dtype = torch.float32,
) -> Env:
    """Build the hover task; wide ranges of the first attitude and speed make it a recovery task.

    A command ``a``, clamped to ``[-1, 1]^4``, acts ``action_delay`` steps after it is given. Then, with ``R(q)`` the rotation of the attitude ``q``,
    ``c = (max_rate a_1, max_rate a_2, max_yaw_rate a_3)`` and ``f = max_thrust (1 + a_0) / 2``::

        rates' = c + (rates - c) exp(-dt / rate_lag)
        q' = q * exp(dt rates' / 2), normalised                              exact for constant rates
        v' = v + dt (R(q') (0, 0, f / mass) - (0, 0, gravity))
        x' = x + dt v'

    The reward, after the step, has a slope everywhere and no plateau, with ``h(y) = sqrt(1 + |y|^2) - 1`` and ``a_hover`` the command that carries the weight::

        reward = -(h(sharpness x') / sharpness + 0.1 h(v') + 0.1 h(rates') + 0.02 |a - a_hover|^2 + 0.02 |a - a_last|^2)

    There is no ground and no episode terminates.

    Observation ``[18 + 4 max(action_delay, 1)]``: position (3), rotation matrix (9, row-major), velocity (3), body rates (3), the last commands, newest first.
    Metrics (cut from the graph): ``success`` (closer to the goal than ``success_distance`` after the step), ``final_distance`` [m], ``final_speed`` [m/s].

    Args:
        max_episode_steps: time limit [steps], or ``None``.
        action_delay: steps between a command and its effect, at least 0.
        gravity: [m/s^2], at least 0.
        mass: [kg].
        max_thrust: of all rotors together [N]; hovering takes ``mass gravity``.
        max_rate: largest command for the rates around body x and y [rad/s].
        max_yaw_rate: around body z [rad/s].
        rate_lag: time constant of the rate controller [s].
        dt: step size [s].
        sharpness: the position cost is quadratic within, linear beyond ``1 / sharpness`` [1/m].
        initial_position: half-width of the reset distribution of x and y [m], at least 0.
        initial_height: of z [m], at least 0.
        initial_yaw: of the heading [rad], at least 0.
        initial_tilt: of roll and pitch [rad], at least 0.
        initial_speed: of each velocity [m/s], at least 0.
        initial_rate: of each body rate [rad/s], at least 0.
        success_distance: tolerance of the success metric [m].
        dtype: ``torch.float32`` or ``torch.float64``, of the default parameters; states follow their parameters.

    Raises:
        ValueError: an argument is outside its range.

    Source: the state-based hover task of Heeg, Song, Scaramuzza, "Learning quadrotor control from differentiable simulation using analytic policy gradients",
    2024: its limits, step size, episode length, observation and the form of its reward. There it starts up to 4.5 m away, commands are late by 30 ms, and the
    forward pass simulates motors at 1 kHz; here the lag stands for them, and the gradient is that of what is simulated. Attitude: Sola, "Quaternion kinematics
    for the error-state Kalman filter", 2017, zeroth-order integration of rotation rates.
    """
    if isinstance(action_delay, bool) or not isinstance(action_delay, Integral) or action_delay < 0:
        raise ValueError(f"action_delay must be an integer of at least 0, got {action_delay!r}")
    if max_episode_steps is not None:
        require_count("max_episode_steps", max_episode_steps)
    values = {
        "gravity": require_number("gravity", gravity, at_least=0.0),
        "mass": require_number("mass", mass, above=0.0),
        "max_thrust": require_number("max_thrust", max_thrust, above=0.0),
        "max_rate": require_number("max_rate", max_rate, above=0.0),
        "max_yaw_rate": require_number("max_yaw_rate", max_yaw_rate, above=0.0),
        "rate_lag": require_number("rate_lag", rate_lag, above=0.0),
        "dt": require_number("dt", dt, above=0.0),
        "sharpness": require_number("sharpness", sharpness, above=0.0),
        "initial_position": require_number("initial_position", initial_position, at_least=0.0),
        "initial_height": require_number("initial_height", initial_height, at_least=0.0),
        "initial_yaw": require_number("initial_yaw", initial_yaw, at_least=0.0),
        "initial_tilt": require_number("initial_tilt", initial_tilt, at_least=0.0),
        "initial_speed": require_number("initial_speed", initial_speed, at_least=0.0),
        "initial_rate": require_number("initial_rate", initial_rate, at_least=0.0),
        "success_distance": require_number("success_distance", success_distance, above=0.0),
    }
    box_dtype, kept = space_dtype(dtype), max(int(action_delay), 1)

    def reset(key: Tensor, env_params: QuadrotorParams) -> QuadrotorState:
        return _reset(key, env_params, kept)

    def step(env_state: QuadrotorState, action: Tensor, env_params: QuadrotorParams) -> tuple[QuadrotorState, Outcome]:
        return _step(env_state, action, env_params, int(action_delay))

    return Env(
        spec=EnvSpec(name="quadrotor", max_episode_steps=max_episode_steps, dt=values["dt"], differentiable=True),
        observation_space=spaces.Box(-math.inf, math.inf, (18 + 4 * kept,), dtype=box_dtype),
        action_space=spaces.Box(-1.0, 1.0, (4,), dtype=box_dtype),
        default_params=QuadrotorParams(**{name: torch.tensor(value, dtype=dtype) for name, value in values.items()}),
        reset=reset,
        observe=_observe,
        step=step,
        scene=_scene,
    )


# Components are handled one by one: a row's products of four numbers then fuse over rows into one kernel, small matrix products would not.


def _product(a: Quaternion, b: Quaternion) -> Quaternion:
    """Hamilton product: the rotation ``b`` followed, in the frame outside, by ``a``."""
    aw, ax, ay, az = a
    bw, bx, by, bz = b
    return (
        aw * bw - ax * bx - ay * by - az * bz,
        aw * bx + ax * bw + ay * bz - az * by,
        aw * by - ax * bz + ay * bw + az * bx,
        aw * bz + ax * by - ay * bx + az * bw,
    )


def _turn(x: Tensor, y: Tensor, z: Tensor) -> Quaternion:
    """The rotation by a vector [rad]: ``(cos r, sin(r) / r v / 2)`` with ``r = |v| / 2``; smooth through 0, where it is a series in ``r^2``."""
    square = 0.25 * (x * x + y * y + z * z)
    small = square < SMALL
    angle = torch.sqrt(torch.where(small, 1.0, square))
    cos = torch.where(small, 1.0 - square / 2 * (1.0 - square / 12 * (1.0 - square / 30 * (1.0 - square / 56))), torch.cos(angle))
    sinc = torch.where(small, 1.0 - square / 6 * (1.0 - square / 20 * (1.0 - square / 42 * (1.0 - square / 72))), torch.sin(angle) / angle)
    return cos, 0.5 * sinc * x, 0.5 * sinc * y, 0.5 * sinc * z


def _normalise(q: Quaternion) -> Quaternion:
    w, x, y, z = q
    scale = torch.rsqrt(w * w + x * x + y * y + z * z)
    return w * scale, x * scale, y * scale, z * scale


def _rotation(q: Quaternion) -> tuple[Tensor, ...]:
    """The nine entries of the rotation matrix of a unit quaternion, row-major."""
    w, x, y, z = q
    return (
        1.0 - 2.0 * (y * y + z * z),
        2.0 * (x * y - w * z),
        2.0 * (x * z + w * y),
        2.0 * (x * y + w * z),
        1.0 - 2.0 * (x * x + z * z),
        2.0 * (y * z - w * x),
        2.0 * (x * z - w * y),
        2.0 * (y * z + w * x),
        1.0 - 2.0 * (x * x + y * y),
    )


def _square(x: Tensor) -> Tensor:
    """Squared length of a vector, summed in a fixed order."""
    total = x[0] * x[0]
    for i in range(1, x.shape[0]):
        total = total + x[i] * x[i]
    return total


def _cost(square: Tensor) -> Tensor:
    """``sqrt(1 + s) - 1`` without cancellation at small ``s``."""
    return square / (torch.sqrt(1.0 + square) + 1.0)


def _hover(p: QuadrotorParams) -> Tensor:
    """``[4]`` the command that carries the weight."""
    thrust = 2.0 * p.mass * p.gravity / p.max_thrust - 1.0
    zero = torch.zeros_like(thrust)
    return torch.stack((thrust, zero, zero, zero))


def _reset(key: Tensor, env_params: QuadrotorParams, kept: int) -> QuadrotorState:
    p = env_params
    u = 2.0 * rng.uniform(key, (12,), dtype=p.mass.dtype) - 1.0
    zero = torch.zeros_like(u[0])
    attitude = _product(_turn(zero, zero, u[3] * p.initial_yaw), _turn(u[4] * p.initial_tilt, u[5] * p.initial_tilt, zero))
    return QuadrotorState(
        position=torch.stack((u[0] * p.initial_position, u[1] * p.initial_position, u[2] * p.initial_height)),
        attitude=torch.stack(_normalise(attitude)),
        velocity=u[6:9] * p.initial_speed,
        rates=u[9:12] * p.initial_rate,
        commands=_hover(p).expand(kept, 4).clone(),
    )


def _observe(env_state: QuadrotorState, env_params: QuadrotorParams) -> Tensor:
    s = env_state
    w, x, y, z = s.attitude.unbind()
    return torch.cat((s.position, torch.stack(_rotation((w, x, y, z))), s.velocity, s.rates, s.commands.reshape(-1)))


def _step(env_state: QuadrotorState, action: Tensor, env_params: QuadrotorParams, delay: int) -> tuple[QuadrotorState, Outcome]:
    if action.shape != (4,):
        raise ValueError(f"action of one row must have shape (4,), got {tuple(action.shape)}")
    s, p = env_state, env_params
    command = clip(action, -1.0, 1.0)
    acting = s.commands[delay - 1] if delay else command
    target = torch.stack((p.max_rate * acting[1], p.max_rate * acting[2], p.max_yaw_rate * acting[3]))
    rates = target + (s.rates - target) * torch.exp(-p.dt / p.rate_lag)
    w, x, y, z = s.attitude.unbind()
    turned = _normalise(_product((w, x, y, z), _turn(*(p.dt * rates).unbind())))
    push = p.max_thrust / p.mass * 0.5 * (1.0 + acting[0])
    _, _, up_x, _, _, up_y, _, _, up_z = _rotation(turned)
    velocity = s.velocity + p.dt * torch.stack((push * up_x, push * up_y, push * up_z - p.gravity))
    position = s.position + p.dt * velocity
    reward = -(
        _cost(p.sharpness.square() * _square(position)) / p.sharpness
        + VELOCITY_WEIGHT * _cost(_square(velocity))
        + RATE_WEIGHT * _cost(_square(rates))
        + EFFORT_WEIGHT * _square(command - _hover(p))
        + SMOOTHNESS_WEIGHT * _square(command - s.commands[0])
    )
    new = QuadrotorState(
        position=position,
        attitude=torch.stack(turned),
        velocity=velocity,
        rates=rates,
        commands=torch.cat((command[None], s.commands[:-1])),
    )
    distance = torch.sqrt(_square(position.detach()))
    success = distance < p.success_distance
    metrics = {"success": success, "final_distance": distance, "final_speed": torch.sqrt(_square(velocity.detach()))}
    return new, Outcome(reward=reward, terminated=torch.zeros_like(success), metrics=metrics)


def _scene(env_state: QuadrotorState, env_params: QuadrotorParams) -> Scene:
    """Seen along the world's y axis."""
    s, p = env_state, env_params
    x, y, z = (float(v) for v in s.position)
    w, i, j, k = s.attitude.unbind()
    r = [float(v) for v in _rotation((w, i, j, k))]
    arm, height, reach = 0.2, 0.08, 1.2 * max(float(p.initial_position), 1.0)
    shapes: list[Circle | Line] = [Circle((0.0, 0.0), float(p.success_distance), color="tab:green")]
    for a, b in ((1, 1), (-1, 1), (-1, -1), (1, -1)):
        end = (x + arm * (a * r[0] + b * r[1]), z + arm * (a * r[6] + b * r[7]))
        shapes.append(Line([(x, z), end], color="black", width=3.0))
        shapes.append(Circle(end, 0.3 * arm, color="tab:blue", filled=False))
    thrust = height + 0.4 * 0.5 * (1.0 + float(s.commands[-1, 0]))
    shapes.append(Line([(x, z), (x + thrust * r[2], z + thrust * r[8])], color="tab:red"))
    return Scene(
        xlim=(-reach, reach), ylim=(-reach, reach), shapes=shapes, caption=f"{math.hypot(x, y, z):.2f} m from the goal, of which {y:+.2f} m into the picture"
    )
