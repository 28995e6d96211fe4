"""The command line: ``frl train``, ``eval``, ``plot``, ``render``, ``runs``, ``check`` and ``list``.

Exit codes: 0, 1 for failures, 2 for a wrong call or run file. Errors are one message without a traceback unless ``--debug`` is given.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

from frl.commands import evaluate, plot, render, runs, train


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="frl", description="On-policy reinforcement learning as pure functions on PyTorch.")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    for module in (train, evaluate, plot, render, runs):
        module.add(commands)

    check = commands.add_parser("check", help="check an environment's gradient against central differences")
    check.add_argument("env", help="registered name")
    check.add_argument("--num-envs", type=int, default=64, help="rows")
    check.add_argument("--steps", type=int, default=8, help="steps of the return")
    check.add_argument("--seed", type=int, default=0)
    check.add_argument("--import", action="append", default=[], metavar="MODULE", dest="imports", help="module that registers the environment")

    commands.add_parser("list", help="list environments, policies, algorithms, optimizers and schedules")
    for command in commands.choices.values():
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())  # modules beside the run file, as with python -m frl
    from frl.config import ConfigError

    commands = {"train": train.run, "eval": evaluate.run, "plot": plot.run, "render": render.run, "runs": runs.run, "check": _check, "list": _list}
    before, warnings.formatwarning = warnings.formatwarning, lambda message, *_, **__: f"frl: {' '.join(str(message).split())}\n"
    try:
        return commands[arguments.command](arguments)
    except ConfigError as error:
        if arguments.debug:
            raise
        return _fail(error, 2)
    except KeyboardInterrupt:
        print("frl: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if arguments.debug:
            raise
        return _fail(error, 1)
    finally:
        warnings.formatwarning = before


def _fail(error: BaseException, code: int) -> int:
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if code == 1:  # the problems of a run file keep their lines
        text = " ".join(line.strip() for line in text.splitlines() if line.strip())
    print(f"frl: {text or type(error).__name__}", file=sys.stderr)
    return code


def _check(arguments: argparse.Namespace) -> int:
    import importlib

    from frl.envs.check import check_env
    from frl.envs.env import Env
    from frl.envs.registry import get_learning_env_factory

    for module in arguments.imports:
        importlib.import_module(module)
    env = get_learning_env_factory(arguments.env)()
    if not isinstance(env, Env):
        raise TypeError(f"{arguments.env!r} is not a functional environment of one row, so it has no gradient to check")
    report = check_env(env, num_envs=arguments.num_envs, num_steps=arguments.steps, seed=arguments.seed)
    print(report.text())
    return 0 if report.passed else 1


def _list(arguments: argparse.Namespace) -> int:
    from frl.algorithms.registry import get_registered_algo_names
    from frl.envs.mujoco.engine import installed
    from frl.envs.mujoco.tasks import PREFIX, TASKS
    from frl.envs.registry import get_registered_learning_env_names
    from frl.optim import get_registered_lr_scheduler_names, get_registered_optimizer_names
    from frl.policies import get_registered_policy_names

    groups = {
        "environments": [*get_registered_learning_env_names(), *(PREFIX + task for task in TASKS if installed())],
        "policies": get_registered_policy_names(),
        "algorithms": get_registered_algo_names(),
        "optimizers": get_registered_optimizer_names(),
        "schedules": get_registered_lr_scheduler_names(),
    }
    width = max(len(name) for name in groups)
    for name, entries in groups.items():
        print(f"{name:<{width}}  {', '.join(entries)}")
    return 0
