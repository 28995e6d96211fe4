"""How fast is generalised advantage estimation, against a loop over time in PyTorch and stable-baselines3's in numpy?

N = 1024 rows, T = 128 steps, float32, one thread on every side. Ours, :func:`frl.compute_gae` with terminations, truncations and final values,
is compiled, and eager beside it. The loop is the recursion as imperative packages write it, ``A_t = delta_t + gamma lambda (1 - done_t) A_{t+1}``, one step
of tensor operations after the other. Before any timing both must agree to 1e-5 on the same numbers. stable-baselines3's is its rollout buffer's, in the
virtual environment that ``bash benchmarks/peers/setup sb3`` makes.

Method: a process each, blocks that alternate (:mod:`timing`). Milliseconds are those of the wall clock; ``cpu_ratios`` compare processor time.

    python benchmarks/gae.py
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timing
from peers.interpreters import interpreter

GAMMA, LAMBDA = 0.99, 0.95
TOLERANCE = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=1024)
    parser.add_argument("--horizon", type=int, default=128)
    parser.add_argument("--quick", action="store_true", help="3 short rounds instead of 9: a trial, not a measurement")
    parser.add_argument("--peer", default=str(interpreter("sb3")), help="Python of the environment that has stable-baselines3")
    parser.add_argument("--out", help="append the JSON line to this file")
    parser.add_argument("--worker", choices=("frl", "frl_eager", "loop"), help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        timing.serve(lambda: prepare(args), seconds=0.1 if args.quick else 0.3)
        return
    if not Path(args.peer).exists():
        parser.error(f"{args.peer} does not exist; make it with: bash benchmarks/peers/setup sb3")
    timing.emit(measure(args), args.out)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Start the workers one after the other, let them work in turns, and put the figures together."""
    conditions = timing.conditions("torch", "frl")
    sizes = [str(x) for x in ("--num-envs", args.num_envs, "--horizon", args.horizon)]
    with contextlib.ExitStack() as stack:
        workers: dict[tuple[str, Any], timing.Worker] = {}
        for side in ("frl", "frl_eager", "loop"):
            workers[side, ()] = timing.Worker([__file__, "--worker", side, *sizes, *(["--quick"] if args.quick else [])], 1)
            stack.callback(workers[side, ()].close)
        command = [str(Path(__file__).parent / "peers" / "sb3.py"), "--work", "gae", *sizes, "--seconds", "0.1" if args.quick else "0.3"]
        workers["sb3", ()] = timing.Worker(command, 1, python=args.peer)
        stack.callback(workers["sb3", ()].close)
        rates = {side: values for (side, _), values in timing.alternate(workers, 3 if args.quick else 9).items()}
        cpu = {side: statistics.median(worker.cpu_rates) for (side, _), worker in workers.items()}
        difference = max(workers[side, ()].ready["difference"] for side in ("frl", "frl_eager"))
    transitions = args.num_envs * args.horizon
    medians = {side: statistics.median(values) for side, values in rates.items()}
    return {
        "benchmark": "gae",
        "num_envs": args.num_envs,
        "horizon": args.horizon,
        **{f"{side}_ms": 1e3 * transitions / median for side, median in medians.items()},
        **{f"{side}_ms_spread": sorted(1e3 * transitions / x for x in timing.spread(rates[side])) for side in rates},
        "ratios": {side: medians["frl"] / medians[side] for side in ("frl_eager", "loop", "sb3")},
        "cpu_ratios": {side: cpu["frl"] / cpu[side] for side in ("frl_eager", "loop", "sb3")},
        "difference_to_loop": difference,
        "rounds": len(rates["frl"]),
        **conditions,
        "loadavg_after": os.getloadavg()[0],
    }


def prepare(args: argparse.Namespace) -> tuple[Callable[[], Any], int, dict[str, Any]]:
    """One side, checked against the loop."""
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("error", message="frl could not compile")
    from frl import compile as compiler
    from frl.advantages import compute_gae

    generator = torch.Generator().manual_seed(0)
    T, N = args.horizon, args.num_envs
    reward, value, final_value = (torch.randn(n, N, generator=generator) for n in (T, T + 1, T))
    terminated, truncated = (torch.rand(T, N, generator=generator) < 0.01 for _ in range(2))
    gamma, lam = torch.tensor(GAMMA), torch.tensor(LAMBDA)

    def loop(reward: Any, value: Any, terminated: Any, truncated: Any, final_value: Any) -> tuple[Any, Any]:
        advantages = torch.zeros_like(reward)
        last = torch.zeros_like(reward[0])
        for t in reversed(range(reward.shape[0])):
            going_on = 1.0 - (terminated[t] | truncated[t]).to(reward.dtype)
            cut = (truncated[t] & ~terminated[t]).to(reward.dtype)
            delta = reward[t] + GAMMA * final_value[t] * cut + GAMMA * value[t + 1] * going_on - value[t]
            last = delta + GAMMA * LAMBDA * going_on * last
            advantages[t] = last
        return advantages, advantages + value[:-1]

    def ours(reward: Any, value: Any, terminated: Any, truncated: Any, final_value: Any) -> Any:
        return compute_gae(reward, value, terminated, truncated, gamma=gamma, gae_lambda=lam, final_value=final_value)

    side = {"frl": compiler.jit(ours), "frl_eager": ours, "loop": loop}[args.worker]
    given = (reward, value, terminated, truncated, final_value)
    with torch.no_grad():
        wanted = loop(*given)
        difference = max(((a - b).norm() / b.norm()).item() for a, b in zip(side(*given), wanted, strict=True))
        if not difference <= TOLERANCE:
            raise SystemExit(f"the two sides compute different advantages: relative difference {difference:.3g}, at most {TOLERANCE:g} expected")
        for _ in range(3):
            side(*given)
    return torch.no_grad()(lambda: side(*given)), T * N, {"difference": difference}


if __name__ == "__main__":
    main()
