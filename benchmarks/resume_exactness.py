"""Is a run that was killed and resumed the run that was never interrupted, bit for bit?

For each algorithm: 20 updates straight; and, in other processes, a run that is killed with SIGKILL in its eighth update, when the checkpoint of the seventh is
on disk, and one that resumes from it and makes the other 13. Compared are every tensor of the last checkpoint (parameters, moments, normalizer, environment
state, keys, hyper-parameters, counters, metrics), the metrics of all 20 updates (wall-clock speed aside), every evaluation, and the final evaluation.

Prints one JSON line per case: ``max_difference`` over all numbers and ``same_bits``. Ends with exit status 1 unless every difference is exactly 0.

    python benchmarks/resume_exactness.py
    python benchmarks/resume_exactness.py --compile-mode inductor
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import multiprocessing.process
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timing

UPDATES, KILLED_AFTER = 20, 7
ROWS, STEPS = 8, 4
CASES = ("apg_segmented", "apg_complete", "shac", "ppo", "grpo")
PATIENCE = 1200.0  # seconds that a process may take, compilation included


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile-mode", choices=("eager", "aot_eager", "inductor"), default="eager")
    parser.add_argument("--case", choices=CASES, action="append", help="one case; all by default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--start", choices=("spawn", "forkserver"), default="spawn", help="forkserver: processes share the imports, which saves seconds")
    parser.add_argument("--out", help="append the JSON lines to this file")
    args = parser.parse_args()
    os.environ.update({name: str(args.threads) for name in timing.THREAD_VARIABLES})
    exact = True
    with tempfile.TemporaryDirectory() as folder:
        for case in args.case or CASES:
            result = compare(case, args.compile_mode, args.threads, args.start, Path(folder) / case)
            timing.emit({**result, "conditions": timing.conditions("torch", "frl")}, args.out)
            exact = exact and result["same_bits"] and result["max_difference"] == 0.0
    sys.exit(0 if exact else 1)


# -- the runs ------------------------------------------------------------------------------------------------------------------------------------


def run_file(case: str, compile_mode: str, threads: int, output_dir: Path) -> dict[str, Any]:
    """A run with everything that has a memory: moments, statistics, schedules or an adaptive rate, running episodes, a best evaluation."""
    network = {"type": "mlp", "network_cfg": {"hidden_sizes": [16, 16], "activation": "tanh"}}
    trainer: dict[str, Any] = {
        "exp_name": case,
        "learning_env": {"name": "point_mass", "cfg": {"max_episode_steps": 6}},
        "num_envs": ROWS,
        "iterations": UPDATES,
        "normalize_observations": True,
        "enable_eval": True,
        "eval_freq": 3 * ROWS * STEPS,
        "num_eval_envs": 4,
        "num_eval_episodes": 6,
        "final_eval_episodes": 6,
        "save_frequency_updates": KILLED_AFTER,
        "compile_mode": compile_mode,
        "threads": threads,
        "output_dir": str(output_dir),
    }
    policy: dict[str, Any] = {"name": "actor_only", "actor": network, "initial_log_std": -1.0}
    cfg: dict[str, Any] = {"optimizer": {"name": "adam", "learning_rate": 0.01}}
    if case.startswith("apg"):
        mode = case.removeprefix("apg_")
        trainer |= {"rollout_mode": mode, "segment_length": STEPS, "action_adjoint_max_norm": 0.05}
        trainer |= {"gradient_accumulation_steps": 2, "eval_freq": 6 * ROWS * STEPS} if mode == "complete" else {}
        cfg |= {"lr_scheduler": {"name": "cosine"}, "ent_coef": 0.001}
        return {"trainer": trainer, "policy": policy, "algorithm": {"name": "apg", "cfg": cfg}}
    if case == "shac":
        trainer |= {"segment_length": STEPS}
        policy = {**policy, "name": "actor_critic", "critic": network}
        cfg |= {"n_epochs": 2, "num_mini_batches": 2, "lr_scheduler": {"name": "linear"}, "ent_coef": 0.01, "learn_temperature": True}
        return {"trainer": trainer, "policy": policy, "algorithm": {"name": "shac", "cfg": cfg}}
    trainer |= {"buffer_size": STEPS}
    if case == "ppo":
        policy = {**policy, "name": "actor_critic", "critic": network}
        cfg |= {"n_epochs": 2, "num_mini_batches": 4, "schedule": "adaptive", "desired_kl": 0.01, "normalize_rewards": True}
    else:
        trainer["learning_env"] = {"name": "cartpole", "cfg": {"max_episode_steps": 20}}
        policy = {"name": "actor_critic", "actor": network, "critic": network}
        cfg |= {"n_epochs": 2, "batch_size": 16, "group_size": 4, "kl_coef": 0.05, "lr_scheduler": {"name": "linear"}}
    return {"trainer": trainer, "policy": policy, "algorithm": {"name": case, "cfg": cfg}}


def work(config: dict[str, Any], resume_from: str | None, blocked_from: int | None, summary_path: str) -> None:
    """One process: train; with ``blocked_from``, stand still from that update on and wait for the end."""
    import frl
    from frl.callbacks import Event

    def stand_still(event: Event) -> None:
        if blocked_from is not None and event.num_updates >= blocked_from:
            time.sleep(PATIENCE)

    where = {} if resume_from is None else {"resume": "latest", "run": resume_from}
    summary = frl.train_from_config(frl.parse_run_config(config), callbacks=[stand_still], **where)
    Path(summary_path).write_text(json.dumps(summary), encoding="utf-8")


def compare(case: str, compile_mode: str, threads: int, start: str, folder: Path) -> dict[str, Any]:
    """Run straight, run and kill, resume; the largest difference."""
    context = multiprocessing.get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload(["frl.run"])
    config = {name: run_file(case, compile_mode, threads, folder / name) for name in ("whole", "killed", "resumed")}
    summaries = {name: folder / f"{name}.json" for name in config}
    folder.mkdir(parents=True)

    def begin(name: str, resume_from: str | None = None, blocked_from: int | None = None) -> multiprocessing.process.BaseProcess:
        process = context.Process(target=work, args=(config[name], resume_from, blocked_from, str(summaries[name])))
        process.start()
        return process

    def end(process: multiprocessing.process.BaseProcess) -> None:
        process.join(PATIENCE)
        if process.exitcode != 0:
            process.kill()
            raise SystemExit(f"{case}: a process ended with exit status {process.exitcode}; its message is above")

    end(begin("whole"))
    killed = begin("killed", blocked_from=KILLED_AFTER + 1)
    run = _saved(folder / "killed", killed)
    os.kill(killed.pid or 0, signal.SIGKILL)
    killed.join()
    end(begin("resumed", resume_from=str(run)))
    whole, resumed = (json.loads(summaries[name].read_text(encoding="utf-8")) for name in ("whole", "resumed"))
    return {
        "case": case,
        "compile_mode": compile_mode,
        "updates": resumed["num_updates"],
        "resumed_after": _updates(Path(resumed["resumed_from"])),
        "killed_by": signal.Signals(-(killed.exitcode or 0)).name,
        **differences(whole, resumed),
    }


def _saved(folder: Path, process: multiprocessing.process.BaseProcess) -> Path:
    """The run directory below ``folder``, when its manifest names the checkpoint to go on from."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and process.is_alive():
        for manifest in folder.glob("*/run-manifest.json"):
            if any(file["num_updates"] == KILLED_AFTER for file in json.loads(manifest.read_text(encoding="utf-8"))["kept"]):
                return manifest.parent
        time.sleep(0.01)
    raise SystemExit(f"{folder}: the checkpoint of update {KILLED_AFTER} did not appear")


