"""A run from its file: the directory, the summary, the checkpoints it names, and a run that goes on from another."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from frl import run as runs
from frl.build import build_run
from frl.checkpoint import CheckpointError, read_checkpoint, save_checkpoint
from frl.config import ConfigError, RunConfig, load_run_config, parse_run_config, write_yaml
from frl.envs.double_integrator import double_integrator
from frl.envs.env import Env
from frl.envs.registry import register_learning_env
from frl.run import train_from_config
from frl.run_directory import MANIFEST, RunDirectory, resolve_resume
from frl.types import Outcome

HORIZON, ROWS = 4, 2


class AgedState(NamedTuple):
    inner: Any
    age: Tensor  # [] steps of the episode
    start: Tensor  # [] first position


@register_learning_env("aged_double_integrator", override=True)
def aged(*, bad_age: int = -1, bad_reward: str = "nan", max_episode_steps: int = 1000) -> Env:
    """The double integrator with a reward that is not finite at one age of an episode, in the rows that started on the right."""
    env = double_integrator(max_episode_steps=max_episode_steps)

    def reset(key: Tensor, env_params: Any) -> AgedState:
        inner = env.reset(key, env_params)
        return AgedState(inner, torch.zeros_like(env_params.mass), inner.position[0])

    def step(env_state: AgedState, action: Tensor, env_params: Any) -> tuple[AgedState, Outcome]:
        inner, outcome = env.step(env_state.inner, action, env_params)
        age = env_state.age + 1
        bad = (age == bad_age) & (env_state.start > 0)
        return AgedState(inner, age, env_state.start), outcome._replace(reward=torch.where(bad, float(bad_reward), outcome.reward))

    return dataclasses.replace(env, reset=reset, observe=lambda env_state, env_params: env.observe(env_state.inner, env_params), step=step)


def mapping(tmp_path: Path, *, algorithm: dict[str, Any] | None = None, env: Any = None, **trainer: Any) -> dict[str, Any]:
    """A run file of the smallest run; keywords are keys of ``trainer``."""
    defaults = {
        "exp_name": "tiny",
        "learning_env": env or {"name": "double_integrator", "cfg": {"max_episode_steps": 3}},
        "num_envs": ROWS,
        "iterations": 2,
        "segment_length": HORIZON,
        "num_eval_envs": 2,
        "num_eval_episodes": 2,
        "final_eval_episodes": 2,
        "output_dir": str(tmp_path / "outputs"),
        "compile_mode": "eager",
    }
    return {
        "trainer": {**defaults, **trainer},
        "policy": {"name": "actor_only", "actor": {"type": "mlp", "network_cfg": {"hidden_sizes": [3]}}},
        "algorithm": {"name": "apg", "cfg": {"optimizer": {"learning_rate": 0.05}, **(algorithm or {})}},
    }


def tiny(tmp_path: Path, **options: Any) -> RunConfig:
    return parse_run_config(mapping(tmp_path, **options))


def directories(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "outputs").glob("*"))


def strict_json(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_nan(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def final_state(summary: dict[str, Any]) -> dict[str, Tensor]:
    return read_checkpoint(summary["latest_checkpoint_path"])[0]


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return set(a) == set(b) and all(a[name].dtype == b[name].dtype and a[name].numpy().tobytes() == b[name].numpy().tobytes() for name in a)


def untimed(history: list[dict[str, float]]) -> list[dict[str, float | None]]:
    return without_nan([{name: value for name, value in record.items() if name != "charts/SPS"} for record in history])


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
    options: dict[str, Any] = {"env": env, "num_envs": 4, "normalize_observations": True, "save_frequency_updates": 1, "final_eval_episodes": 0}
    summary = train_from_config(tiny(tmp_path, iterations=9, algorithm={"lr_scheduler": {"name": "linear"}}, **options))
    assert summary["skipped_updates"] == 1
    assert [record["train/skipped_update"] for record in summary["train_history"]] == [0, 0, 0, 0, 1, 0, 0, 0, 0]
    saved = [read_checkpoint(Path(summary["run_directory"]) / "checkpoints" / f"tiny_step_{i * 4 * HORIZON}.safetensors")[0] for i in (4, 5, 6)]
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


@pytest.mark.parametrize("iterations", [1, 3, 6])
def test_a_profile_is_written(tmp_path: Path, iterations: int):
    summary = train_from_config(tiny(tmp_path, iterations=iterations), profile=True)
    assert json.loads((Path(summary["run_directory"]) / "profile.json").read_text())["traceEvents"]
    if iterations == 6:  # a run that goes on counts its own updates
        summary = train_from_config(tiny(tmp_path, iterations=8), profile=True, resume="latest", run=summary["run_directory"])
        assert json.loads((Path(summary["run_directory"]) / "profile.json").read_text())["traceEvents"]


# ---- a run that goes on from another ----


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


def test_a_truncated_newest_file_is_an_error_that_names_it(tmp_path: Path):
    done = train_from_config(tiny(tmp_path, iterations=2, save_frequency_updates=1))
    latest = Path(done["latest_checkpoint_path"])
    latest.write_bytes(latest.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=latest.name):
        train_from_config(tiny(tmp_path, iterations=3), resume="latest", run=done["run_directory"])
    assert len(directories(tmp_path)) == 1
    resumed = train_from_config(tiny(tmp_path, iterations=3), resume=latest.with_name("tiny_step_8.safetensors"))
    assert resumed["num_updates"] == 3


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
