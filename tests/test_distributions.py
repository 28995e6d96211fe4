from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import AffineTransform, Independent, Normal, TanhTransform, TransformedDistribution, kl_divergence

from frl import rng
from frl.distributions import NormalParams, Sample, diagonal_normal, log1m_tanh_squared, tanh_normal
from tests.tolerances import tolerance

FLOAT64 = torch.float64
BOXES = [([-1.0, -1.0], [1.0, 1.0]), ([0.0, -math.pi / 4], [5.0, math.pi / 4]), ([-0.1, 0.3], [0.3, 100.0])]


def _params(seed, lead=(), dim=2, dtype=FLOAT64, shared_std=False, device=None):
    mean_key, std_key = rng.split(rng.key(seed, device=device))
    log_std = 0.5 * rng.normal(std_key, (dim,) if shared_std else (*lead, dim), dtype=FLOAT64) - 0.5
    return NormalParams(mean=rng.normal(mean_key, (*lead, dim), dtype=FLOAT64).to(dtype), log_std=log_std.to(dtype))


def _noise(seed, shape, dtype=FLOAT64, device=None):
    return rng.normal(rng.key(seed, device=device), shape, dtype=FLOAT64).to(dtype)


def _oracle(params, low=None, high=None):
    base = Normal(params.mean, params.log_std.exp().expand_as(params.mean))
    if low is None:
        return Independent(base, 1)
    low, high = torch.tensor(low, dtype=FLOAT64), torch.tensor(high, dtype=FLOAT64)
    return Independent(TransformedDistribution(base, [TanhTransform(cache_size=1), AffineTransform((low + high) / 2, (high - low) / 2, cache_size=1)]), 1)


def _fixed(mean, std, dtype=torch.float32):
    return NormalParams(mean=torch.tensor(mean, dtype=dtype), log_std=torch.tensor(std, dtype=dtype).log())


# ---- laws for both families ----

FAMILIES = [diagonal_normal(2), *(tanh_normal(*box) for box in BOXES), tanh_normal([-1, -math.inf], [1, math.inf])]


@pytest.mark.parametrize("dist", FAMILIES, ids=lambda d: d.name)
@given(lead=st.lists(st.integers(1, 3), max_size=3), dtype=st.sampled_from([torch.float32, FLOAT64]), shared_std=st.booleans())
def test_shapes_and_dtypes_for_any_leading_dimensions(dist, lead, dtype, shared_std):
    params, noise = _params(1, tuple(lead), dtype=dtype, shared_std=shared_std), _noise(2, (*lead, 2), dtype)
    sample = dist.sample(params, noise)
    for value in (sample.action, sample.raw, dist.mode(params), dist.inverse(sample.action)):
        assert value.shape == (*lead, 2)
        assert value.dtype == dtype
    for value in (dist.log_prob(params, sample), dist.entropy(params), dist.entropy(params, noise), dist.kl(params, params)):
        assert value.shape == tuple(lead)
        assert value.dtype == dtype
        assert value.isfinite().all()


@pytest.mark.parametrize("dist", FAMILIES, ids=lambda d: d.name)
def test_rows_are_independent_in_the_last_dimension(dist, device):
    params, noise = _params(1, (6,), shared_std=True, device=device), _noise(2, (6, 2), device=device)

    def row(mean, noise):
        p = NormalParams(mean=mean, log_std=params.log_std)
        sample = dist.sample(p, noise)
        return sample.action, dist.log_prob(p, sample), dist.entropy(p), dist.entropy(p, noise)

    got = torch.func.vmap(row, in_dims=-1, out_dims=-1)(params.mean.T, noise.T)
    sample = dist.sample(params, noise)
    expected = (sample.action.T, dist.log_prob(params, sample), dist.entropy(params), dist.entropy(params, noise))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=100 * tolerance(FLOAT64))


