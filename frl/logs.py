"""Where numbers go while training: ``metrics.jsonl``, TensorBoard, Weights & Biases and a live line in the terminal."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from frl import compile as compiler


class RunLog:
    """Writes scalar metrics of a run; every back end is opened on first use.

    Args:
        directory: run directory; ``None`` writes nothing.
        name: experiment name, the folder below ``logs/``.
        wandb_project: log to Weights & Biases under this project when given.
        config: the whole run file, for Weights & Biases.
    """

    def __init__(self, directory: Path | None, name: str, *, wandb_project: str | None = None, config: Mapping[str, Any] | None = None) -> None:
        self._file = None
        self._writer = None
        self._wandb = None
        if directory is not None:
            from torch.utils.tensorboard import SummaryWriter

            directory.mkdir(parents=True, exist_ok=True)
            self._started = time.perf_counter()
            self._file = (directory / "metrics.jsonl").open("a", encoding="utf-8")
            self._writer = SummaryWriter(str(directory / "logs" / name))
        if wandb_project:
            try:
                import wandb  # pyright: ignore[reportMissingImports]
            except ImportError as error:
                raise ImportError("trainer.use_wandb needs Weights & Biases: pip install 'frl[wandb]'") from error
            self._wandb = wandb.init(project=wandb_project, name=name, config=dict(config or {}))

    def write(self, values: Mapping[str, float], step: int) -> None:
        """One record; NaN and infinities become ``null`` in the file and are left out of TensorBoard. The file also has the seconds since the log began."""
        if self._file is not None:
            seconds = round(time.perf_counter() - self._started, 3)
            record = {"global_step": step, "seconds": seconds, **{k: (v if math.isfinite(v) else None) for k, v in values.items()}}
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        finite = {k: v for k, v in values.items() if math.isfinite(v)}
        if self._writer is not None:
            for name, value in finite.items():
                self._writer.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(finite, step=step)

    def close(self) -> None:
        """Flush and close everything."""
        if self._file is not None:
            self._file.close()
        if self._writer is not None:
            self._writer.close()
        if self._wandb is not None:
            self._wandb.finish()


class Progress:
    """A live line: share done, return, success, steady steps per second, and compile seconds apart."""

    def __init__(self, total: int, *, enabled: bool = True) -> None:
        self._total = total
        self._enabled = enabled
        self._bar: Any = None
        self._task: Any = None
        self._shown = 0.0
        self._values: dict[str, str] = {}

    def __enter__(self) -> Progress:
        if self._enabled:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            console = Console(stderr=True)
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[text]}"), TimeElapsedColumn())
            self._bar = Bar(*columns, console=console, refresh_per_second=4, disable=not console.is_terminal)
            self._bar.start()
            self._task = self._bar.add_task("compiling", total=self._total, text="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, steps: int, values: Mapping[str, str]) -> None:
        """Show progress; redraws at most ten times a second."""
        self._values.update(values)
        now = time.monotonic()
        if self._bar is None or (now - self._shown < 0.1 and steps < self._total):
            return
        self._shown = now
        text = "  ".join(f"{k} {v}" for k, v in {**self._values, "compiled": f"{compiler.compile_seconds():.0f} s"}.items())
        self._bar.update(self._task, completed=steps, description="training", text=text)
