"""Reading MuJoCo models: from a file, from text, from an object; what is wrong with one is said in one sentence."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from frl.envs.mujoco.engine import engine, require_mujoco, warnings_to


def load_model(source: Any) -> Any:
    """The ``mujoco.MjModel`` of an MJCF or URDF file, of a compiled ``.mjb`` file, of MJCF text, or of a ``mujoco.MjSpec``; a model passes as it is.

    Args:
        source: a path, or text whose first character is ``<``, or an object. A path is relative to the working directory, meshes in a file to the file.

    Raises:
        ModuleNotFoundError: MuJoCo is not installed.
        TypeError: another type.
        ValueError: the file does not exist, or MuJoCo refuses it; its own message, which names the line, is part of it. What it only warns of becomes a
            ``UserWarning``.
    """
    require_mujoco("a MuJoCo model")
    mujoco = engine()
    if isinstance(source, mujoco.MjModel):
        return source
    if isinstance(source, mujoco.MjSpec):
        return _compile(source.compile, "the MjSpec")
    if isinstance(source, str) and source.lstrip().startswith("<"):
        return _compile(lambda: mujoco.MjModel.from_xml_string(source), "the MJCF text")
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"a MuJoCo model is a path, MJCF text, a mujoco.MjSpec or a mujoco.MjModel, got {type(source).__name__}")
    path = Path(source).expanduser()
    if not path.is_file():
        raise ValueError(f"there is no MuJoCo model file {str(path)!r}" + (" (it is a directory)" if path.is_dir() else ""))
    read = mujoco.MjModel.from_binary_path if path.suffix == ".mjb" else mujoco.MjModel.from_xml_path
    return _compile(lambda: read(str(path)), repr(str(path)))


def gymnasium_model(name: str) -> Any:
    """A model that gymnasium ships, such as ``"hopper"``."""
    import gymnasium

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of old spellings in files that are not ours
        return load_model(Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets" / f"{name}.xml")


def _compile(read: Callable[[], Any], what: str) -> Any:
    said: list[str] = []
    try:
        with warnings_to(said.append):
            return read()
    except ValueError as error:
        raise ValueError(f"MuJoCo cannot read {what}: {' '.join(str(error).split())}") from error
    finally:
        for text in said:
            warnings.warn(f"MuJoCo on {what}: {' '.join(text.split())}", UserWarning, stacklevel=3)
