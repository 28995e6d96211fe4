"""Host environments: the one impure door, for environments that keep their state to themselves.

A :class:`HostEnv` wraps a ``gymnasium.vector`` environment, or an object with the stateful :class:`~frl.types.LearningVecEnv` protocol, and speaks the words
of the library: ``step`` returns a :class:`~frl.types.TimeStep` of tensors. All three of gymnasium's autoreset modes give the same transitions; where the
environment spends a step on a reset (``next_step``), ``metrics["valid"]`` is false and the step counts for nothing. ``make_host_unroll`` plays a policy on it
with the signature of :func:`frl.make_unroll`. What changes here is the wrapped environment: the state of a rollout lives in it, and cannot be put back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv
from torch import Tensor

from frl import compile as compiler
from frl import rng, tree
from frl.envs.env import EnvSpec
from frl.envs.vector import RESERVED_METRICS
from frl.observations import encode_observation, encoded_space, entry_names, flatten_observation_groups, is_mapping
from frl.types import LearningVecEnv, Metrics, Normalizer, Params, PyTree, TimeStep, Trajectory

AUTORESET_MODES = {"same_step": "SameStep", "next_step": "NextStep", "disabled": "Disabled"}
"""Names here, and those of gymnasium."""
VECTORIZATIONS = ("sync", "async", "vector_entry_point")
MISSING_FINAL_OBS = ("refuse", "pre_step")
# Those of frl.rollout, which a module of this layer may not import.
FIELDS = ("obs", "final_obs", "action", "raw", "log_prob", "entropy", "metrics")
_RESERVED = (*RESERVED_METRICS, "valid")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class HostEnv:
    """N rows of an environment with a state of its own.

    ``step`` clips actions to the bounds of a ``Box`` and refuses those that a discrete space does not contain; actions are in the numbering of the action
    space, start offsets included, as :attr:`frl.types.Trajectory.action` has them. Metrics of a step are ``episode_return``, ``episode_length``,
    ``nonfinite`` (the row's reward or observation was not finite: it counts as terminated, and is reset where the environment can reset single rows),
    ``valid``, and what the environment's ``info`` holds under ``success`` (or ``is_success``) and ``metrics``, one number for each row, before any reset.
    A metric that was seen once is reported in every later step, NaN (or False) where a row says nothing.

    Args:
        env: a ``gymnasium.vector.VectorEnv``, or an object with the :class:`~frl.types.LearningVecEnv` protocol, which resets rows inside the step.
        device: where tensors are returned.
        dtype: of rewards, metrics and observations; observations that need float64 stay in it (:func:`frl.observations.encode_observation`).
        name: for messages; by default the id of a gymnasium environment, or the name of its class.
        seed: of the first reset, where that is given none.
        autoreset: ``"same_step"``, ``"next_step"`` or ``"disabled"`` (rows are reset here, one by one); by default what the environment's metadata say.
        missing_final_obs: what to do when a row is truncated and the environment does not tell the observation before the reset: ``"refuse"``, or
            ``"pre_step"``, which warns once and takes the observation before the step, so that a bootstrap there is biased.
        clip_actions: clip to the bounds of a ``Box`` action space.

    Attributes:
        single_observation_space: of the encoded observations, a floating ``Box (O,)`` or a ``Dict`` of them.
        single_action_space: ``Box (A,)``, ``Discrete``, or ``MultiDiscrete (A,)``, which also stands for ``MultiBinary``.
        spec: name and time limit; ``dt`` is NaN, since gymnasium does not tell.

    Raises:
        TypeError: for an object of another kind, or spaces that have no form as tensors.
        ValueError: for a bad option, a metadata that says no autoreset mode, or one that contradicts ``autoreset``.
    """

    def __init__(
        self,
        env: Any,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        name: str | None = None,
        seed: int | None = None,
        autoreset: str | None = None,
        missing_final_obs: str = "refuse",
        clip_actions: bool = True,
    ) -> None:
        if not is_host_like(env):
            raise TypeError(f"a host environment wraps a gymnasium.vector environment or an object like LearningVecEnv, got {type(env).__name__}")
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
        if missing_final_obs not in MISSING_FINAL_OBS:
            raise ValueError(f"missing_final_obs must be one of {', '.join(MISSING_FINAL_OBS)}, got {missing_final_obs!r}")
        self.env, self.num_envs, self.device, self.dtype = env, int(env.num_envs), torch.device(device), dtype
        place = getattr(env, "device", None)
        self._numpy = isinstance(env, VectorEnv) and place is None
        # Everything is computed where the environment is; only results move.
        self._home = torch.device("cpu" if self._numpy else place)  # pyright: ignore[reportArgumentType]
        base = getattr(env, "unwrapped", env)
        self._rowwise = isinstance(base, (SyncVectorEnv, AsyncVectorEnv))
        self._raw_space, self._action_space = env.single_observation_space, env.single_action_space
        self.single_observation_space = encoded_space(self._raw_space, dtype)
        self.single_action_space = _policy_action_space(self._action_space)
        inner: Any = base.envs[0].spec if isinstance(base, SyncVectorEnv) else getattr(env, "spec", None)
        mask = getattr(env, "observation_normalize_mask", None)
        self.spec = EnvSpec(
            name=name or (f"gymnasium:{inner.id}" if getattr(inner, "id", None) else type(env).__name__),
            max_episode_steps=getattr(env, "max_episode_steps", getattr(inner, "max_episode_steps", None)),
            dt=float("nan"),
            differentiable=False,
            normalize_mask=None if mask is None else tuple(bool(flag) for flag in mask),
        )
        self.autoreset = self._autoreset(autoreset)
        self.missing_final_obs, self._clip, self._seed = missing_final_obs, clip_actions, _seed(seed)
        self._bounds: list[Tensor] | None = None
        if isinstance(self._action_space, spaces.Box):
            self._bounds = [torch.from_numpy(np.array(x)).reshape(-1).to(self._home) for x in (self._action_space.low, self._action_space.high)]
        self._obs: PyTree = None
        self._names: dict[str, torch.dtype] = {}
        self._warned: set[str] = set()
        self._closed = False

    def _autoreset(self, asked: str | None) -> str:
        if asked is not None and asked not in AUTORESET_MODES:
            raise ValueError(f"autoreset must be one of {', '.join(AUTORESET_MODES)}, got {asked!r}")
        tag: Any = (getattr(self.env, "metadata", None) or {}).get("autoreset_mode")
        said = {theirs: ours for ours, theirs in AUTORESET_MODES.items()}.get(getattr(tag, "value", tag))
        if said is None and asked is None and isinstance(self.env, VectorEnv):
            raise ValueError(f"{self.spec.name} does not say in its metadata how it resets finished rows; pass autoreset=, one of {', '.join(AUTORESET_MODES)}")
        if asked is not None and said is not None and asked != said:
            raise ValueError(f"{self.spec.name} resets finished rows by {said!r}, got autoreset={asked!r}; build it with that mode")
        return asked or said or "same_step"

    # -- what algorithms read of an environment ------------------------------------------------------------------------------------------------

    @property
    def default_params(self) -> PyTree:
        """Nothing: a host environment keeps its parameters to itself."""
        return ()

    @property
    def obs(self) -> PyTree:
        """The observation to act on next, ``[N, ...]``; the environment is reset if it never was."""
        if self._obs is None:
            self.reset()
        return self._out(self._obs)

    def observe(self, state: PyTree, env_params: PyTree = ()) -> PyTree:
        """The observation in ``state``, what :func:`make_host_unroll` returns as the environment's state: it is the observation itself."""
        return state

    # -- reset, step, close --------------------------------------------------------------------------------------------------------------------

    def row_keys(self, key: Tensor) -> Tensor:
        """Keys of the rows, ``[N, 2]``: row i's is ``fold_in(key, i)``, as for a functional environment."""
        return rng.fold_in(key, torch.arange(self.num_envs, device=key.device))

    def reset(self, seed: int | Tensor | None = None, env_params: PyTree = ()) -> PyTree:
        """New episodes in all rows.

        Args:
            seed: an int (gymnasium seeds row ``i`` with ``seed + i``); a key ``[2]``, of which :meth:`row_keys` are taken; or keys ``[N, 2]``. From a key, each
                row gets a seed of its own, and rows with equal keys start equally, where the environment takes a seed for each row; else the first
                row's seed is that of all. ``None`` goes on with the environment's own generators; the first reset then takes the seed of the constructor.
            env_params: nothing; for the signature of a functional environment.

        Returns:
            First observations ``[N, ...]``.
        """
        self._check_open()
        if seed is None and self._obs is None:
            seed = self._seed
        given: Any = self._seeds(seed) if isinstance(seed, Tensor) else _seed(seed)
        obs, _ = self.env.reset(seed=given)
        self._obs = self._encode(obs)
        false = torch.zeros(self.num_envs, dtype=torch.bool, device=self._home)
        self._pending, self._elapsed, self._return = false, false.to(torch.int64), false.to(torch.float64)
        return self._out(self._obs)

    def step(self, action: Tensor) -> TimeStep:
        """One step of every row; rows that are done start a new episode.

        Args:
            action: ``[N, A]``, or ``[N]`` for a ``Discrete`` space.

        Returns:
            :class:`~frl.types.TimeStep` on the device. In a step that only resets a row (``valid`` false) the reward is 0 and no flag is set. Where a row
            terminates and the environment does not tell its last observation, ``final_obs`` has the one before the step; no return needs it.

        Raises:
            RuntimeError: before the first reset, after ``close``, for a truncated row without final observation (see ``missing_final_obs``), and for a
                ``disabled`` environment that does not honour ``reset_mask``.
            TypeError, ValueError: for an action that does not fit the space.
        """
        return self._out(self.advance(action))

    def advance(self, action: Tensor) -> TimeStep:
        """:meth:`step` with the result where the environment is (the CPU for gymnasium): a rollout moves all of it at once."""
        self._check_open()
        if self._obs is None:
            raise RuntimeError(f"{self.spec.name}: reset comes before the first step")
        before, valid = self._obs, ~self._pending
        obs, reward, terminated, truncated, info = self.env.step(self._give(action))
        after = self._encode(obs)
        reward = torch.where(valid, self._rows(reward, torch.float64), 0.0)
        ended, truncated = (self._rows(flag, torch.bool) & valid for flag in (terminated, truncated))
        done = ended | truncated
        final = self._final_obs(info, before, after, done, truncated & ~ended) if self.autoreset == "same_step" else after
        nonfinite = valid & ~(torch.isfinite(reward) & _finite(final))
        lost = nonfinite & ~done  # rows that nobody has reset, or will
        self._obs = after
        self._pending = done if self.autoreset == "next_step" else torch.zeros_like(done)
        if self.autoreset == "disabled":
            self._reset_rows(done | nonfinite)
        elif self._rowwise:
            self._reset_rows(lost)
        elapsed, total = self._elapsed + valid, self._return + reward
        metrics = self._metrics(info, done)
        metrics.update(episode_return=total.to(self.dtype), episode_length=elapsed, nonfinite=nonfinite, valid=valid)
        done = done | nonfinite
        self._elapsed, self._return = torch.where(done, 0, elapsed), torch.where(done, 0.0, total)
        return TimeStep(obs=self._obs, final_obs=final, reward=reward.to(self.dtype), terminated=ended | nonfinite, truncated=truncated, metrics=metrics)

    def close(self) -> None:
        """Close the wrapped environment; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self.env.close()

    def __enter__(self) -> HostEnv:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"HostEnv({self.spec.name!r}, num_envs={self.num_envs}, autoreset={self.autoreset!r})"

    # -- to the environment --------------------------------------------------------------------------------------------------------------------

    def _seeds(self, key: Tensor) -> Any:
        keys = self.row_keys(key) if key.ndim == 1 else key
        if tuple(keys.shape) != (self.num_envs, 2):
            raise ValueError(f"a seed that is a tensor must be a key [2] or keys {[self.num_envs, 2]}, got shape {list(key.shape)}")
        seeds = (rng.bits(keys) >> 1).tolist()
        return seeds if self._rowwise else seeds[0]

    def _give(self, action: Tensor) -> Any:
        """An action of a policy as the environment takes it."""
        space = self._action_space
        width = tuple(self.single_action_space.shape or ())
        if not isinstance(action, Tensor) or tuple(action.shape) != (self.num_envs, *width):
            raise ValueError(f"an action for {space} must be a tensor of shape {[self.num_envs, *width]}, got {getattr(action, 'shape', action)}")
        action = action.detach().to(self._home)
        if self._bounds is not None:
            action = action.to(self._bounds[0].dtype)
            action = torch.clamp(action, *self._bounds) if self._clip else action
        elif action.is_floating_point() or action.dtype == torch.bool:
            raise TypeError(f"an action for {space} must be integers, got {action.dtype}")
        elif self._numpy:
            _check_choices(self.single_action_space, action)
        action = action.reshape(self.num_envs, *(space.shape or ()))
        return action.numpy().astype(space.dtype) if self._numpy else action

    def _reset_rows(self, mask: Tensor) -> None:
        """New episodes in the rows of ``mask``, whose observations replace those to act on next."""
        if not bool(mask.any()):
            return
        obs, _ = self.env.reset(options={"reset_mask": mask.cpu().numpy()})
        fresh = self._encode(obs)
        if not self._rowwise:
            moved = ~_same(fresh, self._obs) & ~mask
            if bool(moved.any()):
                raise RuntimeError(
                    f"{self.spec.name} reset rows that it was not asked to ({_name_rows(moved)}): it does not honour options['reset_mask'], which "
                    "autoreset='disabled' needs; build it with another autoreset mode"
                )
        self._obs = tree.where(mask, fresh, self._obs)

    # -- from the environment ------------------------------------------------------------------------------------------------------------------

    def _rows(self, values: Any, dtype: torch.dtype) -> Tensor:
        x = torch.as_tensor(np.array(values) if self._numpy else values, device=self._home).detach()
        return x.reshape(self.num_envs).to(dtype, copy=True)

    def _encode(self, obs: Any) -> PyTree:
        return encode_observation(self._raw_space, self._tensors(obs), self.dtype)

    def _tensors(self, obs: Any) -> Any:
        if is_mapping(obs):
            return {name: self._tensors(obs[name]) for name in entry_names(obs)}
        if isinstance(obs, Tensor):
            return obs.detach().to(self._home)
        x = np.asarray(obs)
        if x.dtype.kind == "u" and x.dtype.itemsize > 1:
            x = x.astype(np.float64 if x.dtype.itemsize == 8 else np.int64)
        return torch.from_numpy(np.ascontiguousarray(x)).to(self._home)

    def _final_obs(self, info: Mapping[str, Any], before: PyTree, after: PyTree, done: Tensor, cut: Tensor) -> PyTree:
        """Observations before any reset, of an environment that resets inside the step; ``cut`` are the rows whose value depends on them."""
        given = info.get("final_obs", info.get("final_observation"))
        if self._numpy and not bool(done.any()):
            return after
        known = None
        if given is None:
            values, known = after, torch.zeros_like(done)
        elif isinstance(given, (list, tuple)) or (isinstance(given, np.ndarray) and given.dtype == object):
            rows = [i for i, x in enumerate(given) if x is not None]
            known = torch.zeros_like(done)
            known[rows] = True
            values = after
            if rows:
                index = torch.tensor(rows, device=self._home)
                stacked = self._encode(_stack([given[i] for i in rows]))
                values = tree.map(lambda x, y: x.index_copy(0, index, y), after, stacked)
        else:
            values = self._encode(given)
            said = info.get("_final_obs", info.get("_final_observation"))
            known = None if said is None else self._rows(said, torch.bool)
        if known is None:
            return tree.where(done, values, after)
        self._check_missing(cut & ~known)
        return tree.where(done & known, values, tree.where(done, before, after))

    def _check_missing(self, missing: Tensor) -> None:
        if "final_obs" in self._warned or not bool(missing.any()):
            return
        text = f"{self.spec.name} truncated {_name_rows(missing)} and did not tell the observation before the reset (info['final_obs'])"
        if self.missing_final_obs == "refuse":
            raise RuntimeError(
                f"{text}; the value of that state is unknown. Supply it, or pass missing_final_obs='pre_step' to bootstrap, with a bias, from the observation "
                "before the step"
            )
        self._warn("final_obs", f"{text}; the observation before the step stands in for it, which biases what is bootstrapped there")

    def _warn(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(text, RuntimeWarning, stacklevel=4)

    def _metrics(self, info: Mapping[str, Any], done: Tensor) -> Metrics:
        """Numbers of the step by row; of rows that were reset inside the step, those before it."""
        found = self._read(info)
        if self.autoreset == "same_step" and isinstance(info.get("final_info"), Mapping):
            ended = self._read(info["final_info"])
            for name in {**found, **ended}:
                filler = _filler((found if name in found else ended)[name].dtype, done)
                found[name] = torch.where(done, ended.get(name, filler), found.get(name, filler))
        for name, value in found.items():
            if name in _RESERVED:
                raise ValueError(f"environment {self.spec.name!r} uses the metric name {name!r}, which is reported for every environment; rename it")
            self._names.setdefault(name, value.dtype)
        return {name: found[name].to(dtype) if name in found else _filler(dtype, done) for name, dtype in sorted(self._names.items())}

    def _read(self, info: Mapping[str, Any]) -> Metrics:
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
                x = torch.as_tensor(np.array(value) if self._numpy else value, device=self._home).detach()
            except (TypeError, ValueError, RuntimeError):
                continue  # not numbers
            if x.numel() != self.num_envs or (x.ndim > 0 and x.shape[0] != self.num_envs):
                continue
            x = x.reshape(self.num_envs).to(torch.bool if x.dtype == torch.bool or name == "success" else self.dtype, copy=True)
            said = source.get(f"_{key}", None)
            out[name] = x if said is None else torch.where(self._rows(said, torch.bool), x, _filler(x.dtype, x))
        return out

    def _out(self, values: PyTree) -> PyTree:
        return values if self._home == self.device else tree.map(lambda x: x.to(self.device), values)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"{self.spec.name} is closed")


def is_host_like(env: Any) -> bool:
    """Whether ``env`` can be wrapped: a ``gymnasium.vector`` environment, or an object with the stateful protocol (and not a :class:`HostEnv` already)."""
    return isinstance(env, (VectorEnv, LearningVecEnv)) and not isinstance(env, HostEnv)


def _seed(seed: Any) -> int | None:
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed must be an integer, a key or None, got {seed!r}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    return int(seed)


def _policy_action_space(space: spaces.Space) -> spaces.Space:
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


def _finite(obs: PyTree) -> Tensor:
    return torch.stack([torch.isfinite(x).all(1) for x in tree.leaves(obs)]).all(0)


def _same(a: PyTree, b: PyTree) -> Tensor:
    return torch.stack([((x == y) | (x.isnan() & y.isnan())).all(1) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True)]).all(0)


def _filler(dtype: torch.dtype, like: Tensor) -> Tensor:
    return torch.full(like.shape, False if dtype == torch.bool else float("nan"), dtype=dtype, device=like.device)


def _name_rows(mask: Tensor) -> str:
    rows = torch.nonzero(mask).reshape(-1).tolist()
    return f"row{'s' if len(rows) > 1 else ''} {', '.join(str(i) for i in rows[:5])}{', ...' if len(rows) > 5 else ''}"


def _stack(rows: Sequence[Any]) -> Any:
    if is_mapping(rows[0]):
        return {name: _stack([row[name] for row in rows]) for name in entry_names(rows[0])}
    return torch.stack(list(rows)) if isinstance(rows[0], Tensor) else np.stack(rows)


# -- gymnasium by id ---------------------------------------------------------------------------------------------------------------------------------


def gymnasium_env(
    env_id: str,
    num_envs: int = 1,
    *,
    autoreset: str | None = None,
    vectorization: str = "sync",
    seed: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    missing_final_obs: str = "refuse",
    vector_kwargs: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> HostEnv:
    """N rows of a registered gymnasium environment.

    Args:
        env_id: such as ``"CartPole-v1"`` or ``"my_module:MyEnv-v0"``.
        num_envs: N.
        autoreset: ``"same_step"`` (the default), ``"next_step"`` or ``"disabled"``.
        vectorization: ``"sync"`` steps row after row in this process; ``"async"`` has a process for each row, which computes with one thread;
            ``"vector_entry_point"`` is the environment's own vector version, with its own autoreset mode and, often, one generator for all rows.
        seed: of the first reset.
        device, dtype, missing_final_obs: see :class:`HostEnv`.
        vector_kwargs: further arguments of gymnasium's ``SyncVectorEnv`` or ``AsyncVectorEnv`` (``context``, ``shared_memory``, ...).
        **kwargs: passed to ``gymnasium.make`` for each row (``max_episode_steps`` and the environment's own).

    Raises:
        ValueError: for an unknown id, a bad count, mode or seed, or an autoreset mode that the environment does not have.
    """
    if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:
        raise ValueError(f"num_envs must be a positive integer, got {num_envs!r}")
    if vectorization not in VECTORIZATIONS:
        raise ValueError(f"vectorization must be one of {', '.join(VECTORIZATIONS)}, got {vectorization!r}")
    if autoreset is not None and autoreset not in AUTORESET_MODES:
        raise ValueError(f"autoreset must be one of {', '.join(AUTORESET_MODES)}, got {autoreset!r}")
    seed = _seed(seed)
    module, _, plain_id = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        spec = gymnasium.spec(plain_id)
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise ValueError(f"unknown gymnasium environment {env_id!r}: {error}") from error
    options = dict(vector_kwargs or {})
    if vectorization == "vector_entry_point":
        env = gymnasium.make_vec(env_id, num_envs=num_envs, vectorization_mode=vectorization, vector_kwargs=options, **kwargs)
    else:
        options["autoreset_mode"] = AUTORESET_MODES[autoreset or "same_step"]
        make = functools.partial(_make_row, env_id, kwargs, os.getpid())
        with _one_thread_for_children():
            env = (SyncVectorEnv if vectorization == "sync" else AsyncVectorEnv)([make] * num_envs, **options)
    try:
        host = HostEnv(env, device=device, dtype=dtype, name=f"gymnasium:{env_id}", seed=seed, autoreset=autoreset, missing_final_obs=missing_final_obs)
    except (TypeError, ValueError):
        env.close()
        raise
    limit = kwargs.get("max_episode_steps") or spec.max_episode_steps
    host.spec = dataclasses.replace(host.spec, max_episode_steps=limit if limit and limit > 0 else None)
    return host


def _make_row(env_id: str, kwargs: Mapping[str, Any], learner: int) -> gymnasium.Env:
    """One row. In a process of its own it computes with one thread; gymnasium also calls this once in the learner's, whose setting stays as it is."""
    if os.getpid() != learner:
        os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))
        torch.set_num_threads(1)
    return gymnasium.make(env_id, **kwargs)


