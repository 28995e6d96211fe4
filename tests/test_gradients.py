from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from frl.gradients import (
    BatchedGradientNormStats,
    adjoint_norm_per_step,
    adjoint_statistics,
    clip_adjoint,
    clip_adjoint_tree,
    clip_batched_gradient_norm,
    merge_stats,
    stats_metrics,
)
from tests.tolerances import tolerance

GOLDEN = [[3e38, 3e38], [math.nan, 1.0], [3.0, 4.0], [0.0, 0.0], [1e-30, 0.0]]
COTANGENT = [[3.0, 4.0], [0.3, 0.4]]
CLIPPED = [[0.6, 0.8], [0.3, 0.4]]
EPS = tolerance(torch.float32)

any_float32 = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)
finite_rows = st.lists(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=3, max_size=3), min_size=1, max_size=4)
limits = st.floats(1e-3, 1e3)


def norms64(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.double(), dim=-1)


def explicit(g: Tensor, limit: float | Tensor) -> Tensor:
    """The clip without any care for overflow or zero."""
    return g * (limit / torch.linalg.vector_norm(g, dim=-1, keepdim=True)).clamp(max=1)


# -- the row clip ------------------------------------------------------------------------------------------------------------------------------


def test_golden_rows(device: torch.device) -> None:
    got = clip_batched_gradient_norm(torch.tensor(GOLDEN, device=device), 1.0)
    want = torch.tensor([[0.5**0.5] * 2, [0, 0], [0.6, 0.8], [0, 0], [1e-30, 0]], device=device)
    torch.testing.assert_close(got, want, rtol=EPS, atol=0)


def test_rows_below_the_bound_keep_their_bits(device: torch.device) -> None:
    rows = torch.tensor([[0.0, 0.0], [0.3, 0.4], [2.0**-60, 0.0], [-1e-42, 1e-45]], device=device)
    assert torch.equal(clip_batched_gradient_norm(rows, 1.0), rows)


@given(st.lists(st.lists(any_float32, min_size=2, max_size=2), min_size=1, max_size=5), limits)
def test_any_float32_gives_a_finite_bounded_result(rows: list, limit: float) -> None:
    g = torch.tensor(rows)
    got = clip_batched_gradient_norm(g, limit)
    finite = torch.isfinite(g).all(1)
    assert torch.isfinite(got).all()
    assert (norms64(got) <= limit * (1 + EPS)).all()
    assert (got[~finite] == 0).all()
    want = explicit(torch.where(finite[:, None], g, 1).double(), limit)[finite]
    torch.testing.assert_close(got[finite].double(), want, rtol=EPS, atol=2e-45)


@given(finite_rows, limits, st.floats(width=32))
def test_rows_are_independent_bit_for_bit(rows: list, limit: float, other: float) -> None:
    g = torch.tensor(rows)
    changed = torch.cat([torch.full((1, 3), other), g[:1], torch.full((1, 3), math.nan)])
    assert torch.equal(clip_batched_gradient_norm(changed, limit)[1], clip_batched_gradient_norm(g, limit)[0])


@given(finite_rows, limits)
def test_clip_is_idempotent(rows: list, limit: float) -> None:
    once = clip_batched_gradient_norm(torch.tensor(rows), limit)
    torch.testing.assert_close(clip_batched_gradient_norm(once, limit), once, rtol=EPS, atol=1e-44)


@given(st.lists(st.floats(0.5, 4), min_size=3, max_size=3), st.floats(0.1, 10.0), limits)
def test_scale_invariance_up_to_the_bound(row: list, factor: float, limit: float) -> None:
    g = torch.tensor([row], dtype=torch.float64)
    norm, eps = float(norms64(g)), tolerance(torch.float64, 4)
    got = clip_batched_gradient_norm(factor * g, limit)
    want = g * limit / norm if factor * norm >= limit else factor * g
    torch.testing.assert_close(got, want, rtol=eps, atol=0)


def test_layouts_agree(device: torch.device) -> None:
    g = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0)).to(device) * torch.tensor([0.1, 1, 10, 100, math.nan], device=device)[:, None, None]
    want = clip_batched_gradient_norm(g, 1.0)
    last = clip_batched_gradient_norm(g.movedim(0, -1).contiguous(), 1.0, rows=-1)
    torch.testing.assert_close(last.movedim(-1, 0), want, rtol=EPS, atol=0)
    single = vmap(lambda row: clip_batched_gradient_norm(row, 1.0, rows=None))(g)
    torch.testing.assert_close(single, want, rtol=EPS, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    g = torch.tensor([[6e4, 6e4], [0.0, 0.0], [3.0, 4.0]], dtype=dtype)
    want = torch.tensor([[0.5**0.5] * 2, [0, 0], [0.6, 0.8]], dtype=dtype)
    got = clip_batched_gradient_norm(g, 1.0)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=tolerance(dtype), atol=0)


