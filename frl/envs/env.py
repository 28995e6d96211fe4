"""The environment contract: one row, pure functions, parameters as a pytree.

An environment is written for a single row with tensors that have no batch dimension; ``frl.envs.vector`` lifts it with ``torch.func.vmap``, adds the time
limit and resets finished rows. Nothing in here draws from a global generator: ``reset`` takes a key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gymnasium import spaces
from torch import Tensor

from frl.envs.scene import Scene
from frl.types import Outcome, PyTree

# For code that runs on one row and not under vmap.
ADVICE = "build tensors with torch.stack, torch.cat and torch.where in place of writing into them or branching on their values, and draw from the key"


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """Facts about an environment that do not change.

    Attributes:
        name: registered name.
        max_episode_steps: time limit in steps, or ``None``.
        dt: duration of one step [s].
        differentiable: ``step`` has useful gradients with respect to state and action.
        normalize_mask: which observation features a normalizer may touch (all when ``None``), a tuple of O bools.
        gradient_scale: change of an action, in half-widths of its bounds, within which returns are smooth, but for a few; :func:`frl.check_env` takes its
            differences over it.
        gradient_tolerance: relative accuracy in float64 of the gradients, which :func:`frl.check_env` holds them to.
    """

    name: str
    max_episode_steps: int | None
    dt: float
    differentiable: bool
    normalize_mask: tuple[bool, ...] | None = None
    gradient_scale: float = 1e-4
    gradient_tolerance: float = 1e-6


@dataclass(frozen=True, kw_only=True)
class Env:
    """One row of an environment as pure functions.

    Attributes:
        spec: see :class:`EnvSpec`.
        observation_space: ``gymnasium.spaces.Box`` (or ``Dict`` of them) of one row.
        action_space: gymnasium space of one row's action.
        default_params: ``env_params``: a pytree of 0-d tensors (masses, lengths, difficulty, ...). Differentiable, and free to vary by row or
            population member.
        reset: ``reset(key [2], env_params) -> env_state``.
        observe: ``observe(env_state, env_params) -> obs [O]`` (or a nested dict of tensors).
        step: ``step(env_state, action [A], env_params) -> (env_state, Outcome)``; no in-place change of the arguments.
        prepare_differentiable_rollout: optional ``rollout_index -> (DifferentiableRolloutSpec, env_params)``, a pure function that chooses
            the difficulty, the horizon and the objective scale of a complete rollout.
        scene: optional ``scene(env_state, env_params) -> Scene`` of one row (:mod:`frl.envs.scene`), for pictures.
    """

    spec: EnvSpec
    observation_space: spaces.Space
    action_space: spaces.Space
    default_params: PyTree
    reset: Callable[[Tensor, PyTree], PyTree]
    observe: Callable[[PyTree, PyTree], PyTree]
    step: Callable[[PyTree, Tensor, PyTree], tuple[PyTree, Outcome]]
    prepare_differentiable_rollout: Callable[[int], Any] | None = None
    scene: Callable[[PyTree, PyTree], Scene] | None = field(default=None, repr=False)
