"""Names of environments: register, list, build.

Built-in environments are imported when they are asked for, ``gymnasium:ID`` stands for any registered gymnasium environment on the host, and ``mujoco:ID``
for gymnasium's MuJoCo tasks as functions (with the extra ``mujoco``). Other packages add theirs with ``register_learning_env``, through the entry-point group
``frl.envs``, or by being listed under ``trainer.imports`` in a run file.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from frl import tree
from frl.envs.env import Env
from frl.envs.vector import VecEnv, make_vec_env
from frl.registry import Registry

_REGISTRY = Registry("environment", group="frl.envs")
_ALIASES = {"pointmassrl": "point_mass"}
GYMNASIUM = "gymnasium:"
_MUJOCO = "mujoco:"


def register_learning_env(name: str, factory: Callable[..., Any] | None = None, *, override: bool = False) -> Any:
    """Register an environment factory under a case-insensitive name, directly or as a decorator.

    The factory takes the keys of ``learning_env.cfg`` and returns an :class:`~frl.envs.env.Env` of one row. A factory that names ``num_envs`` (and ``device``,
    ``dtype``) in its signature gets them too and may return a vector environment itself.

    Raises:
        ValueError: the name is taken and ``override`` is false.
    """
    return _REGISTRY.register(name, factory, override=override)


def get_registered_learning_env_names() -> list[str]:
    """Sorted names of the registered environments."""
    return _REGISTRY.names()


def get_learning_env_factory(name: str) -> Callable[..., Any]:
    """The factory under ``name``: of :func:`~frl.envs.gymnasium_env.gymnasium_env` for ``gymnasium:ID``, of :mod:`frl.envs.mujoco.tasks` for ``mujoco:ID``.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
        ModuleNotFoundError: for ``mujoco:ID`` without the extra.
    """
    if isinstance(name, str) and name.lower().startswith(GYMNASIUM):
        from frl.envs.gymnasium_env import gymnasium_env, gymnasium_spec

        gymnasium_spec(name[len(GYMNASIUM) :])
        return functools.partial(gymnasium_env, name[len(GYMNASIUM) :])
    if isinstance(name, str) and name.lower().startswith(_MUJOCO):
        from frl.envs.mujoco.tasks import get_task

        return get_task(name[len(_MUJOCO) :])
    if isinstance(name, str) and name.lower() in _ALIASES and name.lower() not in _REGISTRY.names():
        name = _ALIASES[name.lower()]
    return _REGISTRY.get(name)


def build_learning_env(name: str, *, num_envs: int = 1, device: torch.device | str = "cpu", dtype: torch.dtype | None = None, **cfg: Any) -> Any:
    """Build ``num_envs`` rows of a registered environment.

    Args:
        name: registered name, case-insensitive, or ``gymnasium:ID`` or ``mujoco:ID``.
        num_envs: N.
        device: where states live.
        dtype: of a functional environment's floating parameters, which what it computes follows, and of what a host environment returns; as the environment
            has it when ``None``.
        **cfg: passed to the factory.

    Returns:
        A :class:`~frl.envs.vector.VecEnv`; a :class:`~frl.envs.host.HostEnv` around a gymnasium vector environment or an object with the stateful protocol
        :class:`~frl.types.LearningVecEnv`; or what else the factory made itself.

    Raises:
        ValueError: for an unknown name, ``num_envs`` below 1, or a value that the factory refuses.
        TypeError: for a key that the factory does not take (the message lists those it takes).
    """
    factory = get_learning_env_factory(name)
    names = inspect.signature(factory).parameters
    open_ended = any(p.kind == inspect.Parameter.VAR_KEYWORD for p in names.values())
    unknown = sorted(set(cfg) - set(names))
    if unknown and not open_ended:
        near = difflib.get_close_matches(unknown[0], list(names), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"environment {name!r} takes no {unknown[0]!r}{hint} (known: {', '.join(names) or 'none'})")
    given = {"num_envs": num_envs, "device": torch.device(device), **({} if dtype is None else {"dtype": dtype})}
    built = factory(**cfg, **{key: value for key, value in given.items() if key in names})
    if isinstance(built, Env):
        built = make_vec_env(built, num_envs, device)
    if isinstance(built, VecEnv):
        return built if dtype is None else _cast(built, dtype)
    from frl.envs.host import HostEnv, is_host_like

    return HostEnv(built, device=device, name=name, dtype=dtype or torch.float32) if is_host_like(built) else built


def _cast(vec: VecEnv, dtype: torch.dtype) -> VecEnv:
    params = tree.map(lambda x: x.to(dtype) if x.is_floating_point() else x, vec.env.default_params)
    return dataclasses.replace(vec, env=dataclasses.replace(vec.env, default_params=params))


def _builtin(name: str, module: str | None = None) -> None:
    register_learning_env(name, getattr(importlib.import_module(f"frl.envs.{module or name}"), name))


for _name in ("point_mass", "double_integrator", "pendulum", "cartpole", "cartpole_swingup", "quadrotor", "planar_reach", "acrobot", "planar_hopper"):
    _builtin(_name)
for _name in ("constant_reward", "action_reward", "observation_reward", "matching_reward", "delayed_reward", "two_lengths", "final_observation"):
    _builtin(f"probe_{_name}", "probes")
