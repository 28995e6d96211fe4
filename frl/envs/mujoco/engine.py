"""MuJoCo itself, imported when it is needed: the only door to the optional package."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any


def installed() -> bool:
    """Whether MuJoCo is there."""
    return importlib.util.find_spec("mujoco") is not None


def require_mujoco(what: str) -> None:
    """``ModuleNotFoundError`` with the command that installs it, unless MuJoCo is there."""
    if not installed():
        raise ModuleNotFoundError(f"{what} needs MuJoCo, which is not installed; install it with: pip install 'frl[mujoco]'")


def engine() -> Any:
    """The module ``mujoco``."""
    return importlib.import_module("mujoco")


def rollout() -> Any:
    """The module ``mujoco.rollout``."""
    return importlib.import_module("mujoco.rollout")


@contextlib.contextmanager
def warnings_to(handler: Callable[[str], Any]) -> Iterator[None]:
    """Give MuJoCo's warnings to ``handler``. By itself MuJoCo writes each into a log file in the working directory. A handler that is there already stays."""
    mujoco = engine()
    if mujoco.get_mju_user_warning() is not None:
        yield
        return
    mujoco.set_mju_user_warning(handler)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(None)
