"""Planar reach: bend a two-link arm until its tip is at a target. Kinematics only, so that the gradient is exact and cheap."""

from __future__ import annotations

import math
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

DT = 0.1  # nothing moves by itself, so that the length of a step is only a label [s]


class PlanarReachParams(NamedTuple):
    """Geometry and reset distribution, each ``[]``."""

    link_1: Tensor  # length of the link at the base [m]
    link_2: Tensor  # length of the link at the tip [m]
    action_scale: Tensor  # turn of a joint at full action [rad]
    joint_limit: Tensor  # joints stay within +- this [rad]
    initial_joint_scale: Tensor  # joints start uniformly within +- this [rad]
    target_joint_scale: Tensor  # the target is where the tip would be with joints drawn uniformly within +- this [rad]
    success_fraction: Tensor  # success: the tip has come closer than this part of its first distance
    success_threshold: Tensor  # reached: the tip has come closer than this [m]


class PlanarReachState(NamedTuple):
    """State of one row."""

    joints: Tensor  # [2] rad; 0 hangs straight down, the second one is relative to the first
    target: Tensor  # [2] m
    last_action: Tensor  # [2]
    initial_distance: Tensor  # [] of tip and target at the reset, m
    min_distance: Tensor  # [] smallest of this episode so far, the reset included, m; carries no gradient


def planar_reach(
    *,
    max_episode_steps: int | None = 32,
    link_1: float = 1.0,
    link_2: float = 0.8,
    action_scale: float = 0.2,
    joint_limit: float = math.pi,
    initial_joint_scale: float = 0.5,
    target_joint_scale: float = 1.0,
    success_fraction: float = 0.25,
    success_threshold: float = 0.05,
    dtype: torch.dtype = torch.float32,
) -> Env:
    """Build the planar reaching task.

    With the action ``a``, whose bounds of 1 are left to the policy (``clip_actions_to_space``)::

        q' = clamp(q + action_scale a, +-joint_limit)
        tip = (l_1 sin(q_1) + l_2 sin(q_1 + q_2), -l_1 cos(q_1) - l_2 cos(q_1 + q_2))
        reward = -|tip(q') - target|^2

    The gradient is exact; at a joint's limit it is zero for a push outwards. No episode terminates.

    Observation ``[8]``: joints (2), tip (2), target (2), last action (2).
    Metrics (cut from the graph): ``success`` (the smallest distance of the episode is below ``success_fraction`` of its first one), ``reached`` (below
    ``success_threshold``), ``final_distance``, ``min_distance`` and ``initial_distance`` [m].

    Args:
        max_episode_steps: time limit [steps], or ``None``.
        link_1: length of the link at the base [m].
        link_2: length of the link at the tip [m].
        action_scale: turn of a joint at full action [rad].
        joint_limit: bound on the joints [rad].
        initial_joint_scale: half-width of the reset distribution of the joints [rad], at least 0 and at most ``joint_limit``.
        target_joint_scale: half-width of the distribution of the joints that the target is made from [rad], at least 0.
        success_fraction: tolerance of the metric ``success``, a part of the first distance.
        success_threshold: tolerance of the metric ``reached`` [m].
        dtype: ``torch.float32`` or ``torch.float64``, of the default parameters; states follow their parameters.

    Raises:
        ValueError: an argument is outside its range.

    Source: the planar reaching task of EmbodiChain 0.3.2, whose measure, the mean over episodes of the smallest distance, is ``min_distance`` here.
    """
    if max_episode_steps is not None:
        require_count("max_episode_steps", max_episode_steps)
    limit = require_number("joint_limit", joint_limit, above=0.0)
    values = {
        "link_1": require_number("link_1", link_1, above=0.0),
        "link_2": require_number("link_2", link_2, above=0.0),
        "action_scale": require_number("action_scale", action_scale, above=0.0),
        "joint_limit": limit,
        "initial_joint_scale": require_number("initial_joint_scale", initial_joint_scale, at_least=0.0, at_most=limit),
        "target_joint_scale": require_number("target_joint_scale", target_joint_scale, at_least=0.0),
        "success_fraction": require_number("success_fraction", success_fraction, above=0.0),
        "success_threshold": require_number("success_threshold", success_threshold, above=0.0),
    }
    box_dtype = space_dtype(dtype)
    return Env(
        spec=EnvSpec(name="planar_reach", max_episode_steps=max_episode_steps, dt=DT, differentiable=True),
        observation_space=spaces.Box(-math.inf, math.inf, (8,), dtype=box_dtype),
        action_space=spaces.Box(-1.0, 1.0, (2,), dtype=box_dtype),
        default_params=PlanarReachParams(**{name: torch.tensor(value, dtype=dtype) for name, value in values.items()}),
        reset=_reset,
        observe=_observe,
        step=_step,
        scene=_scene,
    )