@contextlib.contextmanager
def _one_thread_for_children() -> Iterator[None]:
    """Environment variables that processes started meanwhile inherit, for libraries which read them when they are loaded."""
    before = {name: os.environ.get(name) for name in _THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# -- rollouts ----------------------------------------------------------------------------------------------------------------------------------------


def make_host_unroll(
    env: HostEnv,
    policy: Any,
    normalizer: Normalizer | None = None,
    *,
    record: Sequence[str] = FIELDS,
    deterministic: bool = False,
    clip_actions: bool = False,
    mode: str = "inductor",
) -> Callable[..., tuple[PyTree, Trajectory]]:
    """Build the rollout function of a host environment and a policy: :func:`frl.make_unroll` without derivatives.

    The policy is compiled and called once for each step. It begins where the environment stands, not at the ``env_state`` that it is given: call
    :meth:`HostEnv.reset` for new episodes. Nothing is recorded for differentiation.

    Args:
        env: see :class:`HostEnv`.
        policy: see :mod:`frl.policies`.
        normalizer: observation normalizer, frozen during the rollout; ``None`` for raw observations.
        record: optional trajectory fields, as for :func:`frl.make_unroll`.
        deterministic: act by the distribution's mode; the noise only gives the number of steps.
        clip_actions: record actions clamped to the action space; the environment gets them so in any case.
        mode: a mode of :mod:`frl.compile`.

    Returns:
        ``unroll(params, norm_state, env_state, env_params, noise) -> (env_state, Trajectory)``. Noise is ``[T, N, noise_dim]`` and gives the dtype that the
        policy computes in; the new ``env_state`` is the observation to act on next, of the dtype of the recorded ones. Those are as the environment gave
        them where a normalizer wants every digit, and in the dtype of the noise without one. ``metrics["valid"]`` is false in steps that only reset a row:
        nothing of them may reach a loss, a statistic or a count.

    Raises:
        ValueError: for an unknown field.
        TypeError: for ``clip_actions`` without bounds.
    """
    unknown = sorted(set(record) - set(FIELDS))
    if unknown:
        raise ValueError(f"unknown trajectory field {unknown[0]!r} (known: {', '.join(FIELDS)})")
    if clip_actions and not isinstance(env.single_action_space, spaces.Box):
        raise TypeError(f"clip_actions needs an action space with bounds, got {env.single_action_space}")
    low = high = None
    if clip_actions:
        low, high = (torch.as_tensor(bound, device=env.device) for bound in (env.single_action_space.low, env.single_action_space.high))  # pyright: ignore[reportAttributeAccessIssue]
    distribution = policy.distribution

    def act(params: Params, view: PyTree, obs: PyTree, noise: Tensor) -> dict[str, Tensor]:
        x = flatten_observation_groups(obs, policy.obs_groups)
        if normalizer is not None:
            x = normalizer.apply(view, x)
        dist = policy.apply(params, x.to(noise.dtype))
        if deterministic:
            out = {"action": distribution.mode(dist)}
        else:
            sample = distribution.sample(dist, noise)
            out = {"action": sample.action}
            if "raw" in record:
                out["raw"] = sample.raw
            if "log_prob" in record:
                out["log_prob"] = distribution.log_prob(dist, sample)
        if "entropy" in record:
            out["entropy"] = distribution.entropy(dist, noise)
        if low is not None and high is not None:
            out["action"] = torch.clamp(out["action"], low.to(noise.dtype), high.to(noise.dtype))
        return out

    compiled = compiler.jit(act, mode=mode)

    @torch.no_grad()
    def unroll(params: Params, norm_state: PyTree, env_state: PyTree, env_params: PyTree, noise: Tensor) -> tuple[PyTree, Trajectory]:
        if noise.ndim < 2 or noise.shape[0] < 1 or noise.shape[1] != env.num_envs:
            raise ValueError(f"noise must be [T, {env.num_envs}, noise_dim] with T of at least 1, got {list(noise.shape)}")
        params = tree.map(_constant, params)
        view = normalizer.prepare(norm_state, noise.dtype) if normalizer is not None else ()
        narrow = (lambda x: x) if normalizer is not None else (lambda x: x.to(noise.dtype))
        obs = tree.map(narrow, env.obs)
        acted: dict[str, list] = {"obs": []}
        steps: list[TimeStep] = []
        for t in range(noise.shape[0]):
            out = compiled(params, view, obs, noise[t])
            if "obs" in record:
                acted["obs"].append(obs)
            for name, value in out.items():
                acted.setdefault(name, []).append(value)
            steps.append(env.advance(out["action"]))
            obs = tree.map(lambda x: narrow(x.to(env.device)), steps[-1].obs)

        def stack(values: Sequence[Any]) -> Any:
            return tree.map(lambda x: x.to(env.device), tree.stack(values)) if values else ()

        terminated, truncated = stack([s.terminated for s in steps]), stack([s.truncated for s in steps])
        done = terminated | truncated
        observed = stack(acted["obs"])
        trajectory = Trajectory(
            obs=observed,
            final_obs=tree.map(narrow, stack([s.final_obs for s in steps])) if "final_obs" in record else (),
            action=stack(acted["action"] if "action" in record else []),
            raw=stack(acted.get("raw", [])),
            log_prob=stack(acted.get("log_prob", [])),
            entropy=stack(acted.get("entropy", [])),
            reward=stack([s.reward for s in steps]).to(noise.dtype),
            terminated=terminated,
            truncated=truncated,
            alive=(done.cumsum(0) - done.to(torch.int64)) == 0,
            metrics=stack(_complete([s.metrics for s in steps])) if "metrics" in record else {},
            initial_obs=tree.index(observed, 0) if "obs" in record else (),
        )
        return obs, trajectory

    return unroll


def host_rollout(
    env: HostEnv,
    policy: Any,
    params: Params,
    norm_state: PyTree = (),
    *,
    noise: Tensor | None = None,
    key: Tensor | None = None,
    num_steps: int | None = None,
    normalizer: Normalizer | None = None,
    mode: str = "eager",
    **options: Any,
) -> Trajectory:
    """One rollout from where the environment stands: :func:`make_host_unroll`, called once. Build that yourself for compiled rollouts, many of them.

    Args:
        env, policy, params, norm_state, normalizer: see :func:`make_host_unroll`.
        noise: ``[T, N, noise_dim]``; or
        key, num_steps: to draw it, in the dtype of the parameters.
        mode: of :mod:`frl.compile`.
        **options: of :func:`make_host_unroll`.

    Returns:
        :class:`~frl.types.Trajectory` ``[T, N]``; the observation that comes next is ``env.obs``.

    Raises:
        ValueError: unless either ``noise`` or ``key`` and ``num_steps`` are given.
    """
    if (noise is None) == (key is None) or (key is None) != (num_steps is None):
        raise ValueError("give either noise, or key and num_steps")
    if noise is None:
        dtype = next((x.dtype for x in tree.floating(params)), env.dtype)
        noise = policy.noise(key, num_steps, env.num_envs, dtype=dtype)
    return make_host_unroll(env, policy, normalizer, mode=mode, **options)(params, norm_state, (), (), noise)[1]


def _constant(x: Tensor) -> Tensor:
    x = x.detach()
    if compiler.plain(x) is not x or compiler.is_transformed(x):
        raise TypeError("a host environment cannot be differentiated or mapped through; move the rollout outside of torch.func.grad, vjp and vmap")
    return x


def _complete(steps: Sequence[Metrics]) -> list[Metrics]:
    """Metrics by step with the same names: those which the environment came to report later are NaN (or False) before."""
    last = steps[-1]
    return [{name: step[name] if name in step else _filler(x.dtype, x) for name, x in last.items()} for step in steps]
