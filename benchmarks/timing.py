"""What the benchmarks share: worker processes, alternating blocks, medians with their spread, and one JSON line for each result.

Whatever is compared runs in a process of its own: the number of threads is a property of a process, and Inductor bakes it into its kernels. A worker
warms up, says that it is ready, and then waits on a pipe. The parent asks one worker at a time for one block of work, in an order that turns round after every
round, so that a disturbance or a drift of the machine meets all of them alike and never two of them run at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


# -- the parent's side ---------------------------------------------------------------------------------------------------------------------------


class WorkerFailed(SystemExit):
    """A worker ended before its work was done; the message has its last words."""


class Worker:
    """A process that runs blocks of work on request.

    Args:
        arguments: script and its arguments. ``--started SECONDS`` is added: the moment of the start, as ``time.time()``, for :func:`serve`.
        threads: number of threads, set in the environment before the process starts.
        environment: more variables.
        python: the interpreter, this one by default.

    Attributes:
        ready: what the worker said when its warm-up was over.
        cpu_rates: of every block, per second of processor time [1/s].
    """

    def __init__(self, arguments: Sequence[str], threads: int, environment: Mapping[str, str] | None = None, python: str | None = None) -> None:
        variables = {**os.environ, **{name: str(threads) for name in THREAD_VARIABLES}, **(environment or {})}
        command = [python or sys.executable, *arguments, "--started", repr(time.time())]
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=variables)
        except OSError as error:
            raise WorkerFailed(f"{command[0]} cannot be started: {error.strerror}") from error
        self.ready = self._read()
        self.cpu_rates: list[float] = []

    def block(self) -> float:
        """Run one block and return its rate [1/s]."""
        with contextlib.suppress(BrokenPipeError):
            print("block", file=self._process.stdin, flush=True)
        done = self._read()
        self.cpu_rates.append(done["cpu_rate"])
        return done["rate"]

    def close(self) -> None:
        """End the worker; it may have ended already."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._errors.seek(0)
            words = self._errors.read()
            print(words, file=sys.stderr, end="")
            last = next((text.strip() for text in reversed(words.splitlines()) if text.strip()), "")
            raise WorkerFailed(f"exit status {status}: {last[-300:]}")
        return json.loads(line)


def compiler_cache(folder: Path) -> dict[str, str]:
    """Variables of a worker whose compilers find nothing but what is left in ``folder``, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TMPDIR": str(folder)}


def alternate(workers: Mapping[tuple[str, Any], Worker], rounds: int, failed: dict[str, str] | None = None) -> dict[Any, list[float]]:
    """``rounds`` blocks of every worker, one at a time, forwards and backwards in turn.

    Args:
        workers: by ``(side, arrangement)``.
        rounds: number of blocks.
        failed: where given, a worker that ends leaves its last words here under its side, and the others go on; otherwise it ends the process.

    Returns:
        ``{(side, arrangement): rates}`` of those that went through all rounds.
    """
    rates: dict[Any, list[float]] = {name: [] for name in workers}
    for i in range(rounds):
        for name in list(rates) if i % 2 == 0 else list(reversed(rates)):
            try:
                rates[name].append(workers[name].block())
            except WorkerFailed as error:
                if failed is None or name[0] == "frl":
                    raise
                failed[name[0]] = str(error)
                del rates[name]
    return rates


def compare(rates: Mapping[tuple[str, Any], Sequence[float]], unit: str, ours: str = "frl") -> tuple[dict[str, Any], dict[str, Any]]:
    """Each side by its best arrangement.

    Args:
        rates: ``{(side, arrangement): rates}``; an arrangement is pairs of name and value.
        unit: name of the rates in the result.
        ours: the side that the others are compared with.

    Returns:
        Medians, spreads, and ours over the others with the spread over the rounds; and the chosen key of each side.
    """
    chosen = {side: best({key: rates[key] for key in rates if key[0] == side}) for side, _ in rates}
    medians = {key: statistics.median(values) for key, values in rates.items()}
    mine = chosen[ours]
    others = {side: key for side, key in chosen.items() if side != ours}
    return {
        unit: {side: medians[key] for side, key in chosen.items()},
        "spread": {side: spread(rates[key]) for side, key in chosen.items()},
        "arrangement": {side: dict(arrangement) for side, arrangement in chosen.values()},
        "ratios": {side: medians[mine] / medians[key] for side, key in others.items()},
        "ratio_spreads": {side: spread([a / b for a, b in zip(rates[mine], rates[key], strict=True)]) for side, key in others.items()},
        "medians": {" ".join([side, *(f"{name}={value}" for name, value in how)]): median for (side, how), median in medians.items()},
        "rounds": len(rates[mine]),
    }, chosen


def spread(values: Sequence[float]) -> list[float]:
    """Smallest and largest."""
    return [min(values), max(values)]


def best(rates: Mapping[Any, Sequence[float]]) -> Any:
    """The name with the highest median."""
    return max(rates, key=lambda name: statistics.median(rates[name]))


# -- the worker's side ---------------------------------------------------------------------------------------------------------------------------


def serve(prepare: Callable[[], tuple[Callable[[], Any], int, dict[str, Any]]], seconds: float, settle: Callable[[Any], Any] | None = None) -> None:
    """Run as a worker until the parent closes the pipe.

    Args:
        prepare: does everything up to the end of the warm-up. Returns ``(call, amount, facts)``: a call does ``amount`` units of work.
        seconds: about how long a block takes.
        settle: waits for the result of the last call of a block, where calls only start the work.
    """
    channel = take_stdout()
    call, amount, facts = prepare()
    calls = max(2, round(seconds / _clock(call, 2, settle)[0]))
    print(json.dumps(facts), file=channel, flush=True)
    for _ in sys.stdin:
        _clock(call, 1, settle)  # the caches have been another worker's meanwhile
        wall, cpu = _clock(call, calls, settle)
        print(json.dumps({"rate": amount / wall, "cpu_rate": amount / cpu}), file=channel, flush=True)


def take_stdout() -> TextIO:
    """The pipe to the parent. Whatever a library prints goes to stderr from now on, not between the lines of the protocol."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return channel


def _clock(call: Callable[[], Any], calls: int, settle: Callable[[Any], Any] | None = None) -> tuple[float, float]:
    """Seconds per call, of the wall clock and of processor time over all threads."""
    start, busy = time.perf_counter(), time.process_time()
    result = None
    for _ in range(calls):
        result = call()
    if settle is not None:
        settle(result)
    return (time.perf_counter() - start) / calls, (time.process_time() - busy) / calls


# -- results -------------------------------------------------------------------------------------------------------------------------------------


def conditions(*packages: str) -> dict[str, Any]:
    """Where a figure comes from: versions, processor count and the load average of the last minute, to be read before the work starts."""
    versions = {}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "absent"
    return {"python": platform.python_version(), **versions, "cpu_count": os.cpu_count(), "loadavg": os.getloadavg()[0]}


def emit(row: Mapping[str, Any], out: str | None = None) -> None:
    """Print one JSON line, floats to 5 digits, and append it to the file ``out``."""
    line = json.dumps(_short(dict(row)))
    print(line, flush=True)
    if out:
        with open(out, "a", encoding="utf-8") as file:
            file.write(line + "\n")


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _short(x) for name, x in value.items()}
    return [_short(x) for x in value] if isinstance(value, (list, tuple)) else value
