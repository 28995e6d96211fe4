"""How fast is PPO, collect plus update, against stable-baselines3?

Both sides: 64 rows x 128 steps, 4 epochs of 4 minibatches, separate 64-64 tanh networks for actor and critic, global-norm clip 0.5, Adam at 7.5e-4, entropy
0.01, gamma 0.99, lambda 0.95, float32. Ours is the functional CartPole (or Pendulum), compiled; the other steps gymnasium's (:mod:`peers/sb3`), in a virtual
environment of its own, which ``bash benchmarks/peers/setup sb3`` makes.

Method: each side runs with 1 and with 2 threads, in a process each; blocks of about a second alternate (:mod:`timing`), and each side counts with its better
number of threads. ``ratio`` is of wall-clock rates. On a machine that others use, ``cpu_ratio``, of steps per processor second and at one thread on both
sides, is the steadier one. Compilation is apart, as in ``apg_update.py``. Both sides must have the same number of parameters.

    python benchmarks/ppo.py --env cartpole
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timing

PEER = Path(__file__).resolve().parents[1] / "build" / "peers" / "sb3" / "bin" / "python"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", choices=("cartpole", "pendulum"), default="cartpole")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--horizon", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--threads", choices=("auto", "1", "2"), default="auto", help="auto: the better of 1 and 2, for each side by itself")
    parser.add_argument("--quick", action="store_true", help="3 short rounds instead of 9: a trial, not a measurement")
    parser.add_argument("--peer", default=str(PEER), help="Python of the environment that has stable-baselines3")
    parser.add_argument("--out", help="append the JSON line to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        timing.serve(lambda: prepare(args), seconds=0.3 if args.quick else 1.0)
        return
    if not Path(args.peer).exists():
        parser.error(f"{args.peer} does not exist; make it with: bash benchmarks/peers/setup sb3")
    timing.emit(measure(args), args.out)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Start the workers one after the other, let them work in turns, and put the figures together."""
    conditions = timing.conditions("torch", "frl", "gymnasium")
    threads = (1, 2) if args.threads == "auto" else (int(args.threads),)
    sizes = ("--env", args.env, "--num-envs", args.num_envs, "--horizon", args.horizon, "--epochs", args.epochs, "--minibatches", args.minibatches)
    with contextlib.ExitStack() as stack:
        caches = {n: stack.enter_context(tempfile.TemporaryDirectory(prefix="frl-inductor-")) for n in threads}

        def start(side: str, n: int) -> timing.Worker:
            options = [str(x) for x in (*sizes, "--threads", n)]
            if side == "frl":
                command, python = [__file__, "--worker", *options, *(["--quick"] if args.quick else [])], None
            else:
                command, python = [str(Path(__file__).parent / "peers" / "sb3.py"), *options, "--seconds", "0.3" if args.quick else "1.0"], args.peer
            worker = timing.Worker(command, n, {"TORCHINDUCTOR_CACHE_DIR": caches[n]}, python=python)
            stack.callback(worker.close)
            return worker

        workers = {(side, n): start(side, n) for side in ("frl", "sb3") for n in threads}
        counts = {worker.ready["parameters"] for worker in workers.values()}
        if len(counts) != 1:
            raise SystemExit(f"the sides have different numbers of parameters: {sorted(counts)}")
        rates = timing.alternate(workers, 3 if args.quick else 9)
        ours, theirs = (timing.best({key: rates[key] for key in rates if key[0] == side}) for side in ("frl", "sb3"))
        cpu = {key: statistics.median(worker.cpu_rates) for key, worker in workers.items()}
        warm = start(*ours).ready
        cold, other = workers[ours].ready, workers[theirs].ready
    medians = {key: statistics.median(values) for key, values in rates.items()}
    least = threads[0]
    return {
        "benchmark": "ppo",
        "env": args.env,
        "num_envs": args.num_envs,
        "horizon": args.horizon,
        "epochs": args.epochs,
        "minibatches": args.minibatches,
        "frl_env_steps_per_s": medians[ours],
        "frl_spread": timing.spread(rates[ours]),
        "frl_threads": ours[1],
        "sb3_env_steps_per_s": medians[theirs],
        "sb3_spread": timing.spread(rates[theirs]),
        "sb3_threads": theirs[1],
        "ratio": medians[ours] / medians[theirs],
        "ratio_spread": timing.spread([a / b for a, b in zip(rates[ours], rates[theirs], strict=True)]),
        "cpu_ratio": cpu["frl", least] / cpu["sb3", least],
        "medians": {f"{side}_{n}_threads": median for (side, n), median in medians.items()},
        "cpu_medians": {f"{side}_{n}_threads": median for (side, n), median in cpu.items()},
        "parameters": counts.pop(),
        "rounds": len(rates[ours]),
        "compile_seconds": cold["compile_seconds"],
        "seconds_to_first_update_cold": cold["first_update"],
        "seconds_to_first_update_warm": warm["first_update"],
        "sb3_seconds_to_first_update": other["first_update"],
        **conditions,
        "loadavg_after": os.getloadavg()[0],
    }


def prepare(args: argparse.Namespace) -> tuple[Callable[[], Any], int, dict[str, Any]]:
    """Build, make the first update, warm up."""
    import torch

    torch.set_num_threads(int(args.threads))
    # An update that fell back to eager must not be timed as a compiled one.
    warnings.filterwarnings("error", message="frl could not compile")
    from frl import build_learning_env, build_policy, rng, tree
    from frl import compile as compiler
    from frl.algorithms.ppo import PpoConfig, make_ppo
    from frl.optim import adam

    env = build_learning_env(args.env, num_envs=args.num_envs)

    def network(last: float) -> dict[str, Any]:
        return {"type": "mlp", "network_cfg": {"hidden_sizes": [64, 64], "activation": "tanh", "orthogonal_init": [2**0.5, 2**0.5, last]}}

    policy = build_policy({"name": "actor_critic", "actor": network(0.01), "critic": network(1.0)}, env.single_observation_space, env.single_action_space)
    config = PpoConfig(buffer_size=args.horizon, n_epochs=args.epochs, num_mini_batches=args.minibatches, ent_coef=0.01)
    ppo = make_ppo(env, policy, adam(), config, learning_rate=7.5e-4)
    state, ready = ppo.init(rng.key(0)), False

    def update() -> None:
        nonlocal state
        graphs = compiler.graph_count()
        state, rollout = ppo.collect(state)
        state = ppo.update(state, rollout)
        if ready and compiler.graph_count() != graphs:
            raise RuntimeError("a timed update compiled a graph")

    update()
    first = time.time() - args.started
    for _ in range(3):
        update()
    ready = True
    facts = {"first_update": first, "compile_seconds": compiler.compile_seconds(), "parameters": sum(x.numel() for x in tree.leaves(state.params))}
    return update, args.num_envs * args.horizon, facts


if __name__ == "__main__":
    main()
