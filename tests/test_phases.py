"""The seconds of the loop by part, and the trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from frl import compile as compiler
from frl import phases as rooms
from frl.phases import NAMES, Phases
from frl.profiling import TRACED_UPDATES, Profile
from frl.run import train_from_config
from frl.train import LoopConfig, train
from tests.test_train import STEPS, counting, first_state, scoring
from tests.tiny_runs import tiny


class Clock:
    """A clock that is moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(rooms.time, "perf_counter", lambda: self.now)


def test_calls_and_seconds(monkeypatch: pytest.MonkeyPatch):
    clock, phases = Clock(monkeypatch), Phases()
    for name, took in (("collect", 1.0), ("update", 2.0), ("collect", 5.0)):
        with phases(name):
            clock.now += took

    def fail() -> None:
        with phases("saving"):
            clock.now += 2.0
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert phases.table() == [
        {"phase": "collect", "calls": 2, "seconds": 6.0, "share": 0.6, "steady_ms": 3000.0},
        {"phase": "update", "calls": 1, "seconds": 2.0, "share": 0.2, "steady_ms": 2000.0},
        {"phase": "saving", "calls": 1, "seconds": 2.0, "share": 0.2, "steady_ms": 2000.0},
    ]
    with pytest.raises(KeyError), phases("tea"):
        pass


def test_calls_that_compile_or_are_traced_are_not_steady(monkeypatch: pytest.MonkeyPatch):
    clock, phases, graphs = Clock(monkeypatch), Phases(), [0]
    monkeypatch.setattr(compiler, "graph_count", lambda: graphs[0])
    with phases("update"):
        clock.now, graphs[0] = 100.0, 1
    phases.traced = True
    with phases("update"):
        clock.now += 10.0
    phases.traced = False
    with phases("update"):
        clock.now += 1.0
    (row,) = phases.table()
    assert (row["calls"], row["seconds"], row["steady_ms"]) == (3, 111.0, 1000.0)


def test_a_device_is_waited_for_inside_the_part_and_marks_surround_it(monkeypatch: pytest.MonkeyPatch):
    clock, seen = Clock(monkeypatch), []

    class Mark:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            seen.append(f"{self.name} begins")

        def __exit__(self, *_: object) -> None:
            seen.append(f"{self.name} ends")

    def wait() -> None:
        clock.now += 3.0

    phases = Phases(wait, Mark)
    with phases("update"):
        seen.append("work")
    assert phases["update"].seconds == 3.0
    assert seen == ["update begins", "work", "update ends"]


def test_the_loop_counts_what_it_does():
    phases = Phases()
    config = LoopConfig(total_updates=6, eval_frequency_steps=2 * STEPS, save_frequency_updates=3, log_frequency_updates=2)
    hooks: dict[str, Any] = {"on_record": lambda values, step: None, "on_save": lambda state, loop, kind: None, "callbacks": [lambda event: None]}
    train(counting(), first_state(), config, evaluate=scoring([1.0, 1.0, 1.0]), phases=phases, **hooks)
    calls = {row["phase"]: row["calls"] for row in phases.table()}
    # Records of updates 2, 4, 6 and of three evaluations; a best state at update 2, periodic saves at 3 and 6.
    assert calls == {"collect": 6, "update": 6, "evaluation": 3, "saving": 3, "logging": 6, "callbacks": 9}
    assert tuple(calls) == NAMES


@pytest.mark.parametrize(("iterations", "traced"), [(1, 1), (3, 1), (7, TRACED_UPDATES)])
def test_a_profile_is_written(tmp_path: Path, iterations: int, traced: int):
    summary = train_from_config(tiny(tmp_path, iterations=iterations, save_frequency_updates=1), profile=True)
    trace = json.loads((Path(summary["run_directory"]) / "profile.json").read_text())["traceEvents"]
    marks = [event["name"] for event in trace if event.get("cat") == "user_annotation"]
    assert marks.count("frl.update") == traced
    assert {"frl.collect", "frl.update", "frl.saving"} <= set(marks)
    rows = {row["phase"]: row for row in summary["phases"]}
    assert set(rows) == {"collect", "update", "saving", "logging"}
    assert rows["update"]["calls"] == iterations
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1.0)
    assert 0 < sum(row["seconds"] for row in rows.values()) <= summary["elapsed_time_sec"]
    if iterations == 7:  # a run that goes on counts its own updates
        summary = train_from_config(tiny(tmp_path, iterations=9), profile=True, resume="latest", run=summary["run_directory"])
        assert json.loads((Path(summary["run_directory"]) / "profile.json").read_text())["traceEvents"]
        assert train_from_config(tiny(tmp_path, iterations=1))["phases"] == []


def test_a_profile_of_a_stopped_run_fits_into_it(tmp_path: Path):
    summary = train_from_config(tiny(tmp_path, iterations=50), profile=True, stop_after=2)
    assert json.loads((Path(summary["run_directory"]) / "profile.json").read_text())["traceEvents"]


def test_closing_twice_writes_once(tmp_path: Path):
    profile = Profile(tmp_path / "profile.json", torch.device("cpu"), after=0)
    profile.close()
    before = (tmp_path / "profile.json").stat().st_mtime_ns
    profile.close()
    assert (tmp_path / "profile.json").stat().st_mtime_ns == before
