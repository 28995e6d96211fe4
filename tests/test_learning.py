"""The benchmark of learning curves: it picks up where it was stopped, and its table is the median over seeds. Its runs are those of ``frl train``."""

from __future__ import annotations

import importlib
import json
import subprocess
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import frl

ROOT = Path(frl.__file__).parents[1]


@pytest.fixture
def learning(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("learning")


def finished_run(seed: int, end: float, solved_at: int | None = 200) -> dict[str, Any]:
    curve = [
        {"env_steps": steps, "seconds": 10.0 + steps / 100, "return": end - 300 + steps, "success": float(solved_at is not None and steps >= solved_at)}
        for steps in (100, 200, 300)
    ]
    return {"task": "pendulum", "algorithm": "shac", "seed": seed, "env_steps": 300, "return": end, "success": 1.0, "seconds": 13.0, "curve": curve}


def test_every_task_has_its_run_files(learning: ModuleType):
    for task in learning.TASKS:
        for algorithm in learning.ALGORITHMS:
            assert learning.run_file(task, algorithm).is_file(), (task, algorithm)


def test_apg_and_shac_have_the_same_budget_but_on_the_quadrotor(learning: ModuleType):
    def budget(task: str, algorithm: str) -> int:
        (value,) = (v for v in learning.settings(task, algorithm, 0) if v.startswith("trainer.eval_freq="))
        return int(value.split("=")[1])

    for task in learning.TASKS:
        if task == "quadrotor":  # APG keeps the published sizes
            assert budget(task, "shac") < budget(task, "apg")
        else:
            assert budget(task, "apg") == budget(task, "shac"), task


def test_results_are_medians_over_seeds(learning: ModuleType, tmp_path: Path):
    runs = [finished_run(0, -150.0), finished_run(1, -140.0, 300), finished_run(2, -500.0, None)]
    (row,) = learning.summarize(runs)
    assert row["seeds"] == [0, 1, 2]
    assert row["return"] == {"median": -150.0, "lowest": -500.0, "highest": -140.0}
    assert row["env_steps_to_solve"] == 300
    assert "| -150.0 (-500.0 to -140.0) |" in learning.table([row])
    assert learning.summarize([runs[2]])[0]["env_steps_to_solve"] is None
    learning.draw([row], tmp_path / "learning.png")
    assert (tmp_path / "learning.png").stat().st_size > 1000


def test_a_finished_run_is_not_run_again(learning: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started: list[list[str]] = []

    def fake(command: list[str], **options: Any) -> Any:
        started.append(command)
        folder = Path(next(x for x in command if x.startswith("trainer.output_dir=")).split("=", 1)[1]) / "pendulum_shac_1"
        folder.mkdir()
        final = {"eval/avg_reward": -147.0, "eval/success_rate": 1.0}
        summary = {"global_step": 300, "last_eval_metrics": final, "compile_seconds": 1.0, "skipped_updates": 0}
        records = [{"global_step": 100, "seconds": 2.0, "eval/avg_reward": -900.0, "eval/success_rate": 0.0}, {"global_step": 300, "seconds": 3.0}]
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "metrics.jsonl").write_text("\n".join(json.dumps(record) for record in records))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(learning.subprocess, "run", fake)
    late = time.monotonic() + 100
    assert learning.run("pendulum", "shac", 3, tmp_path, time.monotonic() - 1) is None
    assert "return -147.0" in learning.run("pendulum", "shac", 3, tmp_path, late)
    assert learning.run("pendulum", "shac", 3, tmp_path, late) is None
    assert len(started) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["pendulum-shac-3.json"]
    (found,) = learning.finished(tmp_path)
    assert [(point["env_steps"], point["return"]) for point in found["curve"]] == [(100, -900.0), (300, -147.0)]
    # Another run file is another run.
    monkeypatch.setattr(learning, "POINTS", 4)
    assert list(learning.finished(tmp_path)) == []
    assert learning.run("pendulum", "shac", 3, tmp_path, late) is not None


def test_a_run_that_fails_says_so_and_is_not_finished(learning: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(learning.subprocess, "run", lambda command, **options: subprocess.CompletedProcess(command, 2, "", "what went wrong"))
    line = learning.run("pendulum", "shac", 0, tmp_path, time.monotonic() + 100)
    assert "exit status 2" in line
    assert "what went wrong" in line
    assert list(learning.finished(tmp_path)) == []
