"""Planar hopper: one springy leg hops forward at a given speed. The ground is soft and smooth, so that contact has a gradient.

A body with a pitch, a point foot, and a massless telescopic leg between them. A servo at the hip turns the leg, a motor moves the rest length of its spring.
All forces are internal but for gravity and the ground, so momentum is a test of every sign.
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
from frl.envs.scene import Circle, Line, Polygon, Scene
from frl.numerics import clip
from frl.types import Outcome

ALIVE, PITCH_WEIGHT, CROUCH_WEIGHT, EFFORT_WEIGHT = 2.0, 2.0, 50.0, 0.05  # relative to the squared error of the speed [s^2/m^2]
FAR = 1000.0  # the ground of a picture goes on beyond its frame [m]
SHORTEST = 1e-3  # of the leg [m], below which its direction is held


class PlanarHopperParams(NamedTuple):
    """Physical parameters, each ``[]``."""

    gravity: Tensor  # [m/s^2]
    body_mass: Tensor  # [kg]
    body_inertia: Tensor  # about the hip, which is the centre of mass [kg m^2]
    foot_mass: Tensor  # [kg]
    leg_length: Tensor  # at rest [m]
    leg_stroke: Tensor  # the rest length changes by +- this at full action [m]
    leg_stiffness: Tensor  # [N/m]
    leg_damping: Tensor  # [N s/m]
    hip_range: Tensor  # angle of the leg to the body that full action asks for [rad]
    hip_stiffness: Tensor  # [N m/rad]
    hip_damping: Tensor  # [N m s/rad]
    ground_stiffness: Tensor  # [N/m]
    ground_softness: Tensor  # depth over which contact sets in [m]
    ground_speed: Tensor  # vertical speed over which the force drops when the foot leaves [m/s]
    friction: Tensor  # coefficient of friction
    slip_speed: Tensor  # horizontal speed over which friction sets in [m/s]
    dt: Tensor  # step size [s]
    target_speed: Tensor  # [m/s]
    initial_height: Tensor  # the foot starts uniformly between 0 and this above the ground [m]
    initial_pitch: Tensor  # body and leg start uniformly within +- this [rad]
    initial_speed: Tensor  # both velocities start uniformly within +- this [m/s]
    crouch_height: Tensor  # the body is to stay above this [m]
    fall_height: Tensor  # the hopper has fallen when the body is below this [m]
    fall_pitch: Tensor  # or pitched beyond +- this [rad]
    success_fraction: Tensor  # success: at least this part of the distance at the target speed


class PlanarHopperState(NamedTuple):
    """State of one row: x forward, z up, angles from +x to +z."""

    body: Tensor  # [3] x [m], z [m], pitch [rad]
    body_velocity: Tensor  # [3] m/s, m/s, rad/s
    foot: Tensor  # [2] x, z, m
    foot_velocity: Tensor  # [2] m/s
    elapsed: Tensor  # [] steps of this episode; carries no gradient


def planar_hopper(
    *,
    max_episode_steps: int | None = 250,
    substeps: int = 8,
    gravity: float = 9.81,
    body_mass: float = 5.0,
    body_inertia: float = 0.2,
    foot_mass: float = 0.5,
    leg_length: float = 0.5,
    leg_stroke: float = 0.1,
    leg_stiffness: float = 1500.0,
    leg_damping: float = 10.0,
    hip_range: float = 0.6,
    hip_stiffness: float = 60.0,
    hip_damping: float = 4.0,
    ground_stiffness: float = 1e4,
    ground_softness: float = 0.01,
    ground_speed: float = 1.0,
    friction: float = 1.0,
    slip_speed: float = 0.2,
    dt: float = 0.02,
    target_speed: float = 1.0,
    initial_height: float = 0.1,
    initial_pitch: float = 0.1,
    initial_speed: float = 0.1,
    crouch_height: float = 0.4,
    fall_height: float = 0.25,
    fall_pitch: float = 1.0,
    success_fraction: float = 0.75,
    dtype: torch.dtype = torch.float32,
) -> Env:
    """Build the hopping task.

    With the action ``a`` clamped to ``[-1, 1]^2``, the hip at ``(x, z)``, the pitch ``phi`` of the body, ``foot - hip = l (sin(psi), -cos(psi)) = l n`` and
    ``t = dn / dpsi``, the leg pushes the foot with ``f n + tau / l t``, and the body with the opposite force and with the torque ``-tau``::

        f = leg_stiffness (leg_length + leg_stroke a_0 - l) - leg_damping l'
        tau = hip_stiffness (hip_range a_1 - (psi - phi)) - hip_damping (psi' - phi')

    The ground pushes the foot, at height ``y`` and with velocity ``(u, w)``, with the forces ``N`` up and ``F`` along it::

        N = ground_stiffness s (1 - tanh(w / ground_speed)),   s = ground_softness softplus(-y / ground_softness)
        F = -friction N u / sqrt(u^2 + slip_speed^2)

    ``N`` is never adhesive, sets in smoothly, and is larger on the way down than up. ``substeps`` steps of semi-implicit Euler integrate: velocities first,
    positions with the new velocities. Friction divides the foot's speed, ``u' = u / (1 + (dt / substeps) |F / (foot_mass u)|)``, and so never reverses it.

    After the step, with ``v`` the body's horizontal velocity and ``c = max(crouch_height - z, 0)``::

        reward = 2 - (v - target_speed)^2 - 2 phi^2 - 50 c^2 - 0.05 |a|^2

    The episode terminates when ``z < fall_height`` or ``|phi| > fall_pitch``; the costs of pitch and crouch rise before, where a gradient can see them.

    Observation ``[10]``: ``z``, ``phi``, ``l``, ``psi - phi``, ``x'``, ``z'``, ``phi'``, ``l'``, ``psi' - phi'``, height of the foot.
    Metrics (cut from the graph): ``success`` (stands, and has come at least ``success_fraction`` of the way that the target speed makes until now),
    ``travelled`` [m], ``fallen``.

    Args:
        max_episode_steps: time limit [steps], or ``None``.
        substeps: integration steps of one step.
        gravity: [m/s^2], at least 0.
        body_mass: [kg].
        body_inertia: about the hip, which is the centre of mass [kg m^2].
        foot_mass: [kg].
        leg_length: at rest [m].
        leg_stroke: change of the rest length at full action [m], at least 0.
        leg_stiffness: [N/m], at least 0.
        leg_damping: [N s/m], at least 0.
        hip_range: angle of the leg to the body that full action asks for [rad], at least 0.
        hip_stiffness: [N m/rad], at least 0.
        hip_damping: [N m s/rad], at least 0.
        ground_stiffness: [N/m], at least 0.
        ground_softness: depth over which contact sets in [m].
        ground_speed: vertical speed over which the ground's force drops when the foot leaves [m/s].
        friction: coefficient of friction, at least 0.
        slip_speed: horizontal speed over which friction sets in [m/s].
        dt: step size [s].
        target_speed: [m/s].
        initial_height: the foot starts uniformly between 0 and this above the ground [m], at least 0.
        initial_pitch: half-width of the reset distribution of the pitch of body and leg [rad], at least 0.
        initial_speed: half-width of the reset distribution of both velocities [m/s], at least 0.
        crouch_height: height of the hip below which it costs [m].
        fall_height: lowest hip of a hopper that has not fallen [m].
        fall_pitch: largest pitch of a hopper that has not fallen [rad].
        success_fraction: tolerance of the success metric.
        dtype: ``torch.float32`` or ``torch.float64``, of the default parameters; states follow their parameters.

    Raises:
        ValueError: an argument is outside its range.

    Source: the planar one-legged hopper of Raibert, "Legged robots that balance", 1986, chapter 2, with a point foot. Contact: a penalty that sets in smoothly,
    with dissipation in proportion to depth after Hunt and Crossley, "Coefficient of restitution interpreted as damping in vibroimpact", 1975, bounded by the
    hyperbolic tangent. Reward and falls follow the hopper of DFlex (Xu et al., ICLR 2022), but for a speed that is tracked, not maximised.
    """
    require_count("substeps", substeps)
    if max_episode_steps is not None:
        require_count("max_episode_steps", max_episode_steps)
    values = {
        "gravity": require_number("gravity", gravity, at_least=0.0),
        "body_mass": require_number("body_mass", body_mass, above=0.0),
        "body_inertia": require_number("body_inertia", body_inertia, above=0.0),
        "foot_mass": require_number("foot_mass", foot_mass, above=0.0),
        "leg_length": require_number("leg_length", leg_length, above=0.0),
        "leg_stroke": require_number("leg_stroke", leg_stroke, at_least=0.0),
        "leg_stiffness": require_number("leg_stiffness", leg_stiffness, at_least=0.0),
        "leg_damping": require_number("leg_damping", leg_damping, at_least=0.0),
        "hip_range": require_number("hip_range", hip_range, at_least=0.0),
        "hip_stiffness": require_number("hip_stiffness", hip_stiffness, at_least=0.0),
        "hip_damping": require_number("hip_damping", hip_damping, at_least=0.0),
        "ground_stiffness": require_number("ground_stiffness", ground_stiffness, at_least=0.0),
        "ground_softness": require_number("ground_softness", ground_softness, above=0.0),
        "ground_speed": require_number("ground_speed", ground_speed, above=0.0),
        "friction": require_number("friction", friction, at_least=0.0),
        "slip_speed": require_number("slip_speed", slip_speed, above=0.0),
        "dt": require_number("dt", dt, above=0.0),
        "target_speed": require_number("target_speed", target_speed),
        "initial_height": require_number("initial_height", initial_height, at_least=0.0),
        "initial_pitch": require_number("initial_pitch", initial_pitch, at_least=0.0),
        "initial_speed": require_number("initial_speed", initial_speed, at_least=0.0),
        "crouch_height": require_number("crouch_height", crouch_height),
        "fall_height": require_number("fall_height", fall_height),
        "fall_pitch": require_number("fall_pitch", fall_pitch, above=0.0),
        "success_fraction": require_number("success_fraction", success_fraction, above=0.0),
    }
    box_dtype = space_dtype(dtype)

    def step(env_state: PlanarHopperState, action: Tensor, env_params: PlanarHopperParams) -> tuple[PlanarHopperState, Outcome]:
        return _step(env_state, action, env_params, substeps)

    return Env(
        spec=EnvSpec(name="planar_hopper", max_episode_steps=max_episode_steps, dt=values["dt"], differentiable=True),
        observation_space=spaces.Box(-math.inf, math.inf, (10,), dtype=box_dtype),
        action_space=spaces.Box(-1.0, 1.0, (2,), dtype=box_dtype),
        default_params=PlanarHopperParams(**{name: torch.tensor(value, dtype=dtype) for name, value in values.items()}),
        reset=_reset,
        observe=_observe,
        step=step,
        scene=_scene,
    )


class _Leg(NamedTuple):
    """The leg in polar coordinates around the hip, each ``[]``."""

    length: Tensor
    sin: Tensor  # the leg points to (sin, -cos)
    cos: Tensor
    angle: Tensor  # [rad], 0 points down
    length_rate: Tensor
    angle_rate: Tensor


def _leg(dx: Tensor, dz: Tensor, du: Tensor, dw: Tensor) -> _Leg:
    """From the foot's position and velocity relative to the hip."""
    square = dx * dx + dz * dz
    ordinary = square > SHORTEST**2
    # A leg of no length points down: both the quotients and the angle would have no derivative.
    dx, dz = torch.where(ordinary, dx, 0.0), torch.where(ordinary, dz, -SHORTEST)
    length = torch.sqrt(torch.where(ordinary, square, SHORTEST**2))
    sin, cos = dx / length, -dz / length
    return _Leg(length=length, sin=sin, cos=cos, angle=torch.atan2(dx, -dz), length_rate=du * sin - dw * cos, angle_rate=(du * cos + dw * sin) / length)


