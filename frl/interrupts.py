"""Ctrl-C and SIGTERM while training: the first asks the run to stop after its update and save, the second ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = b"\x1b[?25h"


class Interrupted(KeyboardInterrupt):
    """A run was asked to stop by a signal and has saved its state.

    Attributes:
        signum: the signal.
        summary: what ``summary.json`` holds; its ``run_directory`` can be resumed from.
    """

    def __init__(self, signum: int, summary: dict[str, Any]) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name} after update {summary['num_updates']}; saved in {summary['run_directory']}")
        self.signum, self.summary = signum, summary

    @property
    def exit_code(self) -> int:
        """What a shell would report of a process that the signal ended: 130 or 143."""
        return 128 + self.signum


class Interrupts:
    """While entered, ``received`` is the first signal that came. Outside the main thread, where Python takes no signals, it does nothing.

    A signal that the process was told to ignore (``nohup``, a job in the background) stays ignored.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        """Whether the run was asked to stop."""
        return self.received is not None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before = signal.getsignal(number)
                if before not in (signal.SIG_IGN, None):
                    self._before[number] = before
                    signal.signal(number, self._first)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}

    def _first(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        for other in self._before:
            signal.signal(other, signal.SIG_DFL)  # in C: also in the middle of a long call, where Python would not look
        # Neither print, which may be what was interrupted, nor the live line, which hides the cursor until it ends.
        cursor = _SHOW_CURSOR if os.isatty(2) else b""
        os.write(2, cursor + b"\nfrl: stopping after this update and saving; once more ends at once\n")
