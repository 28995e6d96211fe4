"""The compilation seam: what is cached, what is static, when the function itself runs, and life without a C++ compiler."""

# The stubs of torch.func know neither argnums nor has_aux, and wrong arguments are passed on purpose.
# pyright: reportCallIssue=false, reportAssignmentType=false, reportArgumentType=false, reportUnusedExpression=false

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vjp, vmap

import frl
from frl import compile as compiler
from frl import tree
from frl.compile import check_mode, compile_seconds, graph_count, jit
from frl.scan import scan
from tests.strategies import assert_trees_close, assert_trees_equal, draw

CAPTURED = "aot_eager"


@pytest.fixture(autouse=True)
def _fresh_flags(monkeypatch):
    monkeypatch.setattr(compiler, "_warned", False)
    monkeypatch.setattr(compiler, "_broken", False)


@pytest.fixture
def no_fallback():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="frl could not compile")
        yield


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


def work(pair, options):
    """A pytree in, another out, with static leaves."""
    scale = options["scale"]
    total = pair.a @ pair.b * scale
    return {"sum": total.sum(), "total": total, "name": (total if options["name"] == "plain" else -total), "none": (), "n": (total > 0).sum()}


def pair_of(*, seed=0, n=4, dtype=torch.float64):
    return Pair(a=draw(n, 3, seed=seed, dtype=dtype), b=draw(3, 2, seed=seed + 1, dtype=dtype))


STATIC = {"scale": 2.0, "name": "plain"}


@pytest.mark.usefixtures("no_fallback")
def test_result_and_structure_are_those_of_the_function():
    run = jit(work, mode=CAPTURED)
    got = run(pair_of(), STATIC)
    assert_trees_close(got, work(pair_of(), STATIC), ops=10)
    assert run.eager is work
    assert run.__name__ == "work"
    assert run.__doc__ == work.__doc__


@pytest.mark.usefixtures("no_fallback")
def test_one_graph_for_each_shape_dtype_and_static_value_and_none_for_new_numbers():
    run = jit(work, mode=CAPTURED)
    start = graph_count()

    def graphs(*args):
        assert_trees_close(run(*args), work(*args), ops=100)
        return graph_count() - start

    assert graphs(pair_of(), STATIC) == 1
    assert graphs(pair_of(seed=5), STATIC) == 1
    assert graphs(pair_of(), {"name": "plain", "scale": 2.0}) == 1
    assert graphs(pair_of(n=1), STATIC) == 2
    assert graphs(pair_of(dtype=torch.float32), STATIC) == 3
    assert graphs(pair_of(), {"scale": 3.0, "name": "plain"}) == 4
    assert graphs(pair_of(), {"scale": 2.0, "name": "minus"}) == 5
    assert graphs(pair_of(n=1), STATIC) == 5


@pytest.mark.usefixtures("no_fallback")
def test_a_value_that_changes_is_a_tensor_and_costs_no_graph():
    """Thirty updates with another learning rate each: one graph, and the values of the eager function."""
    rule = lambda x, rate, limit: torch.clamp(x - rate * x.square(), max=limit)
    run, x = jit(rule, mode=CAPTURED), draw(5)
    start = graph_count()
    for i in range(30):
        args = x + i, torch.tensor(0.1 / (i + 1), dtype=x.dtype), torch.tensor(float(i), dtype=x.dtype)
        assert torch.equal(run(*args), rule(*args))
    assert graph_count() == start + 1


@pytest.mark.usefixtures("no_fallback")
def test_static_values_that_compare_equal_are_told_apart():
    run = jit(lambda x, flag: x * (10.0 if flag is True else 1.0) + (0.5 if isinstance(flag, float) else 0.0), mode=CAPTURED)
    x = torch.ones(())
    assert [float(run(x, flag)) for flag in (1, True, 1.0, 1)] == [1.0, 10.0, 1.5, 1.0]


def test_arguments_are_left_as_they_were_and_results_belong_to_the_caller():
    run = jit(
        lambda x, y: {"x": x, "view": x.view(-1), "row": x[0], "cut": x.detach(), "turned": x.mT, "twice": (y * 2, y * 2), "wide": y.sum().expand(3)},
        mode=CAPTURED,
    )
    x, y = draw(3, 3), draw(3, seed=1)
    before = x.clone(), y.clone()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="frl could not compile")
        out = run(x, y)
    assert_trees_equal(out, run.eager(x, y))
    results = tree.leaves(out)
    values = [z.clone() for z in results]
    for i, z in enumerate(results):
        z.add_(1.0 + i)
    assert all(torch.equal(z, v + (1.0 + i)) for i, (z, v) in enumerate(zip(results, values, strict=True)))
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])


