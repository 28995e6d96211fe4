"""How fast are MuJoCo steps and gradients through frl, and how right are the gradients?

Stepping: Hopper-v5 in N rows under a 11-64-64-3 tanh policy with Gaussian noise, in float32, from the same distribution of states: ``frl.make_unroll`` over 64
steps, against gymnasium's synchronous and asynchronous vector environments with the same policy in eager torch. Each side runs with 1 and with 2 threads, in a
process each: of the simulator for ours, where torch has one thread, since a waiting one of its pool would take the simulator's core; of torch for gymnasium's
(its asynchronous one has N other processes besides). Blocks of about a second alternate (:mod:`timing`), and each side counts with its better number of
threads. Compilation is not in the rates.

Training: env steps per second of the gradient of an 8-step rollout with respect to the policy, for the central differences that are the default and for the
cheaper ones that a run file may choose. No peer is known to compare them with.

Gradients: the derivative of a return of 32 steps, in which every row lands on the floor, with respect to all of its actions in float64, against central
differences of the return that plain ``mujoco.mj_step`` computes in one unbroken simulation.

    python benchmarks/mujoco.py
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timing

# This file is called as the package that it measures.
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent]

STEPS = 64  # of one call
HORIZON = 32  # of the gradient that is checked
SHORT = 8  # of the gradients that are timed
PARTS = ("stepping", "training", "gradients")
SIDES = ("frl", "sync", "async")
VARIANTS = {"central": {}, "one-sided": {"centered": False}, "one-sided Euler": {"centered": False, "gradient_integrator": "euler"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    parser.add_argument("--quick", action="store_true", help="3 short rounds instead of 7: a trial, not a measurement")
    parser.add_argument("--cache", help="folder that keeps compiled kernels for the next call (default: a new one each time)")
    parser.add_argument("--out", help="append the JSON line to this file")
    parser.add_argument("--worker", choices=(*SIDES, *VARIANTS), help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)  # of the simulator
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is None:
        row = measure(args)
        print(table(row))
        timing.emit(row, args.out)
        return
    prepare = prepare_gymnasium if args.worker in SIDES[1:] else prepare_frl if args.worker == "frl" else prepare_gradient
    timing.serve(lambda: prepare(args), seconds=0.3 if args.quick else 1.0)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    conditions = timing.conditions("torch", "mujoco", "gymnasium", "frl")
    with contextlib.ExitStack() as stack:
        kept = args.cache or stack.enter_context(tempfile.TemporaryDirectory(prefix="frl-inductor-"))

        def start(side: str, n: int) -> timing.Worker:
            command = [__file__, "--worker", side, "--threads", str(n), "--num-envs", str(args.num_envs), *(["--quick"] if args.quick else [])]
            worker = timing.Worker(command, n if side in SIDES[1:] else 1, {"TORCHINDUCTOR_CACHE_DIR": str(Path(kept) / "kernels")})
            stack.callback(worker.close)
            return worker

        rounds = 3 if args.quick else 7
        found: dict[str, Any] = {}
        if "stepping" in args.parts:
            found |= stepping(timing.alternate({(side, n): start(side, n) for side in SIDES for n in (1, 2)}, rounds))
        if "training" in args.parts:
            rates = timing.alternate({variant: start(variant, 2) for variant in VARIANTS}, rounds)
            found["gradient_env_steps_per_s"] = {variant: statistics.median(values) for variant, values in rates.items()}
    if "gradients" in args.parts:
        found["gradient_error"] = gradient_error(4 if args.quick else 16)
    return {"benchmark": "mujoco", "env": "Hopper-v5", "num_envs": args.num_envs, **found, **conditions, "loadavg_after": os.getloadavg()[0]}


def stepping(rates: dict[tuple[str, int], list[float]]) -> dict[str, Any]:
    """Rates of all sides, and ratios of ours to the others', each with its better number of threads."""
    ours, *others = (timing.best({key: rates[key] for key in rates if key[0] == side}) for side in SIDES)
    found: dict[str, Any] = {"env_steps_per_s": {f"{side}_{n}_threads": statistics.median(values) for (side, n), values in rates.items()}}
    for other in others:
        pairs = [a / b for a, b in zip(rates[ours], rates[other], strict=True)]
        found[f"over_{other[0]}"] = {"ratio": statistics.median(rates[ours]) / statistics.median(rates[other]), "spread": timing.spread(pairs)}
    return found


def table(row: dict[str, Any]) -> str:
    """The figures for people."""
    lines = [f"Hopper-v5, N={row['num_envs']}, load {row['loadavg']:.1f} before and {row['loadavg_after']:.1f} after"]
    if "env_steps_per_s" in row:
        rates = row["env_steps_per_s"]
        lines += [f"  {side:<6} {max(rate for name, rate in rates.items() if name.startswith(f'{side}_')):>9,.0f} env steps/s" for side in SIDES]
        for name, wanted in (("sync", 3), ("async", 1.5)):
            found = row[f"over_{name}"]
            lines.append(f"  frl over {name}: {found['ratio']:.2f} ({found['spread'][0]:.2f} to {found['spread'][1]:.2f}), wanted at least {wanted}")
    lines += [f"  gradient, {name}: {value:,.0f} env steps/s" for name, value in row.get("gradient_env_steps_per_s", {}).items()]
    if "gradient_error" in row:
        errors = row["gradient_error"]
        lines.append(
            f"  gradient against central differences of mj_step, {HORIZON} steps, {errors['rows']} rows that all land: "
            f"relative error at most {errors['largest']:.1e}, median {errors['median']:.1e}, wanted at most 1e-5"
        )
    return "\n".join(lines)