@pytest.mark.parametrize("dist", FAMILIES, ids=lambda d: d.name)
def test_gradients_by_central_differences(dist):
    params, noise, other = _params(1, (3,)), _noise(2, (3, 2)), _params(5, (3,))

    def total(mean, log_std):
        p = NormalParams(mean=mean, log_std=log_std)
        sample = dist.sample(p, noise)
        terms = (sample.action.square().sum(-1), dist.log_prob(p, sample), dist.entropy(p), dist.entropy(p, noise), dist.kl(p, other))
        return sum((i + 1) * term.sum() for i, term in enumerate(terms))

    direction = (_noise(3, (3, 2)), _noise(4, (3, 2)))
    grads = torch.func.grad(total, argnums=(0, 1))(*params)
    slope = sum((g * d).sum() for g, d in zip(grads, direction, strict=True))
    h = 1e-5
    ahead, behind = (total(*(p + s * h * d for p, d in zip(params, direction, strict=True))) for s in (1, -1))
    torch.testing.assert_close(slope, (ahead - behind) / (2 * h), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dist", FAMILIES, ids=lambda d: d.name)
def test_the_score_is_that_of_the_raw_value(dist):
    params = _params(1, (3,))
    sample = dist.sample(params, _noise(2, (3, 2)))
    clipped = sample._replace(action=torch.zeros_like(sample.action))
    assert torch.equal(dist.log_prob(params, sample), dist.log_prob(params, clipped))
    assert torch.equal(dist.log_prob(params, sample), dist.log_prob(params, sample.raw))
    assert torch.equal(dist.squash(sample.raw), sample.action)


@pytest.mark.parametrize("dist", [FAMILIES[0], FAMILIES[2], FAMILIES[4]], ids=["normal", "box", "mixed"])
def test_inverse_undoes_squash(dist):
    raw = torch.linspace(-3, 3, 14, dtype=FLOAT64).reshape(7, 2)
    torch.testing.assert_close(dist.inverse(dist.squash(raw)), raw, rtol=0, atol=1e-12)


def test_compiled_equals_eager():
    dist = tanh_normal([0.0, -math.inf], [5.0, math.inf])
    params, noise = _params(1, (6,)), _noise(2, (6, 2))

    def row(mean, log_std, noise):
        p = NormalParams(mean=mean, log_std=log_std)
        sample = dist.sample(p, noise)
        return dist.log_prob(p, sample) + sample.action.sum() + dist.entropy(p) + dist.kl(p, NormalParams(mean=noise, log_std=log_std))

    columns = torch.func.vmap(torch.func.grad(row, argnums=(0, 1)), in_dims=-1, out_dims=-1)
    args = (params.mean.T, params.log_std.T, noise.T)
    for a, b in zip(torch.compile(columns, backend="aot_eager", fullgraph=True)(*args), columns(*args), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


# ---- against torch.distributions ----


@pytest.mark.parametrize("shared_std", [False, True])
def test_normal_against_torch(shared_std):
    dist, p, q = diagonal_normal(2), _params(1, (5,), shared_std=shared_std), _params(2, (5,), shared_std=shared_std)
    sample = dist.sample(p, _noise(3, (5, 2)))
    atol = 100 * tolerance(FLOAT64)
    torch.testing.assert_close(dist.log_prob(p, sample), _oracle(p).log_prob(sample.action), rtol=0, atol=atol)
    torch.testing.assert_close(dist.entropy(p), _oracle(p).entropy(), rtol=0, atol=atol)
    torch.testing.assert_close(dist.kl(p, q), kl_divergence(_oracle(p), _oracle(q)), rtol=0, atol=atol)
    assert not torch.allclose(dist.kl(p, q), dist.kl(q, p))
    assert torch.equal(dist.mode(p), p.mean)


@pytest.mark.parametrize(("low", "high"), BOXES)
def test_tanh_normal_against_torch(low, high):
    dist, p, q = tanh_normal(low, high), _params(1, (5,)), _params(2, (5,))
    oracle, base = _oracle(p, low, high), Normal(p.mean, p.log_std.exp())
    noise = _noise(3, (5, 2))
    sample = dist.sample(p, noise)
    expected = torch.tensor(low) + (torch.tensor(high) - torch.tensor(low)) * (torch.tanh(sample.raw) + 1) / 2
    torch.testing.assert_close(sample.action, expected.to(FLOAT64), rtol=0, atol=1e-5)
    torch.testing.assert_close(dist.log_prob(p, sample), oracle.log_prob(dist.squash(sample.raw)), rtol=0, atol=1e-9)
    torch.testing.assert_close(dist.kl(p, q), kl_divergence(Independent(base, 1), Independent(Normal(q.mean, q.log_std.exp()), 1)), rtol=0, atol=1e-12)


def test_the_density_integrates_to_one():
    dist, p = tanh_normal([0.0], [10.0]), NormalParams(mean=torch.tensor([0.3], dtype=FLOAT64), log_std=torch.tensor([-0.7], dtype=FLOAT64))
    action = torch.linspace(0, 10, 20001, dtype=FLOAT64)[1:-1].unsqueeze(-1)
    density = dist.log_prob(p, dist.inverse(action)).exp()
    torch.testing.assert_close(torch.trapezoid(density, action.squeeze(-1)), torch.ones((), dtype=FLOAT64), rtol=0, atol=1e-7)


# ---- entropy ----


@pytest.mark.parametrize(("mean", "std", "error"), [(0.0, 0.01, 1e-8), (0.7, 0.3, 1e-8), (-2.0, 1.0, 1e-7), (0.4, 2.5, 1e-6), (0.0, math.exp(2), 1e-2)])
def test_squashed_entropy_is_the_integral(mean, std, error):
    dist, p = tanh_normal([0.0], [10.0]), _fixed([mean], [std], FLOAT64)
    z = torch.linspace(-10, 10, 200001, dtype=FLOAT64)
    raw = (mean + std * z).unsqueeze(-1)
    log_prob = dist.log_prob(p, raw)
    integral = torch.trapezoid(-log_prob * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi), z)
    torch.testing.assert_close(dist.entropy(p), integral, rtol=0, atol=error)


def test_squashed_entropy_from_noise_is_unbiased():
    dist, p = tanh_normal([0.0, -1.0], [10.0, 3.0]), _fixed([0.3, -1.0], [0.8, 0.5], FLOAT64)
    noise = _noise(1, (20000, 2))
    estimate = dist.entropy(p, noise)
    error = 5 * estimate.std() / math.sqrt(len(estimate))
    assert (estimate.mean() - dist.entropy(p)).abs() < error
    surprise = torch.func.grad(lambda mean: -dist.log_prob(p._replace(mean=mean), dist.sample(p._replace(mean=mean), noise)).sum())(p.mean)
    entropy = torch.func.grad(lambda mean: dist.entropy(p._replace(mean=mean), noise).sum())(p.mean)
    torch.testing.assert_close(surprise, entropy, rtol=1e-12, atol=1e-9)


def test_a_flat_box_bounds_the_entropy():
    # No density on a box has more entropy than the uniform one.
    dist = tanh_normal([0.0, -2.0], [10.0, 2.0])
    for std in (0.2, 0.8, 1.5, 4.0):
        assert dist.entropy(_fixed([0.0, 0.1], [std, std], FLOAT64)) < math.log(10) + math.log(4)


# ---- KL ----


@pytest.mark.parametrize("dist", FAMILIES, ids=lambda d: d.name)
@pytest.mark.parametrize("std", [0.2, 0.05, 0.02, 0.01])
def test_kl_of_identical_policies_is_exactly_zero(dist, std):
    p = _fixed([0.3, -1.7], [std, std])
    assert dist.kl(p, p) == 0


def test_kl_of_a_shift_by_one_std():
    p, q = _fixed([0.0], [0.01]), _fixed([0.01], [0.01])
    torch.testing.assert_close(diagonal_normal(1).kl(p, q), torch.tensor(0.5), rtol=1e-5, atol=0)


@given(seed=st.integers(0, 10**6), scale=st.sampled_from([1e-4, 1e-2, 1.0]))
def test_kl_is_not_negative(seed, scale):
    p, d = _params(seed, (4,), dtype=torch.float32), _params(seed + 1, (4,), dtype=torch.float32)
    q = NormalParams(mean=p.mean + scale * d.mean, log_std=p.log_std + scale * d.log_std)
    assert (diagonal_normal(2).kl(p, q) >= -scale * 8 * torch.finfo(torch.float32).eps).all()


# ---- saturation ----


def test_log_prob_of_a_saturated_sample():
    dist, raw = tanh_normal([-1.0], [1.0]), torch.tensor([20.0])
    sample = Sample(action=dist.squash(raw), raw=raw)
    assert sample.action == 1

    def score(mean, std):
        return dist.log_prob(NormalParams(mean=mean, log_std=std.log()), sample)

    mean, std = torch.tensor([20.0]), torch.tensor([1.0])
    torch.testing.assert_close(score(mean, std), torch.tensor(37.694767), rtol=0, atol=1e-5)
    d_mean, d_std = torch.func.grad(score, argnums=(0, 1))(mean, std)
    assert d_mean == 0
    torch.testing.assert_close(d_std, torch.tensor([-1.0]), rtol=0, atol=1e-6)
    assert score(mean, std) - score(mean, std) == 0


@pytest.mark.parametrize("dtype", [torch.float32, FLOAT64])
@pytest.mark.parametrize("action", [-1.0, 1.0])
def test_rescoring_a_saturated_action_is_finite(dtype, action):
    dist, p = tanh_normal([-1.0], [1.0]), _fixed([20.0], [1.0], dtype)
    raw = dist.inverse(torch.tensor([action], dtype=dtype))
    value, grad = torch.func.grad_and_value(lambda mean: dist.log_prob(p._replace(mean=mean), raw))(p.mean)[::-1]
    assert raw.isfinite().all()
    assert raw.sign() == action
    assert value.isfinite()
    assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, FLOAT64])
