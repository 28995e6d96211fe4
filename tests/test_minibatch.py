from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from frl import rng
from frl.algorithms.minibatch import iterate_minibatches, minibatch_count, minibatch_indices, take_minibatch, transition_view
from frl.numerics import masked_mean

NAN = math.nan


def rollout(rows: int = 2, slots: int = 4, lead: tuple[int, ...] = (), **extra: Any) -> TensorDict:
    """Each entry tells its row and slot; slot T of what is padding is NaN."""
    shape = (*lead, rows, slots)
    number = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    padded = number.clone()
    padded[..., -1] = NAN
    flag = torch.zeros(shape, dtype=torch.bool)
    fields = dict(
        obs=torch.stack([number, -number, 2 * number], -1),
        action=torch.stack([padded, padded], -1),
        sample_log_prob=padded,
        value=100 + number,
        reward=padded + 0.5,
        done=flag | (number % 3 == 1),
        terminated=flag | (number % 3 == 1),
        truncated=flag,
    )
    return TensorDict({**fields, **extra}, batch_size=shape)


# -- transitions -----------------------------------------------------------------------------------------------------------------------------------


def test_view_drops_the_last_slot_and_adds_the_next_value() -> None:
    given = rollout(
        critic_obs=torch.randn(2, 4, 5),
        action_mean=torch.zeros(2, 4, 2),
        action_std=torch.ones(2, 4, 2),
        advantage=torch.randn(2, 4),
        seq_mask=torch.ones(2, 4),
        entropy=torch.zeros(2, 4),
        nested=TensorDict({"a": torch.randn(2, 4, 3)}, batch_size=[2, 4]),
    )
    given["return"] = torch.randn(2, 4)
    before = given.clone()
    given.lock_()
    view = transition_view(given)
    assert tuple(view.batch_size) == (2, 3)
    assert set(view.keys()) == {*before.keys(), "next_value"}
    for name in before.keys(True, True):
        assert torch.equal(view[name], before[name][:, :-1])
    assert torch.equal(view["next_value"], before["value"][:, 1:])
    assert not any(view[name].isnan().any() for name in ("action", "sample_log_prob", "reward"))
    assert view["obs"].data_ptr() == given["obs"].data_ptr()
    assert set(given.keys()) == set(before.keys())


def test_flat_view_goes_row_by_row() -> None:
    flat = transition_view(rollout(), flatten=True)
    assert tuple(flat.batch_size) == (6,)
    assert flat["sample_log_prob"].tolist() == [0, 1, 2, 4, 5, 6]
    assert flat["next_value"].tolist() == [101, 102, 103, 105, 106, 107]
    assert flat["obs"].shape == (6, 3)
    stacked = transition_view(rollout(lead=(5,)), flatten=True)
    assert tuple(stacked.batch_size) == (5, 6)
    assert torch.equal(stacked["reward"][0], flat["reward"])


