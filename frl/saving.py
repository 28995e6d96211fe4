"""Saving a run behind its loop: the state is copied at once, and written, synced, named in the manifest and cleared of old files in a thread.

In this order, so that a crash at any instant leaves a manifest whose files are whole: the new checkpoint, then the manifest that names it, then the removal of
what that manifest no longer names.
"""

from __future__ import annotations

import contextlib
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from frl import tree
from frl.atomic import write_atomically
from frl.checkpoint import CheckpointError, checkpoint_digest, encode_checkpoint
from frl.history import PackedHistory
from frl.run_directory import RunDirectory, SavedFile, write_manifest
from frl.train import LoopState
from frl.types import PyTree, TrainState

LOOP_FIELDS = ("global_step", "num_updates", "best_eval_value", "best_global_step", "last_eval_metrics")
HISTORIES = ("train_history", "eval_history")


class Saver:
    """The checkpoints of one run.

    Args:
        directory: the run directory.
        keep: files to keep beside the best one, the newest; ``None`` keeps all.
        metadata: what every checkpoint says of its run: ``config``, ``schedule``, ``environment``, ``fingerprint``.
    """

    def __init__(self, directory: RunDirectory, keep: int | None, metadata: dict[str, Any]) -> None:
        self._directory, self._keep, self._metadata = directory, keep, metadata
        self._histories = {name: PackedHistory() for name in HISTORIES}
        self._files: list[SavedFile] = []  # newest first
        self._best: SavedFile | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="frl-save")
        self._pending: tuple[Path, Future[None]] | None = None
        self.failures = 0

    @property
    def latest(self) -> Path | None:
        """The newest file that the manifest names."""
        return self._directory.path / self._files[0].path if self._files else None

    @property
    def best(self) -> Path | None:
        """The file of the best state."""
        return self._directory.path / self._best.path if self._best else None

    def save(self, state: TrainState, loop: LoopState, kind: str) -> None:
        """Copy a state and begin to write it; ``kind`` is ``"best"``, ``"periodic"`` or ``"last"``.

        A save that fails is said and training goes on with the files before: the next save may succeed.
        """
        self.settle()
        self._begin(state, loop, kind)

    def save_last(self, state: TrainState, loop: LoopState) -> None:
        """Save the state with which the run ends, unless its last update has been saved, and wait for it.

        Raises:
            CheckpointError: it could not be written; the files before are as they were.
        """
        self.settle()
        if self._files and self._files[0].num_updates == loop.num_updates:
            return
        path = self._begin(state, loop, "last")
        error = self._finished()
        if error is not None:
            self.failures += 1
            before = f"; {self.latest} is the newest checkpoint" if self.latest else ""
            raise CheckpointError(f"the last state could not be saved to {path} ({_reason(error)}){before}") from error

    def poll(self) -> None:
        """Say what has failed meanwhile, without waiting."""
        if self._pending is not None and self._pending[1].done():
            self.settle()

    def settle(self) -> None:
        """Wait for the file that is being written, and say if it could not be."""
        path = self._pending[0] if self._pending else None
        error = self._finished()
        if error is not None:
            self.failures += 1
            before = f"{self.latest} is still the newest checkpoint" if self.latest else "there is no earlier checkpoint"
            warnings.warn(f"{path} could not be saved ({_reason(error)}); training goes on, and {before}", RuntimeWarning, stacklevel=3)

    def close(self) -> None:
        """Wait for the file that is being written and end the thread."""
        self.settle()
        self._thread.shutdown()

    def _begin(self, state: TrainState, loop: LoopState, kind: str) -> Path:
        path = self._directory.checkpoint(kind, loop.global_step)
        packed = {name: self._histories[name].follow(getattr(loop, name)) for name in HISTORIES}
        kept = {**{name: getattr(loop, name) for name in LOOP_FIELDS}, **{name: layout for name, (_, layout) in packed.items()}}
        # One tree: the leaves of the state by their own names, the histories below ``loop``.
        whole = {**state._asdict(), "loop": {name: values for name, (values, _) in packed.items()}}
        whole = tree.map(lambda x: x.detach().to("cpu", copy=True) if isinstance(x, Tensor) else x, whole)
        self._pending = path, self._thread.submit(self._write, path, whole, {"loop": kept, **self._metadata}, kind == "best")
        return path

    def _finished(self) -> OSError | None:
        """Wait; the error of the file system, if there was one."""
        if self._pending is None:
            return None
        _, future = self._pending
        self._pending = None
        try:
            future.result()
        except OSError as error:
            return error
        return None

    def _write(self, path: Path, whole: PyTree, metadata: dict[str, Any], is_best: bool) -> None:
        data = encode_checkpoint(whole, metadata)
        loop = metadata["loop"]
        file = SavedFile(path.relative_to(self._directory.path).as_posix(), loop["global_step"], loop["num_updates"], checkpoint_digest(data))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
        files, best = [file, *self._files], file if is_best else self._best
        kept = [one for i, one in enumerate(files) if self._keep is None or i < self._keep or one == best]
        try:
            write_manifest(self._directory.path, file, best, kept)
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        dropped = [one for one in files if one not in kept]
        self._files, self._best = kept, best
        for one in dropped:
            with contextlib.suppress(OSError):  # the manifest has forgotten it
                (self._directory.path / one.path).unlink(missing_ok=True)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
