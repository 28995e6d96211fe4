"""Checkpoints: one safetensors file with every tensor of the training state by key path, JSON metadata in its header and a checksum of the whole.

Loading can never run code. A file is replaced as a whole (:mod:`frl.atomic`), so that a crash leaves the one before; its SHA-256 covers every byte, so that a
flipped one is found. Everything is compared before anything is returned, and every mismatch is listed by key path.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from frl import tree
from frl.atomic import write_atomically
from frl.types import PyTree

SCHEMA_VERSION = 2
_BLANK = "0" * 64  # stands where the checksum goes while it is computed
_DIGEST = b'"sha256":"'  # in the header; inside the JSON text of the metadata a quotation mark is escaped


class CheckpointError(ValueError):
    """A file that is missing, damaged, of another kind, or does not fit."""


def save_checkpoint(path: str | Path, state: PyTree, metadata: dict[str, Any]) -> Path:
    """Write ``state`` (a pytree of tensors) and JSON ``metadata`` to ``path`` atomically.

    Raises:
        ValueError: two leaves have one key path.
        OSError: it could not be written; a file that was there before is as it was.
    """
    path = Path(path)
    data = encode_checkpoint(state, metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data)
    return path


def encode_checkpoint(state: PyTree, metadata: dict[str, Any]) -> bytes:
    """The bytes of a checkpoint file; :func:`checkpoint_digest` gives their checksum.

    Raises:
        ValueError: two leaves have one key path.
    """
    from safetensors.torch import save

    twice = [name for name, count in Counter(name for name, _ in tree.items(state)).items() if count > 1]
    if twice:
        raise ValueError(f"two leaves of the state have the key path {twice[0]!r}")
    # Leaves of their own: safetensors refuses two tensors in one memory.
    tensors = {name: x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for name, x in tree.items(state) if isinstance(x, Tensor)}
    text = json.dumps({"schema_version": SCHEMA_VERSION, **metadata}, allow_nan=True)
    data = save(tensors, metadata={"frl": text, "sha256": _BLANK})
    start = _digest_start(data)
    return data[:start] + _computed(data, start).encode() + data[start + len(_BLANK) :]


def checkpoint_digest(data: bytes) -> str:
    """The checksum that a checkpoint file carries, in hexadecimal; what it says of the file itself is not compared."""
    start = _digest_start(data)
    return data[start : start + len(_BLANK)].decode()


def read_checkpoint(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """``({key path: tensor}, metadata)`` of a file.

    Raises:
        CheckpointError: the file is missing, is not a checkpoint of this package, or is damaged.
    """
    tensors, metadata, _ = read_sealed(path)
    return tensors, metadata


def read_sealed(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """``({key path: tensor}, metadata, checksum)`` of a file; errors of :func:`read_checkpoint`."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"checkpoint {path} does not exist")
    if path.suffix in (".pt", ".pth"):
        raise CheckpointError(f"{path} is a pickled checkpoint, which can run code when loaded and is not read; frl checkpoints end in .safetensors")
    try:
        data = path.read_bytes()
        metadata = json.loads(json.loads(_header(data))["__metadata__"]["frl"])
        if not isinstance(metadata, dict):
            raise TypeError(f"the metadata is a {type(metadata).__name__}, not a mapping")
        version = metadata.get("schema_version")
        if version != SCHEMA_VERSION or isinstance(version, bool):
            raise CheckpointError(f"{path} has schema version {version!r}, this version reads {SCHEMA_VERSION}")
        start = _digest_start(data)
        digest = checkpoint_digest(data)
        if digest != _computed(data, start):
            raise ValueError("its content does not have the checksum that it carries")
        tensors = load(data)
    except CheckpointError:
        raise
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or not a checkpoint of frl ({type(error).__name__}: {error})") from error
    return tensors, metadata, digest


def _header(data: bytes) -> bytes:
    """The JSON text at the head of a safetensors file."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise ValueError("it ends inside its header")
    return data[8 : 8 + size]


def _digest_start(data: bytes) -> int:
    """Where the checksum stands."""
    place = _header(data).find(_DIGEST)
    if place < 0:
        raise ValueError("it carries no checksum")
    return 8 + place + len(_DIGEST)


def _computed(data: bytes, start: int) -> str:
    """SHA-256 of a file with zeros in the place of the checksum."""
    view = memoryview(data)
    digest = hashlib.sha256(view[:start])
    digest.update(_BLANK.encode())
    digest.update(view[start + len(_BLANK) :])
    return digest.hexdigest()


def restore(tensors: dict[str, Tensor], like: PyTree, *, what: str = "checkpoint") -> PyTree:
    """A tree of the structure of ``like`` with the tensors of a file.

    Raises:
        CheckpointError: lists every key path that is missing, unexpected, or of another shape or dtype.
    """
    problems = mismatches(tensors, like)
    if problems:
        raise CheckpointError("\n  ".join([f"{what} does not match:", *problems]))
    structure = tree.structure(like)
    # Into memory of the same layout and alignment as what was saved had: matrix products round by both, and a resumed run repeats every bit.
    return tree.unflatten(structure, [torch.empty_like(x).copy_(tensors[name]) if isinstance(x, Tensor) else x for name, x in tree.items(like)])


def mismatches(tensors: dict[str, Tensor], like: PyTree) -> list[str]:
    """Why the tensors of a file cannot take the place of ``like``, one line for each key path; empty when they can."""
    expected = {name: x for name, x in tree.items(like) if isinstance(x, Tensor)}
    return tree.differences(dict(sorted(tensors.items())), dict(sorted(expected.items())))
