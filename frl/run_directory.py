"""The directory of a run: its paths, its manifest, and the checkpoint that a user means by ``latest`` or ``best``.

``run-manifest.json`` names the latest and the best checkpoint and, newest first, every one that is kept, with its checksum: a file that was exchanged for
another is found, and when the newest is lost the one before is known.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from frl.atomic import sync_directory, write_atomically
from frl.checkpoint import CheckpointError

MANIFEST = "run-manifest.json"
MANIFEST_VERSION = 1
POPULATION = "population.json"  # of a directory of members: their ranking


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
        sync_directory(path.parent)
        return cls(path, name)

    def checkpoint(self, kind: str, step: int) -> Path:
        """The file of a checkpoint: ``kind`` is ``"best"``, ``"periodic"`` or ``"last"``, ``step`` the environment steps."""
        infix = "best_step" if kind == "best" else "step"
        return self.path / "checkpoints" / f"{self.name}_{infix}_{step}.safetensors"


@dataclass(frozen=True)
class SavedFile:
    """A checkpoint file that a manifest knows."""

    path: str  # relative to the run directory, with forward slashes
    global_step: int
    num_updates: int
    sha256: str  # the checksum that the file carries


def write_manifest(directory: Path, latest: SavedFile | None, best: SavedFile | None, kept: Sequence[SavedFile]) -> None:
    """Replace the manifest; ``kept`` is newest first."""
    files = {"best": best.path if best else None, "latest": latest.path if latest else None}
    listed = [dataclasses.asdict(file) for file in kept]
    content = {"schema_version": MANIFEST_VERSION, "configs": {"train": "configs/train.yaml"}, "checkpoints": files, "kept": listed}
    write_json(directory / MANIFEST, content)


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file as a whole; numbers that are not finite become ``null``."""
    write_atomically(path, (json.dumps(_json(value), indent=2) + "\n").encode())


def _json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


@dataclass(frozen=True)
class Candidate:
    """A checkpoint to resume from."""

    path: Path
    sha256: str | None = None  # what the manifest says of the file; None where no manifest knows it


def resume_candidates(resume: str | Path | None, run: str | Path | None) -> tuple[Candidate, ...]:
    """The checkpoints that ``resume`` and ``run`` name, in the order of preference: for ``"latest"`` those before the newest follow it.

    Args:
        resume: a file, or ``"latest"`` or ``"best"`` of the run directory ``run``.
        run: a run directory.

    Returns:
        Empty when ``resume`` is ``None``. Files may be missing or damaged.

    Raises:
        ValueError: a combination that means nothing.
        FileNotFoundError: the run directory or its manifest is missing, or the manifest names no such checkpoint.
        CheckpointError: the manifest is damaged, of another version, or names a file outside the run directory.
    """
    if resume is None:
        if run is not None:
            raise ValueError("run names a directory to resume from and needs resume='latest' or resume='best'")
        return ()
    if str(resume) not in ("latest", "best"):
        if run is not None:
            raise ValueError("give resume as a file, or as 'latest' or 'best' together with run, not a file and run")
        return (_candidate(Path(resume)),)
    if run is None:
        raise ValueError(f"resume={str(resume)!r} needs run, the directory of the run to resume")
    manifest = Path(run) / MANIFEST
    if not manifest.is_file():
        raise FileNotFoundError(f"{manifest} does not exist, so {run} is not a run directory")
    content = _read_manifest(manifest)
    files = content.get("checkpoints")
    entry = files.get(str(resume)) if isinstance(files, dict) else None
    if not entry:
        raise FileNotFoundError(f"{manifest} names no {resume} checkpoint")
    known = _kept(manifest, content)
    names = [_inside(manifest, entry), *(known if resume == "latest" else ())]
    return tuple(Candidate(Path(run) / name, known.get(name)) for name in dict.fromkeys(names))


def resolve_resume(resume: str | Path | None, run: str | Path | None) -> Path | None:
    """The file that ``resume`` and ``run`` name, ``None`` without any; arguments and errors of :func:`resume_candidates`, and ``FileNotFoundError`` for a
    file that is missing.
    """
    for candidate in resume_candidates(resume, run):
        if not candidate.path.is_file():
            raise FileNotFoundError(f"checkpoint {candidate.path} does not exist")
        return candidate.path
    return None


def _candidate(path: Path) -> Candidate:
    """A file given by its path, with what the manifest of its run says of it."""
    manifest = path.parent.parent / MANIFEST
    try:
        known = _kept(manifest, _read_manifest(manifest)) if manifest.is_file() else {}
    except CheckpointError:
        known = {}  # the file was asked for by name and speaks for itself
    return Candidate(path, known.get(f"{path.parent.name}/{path.name}"))


def _read_manifest(manifest: Path) -> dict[str, Any]:
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{manifest} is damaged ({error}); name a file in {manifest.parent / 'checkpoints'} instead") from error
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != MANIFEST_VERSION or isinstance(version, bool):
        raise CheckpointError(f"{manifest} has schema version {version!r}, this version reads {MANIFEST_VERSION}")
    return content


def _kept(manifest: Path, content: Mapping[str, Any]) -> dict[str, str]:
    """``{relative path: checksum}``, newest first."""
    listed = content.get("kept", [])
    try:
        return {_inside(manifest, file["path"]): str(file["sha256"]) for file in listed}
    except (TypeError, KeyError) as error:
        raise CheckpointError(f"{manifest} is damaged (its list of checkpoints cannot be read)") from error


def _inside(manifest: Path, entry: Any) -> str:
    """A path that stays inside the run directory; it may have been written on another system."""
    systems = (PurePosixPath, PureWindowsPath)
    if not isinstance(entry, str) or any(make(entry).anchor or ".." in make(entry).parts for make in systems):
        raise CheckpointError(f"{manifest} names the checkpoint {entry!r}, expected a path inside the run directory")
    return entry
