"""Policies with a critic: an actor and a value network side by side, for continuous and for discrete actions.

:func:`actor_critic` chooses the kind of actions by the action space: Gaussian for a box, categorical for ``Discrete`` and ``MultiDiscrete``. The critic may
look at another observation than the actor (an asymmetric critic), and its gradients can be clipped apart from the actor's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from frl import rng
from frl.heads import head_for
from frl.networks import Network
from frl.policies import Policy, as_network
from frl.policy_registry import POLICIES, observation_dim, resolve_policy_obs_groups
from frl.types import Params
from frl.validate import require_count, require_switch

ACTION_STD_RANGE = (1e-6, 1e6)


def actor_critic(
    obs_dim: int,
    action_space: spaces.Space | int,
    *,
    actor: Network | Mapping[str, Any] | nn.Module,
    critic: Network | Mapping[str, Any] | nn.Module,
    critic_obs_dim: int | None = None,
    obs_groups: tuple[str, ...] | None = None,
    critic_obs_groups: tuple[str, ...] | None = None,
    distribution: str | None = None,
    initial_action_std: float | None = None,
    action_std_range: Sequence[float] | None = None,
    initial_log_std: float | None = None,
    log_std_range: Sequence[float] | None = None,
    state_dependent_std: bool = False,
    actor_obs_normalization: bool = False,
    critic_obs_normalization: bool = False,
) -> Policy:
    """A policy with a critic: ``distribution = head(actor(obs))``, ``value = critic(critic_obs)``.

    Parameters are ``{"actor": ..., "critic": ..., "log_std": [A]}``, the last for continuous actions with ``std = exp(clamp(log_std, ...))`` alone. Continuous
    actions are neither squashed nor clipped unless ``distribution="tanh_normal"``; their score is that of the sample.

    Args:
        obs_dim: O.
        action_space: a ``Discrete``, a ``MultiDiscrete`` ``(A,)``, a floating ``Box`` ``(A,)``, or an int (A features without bounds).
        actor: a :class:`~frl.networks.Network`, a run file's network block, or a ``torch.nn.Module``, from O features to A means (``n`` logits, ``sum(nvec)``).
        critic: likewise, from C features to 1.
        critic_obs_dim: C, O by default.
        obs_groups: entries of the observation that the actor sees, recorded in the policy.
        critic_obs_groups: those that the critic sees; the actor's by default.
        distribution: ``"normal"`` (default) or ``"tanh_normal"`` for a box, ``"categorical"`` (default) for discrete actions.
        initial_action_std: initial std, 1 by default; ``initial_log_std`` gives its log instead.
        action_std_range: limits of the std, ``(1e-6, 1e6)`` by default; ``log_std_range`` gives their logs instead. The gradient is zero outside.
        state_dependent_std: take ``log_std`` from the network, as in :func:`~frl.policies.actor_only`.
        actor_obs_normalization: recorded in the policy, for the algorithm that owns the normalizer; ``critic_obs_normalization`` likewise.

    Returns:
        A :class:`~frl.policies.Policy` with ``value``, over :class:`~frl.distributions.NormalParams` or :class:`~frl.distributions.CategoricalParams`.

    Raises:
        ValueError: for critic groups without ``critic_obs_dim``, settings of the std or a distribution that do not fit the space, and whatever
            :func:`~frl.policies.actor_only` refuses.
        TypeError: for a space of another kind or a value of the wrong kind.
    """
    obs_dim = require_count("obs_dim", obs_dim)
    if critic_obs_dim is None and critic_obs_groups not in (None, obs_groups):
        raise ValueError(f"critic_obs_groups {list(critic_obs_groups or ())} differ from the actor's: give critic_obs_dim, the features that they have")
    critic_dim = obs_dim if critic_obs_dim is None else require_count("critic_obs_dim", critic_obs_dim)
    for name, value in (("actor_obs_normalization", actor_obs_normalization), ("critic_obs_normalization", critic_obs_normalization)):
        require_switch(name, value)
    low, high = ACTION_STD_RANGE
    head = head_for(
        action_space,
        default_range=(math.log(low), math.log(high)),
        distribution=distribution,
        log_std_range=log_std_range,
        action_std_range=action_std_range,
        initial_action_std=initial_action_std,
        initial_log_std=initial_log_std,
        state_dependent_std=state_dependent_std,
    )
    actor_net, critic_net = as_network(actor, obs_dim, head.width), as_network(critic, critic_dim, 1, "critic")

    def init(key: Tensor, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> Params:
        actor_key, critic_key = rng.split(key, 2)
        return {
            "actor": actor_net.init(actor_key, dtype=dtype, device=device),
            "critic": critic_net.init(critic_key, dtype=dtype, device=device),
            **head.init(dtype, key.device if device is None else device),
        }

    return Policy(
        name="actor_critic",
        obs_dim=obs_dim,
        action_dim=head.distribution.action_dim,
        init=init,
        noise=head.noise,
        apply=lambda params, obs: head.read(params, actor_net.apply(params["actor"], obs)),
        distribution=head.distribution,
        obs_groups=obs_groups,
        value=lambda params, critic_obs: critic_net.apply(params["critic"], critic_obs).squeeze(-1),
        critic_obs_dim=critic_dim,
        critic_obs_groups=obs_groups if critic_obs_groups is None else critic_obs_groups,
        actor_obs_normalization=actor_obs_normalization,
        critic_obs_normalization=critic_obs_normalization,
        optimization_parameter_groups=optimization_parameter_groups,
    )


def optimization_parameter_groups(params: Params) -> dict[str, Params]:
    """Parameters (or gradients) of an actor-critic as ``{"actor": all but the critic's entry, "critic": that entry}``, to be clipped separately."""
    return {"actor": {name: part for name, part in params.items() if name != "critic"}, "critic": {"critic": params["critic"]}}


def join_parameter_groups(groups: Mapping[str, Params]) -> Params:
    """Inverse of :func:`optimization_parameter_groups`."""
    return {name: part for group in groups.values() for name, part in group.items()}


@POLICIES.register("actor_critic")
def _actor_critic_from_block(
    *,
    observation_space: Any,
    action_space: Any,
    actor: Any = None,
    critic: Any = None,
    obs_groups: Any = None,
    distribution: str | None = None,
    initial_action_std: float | None = None,
    action_std_range: Sequence[float] | None = None,
    initial_log_std: float | None = None,
    log_std_range: Sequence[float] | None = None,
    state_dependent_std: bool = False,
    actor_obs_normalization: bool = False,
    critic_obs_normalization: bool = False,
) -> Policy:
    for role, network in (("actor", actor), ("critic", critic)):
        if network is None:
            raise ValueError(f"actor_critic needs {role}, a block {{type: mlp, network_cfg: ...}}")
    actor_groups, critic_groups = resolve_policy_obs_groups({"obs_groups": obs_groups})
    return actor_critic(
        observation_dim(observation_space, actor_groups),
        action_space,
        actor=actor,
        critic=critic,
        critic_obs_dim=observation_dim(observation_space, critic_groups),
        obs_groups=actor_groups,
        critic_obs_groups=critic_groups,
        distribution=distribution,
        initial_action_std=initial_action_std,
        action_std_range=action_std_range,
        initial_log_std=initial_log_std,
        log_std_range=log_std_range,
        state_dependent_std=state_dependent_std,
        actor_obs_normalization=actor_obs_normalization,
        critic_obs_normalization=critic_obs_normalization,
    )