# -- the sides -------------------------------------------------------------------------------------------------------------------------------------


def build(num_envs: int, **options: Any) -> tuple[Any, Any, Any]:
    """Rows of Hopper, a policy and its parameters."""
    import frl
    from frl import rng
    from frl.envs.mujoco.tasks import hopper

    env = frl.make_vec_env(hopper(**options), num_envs)
    network = {"type": "mlp", "network_cfg": {"hidden_sizes": [64, 64], "activation": "tanh", "orthogonal_init": [1.414, 1.414, 0.01]}}
    policy = frl.actor_only(11, 3, network=network, initial_log_std=-0.5)
    return env, policy, policy.init(rng.key(0))


def prepare_frl(args: argparse.Namespace) -> tuple[Callable[[], Any], int, dict[str, Any]]:
    import frl
    from frl import rng

    env, policy, params = build(args.num_envs, threads=args.threads)
    unroll = frl.make_unroll(env, policy, record=("obs",), horizon=STEPS)
    state = [env.reset(env.row_keys(rng.key(1)), env.default_params), rng.key(2)]

    def call() -> None:
        state[1] = rng.fold_in(state[1], 1)
        noise = policy.noise(state[1], STEPS, args.num_envs)
        state[0] = unroll(params, (), state[0], env.default_params, noise)[0]

    call()
    call()
    return call, STEPS * args.num_envs, {}


def prepare_gymnasium(args: argparse.Namespace) -> tuple[Callable[[], Any], int, dict[str, Any]]:
    import gymnasium
    import torch

    _, policy, params = build(1)
    generator = torch.Generator().manual_seed(0)
    vec = gymnasium.make_vec("Hopper-v5", num_envs=args.num_envs, vectorization_mode=args.worker)
    seen = [vec.reset(seed=0)[0]]

    @torch.no_grad()
    def call() -> None:
        for _ in range(STEPS):
            dist = policy.apply(params, torch.from_numpy(seen[0]).float())
            noise = torch.randn(args.num_envs, 3, generator=generator)
            action = policy.distribution.sample(dist, noise).action
            seen[0] = vec.step(action.numpy())[0]

    call()
    return call, STEPS * args.num_envs, {}


def prepare_gradient(args: argparse.Namespace) -> tuple[Callable[[], Any], int, dict[str, Any]]:
    import torch

    import frl
    from frl import rng
    from frl.types import Rollout

    env, policy, params = build(args.num_envs, threads=args.threads, **VARIANTS[args.worker])
    unroll = frl.make_unroll(env, policy, record=(), attach=(), horizon=SHORT)
    noise = policy.noise(rng.key(2), SHORT, args.num_envs)
    state = [env.reset(env.row_keys(rng.key(1)), env.default_params)]

    def call() -> None:
        rollout = Rollout(env_state=state[0], env_params=env.default_params, noise=noise, objective_scale=torch.ones(()))
        state[0] = frl.apg_gradient(unroll, params, (), rollout)[1]["env_state"]

    call()
    call()
    return call, SHORT * args.num_envs, {}


# -- right ----------------------------------------------------------------------------------------------------------------------------------------


def gradient_error(rows: int) -> dict[str, Any]:
    """Relative error, row by row, of the gradient of the sum of forward positions and of a random function of the last state."""
    import mujoco
    import numpy as np
    import torch

    from frl.envs.mujoco import Simulator, simulate
    from frl.envs.mujoco.model import gymnasium_model

    model = gymnasium_model("hopper")
    simulator = Simulator(model, 4)
    random = np.random.default_rng(0)
    start = simulator.start + random.uniform(-5e-3, 5e-3, (rows, simulator.size))
    actions = random.uniform(-0.3, 0.3, (HORIZON, rows, model.nu))
    weights = random.normal(size=(rows, simulator.size))

    def value(actions: torch.Tensor) -> torch.Tensor:
        state, total = torch.from_numpy(start), torch.zeros((), dtype=torch.float64)
        for action in actions:
            state = simulate(simulator, state, action)[0]
            total = total + state[:, 0].sum()
        return total + (state * torch.from_numpy(weights)).sum()

    gradient = torch.func.grad(value)(torch.from_numpy(actions)).numpy()

    def play(row: int, actions: np.ndarray) -> tuple[float, list[int]]:
        data, total, contacts = mujoco.MjData(model), 0.0, []
        data.qpos[:], data.qvel[:] = start[row, : model.nq], start[row, model.nq :]
        for action in actions:
            data.ctrl[:] = action
            mujoco.mj_step(model, data, 4)
            total += data.qpos[0]
            contacts.append(int(data.ncon))
        return total + float(np.concatenate((data.qpos, data.qvel)) @ weights[row]), contacts

    errors, size = [], 1e-6
    for row in range(rows):
        contacts = play(row, actions[:, row])[1]
        if contacts[0] or not contacts[-1]:
            raise SystemExit(f"row {row} does not land: contacts {contacts}")
        slopes = np.zeros((HORIZON, model.nu))
        for t in range(HORIZON):
            for j in range(model.nu):
                there, back = actions[:, row].copy(), actions[:, row].copy()
                there[t, j] += size
                back[t, j] -= size
                slopes[t, j] = (play(row, there)[0] - play(row, back)[0]) / (2 * size)
        errors.append(float(np.linalg.norm(gradient[:, row] - slopes) / np.linalg.norm(slopes)))
    return {"rows": rows, "largest": max(errors), "median": statistics.median(errors)}


if __name__ == "__main__":
    main()
