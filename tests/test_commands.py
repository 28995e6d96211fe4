"""``frl eval``, ``plot``, ``render`` and ``runs``: what they print and write, exit codes, and one message for a failure."""

from __future__ import annotations

import json
import math
import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frl.checkpoint import read_checkpoint, save_checkpoint
from frl.cli import main
from frl.commands.plot import _curve
from frl.evaluate import wilson_interval
from frl.records import read_run
from frl.run_directory import MANIFEST
from tests.trained import trained

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def summaries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    short = {"max_episode_steps": 6}
    options: dict[str, dict[str, Any]] = {
        "first": {"env": {"name": "double_integrator", "cfg": short}, "seed": 1},
        "second": {"env": {"name": "double_integrator", "cfg": short}, "seed": 2},
        "cart": {"env": {"name": "cartpole", "cfg": {"max_episode_steps": 12}}, "algorithm": "ppo", "exp_name": "cart"},
    }
    folder = tmp_path_factory.mktemp("outputs")
    return {name: trained(folder, **choice) for name, choice in options.items()}


@pytest.fixture
def outputs(summaries: dict[str, dict[str, Any]], tmp_path: Path) -> dict[str, Path]:
    """Copies of the runs, for a test to change."""
    copies = {}
    for name, summary in summaries.items():
        source = Path(summary["run_directory"])
        copies[name] = tmp_path / "outputs" / source.name
        shutil.copytree(source, copies[name])
    return copies


def strict(path: Path) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def row(out: str, name: str) -> list[str]:
    (line,) = [line for line in out.splitlines() if line.startswith(f"{name} ")]
    return line[len(name) :].split()


