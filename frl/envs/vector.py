"""Many rows of one environment: ``vmap``, time limit, automatic reset, episode statistics. The only place where these are done.

A row that is done is reset inside the same step, without a branch: the state after the step and a fresh state are computed for every row and one is selected.
Fresh states are drawn by row: reset number ``s`` of row ``i`` uses ``fold_in(key_i, s)``, so a row's episodes depend neither on other rows nor
on how many there are. For a compiled rollout the fresh states of all steps are drawn in one block before time starts (``draw_resets``); the bits are those that
``step`` would draw by itself.

Rows are the first dimension of every leaf in the public layout. Inside compiled loops they are the last one (``rows=-1``), which lets generated kernels
vectorise over rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from frl import rng, tree
from frl.envs.env import ADVICE, Env, EnvSpec
from frl.types import PyTree, TimeStep

RESERVED_METRICS = ("episode_return", "episode_length", "nonfinite")
# How torch speaks of code that vmap cannot run.
_UNMAPPABLE = ("vmap", "broadcast shape", "functorch")


class VecState(NamedTuple):
    """State of N rows."""

    env: PyTree  # [N, ...] state of the environment
    key: Tensor  # [N, 2] int64, one for each row
    steps: Any  # [N] int64, steps of the row in its life: numbers its resets
    elapsed: Tensor  # [N] int64, steps of the current episode
    episode_return: Tensor  # [N] undiscounted reward of the current episode so far


@dataclass(frozen=True, kw_only=True)
class VecEnv:
    """N rows of ``env`` as pure functions.

    Attributes:
        env: the environment of one row.
        num_envs: N.
        device: where states live.
    """

    env: Env
    num_envs: int
    device: torch.device

    def __post_init__(self) -> None:
        if isinstance(self.num_envs, bool) or not isinstance(self.num_envs, int) or self.num_envs < 1:
            raise ValueError(f"num_envs must be a positive integer, got {self.num_envs!r}")

    @property
    def spec(self) -> EnvSpec:
        """Facts about the environment of one row."""
        return self.env.spec

    @property
    def single_observation_space(self) -> Any:
        return self.env.observation_space

    @property
    def single_action_space(self) -> Any:
        return self.env.action_space

    @property
    def default_params(self) -> PyTree:
        """The environment's parameters on this device."""
        return tree.map(lambda x: x.to(self.device), self.env.default_params)

    # -- pure functions ------------------------------------------------------------------------------------------------------------------------

    def row_keys(self, key: Tensor) -> Tensor:
        """Keys of the rows, ``[N, 2]``: row i's is ``fold_in(key, i)``."""
        return rng.fold_in(key, torch.arange(self.num_envs, device=key.device))

    def reset(self, keys: Tensor, env_params: PyTree) -> VecState:
        """New episodes in all rows.

        Args:
            keys: ``[N, 2]`` int64, see :meth:`row_keys`.
            env_params: the environment's parameters; a leaf may have one more leading dimension N than the default to differ by row.
        """
        rows = keys.shape[0]
        state = self._map(self.env.reset, 0, (rng.fold_in(keys, 0),), env_params)
        zero = torch.zeros(rows, dtype=torch.int64, device=keys.device)
        dtype = next((x.dtype for x in tree.floating(state)), torch.get_default_dtype())
        return VecState(env=state, key=keys, steps=zero, elapsed=zero, episode_return=torch.zeros(rows, dtype=dtype, device=keys.device))

    def stagger(self, state: VecState) -> VecState:
        """Rows at different times of their episodes: the time that each has played is drawn uniformly from ``[0, limit)``, the rest of the state stays.

        The first episode of a row then ends early. Rows that begin together are also reset together for ever, so that a rollout shorter than an episode shows
        a critic one part of it at a time.

        Raises:
            ValueError: for an environment without a time limit.
        """
        limit = self.env.spec.max_episode_steps
        if limit is None:
            raise ValueError(f"episodes of {self.env.spec.name!r} cannot be staggered: it has no time limit")
        # Resets have the numbers 0, 1, ...
        return state._replace(elapsed=rng.randint(rng.fold_in(state.key, -1), (), 0, limit))

    def observe(self, state: VecState, env_params: PyTree, *, rows: int = 0) -> PyTree:
        """Observation of every row, ``[N, ...]``."""
        return self._map(self.env.observe, rows, (state.env,), env_params)

    def draw_resets(self, state: VecState, length: int, env_params: PyTree) -> PyTree:
        """The fresh states that the next ``length`` steps may need, ``[T, N, ...]``."""
        # steps + 1 + t: reset 0 was the first episode.
        number = state.steps + 1 + torch.arange(length, device=state.steps.device)[:, None]
        keys = rng.fold_in(state.key.expand(length, *state.key.shape), number)

        if not self.varies_by_row(env_params):
            # Rows of all steps as rows of one step, in the last dimension: one long loop, and what is drawn for a row lies beside what is drawn for the next.
            drawn = self._map(self.env.reset, -1, (keys.flatten(0, 1).movedim(0, -1),), env_params)
            return tree.map(lambda x: x.unflatten(-1, keys.shape[:2]).movedim((-2, -1), (0, 1)), drawn)

        def block(step_keys: Tensor) -> PyTree:
            return self._map(self.env.reset, 0, (step_keys,), env_params)

        return torch.func.vmap(block)(keys)

    def step(self, state: VecState, action: Tensor, env_params: PyTree, *, fresh: PyTree = (), rows: int = 0) -> tuple[VecState, TimeStep]:
        """One step of every row; rows that are done start a new episode.

        Args:
            state: current state.
            action: ``[N, A]`` (``[A, N]`` when ``rows=-1``).
            env_params: see :meth:`reset`.
            fresh: ``[N, ...]`` states for rows that finish now, from :meth:`draw_resets`; drawn here when ``()``. With them ``state.key`` and
                ``state.steps`` are not read and may be ``()``.
            rows: 0, or -1 for the layout with rows last (leaves ``[..., N]``).

        Returns:
            New state and :class:`frl.types.TimeStep`. Its metrics hold the environment's own and ``episode_return``, ``episode_length`` (both including
            this step) and ``nonfinite`` (the row's state or reward was not finite: it counts as terminated and is reset).
        """
        env = self.env
        if isinstance(fresh, tuple) and fresh == ():
            keys = rng.fold_in(state.key if rows == 0 else state.key.movedim(-1, 0), state.steps + 1)
            fresh = self._map(env.reset, 0, (keys,), self._rows_first(env_params, rows))
            fresh = fresh if rows == 0 else tree.map(lambda x: x.movedim(0, -1), fresh)
        stepped, outcome = self._map(env.step, rows, (state.env, action), env_params)
        final_obs = self._map(env.observe, rows, (stepped,), env_params)
        elapsed = state.elapsed + 1
        episode_return = state.episode_return + outcome.reward.detach()
        limit = env.spec.max_episode_steps
        nonfinite = ~_finite_rows(stepped, rows) | ~torch.isfinite(outcome.reward)
        terminated = outcome.terminated | nonfinite
        truncated = elapsed >= limit if limit is not None else torch.zeros_like(terminated)
        done = terminated | truncated
        new = _select(done, fresh, stepped, rows)
        metrics = dict(outcome.metrics)
        taken = sorted(set(metrics) & set(RESERVED_METRICS))
        if taken:
            raise ValueError(f"environment {env.spec.name!r} uses the metric name {taken[0]!r}, which the vector environment reports itself; rename it")
        metrics.update(episode_return=episode_return, episode_length=elapsed, nonfinite=nonfinite)
        state = VecState(
            env=new,
            key=state.key,
            steps=state.steps + 1 if isinstance(state.steps, Tensor) else (),
            elapsed=torch.where(done, 0, elapsed),
            episode_return=torch.where(done, 0.0, episode_return),
        )
        obs = self._map(env.observe, rows, (new,), env_params)
        return state, TimeStep(obs=obs, final_obs=final_obs, reward=outcome.reward, terminated=terminated, truncated=truncated, metrics=metrics)

    # -- layout --------------------------------------------------------------------------------------------------------------------------------

    def _map(self, fn: Callable, rows: int, mapped: tuple, env_params: PyTree) -> Any:
        """``fn(*mapped, env_params)`` for every row; shared parameters are not copied."""
        leaves, structure = tree.flatten((*mapped, env_params))
        n_params = len(tree.leaves(env_params))
        dims = [rows] * (len(leaves) - n_params) + [rows if by_row else None for by_row in self._by_row(env_params)]
        if leaves and all(d is None for d in dims):
            raise ValueError("nothing to map over")
        out: list[Any] = []

        def flat(*values: Tensor) -> tuple[Tensor, ...]:
            result, out_structure = tree.flatten(fn(*tree.unflatten(structure, values)))
            out[:] = [out_structure]
            return tuple(result)

        # Not out_dims=-1: for a result that does not depend on the row, vmap then returns a tensor of a broken shape (torch 2.13).
        try:
            values = torch.func.vmap(flat, in_dims=tuple(dims), out_dims=0)(*leaves)
        except RuntimeError as error:
            said = str(error)
            if not any(word in said for word in _UNMAPPABLE):
                raise
            raise RuntimeError(f"environment {self.env.spec.name!r} does not run under torch.func.vmap: {said.splitlines()[0]} ({ADVICE})") from error
        return tree.unflatten(out[0], values if rows == 0 else [x.movedim(0, -1) for x in values])

    def _by_row(self, env_params: PyTree) -> list[bool]:
        defaults = tree.leaves(self.env.default_params)
        given = tree.leaves(env_params)
        if len(defaults) != len(given):
            tree.check_same(env_params, self.env.default_params, f"env_params of {self.env.spec.name}")
        return [x.ndim > d.ndim for x, d in zip(given, defaults, strict=True)]

    def varies_by_row(self, env_params: PyTree) -> bool:
        """Whether a parameter differs by row."""
        return any(self._by_row(env_params))

    def _rows_first(self, env_params: PyTree, rows: int) -> PyTree:
        if rows == 0:
            return env_params
        leaves, structure = tree.flatten(env_params)
        return tree.unflatten(structure, [x.movedim(-1, 0) if by_row else x for x, by_row in zip(leaves, self._by_row(env_params), strict=True)])

    def rows_last(self, env_params: PyTree) -> PyTree:
        """Parameters in the rows-last layout: leaves that differ by row are ``[..., N]``, the others unchanged."""
        leaves, structure = tree.flatten(env_params)
        return tree.unflatten(structure, [x.movedim(0, -1) if by_row else x for x, by_row in zip(leaves, self._by_row(env_params), strict=True)])


def _finite_rows(state: PyTree, rows: int) -> Tensor:
    """``[N]`` bool: every floating element of the row's state is finite."""
    ok = None
    for leaf in tree.floating(state):
        fine = torch.isfinite(leaf.detach())
        if fine.ndim > 1:
            fine = fine.flatten(1).all(1) if rows == 0 else fine.flatten(0, -2).all(0)
        ok = fine if ok is None else ok & fine
    if ok is None:
        leaf = tree.leaves(state)[0]
        return torch.ones(leaf.shape[rows], dtype=torch.bool, device=leaf.device)
    return ok


def _select(mask: Tensor, yes: PyTree, no: PyTree, rows: int) -> PyTree:
    if rows == 0:
        return tree.where(mask, yes, no)
    return tree.map(lambda a, b: torch.where(mask, a, b), yes, no)


def make_vec_env(env: Env, num_envs: int, device: torch.device | str = "cpu") -> VecEnv:
    """Lift an environment of one row to ``num_envs`` rows.

    Raises:
        ValueError: for a bad ``num_envs``. An environment that uses a reserved metric name is refused at its first step.
    """
    return VecEnv(env=env, num_envs=num_envs, device=torch.device(device))
