"""Options that several commands share, with their checks: a wrong value is a wrong call."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterator
from typing import Any


def count(text: str) -> int:
    """A positive integer."""
    return _checked(text, int, lambda value: value >= 1, "a positive integer")


def seed(text: str) -> int:
    """An integer of at least 0."""
    return _checked(text, int, lambda value: value >= 0, "an integer of at least 0")


def positive(text: str) -> float:
    """A positive, finite number."""
    return _checked(text, float, lambda value: 0 < value < math.inf, "a positive number")


def _checked(text: str, kind: Any, good: Any, what: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not good(value):
        raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}")
    return value


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Which run, which parameters of it, and where to play them."""
    parser.add_argument("run", help="run directory, or a folder of runs, of which the newest is taken, or a checkpoint file")
    parser.add_argument("--checkpoint", default="latest", metavar="latest|best|FILE", help="parameters to use (default: latest)")
    parser.add_argument("--env", metavar="ID", help="another environment, such as gymnasium:CartPole-v1")
    parser.add_argument("--seed", type=seed, help="seed of the episodes (default: one that training has not used)")
    parser.add_argument("--max-steps", type=count, metavar="N", help="cap on steps, for an environment without a time limit")
    parser.add_argument("--stochastic", action="store_true", help="sample actions instead of taking the most probable one")
    parser.add_argument("--device", help="cpu, cuda, ... (default: the run's own)")


@contextlib.contextmanager
def threads(wanted: int | None) -> Iterator[None]:
    """The number of threads of a run, so that its compiled code can be used again."""
    import torch

    before = torch.get_num_threads()
    try:
        if wanted is not None:
            torch.set_num_threads(wanted)
        yield
    finally:
        torch.set_num_threads(before)
