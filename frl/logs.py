"""Where numbers go while training: ``metrics.jsonl``, TensorBoard, Weights & Biases and a live line in the terminal."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from frl import compile as compiler


def require_wandb() -> Any:
    """The module of Weights & Biases; ``ImportError`` that says how to install it."""
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("trainer.use_wandb needs Weights & Biases: pip install 'frl[wandb]'") from error
    return wandb


class RunLog:
    """Writes scalar metrics of a run.

    Training does not depend on a log: what cannot be written (a full disk) is said once and given up, one back end at a time.

    Args:
        directory: run directory.
        name: experiment name, the folder below ``logs/``.
        wandb_project: log to Weights & Biases under this project when given.
        config: the whole run file, for Weights & Biases.
    """

    def __init__(self, directory: Path, name: str, *, wandb_project: str | None = None, config: Mapping[str, Any] | None = None) -> None:
        self._backends: list[_Backend] = [_Wandb(wandb_project, name, config)] if wandb_project else []
        self._backends += [_JsonLines(directory / "metrics.jsonl"), _TensorBoard(directory / "logs" / name)]

    def write(self, values: Mapping[str, float], step: int, *, timed: bool = True) -> None:
        """One record at an environment step; NaN and infinities become ``null`` in ``metrics.jsonl`` and are left out elsewhere.

        Args:
            values: scalars by name.
            step: environment steps.
            timed: ``metrics.jsonl`` has the seconds since the log began; false for a record of an earlier run.
        """
        for backend in list(self._backends):
            self._try(backend, lambda backend=backend: backend.write(values, step, timed))

    def close(self) -> None:
        """Flush and close everything."""
        for backend in self._backends:
            try:
                backend.close()
            except Exception as error:
                _given_up(backend, error)
        self._backends = []

    def _try(self, backend: _Backend, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # of the file system, of a service, or of a writer's own thread
            self._backends.remove(backend)
            _given_up(backend, error)
            with contextlib.suppress(Exception):
                backend.close()


def _given_up(backend: _Backend, error: Exception) -> None:
    warnings.warn(f"{backend.what} could not be written ({type(error).__name__}: {error}); training goes on without it", RuntimeWarning, stacklevel=3)


class _Backend(Protocol):
    what: str

    def write(self, values: Mapping[str, float], step: int, timed: bool) -> None: ...

    def close(self) -> None: ...


class _JsonLines:
    """One JSON object a line, there as soon as it is written."""

    def __init__(self, path: Path) -> None:
        self.what = str(path)
        self._started = time.perf_counter()
        self._file = path.open("a", encoding="utf-8")

    def write(self, values: Mapping[str, float], step: int, timed: bool) -> None:
        seconds = {"seconds": round(time.perf_counter() - self._started, 3)} if timed else {}
        record = {"global_step": step, **seconds, **{k: (v if math.isfinite(v) else None) for k, v in values.items()}}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _TensorBoard:
    """All scalars of a record in one event, written at once. TensorBoard's own writer has a thread that competes with the training for the interpreter, and
    its ``add_scalar`` makes an event of every scalar.
    """

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.what = str(directory)
        self._event, self._summary = Event, Summary
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{platform.node()}.{os.getpid()}.0"
        self._writer = RecordWriter((directory / name).open("ab"))
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, values: Mapping[str, float], step: int, timed: bool) -> None:
        summary = self._summary(value=[self._summary.Value(tag=k, simple_value=v) for k, v in values.items() if math.isfinite(v)])
        self._add(self._event(step=step, wall_time=time.time(), summary=summary))

    def close(self) -> None:
        self._writer.close()

    def _add(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()


class _Wandb:
    what = "Weights & Biases"

    def __init__(self, project: str, name: str, config: Mapping[str, Any] | None) -> None:
        self._run = require_wandb().init(project=project, name=name, config=dict(config or {}))

    def write(self, values: Mapping[str, float], step: int, timed: bool) -> None:
        self._run.log({k: v for k, v in values.items() if math.isfinite(v)}, step=step)

    def close(self) -> None:
        self._run.finish()


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
