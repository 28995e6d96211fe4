"""How much does a policy return after so many environment steps, and after so many seconds? APG, SHAC and PPO on the tasks of ``configs/``.

Every run is ``frl train configs/TASK/ALGORITHM.yaml`` in a process of its own, with one thread, at most two at a time. A run file of SHAC has the budget of
environment steps that APG's has, or a smaller one, at which the two are compared. Evaluations of the policy's mode are the points of a curve, seconds count
from the start of the process, and so include imports, compilation and the evaluations; the last point is the final evaluation, on episodes that no other one
has played.

A finished run is one file in ``--runs``, and is not run again while its run file and the settings here stay the same: a benchmark that was stopped goes on
where it was. Seeds are the outer loop, so that what is there is always a whole picture. ``learning.json`` and ``learning.png`` in ``--out`` show all finished
runs: the median over seeds, and the lowest and highest.

    python benchmarks/learning.py            five seeds; no run begins after 90 minutes
    python benchmarks/learning.py --quick    one seed, about 10 minutes
    python benchmarks/learning.py --draw     runs nothing
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import timing

ROOT = Path(__file__).resolve().parents[1]
TASKS = ("pendulum", "cartpole_swingup", "quadrotor", "planar_reach")
ALGORITHMS = {"apg": "#0072B2", "shac": "#D55E00", "ppo": "#009E73"}
POINTS = 16  # evaluations of a run
EPISODES, FINAL_EPISODES = 64, 1024
SOLVED = 0.95  # success rate that counts as solved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed; no run begins after 10 minutes")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, help="default: all")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS), help="default: all")
    parser.add_argument("--seeds", type=int, help="so many, from 0 (default: 5)")
    parser.add_argument("--minutes", type=float, help="begin no run after so many (default: 90)")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=2, help="runs at a time (default: 2)")
    parser.add_argument("--runs", type=Path, default=ROOT / "outputs" / "learning", help="folder of finished runs")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of learning.json and learning.png")
    parser.add_argument("--draw", action="store_true", help="only draw what is there")
    args = parser.parse_args()
    tasks = args.tasks or TASKS
    seeds = args.seeds or (1 if args.quick else 5)
    deadline = time.monotonic() + 60 * (args.minutes or (10 if args.quick else 90))
    conditions = timing.conditions("torch", "frl")
    jobs = [(task, algorithm, seed) for seed in range(seeds) for task in tasks for algorithm in args.algorithms if run_file(task, algorithm).is_file()]
    args.runs.mkdir(parents=True, exist_ok=True)
    if not args.draw:
        with ThreadPoolExecutor(args.jobs) as pool:
            for line in pool.map(lambda job: run(*job, args.runs, deadline), jobs):
                if line:
                    print(line, flush=True)
    found = list(finished(args.runs))
    if not found:
        raise SystemExit("no run is finished yet")
    results = summarize(found)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "learning.json").write_text(json.dumps({"benchmark": "learning", **conditions, "results": results}, indent=1) + "\n", encoding="utf-8")
    draw(results, args.out / "learning.png")
    print(table(results))


# -- runs ----------------------------------------------------------------------------------------------------------------------------------------


def run_file(task: str, algorithm: str) -> Path:
    return ROOT / "configs" / task / f"{algorithm}.yaml"


def settings(task: str, algorithm: str, seed: int) -> list[str]:
    """What a run of the benchmark changes in its run file."""
    from frl.build import last_update
    from frl.config import load_run_config

    config = load_run_config(run_file(task, algorithm))
    cfg = config.trainer
    length = cfg.update_horizon or cfg.segment_length if algorithm in ("apg", "shac") else cfg.buffer_size
    steps = last_update(config) * length * cfg.num_envs * cfg.gradient_accumulation_steps
    values = {
        "seed": seed,
        "threads": 1,
        "enable_eval": "true",
        "eval_freq": -(-steps // POINTS),
        "num_eval_envs": EPISODES,
        "num_eval_episodes": EPISODES,
        "final_eval_episodes": FINAL_EPISODES,
        "save_frequency_minutes": 0,
        "keep_checkpoints": 1,
    }
    return [f"trainer.{name}={value}" for name, value in values.items()]


def fingerprint(task: str, algorithm: str, seed: int) -> str:
    """Of all settings of a run: another one is another run."""
    from frl.config import dump_run_config, load_run_config

    config = dump_run_config(load_run_config(run_file(task, algorithm), settings(task, algorithm, seed)))
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def result_file(runs: Path, task: str, algorithm: str, seed: int) -> Path:
    return runs / f"{task}-{algorithm}-{seed}.json"


def run(task: str, algorithm: str, seed: int, runs: Path, deadline: float) -> str | None:
    """One run, unless it is finished already or the time is up; a line about it."""
    target, mark = result_file(runs, task, algorithm, seed), fingerprint(task, algorithm, seed)
    if time.monotonic() > deadline or (target.is_file() and json.loads(target.read_text(encoding="utf-8"))["fingerprint"] == mark):
        return None
    with tempfile.TemporaryDirectory(prefix=f"{target.stem}-", dir=runs) as folder:
        command = [sys.executable, "-m", "frl", "train", str(run_file(task, algorithm)), "--quiet"]
        for value in (*settings(task, algorithm, seed), f"trainer.output_dir={folder}"):
            command += ["--set", value]
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, **dict.fromkeys(timing.THREAD_VARIABLES, "1"), "PYTHONPATH": paths}
        started = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        seconds = time.monotonic() - started
        name = f"{task} {algorithm} seed {seed}"
        if done.returncode:
            return f"{name}: exit status {done.returncode}\n{done.stderr}"
        (directory,) = (path for path in Path(folder).iterdir() if (path / "summary.json").is_file())
        result = {"task": task, "algorithm": algorithm, "seed": seed, "fingerprint": mark, "seconds": seconds, **read(directory, seconds)}
    fresh = target.with_suffix(".tmp")
    fresh.write_text(json.dumps(result), encoding="utf-8")
    fresh.replace(target)
    return f"{name}: return {result['return']:.1f}, success {result['success']:.3f}, {result['env_steps']:,} env steps, {seconds:.0f} s"


def read(directory: Path, seconds: float) -> dict[str, Any]:
    """A run directory as a curve and its end; ``seconds`` is the life of the process, whose log began when it had been imported and built."""
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    before = seconds - records[-1]["seconds"]
    curve = [
        {"env_steps": r["global_step"], "seconds": r["seconds"] + before, "return": r["eval/avg_reward"], "success": r["eval/success_rate"]}
        for r in records
        if "eval/avg_reward" in r
    ]
    last = summary["last_eval_metrics"]
    end = {"env_steps": summary["global_step"], "return": last["eval/avg_reward"], "success": last["eval/success_rate"]}
    curve = [point for point in curve if point["env_steps"] < end["env_steps"]] + [{**end, "seconds": seconds}]
    return {**end, "compile_seconds": summary["compile_seconds"], "skipped_updates": summary["skipped_updates"], "curve": curve}


def finished(runs: Path) -> Iterator[dict[str, Any]]:
    """The runs that are there and fit their run files."""
    for task in TASKS:
        for algorithm in ALGORITHMS:
            for path in sorted(runs.glob(f"{task}-{algorithm}-*.json")):
                result = json.loads(path.read_text(encoding="utf-8"))
                if result["fingerprint"] == fingerprint(task, algorithm, result["seed"]):
                    yield result


# -- results -------------------------------------------------------------------------------------------------------------------------------------


def summarize(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry for each task and algorithm, with all of its seeds."""
    results = []
    for task in TASKS:
        for algorithm in ALGORITHMS:
            runs = [run for run in found if (run["task"], run["algorithm"]) == (task, algorithm)]
            if not runs:
                continue
            solved = [next((p["env_steps"] for p in run["curve"] if p["success"] >= SOLVED), math.inf) for run in runs]
            middle = statistics.median_high(solved)
            results.append(
                {
                    "task": task,
                    "algorithm": algorithm,
                    "seeds": [run["seed"] for run in runs],
                    "env_steps": runs[0]["env_steps"],
                    "return": spread(run["return"] for run in runs),
                    "success": spread(run["success"] for run in runs),
                    "seconds": spread(run["seconds"] for run in runs),
                    "env_steps_to_solve": None if math.isinf(middle) else middle,
                    "curves": [run["curve"] for run in runs],
                }
            )
    return results


