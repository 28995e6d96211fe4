"""Policies: observation to action distribution, as pure functions over explicit parameters.

A :class:`Policy` maps ``(params, obs)`` to the parameters of its :class:`~frl.distributions.Distribution`, and draws the noise block of a rollout before
time starts. A network and a head (:mod:`frl.heads`) make one; :mod:`frl.policy_registry` builds them from a run file and the spaces of an environment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from frl import rng
from frl.distributions import Distribution, Sample
from frl.heads import head_for
from frl.networks import Network, build_mlp_from_cfg, module_network
from frl.policy_registry import (
    POLICIES,
    build_policy,
    get_policy_class,
    get_registered_policy_names,
    observation_dim,
    register_policy,
    resolve_policy_obs_groups,
)
from frl.types import Params
from frl.validate import require_count

__all__ = [
    "Policy",
    "actor_only",
    "build_policy",
    "get_policy_class",
    "get_registered_policy_names",
    "observation_dim",
    "register_policy",
    "resolve_policy_obs_groups",
]

LOG_STD_RANGE = (-5.0, 2.0)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A stochastic policy as pure functions, for any leading dimensions.

    Attributes:
        name: registered name of its kind.
        obs_dim: O, observation features.
        action_dim: A.
        init: ``(key [2], dtype=torch.float32, device=None) -> params``.
        noise: ``(key [2], T, N, dtype=torch.float32) -> noise [T, N, ...]``, what the distribution's ``sample`` takes; see :func:`frl.heads.action_noise`.
        apply: ``(params, obs [..., O]) -> distribution parameters`` (a NamedTuple of tensors with leading dimensions ``[...]``).
        distribution: what those parameters mean: mode, log-prob, entropy, KL.
        obs_groups: names of the observation entries that make up ``obs``, in order; ``None`` for all of them.
        value: ``(params, critic_obs [..., C]) -> [...]``, the critic; ``None`` without one.
        critic_obs_dim: C, features of the critic's observation; ``None`` without a critic.
        critic_obs_groups: as ``obs_groups``, of the critic's observation.
        actor_obs_normalization: the algorithm is to normalise ``obs`` by its running statistics before ``apply``. Normalizers are state of their own.
        critic_obs_normalization: likewise for ``critic_obs``, before ``value``.
        optimization_parameter_groups: ``(params or gradients) -> {group: part}``, the parts whose gradients are clipped separately; their entries together are
            those of ``params`` (see :func:`frl.critic_policies.join_parameter_groups`). ``None`` for one group of all.
    """

    name: str
    obs_dim: int
    action_dim: int
    init: Callable[..., Params]
    noise: Callable[..., Tensor]
    apply: Callable[[Params, Tensor], Any]
    distribution: Distribution
    obs_groups: tuple[str, ...] | None = None
    value: Callable[[Params, Tensor], Tensor] | None = None
    critic_obs_dim: int | None = None
    critic_obs_groups: tuple[str, ...] | None = None
    actor_obs_normalization: bool = False
    critic_obs_normalization: bool = False
    optimization_parameter_groups: Callable[[Params], dict[str, Params]] | None = None

    @property
    def has_critic(self) -> bool:
        """Whether the policy also estimates values."""
        return self.value is not None

    @property
    def uses_separate_critic_obs(self) -> bool:
        """Whether actor and critic look at different observations."""
        return self.has_critic and (self.critic_obs_dim, self.critic_obs_groups) != (self.obs_dim, self.obs_groups)

    def sample(self, dist_params: Any, noise: Tensor) -> Sample:
        """The draw at ``noise``, reparameterised where actions are continuous."""
        return self.distribution.sample(dist_params, noise)


def as_network(network: Any, input_dim: int, output_dim: int, role: str = "actor") -> Network:
    """A network from whatever the user gave for ``role``; what is not a run file's block is tried once for its output size."""
    if isinstance(network, Mapping):
        return build_mlp_from_cfg(network, input_dim, output_dim)
    if isinstance(network, nn.Module):
        network = module_network(network, input_dim=input_dim)
    if not isinstance(network, Network):
        raise TypeError(f"the {role} must be a Network, a torch.nn.Module or a block {{type: mlp, network_cfg: ...}}, got {network!r}")
    params = network.init(rng.key(0))
    with torch.no_grad():
        got = tuple(network.apply(params, torch.zeros(2, input_dim)).shape)
    if got != (2, output_dim):
        raise ValueError(f"the {role} must map [2, {input_dim}] to [2, {output_dim}], got {list(got)}")
    return network


