"""One episode, played for a picture: observations, actions, rewards, and the scene of every state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frl import rng, tree
from frl.envs.scene import Scene
from frl.envs.vector import VecEnv
from frl.evaluate import episode_keys
from frl.types import PyTree


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One episode as it was played.

    Attributes:
        name: of the environment.
        dt: duration of a step [s]; NaN where it is not known, and time is then counted in steps.
        obs: ``[T + 1, O]`` flattened observations, the last one after the last step.
        actions: ``[T, A]`` as the environment received them.
        rewards: ``[T]``.
        ending: ``"terminated"``, ``"truncated"`` (time limit) or ``"cut off"`` (by ``max_steps``).
        scenes: ``T + 1`` pictures, empty for an environment that describes none.
    """

    name: str
    dt: float
    obs: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    ending: str
    scenes: tuple[Scene, ...] = ()

    @property
    def length(self) -> int:
        """Steps T."""
        return len(self.rewards)

    @property
    def episode_return(self) -> float:
        """Sum of the rewards."""
        return float(self.rewards.sum())


def play_episode(env: Any, act: Callable[[PyTree, Tensor], Tensor], *, seed: int = 0, max_steps: int | None = None, env_params: PyTree = None) -> Episode:
    """Play one episode with row 0 of ``env``: the first episode of that row in an evaluation with the same seed.

    Args:
        env: a :class:`~frl.envs.vector.VecEnv`, or a :class:`~frl.envs.host.HostEnv` of one row.
        act: ``(obs [1, ...], key [2]) -> action [1, ...]``; the key is another one in every step.
        seed: see :func:`frl.make_evaluator`.
        max_steps: cut the episode off after so many steps; needed for an environment without a time limit.
        env_params: other than the defaults of a functional environment.

    Raises:
        ValueError: an environment without a time limit and no ``max_steps``, or a host environment of several rows.
    """
    limit = env.spec.max_episode_steps
    if max_steps is not None and (isinstance(max_steps, bool) or max_steps < 1):
        raise ValueError(f"max_steps must be a positive integer, got {max_steps!r}")
    if limit is None and max_steps is None:
        raise ValueError(f"environment {env.spec.name!r} has no time limit, so an episode may never end; pass max_steps")
    most = min(x for x in (limit, max_steps) if x is not None)
    play = _play_functional if isinstance(env, VecEnv) else _play_host
    with torch.no_grad():
        return play(env, act, seed, most, limit, env_params)


def _play_functional(vec: VecEnv, act: Callable, seed: int, most: int, limit: int | None, env_params: PyTree) -> Episode:
    env = vec.env
    params = vec.default_params if env_params is None else env_params
    k_env, k_act = episode_keys(seed, vec.device)
    # Row 0 alone: the state after the last step is not replaced by that of a new episode.
    state = tree.index(vec.reset(vec.row_keys(k_env)[:1], params).env, 0)
    states, observed, actions, rewards, ending = [state], [env.observe(state, params)], [], [], "cut off"
    for t in range(most):
        action = act(tree.map(lambda x: x.unsqueeze(0), observed[-1]), rng.fold_in(k_act, t))[0]
        state, outcome = env.step(state, action, params)
        states.append(state)
        observed.append(env.observe(state, params))
        actions.append(action)
        rewards.append(outcome.reward)
        if bool(outcome.terminated) or not bool(tree.all_finite((state, outcome.reward))):
            ending = "terminated"
            break
    else:
        ending = "truncated" if most == limit else ending
    scenes = tuple(env.scene(s, params) for s in states) if env.scene is not None else ()
    return _episode(env.spec.name, env.spec.dt, observed, actions, rewards, ending, scenes)


def _play_host(env: Any, act: Callable, seed: int, most: int, limit: int | None, env_params: PyTree) -> Episode:
    if env.num_envs != 1:
        raise ValueError(f"a picture shows one row, got {env!r}; build it with num_envs=1")
    k_env, k_act = episode_keys(seed, env.device)
    obs = env.reset(k_env)
    observed, actions, rewards, ending = [tree.index(obs, 0)], [], [], "cut off"
    for t in range(most):
        action = act(obs, rng.fold_in(k_act, t))
        step = env.step(action)
        obs = step.obs
        observed.append(tree.index(step.final_obs, 0))
        actions.append(action[0])
        rewards.append(step.reward[0])
        if bool(step.terminated[0]) or bool(step.truncated[0]):
            ending = "terminated" if bool(step.terminated[0]) else "truncated"
            break
    return _episode(env.spec.name, env.spec.dt, observed, actions, rewards, ending, ())


def _episode(name: str, dt: float, observed: Sequence[PyTree], actions: Sequence[Tensor], rewards: Sequence[Tensor], ending: str, scenes: tuple) -> Episode:
    def rows(values: Sequence[PyTree]) -> np.ndarray:
        return np.stack([torch.cat([x.reshape(-1).to(torch.float64) for x in tree.leaves(value)]).cpu().numpy() for value in values])

    return Episode(name=name, dt=dt, obs=rows(observed), actions=rows(actions), rewards=rows(rewards)[:, 0], ending=ending, scenes=scenes)