def _reset(key: Tensor, env_params: PlanarHopperParams) -> PlanarHopperState:
    p = env_params
    u = rng.uniform(key, (4,), dtype=p.gravity.dtype)
    centred = 2.0 * u - 1.0
    pitch, zero = centred[1] * p.initial_pitch, torch.zeros_like(u[0])
    height = u[0] * p.initial_height
    forward, upward = centred[2] * p.initial_speed, centred[3] * p.initial_speed
    return PlanarHopperState(
        body=torch.stack((zero, height + p.leg_length * torch.cos(pitch), pitch)),
        body_velocity=torch.stack((forward, upward, zero)),
        foot=torch.stack((p.leg_length * torch.sin(pitch), height)),
        foot_velocity=torch.stack((forward, upward)),
        elapsed=zero,
    )


def _observe(env_state: PlanarHopperState, env_params: PlanarHopperParams) -> Tensor:
    x, z, pitch = env_state.body.unbind()
    u, w, rate = env_state.body_velocity.unbind()
    foot_x, foot_z = env_state.foot.unbind()
    foot_u, foot_w = env_state.foot_velocity.unbind()
    leg = _leg(foot_x - x, foot_z - z, foot_u - u, foot_w - w)
    return torch.stack((z, pitch, leg.length, leg.angle - pitch, u, w, rate, leg.length_rate, leg.angle_rate - rate, foot_z))


