"""Laws of the running statistics, values of the two reference normalisers, and the inputs on which normalisers usually fail."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from frl import rng, tree
from frl.normalizers import (
    NormalizerState,
    NormalizerView,
    empirical_normalizer,
    merge,
    running_normalizer,
    running_observation_normalizer,
    variance,
)
from frl.types import Normalizer
from tests.tolerances import tolerance

F64 = torch.float64


def rows_of(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype).reshape(-1, 1)


def bitwise_equal(a, b) -> bool:
    return all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


def close(a: NormalizerState, b: NormalizerState, rtol: float = 1e-9, scale: float = 1.0) -> bool:
    same_counts = torch.equal(a.rejected, b.rejected) and torch.equal(a.prior, b.prior) and torch.allclose(a.count, b.count, rtol=1e-12)
    return (
        same_counts
        and torch.allclose(a.mean, b.mean, rtol=rtol, atol=rtol * scale)
        and torch.allclose(variance(a), variance(b), rtol=rtol, atol=rtol * scale**2)
    )


def test_values_with_a_small_prior(device):
    norm = running_observation_normalizer(1)
    state = norm.update(norm.init(device=device), rows_of(1.0, 3.0).to(device))
    assert state.mean.item() == pytest.approx(1.9999, abs=5e-5)
    assert variance(state).item() == pytest.approx(1.0002, abs=5e-5)
    assert state.count.item() == pytest.approx(2.0001)
    assert norm.apply(state, torch.tensor([3.0], device=device)).item() == pytest.approx((3 - 1.9999) / 1.0002**0.5, abs=1e-4)
    state = norm.update(state, rows_of(5.0).to(device))
    assert [state.mean.item(), variance(state).item(), state.count.item()] == pytest.approx([2.9999, 2.6669, 3.0001], abs=5e-5)


def test_values_without_a_prior(device):
    norm = empirical_normalizer(1)
    state = norm.update(norm.update(norm.init(device=device), rows_of(1.0, 3.0).to(device)), rows_of(5.0).to(device))
    assert [state.mean.item(), variance(state).item(), state.count.item()] == pytest.approx([3.0, 8 / 3, 3.0], rel=1e-12)
    got = norm.apply(state, torch.tensor([5.0], device=device))
    assert got.item() == pytest.approx(2.0 / ((8 / 3) ** 0.5 + 1e-2), rel=1e-6)


def test_first_batch_of_a_normaliser_without_prior_replaces_it_exactly():
    norm = empirical_normalizer(2)
    state = norm.update(norm.init(), torch.tensor([[0.1, -7.0]]))
    assert torch.equal(state.mean, torch.tensor([0.1, -7.0]).to(F64))
    assert torch.equal(variance(state), torch.zeros(2, dtype=F64))


def test_nothing_seen_is_the_identity_up_to_epsilon():
    for norm in (running_normalizer(2), running_normalizer(2, initial_count=3.0)):
        x = torch.tensor([[3.0, -4.0]])
        assert torch.allclose(norm.apply(norm.init(), x), x, rtol=1e-7)
        assert torch.equal(variance(norm.init()), torch.ones(2, dtype=F64))
    assert isinstance(norm, Normalizer)


@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=2), min_size=1, max_size=12), st.data())
def test_any_split_and_order_give_the_same_statistics(rows, data):
    x = torch.tensor(rows, dtype=F64)
    cut = data.draw(st.lists(st.integers(0, len(rows)), max_size=3).map(sorted))
    order = torch.tensor(data.draw(st.permutations(range(len(rows)))))
    prior = data.draw(st.sampled_from([0.0, 1e-4, 2.0]))
    norm = running_normalizer(2, initial_count=prior, initial_mean=data.draw(st.sampled_from([None, 0.0])))
    whole = norm.update(norm.init(), x)
    parts = norm.init()
    for start, end in zip([0, *cut], [*cut, len(rows)], strict=True):
        parts = norm.update(parts, x[order][start:end])
    assert close(parts, whole, scale=1e3)
    if norm.init().count == 0:
        assert torch.allclose(whole.mean, x.mean(0), atol=1e-9)
        assert torch.allclose(variance(whole), (len(rows) * x.var(0, correction=0) + prior) / (len(rows) + prior), atol=1e-6)


@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=4), min_size=3, max_size=3))
def test_merge_is_associative_and_commutative_and_agrees_with_update(groups):
    norm = running_normalizer(1)
    a, b, c = (norm.update(norm.init(), rows_of(*g, dtype=F64)) for g in groups)
    assert close(merge(merge(a, b), c), merge(a, merge(b, c)), scale=1e3)
    assert close(merge(a, b), merge(b, a), scale=1e3)
    assert close(merge(a, b), norm.update(a, rows_of(*groups[1], dtype=F64)), scale=1e3)
    assert bitwise_equal(merge(norm.init(), a), a)
    assert bitwise_equal(merge(a, norm.init()), a)
    assert bitwise_equal(merge(norm.init(), norm.init()), norm.init())


@given(st.lists(st.tuples(st.floats(-9, 9), st.sampled_from([0.0, math.nan, math.inf, -math.inf]), st.booleans()), min_size=1, max_size=10))
def test_rows_that_are_masked_or_not_finite_count_as_absent(rows):
    x = torch.tensor([[value, value + bad] for value, bad, _ in rows], dtype=F64)
    mask = torch.tensor([wanted for *_, wanted in rows])
    finite = torch.isfinite(x).all(-1)
    norm = running_normalizer(2)
    got = norm.update(norm.init(), x, mask)
    expected = norm.update(norm.init(), x[mask & finite])
    assert close(got, expected._replace(rejected=(mask & ~finite).sum()), rtol=1e-13, scale=9.0)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_row_never_poisons_the_statistics(bad, device):
    norm = running_normalizer(2)
    x = torch.tensor([[1.0, 2.0], [bad, 5.0], [3.0, 4.0], [8.0, -3.0]], device=device)
    update = torch.compile(norm.update, backend="aot_eager", fullgraph=True) if bad == math.inf else norm.update
    state = update(norm.init(device=device), x)
    clean = norm.update(norm.init(device=device), x[[0, 2, 3]])
    assert bitwise_equal(state._replace(rejected=clean.rejected), clean)
    assert state.rejected == 1
    for i in range(100):
        state = norm.update(state, torch.full((3, 2), float(i), device=device))
    assert tree.all_finite(state)
    assert torch.isfinite(norm.apply(state, x[0])).all()


def test_huge_finite_observations_do_not_overflow_the_statistics():
    norm = running_normalizer(1)
    state = norm.update(norm.init(), rows_of(1.0, 1e300, 2.0, dtype=F64))
    assert [state.count.item(), state.mean.item(), state.rejected.item()] == [2.0, 1.5, 1]
    state = norm.update(norm.init(), rows_of(3e38, -3e38))
    assert torch.isfinite(variance(state)).all()


@pytest.mark.parametrize("initial_count", [0.0, 1e-4])
@pytest.mark.parametrize("batch", [1, 3, 64, 1000])
def test_large_offset_in_float32(batch, initial_count, device):
    stream = (1e6 + torch.arange(4, device=device, dtype=torch.float32)).repeat(250).reshape(-1, 1)
    norm = running_normalizer(1, initial_count=initial_count)
    state = norm.init(device=device)
    for part in stream.split(batch):
        state = norm.update(state, part)
        assert (variance(state) >= 0).all()
    expected = (1000 * 1.25 + initial_count) / (1000 + initial_count)
    assert [state.mean.item(), variance(state).item()] == pytest.approx([1000001.5, expected], rel=1e-9)
    got = norm.apply(state, torch.tensor([1000003.0], device=device))
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(1.5 / 1.25**0.5, rel=tolerance(torch.float32, 4))


@given(st.floats(-1e8, 1e8), st.sampled_from([1e-4, 2.0]), st.lists(st.floats(-3, 3), min_size=1, max_size=16))
def test_a_prior_without_a_mean_does_not_see_where_the_observations_lie(offset, initial_count, values):
    norm = running_normalizer(1, initial_count=initial_count)
    x = rows_of(*values, dtype=F64)
    near, far = norm.update(norm.init(), x), norm.update(norm.init(), x + offset)
    expected = (((x - x.mean()) ** 2).sum() + initial_count) / (len(values) + initial_count)
    assert variance(near).item() == pytest.approx(expected.item(), rel=1e-9)
    assert variance(far).item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
    assert far.mean.item() == pytest.approx(x.mean().item() + offset, rel=1e-12, abs=1e-9)
    assert torch.allclose(merge(norm.init(), far).mean, far.mean, rtol=1e-14)


def test_a_prior_with_a_mean_pulls_towards_it():
    norm = running_normalizer(1, initial_count=2.0, initial_mean=4.0, epsilon=0.0)
    assert (norm.init().mean.item(), variance(norm.init()).item()) == (4.0, 1.0)
    state = norm.update(norm.init(), rows_of(7.0))
    assert [state.mean.item(), variance(state).item()] == pytest.approx([5.0, (2 * (1 + 1) + 4) / 3])
    # The reference's prior has its mean at 0: what is far from 0 looks wide, which is why run files have one without a mean.
    far = rows_of(*(1e6 + i % 4 for i in range(1000)))
    own, theirs = running_normalizer(1, initial_count=1e-4), running_observation_normalizer(1)
    assert variance(theirs.update(theirs.init(), far)).item() > 9e4
    assert variance(own.update(own.init(), far)).item() == pytest.approx(1.25, rel=1e-6)


def test_centring_keeps_what_a_float32_mean_would_lose():
    # A mean half way between two float32 numbers: its rounding alone would shift every output by a fifth of a standard deviation.
    x = torch.tensor([[2.0**24], [2.0**24 + 2.0], [2.0**24 + 2.0]])
    norm = running_normalizer(1)
    state = norm.update(norm.init(), x)
    assert torch.allclose(norm.apply(state, x).to(F64), norm.apply(state, x.to(F64)), rtol=tolerance(torch.float32, 4))
    assert norm.apply(state, x).mean().abs() < 1e-6


@pytest.mark.parametrize("initial_count", [0.0, 1e-4])
def test_constant_feature_does_not_explode(initial_count, device):
    norm = running_normalizer(2, initial_count=initial_count, clip=10.0)
    state = norm.init(device=device)
    noise = rng.normal(rng.key(3, device), (1000, 64))
    for i in range(1000):
        state = norm.update(state, torch.stack([torch.full_like(noise[i], 0.1), noise[i]], -1))
    if initial_count == 0.0:
        assert variance(state)[0] <= 1e-10
    got = norm.apply(state, torch.tensor([[0.1, 1.0], [0.1 + 1e-6, 1.0], [50.0, 1.0]], device=device))
    assert got[0, 0].abs() <= 1e-2
    assert torch.isfinite(got).all()
    assert (got.abs() <= 10.0).all()
    assert got[2, 0] == 10.0
    expected = (1.0 - noise.double().mean()) / noise.double().std(correction=0)
    assert got[:, 1].tolist() == pytest.approx([expected.item()] * 3, rel=1e-5)


def test_std_floor_and_zero_denominators():
    x = torch.tensor([[2.0], [2.0]])
    floored = running_normalizer(1, std_floor=0.5, epsilon=0.0)
    state = floored.update(floored.init(), x)
    assert floored.apply(state, torch.tensor([3.0])).item() == 2.0
    bare = running_normalizer(1, epsilon=0.0)
    assert bare.apply(state, torch.tensor([[2.0], [3.5]])).flatten().tolist() == [0.0, 1.5]
    nearly = state._replace(m2=torch.tensor([1e-200], dtype=F64))
    assert bare.apply(nearly, torch.tensor([2.0])).item() == 0.0
    wide = state._replace(m2=torch.tensor([2.0 * 9.0], dtype=F64))
    assert floored.apply(wide, torch.tensor([8.0])).item() == 2.0


def test_count_is_part_of_the_state():
    norm = running_normalizer(1)
    state = NormalizerState(
        count=torch.tensor(1000.0, dtype=F64),
        mean=torch.zeros(1, dtype=F64),
        m2=torch.full((1,), 1000.0, dtype=F64),
        prior=torch.zeros((), dtype=F64),
        rejected=torch.tensor(0),
    )
    state = norm.update(state, torch.full((10, 1), 101.0))
    assert [state.count.item(), state.mean.item(), variance(state).item()] == pytest.approx([1010.0, 1.0, 100.990099], rel=1e-8)


def test_masked_features_pass_unchanged_and_are_tracked():
    mask = (True, False, False, True)
    norm = running_normalizer(4, mask=mask, clip=1.0)
    state = norm.update(norm.init(), torch.tensor([[1.0, 2.0, 30.0, 4.0], [3.0, 4.0, 50.0, -6.0]]))
    x = torch.tensor([[5.0, 0.1, -0.0, -9.0], [2.0, math.inf, 1e38, -1.0], [2.0, math.nan, 77.7, -1.0]])
    got = norm.apply(state, x)
    assert torch.equal(got[:, 1:3].view(torch.int32), x[:, 1:3].view(torch.int32))
    assert got[:, [0, 3]].tolist() == [[1.0, -1.0], [0.0, 0.0], [0.0, 0.0]]
    assert state.mean.tolist() == [2.0, 3.0, 40.0, -1.0]
    tensor_mask = running_normalizer(4, mask=torch.tensor(mask), clip=1.0)
    assert torch.equal(tensor_mask.apply(state, x[:1]), got[:1])
    free = running_normalizer(4, mask=mask)
    assert torch.allclose(free.apply(state, x[:1])[0, [0, 3]], torch.tensor([3.0, -8.0 / 5.0]))


def test_row_mask_of_any_leading_shape(device):
    norm = running_normalizer(2)
    x = rng.normal(rng.key(1, device), (5, 3, 2))
    alive = rng.uniform(rng.key(2, device), (5, 3)) < 0.5
    got = norm.update(norm.init(device=device), x, alive)
    assert got.count == alive.sum()
    assert close(got, norm.update(norm.init(device=device), x[alive]))
    assert close(norm.update(norm.init(device=device), x), norm.update(norm.init(device=device), x.reshape(15, 2)))


def test_batches_without_rows_change_no_bit():
    norm = running_normalizer(2, initial_count=1e-4)
    state = norm.update(norm.init(), rng.normal(rng.key(0), (7, 2)))._replace(mean=torch.tensor([-0.0, 3.0], dtype=F64))
    for x, mask in ((torch.zeros(0, 2), ()), (torch.ones(4, 2), torch.zeros(4, dtype=torch.bool))):
        after = norm.update(state, x, mask)
        assert bitwise_equal(after, state)
        assert torch.signbit(after.mean[0])
    bad = norm.update(state, torch.full((4, 2), math.nan))
    assert bitwise_equal(bad._replace(rejected=state.rejected), state)
    assert bad.rejected == 4


def test_no_route_changes_the_state_that_goes_in():
    norm = running_normalizer(3, clip=5.0)
    state = norm.update(norm.init(), torch.tensor([[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]]))
    before = tree.map(torch.clone, state)
    x = torch.full((8, 3), 100.0)
    norm.apply(state, x)
    norm.apply(norm.prepare(state, torch.float32), x)
    torch.func.grad(lambda v: norm.apply(state, v).sum())(x)
    norm.update(state, x)
    merge(state, state)
    assert bitwise_equal(state, before)


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [(torch.uint8, [200, 100], (150.0, 2500.0)), (torch.int64, [10**9, 10**9 + 2], (10**9 + 1, 1.0)), (torch.float16, [60000.0, 40000.0], (50000.0, 1e8))],
)
def test_integers_and_half_are_converted_before_any_arithmetic(dtype, values, expected):
    norm = running_normalizer(1)
    x = torch.tensor(values, dtype=dtype).reshape(-1, 1)
    state = norm.update(norm.init(), x)
    assert (state.mean.item(), variance(state).item()) == pytest.approx(expected, rel=1e-12)
    got = norm.apply(state, x)
    assert got.dtype == (dtype if dtype.is_floating_point else torch.float32)
    assert sorted(got.flatten().tolist()) == pytest.approx([-1.0, 1.0], rel=1e-3)


def test_float64_end_to_end_and_configured_output_dtype():
    x = torch.tensor([[1e8], [1e8 + 1.0]], dtype=F64)
    norm = running_normalizer(1, epsilon=0.0)
    state = norm.update(norm.init(), x)
    assert state.mean.item() == 100000000.5
    assert norm.apply(state, x).dtype == F64
    assert norm.apply(state, x).flatten().tolist() == [-1.0, 1.0]
    narrow = running_normalizer(1, epsilon=0.0, dtype=torch.float32)
    assert narrow.apply(state, x).dtype == torch.float32
    assert narrow.apply(state, x).flatten().tolist() == [-1.0, 1.0]
    assert all(leaf.dtype == F64 for leaf in (state.count, state.mean, state.m2))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_view_gives_the_bits_of_the_state(dtype):
    norm = running_normalizer(3, mask=(True, False, True), clip=2.0)
    state = norm.update(norm.init(), rng.normal(rng.key(0), (50, 3)) * 3.0 + 100.0)
    x = rng.normal(rng.key(1), (20, 3), dtype) + 100.0
    view = norm.prepare(state, dtype)
    assert isinstance(view, NormalizerView)
    assert all(leaf.dtype == dtype for leaf in tree.leaves(view))
    assert torch.equal(norm.apply(view, x), norm.apply(state, x))


def test_gradient_flows_through_the_observation_alone():
    norm = running_normalizer(2, clip=1.0)
    state = norm.update(norm.init(), torch.tensor([[0.0, 0.0], [2.0, 4.0]]))
    slope = torch.func.grad(lambda v: norm.apply(state, v).sum())(torch.tensor([[1.5, 3.0], [9.0, 3.0]]))
    assert torch.allclose(slope, torch.tensor([[1.0, 0.5], [0.0, 0.5]]), rtol=1e-6)
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]], requires_grad=True)
    assert not any(leaf.requires_grad for leaf in tree.leaves(norm.update(state, x)))
    for name in ("mean", "m2"):
        slope = torch.func.grad(lambda leaf, name=name: norm.apply(state._replace(**{name: leaf}), torch.tensor([[1.5, 3.0]])).sum())(getattr(state, name))
        assert torch.equal(slope, torch.zeros(2, dtype=F64))
    through = torch.func.grad(lambda v: norm.apply(norm.update(state, v), v).sum())(x.detach())
    assert torch.allclose(through, torch.func.grad(lambda v: norm.apply(norm.update(state, x), v).sum())(x.detach()))


def test_vmap_over_members_equals_the_loop():
    norm = running_normalizer(2, mask=(True, False), clip=3.0)
    x = rng.normal(rng.key(5), (4, 6, 2))
    states = torch.func.vmap(lambda v: norm.update(norm.init(), v))(x)
    out = torch.func.vmap(norm.apply)(states, x)
    for j in range(4):
        state = norm.update(norm.init(), x[j])
        assert close(tree.index(states, j), state, rtol=1e-12)
        assert torch.allclose(out[j], norm.apply(state, x[j]), rtol=tolerance(torch.float32))


def test_compiled_equals_eager():
    norm = running_normalizer(3, mask=(True, False, True), clip=2.0)

    def play(state: NormalizerState, x: Tensor, mask: Tensor) -> tuple[NormalizerState, Tensor, Tensor]:
        state = norm.update(state, x, mask)
        return state, norm.apply(state, x), norm.apply(norm.prepare(state, x.dtype), x)

    x = rng.normal(rng.key(5), (9, 3)) * 2.0
    args = (norm.init(), x.index_fill(0, torch.tensor([4]), math.nan), torch.arange(9) % 3 != 1)
    got, expected = torch.compile(play, backend="aot_eager", fullgraph=True)(*args), play(*args)
    for a, b in zip(tree.leaves(got), tree.leaves(expected), strict=True):
        assert torch.allclose(a, b, rtol=tolerance(a.dtype) if a.is_floating_point() else 0.0, equal_nan=True)


@pytest.mark.parametrize(
    "arguments",
    [
        {"size": 0},
        {"size": -1},
        {"size": 2.0},
        {"size": True},
        {"initial_count": -1.0},
        {"initial_count": math.inf},
        {"initial_mean": math.nan},
        {"initial_mean": True},
        {"epsilon": -1e-8},
        {"epsilon": math.nan},
        {"epsilon": "1e-8"},
        {"std_floor": -1.0},
        {"std_floor": True},
        {"clip": 0.0},
        {"clip": math.inf},
        {"mask": (True,)},
        {"mask": torch.ones(2, 2, dtype=torch.bool)},
        {"dtype": torch.int64},
    ],
)
def test_the_factory_refuses_what_makes_no_sense(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        running_normalizer(**{"size": 2, **arguments})


def test_wrong_width_is_refused():
    norm = running_normalizer(2)
    for call in (norm.apply, norm.update):
        with pytest.raises(ValueError, match="last dimension"):
            call(norm.init(), torch.zeros(4, 3))