@pytest.mark.parametrize("limit", [-1, -0.1, math.nan, -math.inf, True, "1.0", torch.ones(1)])
def test_bad_limits_are_refused(limit: object) -> None:
    x = torch.ones(2, 2)
    for call in (clip_batched_gradient_norm, clip_adjoint, adjoint_statistics, lambda x, c: clip_adjoint_tree({"x": x}, c)):
        with pytest.raises(ValueError, match="max_norm"):
            call(x, limit)


@pytest.mark.parametrize("off", [0, 0.0, math.inf, None])
def test_off_returns_the_input(off: float | None) -> None:
    x = torch.tensor([math.nan, 2.0])
    assert clip_batched_gradient_norm(x, off) is x
    assert clip_adjoint(x, off) is x
    assert clip_adjoint_tree({"x": x}, off)["x"] is x


@pytest.mark.parametrize("off", [0.0, -1.0, math.inf])
def test_limit_tensor_switches_off(off: float, device: torch.device) -> None:
    g = torch.tensor(GOLDEN, device=device)
    assert torch.equal(clip_batched_gradient_norm(g, torch.tensor(off, device=device)).nan_to_num(7), g.nan_to_num(7))
    slope = grad(lambda g: clip_batched_gradient_norm(g, torch.tensor(off, device=device)).nan_to_num(0).sum())(g)
    assert torch.equal(slope[2:], torch.ones_like(g[2:]))


def test_limit_tensor_equals_number_and_nan_shows(device: torch.device) -> None:
    g = torch.tensor(GOLDEN, device=device)
    assert torch.equal(clip_batched_gradient_norm(g, torch.tensor(1.0, device=device)), clip_batched_gradient_norm(g, 1.0))
    assert clip_batched_gradient_norm(g, torch.tensor(math.nan, device=device)).isnan().all()


def test_shapes_and_dtypes_are_checked() -> None:
    for call in (clip_batched_gradient_norm, clip_adjoint):
        with pytest.raises(ValueError, match="two dimensions"):
            call(torch.ones(3), 1.0)
        with pytest.raises(ValueError, match="floating"):
            call(torch.ones(3, 2, dtype=torch.int64), 1.0)
        with pytest.raises(ValueError, match="rows"):
            call(torch.ones(3, 2), 1.0, rows=1)


def test_clip_is_differentiable_in_both_arguments() -> None:
    g = torch.tensor([[3.0, -4.0], [0.3, 0.4], [5.0, 0.0], [1e-3, 2e-3]], dtype=torch.float64, requires_grad=True)
    limit = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[1.0, 2.0], [3.0, 5.0], [-1.0, 4.0], [2.0, 7.0]], dtype=torch.float64)
    for order in (1, 2):
        results = []
        for clip in (clip_batched_gradient_norm, explicit):
            slopes = torch.autograd.grad((clip(g, limit) * weight).sum(), (g, limit), create_graph=True)
            if order == 2:
                slopes = torch.autograd.grad(slopes[0].pow(3).sum() + slopes[1].sin(), (g, limit))
            results.append(slopes)
        torch.testing.assert_close(*results, rtol=tolerance(torch.float64, 50), atol=1e-14)


def test_slope_is_finite_where_the_formula_is_not() -> None:
    g = torch.tensor([[0.0, 0.0], [1e37, 1e37], [math.nan, 1.0], [1e-30, 0.0]])
    for limit in (1.0, torch.tensor(1e30), 1e-30):
        slope = grad(lambda g, c=limit: clip_batched_gradient_norm(g, c).sum())(g)
        assert torch.isfinite(slope).all()
        assert (slope[2] == 0).all()
    assert torch.equal(grad(lambda g: clip_batched_gradient_norm(g, 1.0).sum())(g)[0], torch.ones(2))


# -- the clip inside a backward pass -------------------------------------------------------------------------------------------------------------


