"""Gymnasium environments by id: rows in this process, in processes of their own, or the environment's own vector version."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from frl.envs.host import AUTORESET_MODES, HostEnv, check_seed

VECTORIZATIONS = ("sync", "async", "vector_entry_point")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


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
    seed = check_seed(seed)
    spec = gymnasium_spec(env_id)
    options = dict(vector_kwargs or {})
    try:
        if vectorization == "vector_entry_point":
            env = gymnasium.make_vec(env_id, num_envs=num_envs, vectorization_mode=vectorization, vector_kwargs=options, **kwargs)
        else:
            options["autoreset_mode"] = AUTORESET_MODES[autoreset or "same_step"]
            make = functools.partial(_make_row, env_id, kwargs, os.getpid())
            with _one_thread_for_children():
                env = (SyncVectorEnv if vectorization == "sync" else AsyncVectorEnv)([make] * num_envs, **options)
    except gymnasium.error.Error as error:
        raise ValueError(f"gymnasium cannot make {env_id!r}: {error}") from error
    try:
        host = HostEnv(env, device=device, dtype=dtype, name=f"gymnasium:{env_id}", seed=seed, autoreset=autoreset, missing_final_obs=missing_final_obs)
    except (TypeError, ValueError):
        env.close()
        raise
    limit = kwargs.get("max_episode_steps") or spec.max_episode_steps
    host.spec = dataclasses.replace(host.spec, max_episode_steps=limit if limit and limit > 0 else None)
    return host


def gymnasium_spec(env_id: str) -> EnvSpec:
    """What gymnasium has registered under an id, whose module (``"module:ID"``) is imported; ``ValueError`` for an unknown one."""
    module, _, plain_id = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        return gymnasium.spec(plain_id)
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise ValueError(f"unknown gymnasium environment {env_id!r}: {error}") from error


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
