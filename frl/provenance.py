"""Where a run took place: versions, device, threads and the commit of the code, which decide whether a resumed run has the same bits."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("frl", "torch", "numpy", "optree", "tensordict", "gymnasium", "safetensors")
COMPARED = ("frl", "frl_commit", "torch", "machine", "cpu", "device", "threads", "compile_mode")


def environment_record(device: torch.device, compile_mode: str) -> dict[str, Any]:
    """Versions, device, threads and commits. ``commit`` is that of the working directory, ``frl_commit`` that of a checkout of this package; ``-dirty`` behind
    one says that tracked files differ from it, ``None`` that there is no repository.
    """
    return {
        "device": f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device),
        "compile_mode": compile_mode,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cpu_count": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "commit": _commit(Path.cwd()),
        "frl_commit": _commit(Path(__file__).parent, tracks=Path(__file__).name),
        "created_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def moved(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two records and may change bits: ``name 'before' -> 'now'``."""
    return [f"{name} {before.get(name)!r} -> {now[name]!r}" for name in COMPARED if before.get(name) != now[name]]


def _version(name: str) -> str | None:
    if name == "torch":
        return torch.__version__  # with the build, which the package's metadata may leave out
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@functools.cache  # the code that a process has read does not change with the checkout
def _commit(directory: Path, tracks: str | None = None) -> str | None:
    """The commit that is checked out in ``directory``; ``None`` outside a repository, or in one that does not have the file ``tracks``."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(directory), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False, env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"})
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if tracks is not None and git("ls-files", "--error-unmatch", tracks) is None:
        return None  # an installed copy below somebody else's repository
    return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