def test_a_function_that_changes_its_argument_is_refused_or_harmless():
    def add(x):
        x += 1.0
        return x * 2.0

    x = torch.zeros(2)
    try:
        got = jit(add, mode=CAPTURED)(x)
    except (ValueError, RuntimeError) as error:
        assert "place" in str(error)  # noqa: PT017
    else:
        assert torch.equal(got, torch.full((2,), 2.0))
    assert torch.equal(x, torch.zeros(2))


def test_under_a_gradient_the_function_itself_runs():
    f = lambda w, x: torch.tanh(x @ w).square().sum()
    run, w, x = jit(f, mode=CAPTURED), draw(3, 2), draw(4, 3, seed=1)
    run(w, x)
    start = graph_count()
    assert torch.equal(grad(run)(w, x), grad(f)(w, x))
    assert torch.equal(jacrev(run)(w, x), jacrev(f)(w, x))
    assert torch.equal(vjp(run, w, x)[1](torch.ones((), dtype=w.dtype))[1], vjp(f, w, x)[1](torch.ones((), dtype=w.dtype))[1])
    leaf = w.clone().requires_grad_()
    (g,) = torch.autograd.grad(run(leaf, x), leaf)
    assert torch.allclose(g, grad(f)(w, x))
    assert graph_count() == start


def test_under_vmap_the_mapped_function_is_compiled():
    f = lambda w, x: torch.tanh(x @ w).square().sum()
    run, w, x = jit(f, mode=CAPTURED), draw(3, 2), draw(4, 3, seed=1)
    ws = torch.stack((w, 2 * w))
    start = graph_count()
    for _ in range(2):
        assert torch.allclose(vmap(run, in_dims=(0, None))(ws, x), vmap(f, in_dims=(0, None))(ws, x), rtol=1e-5)
    assert graph_count() == start + 1
    assert torch.equal(vmap(grad(run), in_dims=(0, None))(ws, x), vmap(grad(f), in_dims=(0, None))(ws, x))
    assert graph_count() == start + 1


@pytest.mark.usefixtures("no_fallback")
def test_constants_of_a_differentiated_function_are_still_compiled():
    table = jit(lambda n: torch.cos(n * 2.0), mode=CAPTURED)
    x, n = draw(3), draw(3, seed=1)
    table(n)
    start = graph_count()
    assert torch.equal(grad(lambda x: (x * table(n)).sum())(x), table.eager(n))
    assert torch.equal(vmap(lambda x: x * table(n))(torch.stack((x, x)))[1], x * table.eager(n))
    assert graph_count() == start


def test_without_grad_mode_recorded_tensors_do_no_harm():
    run, w = jit(lambda w: w * 2.0, mode=CAPTURED), draw(3).requires_grad_()
    assert run(w).requires_grad
    with torch.no_grad():
        assert not run(w).requires_grad
    with torch.inference_mode():
        assert torch.equal(run(draw(3)), 2 * draw(3))


@pytest.mark.usefixtures("no_fallback")
def test_closures_over_constants_are_compiled():
    constant = draw(3)
    run = jit(lambda x: x * constant + constant.sum(), mode=CAPTURED)
    start = graph_count()
    assert torch.equal(run(draw(3, seed=1)), run.eager(draw(3, seed=1)))
    assert graph_count() == start + 1


def test_a_closure_over_what_is_differentiated_is_right_or_refused():
    def f(k):
        return jit(lambda x: x * k, mode=CAPTURED)(torch.ones(3)).sum()

    for gradient in (lambda: grad(f)(torch.tensor(2.0)), lambda: (lambda k: torch.autograd.grad(f(k), k)[0])(torch.tensor(2.0, requires_grad=True))):
        try:
            assert float(gradient()) == 3.0
        except ValueError as error:
            assert "closes over" in str(error)  # noqa: PT017


