"""The simulator as a differentiable function of tensors that ``torch.func`` and ``torch.compile`` take as one opaque call.

Two custom operators do the work on rows ``[B, ...]``. Around the first stands a custom autograd function whose ``vmap`` rule moves the mapped dimension to the
rows, so that a mapped step is one call for all rows, and whose backward calls a second function around the second operator. That one has no derivative:
differences of differences would be noise, so a second derivative is refused.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from frl import compile as compiler
from frl.envs.mujoco.native_step import native_step
from frl.envs.mujoco.simulator import SIMULATORS, Simulator
from frl.native.program import OUTSIDE

# -- operators -----------------------------------------------------------------------------------------------------------------------------------------


def _array(x: Tensor) -> Any:
    return x.detach().to(device="cpu", dtype=torch.float64).contiguous().numpy()


def _like(values: Any, x: Tensor) -> Tensor:
    return torch.from_numpy(values).to(device=x.device, dtype=x.dtype)


@torch.library.custom_op("frl::mujoco_step", mutates_args=())
def _step(state: Tensor, ctrl: Tensor, handle: int, frames: int) -> tuple[Tensor, Tensor]:
    after, seen = SIMULATORS[handle].step(_array(state), _array(ctrl), frames)
    return _like(after, state), _like(seen, state)


@_step.register_fake
def _(state: Tensor, ctrl: Tensor, handle: int, frames: int) -> tuple[Tensor, Tensor]:
    return state.new_empty(state.shape), state.new_empty((state.shape[0], SIMULATORS[handle].read_size))


OUTSIDE["mujoco_step"] = native_step


@torch.library.custom_op("frl::mujoco_pull_back", mutates_args=())
def _pull_back(state: Tensor, ctrl: Tensor, after: Tensor, seen: Tensor, handle: int, frames: int) -> tuple[Tensor, Tensor]:
    state_grad, ctrl_grad = SIMULATORS[handle].pull_back(_array(state), _array(ctrl), _array(after), _array(seen), frames)
    return _like(state_grad, state), _like(ctrl_grad, ctrl)


@_pull_back.register_fake
def _(state: Tensor, ctrl: Tensor, after: Tensor, seen: Tensor, handle: int, frames: int) -> tuple[Tensor, Tensor]:
    return state.new_empty((after.shape[0], *state.shape)), ctrl.new_empty((after.shape[0], *ctrl.shape))


# -- derivatives and batching --------------------------------------------------------------------------------------------------------------------------


class _Step(Function):
    """State ``[B, S]`` and controls ``[B, U]`` -> next state ``[B, S]``, what was read ``[B, R]``."""

    @staticmethod
    def forward(state: Tensor, ctrl: Tensor, handle: int, frames: int) -> tuple[Tensor, Tensor]:
        return torch.ops.frl.mujoco_step(state, ctrl, handle, frames)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        state, ctrl, ctx.handle, ctx.frames = inputs
        ctx.save_for_backward(state, ctrl)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple:
        state, ctrl = ctx.saved_tensors
        after, seen = cotangents
        state_grad, ctrl_grad = _PullBack.apply(state, ctrl, after[None], seen[None], ctx.handle, ctx.frames)
        return state_grad[0], ctrl_grad[0], None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError("a MuJoCo step has no forward-mode derivative; use torch.func.grad, vjp or jacrev")

    @staticmethod
    def vmap(info: Any, in_dims: tuple, state: Tensor, ctrl: Tensor, handle: int, frames: int) -> tuple:
        size = info.batch_size
        state, ctrl = (_first(x, d, size) for x, d in zip((state, ctrl), in_dims[:2], strict=True))
        after, seen = _Step.apply(state.flatten(0, 1), ctrl.flatten(0, 1), handle, frames)
        return (after.unflatten(0, state.shape[:2]), seen.unflatten(0, state.shape[:2])), (0, 0)


class _PullBack(Function):
    """Cotangents ``[K, B, S]`` and ``[K, B, R]`` of the results -> ``[K, B, S]`` of the state, ``[K, B, U]`` of the controls."""

    @staticmethod
    def forward(state: Tensor, ctrl: Tensor, after: Tensor, seen: Tensor, handle: int, frames: int) -> tuple[Tensor, Tensor]:
        return torch.ops.frl.mujoco_pull_back(state, ctrl, after, seen, handle, frames)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        raise RuntimeError("a MuJoCo step has no second derivative: its first is a difference quotient")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError("a MuJoCo step has no second derivative: its first is a difference quotient")

    @staticmethod
    def vmap(info: Any, in_dims: tuple, state: Tensor, ctrl: Tensor, after: Tensor, seen: Tensor, handle: int, frames: int) -> tuple:
        size = info.batch_size
        if in_dims[0] is None and in_dims[1] is None:  # a Jacobian by rows: the differences serve all cotangents
            after, seen = (_first(x, d, size) for x, d in zip((after, seen), in_dims[2:4], strict=True))
            grads = _PullBack.apply(state, ctrl, after.flatten(0, 1), seen.flatten(0, 1), handle, frames)
            return tuple(g.unflatten(0, after.shape[:2]) for g in grads), (0, 0)
        state, ctrl = (_first(x, d, size) for x, d in zip((state, ctrl), in_dims[:2], strict=True))
        # The mapped dimension joins the rows, which come second in a cotangent.
        after, seen = (_first(x, d, size).movedim(0, 1) for x, d in zip((after, seen), in_dims[2:4], strict=True))
        grads = _PullBack.apply(state.flatten(0, 1), ctrl.flatten(0, 1), after.flatten(1, 2), seen.flatten(1, 2), handle, frames)
        return tuple(g.unflatten(1, state.shape[:2]) for g in grads), (1, 1)


def _first(x: Tensor, dim: int | None, size: int) -> Tensor:
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _apply(state: Tensor, ctrl: Tensor, handle: int, frames: int) -> tuple[Tensor, Tensor]:
    return _Step.apply(state, ctrl, handle, frames)


_apply = compiler.allow_in_graph(_apply)


def simulate(simulator: Simulator, state: Tensor, ctrl: Tensor, frames: int | None = None) -> tuple[Tensor, Tensor]:
    """One differentiable step.

    Args:
        simulator: see :class:`~frl.envs.mujoco.simulator.Simulator`.
        state: ``[..., S]``, ``(qpos, qvel, act)``. Quaternions need not be of length 1: the step is that of the normalised one.
        ctrl: ``[..., U]``, clamped by MuJoCo to the limits of its actuators; the gradient is 0 outside and, at a limit, the one from inside.
        frames: MuJoCo steps instead of the simulator's ``frame_skip``; with 0 nothing moves and the data are read off the state.

    Returns:
        Next state ``[..., S]`` and what was read ``[..., R]``, in the state's dtype (MuJoCo computes in float64). A row that diverged is NaN and has the
        gradient zero.

    Raises:
        ValueError: for other shapes.
        RuntimeError: when a second or forward-mode derivative is asked for.
    """
    if state.shape[-1:] != (simulator.size,) or ctrl.shape[-1:] != (simulator.nu,) or state.shape[:-1] != ctrl.shape[:-1]:
        raise ValueError(
            f"state must be [..., {simulator.size}] and ctrl [..., {simulator.nu}] with the same leading dimensions, "
            f"got {tuple(state.shape)} and {tuple(ctrl.shape)}"
        )
    lead, frames = state.shape[:-1], simulator.frame_skip if frames is None else frames
    rows = math.prod(lead)
    after, seen = _apply(state.reshape(rows, simulator.size), ctrl.to(state.dtype).reshape(rows, simulator.nu), simulator.handle, frames)
    return after.reshape(*lead, simulator.size), seen.reshape(*lead, simulator.read_size)
