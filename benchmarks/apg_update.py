"""How fast is a complete APG update, against the same update in JAX, in the reference package, in brax and by hand in eager PyTorch?

An update is: collect (noise, fresh states), roll out PointMass for T steps in N rows under a 14-64-64-2 tanh policy on normalised observations, the gradient
with the action adjoint clipped row by row at every step, global-norm clip 0.5, Adam at 2.5e-4, new observation statistics. float32, gamma 0.99, one segment.

``frl``          with 1 and with 2 threads
``eager``        a minimal loop of eager autograd (:mod:`eager_point_mass`), with 1 and with 2 threads
``jax``          ``lax.scan`` and one jitted update (:mod:`peers.jax_scan`)
``jax_split``    the same, rows split over two host devices
``brax``         ``apg.train`` with its own loss and clips, so not quite the same work (:mod:`peers.brax_apg`)
``embodichain``  the reference (:mod:`peers.embodichain_apg`)
``products``     the matrix products of forward and backward alone, in the better of two layouts: the arithmetic limit

Method: each side in a process of its own, in several arrangements where one cannot know the best. Blocks of about a second alternate (:mod:`timing`), and a
side counts with its best arrangement. Compilation is not in the rates: ``seconds_to_first_update`` is from the start of the process, imports included, to
the end of the first update, for ours with an empty Inductor cache (``cold``), and in a new process with the cache that the first one left (``warm``).

Before any timing, the same start state, parameters, statistics, noise and fresh states go through one update of every side but brax, in the middle of training,
with rows that finish on the way and with the adjoint limit that is timed: the gradients that reach Adam and the mean returns must agree with ours to 1e-4, and
a good part of the rows must be clipped. A peer that is not installed, fails or computes something else is in ``failed`` with its last words.

    python benchmarks/apg_update.py --num-envs 64 --horizon 64
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timing
from peers import case as cases
from peers.interpreters import SCRIPTS, interpreter, versions

CLIPPED = (0.1, 0.9)  # range that the fraction of clipped rows must lie in
SHARDED = 256  # rows from which ours uses two threads
BETA1 = 0.9  # Adam's, default of all sides
PEERS = ("eager", "jax", "jax_split", "brax", "embodichain", "products")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--horizon", type=int, default=64)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--threads", choices=("auto", "1", "2"), default="auto", help="auto: the better of 1 and 2, for each side by itself")
    parser.add_argument("--limit", type=float, default=0.1, help="adjoint limit times N (the objective is a mean over rows, so adjoints shrink like 1/N)")
    parser.add_argument("--quick", action="store_true", help="3 short rounds instead of 9, fewer arrangements: a trial, not a measurement")
    parser.add_argument("--out", help="append the JSON line to this file")
    parser.add_argument("--worker", choices=("frl", "eager", "products"), help=argparse.SUPPRESS)
    parser.add_argument("--cases", nargs="*", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is None:
        timing.emit(measure(args), args.out)
        return
    prepare = {"frl": prepare_frl, "eager": prepare_eager, "products": prepare_products}[args.worker]
    timing.serve(lambda: prepare(args), seconds=block_seconds(args.quick))


def block_seconds(quick: bool) -> float:
    return 0.25 if quick else 0.8


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Start the workers one after the other, let them work in turns, and put the figures together."""
    conditions = timing.conditions("torch", "frl")
    threads = (1, 2) if args.threads == "auto" else (int(args.threads),)
    if args.quick and args.threads == "auto" and args.num_envs < SHARDED:
        threads = (1,)
    rounds = 3 if args.quick else 9
    failed: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="frl-apg-")))
        written = {n: str(folder / f"case_{n}.npz") for n in threads}

        def start(side: str, arrangement: tuple[tuple[str, int], ...]) -> timing.Worker:
            worker = command(side, dict(arrangement), args, rounds, folder, written)
            stack.callback(worker.close)
            return worker

        workers: dict[tuple[str, Any], timing.Worker] = {}
        for side in ("frl", *args.peers):
            for arrangement in arrangements(side, threads, args.quick):
                try:
                    workers[side, arrangement] = start(side, arrangement)
                except timing.WorkerFailed as error:
                    if side == "frl":
                        raise
                    failed[side] = str(error)
        rates = timing.alternate(workers, rounds, failed)
        figures, chosen = timing.compare(rates, "env_steps_per_s")
        ready = {side: workers[key].ready for side, key in chosen.items()}
        warm = {} if args.quick else start("frl", chosen["frl"][1]).ready
    checked = [workers[key].ready for key in workers if "gradient_difference" in workers[key].ready]
    return {
        "benchmark": "apg_update",
        "num_envs": args.num_envs,
        "horizon": args.horizon,
        **figures,
        "failed": failed,
        "compile_seconds": ready["frl"]["compile_seconds"],
        "seconds_to_first_update": {
            "cold": ready["frl"]["first_update"],
            **({"warm": warm["first_update"]} if warm else {}),
            **{side: facts["first_update"] for side, facts in ready.items() if side != "frl" and "first_update" in facts},
        },
        "gradient_difference": max((facts["gradient_difference"] for facts in checked), default=None),
        "return_difference": max((facts["return_difference"] for facts in checked), default=None),
        "checked_against": sorted({side for (side, _), worker in workers.items() if "gradient_difference" in worker.ready}),
        "adjoint_limit": args.limit / args.num_envs,
        "clipped_fraction": ready["frl"]["clipped_fraction"],
        "restarted_fraction": ready["frl"]["restarted_fraction"],
        **conditions,
        "peer_versions": {name: versions(name).get(package) for name, package in (("jax", "jax"), ("brax", "brax"), ("embodichain", "embodichain"))},
        "loadavg_after": os.getloadavg()[0],
    }


