"""Known answers, equal bits on every path, and the statistics of the draws (seeds are fixed, so every bound is deterministic)."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from frl import rng
from tests.tolerances import tolerance

F32, F64 = torch.float32, torch.float64
WORDS = st.integers(0, 2**32 - 1)


def philox_of_integers(counter: list[int], key: list[int]) -> list[int]:
    """The generator once more, with Python's unbounded integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p, q = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(q >> 32) ^ c[1] ^ k[0], q % 2**32, (p >> 32) ^ c[3] ^ k[1], p % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def kolmogorov_smirnov(x: Tensor, cdf) -> float:
    """Largest distance of the empirical distribution from ``cdf``, times sqrt(n): beyond 1.95 with probability 1e-3."""
    x = torch.sort(x.to(F64).flatten()).values
    n, f = len(x), cdf(x)
    above = (torch.arange(1, n + 1, dtype=F64) / n - f).max()
    below = (f - torch.arange(n, dtype=F64) / n).max()
    return float(torch.maximum(above, below)) * n**0.5


def correlation(a: Tensor, b: Tensor) -> float:
    """Correlation coefficient times sqrt(n): standard normal for independent samples."""
    a, b = a.to(F64).flatten(), b.to(F64).flatten()
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1]) * len(a) ** 0.5


def normal_cdf(x: Tensor) -> Tensor:
    return 0.5 * torch.erfc(-x / math.sqrt(2.0))


def all_draws(key: Tensor) -> dict[str, Tensor]:
    return {
        "bits": rng.bits(key, (3, 5)),
        "uniform": rng.uniform(key, (3,)),
        "affine": rng.uniform(key, (7,), low=-0.3, high=1.7),
        "uniform64": rng.uniform(key, (2, 3), dtype=F64),
        "normal": rng.normal(key, (3, 2)),
        "normal64": rng.normal(key, (5,), F64),
        "gumbel": rng.gumbel(key, (4,)),
        "randint": rng.randint(key, (9,), -3, 8),
        "permutation": rng.permutation(key, 13),
        "categorical": rng.categorical(key, torch.zeros(*key.shape[:-1], 6, device=key.device)),
        "split": rng.split(key, 3),
        "fold_in": rng.fold_in(key, torch.tensor(-7, device=key.device)),
        "scalar": rng.uniform(key),
    }


