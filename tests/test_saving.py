"""Saving behind the loop: which files are kept, in which order things happen on the disk, and what a save that fails costs."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frl import saving as rooms
from frl.checkpoint import CheckpointError, read_checkpoint
from frl.resume import SavedRun
from frl.run import train_from_config
from frl.run_directory import MANIFEST, RunDirectory, resolve_resume
from frl.saving import Saver
from frl.train import LoopState
from frl.types import TrainState
from tests.test_train import first_state
from tests.tiny_runs import HORIZON, ROWS, directories, final_state, same_bits, strict_json, tiny

METADATA: dict[str, Any] = {"config": {}, "schedule": {"begin": 0, "updates": 1}, "environment": {}, "fingerprint": {}}


def at(number: int) -> tuple[TrainState, LoopState]:
    """The state and loop after an update."""
    state = first_state(updates=number, env_steps=8 * number)
    history = [{"global_step": 8 * n, "num_updates": n, "train/loss": 1 / n} for n in range(1, number + 1)]
    return state, LoopState(num_updates=number, global_step=8 * number, train_history=history)


def saver(folder: Path, keep: int | None = None) -> Saver:
    return Saver(RunDirectory.create(folder, "run"), keep, METADATA)


def manifest(one: Saver) -> dict[str, Any]:
    assert one.latest is not None
    return strict_json((one.latest.parents[1] / MANIFEST).read_text())


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# ---- what is kept ----


@given(kinds=st.lists(st.sampled_from(["periodic", "best"]), min_size=1, max_size=9), keep=st.one_of(st.none(), st.integers(1, 4)))
def test_the_newest_and_the_best_are_kept(tmp_path_factory: pytest.TempPathFactory, kinds: list[str], keep: int | None):
    one = saver(tmp_path_factory.mktemp("run"), keep)
    for number, kind in enumerate(kinds, start=1):
        one.save(*at(number), kind)
    one.close()
    best = max((number for number, kind in enumerate(kinds, start=1) if kind == "best"), default=None)
    newest = range(len(kinds), 0, -1)
    kept = [number for i, number in enumerate(newest) if keep is None or i < keep or number == best]
    content = manifest(one)
    assert [file["num_updates"] for file in content["kept"]] == kept
    names = {f"run_{'best_step' if kinds[number - 1] == 'best' else 'step'}_{8 * number}.safetensors": number for number in kept}
    assert one.latest is not None
    assert {entry.name for entry in one.latest.parent.iterdir()} == set(names)
    assert content["checkpoints"]["latest"] == f"checkpoints/{one.latest.name}"
    assert (content["checkpoints"]["best"] is None) == (best is None)
    assert (one.best is None) == (best is None)
    if best is not None:
        assert content["checkpoints"]["best"] == f"checkpoints/run_best_step_{8 * best}.safetensors"
    for file in content["kept"]:
        saved = SavedRun.read(one.latest.parents[1] / file["path"], file["sha256"])
        assert (saved.loop["num_updates"], saved.loop["global_step"]) == (file["num_updates"], file["global_step"])
        assert saved.loop["train_history"] == at(file["num_updates"])[1].train_history


def test_a_run_keeps_what_its_file_says(tmp_path: Path):
    def steps(**options: Any) -> list[int]:
        summary = train_from_config(tiny(tmp_path, iterations=8, save_frequency_updates=1, final_eval_episodes=0, **options))
        files = (Path(summary["run_directory"]) / "checkpoints").iterdir()
        return sorted(int(file.stem.rsplit("_", 1)[1]) // (HORIZON * ROWS) for file in files)

    assert steps() == [4, 5, 6, 7, 8]
    assert steps(keep_checkpoints=2) == [7, 8]
    assert steps(keep_checkpoints=None) == [1, 2, 3, 4, 5, 6, 7, 8]
    evaluated: dict[str, Any] = {"enable_eval": True, "eval_freq": 8, "best_eval_metric": "eval/episodes"}  # the first evaluation stays the best
    assert steps(keep_checkpoints=2, **evaluated) == [1, 7, 8]


def test_saves_by_environment_steps(tmp_path: Path):
    options: dict[str, Any] = {"iterations": 7, "keep_checkpoints": None, "final_eval_episodes": 0}
    summary = train_from_config(tiny(tmp_path, save_freq=20, **options))
    kept = [int(file.stem.rsplit("_", 1)[1]) for file in (Path(summary["run_directory"]) / "checkpoints").iterdir()]
    # Steps 8, 16, ..., 56: the multiples 20 and 40 are passed at 24 and 40; 56 is the end.
    assert sorted(kept) == [24, 40, 56]


def test_the_last_state_is_not_saved_twice(tmp_path: Path):
    one = saver(tmp_path)
    one.save(*at(1), "periodic")
    one.settle()
    before = one.latest
    one.save_last(*at(1))
    assert one.latest == before
    one.save_last(*at(2))
    one.close()
    assert [file["num_updates"] for file in manifest(one)["kept"]] == [2, 1]


# ---- in which order ----


def test_nothing_that_a_manifest_names_is_ever_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Between any two operations on the disk the manifest that is there names whole files only."""
    one, looked = saver(tmp_path, keep=1), []
    unlink, replace = Path.unlink, os.replace

    def look() -> None:
        for file in tmp_path.glob(f"*/{MANIFEST}"):
            for entry in json.loads(file.read_text())["kept"]:
                SavedRun.read(file.parent / entry["path"], entry["sha256"])
                looked.append(entry["num_updates"])

    def spy_unlink(path: Path, **options: Any) -> None:
        look()
        unlink(path, **options)
        look()

    def spy_replace(*args: Any) -> None:
        look()
        replace(*args)
        look()

    monkeypatch.setattr(Path, "unlink", spy_unlink)
    monkeypatch.setattr(os, "replace", spy_replace)
    for number, kind in ((1, "best"), (2, "periodic"), (3, "periodic"), (4, "best"), (5, "periodic")):
        one.save(*at(number), kind)
    one.close()
    assert len(looked) > 30
    assert {5, 4} == {file["num_updates"] for file in manifest(one)["kept"]}


