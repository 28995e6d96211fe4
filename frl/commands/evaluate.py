"""``frl eval RUN``: play episodes with a trained policy, print what came out, and keep it in the run directory."""

from __future__ import annotations

import argparse
import math
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frl.commands.options import add_run_options, count, threads
from frl.commands.tables import number, print_table

if TYPE_CHECKING:
    from frl.evaluate import EvaluationResult
    from frl.runtime import LoadedRun

SCHEMA_VERSION = 1


def add(commands: Any) -> argparse.ArgumentParser:
    """Add the command to a parser."""
    parser = commands.add_parser("eval", help="play episodes with a trained policy")
    add_run_options(parser)
    parser.add_argument("--episodes", type=count, metavar="N", help="episodes to play (default: those of the run's final evaluation)")
    parser.add_argument("--num-envs", type=count, metavar="N", help="rows that play them (default: trainer.num_eval_envs)")
    parser.add_argument("--compile-mode", choices=("eager", "aot_eager", "inductor"), default="eager", help="inductor pays for many episodes (default: eager)")
    parser.add_argument("--output", metavar="DIR", help="where the evaluation's folder goes (default: evaluations in the run directory)")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Evaluate; returns the exit code."""
    from frl.load import load_run, newest_run

    directory = newest_run(arguments.run)
    with load_run(directory, checkpoint=arguments.checkpoint, env=arguments.env, num_envs=arguments.num_envs, device=arguments.device) as loaded:
        with threads(loaded.config.trainer.threads):
            seed = loaded.final_seed if arguments.seed is None else arguments.seed
            result = loaded.evaluate(
                arguments.episodes,
                seed=seed,
                deterministic=not arguments.stochastic,
                max_steps=arguments.max_steps,
                compile_mode=arguments.compile_mode,
            )
        inputs = {
            "run": str(loaded.path),
            "checkpoint": str(loaded.checkpoint),
            "global_step": loaded.global_step,
            "num_updates": loaded.num_updates,
            "env": loaded.env_name,
            "num_envs": loaded.env.num_envs,
            "episodes": result.episodes + result.unfinished,
            "seed": seed,
            "deterministic": not arguments.stochastic,
            "max_steps": arguments.max_steps,
            "compile_mode": arguments.compile_mode,
        }
        parent = Path(arguments.output) if arguments.output is not None else loaded.path / "evaluations"
        path = write_evaluation(parent, inputs, result)
    _report(loaded, result)
    print(f"evaluation: {path}")
    return 0 if result.episodes else 1


def write_evaluation(parent: Path, inputs: dict[str, Any], result: EvaluationResult) -> Path:
    """Write ``<parent>/<UTC stamp>-policy/evaluation.json`` and return its path; numbers that are not finite become ``null``."""
    from frl.run_directory import write_json

    now = datetime.now(timezone.utc)
    folder = parent / f"{now.strftime('%Y%m%dT%H%M%S%fZ')}-policy"
    folder.mkdir(parents=True)
    episodes: dict[str, Any] = {
        "return": result.returns.tolist(),
        "length": result.lengths.tolist(),
        "row": result.rows.tolist(),
        "truncated": result.truncated.tolist(),
        **({} if result.success is None else {"success": result.success.tolist()}),
        **{name: values.tolist() for name, values in result.values.items()},
    }
    content = {
        "schema_version": SCHEMA_VERSION,
        "created_at": now.isoformat(timespec="seconds"),
        "mode": "policy",
        "inputs": inputs,
        "result": {"episodes": result.episodes, "unfinished": result.unfinished, "metrics": result.metrics, "per_episode": episodes},
    }
    write_json(folder / "evaluation.json", content)
    return folder / "evaluation.json"


def _report(loaded: LoadedRun, result: EvaluationResult) -> None:
    print(f"{loaded.path.name}, {loaded.checkpoint.name}: {result.episodes} episodes of {loaded.env_name}")
    if result.unfinished:
        print(f"{result.unfinished} episodes were cut off by the cap on steps and are not counted")
    if result.episodes:
        print_table(["", "mean", "std", "95 % interval"], list(_rows(result)))


def _rows(result: EvaluationResult) -> list[list[str]]:
    import numpy as np

    from frl.evaluate import wilson_interval

    n = result.episodes
    named: dict[str, Any] = {"return": result.returns, "length": result.lengths, **result.values}
    rows = []
    for name, values in named.items():
        values = np.asarray(values, dtype=np.float64)
        mean, std = float(values.mean()), float(values.std(ddof=1)) if n > 1 else math.nan
        half = 1.96 * std / math.sqrt(n)
        rows.append([name, number(mean), number(std), f"{number(mean - half)} to {number(mean + half)}" if n > 1 else "-"])
    if result.success is not None:
        low, high = wilson_interval(float(result.success.sum()), n)
        rows.insert(1, ["success rate", number(float(result.success.mean())), "", f"{number(low)} to {number(high)}"])
    return rows
