"""A run from its file: the directory, the summary, the checkpoints it names, and a run that goes on from another."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from frl import run as runs
from frl.build import build_run
from frl.checkpoint import read_checkpoint
from frl.config import ConfigError, load_run_config, parse_run_config, write_yaml
from frl.run import train_from_config
from frl.run_directory import MANIFEST, RunDirectory, resolve_resume
from tests.tiny_runs import HORIZON, ROWS, directories, final_state, mapping, same_bits, saved_state, strict_json, tiny, without_nan

# ---- the directory ----


def test_what_a_run_leaves(tmp_path: Path):
    path = tmp_path / "run.yaml"
    write_yaml(path, mapping(tmp_path, enable_eval=True, eval_freq=HORIZON * ROWS, save_frequency_updates=1, iterations=3))
    summary = train_from_config(path)
    (directory,) = directories(tmp_path)
    assert Path(summary["run_directory"]) == directory
    assert directory.name.startswith("tiny_")
    assert {entry.name for entry in directory.iterdir()} >= {"checkpoints", "configs", "logs", "metrics.jsonl", "summary.json", MANIFEST}
    assert list((directory / "logs" / "tiny").glob("events.out.tfevents.*"))
    # The snapshot is the file with every default resolved, and reads back as the same run.
    assert load_run_config(directory / "configs" / "train.yaml") == load_run_config(path)
    names = {entry.name for entry in (directory / "checkpoints").iterdir()}
    assert {"tiny_step_24.safetensors", "tiny_best_step_8.safetensors"} <= names
    assert all(name.startswith(("tiny_step_", "tiny_best_step_")) for name in names)
    manifest = strict_json((directory / MANIFEST).read_text())
    assert manifest["schema_version"] == 1
    assert manifest["configs"] == {"train": "configs/train.yaml"}
    assert manifest["checkpoints"]["latest"] == "checkpoints/tiny_step_24.safetensors"
    assert (directory / manifest["checkpoints"]["best"]).is_file()
    assert summary["latest_checkpoint_path"] == str(directory / manifest["checkpoints"]["latest"])
    assert summary["best_checkpoint_path"] == str(directory / manifest["checkpoints"]["best"])
    assert not [entry for entry in directory.rglob(".*")]


def test_the_summary(tmp_path: Path):
    # No episode ends in the first update: its means are NaN.
    summary = train_from_config(tiny(tmp_path, iterations=3, env={"name": "double_integrator", "cfg": {"max_episode_steps": 6}}))
    assert math.isnan(summary["train_history"][0]["charts/episode_reward_avg_100"])
    assert set(summary) >= {
        *("global_step", "num_updates", "elapsed_time_sec", "training_fps", "last_train_metrics", "last_eval_metrics"),
        *("train_history", "eval_history", "latest_checkpoint_path", "best_checkpoint_path"),
        *("best_eval_metrics", "compile_seconds", "seconds_to_first_update", "run_directory"),
    }
    stored = strict_json((Path(summary["run_directory"]) / "summary.json").read_text())
    assert stored == without_nan(json.loads(json.dumps(summary)))
    assert (summary["num_updates"], summary["global_step"], summary["skipped_updates"]) == (3, 3 * HORIZON * ROWS, 0)
    assert [record["num_updates"] for record in summary["train_history"]] == [1, 2, 3]
    assert {"global_step", "num_updates", "charts/SPS", "charts/episode_reward_avg_100", "charts/episode_length_avg_100"} <= set(summary["train_history"][0])
    assert {"train/loss", "train/objective", "train/entropy", "train/grad_norm", "train/learning_rate", "train/skipped_update"} <= set(
        summary["last_train_metrics"]
    )
    assert {"eval/avg_reward", "eval/avg_length", "eval/success_rate", "eval/metrics/final_distance"} <= set(summary["last_eval_metrics"])
    assert (summary["eval_history"], summary["best_checkpoint_path"], summary["best_eval_metrics"]) == ([], None, {})
    assert summary["elapsed_time_sec"] >= summary["seconds_to_first_update"] > 0
    assert summary["training_fps"] > 0


def test_records_are_lines_of_json(tmp_path: Path):
    summary = train_from_config(tiny(tmp_path, enable_eval=True, eval_freq=2 * HORIZON * ROWS, iterations=4))
    lines = [strict_json(line) for line in (Path(summary["run_directory"]) / "metrics.jsonl").read_text().splitlines()]
    training = [line for line in lines if "train/loss" in line]
    assert [line["global_step"] for line in training] == [8, 16, 24, 32]
    assert training[-1]["train/loss"] == summary["last_train_metrics"]["train/loss"]
    assert [line["global_step"] for line in lines if "eval/avg_reward" in line] == [16, 32]
    assert [line["final_eval/avg_reward"] for line in lines if "final_eval/avg_reward" in line] == [summary["last_eval_metrics"]["eval/avg_reward"]]


def test_every_run_has_a_directory_of_its_own(tmp_path: Path):
    first, second = train_from_config(tiny(tmp_path)), train_from_config(tiny(tmp_path))
    assert first["run_directory"] != second["run_directory"]
    assert same_bits(final_state(first), final_state(second))
    made = RunDirectory.create(tmp_path / "deep" / "er", "name")
    assert made.path.is_dir()
    assert made.checkpoint("best", 5).name == "name_best_step_5.safetensors"
    assert made.checkpoint("periodic", 5).name == made.checkpoint("last", 5).name == "name_step_5.safetensors"


def test_the_default_name(tmp_path: Path):
    summary = train_from_config(tiny(tmp_path, exp_name=None, env={"name": "Double_Integrator", "cfg": {"max_episode_steps": 3}}))
    assert Path(summary["run_directory"]).name.lower().startswith("double_integrator_apg_")


def test_the_environment_is_recorded(tmp_path: Path):
    summary = train_from_config(tiny(tmp_path))
    record = strict_json((Path(summary["run_directory"]) / "environment.json").read_text())
    assert record["torch"] == torch.__version__
    assert record["threads"] == torch.get_num_threads()
    assert record["seed"] == summary["seed"] == 1
    assert record["resumed_from"] is None


# ---- what is trained ----


def test_the_seed_decides(tmp_path: Path):
    first, other = train_from_config(tiny(tmp_path, seed=3)), train_from_config(tiny(tmp_path, seed=4))
    assert not torch.equal(final_state(first)["params.log_std"], final_state(other)["params.log_std"])
    drawn = train_from_config(tiny(tmp_path, seed=-1))
    assert drawn["seed"] >= 0
    again = train_from_config(tiny(tmp_path, seed=drawn["seed"]))
    assert same_bits(final_state(drawn), final_state(again))


def test_a_step_budget_and_overrides(tmp_path: Path):
    path = tmp_path / "run.yaml"
    write_yaml(path, mapping(tmp_path))
    summary = train_from_config(path, overrides=["trainer.total_timesteps=17", "algorithm.cfg.optimizer.learning_rate=0.5"])
    assert (summary["global_step"], summary["num_updates"]) == (24, 3)
    assert summary["last_train_metrics"]["train/learning_rate"] == 0.5


def test_overrides_hold_for_a_config_object_too_or_are_refused(tmp_path: Path):
    try:
        summary = train_from_config(tiny(tmp_path), overrides=["trainer.iterations=1"])
    except (TypeError, ValueError):
        return
    assert summary["num_updates"] == 1


def test_a_schedule_runs_over_the_whole_budget(tmp_path: Path):
    schedule = {"lr_scheduler": {"name": "linear"}, "optimizer": {"learning_rate": 1.0}}
    for budget in ({"iterations": 4}, {"total_timesteps": 4 * HORIZON * ROWS}):
        summary = train_from_config(tiny(tmp_path, algorithm=schedule, **budget))
        assert [record["train/learning_rate"] for record in summary["train_history"]] == [1.0, 0.75, 0.5, 0.25]


def test_float64_runs_end_to_end(tmp_path: Path):
    summary = train_from_config(tiny(tmp_path, dtype="float64", enable_eval=True, eval_freq=8, normalize_observations=True))
    floating = {x.dtype for x in final_state(summary).values() if x.is_floating_point()}
    assert floating == {torch.float64}


def test_several_segments_in_one_update_and_several_rollouts(tmp_path: Path):
    summary = train_from_config(tiny(tmp_path, update_horizon=3 * HORIZON))
    assert summary["global_step"] == 2 * 3 * HORIZON * ROWS
    summary = train_from_config(tiny(tmp_path, rollout_mode="complete", gradient_accumulation_steps=2))
    assert summary["global_step"] == 2 * 2 * HORIZON * ROWS


# ---- evaluation ----


class Seeds:
    """Sees every evaluation of a run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[int, int, dict[str, Tensor]]] = []
        make = runs.make_evaluator

        def spy(*args: Any, **kwargs: Any) -> Any:
            evaluate = make(*args, **kwargs)

            def seen(params: Any, norm_state: Any = (), **options: Any) -> Any:
                self.calls.append((options["seed"], options["num_episodes"], params))
                return evaluate(params, norm_state, **options)

            return seen

        monkeypatch.setattr(runs, "make_evaluator", spy)