def _tip(joints: Tensor, p: PlanarReachParams) -> Tensor:
    """Where the tip is, ``[2]``."""
    shoulder, elbow = joints[0], joints[0] + joints[1]
    x = p.link_1 * torch.sin(shoulder) + p.link_2 * torch.sin(elbow)
    y = -p.link_1 * torch.cos(shoulder) - p.link_2 * torch.cos(elbow)
    return torch.stack((x, y))


def _squared(a: Tensor, b: Tensor) -> Tensor:
    return (a[0] - b[0]).square() + (a[1] - b[1]).square()


def _reset(key: Tensor, env_params: PlanarReachParams) -> PlanarReachState:
    p = env_params
    centred = 2.0 * rng.uniform(key, (4,), dtype=p.link_1.dtype) - 1.0
    joints, target = centred[:2] * p.initial_joint_scale, _tip(centred[2:] * p.target_joint_scale, p)
    distance = torch.sqrt(_squared(_tip(joints, p), target).detach())
    return PlanarReachState(joints=joints, target=target, last_action=torch.zeros_like(joints), initial_distance=distance, min_distance=distance)


def _observe(env_state: PlanarReachState, env_params: PlanarReachParams) -> Tensor:
    s = env_state
    return torch.cat((s.joints, _tip(s.joints, env_params), s.target, s.last_action))


def _step(env_state: PlanarReachState, action: Tensor, env_params: PlanarReachParams) -> tuple[PlanarReachState, Outcome]:
    if action.shape != (2,):
        raise ValueError(f"action of one row must have shape (2,), got {tuple(action.shape)}")
    s, p = env_state, env_params
    joints = clip(s.joints + p.action_scale * action, -p.joint_limit, p.joint_limit)
    squared = _squared(_tip(joints, p), s.target)
    distance = torch.sqrt(squared.detach())
    smallest = torch.minimum(s.min_distance, distance).detach()
    metrics = {
        "success": smallest < p.success_fraction * s.initial_distance,
        "reached": smallest < p.success_threshold,
        "final_distance": distance,
        "min_distance": smallest,
        "initial_distance": s.initial_distance,
    }
    new = s._replace(joints=joints, last_action=action, min_distance=smallest)
    return new, Outcome(reward=-squared, terminated=torch.zeros_like(metrics["success"]), metrics=metrics)


def _scene(env_state: PlanarReachState, env_params: PlanarReachParams) -> Scene:
    s, p = env_state, env_params
    q_1, q_2, l_1 = float(s.joints[0]), float(s.joints[1]), float(p.link_1)
    reach = 1.1 * (l_1 + float(p.link_2))
    elbow = (l_1 * math.sin(q_1), -l_1 * math.cos(q_1))
    tip = (elbow[0] + float(p.link_2) * math.sin(q_1 + q_2), elbow[1] - float(p.link_2) * math.cos(q_1 + q_2))
    target = (float(s.target[0]), float(s.target[1]))
    return Scene(
        xlim=(-reach, reach),
        ylim=(-reach, reach),
        shapes=[
            Circle(target, float(p.success_threshold), color="tab:green"),
            Line([(0.0, 0.0), elbow, tip], color="tab:blue", width=4.0),
            Circle((0.0, 0.0), 0.04, color="black"),
            Circle(elbow, 0.03, color="black"),
        ],
        caption=f"{math.dist(tip, target):.2f} m from the target, {float(s.initial_distance):.2f} m at first",
    )
