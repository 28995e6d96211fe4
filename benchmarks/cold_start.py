"""How long does a user wait for the first update of ``frl train``, with an empty compiler cache and with a full one?

A new process does what ``frl train configs/point_mass/apg.yaml`` does (64 rows, evaluation on, everything as in the run file), and the clock runs from its
start, imports included, to the moment when the first update is finished and its record is shown to a callback, and to that after update 8, when the compiled
updates, which begin after an eager first one, are under way (``cold_settled``, ``warm_settled``). Then it is ended. Cold: the folder of Inductor's
cache is empty. Warm: the folder is the one that the cold process left, complete with what it compiled after the first update. ``import_torch`` is the same
clock for a process that imports torch and nothing else.

    python benchmarks/cold_start.py
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import timing

ROOT = Path(__file__).resolve().parents[1]
UPDATES = 8  # after which a process ends: by then everything but evaluation has been compiled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(ROOT / "configs" / "point_mass" / "apg.yaml"), help="run file")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="once instead of three times: a trial, not a measurement")
    parser.add_argument("--out", help="append the JSON line to this file")
    parser.add_argument("--worker", choices=("frl", "torch"), help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is None:
        timing.emit(measure(args), args.out)
        return
    timing.serve(lambda: (prepare(args), 1, {"seconds": time.time() - args.started}) if args.worker == "torch" else train(args), seconds=0.0)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Cold and warm, several times."""
    conditions = timing.conditions("torch", "frl")
    seconds: dict[str, list[float]] = {name: [] for name in ("import_torch", "cold", "cold_settled", "warm", "warm_settled")}

    def run(side: str, folder: Path) -> dict[str, float]:
        options = ["--worker", side, "--config", args.config, "--output", str(folder / "runs")]
        worker = timing.Worker([__file__, *options], 1, timing.compiler_cache(folder / "cache"))
        worker.close()
        return worker.ready

    for i in range(1 if args.quick else args.repeats):
        with tempfile.TemporaryDirectory(prefix="frl-cold-") as folder:
            if i == 0:
                run("torch", Path(folder))  # so that the libraries are in memory
            seconds["import_torch"].append(run("torch", Path(folder))["seconds"])
            for name in ("cold", "warm"):
                ready = run("frl", Path(folder))
                seconds[name].append(ready["seconds"])
                seconds[f"{name}_settled"].append(ready["settled"])
    return {
        "benchmark": "cold_start",
        "config": str(Path(args.config).resolve().relative_to(ROOT)) if Path(args.config).resolve().is_relative_to(ROOT) else args.config,
        **{f"{name}_seconds": statistics.median(values) for name, values in seconds.items()},
        **{f"{name}_spread": timing.spread(values) for name, values in seconds.items()},
        "repeats": len(seconds["cold"]),
        **conditions,
        "loadavg_after": os.getloadavg()[0],
    }


def prepare(args: argparse.Namespace) -> Any:
    import torch

    return torch.get_num_threads


class Enough(Exception):
    """The run has gone on for long enough."""


def train(args: argparse.Namespace) -> Any:
    """The run, up to a few updates."""
    warnings.filterwarnings("error", message="frl could not compile")
    import frl.commands.train  # noqa: F401  what the command imports
    from frl.cli import main as command  # noqa: F401
    from frl.run import train_from_config

    finished: list[float] = []

    def see(event: Any) -> None:
        finished.append(time.time() - args.started)
        if event.num_updates >= UPDATES:
            raise Enough

    with contextlib.suppress(Enough):
        train_from_config(args.config, overrides=[f"trainer.output_dir='{args.output}'"], callbacks=[see])
    return (lambda: None), 1, {"seconds": finished[0], "settled": finished[-1]}


if __name__ == "__main__":
    main()