def test_the_state_is_copied_at_once_and_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gate, encode = threading.Event(), rooms.encode_checkpoint

    def slow(*args: Any) -> bytes:
        gate.wait(60)
        return encode(*args)

    monkeypatch.setattr(rooms, "encode_checkpoint", slow)
    one = saver(tmp_path)
    state, loop = at(1)
    one.save(state, loop, "periodic")
    one.poll()
    assert one.latest is None  # the loop is here, the file is not
    state.params["w"].add_(100.0)
    loop.train_history.append({"global_step": 16, "num_updates": 2, "train/loss": 0.5})
    loop.num_updates = 2
    gate.set()
    one.close()
    assert one.latest is not None
    saved = SavedRun.read(one.latest)
    assert torch.equal(saved.tensors["params.w"], at(1)[0].params["w"])
    assert (saved.loop["num_updates"], len(saved.loop["train_history"])) == (1, 1)


# ---- what fails ----


def test_a_save_that_fails_is_said_and_costs_that_save_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    one = saver(tmp_path)
    one.save(*at(1), "best")
    one.settle()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        one.save(*at(2), "periodic")
        with pytest.warns(RuntimeWarning, match=r"run_step_16\.safetensors could not be saved \(No space left.*run_best_step_8\.safetensors is still"):
            one.settle()
    assert one.failures == 1
    assert [file["num_updates"] for file in manifest(one)["kept"]] == [1]
    assert one.latest == one.best
    one.save(*at(3), "periodic")
    one.close()
    assert [file["num_updates"] for file in manifest(one)["kept"]] == [3, 1]
    assert one.latest is not None
    assert not [entry.name for entry in one.latest.parent.iterdir() if entry.name.startswith(".") or "_16" in entry.name]


def test_a_manifest_that_cannot_be_written_takes_its_checkpoint_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    one = saver(tmp_path)
    one.save(*at(1), "periodic")
    one.settle()
    before = manifest(one)
    with monkeypatch.context() as patch:
        patch.setattr(rooms, "write_manifest", no_space)
        one.save(*at(2), "best")
        with pytest.warns(RuntimeWarning, match="could not be saved"):
            one.settle()
    assert manifest(one) == before
    assert one.best is None
    assert one.latest is not None
    assert [entry.name for entry in one.latest.parent.iterdir()] == ["run_step_8.safetensors"]
    one.close()


def test_the_failure_is_said_while_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    one = saver(tmp_path)
    monkeypatch.setattr(os, "fsync", no_space)
    one.save(*at(1), "periodic")
    assert one._pending is not None
    one._pending[1].exception(60)
    with pytest.warns(RuntimeWarning, match="there is no earlier checkpoint"):
        one.poll()
    one.poll()
    one.close()


def test_the_last_state_that_cannot_be_saved_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    one = saver(tmp_path)
    one.save(*at(1), "periodic")
    one.settle()
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(CheckpointError, match=r"could not be saved to .*run_step_16\.safetensors \(No space left.*run_step_8\.safetensors is the newest"):
        one.save_last(*at(2))
    one.close()


def test_a_fault_in_the_program_is_not_taken_for_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any) -> bytes:
        raise AssertionError("a bug")

    monkeypatch.setattr(rooms, "encode_checkpoint", broken)
    one = saver(tmp_path)
    one.save(*at(1), "periodic")
    with pytest.raises(AssertionError, match="a bug"):
        one.settle()
    one.close()


def test_a_run_whose_saves_fail_in_between_is_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    options: dict[str, Any] = {"iterations": 6, "save_frequency_updates": 1, "final_eval_episodes": 0, "keep_checkpoints": None}
    whole = train_from_config(tiny(tmp_path / "whole", **options))
    write = rooms.write_atomically

    def sometimes(path: Path, data: bytes) -> None:
        if path.suffix == ".safetensors" and path.stem.endswith(("_16", "_24")):
            no_space()
        write(path, data)

    monkeypatch.setattr(rooms, "write_atomically", sometimes)
    with pytest.warns(RuntimeWarning, match="could not be saved"):
        summary = train_from_config(tiny(tmp_path, **options))
    assert (summary["status"], summary["failed_saves"]) == ("finished", 2)
    assert same_bits(final_state(summary), final_state(whole))
    (directory,) = directories(tmp_path)
    assert [file["num_updates"] for file in strict_json((directory / MANIFEST).read_text())["kept"]] == [6, 5, 4, 1]


def test_a_run_whose_last_save_fails_says_so_and_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write = rooms.write_atomically

    def sometimes(path: Path, data: bytes) -> None:
        if path.stem.endswith("_24"):
            no_space()
        write(path, data)

    monkeypatch.setattr(rooms, "write_atomically", sometimes)
    with pytest.raises(CheckpointError, match="No space left on device"):
        train_from_config(tiny(tmp_path, iterations=3, save_frequency_updates=2))
    (directory,) = directories(tmp_path)
    summary = strict_json((directory / "summary.json").read_text())
    assert (summary["status"], summary["num_updates"], summary["failed_saves"]) == ("failed", 3, 1)
    assert "No space left" in summary["error"]
    latest = resolve_resume("latest", directory)
    assert latest is not None
    assert read_checkpoint(latest)[1]["loop"]["num_updates"] == 2
