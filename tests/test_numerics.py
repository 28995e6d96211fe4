"""Values and gradients at the points where the plain formulas break, and derivatives by central differences elsewhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from frl import numerics
from tests.tolerances import tolerance

INF = math.inf
NAN = math.nan


def grad(fn, *args: Tensor) -> tuple[Tensor, ...]:
    return torch.func.grad(lambda *xs: fn(*xs).sum(), argnums=tuple(range(len(args))))(*args)


def same(got: Tensor, expected) -> bool:
    return torch.equal(got, torch.tensor(expected, dtype=got.dtype, device=got.device))


@pytest.mark.parametrize(
    ("fn", "points"),
    [
        (lambda x: numerics.safe_norm(x.reshape(2, 2)), [0.3, -0.4, 2.0, 1.5]),
        (lambda x: numerics.safe_norm(x.reshape(2, 1, 2), dim=(0, 2), keepdim=True), [0.3, -0.4, 2.0, 1.5]),
        (numerics.safe_sqrt, [0.5, 3.0, -2.0]),
        (numerics.safe_log, [0.5, 3.0, 10.0]),
        (lambda x: numerics.safe_div(x[:2], x[2:]), [1.0, -3.0, 0.7, -2.0]),
        (numerics.log1mexp, [-0.1, -0.6, -0.8, -5.0]),
        (lambda x: numerics.masked_mean(x, torch.tensor([True, False, True])) * x, [1.0, 2.0, -4.0]),
        (lambda x: numerics.masked_var(x, torch.tensor([True, False, True, True]), correction=1), [1.0, 2.0, -4.0, 0.5]),
        (lambda x: numerics.masked_std(x, torch.tensor([True, False, True, True])), [1.0, 2.0, -4.0, 0.5]),
        (lambda x: numerics.coalesce_nonfinite(x) ** 3, [1.0, -2.0]),
        (lambda x: numerics.clamp_log_std(x) ** 3, [1.0, -2.0, 3.0, -7.0]),
        (lambda x: numerics.clip(x, -2.5, x.new_tensor(2.0)) ** 3, [1.0, -2.0, 3.0, -7.0]),
    ],
)
def test_first_and_second_derivatives_match_central_differences(fn, points):
    x = torch.tensor(points, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(fn, (x,))
    assert torch.autograd.gradgradcheck(fn, (x,))


def test_clip_at_its_bounds(device):
    x = torch.tensor([-2.0, -1.0, 0.0, 3.0, 3.5, INF, -INF, NAN], device=device)
    low, high = torch.tensor(-1.0, device=device), 3.0
    assert same(numerics.clip(x, low, high)[:7], [-1.0, -1.0, 0.0, 3.0, 3.0, 3.0, -1.0])
    assert numerics.clip(x, low, high)[7].isnan()
    assert same(grad(lambda v: numerics.clip(v, low, high), x)[0][:7], [0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0])


def test_norm_at_zero_and_beside_it(device):
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]], device=device)
    assert same(numerics.safe_norm(x), [0.0, 5.0])
    assert torch.allclose(-grad(numerics.safe_norm, x)[0], torch.tensor([[0.0, 0.0], [-0.6, -0.8]], device=device), rtol=tolerance(torch.float32))
    hessian = torch.func.hessian(lambda v: numerics.safe_norm(v))(torch.zeros(2, device=device))
    assert same(hessian, [[0.0, 0.0], [0.0, 0.0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norm_over_the_whole_range_of_the_dtype(dtype, device):
    big, small = torch.finfo(dtype).max / 2, torch.finfo(dtype).tiny
    for scale in (big, 1.0, small):
        x = torch.tensor([0.6, -0.8, 0.0], dtype=dtype, device=device) * scale
        direction = torch.tensor([0.6, -0.8, 0.0], dtype=dtype, device=device)
        assert numerics.safe_norm(x).item() / scale == pytest.approx(1.0, rel=tolerance(dtype, 4))
        assert torch.allclose(grad(numerics.safe_norm, x)[0], direction, rtol=tolerance(dtype, 4), atol=0)
    over = torch.full((4,), torch.finfo(dtype).max, dtype=dtype, device=device)
    assert numerics.safe_norm(over) == INF
    assert torch.isfinite(grad(numerics.safe_norm, over)[0]).all()


def test_norm_of_infinite_and_nan_rows_leaves_other_rows_alone(device):
    x = torch.tensor([[INF, 1.0], [-INF, INF], [NAN, 1.0], [3.0, 4.0]], device=device)
    assert torch.equal(numerics.safe_norm(x)[[0, 1, 3]], torch.tensor([INF, INF, 5.0], device=device))
    assert numerics.safe_norm(x)[2].isnan()
    assert torch.allclose(grad(numerics.safe_norm, x)[0], torch.tensor([[0.0, 0.0]] * 3 + [[0.6, 0.8]], device=device), rtol=tolerance(torch.float32))


def test_norm_shapes_match_torch(device):
    x = torch.randn(2, 3, 4, dtype=torch.float64, device=device)
    for dim in (-1, 0, (0, 2), (0, 1, 2)):
        for keepdim in (False, True):
            got, expected = numerics.safe_norm(x, dim, keepdim), torch.linalg.vector_norm(x, dim=dim, keepdim=keepdim)
            assert got.shape == expected.shape
            assert torch.allclose(got, expected, rtol=tolerance(torch.float64, 24))


def test_sqrt_at_zero_below_and_at_infinity(device):
    x = torch.tensor([0.0, -0.0, -3.0, -INF, INF, 4.0], device=device)
    assert same(numerics.safe_sqrt(x), [0.0, 0.0, 0.0, 0.0, INF, 2.0])
    assert same(grad(numerics.safe_sqrt, x)[0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.25])
    assert numerics.safe_sqrt(torch.tensor(NAN, device=device)).isnan()


def test_selecting_between_a_root_and_its_argument_keeps_the_gradient(device):
    x = torch.tensor([-1.0, -4.0], device=device)
    assert same(grad(lambda v: torch.where(v > 0, numerics.safe_sqrt(v), v), x)[0], [1.0, 1.0])


def test_log_at_zero_below_and_at_infinity(device):
    x = torch.tensor([0.0, -1.0, -INF, 2.0, INF], device=device)
    got = numerics.safe_log(x)
    assert torch.isfinite(got[:4]).all()
    assert got[4] == INF
    assert got[0] == math.log(torch.finfo(torch.float32).tiny)
    assert same(grad(numerics.safe_log, x)[0], [0.0, 0.0, 0.0, 0.5, 0.0])
    assert numerics.safe_log(torch.tensor(NAN, device=device)).isnan()


def test_division_by_zero_gives_the_default_and_no_gradient(device):
    a = torch.tensor([0.0, 1.0, INF, 6.0, 1.0], device=device)
    b = torch.tensor([0.0, 0.0, -0.0, 3.0, INF], device=device)
    assert same(numerics.safe_div(a, b), [0.0, 0.0, 0.0, 2.0, 0.0])
    assert same(numerics.safe_div(a, b, default=7.0), [7.0, 7.0, 7.0, 2.0, 0.0])
    da, db = grad(numerics.safe_div, a, b)
    assert torch.allclose(da, torch.tensor([0.0, 0.0, 0.0, 1 / 3, 0.0], device=device), rtol=tolerance(torch.float32))
    assert torch.allclose(db, torch.tensor([0.0, 0.0, 0.0, -2 / 3, 0.0], device=device), rtol=tolerance(torch.float32))


def test_log1mexp_against_high_precision_and_at_the_ends(device):
    x = torch.tensor([-1e-12, -1e-3, -0.6931, -0.6932, -3.0, -50.0], dtype=torch.float64, device=device)
    # log(1 - e^x) by its series for small |x| and by expm1 elsewhere, in the precision of the host's long double
    expected = torch.tensor([float(np.log(-np.expm1(np.longdouble(v)))) if v > -20 else -math.exp(v) for v in x.tolist()], dtype=torch.float64, device=device)
    assert torch.allclose(numerics.log1mexp(x), expected, rtol=tolerance(torch.float64, 4), atol=0)
    ends = torch.tensor([0.0, -INF, -1e-30, -200.0], device=device)
    value, slope = numerics.log1mexp(ends), grad(numerics.log1mexp, ends)[0]
    assert value.tolist()[:2] == [-INF, 0.0]
    assert slope.tolist()[:2] == [-INF, 0.0]
    assert slope[2].item() == pytest.approx(-1e30, rel=1e-6)
    assert slope[3] == 0.0
    assert numerics.log1mexp(torch.tensor(0.5, device=device)).isnan()


def test_masked_out_rows_reach_neither_value_nor_gradient(device):
    x = torch.tensor([[1.0, NAN], [3.0, INF], [-INF, 5.0]], device=device)
    mask = torch.isfinite(x)
    for fn, expected in ((numerics.masked_mean, 3.0), (numerics.masked_var, 8 / 3), (numerics.masked_std, (8 / 3) ** 0.5)):
        assert fn(x, mask).item() == pytest.approx(expected, rel=tolerance(torch.float32, 4))
        slope = grad(lambda v, fn=fn: fn(v, mask), x)[0]
        assert torch.isfinite(slope).all()
        assert (slope[~mask] == 0).all()
    assert torch.allclose(grad(lambda v: numerics.masked_mean(v, mask), x)[0], mask / 3.0)
    assert same(numerics.masked_mean(x, mask, dim=0), [2.0, 5.0])
    assert same(numerics.masked_mean(x, mask, dim=0, keepdim=True), [[2.0, 5.0]])


def test_empty_and_constant_selections(device):
    x = torch.tensor([[NAN, 2.0], [INF, 2.0]], device=device)
    mask = torch.tensor([[False, True], [False, True]], device=device)
    for fn in (numerics.masked_mean, numerics.masked_var, numerics.masked_std):
        assert same(fn(x, torch.zeros_like(mask)), 0.0)
        assert same(grad(lambda v, fn=fn: fn(v, torch.zeros_like(mask)), x)[0], [[0.0, 0.0], [0.0, 0.0]])
        assert torch.isfinite(grad(lambda v, fn=fn: fn(v, mask, 0), x)[0]).all()
    assert same(numerics.masked_std(x, mask, dim=0), [0.0, 0.0])
    one = torch.tensor([True, False], device=device)
    assert same(numerics.masked_var(torch.tensor([5.0, NAN], device=device), one, correction=1), 0.0)


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.booleans()), min_size=1, max_size=12), st.integers(0, 1))
def test_masked_moments_equal_those_of_the_selected_elements(rows, correction):
    x = torch.tensor([r[0] for r in rows], dtype=torch.float64)
    mask = torch.tensor([r[1] for r in rows])
    chosen = x[mask]
    mean = chosen.mean() if len(chosen) else torch.zeros(())
    var = chosen.var(correction=correction) if len(chosen) > correction else torch.zeros(())
    atol = 1e3 * tolerance(torch.float64, len(rows))
    assert torch.allclose(numerics.masked_mean(x, mask), mean.double(), atol=atol)
    assert torch.allclose(numerics.masked_var(x, mask, correction=correction), var.double(), atol=1e3 * atol)


def test_mask_broadcasts_and_booleans_are_averaged(device):
    success = torch.tensor([[True, True], [False, True]], device=device)
    assert numerics.masked_mean(success, torch.tensor([True, False], device=device)) == 0.5
    assert numerics.masked_mean(torch.tensor([1, 2, 4], device=device), torch.tensor([True, False, True], device=device)) == 2.5
    assert numerics.masked_mean(torch.tensor(3.0, device=device), torch.tensor([True, True], device=device)) == 3.0
    assert numerics.masked_var(torch.tensor(3.0, device=device), torch.tensor(True, device=device)) == 0.0


def test_clamp_and_coalesce_have_zero_gradient_outside(device):
    x = torch.tensor([-9.0, -5.0, 0.0, 3.0], device=device)
    assert same(numerics.clamp_log_std(x), [-5.0, -5.0, 0.0, 2.0])
    assert same(grad(numerics.clamp_log_std, x)[0], [0.0, 1.0, 1.0, 0.0])
    y = torch.tensor([NAN, INF, -INF, 2.0], device=device)
    assert same(numerics.coalesce_nonfinite(y, 7.0), [7.0, 7.0, 7.0, 2.0])
    assert same(grad(lambda v: numerics.coalesce_nonfinite(v) ** 2, y)[0], [0.0, 0.0, 0.0, 4.0])


def test_a_row_that_blows_up_and_is_reset_by_mask_leaves_the_shared_gradient_alone():
    def objective(gain: Tensor, start: Tensor) -> Tensor:
        state = numerics.safe_sqrt(numerics.safe_div(gain * start, start))
        done = start == 0
        return torch.where(done, 0.0, state * start).sum()

    gain = torch.tensor(2.0)
    both = torch.func.grad(objective)(gain, torch.tensor([0.0, 3.0]))
    alone = torch.func.grad(objective)(gain, torch.tensor([3.0]))
    assert torch.isfinite(both)
    assert torch.equal(both, alone)


def everything(x: Tensor) -> list[Tensor]:
    mask = torch.isfinite(x)
    return [
        numerics.safe_norm(x),
        numerics.safe_sqrt(x),
        numerics.safe_log(x),
        numerics.safe_div(x, x - 1.0),
        numerics.log1mexp(-0.1 - x**2),
        numerics.masked_mean(x, mask, 0),
        numerics.masked_std(x, mask, 0),
        numerics.coalesce_nonfinite(x),
        numerics.clamp_log_std(x),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_follows_and_vmap_equals_the_loop(dtype):
    x = torch.tensor([[[0.0, -1.0], [1.0, 2.0]], [[3.0, INF], [0.5, 4.0]]], dtype=dtype)
    mapped = torch.func.vmap(everything)(x)
    for j in range(2):
        for got, expected in zip(mapped, everything(x[j]), strict=True):
            assert got.dtype == dtype
            assert torch.allclose(got[j], expected, rtol=tolerance(dtype, 4), equal_nan=True)


def test_compiled_gradient_equals_eager():
    x = torch.tensor([[0.0, 0.0], [1.0, 2.0], [-3.0, 0.5]])

    def total(v: Tensor) -> Tensor:
        return torch.stack([numerics.coalesce_nonfinite(y).sum() for y in everything(v)]).sum()

    fn = torch.func.grad(total)
    compiled = torch.compile(fn, backend="aot_eager", fullgraph=True)
    assert torch.isfinite(fn(x)).all()
    assert torch.allclose(compiled(x), fn(x), rtol=tolerance(torch.float32, 16))
