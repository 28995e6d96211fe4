"""What runs wrote: every whole line is read, whatever happened to the file, and tables tell how far a run got."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frl.config import write_yaml
from frl.records import METRICS, SETTINGS, SUMMARY, find_runs, read_metrics, read_run
from frl.run_directory import MANIFEST
from tests.trained import settings, trained


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trained(tmp_path_factory.mktemp("runs"), env={"name": "double_integrator", "cfg": {"max_episode_steps": 3}})


def written(folder: Path, records: list[Any], **trainer: Any) -> Path:
    """A run directory with records and settings, as a run that is going on has it."""
    (folder / "configs").mkdir(parents=True)
    write_yaml(folder / SETTINGS, settings(folder.parent, **trainer))
    (folder / METRICS).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


# ---- a finished run ----


def test_a_finished_run(finished: dict[str, Any]):
    record = read_run(finished["run_directory"])
    assert (record.state, record.damaged, record.problem) == ("finished", 0, None)
    assert (record.name, record.updates, record.steps) == ("small", finished["num_updates"], finished["global_step"])
    assert record.best == finished["best_eval_value"] == max(entry["eval/avg_reward"] for entry in finished["eval_history"])
    assert record.last_return == finished["train_history"][-1]["charts/episode_reward_avg_100"]
    assert {"eval/avg_reward", "train/loss", "charts/SPS"} <= set(record.names)


def test_series_are_those_of_the_history(finished: dict[str, Any]):
    record = read_run(finished["run_directory"])
    for metric, history in (("eval/avg_reward", finished["eval_history"]), ("train/loss", finished["train_history"])):
        x, y = record.series(metric)
        assert x.tolist() == [entry["global_step"] for entry in history]
        assert y.tolist() == [entry[metric] for entry in history]
    seconds, y = record.series("train/loss", "seconds")
    assert (np.diff(seconds) > 0).all()
    assert 0 <= seconds[0] < seconds[-1] < finished["elapsed_time_sec"]
    assert y.tolist() == [entry["train/loss"] for entry in finished["train_history"]]
    assert record.series("no such metric")[0].size == 0


# ---- runs that are not whole ----


@given(cut=st.integers(0, 5000))
def test_a_torn_file_is_read_as_far_as_it_goes(finished: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, cut: int):
    data = (Path(finished["run_directory"]) / METRICS).read_bytes()
    whole, _ = read_metrics(Path(finished["run_directory"]) / METRICS)
    path = tmp_path_factory.mktemp("torn") / METRICS
    path.write_bytes(data[:cut])
    records, damaged = read_metrics(path)
    lines = data[:cut].count(b"\n")
    assert lines <= len(records) + damaged <= lines + 1
    assert records == whole[: len(records)]
    assert len(records) >= lines


@pytest.mark.parametrize("bad", [b"\xff\xfe\x00", b"[1, 2]", b'"text"', b"{'a': 1}", b'{"global_step": 8, "train/lo'])
def test_a_bad_line_costs_no_other(tmp_path: Path, bad: bytes):
    path = tmp_path / METRICS
    path.write_bytes(b'{"global_step": 4, "a": 1}\n' + bad + b'\n\n{"global_step": 12, "a": 3}\n')
    assert read_metrics(path) == ([{"global_step": 4.0, "a": 1.0}, {"global_step": 12.0, "a": 3.0}], 1)


def test_values_that_are_no_numbers_are_left_out(tmp_path: Path):
    path = tmp_path / METRICS
    path.write_text('{"global_step": 4, "a": null, "b": NaN, "c": Infinity, "d": true, "e": "x", "f": 1.5}\n')
    assert read_metrics(path) == ([{"global_step": 4.0, "f": 1.5}], 0)


def test_a_run_without_records(tmp_path: Path):
    record = read_run(written(tmp_path / "run", []))
    assert (record.state, record.updates, record.steps, record.best, record.last_return) == ("interrupted", None, None, None, None)
    (tmp_path / "run" / METRICS).unlink()
    assert read_run(tmp_path / "run").records == []


def test_a_run_that_was_killed(finished: dict[str, Any], tmp_path: Path):
    shutil.copytree(finished["run_directory"], tmp_path / "run")
    (tmp_path / "run" / SUMMARY).unlink()
    data = (tmp_path / "run" / METRICS).read_bytes()
    (tmp_path / "run" / METRICS).write_bytes(data[: data.rindex(b"\n", 0, -2) + 20])
    record = read_run(tmp_path / "run")
    assert (record.state, record.damaged) == ("interrupted", 1)
    assert record.updates == finished["num_updates"]
    for text, state in (('{"num_upd', "interrupted"), ('{"status": "stopped"}', "stopped"), ('{"status": 3}', "interrupted"), ("[]", "interrupted")):
        (tmp_path / "run" / SUMMARY).write_text(text)
        assert read_run(tmp_path / "run").state == state


def test_a_place_recorded_twice_has_its_later_value(tmp_path: Path):
    steps = [8, 16, 24, 16, 24, 32]
    record = read_run(written(tmp_path / "run", [{"global_step": step, "a": float(i)} for i, step in enumerate(steps)]))
    x, y = record.series("a")
    assert (x.tolist(), y.tolist()) == ([8, 16, 24, 32], [0, 3, 4, 5])
    assert record.steps == 32


@pytest.mark.parametrize(("mode", "expected"), [("max", 5.0), ("min", -2.0)])
def test_the_best_is_that_of_the_run(tmp_path: Path, mode: str, expected: float):
    records = [{"global_step": i, "eval/x": value, "eval/avg_reward": 100.0} for i, value in enumerate([1.0, 5.0, -2.0, 3.0])]
    record = read_run(written(tmp_path / "run", records, best_eval_metric="eval/x", best_eval_mode=mode))
    assert record.best == expected
    assert record.last_return == 100.0


def test_settings_that_cannot_be_read(tmp_path: Path):
    folder = written(tmp_path / "my_name_20250102_030405_000000006", [{"global_step": 4, "num_updates": 1}])
    for text in ("trainer: {", "", "trainer: {no_such_key: 1}\n"):
        (folder / SETTINGS).write_text(text)
        record = read_run(folder)
        assert record.config is None
        assert record.problem is not None
        assert str(SETTINGS) in record.problem
        assert "\n" not in record.problem
        assert (record.name, record.updates, record.best) == ("my_name", 1, None)


# ---- runs that go on from others ----


@pytest.mark.parametrize(
    ("source", "summary", "expected"),
    [
        ("outputs/old/checkpoints/small_step_24.safetensors", None, True),
        ("outputs/old/checkpoints/small_best_step_8.safetensors", None, True),  # interrupted, whatever came after the checkpoint is lost
        (r"D:\runs\old\checkpoints\small_step_24.safetensors", {"status": "stopped"}, True),
        ("outputs/old/checkpoints/small_step_24.safetensors", {"status": "finished"}, True),
        ("outputs/old/checkpoints/small_best_step_8.safetensors", {"status": "finished"}, False),  # a branch
        ("outputs/another/checkpoints/small_step_24.safetensors", None, False),
        ("somewhere.safetensors", None, False),
        (None, None, False),
        (5, None, False),
    ],
)
def test_a_run_that_takes_the_place_of_another(tmp_path: Path, source: Any, summary: Any, expected: bool):
    old = written(tmp_path / "old", [{"global_step": 24, "num_updates": 3}])
    new = written(tmp_path / "new", [{"global_step": 32, "num_updates": 4}])
    (new / "environment.json").write_text(json.dumps({"resumed_from": source}))
    if summary is not None:
        (old / SUMMARY).write_text(json.dumps(summary))
    assert read_run(new).goes_on(read_run(old)) is expected
    assert not read_run(old).goes_on(read_run(new))


# ---- finding ----


def test_runs_are_found_in_whatever_state(tmp_path: Path):
    for name, file in (("b/with_manifest", MANIFEST), ("a", METRICS), ("b/c/with_settings", str(SETTINGS)), (".hidden", METRICS), ("x/y/z/too_deep", METRICS)):
        path = tmp_path / name / file
        path.parent.mkdir(parents=True)
        path.write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "a" / "inner").mkdir()
    (tmp_path / "a" / "inner" / METRICS).write_text("")  # belongs to its run
    assert find_runs(tmp_path) == [tmp_path / name for name in ("a", "b/c/with_settings", "b/with_manifest")]
    assert find_runs(tmp_path / "a") == [tmp_path / "a"]
    assert find_runs(tmp_path / "empty") == []
    with pytest.raises(FileNotFoundError, match="none"):
        find_runs(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="is not a run directory"):
        read_run(tmp_path / "empty")