@pytest.mark.usefixtures("no_fallback")
def test_functions_of_no_tensors_and_of_absent_ones():
    assert torch.equal(jit(lambda n: torch.ones(n), mode=CAPTURED)(3), torch.ones(3))
    assert jit(lambda x: (), mode=CAPTURED)(torch.ones(1)) == ()
    got = jit(lambda x, nothing: {"x": x * 2, "nothing": nothing}, mode=CAPTURED)(torch.ones(1), ())
    assert got["nothing"] == ()


def test_an_error_of_the_function_is_its_own():
    run = jit(lambda x: x.reshape(7), mode=CAPTURED)
    with pytest.raises(RuntimeError, match="invalid for input of size 2"):
        run(torch.ones(2))
    assert compiler._broken is False


def test_a_function_that_cannot_be_captured_runs_eagerly_and_spoils_nothing_else():
    def branch(x):
        return x if x.sum() > 0 else -x

    with pytest.warns(RuntimeWarning, match="branch"):
        assert torch.equal(jit(branch, mode=CAPTURED)(-torch.ones(2)), torch.ones(2))
    start = graph_count()
    jit(lambda x: x + 1.0, mode=CAPTURED)(torch.ones(2))
    assert graph_count() == start + 1
    assert compiler._broken is False


def test_inside_torch_compile_the_function_is_traced():
    run = jit(lambda x: {"y": torch.sin(x) * 2.0}, mode=CAPTURED)
    x = draw(3)
    assert torch.allclose(torch.compile(lambda x: run(x)["y"] + 1.0, backend="aot_eager", fullgraph=True)(x), run.eager(x)["y"] + 1.0)


def test_counters_only_grow():
    graphs, seconds = graph_count(), compile_seconds()
    jit(lambda x: x * 3.0, mode=CAPTURED)(torch.ones(2))
    assert graph_count() == graphs + 1
    assert compile_seconds() > seconds


def test_eager_mode_compiles_nothing():
    start = graph_count()
    run = jit(work, mode="eager")
    assert_trees_equal(run(pair_of(), STATIC), work(pair_of(), STATIC))
    assert graph_count() == start


def test_modes_are_checked_by_name():
    assert [check_mode(mode) for mode in compiler.MODES] == list(compiler.MODES)
    for make in (lambda: check_mode("fast"), lambda: jit(work, mode="fast")):
        with pytest.raises(ValueError, match=r"unknown compile mode 'fast' \(known: .*eager"):
            make()


# -- life without a compiler -----------------------------------------------------------------------------------------------------------------------------


def rollout_gradient(mode):
    """A scan and a jitted function: forward, backward and inference kernels."""
    step = lambda params, carry, x: (torch.tanh(carry * params + x), carry.square().sum())
    total = lambda p: scan(step, p, torch.ones(3), torch.linspace(-1, 1, 12).reshape(4, 3), mode=mode)[1].sum()
    double = jit(lambda x: x * 2.0, mode=mode)
    return grad(total)(torch.tensor(0.5)), total(torch.tensor(0.5)), double(torch.ones(2))


def test_a_missing_compiler_gives_one_warning_and_eager_results(monkeypatch):
    from torch._inductor.exc import InvalidCxxCompiler

    def fail(*args, **kwargs):
        raise InvalidCxxCompiler

    monkeypatch.setattr(compiler, "_generate", fail)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = rollout_gradient("inductor"), rollout_gradient("inductor")
    ours = [str(w.message) for w in caught if "frl" in str(w.message)]
    assert len(ours) == 1
    assert "C++ compiler" in ours[0]
    for result in got:
        assert_trees_close(result, rollout_gradient("eager"), ops=100)


def test_on_a_machine_without_a_compiler(tmp_path):
    """The same in a process that really has none."""
    script = f"""
import sys, warnings
sys.path[:0] = {[os.path.dirname(os.path.dirname(os.path.abspath(frl.__file__)))]!r}
import torch
torch.set_num_threads(1)
from tests.test_compile import rollout_gradient
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    got, expected = rollout_gradient("inductor"), rollout_gradient("eager")
assert all(torch.allclose(a, b) for a, b in zip(got, expected, strict=True)), (got, expected)
print(len([w for w in caught if "frl could not compile" in str(w.message)]))
"""
    env = {**os.environ, "CXX": "/nonexistent/g++", "PATH": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"
