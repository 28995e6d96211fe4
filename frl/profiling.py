"""``--profile``: a torch profiler trace of a few updates and the seconds of each part of the loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from frl.phases import Phases

TRACED_UPDATES = 3


class Profile:
    """A trace of three updates, or of those that there are, after the first ``after``; and ``phases``, which wait for the device so that each part is its own.

    Args:
        path: where the trace goes; it opens in Perfetto or ``chrome://tracing``.
        device: of the run.
        after: updates to let pass, those that compile.
    """

    def __init__(self, path: Path, device: torch.device, after: int) -> None:
        self._path, self._after, self._count = path, after, 0
        self._profiler: Any = None
        self._cuda = device.type == "cuda"
        self.phases = Phases((lambda: torch.cuda.synchronize(device)) if self._cuda else None, lambda name: torch.profiler.record_function(f"frl.{name}"))
        if after == 0:
            self._start()

    def step(self) -> None:
        """Call after every update."""
        self._count += 1
        if self._count == self._after:
            self._start()
        elif self._count == self._after + TRACED_UPDATES:
            self.close()

    def close(self) -> None:
        """Stop and write, if that has not been done."""
        if self._profiler is not None:
            self._profiler.stop()
            self.phases.traced = False
            self._profiler.export_chrome_trace(str(self._path))
            self._profiler = None

    def _start(self) -> None:
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as make

        self._profiler = make(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])])
        self.phases.traced = True
        self._profiler.start()