def test_rows_are_not_coupled_by_any_transform(device: torch.device) -> None:
    weight, want = torch.tensor(COTANGENT, device=device), torch.tensor(CLIPPED, device=device)
    x = torch.zeros(2, 2, device=device)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return (clip_adjoint(x, 1.0) * w).sum()

    def row(x: Tensor, w: Tensor) -> Tensor:
        return (clip_adjoint(x, 1.0, rows=None) * w).sum()

    leaf = x.clone().requires_grad_()
    results = {
        "autograd": torch.autograd.grad(loss(leaf, weight), leaf)[0],
        "grad": grad(loss)(x, weight),
        "vjp": vjp(lambda x: clip_adjoint(x, 1.0), x)[1](weight)[0],
        "vmap of grad": vmap(grad(row))(x, weight),
        "grad of vmap": grad(lambda x: vmap(row)(x, weight).sum())(x),
        "vmap of grad, one row each": vmap(grad(loss))(x[:, None], weight[:, None])[:, 0],
        "rows last": vmap(grad(row), in_dims=-1, out_dims=-1)(x.mT, weight.mT).mT,
        "jacrev": jacrev(lambda x: (clip_adjoint(x, 1.0) * weight).sum(1))(x).sum(0),
    }
    for name, got in results.items():
        torch.testing.assert_close(got, want, rtol=EPS, atol=0, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("order", ["vmap of grad", "grad of vmap"])
def test_rows_are_not_coupled_when_compiled(order: str, device: torch.device) -> None:
    weight, want = torch.tensor(COTANGENT, device=device), torch.tensor(CLIPPED, device=device)

    def row(x: Tensor, w: Tensor) -> Tensor:
        return (clip_adjoint(x, 1.0, rows=None) * w).sum()

    def mapped(x: Tensor, w: Tensor) -> Tensor:
        return vmap(grad(row))(x, w)

    def summed(x: Tensor, w: Tensor) -> Tensor:
        return grad(lambda x: vmap(row)(x, w).sum())(x)

    compiled = torch.compile(mapped if order == "vmap of grad" else summed, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(torch.zeros(2, 2, device=device), weight), want, rtol=EPS, atol=0)


def test_zero_clipped_and_small_rows() -> None:
    weight = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.3, 0.4]])
    got = grad(lambda x: (clip_adjoint(x, 1.0) * weight).sum())(torch.ones(3, 2))
    torch.testing.assert_close(got, torch.tensor([[0.0, 0.0], [0.6, 0.8], [0.3, 0.4]]), rtol=EPS, atol=0)


def rollout_loss(gain: Tensor, x: Tensor, limit: Tensor | float) -> Tensor:
    """Four steps of an unstable plant; the clip acts on the action's adjoint."""
    total = x.new_zeros(())
    for _ in range(4):
        action = clip_adjoint(torch.tanh(x @ gain), limit)
        x = 2.5 * x + action
        total = total + (x * x).mean(1).sum()
    return total


def hooked_slope(gain: Tensor, x: Tensor, limit: float) -> tuple[Tensor, list[Tensor]]:
    """The same by the autograd engine with hooks, and the adjoints that the hooks received."""
    gain, seen = gain.detach().requires_grad_(), []

    def hook(g: Tensor) -> Tensor:
        seen.insert(0, g)
        return clip_batched_gradient_norm(g, limit)

    total = x.new_zeros(())
    for _ in range(4):
        action = torch.tanh(x @ gain)
        action.register_hook(hook)
        x = 2.5 * x + action
        total = total + (x * x).mean(1).sum()
    return torch.autograd.grad(total, gain)[0], seen


