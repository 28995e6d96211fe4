"""How does the cost of an APG update grow with the number of rows and with the number of steps?

Complete updates of ours as in ``apg_update.py``, compiled for each size in a process of its own: N from 16 to 16384 rows at T = 64, and T from 16 to 4096 steps
at N = 64. One thread below 256 rows and two from there on. ``ns_per_env_step`` should fall with N until the arithmetic is what counts, and be flat over T;
``largest_rise`` is the largest factor by which it goes up from one point to the next: a cliff would be seen there.

    python benchmarks/growth.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import timing

ROWS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEPS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
SCRIPT = Path(__file__).resolve().parent / "apg_update.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--over", choices=("rows", "steps", "both"), default="both")
    parser.add_argument("--points", type=int, nargs="+", help="other sizes than those above")
    parser.add_argument("--quick", action="store_true", help="every fourth size or so, 2 short rounds: a trial, not a measurement")
    parser.add_argument("--out", help="append the JSON lines to this file")
    args = parser.parse_args()
    for over in ("rows", "steps") if args.over == "both" else (args.over,):
        sizes = args.points or (ROWS if over == "rows" else STEPS)
        if args.quick and not args.points:
            sizes = (16, 256, 4096, 16384) if over == "rows" else (16, 256, 4096)
        timing.emit(measure(over, sizes, args.quick), args.out)


def measure(over: str, sizes: Any, quick: bool) -> dict[str, Any]:
    """One point after the other; smaller sizes need not stay while larger ones are timed."""
    conditions = timing.conditions("torch", "frl")
    points = []
    with tempfile.TemporaryDirectory(prefix="frl-growth-") as folder:
        for size in sizes:
            rows, steps = (size, 64) if over == "rows" else (64, size)
            threads = 1 if rows < 256 else 2
            options = ["--worker", "frl", "--threads", str(threads), "--num-envs", str(rows), "--horizon", str(steps), *(["--quick"] if quick else [])]
            worker = timing.Worker([str(SCRIPT), *options], threads, timing.compiler_cache(Path(folder)))
            rates = [worker.block() for _ in range(2 if quick else 5)]
            worker.close()
            rate = statistics.median(rates)
            points.append({"size": size, "threads": threads, "env_steps_per_s": rate, "spread": timing.spread(rates), "ns_per_env_step": 1e9 / rate})
    costs = [point["ns_per_env_step"] for point in points]
    return {
        "benchmark": "growth",
        "over": over,
        "points": points,
        "largest_rise": max((b / a for a, b in zip(costs, costs[1:], strict=False)), default=1.0),
        **conditions,
        "loadavg_after": os.getloadavg()[0],
    }


if __name__ == "__main__":
    main()
