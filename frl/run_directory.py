"""The directory of a run: its paths, its manifest, the record of the machine, and the checkpoint that a user means by ``latest`` or ``best``."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch

from frl.checkpoint import CheckpointError

MANIFEST = "run-manifest.json"
MANIFEST_VERSION = 1


@dataclass(frozen=True)
class RunDirectory:
    """Paths of a run."""

    path: Path
    name: str

    @classmethod
    def create(cls, output_dir: str | Path, name: str) -> RunDirectory:
        """A new directory, named by experiment and time."""
        now = time.time_ns()
        stamp = datetime.fromtimestamp(now // 10**9).strftime("%Y%m%d_%H%M%S")
        path = Path(output_dir) / f"{name}_{stamp}_{now % 10**9:09d}"
        path.mkdir(parents=True, exist_ok=False)
        return cls(path, name)

    def checkpoint(self, kind: str, step: int) -> Path:
        """The file of a checkpoint: ``kind`` is ``"best"``, ``"periodic"`` or ``"last"``, ``step`` the environment steps."""
        infix = "best_step" if kind == "best" else "step"
        return self.path / "checkpoints" / f"{self.name}_{infix}_{step}.safetensors"


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file as a whole; numbers that are not finite become ``null``."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(_json(value), indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def environment_record(device: torch.device, compile_mode: str) -> dict[str, Any]:
    """Device, versions and threads, which decide whether a resumed run has the same bits."""
    return {
        "device": f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device),
        "compile_mode": compile_mode,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu_count": os.cpu_count(),
        "machine": platform.machine(),
        "created_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def resolve_resume(resume: str | Path | None, run: str | Path | None) -> Path | None:
    """The checkpoint that ``resume`` and ``run`` name.

    Args:
        resume: a file, or ``"latest"`` or ``"best"`` of the run directory ``run``.
        run: a run directory.

    Raises:
        ValueError: a combination that means nothing.
        FileNotFoundError: the run directory, its manifest or the checkpoint is missing.
        CheckpointError: the manifest is damaged, of another version, or names a file outside the run directory.
    """
    if resume is None:
        if run is not None:
            raise ValueError("run names a directory to resume from and needs resume='latest' or resume='best'")
        return None
    if str(resume) in ("latest", "best"):
        if run is None:
            raise ValueError(f"resume={str(resume)!r} needs run, the directory of the run to resume")
        manifest = Path(run) / MANIFEST
        if not manifest.is_file():
            raise FileNotFoundError(f"{manifest} does not exist, so {run} is not a run directory")
        path = Path(run) / _manifest_entry(manifest, str(resume))
    else:
        if run is not None:
            raise ValueError("give resume as a file, or as 'latest' or 'best' together with run, not a file and run")
        path = Path(resume)
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint {path} does not exist")
    return path


def _manifest_entry(manifest: Path, kind: str) -> str:
    """Relative path of the ``"latest"`` or ``"best"`` checkpoint."""
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{manifest} is damaged ({error})") from error
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != MANIFEST_VERSION or isinstance(version, bool):
        raise CheckpointError(f"{manifest} has schema version {version!r}, this version reads {MANIFEST_VERSION}")
    files = content.get("checkpoints")
    entry = files.get(kind) if isinstance(files, dict) else None
    if not entry:
        raise FileNotFoundError(f"{manifest} names no {kind} checkpoint")
    systems = (PurePosixPath, PureWindowsPath)  # a directory may have come from the other
    if not isinstance(entry, str) or any(make(entry).anchor or ".." in make(entry).parts for make in systems):
        raise CheckpointError(f"{manifest} names the checkpoint {entry!r}, expected a path inside the run directory")
    return entry
