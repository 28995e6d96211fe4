"""How fast is a functional Adam step with a global-norm clip, against torch's fused Adam and torchopt?

``10k``  the 12 tensors of an actor and a critic 14-64-64, 10 k parameters
``20M``  20 tensors of a million

``frl``       ``chain(clip_by_global_norm(0.5), adam())`` and ``apply_updates``, compiled: new parameters and moments, the old ones stay as they are
``torch``     ``clip_grad_norm_`` and ``torch.optim.Adam(fused=True)``, in place
``foreach``   the same with ``foreach=True``
``torchopt``  the same chain as ours in torchopt, with and without its accelerated operation (:mod:`peers.torchopt_adam`)

Method: as in ``apg_update.py``; a rate is steps per second. Before any timing all sides make five steps from the same parameters with the same gradients, and
sums and ends of every tensor must agree to 1e-5.

    python benchmarks/optimizer.py --size 10k
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import timing
from peers.interpreters import SCRIPTS, interpreter, versions

MAX_GRAD_NORM, LEARNING_RATE, STEPS, TOLERANCE = 0.5, 1e-3, 5, 1e-5
PEERS = ("torch", "foreach", "torchopt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("10k", "20M"), default="10k")
    parser.add_argument("--threads", choices=("auto", "1", "2"), default="auto", help="auto: the better of 1 and 2, for each side by itself")
    parser.add_argument("--quick", action="store_true", help="3 short rounds instead of 9, one thread: a trial, not a measurement")
    parser.add_argument("--out", help="append the JSON line to this file")
    parser.add_argument("--worker", choices=("frl", "torch", "foreach"), help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is None:
        timing.emit(measure(args), args.out)
        return
    timing.serve(lambda: (prepare_frl if args.worker == "frl" else prepare_torch)(args), seconds=block_seconds(args.quick))


def block_seconds(quick: bool) -> float:
    return 0.2 if quick else 0.6


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Start the workers one after the other, let them work in turns, and put the figures together."""
    conditions = timing.conditions("torch", "frl")
    threads = ((1,) if args.quick else (1, 2)) if args.threads == "auto" else (int(args.threads),)
    failed: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="frl-optimizer-")))
        workers: dict[tuple[str, Any], timing.Worker] = {}
        for side in ("frl", *PEERS):
            for n in threads:
                for how in ({"threads": n}, {"threads": n, "accelerated": 1}) if side == "torchopt" else ({"threads": n},):
                    try:
                        worker = command(side, how, args, folder)
                    except timing.WorkerFailed as error:
                        if side == "frl":
                            raise
                        failed[side] = str(error)
                        continue
                    stack.callback(worker.close)
                    workers[side, tuple(how.items())] = worker
        ours = next(iter(workers.values())).ready["numbers"]
        distance = {key: difference(ours, worker.ready["numbers"]) for key, worker in workers.items()}
        for (side, how), found in distance.items():
            if not found <= TOLERANCE:
                failed[side] = f"other parameters after {STEPS} steps: relative difference {found:.3g}, at most {TOLERANCE:g} expected"
                del workers[side, how]
        if not any(side == "frl" for side, _ in workers):
            raise SystemExit(failed["frl"])
        rates = timing.alternate(workers, 3 if args.quick else 9, failed)
    figures, _ = timing.compare(rates, "steps_per_s")
    return {
        "benchmark": "optimizer",
        "size": args.size,
        **figures,
        "us_per_step": {side: 1e6 / rate for side, rate in figures["steps_per_s"].items()},
        "failed": failed,
        "difference": max(distance[key] for key in rates),
        **conditions,
        "peer_versions": {"torchopt": versions("torchopt").get("torchopt")},
        "loadavg_after": os.getloadavg()[0],
    }


def command(side: str, how: dict[str, int], args: argparse.Namespace, folder: Path) -> timing.Worker:
    """Start a worker."""
    options = ["--size", args.size, "--threads", str(how["threads"])]
    if side == "torchopt":
        options += ["--seconds", str(block_seconds(args.quick)), *(["--accelerated"] if how.get("accelerated") else [])]
        return timing.Worker([str(SCRIPTS / "torchopt_adam.py"), *options], how["threads"], python=str(interpreter("torchopt")))
    options += ["--worker", side, *(["--quick"] if args.quick else [])]
    return timing.Worker([__file__, *options], how["threads"], timing.compiler_cache(folder / "cache"))


def difference(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """Largest difference of any number, relative to the root of the tensor's squares (the last of its numbers)."""
    return max(abs(a - b) / x[-1] ** 0.5 for x, y in zip(ours, theirs, strict=True) for a, b in zip(x[:-1], y[:-1], strict=True))


# -- the workers' side, for the peers too --------------------------------------------------------------------------------------------------------


def tensors(size: str) -> tuple[list[Any], list[Any]]:
    """Parameters and gradients, the same in every process."""
    import numpy as np
    import torch

    rng = np.random.default_rng(0)
    network = [(64, 14), (64,), (64, 64), (64,)]
    shapes = [*network, (2, 64), (2,), *network, (1, 64), (1,)] if size == "10k" else [(1_000_000,)] * 20

    def draw(scale: float) -> list[Any]:
        return [torch.from_numpy(scale * rng.standard_normal(shape, dtype=np.float32)) for shape in shapes]

    return draw(1.0), draw(0.01)


def numbers(params: Sequence[Any]) -> list[list[float]]:
    """First and last value, root-mean-scaled sum, and sum of squares, of every tensor."""
    flat = [x.detach().double().flatten() for x in params]
    return [[x[0].item(), x[-1].item(), (x.sum() / len(x) ** 0.5).item(), x.square().sum().item()] for x in flat]


def prepare_frl(args: argparse.Namespace) -> tuple[Callable[[], Any], int, dict[str, Any]]:
    import torch

    torch.set_num_threads(int(args.threads))
    warnings.filterwarnings("error", message="frl could not compile")
    from frl import compile as compiler
    from frl.optim import adam, apply_updates, chain, clip_by_global_norm

    optimizer = chain(clip_by_global_norm(MAX_GRAD_NORM), adam())

    def step(grads: Any, state: Any, params: Any, hyper: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(grads, state, params, hyper)
        return apply_updates(params, updates), state

    step, hyper = compiler.jit(step), {"learning_rate": torch.tensor(LEARNING_RATE)}
    params, grads = tensors(args.size)
    state = optimizer.init(params)

    def call() -> None:
        nonlocal params, state
        params, state = step(grads, state, params, hyper)

    for _ in range(STEPS):
        call()
    return call, 1, {"numbers": numbers(params)}


def prepare_torch(args: argparse.Namespace) -> tuple[Callable[[], Any], int, dict[str, Any]]:
    import torch

    torch.set_num_threads(int(args.threads))
    params, grads = tensors(args.size)
    # The clip works in place: after the first step it finds gradients whose norm is the limit, and does the same work on them.
    for param, grad in zip(params, grads, strict=True):
        param.requires_grad_().grad = grad
    optimizer = torch.optim.Adam(params, lr=LEARNING_RATE, fused=args.worker == "torch", foreach=args.worker == "foreach")

    def call() -> None:
        torch.nn.utils.clip_grad_norm_(params, MAX_GRAD_NORM)
        optimizer.step()

    for _ in range(STEPS):
        call()
    return call, 1, {"numbers": numbers(params)}


if __name__ == "__main__":
    main()
