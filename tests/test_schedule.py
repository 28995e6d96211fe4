"""Schedules: the specification of a rollout and the stratified order."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frl.envs.schedule import DifferentiableRolloutSpec, stratified_rollout_value


def test_defaults_and_integral_float():
    spec = DifferentiableRolloutSpec(2.0)  # pyright: ignore[reportArgumentType]
    assert spec.num_steps == 2
    assert type(spec.num_steps) is int
    assert spec.objective_scale == 1.0
    assert dict(spec.metadata) == {}
    assert type(DifferentiableRolloutSpec(np.int64(3)).num_steps) is int  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("num_steps", [True, False, 2.5, math.nan, math.inf, "4", None, torch.tensor(3)])
def test_num_steps_of_a_wrong_kind(num_steps):
    with pytest.raises(TypeError, match="num_steps"):
        DifferentiableRolloutSpec(num_steps)


@pytest.mark.parametrize("num_steps", [0, -1, -2.0])
def test_num_steps_out_of_range(num_steps):
    with pytest.raises(ValueError, match="num_steps must be at least 1"):
        DifferentiableRolloutSpec(num_steps)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, torch.tensor(math.nan), torch.tensor([1.0, math.inf]), torch.tensor(2), torch.ones(2, 2)])
def test_objective_scale_out_of_range(scale):
    with pytest.raises(ValueError, match="objective_scale"):
        DifferentiableRolloutSpec(4, objective_scale=scale)


@pytest.mark.parametrize("scale", [True, "1", None])
def test_objective_scale_of_a_wrong_kind(scale):
    with pytest.raises(TypeError, match="objective_scale"):
        DifferentiableRolloutSpec(4, objective_scale=scale)


def test_tensor_scale_is_kept():
    scale = torch.tensor([0.5, 2.0])
    assert DifferentiableRolloutSpec(4, scale).objective_scale is scale


def test_metadata_is_copied_and_checked():
    labels = {"difficulty": 3}
    spec = DifferentiableRolloutSpec(4, metadata=labels)
    labels["difficulty"] = 9
    assert dict(spec.metadata) == {"difficulty": 3.0}
    with pytest.raises(ValueError, match="difficulty"):
        DifferentiableRolloutSpec(4, metadata={"difficulty": math.nan})
    with pytest.raises(TypeError, match="names"):
        DifferentiableRolloutSpec(4, metadata={1: 2.0})  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="mapping"):
        DifferentiableRolloutSpec(4, metadata=[("difficulty", 1.0)])  # pyright: ignore[reportArgumentType]


def test_spec_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DifferentiableRolloutSpec(4).num_steps = 5  # pyright: ignore[reportAttributeAccessIssue]


def test_stratified_order_golden():
    assert [stratified_rollout_value(i, 2, 4) for i in range(12)] == [2, 3, 4, 3, 4, 2, 4, 2, 3, 2, 3, 4]


@given(minimum=st.integers(-50, 50), count=st.integers(1, 20), cycle=st.integers(0, 1000))
def test_each_cycle_covers_the_range_once(minimum, count, cycle):
    maximum = minimum + count - 1
    block = [stratified_rollout_value(cycle * count + i, minimum, maximum) for i in range(count)]
    assert sorted(block) == list(range(minimum, maximum + 1))
    following = stratified_rollout_value((cycle + 1) * count, minimum, maximum)
    assert following == block[1 % count], "a cycle starts one value later than the one before"


@pytest.mark.parametrize("arguments", [(-1, 2, 4), (0, 4, 3)])
def test_stratified_range_errors(arguments):
    with pytest.raises(ValueError, match="must be at least"):
        stratified_rollout_value(*arguments)


@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize("value", [True, 1.0, "1", None])
def test_stratified_type_errors(position, value):
    arguments = [0, 2, 4]
    arguments[position] = value
    with pytest.raises(TypeError, match="must be an integer"):
        stratified_rollout_value(*arguments)
