"""PointMass: a damped mass is pushed to a goal in a walled square, around two soft obstacles.

The smallest task on which analytic gradients, model-free methods and evaluation can all be compared: smooth inside the walls, with a terminating goal and
penalties instead of contacts. All physical numbers are leaves of ``env_params``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor

from frl import rng
from frl.envs.check import require_count, require_number, space_dtype
from frl.envs.env import Env, EnvSpec
from frl.envs.scene import Circle, Line, Scene
from frl.numerics import safe_sqrt
from frl.types import Outcome

GOAL_SPREAD, START_SPREAD, OBSTACLE_SPREAD = 0.7, 0.6, 0.8  # half-widths of the reset distributions, as fractions of workspace_half
FALLBACK = -0.5  # an obstacle with no valid candidate sits at this multiple of the goal
BONUS_HEIGHT, BONUS_WIDTH = 0.5, 0.05  # dense bonus around the goal; width in [m]
OBSTACLE_WEIGHT, SPEED_WEIGHT, SMOOTHNESS_WEIGHT = 2.0, 0.01, 0.001


class PointMassParams(NamedTuple):
    """Physical parameters, each ``[]``."""

    mass: Tensor  # [kg]
    force_scale: Tensor  # force at full action [N]
    linear_damping: Tensor  # rate of velocity decay [1/s], not divided by the mass
    dt: Tensor  # step size [s]
    success_threshold: Tensor  # distance below which the goal counts as reached [m]
    success_bonus: Tensor  # reward on reaching the goal
    workspace_half: Tensor  # half side of the square [m]
    obstacle_radius_min: Tensor  # [m]
    obstacle_radius_max: Tensor  # [m]
    obstacle_min_goal_distance: Tensor  # obstacle centres keep farther than this from the goal [m]


class PointMassState(NamedTuple):
    """State of one row."""

    position: Tensor  # [2] m
    velocity: Tensor  # [2] m/s
    goal: Tensor  # [2] m
    last_action: Tensor  # [2] in [-1, 1]
    obstacles: Tensor  # [2, 2] centres, m
    radii: Tensor  # [2] m
    path_length: Tensor  # [] m, carries no gradient
    collisions: Tensor  # [] steps with any penetration so far


def point_mass(
    *,
    max_episode_steps: int | None = 100,
    workspace_half: float = 1.0,
    mass: float = 1.0,
    force_scale: float = 5.0,
    linear_damping: float = 5.0,
    dt: float = 1 / 60,
    success_threshold: float = 0.03,
    success_bonus: float = 0.0,
    obstacle_radius_range: Sequence[float] = (0.08, 0.15),
    obstacle_min_goal_distance: float = 0.25,
    obstacle_candidates: int = 8,
    detach_last_action: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Env:
    """Build the point-mass navigation task.

    With the action ``a`` clamped to ``[-1, 1]``::

        v' = v (1 - linear_damping dt) + a force_scale / mass dt
        x' = clamp(x + v' dt, -workspace_half, workspace_half)         the velocity is kept at a wall
        d  = |x' - goal|,   p_k = max(radius_k - |x' - centre_k|, 0)
        reward = -d + 0.5 exp(-d^2 / (2 0.05^2)) - 2 (p_1^2 + p_2^2) - 0.01 |v'|^2 - 0.001 |a - a_last|^2 + success_bonus [d < success_threshold]

    The episode terminates at ``d < success_threshold``. Gradients are those of ``torch.clamp``: zero through a saturated action and through a wall. The
    distance has gradient zero at the goal itself. Termination and bonus have none.

    Observation ``[14]``: position (2), velocity (2), goal (2), last action (2), obstacle centres (2x2, row-major), radii (2).
    Metrics (cut from the graph): ``success``, ``final_distance`` [m], ``path_length`` [m], ``collision_count`` [steps].

    A reset draws, in units of ``workspace_half``, the goal from ``U(-0.7, 0.7)^2``, the start from ``U(-0.6, 0.6)^2`` and ``obstacle_candidates`` places from
    ``U(-0.8, 0.8)^2``. The obstacles are the first two places farther than ``obstacle_min_goal_distance`` from the goal, or ``-0.5 goal`` for what is missing.

    Args:
        max_episode_steps: time limit [steps], or ``None``.
        workspace_half: half side of the square [m].
        mass: [kg].
        force_scale: force at full action [N].
        linear_damping: velocity decay rate [1/s].
        dt: step size [s].
        success_threshold: goal radius [m].
        success_bonus: reward on reaching the goal, at least 0.
        obstacle_radius_range: smallest and largest obstacle radius [m].
        obstacle_min_goal_distance: clearance between obstacle centre and goal [m], at least 0.
        obstacle_candidates: draws for the two obstacles together.
        detach_last_action: cut the remembered action from the graph, so that neither the smoothness term nor the observation passes a gradient to the
            action of the step before. The gradient of a rollout is then not exact.
        dtype: ``torch.float32`` or ``torch.float64``, of the default parameters; states follow their parameters.

    Raises:
        ValueError: an argument is outside its range.
    """
    if max_episode_steps is not None:
        require_count("max_episode_steps", max_episode_steps)
    require_count("obstacle_candidates", obstacle_candidates)
    if not isinstance(detach_last_action, bool):
        raise ValueError(f"detach_last_action must be true or false, got {detach_last_action!r}")
    if isinstance(obstacle_radius_range, str) or not isinstance(obstacle_radius_range, Sequence) or len(obstacle_radius_range) != 2:
        raise ValueError(f"obstacle_radius_range must be two numbers, got {obstacle_radius_range!r}")
    radius_min = require_number("obstacle_radius_range[0]", obstacle_radius_range[0], above=0.0)
    radius_max = require_number("obstacle_radius_range[1]", obstacle_radius_range[1], at_least=radius_min)
    values = {
        "mass": require_number("mass", mass, above=0.0),
        "force_scale": require_number("force_scale", force_scale, above=0.0),
        "linear_damping": require_number("linear_damping", linear_damping, at_least=0.0),
        "dt": require_number("dt", dt, above=0.0),
        "success_threshold": require_number("success_threshold", success_threshold, above=0.0),
        "success_bonus": require_number("success_bonus", success_bonus, at_least=0.0),
        "workspace_half": require_number("workspace_half", workspace_half, above=0.0),
        "obstacle_radius_min": radius_min,
        "obstacle_radius_max": radius_max,
        "obstacle_min_goal_distance": require_number("obstacle_min_goal_distance", obstacle_min_goal_distance, at_least=0.0),
    }
    box_dtype = space_dtype(dtype)

    def reset(key: Tensor, env_params: PointMassParams) -> PointMassState:
        return _reset(key, env_params, obstacle_candidates)

    def step(env_state: PointMassState, action: Tensor, env_params: PointMassParams) -> tuple[PointMassState, Outcome]:
        return _step(env_state, action, env_params, detach_last_action)

    return Env(
        spec=EnvSpec(name="point_mass", max_episode_steps=max_episode_steps, dt=values["dt"], differentiable=True),
        observation_space=spaces.Box(-float("inf"), float("inf"), (14,), dtype=box_dtype),
        action_space=spaces.Box(-1.0, 1.0, (2,), dtype=box_dtype),
        default_params=PointMassParams(**{name: torch.tensor(value, dtype=dtype) for name, value in values.items()}),
        reset=reset,
        observe=_observe,
        step=step,
        scene=_scene,
    )


def _length(x: Tensor) -> Tensor:
    """2-norm of the last dimension with gradient 0 at 0. Coordinates are of the size of a room, so the squares need no guard against overflow."""
    return safe_sqrt(x.square().sum(-1))


def _reset(key: Tensor, env_params: PointMassParams, candidates: int) -> PointMassState:
    # One draw for everything: resets are made for whole blocks of rows and steps, where the number of generator calls is the cost.
    draw = rng.uniform(key, (6 + 2 * candidates,), dtype=env_params.workspace_half.dtype)
    centred = (2.0 * draw - 1.0) * env_params.workspace_half
    goal = GOAL_SPREAD * centred[0:2]
    proposals = OBSTACLE_SPREAD * centred[6:].reshape(candidates, 2)
    valid = _length(proposals - goal) > env_params.obstacle_min_goal_distance
    first = second = FALLBACK * goal
    # From the last candidate to the first, so that the first valid ones win; selects fuse into one kernel, an index look-up does not.
    for i in reversed(range(candidates)):
        second = torch.where(valid[i], first, second)
        first = torch.where(valid[i], proposals[i], first)
    radii = env_params.obstacle_radius_min + (env_params.obstacle_radius_max - env_params.obstacle_radius_min) * draw[4:6]
    return PointMassState(
        position=START_SPREAD * centred[2:4],
        velocity=torch.zeros_like(goal),
        goal=goal,
        last_action=torch.zeros_like(goal),
        obstacles=torch.stack((first, second)),
        radii=radii,
        path_length=torch.zeros_like(goal[0]),
        collisions=torch.zeros_like(goal[0]),
    )


def _observe(env_state: PointMassState, env_params: PointMassParams) -> Tensor:
    s = env_state
    return torch.cat((s.position, s.velocity, s.goal, s.last_action, s.obstacles.reshape(4), s.radii))


def _step(env_state: PointMassState, action: Tensor, env_params: PointMassParams, detach_last_action: bool) -> tuple[PointMassState, Outcome]:
    if action.shape != (2,):
        raise ValueError(f"action of one row must have shape (2,), got {tuple(action.shape)}")
    s, p = env_state, env_params
    thrust = action.clamp(-1.0, 1.0)
    velocity = s.velocity * (1.0 - p.linear_damping * p.dt) + thrust * (p.force_scale / p.mass * p.dt)
    position = torch.clamp(s.position + velocity * p.dt, -p.workspace_half, p.workspace_half)
    distance = _length(position - s.goal)
    penetration = torch.clamp(s.radii - _length(position - s.obstacles), min=0.0)
    terminated = distance < p.success_threshold
    reward = (
        BONUS_HEIGHT * torch.exp(distance.square() * (-0.5 / BONUS_WIDTH**2))
        - distance
        - OBSTACLE_WEIGHT * penetration.square().sum(-1)
        - SPEED_WEIGHT * velocity.square().sum(-1)
        - SMOOTHNESS_WEIGHT * (thrust - s.last_action).square().sum(-1)
        + p.success_bonus * terminated
    )
    path_length = s.path_length + _length((position - s.position).detach())
    collisions = s.collisions + (penetration > 0.0).any(-1)
    new_state = s._replace(
        position=position,
        velocity=velocity,
        last_action=thrust.detach() if detach_last_action else thrust,
        path_length=path_length,
        collisions=collisions,
    )
    # Metrics are for the log: left in the graph, each would cost the backward pass a cotangent per step.
    metrics = {"success": terminated, "final_distance": distance.detach(), "path_length": path_length, "collision_count": collisions}
    return new_state, Outcome(reward=reward, terminated=terminated, metrics=metrics)


def _scene(env_state: PointMassState, env_params: PointMassParams) -> Scene:
    """The mass (blue) with its thrust, the goal (green), obstacles (grey) and walls."""
    (x, y), (goal_x, goal_y), (push_x, push_y) = (tuple(float(v) for v in part) for part in (env_state.position, env_state.goal, env_state.last_action))
    half, near = float(env_params.workspace_half), float(env_params.success_threshold)
    walls = [(-half, -half), (half, -half), (half, half), (-half, half), (-half, -half)]
    obstacles = [
        Circle(center=(float(centre[0]), float(centre[1])), radius=float(radius), color="silver")
        for centre, radius in zip(env_state.obstacles, env_state.radii, strict=True)
    ]
    mass = 0.03 * half
    reach = 0.15 * half
    return Scene(
        xlim=(-1.05 * half, 1.05 * half),
        ylim=(-1.05 * half, 1.05 * half),
        shapes=[
            Line(points=walls, color="dimgray"),
            *obstacles,
            Circle(center=(goal_x, goal_y), radius=near, color="tab:green"),
            Circle(center=(goal_x, goal_y), radius=near + mass, color="tab:green", filled=False),
            Line(points=[(x, y), (x + reach * push_x, y + reach * push_y)], color="tab:orange"),
            Circle(center=(x, y), radius=mass),
        ],
        caption=f"distance {math.hypot(goal_x - x, goal_y - y):.2f} m",
    )
