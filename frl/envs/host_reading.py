"""What a host environment says, as tensors: observations, numbers of the rows, final observations and metrics in the forms that ``info`` has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from frl import tree
from frl.observations import encode_observation, entry_names, is_mapping
from frl.types import Metrics, PyTree


@dataclass(frozen=True, kw_only=True)
class Reader:
    """How values of one environment are read.

    Attributes:
        space: of its observations, as declared.
        num_envs: N.
        device: where the environment is.
        dtype: of metrics and observations; observations that need float64 stay in it.
        numpy: it speaks numpy, and may write its arrays again.
    """

    space: spaces.Space
    num_envs: int
    device: torch.device
    dtype: torch.dtype
    numpy: bool

    def rows(self, values: Any, dtype: torch.dtype) -> Tensor:
        """One number of every row, ``[N]``, copied."""
        return self._tensor(values).reshape(self.num_envs).to(dtype, copy=True)

    def observation(self, obs: Any) -> PyTree:
        """Observations of some rows as floating tensors ``[..., O]``."""
        return encode_observation(self.space, self._tensors(obs), self.dtype)

    def final_observations(self, info: Mapping[str, Any], after: PyTree, done: Tensor) -> tuple[PyTree, Tensor]:
        """``(observations before any reset, rows in which they are known)``; ``after`` has what the step returned."""
        given = info.get("final_obs", info.get("final_observation"))
        if given is None:
            return after, torch.zeros_like(done)
        if isinstance(given, (list, tuple)) or (isinstance(given, np.ndarray) and given.dtype == object):
            rows = [i for i, x in enumerate(given) if x is not None]
            index = torch.tensor(rows, dtype=torch.int64, device=self.device)
            known = torch.zeros_like(done).index_fill(0, index, True)
            if not rows:
                return after, known
            stacked = self.observation(_stack([given[i] for i in rows]))
            return tree.map(lambda x, y: x.index_copy(0, index, y), after, stacked), known
        said = info.get("_final_obs", info.get("_final_observation"))
        return self.observation(given), torch.ones_like(done) if said is None else self.rows(said, torch.bool)

    def metrics(self, info: Mapping[str, Any]) -> Metrics:
        """``success`` and the entries of ``metrics`` that are one number for each row."""
        inner: Any = info.get("metrics")
        sources: list[tuple[str, Any, str]] = [("success", info, "success"), ("success", info, "is_success")]
        sources += [(name, inner, name) for name in entry_names(inner) if not name.startswith("_")] if is_mapping(inner) else []
        out: Metrics = {}
        for name, source, key in sources:
            value = source.get(key, None)
            if value is None or name in out:
                continue
            try:
                x = self._tensor(value)
            except (TypeError, ValueError, RuntimeError):
                continue  # not numbers
            if x.numel() != self.num_envs or (x.ndim > 0 and x.shape[0] != self.num_envs):
                continue
            x = x.reshape(self.num_envs).to(torch.bool if x.dtype == torch.bool or name == "success" else self.dtype, copy=True)
            said = source.get(f"_{key}", None)
            out[name] = x if said is None else torch.where(self.rows(said, torch.bool), x, filler(x.dtype, x))
        return out

    def _tensor(self, values: Any) -> Tensor:
        return torch.as_tensor(np.array(values) if self.numpy else values, device=self.device).detach()

    def _tensors(self, obs: Any) -> Any:
        if is_mapping(obs):
            return {name: self._tensors(obs[name]) for name in entry_names(obs)}
        if isinstance(obs, Tensor):
            return obs.detach().to(self.device)
        x = np.asarray(obs)
        if x.dtype.kind == "u" and x.dtype.itemsize > 1:
            x = x.astype(np.float64 if x.dtype.itemsize == 8 else np.int64)
        return torch.from_numpy(np.ascontiguousarray(x)).to(self.device)


def filler(dtype: torch.dtype, like: Tensor) -> Tensor:
    """What stands for a metric of rows that say nothing of it: NaN, or False."""
    return torch.full(like.shape, False if dtype == torch.bool else float("nan"), dtype=dtype, device=like.device)


def _stack(rows: Sequence[Any]) -> Any:
    if is_mapping(rows[0]):
        return {name: _stack([row[name] for row in rows]) for name in entry_names(rows[0])}
    return torch.stack(list(rows)) if isinstance(rows[0], Tensor) else np.stack(rows)