def actor_only(
    obs_dim: int,
    action_space: spaces.Space | int,
    *,
    network: Network | Mapping[str, Any] | nn.Module,
    distribution: str | None = None,
    action_low: Any = None,
    action_high: Any = None,
    initial_log_std: float | None = None,
    initial_action_std: float | None = None,
    log_std_range: Sequence[float] | None = None,
    action_std_range: Sequence[float] | None = None,
    state_dependent_std: bool = False,
    obs_groups: tuple[str, ...] | None = None,
) -> Policy:
    """A policy without a critic: ``mean = network(obs)``, ``std = exp(clamp(log_std, *log_std_range))``, or ``logits = network(obs)`` of discrete actions.

    Parameters are ``{"actor": network parameters, "log_std": [A]}``, the last for continuous actions alone. With ``state_dependent_std`` the network
    has ``2 A`` outputs, ``mean`` and an offset to ``initial_log_std``, and there is no ``"log_std"`` entry. The gradient outside its range is zero.

    Args:
        obs_dim: O.
        action_space: an int (A features without bounds), a floating ``Box`` ``(A,)``, a ``Discrete`` or a ``MultiDiscrete`` ``(A,)``.
        network: a :class:`~frl.networks.Network`, a run file's network block, or a ``torch.nn.Module``, from O features to A means (``n`` logits,
            ``sum(nvec)``).
        distribution: ``"normal"`` (default), or ``"tanh_normal"`` to squash actions into the box; ``"categorical"`` (default) for discrete actions.
        action_low: [A] lower bounds, for ``"tanh_normal"`` alone, by default those of the box; ``action_high`` likewise.
        initial_log_std: log of the initial std, 0 by default.
        initial_action_std: the initial std itself, instead of ``initial_log_std``.
        log_std_range: limits of ``log_std``, ``(-5, 2)`` by default.
        action_std_range: those of the std itself, instead of ``log_std_range``.
        state_dependent_std: take ``log_std`` from the network.
        obs_groups: recorded in the policy.

    Returns:
        A :class:`Policy` over :class:`~frl.distributions.NormalParams` or :class:`~frl.distributions.CategoricalParams`.

    Raises:
        ValueError: for an unknown distribution or one that does not fit the space, bounds where none are used or none where they are needed, a start outside
            ``log_std_range``, a network of another output size, and whatever the network and the distribution refuse.
        TypeError: for a space of another kind or a value of the wrong kind.
    """
    obs_dim = require_count("obs_dim", obs_dim)
    head = head_for(
        action_space,
        default_range=LOG_STD_RANGE,
        distribution=distribution,
        action_low=action_low,
        action_high=action_high,
        log_std_range=log_std_range,
        action_std_range=action_std_range,
        initial_log_std=initial_log_std,
        initial_action_std=initial_action_std,
        state_dependent_std=state_dependent_std,
    )
    net = as_network(network, obs_dim, head.width)

    def init(key: Tensor, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> Params:
        return {"actor": net.init(key, dtype=dtype, device=device), **head.init(dtype, key.device if device is None else device)}

    return Policy(
        name="actor_only",
        obs_dim=obs_dim,
        action_dim=head.distribution.action_dim,
        init=init,
        noise=head.noise,
        apply=lambda params, obs: head.read(params, net.apply(params["actor"], obs)),
        distribution=head.distribution,
        obs_groups=obs_groups,
    )


@POLICIES.register("actor_only")
def _actor_only_from_block(
    *,
    obs_dim: int,
    action_space: Any,
    actor: Any = None,
    critic: Any = None,
    obs_groups: Any = None,
    actor_obs_normalization: Any = False,
    critic_obs_normalization: Any = False,
    distribution: str | None = None,
    initial_log_std: float | None = None,
    initial_action_std: float | None = None,
    log_std_range: Sequence[float] | None = None,
    action_std_range: Sequence[float] | None = None,
    state_dependent_std: bool = False,
) -> Policy:
    if actor is None:
        raise ValueError("actor_only needs actor, a block {type: mlp, network_cfg: ...}")
    if critic is not None or (obs_groups and obs_groups.get("critic") is not None):
        raise ValueError(f"actor_only has no critic: remove {'critic' if critic is not None else 'obs_groups.critic'} or choose a policy with one")
    for key, value in (("actor_obs_normalization", actor_obs_normalization), ("critic_obs_normalization", critic_obs_normalization)):
        if value is not False and value is not None:
            raise ValueError(f"actor_only does not support {key}={value!r}: its observations are normalised by the trainer (trainer.normalize_observations)")
    return actor_only(
        obs_dim,
        action_space,
        network=actor,
        obs_groups=resolve_policy_obs_groups({"obs_groups": obs_groups})[0],
        distribution=distribution,
        initial_log_std=initial_log_std,
        initial_action_std=initial_action_std,
        log_std_range=log_std_range,
        action_std_range=action_std_range,
        state_dependent_std=state_dependent_std,
    )
