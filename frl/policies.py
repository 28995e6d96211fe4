"""Policies: observation to action distribution, as pure functions over explicit parameters.

A :class:`Policy` maps ``(params, obs)`` to the parameters of its :class:`~frl.distributions.Distribution`, and draws the noise block of a rollout before
time starts. :func:`build_policy` makes one from a run file's ``policy`` block and the spaces of an environment; :func:`register_policy` adds kinds.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from frl import rng
from frl.distributions import Distribution, NormalParams, Sample, diagonal_normal, tanh_normal
from frl.networks import Network, build_mlp_from_cfg, check_keys, check_size, module_network
from frl.registry import Registry
from frl.types import Params

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
        noise: ``(key [2], T, N, dtype=torch.float32) -> noise [T, N, A]``; see :func:`action_noise`.
        apply: ``(params, obs [..., O]) -> distribution parameters`` (a NamedTuple of tensors with leading dimensions ``[...]``).
        distribution: what those parameters mean: mode, log-prob, entropy, KL.
        has_critic: whether the policy also estimates values.
        obs_groups: names of the observation entries that make up ``obs``, in order; ``None`` for all of them.
    """

    name: str
    obs_dim: int
    action_dim: int
    init: Callable[..., Params]
    noise: Callable[..., Tensor]
    apply: Callable[[Params, Tensor], Any]
    distribution: Distribution
    has_critic: bool = False
    obs_groups: tuple[str, ...] | None = None

    def sample(self, dist_params: Any, noise: Tensor) -> Sample:
        """The reparameterised draw at ``noise`` [..., A]."""
        return self.distribution.sample(dist_params, noise)


