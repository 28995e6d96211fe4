"""How fast is a complete APG update, against the same update written by hand in eager PyTorch?

An update is: collect (noise, fresh states), roll out PointMass for T steps in N rows under a 14-64-64-2 tanh policy on normalised observations, the gradient
with the action adjoint clipped row by row at every step, global-norm clip 0.5, Adam at 2.5e-4, new observation statistics. float32, gamma 0.99, one segment.
The other side is :mod:`eager_point_mass`.

Method: each side runs with 1 and with 2 threads, in a process each. Blocks of about a second alternate (:mod:`timing`), and each side counts with its better
number of threads. Compilation is not in the rates: ``seconds_to_first_update_cold`` is from the start of the process, imports included, to the end of the
first update, with an empty Inductor cache and no other worker at work; ``seconds_to_first_update_warm`` is the same in a new process with the cache that
the first one left.

Before any timing, the same start state, parameters, statistics, noise and fresh states go through one update of both sides, in the middle of training, with
rows that finish on the way and with the adjoint limit that is timed: the gradients that reach Adam must agree to 1e-4, and a good part of the rows must be
clipped.

    python benchmarks/apg_update.py --num-envs 64 --horizon 64
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
from typing import Any

import timing

TOLERANCE = 1e-4  # relative difference of the gradients, 2-norm
CLIPPED = (0.1, 0.9)  # range that the fraction of clipped rows must lie in
BETA1 = 0.9  # Adam's, default of both sides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--horizon", type=int, default=64)
    parser.add_argument("--threads", choices=("auto", "1", "2"), default="auto", help="auto: the better of 1 and 2, for each side by itself")
    parser.add_argument("--limit", type=float, default=0.1, help="adjoint limit times N (the objective is a mean over rows, so adjoints shrink like 1/N)")
    parser.add_argument("--quick", action="store_true", help="3 short rounds instead of 9: a trial, not a measurement")
    parser.add_argument("--out", help="append the JSON line to this file")
    parser.add_argument("--worker", choices=("frl", "eager"), help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is None:
        timing.emit(measure(args), args.out)
        return
    prepare = prepare_frl if args.worker == "frl" else prepare_eager
    timing.serve(lambda: prepare(args), seconds=0.2 if args.quick else 0.8)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Start the workers one after the other, let them work in turns, and put the figures together."""
    conditions = timing.conditions("torch", "frl")
    threads = (1, 2) if args.threads == "auto" else (int(args.threads),)
    with contextlib.ExitStack() as stack:
        caches = {n: stack.enter_context(tempfile.TemporaryDirectory(prefix="frl-inductor-")) for n in threads}

        def start(side: str, n: int) -> timing.Worker:
            options = {"--worker": side, "--threads": n, "--num-envs": args.num_envs, "--horizon": args.horizon, "--limit": args.limit}
            command = [__file__, *(str(x) for pair in options.items() for x in pair), *(["--quick"] if args.quick else [])]
            worker = timing.Worker(command, n, {"TORCHINDUCTOR_CACHE_DIR": caches[n], "TMPDIR": caches[n]})
            stack.callback(worker.close)
            return worker

        workers = {(side, n): start(side, n) for side in ("frl", "eager") for n in threads}
        rates = timing.alternate(workers, 3 if args.quick else 9)
        frl = timing.best({key: rates[key] for key in rates if key[0] == "frl"})
        eager = timing.best({key: rates[key] for key in rates if key[0] == "eager"})
        warm = start(*frl).ready
        cold, other = workers[frl].ready, workers[eager].ready
    medians = {key: statistics.median(values) for key, values in rates.items()}
    return {
        "benchmark": "apg_update",
        "num_envs": args.num_envs,
        "horizon": args.horizon,
        "frl_env_steps_per_s": medians[frl],
        "frl_spread": timing.spread(rates[frl]),
        "frl_threads": frl[1],
        "eager_env_steps_per_s": medians[eager],
        "eager_spread": timing.spread(rates[eager]),
        "eager_threads": eager[1],
        "ratio": medians[frl] / medians[eager],
        "ratio_spread": timing.spread([a / b for a, b in zip(rates[frl], rates[eager], strict=True)]),
        "medians": {f"{side}_{n}_threads": median for (side, n), median in medians.items()},
        "rounds": len(rates[frl]),
        "compile_seconds": cold["compile_seconds"],
        "seconds_to_first_update_cold": cold["first_update"],
        "seconds_to_first_update_warm": warm["first_update"],
        "eager_seconds_to_first_update": other["first_update"],
        "gradient_relative_difference": max(workers["frl", n].ready["difference"] for n in threads),
        "adjoint_limit": args.limit / args.num_envs,
        "clipped_fraction": cold["clipped_fraction"],
        "restarted_fraction": cold["restarted_fraction"],
        **conditions,
        "loadavg_after": os.getloadavg()[0],
    }


