"""Optimizers against ``torch.optim``, transforms against their laws, names and options against the edge."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, jacrev, vmap

from frl import tree
from frl.optim import (
    OptimizerCfg,
    adam,
    adamw,
    apply_updates,
    build_optimizer,
    chain,
    clip_by_global_norm,
    clip_global_norm,
    coerce_optimizer_cfg,
    get_registered_optimizer_names,
    global_norm,
    register_optimizer,
    rmsprop,
    sgd,
    skip_nonfinite,
)
from frl.types import Optimizer
from tests.tolerances import tolerance

STEPS = 200

BUILT: dict[str, Callable[[], Optimizer]] = {
    "adam": lambda: adam(weight_decay=0.01),
    "adam_amsgrad": lambda: adam(amsgrad=True),
    "adamw": lambda: adamw(),
    "sgd": lambda: sgd(0.1),
    "sgd_momentum": lambda: sgd(0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "sgd_nesterov": lambda: sgd(0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda: rmsprop(),
    "rmsprop_centered": lambda: rmsprop(centered=True, momentum=0.5),
    "chained": lambda: skip_nonfinite(chain(clip_by_global_norm(0.5), adam())),
}
each_optimizer = pytest.mark.parametrize("name", sorted(BUILT))

unit = st.floats(0.0, 0.95)
decay = st.sampled_from([0.0, 0.01, 0.1])
adam_options = {
    "betas": st.tuples(unit, st.floats(0.5, 0.999)),
    "eps": st.sampled_from([1e-8, 1e-3]),
    "weight_decay": decay,
    "amsgrad": st.booleans(),
    "maximize": st.booleans(),
}
OPTIONS: dict[str, tuple[Any, Any, Any]] = {
    "adam": (adam, torch.optim.Adam, st.fixed_dictionaries({**adam_options, "decoupled_weight_decay": st.booleans()})),
    "adamw": (adamw, torch.optim.AdamW, st.fixed_dictionaries(adam_options)),
    "sgd": (
        sgd,
        torch.optim.SGD,
        st.fixed_dictionaries({"momentum": st.just(0.0) | unit, "dampening": unit, "weight_decay": decay, "maximize": st.booleans()})
        | st.fixed_dictionaries({"momentum": st.floats(0.1, 0.95), "nesterov": st.just(True), "weight_decay": decay, "maximize": st.booleans()}),
    ),
    "rmsprop": (
        rmsprop,
        torch.optim.RMSprop,
        st.fixed_dictionaries(
            {
                "alpha": st.floats(0.5, 0.99),
                "eps": st.sampled_from([1e-8, 1e-3]),
                "weight_decay": decay,
                "momentum": st.just(0.0) | unit,
                "centered": st.booleans(),
                "maximize": st.booleans(),
            }
        ),
    ),
}


def make_params(dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> Any:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(device, dtype)

    return {"layers": [{"weight": normal(3, 2), "bias": normal(2)}], "log_std": normal(), "empty": normal(0)}


def rate(value: float, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    return {"learning_rate": torch.tensor(value, dtype=dtype, device=device)}


def run(optimizer: Optimizer, params: Any, grads: list[Any], hyper: dict[str, Tensor]) -> tuple[Any, Any]:
    state = optimizer.init(params)
    for g in grads:
        updates, state = optimizer.update(g, state, params, hyper)
        params = apply_updates(params, updates)
    return params, state


def assert_same_bits(got: Any, expected: Any) -> None:
    assert tree.structure(got) == tree.structure(expected)
    for (name, a), (_, b) in zip(tree.items(got), tree.items(expected), strict=True):
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b) or (torch.isnan(a) == torch.isnan(b)).all() and torch.equal(a.nan_to_num(), b.nan_to_num()), name


def assert_close(got: Any, expected: Any, tol: float) -> None:
    for (name, a), (_, b) in zip(tree.items(got), tree.items(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol, msg=lambda text, name=name: f"{name}: {text}")


# ---- torch.optim is the oracle ----


def follow_torch(name: str, options: dict[str, Any], dtype: torch.dtype, seed: int, tol: float) -> None:
    """Both start at the same point, see gradients of their own parameters plus the same noise, and a rate that changes each step."""
    factory, oracle_class, _ = OPTIONS[name]
    params = make_params(dtype, seed=seed)
    del params["empty"]
    twins = [x.clone().requires_grad_() for x in tree.leaves(params)]
    oracle = oracle_class(twins, lr=1.0, **options)
    optimizer = factory(**options)
    state = optimizer.init(params)
    draw = torch.Generator().manual_seed(seed + 1)
    for k in range(STEPS):
        noise = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(dtype) for x in twins]
        learning_rate = 1e-3 * (1.5 + math.sin(k))
        grads = tree.map(lambda p, n: 0.1 * p + n, params, tree.unflatten(tree.structure(params), noise))
        updates, state = optimizer.update(grads, state, params, rate(learning_rate, dtype))
        params = apply_updates(params, updates)
        for x, n in zip(twins, noise, strict=True):
            x.grad = 0.1 * x.detach() + n
        oracle.param_groups[0]["lr"] = learning_rate
        oracle.step()
    assert state.count == STEPS
    scale = max(1.0, max(float(x.detach().abs().max()) for x in twins))
    for (path, got), expected in zip(tree.items(params), twins, strict=True):
        error = float((got - expected.detach()).abs().max())
        assert error <= tol * scale, f"{path}: off by {error} of {scale} with {options}"


@pytest.mark.parametrize("name", sorted(OPTIONS))
@settings(max_examples=10)
@given(data=st.data())
def test_trajectory_equals_torch_in_double(name: str, data: st.DataObject) -> None:
    follow_torch(name, data.draw(OPTIONS[name][2]), torch.float64, data.draw(st.integers(0, 99)), 1e-12)


@pytest.mark.parametrize("name", sorted(OPTIONS))
@settings(max_examples=4)
@given(data=st.data())
def test_trajectory_equals_torch_in_single(name: str, data: st.DataObject) -> None:
    # About ten rounded operations an update, and momentum and the changing denominator carry each rounding on.
    follow_torch(name, data.draw(OPTIONS[name][2]), torch.float32, data.draw(st.integers(0, 99)), tolerance(torch.float32, 10 * STEPS))


def test_torch_implementation_flags_change_nothing() -> None:
    params = make_params(torch.float64)
    plain, flagged = adam(), adam(foreach=False, fused=None, capturable=True, differentiable=True)
    assert_same_bits(run(flagged, params, [params] * 3, {}), run(plain, params, [params] * 3, {}))


def test_first_updates_by_hand() -> None:
    # Adam's first step is the rate against the sign of the gradient; descent is downhill, maximize uphill.
    params, grads = {"w": torch.tensor([1.0, 1.0], dtype=torch.float64)}, {"w": torch.tensor([3.0, -0.5], dtype=torch.float64)}
    for optimizer, expected in [
        (adam(0.1, eps=0.0), [-0.1, 0.1]),
        (adam(0.1, eps=0.0, maximize=True), [0.1, -0.1]),
        (adamw(0.1, eps=0.0, weight_decay=0.5), [-0.15, 0.05]),
        (sgd(0.1), [-0.3, 0.05]),
        (sgd(0.1, momentum=0.9, dampening=0.5), [-0.3, 0.05]),
        (sgd(0.1, weight_decay=2.0), [-0.5, -0.15]),
        (rmsprop(0.1, alpha=0.75, eps=0.0), [-0.2, 0.2]),
    ]:
        updates, _ = optimizer.update(grads, optimizer.init(params), params, {})
        torch.testing.assert_close(updates["w"], torch.tensor(expected, dtype=torch.float64))


# ---- laws of every optimizer ----


@each_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtypes_follow_params_and_inputs_stay(name: str, dtype: torch.dtype, device: torch.device) -> None:
    optimizer = BUILT[name]()
    params, grads = make_params(dtype, device), make_params(dtype, device, seed=1)
    state = optimizer.init(params)
    _, state = optimizer.update(grads, state, params, rate(0.1, torch.float64, device))
    before = tree.map(torch.clone, (params, grads, state))
    updates, new_state = optimizer.update(grads, state, params, rate(0.1, torch.float64, device))
    assert_same_bits((params, grads, state), before)
    tree.check_same(updates, params, "updates")
    tree.check_same(new_state, state, "state")
    tree.check_same(apply_updates(params, updates), params, "params")
    assert all(isinstance(x, Tensor) and x.device == params["log_std"].device for x in tree.leaves(new_state))
    counts = [x for path, x in tree.items(new_state) if path.endswith("count")]
    assert counts
    assert all(x.dtype == torch.int64 and x.shape == () and x == 2 for x in counts)


@each_optimizer
def test_insertion_order_of_params_does_not_matter(name: str) -> None:
    params, grads = make_params(torch.float64), make_params(torch.float64, seed=1)
    turned = {key: grads[key] for key in reversed(list(grads))}
    assert_same_bits(run(BUILT[name](), params, [turned] * 3, {}), run(BUILT[name](), params, [grads] * 3, {}))


@each_optimizer
def test_other_structure_is_refused(name: str) -> None:
    params = make_params(torch.float64)
    optimizer = BUILT[name]()
    with pytest.raises(ValueError, match="log_std"):
        optimizer.update({k: v for k, v in params.items() if k != "log_std"}, optimizer.init(params), params, {})


@each_optimizer
def test_hyper_learning_rate_takes_the_place_of_the_default(name: str) -> None:
    params, grads = make_params(torch.float64), [make_params(torch.float64, seed=k) for k in (1, 2)]
    default, _ = run(BUILT[name](), params, grads, {})
    slow, _ = run(BUILT[name](), params, grads, rate(1e-5))
    frozen, _ = run(BUILT[name](), params, grads, rate(0.0))
    assert (slow["log_std"] - params["log_std"]).abs() < 0.1 * (default["log_std"] - params["log_std"]).abs()
    assert_same_bits(frozen, params)


@pytest.mark.parametrize(
    ("made", "plain", "hyper"),
    [
        (adam(betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1), adam(), {"beta1": 0.8, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.1}),
        (adam(betas=(0.0, 0.0)), adam(), {"beta1": 0.0, "beta2": 0.0}),
        (adamw(weight_decay=0.2), adamw(), {"weight_decay": 0.2}),
        (sgd(momentum=0.5, dampening=0.2, weight_decay=0.1), sgd(momentum=0.9), {"momentum": 0.5, "dampening": 0.2, "weight_decay": 0.1}),
        (
            rmsprop(alpha=0.5, eps=1e-3, momentum=0.3, weight_decay=0.1),
            rmsprop(momentum=0.9),
            {"alpha": 0.5, "eps": 1e-3, "momentum": 0.3, "weight_decay": 0.1},
        ),
    ],
)
def test_other_options_can_come_from_hyper(made: Optimizer, plain: Optimizer, hyper: dict[str, float]) -> None:
    params, grads = make_params(torch.float64), [make_params(torch.float64, seed=k) for k in (1, 2, 3)]
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in hyper.items()}
    got, _ = run(plain, params, grads, tensors)
    assert_close(got, run(made, params, grads, {})[0], 1e-12)
    assert not torch.equal(got["log_std"], run(plain, params, grads, {})[0]["log_std"])


def test_hyper_must_hold_scalars_that_are_used() -> None:
    params = make_params(torch.float64)
    optimizer = adam()
    for wrong in (0.1, torch.ones(3)):
        with pytest.raises(ValueError, match="0-d tensor"):
            optimizer.update(params, optimizer.init(params), params, {"learning_rate": wrong})  # pyright: ignore[reportArgumentType]
    for optimizer in (sgd(), rmsprop()):
        with pytest.raises(ValueError, match="momentum 0"):
            optimizer.update(params, optimizer.init(params), params, {"momentum": torch.tensor(0.9)})


def test_scalar_arithmetic_keeps_the_digits_of_single_precision() -> None:
    # 1 - 0.999^t in single precision is off by 3e-5 at t = 1, which the first update would show.
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor([2.0], dtype=dtype)
        updates, _ = adam(0.1, eps=0.0).update(x, adam().init(x), x, {})
        assert abs(float(updates) + 0.1) < 0.1 * tolerance(dtype, 4)


# ---- vmap, compile, differentiation ----


@each_optimizer
def test_vmap_over_members_equals_the_loop(name: str) -> None:
    optimizer, members = BUILT[name](), 3
    params = [make_params(torch.float64, seed=i) for i in range(members)]
    grads = [tree.map(lambda x, i=i: x * 10.0**i, make_params(torch.float64, seed=10 + i)) for i in range(members)]
    if name == "chained":
        grads[1]["log_std"] = torch.tensor(math.nan, dtype=torch.float64)
    hyper = [{**rate(0.1 * (i + 1)), "max_grad_norm": torch.tensor(0.5 + i, dtype=torch.float64)} for i in range(members)]

    def two_updates(p: Any, g: Any, h: Any) -> tuple[Any, Any]:
        return run(optimizer, p, [g, g], h)

    got = vmap(two_updates)(tree.stack(params), tree.stack(grads), tree.stack(hyper))
    expected = tree.stack([two_updates(p, g, h) for p, g, h in zip(params, grads, hyper, strict=True)])
    assert_close(got, expected, tolerance(torch.float64, 100))
    if name == "chained":
        assert got[1].skipped.tolist() == [0, 2, 0]


def test_vmapped_init_gives_each_member_a_count_of_its_own() -> None:
    state = vmap(skip_nonfinite(adam()).init)(torch.ones(3, 2))
    assert state.inner.count.shape == state.skipped.shape == (3,)
    assert state.inner.count.stride() == state.skipped.stride() == (1,)


def test_compiled_equals_eager_and_a_new_rate_does_not_recompile() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    optimizer = skip_nonfinite(chain(clip_by_global_norm(0.5), adamw(weight_decay=0.1, amsgrad=True)))
    compiled = torch.compile(optimizer.update, backend=counter, fullgraph=True)
    params = make_params(torch.float32)
    state = optimizer.init(params)
    expected_params, expected_state, graphs = params, state, []
    for k in range(30):
        grads = make_params(torch.float32, seed=k + 1)
        if k == 7:
            grads["log_std"] = torch.tensor(math.inf)
        hyper = {**rate(0.1 / (k + 1), torch.float32), "max_grad_norm": torch.tensor(0.1 * (k + 1))}
        updates, state = compiled(grads, state, params, hyper)
        params = apply_updates(params, updates)
        graphs.append(counter.frame_count)
        updates, expected_state = optimizer.update(grads, expected_state, expected_params, hyper)
        expected_params = apply_updates(expected_params, updates)
    assert_close((params, state), (expected_params, expected_state), tolerance(torch.float32, 30))
    assert state.skipped == 1
    assert graphs[-1] == graphs[0] > 0


def test_compiled_sgd_and_rmsprop_equal_eager_in_any_insertion_order() -> None:
    optimizer = chain(rmsprop(centered=True, momentum=0.5), sgd(momentum=0.9, dampening=0.1))
    params, grads = make_params(torch.float64), make_params(torch.float64, seed=1)
    state = optimizer.update(grads, optimizer.init(params), params, {})[1]
    turned = {key: grads[key] for key in reversed(list(grads))}
    compiled = torch.compile(optimizer.update, backend="aot_eager", fullgraph=True)
    assert_close(compiled(turned, state, params, rate(0.1)), optimizer.update(grads, state, params, rate(0.1)), tolerance(torch.float64, 30))


@each_optimizer
def test_meta_gradients_equal_central_differences(name: str) -> None:
    optimizer, params = BUILT[name](), make_params(torch.float64)

    def after_training(learning_rate: Tensor, scale: Tensor) -> Tensor:
        def loss(p: Any) -> Tensor:
            return tree.map(lambda x: (torch.cos(x) * scale).sum(), p)["log_std"] + (torch.sin(p["layers"][0]["weight"]) ** 2).sum() * scale**2

        p, state = params, optimizer.init(params)
        for _ in range(3):
            updates, state = optimizer.update(grad(loss)(p), state, p, {"learning_rate": learning_rate})
            p = apply_updates(p, updates)
        return loss(p)

    at = torch.tensor(0.05, dtype=torch.float64), torch.tensor(1.3, dtype=torch.float64)
    got = grad(after_training, argnums=(0, 1))(*at)
    for i in range(2):
        shift = [torch.tensor(1e-5 if j == i else 0.0, dtype=torch.float64) for j in range(2)]
        up, down = (after_training(*(a + sign * s for a, s in zip(at, shift, strict=True))) for sign in (1, -1))
        torch.testing.assert_close(got[i], (up - down) / 2e-5, rtol=1e-6, atol=1e-8)


@each_optimizer
def test_meta_gradients_are_finite_where_the_gradient_is_zero(name: str) -> None:
    optimizer = BUILT[name]()
    params = {"w": torch.zeros(3, dtype=torch.float64)}

    def first_update(grads: Tensor, learning_rate: Tensor) -> Tensor:
        return optimizer.update({"w": grads}, optimizer.init(params), params, {"learning_rate": learning_rate})[0]["w"]

    at = params["w"], torch.tensor(0.1, dtype=torch.float64)
    slopes = jacrev(first_update, argnums=(0, 1))(*at)
    assert all(torch.isfinite(x).all() for x in slopes)
    assert torch.equal(slopes[1], torch.zeros(3, dtype=torch.float64))
    curvature = jacrev(jacrev(lambda g: first_update(g, at[1]).sum()))(at[0])
    assert torch.isfinite(curvature).all()
    if name == "adam":
        # m_hat = g and v_hat = g^2, so the slope of -rate * g / (|g| + eps) at 0 is -rate / eps.
        torch.testing.assert_close(slopes[0], -0.1 / 1e-8 * torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("optimizer", [adam(eps=0.0), adam(eps=0.0, amsgrad=True), rmsprop(eps=0.0), rmsprop(eps=0.0, centered=True)])
def test_without_eps_an_element_without_gradient_stays(optimizer: Optimizer) -> None:
    params = torch.ones(2)
    grads = torch.tensor([0.0, 1.0])
    got, _ = run(optimizer, params, [grads] * 2, rate(0.1, torch.float32))
    assert got[0] == 1
    assert got[1] < 1


# ---- clipping ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(seed=st.integers(0, 10_000), exponent=st.integers(-12, 12), max_norm=st.floats(1e-3, 1e3))
def test_clip_equals_torch(dtype: torch.dtype, seed: int, exponent: int, max_norm: float) -> None:
    grads = tree.map(lambda x: x * 10.0**exponent, make_params(dtype, seed=seed))
    twins = [torch.zeros_like(x).requires_grad_() for x in tree.leaves(grads)]
    for x, g in zip(twins, tree.leaves(grads), strict=True):
        x.grad = g.clone()
    norm = torch.nn.utils.clip_grad_norm_(twins, max_norm)
    got, got_norm = clip_global_norm(grads, max_norm)
    tol = tolerance(dtype, 16)
    torch.testing.assert_close(got_norm, norm, rtol=tol, atol=0.0)
    for a, x in zip(tree.leaves(got), twins, strict=True):
        torch.testing.assert_close(a, x.grad, rtol=tol, atol=0.0)
    assert global_norm(got) <= max_norm * (1 + tol)
    assert_close(chain(clip_by_global_norm(max_norm)).update(grads, ((),), grads, {})[0], got, 0.0)


def test_clip_by_hand_and_unchanged_within_the_limit() -> None:
    grads = {"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])}
    clipped, norm = clip_global_norm(grads, 1.0)
    assert norm == 5
    torch.testing.assert_close(clipped, {"a": torch.tensor([0.6]), "b": torch.tensor([[0.8]])})
    for limit in (5.1, math.inf, torch.tensor(5.1), torch.tensor(math.inf)):
        assert_same_bits(clip_global_norm(grads, limit)[0], grads)
    zeros = tree.map(torch.zeros_like, grads)
    assert_same_bits(clip_global_norm(zeros, 1.0)[0], zeros)


@pytest.mark.parametrize("size", [1e30, 3e38, 1e-30])
def test_norm_neither_overflows_nor_underflows(size: float) -> None:
    grads = {"a": torch.tensor([3.0, 0.0]) * (size / 4), "b": torch.tensor(size)}
    clipped, norm = clip_global_norm(grads, 0.5)
    if size < 3e38:
        assert math.isclose(float(norm), 1.25 * float(grads["b"]), rel_tol=1e-6)
    if size > 1:
        torch.testing.assert_close(clipped, {"a": torch.tensor([0.3, 0.0]), "b": torch.tensor(0.4)})
    else:
        assert_same_bits(clipped, grads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_clipping_narrow_gradients_keeps_the_digits_of_the_factor(dtype: torch.dtype):
    grads = [torch.full((100_000,), 6e4).to(dtype)]
    clipped, norm = clip_global_norm(grads, 0.5)
    assert_close(clipped[0].double(), torch.full((100_000,), 0.5 / 100_000**0.5, dtype=torch.float64), 2.0**-8)
    assert norm.dtype == torch.float32


def test_norm_of_special_trees() -> None:
    assert global_norm({}) == 0
    assert global_norm({"n": torch.tensor([3])}) == 0
    assert global_norm({"x": torch.tensor([math.inf, 1.0])}) == math.inf
    assert torch.isnan(global_norm({"x": torch.tensor([math.inf, math.nan])}))
    assert torch.isnan(clip_global_norm({"x": torch.tensor([math.nan, 1.0])}, 1.0)[0]["x"]).all()
    assert torch.isnan(clip_global_norm({"x": torch.tensor([1.0])}, torch.tensor(-1.0))[0]["x"]).all()
    assert torch.equal(grad(lambda x: global_norm({"a": x, "b": x}))(torch.zeros(3)), torch.zeros(3))
    x = torch.tensor([3.0, 4.0], dtype=torch.float64)
    torch.testing.assert_close(grad(global_norm)(x), x / 5)
    torch.testing.assert_close(
        jacrev(lambda g: clip_global_norm(g, 1e-3)[0])(x), (torch.eye(2, dtype=torch.float64) - torch.outer(x, x) / 25) * 2e-4, rtol=1e-5, atol=0
    )


def test_limit_can_come_from_hyper() -> None:
    grads = torch.tensor([3.0, 4.0])
    for configured in (None, math.inf, 2.0):
        clip = clip_by_global_norm(configured)
        got, state = clip.update(grads, clip.init(grads), grads, {"max_grad_norm": torch.tensor(1.0)})
        torch.testing.assert_close(got, torch.tensor([0.6, 0.8]))
        assert state == ()
    assert torch.equal(clip_by_global_norm(None).update(grads, (), grads, {})[0], grads)


@pytest.mark.parametrize("wrong", [-1, 0, math.nan, -math.inf, True, "1.0"])
def test_limits_out_of_domain_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="max_norm"):
        clip_by_global_norm(wrong)


# ---- chain and skip ----


def test_chain_passes_updates_through_in_order() -> None:
    params, grads = make_params(torch.float64), make_params(torch.float64, seed=1)
    both = chain(clip_by_global_norm(0.1), sgd(0.5))
    got, state = both.update(grads, both.init(params), params, {})
    expected = tree.map(lambda x: -0.5 * x, clip_global_norm(grads, 0.1)[0])
    assert_close(got, expected, 1e-15)
    assert state[0] == ()
    assert state[1].count == 1
    assert_same_bits(chain().update(grads, chain().init(params), params, {}), (grads, ()))
    nested = chain(chain(clip_by_global_norm(0.1)), chain(sgd(0.5), chain()))
    assert_same_bits(nested.update(grads, nested.init(params), params, {})[0], got)
    with pytest.raises(ValueError, match="argument 1"):
        chain(adam(), "sgd")  # pyright: ignore[reportArgumentType]


@given(bad=st.sampled_from([math.nan, math.inf, -math.inf]), where=st.sampled_from(["layers", "log_std"]), at=st.integers(0, 4))
def test_skip_keeps_everything_and_counts(bad: float, where: str, at: int) -> None:
    inner = chain(clip_by_global_norm(0.5), adamw(weight_decay=0.1))
    optimizer = skip_nonfinite(inner)
    params = expected = make_params(torch.float32)
    state, expected_state = optimizer.init(params), inner.init(params)
    for k in range(5):
        grads = make_params(torch.float32, seed=k + 1)
        if k == at:
            spoiled = (
                {**grads, "log_std": torch.tensor(bad)}
                if where == "log_std"
                else {**grads, "layers": [{**grads["layers"][0], "bias": torch.tensor([1.0, bad])}]}
            )
            before = state
            updates, state = optimizer.update(spoiled, state, params, {})
            assert_same_bits(updates, tree.map(torch.zeros_like, params))
            assert_same_bits(state.inner, before.inner)
            assert state.skipped == before.skipped + 1
        updates, state = optimizer.update(grads, state, params, {})
        params = apply_updates(params, updates)
        updates, expected_state = inner.update(grads, expected_state, expected, {})
        expected = apply_updates(expected, updates)
    assert_same_bits((params, state.inner), (expected, expected_state))
    assert state.skipped == 1


def test_skip_refuses_a_step_that_would_spoil_the_state() -> None:
    # The square of 1e30 is infinite in single precision: unguarded, Adam would never move this element again.
    params = torch.ones(1)
    optimizer = skip_nonfinite(adam())
    state = optimizer.init(params)
    updates, state = optimizer.update(torch.tensor([1e30]), state, params, {})
    assert updates == 0
    assert state.skipped == 1
    assert state.inner.nu == 0
    updates, state = optimizer.update(torch.tensor([1.0]), state, params, rate(math.nan, torch.float32))
    assert updates == 0
    assert state.skipped == 2
    updates, state = optimizer.update(torch.tensor([1.0]), state, params, {})
    assert updates < 0
    assert state.skipped == 2


def test_skip_sends_no_nan_back() -> None:
    optimizer = skip_nonfinite(chain(clip_by_global_norm(0.5), adam()))
    params = torch.ones(2)

    def update(scale: Tensor, learning_rate: Tensor) -> Tensor:
        grads = scale * torch.tensor([1.0, math.nan])
        return optimizer.update(grads, optimizer.init(params), params, {"learning_rate": learning_rate})[0].sum()

    assert grad(update, argnums=1)(torch.tensor(2.0), torch.tensor(0.1)) == 0


# ---- options and names ----


@pytest.mark.parametrize(
    ("factory", "option", "value"),
    [
        *[(f, "learning_rate", v) for f in (adam, adamw, sgd, rmsprop) for v in (-1.0, math.nan, math.inf, True, "1e-4", None, torch.tensor(0.1))],
        *[(f, "weight_decay", v) for f in (adam, adamw, sgd, rmsprop) for v in (-0.1, math.nan, False)],
        *[(f, "eps", v) for f in (adam, adamw, rmsprop) for v in (-1, math.nan, math.inf, True)],
        *[(f, "betas", v) for f in (adam, adamw) for v in (0.9, (0.9,), (0.9, 1.0), (-0.1, 0.9), (True, 0.9), (0.9, math.nan), "ab")],
        *[(f, "maximize", v) for f in (adam, adamw, sgd, rmsprop) for v in (1, "false", None)],
        *[(f, "foreach", "no") for f in (adam, adamw, sgd, rmsprop)],
        *[(f, "amsgrad", 0) for f in (adam, adamw)],
        *[(sgd, n, v) for n in ("momentum", "dampening") for v in (-0.1, 1.5, math.nan, True)],
        (sgd, "nesterov", True),
        *[(rmsprop, "alpha", v) for v in (-0.1, 1.0, 99, math.nan)],
        *[(rmsprop, "momentum", v) for v in (-0.1, 9.0, True)],
        (rmsprop, "centered", "true"),
    ],
)
def test_options_out_of_domain_are_refused(factory: Callable, option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=option):
        factory(**{option: value})


def test_nesterov_needs_momentum_without_dampening() -> None:
    with pytest.raises(ValueError, match="nesterov"):
        sgd(momentum=0.9, dampening=0.1, nesterov=True)


def test_configuration_builds_what_it_names() -> None:
    assert get_registered_optimizer_names() == ["adam", "adamw", "rmsprop", "sgd"]
    params = make_params(torch.float64)
    for cfg, expected in [
        (OptimizerCfg(), adam(3e-4)),
        (OptimizerCfg("SGD", 0.5, {"momentum": 0.9}), sgd(0.5, momentum=0.9)),
        (coerce_optimizer_cfg({"name": "adamw", "kwargs": {"betas": [0.8, 0.9]}}), adamw(3e-4, betas=(0.8, 0.9))),
        (coerce_optimizer_cfg({"name": "rmsprop", "learning_rate": 0}), rmsprop(0.0)),
    ]:
        assert_same_bits(run(build_optimizer(cfg), params, [params] * 2, {}), run(expected, params, [params] * 2, {}))


def test_configuration_may_be_a_mapping_and_is_nothing_else() -> None:
    built, one = build_optimizer({"name": "sgd", "learning_rate": 0.5}), {"w": torch.ones(1)}
    assert built.update(one, built.init(one), one, {})[0]["w"].item() == -0.5
    with pytest.raises(TypeError, match="optimizer must be a mapping, OptimizerCfg or None, got str"):
        build_optimizer("sgd")


def test_configuration_is_checked_when_it_is_made() -> None:
    for kwargs, pattern in [
        ({"name": "adma"}, "did you mean 'adam'"),
        ({"name": None}, "known: adam"),
        ({"learning_rate": -1}, "learning_rate"),
        ({"learning_rate": "1e-4"}, "learning_rate"),
        ({"kwargs": {"lr": 0.1}}, r"optimizer\.learning_rate"),
        ({"kwargs": {"learning_rate": 0.1}}, r"optimizer\.learning_rate"),
        ({"kwargs": {"weight-decay": 0.1}}, r"did you mean 'weight_decay'\? \(allowed: amsgrad, betas"),
        ({"name": "sgd", "kwargs": {"betas": (0.9, 0.99)}}, "'sgd' has no option 'betas'"),
        ({"kwargs": {"eps": -1}}, "eps"),
        ({"kwargs": None}, "kwargs must be a mapping"),
    ]:
        with pytest.raises(ValueError, match=pattern):
            OptimizerCfg(**kwargs)
    with pytest.raises(ValueError, match="did you mean 'learning_rate'"):
        coerce_optimizer_cfg({"learning_rat": 0.1})
    for value in ("adam", 3, [("name", "adam")]):
        with pytest.raises(TypeError, match="optimizer must be a mapping"):
            coerce_optimizer_cfg(value)  # pyright: ignore[reportArgumentType]


def test_configuration_is_frozen_and_owns_its_options() -> None:
    options: dict[str, Any] = {"betas": [0.8, 0.9]}
    cfg = OptimizerCfg(kwargs=options)
    options["betas"].append(3)
    assert cfg.kwargs == {"betas": [0.8, 0.9]}
    assert cfg == coerce_optimizer_cfg(cfg) == OptimizerCfg("Adam", kwargs={"betas": [0.8, 0.9]})
    assert coerce_optimizer_cfg(None) == OptimizerCfg()
    with pytest.raises(AttributeError):
        cfg.name = "sgd"  # pyright: ignore[reportAttributeAccessIssue]


def test_registering_an_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    from frl.optim import registry

    monkeypatch.setattr(registry._OPTIMIZERS, "_table", dict(registry._OPTIMIZERS._table))

    @register_optimizer("signed")
    def signed(learning_rate: float, sharpness: float) -> Optimizer:
        return chain(sgd(learning_rate * sharpness))

    register_optimizer("Plain", sgd)
    assert get_registered_optimizer_names() == ["adam", "adamw", "plain", "rmsprop", "sgd", "signed"]
    params = torch.ones(1)
    assert run(build_optimizer(OptimizerCfg("signed", 0.5, {"sharpness": 2.0})), params, [params], {})[0] == 0
    with pytest.raises(ValueError, match="needs sharpness"):
        OptimizerCfg("signed")
    with pytest.raises(ValueError, match="already registered"):
        register_optimizer("sgd", adam)
    with pytest.raises(ValueError, match="callable"):
        register_optimizer("other", 3)  # pyright: ignore[reportArgumentType]
    assert register_optimizer("sgd", adam, override=True) is adam
