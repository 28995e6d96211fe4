"""A run that goes on from another: which checkpoint, whether it fits, what it goes on with, and that it is the run that was never interrupted."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import frl
from frl.checkpoint import CheckpointError, read_checkpoint, restore, save_checkpoint
from frl.config import ConfigError, RunConfig, parse_run_config
from frl.resume import SavedRun
from frl.run import train_from_config
from frl.run_directory import MANIFEST, resolve_resume, resume_candidates
from tests.tiny_runs import HORIZON, ROWS, directories, final_state, mapping, same_bits, strict_json, tiny, untimed, without_nan


@pytest.mark.parametrize(
    ("resume", "run", "error", "text"),
    [
        (None, "there", ValueError, "latest"),
        ("latest", None, ValueError, "run"),
        ("best", None, ValueError, "run"),
        ("file", "there", ValueError, "not a file and run"),
        ("file", None, FileNotFoundError, "does not exist"),
        ("latest", "missing", FileNotFoundError, MANIFEST),
        ("best", "there", FileNotFoundError, "best"),
        ("latest", "gone", FileNotFoundError, "does not exist"),
    ],
)
def test_combinations_that_mean_nothing(tmp_path: Path, resume: str | None, run: str | None, error: type[Exception], text: str):
    for name, latest in (("there", "a.safetensors"), ("gone", "b.safetensors")):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text(json.dumps({"schema_version": 1, "checkpoints": {"best": None, "latest": latest}}))
    (tmp_path / "there" / "a.safetensors").write_bytes(b"")
    where = None if run is None else tmp_path / run
    with pytest.raises(error, match=text):
        train_from_config(tiny(tmp_path), resume=resume, run=where)
    assert directories(tmp_path) == []
    assert resolve_resume("latest", tmp_path / "there") == tmp_path / "there" / "a.safetensors"
    assert resolve_resume(None, None) is None


@pytest.mark.parametrize("entry", ["/a.safetensors", "../a.safetensors", "checkpoints/../../a.safetensors", "C:\\a.safetensors", "..\\a.safetensors", 3])
def test_a_manifest_that_points_outside_its_directory_is_refused(tmp_path: Path, entry: Any):
    (tmp_path / "a.safetensors").write_bytes(b"")
    run = tmp_path / "run"
    run.mkdir()
    if entry == "/a.safetensors":
        entry = str(tmp_path / "a.safetensors")
    (run / MANIFEST).write_text(json.dumps({"schema_version": 1, "checkpoints": {"latest": entry}}))
    with pytest.raises(CheckpointError, match="inside the run directory"):
        resolve_resume("latest", run)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"schema_version": 2, "checkpoints": {"latest": "a"}}', "schema version 2"),
        ('{"schema_version": true, "checkpoints": {"latest": "a"}}', "schema version True"),
        ('{"checkpoints": {"latest": "a"}}', "schema version None"),
        ("[]", "schema version None"),
        ('{"schema_version": 1', "damaged"),
    ],
)
def test_a_manifest_of_another_version_is_refused(tmp_path: Path, text: str, words: str):
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=words):
        resolve_resume("latest", tmp_path)


@pytest.mark.parametrize("kept", [3, [3], [{"path": "a"}], [{"sha256": "x"}], {"a": 1}, None])
def test_a_list_of_checkpoints_that_cannot_be_read_is_said(tmp_path: Path, kept: Any):
    (tmp_path / MANIFEST).write_text(json.dumps({"schema_version": 1, "checkpoints": {"latest": "a"}, "kept": kept}))
    with pytest.raises(CheckpointError, match="its list of checkpoints cannot be read"):
        resume_candidates("latest", tmp_path)


def test_the_list_of_checkpoints_stays_inside_its_directory(tmp_path: Path):
    listed = [{"path": "a", "sha256": "1"}, {"path": "../b", "sha256": "2"}]
    (tmp_path / MANIFEST).write_text(json.dumps({"schema_version": 1, "checkpoints": {"latest": "a"}, "kept": listed}))
    with pytest.raises(CheckpointError, match="inside the run directory"):
        resume_candidates("latest", tmp_path)


def test_candidates_are_the_newest_first_and_each_once(tmp_path: Path):
    done = train_from_config(tiny(tmp_path, iterations=4, **{**MEMORY, "save_frequency_updates": 1}))
    manifest = strict_json((Path(done["run_directory"]) / MANIFEST).read_text())
    found = resume_candidates("latest", done["run_directory"])
    assert [one.path for one in found] == [Path(done["run_directory"]) / file["path"] for file in manifest["kept"]]
    assert [one.sha256 for one in found] == [file["sha256"] for file in manifest["kept"]]
    assert found[0].path == Path(done["latest_checkpoint_path"])
    (best,) = resume_candidates("best", done["run_directory"])
    assert best.path == Path(done["best_checkpoint_path"])
    assert resume_candidates(None, None) == ()


def test_a_file_given_by_name_needs_no_manifest(tmp_path: Path):
    done = train_from_config(tiny(tmp_path, iterations=1))
    for damage in (lambda path: path.write_text("{"), lambda path: path.unlink()):
        damage(Path(done["run_directory"]) / MANIFEST)
        assert train_from_config(tiny(tmp_path), resume=done["latest_checkpoint_path"])["num_updates"] == 2


def test_what_a_checkpoint_of_a_run_lacks_is_listed(tmp_path: Path):
    done = train_from_config(tiny(tmp_path, iterations=1))
    tensors, metadata = read_checkpoint(done["latest_checkpoint_path"])

    def saved(tensors: dict[str, Any], metadata: dict[str, Any]) -> Path:
        return save_checkpoint(tmp_path / "a.safetensors", tensors, {name: part for name, part in metadata.items() if name != "schema_version"})

    assert SavedRun.read(saved(tensors, metadata)).loop["num_updates"] == 1
    for name in ("loop", "config", "schedule", "environment", "fingerprint"):
        with pytest.raises(CheckpointError, match=f"not a checkpoint of a run: its metadata lack {name}"):
            SavedRun.read(saved(tensors, {key: part for key, part in metadata.items() if key != name}))
    loop = {name: value for name, value in metadata["loop"].items() if name != "best_eval_value"}
    with pytest.raises(CheckpointError, match=r"lack loop\.best_eval_value"):
        SavedRun.read(saved(tensors, {**metadata, "loop": loop}))
    with pytest.raises(CheckpointError, match=r"lack loop\.train_history$"):
        SavedRun.read(saved({name: x for name, x in tensors.items() if name != "loop.train_history"}, metadata))
    with pytest.raises(CheckpointError, match="damaged .*layout of a history"):
        SavedRun.read(saved(tensors, {**metadata, "loop": {**metadata["loop"], "train_history": [[7, ["a"]]]}}))


def test_a_checkpoint_that_is_not_of_a_run_is_refused(tmp_path: Path):
    path = save_checkpoint(tmp_path / "a.safetensors", {"x": torch.zeros(1)}, {"loop": {}, "config": {}, "environment": {}})
    with pytest.raises(CheckpointError, match=r"not a checkpoint of a run.*schedule"):
        train_from_config(tiny(tmp_path), resume=path)
    assert directories(tmp_path) == []


@pytest.mark.parametrize(("scheduler", "resume"), [("restart", None), ("again", None), ("Restore", "latest")])
def test_scheduler_options_that_mean_nothing(tmp_path: Path, scheduler: str, resume: str | None):
    with pytest.raises(ValueError, match="resume_scheduler"):
        train_from_config(tiny(tmp_path), resume=resume, resume_scheduler=scheduler)
    assert directories(tmp_path) == []


MEMORY: dict[str, Any] = {"normalize_observations": True, "enable_eval": True, "eval_freq": 2 * HORIZON * ROWS, "save_frequency_updates": 2}


@pytest.mark.parametrize(
    "options",
    [{}, {"rollout_mode": "complete"}, {"rollout_mode": "complete", "gradient_accumulation_steps": 2}, {"action_adjoint_max_norm": 0.2, "update_horizon": 8}],
    ids=["segmented", "complete", "accumulated", "clipped"],
)
@pytest.mark.parametrize("scheduler", [None, "cosine"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, options: dict[str, Any], scheduler: str | None):
    algorithm = {"lr_scheduler": {"name": scheduler, "kwargs": {"T_max": 4}}} if scheduler else {}
    config = tiny(tmp_path, algorithm=algorithm, iterations=4, **{**MEMORY, **options})
    whole = train_from_config(config)
    half = train_from_config(tiny(tmp_path, algorithm=algorithm, iterations=2, **{**MEMORY, **options}))
    resumed = train_from_config(config, resume="latest", run=half["run_directory"])
    assert resumed["run_directory"] != half["run_directory"]
    assert same_bits(final_state(resumed), final_state(whole))
    assert untimed(resumed["train_history"]) == untimed(whole["train_history"])
    assert without_nan(resumed["eval_history"]) == without_nan(whole["eval_history"])
    assert without_nan(resumed["last_eval_metrics"]) == without_nan(whole["last_eval_metrics"])
    for name in ("global_step", "num_updates", "best_eval_value", "skipped_updates"):
        assert resumed[name] == whole[name]
    record = strict_json((Path(resumed["run_directory"]) / "environment.json").read_text())
    assert record["resumed_from"] == half["latest_checkpoint_path"]


RECORDED: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("ppo", {"n_epochs": 2, "num_mini_batches": 2, "lr_scheduler": {"name": "linear", "kwargs": {"total_iters": 5}}}),
    "ppo-adaptive": ("ppo", {"n_epochs": 2, "num_mini_batches": 2, "schedule": "adaptive", "desired_kl": 1e-9}),
    "grpo": ("grpo", {"n_epochs": 2, "batch_size": 4, "group_size": 2}),
}


@pytest.mark.parametrize("case", RECORDED)
def test_a_resumed_run_of_recorded_rollouts_is_the_uninterrupted_one(tmp_path: Path, case: str):
    name, cfg = RECORDED[case]

    def config(iterations: int) -> RunConfig:
        raw = mapping(tmp_path, iterations=iterations, buffer_size=HORIZON, algorithm=cfg, **MEMORY)
        del raw["trainer"]["segment_length"]
        raw["algorithm"]["name"] = name
        if name == "ppo":
            raw["policy"] |= {"name": "actor_critic", "critic": raw["policy"]["actor"]}
        return parse_run_config(raw)

    whole, half = train_from_config(config(4)), train_from_config(config(2))
    resumed = train_from_config(config(4), resume="latest", run=half["run_directory"])
    assert same_bits(final_state(resumed), final_state(whole))
    assert untimed(resumed["train_history"]) == untimed(whole["train_history"])
    assert without_nan(resumed["eval_history"]) == without_nan(whole["eval_history"])
    if case == "ppo-adaptive":
        # The rate that the controller had reached, not the configured one.
        assert rates(resumed)[2] < 0.9 * rates(resumed)[0]


@pytest.mark.parametrize("kind", ["file", "best"])
def test_a_run_goes_on_from_a_file_and_from_the_best(tmp_path: Path, kind: str):
    whole = train_from_config(tiny(tmp_path, iterations=4, **MEMORY))
    half = train_from_config(tiny(tmp_path, iterations=2, **MEMORY))
    where = {"resume": half["latest_checkpoint_path"]} if kind == "file" else {"resume": "best", "run": half["run_directory"]}
    resumed = train_from_config(tiny(tmp_path, iterations=4, **MEMORY), **where)
    assert same_bits(final_state(resumed), final_state(whole))
    assert without_nan(resumed["eval_history"]) == without_nan(whole["eval_history"])


def test_the_best_of_a_resumed_run_has_to_beat_the_best_before(tmp_path: Path):
    options: dict[str, Any] = {**MEMORY, "best_eval_metric": "eval/episodes"}
    half = train_from_config(tiny(tmp_path, iterations=2, **options))
    assert half["best_eval_value"] == 2.0
    resumed = train_from_config(tiny(tmp_path, iterations=4, **options), resume="latest", run=half["run_directory"])
    assert (resumed["best_eval_value"], resumed["best_checkpoint_path"]) == (2.0, None)
    manifest = strict_json((Path(resumed["run_directory"]) / MANIFEST).read_text())
    assert manifest["checkpoints"] == {"latest": "checkpoints/tiny_step_32.safetensors", "best": None}
    better = train_from_config(tiny(tmp_path, iterations=4, **{**options, "num_eval_episodes": 3}), resume="latest", run=half["run_directory"])
    assert better["best_eval_value"] == 3.0
    assert better["best_checkpoint_path"] is not None


def test_a_run_that_is_already_done_adds_nothing(tmp_path: Path):
    done = train_from_config(tiny(tmp_path))
    again = train_from_config(tiny(tmp_path), resume="latest", run=done["run_directory"])
    assert same_bits(final_state(again), final_state(done))
    assert untimed(again["train_history"]) == untimed(done["train_history"])


def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path):
    done = train_from_config(tiny(tmp_path))
    raw = mapping(tmp_path)
    raw["policy"]["actor"]["network_cfg"]["hidden_sizes"] = [5]
    with pytest.raises(CheckpointError, match=r"params\.actor"):
        train_from_config(parse_run_config(raw), resume="latest", run=done["run_directory"])
    with pytest.raises(CheckpointError, match="norm_state"):
        train_from_config(tiny(tmp_path, normalize_observations=True), resume="latest", run=done["run_directory"])
    with pytest.raises(CheckpointError, match="float64"):
        train_from_config(tiny(tmp_path, dtype="float64"), resume="latest", run=done["run_directory"])
    assert len(directories(tmp_path)) == 1


def test_the_file_before_a_lost_newest_one_is_taken_and_that_is_said(tmp_path: Path):
    """A missing or damaged newest file; the second one is then damaged too, and then all."""
    options: dict[str, Any] = {"save_frequency_updates": 1, "final_eval_episodes": 0}
    whole = train_from_config(tiny(tmp_path, iterations=5, **options))
    done = train_from_config(tiny(tmp_path, iterations=4, **options))
    folder = Path(done["run_directory"]) / "checkpoints"
    files = [folder / f"tiny_step_{i * HORIZON * ROWS}.safetensors" for i in (4, 3, 2, 1)]
    files[0].write_bytes(files[0].read_bytes()[:-7])
    for lost, taken in ((1, 3), (2, 2)):
        with pytest.warns(RuntimeWarning, match=rf"{files[0].name} is damaged.*{files[lost].name}, after update {taken}$"):
            resumed = train_from_config(tiny(tmp_path, iterations=5, **options), resume="latest", run=done["run_directory"])
        assert resumed["resumed_from"] == str(files[lost])
        assert same_bits(final_state(resumed), final_state(whole))
        assert untimed(resumed["train_history"]) == untimed(whole["train_history"])
        files[lost].unlink()
    made = len(directories(tmp_path))
    files[3].write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        train_from_config(tiny(tmp_path, iterations=5), resume="latest", run=done["run_directory"])
    assert all(file.name in str(caught.value) for file in files)
    # A file that was asked for by name, or the best, has no stand-in.
    with pytest.raises(CheckpointError, match=f"{files[0].name} is damaged"):
        train_from_config(tiny(tmp_path, iterations=5), resume=files[0])
    assert len(directories(tmp_path)) == made


@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_a_lost_best_file_has_no_stand_in(tmp_path: Path, how: str):
    done = train_from_config(tiny(tmp_path, iterations=3, **MEMORY))
    best = Path(done["best_checkpoint_path"])
    if how == "missing":
        best.unlink()
    else:
        best.write_bytes(best.read_bytes()[:-1])
    with pytest.raises((CheckpointError, FileNotFoundError), match=best.name):
        train_from_config(tiny(tmp_path, iterations=4, **MEMORY), resume="best", run=done["run_directory"])


def test_a_file_that_was_exchanged_for_another_is_not_taken(tmp_path: Path, report: Callable[[str], None]):
    """Each file is whole in itself; the manifest knows which is which."""
    options: dict[str, Any] = {"save_frequency_updates": 1, "final_eval_episodes": 0}
    done = train_from_config(tiny(tmp_path, iterations=3, **options))
    other = train_from_config(tiny(tmp_path, iterations=3, seed=9, **options))
    folder = Path(done["run_directory"]) / "checkpoints"
    newest, middle = folder / "tiny_step_24.safetensors", folder / "tiny_step_16.safetensors"
    own = newest.read_bytes()
    for content in (middle.read_bytes(), Path(other["latest_checkpoint_path"]).read_bytes()):
        newest.write_bytes(content)
        with pytest.warns(RuntimeWarning, match=rf"{newest.name} is not the file that its run wrote.*{middle.name}, after update 2$"):
            resumed = train_from_config(tiny(tmp_path, iterations=4, **options), resume="latest", run=done["run_directory"])
        assert resumed["resumed_from"] == str(middle)
        with pytest.raises(CheckpointError, match="is not the file that its run wrote"):
            train_from_config(tiny(tmp_path, iterations=4, **options), resume=newest)
    report("faults, exchanged checkpoint files: 4 of 4 found")
    newest.write_bytes(own)
    # A copy elsewhere is a file like any other.
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(own)
    assert train_from_config(tiny(tmp_path, iterations=4, **options), resume=copy)["num_updates"] == 4


def rates(summary: dict[str, Any]) -> list[float]:
    return [record["train/learning_rate"] for record in summary["train_history"]]


def cosine(step: int, total: int) -> float:
    return (1 + math.cos(math.pi * step / total)) / 2


def test_a_restored_schedule_goes_on_where_it_was(tmp_path: Path):
    algorithm = {"optimizer": {"learning_rate": 1.0}, "lr_scheduler": {"name": "cosine", "kwargs": {"T_max": 100}}}
    half = train_from_config(tiny(tmp_path, algorithm=algorithm, iterations=51, final_eval_episodes=0))
    resumed = train_from_config(tiny(tmp_path, algorithm=algorithm, iterations=52, final_eval_episodes=0), resume="latest", run=half["run_directory"])
    assert rates(resumed)[:51] == rates(half)
    assert rates(resumed)[51] == pytest.approx(0.484295, abs=1e-6)


def test_a_longer_budget_does_not_move_a_schedule_that_has_begun(tmp_path: Path):
    algorithm = {"optimizer": {"learning_rate": 1.0}, "lr_scheduler": {"name": "cosine"}}
    half = train_from_config(tiny(tmp_path, algorithm=algorithm, iterations=4, total_timesteps=2 * HORIZON * ROWS))
    assert rates(half) == pytest.approx([1.0, cosine(1, 2)], abs=1e-6)
    where: dict[str, Any] = {"resume": "latest", "run": half["run_directory"]}
    for budget in ({"iterations": 4}, {"total_timesteps": 2 * HORIZON * ROWS + 1}):
        with pytest.raises(ConfigError, match=rf"trainer\.{next(iter(budget))}.*update 2.*restart"):
            train_from_config(tiny(tmp_path, algorithm=algorithm, **budget), **where)
    assert len(directories(tmp_path)) == 1
    # A length of the schedule's own is kept by any budget.
    own = {"optimizer": {"learning_rate": 1.0}, "lr_scheduler": {"name": "cosine", "kwargs": {"T_max": 2}}}
    resumed = train_from_config(tiny(tmp_path, algorithm=own, iterations=3), **where)
    assert rates(resumed) == pytest.approx([1.0, cosine(1, 2), cosine(2, 2)], abs=1e-6)


def test_a_shorter_budget_does_not_move_a_schedule_that_has_begun(tmp_path: Path):
    algorithm = {"optimizer": {"learning_rate": 1.0}, "lr_scheduler": {"name": "linear"}}
    options: dict[str, Any] = {"algorithm": algorithm, "save_frequency_updates": 1, "final_eval_episodes": 0}
    whole = train_from_config(tiny(tmp_path, iterations=4, **options))
    early = Path(whole["latest_checkpoint_path"]).with_name("tiny_step_8.safetensors")
    cut = train_from_config(tiny(tmp_path, iterations=3, **options), resume=early)
    assert rates(cut) == [1.0, 0.75, 0.5]
    again = train_from_config(tiny(tmp_path, iterations=4, **options), resume=cut["latest_checkpoint_path"])
    assert same_bits(final_state(again), final_state(whole))


def test_a_restarted_schedule_runs_over_the_updates_that_remain(tmp_path: Path):
    algorithm = {"optimizer": {"learning_rate": 1.0}, "lr_scheduler": {"name": "linear"}}
    half = train_from_config(tiny(tmp_path, algorithm=algorithm, iterations=2))
    where: dict[str, Any] = {"resume": "latest", "run": half["run_directory"], "resume_scheduler": "restart"}
    resumed = train_from_config(tiny(tmp_path, algorithm=algorithm, iterations=6), **where)
    assert rates(resumed) == [1.0, 0.5, 1.0, 0.75, 0.5, 0.25]
    # Interrupted, the schedule that began anew goes on over its own length.
    options: dict[str, Any] = {"algorithm": algorithm, "iterations": 6}
    early = train_from_config(tiny(tmp_path, save_frequency_updates=1, **options), **where)["latest_checkpoint_path"]
    again = train_from_config(tiny(tmp_path, **options), resume=Path(early).with_name("tiny_step_32.safetensors"))
    assert rates(again) == rates(resumed)
    with pytest.raises(ConfigError, match="update 6"):
        train_from_config(tiny(tmp_path, algorithm=algorithm, iterations=7), resume=resumed["latest_checkpoint_path"])


def test_a_restarted_schedule_keeps_the_moments(tmp_path: Path):
    algorithm = {"optimizer": {"learning_rate": 1.0}, "lr_scheduler": {"name": "exponential", "kwargs": {"gamma": 0.5}}}
    half = train_from_config(tiny(tmp_path, algorithm=algorithm, iterations=2))
    where: dict[str, Any] = {"resume": "latest", "run": half["run_directory"]}
    restored = train_from_config(tiny(tmp_path, algorithm=algorithm, iterations=3), **where)
    restarted = train_from_config(tiny(tmp_path, algorithm=algorithm, iterations=3), resume_scheduler="restart", **where)
    assert rates(restored) == pytest.approx([1.0, 0.5, 0.25], rel=1e-6)
    assert rates(restarted) == pytest.approx([1.0, 0.5, 1.0], rel=1e-6)
    a, b = final_state(restored), final_state(restarted)
    moments = {name for name in a if name.startswith("opt_state.")}
    assert moments
    assert all(torch.equal(a[name], b[name]) for name in moments)
    assert int(b["counters.updates"]) == 3


def test_a_changed_hyper_parameter_is_taken_or_said(tmp_path: Path, recwarn: pytest.WarningsRecorder, capfd: pytest.CaptureFixture[str]):
    half = train_from_config(tiny(tmp_path, iterations=1))
    capfd.readouterr()
    resumed = train_from_config(tiny(tmp_path, algorithm={"gamma": 0.5, "optimizer": {"learning_rate": 0.25}}), resume="latest", run=half["run_directory"])
    said = "".join((*(str(warning.message) for warning in recwarn), *capfd.readouterr()))
    state = final_state(resumed)
    for name, value in (("gamma", 0.5), ("optimizer.learning_rate", 0.25)):
        assert float(state[f"hyper.{name}"]) == value
        assert f"algorithm.cfg.{name}" in said
    assert rates(resumed) == [0.05000000074505806, 0.25]
    # Budget and output are no settings of the training: nothing is said of them.
    recwarn.clear()
    train_from_config(tiny(tmp_path, iterations=2, exp_name="other"), resume="latest", run=half["run_directory"])
    assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]


def test_a_limit_can_be_switched_on_and_off_when_a_run_goes_on(tmp_path: Path):
    half = train_from_config(tiny(tmp_path, iterations=1))
    with pytest.warns(RuntimeWarning, match=r"trainer\.state_adjoint_max_norm 0\.0 -> 0\.5"):
        limited = train_from_config(tiny(tmp_path, state_adjoint_max_norm=0.5), resume="latest", run=half["run_directory"])
    assert float(final_state(limited)["hyper.state_adjoint_max_norm"]) == 0.5
    with pytest.warns(RuntimeWarning, match="state_adjoint_max_norm"):
        free = train_from_config(tiny(tmp_path, iterations=3), resume="latest", run=limited["run_directory"])
    assert "hyper.state_adjoint_max_norm" not in final_state(free)


def test_a_run_that_goes_on_with_other_threads_says_so(tmp_path: Path, recwarn: pytest.WarningsRecorder, capfd: pytest.CaptureFixture[str]):
    half = train_from_config(tiny(tmp_path, iterations=1, threads=1))
    capfd.readouterr()
    train_from_config(tiny(tmp_path, threads=2), resume="latest", run=half["run_directory"])
    said = "".join((*(str(warning.message) for warning in recwarn), *capfd.readouterr()))
    assert "thread" in said


# ---- stopping early ----


@pytest.mark.parametrize("scheduler", ["linear", "cosine"])
def test_a_run_that_stops_after_every_update_is_the_run_that_does_not(tmp_path: Path, scheduler: str):
    algorithm = {"optimizer": {"learning_rate": 1.0}, "lr_scheduler": {"name": scheduler}}
    options: dict[str, Any] = {"algorithm": algorithm, "iterations": 4, **MEMORY}
    whole = train_from_config(tiny(tmp_path, **options))
    summary = train_from_config(tiny(tmp_path, **options), stop_after=1)
    for number in (1, 2, 3):
        assert (summary["status"], summary["num_updates"]) == ("stopped", number)
        assert rates(summary) == rates(whole)[:number]
        assert summary["best_eval_metrics"] == {}
        summary = train_from_config(tiny(tmp_path, **options), resume="latest", run=summary["run_directory"], stop_after=1)
    assert summary["status"] == "finished"
    assert same_bits(final_state(summary), final_state(whole))
    assert untimed(summary["train_history"]) == untimed(whole["train_history"])
    assert without_nan(summary["eval_history"]) == without_nan(whole["eval_history"])
    assert without_nan(summary["last_eval_metrics"]) == without_nan(whole["last_eval_metrics"])


def test_a_stop_after_the_budget_changes_nothing(tmp_path: Path):
    summary = train_from_config(tiny(tmp_path, iterations=2), stop_after=50)
    assert (summary["status"], summary["num_updates"]) == ("finished", 2)
    assert summary["last_eval_metrics"]["eval/episodes"] == 2
    stopped = train_from_config(tiny(tmp_path, total_timesteps=5 * HORIZON * ROWS, algorithm={"lr_scheduler": {"name": "linear"}}), stop_after=3)
    assert stopped["num_updates"] == 3
    assert rates(stopped) == pytest.approx([0.05, 0.04, 0.03])


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "3"])
def test_a_stop_that_means_nothing_is_refused(tmp_path: Path, value: Any):
    with pytest.raises(ValueError, match="stop_after must be an integer of at least 1"):
        train_from_config(tiny(tmp_path), stop_after=value)
    assert directories(tmp_path) == []


# ---- killed and resumed, in processes of their own ----


def test_a_killed_and_resumed_run_has_a_maximum_difference_of_zero(report: Callable[[str], None]):
    """Twenty updates straight against seven, SIGKILL and thirteen more, each in another process, by the script that users run."""
    script = Path(frl.__file__).parents[1] / "benchmarks" / "resume_exactness.py"
    command = [sys.executable, str(script), "--compile-mode", "eager", "--start", "forkserver"]
    done = subprocess.run(command, cwd=script.parents[1], capture_output=True, text=True, check=False)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [result["case"] for result in results] == ["apg_segmented", "apg_complete", "shac", "ppo", "grpo"], done.stderr
    for result in results:
        assert (result["resumed_after"], result["updates"], result["killed_by"]) == (7, 20, "SIGKILL")
        assert result["tensors"] > 50
        assert result["metrics"] > 300
        assert result["same_bits"] is True
        assert result["max_difference"] == 0.0
        report(f"resume, {result['case']}: maximum difference {result['max_difference']:g} over {result['values']} values and {result['metrics']} metrics")
    assert done.returncode == 0


def test_the_comparison_finds_a_single_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = Path(frl.__file__).parents[1]
    monkeypatch.syspath_prepend(root / "benchmarks")
    script = importlib.import_module("resume_exactness")
    one = json.loads(json.dumps(train_from_config(tiny(tmp_path, iterations=2, enable_eval=True, eval_freq=8))))
    assert script.differences(one, one)["same_bits"]
    assert script.differences(one, one)["max_difference"] == 0.0
    tensors, metadata = read_checkpoint(one["latest_checkpoint_path"])
    nudged = torch.nextafter(tensors["params.log_std"], torch.tensor(1.0))
    state = {name: x for name, x in tensors.items() if not name.startswith("loop.")}
    other = save_checkpoint(tmp_path / "other.safetensors", {**state, "params.log_std": nudged}, {})
    found = script.differences(one, {**one, "latest_checkpoint_path": str(other)})
    assert not found["same_bits"]
    assert 0 < found["max_difference"] < 1e-6
    later = json.loads(json.dumps(one))
    later["train_history"][1]["train/loss"] += 1e-12
    assert 0 < script.differences(one, later)["max_difference"] < 1e-11
    later["train_history"][1]["train/loss"] = math.nan
    assert script.differences(one, later)["max_difference"] == math.inf
    del later["eval_history"][0]["eval/avg_reward"]
    assert not script.differences(one, later)["same_bits"]


# ---- from one machine or mode to another ----


@pytest.mark.parametrize(("before", "after"), [("aot_eager", "eager"), ("eager", "aot_eager")])
def test_compiled_and_eager_runs_go_on_from_each_other(tmp_path: Path, before: str, after: str):
    options: dict[str, Any] = {"iterations": 2, "final_eval_episodes": 0, "normalize_observations": True}
    done = train_from_config(tiny(tmp_path, compile_mode=before, **options))
    where: dict[str, Any] = {"resume": "latest", "run": done["run_directory"]}
    with pytest.warns(RuntimeWarning, match=f"compile_mode '{before}' -> '{after}'"):
        loaded = train_from_config(tiny(tmp_path, compile_mode=after, **options), **where)
    assert same_bits(final_state(loaded), final_state(done))
    with pytest.warns(RuntimeWarning, match="compile_mode"):
        resumed = train_from_config(tiny(tmp_path, compile_mode=after, **{**options, "iterations": 3}), **where)
    whole = train_from_config(tiny(tmp_path, compile_mode="eager", **{**options, "iterations": 3}))
    a, b = final_state(resumed), final_state(whole)
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("before", "after"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_runs_on_cpu_and_cuda_go_on_from_each_other(tmp_path: Path, before: str, after: str):
    done = train_from_config(tiny(tmp_path, device=before, iterations=2))
    where: dict[str, Any] = {"resume": "latest", "run": done["run_directory"]}
    with pytest.warns(RuntimeWarning, match=f"device '{before}"):
        loaded = train_from_config(tiny(tmp_path, device=after, iterations=2), **where)
    with pytest.warns(RuntimeWarning, match=f"device '{before}"):
        resumed = train_from_config(tiny(tmp_path, device=after, iterations=4), **where)
    assert same_bits(final_state(loaded), final_state(done))
    assert (resumed["num_updates"], resumed["skipped_updates"]) == (4, 0)


def test_a_checkpoint_written_on_another_device_is_read_without_it(tmp_path: Path):
    """Files hold no device: what was on an accelerator when it was saved is plain numbers."""
    done = train_from_config(tiny(tmp_path, iterations=1))
    tensors, _ = read_checkpoint(done["latest_checkpoint_path"])
    assert {x.device.type for x in tensors.values()} == {"cpu"}
    back = restore(tensors, {name: torch.empty_like(x, device="meta") for name, x in tensors.items()})
    assert all(x.device.type == "meta" and x.shape == tensors[name].shape for name, x in back.items())


@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
def test_a_resumed_run_of_short_horizons_is_the_uninterrupted_one(tmp_path: Path, mode: str):
    """Target critic, temperature, statistics of values and both optimizers go on where they were."""

    def config(iterations: int, **cfg: Any) -> RunConfig:
        schedule = {"name": "linear", "kwargs": {"total_iters": 5}}
        soft = {"n_epochs": 2, "num_mini_batches": 2, "learn_temperature": True, "ent_coef": 0.1, "lr_scheduler": schedule, **cfg}
        raw = mapping(tmp_path, iterations=iterations, algorithm=soft, compile_mode=mode, **MEMORY)
        raw["algorithm"]["name"] = "shac"
        raw["policy"] |= {"name": "actor_critic", "critic": raw["policy"]["actor"]}
        return parse_run_config(raw)

    whole, half = train_from_config(config(4)), train_from_config(config(2))
    resumed = train_from_config(config(4), resume="latest", run=half["run_directory"])
    assert same_bits(final_state(resumed), final_state(whole))
    assert {"extra.log_temperature", "extra.value_stats.mean"} <= set(final_state(whole))
    assert untimed(resumed["train_history"]) == untimed(whole["train_history"])
    assert without_nan(resumed["eval_history"]) == without_nan(whole["eval_history"])
    if mode == "eager":
        # A changed rate of the critic holds from the resumed update on; the actor's stays.
        with pytest.warns(RuntimeWarning, match=r"algorithm\.cfg\.critic_optimizer\.learning_rate"):
            faster = train_from_config(config(3, critic_optimizer={"learning_rate": 0.5}), resume="latest", run=half["run_directory"])
        found = faster["last_train_metrics"]
        assert found["train/critic_learning_rate"] == pytest.approx(0.5 * 0.6)
        assert found["train/learning_rate"] == whole["train_history"][2]["train/learning_rate"]