def fails(capsys: Capture, code: int, *argv: Any) -> str:
    """The one message of a command that fails."""
    assert main([str(argument) for argument in argv]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("frl: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


def wrong_call(capsys: Capture, *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(list(argv))
    assert caught.value.code == 2
    return capsys.readouterr().err


# ---- eval ----


def test_eval_repeats_the_final_evaluation(outputs: dict[str, Path], summaries: dict[str, dict[str, Any]], capsys: Capture):
    assert main(["eval", str(outputs["first"])]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    (path,) = outputs["first"].glob("evaluations/*-policy/evaluation.json")
    assert f"evaluation: {path}" in out
    content = strict(path)
    assert content["schema_version"] == 1
    assert content["mode"] == "policy"
    stored = {key: None if value != value else value for key, value in summaries["first"]["last_eval_metrics"].items()}
    assert content["result"]["metrics"] == stored
    assert content["result"]["episodes"] == 7 == len(content["result"]["per_episode"]["return"])
    inputs = content["inputs"]
    assert (inputs["env"], inputs["episodes"], inputs["deterministic"], inputs["seed"]) == ("double_integrator", 7, True, 1_010_004)
    assert Path(inputs["checkpoint"]).name == Path(summaries["first"]["latest_checkpoint_path"]).name

    returns = np.array(content["result"]["per_episode"]["return"])
    mean, std = returns.mean(), returns.std(ddof=1)
    half = 1.96 * std / 7**0.5
    assert row(out, "return") == [f"{mean:.4g}", f"{std:.4g}", f"{mean - half:.4g}", "to", f"{mean + half:.4g}"]
    low, high = wilson_interval(0.0, 7)
    assert row(out, "success rate") == ["0", f"{low:.4g}", "to", f"{high:.4g}"]
    assert row(out, "final_distance")


def test_eval_options(outputs: dict[str, Path], capsys: Capture):
    for _ in range(2):
        options = ["--checkpoint", "best", "--episodes", "5", "--seed", "9", "--num-envs", "2", "--output", str(outputs["cart"].parent / "kept")]
        assert main(["eval", str(outputs["cart"]), *options]) == 0
    assert not (outputs["cart"] / "evaluations").exists()
    first, second = (strict(path) for path in (outputs["cart"].parent / "kept").glob("*/evaluation.json"))
    assert first["result"] == second["result"]
    assert first["result"]["episodes"] == 5
    assert (first["inputs"]["seed"], first["inputs"]["num_envs"]) == (9, 2)
    assert "_best_step_" in first["inputs"]["checkpoint"]
    assert main(["eval", str(outputs["cart"]), "--episodes", "40", "--seed", "9", "--stochastic"]) == 0
    sampled = strict(next(outputs["cart"].glob("evaluations/*/evaluation.json")))
    assert not sampled["inputs"]["deterministic"]
    out = capsys.readouterr().out
    assert "5 episodes of cartpole" in out
    assert "40 episodes of cartpole" in out


def test_eval_of_a_checkpoint_file(outputs: dict[str, Path], capsys: Capture):
    (file,) = outputs["cart"].glob("checkpoints/*best*")
    assert main(["eval", str(outputs["cart"]), "--checkpoint", file.name, "--episodes", "2"]) == 0
    assert main(["eval", str(file), "--episodes", "2"]) == 0
    assert capsys.readouterr().out.count(f"{file.name}: 2 episodes") == 2
    assert len(list(outputs["cart"].glob("evaluations/*"))) == 2


def test_eval_takes_the_newest_run_of_a_folder(outputs: dict[str, Path], capsys: Capture):
    (outputs["second"] / MANIFEST).touch()
    assert main(["eval", str(outputs["second"].parent), "--episodes", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(outputs["second"].name)
    assert row(out, "return")[1:] == ["-", "-"]  # one episode has no spread


def test_eval_says_what_was_cut_off(outputs: dict[str, Path], capsys: Capture):
    assert main(["eval", str(outputs["cart"]), "--episodes", "4", "--max-steps", "2"]) == 1
    assert "4 episodes were cut off" in capsys.readouterr().out
    (path,) = outputs["cart"].glob("evaluations/*/evaluation.json")
    assert strict(path)["result"]["unfinished"] == 4


def test_eval_on_another_environment(outputs: dict[str, Path], capsys: Capture):
    err = fails(capsys, 1, "eval", outputs["first"], "--env", "cartpole")
    assert "observation: got shape (4,), the policy was trained on shape (2,)" in err
    assert "action: got Discrete(2)" in err
    assert "did you mean 'pendulum'" in fails(capsys, 1, "eval", outputs["first"], "--env", "pendulm")
    assert not list(outputs["first"].glob("evaluations/*"))
    assert main(["eval", str(outputs["cart"]), "--env", "cartpole", "--episodes", "3"]) == 0
    assert strict(next(outputs["cart"].glob("evaluations/*/*")))["inputs"]["env"] == "cartpole"


def test_failures_of_eval(outputs: dict[str, Path], tmp_path: Path, capsys: Capture):
    assert "none" in fails(capsys, 1, "eval", tmp_path / "none")
    assert MANIFEST in fails(capsys, 1, "eval", tmp_path)
    assert "none.safetensors" in fails(capsys, 1, "eval", outputs["first"], "--checkpoint", "none.safetensors")
    manifest = strict(outputs["first"] / MANIFEST)
    file = outputs["first"] / manifest["checkpoints"]["latest"]
    tensors, metadata = read_checkpoint(file)
    save_checkpoint(file, tensors, {**metadata, "schema_version": 99})
    assert "version 99" in fails(capsys, 1, "eval", file)
    file.write_bytes(file.read_bytes()[:50])
    assert "damaged" in fails(capsys, 1, "render", file)
    with pytest.warns(RuntimeWarning, match=f"{file.name} is damaged"):
        assert main(["eval", str(outputs["first"]), "--episodes", "1"]) == 0  # with the checkpoint before
    assert Path(manifest["kept"][1]["path"]).name in capsys.readouterr().out
    with pytest.raises(FileNotFoundError):
        main(["eval", str(tmp_path / "none"), "--debug"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["eval"], "required: run"),
        (["eval", "x", "--episodes", "0"], "expected a positive integer, got '0'"),
        (["eval", "x", "--episodes", "many"], "expected a positive integer"),
        (["eval", "x", "--seed", "-1"], "expected an integer of at least 0"),
        (["render", "x", "--fps", "nan"], "expected a positive number"),
        (["plot"], "RUN"),
        (["plot", "x", "--x", "days"], "steps"),
        (["plot", "x", "--band", "iqr"], "std"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_calls(argv: list[str], words: str, capsys: Capture):
    assert words in wrong_call(capsys, *argv)


@given(count=st.integers(1, 500), share=st.floats(0, 1), z=st.floats(0.5, 4))
def test_the_interval_of_a_rate(count: int, share: float, z: float):
    """Its ends are the rates ``p`` from which the observed one is just ``z`` standard errors away."""
    successes = round(share * count)
    low, high = wilson_interval(successes, count, z)
    assert 0 <= low <= successes / count <= high <= 1
    for end in (low, high):
        error = math.sqrt(end * (1 - end) / count)
        assert abs(successes / count - end) == pytest.approx(z * error, abs=1e-9)


# ---- plot ----


def svg_text(path: Path) -> str:
    return " ".join(ElementTree.parse(path).getroot().itertext())


def test_plot_of_one_run(outputs: dict[str, Path], capsys: Capture):
    assert main(["plot", str(outputs["first"])]) == 0
    png, svg = outputs["first"] / "learning_curves.png", outputs["first"] / "learning_curves.svg"
    assert capsys.readouterr().out.splitlines() == [f"plot: {png}", f"plot: {svg}"]
    assert png.read_bytes().startswith(b"\x89PNG")
    assert all(words in svg_text(svg) for words in ("return of the last 100 episodes", "return in evaluation", "success rate in evaluation", "small"))


def test_an_evaluation_has_the_band_of_its_episodes(outputs: dict[str, Path], summaries: dict[str, dict[str, Any]]):
    history = summaries["cart"]["eval_history"]
    record = read_run(outputs["cart"])
    curve = _curve(record, "eval/avg_reward", "steps")
    assert curve.low is not None
    assert curve.high is not None
    assert (curve.high - curve.low).tolist() == pytest.approx([2 * entry["eval/ci95_reward"] for entry in history])
    assert ((curve.high + curve.low) / 2).tolist() == pytest.approx(curve.y.tolist())
    rates = _curve(record, "eval/success_rate", "steps")
    assert rates.low is not None
    assert rates.low.tolist() == [wilson_interval(4 * entry["eval/success_rate"], 4)[0] for entry in history]
    assert _curve(record, "train/loss", "steps").low is None


def test_plot_groups_runs_by_experiment(outputs: dict[str, Path], tmp_path: Path, capsys: Capture):
    argv = ["plot", str(outputs["first"].parent), "--output", str(tmp_path / "pictures" / "all.svg"), "--metric", "train/loss", "--x", "seconds"]
    assert main([*argv, "--band", "range", "--title", "Three runs"]) == 0
    text = svg_text(tmp_path / "pictures" / "all.svg")
    assert all(words in text for words in ("small (2 runs)", "cart", "train/loss", "seconds", "Three runs"))
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["all.svg"]
    assert main(["plot", str(outputs["first"]), str(outputs["cart"]), str(outputs["first"]), "--output", str(tmp_path / "two")]) == 0
    assert "small (2 runs)" not in svg_text(tmp_path / "two.svg")
    assert (tmp_path / "two.png").is_file()


def test_several_runs_are_drawn_here(outputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plot", str(outputs["first"]), str(outputs["second"])]) == 0
    assert {path.name for path in tmp_path.glob("*.*")} == {"learning_curves.png", "learning_curves.svg"}


def test_unfinished_runs_are_drawn_as_far_as_they_go(outputs: dict[str, Path], capsys: Capture):
    for name in ("summary.json", MANIFEST, "configs/train.yaml"):
        (outputs["first"] / name).unlink()
    shutil.rmtree(outputs["first"] / "checkpoints")
    records = outputs["first"] / "metrics.jsonl"
    data = records.read_bytes()
    records.write_bytes(data[: len(data) // 2])
    (outputs["second"] / "metrics.jsonl").write_bytes(b"")
    assert main(["plot", *(str(path) for path in outputs.values()), "--output", str(outputs["first"] / "a.svg")]) == 0
    err = capsys.readouterr().err
    assert f"{outputs['first']}: 1 damaged line in metrics.jsonl left out" in err
    assert f"{outputs['second']}: no records yet" in err
    assert "small" in svg_text(outputs["first"] / "a.svg")  # named by its directory


def test_a_run_that_was_resumed_is_drawn_once(outputs: dict[str, Path], tmp_path: Path, capsys: Capture):
    record = outputs["second"] / "environment.json"
    source = f"{outputs['first']}/checkpoints/small_step_{read_run(outputs['first']).steps}.safetensors"
    record.write_text(json.dumps({**json.loads(record.read_text()), "resumed_from": source}))
    assert main(["plot", str(outputs["first"].parent), "--output", str(tmp_path / "a.svg")]) == 0
    assert "left out" in capsys.readouterr().err
    assert "small (2 runs)" not in svg_text(tmp_path / "a.svg")
    assert main(["plot", str(outputs["first"]), str(outputs["second"]), "--output", str(tmp_path / "b.svg")]) == 0
    assert "small (2 runs)" in svg_text(tmp_path / "b.svg")


def test_failures_of_plot(outputs: dict[str, Path], tmp_path: Path, capsys: Capture):
    assert "did you mean 'eval/avg_reward'" in fails(capsys, 1, "plot", outputs["first"], "--metric", "eval/avg_rewrd")
    assert "recorded: " in fails(capsys, 1, "plot", outputs["first"], "--metric", "zzz")
    assert ".png or .svg" in fails(capsys, 2, "plot", outputs["first"], "--output", "a.pdf")
    assert "none" in fails(capsys, 1, "plot", tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "no run directory" in fails(capsys, 1, "plot", tmp_path / "empty")
    records = outputs["first"] / "metrics.jsonl"
    records.write_text("".join(json.dumps({k: v for k, v in json.loads(line).items() if k != "seconds"}) + "\n" for line in records.read_text().splitlines()))
    assert "with times" in fails(capsys, 1, "plot", outputs["first"], "--x", "seconds")
    records.unlink()
    assert main(["plot", str(outputs["first"])]) == 1
    assert "nothing to draw" in capsys.readouterr().err


# ---- render ----


def test_render_draws_an_episode(outputs: dict[str, Path], capsys: Capture):
    assert main(["render", str(outputs["cart"]), "--seed", "4", "--width", "80"]) == 0
    out = capsys.readouterr().out
    (path,) = outputs["cart"].glob("renders/*")
    assert path.name == "cartpole_step_96_seed_4.gif"
    assert f"picture: {path}" in out
    assert path.read_bytes().startswith(b"GIF89a")
    steps, total = re.findall(r"cartpole: (\d+) steps, return ([\d.]+)", out)[0]
    assert main(["eval", str(outputs["cart"]), "--seed", "4", "--episodes", "1"]) == 0  # the same episode
    table = capsys.readouterr().out
    assert (row(table, "return")[0], row(table, "length")[0]) == (total, steps)


def test_render_options(outputs: dict[str, Path], tmp_path: Path, capsys: Capture):
    target = tmp_path / "pictures" / "a.png"
    assert main(["render", str(outputs["first"]), "--checkpoint", "best", "--output", str(target), "--frames", "3", "--width", "70"]) == 0
    strip = target.read_bytes()
    assert strip.startswith(b"\x89PNG")
    assert main(["render", str(outputs["first"]), "--output", str(target), "--signals", "--stochastic"]) == 0
    assert target.read_bytes() != strip
    assert not list(outputs["first"].glob("renders/*"))
    assert main(["render", str(outputs["first"]), "--signals", "--max-steps", "2"]) == 0
    (path,) = outputs["first"].glob("renders/*")
    assert path.suffix == ".png"
    assert "2 steps" in capsys.readouterr().out
    assert ".gif or .png" in fails(capsys, 2, "render", outputs["first"], "--output", "a.mp4")
    assert "least 64" in fails(capsys, 1, "render", outputs["first"], "--width", "8")


# ---- runs ----


def test_runs_lists_every_run(outputs: dict[str, Path], summaries: dict[str, dict[str, Any]], capsys: Capture):
    (outputs["second"] / "summary.json").unlink()
    (outputs["cart"] / "configs" / "train.yaml").write_text("trainer: {")
    (outputs["first"].parent / "notes").mkdir()
    assert main(["runs", str(outputs["first"].parent)]) == 0
    out, err = capsys.readouterr()
    header, *lines = out.splitlines()
    assert header.split("  ")[0] == "run"
    assert len(lines) == 3
    first = summaries["first"]
    best, last = f"{first['best_eval_value']:.4g}", f"{first['train_history'][-1]['charts/episode_reward_avg_100']:.4g}"
    assert row(out, outputs["first"].name) == ["apg", "double_integrator", "finished", "3", "48", best, last]
    assert row(out, outputs["second"].name)[:5] == ["apg", "double_integrator", "interrupted", "3", "48"]
    assert row(out, outputs["cart"].name)[:3] == ["?", "?", "finished"]
    assert f"{outputs['cart']}: the settings cannot be read" in err


def test_runs_of_one_directory_and_of_none(outputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    assert main(["runs", str(outputs["first"])]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    (tmp_path / "empty").mkdir()
    assert "no run directory" in fails(capsys, 1, "runs", tmp_path / "empty")
    assert "none" in fails(capsys, 1, "runs", tmp_path / "none")
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_a_table_is_whole_in_a_narrow_terminal(outputs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    monkeypatch.setenv("COLUMNS", "20")
    assert main(["runs", str(outputs["first"])]) == 0
    assert outputs["first"].name in capsys.readouterr().out


# ---- from README.md to the pictures ----


def test_the_commands_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    """The four commands for a newcomer, with a smaller budget and in an empty directory."""
    root = Path(__file__).resolve().parents[1]
    text = (root / "README.md").read_text(encoding="utf-8")
    (first,) = [line for line in text.splitlines() if line.startswith("python3 -m venv") and "frl train" in line]
    block = text.split("## From nothing to a picture")[1].split("```sh\n")[1].split("```")[0]
    commands = [line.split() for line in (first.split("&&")[-1], *block.splitlines())]
    assert [words[:2] for words in commands] == [[".venv/bin/frl", name] for name in ("train", "plot", "eval", "render")]
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    made = [words[words.index("--output") + 1] for words in commands if "--output" in words]
    assert len(made) == 2
    assert set(made) <= set(pictures)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(root / "configs", tmp_path / "configs")
    small = {
        "train": ["--quiet", *(f"--set=trainer.{key}" for key in ("iterations=2", "segment_length=4", "num_envs=2", "num_eval_envs=2", "num_eval_episodes=2"))]
        + [f"--set=trainer.{key}" for key in ("eval_freq=8", "final_eval_episodes=2", "compile_mode=eager")]
    }
    for _, name, *rest in commands:
        assert main([name, *rest, *small.get(name, [])]) == 0
    assert all((tmp_path / path).is_file() for path in made)
    for path in pictures:  # what the repository shows
        data = (root / path).read_bytes()
        assert data.startswith((b"GIF89a", b"\x89PNG"))
        assert len(data) < (300_000 if path.endswith(".gif") else 200_000)
