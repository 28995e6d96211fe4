"""The smallest runs, and what is compared of them."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from frl.checkpoint import read_checkpoint
from frl.config import RunConfig, parse_run_config
from frl.envs.double_integrator import double_integrator
from frl.envs.env import Env
from frl.envs.registry import register_learning_env
from frl.types import Outcome

HORIZON, ROWS = 4, 2


class AgedState(NamedTuple):
    inner: Any
    age: Tensor  # [] steps of the episode
    start: Tensor  # [] first position


@register_learning_env("aged_double_integrator", override=True)
def aged(*, bad_age: int = -1, bad_reward: str = "nan", max_episode_steps: int = 1000, nap: float = 0.0) -> Env:
    """The double integrator with a reward that is not finite at one age of an episode, in the rows that started on the right; ``nap`` [s] slows a step."""
    env = double_integrator(max_episode_steps=max_episode_steps)

    def reset(key: Tensor, env_params: Any) -> AgedState:
        inner = env.reset(key, env_params)
        return AgedState(inner, torch.zeros_like(env_params.mass), inner.position[0])

    def step(env_state: AgedState, action: Tensor, env_params: Any) -> tuple[AgedState, Outcome]:
        time.sleep(nap)
        inner, outcome = env.step(env_state.inner, action, env_params)
        age = env_state.age + 1
        bad = (age == bad_age) & (env_state.start > 0)
        return AgedState(inner, age, env_state.start), outcome._replace(reward=torch.where(bad, float(bad_reward), outcome.reward))

    return dataclasses.replace(env, reset=reset, observe=lambda env_state, env_params: env.observe(env_state.inner, env_params), step=step)


def mapping(tmp_path: Path, *, algorithm: dict[str, Any] | None = None, env: Any = None, **trainer: Any) -> dict[str, Any]:
    """A run file of the smallest run; keywords are keys of ``trainer``."""
    defaults = {
        "exp_name": "tiny",
        "learning_env": env or {"name": "double_integrator", "cfg": {"max_episode_steps": 3}},
        "num_envs": ROWS,
        "iterations": 2,
        "segment_length": HORIZON,
        "num_eval_envs": 2,
        "num_eval_episodes": 2,
        "final_eval_episodes": 2,
        "output_dir": str(tmp_path / "outputs"),
        "compile_mode": "eager",
    }
    return {
        "trainer": {**defaults, **trainer},
        "policy": {"name": "actor_only", "actor": {"type": "mlp", "network_cfg": {"hidden_sizes": [3]}}},
        "algorithm": {"name": "apg", "cfg": {"optimizer": {"learning_rate": 0.05}, **(algorithm or {})}},
    }


def tiny(tmp_path: Path, **options: Any) -> RunConfig:
    return parse_run_config(mapping(tmp_path, **options))


def directories(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "outputs").glob("*"))


def strict_json(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_nan(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def final_state(summary: dict[str, Any]) -> dict[str, Tensor]:
    return saved_state(summary["latest_checkpoint_path"])


def saved_state(path: str | Path) -> dict[str, Tensor]:
    """Every tensor of the training state in a checkpoint; the histories beside it have wall-clock times in them."""
    return {name: x for name, x in read_checkpoint(path)[0].items() if not name.startswith("loop.")}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return set(a) == set(b) and all(a[name].dtype == b[name].dtype and a[name].numpy().tobytes() == b[name].numpy().tobytes() for name in a)


def untimed(history: list[dict[str, float]]) -> list[dict[str, float | None]]:
    return without_nan([{name: value for name, value in record.items() if name != "charts/SPS"} for record in history])
