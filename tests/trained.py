"""Small finished runs for the tests of what reads them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from frl.config import parse_run_config
from frl.envs.double_integrator import double_integrator
from frl.envs.env import Env, EnvSpec
from frl.envs.registry import register_learning_env
from frl.run import train_from_config
from frl.types import Outcome


def settings(output_dir: Path, *, env: Any = None, algorithm: str = "apg", policy: dict[str, Any] | None = None, **trainer: Any) -> dict[str, Any]:
    """A run file of a few small updates; keywords are keys of ``trainer``."""
    network = {"type": "mlp", "network_cfg": {"hidden_sizes": [5], "activation": "tanh"}}
    policies = {"name": "actor_only", "actor": network} if algorithm == "apg" else {"name": "actor_critic", "actor": network, "critic": network}
    return {
        "trainer": {
            "exp_name": "small",
            "learning_env": env or {"name": "double_integrator", "cfg": {"max_episode_steps": 6}},
            "num_envs": 4,
            "iterations": 3,
            "enable_eval": True,
            "eval_freq": 1,
            "num_eval_envs": 3,
            "num_eval_episodes": 4,
            "final_eval_episodes": 7,
            "save_frequency_updates": 1,
            "output_dir": str(output_dir),
            "compile_mode": "eager",
            **({"segment_length": 4} if algorithm == "apg" else {"buffer_size": 8}),
            **trainer,
        },
        "policy": {**policies, **(policy or {})},
        "algorithm": {"name": algorithm, "cfg": {"group_size": 2} if algorithm == "grpo" else {}},
    }


def trained(output_dir: Path, **options: Any) -> dict[str, Any]:
    """The summary of a finished run; options of :func:`settings`."""
    return train_from_config(parse_run_config(settings(output_dir, **options)))


# ---- environments that show what a policy receives and gives ----


class NamedState(NamedTuple):
    position: Tensor  # [2]
    secret: Tensor  # []


@register_learning_env("named_entries", override=True)
def named_entries(*, extra: int = 0, secretive: bool = False) -> Env:
    """Observations are a mapping: ``place.position`` ``[2 + extra]``, ``place.goal`` ``[1]``, and, unless ``secretive``, ``secret`` ``[1]`` for the critic."""
    inf = np.inf

    def reset(key: Tensor, params: Any) -> NamedState:
        start = double_integrator(dimensions=2).reset(key, double_integrator().default_params)
        return NamedState(position=start.position, secret=start.velocity[0])

    def observe(state: NamedState, params: Any) -> dict[str, Any]:
        position = torch.cat([state.position, state.position.new_zeros(extra)])
        place = {"position": position, "goal": params["goal"].reshape(1)}
        return {"place": place} if secretive else {"place": place, "secret": state.secret.reshape(1)}

    def step(state: NamedState, action: Tensor, params: Any) -> tuple[NamedState, Outcome]:
        position = state.position + 0.1 * action
        return state._replace(position=position), Outcome(reward=-position.square().sum(), terminated=position.abs().sum() > 1e3, metrics={})

    place = spaces.Dict({"position": spaces.Box(-inf, inf, (2 + extra,)), "goal": spaces.Box(-inf, inf, (1,))})
    return Env(
        spec=EnvSpec(name="named_entries", max_episode_steps=5, dt=0.1, differentiable=True),
        observation_space=spaces.Dict({"place": place, **({} if secretive else {"secret": spaces.Box(-inf, inf, (1,))})}),
        action_space=spaces.Box(-1.0, 1.0, (2,)),
        default_params={"goal": torch.tensor(0.5)},
        reset=reset,
        observe=observe,
        step=step,
    )


@register_learning_env("told_actions", override=True)
def told_actions(*, width: int = 2) -> Env:
    """Actions of ``Box([0, -2], [10, 2])``, which the metrics repeat as the environment received them."""
    inner = double_integrator(dimensions=1, max_episode_steps=3)

    def step(state: Any, action: Tensor, params: Any) -> tuple[Any, Outcome]:
        state, outcome = inner.step(state, 0.0 * action[:1], params)
        received = {f"action_{i}": action[i].detach() for i in range(width)}
        return state, outcome._replace(reward=outcome.reward - 0.01 * action.square().sum(), metrics=received)

    low, high = np.array([0.0, -2.0, 0.0], np.float32)[:width], np.array([10.0, 2.0, 1.0], np.float32)[:width]
    return dataclasses.replace(inner, spec=dataclasses.replace(inner.spec, name="told_actions"), action_space=spaces.Box(low, high), step=step)
