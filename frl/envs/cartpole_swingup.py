"""Cart-pole swing-up: drive a cart so that the pole hanging from it swings up and stands.

The task of the SHAC paper: a continuous force, the pole starts around hanging, a smooth cost, no termination.
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
from frl.envs.scene import Line, Polygon, Scene
from frl.numerics import clip
from frl.types import Outcome

FAR = 1000.0  # the track of a picture goes on beyond its frame, and frames of one episode share the widest limits [m]


class CartPoleSwingUpParams(NamedTuple):
    """Physical parameters, each ``[]``."""

    gravity: Tensor  # [m/s^2]
    mass_cart: Tensor  # [kg]
    mass_pole: Tensor  # [kg], uniform along the pole
    length: Tensor  # of the whole pole [m]
    max_force: Tensor  # force at full action [N]
    dt: Tensor  # step size [s]
    position_weight: Tensor  # of the squared position in the cost, relative to the squared angle [1/m^2]
    velocity_weight: Tensor  # of the squared velocity of the cart [s^2/m^2]
    angular_velocity_weight: Tensor  # of the squared angular velocity of the pole [s^2]
    initial_position: Tensor  # the cart starts uniformly within +- this [m]
    initial_angle: Tensor  # the pole starts uniformly within +- this of hanging [rad]
    initial_speed: Tensor  # both speeds start uniformly within +- this [m/s], [rad/s]
    success_angle: Tensor  # upright: |angle| below this [rad]
    success_speed: Tensor  # still: |angular velocity| below this [rad/s]
    success_time: Tensor  # how long it has to be upright and still [s]


class CartPoleSwingUpState(NamedTuple):
    """State of one row."""

    position: Tensor  # [] of the cart, m
    angle: Tensor  # [] rad, 0 is upright, not wrapped
    velocity: Tensor  # [] m/s
    angular_velocity: Tensor  # [] rad/s
    held: Tensor  # [] steps upright and still until now, without interruption; carries no gradient


def cartpole_swingup(
    *,
    max_episode_steps: int | None = 240,
    substeps: int = 4,
    gravity: float = 9.81,
    mass_cart: float = 50.0,
    mass_pole: float = 2.5,
    length: float = 1.0,
    max_force: float = 1000.0,
    dt: float = 1 / 60,
    position_weight: float = 0.05,
    velocity_weight: float = 0.1,
    angular_velocity_weight: float = 0.1,
    initial_position: float = math.pi / 2,
    initial_angle: float = math.pi / 2,
    initial_speed: float = 0.25,
    success_angle: float = 0.2,
    success_speed: float = 0.5,
    success_time: float = 2.0,
    dtype: torch.dtype = torch.float32,
) -> Env:
    """Build the cart-pole swing-up task.

    With the action ``a`` clamped to ``[-1, 1]``, ``F = max_force a``, ``m`` and ``M`` the masses of pole and cart, ``l = length / 2`` and ``theta = 0`` upright
    (positive towards positive ``x``)::

        u = (F + m l theta_dot^2 sin(theta)) / (M + m)
        theta_acc = (g sin(theta) - u cos(theta)) / (l (4/3 - m cos(theta)^2 / (M + m)))
        x_acc = u - m l theta_acc cos(theta) / (M + m)

    which ``substeps`` steps of semi-implicit Euler integrate: velocities first, positions with the new velocities. After the step, with ``wrap`` the angle in
    ``[-pi, pi)``::

        reward = -(wrap(theta)^2 + angular_velocity_weight theta_dot^2 + position_weight x^2 + velocity_weight x_dot^2)

    ``wrap`` has slope 1 everywhere, so the reward has a kink where the pole hangs straight down. The track has no end and no episode terminates.

    Observation ``[5]``: ``x``, ``x_dot``, ``sin(theta)``, ``cos(theta)``, ``theta_dot``.
    Metrics (cut from the graph): ``success`` (the pole was upright and still in every step of the last ``success_time``; the cart may still be on its way
    back), ``final_angle`` [rad, absolute and wrapped], ``final_position`` of the cart [m, absolute], ``held_time`` [s] for which the pole has been upright and
    still.

    Args:
        max_episode_steps: time limit [steps], or ``None``.
        substeps: integration steps of one step.
        gravity: [m/s^2], at least 0.
        mass_cart: [kg].
        mass_pole: [kg].
        length: of the whole pole [m].
        max_force: force at full action [N].
        dt: step size [s].
        position_weight: of the squared position of the cart in the cost, at least 0.
        velocity_weight: of its squared velocity, at least 0.
        angular_velocity_weight: of the squared angular velocity of the pole, at least 0.
        initial_position: half-width of the reset distribution of the cart's position [m], at least 0.
        initial_angle: half-width of the reset distribution of the angle around hanging [rad], at least 0.
        initial_speed: half-width of the reset distribution of both speeds [m/s, rad/s], at least 0.
        success_angle: tolerance of the success metric [rad].
        success_speed: tolerance of the success metric [rad/s].
        success_time: duration of the success metric [s].
        dtype: ``torch.float32`` or ``torch.float64``, of the default parameters; states follow their parameters.

    Raises:
        ValueError: an argument is outside its range.

    Source: the equations of Barto, Sutton, Anderson 1983 in the form of gymnasium's ``CartPole-v1``. Task, reward, reset and sizes: ``CartPoleSwingUpEnv`` of
    DFlex, in Xu et al., "Accelerated policy learning with parallel differentiable simulation", ICLR 2022 (masses are those of its boxes at 1000 kg/m^3).
    The soft ends of its track at 4 m are left out; ``success`` is this library's addition.
    """
    require_count("substeps", substeps)
    if max_episode_steps is not None:
        require_count("max_episode_steps", max_episode_steps)
    values = {
        "gravity": require_number("gravity", gravity, at_least=0.0),
        "mass_cart": require_number("mass_cart", mass_cart, above=0.0),
        "mass_pole": require_number("mass_pole", mass_pole, above=0.0),
        "length": require_number("length", length, above=0.0),
        "max_force": require_number("max_force", max_force, above=0.0),
        "dt": require_number("dt", dt, above=0.0),
        "position_weight": require_number("position_weight", position_weight, at_least=0.0),
        "velocity_weight": require_number("velocity_weight", velocity_weight, at_least=0.0),
        "angular_velocity_weight": require_number("angular_velocity_weight", angular_velocity_weight, at_least=0.0),
        "initial_position": require_number("initial_position", initial_position, at_least=0.0),
        "initial_angle": require_number("initial_angle", initial_angle, at_least=0.0),
        "initial_speed": require_number("initial_speed", initial_speed, at_least=0.0),
        "success_angle": require_number("success_angle", success_angle, above=0.0),
        "success_speed": require_number("success_speed", success_speed, above=0.0),
        "success_time": require_number("success_time", success_time, above=0.0),
    }
    box_dtype = space_dtype(dtype)

    def step(env_state: CartPoleSwingUpState, action: Tensor, env_params: CartPoleSwingUpParams) -> tuple[CartPoleSwingUpState, Outcome]:
        return _step(env_state, action, env_params, substeps)

    return Env(
        spec=EnvSpec(name="cartpole_swingup", max_episode_steps=max_episode_steps, dt=values["dt"], differentiable=True),
        observation_space=spaces.Box(-math.inf, math.inf, (5,), dtype=box_dtype),
        action_space=spaces.Box(-1.0, 1.0, (1,), dtype=box_dtype),
        default_params=CartPoleSwingUpParams(**{name: torch.tensor(value, dtype=dtype) for name, value in values.items()}),
        reset=_reset,
        observe=_observe,
        step=step,
        scene=_scene,
    )


def _reset(key: Tensor, env_params: CartPoleSwingUpParams) -> CartPoleSwingUpState:
    p = env_params
    centred = 2.0 * rng.uniform(key, (4,), dtype=p.initial_angle.dtype) - 1.0
    return CartPoleSwingUpState(
        position=centred[0] * p.initial_position,
        angle=centred[1] * p.initial_angle - math.pi,
        velocity=centred[2] * p.initial_speed,
        angular_velocity=centred[3] * p.initial_speed,
        held=torch.zeros_like(centred[0]),
    )


def _observe(env_state: CartPoleSwingUpState, env_params: CartPoleSwingUpParams) -> Tensor:
    s = env_state
    return torch.stack((s.position, s.velocity, torch.sin(s.angle), torch.cos(s.angle), s.angular_velocity))


def _step(env_state: CartPoleSwingUpState, action: Tensor, env_params: CartPoleSwingUpParams, substeps: int) -> tuple[CartPoleSwingUpState, Outcome]:
    if action.shape != (1,):
        raise ValueError(f"action of one row must have shape (1,), got {tuple(action.shape)}")
    p, (x, theta, v, omega, held) = env_params, env_state
    force = p.max_force * clip(action[0], -1.0, 1.0)
    h, half, total = p.dt / substeps, 0.5 * p.length, p.mass_cart + p.mass_pole
    ratio = p.mass_pole / total
    for _ in range(substeps):
        cos, sin = torch.cos(theta), torch.sin(theta)
        push = force / total + ratio * half * omega.square() * sin
        angular_acceleration = (p.gravity * sin - cos * push) / (half * (4.0 / 3.0 - ratio * cos.square()))
        omega = omega + h * angular_acceleration
        v = v + h * (push - ratio * half * angular_acceleration * cos)
        theta = theta + h * omega
        x = x + h * v
    angle = wrap_angle(theta)
    cost = angle.square() + p.angular_velocity_weight * omega.square() + p.position_weight * x.square() + p.velocity_weight * v.square()
    final_angle = angle.detach().abs()
    held = torch.where((final_angle < p.success_angle) & (omega.detach().abs() < p.success_speed), held + 1.0, 0.0)
    held_time = held * p.dt
    # Half a step of slack: a sum of rounded steps may fall short of the time by a rounding error.
    success = held_time > p.success_time - 0.5 * p.dt
    metrics = {"success": success, "final_angle": final_angle, "final_position": x.detach().abs(), "held_time": held_time}
    new = CartPoleSwingUpState(position=x, angle=theta, velocity=v, angular_velocity=omega, held=held)
    return new, Outcome(reward=-cost, terminated=torch.zeros_like(success), metrics=metrics)


def _scene(env_state: CartPoleSwingUpState, env_params: CartPoleSwingUpParams) -> Scene:
    x, angle, length = float(env_state.position), float(env_state.angle), float(env_params.length)
    width, height, reach = 0.5 * length, 0.2 * length, 3.0 * length
    tip = (x + length * math.sin(angle), length * math.cos(angle))
    cart = [(x + i * width / 2, j * height / 2) for i, j in ((-1, -1), (1, -1), (1, 1), (-1, 1))]
    middle = reach * round(x / reach)  # the picture moves along with a cart that leaves it
    return Scene(
        xlim=(middle - reach, middle + reach),
        ylim=(-1.3 * length, 1.3 * length),
        shapes=[
            Line([(middle - FAR, 0.0), (middle + FAR, 0.0)], color="tab:gray", width=1.0),
            Polygon(cart, color="tab:blue"),
            Line([(x, 0.0), tip], color="tab:orange", width=5.0),
        ],
        caption=f"upright and still for {float(env_state.held * env_params.dt):.1f} s",
    )