def spread(values: Iterator[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    numbers = list(values)
    return {"median": statistics.median(numbers), "lowest": min(numbers), "highest": max(numbers)}


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """A table in Markdown."""
    lines = [
        f"| task | algorithm | seeds | env steps | return, median (lowest to highest) | success | env steps to a success of {SOLVED} | seconds |",
        "|---|---|---:|---:|---|---|---:|---:|",
    ]
    for row in results:
        back, success = row["return"], row["success"]
        digits = 1 if abs(back["median"]) >= 10 else 2
        solved = row["env_steps_to_solve"]
        cells = [
            f"`{row['task']}`",
            row["algorithm"].upper(),
            str(len(row["seeds"])),
            f"{row['env_steps']:,}",
            f"{back['median']:.{digits}f} ({back['lowest']:.{digits}f} to {back['highest']:.{digits}f})",
            f"{success['median']:.2f} ({success['lowest']:.2f} to {success['highest']:.2f})",
            "never" if solved is None else f"{solved:,}",
            f"{row['seconds']['median']:.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A column for each task; return against environment steps above, against seconds below."""
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, NullFormatter

    tasks = [task for task in TASKS if any(row["task"] == task for row in results)]
    figure = Figure(figsize=(3.2 * len(tasks) + 0.4, 5.6), dpi=110, layout="constrained")
    axes = figure.subplots(2, len(tasks), squeeze=False, sharey="col")
    for column, task in enumerate(tasks):
        for row in (row for row in results if row["task"] == task):
            color, name = ALGORITHMS[row["algorithm"]], row["algorithm"].upper()
            for ax, key in zip(axes[:, column], ("env_steps", "seconds"), strict=True):
                # The runs of one row have their evaluations after the same numbers of environment steps.
                count = min(len(curve) for curve in row["curves"])
                places, values = (np.array([[point[what] for point in curve[:count]] for curve in row["curves"]]) for what in (key, "return"))
                middle = np.median(places, 0)
                ax.plot(middle, np.median(values, 0), color=color, linewidth=1.6, label=name)
                ax.fill_between(middle, values.min(0), values.max(0), color=color, alpha=0.2, linewidth=0)
        axes[0, column].set(title=task, xlabel="env steps", xscale="log")
        axes[0, column].xaxis.set_major_formatter(EngFormatter(sep=""))
        axes[0, column].xaxis.set_minor_formatter(NullFormatter())
        axes[1, column].set(xlabel="seconds, with compilation")
        axes[1, column].set_xlim(left=0)
    for ax in axes.flat:
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes[:, 0]:
        ax.set_ylabel("return of an episode")
    handles = {label: handle for ax in axes.flat for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    axes[0, 0].legend(handles.values(), handles.keys(), fontsize=8, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})


if __name__ == "__main__":
    main()
