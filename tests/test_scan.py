"""The time loop: compiled equals eager under every transform, any length runs the same graphs, and what cannot be right is refused."""

# The stubs of torch.func know neither argnums nor has_aux, and wrong arguments are passed on purpose.
# pyright: reportCallIssue=false, reportAssignmentType=false, reportArgumentType=false, reportUnusedExpression=false

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

from frl import compile as compiler
from frl import tree
from frl.compile import graph_count
from frl.gradients import clip_adjoint, clip_adjoint_tree
from frl.scan import scan
from tests.strategies import HORIZONS, QUICK, assert_trees_close, assert_trees_equal, copy_of, draw
from tests.tolerances import tolerance

CAPTURED = "aot_eager"  # captures and partitions the step as the real compiler does, without its minutes
N, D, T = 5, 3, 7


@pytest.fixture(autouse=True)
def _no_fallback(monkeypatch):
    """A step that silently ran eagerly would make every comparison here vacuous."""
    monkeypatch.setattr(compiler, "_warned", False)
    monkeypatch.setattr(compiler, "_broken", False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="frl could not compile")
        yield


def step(params, carry, x):
    """A little of everything: a matrix product, an integer, a constant leaf that passes through, outputs that carry no gradient."""
    h = torch.tanh(carry["x"] @ params["w"] + x["u"])
    new = carry["x"] * 0.9 + h * 0.1
    count = carry["n"] + 1
    y = {"r": -(new**2).sum(-1), "n": count, "up": new[..., 0] > 0, "still": new.detach()}
    return {"x": new, "n": count, "const": carry["const"]}, y


W, X0, U = draw(D, D), draw(N, D, seed=1), draw(T, N, D, seed=2)
WS, XS, US = draw(4, D, D, seed=3), draw(6, N, D, seed=4), draw(T, N, 4, D, seed=5)


def start(x=X0):
    return {"x": x, "n": torch.zeros(N, dtype=torch.int64, device=x.device), "const": torch.ones(N, dtype=x.dtype, device=x.device)}


def play(mode, w=W, u=U, x0=X0, **options):
    return scan(step, {"w": w}, start(x0), {"u": u}, mode=mode, **options)


def loss(mode, w, u, x0, **options):
    """Every step and every leaf counts, with unequal weights."""
    end, ys = play(mode, w, u, x0, **options)
    weights = torch.arange(1, u.shape[0] + 1, dtype=u.dtype, device=u.device)[:, None]
    return (ys["r"] * weights).sum() + (end["x"] ** 3).sum()


def per_step(mode, w):
    return play(mode, w)[1]["r"].sum(1)


def pulled_back_twice(mode):
    value, pull = vjp(lambda w: loss(mode, w, U, X0), W)
    return pull(torch.ones_like(value)), pull(torch.full_like(value, 2.0)), value


def autograd(mode, order):
    w = W.clone().requires_grad_()
    (g,) = torch.autograd.grad(loss(mode, w, U, X0), w, create_graph=order == 2)
    return g if order == 1 else torch.autograd.grad(g.pow(2).sum(), w)


def squared(g):
    return sum(x.pow(2).sum() for x in tree.leaves(g))


