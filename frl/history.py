"""Histories of scalar records as one vector, so that a checkpoint keeps every bit of them in little space and time.

A record is a dict of floats; most follow each other with the same names. Packed, a history is its values in one float64 vector and a layout ``[[count, names],
...]`` of the runs of records with the same names in the same order.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Record = dict[str, float]
_WHOLE = ("global_step", "num_updates")  # names whose values are integers


class PackedHistory:
    """Follows a list of records that only grows: each is packed once, however often the history is saved."""

    def __init__(self) -> None:
        self._values = array("d")
        self._layout: list[list[Any]] = []
        self._seen = 0

    def follow(self, records: Sequence[Mapping[str, float]]) -> tuple[Tensor, list[list[Any]]]:
        """``(values float64 [n], layout)`` of all records so far, of which the first ones are those of the last call."""
        for record in records[self._seen :]:
            names = list(record)
            if not self._layout or self._layout[-1][1] != names:
                self._layout.append([0, names])
            self._layout[-1][0] += 1
            self._values.extend(record.values())
        self._seen = len(records)
        values = torch.frombuffer(self._values[:], dtype=torch.float64) if self._values else torch.zeros(0, dtype=torch.float64)
        return values, [[count, list(names)] for count, names in self._layout]


def unpack_history(values: Tensor, layout: Any) -> list[Record]:
    """The records of a packed history.

    Raises:
        ValueError: ``layout`` is none, or one of another number of values.
    """
    try:
        runs = [(int(count), [str(name) for name in names]) for count, names in layout]
    except (TypeError, ValueError) as error:
        raise ValueError(f"not the layout of a history: {error}") from error
    flat = values.tolist()
    if values.ndim != 1 or any(count < 0 for count, _ in runs) or sum(count * len(names) for count, names in runs) != len(flat):
        raise ValueError(f"the layout of a history does not fit its values of shape {tuple(values.shape)}")
    records, at = [], 0
    for count, names in runs:
        for _ in range(count):
            row = zip(names, flat[at : at + len(names)], strict=True)
            records.append({name: int(value) if name in _WHOLE else value for name, value in row})
            at += len(names)
    return records
