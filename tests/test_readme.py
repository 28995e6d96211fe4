"""README.md is true: its names can be imported, its examples run, its commands are the ones that CI runs."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

import frl

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (`[^|]+) \| ([^|]+) \|$", README.split("## Names")[1].split("\n## ")[0], re.MULTILINE)
HERE = sorted({name for _, here in ROWS for name in re.findall(r"`(frl(?:\.\w+)+)`", here)})
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_table_has_rows():
    assert len(ROWS) > 40
    assert len(HERE) > 40


@pytest.mark.parametrize(("there", "here"), ROWS)
def test_every_name_has_a_home_or_a_reason(there: str, here: str):
    assert there.strip()
    assert re.search(r"`frl\.", here) or here.startswith(("left out, because", "not yet"))


@pytest.mark.parametrize("name", HERE)
def test_every_name_can_be_imported(name: str):
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            value = getattr(value, part)
        return
    raise AssertionError(f"{name} cannot be imported")


def test_every_public_name_resolves():
    for name in frl.__all__:
        assert getattr(frl, name) is not None


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_run(number: int):
    if "mujoco" in EXAMPLES[number]:
        pytest.importorskip("mujoco")
    text = EXAMPLES[number].replace("segment_length=64", "segment_length=2, compile_mode='eager'").replace("num_envs=64", "num_envs=4")
    exec(compile(text, f"README example {number}", "exec"), {"__name__": f"readme_{number}"})


def test_the_example_environment_has_a_right_gradient():
    from frl.envs.check import check_env
    from frl.envs.registry import get_learning_env_factory, get_registered_learning_env_names

    if "my_cart" not in get_registered_learning_env_names():
        exec(compile(next(text for text in EXAMPLES if "my_cart" in text), "README", "exec"), {"__name__": "readme_env"})
    assert check_env(get_learning_env_factory("my_cart")()).passed


def test_every_environment_has_a_line():
    from frl.envs.registry import get_learning_env_factory, get_registered_learning_env_names

    table = README.split("### Environments")[1].split("\n### ")[0]
    listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(listed) == [name for name in get_registered_learning_env_names() if get_learning_env_factory(name).__module__ == f"frl.envs.{name}"]
    for name in listed:
        env = get_learning_env_factory(name)()
        assert env.spec.differentiable or name == "cartpole"


def test_the_example_of_a_mujoco_model_has_a_right_gradient():
    pytest.importorskip("mujoco")
    from frl.envs.check import check_env
    from frl.envs.registry import get_learning_env_factory, get_registered_learning_env_names

    if "my_arm" not in get_registered_learning_env_names():
        exec(compile(next(text for text in EXAMPLES if "my_arm" in text), "README", "exec"), {"__name__": "readme_mujoco"})
    report = check_env(get_learning_env_factory("my_arm")(), num_envs=8, num_steps=4)
    assert report.passed, report.text()


def test_the_commands_are_one_line_each():
    commands = [line for line in README.splitlines() if line.startswith("python3 -m venv")]
    assert len(commands) == 2
    assert commands[0].endswith("frl train configs/point_mass/apg.yaml")
    assert commands[1].endswith("-m pytest")
    assert all("pip install -q torch==" in line for line in commands)
    assert sys.version_info >= (3, 10)
