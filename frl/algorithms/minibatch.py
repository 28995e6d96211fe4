"""Recorded rollouts as batches of transitions, and their partition into minibatches.

A minibatch is a row of indices with a mask. All rows of a partition have the same length, so every minibatch has the same shape and a compiled step sees
one; where the sizes differ (by one at most) the shorter rows are filled up with an index that the mask leaves out. Which transition goes where follows from
a key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from frl import rng, tree
from frl.validate import require_count

if TYPE_CHECKING:
    from tensordict import TensorDict

REQUIRED = ("obs", "action", "sample_log_prob", "reward", "done", "terminated", "truncated")
FLAGS = ("done", "terminated", "truncated", "valid")
PER_STEP = ("sample_log_prob", "value", "reward", "advantage", "return", "seq_mask", "seq_return", "entropy", "final_value", *FLAGS)


class Minibatches(NamedTuple):
    """A partition of ``0 .. count - 1``: every number is in exactly one place that ``mask`` counts."""

    index: Tensor  # [..., M, S] int64; S = ceil(count / M)
    mask: Tensor  # [..., M, S] bool; false on the filling


def transition_view(rollout: TensorDict, flatten: bool = False) -> TensorDict:
    """The T transitions of every row of a recorded rollout, as a view of the same memory; the rollout stays as it is.

    All fields lose slot T (the bootstrap value and padding). ``next_value`` is added where values are recorded: ``value`` one slot later, which after a
    done is the value of the next episode's first observation.

    Args:
        rollout: TensorDict ``[N, T+1]``, or with further leading dimensions, with ``obs``, ``action``, ``sample_log_prob``, ``reward``, ``done``,
            ``terminated`` and ``truncated``, usually ``value``, and any others.
        flatten: join rows and steps to one dimension ``[N T]``, rows first.

    Returns:
        TensorDict ``[N, T]`` or ``[N T]``.

    Raises:
        ValueError: for a batch size without steps, missing fields, flags that are not bool, and numbers or flags of a step that are not ``[N, T+1]``.
    """
    batch = tuple(rollout.batch_size)
    if len(batch) < 2 or batch[-1] < 2:
        raise ValueError(f"a rollout has batch size [N, T+1] with T of at least 1, got {list(batch)}")
    names = set(rollout.keys())
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        raise ValueError(f"the rollout has no {', '.join(missing)}; transitions need {', '.join(REQUIRED)}")
    for name in PER_STEP:
        if name not in names:
            continue
        field = rollout.get(name)
        if tuple(field.shape) != batch:
            raise ValueError(f"rollout field {name!r} must have shape {list(batch)}, got {list(field.shape)}")
        if name in FLAGS and field.dtype != torch.bool:
            raise ValueError(f"rollout field {name!r} must be bool, got {field.dtype}")
    view = rollout[..., :-1]
    if "value" in names:
        view.set("next_value", rollout.get("value")[..., 1:])
    return view.flatten(len(batch) - 2, len(batch) - 1) if flatten else view


def minibatch_count(count: int, *, num_minibatches: int | None = None, batch_size: int | None = None) -> int:
    """Number of minibatches: ``num_minibatches`` if given, else as many as keep every one at ``batch_size`` or below.

    Raises:
        ValueError: unless ``count`` and the number that is used are positive integers and ``num_minibatches`` is at most ``count``.
    """
    require_count("the number of transitions", count)
    if num_minibatches is not None:
        if require_count("num_minibatches", num_minibatches) > count:
            raise ValueError(f"num_minibatches must be at most the number of transitions, {count}, got {num_minibatches}")
        return num_minibatches
    return -(-count // require_count("batch_size", batch_size))


def minibatch_indices(key: Tensor, count: int, *, num_minibatches: int | None = None, batch_size: int | None = None) -> Minibatches:
    """A random partition of ``0 .. count - 1`` into M minibatches whose sizes differ by at most 1, the larger ones first.

    Args:
        key: int64 ``[2]``, or ``[..., 2]`` for a partition by key. Give each epoch its own: ``rng.fold_in(key, epoch)``.
        count: number of transitions.
        num_minibatches: M. It goes before ``batch_size``.
        batch_size: the largest size allowed; one above ``count`` gives one minibatch.

    Returns:
        :class:`Minibatches`.

    Raises:
        ValueError: as :func:`minibatch_count`.
    """
    parts = minibatch_count(count, num_minibatches=num_minibatches, batch_size=batch_size)
    base, larger = divmod(count, parts)
    row = torch.arange(parts, device=key.device)[:, None]
    column = torch.arange(base + (larger > 0), device=key.device)
    mask = column < base + (row < larger).to(torch.int64)
    # The filling repeats the first index of its row: a transition that exists, whatever the batch holds.
    place = row * base + row.clamp(max=larger) + torch.where(mask, column, 0)
    index = rng.permutation(key, count)[..., place]
    return Minibatches(index=index, mask=mask.expand(index.shape))


def take_minibatch(flat: Any, index: Tensor) -> Any:
    """The transitions at ``index [S]`` of a TensorDict ``[count]`` or of a tree of tensors ``[count, ...]``; copies, in the order of ``index``."""
    return flat[index] if hasattr(flat, "batch_size") else tree.index(flat, index)


def iterate_minibatches(
    flat: Any, key: Tensor, *, num_minibatches: int | None = None, batch_size: int | None = None, epochs: int = 1
) -> Iterator[tuple[Any, Tensor]]:
    """Every transition once for each epoch, in minibatches of one shape: pairs ``(minibatch [S, ...], mask [S])``.

    Epoch ``e`` is the partition of :func:`minibatch_indices` under ``fold_in(key, e)``. Statistics of a minibatch skip what its mask leaves out; averages
    over minibatches weigh each by ``mask.sum()``.

    Args:
        flat: TensorDict ``[count]`` (``transition_view(rollout, flatten=True)``) or a tree of tensors ``[count, ...]``.
        key: int64 ``[2]``.
        num_minibatches, batch_size: see :func:`minibatch_indices`.
        epochs: passes over the data.

    Raises:
        ValueError: as :func:`minibatch_count`, at the call; for a ``flat`` that has no common first dimension, or ``epochs`` that is not an integer of at
            least 0.
    """
    require_count("epochs", epochs, 0)
    count = _count(flat)
    parts = minibatch_count(count, num_minibatches=num_minibatches, batch_size=batch_size)

    def minibatches() -> Iterator[tuple[Any, Tensor]]:
        for epoch in range(epochs):
            plan = minibatch_indices(rng.fold_in(key, epoch), count, num_minibatches=parts)
            for m in range(parts):
                yield take_minibatch(flat, plan.index[m]), plan.mask[m]

    return minibatches()


def _count(flat: Any) -> int:
    if hasattr(flat, "batch_size"):
        if len(flat.batch_size) != 1:
            raise ValueError(f"minibatches are taken from one dimension, got batch size {list(flat.batch_size)}; use transition_view(rollout, flatten=True)")
        return flat.batch_size[0]
    sizes = {tuple(x.shape[:1]) for x in tree.leaves(flat)}
    if len(sizes) != 1 or sizes == {()}:
        raise ValueError(f"all tensors must have the same first dimension, got {sorted(sizes)}")
    return sizes.pop()[0]
