"""Cart-pole: keep a pole upright on a cart by pushing the cart left or right.

The dynamics, reward, reset and limits of gymnasium's ``CartPole-v1``, as a function of the state, the choice and the parameters.
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
from frl.envs.scene import Circle, Line, Polygon, Scene
from frl.types import Outcome


class CartPoleParams(NamedTuple):
    """Physical parameters, each ``[]``."""

    gravity: Tensor  # [m/s^2]
    masscart: Tensor  # [kg]
    masspole: Tensor  # [kg]
    length: Tensor  # half the length of the pole [m]
    force_mag: Tensor  # size of a push [N]
    tau: Tensor  # step size [s]
    theta_threshold: Tensor  # the pole has fallen beyond +- this angle [rad]
    x_threshold: Tensor  # the track ends at +- this position [m]
    initial_range: Tensor  # each number of the first state is uniform within +- this


class CartPoleState(NamedTuple):
    """State of one row."""

    x: Tensor  # [] position of the cart [m]
    x_dot: Tensor  # [] [m/s]
    theta: Tensor  # [] angle of the pole [rad], 0 is upright
    theta_dot: Tensor  # [] [rad/s]


def cartpole(
    *,
    max_episode_steps: int | None = 500,
    gravity: float = 9.8,
    masscart: float = 1.0,
    masspole: float = 0.1,
    length: float = 0.5,
    force_mag: float = 10.0,
    tau: float = 0.02,
    theta_threshold: float = 12 * 2 * math.pi / 360,
    x_threshold: float = 2.4,
    initial_range: float = 0.05,
    dtype: torch.dtype = torch.float32,
) -> Env:
    """Build the cart-pole task.

    With the push ``F = force_mag`` for action 1 and ``-force_mag`` for action 0, ``m = masspole``, ``M = masscart + masspole`` and ``l = length``::

        u = (F + m l theta_dot^2 sin(theta)) / M
        theta_acc = (g sin(theta) - u cos(theta)) / (l (4/3 - m cos(theta)^2 / M))
        x_acc = u - m l theta_acc cos(theta) / M

    and one explicit Euler step: positions move with the old velocities. The reward is 1 in every step, the one that ends the episode included; it ends when
    ``|x| > x_threshold`` or ``|theta| > theta_threshold``. The step is smooth in state and parameters, but its return is constant between endings and
    its action is a choice, so the environment counts as not differentiable.

    Observation ``[4]``: ``x``, ``x_dot``, ``theta``, ``theta_dot``. Action: ``Discrete(2)``, an integer ``[]``.
    Metrics: ``success``, the pole stands after the step, so that an episode succeeds if it reaches the time limit (this library's addition).

    Args:
        max_episode_steps: time limit [steps], or ``None``.
        gravity: [m/s^2], at least 0.
        masscart: [kg].
        masspole: [kg].
        length: half the length of the pole [m].
        force_mag: size of a push [N], at least 0.
        tau: step size [s].
        theta_threshold: largest angle of a standing pole [rad].
        x_threshold: largest distance from the middle of the track [m].
        initial_range: half-width of the reset distribution, at least 0.
        dtype: ``torch.float32`` or ``torch.float64``, of the default parameters; states follow their parameters.

    Raises:
        ValueError: an argument is outside its range.

    Source: gymnasium, ``envs/classic_control/cartpole.py``, ``CartPole-v1``, after Barto, Sutton, Anderson 1983.
    """
    if max_episode_steps is not None:
        require_count("max_episode_steps", max_episode_steps)
    values = {
        "gravity": require_number("gravity", gravity, at_least=0.0),
        "masscart": require_number("masscart", masscart, above=0.0),
        "masspole": require_number("masspole", masspole, above=0.0),
        "length": require_number("length", length, above=0.0),
        "force_mag": require_number("force_mag", force_mag, at_least=0.0),
        "tau": require_number("tau", tau, above=0.0),
        "theta_threshold": require_number("theta_threshold", theta_threshold, above=0.0),
        "x_threshold": require_number("x_threshold", x_threshold, above=0.0),
        "initial_range": require_number("initial_range", initial_range, at_least=0.0),
    }
    box_dtype = space_dtype(dtype)
    # Twice the thresholds, so that the observation of an ended episode still lies inside.
    high = np.array([2 * values["x_threshold"], np.inf, 2 * values["theta_threshold"], np.inf], dtype=box_dtype)
    return Env(
        spec=EnvSpec(name="cartpole", max_episode_steps=max_episode_steps, dt=values["tau"], differentiable=False),
        observation_space=spaces.Box(-high, high, dtype=box_dtype),
        action_space=spaces.Discrete(2),
        default_params=CartPoleParams(**{name: torch.tensor(value, dtype=dtype) for name, value in values.items()}),
        reset=_reset,
        observe=_observe,
        step=_step,
        scene=_scene,
    )


def _reset(key: Tensor, env_params: CartPoleParams) -> CartPoleState:
    p = env_params
    centred = 2.0 * rng.uniform(key, (4,), dtype=p.initial_range.dtype) - 1.0
    return CartPoleState(*(centred * p.initial_range).unbind())


def _observe(env_state: CartPoleState, env_params: CartPoleParams) -> Tensor:
    return torch.stack(tuple(env_state))


def _step(env_state: CartPoleState, action: Tensor, env_params: CartPoleParams) -> tuple[CartPoleState, Outcome]:
    if action.shape != ():
        raise ValueError(f"action of one row must be one choice of shape (), got {tuple(action.shape)}")
    p, (x, x_dot, theta, theta_dot) = env_params, env_state
    force = torch.where(action == 1, p.force_mag, -p.force_mag)
    total_mass, moment = p.masscart + p.masspole, p.masspole * p.length
    cos, sin = torch.cos(theta), torch.sin(theta)
    push = (force + moment * theta_dot.square() * sin) / total_mass
    theta_acc = (p.gravity * sin - cos * push) / (p.length * (4.0 / 3.0 - p.masspole * cos.square() / total_mass))
    x_acc = push - moment * theta_acc * cos / total_mass
    new = CartPoleState(
        x=x + p.tau * x_dot,
        x_dot=x_dot + p.tau * x_acc,
        theta=theta + p.tau * theta_dot,
        theta_dot=theta_dot + p.tau * theta_acc,
    )
    terminated = (new.x.abs() > p.x_threshold) | (new.theta.abs() > p.theta_threshold)
    return new, Outcome(reward=torch.ones_like(new.x), terminated=terminated, metrics={"success": ~terminated})


def _scene(env_state: CartPoleState, env_params: CartPoleParams) -> Scene:
    """Track with its ends, cart and pole; positive angles lean to the right."""
    x, theta = float(env_state.x), float(env_state.theta)
    end, pole = float(env_params.x_threshold), 2.0 * float(env_params.length)
    half, height = 0.2 * pole, 0.2 * pole
    tip = (x + pole * math.sin(theta), height + pole * math.cos(theta))
    return Scene(
        xlim=(-end - half, end + half),
        ylim=(-0.1 * pole, height + 1.1 * pole),
        shapes=[
            Line(points=[(-end, 0.0), (end, 0.0)], color="dimgray"),
            *(Line(points=[(side, 0.0), (side, height)], color="tab:red") for side in (-end, end)),
            Polygon(points=[(x - half, 0.0), (x + half, 0.0), (x + half, height), (x - half, height)]),
            Line(points=[(x, height), tip], color="tab:orange", width=6.0),
            Circle(center=(x, height), radius=0.04 * pole, color="black"),
        ],
        caption=f"angle {math.degrees(theta):+.1f} deg",
    )