def test_log_jacobian_is_exact_everywhere(dtype):
    u = torch.linspace(-60, 60, 481, dtype=dtype)
    wide = u.to(torch.float64).abs()
    expected = 2 * (math.log(2) - wide - torch.log1p(torch.exp(-2 * wide)))
    torch.testing.assert_close(log1m_tanh_squared(u).to(FLOAT64), expected, rtol=tolerance(dtype), atol=4 * tolerance(dtype))
    slope = torch.func.vmap(torch.func.grad(log1m_tanh_squared))(u)
    torch.testing.assert_close(slope, -2 * torch.tanh(u), rtol=0, atol=4 * tolerance(dtype))
    curvature = torch.func.grad(torch.func.grad(log1m_tanh_squared))(torch.zeros((), dtype=dtype))
    torch.testing.assert_close(curvature, torch.full((), -2.0, dtype=dtype), rtol=0, atol=4 * tolerance(dtype))


# ---- boxes ----


@pytest.mark.parametrize(("low", "high", "action", "score"), [(-2.0, 2.0, 1.8102965, -1.0262054), (0.0, 10.0, 9.5257413, -1.9424961)])
def test_log_prob_has_the_scale_of_the_box(low, high, action, score):
    dist, p = tanh_normal([low], [high]), _fixed([0.0], [1.0])
    sample = dist.sample(p, torch.tensor([1.5]))
    torch.testing.assert_close(sample.action, torch.tensor([action]), rtol=1e-6, atol=0)
    torch.testing.assert_close(dist.log_prob(p, sample), torch.tensor(score), rtol=0, atol=2e-6)