def action_noise(key: Tensor, T: int, N: int, action_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal noise of a rollout.

    A row's numbers do not depend on ``N``, and those of its first steps not on ``T``: steps are drawn in blocks of 16 under ``fold_in(key, block)``, and
    within a block the row comes first.

    Args:
        key: int64 [2].
        T: steps.
        N: env rows.
        action_dim: A.
        dtype: float32 or float64.

    Returns:
        ``[T, N, A]`` on the key's device.
    """
    blocks = -(-T // _NOISE_BLOCK)
    keys = rng.fold_in(key, torch.arange(blocks, device=key.device))
    drawn = rng.normal(keys, (N, _NOISE_BLOCK, action_dim), dtype=dtype)
    return drawn.transpose(1, 2).reshape(blocks * _NOISE_BLOCK, N, action_dim)[:T]


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value!r}")
    return float(value)


def _range(name: str, value: Any) -> tuple[float, float]:
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise TypeError(f"{name} must be two numbers [low, high], got {value!r}")
    low, high = (_number(name, bound) for bound in value)
    if low > high:
        raise ValueError(f"{name} must be two non-decreasing numbers, got {value!r}")
    return low, high


def _initial_log_std(initial_log_std: Any, initial_action_std: Any, limits: tuple[float, float]) -> float:
    if initial_action_std is not None:
        if initial_log_std is not None:
            raise ValueError(f"give initial_log_std or initial_action_std, not both (got {initial_log_std!r} and {initial_action_std!r})")
        std = _number("initial_action_std", initial_action_std)
        if std <= 0:
            raise ValueError(f"initial_action_std must be positive, got {initial_action_std!r}")
        initial_log_std = math.log(std)
    value = 0.0 if initial_log_std is None else _number("initial_log_std", initial_log_std)
    if not limits[0] <= value <= limits[1]:
        raise ValueError(f"initial log std {value:g} lies outside the range [{limits[0]:g}, {limits[1]:g}], where its gradient is zero and it could never move")
    return value


def _as_network(network: Any, obs_dim: int, output_dim: int) -> Network:
    if isinstance(network, Mapping):
        return build_mlp_from_cfg(network, obs_dim, output_dim)
    if isinstance(network, nn.Module):
        network = module_network(network, input_dim=obs_dim)
    if not isinstance(network, Network):
        raise TypeError(f"the actor must be a Network, a torch.nn.Module or a block {{type: mlp, network_cfg: ...}}, got {network!r}")
    params = network.init(rng.key(0))
    with torch.no_grad():
        got = tuple(network.apply(params, torch.zeros(2, obs_dim)).shape)
    if got != (2, output_dim):
        raise ValueError(f"the actor must map [2, {obs_dim}] to [2, {output_dim}], got {list(got)}")
    return network


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
    obs_dim, action_dim = check_size("obs_dim", obs_dim), check_size("action_dim", action_dim)
    squashed = _DISTRIBUTIONS.get(distribution) is tanh_normal
    if not isinstance(state_dependent_std, bool):
        raise TypeError(f"state_dependent_std must be a bool, got {state_dependent_std!r}")
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
    net = _as_network(network, obs_dim, 2 * action_dim if state_dependent_std else action_dim)

    def init(key: Tensor, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> Params:
        params = {"actor": net.init(key, dtype=dtype, device=device)}
        if not state_dependent_std:
            params["log_std"] = torch.full((action_dim,), start, dtype=dtype, device=key.device if device is None else device)
        return params

    def apply(params: Params, obs: Tensor) -> NormalParams:
        out = net.apply(params["actor"], obs)
        if state_dependent_std:
            return NormalParams(mean=out[..., :action_dim], log_std=torch.clamp(out[..., action_dim:] + start, low, high))
        # The zeros give every row its log_std: vmap with out_dims=-1 returns garbage shapes for an output that does not depend on its input (torch 2.13).
        return NormalParams(mean=out, log_std=torch.clamp(params["log_std"], low, high) + torch.zeros_like(out))

    def noise(key: Tensor, T: int, N: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return action_noise(key, T, N, action_dim, dtype)

    return Policy(name="actor_only", obs_dim=obs_dim, action_dim=action_dim, init=init, noise=noise, apply=apply, distribution=dist, obs_groups=obs_groups)


_REGISTRY = Registry("policy", group="frl.policies")


def register_policy(name: str, factory: Callable[..., Policy] | None = None, *, override: bool = False) -> Any:
    """Register a policy factory under a case-insensitive name, directly or as a decorator.

    :func:`build_policy` calls it by keyword with what its signature names: ``observation_space`` (or ``obs_space``), ``obs_dim``, ``action_space``,
    ``action_dim``, and the keys of the policy block. A key that it does not name is an error::

        @register_policy("constant")
        def constant(*, obs_dim, action_dim, level=0.0) -> Policy: ...
    """
    return _REGISTRY.register(name, factory, override=override)


def get_policy_class(name: str) -> Callable[..., Policy]:
    """The factory registered under ``name``; ``ValueError`` with the known names otherwise."""
    return _REGISTRY.get(name)


def get_registered_policy_names() -> list[str]:
    """Sorted names of the registered policies."""
    return _REGISTRY.names()


def resolve_policy_obs_groups(policy_block: Mapping[str, Any]) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """Observation groups ``(actor, critic)`` of a policy block: ``(None, None)`` without ``obs_groups``; a missing critic uses the actor's.

    Raises:
        TypeError: ``obs_groups`` is not a mapping, or a value is not a list of strings.
        ValueError: a list is empty, the actor is missing, or a key is unknown.
    """
    groups = policy_block.get("obs_groups")
    if groups is None:
        return None, None
    if not isinstance(groups, Mapping):
        raise TypeError(f"obs_groups must be a mapping with actor and critic, got {groups!r}")
    check_keys("obs_groups", groups, ("actor", "critic"))

    def names(role: str) -> tuple[str, ...]:
        value = groups[role]
        if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
            raise TypeError(f"obs_groups.{role} must be a list of names, got {value!r}")
        if not value:
            raise ValueError(f"obs_groups.{role} must name at least one group")
        return tuple(value)

    if groups.get("actor") is None:
        raise ValueError("obs_groups needs actor, a list of names")
    actor = names("actor")
    return actor, actor if groups.get("critic") is None else names("critic")


def observation_dim(space: spaces.Space | int, groups: Sequence[str] | None = None) -> int:
    """Features of a flattened observation.

    Args:
        space: an int, a ``Box`` of shape ``(O,)``, or a (nested) ``Dict`` of boxes, whose entries are flattened.
        groups: entries of a ``Dict`` (dotted paths) that count; all when ``None``.

    Raises:
        TypeError: for another kind of space, or groups of a space without names.
        KeyError: for a group that the space lacks.
    """
    if isinstance(space, spaces.Dict):
        parts: list[Any] = []
        for path in groups if groups is not None else space.spaces:
            part: Any = space
            for name in path.split(".") if groups is not None else [path]:
                if not isinstance(part, spaces.Dict) or name not in part.spaces:
                    raise KeyError(f"observation group {path!r} is not in the observation space (entries: {', '.join(space.spaces)})")
                part = part.spaces[name]
            parts.append(part)
        return sum(math.prod(part.shape) if isinstance(part, spaces.Box) else observation_dim(part) for part in parts)
    if groups is not None:
        raise TypeError(f"obs_groups {list(groups)} need a Dict observation space, got {space}")
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        return space.shape[0]
    if isinstance(space, Integral):
        return check_size("observation space", space)
    raise TypeError(f"an observation space must be an int, a Box of shape (O,) or a Dict of boxes, got {space}")


def _action_dim(space: spaces.Space | int) -> int:
    if isinstance(space, spaces.Box) and len(space.shape) == 1 and np.issubdtype(space.dtype, np.floating):
        return space.shape[0]
    if isinstance(space, Integral):
        return check_size("action space", space)
    raise TypeError(f"the policy needs a continuous action space, an int or a floating-point Box of shape (A,), got {space}")


def build_policy(policy_block: Mapping[str, Any], observation_space: spaces.Space | int, action_space: spaces.Space | int) -> Policy:
    """A policy from the ``policy`` block of a run file.

    Args:
        policy_block: ``name`` (case-insensitive) and the keys that its factory accepts; ``action_dim``, if given, must equal that of the space.
        observation_space: see :func:`observation_dim`.
        action_space: an int (A features without bounds) or a gymnasium space.

    Raises:
        ValueError: for an unknown name, a key that the factory does not accept, or a value that it refuses.
        TypeError: for a block that is not a mapping or a space of the wrong kind.
    """
    if not isinstance(policy_block, Mapping):
        raise TypeError(f"the policy block must be a mapping, got {policy_block!r}")
    if "name" not in policy_block:
        raise ValueError(f"the policy block needs a name (known: {', '.join(get_registered_policy_names())})")
    factory = get_policy_class(policy_block["name"])
    keys = {key: value for key, value in policy_block.items() if key != "name"}
    if keys.get("action_dim") is not None and keys["action_dim"] != _action_dim(action_space):
        raise ValueError(f"action_dim {keys['action_dim']!r} of the policy block does not match the environment's {_action_dim(action_space)}")
    keys.pop("action_dim", None)

    signature = inspect.signature(factory).parameters.values()
    accepted = [p.name for p in signature if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    offered: dict[str, Callable[[], Any]] = {
        "observation_space": lambda: observation_space,
        "obs_space": lambda: observation_space,
        "obs_dim": lambda: observation_dim(observation_space, resolve_policy_obs_groups(policy_block)[0]),
        "action_space": lambda: action_space,
        "action_dim": lambda: _action_dim(action_space),
    }
    if not any(p.kind == p.VAR_KEYWORD for p in signature):
        check_keys(f"the policy block of {policy_block['name']!r}", keys, [name for name in accepted if name not in offered])
    return factory(**{name: value() for name, value in offered.items() if name in accepted}, **keys)


@register_policy("actor_only")
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
    if action_std_range is not None:
        if log_std_range is not None:
            raise ValueError("give action_std_range or log_std_range, not both")
        low, high = _range("action_std_range", action_std_range)
        if low <= 0:
            raise ValueError(f"action_std_range must be two positive numbers, got {action_std_range!r}")
        log_std_range = (math.log(low), math.log(high))
    bounds: dict[str, Any] = {}
    if _DISTRIBUTIONS.get(distribution) is tanh_normal:
        if not isinstance(action_space, spaces.Box):
            raise TypeError(f"tanh_normal takes its bounds from the action space, which must be a Box, got {action_space}")
        bounds = {"action_low": action_space.low, "action_high": action_space.high}
    return actor_only(
        obs_dim,
        action_dim,
        network=actor,
        distribution=distribution,
        **bounds,
        initial_log_std=initial_log_std,
        initial_action_std=initial_action_std,
        log_std_range=LOG_STD_RANGE if log_std_range is None else log_std_range,
        state_dependent_std=state_dependent_std,
        obs_groups=resolve_policy_obs_groups({"obs_groups": obs_groups})[0],
    )
