"""Categorical distributions: torch.distributions is the oracle."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Categorical, kl_divergence

from frl import rng
from frl.distributions import CategoricalParams, Sample, categorical, multi_categorical
from tests.tolerances import tolerance

FLOAT64 = torch.float64
ATOL = 100 * tolerance(FLOAT64)
NVEC, STARTS = [2, 5, 3], [-1, 10, 0]
FAMILIES = [categorical(4, -1), categorical(1, 2), multi_categorical([3, 3], [4, 4]), multi_categorical(NVEC, STARTS), multi_categorical([1, 2])]
IDS = ["categorical", "one-choice", "multi-equal", "multi-mixed", "multi-one"]
SIZES = [torch.tensor(n) for n in (4, 1, [3, 3], NVEC, [1, 2])]
EVENTS = [(), (), (2,), (3,), (2,)]
CASES = pytest.mark.parametrize(("dist", "event"), list(zip(FAMILIES, EVENTS, strict=True)), ids=IDS)


def _logits(seed, lead, dist, dtype=FLOAT64, device=None):
    return CategoricalParams(logits=(1.5 * rng.normal(rng.key(seed, device=device), (*lead, dist.noise_dim), dtype=FLOAT64)).to(dtype))


def _noise(seed, lead, dist, dtype=FLOAT64, device=None):
    return dist.draw_noise(rng.key(seed, device=device), (*lead, dist.noise_dim), dtype=dtype)


def _oracles(params, nvec):
    return [Categorical(logits=part) for part in torch.split(params.logits, nvec, -1)]


def _hessian(fn, x):
    return torch.func.jacrev(torch.func.grad(fn))(x)


# ---- laws for every family ----


@CASES
@given(lead=st.lists(st.integers(1, 3), max_size=3), dtype=st.sampled_from([torch.float32, FLOAT64]))
def test_shapes_and_dtypes_for_any_leading_dimensions(dist, event, lead, dtype):
    lead = tuple(lead)
    params, noise = _logits(1, lead, dist, dtype), _noise(2, lead, dist, dtype)
    sample = dist.sample(params, noise)
    for value in (sample.action, sample.raw, dist.mode(params), dist.squash(sample.raw), dist.inverse(sample.action)):
        assert value.shape == (*lead, *event)
        assert value.dtype == torch.int64
    for value in (dist.log_prob(params, sample), dist.entropy(params), dist.entropy(params, noise), dist.kl(params, params)):
        assert value.shape == lead
        assert value.dtype == dtype
        assert value.isfinite().all()


@CASES
def test_rows_in_the_last_dimension_equal_rows_first(dist, event, device):
    params, other, noise = _logits(1, (6,), dist, device=device), _logits(3, (6,), dist, device=device), _noise(2, (6,), dist, device=device)

    def row(logits, other, noise):
        p = CategoricalParams(logits=logits)
        sample = dist.sample(p, noise)
        return sample.action, sample.raw, dist.log_prob(p, sample), dist.entropy(p), dist.kl(p, CategoricalParams(logits=other)), dist.mode(p)

    got = torch.func.vmap(row, in_dims=-1, out_dims=-1)(params.logits.T, other.logits.T, noise.T)
    sample = dist.sample(params, noise)
    expected = (sample.action, sample.raw, dist.log_prob(params, sample), dist.entropy(params), dist.kl(params, other), dist.mode(params))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.movedim(-1, 0), b, rtol=0, atol=ATOL)


@CASES
def test_gradients_by_central_differences(dist, event):
    params, other = _logits(1, (3,), dist), _logits(5, (3,), dist)
    sample = dist.sample(params, _noise(2, (3,), dist))

    def total(logits):
        p = CategoricalParams(logits=logits)
        terms = (dist.log_prob(p, sample), dist.entropy(p), dist.kl(p, other), dist.kl(other, p))
        return sum((i + 1) * term.sum() for i, term in enumerate(terms))

    direction = rng.normal(rng.key(4), tuple(params.logits.shape), dtype=FLOAT64)
    slope = (torch.func.grad(total)(params.logits) * direction).sum()
    h = 1e-5
    ahead, behind = (total(params.logits + s * h * direction) for s in (1, -1))
    torch.testing.assert_close(slope, (ahead - behind) / (2 * h), rtol=1e-7, atol=1e-8)


def test_compiled_equals_eager():
    dist = multi_categorical(NVEC, STARTS)
    params, noise = _logits(1, (6,), dist), _noise(2, (6,), dist)

    def row(logits, noise):
        p = CategoricalParams(logits=logits)
        sample = dist.sample(p, noise)
        score = dist.log_prob(p, sample) + dist.entropy(p) + dist.kl(p, CategoricalParams(logits=noise))
        return score, (sample.action, dist.mode(p))

    columns = torch.func.vmap(torch.func.grad(row, has_aux=True), in_dims=-1, out_dims=-1)
    args = (params.logits.T, noise.T)
    got, expected = torch.compile(columns, backend="aot_eager", fullgraph=True)(*args), columns(*args)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@CASES
def test_noise_decides_the_sample(dist, event):
    params, noise = _logits(1, (5,), dist), _noise(2, (5,), dist)
    before = (params.logits.clone(), noise.clone())
    first, second = (dist.sample(params, noise) for _ in range(2))
    assert torch.equal(first.action, second.action)
    assert torch.equal(dist.squash(first.raw), first.action)
    assert torch.equal(dist.inverse(first.action), first.raw)
    assert torch.equal(params.logits, before[0])
    assert torch.equal(noise, before[1])


# ---- against torch.distributions ----


def test_categorical_against_torch():
    dist, p, q = categorical(6, 3), _logits(1, (50,), categorical(6)), _logits(2, (50,), categorical(6))
    sample = dist.sample(p, _noise(3, (50,), dist))
    oracle = Categorical(logits=p.logits)
    torch.testing.assert_close(dist.log_prob(p, sample), oracle.log_prob(sample.action - 3), rtol=0, atol=ATOL)
    torch.testing.assert_close(dist.entropy(p), oracle.entropy(), rtol=0, atol=ATOL)
    torch.testing.assert_close(dist.kl(p, q), kl_divergence(oracle, Categorical(logits=q.logits)), rtol=0, atol=ATOL)
    assert not torch.allclose(dist.kl(p, q), dist.kl(q, p))
    assert torch.equal(dist.mode(p), p.logits.argmax(-1) + 3)


@pytest.mark.parametrize("nvec", [NVEC, [4, 4]])
def test_multi_categorical_against_torch(nvec):
    dist = multi_categorical(nvec, [7 * i - 1 for i in range(len(nvec))])
    p, q = _logits(1, (50,), dist), _logits(2, (50,), dist)
    sample = dist.sample(p, _noise(3, (50,), dist))
    pairs = list(zip(_oracles(p, nvec), _oracles(q, nvec), strict=True))
    log_prob = sum(o.log_prob(sample.raw[:, i]) for i, (o, _) in enumerate(pairs))
    torch.testing.assert_close(dist.log_prob(p, sample), log_prob, rtol=0, atol=ATOL)
    torch.testing.assert_close(dist.entropy(p), sum(o.entropy() for o, _ in pairs), rtol=0, atol=ATOL)
    torch.testing.assert_close(dist.kl(p, q), sum(kl_divergence(a, b) for a, b in pairs), rtol=0, atol=ATOL)
    singles = [categorical(n).mode(CategoricalParams(logits=part)) for n, part in zip(nvec, torch.split(p.logits, nvec, -1), strict=True)]
    assert torch.equal(dist.inverse(dist.mode(p)), torch.stack(singles, -1))


def test_golden_values():
    dist, p = categorical(3), CategoricalParams(logits=torch.tensor([0.2, 0.3, 0.5], dtype=FLOAT64).log() + 7)
    q = CategoricalParams(logits=torch.tensor([0.5, 0.25, 0.25], dtype=FLOAT64).log())
    assert dist.log_prob(p, torch.tensor(2)).item() == pytest.approx(math.log(0.5), abs=1e-14)
    assert dist.entropy(p).item() == pytest.approx(1.0296530140645737, abs=1e-14)
    assert dist.kl(p, q).item() == pytest.approx(0.2 * math.log(0.4) + 0.3 * math.log(1.2) + 0.5 * math.log(2), abs=1e-14)
    assert dist.sample(p, torch.tensor([2.0, 0.1, 1.0], dtype=FLOAT64)).raw == 0
    assert dist.sample(p, torch.tensor([0.2, 1.6, 1.0], dtype=FLOAT64)).raw == 1


@pytest.mark.parametrize("dtype", [torch.float32, FLOAT64])
def test_samples_have_the_probabilities(dtype):
    dist, p = multi_categorical([3, 2]), CategoricalParams(logits=torch.tensor([0.1, 0.3, 0.6, 0.25, 0.75], dtype=dtype).log())
    count = 40000
    raw = dist.sample(p, _noise(1, (count,), dist, dtype)).raw
    expected = torch.tensor([0.1, 0.3, 0.6]).outer(torch.tensor([0.25, 0.75]))
    for i in range(3):
        for j in range(2):
            share = ((raw[:, 0] == i) & (raw[:, 1] == j)).float().mean()
            assert (share - expected[i, j]).abs() < 5 * math.sqrt(expected[i, j].item() / count)


def test_the_likelihood_ratio_gradient_is_that_of_the_expectation():
    dist, logits = categorical(3), torch.tensor([0.3, -1.0, 0.5], dtype=FLOAT64)
    reward = torch.tensor([1.0, -2.0, 0.5], dtype=FLOAT64)
    raw = dist.sample(CategoricalParams(logits=logits), _noise(1, (60000,), dist)).raw

    def surrogate(x):
        return (dist.log_prob(CategoricalParams(logits=x), raw) * reward[raw]).mean()

    exact = torch.func.grad(lambda x: (torch.softmax(x, -1) * reward).sum())(logits)
    torch.testing.assert_close(torch.func.grad(surrogate)(logits), exact, rtol=0, atol=0.02)


# ---- starts: the environment gets its own names, the score is the index's ----


@pytest.mark.parametrize("space", [spaces.Discrete(3, start=-1), spaces.Discrete(2, start=10), spaces.Discrete(1, start=2)])
def test_only_legal_actions_of_a_discrete_space(space):
    dist = categorical(int(space.n), int(space.start))
    p = _logits(1, (200,), dist)
    sample = dist.sample(p, _noise(2, (200,), dist))
    assert set(sample.action.tolist()) == set(range(space.start, space.start + space.n))
    assert set(sample.raw.tolist()) == set(range(space.n))
    for action in (*sample.action, *dist.mode(p)):
        assert space.contains(action.numpy())
    oracle = Categorical(logits=p.logits).log_prob(sample.raw)
    torch.testing.assert_close(dist.log_prob(p, sample), oracle, rtol=0, atol=ATOL)
    torch.testing.assert_close(dist.log_prob(p, sample.raw), oracle, rtol=0, atol=ATOL)
    torch.testing.assert_close(dist.log_prob(p, sample.raw.to(torch.float32)), oracle, rtol=0, atol=ATOL)


def test_only_legal_actions_of_a_multi_discrete_space():
    space = spaces.MultiDiscrete(NVEC, start=STARTS)
    dist = multi_categorical(space.nvec, space.start)
    p = _logits(1, (300,), dist)
    sample = dist.sample(p, _noise(2, (300,), dist))
    for action in (*sample.action, *dist.mode(p)):
        assert space.contains(action.numpy())
    assert sample.raw.amin(0).tolist() == [0, 0, 0]
    assert sample.raw.amax(0).tolist() == [n - 1 for n in NVEC]
    assert torch.equal(sample.action - torch.tensor(STARTS), sample.raw)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@CASES
def test_actions_are_legal_for_any_parameters(dist, event, bad):
    p = CategoricalParams(logits=torch.full((4, dist.noise_dim), bad))
    sample = dist.sample(p, _noise(1, (4,), dist, torch.float32))
    sizes = SIZES[FAMILIES.index(dist)]
    for raw in (sample.raw, dist.inverse(dist.mode(p))):
        assert (raw >= 0).all()
        assert (raw < sizes).all()


def test_one_choice_is_certain():
    dist, p = categorical(1, 2), CategoricalParams(logits=torch.tensor([[3.0], [-40.0]]))
    sample = dist.sample(p, torch.tensor([[0.3], [-2.0]]))
    assert sample.action.tolist() == [2, 2]
    for value in (dist.log_prob(p, sample), dist.entropy(p), dist.kl(p, p)):
        assert not value.any()
    assert not torch.func.grad(lambda x: dist.log_prob(CategoricalParams(logits=x), sample).sum())(p.logits).any()


# ---- KL and extremes ----


@CASES
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([1e-2, 1.0, 30.0]))
def test_kl_of_identical_policies_is_exactly_zero(dist, event, seed, scale):
    p = CategoricalParams(logits=scale * _logits(seed, (3,), dist, torch.float32).logits)
    assert not dist.kl(p, p).any()


def test_kl_has_the_fisher_information_as_its_curvature():
    dist, x = categorical(3), torch.tensor([0.3, -1.0, 0.5], dtype=FLOAT64)
    p = CategoricalParams(logits=x)
    hessian = _hessian(lambda y: dist.kl(p, CategoricalParams(logits=y)), x)
    prob = torch.softmax(x, -1)
    torch.testing.assert_close(hessian, torch.diag(prob) - prob.outer(prob), rtol=0, atol=1e-12)
    other = _hessian(lambda y: dist.kl(CategoricalParams(logits=y), p), x)
    torch.testing.assert_close(other, hessian, rtol=0, atol=1e-12)


@given(seed=st.integers(0, 10**6), scale=st.sampled_from([1e-4, 1e-2, 1.0]))
def test_kl_is_not_negative(seed, scale):
    dist = categorical(5)
    p, d = _logits(seed, (4,), dist, torch.float32), _logits(seed + 1, (4,), dist, torch.float32)
    assert (dist.kl(p, CategoricalParams(logits=p.logits + scale * d.logits)) >= -8 * torch.finfo(torch.float32).eps).all()


def test_impossible_choices_have_no_weight_and_no_gradient():
    dist, full = categorical(4), categorical(3)
    x = torch.tensor([0.3, -math.inf, 1.0, -0.5], dtype=FLOAT64)
    y = torch.tensor([0.1, -math.inf, 0.0, 0.7], dtype=FLOAT64)
    keep = [0, 2, 3]
    p, q, small_p, small_q = (CategoricalParams(logits=z) for z in (x, y, x[keep], y[keep]))
    torch.testing.assert_close(dist.entropy(p), full.entropy(small_p), rtol=0, atol=ATOL)
    torch.testing.assert_close(dist.kl(p, q), full.kl(small_p, small_q), rtol=0, atol=ATOL)
    assert dist.log_prob(p, torch.tensor(1)) == -math.inf
    assert dist.kl(CategoricalParams(logits=torch.zeros(4, dtype=FLOAT64)), q) == math.inf
    assert (dist.sample(p, _noise(1, (500,), dist)).raw != 1).all()

    def total(z):
        r = CategoricalParams(logits=z)
        return dist.entropy(r) + dist.kl(r, q) + dist.kl(q, r) + dist.log_prob(r, torch.tensor(2))

    grad = torch.func.grad(total)(x)
    assert grad.isfinite().all()
    assert grad[1] == 0


@pytest.mark.parametrize("dtype", [torch.float32, FLOAT64])
def test_nearly_certain_choices_are_finite(dtype):
    dist, p = categorical(3), CategoricalParams(logits=torch.tensor([0.0, 300.0, -1e4], dtype=dtype))
    q = CategoricalParams(logits=p.logits.flip(-1))
    for index in range(3):
        grad, value = torch.func.grad_and_value(lambda x, i=index: dist.log_prob(CategoricalParams(logits=x), torch.tensor(i)))(p.logits)
        assert value.isfinite()
        assert grad.isfinite().all()
    assert dist.log_prob(p, torch.tensor(2)).item() == pytest.approx(-10300.0, rel=tolerance(dtype))
    assert dist.entropy(p).item() == pytest.approx(0.0, abs=1e-30)
    assert dist.kl(q, p).isfinite()


def test_the_ratio_of_an_unchanged_policy_is_one():
    dist, p = categorical(3, 10), _logits(1, (64,), categorical(3), torch.float32)
    sample = dist.sample(p, _noise(2, (64,), dist, torch.float32))
    stored = dist.log_prob(p, sample)
    again = dist.log_prob(p, Sample(action=sample.action, raw=dist.inverse(sample.action)))
    assert torch.equal(torch.exp(again - stored), torch.ones(64))


# ---- refusals ----


@pytest.mark.parametrize(
    ("n", "start", "text"), [(0, 0, "n must be"), (-1, 0, "n must be"), (2.0, 0, "n must be"), (True, 0, "n must be"), (2, 0.5, "start"), (2, False, "start")]
)
def test_bad_choices_are_refused(n, start, text):
    with pytest.raises(ValueError, match=text):
        categorical(n, start)


@pytest.mark.parametrize(
    ("nvec", "start", "text"),
    [
        ([], None, "nvec"),
        ([2, 0], None, r"nvec\[1\]"),
        (3, None, "nvec"),
        ("23", None, "nvec"),
        ([[2, 3]], None, r"nvec\[0\]"),
        ([2, 3], [0], "one entry"),
        ([2], [0.5], r"start\[0\]"),
    ],
)
def test_bad_lists_of_choices_are_refused(nvec, start, text):
    with pytest.raises(ValueError, match=text):
        multi_categorical(nvec, start)


def test_numpy_integers_are_accepted():
    assert categorical(np.int64(3), np.int64(1)).noise_dim == 3  # pyright: ignore[reportArgumentType]
    assert multi_categorical(np.array([2, 3])).noise_dim == 5