def test_mode_and_sample_share_one_map_into_the_box():
    dist = tanh_normal([0.0, -2.0], [10.0, 2.0])
    for raw, action in ((0.0, [5.0, 0.0]), (50.0, [10.0, 2.0]), (-50.0, [0.0, -2.0])):
        p = _fixed([raw, raw], [1.0, 1.0])
        assert torch.equal(dist.mode(p), torch.tensor(action))
        assert torch.equal(dist.sample(p, torch.zeros(2)).action, torch.tensor(action))


def test_asymmetric_bounds():
    dist = tanh_normal([0.0, -math.pi / 4], [5.0, math.pi / 4])
    for unit, action in ((-50.0, [0.0, -0.785398]), (0.0, [2.5, 0.0]), (50.0, [5.0, 0.785398])):
        torch.testing.assert_close(dist.squash(torch.full((2,), unit)), torch.tensor(action), rtol=0, atol=1e-6)
    p, raw = _fixed([0.0, 0.0], [1.0, 1.0], FLOAT64), torch.zeros(2, dtype=FLOAT64)
    expected = diagonal_normal(2).log_prob(p, raw) - math.log(2.5) - math.log(math.pi / 4)
    torch.testing.assert_close(dist.log_prob(p, raw), expected, rtol=0, atol=1e-12)
    assert torch.equal(tanh_normal([-1, 0, 0], [1, 1, 1]).squash(torch.zeros(3)), torch.tensor([0.0, 0.5, 0.5]))


