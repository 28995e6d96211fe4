"""One APG update of ours as plain arrays, for the peers to repeat: what goes in, and what must come out. Needs numpy alone.

What goes in: ``x, v, a`` ``[N, 2]``, ``task`` ``[N, 8]`` (goal, two centres, two radii) and ``t`` ``[N]``, the state of every row at the start; ``noise``
``[T, N, 2]``; ``fresh_x`` and ``fresh_task`` ``[T, N, ...]``, from which row n starts again when it is done at step t; ``w1, b1 ... w3, b3`` (weights
``[out, in]``) and ``log_std``; ``mean, var`` of the normalizer; ``limit`` of the action adjoint. What must come out: ``gradient``, flat in the order of
:data:`PARAMETERS`, as it reaches Adam (adjoint clip, then global-norm clip), and ``objective``, the mean discounted return.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

PARAMETERS = ("w1", "w2", "w3", "b1", "b2", "b3", "log_std")
TOLERANCE = 1e-4  # relative: of the gradient in the 2-norm, and of the objective


def save(path: str, arrays: Mapping[str, Any]) -> None:
    np.savez(path, **{name: np.asarray(value) for name, value in arrays.items()})


def check(paths: Sequence[str], repeat: Callable[[dict[str, np.ndarray]], tuple[np.ndarray, float]]) -> dict[str, float]:
    """Put the cases through a peer and compare.

    Args:
        paths: files of :func:`save`.
        repeat: case -> (flat gradient as it reaches Adam, mean discounted return).

    Returns:
        ``gradient_difference`` and ``return_difference``, relative, the largest over the cases. Ends the process when one exceeds :data:`TOLERANCE`.
    """
    worst = {"gradient_difference": 0.0, "return_difference": 0.0}
    for path in paths:
        with np.load(path) as file:
            case = dict(file)
        gradient, objective = repeat(case)
        expected = case["gradient"].astype(np.float64)
        found = {
            "gradient_difference": np.linalg.norm(np.asarray(gradient, np.float64) - expected) / np.linalg.norm(expected),
            "return_difference": abs(float(objective) - float(case["objective"])) / abs(float(case["objective"])),
        }
        for name, difference in found.items():
            if not difference <= TOLERANCE:
                raise SystemExit(f"the two sides compute different numbers: {name} {difference:.3g}, at most {TOLERANCE:g} expected")
            worst[name] = max(worst[name], float(difference))
    return worst