def test_the_final_evaluation_is_on_episodes_that_chose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = Seeds(monkeypatch)
    summary = train_from_config(tiny(tmp_path, iterations=3, enable_eval=True, eval_freq=8, final_eval_episodes=5, seed=2, best_eval_mode="min"))
    during, final = [call for call in seen.calls if call[1] == 2], [call for call in seen.calls if call[1] == 5]
    assert [seed for seed, *_ in during] == [10_002] * 3
    assert len(final) == 2
    assert len({seed for seed, *_ in final}) == 1
    assert final[0][0] != 10_002
    assert summary["last_eval_metrics"]["eval/episodes"] == summary["best_eval_metrics"]["eval/episodes"] == 5
    last, best = final_state(summary), read_checkpoint(summary["best_checkpoint_path"])[0]
    assert not torch.equal(last["params.log_std"], best["params.log_std"])
    assert torch.equal(final[0][2]["log_std"], last["params.log_std"])
    assert torch.equal(final[1][2]["log_std"], best["params.log_std"])
    assert [entry["eval/episodes"] for entry in summary["eval_history"]] == [2, 2, 2]
    assert summary["best_eval_value"] == min(entry["eval/avg_reward"] for entry in summary["eval_history"])


def test_without_a_final_evaluation_the_last_one_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = Seeds(monkeypatch)
    summary = train_from_config(tiny(tmp_path, iterations=2, enable_eval=True, eval_freq=8, eval_seed=33, final_eval_episodes=0))
    assert [seed for seed, *_ in seen.calls] == [33, 33]
    assert summary["best_eval_metrics"] == {}
    assert {"global_step": 16, **summary["last_eval_metrics"]} == summary["eval_history"][-1]
    summary = train_from_config(tiny(tmp_path, final_eval_episodes=0))
    assert summary["last_eval_metrics"] == {}


