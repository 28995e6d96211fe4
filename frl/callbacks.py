"""Watching a training run: functions that are shown the immutable state, after updates or after evaluations, at intervals.

A callback observes. The containers it is given are copies, and a tensor changed in place is an error that names it: the state belongs to the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from frl import tree
from frl.evaluate import EvaluationResult
from frl.types import TrainState
from frl.validate import require_choice, require_count

KINDS = ("update", "evaluation")


@dataclass(frozen=True, kw_only=True)
class Event:
    """What a callback is shown.

    Attributes:
        kind: ``"update"`` or ``"evaluation"``.
        state: the training state after the update.
        metrics: of the update, by the names of the records (``train/loss``, ``charts/SPS``, ...), or of the evaluation.
        global_step, num_updates: environment steps and updates so far.
        result: every episode of the evaluation; ``None`` after an update.
    """

    kind: str
    state: TrainState
    metrics: dict[str, float]
    global_step: int
    num_updates: int
    result: EvaluationResult | None = None


@dataclass(frozen=True, kw_only=True)
class Callback:
    """A function and when it is called.

    Attributes:
        function: takes an :class:`Event`; what it returns is not used, what it raises ends the run.
        on: ``"update"`` or ``"evaluation"``.
        every: every so many updates of the run, or evaluations of this process.
        every_steps: instead, whenever the environment steps have passed another multiple of it.

    Example:
        >>> Callback(function=lambda event: print(event.num_updates), every=100)  # doctest: +ELLIPSIS
        Callback(function=..., on='update', every=100, every_steps=None)
    """

    function: Callable[[Event], Any]
    on: str = "update"
    every: int = 1
    every_steps: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(f"function of a callback must be callable, got {self.function!r}")
        require_choice("on", self.on, KINDS)
        require_count("every", self.every)
        if self.every_steps is not None:
            require_count("every_steps", self.every_steps)
            if self.every != 1:
                raise ValueError(f"give every or every_steps of a callback, not both, got {self.every} and {self.every_steps}")


Callbacks: TypeAlias = Sequence["Callback | Callable[[Event], Any]"]


def as_callbacks(callbacks: Iterable[Callback | Callable[[Event], Any]]) -> tuple[Callback, ...]:
    """Callbacks, of which a plain function is one that is called after every update; ``ValueError`` for what is neither."""
    return tuple(one if isinstance(one, Callback) else Callback(function=one) for one in callbacks)


class Watchers:
    """The callbacks of one run.

    Args:
        callbacks: what to call.
    """

    def __init__(self, callbacks: Iterable[Callback | Callable[[Event], Any]] = ()) -> None:
        self._callbacks = as_callbacks(callbacks)
        self._evaluations = 0

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def show(self, before: int, event: Event) -> None:
        """Call those that are due at an event whose update began after ``before`` environment steps."""
        self._evaluations += event.kind == "evaluation"
        number = event.num_updates if event.kind == "update" else self._evaluations
        for callback in self._callbacks:
            steps = callback.every_steps
            due = number % callback.every == 0 if steps is None else event.global_step // steps > before // steps
            if callback.on == event.kind and due:
                _observed(callback.function, event)


def _observed(function: Callable[[Event], Any], event: Event) -> None:
    """Call ``function``; ``RuntimeError`` if it changed a tensor of the state in place."""
    before = _versions(event.state)
    copy = tree.map(lambda x: x, event.state)
    function(Event(**{**event.__dict__, "state": copy, "metrics": dict(event.metrics)}))
    after = _versions(event.state)
    if before != after:
        changed = [name for (name, _), a, b in zip(tree.items(event.state), before, after, strict=True) if a != b]
        name = getattr(function, "__qualname__", repr(function))
        raise RuntimeError(f"the callback {name} changed the training state in place: {', '.join(changed)}; a callback observes, so clone before changing")


def _versions(state: TrainState) -> list[int]:
    """How often each leaf was changed in place."""
    return [x._version if isinstance(x, Tensor) and not x.is_inference() else 0 for x in tree.leaves(state)]
