"""Double integrator: frictionless masses on a line, a quadratic cost, and the exact solution.

The linear-quadratic task: returns, gradients and the best policy are known in closed form, so an algorithm can be checked against the truth. The axes do not
interact, which lets the number of dimensions grow while the solution stays a 2x2 Riccati recursion.
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
from frl.envs.scene import Line, Polygon, Scene
from frl.types import Outcome


class DoubleIntegratorParams(NamedTuple):
    """Physical parameters and cost weights, each ``[]``."""

    mass: Tensor  # [kg]
    dt: Tensor  # step size [s]
    position_weight: Tensor  # q_x [1/m^2]
    velocity_weight: Tensor  # q_v [s^2/m^2]
    action_weight: Tensor  # r [1/N^2]
    initial_position: Tensor  # the first position is uniform within +- this [m]
    initial_velocity: Tensor  # the first velocity is uniform within +- this [m/s]
    success_threshold: Tensor  # at rest at the origin: |x| [m] and |v| [m/s] both below this


class DoubleIntegratorState(NamedTuple):
    """State of one row."""

    position: Tensor  # [n] m
    velocity: Tensor  # [n] m/s


def double_integrator(
    *,
    dimensions: int = 1,
    max_episode_steps: int | None = 100,
    mass: float = 1.0,
    dt: float = 0.1,
    position_weight: float = 1.0,
    velocity_weight: float = 0.1,
    action_weight: float = 0.1,
    initial_position: float = 1.0,
    initial_velocity: float = 0.5,
    success_threshold: float = 0.05,
    dtype: torch.dtype = torch.float32,
) -> Env:
    """Build the linear-quadratic regulation task with ``n = dimensions`` independent axes.

    The action is a force [N], held over the step and not bounded::

        reward = -(position_weight |x|^2 + velocity_weight |v|^2 + action_weight |a|^2)          at the state before the step
        x' = x + dt v + dt^2 / (2 mass) a
        v' = v + dt / mass a

    It never terminates. Observation ``[2n]``: position (n), velocity (n). Metrics (cut from the graph): ``success`` (``|x'|`` and ``|v'|`` both below
    ``success_threshold``), ``final_distance`` ``|x'|`` [m]. See :func:`lqr_gain` and :func:`optimal_return` for the solution.

    Args:
        dimensions: number of axes.
        max_episode_steps: time limit [steps], or ``None``.
        mass: [kg].
        dt: step size [s].
        position_weight: at least 0.
        velocity_weight: at least 0.
        action_weight: above 0, without which the best action is not unique.
        initial_position: half-width of the reset distribution of the position [m], at least 0.
        initial_velocity: half-width of the reset distribution of the velocity [m/s], at least 0.
        success_threshold: tolerance of the success metric.
        dtype: ``torch.float32`` or ``torch.float64``, of the default parameters; states follow their parameters.

    Raises:
        ValueError: an argument is outside its range.
    """
    require_count("dimensions", dimensions)
    if max_episode_steps is not None:
        require_count("max_episode_steps", max_episode_steps)
    values = {
        "mass": require_number("mass", mass, above=0.0),
        "dt": require_number("dt", dt, above=0.0),
        "position_weight": require_number("position_weight", position_weight, at_least=0.0),
        "velocity_weight": require_number("velocity_weight", velocity_weight, at_least=0.0),
        "action_weight": require_number("action_weight", action_weight, above=0.0),
        "initial_position": require_number("initial_position", initial_position, at_least=0.0),
        "initial_velocity": require_number("initial_velocity", initial_velocity, at_least=0.0),
        "success_threshold": require_number("success_threshold", success_threshold, above=0.0),
    }
    infinity, box_dtype = float("inf"), space_dtype(dtype)

    def reset(key: Tensor, env_params: DoubleIntegratorParams) -> DoubleIntegratorState:
        centred = 2.0 * rng.uniform(key, (2 * dimensions,), dtype=env_params.mass.dtype) - 1.0
        return DoubleIntegratorState(position=centred[:dimensions] * env_params.initial_position, velocity=centred[dimensions:] * env_params.initial_velocity)

    return Env(
        spec=EnvSpec(name="double_integrator", max_episode_steps=max_episode_steps, dt=values["dt"], differentiable=True),
        observation_space=spaces.Box(-infinity, infinity, (2 * dimensions,), dtype=box_dtype),
        action_space=spaces.Box(-infinity, infinity, (dimensions,), dtype=box_dtype),
        default_params=DoubleIntegratorParams(**{name: torch.tensor(value, dtype=dtype) for name, value in values.items()}),
        reset=reset,
        observe=_observe,
        step=_step,
        scene=_scene,
    )


def lqr_gain(env_params: DoubleIntegratorParams, horizon: int, gamma: float = 1.0) -> Tensor:
    """Gains of the best policy for the discounted return of ``horizon`` steps: ``a_t = -(K_t[0] x_t + K_t[1] v_t)`` on every axis.

    Args:
        env_params: parameters, each ``[]``.
        horizon: number of steps ``T``, at least 1.
        gamma: discount, above 0 and at most 1.

    Returns:
        ``K`` ``[T, 2]``, float64. The last row is zero: the last action changes no reward but its own cost.

    Raises:
        ValueError: ``horizon`` or ``gamma`` is outside its range.

    Source: Bertsekas, Dynamic Programming and Optimal Control, vol. 1, section 3.1, with discounting: ``K = gamma B'PA / (r + gamma B'PB)``,
    ``P <- Q + gamma A'P(A - BK)`` from ``P = 0`` at the end.
    """
    return _riccati(env_params, horizon, gamma)[0]


def optimal_return(env_state: DoubleIntegratorState, env_params: DoubleIntegratorParams, horizon: int, gamma: float = 1.0) -> Tensor:
    """The largest discounted return of ``horizon`` steps from a state: ``-sum_i z_i' P_0 z_i`` over the axes, with ``z_i = (x_i, v_i)``.

    Args:
        env_state: ``[..., n]`` position and velocity.
        env_params: parameters, each ``[]``.
        horizon: number of steps, at least 1.
        gamma: discount, above 0 and at most 1.

    Returns:
        ``[...]``, float64.

    Raises:
        ValueError: ``horizon`` or ``gamma`` is outside its range.
    """
    cost = _riccati(env_params, horizon, gamma)[1]
    z = torch.stack((env_state.position, env_state.velocity), dim=-1).to(torch.float64)
    return -((z @ cost) * z).sum((-1, -2))


def _riccati(env_params: DoubleIntegratorParams, horizon: int, gamma: float) -> tuple[Tensor, Tensor]:
    require_count("horizon", horizon)
    require_number("gamma", gamma, above=0.0, at_most=1.0)
    mass, dt, q_x, q_v, r = (x.to(torch.float64) for x in env_params[:5])
    one, zero = torch.ones_like(mass), torch.zeros_like(mass)
    a = torch.stack((torch.stack((one, dt)), torch.stack((zero, one))))  # [2, 2]
    b = torch.stack((dt.square() / (2.0 * mass), dt / mass))  # [2]
    q = torch.stack((torch.stack((q_x, zero)), torch.stack((zero, q_v))))  # [2, 2]
    cost = torch.zeros_like(q)
    gains: list[Tensor] = []
    for _ in range(horizon):
        pull = gamma * (b @ cost)  # [2] gamma B'P
        gain = pull @ a / (r + pull @ b)  # [2]
        cost = q + gamma * (a.T @ cost @ (a - torch.outer(b, gain)))
        cost = 0.5 * (cost + cost.T)  # rounding would let the antisymmetric part grow
        gains.append(gain)
    return torch.stack(gains[::-1]), cost


def _observe(env_state: DoubleIntegratorState, env_params: DoubleIntegratorParams) -> Tensor:
    return torch.cat((env_state.position, env_state.velocity))


def _step(env_state: DoubleIntegratorState, action: Tensor, env_params: DoubleIntegratorParams) -> tuple[DoubleIntegratorState, Outcome]:
    if action.shape != env_state.position.shape:
        raise ValueError(f"action of one row must have shape {tuple(env_state.position.shape)}, got {tuple(action.shape)}")
    p, x, v = env_params, env_state.position, env_state.velocity
    reward = -(p.position_weight * x.square().sum(-1) + p.velocity_weight * v.square().sum(-1) + p.action_weight * action.square().sum(-1))
    change = action * (p.dt / p.mass)
    position = x + p.dt * (v + 0.5 * change)
    velocity = v + change
    distance = torch.linalg.vector_norm(position.detach(), dim=-1)
    speed = torch.linalg.vector_norm(velocity.detach(), dim=-1)
    success = (distance < p.success_threshold) & (speed < p.success_threshold)
    outcome = Outcome(reward=reward, terminated=torch.zeros_like(success), metrics={"success": success, "final_distance": distance})
    return DoubleIntegratorState(position=position, velocity=velocity), outcome


def _scene(env_state: DoubleIntegratorState, env_params: DoubleIntegratorParams) -> Scene:
    """One rail for each axis, the first on top: the mass (blue), its velocity over a second (orange), and where it shall rest (green)."""
    places, speeds = ([float(v) for v in part] for part in (env_state.position, env_state.velocity))
    reach = max(1.5 * float(env_params.initial_position), 1e-3)
    gap, half = 0.4 * reach, 0.06 * reach
    shapes: list[Line | Polygon] = []
    for axis, (x, v) in enumerate(zip(places, speeds, strict=True)):
        y = gap * (len(places) - 1 - axis)
        shapes += [
            Line(points=[(-reach, y), (reach, y)], color="silver"),
            Line(points=[(0.0, y - 2 * half), (0.0, y + 2 * half)], color="tab:green"),
            Polygon(points=[(x - half, y - half), (x + half, y - half), (x + half, y + half), (x - half, y + half)]),
            Line(points=[(x, y), (x + v, y)], color="tab:orange"),
        ]
    farthest = max(abs(x) for x in places)
    return Scene(
        xlim=(-max(reach, farthest + half), max(reach, farthest + half)),
        ylim=(-gap, gap * len(places)),
        shapes=shapes,
        caption=f"distance {math.hypot(*places):.2f} m",
    )
