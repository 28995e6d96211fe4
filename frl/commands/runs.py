"""``frl runs DIR``: a table of the runs in a folder."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from frl.commands.tables import number, print_table

HEADERS = ["run", "algorithm", "environment", "state", "updates", "steps", "best", "last return"]


def add(commands: Any) -> argparse.ArgumentParser:
    """Add the command to a parser."""
    parser = commands.add_parser("runs", help="list the runs in a folder")
    parser.add_argument("directory", nargs="?", default="outputs", metavar="DIR", help="folder of run directories (default: outputs)")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """List; returns the exit code."""
    from frl.records import find_runs, read_run

    found = find_runs(arguments.directory)
    if not found:
        print(f"frl: there is no run directory in {arguments.directory}", file=sys.stderr)
        return 1
    records = [read_run(path) for path in found]
    rows = []
    for record in records:
        algorithm = record.config.algorithm.name if record.config is not None else "?"
        env = record.config.trainer.learning_env.name if record.config is not None else "?"
        numbers = [number(record.updates), number(record.steps), number(record.best), number(record.last_return)]
        rows.append([record.path.name, algorithm, env, record.state, *numbers])
    print_table(HEADERS, rows, text_columns=4)
    for record in records:
        if record.problem is not None:
            print(f"frl: {record.path}: the settings cannot be read: {record.problem}", file=sys.stderr)
    return 0
