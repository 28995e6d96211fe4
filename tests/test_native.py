"""The native loop: it gives what the eager loop gives, in every arrangement, and steps aside where it cannot."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.func import grad

from frl import compile as compiler
from frl import philox, rng
from frl import scan as scans
from frl.native import library
from frl.native.loop import Loop, dry_run
from frl.one_operation import as_one_operation
from frl.returns import discounted_suffix_sums
from frl.scan import scan, scan_shards
from frl.suffix_sums import applies
from tests.strategies import assert_trees_close, draw
from tests.tolerances import tolerance

pytestmark = pytest.mark.skipif(not library.has_products(), reason="this build of torch offers no matrix products to C++")


def step(params, carry, x):
    """Rows last; a product of every layout, a carry that is saved for the backward, a constant one, an integer one, a y without a gradient."""
    h = torch.tanh(params["w"] @ carry["h"] + params["b"][:, None] + x)
    back = (h.mT @ params["w"]).mT
    new = {"h": 0.7 * h + 0.1 * back * carry["scale"], "scale": carry["scale"], "t": carry["t"] + 1}
    return new, {"sum": (h * carry["h"]).sum(0), "time": carry["t"] * 2, "h": h.detach()}


def problem(rows, steps, dtype=torch.float32, size=5):
    key = rng.split(rng.key(rows + 31 * steps), 4)
    params = {"w": 0.4 * rng.normal(key[0], (size, size), dtype), "b": rng.normal(key[1], (size,), dtype)}
    carry = {"h": rng.normal(key[2], (size, rows), dtype), "scale": torch.full((rows,), 0.5, dtype=dtype), "t": torch.tensor(3)}
    return params, carry, rng.normal(key[3], (steps, size, rows), dtype)


def loss(params, h, xs, rest, mode, memory="save", shards=1):
    carry = {**rest, "h": h}
    if shards > 1:
        cut = lambda x: [p.contiguous() for p in x.chunk(shards, -1)] if x.ndim else [x] * shards
        carries = [dict(zip(carry, parts, strict=True)) for parts in zip(*map(cut, carry.values()), strict=True)]
        results = scan_shards(step, params, carries, list(xs.chunk(shards, -1)), memory=memory, mode=mode)
    else:
        results = [scan(step, params, carry, xs, memory=memory, mode=mode)]
    return sum((c["h"].square().sum() + y["sum"].sin().sum() for c, y in results), torch.zeros((), dtype=xs.dtype))


def gradient(params, carry, xs, mode, **options):
    return grad(lambda p, h, x: loss(p, h, x, carry, mode, **options), argnums=(0, 1, 2))(params, carry["h"], xs)


def loops():
    return [loop for plan, _ in scans._plans.values() for loop in plan._loops.values()]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.integers(1, 17), memory=st.sampled_from(["save", "recompute"]), double=st.booleans())
def test_gradients_equal_the_eager_loop(steps, memory, double):
    params, carry, xs = problem(4, steps, torch.float64 if double else torch.float32)
    got = gradient(params, carry, xs, "inductor", memory=memory)
    assert_trees_close(got, gradient(params, carry, xs, "eager"), ops=2000)
    assert any(isinstance(loop, Loop) for loop in loops())


@settings(max_examples=6, deadline=None)
@given(steps=st.integers(1, 9), memory=st.sampled_from(["save", "recompute"]))
def test_shards_equal_the_whole(steps, memory):
    params, carry, xs = problem(8, steps)
    got = gradient(params, carry, xs, "inductor", memory=memory, shards=2)
    assert_trees_close(got, gradient(params, carry, xs, "eager"), ops=2000)
    assert (True, 2) in {key for plan, _ in scans._plans.values() for key in plan._loops}


def test_shards_that_differ_are_refused():
    params, carry, xs = problem(8, 3)
    with pytest.raises(ValueError, match="shard"):
        scan_shards(step, params, [carry, {**carry, "h": carry["h"][:, :3]}], [xs, xs])


@pytest.mark.parametrize("memory", ["save", "recompute"])
def test_one_run_is_differentiated_twice_and_inputs_stay(memory):
    params, carry, xs = problem(4, 9)
    before = [x.clone() for x in (params["w"], carry["h"], xs)]

    def both(p):
        value, pull = torch.func.vjp(lambda q: loss(q, carry["h"], xs, carry, "inductor", memory), p)
        return pull(torch.ones_like(value))[0], pull(2 * torch.ones_like(value))[0]

    once, twice = both(params)
    assert_trees_close(twice, {name: 2 * g for name, g in once.items()}, ops=100)
    again = both(params)[0]
    assert all(torch.equal(once[name], again[name]) for name in once), "same inputs, same bits"
    assert all(torch.equal(a, b) for a, b in zip(before, (params["w"], carry["h"], xs), strict=True))


def test_results_are_the_callers_own():
    """What a run gives back shares no memory with later runs or with its own backward pass."""
    params, carry, xs = problem(4, 6)
    last, ys = scan(step, params, carry, xs)
    kept = [last["h"].clone(), ys["sum"].clone()]
    ys["h"].fill_(7.0)
    scan(step, params, {**carry, "h": carry["h"] + 1}, xs)
    assert torch.equal(last["h"], kept[0])
    assert torch.equal(ys["sum"], kept[1])

    def run(p):
        c, y = scan(step, p, carry, xs)
        return c["h"].square().sum() + y["sum"].sin().sum(), y["h"]

    _, pull, seen = torch.func.vjp(run, params, has_aux=True)
    seen.fill_(float("nan"))
    assert_trees_close(pull(torch.ones(()))[0], gradient(params, carry, xs, "eager")[0], ops=2000)


def test_memory_goes_back_to_the_pool():
    params, carry, xs = problem(4, 6)
    gradient(params, carry, xs, "inductor")
    loop = next(loop for loop in loops() if isinstance(loop, Loop) and loop.backward_side is not None)
    for _ in range(5):
        gradient(params, carry, xs, "inductor")
    assert all(len(blocks) <= 2 for blocks in loop._pool.values())


@settings(max_examples=10, deadline=None)
@given(held=st.lists(st.booleans(), min_size=4, max_size=12))
def test_memory_of_large_results_is_written_again_when_nobody_holds_it(held):
    twice = compiler.jit(lambda x: (2 * x, x + 1), mode="inductor")
    x = torch.arange(1 << 18, dtype=torch.float32)
    kept = []
    for i, hold in enumerate(held):
        double, more = twice(x + i)
        if hold:  # a view is enough, and so is an array
            kept.append((i, double[3:], more.numpy()))
    for i, double, more in kept:
        assert torch.equal(double, 2 * (x + i)[3:])
        assert torch.equal(torch.from_numpy(more), x + i + 1)
    places = set()
    for _ in range(6):
        double, more = twice(x)
        assert double.untyped_storage().data_ptr() != more.untyped_storage().data_ptr()
        places |= {double.data_ptr(), more.data_ptr()}
    assert len(places) <= 4 + 2 * len(kept)


def test_a_step_that_calls_something_else_runs_from_python():
    """The library keeps what Inductor generated and calls it step by step."""

    def sorting(params, carry, x):
        new = torch.sort(params * carry + x).values
        return new, (new * torch.arange(3)).sum()

    params, carry, xs = torch.tensor([0.5, 0.6, 0.7]), torch.ones(3), rng.normal(rng.key(1), (4, 3))
    value = lambda p, mode: scan(sorting, p, carry, xs, mode=mode)[1].square().sum()
    assert_trees_close(grad(value)(params, "inductor"), grad(value)(params, "eager"), ops=2000)
    assert any(loop is None for plan, _ in scans._plans.values() for loop in plan._loops.values())


def test_dividing_an_integer_by_zero_is_an_error():
    def dividing(params, carry, x):
        return carry // (x - 1), carry

    with pytest.raises(RuntimeError, match="divided an integer by zero"):
        scan(dividing, (), torch.tensor([6, 4]), torch.tensor([[3, 2], [1, 2]]))
    assert scan(dividing, (), torch.tensor([6, 4]), torch.tensor([[3, 2], [4, 3]]))[0].tolist() == [1, 2]


def test_a_compiled_function_is_one_library():
    """Running sums, random words and products in one call, several kernels together."""

    def mixed(key, x):
        words = rng.bits(rng.fold_in(key, x.to(torch.int64).cumsum(0)), (5,))
        return words, (x[:, None] * x).float() @ torch.ones(4, 3), x.to(torch.bool).cumsum(0), x.double().reshape(2, 2).cumsum(1)

    key, x = rng.key(4), torch.tensor([3.0, 0.0, 2.0, 5.0])
    fast = compiler.jit(mixed)
    assert_trees_close(fast(key, x), mixed(key, x), ops=10)


@settings(max_examples=25, deadline=None)
@given(
    words=st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4),
    first=st.integers(0, 2**32 - 1),
    third=st.integers(0, 2**32 - 1),
    lead=st.sampled_from([(), (3,), (2, 1), (67,), (2, 3, 5)]),
)
def test_one_operation_gives_the_words_of_the_generator(words, first, third, lead):
    c1, c3, k0, k1 = (torch.tensor(w) for w in words)
    c1, k1 = (c1 + torch.arange(torch.Size(lead).numel()).reshape(lead)) & 0xFFFFFFFF, k1.expand(lead)
    expected = rng.philox4x32((first, c1, third, c3), torch.stack((k0.expand(lead), k1), -1))
    assert torch.equal(philox.philox(c1, c3, k0, k1, first, third), expected)


def test_the_operation_is_mapped_like_the_generator():
    keys = rng.split(rng.key(9), 6).reshape(2, 3, 2)
    data = torch.arange(3) * 5_000_000_000
    words = lambda k, d: rng.bits(rng.fold_in(k, d), (3,))
    nested = lambda k, d: torch.func.vmap(torch.func.vmap(words), in_dims=(0, None))(k, d)
    assert torch.equal(compiler.jit(nested)(keys, data), nested(keys, data))


@settings(max_examples=40, deadline=None)
@given(
    steps=st.integers(1, 40),
    lead=st.sampled_from([(), (3,), (2, 5), (67,)]),
    by_row=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**31),
)
def test_suffix_sums_as_one_operation_are_those_written_out(steps, lead, by_row, dtype, seed):
    x, linked = draw(steps, *lead, seed=seed, dtype=dtype), draw(steps, *lead, seed=seed + 1) > -1
    x = torch.where(draw(steps, *lead, seed=seed + 3) > 2.5, torch.inf, x)  # an episode that overflows reaches no other
    factor = torch.sigmoid(draw(*(lead if by_row else ()), seed=seed + 2, dtype=dtype))
    with as_one_operation(True):
        assert applies(x, factor)
        got = discounted_suffix_sums(x, factor, linked)
    expected = discounted_suffix_sums(x, factor, linked)
    finite = torch.isfinite(expected)
    assert torch.equal(got[~finite].nan_to_num(), expected[~finite].nan_to_num())
    torch.testing.assert_close(got[finite], expected[finite], rtol=tolerance(dtype, 100), atol=tolerance(dtype, 100))


def test_suffix_sums_are_mapped_compiled_and_differentiated():
    x, linked = draw(9, 4, 3, dtype=torch.float32), draw(9, 4, 3, seed=1) > -1
    factors = torch.tensor([0.5, 0.9, 1.0])
    both = torch.func.vmap(discounted_suffix_sums, in_dims=(2, 0, 2))
    assert_trees_close(compiler.jit(both)(x, factors, linked), both(x, factors, linked), ops=100)
    step = lambda p, carry, t: (carry + discounted_suffix_sums(x * p, factors, linked).sum(), carry)
    gradient = lambda mode: grad(lambda p: scan(step, p, torch.zeros(()), torch.arange(3), mode=mode)[0])(torch.tensor(2.0))
    assert_trees_close(gradient("inductor"), gradient("eager"), ops=1000)


def test_graphs_are_captured_ahead_without_a_run():
    def first(x):
        return x, compiler.jit(lambda v: v.sin() + 2)(x)

    ran = []
    second = compiler.jit(lambda x, y: x * y + 1)
    call = compiler.captured_ahead(first, lambda x, y: ran.append(second(x, y)), mode="inductor")
    x = draw(7, dtype=torch.float32)
    got = call(x)
    assert torch.equal(ran[0], torch.zeros(7))
    assert len(ran) == 1
    assert_trees_close(got[1], x.sin() + 2)
    graphs = compiler.graph_count()
    assert_trees_close(second(*got), x * got[1] + 1)
    call(x)
    assert compiler.graph_count() == graphs + 1
    assert len(ran) == 1


def test_a_dry_run_goes_through_the_loops_and_leaves_the_next_run_as_it_is():
    params, carry, xs = problem(6, 5)

    def value(p, mode):
        final, y = scan(step, p, carry, xs, mode=mode)
        return final["h"].square().sum() + y["sum"].sum()

    with dry_run():
        dry = grad(value)(params, "inductor")
    assert all(not bool(g.any()) for g in dry.values())
    assert_trees_close(grad(value)(params, "inductor"), grad(value)(params, "eager"), ops=2000)
