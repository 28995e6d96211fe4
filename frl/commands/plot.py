"""``frl plot RUN...``: learning curves of one or many runs, grouped by experiment name."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frl.plots import Curve
    from frl.records import RunRecord

LABELS = {
    "charts/episode_reward_avg_100": "return of the last 100 episodes",
    "eval/avg_reward": "return in evaluation",
    "eval/success_rate": "success rate in evaluation",
}
"""What is drawn without ``--metric``, where a run has it."""
LIMITS = {LABELS["eval/success_rate"]: (-0.02, 1.02)}
X_LABELS = {"steps": "environment steps", "seconds": "seconds"}


def add(commands: Any) -> argparse.ArgumentParser:
    """Add the command to a parser."""
    parser = commands.add_parser("plot", help="draw learning curves")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory, or a folder of runs, of which all are drawn")
    parser.add_argument("--metric", action="append", default=[], dest="metrics", metavar="NAME", help="a name in metrics.jsonl (default: returns and success)")
    parser.add_argument("--x", choices=tuple(X_LABELS), default="steps", help="horizontal axis (default: steps)")
    parser.add_argument("--band", choices=("std", "ci", "range", "none"), default="std", help="band over the runs of an experiment (default: std)")
    parser.add_argument("--title", default=None, help="title of the picture (default: the experiment, if it is one)")
    parser.add_argument("--output", metavar="FILE", help=".png or .svg; both without a suffix (default: learning_curves in the run directory, or here)")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Draw; returns the exit code."""
    from frl.plots import SUFFIXES, plot_curves
    from frl.records import find_runs, read_run
    from frl.run_directory import POPULATION

    output = None if arguments.output is None else Path(arguments.output)
    if output is not None and output.suffix and output.suffix.lower() not in SUFFIXES:
        print(f"frl: --output must end in {' or '.join(SUFFIXES)}, or have no suffix for both, got {arguments.output!r}", file=sys.stderr)
        return 2
    found = list(dict.fromkeys(path for given in arguments.runs for path in find_runs(given)))
    if not found:
        raise FileNotFoundError(f"there is no run directory in {', '.join(arguments.runs)}")
    asked = {Path(given).resolve() for given in arguments.runs}
    records = _without_replaced([read_run(path) for path in found], asked)
    for record in records:
        _tell(record)
    metrics = arguments.metrics or [name for name in LABELS if any(name in record.names for record in records)]
    _check_known(metrics, records)
    panels = {LABELS.get(name, name): [_curve(record, name, arguments.x) for record in records] for name in metrics}
    if not any(len(curve.x) for curves in panels.values() for curve in curves):
        what = "no values of " + " or ".join(metrics or LABELS) + (" with times" if arguments.x == "seconds" else "")
        raise ValueError(f"there is nothing to draw: {', '.join(str(r.path) for r in records)} {'has' if len(records) == 1 else 'have'} {what} yet")
    if output is None:
        one = found[0] if len(found) == 1 else Path(arguments.runs[0]) if len(asked) == 1 and (Path(arguments.runs[0]) / POPULATION).is_file() else Path()
        output = one / "learning_curves"
    files = [output] if output.suffix else [output.with_name(output.name + suffix) for suffix in SUFFIXES]
    names = list(dict.fromkeys(record.name for record in records))
    title = (names[0] if len(names) == 1 else "") if arguments.title is None else arguments.title
    for path in plot_curves(panels, files, x_label=X_LABELS[arguments.x], band=arguments.band, title=title, limits=LIMITS):
        print(f"plot: {path}")
    return 0


def _without_replaced(records: Sequence[RunRecord], asked: set[Path]) -> list[RunRecord]:
    """The runs without those that another one goes on from, whose curve holds theirs; a run that was asked for by itself stays."""
    kept = []
    for record in records:
        heirs = [other for other in records if other.goes_on(record)]
        if heirs and record.path.resolve() not in asked:
            print(f"frl: {record.path} left out: {heirs[0].path.name} goes on from it", file=sys.stderr)
        else:
            kept.append(record)
    return kept


def _tell(record: RunRecord) -> None:
    """Say what is missing of a run."""
    if record.damaged:
        lines = "1 damaged line" if record.damaged == 1 else f"{record.damaged} damaged lines"
        print(f"frl: {record.path}: {lines} in metrics.jsonl left out", file=sys.stderr)
    if not record.records:
        print(f"frl: {record.path}: no records yet", file=sys.stderr)


def _check_known(metrics: Sequence[str], records: Sequence[RunRecord]) -> None:
    known = sorted({name for record in records for name in record.names})
    for name in metrics:
        if known and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ValueError(f"no run has recorded {name!r}" + (f"; did you mean {near[0]!r}?" if near else f" (recorded: {', '.join(known)})"))


def _curve(record: RunRecord, metric: str, x: str) -> Curve:
    """A metric of a run; evaluations with their own confidence interval."""
    import numpy as np

    from frl.evaluate import wilson_interval
    from frl.plots import Curve

    places, values = record.series(metric, x)
    low = high = None
    if metric == "eval/avg_reward":
        at, half = record.series("eval/ci95_reward", x)
        if np.array_equal(at, places):
            low, high = values - half, values + half
    if metric == "eval/success_rate":
        at, episodes = record.series("eval/episodes", x)
        if np.array_equal(at, places) and len(at):
            low, high = np.array([wilson_interval(rate * n, int(n)) for rate, n in zip(values, episodes, strict=True)]).T
    return Curve(group=record.name, x=places, y=values, low=low, high=high)
