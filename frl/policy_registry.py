"""Names and spaces of policies: register a factory, read the spaces of an environment, build a policy from a run file's ``policy`` block.

:func:`build_policy` calls a factory by keyword with what its signature names, so a user's factory asks for just what it needs. The built-in kinds register
themselves when their modules are imported, which the first look-up does.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from frl.networks import check_keys
from frl.registry import Registry
from frl.validate import require_count

if TYPE_CHECKING:
    from frl.policies import Policy

POLICIES = Registry("policy", group="frl.policies")
"""Policy factories by case-insensitive name."""
_BUILTIN_MODULES = ("frl.policies", "frl.critic_policies")


def _load_builtins() -> None:
    for module in _BUILTIN_MODULES:
        importlib.import_module(module)


def register_policy(name: str, factory: Callable[..., Policy] | None = None, *, override: bool = False) -> Any:
    """Register a policy factory under a case-insensitive name, directly or as a decorator.

    :func:`build_policy` calls it by keyword with what its signature names: ``observation_space`` (or ``obs_space``), ``obs_dim``, ``critic_obs_dim``,
    ``action_space``, ``action_dim``, and the keys of the policy block. A key that it does not name is an error::

        @register_policy("constant")
        def constant(*, obs_dim, action_dim, level=0.0) -> Policy: ...

    Raises:
        ValueError: the name is empty, or taken and ``override`` is false.
    """
    _load_builtins()
    return POLICIES.register(name, factory, override=override)


def get_policy_class(name: str) -> Callable[..., Policy]:
    """The factory registered under ``name``; ``ValueError`` with the known names otherwise."""
    _load_builtins()
    return POLICIES.get(name)


def get_registered_policy_names() -> list[str]:
    """Sorted names of the registered policies."""
    _load_builtins()
    return POLICIES.names()


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
        return require_count("observation space", space)
    raise TypeError(f"an observation space must be an int, a Box of shape (O,) or a Dict of boxes, got {space}")


def action_count(space: Any) -> int:
    """Numbers in one action: A of a floating ``Box`` ``(A,)``, a ``MultiDiscrete`` ``(A,)`` or an int; 1 of a ``Discrete``. ``TypeError`` for other spaces."""
    if isinstance(space, spaces.Discrete):
        return 1
    if isinstance(space, spaces.MultiDiscrete) and len(space.shape) == 1:
        return space.shape[0]
    return _continuous_action_dim(space)


def _continuous_action_dim(space: spaces.Space | int) -> int:
    if isinstance(space, spaces.Box) and len(space.shape) == 1 and np.issubdtype(space.dtype, np.floating):
        return space.shape[0]
    if isinstance(space, Integral):
        return require_count("action space", space)
    raise TypeError(f"the policy needs a continuous action space, an int or a floating-point Box of shape (A,), got {space}")


def build_policy(policy_block: Mapping[str, Any], observation_space: spaces.Space | int, action_space: spaces.Space | int) -> Policy:
    """A :class:`~frl.policies.Policy` from the ``policy`` block of a run file.

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
    if keys.get("action_dim") is not None and keys["action_dim"] != action_count(action_space):
        raise ValueError(f"action_dim {keys['action_dim']!r} of the policy block does not match the environment's {action_count(action_space)}")
    keys.pop("action_dim", None)

    signature = inspect.signature(factory).parameters.values()
    accepted = [p.name for p in signature if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    offered: dict[str, Callable[[], Any]] = {
        "observation_space": lambda: observation_space,
        "obs_space": lambda: observation_space,
        "obs_dim": lambda: observation_dim(observation_space, resolve_policy_obs_groups(policy_block)[0]),
        "critic_obs_dim": lambda: observation_dim(observation_space, resolve_policy_obs_groups(policy_block)[1]),
        "action_space": lambda: action_space,
        "action_dim": lambda: _continuous_action_dim(action_space),
    }
    if not any(p.kind == p.VAR_KEYWORD for p in signature):
        check_keys(f"the policy block of {policy_block['name']!r}", keys, [name for name in accepted if name not in offered])
    return factory(**{name: value() for name, value in offered.items() if name in accepted}, **keys)
