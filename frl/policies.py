"""Policies: observation to action distribution, as pure functions over explicit parameters.

A :class:`Policy` maps ``(params, obs)`` to the parameters of its :class:`~frl.distributions.Distribution`, and draws the noise block of a rollout before
time starts. A network and a :class:`Head` make one; :mod:`frl.policy_registry` builds them from a run file and the spaces of an environment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from frl import rng
from frl.distributions import Distribution, NormalParams, Sample, diagonal_normal, tanh_normal
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
from frl.registry import Registry
from frl.types import Params
from frl.validate import require_count, require_number, require_switch

__all__ = [
    "Head",
    "Policy",
    "action_noise",
    "actor_only",
    "build_policy",
    "gaussian_head",
    "get_policy_class",
    "get_registered_policy_names",
    "observation_dim",
    "register_policy",
    "resolve_policy_obs_groups",
]

LOG_STD_RANGE = (-5.0, 2.0)
_NOISE_BLOCK = 16
_DISTRIBUTIONS = Registry("distribution")
_DISTRIBUTIONS.register("normal", diagonal_normal)
_DISTRIBUTIONS.register("tanh_normal", tanh_normal)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A stochastic policy as pure functions, for any leading dimensions.

    Attributes:
        name: registered name of its kind.
        obs_dim: O, observation features.
        action_dim: A.
        init: ``(key [2], dtype=torch.float32, device=None) -> params``.
        noise: ``(key [2], T, N, dtype=torch.float32) -> noise [T, N, ...]``, what the distribution's ``sample`` takes; see :func:`action_noise`.
        apply: ``(params, obs [..., O]) -> distribution parameters`` (a NamedTuple of tensors with leading dimensions ``[...]``).
        distribution: what those parameters mean: mode, log-prob, entropy, KL.
        obs_groups: names of the observation entries that make up ``obs``, in order; ``None`` for all of them.
        value: ``(params, critic_obs [..., C]) -> [...]``, the critic; ``None`` without one.
        critic_obs_dim: C, features of the critic's observation; ``None`` without a critic.
        critic_obs_groups: as ``obs_groups``, of the critic's observation.
        actor_obs_normalization: the algorithm is to normalise ``obs`` by its running statistics before ``apply``. Normalizers are state of their own.
        critic_obs_normalization: likewise for ``critic_obs``, before ``value``.
        optimization_parameter_groups: ``(params or gradients) -> {group: part}``, the parts whose gradients are clipped separately; their entries together are
            those of ``params`` (see :func:`frl.actor_critic.join_parameter_groups`). ``None`` for one group of all.
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


def action_noise(key: Tensor, T: int, N: int, width: int, dtype: torch.dtype = torch.float32, draw: Callable[..., Tensor] = rng.normal) -> Tensor:
    """Noise of a rollout, standard normal by default.

    A row's numbers do not depend on ``N``, and those of its first steps not on ``T``: steps are drawn in blocks of 16 under ``fold_in(key, block)``, and
    within a block the row comes first.

    Args:
        key: int64 [2].
        T: steps.
        N: env rows.
        width: numbers for each action.
        dtype: float32 or float64.
        draw: ``(key, shape, dtype) -> noise``, such as :func:`frl.rng.gumbel`.

    Returns:
        ``[T, N, width]`` on the key's device.
    """
    blocks = -(-T // _NOISE_BLOCK)
    keys = rng.fold_in(key, torch.arange(blocks, device=key.device))
    drawn = draw(keys, (N, _NOISE_BLOCK, width), dtype=dtype)
    return drawn.transpose(1, 2).reshape(blocks * _NOISE_BLOCK, N, width)[:T]


def _range(name: str, value: Any) -> tuple[float, float]:
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise TypeError(f"{name} must be two numbers [low, high], got {value!r}")
    low, high = (require_number(name, bound) for bound in value)
    if low > high:
        raise ValueError(f"{name} must be two non-decreasing numbers, got {value!r}")
    return low, high


def _initial_log_std(initial_log_std: Any, initial_action_std: Any, limits: tuple[float, float]) -> float:
    if initial_action_std is not None:
        if initial_log_std is not None:
            raise ValueError(f"give initial_log_std or initial_action_std, not both (got {initial_log_std!r} and {initial_action_std!r})")
        initial_log_std = math.log(require_number("initial_action_std", initial_action_std, above=0.0))
    value = 0.0 if initial_log_std is None else require_number("initial_log_std", initial_log_std)
    if not limits[0] <= value <= limits[1]:
        raise ValueError(f"initial log std {value:g} lies outside the range [{limits[0]:g}, {limits[1]:g}], where its gradient is zero and it could never move")
    return value


def log_std_limits(log_std_range: Sequence[float] | None, action_std_range: Sequence[float] | None, default: tuple[float, float]) -> tuple[float, float]:
    """Limits of ``log_std`` from either way to give them."""
    if action_std_range is None:
        return default if log_std_range is None else _range("log_std_range", log_std_range)
    if log_std_range is not None:
        raise ValueError("give action_std_range or log_std_range, not both")
    low, high = _range("action_std_range", action_std_range)
    if low <= 0:
        raise ValueError(f"action_std_range must be two positive numbers, got {action_std_range!r}")
    return math.log(low), math.log(high)


def box_bounds(distribution: str, action_space: Any) -> dict[str, Any]:
    """``action_low`` and ``action_high`` for a distribution that squashes into the action space; nothing for another."""
    if _DISTRIBUTIONS.get(distribution) is not tanh_normal:
        return {}
    if not isinstance(action_space, spaces.Box):
        raise TypeError(f"tanh_normal takes its bounds from the action space, which must be a Box, got {action_space}")
    return {"action_low": action_space.low, "action_high": action_space.high}


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


class Head(NamedTuple):
    """What turns the output of the actor's network into distribution parameters."""

    distribution: Distribution
    width: int  # outputs that the network must have
    init: Callable[[torch.dtype, Any], Params]  # (dtype, device) -> the head's own entries of params, {} if it has none
    read: Callable[[Params, Tensor], Any]  # (params, output [..., width]) -> distribution parameters [...]

    def noise(self, key: Tensor, T: int, N: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The noise block of a rollout, ``[T, N, noise_dim]``."""
        return action_noise(key, T, N, self.distribution.noise_dim, dtype, self.distribution.draw_noise)


def gaussian_head(
    action_dim: int,
    *,
    distribution: str = "normal",
    action_low: Any = None,
    action_high: Any = None,
    initial_log_std: float | None = None,
    initial_action_std: float | None = None,
    log_std_range: Sequence[float] = LOG_STD_RANGE,
    state_dependent_std: bool = False,
) -> Head:
    """``mean = output``, ``std = exp(clamp(log_std, *log_std_range))`` with a parameter ``"log_std"`` [A]; arguments and refusals of :func:`actor_only`.

    With ``state_dependent_std`` the output has ``2 A`` numbers, the mean and an offset to the initial ``log_std``, and the head has no parameters.
    """
    squashed = _DISTRIBUTIONS.get(distribution) is tanh_normal
    require_switch("state_dependent_std", state_dependent_std)
    low, high = _range("log_std_range", log_std_range)
    start = _initial_log_std(initial_log_std, initial_action_std, (low, high))
    if not squashed:
        if action_low is not None or action_high is not None:
            raise ValueError("action_low and action_high have no effect on a 'normal' distribution; use 'tanh_normal' or leave them out")
        dist = diagonal_normal(action_dim)
    else:
        if action_low is None or action_high is None:
            raise ValueError("tanh_normal needs the action box: action_low and action_high")
        dist = tanh_normal(np.broadcast_to(action_low, (action_dim,)), np.broadcast_to(action_high, (action_dim,)))

    def init(dtype: torch.dtype, device: Any) -> Params:
        return {} if state_dependent_std else {"log_std": torch.full((action_dim,), start, dtype=dtype, device=device)}

    def read(params: Params, out: Tensor) -> NormalParams:
        if state_dependent_std:
            return NormalParams(mean=out[..., :action_dim], log_std=torch.clamp(out[..., action_dim:] + start, low, high))
        # The zeros give every row its log_std: vmap with out_dims=-1 returns garbage shapes for an output that does not depend on its input (torch 2.13).
        return NormalParams(mean=out, log_std=torch.clamp(params["log_std"], low, high) + torch.zeros_like(out))

    return Head(distribution=dist, width=2 * action_dim if state_dependent_std else action_dim, init=init, read=read)


def actor_only(
    obs_dim: int,
    action_dim: int,
    *,
    network: Network | Mapping[str, Any] | nn.Module,
    distribution: str = "normal",
    action_low: Any = None,
    action_high: Any = None,
    initial_log_std: float | None = None,
    initial_action_std: float | None = None,
    log_std_range: Sequence[float] = LOG_STD_RANGE,
    state_dependent_std: bool = False,
    obs_groups: tuple[str, ...] | None = None,
) -> Policy:
    """A Gaussian policy without a critic: ``mean = network(obs)``, ``std = exp(clamp(log_std, *log_std_range))``.

    Parameters are ``{"actor": network parameters, "log_std": [A]}``. With ``state_dependent_std`` the network has ``2 A`` outputs, ``mean`` and an offset to
    ``initial_log_std``, and there is no ``"log_std"`` entry. The gradient of a ``log_std`` outside its range is zero.

    Args:
        obs_dim: O.
        action_dim: A.
        network: a :class:`~frl.networks.Network`, a run file's network block, or a ``torch.nn.Module``.
        distribution: ``"normal"``, or ``"tanh_normal"`` to squash actions into the box ``[action_low, action_high]``.
        action_low: [A] lower bounds, for ``"tanh_normal"`` alone; ``action_high`` likewise.
        initial_log_std: log of the initial std, 0 by default.
        initial_action_std: the initial std itself, instead of ``initial_log_std``.
        log_std_range: limits of ``log_std``.
        state_dependent_std: take ``log_std`` from the network.
        obs_groups: recorded in the policy.

    Returns:
        A :class:`Policy` over :class:`~frl.distributions.NormalParams`.

    Raises:
        ValueError: for an unknown distribution, bounds where none are used or none where they are needed, a start outside ``log_std_range``, a network of
            another output size, and whatever the network and the distribution refuse.
        TypeError: for a value of the wrong kind.
    """
    obs_dim, action_dim = require_count("obs_dim", obs_dim), require_count("action_dim", action_dim)
    head = gaussian_head(
        action_dim,
        distribution=distribution,
        action_low=action_low,
        action_high=action_high,
        initial_log_std=initial_log_std,
        initial_action_std=initial_action_std,
        log_std_range=log_std_range,
        state_dependent_std=state_dependent_std,
    )
    net = as_network(network, obs_dim, head.width)

    def init(key: Tensor, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> Params:
        return {"actor": net.init(key, dtype=dtype, device=device), **head.init(dtype, key.device if device is None else device)}

    def apply(params: Params, obs: Tensor) -> NormalParams:
        return head.read(params, net.apply(params["actor"], obs))

    return Policy(
        name="actor_only",
        obs_dim=obs_dim,
        action_dim=action_dim,
        init=init,
        noise=head.noise,
        apply=apply,
        distribution=head.distribution,
        obs_groups=obs_groups,
    )


@POLICIES.register("actor_only")
def _actor_only_from_block(
    *,
    obs_dim: int,
    action_dim: int,
    action_space: Any,
    actor: Any = None,
    critic: Any = None,
    obs_groups: Any = None,
    actor_obs_normalization: Any = False,
    critic_obs_normalization: Any = False,
    distribution: str = "normal",
    state_dependent_std: bool = False,
    initial_log_std: float | None = None,
    initial_action_std: float | None = None,
    log_std_range: Sequence[float] | None = None,
    action_std_range: Sequence[float] | None = None,
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
        action_dim,
        network=actor,
        distribution=distribution,
        **box_bounds(distribution, action_space),
        initial_log_std=initial_log_std,
        initial_action_std=initial_action_std,
        log_std_range=log_std_limits(log_std_range, action_std_range, LOG_STD_RANGE),
        state_dependent_std=state_dependent_std,
        obs_groups=resolve_policy_obs_groups({"obs_groups": obs_groups})[0],
    )