def _step(env_state: PlanarHopperState, action: Tensor, env_params: PlanarHopperParams, substeps: int) -> tuple[PlanarHopperState, Outcome]:
    if action.shape != (2,):
        raise ValueError(f"action of one row must have shape (2,), got {tuple(action.shape)}")
    s, p = env_state, env_params
    a = clip(action, -1.0, 1.0)
    x, z, pitch = s.body.unbind()
    u, w, rate = s.body_velocity.unbind()
    foot_x, foot_z = s.foot.unbind()
    foot_u, foot_w = s.foot_velocity.unbind()
    h = p.dt / substeps
    rest, wanted = p.leg_length + p.leg_stroke * a[0], p.hip_range * a[1]
    for _ in range(substeps):
        leg = _leg(foot_x - x, foot_z - z, foot_u - u, foot_w - w)
        push = p.leg_stiffness * (rest - leg.length) - p.leg_damping * leg.length_rate
        torque = p.hip_stiffness * (wanted - (leg.angle - pitch)) - p.hip_damping * (leg.angle_rate - rate)
        across = torque / leg.length
        force_x = push * leg.sin + across * leg.cos
        force_z = -push * leg.cos + across * leg.sin
        depth = p.ground_softness * torch.nn.functional.softplus(-foot_z / p.ground_softness)
        load = p.ground_stiffness * depth * (1.0 - torch.tanh(foot_w / p.ground_speed))
        u, w = u - h * force_x / p.body_mass, w - h * (force_z / p.body_mass + p.gravity)
        rate = rate - h * torque / p.body_inertia
        foot_u = foot_u + h * force_x / p.foot_mass
        foot_u = foot_u / (1.0 + h * p.friction * load / (p.foot_mass * torch.sqrt(foot_u.square() + p.slip_speed.square())))
        foot_w = foot_w + h * ((force_z + load) / p.foot_mass - p.gravity)
        x, z, pitch = x + h * u, z + h * w, pitch + h * rate
        foot_x, foot_z = foot_x + h * foot_u, foot_z + h * foot_w
    effort = a[0].square() + a[1].square()
    crouch = torch.relu(p.crouch_height - z)
    reward = ALIVE - (u - p.target_speed).square() - PITCH_WEIGHT * pitch.square() - CROUCH_WEIGHT * crouch.square() - EFFORT_WEIGHT * effort
    fallen = (z < p.fall_height) | (pitch.abs() > p.fall_pitch)
    elapsed, travelled = s.elapsed + 1.0, x.detach()
    wanted_way = p.target_speed * p.dt * elapsed
    success = ~fallen & (travelled * torch.sign(wanted_way) >= p.success_fraction * wanted_way.abs())
    new = PlanarHopperState(
        body=torch.stack((x, z, pitch)),
        body_velocity=torch.stack((u, w, rate)),
        foot=torch.stack((foot_x, foot_z)),
        foot_velocity=torch.stack((foot_u, foot_w)),
        elapsed=elapsed,
    )
    return new, Outcome(reward=reward, terminated=fallen, metrics={"success": success, "travelled": travelled, "fallen": fallen})