TRANSFORMS = {
    "forward": play,
    "grad": lambda m: grad(lambda *a: loss(m, *a), argnums=(0, 1, 2))(W, U, X0),
    "grad of xs alone": lambda m: grad(lambda u: loss(m, W, u, X0))(U),
    "grad of carry alone": lambda m: grad(lambda x: loss(m, W, U, x))(X0),
    "grad, recomputed": lambda m: grad(lambda *a: loss(m, *a, memory="recompute"), argnums=(0, 1, 2))(W, U, X0),
    "vjp, pulled back twice": pulled_back_twice,
    "jacrev": lambda m: jacrev(lambda w: per_step(m, w))(W),
    "vmap": lambda m: vmap(lambda w: loss(m, w, U, X0))(WS),
    "vmap of xs": lambda m: vmap(lambda u: loss(m, W, u, X0), in_dims=2)(US),
    "vmap of carry": lambda m: vmap(lambda x: play(m, x0=x))(XS),
    "vmap of grad": lambda m: vmap(grad(lambda w: loss(m, w, U, X0)))(WS),
    "vmap of grad, other size": lambda m: vmap(grad(lambda w: loss(m, w, U, X0)))(WS[:3]),
    "vmap of grad, mapped out": lambda m: vmap(grad(lambda w: loss(m, w, U, X0)), out_dims=2)(WS),
    "vmap of grad of xs": lambda m: vmap(grad(lambda u: loss(m, W, u, X0)), in_dims=2)(US),
    "vmap of grad of both": lambda m: vmap(grad(lambda w, u: loss(m, w, u, X0), argnums=(0, 1)), in_dims=(0, None))(WS, U),
    "vmap of grad, recomputed": lambda m: vmap(grad(lambda w: loss(m, w, U, X0, memory="recompute")))(WS),
    "grad of vmap": lambda m: grad(lambda ws: vmap(lambda w: loss(m, w, U, X0))(ws).sum())(WS),
    "grad of vmap, shared": lambda m: grad(lambda w: vmap(lambda u: loss(m, w, u, X0), in_dims=2)(US).sum())(W),
    "vmap of vmap": lambda m: vmap(vmap(lambda w, x: loss(m, w, U, x), in_dims=(None, 0)), in_dims=(0, None))(WS, XS),
    "vmap of vmap of grad": lambda m: vmap(vmap(grad(lambda w, x: loss(m, w, U, x), argnums=(0, 1)), in_dims=(None, 0)), in_dims=(0, None))(WS, XS),
    "vmap of jacrev": lambda m: vmap(jacrev(lambda w: per_step(m, w)))(WS),
    "grad of grad": lambda m: grad(lambda w: squared(grad(lambda *a: loss(m, *a), argnums=(0, 1))(w, U, X0)))(W),
    "jacrev of jacrev": lambda m: jacrev(jacrev(lambda w: loss(m, w, U[:3], X0)))(W),
    "vmap of jacrev of grad": lambda m: vmap(jacrev(grad(lambda w: loss(m, w, U[:3], X0))))(WS),
    "grad of vmap of grad": lambda m: grad(lambda w: squared(vmap(lambda x: grad(lambda v: loss(m, v, U[:3], x))(w))(XS)))(W),
    "third derivative": lambda m: grad(lambda a: squared(grad(lambda b: squared(grad(lambda c: loss(m, c, U[:3], X0))(b)))(a)))(W),
    "autograd": lambda m: autograd(m, 1),
    "autograd twice": lambda m: autograd(m, 2),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_captured_equals_eager_under(name):
    assert_trees_close(TRANSFORMS[name](CAPTURED), TRANSFORMS[name]("eager"), ops=10_000)


def test_gradient_equals_central_differences():
    """The eager loop shares its step with the captured one; this oracle does not."""
    g = grad(lambda w: loss(CAPTURED, w, U, X0))(W)
    for i in range(D):
        for j in range(D):
            bump = torch.zeros_like(W)
            bump[i, j] = 1e-6
            difference = (loss("eager", W + bump, U, X0) - loss("eager", W - bump, U, X0)) / 2e-6
            assert float(g[i, j]) == pytest.approx(float(difference), rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_is_followed(dtype, device):
    args = W.to(device, dtype), U.to(device, dtype), X0.to(device, dtype)
    got, expected = (grad(lambda *a, m=m: loss(m, *a), argnums=(0, 1, 2))(*args) for m in (CAPTURED, "eager"))
    assert {x.dtype for x in got} == {dtype}
    assert_trees_close(got, expected, ops=1_000)


def test_complex_leaves_are_differentiated_or_refused():
    def turn(params, carry, x):
        return carry * params, (carry * x).abs()

    def total(mode, z):
        return scan(turn, z, torch.tensor(1 + 1j), torch.ones(3), mode=mode)[1].sum()

    z = torch.tensor(0.5 + 0.25j)
    try:
        got = grad(lambda z: total(CAPTURED, z))(z)
    except (TypeError, ValueError, NotImplementedError):
        return
    torch.testing.assert_close(got, grad(lambda z: total("eager", z))(z))


# -- any number of steps -------------------------------------------------------------------------------------------------------------------------------


@QUICK
@given(length=HORIZONS, memory=st.sampled_from(["save", "recompute"]))
def test_any_length_runs_the_same_graphs(length, memory):
    def both(u):
        return play(CAPTURED, u=u), grad(lambda w: loss(CAPTURED, w, u, X0, memory=memory))(W)

    both(U)
    graphs, u = graph_count(), draw(length, N, D, seed=length)
    got = both(u)
    assert graph_count() == graphs
    assert_trees_close(got, (play("eager", u=u), grad(lambda w: loss("eager", w, u, X0))(W)), ops=10_000)


@QUICK
@given(length=HORIZONS)
def test_recomputing_gives_the_bits_of_saving(length):
    u = draw(length, N, D, seed=length)
    save, recompute = (grad(lambda *a, k=k: loss(CAPTURED, *a, memory=k), argnums=(0, 1, 2))(W, u, X0) for k in ("save", "recompute"))
    assert_trees_equal(recompute, save)


@QUICK
@given(length=st.integers(2, 20), data=st.data())
def test_a_loop_is_the_chain_of_its_parts(length, data):
    cut = data.draw(st.integers(1, length - 1))
    u = draw(length, N, D, seed=length)
    end, ys = play(CAPTURED, u=u)
    middle, first = play(CAPTURED, u=u[:cut])
    last, second = scan(step, {"w": W}, middle, {"u": u[cut:]}, mode=CAPTURED)
    assert_trees_equal(last, end)
    assert_trees_equal(tree.map(lambda a, b: torch.cat((a, b)), first, second), ys)


def test_results_have_time_first():
    end, ys = play(CAPTURED)
    assert tree.map(lambda x: tuple(x.shape), end) == {"x": (N, D), "n": (N,), "const": (N,)}
    assert tree.map(lambda x: tuple(x.shape), ys) == {"r": (T, N), "n": (T, N), "up": (T, N), "still": (T, N, D)}
    assert torch.equal(ys["n"], torch.arange(1, T + 1)[:, None].expand(T, N))
    assert torch.equal(ys["still"][-1], end["x"])


@QUICK
@given(length=st.integers(1, 13), unroll=st.sampled_from([2, 4]))
def test_unrolled_steps_and_their_remainder(length, unroll):
    u = draw(length, N, D, seed=length)
    got = grad(lambda *a: loss(CAPTURED, *a, unroll=unroll), argnums=(0, 1, 2))(W, u, X0)
    assert_trees_close(got, grad(lambda *a: loss("eager", *a), argnums=(0, 1, 2))(W, u, X0), ops=10_000)
    one, many = (play(CAPTURED, u=u, unroll=k) for k in (1, unroll))
    assert_trees_close(many, one, ops=1_000)


def test_unrolled_steps_use_the_same_graphs_for_any_length():
    def run(length):
        u = draw(length, N, D, seed=length)
        return grad(lambda w: loss(CAPTURED, w, u, X0, unroll=4))(W)

    run(9)
    graphs = graph_count()
    for length in (4, 5, 8, 11, 14):
        run(length)
    assert graph_count() == graphs


def test_mapped_over_other_numbers_of_members():
    """The mapped step is compiled for its number of members: another number must not run the same graph."""
    for count in (2, 5, 1, 3):
        members = draw(count, D, D, seed=count)
        got = vmap(grad(lambda w: loss(CAPTURED, w, U, X0)))(members)
        assert got.shape == members.shape
        assert_trees_close(got, torch.stack([grad(lambda w: loss("eager", w, U, X0))(w) for w in members]), ops=10_000)


def test_graphs_are_kept_while_values_change():
    run = lambda w: (vmap(grad(lambda v: loss(CAPTURED, v, U, X0)))(w), loss(CAPTURED, w[0], U, X0))
    run(WS)
    graphs = graph_count()
    run(WS * 2)
    assert graph_count() == graphs


def test_steps_of_one_factory_are_told_apart():
    def make(factor):
        return lambda params, carry, x: (carry * factor + x, carry)

    steps = [make(1.0), make(3.0)]
    for s, factor in zip(steps, (1.0, 3.0), strict=True):
        end, _ = scan(s, (), torch.ones(2), torch.zeros(3, 2), mode=CAPTURED)
        assert torch.equal(end, torch.full((2,), factor**3))


def test_partial_functions_and_methods_are_steps_too():
    class Gain:
        def __init__(self, k):
            self.k = k

        def step(self, params, carry, x):
            return carry * self.k + x, carry

    for s in (functools.partial(lambda k, p, c, x: (c * k + x, c), 2.0), Gain(2.0).step):
        assert torch.equal(scan(s, (), torch.ones(2), torch.zeros(3, 2), mode=CAPTURED)[0], torch.full((2,), 8.0))


# -- kinds of leaves -----------------------------------------------------------------------------------------------------------------------------------


def test_integer_and_bool_carries():
    def count(params, carry, x):
        n = (carry["n"] * 1103515245 + 12345) % 2147483648
        flag = carry["flag"] ^ (x > 0)
        return {"n": n, "flag": flag, "x": carry["x"] * params + flag}, (n, flag)

    def run(mode, k):
        return scan(count, k, {"n": torch.tensor(7), "flag": torch.tensor(False), "x": torch.ones((), dtype=torch.float64)}, draw(9, seed=4), mode=mode)

    k = torch.tensor(0.5, dtype=torch.float64)
    assert_trees_equal(run(CAPTURED, k), run("eager", k))
    g = [grad(lambda k, m=m: run(m, k)[0]["x"])(k) for m in (CAPTURED, "eager")]
    assert_trees_close(g[0], g[1], ops=100)


def test_vmap_over_integer_leaves_alone():
    def lottery(params, carry, x):
        n = (carry["n"] * 1103515245 + 12345) % 2147483648
        return {"n": n, "sum": carry["sum"] + n.double()}, n % 2 == 0

    def run(mode, n, x):
        return scan(lottery, (), {"n": n, "sum": torch.zeros((), dtype=torch.float64)}, x, mode=mode)

    keys = torch.arange(4)
    assert_trees_equal(*(vmap(lambda n, m=m: run(m, n, torch.zeros(6)))(keys) for m in (CAPTURED, "eager")))
    xs = torch.arange(12).reshape(6, 2)
    assert_trees_equal(*(vmap(lambda x, m=m: scan(lambda p, c, i: (c + i, i > 3), (), torch.tensor(0), x, mode=m), in_dims=1)(xs) for m in (CAPTURED, "eager")))


def test_a_leaf_that_passes_through_and_one_that_is_replaced():
    """d/dk of k c + ... : the leaf that passes keeps the whole gradient, the replaced one only reaches the first step."""

    def s(params, carry, x):
        return {"keep": carry["keep"], "reset": torch.full_like(carry["reset"], 5.0)}, carry["keep"] * x + carry["reset"] * params

    def total(mode, keep, reset, p):
        end, y = scan(s, p, {"keep": keep, "reset": reset}, torch.tensor([1.0, 10.0, 100.0]), mode=mode)
        return y.sum() + 7 * end["keep"] + 11 * end["reset"]

    args = torch.tensor(2.0), torch.tensor(3.0), torch.tensor(4.0)
    for mode in (CAPTURED, "eager"):
        g = grad(lambda *a, m=mode: total(m, *a), argnums=(0, 1, 2))(*args)
        assert [float(x) for x in g] == [118.0, 4.0, 13.0]
        end, _ = scan(s, args[2], {"keep": args[0], "reset": args[1]}, torch.ones(3), mode=mode)
        assert (float(end["keep"]), float(end["reset"])) == (2.0, 5.0)


def unread(params, carry, x):
    return carry + x, (carry * x).sum()


@pytest.mark.parametrize("memory", ["save", "recompute"])
def test_parameters_that_are_never_read_have_gradient_zero(memory):
    def total(p, x):
        return scan(unread, p, torch.zeros(3), x, mode=CAPTURED, memory=memory)[1].sum()

    p = {"a": torch.ones(2), "b": torch.tensor(3.0)}
    g, gx = grad(total, argnums=(0, 1))(p, torch.ones(4, 3))
    assert_trees_equal(g, tree.map(torch.zeros_like, p))
    assert float(gx.abs().min()) > 0
    # Nothing at all depends on what is differentiated: still zero, not an error and not a fall back.
    assert_trees_equal(grad(lambda p: total(p, torch.ones(4, 3)))(p), tree.map(torch.zeros_like, p))
    assert_trees_equal(
        vmap(grad(lambda p: total(p, torch.ones(4, 3))))(tree.map(lambda x: torch.stack((x, x)), p)), tree.map(lambda x: torch.zeros(2, *x.shape), p)
    )


def test_a_step_whose_outputs_carry_no_gradient():
    def s(params, carry, x):
        return carry + 1, (carry * params).detach()

    for mode in (CAPTURED, "eager"):
        assert float(grad(lambda p, m=mode: scan(s, p, torch.zeros(3), torch.zeros(4, 1), mode=m)[1].sum())(torch.tensor(2.0))) == 0.0
        _, y = scan(s, torch.tensor(2.0, requires_grad=True), torch.zeros(3), torch.zeros(4, 1), mode=mode)
        assert not y.requires_grad


def test_outputs_that_carry_no_gradient_say_so():
    w = W.clone().requires_grad_()
    for mode in (CAPTURED, "eager"):
        end, ys = play(mode, w)
        assert {name: y.requires_grad for name, y in ys.items()} == {"r": True, "n": False, "up": False, "still": False}
        assert end["x"].requires_grad
        assert not end["n"].requires_grad
    assert not any(y.requires_grad for y in tree.leaves(play(CAPTURED)))


def test_empty_trees_and_empty_tensors():
    double = lambda params, carry, x: (carry, x * params)
    u = torch.arange(4.0)
    for carry in ((), None, torch.zeros(0)):
        _, y = scan(double, torch.tensor(3.0), carry, u, mode=CAPTURED)
        assert torch.equal(y, 3 * u)
        assert float(grad(lambda p, c=carry: scan(double, p, c, u, mode=CAPTURED)[1].sum())(torch.tensor(3.0))) == 6.0
    for nothing in ((), None):
        run = lambda x, n=nothing: scan(lambda p, c, x: (c + x, n), (), torch.zeros(()), x, mode=CAPTURED)
        end, y = run(u)
        assert (float(end), y) == (6.0, nothing)
        assert torch.equal(grad(lambda x, r=run: r(x)[0])(u), torch.ones(4))


def test_strides_of_inputs_and_cotangents_do_not_matter():
    def pull(mode, lay):
        def run(w, x0, u):
            end, ys = play(mode, w, u, x0)
            return end["x"], ys["r"]

        value, back = vjp(run, lay(W), lay(X0), lay(U))
        one = torch.ones((), dtype=W.dtype)
        return value, back((lay(draw(N, D, seed=8)), lay(draw(T, N, seed=9)))), back((one.expand(N, D), one.expand(T, N)))

    expected = pull("eager", lambda x: x)
    assert_trees_close(pull(CAPTURED, lambda x: x), expected, ops=10_000)
    assert_trees_close(pull(CAPTURED, lambda x: x.mT.contiguous().mT), expected, ops=10_000)
    assert_trees_close(pull(CAPTURED, lambda x: torch.stack((x, x), -1)[..., 1]), expected, ops=10_000)


# -- aliasing and mutation -----------------------------------------------------------------------------------------------------------------------------


def aliasing(params, carry, x):
    a = carry["a"]
    new = {"a": a * 0.9 + x, "b": a, "c": a.detach(), "v": carry["v"], "k": torch.ones_like(a), "p": params}
    return new, {"a": a, "a again": a, "x": x, "view": x[0], "turned": x.mT, "flat": carry["b"].reshape(-1), "wide": a.sum().expand(3), "p": params[0]}


def test_outputs_may_alias_inputs_and_each_other():
    base = X0 * 1.0
    carry = {"a": base, "b": base * 2, "c": base * 3, "v": base.mT, "k": base, "p": base * 4}

    def total(mode, carry, params, u):
        out = scan(aliasing, params, carry, u, mode=mode)
        return sum((y * torch.arange(y.numel()).reshape(y.shape)).sum() for y in tree.leaves(out)), out

    got, expected = (grad(functools.partial(total, m), argnums=(0, 1, 2), has_aux=True)(carry, X0 * 5, U) for m in (CAPTURED, "eager"))
    assert_trees_close(got, expected, ops=1_000)


@pytest.mark.parametrize("recorded", [False, True])
def test_inputs_stay_as_they_were_and_results_belong_to_the_caller(recorded):
    carry = {"a": X0.clone(), "b": X0 * 2, "c": X0 * 3, "v": X0 * 5, "k": X0 * 6, "p": X0 * 7}
    params, u = X0 * 4, U.clone()
    if recorded:
        params.requires_grad_()
    before = copy_of(tree.detach((carry, params, u)))
    out = scan(aliasing, params, carry, u, mode=CAPTURED)
    assert_trees_equal(tree.detach((carry, params, u)), before)
    results = tree.leaves(tree.detach(out))
    values = [y.clone() for y in results]
    for i, y in enumerate(results):
        y.add_(1.0 + i)
    assert all(torch.equal(y, v + (1.0 + i)) for i, (y, v) in enumerate(zip(results, values, strict=True)))
    assert_trees_equal(tree.detach((carry, params, u)), before)


def test_changing_a_result_does_not_spoil_the_backward():
    """The last carry can be one of the tensors that the step saved (the output of a tanh is)."""
    s = lambda params, carry, x: (lambda new: (new, new))(torch.tanh(carry @ params))

    def gradient(mutate):
        w = W.clone().requires_grad_()
        end, ys = scan(s, w, X0, torch.zeros(4, 1), mode=CAPTURED)
        if mutate:
            end.mul_(3.0), ys.mul_(2.0)
        else:
            end, ys = end * 3.0, ys * 2.0
        return torch.autograd.grad(end.sum() + ys.sum(), w)[0]

    assert_trees_close(gradient(True), gradient(False), ops=100)


def test_an_input_changed_before_the_backward_is_noticed():
    w, x0 = W.clone().requires_grad_(), X0.clone()
    end, _ = play(CAPTURED, w, x0=x0)
    x0.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        end["x"].sum().backward()


def test_backward_twice_needs_a_retained_graph():
    w = W.clone().requires_grad_()
    value = loss(CAPTURED, w, U, X0)
    first = torch.autograd.grad(value, w, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(value, w)[0], first)
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(value, w)


def test_in_place_code_on_fresh_tensors_is_right():
    """Adding twice to a column of a fresh tensor counts twice."""

    def s(params, carry, x):
        r = torch.zeros(N, 2, dtype=carry.dtype)
        r[:, 0] += carry[:, 0].abs()
        r[:, 0] += carry[:, 0].abs()
        moved = carry.clone()
        moved[:, 1] *= 2.0
        moved += x
        return moved, r

    g, h = (grad(lambda x, m=m: scan(s, (), x, U[:1], mode=m)[1].sum())(X0) for m in (CAPTURED, "eager"))
    assert torch.equal(g[:, 0], 2 * X0[:, 0].sign())
    assert torch.equal(g, h)
    assert_trees_close(*(grad(lambda x, m=m: loss_of(s, x, m))(X0) for m in (CAPTURED, "eager")), ops=100)


def loss_of(s, x, mode):
    end, ys = scan(s, (), x, U, mode=mode)
    return (end**2).sum() + ys.sum()


def test_a_step_that_changes_its_argument_in_place_is_refused():
    def s(params, carry, x):
        carry += x
        return carry * 2.0, carry.sum()

    mine = X0.clone()
    with pytest.raises((ValueError, RuntimeError), match="in.?place"):
        scan(s, (), mine, U, mode=CAPTURED)
    assert torch.equal(mine, X0)
    with pytest.raises((ValueError, RuntimeError), match="in.?place"):
        grad(lambda u: scan(s, (), X0.clone(), u, mode=CAPTURED)[0].sum())(U)


# -- closures ------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("transform", "w"), [(lambda f: f, W), (grad, W), (lambda f: vmap(grad(f)), WS)])
def test_a_step_may_close_over_constants(transform, w):
    constant, table = draw(D, seed=6), draw(N, D, seed=7)

    def s(params, carry, x):
        new = torch.tanh(carry * constant + x @ params) + table
        return new, (new * constant).sum(-1)

    graphs = graph_count()
    got, expected = (transform(lambda w, m=m: scan(s, w, X0, U, mode=m)[1].sum())(w) for m in (CAPTURED, "eager"))
    assert_trees_close(got, expected, ops=10_000)
    assert graph_count() > graphs


@pytest.mark.parametrize("transform", [grad, vmap])
def test_closing_over_what_is_differentiated_or_mapped_is_right_or_refused(transform):
    """Its gradient would otherwise be lost without a word."""

    def run(mode):
        def f(k):
            return scan(lambda params, carry, x: (carry * k, carry * x), (), torch.ones(()), torch.ones(3), mode=mode)[1].sum()

        return transform(f)(torch.tensor(2.0) if transform is grad else torch.tensor([2.0, 3.0]))

    try:
        got = run(CAPTURED)
    except ValueError as error:
        assert "params" in str(error)  # noqa: PT017
        return
    assert torch.equal(got, run("eager"))


def test_closing_over_a_tensor_that_autograd_records_is_right_or_refused():
    k = torch.tensor(2.0, requires_grad=True)
    s = lambda params, carry, x: (carry * k, carry * x)
    try:
        y = scan(s, (), torch.ones(()), torch.ones(3), mode=CAPTURED)[1]
    except ValueError as error:
        assert "params" in str(error)  # noqa: PT017
        return
    assert torch.autograd.grad(y.sum(), k)[0] == 5.0


def test_a_step_that_cannot_be_captured_runs_eagerly_and_spoils_nothing_else():
    def branches(params, carry, x):
        return (carry - x if carry.sum() > 0 else carry + x), carry.sum()

    u = torch.ones(4, D, dtype=torch.float64)
    run = lambda m: grad(lambda u: scan(branches, (), torch.zeros(D, dtype=torch.float64), u, mode=m)[1].sum())(u)
    with pytest.warns(RuntimeWarning, match="branches"):
        got = run(CAPTURED)
    assert torch.equal(got, run("eager"))
    graphs = graph_count()
    other = lambda params, carry, x: (carry * 2.0, x)
    scan(other, (), torch.ones(2), torch.ones(3), mode=CAPTURED)
    assert graph_count() == graphs + 1
    assert compiler._broken is False


# -- adjoint clips inside the step -----------------------------------------------------------------------------------------------------------------------


def clipped(params, carry, x):
    limit, gain = params
    carry = clip_adjoint_tree(carry, limit, rows=0)
    return carry * gain, carry[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("memory", ["save", "recompute"])
@pytest.mark.parametrize("mode", [CAPTURED, "eager"])
def test_a_clip_at_every_step_keeps_a_long_rollout_finite(mode, memory, dtype):
    """Rows that grow by 10 and halve, 60 steps: the first adjoint is the limit exactly, the second 2^-60 exactly, untouched by the first."""
    gain, limit = torch.tensor([[10.0], [0.5]], dtype=dtype), torch.tensor(1.0, dtype=dtype)
    g = grad(lambda x: scan(clipped, (limit, gain), x, torch.zeros(60, 1), mode=mode, memory=memory)[0].sum())(torch.ones(2, 1, dtype=dtype))
    assert float(g[0]) == pytest.approx(1.0, rel=tolerance(dtype, 1))
    assert float(g[1]) == 2.0**-60


def test_a_clip_inside_the_step_acts_and_equals_eager():
    def s(params, carry, x):
        push = clip_adjoint(torch.tanh(carry @ params["w"] + x), params["limit"])
        new = 1.5 * carry + push
        return new, (new**2).sum(-1)

    def run(mode, w, limit):
        return grad(lambda w: scan(s, {"w": w, "limit": limit}, X0, U, mode=mode)[1].sum())(w)

    tight, off = torch.tensor(0.3, dtype=W.dtype), torch.tensor(float("inf"), dtype=W.dtype)
    got = run(CAPTURED, W, tight)
    assert_trees_close(got, run("eager", W, tight), ops=10_000)
    assert not torch.allclose(got, run("eager", W, off), rtol=0.1)
    assert_trees_close(run(CAPTURED, W, off), run("eager", W, off), ops=10_000)
    assert_trees_close(vmap(lambda w: run(CAPTURED, w, tight))(WS), torch.stack([run("eager", w, tight) for w in WS]), ops=10_000)
    limits = torch.tensor([0.1, 1.0, 10.0], dtype=W.dtype)
    assert_trees_close(vmap(lambda c: run(CAPTURED, W, c))(limits), torch.stack([run("eager", W, c) for c in limits]), ops=10_000)


def test_the_probe_gradient_is_the_adjoint_before_clipping():
    """xs that are added to the carry: their gradient is the costate, closed form 0.5^(T-1-t)."""
    s = lambda params, carry, x: (0.5 * carry + x, ())
    g = grad(lambda x: scan(s, (), torch.zeros((), dtype=torch.float64), x, mode=CAPTURED)[0])(torch.zeros(6, dtype=torch.float64))
    assert g.tolist() == [0.5**k for k in range(5, -1, -1)]


# -- neighbours ----------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [CAPTURED, "eager"])
def test_under_torch_compile_it_is_traced_through(mode):
    def value_and_gradient(w, u, x0):
        return loss(mode, w, u, x0), grad(lambda w: loss(mode, w, u, x0))(w)

    torch._dynamo.reset()
    got = torch.compile(value_and_gradient, backend="aot_eager", fullgraph=True)(W, U[:3], X0)
    assert_trees_close(got, value_and_gradient(W, U[:3], X0), ops=10_000)


@pytest.mark.parametrize("memory", ["save", "recompute"])
def test_the_public_compiler_as_fallback(monkeypatch, memory):
    """mode="dynamo" goes through torch.compile and the autograd engine."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    got = grad(lambda *a: loss("dynamo", *a, memory=memory), argnums=(0, 1, 2))(W, U, X0), play("dynamo")
    expected = grad(lambda *a: loss("eager", *a), argnums=(0, 1, 2))(W, U, X0), play("eager")
    assert_trees_close(got, expected, ops=10_000)


def test_forward_mode_is_refused_when_captured_and_works_eagerly():
    for forward in (
        lambda m: jvp(lambda w: loss(m, w, U, X0), (W,), (W,)),
        lambda m: jacfwd(lambda x: loss(m, W, U, x))(X0),
        lambda m: jvp(grad(lambda w: loss(m, w, U, X0)), (W,), (W,)),
    ):
        with pytest.raises(RuntimeError, match="eager"):
            forward(CAPTURED)
    value, tangent = jvp(lambda w: loss("eager", w, U, X0), (W,), (W,))
    assert float(tangent) == pytest.approx(float((grad(lambda w: loss("eager", w, U, X0))(W) * W).sum()), rel=1e-10)
    assert torch.equal(value, loss("eager", W, U, X0))


def test_a_dual_tensor_is_refused_or_followed():
    with forward_ad.dual_level():
        w = forward_ad.make_dual(W, torch.ones_like(W))
        expected = forward_ad.unpack_dual(loss("eager", w, U, X0)).tangent
        try:
            got = forward_ad.unpack_dual(loss(CAPTURED, w, U, X0)).tangent
        except RuntimeError:
            return
        assert torch.allclose(got, expected)


def test_without_grad_mode_nothing_is_kept_for_a_backward():
    w = W.clone().requires_grad_()
    expected = loss("eager", W, U, X0)
    with torch.no_grad():
        value = loss(CAPTURED, w, U, X0)
    with torch.inference_mode():
        inferred = loss(CAPTURED, W, U, X0)
    assert not value.requires_grad
    assert_trees_close((value, inferred.clone()), (expected, expected), ops=1_000)
    assert not loss(CAPTURED, W, U, X0).requires_grad


# -- refusals ------------------------------------------------------------------------------------------------------------------------------------------

Z, OK = torch.zeros(3), torch.ones(4, 3)
plus = lambda params, carry, x: (carry + x, carry.sum())


@pytest.mark.parametrize("mode", [CAPTURED, "eager"])
@pytest.mark.parametrize(
    ("call", "error", "parts"),
    [
        (lambda m: scan(plus, (), Z, {}, mode=m), ValueError, "xs has no leaves"),
        (lambda m: scan(plus, (), Z, OK[:0], mode=m), ValueError, "at least one step"),
        (lambda m: scan(plus, (), Z, {"a": OK, "b": OK[:2]}, mode=m), ValueError, r"'a': 4, 'b': 2"),
        (lambda m: scan(plus, (), Z, {"a": OK, "b": torch.ones(())}, mode=m), ValueError, r"'b': None"),
        (
            lambda m: scan(lambda p, c, x: ({"a": {"b": c["a"]["b"].double()}}, x), (), {"a": {"b": Z}}, OK, mode=m),
            ValueError,
            r"a\.b: got torch\.float64, expected torch\.float32",
        ),
        (lambda m: scan(lambda p, c, x: ({"a": c["a"].sum()}, x), (), {"a": Z}, OK, mode=m), ValueError, r"a: got shape \(\), expected \(3,\)"),
        (lambda m: scan(lambda p, c, x: ({"a": c["a"]}, x), (), {"a": Z, "n": Z}, OK, mode=m), ValueError, "n: missing"),
        (lambda m: scan(lambda p, c, x: ({**c, "q": x}, x), (), {"a": Z}, OK, mode=m), ValueError, "q: unexpected"),
        (lambda m: scan(lambda p, c, x: ({"a": 1.0}, x), (), {"a": Z}, OK, mode=m), ValueError, "a: got float, expected a tensor"),
        (lambda m: scan(plus, (), Z, OK, mode="jit" if m else m), ValueError, "unknown compile mode 'jit'"),
        (lambda m: scan(plus, (), Z, OK, mode=m, memory="some"), ValueError, "unknown scan memory 'some'"),
        (lambda m: scan(plus, (), Z, OK, mode=m, unroll=0), ValueError, "unroll must be a positive integer, got 0"),
        (lambda m: scan(plus, (), Z, OK, mode=m, unroll=True), ValueError, "unroll must be a positive integer, got True"),
    ],
)
def test_wrong_calls_are_refused_by_name(mode, call, error, parts):
    with pytest.raises(error, match=parts):
        call(mode)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: scan(lambda p, c, x: (c + x * p, c), 2.0, Z, OK, mode=CAPTURED), "params"),
        (lambda: scan(lambda p, c, x: ({"a": c["a"] + x, "n": c["n"]}, x), (), {"a": Z, "n": 0}, OK, mode=CAPTURED), r"carry\.n"),
        (lambda: scan(plus, (), Z, {"a": OK, "b": 3.0}, mode=CAPTURED), r"b"),
        (lambda: scan(lambda p, c, x: (c + x, {"k": 1.0}), (), Z, OK, mode=CAPTURED), "float"),
    ],
)
def test_leaves_that_are_no_tensors_are_refused_by_name(call, name):
    with pytest.raises((ValueError, TypeError), match=name):
        call()
