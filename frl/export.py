"""A trained policy as a program of ``torch.export``: observation in, action out, and no ``frl`` to run it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from frl import tree
from frl.observations import infer_policy_action, is_mapping
from frl.types import Normalizer, Params, PyTree

SUFFIX = ".pt2"
ABOUT = "frl.json"
"""The file within a program that says what goes in and out."""


def export_policy(
    path: str | Path,
    policy: Any,
    params: Params,
    example: PyTree,
    *,
    normalizer: Normalizer | None = None,
    norm_state: PyTree = (),
    clamp_to: spaces.Box | None = None,
    about: Mapping[str, Any] | None = None,
) -> Path:
    """Write the deterministic policy with its normalizer; ``torch.export.load(path).module()(obs)`` runs it for any number of rows.

    Args:
        path: a file that ends in ``.pt2``; its folder is made.
        policy, params: see :class:`frl.Policy`.
        example: raw observations of a few rows, ``[N, ...]``, or a mapping of them; their dtype and device are those that the program takes.
        normalizer, norm_state: as trained.
        clamp_to: clamp actions to this space.
        about: what to add to the description in ``frl.json`` inside the file (``torch.export.load(path, extra_files={"frl.json": ""})`` reads it).

    Returns:
        The path.

    Raises:
        ValueError: for another suffix.
    """
    path = Path(path)
    if path.suffix != SUFFIX:
        raise ValueError(f"an exported program ends in {SUFFIX}, got {path.name!r}")
    actor = _Actor(policy, params, normalizer, norm_state, clamp_to)
    # One row would be taken for a constant.
    example = tree.map(lambda x: x[:1].expand(2, *x.shape[1:]).clone(), example)
    rows = torch.export.Dim("rows")
    program = torch.export.export(actor, (example,), dynamic_shapes=(tree.map(lambda x: {0: rows}, example),))
    with torch.no_grad():
        action = actor(example)
    described = {**dict(about or {}), "observation": _shapes(example), "action": _shapes(action)}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.export.save(program, path, extra_files={ABOUT: json.dumps(described, indent=2)})
    return path


def clamp_action(action: Tensor, space: spaces.Box) -> Tensor:
    """Each component within the bounds of the space."""
    low, high = (torch.as_tensor(bound, dtype=action.dtype, device=action.device) for bound in (space.low, space.high))
    return torch.where(action < low, low, torch.where(action > high, high, action))


class _Actor(nn.Module):
    """Everything that a policy needs as buffers, in the form that ``torch.export`` reads."""

    def __init__(self, policy: Any, params: Params, normalizer: Normalizer | None, norm_state: PyTree, clamp_to: spaces.Box | None) -> None:
        super().__init__()
        self._policy, self._normalizer, self._clamp_to = policy, normalizer, clamp_to
        leaves, self._structure = tree.flatten((params, norm_state))
        self._names = [f"leaf_{i}" for i in range(len(leaves))]
        for name, leaf in zip(self._names, leaves, strict=True):
            self.register_buffer(name, leaf.detach().clone())

    def forward(self, obs: Any) -> Tensor:
        params, norm_state = tree.unflatten(self._structure, [getattr(self, name) for name in self._names])
        action = infer_policy_action(self._policy, params, obs, normalizer=self._normalizer, norm_state=norm_state)
        return action if self._clamp_to is None else clamp_action(action, self._clamp_to)


def _shapes(values: Any) -> Any:
    if is_mapping(values):
        return {name: _shapes(part) for name, part in values.items()}
    return {"shape": ["N", *values.shape[1:]], "dtype": str(values.dtype).removeprefix("torch.")}
