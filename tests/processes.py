"""Processes to kill: each is forked from a server that has done the imports and nothing else, so that a start costs little."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["frl.run", "frl.cli", "tests.tiny_runs"])
PATIENCE = 120.0  # seconds to wait for what takes one; only a failure takes longer


def start(target: Callable[..., None], *args: Any) -> BaseProcess:
    """A running process with one thread and the signal handlers of a fresh interpreter."""
    process = CONTEXT.Process(target=_clean, args=(target, args))
    process.start()
    return process


def _clean(target: Callable[..., None], args: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    target(*args)


def kill(process: BaseProcess) -> None:
    """SIGKILL, and wait for the end."""
    if process.pid is not None and process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    process.join(PATIENCE)


def send(process: BaseProcess, number: int) -> None:
    """A signal."""
    assert process.pid is not None
    os.kill(process.pid, number)


def ended(process: BaseProcess) -> int:
    """The exit code of a process that is expected to end by itself."""
    process.join(PATIENCE)
    if process.exitcode is None:
        process.kill()
        raise AssertionError("the process does not end")
    return process.exitcode


def wait_for(condition: Callable[[], Any], process: BaseProcess | None = None) -> Any:
    """The first true value of ``condition``."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        value = condition()
        if value:
            return value
        assert process is None or process.is_alive(), f"the process ended with {process.exitcode}"
        time.sleep(0.005)
    raise AssertionError("nothing happened")


def train_in_process(config: Mapping[str, Any], options: Mapping[str, Any], answer: str) -> None:
    """Target: train a run file and write the summary, or the error, to the file ``answer``."""
    from frl.config import parse_run_config
    from frl.run import train_from_config

    try:
        result: dict[str, Any] = train_from_config(parse_run_config(config), **options)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    Path(answer).write_text(json.dumps(result), encoding="utf-8")