def arrangements(side: str, threads: tuple[int, ...], quick: bool) -> list[tuple[tuple[str, int], ...]]:
    """The ways in which a side may be at its best."""
    if side in ("frl", "eager", "products"):
        return [(("threads", n),) for n in threads]
    if side == "embodichain":  # slower with 2 threads at all sizes that were measured
        return [(("threads", n),) for n in (threads[:1] if quick else threads)]
    if side == "jax":
        return [(("unroll", k),) for k in ((1,) if quick else (1, 4))]
    return [()]


def command(side: str, arrangement: dict[str, int], args: argparse.Namespace, rounds: int, folder: Path, written: dict[int, str]) -> timing.Worker:
    """Start a worker."""
    sizes = ["--num-envs", str(args.num_envs), "--horizon", str(args.horizon)]
    limit, seconds, threads = ["--limit", str(args.limit)], ["--seconds", str(block_seconds(args.quick))], arrangement.get("threads", 1)
    check = ["--cases", *written.values()]
    if side in ("frl", "eager", "products"):
        mine = ["--cases", written[threads]] if side == "frl" else check
        options = ["--worker", side, "--threads", str(threads), *sizes, *limit, *(["--quick"] if args.quick else []), *mine]
        return timing.Worker([__file__, *options], threads, timing.compiler_cache(folder / f"cache_{threads}"))
    if side == "embodichain":
        options = ["--threads", str(threads), *sizes, *limit, *seconds, *check]
        return timing.Worker([str(SCRIPTS / "embodichain_apg.py"), *options], threads, {"WANDB_MODE": "disabled"}, str(interpreter("embodichain")))
    both = os.cpu_count() or 1  # XLA has a pool of threads of its own
    if side == "brax":
        updates = max(2, round(block_seconds(args.quick) * 8e5 / (args.num_envs * args.horizon)))
        options = [*sizes, "--updates", str(updates), "--rounds", str(rounds)]
        return timing.Worker([str(SCRIPTS / "brax_apg.py"), *options], both, python=str(interpreter("brax")))
    options = [*sizes, *limit, *seconds, *check, "--devices", "2" if side == "jax_split" else "1", "--unroll", str(arrangement.get("unroll", 1))]
    return timing.Worker([str(SCRIPTS / "jax_scan.py"), *options], both, python=str(interpreter("jax")))


# -- the sides that run in this environment ------------------------------------------------------------------------------------------------------


