"""How fast is PPO, collect plus update, against stable-baselines3, rejax and torchrl?

All sides: 64 rows x 128 steps, 4 epochs of 4 minibatches, separate 64-64 tanh networks for actor and critic, global-norm clip 0.5, Adam at 7.5e-4, entropy
0.01, gamma 0.99, lambda 0.95, float32. Ours is the functional CartPole (or Pendulum), compiled. The others run in virtual environments of their own, which
``bash benchmarks/peers/setup sb3 jax torchrl`` makes: stable-baselines3 and torchrl step gymnasium's environments, rejax gymnax's, in one jitted program.

Method: each side with 1 and with 2 threads (rejax with XLA's pool), in a process each; blocks of about a second alternate (:mod:`timing`), and each side counts
with its better arrangement. ``ratios`` are of wall-clock rates. On a machine that others use, ``cpu_ratios``, of steps per processor second and at one thread
on both sides, are the steadier ones. Compilation is apart, as in ``apg_update.py``. All sides must have the same number of parameters. A peer that is not
installed or fails is in ``failed``.

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
from peers.interpreters import SCRIPTS, interpreter, versions

PEERS = ("sb3", "rejax", "torchrl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", choices=("cartpole", "pendulum"), default="cartpole")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--horizon", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="all by default, for pendulum sb3 alone")
    parser.add_argument("--threads", choices=("auto", "1", "2"), default="auto", help="auto: the better of 1 and 2, for each side by itself")
    parser.add_argument("--quick", action="store_true", help="3 short rounds instead of 9: a trial, not a measurement")
    parser.add_argument("--out", help="append the JSON line to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        timing.serve(lambda: prepare(args), seconds=block_seconds(args.quick))
        return
    args.peers = args.peers if args.peers is not None else list(PEERS if args.env == "cartpole" else PEERS[:1])
    timing.emit(measure(args), args.out)


def block_seconds(quick: bool) -> float:
    return 0.4 if quick else 1.0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Start the workers one after the other, let them work in turns, and put the figures together."""
    conditions = timing.conditions("torch", "frl", "gymnasium")
    threads = (1, 2) if args.threads == "auto" else (int(args.threads),)
    failed: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="frl-ppo-")))

        def start(side: str, arrangement: tuple[tuple[str, int], ...]) -> timing.Worker:
            worker = command(side, dict(arrangement).get("threads"), args, folder)
            stack.callback(worker.close)
            return worker

        workers: dict[tuple[str, Any], timing.Worker] = {}
        for side in ("frl", *args.peers):
            for arrangement in [()] if side == "rejax" else [(("threads", n),) for n in threads]:
                try:
                    worker = start(side, arrangement)
                except timing.WorkerFailed as error:
                    if side == "frl":
                        raise
                    failed[side] = str(error)
                    continue
                ours = next(iter(workers.values()), worker).ready["parameters"]
                if worker.ready["parameters"] != ours:
                    failed[side] = f"{worker.ready['parameters']} parameters, {ours} expected"
                    continue
                workers[side, arrangement] = worker
        rates = timing.alternate(workers, 3 if args.quick else 9, failed)
        figures, chosen = timing.compare(rates, "env_steps_per_s")
        cpu = {key: statistics.median(workers[key].cpu_rates) for key in rates}
        ready = {side: workers[key].ready for side, key in chosen.items()}
        warm = {} if args.quick else start(*chosen["frl"]).ready
    single = (("threads", threads[0]),)
    return {
        "benchmark": "ppo",
        "env": args.env,
        "num_envs": args.num_envs,
        "horizon": args.horizon,
        "epochs": args.epochs,
        "minibatches": args.minibatches,
        **figures,
        "cpu_ratios": {side: cpu["frl", single] / cpu[side, single] for side in chosen if side != "frl" and (side, single) in cpu},
        "failed": failed,
        "parameters": ready["frl"]["parameters"],
        "compile_seconds": ready["frl"]["compile_seconds"],
        "seconds_to_first_update": {
            "cold": ready["frl"]["first_update"],
            **({"warm": warm["first_update"]} if warm else {}),
            **{side: facts["first_update"] for side, facts in ready.items() if side != "frl"},
        },
        **conditions,
        "peer_versions": {
            package: versions(name).get(package) for name, package in (("sb3", "stable_baselines3"), ("jax", "rejax"), ("jax", "jax"), ("torchrl", "torchrl"))
        },
        "loadavg_after": os.getloadavg()[0],
    }


def command(side: str, threads: int | None, args: argparse.Namespace, folder: Path) -> timing.Worker:
    """Start a worker."""
    sizes = {"--num-envs": args.num_envs, "--horizon": args.horizon, "--epochs": args.epochs, "--minibatches": args.minibatches}
    options = [str(x) for pair in sizes.items() for x in pair]
    seconds = ["--seconds", str(block_seconds(args.quick))]
    if side == "frl":
        command = [__file__, "--worker", "--env", args.env, "--threads", str(threads), *options, *(["--quick"] if args.quick else [])]
        return timing.Worker(command, threads or 1, timing.compiler_cache(folder / f"cache_{threads}"))
    if side == "sb3":
        command = [str(SCRIPTS / "sb3.py"), "--env", args.env, "--threads", str(threads), *options, *seconds]
        return timing.Worker(command, threads or 1, python=str(interpreter("sb3")))
    if side == "torchrl":
        return timing.Worker([str(SCRIPTS / "torchrl_ppo.py"), "--threads", str(threads), *options, *seconds], threads or 1, python=str(interpreter("torchrl")))
    return timing.Worker([str(SCRIPTS / "rejax_ppo.py"), *options, *seconds], os.cpu_count() or 1, python=str(interpreter("jax")))


def make(env_name: str, num_envs: int, horizon: int, epochs: int, minibatches: int) -> Any:
    """Our algorithm."""
    from frl import build_learning_env, build_policy
    from frl.algorithms.ppo import PpoConfig, make_ppo
    from frl.optim import adam

    env = build_learning_env(env_name, num_envs=num_envs)

    def network(last: float) -> dict[str, Any]:
        return {"type": "mlp", "network_cfg": {"hidden_sizes": [64, 64], "activation": "tanh", "orthogonal_init": [2**0.5, 2**0.5, last]}}

    policy = build_policy({"name": "actor_critic", "actor": network(0.01), "critic": network(1.0)}, env.single_observation_space, env.single_action_space)
    config = PpoConfig(buffer_size=horizon, n_epochs=epochs, num_mini_batches=minibatches, ent_coef=0.01)
    return make_ppo(env, policy, adam(), config, learning_rate=7.5e-4)


def prepare(args: argparse.Namespace) -> tuple[Callable[[], Any], int, dict[str, Any]]:
    """Build, make the first update, warm up."""
    import torch

    torch.set_num_threads(int(args.threads))
    # An update that fell back to eager must not be timed as a compiled one.
    warnings.filterwarnings("error", message="frl could not compile")
    from frl import compile as compiler
    from frl import rng, tree

    ppo = make(args.env, args.num_envs, args.horizon, args.epochs, args.minibatches)
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
