"""What saving, logging and evaluating cost a training run, beside the updates themselves.

Runs ``frl train configs/point_mass/apg.yaml`` (PointMass, 64 rows, segments of 100 steps, 14-64-64-2 tanh) in this process with a checkpoint every few updates
and, on a terminal, the live line. Each part of the loop is timed where it happens (``frl.phases``); updates that compile something are left out.

``checkpoint_ms``  of the loop per checkpoint: the state is copied there, everything else (checksum, writing, syncing, manifest, removal of old files) happens
                   in a thread. Median and worst of all checkpoints; ``checkpoint_processor_ms`` is what it takes of the processor (on a busy machine the clock
                   also counts the others), and ``written_ms`` the median of the work behind the loop.
``logging_share``  of steady time spent on reading the metrics of every update, ``metrics.jsonl`` and TensorBoard, at the run file's own rate of records and
                   with a record for every update.
``graphs``         compiled by the first evaluation and by all later ones together (the final evaluations of the last and the best state included).

Prints one JSON line; ends with exit status 1 when a checkpoint takes more than 20 ms, logging more than 2 %, or a later evaluation compiles something.

    python benchmarks/overheads.py
    python benchmarks/overheads.py --compile-mode eager --quick
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import timing

CHECKPOINT_MS, LOGGING_SHARE = 20.0, 0.02
ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile-mode", choices=("inductor", "aot_eager", "eager"), default="inductor")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--updates", type=int, default=500)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="40 updates: a trial, not a measurement")
    parser.add_argument("--out", help="append the JSON line to this file")
    args = parser.parse_args()
    os.environ.update({name: str(args.threads) for name in timing.THREAD_VARIABLES})
    conditions = timing.conditions("torch", "frl")
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args, Path(folder))
    timing.emit({**result, "conditions": conditions}, args.out)
    good = result["checkpoint_ms"] <= CHECKPOINT_MS and result["logging_share"] <= LOGGING_SHARE and result["graphs"]["later"] == 0
    sys.exit(0 if good else 1)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train once with everything on, then time records by themselves."""
    from frl import compile as compiler
    from frl import run, saving, train
    from frl.phases import Phases

    updates = 40 if args.quick else args.updates
    save_every = 4 if args.quick else args.save_every
    phases = Phases()
    saves: list[float] = []
    written: list[float] = []
    processor: list[float] = []
    graphs: list[int] = []

    class Timed(saving.Saver):
        def save(self, *rest: Any) -> None:
            started, busy = time.perf_counter(), time.thread_time()
            super().save(*rest)
            saves.append(1e3 * (time.perf_counter() - started))
            processor.append(1e3 * (time.thread_time() - busy))

        def _write(self, *rest: Any) -> None:
            started = time.perf_counter()
            super()._write(*rest)
            written.append(1e3 * (time.perf_counter() - started))

    make_evaluator, make_loop, to_host = run.make_evaluator, train.train, train.metrics_to_host
    read: list[float] = []

    def timed_read(metrics: Any) -> dict[str, float]:
        values = [x.detach() for x in metrics.values()]
        started = time.perf_counter()
        found = to_host(dict(zip(metrics, values, strict=True)))
        read.append(time.perf_counter() - started)
        return found

    def counted(*rest: Any, **options: Any) -> Any:
        evaluate = make_evaluator(*rest, **options)

        def one(*inputs: Any, **more: Any) -> Any:
            before = compiler.graph_count()
            result = evaluate(*inputs, **more)
            graphs.append(compiler.graph_count() - before)
            return result

        return one

    run.Saver, run.make_evaluator, train.metrics_to_host = Timed, counted, timed_read
    run.train = lambda *rest, **options: make_loop(*rest, **{**options, "phases": phases})
    settings = {
        "trainer.compile_mode": args.compile_mode,
        "trainer.num_envs": args.num_envs,
        "trainer.iterations": updates,
        "trainer.threads": args.threads,
        "trainer.eval_freq": args.num_envs * 100 * max(1, updates // 5),
        "trainer.save_frequency_updates": save_every,
        "trainer.output_dir": f"'{folder}'",
    }
    overrides = [f"{name}={value}" for name, value in settings.items()]
    summary = run.train_from_config(ROOT / "configs" / "point_mass" / "apg.yaml", overrides=overrides, progress=True)
    loop = {name: phases[name] for name in ("collect", "update", "logging", "saving", "evaluation")}
    working = loop["collect"].steady_seconds + loop["update"].steady_seconds
    reading, steady = statistics.median(read), loop["update"].steady_calls
    record = loop["logging"].seconds / loop["logging"].calls
    update = working / steady - reading
    per_update = loop["logging"].seconds / loop["update"].calls
    return {
        "compile_mode": args.compile_mode,
        "num_envs": args.num_envs,
        "updates": summary["num_updates"],
        "update_ms": 1e3 * update,
        "steps_per_second": summary["training_fps"],
        "checkpoint_ms": statistics.median(saves),
        "checkpoint_ms_worst": max(saves),
        "checkpoint_processor_ms": statistics.median(processor),
        "checkpoints": len(saves),
        "written_ms": statistics.median(written),
        "checkpoint_bytes": Path(summary["latest_checkpoint_path"]).stat().st_size,
        "records": loop["logging"].calls,
        "record_ms": 1e3 * record,
        "read_ms": 1e3 * reading,
        "logging_share": (reading + per_update) / (update + reading + per_update),
        "logging_share_every_update": (reading + record) / (update + reading + record),
        "graphs": {"first_evaluation": graphs[0], "later": sum(graphs[1:]), "evaluations": len(graphs)},
    }


if __name__ == "__main__":
    main()
