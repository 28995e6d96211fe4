"""Checkpoints: one safetensors file with every tensor of the training state by key path and JSON metadata in its header.

Loading can never run code. A file is written beside its place, synced and renamed, so that a crash leaves the one before. Everything is compared before
anything is returned, and every mismatch is listed by key path.
"""

from __future__ import annotations

import json
import os
import secrets
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from frl import tree
from frl.types import PyTree

SCHEMA_VERSION = 1


class CheckpointError(ValueError):
    """A file that is missing, damaged, of another kind, or does not fit."""


def save_checkpoint(path: str | Path, state: PyTree, metadata: dict[str, Any]) -> Path:
    """Write ``state`` (a pytree of tensors) and JSON ``metadata`` to ``path`` atomically.

    Raises:
        ValueError: two leaves have one key path.
    """
    from safetensors.torch import save

    path = Path(path)
    twice = [name for name, count in Counter(name for name, _ in tree.items(state)).items() if count > 1]
    if twice:
        raise ValueError(f"two leaves of the state have the key path {twice[0]!r}")
    tensors = {name: x.detach().cpu().contiguous().clone() for name, x in tree.items(state) if isinstance(x, Tensor)}
    text = json.dumps({"schema_version": SCHEMA_VERSION, **metadata}, allow_nan=True)
    data = save(tensors, metadata={"frl": text})
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    # Unlike a file of tempfile's, readable as far as the umask allows.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def read_checkpoint(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """``({key path: tensor}, metadata)`` of a file.

    Raises:
        CheckpointError: the file is missing, is not a checkpoint of this package, or is damaged.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"checkpoint {path} does not exist")
    if path.suffix in (".pt", ".pth"):
        raise CheckpointError(f"{path} is a pickled checkpoint, which can run code when loaded and is not read; frl checkpoints end in .safetensors")
    try:
        with safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = json.loads(header["frl"])
        if not isinstance(metadata, dict):
            raise TypeError(f"the metadata is a {type(metadata).__name__}, not a mapping")
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or not a checkpoint of frl ({type(error).__name__}: {error})") from error
    version = metadata.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise CheckpointError(f"{path} has schema version {version!r}, this version reads {SCHEMA_VERSION}")
    return tensors, metadata


def restore(tensors: dict[str, Tensor], like: PyTree, *, what: str = "checkpoint") -> PyTree:
    """A tree of the structure of ``like`` with the tensors of a file.

    Raises:
        CheckpointError: lists every key path that is missing, unexpected, or of another shape or dtype.
    """
    expected = {name: x for name, x in tree.items(like) if isinstance(x, Tensor)}
    try:
        tree.check_same(dict(sorted(tensors.items())), dict(sorted(expected.items())), what)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    structure = tree.structure(like)
    # Into memory of the same layout and alignment as what was saved had: matrix products round by both, and a resumed run repeats every bit.
    return tree.unflatten(structure, [torch.empty_like(x).copy_(tensors[name]) if isinstance(x, Tensor) else x for name, x in tree.items(like)])


def device_of(like: PyTree) -> torch.device:
    """Device of the first tensor of a tree."""
    return next(x.device for x in tree.leaves(like) if isinstance(x, Tensor))