def _updates(checkpoint: Path) -> int:
    import frl

    return frl.read_checkpoint(checkpoint)[1]["loop"]["num_updates"]


# -- the comparison ------------------------------------------------------------------------------------------------------------------------------


def differences(whole: dict[str, Any], resumed: dict[str, Any]) -> dict[str, Any]:
    """The largest difference of the last states and of everything that the summaries say of training and evaluation."""
    import frl

    a, b = (
        {name: x for name, x in frl.read_checkpoint(summary["latest_checkpoint_path"])[0].items() if not name.startswith("loop.")}
        for summary in (whole, resumed)
    )
    largest, same = 0.0, a.keys() == b.keys()
    for name in a.keys() & b.keys():
        x, y = a[name], b[name]
        same = same and x.shape == y.shape and x.dtype == y.dtype and x.numpy().tobytes() == y.numpy().tobytes()
        if x.shape == y.shape:
            largest = max([largest, *(_distance(p, q) for p, q in zip(x.double().flatten().tolist(), y.double().flatten().tolist(), strict=True))])
    compared = ("train_history", "eval_history", "last_eval_metrics", "best_eval_value", "skipped_updates", "num_updates", "global_step")
    numbers = 0
    for name in compared:
        left, right = dict(_numbers(whole[name], name)), dict(_numbers(resumed[name], name))
        same = same and left.keys() == right.keys()
        for path in left.keys() & right.keys():
            numbers += 1
            largest = max(largest, _distance(left[path], right[path]))
    return {"tensors": len(a), "values": sum(x.numel() for x in a.values()), "metrics": numbers, "max_difference": largest, "same_bits": same}


def _distance(p: float | None, q: float | None) -> float:
    if p is None or q is None or math.isnan(p) or math.isnan(q):
        alike = (p is None or math.isnan(p)) and (q is None or math.isnan(q))
        return 0.0 if alike else math.inf
    return 0.0 if p == q else abs(p - q)


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float | None]]:
    if isinstance(value, dict):
        for name, item in value.items():
            if name != "charts/SPS":
                yield from _numbers(item, f"{path}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _numbers(item, f"{path}[{index}]")
    else:
        yield path, value


if __name__ == "__main__":
    main()
