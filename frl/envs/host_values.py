"""What passes between a host environment and the library: actions on the way in; observations, rewards, flags and ``info`` on the way out."""

from __future__ import annotations

import functools
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


@dataclass(frozen=True, kw_only=True)
class Writer:
    """How actions of a policy are given to one environment.

    Attributes:
        space: its action space, as declared.
        num_envs: N.
        device: where the environment is.
        numpy: it speaks numpy.
        clip: clip to the bounds of a ``Box``.
    """

    space: spaces.Space
    num_envs: int
    device: torch.device
    numpy: bool
    clip: bool

    @functools.cached_property
    def _bounds(self) -> list[Tensor] | None:
        if not isinstance(self.space, spaces.Box):
            return None
        return [torch.from_numpy(np.array(x)).reshape(-1).to(self.device) for x in (self.space.low, self.space.high)]

    def action(self, action: Tensor) -> Any:
        """An action ``[N, A]`` or ``[N]`` as the environment takes it; ``TypeError`` or ``ValueError`` for one that does not fit."""
        space = self.space
        width = tuple(policy_action_space(space).shape or ())
        if not isinstance(action, Tensor) or tuple(action.shape) != (self.num_envs, *width):
            raise ValueError(f"an action for {space} must be a tensor of shape {[self.num_envs, *width]}, got {getattr(action, 'shape', action)}")
        action = action.detach().to(self.device)
        if self._bounds is not None:
            action = action.to(self._bounds[0].dtype)
            action = torch.clamp(action, *self._bounds) if self.clip else action
        elif action.is_floating_point() or action.dtype == torch.bool:
            raise TypeError(f"an action for {space} must be integers, got {action.dtype}")
        elif self.numpy:
            _check_choices(policy_action_space(space), action)
        action = action.reshape(self.num_envs, *(space.shape or ()))
        return action.numpy().astype(space.dtype) if self.numpy else action


def policy_action_space(space: spaces.Space) -> spaces.Space:
    """The action space as policies read it: one vector, or one choice."""
    if isinstance(space, spaces.Discrete):
        return space
    if isinstance(space, spaces.MultiDiscrete):
        return spaces.MultiDiscrete(space.nvec.reshape(-1), start=space.start.reshape(-1)) if space.nvec.ndim != 1 else space
    if isinstance(space, spaces.MultiBinary):
        return spaces.MultiDiscrete(np.full(int(np.prod(space.shape)), 2))
    if isinstance(space, spaces.Box):
        return space if len(space.shape) == 1 else spaces.Box(space.low.reshape(-1), space.high.reshape(-1), dtype=space.dtype.type)  # pyright: ignore[reportArgumentType]
    raise TypeError(f"actions of {type(space).__name__} have no form as one tensor (known: Box, Discrete, MultiDiscrete, MultiBinary); wrap the env")


def _check_choices(space: Any, action: Tensor) -> None:
    n = space.n if isinstance(space, spaces.Discrete) else space.nvec
    index = action.numpy() - space.start
    if bool((index < 0).any()) or bool((index >= n).any()):
        raise ValueError(f"an action is outside {space}: got values from {int(action.min())} to {int(action.max())}; the start offset is part of an action")


def filler(dtype: torch.dtype, like: Tensor) -> Tensor:
    """What stands for a metric of rows that say nothing of it: NaN, or False."""
    return torch.full(like.shape, False if dtype == torch.bool else float("nan"), dtype=dtype, device=like.device)


def _stack(rows: Sequence[Any]) -> Any:
    if is_mapping(rows[0]):
        return {name: _stack([row[name] for row in rows]) for name in entry_names(rows[0])}
    return torch.stack(list(rows)) if isinstance(rows[0], Tensor) else np.stack(rows)
