"""``frl train CONFIG``: train what a run file describes, stop, resume and profile."""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from typing import Any

from frl.commands import plot
from frl.commands.options import count
from frl.commands.tables import number, print_table


def add(commands: Any) -> argparse.ArgumentParser:
    """Add the command to a parser."""
    parser = commands.add_parser("train", help="train what a run file describes")
    parser.add_argument("config", help="run file (.yaml, .yml or .json)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override a key, for example trainer.num_envs=32")
    parser.add_argument("--resume", metavar="FILE|latest|best", help="checkpoint to continue from")
    parser.add_argument("--run", metavar="DIR", help="run directory of --resume latest or best")
    parser.add_argument("--resume-scheduler", choices=("restore", "restart"), default="restore", help="continue the learning-rate schedule or begin it anew")
    parser.add_argument("--stop-after", type=count, metavar="N", help="stop after N updates of this process, to go on later; schedules stay as they are")
    parser.add_argument("--profile", action="store_true", help="write a torch profiler trace of a few updates and print the seconds of each part of the loop")
    parser.add_argument("--quiet", action="store_true", help="no live line")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Train; returns the exit code."""
    wrong = _wrong(arguments)
    if wrong is not None:
        print(f"frl: {wrong}", file=sys.stderr)
        return 2
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
    if "members" in summary and summary["train_history"]:
        plot.run(argparse.Namespace(runs=[summary["run_directory"]], metrics=[], x="steps", band="std", title=None, output=None))
    return 0


def _wrong(arguments: argparse.Namespace) -> str | None:
    """What options need each other and do not have."""
    if arguments.run is not None and arguments.resume not in ("latest", "best"):
        return "--run needs --resume latest or --resume best"
    if arguments.resume in ("latest", "best") and arguments.run is None:
        return "--resume latest or best needs --run"
    if arguments.resume_scheduler == "restart" and arguments.resume is None:
        return "--resume-scheduler restart needs --resume"
    return None


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
        _print_phases(summary["phases"])
    if "members" in summary:
        _print_ranking(summary)
    print(f"run: {summary['run_directory']}")  # a table cuts at the width of the terminal
    if summary["status"] in ("stopped", "interrupted"):
        print(f"{summary['status']} before its budget; go on with --resume latest --run {summary['run_directory']}")


def _print_ranking(summary: dict[str, Any]) -> None:
    print(f"\nmembers by {summary['score_name']} of their best state; the figures above are those of the first")
    names = list(summary["members"][0]["hyper"])
    rows = []
    for rank, member in enumerate(summary["members"], 1):
        steps, skipped = number(member["best_global_step"]), str(member["skipped_updates"])
        rows.append(
            [str(rank), str(member["member"]), number(member["score"]), str(member["seed"]), *(f"{member['hyper'][n]:g}" for n in names), steps, skipped]
        )
    print_table(["rank", "member", "score", "seed", *names, "env steps", "skipped"], rows, text_columns=0)


def _print_phases(rows: list[dict[str, Any]]) -> None:
    print("\nseconds of the loop")
    cells = []
    for row in rows:
        steady = f"{row['steady_ms']:.2f}" if math.isfinite(row["steady_ms"]) else "-"
        cells.append([row["phase"], str(row["calls"]), f"{row['seconds']:.3f}", f"{row['share']:.1%}", steady])
    print_table(["phase", "calls", "seconds", "share", "steady ms/call"], cells)