def test_known_answers(device):
    for word, expected in ((0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"), (0xFFFFFFFF, "408f276d 41c83b0e a20bc7c6 6d5451fd")):
        block = torch.full((4,), word, dtype=torch.int64, device=device)
        got = rng.philox4x32(block, block[:2])
        assert " ".join(f"{w:08x}" for w in got.tolist()) == expected


@given(st.lists(WORDS, min_size=4, max_size=4), st.lists(WORDS, min_size=2, max_size=2))
def test_blocks_equal_unbounded_integer_arithmetic(counter, key):
    got = rng.philox4x32(torch.tensor(counter), torch.tensor(key))
    assert got.tolist() == philox_of_integers(counter, key)
    assert rng.philox4x32(tuple(torch.tensor(counter)), torch.tensor(key)).tolist() == got.tolist()


def test_long_counters_equal_unbounded_integer_arithmetic(device):
    # Long enough for the vector code of eager kernels and its remainder.
    counter = rng.bits(rng.key(5, device), (67, 4))
    key = rng.bits(rng.key(6, device), (67, 2))
    expected = [philox_of_integers(c, k) for c, k in zip(counter.tolist(), key.tolist(), strict=True)]
    assert rng.philox4x32(counter, key).tolist() == expected


def test_seeds_are_64_bits(device):
    assert rng.key(0, device).tolist() == [0, 0]
    assert rng.key(2**64 - 1).tolist() == rng.key(-1).tolist() == [2**32 - 1, 2**32 - 1]
    assert rng.key(0x123456789ABCDEF0).tolist() == [0x9ABCDEF0, 0x12345678]
    assert rng.key(1).dtype == torch.int64
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(ValueError, match="64 bits"):
            rng.key(seed)
    for seed in (True, 1.0, "1", None):
        with pytest.raises(TypeError, match="seed must be an int"):
            rng.key(seed)  # pyright: ignore[reportArgumentType]


@given(st.integers(0, 2**64 - 1), st.integers(0, 40), st.integers(0, 40))
def test_a_longer_draw_begins_with_the_shorter_one(seed, m, n):
    key, (m, n) = rng.key(seed), sorted((m, n))
    for draw in (rng.bits, rng.normal, rng.uniform, rng.gumbel):
        assert torch.equal(draw(key, (n,))[:m], draw(key, (m,)))
    for dtype in (F32, F64):
        assert torch.equal(rng.uniform(key, (n,), dtype=dtype)[:m], rng.uniform(key, (m,), dtype=dtype))
        assert torch.equal(rng.normal(key, (n,), dtype)[:m], rng.normal(key, (m,), dtype))
    assert torch.equal(rng.split(key, n + 1)[: m + 1], rng.split(key, m + 1))
    assert torch.equal(rng.bits(key, (2, n)).flatten(), rng.bits(key, (2 * n,)))


@given(st.integers(0, 2**63 - 1), st.sampled_from([1, 2, 7, 33]), st.integers(1, 50))
def test_rows_do_not_depend_on_their_number(seed, few, more):
    key = rng.key(seed)
    small, large = rng.fold_in(key, torch.arange(few)), rng.fold_in(key, torch.arange(few + more))
    assert torch.equal(small, large[:few])
    drawn = all_draws(large)
    for name, value in all_draws(small[few - 1]).items():
        assert torch.equal(drawn[name][few - 1], value), name


def test_batches_of_keys_vmap_and_single_keys_draw_the_same_bits(device):
    keys = rng.split(rng.key(11, device), 6).reshape(2, 3, 2)
    mapped = torch.func.vmap(torch.func.vmap(all_draws))(keys)
    batched = all_draws(keys)
    for i in range(2):
        for j in range(3):
            for name, value in all_draws(keys[i, j]).items():
                assert torch.equal(mapped[name][i, j], value), name
                assert torch.equal(batched[name][i, j], value), name


def test_fold_in_of_any_integer_and_shape(device):
    key = rng.key(3, device)
    for data in (0, 1, -1, 2**31, 2**63 - 1, -(2**63)):
        assert torch.equal(rng.fold_in(key, data), rng.fold_in(key, torch.tensor(data, device=device)))
    data = torch.tensor([[0, 1, 2], [-1, 2**32, 2**40]], device=device)
    table = rng.fold_in(key, data)
    assert table.shape == (2, 3, 2)
    assert len({tuple(k) for k in table.reshape(-1, 2).tolist()}) == 6
    assert torch.equal(rng.fold_in(key, torch.arange(3, device=device).to(torch.uint8)), table[0])
    rows = rng.fold_in(table, 5)
    assert torch.equal(rows[1, 2], rng.fold_in(table[1, 2], 5))
    assert torch.equal(rng.fold_in(table[0], data), torch.stack([torch.stack([rng.fold_in(table[0, j], data[i, j]) for j in range(3)]) for i in range(2)]))
    for wrong in (torch.tensor(1.0), torch.tensor(True)):
        with pytest.raises(TypeError, match="integer tensor"):
            rng.fold_in(key, wrong.to(device))


def test_children_are_distinct_and_never_drawn(device):
    key = rng.key(0, device)
    n = 100_000
    tables = [rng.split(key, n), rng.fold_in(key, torch.arange(n, device=device)), rng.bits(key, (n, 2)), rng.split(rng.split(key)[0], n), key[None]]
    codes = torch.cat([(t[:, 0] << 31) ^ t[:, 1] for t in tables])
    assert len(torch.unique(codes)) == len(codes)
    assert rng.split(key).shape == (2, 2)
    with pytest.raises(ValueError, match="num"):
        rng.split(key, -1)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_uniform_is_uniform_and_below_one(dtype, device):
    u = rng.uniform(rng.key(1, device), (200_000,), dtype=dtype)
    assert u.dtype == dtype
    assert ((u >= 0) & (u < 1)).all()
    assert kolmogorov_smirnov(u.cpu(), lambda x: x) < 1.95
    assert abs(u.double().mean() - 0.5) < 4 / math.sqrt(12 * 200_000)
    assert abs(u.double().var() - 1 / 12) < 4 / math.sqrt(180 * 200_000)
    counts = torch.histc(u.double().cpu(), 256, 0, 1)
    chi2 = ((counts - 200_000 / 256) ** 2 / (200_000 / 256)).sum()
    assert abs(chi2 - 255) < 4 * math.sqrt(2 * 255)


def test_every_bit_of_the_words_is_fair(device):
    words = rng.bits(rng.key(2, device), (50_000,))
    assert ((words >= 0) & (words < 2**32)).all()
    ones = torch.stack([((words >> i) & 1).double().mean() for i in range(32)])
    assert (ones - 0.5).abs().max() < 4.5 * 0.5 / math.sqrt(50_000)


def test_uniform_between_bounds(device):
    key = rng.key(4, device)
    u = rng.uniform(key, (20_000, 2))
    low, high = torch.tensor([-2.0, 5.0], device=device), torch.tensor([3.0, 5.0], device=device)
    x = rng.uniform(key, (20_000, 2), low=low, high=high)
    assert torch.allclose(x, low + (high - low) * u, rtol=0, atol=3 * tolerance(F32))
    assert ((x >= low) & (x <= high)).all()
    assert (x[:, 1] == 5.0).all()
    assert torch.equal(rng.uniform(key, (9,), low=-1.0, high=1), rng.uniform(key, (9,), low=torch.tensor(-1.0, device=device), high=1.0))
    assert rng.uniform(key, (9,), low=0.0, high=3.0, dtype=F64).dtype == F64
    slope = torch.func.grad(lambda h: rng.uniform(key, (5,), high=h).sum())(torch.tensor(2.0, device=device))
    assert slope.item() == pytest.approx(rng.uniform(key, (5,)).sum().item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_normal_is_normal_and_finite(dtype, device):
    n = 400_000
    z = rng.normal(rng.key(1, device), (n,), dtype)
    assert z.dtype == dtype
    assert torch.isfinite(z).all()
    assert kolmogorov_smirnov(z.cpu(), normal_cdf) < 1.95
    z = z.double()
    for power, moment, spread in ((1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)):
        assert abs((z**power).mean() - moment) < 4 * math.sqrt(spread / n), power
    assert (z.abs() > 4).double().mean().item() == pytest.approx(6.33e-5, rel=0.5)
    # The four numbers of a block come in pairs of one radius: neither they nor their squares may be correlated.
    block = z.reshape(-1, 4)
    for i in range(4):
        for j in range(i):
            assert abs(correlation(block[:, i], block[:, j])) < 4
            assert abs(correlation(block[:, i] ** 2, block[:, j] ** 2)) < 4


def test_extreme_words_give_finite_numbers(device, monkeypatch):
    for word in (0, 2**32 - 1):
        monkeypatch.setattr(rng, "_blocks", lambda key, count, purpose, word=word: torch.full((count, 4), word, dtype=torch.int64, device=device))
        for dtype in (F32, F64):
            assert torch.isfinite(rng.normal(rng.key(0), (8,), dtype)).all()
            assert torch.isfinite(rng.gumbel(rng.key(0), (8,), dtype)).all()
            u = rng.uniform(rng.key(0), (8,), dtype=dtype)
            assert ((u >= 0) & (u < 1)).all()
        assert ((rng.randint(rng.key(0), (8,), -5, 2**31 - 5) - word // 2).abs() <= 5).all()


def test_neighbouring_keys_rows_and_elements_are_uncorrelated(device):
    n = 300
    seeds = torch.stack([rng.normal(rng.key(s, device), (n,)) for s in range(n)])
    rows = rng.normal(rng.fold_in(rng.key(8, device), torch.arange(n, device=device)), (n,))
    children = rng.normal(rng.split(rng.key(9, device), n), (n,))
    for block in (seeds, rows, children):
        assert abs(correlation(block[1:], block[:-1])) < 4
        assert abs(correlation(block[:, 1:], block[:, :-1])) < 4
        assert abs(correlation(block[1:, 1:], block[:-1, :-1])) < 4
        assert abs(correlation(block, block.T)) < 4 * math.sqrt(2)
        assert kolmogorov_smirnov(block[:, 0].cpu(), normal_cdf) < 1.95
    assert abs(correlation(rows, children)) < 4


def test_gumbel_and_categorical_have_their_distributions(device):
    n = 100_000
    for dtype in (F32, F64):
        g = rng.gumbel(rng.key(3, device), (n,), dtype)
        assert g.dtype == dtype
        assert torch.isfinite(g).all()
        assert kolmogorov_smirnov(g.cpu(), lambda x: torch.exp(-torch.exp(-x))) < 1.95
    probabilities = torch.tensor([0.1, 0.0, 0.6, 0.3], device=device)
    keys = rng.split(rng.key(4, device), 4)
    drawn = rng.categorical(keys, probabilities.log().expand(4, n // 4, 4))
    assert drawn.shape == (4, n // 4)
    share = torch.bincount(drawn.flatten(), minlength=4) / n
    assert (share - probabilities).abs().max() < 4 * 0.5 / math.sqrt(n)
    assert share[1] == 0
    assert torch.equal(drawn[2], rng.categorical(keys[2], probabilities.log().expand(n // 4, 4)))


def test_randint_covers_its_range_evenly(device):
    n = 70_000
    x = rng.randint(rng.key(5, device), (n,), -3, 4)
    counts = torch.bincount(x + 3, minlength=7).double()
    assert len(counts) == 7
    assert ((counts - n / 7) ** 2 / (n / 7)).sum() < 6 + 4 * math.sqrt(12)
    assert (rng.randint(rng.key(5, device), (10,), 4, 5) == 4).all()
    high = torch.tensor([1, 10, 2**31], device=device)
    y = rng.randint(rng.key(6, device), (1000, 3), 0, high)
    assert ((y >= 0) & (y < high)).all()
    assert y[:, 2].max() > 2**30
    for low, top in ((3, 3), (5, 2), (0, 2**31 + 1)):
        with pytest.raises(ValueError, match="high - low"):
            rng.randint(rng.key(0), (2,), low, top)


@given(st.integers(0, 2**64 - 1), st.integers(0, 60))
def test_permutation_holds_every_index_once(seed, n):
    got = rng.permutation(rng.key(seed), n)
    assert got.dtype == torch.int64
    assert got.shape == (n,)
    assert torch.equal(torch.sort(got).values, torch.arange(n))
    assert torch.equal(got, torch.argsort(rng.bits(rng.key(seed), (n,)), stable=True))


def test_permutations_are_even_and_break_ties_by_index(device, monkeypatch):
    n = 24_000
    orders = rng.permutation(rng.split(rng.key(7, device), n), 4)
    counts = torch.bincount((orders * torch.tensor([64, 16, 4, 1], device=device)).sum(-1)).double()
    counts = counts[counts > 0]
    assert len(counts) == 24
    assert ((counts - n / 24) ** 2 / (n / 24)).sum() < 23 + 4 * math.sqrt(46)
    monkeypatch.setattr(rng, "bits", lambda key, shape: torch.full(shape, 77, device=device))
    assert torch.equal(rng.permutation(rng.key(0, device), 50), torch.arange(50, device=device))


def test_narrow_types_are_refused():
    for draw in (rng.normal, rng.gumbel, lambda key, shape, dtype: rng.uniform(key, shape, dtype=dtype)):
        with pytest.raises(ValueError, match="float32 or torch.float64"):
            draw(rng.key(0), (2,), torch.float16)


def test_draws_change_nothing_outside():
    before, key = torch.get_rng_state(), rng.key(1)
    kept = key.clone()
    first, second = all_draws(key), all_draws(key)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(key, kept)


def test_compiled_equals_eager(device):
    def play(key: Tensor) -> dict[str, Tensor]:
        return torch.func.vmap(all_draws)(rng.fold_in(key, torch.arange(19, device=key.device)))

    key = rng.key(12, device)
    compiled = torch.compile(play, backend="aot_eager", fullgraph=True)(key)
    for name, value in play(key).items():
        assert torch.equal(compiled[name], value), name


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
def test_generated_kernels_draw_the_same_bits():
    # Long enough for vector code, whose product of an arange and a large constant wraps at 32 bits.
    def play(key: Tensor) -> tuple[Tensor, Tensor]:
        index = torch.arange(77)
        return rng.philox4x32((index, 0, index, 1), key), rng.bits(key, (77,))

    key = rng.key(12)
    for got, expected in zip(torch.compile(play, fullgraph=True)(key), play(key), strict=True):
        assert torch.equal(got, expected)
