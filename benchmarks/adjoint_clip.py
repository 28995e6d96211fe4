"""What does the clip of the action adjoint cost? Complete APG updates of ours with it, and without it.

Work, sides and method as in ``apg_update.py``. With the clip an update also has the adjoint's statistics (norms, the fraction that was clipped), without it
neither. ``cost`` is by how much longer an update takes.

    python benchmarks/adjoint_clip.py --num-envs 1024 --horizon 64
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timing
from apg_update import block_seconds, guarded, make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=1024)
    parser.add_argument("--horizon", type=int, default=64)
    parser.add_argument("--threads", choices=("auto", "1", "2"), default="auto", help="auto: the better of 1 and 2, for each side by itself")
    parser.add_argument("--limit", type=float, default=0.1, help="adjoint limit times N")
    parser.add_argument("--quick", action="store_true", help="5 short rounds instead of 15, one thread: a trial, not a measurement")
    parser.add_argument("--out", help="append the JSON line to this file")
    parser.add_argument("--worker", choices=("on", "off"), help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is None:
        timing.emit(measure(args), args.out)
        return
    timing.serve(lambda: prepare(args), seconds=block_seconds(args.quick))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Start the workers one after the other, let them work in turns, and put the figures together."""
    conditions = timing.conditions("torch", "frl")
    threads = ((1,) if args.quick else (1, 2)) if args.threads == "auto" else (int(args.threads),)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="frl-clip-")))
        workers: dict[tuple[str, Any], timing.Worker] = {}
        for n in threads:
            for side in ("on", "off"):
                options = ["--worker", side, "--threads", n, "--num-envs", args.num_envs, "--horizon", args.horizon, "--limit", args.limit]
                command = [__file__, *(str(x) for x in options), *(["--quick"] if args.quick else [])]
                worker = timing.Worker(command, n, timing.compiler_cache(folder))
                stack.callback(worker.close)
                workers[side, (("threads", n),)] = worker
        rates = timing.alternate(workers, 5 if args.quick else 15)
    figures, _ = timing.compare(rates, "env_steps_per_s", ours="on")
    return {
        "benchmark": "adjoint_clip",
        "num_envs": args.num_envs,
        "horizon": args.horizon,
        **figures,
        "cost": 1 / figures["ratios"]["off"] - 1,
        "cost_spread": sorted(1 / x - 1 for x in figures["ratio_spreads"]["off"]),
        **conditions,
        "loadavg_after": os.getloadavg()[0],
    }


def prepare(args: argparse.Namespace) -> tuple[Callable[[], Any], int, dict[str, Any]]:
    import torch

    torch.set_num_threads(int(args.threads))
    warnings.filterwarnings("error", message="frl could not compile")
    from frl import rng

    _, apg = make(args.num_envs, args.horizon, args.limit / args.num_envs if args.worker == "on" else None)
    state = apg.init(rng.key(0))

    def update() -> None:
        nonlocal state
        state, rollout = apg.collect(state)
        state = apg.update(state, rollout)

    return guarded(update), args.num_envs * args.horizon, {}


if __name__ == "__main__":
    main()
