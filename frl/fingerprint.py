"""What must be the same for a checkpoint to fit a run: algorithm, policy, environment and spaces. Shapes and dtypes are those of the tensors themselves.

Two policies can have parameters of the same shapes and yet be different functions (``tanh`` for ``relu``), and two environments the same spaces; loading one
for the other would go wrong in silence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from gymnasium import spaces

from frl.build import RunParts
from frl.config import dump_run_config

_FREE_POLICY_KEYS = ("initial_log_std", "initial_action_std")  # they shape the first parameters only


def fingerprint(parts: RunParts) -> dict[str, Any]:
    """The fingerprint of a built run, as JSON values."""
    blocks, env = dump_run_config(parts.config), parts.env
    spec = getattr(getattr(env, "env", env), "spec", None)
    mask = getattr(spec, "normalize_mask", None)
    trainer = blocks["trainer"]
    found = {
        "algorithm": parts.config.algorithm.name,
        "policy": {name: value for name, value in blocks["policy"].items() if name not in _FREE_POLICY_KEYS},
        "normalize_observations": trainer["normalize_observations"],
        "environment": {
            "name": getattr(spec, "name", trainer["learning_env"]["name"]),
            "observation_space": describe_space(env.single_observation_space),
            "action_space": describe_space(env.single_action_space),
            "normalize_mask": None if mask is None else [bool(flag) for flag in mask],
        },
    }
    return json.loads(json.dumps(found))


def describe_space(space: spaces.Space) -> dict[str, Any]:
    """A gymnasium space as JSON values, bounds included."""
    kind = {"type": type(space).__name__}
    if isinstance(space, spaces.Dict):
        return {**kind, "spaces": {name: describe_space(part) for name, part in sorted(space.spaces.items())}}
    if isinstance(space, spaces.Tuple):
        return {**kind, "spaces": [describe_space(part) for part in space.spaces]}
    if isinstance(space, spaces.Box):
        return {**kind, "shape": list(space.shape), "dtype": str(space.dtype), "low": space.low.tolist(), "high": space.high.tolist()}
    if isinstance(space, spaces.Discrete):
        return {**kind, "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {**kind, "nvec": space.nvec.tolist(), "start": space.start.tolist()}
    return {**kind, "is": repr(space)}


def changes(before: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """``(key path, value before, value now)`` of everything that differs between two plain values."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in {**before, **now}:
            yield from changes(before.get(key), now.get(key), f"{path}.{key}" if path else key)
    elif before != now:
        yield path, before, now
