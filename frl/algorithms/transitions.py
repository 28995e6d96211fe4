"""Transitions of a recorded rollout ``[N, T+1]`` as updates take them: fields by name, time first for what runs through time, or flat for minibatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from frl import tree


def read_rollout(rollout: Any, names: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
    """Fields of a recorded rollout as a plain dict, ``metrics`` as a nested one.

    Args:
        rollout: TensorDict ``[N, T+1]`` (or a mapping of tensors).
        names: fields that must be there.
        optional: fields that are taken when they are.

    Raises:
        ValueError: for a missing field, a rollout without steps, or a field whose first dimensions are not ``[N, T+1]``.
    """
    fields = {name: rollout.get(name, None) for name in (*names, *optional)}
    missing = [name for name in names if fields[name] is None]
    if missing:
        raise ValueError(f"the rollout has no {', '.join(missing)}; this update needs {', '.join(names)}")
    batch = fields["reward"].shape
    if len(batch) != 2 or batch[1] < 2:
        raise ValueError(f"a rollout has reward of shape [N, T+1] with T of at least 1, got {list(batch)}")
    for name, x in fields.items():
        if isinstance(x, Tensor) and x.shape[:2] != batch:
            raise ValueError(f"rollout field {name!r} must have first dimensions {list(batch)}, got shape {list(x.shape)}")
    plain = {name: x.to_dict() if hasattr(x, "to_dict") else x for name, x in fields.items() if x is not None}
    return {name: tree.map(lambda x: x.detach(), x) for name, x in plain.items()}


def by_time(x: Tensor) -> Tensor:
    """``[N, T+1, ...] -> [T, N, ...]``, without the bootstrap slot."""
    return x[:, :-1].movedim(0, 1)


def valid_steps(fields: dict[str, Any]) -> Tensor:
    """Transitions that count, ``[T, N]`` bool; all of them where the recording does not say."""
    return by_time(fields["valid"]) if "valid" in fields else torch.ones_like(by_time(fields["done"]))


def flat_transitions(x: Tensor) -> Tensor:
    """``[N, T+1, ...] -> [N T, ...]``, rows first."""
    return x[:, :-1].flatten(0, 1)


def cleared(valid: Tensor, x: Tensor) -> Tensor:
    """Zeros where a transition does not count: whatever stands there would meet a zero cotangent in the backward, and zero times NaN is NaN."""
    return torch.where(valid.reshape(valid.shape + (1,) * (x.ndim - valid.ndim)), x, torch.zeros_like(x))
