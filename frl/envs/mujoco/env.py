"""An environment from a MuJoCo model: give the model, say what is observed and rewarded, and the rest is here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from frl import rng
from frl.envs.check import require_count, require_number, space_dtype
from frl.envs.env import Env, EnvSpec
from frl.envs.mujoco.engine import engine
from frl.envs.mujoco.model import load_model
from frl.envs.mujoco.operator import simulate
from frl.envs.mujoco.scene import scene_of
from frl.envs.mujoco.simulator import Read, Simulator
from frl.types import Outcome, PyTree

GRADIENT_SCALE = 1e-6  # contacts begin and end at every distance; this is ten times what the simulator's own differences look at


class MujocoState(NamedTuple):
    """State of one row. Sizes are the model's."""

    qpos: Tensor  # [nq] positions, quaternions of length 1
    qvel: Tensor  # [nv] velocities
    act: Any  # [na] activations of the actuators, () where there are none
    readings: Any  # [R] what was read off the simulator's data, () where nothing is
    fault: Tensor  # [] 0; NaN after a step in which the simulation diverged, so that the row counts as not finite and is reset


def mujoco_env(
    name: str,
    model: Any,
    outcome: Callable[[MujocoState, Tensor, MujocoState, PyTree], Outcome],
    *,
    frame_skip: int = 1,
    max_episode_steps: int | None = 1000,
    params: Mapping[str, float] | None = None,
    observe: Callable[[MujocoState, PyTree], Tensor] | None = None,
    reset: Callable[[Tensor, PyTree], tuple[Tensor, Tensor]] | None = None,
    reset_noise_scale: float = 0.01,
    keyframe: str | int | None = None,
    read: Read | None = None,
    settle: bool = True,
    first_readings: Callable[[Tensor, Tensor], Tensor] | None = None,
    differentiable: bool = True,
    gradient_tolerance: float = 1e-5,
    view: str = "xz",
    dtype: torch.dtype = torch.float32,
    threads: int | None = None,
    centered: bool = True,
    gradient_integrator: str | None = None,
) -> Env:
    """Build an environment of one row around a MuJoCo model.

    Actions are the controls of the actuators; MuJoCo clamps them to their limits. A simulation that diverges (numbers that are not finite or beyond 1e10, or
    another warning of MuJoCo's) leaves the row where it was and marks it, so that it is reset and counted as ``nonfinite`` and no gradient is spoilt.
    MuJoCo computes in float64; states and everything else follow the dtype of the parameters.

    Args:
        name: of the environment.
        model: what :func:`~frl.envs.mujoco.model.load_model` takes: a path, MJCF text, a ``mujoco.MjSpec`` or a
            ``mujoco.MjModel``. Its own parameters are fixed.
        outcome: ``(before, action, after, env_params) -> Outcome`` of one row: reward, termination and metrics of a step, in differentiable operations.
        frame_skip: MuJoCo steps of one step of the environment.
        max_episode_steps: time limit [steps], or ``None``.
        params: name -> number, what ``outcome`` and the rest read as ``env_params[name]``. ``reset_noise_scale`` is added.
        observe: ``(state, env_params) -> [O]``; positions, velocities, activations and readings in a row when ``None``.
        reset: ``(key, env_params) -> (qpos, qvel)``; the model's start and uniform noise within ``+-reset_noise_scale`` on every coordinate when ``None``.
        reset_noise_scale: of the default reset.
        keyframe: name or number of the model's keyframe at which episodes start instead of its default pose.
        read: ``(model, data) -> [R]``, numbers that the state is to hold as ``readings`` (positions of sites, forces, sensors); differentiable like the rest.
        settle: read after ``mj_forward`` at the new state (:class:`~frl.envs.mujoco.simulator.Simulator`).
        first_readings: ``(qpos, qvel) -> [R]`` after a reset, where they have a formula: fresh states are drawn for every step, and simulating them costs time.
        differentiable: ``outcome`` has useful gradients.
        gradient_tolerance: what :func:`frl.check_env` is to expect of difference quotients along a few steps with contacts.
        view: plane of pictures, ``"xz"`` from the side or ``"xy"`` from above.
        dtype: ``torch.float32`` or ``torch.float64``, of the default parameters.
        threads, centered, gradient_integrator: see :class:`~frl.envs.mujoco.simulator.Simulator`.

    Raises:
        ModuleNotFoundError: MuJoCo is not installed.
        TypeError, ValueError: a model that MuJoCo refuses or that has no actuators, or an argument outside its range.
    """
    compiled = load_model(model)
    simulator = Simulator(compiled, frame_skip, read=read, settle=settle, threads=threads, centered=centered, gradient_integrator=gradient_integrator)
    if simulator.nu == 0:
        raise ValueError("the model has no actuators, so there are no actions")
    if max_episode_steps is not None:
        require_count("max_episode_steps", max_episode_steps)
    if view not in ("xz", "xy"):
        raise ValueError(f"view must be 'xz' or 'xy', got {view!r}")
    values = {"reset_noise_scale": require_number("reset_noise_scale", reset_noise_scale, at_least=0.0), **(params or {})}
    start_qpos, start_qvel, start_act = _start(compiled, keyframe)
    nq, nv, na = simulator.nq, simulator.nv, simulator.na
    quaternions = [q for q, _ in simulator.tangent.quaternions]

    def pack(qpos: Tensor, qvel: Tensor, act: Any) -> Tensor:
        return torch.cat((qpos, qvel, act)) if na else torch.cat((qpos, qvel))

    def unpack(state: Tensor, seen: Tensor, fault: Tensor) -> MujocoState:
        act = state[nq + nv :] if na else ()
        return MujocoState(qpos=state[:nq], qvel=state[nq : nq + nv], act=act, readings=seen if simulator.read_size else (), fault=fault)

    def default_reset(key: Tensor, env_params: PyTree) -> tuple[Tensor, Tensor]:
        scale = env_params["reset_noise_scale"]
        noise = scale * (2.0 * rng.uniform(key, (nq + nv,), dtype=scale.dtype) - 1.0)
        return _unit(_as(start_qpos, noise) + noise[:nq], quaternions), _as(start_qvel, noise) + noise[nq:]

    draw = reset or default_reset

    def first(key: Tensor, env_params: PyTree) -> MujocoState:
        qpos, qvel = draw(key, env_params)
        state = pack(qpos, qvel, _as(start_act, qpos).clone() if na else ())
        if not simulator.read_size:
            seen = qpos
        elif first_readings is not None:
            seen = first_readings(qpos, qvel)
        else:
            seen = simulate(simulator, state, torch.zeros(simulator.nu, dtype=state.dtype, device=state.device), frames=0)[1]
        return unpack(state, seen, torch.zeros_like(qpos[0]))

    def step(env_state: MujocoState, action: Tensor, env_params: PyTree) -> tuple[MujocoState, Outcome]:
        if action.shape != (simulator.nu,):
            raise ValueError(f"action of one row must have shape ({simulator.nu},), got {tuple(action.shape)}")
        before = pack(env_state.qpos, env_state.qvel, env_state.act)
        after, seen = simulate(simulator, before, action)
        lost = ~torch.isfinite(after.detach()).all()
        after = torch.where(lost, before, after)
        seen = torch.where(lost, env_state.readings, seen) if simulator.read_size else seen
        new = unpack(after, seen, torch.where(lost, math.nan, torch.zeros_like(after[0].detach())))
        return new, outcome(env_state, action, new, env_params)

    def default_observe(env_state: MujocoState, env_params: PyTree) -> Tensor:
        return torch.cat([x for x in (env_state.qpos, env_state.qvel, env_state.act, env_state.readings) if isinstance(x, Tensor)])

    watch = observe or default_observe
    default_params = {key: torch.tensor(value, dtype=dtype) for key, value in values.items()}
    box_dtype = space_dtype(dtype)
    seen = watch(first(rng.key(0), default_params), default_params)
    limited = compiled.actuator_ctrllimited.astype(bool)
    low, high = (np.where(limited, compiled.actuator_ctrlrange[:, i], bound).astype(box_dtype) for i, bound in ((0, -np.inf), (1, np.inf)))
    return Env(
        spec=EnvSpec(
            name=name,
            max_episode_steps=max_episode_steps,
            dt=simulator.dt,
            differentiable=differentiable,
            gradient_scale=GRADIENT_SCALE,
            gradient_tolerance=gradient_tolerance,
        ),
        observation_space=spaces.Box(-np.inf, np.inf, tuple(seen.shape), dtype=box_dtype),
        action_space=spaces.Box(low, high, dtype=box_dtype),
        default_params=default_params,
        reset=first,
        observe=watch,
        step=step,
        scene=scene_of(simulator.model, view),
    )


def _start(model: Any, keyframe: str | int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Position, velocity and activation at which episodes start, float64."""
    mujoco = engine()
    data = mujoco.MjData(model)
    if keyframe is not None:
        number = keyframe if isinstance(keyframe, int) else mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_KEY, keyframe)
        if not 0 <= number < model.nkey:
            known = [model.key(i).name or i for i in range(model.nkey)]
            raise ValueError(f"the model has no keyframe {keyframe!r} (known: {', '.join(map(str, known)) or 'none'})")
        mujoco.mj_resetDataKeyframe(model, data, number)
    return torch.from_numpy(data.qpos.copy()), torch.from_numpy(data.qvel.copy()), torch.from_numpy(data.act.copy())


def _as(constant: Tensor, like: Tensor) -> Tensor:
    return constant.to(dtype=like.dtype, device=like.device)


def _unit(qpos: Tensor, quaternions: list[int]) -> Tensor:
    """Positions with quaternions of length 1."""
    if not quaternions:
        return qpos
    parts, end = [], 0
    for q in quaternions:
        parts += [qpos[end:q], torch.nn.functional.normalize(qpos[q : q + 4], dim=0)]
        end = q + 4
    return torch.cat([*parts, qpos[end:]])
