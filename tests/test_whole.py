"""Functions with time loops inside as one native program."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from frl import compile as compiler
from frl import make_vec_env, rng, running_normalizer, tree
from frl import scan as scans
from frl.algorithms.apg import ApgConfig, make_apg
from frl.envs.double_integrator import double_integrator
from frl.native import library
from frl.optim import adam
from frl.policies import actor_only
from frl.scan import scan, scan_shards
from tests.strategies import assert_trees_close
from tests.test_grpo import algorithm as grpo_algorithm
from tests.test_ppo import algorithm as ppo_algorithm

pytestmark = pytest.mark.skipif(not library.has_products(), reason="this build of torch offers no matrix products to C++")


def step(params: dict[str, Tensor], carry: dict[str, Tensor], x: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    h = torch.tanh(params["w"] @ carry["h"] + x)
    new = {"h": h, "count": carry["count"] + 1, "done": h[0] > params["unused"].sum()}
    return new, {"h": h, "sum": h.sum(0), "count": new["count"]}


def problem(rows: int, steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    w, h, xs = (0.3 * rng.normal(k, s) for k, s in zip(rng.split(rng.key(rows + 100 * steps), 3), ((5, 5), (5, rows), (steps, 5, rows)), strict=True))
    return {"w": w, "unused": torch.zeros(2)}, {"h": h, "count": torch.zeros((), dtype=torch.int64), "done": torch.zeros(rows, dtype=torch.bool)}, xs


def descent(params: dict[str, Tensor], carry: dict[str, Tensor], xs: Tensor, mode: str = "inductor", shards: int = 1) -> dict[str, Any]:
    """A step down the gradient of what a loop gives, and what it gave; the gradient reaches params, the carry and the inputs."""
    found: dict[str, Any] = {}

    def loss(p: dict[str, Tensor], h: Tensor, x: Tensor) -> tuple[Tensor, Any]:
        parts, inputs = [{**carry, "h": part} for part in h.chunk(shards, -1)], list(x.chunk(shards, -1))
        if shards > 1:
            parts = [{**part, "done": done} for part, done in zip(parts, carry["done"].chunk(shards), strict=True)]
            ran = scan_shards(step, p, parts, inputs, mode=mode)
        else:
            ran = [scan(step, p, parts[0], inputs[0], mode=mode)]
        value = sum(last["h"].square().sum() + ys["sum"].sin().sum() for last, ys in ran)
        return value, ([last["count"] for last, _ in ran], torch.cat([ys["h"].detach() for _, ys in ran], -1))

    grads, found["seen"] = torch.func.grad(loss, argnums=(0, 1, 2), has_aux=True)(params, carry["h"], xs)
    norm = torch.stack([g.square().sum() for g in tree.leaves(grads)]).sum().sqrt()
    return {"params": tree.map(lambda p, g: p - 0.1 * g / norm, params, grads[0]), "grads": grads, "norm": norm, **found}


def native(fn: Any, *args: Any) -> Any:
    """``fn`` compiled, which has to become one program."""
    graphs = compiler.graph_count()
    one = compiler.whole(fn)
    result = one(*args)
    assert compiler.graph_count() > graphs
    again = compiler.graph_count()
    assert_trees_close(one(*args), result, ops=0)
    assert compiler.graph_count() == again
    leaves = [x for x in tree.leaves(args) if isinstance(x, Tensor)]
    kernel = compiler.Kernel(lambda x: tree.leaves(fn(*tree.unflatten(tree.structure(args), x))), leaves, [False] * len(leaves), "inductor")
    assert kernel.is_native(members=False), "not one program"
    return result


@settings(max_examples=6, deadline=None)
@given(rows=st.sampled_from([1, 4, 17]), steps=st.integers(1, 9))
def test_a_gradient_through_a_loop_is_one_program(rows: int, steps: int):
    args = problem(rows, steps)
    before = [x.clone() for x in tree.leaves(args)]
    assert_trees_close(native(descent, *args), descent(*args, mode="eager"), ops=2000)
    assert all(torch.equal(a, b) for a, b in zip(before, tree.leaves(args), strict=True))


def test_shards_are_one_call():
    args = problem(8, 5)
    got = native(lambda *x: descent(*x, shards=2), *args)
    assert_trees_close(got, descent(*args, mode="eager", shards=2), ops=2000)


def test_loops_follow_each_other_and_differ():
    def two(params: dict[str, Tensor], carry: dict[str, Tensor], xs: Tensor) -> Any:
        middle, first = scan(step, params, carry, xs)
        last, second = scan(step, params, middle, xs[:2] + first["h"][-1])
        return last, first["sum"].cumsum(0), torch.cat([first["h"], second["h"]])

    args = problem(4, 6)
    with torch.no_grad():
        plain = two(*args)
    assert_trees_close(native(two, *args), plain, ops=2000)


def test_members_of_one_program_are_those_alone():
    params, carry, xs = problem(4, 3)
    many = torch.stack([xs, 2 * xs, -xs])
    one = compiler.whole(descent)
    got = torch.func.vmap(lambda x: one(params, carry, x))(many)
    for i in range(3):
        assert_trees_close(tree.index(got, i), one(params, carry, many[i]), ops=0)


def test_what_is_asked_for_a_gradient_is_differentiated():
    params, carry, xs = problem(4, 3)
    one = compiler.whole(descent)
    outer = lambda f: torch.func.grad(lambda x: f(params, carry, x)["norm"])(xs)
    assert_trees_close(outer(one), outer(lambda *a: descent(*a, mode="eager")), ops=5000)


@pytest.mark.parametrize("memory", ["save", "recompute"])
def test_what_cannot_be_one_program_runs_in_parts_and_says_nothing(memory: str):
    def solved(params: dict[str, Tensor], carry: dict[str, Tensor], xs: Tensor) -> Tensor:
        def loss(p: dict[str, Tensor]) -> Tensor:
            return scan(step, p, carry, xs, memory=memory)[0]["h"].square().sum()

        grad = torch.func.grad(loss)(params)["w"]
        return torch.linalg.solve(torch.eye(5) + 0.1 * grad, xs[0])

    args = problem(4, 4)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="frl")
        got = compiler.whole(solved)(*args)
    assert_trees_close(got, solved(*args), ops=100)


def test_an_update_is_one_program_with_the_numbers_of_its_parts(monkeypatch: pytest.MonkeyPatch):
    env = make_vec_env(double_integrator(), 6)
    network = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "activation": "tanh"}}
    policy = actor_only(2, 1, network=network)
    config = ApgConfig(segment_length=4, update_horizon=8, action_adjoint_max_norm=0.01, state_adjoint_max_norm=0.05, adjoint_norm_per_step=True)

    def make() -> Any:
        return make_apg(env, policy, adam(), config, normalizer=running_normalizer(2), learning_rate=1e-2)

    one = make()
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "whole", lambda fn, mode: fn)
        parts = make()
    state, kept = one.init(rng.key(0)), []
    for _ in range(4):
        state, rollout = one.collect(state)
        with monkeypatch.context() as patch:
            patch.setattr(scans.NativeRun, "forward", None)  # of a loop that Python calls
            new = one.update(state, rollout)
        assert_trees_close(new, parts.update(state, rollout), ops=500)
        kept.append((new, [x.clone() for x in tree.leaves(new)]))
        state = new
    for new, copies in kept:  # no later program wrote into what an earlier one gave
        assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(tree.leaves(new), copies, strict=True))


# -- what programs are made of -----------------------------------------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(shape=st.sampled_from([(1,), (7,), (5, 3), (33, 2), (2, 3, 17)]), dim=st.integers(-1, 0))
def test_running_maxima_and_sorting_of_any_layout(shape: tuple[int, ...], dim: int):
    x = (rng.bits(rng.key(len(shape)), shape) % 50) - 25

    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.cummax(x, dim).values + 1, torch.cumsum(x, dim) - 1, torch.sort(x.movedim(0, -1) * 2, stable=True).values + 1

    assert_trees_close(native(fn, x), fn(x), ops=0)


@settings(max_examples=8, deadline=None)
@given(size=st.sampled_from([1, 15, 16, 33, 300]), seed=st.integers(0, 9))
def test_masks_and_both_precisions_in_one_loop(size: int, seed: int):
    a, b = rng.normal(rng.key(seed), (2, size)).unbind()
    a = torch.where(a > 1.5, torch.nan, a)

    def fn(a: Tensor, b: Tensor) -> Any:
        wide, mask = a.to(torch.float64), (a > b) | torch.isnan(a)
        kept = torch.where(mask & (wide.abs() <= 1.0), wide * b, b.to(torch.float64))
        return (
            kept.sum(),
            (kept - wide * 2).to(torch.float32) * b - a,
            mask,
            (mask.to(torch.int64) * 3 - mask.sum()).to(torch.float32),
            mask.any() & ~mask.all(),
        )

    assert_trees_close(native(fn, a, b), fn(a, b), ops=10 + size)


def test_large_results_go_past_the_cache_and_stay_the_callers():
    x = torch.linspace(-3, 3, 4_000_037)

    def fn(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        return x * scale, torch.where(x > 0, x, -scale), x.abs().sqrt() / (1 + scale.exp())

    one, kept = compiler.jit(fn), []
    for i in range(4):
        scale = torch.tensor(0.5 + i)
        result = one(x, scale)
        kept.append((scale, result))
        assert_trees_close(result, fn(x, scale), ops=10)
    for scale, result in kept:
        assert_trees_close(result, fn(x, scale), ops=10)


def test_kernels_of_many_loops_are_split_and_right():
    xs = [torch.linspace(-1, 1, 5 + i) for i in range(12)]

    def fn(xs: list[Tensor]) -> list[Tensor]:
        total = torch.stack([x.square().sum() for x in xs]).sum()
        return [x * total + i for i, x in enumerate(xs)]

    assert_trees_close(native(fn, xs), fn(xs), ops=50)


def test_code_that_the_compiler_refuses_is_compiled_as_it_was_generated(monkeypatch: pytest.MonkeyPatch):
    from frl.native import source

    monkeypatch.setattr(source, "_VECTORS", "this is no C++;")
    x = torch.linspace(-1, 1, 37)
    with pytest.warns(RuntimeWarning, match="refused code that frl had made faster"):
        got = compiler.jit(lambda x: torch.where(x > 0.123, x * 3, x.to(torch.float64).exp().to(torch.float32)))(x)
    assert_trees_close(got, torch.where(x > 0.123, x * 3, x.to(torch.float64).exp().to(torch.float32)), ops=10)


def test_threads_compile_one_after_the_other_and_leave_inductor_as_it_was():
    from torch._inductor.codegen.cpp import TilingSelect

    before = TilingSelect._select_tiling_indices
    functions = [compiler.jit(lambda x, k=k: (x * k).sin().cumsum(0) + torch.exp(x) * k) for k in range(1, 5)]
    x, found = torch.linspace(-1, 1, 40), {}

    def run(which: list[int]) -> None:
        for i in which:
            found.setdefault(i, []).append(functions[i](x))

    threads = [threading.Thread(target=run, args=(which,)) for which in ([0, 1, 2, 3], [3, 2, 1, 0])]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="frl")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert TilingSelect._select_tiling_indices is before
    for k, fn in enumerate(functions):
        assert_trees_close(found[k], [fn.eager(x)] * 2, ops=100)


# -- updates -------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_updates_of_many_minibatches_are_the_eager_ones(name: str, threads: int):
    """Permutations of several epochs are drawn, sorted and read by the same program as the steps."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        make = {"ppo": ppo_algorithm, "grpo": grpo_algorithm}[name]
        options = {"n_epochs": 3, "num_mini_batches": 4, "normalize": True} if name == "ppo" else {"n_epochs": 3, "batch_size": 10}
        fast, slow = make(**options, compile_mode="inductor"), make(**options, compile_mode="eager")
        state = fast.init(rng.key(3))
        for _ in range(2):
            state, rollout = fast.collect(state)
            new = fast.update(state, rollout)
            assert_trees_close(new, slow.update(state, rollout), ops=5000)
            state = new
    finally:
        torch.set_num_threads(before)
