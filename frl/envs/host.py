"""Host environments: the one impure door, for environments that keep their state to themselves.

A :class:`HostEnv` wraps a ``gymnasium.vector`` environment, or an object with the stateful :class:`~frl.types.LearningVecEnv` protocol, and speaks the words
of the library: ``step`` returns a :class:`~frl.types.TimeStep` of tensors. All three of gymnasium's autoreset modes give the same transitions; where the
environment spends a step on a reset (``next_step``), ``metrics["valid"]`` is false and the step counts for nothing. What changes here is the wrapped
environment: the state of a rollout lives in it, and cannot be put back. :mod:`frl.envs.gymnasium_env` makes one from an id, and
:mod:`frl.envs.host_rollout` plays a policy on it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv
from torch import Tensor

from frl import rng, tree
from frl.envs.env import EnvSpec
from frl.envs.host_values import Reader, Writer, filler, policy_action_space
from frl.envs.vector import RESERVED_METRICS
from frl.observations import encoded_space
from frl.types import LearningVecEnv, Metrics, PyTree, TimeStep

AUTORESET_MODES = {"same_step": "SameStep", "next_step": "NextStep", "disabled": "Disabled"}
"""Names here, and those of gymnasium."""
MISSING_FINAL_OBS = ("refuse", "pre_step")
_RESERVED = (*RESERVED_METRICS, "valid")


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
        seeds_rows: whether each row takes a seed of its own.

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
        self.seeds_rows = isinstance(base, (SyncVectorEnv, AsyncVectorEnv))
        self._reader = Reader(space=env.single_observation_space, num_envs=self.num_envs, device=self._home, dtype=dtype, numpy=self._numpy)
        self._writer = Writer(space=env.single_action_space, num_envs=self.num_envs, device=self._home, numpy=self._numpy, clip=clip_actions)
        self.single_observation_space = encoded_space(env.single_observation_space, dtype)
        self.single_action_space = policy_action_space(env.single_action_space)
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
        self.missing_final_obs, self._seed = missing_final_obs, check_seed(seed)
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
        given: Any = self._seeds(seed) if isinstance(seed, Tensor) else check_seed(seed)
        obs, _ = self._ask(self.env.reset, seed=given)
        self._obs = self._reader.observation(obs)
        if isinstance(seed, Tensor) and seed.ndim == 2:
            self._check_equal_starts(seed)
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
        obs, reward, terminated, truncated, info = self._ask(self.env.step, self._writer.action(action))
        after = self._reader.observation(obs)
        reward = torch.where(valid, self._reader.rows(reward, torch.float64), 0.0)
        ended, truncated = (self._reader.rows(flag, torch.bool) & valid for flag in (terminated, truncated))
        done = ended | truncated
        final = self._final_obs(info, before, after, done, truncated & ~ended) if self.autoreset == "same_step" else after
        nonfinite = valid & ~(torch.isfinite(reward) & _finite(final))
        lost = nonfinite & ~done  # rows that nobody has reset, or will
        self._obs = after
        self._pending = done if self.autoreset == "next_step" else torch.zeros_like(done)
        if self.autoreset == "disabled":
            self._reset_rows(done | nonfinite)
        elif self.seeds_rows:
            self._reset_rows(lost)
        elapsed, total = self._elapsed + valid, self._return + reward
        metrics = self._metrics(info, done)
        metrics.update(episode_return=total.to(self.dtype), episode_length=elapsed, nonfinite=nonfinite, valid=valid)
        done = done | nonfinite
        self._elapsed, self._return = torch.where(done, 0, elapsed), torch.where(done, 0.0, total)
        return TimeStep(obs=self._obs, final_obs=final, reward=reward.to(self.dtype), terminated=ended | nonfinite, truncated=truncated, metrics=metrics)

    def close(self) -> None:
        """Close the wrapped environment; a second call does nothing. Processes are ended, even when some of them are dead already."""
        if self._closed:
            return
        self._closed = True
        try:
            self.env.close()
        except (EOFError, OSError):
            for process in self._processes():
                if process.is_alive():
                    process.terminate()
                process.join()
            self.env.closed = True

    def __enter__(self) -> HostEnv:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"HostEnv({self.spec.name!r}, num_envs={self.num_envs}, autoreset={self.autoreset!r})"

    def _processes(self) -> Sequence[Any]:
        base = getattr(self.env, "unwrapped", self.env)
        return base.processes if isinstance(base, AsyncVectorEnv) else ()

    def _ask(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """``call(*args)``; when a process of the environment is dead, that is said."""
        try:
            return call(*args, **options)
        except (EOFError, ConnectionError) as error:
            for process in self._processes():
                process.join(timeout=1.0)
            dead = [f"row {i} (exit code {process.exitcode})" for i, process in enumerate(self._processes()) if process.exitcode is not None]
            raise RuntimeError(f"{self.spec.name}: a process of the environment ended: {', '.join(dead) or type(error).__name__}") from error

    # -- to the environment --------------------------------------------------------------------------------------------------------------------

    def _seeds(self, key: Tensor) -> Any:
        keys = self.row_keys(key) if key.ndim == 1 else key
        if tuple(keys.shape) != (self.num_envs, 2):
            raise ValueError(f"a seed that is a tensor must be a key [2] or keys {[self.num_envs, 2]}, got shape {list(key.shape)}")
        seeds = (rng.bits(keys) >> 1).tolist()
        return seeds if self.seeds_rows else seeds[0]

    def _check_equal_starts(self, keys: Tensor) -> None:
        """Rows with equal keys have begun equally: what groups of rows are compared by."""
        _, group = torch.unique(keys, dim=0, return_inverse=True)
        first = torch.full_like(group, self.num_envs).scatter_reduce(0, group, torch.arange(self.num_envs, device=group.device), "amin")[group]
        other = ~_same(self._obs, tree.index(self._obs, first.to(self._home)))
        if bool(other.any()):
            why = "its reset does not honour the seed" if self.seeds_rows else "it cannot be seeded row by row"
            raise RuntimeError(f"{self.spec.name}: rows with equal keys did not begin equally ({_name_rows(other)}): {why}")

    def _reset_rows(self, mask: Tensor) -> None:
        """New episodes in the rows of ``mask``, whose observations replace those to act on next."""
        if not bool(mask.any()):
            return
        obs, _ = self._ask(self.env.reset, options={"reset_mask": mask.cpu().numpy()})
        fresh = self._reader.observation(obs)
        if not self.seeds_rows:
            moved = ~_same(fresh, self._obs) & ~mask
            if bool(moved.any()):
                raise RuntimeError(
                    f"{self.spec.name} reset rows that it was not asked to ({_name_rows(moved)}): it does not honour options['reset_mask'], which "
                    "autoreset='disabled' needs; build it with another autoreset mode"
                )
        self._obs = tree.where(mask, fresh, self._obs)

    # -- from the environment ------------------------------------------------------------------------------------------------------------------

    def _final_obs(self, info: Mapping[str, Any], before: PyTree, after: PyTree, done: Tensor, cut: Tensor) -> PyTree:
        """Observations before any reset, of an environment that resets inside the step; ``cut`` are the rows whose value depends on them."""
        if self._numpy and not bool(done.any()):
            return after
        values, known = self._reader.final_observations(info, after, done)
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
        found = self._reader.metrics(info)
        if self.autoreset == "same_step" and isinstance(info.get("final_info"), Mapping):
            ended = self._reader.metrics(info["final_info"])
            for name in {**found, **ended}:
                absent = filler((found if name in found else ended)[name].dtype, done)
                found[name] = torch.where(done, ended.get(name, absent), found.get(name, absent))
        for name, value in found.items():
            if name in _RESERVED:
                raise ValueError(f"environment {self.spec.name!r} uses the metric name {name!r}, which is reported for every environment; rename it")
            self._names.setdefault(name, value.dtype)
        return {name: found[name].to(dtype) if name in found else filler(dtype, done) for name, dtype in sorted(self._names.items())}

    def _out(self, values: PyTree) -> PyTree:
        return values if self._home == self.device else tree.map(lambda x: x.to(self.device), values)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"{self.spec.name} is closed")


def is_host_like(env: Any) -> bool:
    """Whether ``env`` can be wrapped: a ``gymnasium.vector`` environment, or an object with the stateful protocol (and not a :class:`HostEnv` already)."""
    return isinstance(env, (VectorEnv, LearningVecEnv)) and not isinstance(env, HostEnv)


def check_seed(seed: Any) -> int | None:
    """A seed as an int, or ``None``; ``TypeError`` for another kind of value, ``ValueError`` below 0."""
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed must be an integer, a key or None, got {seed!r}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    return int(seed)


def _finite(obs: PyTree) -> Tensor:
    return torch.stack([torch.isfinite(x).all(1) for x in tree.leaves(obs)]).all(0)


def _same(a: PyTree, b: PyTree) -> Tensor:
    return torch.stack([((x == y) | (x.isnan() & y.isnan())).all(1) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True)]).all(0)


def _name_rows(mask: Tensor) -> str:
    rows = torch.nonzero(mask).reshape(-1).tolist()
    return f"row{'s' if len(rows) > 1 else ''} {', '.join(str(i) for i in rows[:5])}{', ...' if len(rows) > 5 else ''}"
