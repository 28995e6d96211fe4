"""A run's first update without a compiler, so that one sees at once whether the run makes sense."""

from __future__ import annotations

from typing import Any

from frl.types import Algorithm, TrainState

MOST_STEPS = 2**17  # of an eager update: its gradient holds every step in memory, and takes a second or two


def eager_first_update(compiled: Algorithm, eager: Algorithm) -> Algorithm:
    """An algorithm that does the update of a state that has had none eagerly, and all others compiled.

    Which one an update is depends on its state alone and not on how long a compiler takes, so a run repeats bit for bit and resumes exactly.

    Args:
        compiled: the algorithm.
        eager: the same, built with ``compile_mode="eager"``.
    """

    def of(state: TrainState) -> Algorithm:
        return compiled if int(state.counters["updates"]) else eager

    def collect(state: TrainState) -> tuple[TrainState, Any]:
        return of(state).collect(state)

    def update(state: TrainState, rollout: Any) -> TrainState:
        return of(state).update(state, rollout)

    return Algorithm(init=compiled.init, collect=collect, update=update)
