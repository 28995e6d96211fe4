"""Where numbers go: lines of JSON, TensorBoard, Weights & Biases, and what a log that cannot be written costs."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from frl import logs
from frl.logs import RunLog
from frl.run import train_from_config
from tests.tiny_runs import HORIZON, ROWS, directories, strict_json, tiny


def lines(folder: Path) -> list[dict[str, Any]]:
    return [strict_json(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def scalars(folder: Path, name: str) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder / "logs" / name)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


class FakeWandb(types.ModuleType):
    """What of Weights & Biases is used."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__("wandb")
        self.fails, self.started, self.records, self.finished = fails, [], [], 0

    def init(self, **options: Any) -> FakeWandb:
        self.started.append(options)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        if self.fails:
            raise ConnectionError("no route to host")
        self.records.append((step, values))

    def finish(self) -> None:
        self.finished += 1


def test_a_record_goes_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    log = RunLog(tmp_path, "name", wandb_project="project", config={"a": 1})
    log.write({"loss": 0.5, "bad": math.nan, "worse": -math.inf}, 8)
    assert len(lines(tmp_path)) == 1  # at once
    log.write({"loss": 0.25}, 16)
    log.write({"loss": 1.0}, 4, timed=False)
    log.close()
    first, second, third = lines(tmp_path)
    assert first.pop("seconds") <= second.pop("seconds")
    assert first == {"global_step": 8, "loss": 0.5, "bad": None, "worse": None}
    assert second == {"global_step": 16, "loss": 0.25}
    assert third == {"global_step": 4, "loss": 1.0}
    assert scalars(tmp_path, "name") == {"loss": [(8, 0.5), (16, 0.25), (4, 1.0)]}
    assert wandb.started == [{"project": "project", "name": "name", "config": {"a": 1}}]
    assert wandb.records == [(8, {"loss": 0.5}), (16, {"loss": 0.25}), (4, {"loss": 1.0})]
    assert wandb.finished == 1


def test_weights_and_biases_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    train_from_config(tiny(tmp_path, iterations=1))
    assert wandb.started == []
    summary = train_from_config(tiny(tmp_path, iterations=2, use_wandb=True, wandb_project_name="mine"))
    assert [(one["project"], one["name"]) for one in wandb.started] == [("mine", "tiny")]
    assert wandb.started[0]["config"]["trainer"]["num_envs"] == ROWS
    assert [step for step, values in wandb.records if "train/loss" in values] == [8, 16]
    assert wandb.records[-1][1]["final_eval/avg_reward"] == summary["last_eval_metrics"]["eval/avg_reward"]
    assert wandb.finished == 1


def test_weights_and_biases_that_is_not_installed_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"pip install 'frl\[wandb\]'"):
        train_from_config(tiny(tmp_path, use_wandb=True))
    assert directories(tmp_path) == []


def test_a_service_that_fails_is_given_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wandb = FakeWandb(fails=True)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.warns(RuntimeWarning, match=r"Weights & Biases could not be written .*no route to host.*goes on without it") as said:
        summary = train_from_config(tiny(tmp_path, iterations=3, use_wandb=True))
    assert len([one for one in said if "Weights" in str(one.message)]) == 1
    assert summary["status"] == "finished"
    assert wandb.finished == 1
    assert len(lines(Path(summary["run_directory"]))) == 4


def test_a_file_that_cannot_be_written_is_given_up_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_space(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = RunLog(tmp_path, "name")
    log.write({"x": 1.0}, 1)
    monkeypatch.setattr(logs._JsonLines, "write", no_space)
    with pytest.warns(RuntimeWarning, match=r"metrics\.jsonl could not be written \(OSError.*No space left"):
        log.write({"x": 2.0}, 2)
    log.write({"x": 3.0}, 3)
    monkeypatch.setattr(logs._TensorBoard, "close", no_space)
    with pytest.warns(RuntimeWarning, match="logs"):
        log.close()
    assert [line["x"] for line in lines(tmp_path)] == [1.0]


def test_a_resumed_run_shows_all_of_itself(tmp_path: Path):
    options: dict[str, Any] = {"enable_eval": True, "eval_freq": 2 * HORIZON * ROWS, "final_eval_episodes": 0}
    whole = train_from_config(tiny(tmp_path, iterations=6, **options))
    half = train_from_config(tiny(tmp_path, iterations=3, **options))
    resumed = train_from_config(tiny(tmp_path, iterations=6, **options), resume="latest", run=half["run_directory"])

    def untimed(summary: dict[str, Any]) -> list[dict[str, Any]]:
        return [{k: v for k, v in line.items() if k not in ("seconds", "charts/SPS")} for line in lines(Path(summary["run_directory"]))]

    assert untimed(resumed) == untimed(whole)
    assert ["seconds" in line for line in lines(Path(resumed["run_directory"]))].count(False) == 4

    def losses(summary: dict[str, Any]) -> list[tuple[int, float]]:
        return scalars(Path(summary["run_directory"]), "tiny")["train/loss"]

    assert losses(resumed) == losses(whole)
    assert len(losses(whole)) == 6


def test_a_long_run_is_logged_at_most_five_hundred_times_and_at_its_end(tmp_path: Path):
    summary = train_from_config(tiny(tmp_path, iterations=503, final_eval_episodes=0), stop_after=7)
    assert [json.loads(line)["num_updates"] for line in (Path(summary["run_directory"]) / "metrics.jsonl").read_text().splitlines()] == [2, 4, 6, 7]
    assert len(summary["train_history"]) == 7