def build(num_envs: int) -> tuple[Any, Any, Any]:
    """Our environment, policy and normalizer, equal to those of the other side."""
    from eager_point_mass import LAYERS, LOG_STD

    from frl.envs.point_mass import point_mass
    from frl.envs.vector import make_vec_env
    from frl.normalizers import running_normalizer
    from frl.policies import actor_only

    # The other side cuts the remembered action from the graph.
    env = make_vec_env(point_mass(detach_last_action=True), num_envs)
    network = {"hidden_sizes": [64, 64], "activation": "tanh", "last_activation": "tanh", "orthogonal_init": [gain for _, _, gain in LAYERS]}
    policy = actor_only(14, 2, network={"type": "mlp", "network_cfg": network}, initial_log_std=LOG_STD)
    return env, policy, running_normalizer(14, initial_count=1e-4)


def prepare_frl(args: argparse.Namespace) -> tuple[Callable[[], Any], int, dict[str, Any]]:
    """Build, make the first update, write the case for the others, warm up."""
    import torch

    torch.set_num_threads(int(args.threads))
    # An update that fell back to eager must not be timed as a compiled one.
    warnings.filterwarnings("error", message="frl could not compile")
    from frl import rng
    from frl.optim import adam

    env, apg = make(args.num_envs, args.horizon, args.limit / args.num_envs)
    state = apg.init(rng.key(0))

    def update() -> None:
        nonlocal state
        state, rollout = apg.collect(state)
        state = apg.update(state, rollout)

    update()
    first = time.time() - args.started
    from frl import compile as compiler

    # The case is where the time limit falls into the rollout, so that it covers rows that start again.
    for _ in range(99 // args.horizon - 1):
        update()
    state, rollout = apg.collect(state)
    state = state._replace(opt_state=adam().init(state.params))
    after = apg.update(state, rollout)
    facts = {"first_update": first, "compile_seconds": compiler.compile_seconds(), **write_case(args, env, state, rollout, after)}
    return guarded(update), args.num_envs * args.horizon, facts


def make(num_envs: int, horizon: int, limit: float | None) -> tuple[Any, Any]:
    """Our environment and algorithm; ``limit=None`` for no adjoint clip."""
    from eager_point_mass import GAMMA, LEARNING_RATE, MAX_GRAD_NORM

    from frl.algorithms.apg import ApgConfig, make_apg
    from frl.optim import adam

    env, policy, normalizer = build(num_envs)
    config = ApgConfig(gamma=GAMMA, max_grad_norm=MAX_GRAD_NORM, segment_length=horizon, action_adjoint_max_norm=limit)
    return env, make_apg(env, policy, adam(), config, normalizer=normalizer, learning_rate=LEARNING_RATE)


def guarded(update: Callable[[], Any]) -> Callable[[], Any]:
    """A function that fails when it compiles something, after three calls in which it may."""
    from frl import compile as compiler

    for _ in range(3):
        update()
    graphs = compiler.graph_count()

    def call() -> Any:
        result = update()
        if compiler.graph_count() != graphs:
            raise RuntimeError("a timed update compiled a graph")
        return result

    return call


def write_case(args: argparse.Namespace, env: Any, state: Any, rollout: Any, after: Any) -> dict[str, float]:
    """Write one update of ours as arrays (:mod:`peers.case`).

    Args:
        args: the command line.
        env: our environment.
        state: before the update, with fresh moments: Adam's first moment after it is then ``(1 - beta1)`` times the gradient that reached Adam.
        rollout: inputs of the update.
        after: the state after it.

    Returns:
        ``clipped_fraction``, of all rows at all steps; ``restarted_fraction``, of the rows.
    """
    import torch

    from frl.normalizers import variance

    start = rollout.env_state
    fresh = env.draw_resets(start, args.horizon, rollout.env_params)

    def task(states: Any) -> torch.Tensor:
        return torch.cat((states.goal, states.obstacles.flatten(-2), states.radii), -1)

    clipped = after.metrics["action_adjoint_clipped_fraction"].item()
    if args.cases and not CLIPPED[0] <= clipped <= CLIPPED[1]:
        raise SystemExit(f"the adjoint limit clips {clipped:.3g} of the rows, between {CLIPPED[0]} and {CLIPPED[1]} expected; choose another --limit")
    for path in args.cases:
        cases.save(
            path,
            {
                **dict(zip(("x", "v", "a", "t"), (start.env.position, start.env.velocity, start.env.last_action, start.elapsed), strict=True)),
                "task": task(start.env),
                "noise": rollout.noise,
                "fresh_x": fresh.position,
                "fresh_task": task(fresh),
                **dict(zip(cases.PARAMETERS, parameters(state.params), strict=True)),
                "mean": state.norm_state.mean.float(),
                "var": variance(state.norm_state).float(),
                "limit": torch.tensor(args.limit / args.num_envs),
                "gradient": torch.cat([x.flatten() for x in parameters(after.opt_state.mu)]) / (1 - BETA1),
                "objective": after.metrics["objective"],
            },
        )
    restarted = (after.env_state.elapsed < start.elapsed + args.horizon).float().mean().item()
    return {"clipped_fraction": clipped, "restarted_fraction": restarted}


def parameters(params: Any) -> list[Any]:
    """Our parameters, or a tree of their shape, in the order of :data:`peers.case.PARAMETERS`."""
    layers = params["actor"]["layers"]
    return [*(layer["weight"] for layer in layers), *(layer["bias"] for layer in layers), params["log_std"]]


def prepare_eager(args: argparse.Namespace) -> tuple[Callable[[], Any], int, dict[str, Any]]:
    """Build, make the first update, check against ours, warm up."""
    import numpy as np
    import torch

    torch.set_num_threads(int(args.threads))
    from eager_point_mass import EagerApg, PointMass, golden, replayed

    apg = EagerApg(PointMass(args.num_envs), args.horizon, args.limit / args.num_envs)
    apg.update()
    first = time.time() - args.started
    golden()

    def repeat(case: dict[str, np.ndarray]) -> tuple[np.ndarray, float]:
        other = EagerApg(replayed(case)(args.num_envs), args.horizon, float(case["limit"]))
        other.mean, other.var = torch.from_numpy(case["mean"]), torch.from_numpy(case["var"])
        with torch.no_grad():
            for parameter, name in zip(other.parameters, cases.PARAMETERS, strict=True):
                parameter.copy_(torch.from_numpy(case[name]))
        other.backward(torch.from_numpy(case["noise"]))
        return np.concatenate([gradient.numpy().ravel() for gradient in other.gradients()]), float(other.objective)

    differences = cases.check(args.cases, repeat)
    for _ in range(3):
        apg.update()
    return apg.update, args.num_envs * args.horizon, {"first_update": first, **differences}


def prepare_products(args: argparse.Namespace) -> tuple[Callable[[], Any], int, dict[str, Any]]:
    """The products of T steps: for each of the three layers one forward, one for the gradient of its input and one for that of its weight."""
    import torch
    from eager_point_mass import LAYERS

    torch.set_num_threads(int(args.threads))
    n = args.num_envs

    def rows_first() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        found = []
        for inputs, outputs, _ in LAYERS:
            x, w, y = torch.randn(n, inputs), torch.randn(outputs, inputs), torch.randn(n, outputs)
            found += [(x, w.T, y), (y, w, torch.empty(n, inputs)), (y.T, x, torch.empty(outputs, inputs))]
        return found

    def rows_last() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        found = []
        for inputs, outputs, _ in LAYERS:
            x, w, y = torch.randn(inputs, n), torch.randn(outputs, inputs), torch.randn(outputs, n)
            found += [(w, x, torch.empty(outputs, n)), (w.T, y, torch.empty(inputs, n)), (y, x.T, torch.empty(outputs, inputs))]
        return found

    def make_call(products: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        def call() -> None:
            for _ in range(args.horizon):
                for a, b, out in products:
                    torch.mm(a, b, out=out)

        return call

    calls = [make_call(rows_first()), make_call(rows_last())]
    taken = []
    for call in calls:
        call()
        start = time.perf_counter()
        for _ in range(3):
            call()
        taken.append(time.perf_counter() - start)
    return calls[taken.index(min(taken))], n * args.horizon, {"layout": ("rows first", "rows last")[taken.index(min(taken))]}


if __name__ == "__main__":
    main()
