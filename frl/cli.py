"""The command line: ``frl train``, ``eval``, ``plot``, ``render``, ``runs``, ``check`` and ``list``.

Exit codes: 0, 1 for failures, 2 for a wrong call or run file. Errors are one message without a traceback unless ``--debug`` is given.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from frl.commands import evaluate, plot, render, runs


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="frl", description="On-policy reinforcement learning as pure functions on PyTorch.")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train what a run file describes")
    train.add_argument("config", help="run file (.yaml, .yml or .json)")
    train.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override a key, for example trainer.num_envs=32")
    train.add_argument("--resume", metavar="FILE|latest|best", help="checkpoint to continue from")
    train.add_argument("--run", metavar="DIR", help="run directory of --resume latest or best")
    train.add_argument("--resume-scheduler", choices=("restore", "restart"), default="restore", help="continue the learning-rate schedule or begin it anew")
    train.add_argument("--stop-after", type=_positive, metavar="N", help="stop after N updates of this process, to go on later; schedules stay as they are")
    train.add_argument("--profile", action="store_true", help="write a torch profiler trace of a few updates and print the seconds of each part of the loop")
    train.add_argument("--quiet", action="store_true", help="no live line")

    for module in (evaluate, plot, render, runs):
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


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())  # modules beside the run file, as with python -m frl
    from frl.config import ConfigError

    commands = {"train": _train, "eval": evaluate.run, "plot": plot.run, "render": render.run, "runs": runs.run, "check": _check, "list": _list}
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


def _train(arguments: argparse.Namespace) -> int:
    if arguments.run is not None and arguments.resume not in ("latest", "best"):
        return _fail(ValueError("--run needs --resume latest or --resume best"), 2)
    if arguments.resume in ("latest", "best") and arguments.run is None:
        return _fail(ValueError("--resume latest or best needs --run"), 2)
    if arguments.resume_scheduler == "restart" and arguments.resume is None:
        return _fail(ValueError("--resume-scheduler restart needs --resume"), 2)
    from frl.interrupts import Interrupted
    from frl.run import train_from_config

    warnings.filterwarnings("once", category=RuntimeWarning, module="frl")
    try:
        summary = train_from_config(
            arguments.config,
            resume=arguments.resume,
            run=arguments.run,
            resume_scheduler=arguments.resume_scheduler,
            stop_after=arguments.stop_after,
            profile=arguments.profile,
            overrides=arguments.overrides,
            progress=not arguments.quiet,
        )
    except Interrupted as interrupt:
        _report(interrupt.summary)
        print(f"frl: {interrupt}", file=sys.stderr)
        return interrupt.exit_code
    _report(summary)
    return 0


def _report(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    rows = [
        ("updates", f"{summary['num_updates']:,} ({summary['skipped_updates']} skipped)"),
        ("env steps", f"{summary['global_step']:,}"),
        ("steady speed", f"{summary['training_fps']:,.0f} env steps/s" if math.isfinite(summary["training_fps"]) else "not measured"),
        ("compiling", f"{summary['compile_seconds']:.1f} s (first update after {summary['seconds_to_first_update']:.1f} s)"),
        ("total", f"{summary['elapsed_time_sec']:.1f} s"),
    ]
    for name, value in summary["last_eval_metrics"].items():
        if value is not None and math.isfinite(value):
            rows.append((name, f"{value:.4g}"))
    for name, value in rows:
        table.add_row(name, value)
    Console(soft_wrap=True).print(table)
    if summary["phases"]:
        Console(soft_wrap=True).print(_phases(summary["phases"]))
    print(f"run: {summary['run_directory']}")  # a table cuts at the width of the terminal
    if summary["status"] in ("stopped", "interrupted"):
        print(f"{summary['status']} before its budget; go on with --resume latest --run {summary['run_directory']}")


def _phases(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(title="seconds of the loop", title_justify="left", box=None, pad_edge=False)
    for name in ("phase", "calls", "seconds", "share", "steady ms/call"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for row in rows:
        steady = f"{row['steady_ms']:.2f}" if math.isfinite(row["steady_ms"]) else "-"
        table.add_row(row["phase"], str(row["calls"]), f"{row['seconds']:.3f}", f"{row['share']:.1%}", steady)
    return table


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
    from frl.envs.registry import get_registered_learning_env_names
    from frl.optim import get_registered_lr_scheduler_names, get_registered_optimizer_names
    from frl.policies import get_registered_policy_names

    groups = {
        "environments": get_registered_learning_env_names(),
        "policies": get_registered_policy_names(),
        "algorithms": get_registered_algo_names(),
        "optimizers": get_registered_optimizer_names(),
        "schedules": get_registered_lr_scheduler_names(),
    }
    width = max(len(name) for name in groups)
    for name, entries in groups.items():
        print(f"{name:<{width}}  {', '.join(entries)}")
    return 0