# -- the two sides ---------------------------------------------------------------------------------------------------------------------------------


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
    """Build, make the first update, check against the other side, warm up."""
    import torch

    torch.set_num_threads(int(args.threads))
    # An update that fell back to eager must not be timed as a compiled one.
    warnings.filterwarnings("error", message="frl could not compile")
    from eager_point_mass import GAMMA, LEARNING_RATE, MAX_GRAD_NORM

    from frl import compile as compiler
    from frl import rng
    from frl.algorithms.apg import ApgConfig, make_apg
    from frl.optim import adam

    env, policy, normalizer = build(args.num_envs)
    config = ApgConfig(gamma=GAMMA, max_grad_norm=MAX_GRAD_NORM, segment_length=args.horizon, action_adjoint_max_norm=args.limit / args.num_envs)
    apg = make_apg(env, policy, adam(), config, normalizer=normalizer, learning_rate=LEARNING_RATE)
    state, ready = apg.init(rng.key(0)), False

    def update() -> None:
        nonlocal state
        graphs = compiler.graph_count()
        state, rollout = apg.collect(state)
        state = apg.update(state, rollout)
        if ready and compiler.graph_count() != graphs:
            raise RuntimeError("a timed update compiled a graph")

    update()
    first = time.time() - args.started
    # The check is where the time limit falls into the rollout, so that it covers rows that start again.
    for _ in range(99 // args.horizon - 1):
        update()
    state, rollout = apg.collect(state)
    state = state._replace(opt_state=adam().init(state.params))
    after = apg.update(state, rollout)
    facts = {"first_update": first, "compile_seconds": compiler.compile_seconds(), **compare(args, env, state, rollout, after)}
    for _ in range(3):
        update()
    ready = True
    return update, args.num_envs * args.horizon, facts


def prepare_eager(args: argparse.Namespace) -> tuple[Callable[[], Any], int, dict[str, Any]]:
    """Check the environment, build, warm up."""
    import torch

    torch.set_num_threads(int(args.threads))
    from eager_point_mass import EagerApg, PointMass, golden

    golden()
    apg = EagerApg(PointMass(args.num_envs), args.horizon, args.limit / args.num_envs)
    apg.update()
    first = time.time() - args.started
    for _ in range(3):
        apg.update()
    return apg.update, args.num_envs * args.horizon, {"first_update": first}


def compare(args: argparse.Namespace, env: Any, state: Any, rollout: Any, after: Any) -> dict[str, float]:
    """Put the inputs of an update of ours through the eager side.

    Args:
        args: the command line.
        env: our environment.
        state: before the update, with fresh moments: Adam's first moment after it is then ``(1 - beta1)`` times the gradient that reached Adam.
        rollout: inputs of the update.
        after: the state after it.

    Returns:
        ``difference``, relative in the 2-norm; ``clipped_fraction``, of all rows at all steps; ``restarted_fraction``, of the rows.
    """
    import torch
    from eager_point_mass import EagerApg, PointMass

    from frl.normalizers import variance

    start = rollout.env_state
    fresh = env.draw_resets(start, args.horizon, rollout.env_params)

    def task(states: Any) -> torch.Tensor:
        return torch.cat((states.goal, states.obstacles.flatten(-2), states.radii), -1)

    class Replayed(PointMass):
        """Rows that are done start again from the states that ours were given."""

        clock = -1

        def draw(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().draw(rows) if self.clock < 0 else (fresh.position[self.clock, rows], task(fresh)[self.clock, rows])

        def step(self, action: torch.Tensor) -> tuple[torch.Tensor, ...]:
            self.clock += 1
            return super().step(action)

    other = Replayed(args.num_envs)
    other.x, other.v, other.a, other.task, other.t = start.env.position, start.env.velocity, start.env.last_action, task(start.env), start.elapsed
    eager = EagerApg(other, args.horizon, args.limit / args.num_envs)
    eager.mean, eager.var = state.norm_state.mean.float(), variance(state.norm_state).float()
    with torch.no_grad():
        for mine, theirs in zip(eager.parameters, parameters(state.params), strict=True):
            mine.copy_(theirs)
    eager.backward(rollout.noise)
    expected = torch.cat([gradient.flatten() for gradient in eager.gradients()])
    got = torch.cat([x.flatten() for x in parameters(after.opt_state.mu)]) / (1 - BETA1)
    difference = ((got - expected).norm() / expected.norm()).item()
    clipped = after.metrics["action_adjoint_clipped_fraction"].item()
    restarted = (after.env_state.elapsed < start.elapsed + args.horizon).float().mean().item()
    if not difference <= TOLERANCE:
        raise SystemExit(f"the two sides compute different gradients: relative difference {difference:.3g}, at most {TOLERANCE:g} expected")
    if not CLIPPED[0] <= clipped <= CLIPPED[1]:
        raise SystemExit(f"the adjoint limit clips {clipped:.3g} of the rows, between {CLIPPED[0]} and {CLIPPED[1]} expected; choose another --limit")
    return {"difference": difference, "clipped_fraction": clipped, "restarted_fraction": restarted}


def parameters(params: Any) -> list[Any]:
    """Our parameters, or a tree of their shape, in the order of the other side's."""
    layers = params["actor"]["layers"]
    return [*(layer["weight"] for layer in layers), *(layer["bias"] for layer in layers), params["log_std"]]


if __name__ == "__main__":
    main()