@given(low=st.floats(-100, 100, width=32), width=st.floats(2**-7, 100, width=32), raw=st.floats(-60, 60, width=32))
def test_actions_lie_inside_the_box(low, width, raw):
    low, high = float(np.float32(low)), float(np.float32(low) + np.float32(width))
    for lows, highs in (([low], [high]), ([low, -1.0], [high, 2.0])):
        for value in (raw, -60.0, 60.0):
            action = tanh_normal(lows, highs).squash(torch.full((len(lows),), value))
            assert (action >= torch.tensor(lows, dtype=torch.float32)).all()
            assert (action <= torch.tensor(highs, dtype=torch.float32)).all()


@pytest.mark.parametrize("bound", [math.inf, 3.4e38, float(np.finfo(np.float32).max), 1e30])
def test_unbounded_dimensions_are_plain_gaussians(bound):
    free, normal = tanh_normal([-bound] * 2, [bound] * 2), diagonal_normal(2)
    p, noise = _params(1, (4,), dtype=torch.float32), _noise(2, (4, 2), torch.float32)
    sample = free.sample(p, noise)
    assert torch.equal(sample.action, normal.sample(p, noise).action)
    assert torch.equal(free.log_prob(p, sample), normal.log_prob(p, sample))
    assert torch.equal(free.entropy(p, noise), normal.entropy(p))
    assert torch.equal(free.entropy(p), normal.entropy(p))


def test_bounded_and_unbounded_dimensions_side_by_side():
    mixed = tanh_normal([-1.0, -math.inf], [1.0, math.inf])
    p, noise = _params(1, (4,)), _noise(2, (4, 2))
    sample = mixed.sample(p, noise)
    torch.testing.assert_close(sample.action, torch.stack([torch.tanh(sample.raw[:, 0]), sample.raw[:, 1]], -1), rtol=0, atol=0)
    first, second = (NormalParams(mean=p.mean[:, i : i + 1], log_std=p.log_std[:, i : i + 1]) for i in range(2))
    expected = tanh_normal([-1.0], [1.0]).log_prob(first, sample.raw[:, :1]) + diagonal_normal(1).log_prob(second, sample.raw[:, 1:])
    torch.testing.assert_close(mixed.log_prob(p, sample), expected, rtol=0, atol=1e-12)
    huge = torch.tensor([0.5, 1e6], dtype=FLOAT64)
    grad = torch.func.grad(lambda raw: mixed.log_prob(NormalParams(mean=raw.detach(), log_std=torch.zeros_like(raw)), raw) + mixed.squash(raw).sum())(huge)
    assert grad.isfinite().all()
    assert grad[1] == 1


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        ([0.0], [math.inf], "action dimension 0 has one bound only"),
        ([-1.0, -math.inf], [1.0, 2.0], "action dimension 1 has one bound only"),
        ([-1.0], [3.4e38], "action dimension 0 has one bound only"),
        ([-1.0, 2.0], [1.0, 2.0], "action dimension 1 needs low < high"),
        ([math.nan], [1.0], "action dimension 0 needs low < high"),
        ([-1.0], [1.0, 1.0], "same length"),
        ([], [], "same length"),
        ([[-1.0]], [[1.0]], "vectors"),
    ],
)
def test_bad_boxes_are_refused(low, high, text):
    with pytest.raises(ValueError, match=text):
        tanh_normal(low, high)


@pytest.mark.parametrize("dim", [0, -1, 2.0, True])
def test_bad_action_dims_are_refused(dim):
    with pytest.raises(ValueError, match="action_dim"):
        diagonal_normal(dim)


def test_the_stored_action_may_be_clipped_without_moving_the_ratio():
    dist, p = diagonal_normal(1), _fixed([0.0], [5.0])
    sample = dist.sample(p, torch.tensor([0.6]))
    received = sample._replace(action=sample.action.clamp(-1, 1))
    torch.testing.assert_close(sample.raw, torch.tensor([3.0]), rtol=1e-6, atol=0)
    assert received.action == 1
    assert torch.exp(dist.log_prob(p, received) - dist.log_prob(p, sample)) == 1
    torch.testing.assert_close(torch.exp(dist.log_prob(p, received.action) - dist.log_prob(p, sample)), torch.tensor(1.17351), rtol=1e-5, atol=0)