def rollout_inputs(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    gains = torch.randn(3, 2, 2, generator=generator, dtype=torch.float64)
    x = torch.randn(3, 5, 2, generator=generator, dtype=torch.float64)
    return gains.to(device), x.to(device), torch.tensor([0.5, 2.0, 30.0], dtype=torch.float64, device=device)


def test_population_equals_a_loop_with_hooks(device: torch.device) -> None:
    gains, x, limit = rollout_inputs(device)
    eps = tolerance(torch.float64, 100)
    want = torch.stack([hooked_slope(gains[i], x[i], limit[i].item())[0] for i in range(3)])
    torch.testing.assert_close(vmap(grad(rollout_loss))(gains, x, limit), want, rtol=eps, atol=eps)
    got, limit_slope = grad(lambda gains, limit: vmap(rollout_loss)(gains, x, limit).sum(), argnums=(0, 1))(gains, limit)
    torch.testing.assert_close(got, want, rtol=eps, atol=eps)
    assert torch.equal(limit_slope, torch.zeros_like(limit))
    only_limits = vmap(grad(rollout_loss), in_dims=(None, None, 0))(gains[0], x[0], limit)
    want = torch.stack([hooked_slope(gains[0], x[0], c.item())[0] for c in limit])
    torch.testing.assert_close(only_limits, want, rtol=eps, atol=eps)


def test_probe_receives_what_a_hook_receives() -> None:
    gains, x, _ = rollout_inputs(torch.device("cpu"))

    def loss(probe: Tensor) -> Tensor:
        state, total = x[0], x.new_zeros(())
        for t in range(4):
            state = 2.5 * state + clip_adjoint(torch.tanh(state @ gains[0]), 0.5) + probe[t]
            total = total + (state * state).mean(1).sum()
        return total

    got = grad(loss)(x.new_zeros(4, 5, 2))
    seen = torch.stack(hooked_slope(gains[0], x[0], 0.5)[1])
    torch.testing.assert_close(got, seen, rtol=tolerance(torch.float64, 50), atol=0)
    assert 0 < stats_metrics(adjoint_statistics(got, 0.5))["action_adjoint_clipped_fraction"] <= 1


def test_traced_graph_takes_the_limit_as_an_input() -> None:
    gains, x, _ = rollout_inputs(torch.device("cpu"))

    def step(gain: Tensor, x: Tensor, limit: Tensor) -> Tensor:
        with torch.enable_grad():
            gain = gain.detach().requires_grad_()
            return torch.autograd.grad(rollout_loss(gain, x, limit), gain)[0]

    graph = make_fx(step)(gains[0], x[0], x.new_tensor(1.0))
    for limit in (0.5, 30.0):
        want = hooked_slope(gains[1], x[1], limit)[0]
        torch.testing.assert_close(graph(gains[1], x[1], x.new_tensor(limit)), want, rtol=tolerance(torch.float64, 100), atol=1e-12)


def test_compiled_equals_eager_for_any_limit(device: torch.device) -> None:
    gains, x, limit = rollout_inputs(device)
    eps = tolerance(torch.float64, 100)

    # torch.compile caches by code object and all results of torch.func.grad share one: each test compiles functions of its own.
    def one(*args: Tensor) -> Tensor:
        return grad(rollout_loss)(*args)

    def population(*args: Tensor) -> Tensor:
        return vmap(grad(rollout_loss))(*args)

    for fn, args in ((one, (gains[0], x[0], limit[0])), (population, (gains, x, limit))):
        compiled = torch.compile(fn, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(*args), fn(*args), rtol=eps, atol=eps)
        with torch.compiler.set_stance("fail_on_recompile"):
            more = (*args[:2], 3 * args[2])
            torch.testing.assert_close(compiled(*more), fn(*more), rtol=eps, atol=eps)
        assert (fn(*more) - fn(*args)).abs().max() > 0.1


def test_second_reverse_pass_differentiates_the_clip() -> None:
    x = torch.tensor([[0.6, -0.9], [0.02, 0.05], [2.0, 1.0]], dtype=torch.float64)
    limit = torch.tensor(0.7, dtype=torch.float64)
    weight = torch.tensor([[0.1, 0.02], [0.3, -0.2], [0.05, 0.01]], dtype=torch.float64)

    def slope(x: Tensor, limit: Tensor) -> Tensor:
        return grad(lambda z: clip_adjoint(z, limit).pow(3).sum())(x)

    def formula(x: Tensor, limit: Tensor) -> Tensor:
        return explicit(3 * x.square(), limit)

    got, got_limit = grad(lambda x, c: (slope(x, c) * weight).sum(), argnums=(0, 1))(x, limit)
    want, want_limit = grad(lambda x, c: (formula(x, c) * weight).sum(), argnums=(0, 1))(x, limit)
    eps = tolerance(torch.float64, 50)
    assert (norms64(3 * x.square()) > limit).tolist() == [True, False, True]
    assert norms64(want).max() < limit
    torch.testing.assert_close(got, want, rtol=eps, atol=eps)
    torch.testing.assert_close(got_limit, want_limit, rtol=eps, atol=eps)

    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(clip_adjoint(leaf, limit).pow(3).sum(), leaf, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad((first * weight).sum(), leaf)[0], want, rtol=eps, atol=eps)

    # An outer gradient is that of the clipped one and is not clipped itself; autograd's own second pass cannot tell the two apart.
    large = grad(lambda x: (slope(x, limit) * 100 * weight).sum())(x)
    torch.testing.assert_close(large, 100 * want, rtol=eps, atol=eps)
    (first,) = torch.autograd.grad(clip_adjoint(leaf, limit).pow(3).sum(), leaf, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad((first * 100 * weight).sum(), leaf)[0], explicit(100 * want, limit), rtol=eps, atol=eps)


def test_forward_mode_is_the_identity_and_gives_the_exact_curvature() -> None:
    x = torch.tensor([[0.6, -0.9], [0.02, 0.05]], dtype=torch.float64)
    value, tangent = jvp(lambda x: clip_adjoint(x, 0.1), (x,), (50 * x,))
    assert torch.equal(value, x)
    assert torch.equal(tangent, 50 * x)

    slope = grad(lambda z: clip_adjoint(z, 0.7).pow(3).sum())
    curvature, h = jacfwd(slope)(x), 1e-6
    steps = h * torch.eye(4, dtype=torch.float64).reshape(4, 2, 2)
    central = torch.stack([(slope(x + d) - slope(x - d)) / (2 * h) for d in steps], -1).reshape(2, 2, 2, 2)
    torch.testing.assert_close(curvature, central, rtol=1e-7, atol=1e-9)


# -- the clip of a state -------------------------------------------------------------------------------------------------------------------------


class State(NamedTuple):
    body: dict[str, Tensor]
    clock: Tensor
    done: Tensor
    heat: Tensor


def state_of(rows: int, device: torch.device) -> State:
    return State(
        body={"x": torch.zeros(rows, 2, device=device), "frame": torch.zeros(rows, 1, 2, device=device)},
        clock=torch.arange(rows, device=device),
        done=torch.zeros(rows, dtype=torch.bool, device=device),
        heat=torch.zeros(rows, dtype=torch.float64, device=device),
    )


def test_tree_clips_one_norm_for_each_row(device: torch.device) -> None:
    state = state_of(3, device)
    weights = torch.tensor([[3.0, 0, 0, 4.0, 12.0], [0.1, 0.2, 0.2, 0.1, 0.0], [1.0, math.nan, 1.0, 1.0, 1.0]], dtype=torch.float64, device=device)

    def pull(x: Tensor, frame: Tensor, heat: Tensor, rows: int | None = 0) -> Tensor:
        out = clip_adjoint_tree(state._replace(body={"x": x, "frame": frame}, heat=heat), 1.3, rows=rows)
        assert out.clock is state.clock
        assert out.done is state.done
        if rows == 0:
            return (out.body["x"] * weights[:, :2]).sum() + (out.body["frame"][:, 0] * weights[:, 2:4]).sum() + (out.heat * weights[:, 4]).sum()
        return (out.body["x"] * weights[:, :2].mT).sum() + (out.body["frame"][0] * weights[:, 2:4].mT).sum() + (out.heat * weights[:, 4]).sum()

    leaves = (state.body["x"], state.body["frame"], state.heat)
    got = grad(pull, argnums=(0, 1, 2))(*leaves)
    assert [g.dtype for g in got] == [x.dtype for x in leaves]
    want = torch.tensor([[0.3, 0, 0, 0.4, 1.2], [0.1, 0.2, 0.2, 0.1, 0.0], [0, 0, 0, 0, 0]], dtype=torch.float64, device=device)
    torch.testing.assert_close(torch.cat([got[0], got[1][:, 0], got[2][:, None]], 1), want, rtol=EPS, atol=0)

    last = grad(lambda *xs: pull(*xs, rows=-1), argnums=(0, 1, 2))(*(x.movedim(0, -1).contiguous() for x in leaves))
    for a, b in zip(last, got, strict=True):
        torch.testing.assert_close(a.movedim(-1, 0), b, rtol=EPS, atol=0)


def test_tree_of_one_row_under_vmap() -> None:
    weight = torch.tensor([[3.0, 4.0], [0.3, 0.4]])

    def row(state: dict, w: Tensor) -> Tensor:
        out = clip_adjoint_tree(state, 1.0, rows=None)
        return out["a"] * w[0] + out["b"][0] * w[1]

    got = vmap(grad(row))({"b": torch.zeros(2, 1), "a": torch.zeros(2)}, weight)
    torch.testing.assert_close(torch.stack([got["a"], got["b"][:, 0]], 1), torch.tensor(CLIPPED), rtol=EPS, atol=0)


def test_tree_without_floating_leaves_and_unequal_rows() -> None:
    ints = {"a": torch.arange(3)}
    assert clip_adjoint_tree(ints, 1.0) is ints
    with pytest.raises(ValueError, match=r"a \(3, 1\), b\.c \(2, 1\)"):
        clip_adjoint_tree({"a": torch.zeros(3, 1), "b": {"c": torch.zeros(2, 1)}}, 1.0)
    with pytest.raises(ValueError, match="share"):
        clip_adjoint_tree({"a": torch.zeros(())}, 1.0)


@pytest.mark.parametrize("compiled", [False, True])
def test_exploding_row_leaves_the_other_untouched(compiled: bool, device: torch.device) -> None:
    k = torch.tensor([10.0, 0.5], device=device)

    def final(x: Tensor) -> Tensor:
        for _ in range(60):
            x = k * clip_adjoint_tree({"x": x}, 1.0)["x"]
        return x.sum()

    def slope(x: Tensor) -> Tensor:
        return grad(final)(x)

    got = (torch.compile(slope, backend="aot_eager", fullgraph=True) if compiled else slope)(torch.zeros(2, device=device))
    assert got.tolist() == [1.0, 2.0**-60]


# -- statistics ----------------------------------------------------------------------------------------------------------------------------------


def test_golden_metrics(device: torch.device) -> None:
    for limit in (1.0, torch.tensor(1.0, device=device)):
        metrics = stats_metrics(adjoint_statistics(torch.tensor(GOLDEN, device=device), limit))
        assert list(metrics) == [
            "action_adjoint_preclip_mean_norm",
            "action_adjoint_preclip_max_norm",
            "action_adjoint_clipped_fraction",
            "action_adjoint_nonfinite_fraction",
        ]
        assert [value.item() for value in metrics.values()] == pytest.approx([5 / 3, 5.0, 0.2, 0.4], rel=EPS)
        assert all(value.ndim == 0 for value in metrics.values())


@pytest.mark.parametrize("off", [None, 0.0, torch.tensor(0.0), torch.tensor(math.inf)])
def test_nothing_is_clipped_when_off(off: float | Tensor | None) -> None:
    assert adjoint_statistics(torch.tensor(GOLDEN), off).clipped_rows.item() == 0


def test_statistics_of_no_finite_row_are_zero() -> None:
    metrics = stats_metrics(adjoint_statistics(torch.full((3, 2, 2), math.nan), 1.0))
    assert [value.item() for value in metrics.values()] == [0.0, 0.0, 0.0, 1.0]
    empty = stats_metrics(adjoint_statistics(torch.zeros(0, 2), 1.0))
    assert [value.item() for value in empty.values()] == [0.0, 0.0, 0.0, 0.0]


rows_of_any = st.lists(st.lists(any_float32, min_size=2, max_size=2), min_size=1, max_size=4)


@given(rows_of_any, rows_of_any, rows_of_any, limits)
def test_merged_statistics_are_those_of_all_rows(a: list, b: list, c: list, limit: float) -> None:
    def close(x: BatchedGradientNormStats, y: BatchedGradientNormStats) -> None:
        torch.testing.assert_close(tuple(x), tuple(y), rtol=tolerance(torch.float32, 12), atol=0)

    one, two, three = (adjoint_statistics(torch.tensor(rows), limit) for rows in (a, b, c))
    close(merge_stats(merge_stats(one, two), three), adjoint_statistics(torch.tensor(a + b + c), limit))
    close(merge_stats(one, merge_stats(two, three)), merge_stats(merge_stats(three, one), two))
    assert one.rows.item() == len(a) == (one.finite_rows + one.nonfinite_rows).item()


def test_statistics_under_vmap_and_leading_dimensions(device: torch.device) -> None:
    g = torch.randn(3, 4, 5, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(device)
    limit = torch.tensor([0.5, 1.0, 1.5], dtype=torch.float64, device=device)
    got = vmap(adjoint_statistics)(g, limit)
    norms = norms64(g)
    torch.testing.assert_close(got.norm_sum, norms.sum((1, 2)), rtol=tolerance(torch.float64, 20), atol=0)
    torch.testing.assert_close(got.norm_max, norms.amax((1, 2)), rtol=tolerance(torch.float64), atol=0)
    assert torch.equal(got.clipped_rows, (norms > limit[:, None, None]).sum((1, 2)))


def test_norm_per_step(device: torch.device) -> None:
    g = torch.tensor([[[3.0, 4.0], [0.0, 1.0]], [[math.inf, 0.0], [0.0, 2.0]], [[math.nan, 0.0], [3e38, 3e38]]], device=device)
    torch.testing.assert_close(adjoint_norm_per_step(g), torch.tensor([3.0, 2.0, 0.0], device=device), rtol=EPS, atol=0)
