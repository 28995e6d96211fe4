"""The first update of a run: eager, and the same whenever it is done."""

from __future__ import annotations

from pathlib import Path

from frl import compile as compiler
from frl import rng
from frl.build import build_run
from frl.types import Algorithm
from frl.warm_up import MOST_STEPS, eager_first_update
from tests.strategies import assert_trees_close, assert_trees_equal
from tests.tiny_runs import tiny


def test_only_a_state_without_updates_is_updated_eagerly(tmp_path: Path):
    calls = []

    def named(name: str, algorithm: Algorithm) -> Algorithm:
        collect = lambda state: calls.append((name, "collect")) or algorithm.collect(state)
        return Algorithm(init=algorithm.init, collect=collect, update=lambda s, r: calls.append((name, "update")) or algorithm.update(s, r))

    algorithm = build_run(tiny(tmp_path, compile_mode="eager")).algorithm
    both = eager_first_update(named("compiled", algorithm), named("eager", algorithm))
    state = first = both.init(rng.key(0))
    for _ in range(3):
        state, rollout = both.collect(state)
        state = both.update(state, rollout)
    both.collect(first)
    expected = ["eager"] * 2 + ["compiled"] * 4 + ["eager"]
    assert [name for name, _ in calls] == expected


def test_the_first_update_compiles_nothing_and_is_the_compiled_one_to_rounding(tmp_path: Path):
    results = {}
    for early in (True, False):
        algorithm = build_run(tiny(tmp_path, compile_mode="aot_eager", eager_first_update=early)).algorithm
        graphs = compiler.graph_count()
        state, rollout = algorithm.collect(algorithm.init(rng.key(0)))
        results[early] = algorithm.update(state, rollout)
        assert (compiler.graph_count() == graphs) == early
    assert_trees_close(results[True], results[False], ops=100_000)


def test_large_updates_are_never_eager(tmp_path: Path):
    for rows, members in ((MOST_STEPS // 8 + 1, 1), (2, MOST_STEPS // 16 + 1)):
        algorithm = build_run(tiny(tmp_path, compile_mode="aot_eager", num_envs=rows, segment_length=8), members=members).algorithm
        graphs = compiler.graph_count()
        algorithm.collect(algorithm.init(rng.key(0)))
        assert compiler.graph_count() > graphs


def test_it_repeats(tmp_path: Path):
    algorithm = build_run(tiny(tmp_path, compile_mode="aot_eager")).algorithm
    state, rollout = algorithm.collect(algorithm.init(rng.key(0)))
    assert_trees_equal(algorithm.update(state, rollout), algorithm.update(state, rollout))
