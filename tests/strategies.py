"""Hypothesis strategies, comparisons of trees, and a toy environment with known derivatives, shared by the tests of the time loop."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from frl import rng, tree
from frl.envs.env import Env, EnvSpec
from frl.types import Outcome
from tests.tolerances import tolerance

SEEDS = st.integers(0, 2**32 - 1)
HORIZONS = st.integers(1, 20)
QUICK = settings(max_examples=max(5, settings().max_examples // 5))  # for laws whose every example plays a rollout


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> Tensor:
    """Standard normal test data that does not depend on the order of the tests."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).to(device)


def assert_trees_equal(got: Any, expected: Any) -> None:
    """Same structure, and every leaf bit for bit (NaN equals NaN)."""
    tree.check_same(got, expected, "tree")
    for (name, a), (_, b) in zip(tree.items(got), tree.items(expected), strict=True):
        assert torch.equal(a, b) or torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True), f"{name}: {a} is not {b}"


def assert_trees_close(got: Any, expected: Any, *, ops: int = 1) -> None:
    """Same structure, and every leaf to the rounding of about ``ops`` operations, relative to the leaf's largest element."""
    tree.check_same(got, expected, "tree")
    for (name, a), (_, b) in zip(tree.items(got), tree.items(expected), strict=True):
        if not b.is_floating_point():
            assert torch.equal(a, b), f"{name}: {a} is not {b}"
            continue
        limit = tolerance(b.dtype, ops)
        scale = float(b.abs().nan_to_num(nan=0.0).max()) if b.numel() else 0.0
        torch.testing.assert_close(a, b, rtol=limit, atol=limit * max(scale, 1e-30), equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")


def copy_of(values: Any) -> Any:
    """A tree of the same bits in memory of its own."""
    return tree.map(lambda x: x.clone(), values)


class ToyState(NamedTuple):
    """State of one row."""

    x: Tensor  # [2]
    clock: Tensor  # [] int64, steps of this episode
    life: Tensor  # [] int64, the episode terminates at this clock


class ToyParams(NamedTuple):
    """Parameters, each ``[]``; those from ``fault_step`` on make a row sick at one clock, when they are given by row."""

    gain: Tensor  # x' = gain x + push a
    push: Tensor
    fault_step: Tensor  # int64
    reward_fault: Tensor  # added to the reward of that step
    state_fault: Tensor  # added to the state after it


def toy_env(
    *, life: tuple[int, int] = (10_000, 10_001), max_episode_steps: int | None = None, gain: float = 0.9, push: float = 0.5, dtype: torch.dtype = torch.float64
) -> Env:
    """A linear system: ``x' = gain x + push a``, ``r = -|x'|^2 - 0.1 |a|^2``; an episode lives for a random number of steps in ``[low, high)``."""

    def reset(key: Tensor, env_params: ToyParams) -> ToyState:
        x = 2.0 * rng.uniform(key, (2,), dtype=env_params.gain.dtype) - 1.0
        length = rng.randint(rng.fold_in(key, 1), (), *life)
        return ToyState(x=x, clock=torch.zeros_like(length), life=length)

    def step(state: ToyState, action: Tensor, env_params: ToyParams) -> tuple[ToyState, Outcome]:
        p = env_params
        x = p.gain * state.x + p.push * action
        reward = -x.square().sum() - 0.1 * action.square().sum()
        sick = state.clock == p.fault_step
        reward = reward + torch.where(sick, p.reward_fault, 0.0)
        x = x + torch.where(sick, p.state_fault, 0.0)
        clock = state.clock + 1
        metrics = {"distance": x.detach().square().sum(), "success": x.detach().square().sum() < 0.01}
        return ToyState(x=x, clock=clock, life=state.life), Outcome(reward=reward, terminated=clock >= state.life, metrics=metrics)

    def number(value: float) -> Tensor:
        return torch.tensor(value, dtype=dtype)

    return Env(
        spec=EnvSpec(name="toy", max_episode_steps=max_episode_steps, dt=1.0, differentiable=True),
        observation_space=spaces.Box(-math.inf, math.inf, (2,)),
        action_space=spaces.Box(-1.0, 1.0, (2,)),
        default_params=ToyParams(gain=number(gain), push=number(push), fault_step=torch.tensor(-1), reward_fault=number(0.0), state_fault=number(0.0)),
        reset=reset,
        observe=lambda state, env_params: state.x,
        step=step,
    )
