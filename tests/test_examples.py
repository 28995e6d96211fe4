"""Every example of embedding and of training that is differentiated does what it says, at a small size."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "examples"
TESTED: set[str] = set()


def example(name: str) -> Any:
    TESTED.add(name)
    spec = importlib.util.spec_from_file_location(f"frl_example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_learning_rate_is_learned():
    history = example("learned_learning_rate").learn(rounds=5, updates=2, rows=4, steps=8)
    rates, values = zip(*history, strict=True)
    assert rates[-1] > 2 * rates[0]  # the start is too slow
    assert list(values) == sorted(values)


def test_mass_and_damping_are_identified():
    found = example("system_identification").identify((1.3, 4.0), rows=3, steps=10, iterations=70)
    assert found["mass"] == pytest.approx(1.3, rel=0.05)
    assert found["damping"] == pytest.approx(4.0, rel=0.1)
    assert found["residual"] < 2e-3


def test_laggards_go_on_from_leaders():
    history = example("population_based_training").train(size=4, rounds=3, updates=2, mode="eager")
    for before, after in zip(history, history[1:], strict=False):
        leader = max(range(4), key=before["objective"].__getitem__)
        laggard = min(range(4), key=before["objective"].__getitem__)
        assert before["parents"] == [leader if i == laggard else i for i in range(4)]
        assert after["rates"][laggard] / before["rates"][leader] == pytest.approx(0.8, rel=1e-5) or after["rates"][laggard] / before["rates"][
            leader
        ] == pytest.approx(1.25, rel=1e-5)
        assert all(after["rates"][i] == before["rates"][i] for i in range(4) if i != laggard)


def test_the_optimizer_takes_any_loss():
    losses = example("own_loss").fit(120)
    assert losses[-1] < 0.05 * losses[0]


def test_an_environment_and_a_module_of_ones_own_train():
    objectives = example("own_environment_and_module").train(10, mode="eager")
    assert sum(objectives[-3:]) / 3 > 0.75 * objectives[0]  # costs are negative


def test_planning_beats_doing_nothing():
    planned, idle = example("model_predictive_control").control(steps=8, horizon=8, sweeps=4, rows=3)
    assert planned > idle + 0.01 * abs(idle)


def test_an_exported_policy_runs_without_frl(tmp_path):
    assert example("exported_policy").export_and_run(tmp_path) < 1e-6


def test_rollouts_are_read_by_torchrl():
    TESTED.add("torchrl_loss")
    pytest.importorskip("torchrl")
    losses = example("torchrl_loss").train(rows=4, steps=8)
    assert losses[-1] < losses[0]


def test_every_example_is_tested():
    assert {path.stem for path in FOLDER.glob("*.py")} == TESTED
