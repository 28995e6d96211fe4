"""A step in parts is the step on the whole: written out, compiled, and side by side on threads."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from frl import compile as compiler
from frl import rng
from frl import scan as scans
from frl.algorithms import epochs
from frl.native import library
from frl.parts import in_parts, part_count
from frl.scan import scan
from tests.strategies import assert_trees_close
from tests.test_ppo import algorithm, begin

SIDE_BY_SIDE = pytest.mark.skipif(not library.has_products(), reason="this build of torch offers no matrix products to C++")


@contextlib.contextmanager
def threads(n):
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def part(w, h, x):
    y = torch.tanh(x["a"] @ w + h["bias"])
    return {"product": x["a"].mT @ y, "largest": y.amax(), "count": x["seen"].sum()}


def rest(w, h, x, results):
    total = sum((r["product"] for r in results[1:]), results[0]["product"])
    bias = h["bias"] + x["rate"] * total.mean(0)
    largest = torch.stack([r["largest"] for r in results]).amax()
    return {"bias": bias, "seen": h["seen"] + sum(r["count"] for r in results)}, {"largest": largest, "bias": bias}


STEP = in_parts(part, rest)


def problem(pieces, steps, rows, dtype=torch.float32):
    keys = rng.split(rng.key(steps), 4)
    w, bias = 0.5 * rng.normal(keys[0], (3, 4), dtype), rng.normal(keys[1], (4,), dtype)
    a, seen = rng.normal(keys[2], (steps, pieces * rows, 3), dtype), rng.uniform(keys[3], (steps, pieces * rows)) < 0.5
    cut = tuple({"a": p.contiguous(), "seen": s.contiguous()} for p, s in zip(a.chunk(pieces, 1), seen.chunk(pieces, 1), strict=True))
    rate = torch.linspace(0.1, 1, steps, dtype=dtype)
    return w, {"bias": bias, "seen": torch.tensor(0)}, {"parts": cut, "rest": {"rate": rate}}, {"a": a, "seen": seen}


def whole(w, carry, xs, a):
    """The loop over whole minibatches, written out."""
    told = []
    for t, rate in enumerate(xs["rest"]["rate"]):
        carry, y = rest(w, carry, {"rate": rate}, [part(w, carry, {"a": a["a"][t], "seen": a["seen"][t]})])
        told.append(y)
    return carry, {name: torch.stack([y[name] for y in told]) for name in told[0]}


@settings(max_examples=15, deadline=None)
@given(pieces=st.integers(1, 4), steps=st.integers(1, 6), rows=st.integers(1, 5), double=st.booleans())
def test_parts_add_up_to_the_whole(pieces, steps, rows, double):
    w, carry, xs, a = problem(pieces, steps, rows, torch.float64 if double else torch.float32)
    assert_trees_close(scan(STEP, w, carry, xs, mode="eager"), whole(w, carry, xs, a), ops=500)


@SIDE_BY_SIDE
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("mode", ["aot_eager", "inductor"])
def test_threads_change_nothing(mode, count):
    w, carry, xs, a = problem(2, 5, 8)
    with threads(count):
        scans._plans.clear()
        got = scan(STEP, w, carry, xs, mode=mode)
        again = scan(STEP, w, carry, xs, mode=mode)
        [(plan, _)] = scans._plans.values()
    assert_trees_close(got, whole(w, carry, xs, a), ops=500)
    assert all(torch.equal(x, y) for x, y in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(again), strict=True))
    if mode == "inductor":
        calls = {call[0] for call in plan.loop(False).forward_side.program.calls}
        assert ("beside" in calls) == (count == 2)


@SIDE_BY_SIDE
def test_members_of_a_population_run_a_step_in_parts():
    w, carry, xs, a = problem(2, 4, 8)
    ws = torch.stack([w, 2 * w])
    with threads(2):
        got = torch.func.vmap(lambda v: scan(STEP, v, carry, xs, mode="inductor")[1]["bias"])(ws)
    for member, v in zip(got, ws, strict=True):
        assert_trees_close(member, whole(v, carry, xs, a)[1]["bias"], ops=500)


@SIDE_BY_SIDE
def test_an_error_in_a_part_is_an_error():
    divided = in_parts(lambda p, c, x: 7 // (x - 1), lambda p, c, x, results: (c + x + sum(results), c))
    xs = {"parts": (torch.tensor([[3], [2]]), torch.tensor([[2], [1]])), "rest": torch.tensor([[1], [1]])}
    with threads(2), pytest.raises(RuntimeError, match="divided an integer by zero"):
        scan(divided, (), torch.tensor([0]), xs, mode="inductor")


def test_a_step_has_a_part_for_each_thread_where_it_is_worth_one():
    with threads(2):
        cpu = torch.device("cpu")
        assert [part_count(n, cpu) for n in (1, 511, 512, 1 << 20)] == [1, 1, 2, 2]
        assert part_count(1 << 20, torch.device("cuda")) == 1
    with threads(1):
        assert part_count(1 << 20, cpu) == 1


@pytest.mark.parametrize("options", [{}, {"normalize_advantage_per_mini_batch": True}, {"schedule": "adaptive", "desired_kl": 0.01, "early_stop_kl": 0.5}])
@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
def test_an_update_in_parts_is_the_update(monkeypatch, options, mode):
    """Five parts of minibatches that five does not divide."""
    algo = algorithm(compile_mode=mode, **options)
    state, rollout = begin(algo, seed=4)
    expected = algo.update(state, rollout)
    monkeypatch.setattr(epochs, "part_count", lambda samples, device: 5)
    got = algo.update(state, rollout)
    assert_trees_close((got.params, got.opt_state), (expected.params, expected.opt_state), ops=2000)
    for name, value in expected.metrics.items():
        torch.testing.assert_close(got.metrics[name], value, rtol=1e-9, atol=1e-11, equal_nan=True, msg=name)


@pytest.mark.parametrize("at_once", [1, 1 << 30])
def test_how_many_epochs_are_put_in_order_at_once_changes_nothing(monkeypatch, at_once):
    algo = algorithm(n_epochs=6)
    state, rollout = begin(algo, seed=5)
    expected = algo.update(state, rollout)
    monkeypatch.setattr(epochs, "_AT_ONCE", at_once)
    got = algo.update(state, rollout)
    assert all(torch.equal(x, y) for x, y in zip(torch.utils._pytree.tree_leaves(got.params), torch.utils._pytree.tree_leaves(expected.params), strict=True))
    assert torch.equal(got.metrics["steps"], expected.metrics["steps"])


@SIDE_BY_SIDE
@pytest.mark.parametrize("n", [1, 2, 1023, 1024, 5000])
def test_compiled_code_sorts_as_torch_does(n):
    words = torch.stack([rng.bits(rng.key(n), (n,)) << 31, -(rng.bits(rng.key(1), (n,)) % 5), torch.full((n,), -3)])

    def ordered(x):
        return torch.sort(x, dim=-1).values

    for count in (1, 2):
        with threads(count):
            assert torch.equal(compiler.jit(ordered, mode="inductor")(words), ordered(words))


@SIDE_BY_SIDE
def test_an_order_that_is_asked_for_with_the_values_is_right_too():
    words = rng.bits(rng.key(3), (2, 50))
    values, order = compiler.jit(lambda x: tuple(torch.sort(x, dim=-1)), mode="inductor")(words)
    assert torch.equal(words.gather(-1, order), values)
    assert torch.equal(values, words.sort(-1).values)
