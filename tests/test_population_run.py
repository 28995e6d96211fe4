"""A run file with a population: each member is the solo run of its own run file, and the whole ends with a ranking."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from frl.checkpoint import CheckpointError, read_checkpoint
from frl.cli import main
from frl.config import ConfigError, RunConfig, load_run_config, parse_run_config
from frl.load import load_run, newest_run
from frl.population_run import member_configs
from frl.records import find_runs, read_run
from frl.run import train_from_config


def blocks(folder: Path, **trainer: Any) -> dict[str, Any]:
    return {
        "trainer": {
            "exp_name": "tiny",
            "learning_env": {"name": "point_mass", "cfg": {"max_episode_steps": 6}},
            "seed": 3,
            "num_envs": 2,
            "iterations": 4,
            "segment_length": 6,
            "normalize_observations": True,
            "enable_eval": True,
            "eval_freq": 24,
            "num_eval_envs": 2,
            "num_eval_episodes": 4,
            "final_eval_episodes": 4,
            "compile_mode": "eager",
            "output_dir": str(folder),
            **trainer,
        },
        "policy": {"name": "actor_only", "actor": {"type": "mlp", "network_cfg": {"hidden_sizes": [4], "activation": "tanh"}}},
        "algorithm": {"name": "apg", "cfg": {"optimizer": {"learning_rate": 0.002}, "lr_scheduler": {"name": "cosine"}}},
        "population": {"size": 4, "hyper": {"optimizer.learning_rate": [0.001, 0.1], "gamma": [0.9, 0.9, 0.99, 0.99]}},
    }


def config(folder: Path, **trainer: Any) -> RunConfig:
    return parse_run_config(blocks(folder, **trainer))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train_from_config(config(tmp_path_factory.mktemp("population")))


def tensors(path: str | Path) -> dict[str, torch.Tensor]:
    return {name: x for name, x in read_checkpoint(path)[0].items() if not name.startswith("loop.")}


def test_a_member_is_the_solo_run_of_its_own_run_file(trained, tmp_path):
    directory = Path(trained["run_directory"]) / "members" / "01"
    own = load_run_config(directory / "configs" / "train.yaml", [f"trainer.output_dir={json.dumps(str(tmp_path))}"])
    assert own.population is None
    assert (own.trainer.seed, own.algorithm.cfg.optimizer.learning_rate, own.algorithm.cfg.gamma) == (4, 0.1, 0.9)
    solo = train_from_config(own)
    member = json.loads((directory / "summary.json").read_text())
    got, want = tensors(member["latest_checkpoint_path"]), tensors(solo["latest_checkpoint_path"])
    assert set(got) == set(want)
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-4, atol=1e-5, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")
    for key in ("global_step", "num_updates", "best_eval_value"):
        assert member[key] == pytest.approx(solo[key], rel=1e-4)
    assert member["last_eval_metrics"] == pytest.approx(solo["last_eval_metrics"], rel=1e-3, nan_ok=True)
    assert len(member["eval_history"]) == len(solo["eval_history"]) == 2


def test_the_ranking_is_by_score(trained):
    directory = Path(trained["run_directory"])
    ranking = json.loads((directory / "population.json").read_text())["members"]
    assert [row["member"] for row in ranking] == [row["member"] for row in trained["members"]]
    assert sorted(row["member"] for row in ranking) == [0, 1, 2, 3]
    scores = [row["score"] for row in ranking]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) > 1
    for row in ranking:
        assert row["seed"] == 3 + row["member"]
        assert row["hyper"] == {"optimizer.learning_rate": (0.001, 0.1)[row["member"] % 2], "gamma": (0.9, 0.9, 0.99, 0.99)[row["member"]]}
        summary = json.loads((directory / row["directory"] / "summary.json").read_text())
        assert summary["score"] == row["score"] == summary["best_eval_metrics"]["eval/avg_reward"]
        assert Path(summary["best_checkpoint_path"]).is_file()
    assert trained["best_checkpoint_path"].startswith(str(directory / ranking[0]["directory"]))


def test_members_are_runs_for_whatever_reads_a_run(trained, capsys):
    directory = Path(trained["run_directory"])
    members = find_runs(directory)
    assert [path.name for path in members] == ["00", "01", "02", "03"]
    record = read_run(members[2])
    assert (record.name, record.state, record.updates) == ("tiny", "finished", 4)
    assert len(record.series("train/loss")[0]) == 4
    best = trained["members"][0]
    assert newest_run(directory) == newest_run(directory.parent) == directory / best["directory"]
    assert main(["eval", str(directory), "--episodes", "3"]) == 0
    assert f"{best['member']:02d}, tiny_" in capsys.readouterr().out
    assert main(["plot", str(directory)]) == 0
    assert (directory / "learning_curves.png").is_file()
    with load_run(directory, checkpoint="best") as loaded:
        assert loaded.path == directory / best["directory"]
        assert loaded.global_step == best["best_global_step"]


def test_a_resumed_population_is_the_one_without_a_stop(trained, tmp_path):
    first = train_from_config(config(tmp_path), stop_after=2)
    assert (first["status"], first["num_updates"]) == ("stopped", 2)
    second = train_from_config(config(tmp_path), resume="latest", run=first["run_directory"])
    for i in range(4):
        ends = [json.loads((Path(run["run_directory"]) / "members" / f"{i:02d}" / "summary.json").read_text()) for run in (second, trained)]
        a, b = (tensors(end["latest_checkpoint_path"]) for end in ends)
        assert all(torch.equal(a[name].nan_to_num(), b[name].nan_to_num()) for name in b)
        assert ends[0]["eval_history"] == ends[1]["eval_history"]
    assert [row["member"] for row in second["members"]] == [row["member"] for row in trained["members"]]


def test_the_command_prints_the_ranking(tmp_path, capsys):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(blocks(tmp_path / "out", enable_eval=False, eval_freq=0, final_eval_episodes=0)))
    assert main(["train", str(path), "--quiet", "--set", "population.size=2", "--set", "population.hyper={optimizer.learning_rate: [0.001, 0.1]}"]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.split()[:1] in (["1"], ["2"])]
    assert sorted(row[1] for row in rows) == ["0", "1"]
    assert "optimizer.learning_rate" in out
    assert "learning_curves.png" in out


def test_what_means_nothing_is_refused(tmp_path):
    def refused(change: dict[str, Any], **trainer: Any) -> str:
        data = blocks(tmp_path, **trainer)
        data["population"].update(change)
        with pytest.raises((ConfigError, ValueError)) as caught:
            train_from_config(parse_run_config(data))
        return str(caught.value)

    assert "population.hyper.optimizer.rate: there is no such setting" in refused({"hyper": {"optimizer.rate": [1.0, 2.0]}})
    assert "gamma" in refused({"hyper": {"gamma": [0.9, 2.0]}})
    assert "no hyper-parameter 'segment_length'" in refused({"hyper": {"segment_length": [6, 3]}})
    assert "trainer.seed" in refused({}, seed=-1)
    with pytest.raises(ValueError, match="resumed from 'latest'"):
        train_from_config(config(tmp_path), resume="best", run=tmp_path)
    with pytest.raises(ValueError, match="neither callbacks nor a profile"):
        train_from_config(config(tmp_path), profile=True)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_host_environment_is_refused(tmp_path):
    data = blocks(tmp_path)
    data["trainer"] = {**data["trainer"], "learning_env": "gymnasium:Pendulum-v1", "buffer_size": 4, "normalize_observations": False}
    del data["trainer"]["segment_length"]
    data["algorithm"] = {"name": "grpo", "cfg": {"group_size": 2, "batch_size": 4}}
    data["population"] = {"size": 2}
    with pytest.raises(ConfigError, match="cannot be played by several members"):
        train_from_config(parse_run_config(data))


def test_checkpoints_of_different_updates_are_not_one_population(tmp_path):
    first = train_from_config(config(tmp_path), stop_after=1)
    more = train_from_config(config(tmp_path), resume="latest", run=first["run_directory"], stop_after=1)
    Path(more["run_directory"], "members", "01").rename(tmp_path / "away")
    Path(first["run_directory"], "members", "01").rename(Path(more["run_directory"], "members", "01"))
    with pytest.raises(CheckpointError, match=r"different updates: \[1, 2\]"):
        train_from_config(config(tmp_path), resume="latest", run=more["run_directory"])


def test_seeds_of_members_can_be_given(tmp_path):
    data = blocks(tmp_path)
    data["population"] = {"size": 2, "seeds": [11, 5]}
    assert [one.trainer.seed for one in member_configs(parse_run_config(data), "x")] == [11, 5]
    assert math.isclose(member_configs(config(tmp_path), "x")[3].algorithm.cfg.optimizer.learning_rate, 0.1)