def test_evaluation_leaves_training_alone(tmp_path: Path):
    options: dict[str, Any] = {"iterations": 3, "normalize_observations": True}
    plain = train_from_config(tiny(tmp_path, **options))
    watched = train_from_config(tiny(tmp_path, enable_eval=True, eval_freq=8, save_frequency_updates=1, **options))
    assert same_bits(final_state(plain), final_state(watched))


def test_any_metric_can_choose_the_best(tmp_path: Path):
    options: dict[str, Any] = {"iterations": 4, "enable_eval": True, "eval_freq": 8, "best_eval_metric": "eval/metrics/final_distance", "best_eval_mode": "max"}
    summary = train_from_config(tiny(tmp_path, **options))
    assert summary["best_eval_value"] == max(entry["eval/metrics/final_distance"] for entry in summary["eval_history"])


# ---- what is not finite ----


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_a_reward_that_is_not_finite_costs_one_update(tmp_path: Path, bad: str):
    env = {"name": "aged_double_integrator", "cfg": {"bad_age": 5 * HORIZON, "bad_reward": bad}}
    options: dict[str, Any] = {
        "env": env,
        "num_envs": 4,
        "normalize_observations": True,
        "save_frequency_updates": 1,
        "keep_checkpoints": None,
        "final_eval_episodes": 0,
    }
    summary = train_from_config(tiny(tmp_path, iterations=9, algorithm={"lr_scheduler": {"name": "linear"}}, **options))
    assert summary["skipped_updates"] == 1
    assert [record["train/skipped_update"] for record in summary["train_history"]] == [0, 0, 0, 0, 1, 0, 0, 0, 0]
    saved = [saved_state(Path(summary["run_directory"]) / "checkpoints" / f"tiny_step_{i * 4 * HORIZON}.safetensors") for i in (4, 5, 6)]
    before, skipped, after = (
        {name: x for name, x in tensors.items() if name.split(".")[0] in ("params", "opt_state", "norm_state", "hyper")} for tensors in saved
    )
    assert same_bits(before, skipped)
    assert not same_bits(before, after)
    assert (int(saved[1]["counters.updates"]), int(saved[1]["counters.successful_updates"])) == (5, 4)
    assert 1 <= int(saved[1]["counters.nonfinite_rows"]) <= 3
    assert int(saved[0]["counters.nonfinite_rows"]) == 0
    for tensors in saved:
        learned = [x for name, x in tensors.items() if not name.startswith("metrics.") and name != "hyper.max_grad_norm_before_clip"]
        assert all(bool(torch.isfinite(x).all()) for x in learned)