def test_values_are_optional() -> None:
    view = transition_view(rollout().exclude("value"))
    assert set(view.keys()) == {"obs", "action", "sample_log_prob", "reward", "done", "terminated", "truncated"}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: rollout().exclude("reward", "action"), "no action, reward"),
        (lambda: rollout()[0], "batch size"),
        (lambda: rollout()[:, :1], "batch size"),
        (lambda: rollout(value=torch.zeros(2, 4, 1)), "'value'.*shape"),
        (lambda: rollout(reward=torch.zeros(2, 4, 1)), "'reward'.*shape"),
        (lambda: rollout(done=torch.zeros(2, 4)), "'done'.*bool"),
        (lambda: rollout(valid=torch.zeros(2, 4)), "'valid'.*bool"),
        (lambda: rollout(advantage=torch.zeros(2, 4, 2)), "'advantage'.*shape"),
    ],
)
def test_bad_rollouts_are_refused(make, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        transition_view(make())


# -- partitions ------------------------------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 2**32), st.booleans())
def test_partition_is_exact_and_balanced(count: int, number: int, seed: int, by_size: bool) -> None:
    how = {"batch_size": number} if by_size else {"num_minibatches": min(number, count)}
    index, mask = minibatch_indices(rng.key(seed), count, **how)
    parts = -(-count // number) if by_size else min(number, count)
    assert index.shape == mask.shape == (parts, -(-count // parts))
    assert index.dtype == torch.int64
    assert sorted(index[mask].tolist()) == list(range(count))
    sizes = mask.sum(-1)
    assert sizes.max() - sizes.min() <= 1
    assert (sizes.diff() <= 0).all()
    assert index.min() >= 0
    assert index.max() < count
    if by_size:
        assert sizes.max() <= number
    else:
        assert minibatch_count(count, **how, batch_size=0) == parts


@pytest.mark.parametrize(
    ("count", "how", "sizes"),
    [
        (1024, {"num_minibatches": 5}, [205, 205, 205, 205, 204]),
        (6, {"num_minibatches": 4}, [2, 2, 1, 1]),
        (10, {"num_minibatches": 4}, [3, 3, 2, 2]),
        (65, {"batch_size": 64}, [33, 32]),
        (5, {"batch_size": 64}, [5]),
        (1, {"batch_size": 1}, [1]),
    ],
)
def test_sizes(count: int, how: dict[str, int], sizes: list[int], device: torch.device) -> None:
    mask = minibatch_indices(rng.key(0, device), count, **how).mask
    assert mask.sum(-1).tolist() == sizes


def test_order_is_that_of_the_keyed_permutation_and_every_epoch_has_its_own() -> None:
    key = rng.key(3)
    keys = rng.fold_in(key, torch.arange(4))
    index, mask = minibatch_indices(keys, 50, num_minibatches=4)
    assert index.shape == (4, 4, 13)
    orders = [tuple(index[e][mask[e]].tolist()) for e in range(4)]
    assert len(set(orders)) == 4
    for e in range(4):
        alone = minibatch_indices(rng.fold_in(key, e), 50, num_minibatches=4)
        assert torch.equal(alone.index, index[e])
        assert list(orders[e]) == rng.permutation(rng.fold_in(key, e), 50).tolist()
    one = torch.func.vmap(lambda k: minibatch_indices(k, 50, num_minibatches=4))(keys)
    assert torch.equal(one.index, index)
    assert torch.equal(one.mask, mask)


def test_places_are_uniform() -> None:
    """Where transition 0 goes over 4000 keys: four standard errors of a fair share."""
    index, mask = minibatch_indices(rng.fold_in(rng.key(5), torch.arange(4000)), 10, num_minibatches=4)
    share = ((index == 0) & mask).any(-1).double().mean(0)
    want = torch.tensor([0.3, 0.3, 0.2, 0.2], dtype=torch.float64)
    assert ((share - want).abs() < 4 * (want * (1 - want) / 4000).sqrt()).all()


@pytest.mark.parametrize(
    ("count", "how", "text"),
    [
        (10, {"num_minibatches": 11}, "num_minibatches must be at most.*10, got 11"),
        (10, {"num_minibatches": 0}, "num_minibatches.*got 0"),
        (10, {"num_minibatches": True}, "num_minibatches"),
        (10, {"num_minibatches": 2.0}, "num_minibatches"),
        (10, {"batch_size": 0}, "batch_size.*got 0"),
        (10, {"batch_size": -1}, "batch_size"),
        (10, {"batch_size": NAN}, "batch_size"),
        (10, {}, "batch_size.*got None"),
        (0, {"batch_size": 4}, "transitions.*got 0"),
    ],
)
def test_bad_numbers_are_refused(count: int, how: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        minibatch_indices(rng.key(0), count, **how)
    if count:
        with pytest.raises(ValueError, match=text):
            iterate_minibatches(torch.zeros(count), rng.key(0), **how)


def test_iteration_visits_every_transition_once_an_epoch() -> None:
    flat = transition_view(rollout(rows=5, slots=4), flatten=True)
    before = flat.clone()
    key = rng.key(1)
    seen = list(iterate_minibatches(flat, key, num_minibatches=4, epochs=3))
    assert len(seen) == 12
    for epoch in range(3):
        plan = minibatch_indices(rng.fold_in(key, epoch), 15, num_minibatches=4)
        rewards = []
        for m, (batch, mask) in enumerate(seen[4 * epoch : 4 * epoch + 4]):
            assert tuple(batch.batch_size) == (4,)
            assert torch.equal(batch["obs"], flat["obs"][plan.index[m]])
            assert torch.equal(mask, plan.mask[m])
            rewards += batch["reward"][mask].tolist()
        assert sorted(rewards) == sorted(flat["reward"].tolist())
    assert (flat == before).all()
    assert list(iterate_minibatches(flat, key, batch_size=4, epochs=0)) == []


def test_weighted_minibatch_means_are_the_mean_of_all() -> None:
    x = torch.randn(23, dtype=torch.float64)
    parts = [(masked_mean(batch, mask), mask.sum()) for batch, mask in iterate_minibatches(x, rng.key(2), num_minibatches=5)]
    torch.testing.assert_close(sum(mean * n for mean, n in parts) / 23, x.mean(), rtol=1e-12, atol=1e-12)


def test_trees_of_tensors() -> None:
    flat = {"a": torch.arange(6), "b": (torch.arange(12).reshape(6, 2),)}
    index = torch.tensor([4, 0, 4])
    got = take_minibatch(flat, index)
    assert got["a"].tolist() == [4, 0, 4]
    assert got["b"][0].tolist() == [[8, 9], [0, 1], [8, 9]]
    for batch, mask in iterate_minibatches(flat, rng.key(0), batch_size=2):
        assert torch.equal(batch["b"][0][:, 0], 2 * batch["a"])
        assert mask.all()


@pytest.mark.parametrize(
    ("flat", "epochs", "text"),
    [
        (rollout(), 1, "batch size"),
        ({"a": torch.zeros(3), "b": torch.zeros(4)}, 1, "first dimension"),
        ({}, 1, "first dimension"),
        (torch.zeros(()), 1, "first dimension"),
        (torch.zeros(3), -1, "epochs"),
        (torch.zeros(3), True, "epochs"),
    ],
)
def test_bad_data_are_refused_at_the_call(flat: Any, epochs: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        iterate_minibatches(flat, rng.key(0), batch_size=2, epochs=epochs)


def test_compiled_equals_eager() -> None:
    """A partition and the taking of its minibatches with the key as data: one graph for all keys."""
    flat = {"x": torch.randn(10, 3), "a": torch.randn(10)}

    def batches(key: torch.Tensor) -> tuple[Any, torch.Tensor]:
        plan = minibatch_indices(key, 10, num_minibatches=4)
        return [take_minibatch(flat, plan.index[m]) for m in range(4)], plan.mask

    run = torch.compile(batches, backend="aot_eager", fullgraph=True)
    for seed in (0, 1):
        (got, got_mask), (want, want_mask) = run(rng.key(seed)), batches(rng.key(seed))
        assert torch.equal(got_mask, want_mask)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a["x"], b["x"])
            assert torch.equal(a["a"], b["a"])