def _scene(env_state: PlanarHopperState, env_params: PlanarHopperParams) -> Scene:
    x, z, pitch = (float(v) for v in env_state.body)
    foot = (float(env_state.foot[0]), float(env_state.foot[1]))
    size = float(env_params.leg_length)
    left = x - 2.0 * size
    forward, up = (math.cos(pitch), math.sin(pitch)), (-math.sin(pitch), math.cos(pitch))
    corners = [
        (x + size * (0.5 * i * forward[0] + 0.2 * j * up[0]), z + size * (0.5 * i * forward[1] + 0.2 * j * up[1]))
        for i, j in ((-1, 0), (1, 0), (1, 1), (-1, 1))
    ]
    marks = [Line([(m, 0.0), (m, -0.1 * size)], color="tab:gray") for m in range(math.ceil(left), math.floor(left + 4.0 * size) + 1)]
    return Scene(
        xlim=(left, left + 4.0 * size),
        ylim=(-0.4 * size, 3.6 * size),
        shapes=[
            Line([(left - FAR, 0.0), (left + FAR, 0.0)], color="tab:gray"),
            *marks,
            Polygon(corners, color="tab:blue"),
            Line([(x, z), foot], color="tab:orange", width=4.0),
            Circle(foot, 0.08 * size, color="black"),
        ],
        caption=f"{x:.2f} m, {float(env_state.body_velocity[0]):+.2f} m/s",
    )
