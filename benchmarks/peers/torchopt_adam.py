"""torchopt's functional Adam with a global-norm clip as a worker of benchmarks/optimizer.py; runs in the environment that ``peers/setup torchopt`` makes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
import timing
from optimizer import LEARNING_RATE, MAX_GRAD_NORM, STEPS, numbers, tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("10k", "20M"), default="10k")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--accelerated", action="store_true", help="its operation in C++")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--started", type=float, required=True)
    args = parser.parse_args()
    timing.serve(lambda: prepare(args), seconds=args.seconds)


def prepare(args: argparse.Namespace) -> tuple[Callable[[], Any], int, dict[str, Any]]:
    import torch
    import torchopt

    torch.set_num_threads(args.threads)
    params, grads = (tuple(values) for values in tensors(args.size))
    optimizer = torchopt.chain(torchopt.clip_grad_norm(MAX_GRAD_NORM), torchopt.adam(lr=LEARNING_RATE, use_accelerated_op=args.accelerated))
    state = optimizer.init(params)

    def call() -> None:
        nonlocal params, state
        updates, state = optimizer.update(grads, state, params=params, inplace=False)
        params = torchopt.apply_updates(params, updates, inplace=False)

    for _ in range(STEPS):
        call()
    return call, 1, {"numbers": numbers(params)}


if __name__ == "__main__":
    main()
