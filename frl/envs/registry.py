"""Names of environments: register, list, build.

Built-in environments are imported when they are asked for, and ``gymnasium:ID`` stands for any registered gymnasium environment. Other packages add theirs
with ``register_learning_env``, through the entry-point group ``frl.envs``, or by being listed under ``trainer.imports`` in a run file.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from frl.envs.env import Env
from frl.envs.vector import VecEnv, make_vec_env
from frl.registry import Registry

_REGISTRY = Registry("environment", group="frl.envs")
_ALIASES = {"pointmassrl": "point_mass"}
_GYMNASIUM = "gymnasium:"


def register_learning_env(name: str, factory: Callable[..., Any] | None = None, *, override: bool = False) -> Any:
    """Register an environment factory under a case-insensitive name, directly or as a decorator.

    The factory takes the keys of ``learning_env.cfg`` and returns an :class:`~frl.envs.env.Env` of one row. A factory that names ``num_envs`` (and ``device``)
    in its signature gets them too and may return a vector environment itself.

    Raises:
        ValueError: the name is taken and ``override`` is false.
    """
    return _REGISTRY.register(name, factory, override=override)


def get_registered_learning_env_names() -> list[str]:
    """Sorted names of the registered environments."""
    return _REGISTRY.names()


def get_learning_env_factory(name: str) -> Callable[..., Any]:
    """The factory under ``name`` (of :func:`~frl.envs.host.gymnasium_env` for ``gymnasium:ID``); ``ValueError`` that lists the names otherwise."""
    if isinstance(name, str) and name.lower().startswith(_GYMNASIUM):
        from frl.envs.host import gymnasium_env

        return functools.partial(gymnasium_env, name[len(_GYMNASIUM) :])
    if isinstance(name, str) and name.lower() in _ALIASES and name.lower() not in _REGISTRY.names():
        name = _ALIASES[name.lower()]
    return _REGISTRY.get(name)


def build_learning_env(name: str, *, num_envs: int = 1, device: torch.device | str = "cpu", **cfg: Any) -> Any:
    """Build ``num_envs`` rows of a registered environment.

    Args:
        name: registered name, case-insensitive, or ``gymnasium:ID``.
        num_envs: N.
        device: where states live.
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
    own = {key: value for key, value in (("num_envs", num_envs), ("device", torch.device(device))) if key in names}
    built = factory(**cfg, **own)
    if isinstance(built, Env):
        return make_vec_env(built, num_envs, device)
    if isinstance(built, VecEnv):
        return built
    from frl.envs.host import HostEnv, is_host_like

    return HostEnv(built, device=device, name=name) if is_host_like(built) else built


def _builtin(name: str, module: str | None = None) -> None:
    register_learning_env(name, getattr(importlib.import_module(f"frl.envs.{module or name}"), name))


for _name in ("point_mass", "double_integrator", "pendulum", "cartpole", "cartpole_swingup", "quadrotor", "planar_reach", "acrobot", "planar_hopper"):
    _builtin(_name)
for _name in ("constant_reward", "action_reward", "observation_reward", "matching_reward", "delayed_reward", "two_lengths", "final_observation"):
    _builtin(f"probe_{_name}", "probes")
