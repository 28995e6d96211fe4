"""Probe environments: tiny tasks with an exact solution, each of which one fault of an algorithm cannot survive.

They go from easy to hard: a learner that fails a probe has the fault that the probe's docstring names. The observation is one number, the reward is a multiple
of ``env_params.reward``, and :data:`SOLUTIONS` gives the optimal value, return and action of each probe with its default lengths.

Actions are ``Discrete(2)``, or ``Box(-1, 1, (1,))`` with ``continuous=True``. Where they matter, the right choice (1 for a positive number, 0 for a negative
one) earns 1 and the other 0; a continuous action ``a`` earns ``1 - (a - target)^2`` with the target 0.5 or -0.5, so a Gaussian policy with std ``s`` gets
``1 - s^2`` at best, and that probe is differentiable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor

from frl import rng
from frl.envs.check import require_count, require_number, space_dtype
from frl.envs.env import Env, EnvSpec
from frl.envs.scene import Circle, Line, Scene
from frl.types import Outcome

LIMIT, LENGTH, SHORT, LONG = 4, 3, 2, 6  # default lengths [steps]
TARGET = 0.5


class ProbeParams(NamedTuple):
    """Parameters of every probe."""

    reward: Tensor  # [] scale of all rewards


class ProbeState(NamedTuple):
    """State of one row."""

    number: Tensor  # [] what the probe remembers: a sign, a phase, or steps


@dataclass(frozen=True, kw_only=True)
class Solution:
    """What an optimal policy achieves in a probe with default lengths and reward 1.

    Attributes:
        value: ``(obs [..., 1], gamma) -> [...]``, its value for a discount below 1; time limits are no ends and are bootstrapped.
        episode_return: expected undiscounted return of an episode.
        choice: ``(obs [..., 1]) -> int64 [...]``, the optimal ``Discrete`` action; ``None`` where actions do not matter.
        target: ``(obs [..., 1]) -> [..., 1]``, the optimal continuous action; likewise.
    """

    value: Callable[[Tensor, Any], Tensor]
    episode_return: float
    choice: Callable[[Tensor], Tensor] | None = None
    target: Callable[[Tensor], Tensor] | None = None


def _probe(
    name: str,
    reset: Callable[[Tensor, Tensor], Tensor],
    step: Callable[[Tensor, Any], tuple[Tensor, Tensor, Tensor]],
    *,
    limit: int,
    scale: float = 1.0,
    reward: float,
    continuous: bool,
    acting: bool = False,
    dtype: torch.dtype,
) -> Env:
    """``reset(key, one) -> number``; ``step(number, score) -> (number, reward, ended)``; ``score(sign)`` is what the action earns; ``obs = number / scale``."""
    if not isinstance(continuous, bool):
        raise ValueError(f"continuous must be a bool, got {continuous!r}")
    shape = (1,) if continuous else ()

    def transition(env_state: ProbeState, action: Tensor, env_params: ProbeParams) -> tuple[ProbeState, Outcome]:
        if action.shape != shape:
            raise ValueError(f"action of one row must have shape {shape}, got {tuple(action.shape)}")

        def score(sign: Tensor) -> Tensor:
            if continuous:
                return 1.0 - (action[0] - TARGET * sign).square()
            return ((action == 1) == (sign > 0)).to(sign.dtype)

        number, earned, ended = step(env_state.number, score)
        return ProbeState(number=number), Outcome(reward=env_params.reward * earned, terminated=ended, metrics={})

    box_dtype = space_dtype(dtype)
    return Env(
        spec=EnvSpec(name=name, max_episode_steps=limit, dt=1.0, differentiable=continuous and acting),
        observation_space=spaces.Box(-1.0, 1.0, (1,), dtype=box_dtype),
        action_space=spaces.Box(-1.0, 1.0, (1,), dtype=box_dtype) if continuous else spaces.Discrete(2),
        default_params=ProbeParams(reward=torch.tensor(require_number("reward", reward), dtype=dtype)),
        reset=lambda key, env_params: ProbeState(number=reset(key, torch.ones_like(env_params.reward))),
        observe=lambda env_state, env_params: (env_state.number / scale).unsqueeze(0),
        step=transition,
        scene=lambda env_state, env_params: _scene(float(env_state.number) / scale),
    )


def _scene(number: float) -> Scene:
    """The observation as a disc on the line from -1 to 1."""
    return Scene(
        xlim=(-1.3, 1.3),
        ylim=(-0.4, 0.4),
        shapes=[
            Line(points=[(-1.0, 0.0), (1.0, 0.0)], color="silver"),
            *(Line(points=[(mark, -0.1), (mark, 0.1)], color="silver") for mark in (-1.0, 0.0, 1.0)),
            Circle(center=(number, 0.0), radius=0.12, color="tab:blue" if number >= 0 else "tab:orange"),
        ],
        caption=f"observation {number:+.2f}",
    )


def _one(key: Tensor, one: Tensor) -> Tensor:
    return one


def _coin(key: Tensor, one: Tensor) -> Tensor:
    return rng.uniform(key, dtype=one.dtype) < 0.5


def _sign(key: Tensor, one: Tensor) -> Tensor:
    return torch.where(_coin(key, one), one, -one)


def _ended(number: Tensor) -> Tensor:
    return torch.ones_like(number, dtype=torch.bool)


def probe_constant_reward(*, max_episode_steps: int = LIMIT, reward: float = 1.0, continuous: bool = False, dtype: torch.dtype = torch.float32) -> Env:
    """Reward 1 for ever, cut by a time limit. Fault: a time limit taken for an end of the task.

    The observation is 1 and ``V = 1 / (1 - gamma)`` for every policy and limit ``L``; an episode returns ``L``. Without a bootstrap at the limit, returns
    average to ``mean_k (1 - gamma^k) / (1 - gamma)`` over ``k = 1 .. L``.
    """
    limit = require_count("max_episode_steps", max_episode_steps)
    return _probe(
        "probe_constant_reward",
        _one,
        lambda number, score: (number, torch.ones_like(number), ~_ended(number)),
        limit=limit,
        reward=reward,
        continuous=continuous,
        dtype=dtype,
    )


def probe_action_reward(*, reward: float = 1.0, continuous: bool = False, dtype: torch.dtype = torch.float32) -> Env:
    """One step; action 1 earns 1. Fault: sign of the advantage or of the policy's loss, or the scored action is not the one played.

    The observation is 1. A policy that plays 1 with probability ``p`` has ``V = p`` and the advantages ``1 - p`` and ``-p``; the optimum is ``V = 1``.
    """
    return _probe(
        "probe_action_reward",
        _one,
        lambda number, score: (number, score(number), _ended(number)),
        limit=2,
        reward=reward,
        continuous=continuous,
        acting=True,
        dtype=dtype,
    )


def probe_observation_reward(*, reward: float = 1.0, continuous: bool = False, dtype: torch.dtype = torch.float32) -> Env:
    """One step; the observation, -1 or 1 with equal chances, is the reward. Fault: values of other rows or steps, or a critic that does not see.

    ``V(o) = o`` for every policy; the expected return is 0, and every advantage of a right critic is 0.
    """
    return _probe(
        "probe_observation_reward",
        _sign,
        lambda number, score: (number, number, _ended(number)),
        limit=2,
        reward=reward,
        continuous=continuous,
        dtype=dtype,
    )


def probe_matching_reward(*, reward: float = 1.0, continuous: bool = False, dtype: torch.dtype = torch.float32) -> Env:
    """One step; the action that matches the observation, -1 or 1, earns 1. Fault: an actor that does not see, or observations and actions out of step.

    The optimum is ``V = 1``; a policy that does not look gets ``1 / 2`` (``3 / 4`` with continuous actions).
    """
    return _probe(
        "probe_matching_reward",
        _sign,
        lambda number, score: (number, score(number), _ended(number)),
        limit=2,
        reward=reward,
        continuous=continuous,
        acting=True,
        dtype=dtype,
    )


def probe_delayed_reward(*, length: int = LENGTH, reward: float = 1.0, continuous: bool = False, dtype: torch.dtype = torch.float32) -> Env:
    """Reward 1 in the last of ``n = length`` steps alone. Fault: discounting, or a recursion that is a step off or crosses the end of an episode.

    The observation is ``k / n`` after ``k`` steps and ``V = gamma^(n - 1 - k)`` for every policy; an episode returns 1.
    """
    n = require_count("length", length)

    def step(number: Tensor, score: Any) -> tuple[Tensor, Tensor, Tensor]:
        last = number + 1 >= n
        return number + 1, last.to(number.dtype), last

    return _probe(
        "probe_delayed_reward",
        lambda key, one: torch.zeros_like(one),
        step,
        limit=n + 1,
        scale=float(n),
        reward=reward,
        continuous=continuous,
        dtype=dtype,
    )


def probe_two_lengths(*, short: int = SHORT, long: int = LONG, reward: float = 1.0, continuous: bool = False, dtype: torch.dtype = torch.float32) -> Env:
    """Reward 1 in every step of episodes that last ``short`` or ``long`` steps with equal chances. Fault: statistics that prefer short episodes.

    The observation is ``r / long`` with ``r`` steps to go and ``V = (1 - gamma^r) / (1 - gamma)`` for every policy. An episode returns ``(short + long) / 2``
    on average; the mean over the episodes that finish first is less.
    """
    first, second = float(require_count("short", short)), float(require_count("long", long))
    if first >= second:
        raise ValueError(f"short must be below long, got {short} and {long}")
    return _probe(
        "probe_two_lengths",
        lambda key, one: torch.where(_coin(key, one), first * one, second * one),
        lambda number, score: (number - 1, torch.ones_like(number), number <= 1),
        limit=int(second) + 1,
        scale=second,
        reward=reward,
        continuous=continuous,
        dtype=dtype,
    )


def probe_final_observation(*, reward: float = 1.0, continuous: bool = False, dtype: torch.dtype = torch.float32) -> Env:
    """A phase that flips between 0 and 1 and is the reward, cut after every step. Fault: a bootstrap from another observation than the final one.

    The observation is the phase, 0 or 1 with equal chances at a reset. For every policy ``V(1) = 1 / (1 - gamma^2)`` and ``V(0) = gamma / (1 - gamma^2)``.
    Bootstrapped from the observation before the step it is ``1 / (1 - gamma)`` and 0, from that after the reset ``1 + b`` and ``b`` with
    ``b = gamma / (2 (1 - gamma))``, and without bootstrap 1 and 0. An episode returns 1/2 on average.
    """
    return _probe(
        "probe_final_observation",
        lambda key, one: _coin(key, one).to(one.dtype),
        lambda number, score: (1 - number, number, ~_ended(number)),
        limit=1,
        reward=reward,
        continuous=continuous,
        dtype=dtype,
    )


def _ones(obs: Tensor, gamma: Any = 0.0) -> Tensor:
    return torch.ones_like(obs[..., 0])


SOLUTIONS: dict[str, Solution] = {
    "probe_constant_reward": Solution(value=lambda obs, gamma: _ones(obs) / (1 - gamma), episode_return=float(LIMIT)),
    "probe_action_reward": Solution(
        value=_ones,
        episode_return=1.0,
        choice=lambda obs: _ones(obs).to(torch.int64),
        target=lambda obs: TARGET * torch.ones_like(obs),
    ),
    "probe_observation_reward": Solution(value=lambda obs, gamma: obs[..., 0], episode_return=0.0),
    "probe_matching_reward": Solution(
        value=_ones,
        episode_return=1.0,
        choice=lambda obs: (obs[..., 0] > 0).to(torch.int64),
        target=lambda obs: TARGET * obs,
    ),
    "probe_delayed_reward": Solution(value=lambda obs, gamma: gamma ** (LENGTH - 1 - LENGTH * obs[..., 0]), episode_return=1.0),
    "probe_two_lengths": Solution(value=lambda obs, gamma: (1 - gamma ** (LONG * obs[..., 0])) / (1 - gamma), episode_return=(SHORT + LONG) / 2),
    "probe_final_observation": Solution(value=lambda obs, gamma: gamma ** (1 - obs[..., 0]) / (1 - gamma**2), episode_return=0.5),
}
"""The solutions by name."""
