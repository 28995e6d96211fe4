"""The command line: exit codes, one message for a failure, and nothing left behind by a wrong call."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import frl
from frl import run as runs
from frl.callbacks import Event
from frl.cli import main
from frl.config import write_yaml
from frl.envs.double_integrator import double_integrator
from frl.envs.env import Env
from frl.envs.registry import get_registered_learning_env_names, register_learning_env


@register_learning_env("failing_env", override=True)
def failing_env(*, lines: int = 1, empty: bool = False) -> Env:
    """An environment whose step fails."""
    env = double_integrator(max_episode_steps=3)

    def step(*_: Any) -> Any:
        raise RuntimeError("" if empty else "\n".join(["the gripper is stuck"] * lines))

    return dataclasses.replace(env, step=step)


@register_learning_env("wrong_gradient", override=True)
def wrong_gradient() -> Env:
    """An environment whose reward is cut from the graph."""
    env = double_integrator(max_episode_steps=3)

    def step(env_state: Any, action: torch.Tensor, env_params: Any) -> Any:
        return env.step(env_state, action.detach(), env_params)

    return dataclasses.replace(env, step=step)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    write_yaml(path, mapping(tmp_path))
    return path


def mapping(tmp_path: Path) -> dict[str, Any]:
    return {
        "trainer": {
            "exp_name": "tiny",
            "learning_env": {"name": "double_integrator", "cfg": {"max_episode_steps": 3}},
            "num_envs": 2,
            "iterations": 1,
            "segment_length": 2,
            "num_eval_envs": 2,
            "final_eval_episodes": 2,
            "output_dir": str(tmp_path / "outputs"),
            "compile_mode": "eager",
        },
        "policy": {"name": "actor_only", "actor": {"type": "mlp", "network_cfg": {"hidden_sizes": [3]}}},
        "algorithm": {"name": "apg", "cfg": {}},
    }


def outputs(path: Path) -> list[Path]:
    return sorted((path.parent / "outputs").glob("*"))


def train(path: Path, *options: str) -> int:
    return main(["train", str(path), "--quiet", *options])


# ---- train ----


def test_training_prints_what_was_reached(run_file: Path, capsys: pytest.CaptureFixture[str]):
    assert train(run_file, "--set", "trainer.iterations=2") == 0
    (directory,) = outputs(run_file)
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["num_updates"] == 2
    out, err = capsys.readouterr()
    assert err == ""
    assert "2 (0 skipped)" in out
    assert "eval/avg_reward" in out
    assert f"{summary['last_eval_metrics']['eval/avg_reward']:.4g}" in out


def test_training_prints_the_whole_path_of_the_run(run_file: Path, capsys: pytest.CaptureFixture[str]):
    train(run_file)
    (directory,) = outputs(run_file)
    assert str(directory) in capsys.readouterr().out


def test_json_run_files_and_overrides(run_file: Path):
    path = run_file.with_suffix(".json")
    path.write_text(json.dumps(mapping(run_file.parent)))
    assert train(path, "--set", "trainer.seed=5", "--set", "algorithm.cfg.gamma=.5") == 0
    (directory,) = outputs(run_file)
    assert json.loads((directory / "summary.json").read_text())["seed"] == 5


def test_a_run_is_resumed_from_the_command_line(run_file: Path):
    assert train(run_file) == 0
    (first,) = outputs(run_file)
    assert train(run_file, "--resume", "latest", "--run", str(first), "--set", "trainer.iterations=3") == 0
    second = outputs(run_file)[-1]
    assert json.loads((second / "summary.json").read_text())["num_updates"] == 3
    (checkpoint,) = (second / "checkpoints").iterdir()
    assert train(run_file, "--resume", str(checkpoint), "--resume-scheduler", "restart", "--set", "trainer.iterations=4") == 0
    assert len(outputs(run_file)) == 3


def test_a_profile_flag(run_file: Path, capsys: pytest.CaptureFixture[str]):
    assert train(run_file, "--profile", "--set", "trainer.iterations=6", "--set", "trainer.save_frequency_updates=2") == 0
    assert (outputs(run_file)[0] / "profile.json").is_file()
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert rows["phase"] == ["phase", "calls", "seconds", "share", "steady", "ms/call"]
    assert [rows[name][1] for name in ("collect", "update", "saving", "logging")] == ["6", "6", "3", "6"]


def test_a_run_is_stopped_and_says_how_to_go_on(run_file: Path, capsys: pytest.CaptureFixture[str]):
    assert train(run_file, "--stop-after", "2", "--set", "trainer.iterations=5") == 0
    (first,) = outputs(run_file)
    out = capsys.readouterr().out
    assert "2 (0 skipped)" in out
    assert f"--resume latest --run {first}" in out
    assert train(run_file, "--resume", "latest", "--run", str(first), "--set", "trainer.iterations=5") == 0
    assert "go on with" not in capsys.readouterr().out
    assert json.loads((outputs(run_file)[-1] / "summary.json").read_text())["num_updates"] == 5


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "x", "true"])
def test_a_stop_that_means_nothing(run_file: Path, capsys: pytest.CaptureFixture[str], value: str):
    with pytest.raises(SystemExit) as caught:
        train(run_file, "--stop-after", value)
    assert caught.value.code == 2
    assert "--stop-after" in capsys.readouterr().err
    assert outputs(run_file) == []


# ---- wrong calls: exit code 2, the key and the nearest one, no run directory ----


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("learning_rate=0.1", ["learning_rate", "algorithm.cfg.optimizer.learning_rate"]),
        ("trainer.num-envs=3", ["trainer.num-envs", "num_envs"]),
        ("trainer.num_env=3", ["trainer.num_env", "num_envs"]),
        ("algorithm.cfg.gamm=0.9", ["algorithm.cfg.gamm", "gamma"]),
        ("policy.actor.network_cfg.hidden_size=[3]", ["policy.actor.network_cfg", "hidden_sizes"]),
        ("trainer.num_envs=true", ["trainer.num_envs"]),
        ("trainer.num_envs", ["key.path=value"]),
    ],
)
def test_a_wrong_override(run_file: Path, capsys: pytest.CaptureFixture[str], override: str, words: list[str]):
    assert train(run_file, "--set", override) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("frl: ")
    assert all(word in err for word in words)
    assert "Traceback" not in err
    assert outputs(run_file) == []


@pytest.mark.parametrize(
    ("section", "key", "nearest"),
    [
        ((), "learning_rate", "optimizer.learning_rate"),
        (("trainer",), "num-envs", "num_envs"),
        (("policy", "actor", "network_cfg"), "activatoin", "activation"),
        (("algorithm", "cfg"), "gamm", "gamma"),
    ],
)
def test_a_wrong_key_in_the_file(run_file: Path, capsys: pytest.CaptureFixture[str], section: tuple[str, ...], key: str, nearest: str):
    raw = mapping(run_file.parent)
    place: Any = raw
    for name in section:
        place = place[name]
    place[key] = 0.9
    write_yaml(run_file, raw)
    assert train(run_file) == 2
    err = capsys.readouterr().err
    assert ".".join((*section, key)) in err
    assert nearest in err
    assert str(run_file) in err
    assert outputs(run_file) == []


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "trainer: [", "trainer: {}\n", "just text\n"])
def test_a_file_that_is_no_run_file(run_file: Path, capsys: pytest.CaptureFixture[str], text: str):
    run_file.write_text(text)
    assert train(run_file) == 2
    assert str(run_file) in capsys.readouterr().err
    assert outputs(run_file) == []


def test_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert train(tmp_path / "none.yaml") == 2
    assert "none.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.learning_env.cfg.max_episode_step=3", ["max_episode_step", "did you mean", "trainer.learning_env.cfg"]),
        ("trainer.learning_env.name=doble_integrator", ["trainer.learning_env.name", "double_integrator"]),
        ("trainer.imports=[no_such_module_of_frl]", ["trainer.imports", "no_such_module_of_frl"]),
        *((f"trainer.device={name}", ["trainer.device", repr(name), "cuda:0"]) for name in ("gpu", "meta", "mps", "cpu:7")),
        ("trainer.device=cuda:99", ["trainer.device", "'cuda:99'", "torch sees"]),
        ("algorithm.cfg.optimizer.name=adm", ["algorithm.cfg.optimizer", "adam"]),
        ("algorithm.cfg.optimizer.kwargs={weight_decy: 0.1}", ["algorithm.cfg.optimizer", "weight_decay"]),
        ("algorithm.cfg.lr_scheduler.name=cosin", ["algorithm.cfg.lr_scheduler", "cosine"]),
    ],
)
def test_a_wrong_name_below_the_schema(run_file: Path, capsys: pytest.CaptureFixture[str], override: str, words: list[str]):
    code = train(run_file, "--set", override)
    err = capsys.readouterr().err
    assert code == 2
    assert all(word in err for word in words)
    assert outputs(run_file) == []


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("trainer.learning_env.cfg.max_episode_step=3", "max_episode_steps"),
        ("trainer.learning_env.name=doble_integrator", "double_integrator"),
        ("algorithm.cfg.optimizer.name=adm", "adam"),
        ("algorithm.cfg.optimizer.kwargs={weight_decy: 0.1}", "weight_decay"),
        ("algorithm.cfg.lr_scheduler.name=cosin", "cosine"),
    ],
)
def test_a_wrong_name_below_the_schema_is_never_dropped(run_file: Path, capsys: pytest.CaptureFixture[str], override: str, nearest: str):
    assert train(run_file, "--set", override) != 0
    err = capsys.readouterr().err
    assert nearest in err
    assert err.count("\n") == 1
    assert outputs(run_file) == []


@pytest.mark.parametrize(
    "options",
    [
        ("--run", "somewhere"),
        ("--run", "somewhere", "--resume", "a.safetensors"),
        ("--resume-scheduler", "restart"),
        ("--resume", "latest"),
        ("--resume", "best"),
    ],
    ids=" ".join,
)
def test_options_that_need_each_other(run_file: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]):
    code = train(run_file, *options)
    assert "resume" in capsys.readouterr().err
    assert code == 2
    assert outputs(run_file) == []


@pytest.mark.parametrize(
    "argv", [[], ["trian"], ["train"], ["train", "a.yaml", "--bogus"], ["train", "a.yaml", "--resume-scheduler", "again"], ["check"]], ids=" ".join
)
def test_usage(argv: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: frl" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert all(command in out for command in ("train", "check", "list"))


# ---- failures: exit code 1 and one message ----


@pytest.mark.parametrize("fault", ["raise ValueError('boom')", "import no_such_module_of_frl"])
def test_a_module_that_fails_when_it_is_imported(run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str):
    name = f"my_failing_module_{len(fault)}"
    (run_file.parent / f"{name}.py").write_text(fault)
    monkeypatch.syspath_prepend(run_file.parent)
    assert train(run_file, "--set", f"trainer.imports=[{name}]") == 1
    err = capsys.readouterr().err
    assert all(word in err for word in (str(run_file), "trainer.imports", name, fault.split("'")[-2] if "'" in fault else fault.split()[-1]))
    assert err.count("\n") == 1
    assert outputs(run_file) == []


def test_a_failing_environment(run_file: Path, capsys: pytest.CaptureFixture[str]):
    assert train(run_file, "--set", "trainer.learning_env={name: failing_env}") == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", "frl: the gripper is stuck\n")


@pytest.mark.parametrize("cfg", ["{lines: 3}", "{empty: true}"])
def test_a_failing_environment_has_one_line(run_file: Path, capsys: pytest.CaptureFixture[str], cfg: str):
    assert train(run_file, "--set", "trainer.learning_env.name=failing_env", "--set", f"trainer.learning_env.cfg={cfg}") == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert len(err.strip()) > len("frl: ")


def test_failures_of_a_resume(run_file: Path, capsys: pytest.CaptureFixture[str]):
    assert train(run_file, "--resume", "none.safetensors") == 1
    assert "none.safetensors" in capsys.readouterr().err
    assert train(run_file, "--resume", "latest", "--run", str(run_file.parent)) == 1
    assert "run-manifest.json" in capsys.readouterr().err
    broken = run_file.parent / "broken.safetensors"
    broken.write_bytes(b"broken")
    assert train(run_file, "--resume", str(broken)) == 1
    assert "damaged" in capsys.readouterr().err
    assert outputs(run_file) == []


@pytest.mark.parametrize("before", [True, False])
def test_debug_shows_where(run_file: Path, before: bool):
    argv = ["train", str(run_file), "--quiet", "--set", "trainer.learning_env={name: failing_env}"]
    with pytest.raises(RuntimeError, match="gripper"):
        main(["--debug", *argv] if before else [*argv, "--debug"])


def test_an_interrupt(run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("frl.run.train_from_config", stop)
    assert train(run_file) == 130
    assert capsys.readouterr().err == "frl: interrupted\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_is_reported_and_says_how_to_go_on(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], number: signal.Signals, code: int
):
    train_from_config = runs.train_from_config

    def press(event: Event) -> None:
        if event.num_updates == 1:
            signal.raise_signal(number)

    def pressed(*args: Any, **options: Any) -> dict[str, Any]:
        return train_from_config(*args, **options, callbacks=[press])

    monkeypatch.setattr(runs, "train_from_config", pressed)
    assert train(run_file, "--set", "trainer.iterations=50") == code
    (directory,) = outputs(run_file)
    out, err = capfd.readouterr()
    assert "2 (0 skipped)" in out
    assert f"--resume latest --run {directory}" in out
    assert f"interrupted by {number.name} after update 2" in err
    assert "Traceback" not in err


# ---- check and list ----


def test_check(capsys: pytest.CaptureFixture[str]):
    assert main(["check", "double_integrator", "--num-envs", "4", "--steps", "2"]) == 0
    assert "passed" in capsys.readouterr().out
    assert main(["check", "wrong_gradient", "--num-envs", "4", "--steps", "2"]) == 1
    assert "FAILED" in capsys.readouterr().out
    assert main(["check", "pendulm"]) == 1
    assert "did you mean 'pendulum'" in capsys.readouterr().err
    assert main(["check", "double_integrator", "--num-envs", "0"]) == 1
    assert "num_envs" in capsys.readouterr().err


def test_check_imports_what_registers_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "my_tasks_of_the_command_line.py").write_text(
        "from frl.envs.double_integrator import double_integrator\nfrom frl.envs.registry import register_learning_env\n"
        "register_learning_env('my_task_of_the_command_line', double_integrator, override=True)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    argv = ["check", "my_task_of_the_command_line", "--num-envs", "2", "--steps", "1"]
    assert main([*argv, "--import", "my_tasks_of_the_command_line"]) == 0
    assert "passed" in capsys.readouterr().out


def test_modules_of_the_working_directory_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_tasks_beside_the_run_file.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    assert main(["check", "double_integrator", "--num-envs", "2", "--steps", "1", "--import", "my_tasks_beside_the_run_file"]) == 0


def test_list(capsys: pytest.CaptureFixture[str]):
    assert main(["list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert list(lines) == ["environments", "policies", "algorithms", "optimizers", "schedules"]
    assert all(name in lines["environments"] for name in get_registered_learning_env_names())
    assert "apg" in lines["algorithms"]


def test_the_module_is_the_command(tmp_path: Path):
    root = Path(frl.__file__).parents[1]
    command = [sys.executable, "-m", "frl", "train", str(tmp_path / "none.yaml")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("frl: ")
    assert done.stderr.count("\n") == 1
