"""Rows of an environment, functional or a host's, as algorithms and evaluation play them: does the policy fit, begin, and roll out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from frl import compile as compiler
from frl import rng
from frl.distributions import CategoricalParams
from frl.envs.vector import VecEnv
from frl.policy_registry import observation_dim
from frl.rollout import make_unroll
from frl.types import Normalizer, PyTree, Trajectory


def check_fit(env: Any, policy: Any, what: str) -> None:
    """Refuse what is not rows of an environment, and a policy whose observations or actions are not those of the environment.

    Args:
        env: functional or host environment.
        policy: what is to act.
        what: who asks, for the message.

    Raises:
        TypeError, ValueError: see above; names, sizes and choices are compared, bounds of continuous actions are not.
    """
    if not hasattr(env, "single_action_space") or not hasattr(env, "row_keys"):
        raise TypeError(f"{what} needs rows of an environment (frl.make_vec_env, or frl.HostEnv around a host's), got {type(env).__name__}")
    name, space = env.spec.name, env.single_action_space
    roles = [("policy", policy.obs_groups, policy.obs_dim)]
    if policy.has_critic:
        roles.append(("critic", policy.critic_obs_groups, policy.critic_obs_dim))
    for role, groups, features in roles:
        try:
            there = observation_dim(env.single_observation_space, groups)
        except (KeyError, TypeError) as error:
            raise ValueError(f"the {role} does not fit the observations of {name!r}: {error.args[0]}") from error
        if there != features:
            raise ValueError(f"the {role} has {features} observation features, but the observations of {name!r} have {there}")
    with torch.no_grad():
        dist = policy.apply(policy.init(rng.key(0)), torch.zeros(policy.obs_dim))
        action = policy.sample(dist, torch.zeros(policy.distribution.noise_dim)).action
    if tuple(action.shape) != tuple(space.shape or ()) or action.is_floating_point() != isinstance(space, spaces.Box):
        kind = "continuous" if action.is_floating_point() else "discrete"
        raise ValueError(f"the policy has {kind} actions of shape {list(action.shape)}, but the action space of {name!r} is {space}")
    if isinstance(dist, CategoricalParams):
        rising = torch.arange(dist.logits.shape[-1], dtype=torch.get_default_dtype())
        first, last = ([int(i) for i in policy.distribution.mode(CategoricalParams(logits=x)).reshape(-1)] for x in (-rising, rising))
        start, sizes = np.ravel(space.start), np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec)
        if (first, last) != ([int(i) for i in start], [int(i) for i in start + sizes - 1]):
            raise ValueError(f"the policy chooses actions from {first} to {last}, but the action space of {name!r} is {space}")


def check_stagger(env: Any) -> None:
    """Refuse rows whose episodes cannot be staggered: a host's, and those without a time limit."""
    if not isinstance(env, VecEnv):
        raise ValueError(f"stagger_episodes needs a functional environment (frl.make_vec_env), and {env.spec.name!r} is a host's")
    if env.spec.max_episode_steps is None:
        raise ValueError(f"stagger_episodes needs a time limit, and {env.spec.name!r} has none")


def make_begin(env: Any, *, mode: str = "inductor") -> Callable[[Tensor, PyTree], PyTree]:
    """``begin(keys [N, 2], env_params) -> env_state``: new episodes in all rows, compiled for a functional environment."""
    if not isinstance(env, VecEnv):
        return env.reset
    return compiler.jit(lambda keys, env_params: env.reset(keys, env_params), mode=mode)


def make_play(
    env: Any,
    policy: Any,
    normalizer: Normalizer | None = None,
    *,
    record: Sequence[str],
    length: int,
    deterministic: bool = False,
    clip_actions: bool = False,
    mode: str = "inductor",
) -> Callable[..., tuple[Any, Trajectory]]:
    """The rollout function of rows of either kind, without derivatives: :func:`frl.make_unroll` or :func:`frl.make_host_unroll`.

    Args:
        env: functional or host environment.
        policy, normalizer, record, deterministic, clip_actions, mode: as there.
        length: the usual number of steps.

    Returns:
        ``unroll(params, norm_state, env_state, env_params, noise) -> (env_state, Trajectory)``; a host's environment goes on where it stands, whatever
        ``env_state`` says.
    """
    if isinstance(env, VecEnv):
        return make_unroll(env, policy, normalizer, record=record, attach=(), deterministic=deterministic, clip_actions=clip_actions, horizon=length, mode=mode)
    from frl.envs.host_rollout import make_host_unroll

    return make_host_unroll(env, policy, normalizer, record=record, deterministic=deterministic, clip_actions=clip_actions, mode=mode)
