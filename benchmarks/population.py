"""How fast are 32 members together, against one run of as many rows, and against JAX and rejax doing the same?

* APG: 32 members of PointMass, 64 rows x 64 steps each (the update of ``apg_update.py``), against one run of ours with 2048 rows and against a vmapped jitted
  update in JAX.
* PPO: 32 members of CartPole, 64 rows x 128 steps, 4 epochs of 4 minibatches, against one run of ours with 2048 rows and as many minibatches of an epoch
  as a member has, and against 32 vmapped seeds of rejax.

Method: a process for each side; blocks of about a second alternate (:mod:`timing`). All sides may use all processors: ours have ``--threads``, XLA takes what
it takes. Ratios are of env steps per second of the wall clock, and of the same rounds; on a machine that others use ``cpu_rates``, per second of processor time
over all threads, are the steadier figures. Compilation is apart: ``compile_ratio`` is that of the population's
first update, compiling included, to the first update of one member alone; ``memory_mib`` is the peak over that of the imports.
The peers live in an environment that ``bash benchmarks/peers/setup jax`` makes; without it their figures are ``null``.

    python benchmarks/population.py
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timing

PEER = Path(__file__).resolve().parents[1] / "build" / "peers" / "jax" / "bin" / "python"
SIDES = ("members", "own_2048", "peer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=None)
    parser.add_argument("--tasks", nargs="+", choices=("apg", "ppo"), default=["apg", "ppo"])
    parser.add_argument("--quick", action="store_true", help="3 short rounds instead of 9: a trial, not a measurement")
    parser.add_argument("--peer", default=str(PEER), help="Python of the environment that has jax and rejax")
    parser.add_argument("--out", help="append the JSON line to this file")
    parser.add_argument("--worker", choices=("members", "own_2048", "one"), help=argparse.SUPPRESS)
    parser.add_argument("--task", choices=("apg", "ppo"), help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        timing.serve(lambda: prepare(args), seconds=0.3 if args.quick else 1.0)
        return
    conditions = timing.conditions("torch", "frl")
    if not Path(args.peer).exists():
        print(f"{args.peer} does not exist (bash benchmarks/peers/setup jax makes it): the peers' figures are null", file=sys.stderr)
    results = {task: measure(args, task) for task in args.tasks}
    _print(results)
    row: dict[str, Any] = {"benchmark": "population", "members": args.members, "threads": args.threads, "chunk": args.chunk}
    for task, found in results.items():
        row[f"{task}_vs_{'jax' if task == 'apg' else 'rejax'}"] = found["vs_peer"]
        row[f"{task}_vs_own_2048"] = found["vs_own_2048"]
        row.update({f"{task}_{name}": found[name] for name in ("rates", "cpu_rates", "compile_ratio", "memory_mib", "member_state_mib")})
    timing.emit({**row, **conditions}, args.out)


def measure(args: argparse.Namespace, task: str) -> dict[str, Any]:
    """Rates of all sides of a task, taken in turns."""
    with contextlib.ExitStack() as stack:

        def start(side: str) -> timing.Worker:
            options = ["--threads", str(args.threads), "--members", str(args.members), *(["--chunk", str(args.chunk)] if args.chunk else [])]
            if side == "peer":
                command = [str(Path(__file__).parent / "peers" / "jax_population.py"), "--task", task, "--members", str(args.members)]
                worker = timing.Worker([*command, "--seconds", "0.3" if args.quick else "1.0"], args.threads, python=args.peer)
            else:
                # A cache of its own for every side: the code of a member is that of a population.
                cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="frl-inductor-"))
                command = [__file__, "--worker", side, "--task", task, *options, *(["--quick"] if args.quick else [])]
                worker = timing.Worker(command, args.threads, {"TORCHINDUCTOR_CACHE_DIR": cache})
            stack.callback(worker.close)
            return worker

        one = start("one")
        alone = one.ready
        one.close()
        workers = {side: start(side) for side in SIDES if side != "peer" or Path(args.peer).exists()}
        rates = timing.alternate(workers, 3 if args.quick else 9)
        ready = {side: worker.ready for side, worker in workers.items()}
    against = lambda other: statistics.median([a / b for a, b in zip(rates["members"], rates[other], strict=True)]) if other in rates else None
    cpu = {side: statistics.median(worker.cpu_rates) for side, worker in workers.items()}
    return {
        "cpu_rates": cpu,
        "rates": {side: statistics.median(values) for side, values in rates.items()},
        "vs_peer": against("peer"),
        "vs_own_2048": against("own_2048"),
        "compile_ratio": ready["members"]["first_update"] / alone["first_update"],
        "memory_mib": {"members": ready["members"]["peak_mib"], "one": alone["peak_mib"]},
        "member_state_mib": alone["state_mib"],
    }


def prepare(args: argparse.Namespace) -> tuple[Callable[[], Any], int, dict[str, Any]]:
    """Build a side, make its first updates, and say what they cost."""
    import torch

    torch.set_num_threads(args.threads)
    warnings.filterwarnings("error", message="frl could not compile")
    import frl
    from frl import compile as compiler
    from frl import rng, tree

    rows = 2048 if args.worker == "own_2048" else 64
    algorithm, steps = (_apg if args.task == "apg" else _ppo)(rows)
    members = args.members if args.worker == "members" else 1
    if args.worker == "members":
        algorithm = frl.population(algorithm, members, chunk=args.chunk)
    imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.perf_counter()
    state, ready = algorithm.init(rng.key(0)), False

    def update() -> None:
        nonlocal state
        graphs = compiler.graph_count()
        state, rollout = algorithm.collect(state)
        state = algorithm.update(state, rollout)
        if ready and compiler.graph_count() != graphs:
            raise RuntimeError("a timed update compiled a graph")

    update()
    first = time.perf_counter() - begun
    for _ in range(3):
        update()
    ready = True
    facts = {
        "first_update": first,
        "peak_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - imported) / 1024,
        "state_mib": sum(x.numel() * x.element_size() for x in tree.leaves(state)) / 2**20 / members,
    }
    return update, members * rows * steps, facts


def _apg(rows: int) -> tuple[Any, int]:
    from apg_update import build

    import frl

    env, policy, normalizer = build(rows)
    config = frl.ApgConfig(gamma=0.99, max_grad_norm=0.5, segment_length=64, action_adjoint_max_norm=0.1 / rows)
    return frl.make_apg(env, policy, frl.adam(), config, normalizer=normalizer, learning_rate=2.5e-4), 64


def _ppo(rows: int) -> tuple[Any, int]:
    import frl
    from frl.policies import build_policy

    env = frl.build_learning_env("cartpole", num_envs=rows)
    network = {"type": "mlp", "network_cfg": {"hidden_sizes": [64, 64], "activation": "tanh"}}
    blocks = {"name": "actor_critic", "actor": network, "critic": network}
    policy = build_policy(blocks, env.single_observation_space, env.single_action_space)
    config = frl.PpoConfig(buffer_size=128, n_epochs=4, num_mini_batches=4, gamma=0.99, gae_lambda=0.95, ent_coef=0.01, max_grad_norm=0.5)
    return frl.make_ppo(env, policy, frl.adam(), config, learning_rate=7.5e-4), 128


def _print(results: dict[str, dict[str, Any]]) -> None:
    show = lambda value, unit="": "-" if value is None else f"{value:,.2f}{unit}" if value < 1000 else f"{value / 1000:,.0f}k"
    print(f"{'':5}{'members':>12}{'own 2048':>12}{'peer':>12}{'vs peer':>10}{'vs own':>10}{'compile':>10}{'memory':>12}", file=sys.stderr)
    for task, found in results.items():
        cells = [found["rates"].get(side) for side in SIDES]
        memory = f"{found['memory_mib']['members']:.0f} MiB"
        tail = [show(found[name], "x") for name in ("vs_peer", "vs_own_2048", "compile_ratio")]
        print(f"{task:5}" + "".join(f"{show(x):>12}" for x in cells) + "".join(f"{x:>10}" for x in tail) + f"{memory:>12}", file=sys.stderr)


if __name__ == "__main__":
    main()
