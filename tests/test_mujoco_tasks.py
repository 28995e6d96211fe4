"""Gymnasium's MuJoCo tasks as functional environments: its numbers step by step, and the promises of every environment."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import frl
from frl import rng
from frl.envs.mujoco.tasks import PREFIX, TASKS
from tests import test_contracts as contracts

mujoco = pytest.importorskip("mujoco")

F32, F64 = torch.float32, torch.float64
NAMES = [PREFIX + task for task in TASKS]
every_task = pytest.mark.parametrize("task", TASKS)


def at(env: frl.Env, simulation: Any) -> Any:
    """Our state where gymnasium's simulation is."""
    data = simulation.data
    return env.reset(rng.key(0), env.default_params)._replace(qpos=torch.tensor(data.qpos.copy()), qvel=torch.tensor(data.qvel.copy()))


def gymnasiums(task: str) -> Any:
    """Gymnasium's environment, without the log file that MuJoCo writes about old spellings in its models."""
    mujoco.set_mju_user_warning(lambda message: None)
    try:
        return gymnasium.make(task)
    finally:
        mujoco.set_mju_user_warning(None)


# ---- gymnasium's numbers ----


@every_task
def test_steps_are_those_of_gymnasium(task: str):
    theirs = gymnasiums(task).unwrapped
    env = TASKS[task](dtype=F64)
    random = np.random.default_rng(0)
    ends = 0
    for episode in range(4):
        theirs.reset(seed=episode)
        for _ in range(40):
            state = at(env, theirs)
            action = random.uniform(-1.3, 1.3, theirs.model.nu) * theirs.action_space.high
            new, outcome = env.step(state, torch.from_numpy(action), env.default_params)
            obs, reward, terminated, _, info = theirs.step(action)
            torch.testing.assert_close(env.observe(new, env.default_params), torch.from_numpy(obs), rtol=1e-9, atol=1e-9)
            assert float(outcome.reward) == pytest.approx(reward, rel=1e-9, abs=1e-9)
            assert bool(outcome.terminated) == terminated
            assert set(outcome.metrics) == set(info)
            assert {name: float(x) for name, x in outcome.metrics.items()} == pytest.approx(info, rel=1e-9, abs=1e-9)
            assert float(new.fault) == 0.0
            ends += terminated
            if terminated:
                break
    assert (ends > 0) == (task in ("InvertedPendulum-v5", "InvertedDoublePendulum-v5", "Hopper-v5"))


@every_task
def test_facts_are_those_of_gymnasium(task: str):
    theirs, env = gymnasiums(task), TASKS[task]()
    assert env.spec.max_episode_steps == theirs.spec.max_episode_steps
    assert env.spec.dt == pytest.approx(theirs.unwrapped.dt)
    assert env.observation_space.shape == theirs.observation_space.shape
    assert env.action_space == theirs.action_space


@every_task
def test_first_states_are_distributed_as_those_of_gymnasium(task: str):
    theirs, env = gymnasiums(task).unwrapped, TASKS[task](dtype=F64)
    count = 2000
    states = torch.func.vmap(env.reset, in_dims=(0, None))(rng.split(rng.key(1), count), env.default_params)
    ours, drawn = torch.cat((states.qpos, states.qvel), dim=1).numpy(), []
    for seed in range(count):
        theirs.reset(seed=seed)
        drawn.append(np.concatenate((theirs.data.qpos, theirs.data.qvel)))
    for mine, his in zip(ours.T, np.array(drawn).T, strict=True):
        places = np.concatenate((mine, his))
        gap = np.searchsorted(np.sort(mine), places, side="right") - np.searchsorted(np.sort(his), places, side="right")
        # Two samples of one distribution are further apart once in a hundred thousand times (Kolmogorov and Smirnov).
        assert np.abs(gap).max() / count <= math.sqrt(-0.5 * math.log(1e-5 / 2) * 2 / count)


@every_task
def test_first_observations_are_those_of_gymnasium_at_that_state(task: str):
    theirs, env = gymnasiums(task).unwrapped, TASKS[task](dtype=F64)
    for seed in range(3):
        state = env.reset(rng.key(seed), env.default_params)
        theirs.reset(seed=0)
        theirs.set_state(state.qpos.numpy(), state.qvel.numpy())
        torch.testing.assert_close(env.observe(state, env.default_params), torch.from_numpy(theirs._get_obs()), rtol=1e-9, atol=1e-9)


# ---- the promises of every environment ----

PROMISES: list[tuple[Callable[..., None], dict[str, Any]]] = [
    (contracts.test_env_tells_its_facts, {}),
    (contracts.test_env_stays_in_its_spaces, {"dtype": F32}),
    (contracts.test_env_stays_in_its_spaces, {"dtype": F64}),
    (contracts.test_env_is_pure_and_deterministic, {}),
    (contracts.test_env_outcomes_have_one_shape, {}),
    (contracts.test_env_follows_the_dtype_of_its_parameters, {}),
    (contracts.test_env_in_float32_is_a_rounding_of_float64, {}),
    (contracts.test_env_rows_know_nothing_of_each_other, {}),
    (contracts.test_env_parameters_may_differ_by_row, {}),
    (contracts.test_env_layout_with_rows_last_is_the_same, {}),
    (contracts.test_env_gradients_are_finite, {}),
]
TRACED = [contracts.test_env_compiled_equals_eager, contracts.test_env_is_traced_without_a_break]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("promise", "more"), PROMISES, ids=lambda value: getattr(value, "__name__", ""))
def test_task_keeps_the_promises_of_an_environment(promise: Callable[..., None], more: dict[str, Any], name: str):
    promise(name=name, options={}, **more)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == f"{PREFIX}Reacher-v5" else pytest.mark.slow) for name in NAMES])
@pytest.mark.parametrize("promise", TRACED, ids=lambda value: value.__name__)
def test_task_is_compiled(promise: Callable[..., None], name: str):
    promise(name=name, options={})
