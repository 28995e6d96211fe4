"""Every shipped run file is loaded, built and run for one update, at a small size."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

import frl
from frl.build import build_run
from frl.config import dump_run_config, load_run_config, parse_run_config
from frl.run import train_from_config

FOLDER = Path(frl.__file__).parents[1] / "configs"
FILES = sorted(path for path in FOLDER.rglob("*") if path.suffix in (".yaml", ".yml", ".json"))
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(FOLDER).as_posix())


def small(path: Path, output_dir: Path) -> list[str]:
    """Overrides that make one update of a run file quick, whatever its algorithm."""
    config = load_run_config(path)
    rows = getattr(config.algorithm.cfg, "group_size", 2)
    values: dict[str, Any] = {
        "trainer.num_envs": rows,
        "trainer.iterations": 1,
        "trainer.total_timesteps": "null",
        "trainer.num_eval_envs": 2,
        "trainer.num_eval_episodes": 2,
        "trainer.final_eval_episodes": 2,
        "trainer.compile_mode": "eager",
        "trainer.threads": "null",
        "trainer.device": "cpu",
        "trainer.use_wandb": "false",
        "trainer.output_dir": json.dumps(str(output_dir)),
    }
    if config.algorithm.name in ("apg", "shac"):
        values |= {"trainer.segment_length": 4, "trainer.update_horizon": 4}
        values |= {"algorithm.cfg.n_epochs": 1, "algorithm.cfg.num_mini_batches": 2} if config.algorithm.name == "shac" else {}
        steps = 4 * rows * config.trainer.gradient_accumulation_steps
    else:
        values |= {"trainer.buffer_size": 4, "algorithm.cfg.n_epochs": 1, "algorithm.cfg.batch_size": 2 * rows}
        steps = 4 * rows
        if config.algorithm.name == "ppo":
            values["algorithm.cfg.num_mini_batches"] = 2
    if config.trainer.enable_eval and config.trainer.eval_freq:
        values["trainer.eval_freq"] = steps
    if config.population is not None:
        values["population.size"] = math.lcm(*map(len, config.population.hyper.values()))
    if config.trainer.save_frequency_updates:
        values["trainer.save_frequency_updates"] = 1
    return [f"{name}={value}" for name, value in values.items()]


def test_there_are_run_files():
    assert FILES
    assert [entry for entry in FOLDER.rglob("*") if entry.is_file() and entry not in FILES] == []


@every_file
def test_a_run_file_means_the_same_after_a_round_trip(path: Path):
    config = load_run_config(path)
    assert parse_run_config(dump_run_config(config)) == config


@every_file
def test_a_run_file_says_what_it_is_for(path: Path):
    if path.suffix != ".json":
        assert path.read_text(encoding="utf-8").startswith("# ")
    config = load_run_config(path)
    name, algorithm = config.trainer.learning_env.name, config.algorithm.name
    if path.parent.name in ("gymnasium", "mujoco"):
        # The file is the task and the algorithm: hopper_ppo of mujoco:Hopper-v5.
        task = name.removeprefix(f"{path.parent.name}:").split("-")[0]
        assert name.startswith(f"{path.parent.name}:")
        assert path.stem.startswith(f"{re.sub(r'(?<!^)(?=[A-Z])', '_', task).lower()}_{algorithm}")
    else:
        # The folder is the task, the file is the algorithm.
        assert name == path.parent.name
        assert path.stem.startswith(algorithm)
    assert config.trainer.exp_name is not None


@every_file
def test_a_run_file_asks_for_evaluations_that_take_place(path: Path):
    trainer = load_run_config(path).trainer
    assert trainer.enable_eval == (trainer.eval_freq > 0)
    assert trainer.seed >= 0


def needs_what_it_needs(path: Path) -> None:
    """Skip what needs an extra that is not installed."""
    if path.parent.name == "mujoco":
        pytest.importorskip("mujoco")


@every_file
def test_a_run_file_is_built_at_its_own_size(path: Path):
    needs_what_it_needs(path)
    parts = build_run(load_run_config(path, ["trainer.compile_mode=eager", "trainer.device=cpu"]))
    assert parts.env.num_envs == parts.config.trainer.num_envs
    assert (parts.loop_config.total_updates is None) != (parts.loop_config.total_timesteps is None)


@every_file
def test_a_run_file_makes_one_update(path: Path, tmp_path: Path):
    needs_what_it_needs(path)
    config = load_run_config(path)
    summary = train_from_config(path, overrides=small(path, tmp_path))
    assert (summary["num_updates"], summary["skipped_updates"]) == (1, 0)
    assert math.isfinite(summary["last_train_metrics"]["train/loss"])
    assert Path(summary["latest_checkpoint_path"]).is_file()
    assert Path(summary["latest_checkpoint_path"]).is_relative_to(tmp_path)
    assert summary["last_eval_metrics"]["eval/episodes"] == 2
    if config.trainer.enable_eval:
        # The metric that picks the best checkpoint exists.
        assert config.trainer.best_eval_metric in summary["eval_history"][0]