def test_a_reward_that_is_not_finite_can_be_an_error(tmp_path: Path):
    env = {"name": "aged_double_integrator", "cfg": {"bad_age": 2 * HORIZON}}
    with pytest.raises(FloatingPointError, match="update 2"):
        train_from_config(tiny(tmp_path, env=env, num_envs=4, iterations=3, save_frequency_updates=1, algorithm={"skip_nonfinite_updates": False}))
    (directory,) = directories(tmp_path)
    # What was saved before is there to go on from.
    assert resolve_resume("latest", directory) == directory / "checkpoints" / "tiny_step_16.safetensors"


# ---- refusals leave nothing behind ----


@pytest.mark.parametrize(
    "trainer",
    [
        {"learning_env": "no_such_env"},
        {"learning_env": {"name": "double_integrator", "cfg": {"max_episode_step": 3}}},
        {"learning_env": {"name": "double_integrator", "cfg": {"mass": -1.0}}},
        {"learning_env": {"name": "double_integrator", "cfg": {"max_episode_steps": None}}},
        {"imports": ["no_such_module_of_frl"]},
        pytest.param({"device": "cuda"}, marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")),
    ],
    ids=str,
)
def test_what_cannot_be_built_leaves_no_directory(tmp_path: Path, trainer: dict[str, Any]):
    raw = mapping(tmp_path)
    raw["trainer"].update(trainer)
    with pytest.raises((ValueError, TypeError, ImportError)):
        train_from_config(parse_run_config(raw))
    assert directories(tmp_path) == []


def test_a_wrong_file_leaves_no_directory(tmp_path: Path):
    raw = mapping(tmp_path)
    raw["trainer"]["num_env"] = 3
    write_yaml(tmp_path / "run.yaml", raw)
    with pytest.raises(ConfigError, match="num_envs"):
        train_from_config(tmp_path / "run.yaml")
    assert directories(tmp_path) == []


def test_threads_and_determinism_are_put_back(tmp_path: Path):
    threads = torch.get_num_threads()
    train_from_config(tiny(tmp_path, threads=threads + 1, torch_deterministic=True))
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(ValueError, match="no_such_env"):
        train_from_config(tiny(tmp_path, threads=threads + 1, torch_deterministic=True, env="no_such_env"))
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()


def test_build_run_writes_nothing(tmp_path: Path):
    parts = build_run(tiny(tmp_path, num_envs=3))
    assert (parts.env.num_envs, parts.eval_env.num_envs, parts.seed, parts.eval_seed) == (3, 2, 1, 10_001)
    assert directories(tmp_path) == []


def test_compile_seconds_of_earlier_runs_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runs.compiler, "_seconds", 100.0)
    assert train_from_config(tiny(tmp_path))["compile_seconds"] == 0.0
