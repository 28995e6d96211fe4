"""What runs wrote, read back for plots and tables: ``metrics.jsonl`` as far as it goes, the settings, and how far a run got.

A run may still be going on, or have been killed in the middle of a line: what can be read is used, and what cannot is counted.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from frl.config import ConfigError, RunConfig, load_run_config
from frl.run_directory import MANIFEST

METRICS = "metrics.jsonl"
SETTINGS = Path("configs") / "train.yaml"
SUMMARY = "summary.json"
ENVIRONMENT = "environment.json"
AXES = {"steps": "global_step", "seconds": "seconds"}
"""What a curve can be drawn over, and the entry of a record that has it."""
RETURNS = ("charts/episode_reward_avg_100", "eval/avg_reward")
_STAMP = re.compile(r"_\d{8}_\d{6}(_\d{9})?$")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run directory, read.

    Attributes:
        path: the directory.
        name: experiment name.
        config: settings; ``None`` where they cannot be read, and ``problem`` says why.
        records: lines of ``metrics.jsonl`` in order; numbers that were not finite are missing.
        damaged: lines that could not be read.
        summary: what the run said at its end; ``None`` where it did not come to say anything.
        resumed_from: name of the run directory that it goes on from, and the environment steps of the checkpoint.
    """

    path: Path
    name: str
    config: RunConfig | None
    records: list[dict[str, float]] = field(repr=False)
    damaged: int = 0
    summary: dict[str, Any] | None = field(default=None, repr=False)
    problem: str | None = None
    resumed_from: tuple[str, int] | None = None

    @property
    def state(self) -> str:
        """``"finished"``, or why not: ``"stopped"``, ``"failed"``, ``"interrupted"``. A run that was killed, or is still going on, counts as interrupted."""
        status = "interrupted" if self.summary is None else self.summary.get("status", "finished")
        return status if isinstance(status, str) else "interrupted"

    @property
    def updates(self) -> int | None:
        """Updates so far."""
        return self._furthest("num_updates")

    @property
    def steps(self) -> int | None:
        """Environment steps so far."""
        return self._furthest("global_step")

    @property
    def best(self) -> float | None:
        """The best evaluation so far by the run's own metric."""
        if self.config is None:
            return None
        cfg = self.config.trainer
        values = [record[cfg.best_eval_metric] for record in self.records if cfg.best_eval_metric in record]
        return (max if cfg.best_eval_mode == "max" else min)(values, default=None)

    @property
    def last_return(self) -> float | None:
        """Mean return of the last 100 training episodes, or of the last evaluation where none has ended."""
        for name in RETURNS:
            values = [record[name] for record in self.records if name in record]
            if values:
                return values[-1]
        return None

    @property
    def names(self) -> list[str]:
        """Sorted names of everything recorded."""
        return sorted({name for record in self.records for name in record} - {"global_step", "num_updates", "seconds"})

    def series(self, metric: str, x: str = "steps") -> tuple[np.ndarray, np.ndarray]:
        """``(places, values)`` of a metric over ``x``, ``"steps"`` or ``"seconds"``; a place that was recorded twice has its later value."""
        axis = AXES[x]
        values = {record[axis]: record[metric] for record in self.records if metric in record and axis in record}
        places = sorted(values)
        return np.array(places, dtype=np.float64), np.array([values[place] for place in places], dtype=np.float64)

    def goes_on(self, other: RunRecord) -> bool:
        """Whether this run has taken the place of another: it was resumed from its end, or from wherever it was interrupted."""
        if self.resumed_from is None or self.resumed_from[0] != other.path.resolve().name:
            return False
        return other.state != "finished" or self.resumed_from[1] >= (other.steps or 0)

    def _furthest(self, name: str) -> int | None:
        values = [record[name] for record in self.records if name in record]
        values += [self.summary[name]] if self.summary is not None and isinstance(self.summary.get(name), int) else []
        return int(max(values)) if values else None


def is_run(path: Path) -> bool:
    """Whether a directory is one of a run, in whatever state."""
    return any((path / name).is_file() for name in (MANIFEST, METRICS, SETTINGS))


def find_runs(path: str | Path, depth: int = 3) -> list[Path]:
    """Run directories: ``path`` itself, or those in it down to ``depth`` folders, sorted by path.

    Raises:
        FileNotFoundError: there is no such directory.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"directory {path} does not exist")
    return list(_runs(path, depth))


def _runs(path: Path, depth: int) -> Iterator[Path]:
    if is_run(path):
        yield path
    elif depth > 0:
        for inner in sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")):
            yield from _runs(inner, depth - 1)


def read_run(path: str | Path) -> RunRecord:
    """Read a run directory as far as it can be read.

    Raises:
        FileNotFoundError: it is none.
    """
    path = Path(path)
    if not is_run(path):
        raise FileNotFoundError(f"{path} is not a run directory (it has none of {MANIFEST}, {METRICS} and {SETTINGS})")
    config, problem = None, None
    try:
        config = load_run_config(path / SETTINGS)
    except ConfigError as error:
        problem = " ".join(str(error).split())
    records, damaged = read_metrics(path / METRICS)
    name = (config.trainer.exp_name if config is not None else None) or _STAMP.sub("", path.resolve().name)
    return RunRecord(
        path=path,
        name=name,
        config=config,
        records=records,
        damaged=damaged,
        summary=_json_mapping(path / SUMMARY),
        problem=problem,
        resumed_from=_resumed_from(path / ENVIRONMENT),
    )


def read_metrics(path: Path) -> tuple[list[dict[str, float]], int]:
    """``(records, lines that could not be read)`` of a ``metrics.jsonl``; a file that does not exist has no records."""
    if not path.is_file():
        return [], 0
    records, damaged = [], 0
    for line in path.read_bytes().splitlines():
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:  # torn, or not even text
            damaged += 1
            continue
        if not isinstance(record, dict):
            damaged += 1
            continue
        records.append({name: float(value) for name, value in record.items() if _is_number(value)})
    return records, damaged


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _json_mapping(path: Path) -> dict[str, Any] | None:
    """What a JSON file holds, ``None`` where it holds no mapping or cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _resumed_from(path: Path) -> tuple[str, int] | None:
    source = (_json_mapping(path) or {}).get("resumed_from")
    if not isinstance(source, str):
        return None
    parts = re.split(r"[\\/]", source)  # written on whatever system
    step = re.search(r"_step_(\d+)\.", parts[-1])
    return None if len(parts) < 3 or step is None else (parts[-3], int(step[1]))
