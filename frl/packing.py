"""Many small tensors as few: leaves joined into one buffer for each dtype.

The time loop pays for every tensor it hands to a compiled step and takes back (an allocation, a view, a stack at the end), so what goes in and out of a
step by the dozen travels joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Packing:
    """How a list of tensors joins into packs: one for each dtype, device and need of a gradient.

    Args:
        examples: tensors with the shapes, dtypes and devices of the leaves; ``requires_grad`` separates tracked leaves from others.

    Attributes:
        tracked: for each pack whether its leaves require gradients.
    """

    def __init__(self, examples: Sequence[Tensor]) -> None:
        self.shapes = [x.shape for x in examples]
        groups: dict[tuple, list[int]] = {}
        for i, x in enumerate(examples):
            groups.setdefault((x.dtype, x.device, x.requires_grad), []).append(i)
        self.groups = list(groups.values())
        self.tracked = [key[2] for key in groups]

    def join(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Leaves to packs ``[total]``; a leaf that is alone in its group stays as it is."""
        return [torch.cat([leaves[i].reshape(-1) for i in group]) if len(group) > 1 else leaves[group[0]] for group in self.groups]

    def split(self, packs: Sequence[Tensor]) -> list[Tensor]:
        """Inverse of :meth:`join`; views."""
        return [x[0] for x in self.split_stacked([pack.unsqueeze(0) for pack in packs])]

    def join_stacked(self, leaves: Sequence[Any], *, tracked_only: bool = False, lead: int = 1) -> list[Tensor]:
        """Leaves ``[T, ...]`` (or with ``lead`` leading dimensions) to packs ``[T, total]``, or to those that are tracked."""
        joined = []
        for group, tracked in zip(self.groups, self.tracked, strict=True):
            if tracked or not tracked_only:
                flat = [leaves[i].flatten(lead) if leaves[i].ndim > lead else leaves[i].unsqueeze(-1) for i in group] if len(group) > 1 else ()
                joined.append(torch.cat(flat, -1) if len(group) > 1 else leaves[group[0]].contiguous())
        return joined

    def split_stacked(self, packs: Sequence[Tensor], *, lead: int = 1) -> list[Tensor]:
        """Inverse of :meth:`join_stacked`; views."""
        leaves: list[Any] = [None] * len(self.shapes)
        for pack, group in zip(packs, self.groups, strict=True):
            if len(group) == 1:
                leaves[group[0]] = pack
                continue
            parts = pack.split([self.shapes[i].numel() for i in group], dim=-1)
            for i, part in zip(group, parts, strict=True):
                leaves[i] = part.reshape(*pack.shape[:lead], *self.shapes[i])
        return leaves
