"""How does the memory of a rollout's gradient grow with the number of steps?

``torch.func.grad`` of the APG loss through the rollout of PointMass (policy, normalizer and adjoint clip as in ``apg_update.py``) with ``memory="save"``, which
keeps what the backward of each step needs, and with ``memory="recompute"``, which keeps the state at about sqrt(T) boundaries; and the same gradient by a loop
of plain eager autograd, :mod:`eager_point_mass`.

Method: each figure is from a process of its own, with one thread. The gradient is taken once, which compiles everything. Then free memory goes back to the
system, the kernel's high-water mark of resident memory is reset (``/proc/self/clear_refs``), the gradient is taken again, and the mark is read: what it rose
by holds neither imports nor compilation, nor the inputs (start state, noise ``[T, N, 2]``). Linux with glibc only.

- ``peak_mib`` is measured while every larger tensor has pages of its own, so that it is the memory of the tensors that are alive.
- ``resident_mib`` is the same with the allocator as it comes. It also holds freed pieces that the allocator keeps, and varies from run to run.
- ``fresh_states_mib`` is a part of both: the states for rows that finish, drawn for all steps before time starts. It is linear in T whatever the backward does.

The last line has the growth exponents, slopes of log(memory) over log(T): 1 is linear, 0.5 the square root.

    python benchmarks/memory.py
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import timing

MODES = ("save", "recompute", "eager")
LIMIT = 0.1  # adjoint limit times N, as in apg_update.py
M_MMAP_THRESHOLD = -3  # of mallopt(3)
OWN_PAGES = 32768  # bytes from which a tensor gets pages of its own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=1024)
    parser.add_argument("--horizons", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--quick", action="store_true", help="for benchmarks/report.py: changes nothing, a peak needs no repetition")
    parser.add_argument("--one-draw", action="store_true", help="draw the fresh states of all steps by one graph, as make_apg does, instead of in blocks of 16")
    parser.add_argument("--out", help="append the JSON lines to this file")
    parser.add_argument("--worker", choices=MODES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        print(json.dumps(measure(args.worker, args.num_envs, args.horizons[0], args.one_draw)))
        return
    conditions = timing.conditions("torch", "frl")
    found: dict[str, dict[int, dict[str, float]]] = {mode: {} for mode in args.modes}
    for mode in args.modes:
        for horizon in sorted(args.horizons):
            row = {"benchmark": "memory", "mode": mode, "num_envs": args.num_envs, "horizon": horizon}
            if not fits(found[mode], horizon):
                timing.emit({**row, "skipped": "it would take more than half of the memory that is available"}, args.out)
                continue
            found[mode][horizon] = run(mode, horizon, args)
            timing.emit({**row, **found[mode][horizon]}, args.out)
    exponents = {}
    for mode, rows in found.items():
        if len(rows) > 1:
            exponents[mode] = slope({t: row["peak_mib"] for t, row in rows.items()})
            if mode != "eager":
                exponents[f"{mode}_without_fresh_states"] = slope({t: row["peak_mib"] - row["fresh_states_mib"] for t, row in rows.items()})
    timing.emit({"benchmark": "memory", "one_draw": args.one_draw, "growth_exponents": exponents, **conditions}, args.out)


def run(mode: str, horizon: int, args: argparse.Namespace) -> dict[str, float]:
    """:func:`measure` in a new process."""
    command = [sys.executable, __file__, "--worker", mode, "--num-envs", str(args.num_envs), "--horizons", str(horizon)]
    command += ["--one-draw"] if args.one_draw else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **dict.fromkeys(timing.THREAD_VARIABLES, "1")})
    if done.returncode:
        raise SystemExit(f"the measurement of {mode!r} at T={horizon} ended with exit status {done.returncode}; its message is above")
    return json.loads(done.stdout.splitlines()[-1])


def fits(rows: Mapping[int, Mapping[str, float]], horizon: int) -> bool:
    """Whether ``horizon`` steps, by a straight line from the longest measured rollout, take less than half of the available memory."""
    if not rows:
        return True
    longest = max(rows)
    return rows[longest]["resident_mib"] * horizon / longest < size("/proc/meminfo", "MemAvailable") / 2


def slope(points: Mapping[int, float]) -> float:
    """Least-squares slope of log(memory) over log(T)."""
    x, y = [math.log(t) for t in points], [math.log(m) for m in points.values()]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def size(path: str, name: str) -> float:
    """A size in MiB from a file of /proc."""
    with open(path, encoding="ascii") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(name + ":"))


# -- the worker's side -----------------------------------------------------------------------------------------------------------------------------


def measure(mode: str, num_envs: int, horizon: int, one_draw: bool) -> dict[str, float]:
    """The three sizes of the module's description, in MiB."""
    import torch

    torch.set_num_threads(1)
    gradient, states = eager_gradient(num_envs, horizon) if mode == "eager" else frl_gradient(mode, num_envs, horizon, one_draw)
    gradient()
    resident = rise(gradient)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, OWN_PAGES)
    return {"peak_mib": rise(gradient), "resident_mib": resident, "fresh_states_mib": states / 2**20}


def rise(call: Callable[[], Any]) -> float:
    """What a call adds to resident memory at its peak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    before = size("/proc/self/status", "VmRSS")
    call()
    return size("/proc/self/status", "VmHWM") - before


def frl_gradient(mode: str, num_envs: int, horizon: int, one_draw: bool) -> tuple[Callable[[], Any], int]:
    """The gradient as a function without arguments, and the bytes of the fresh states."""
    import torch
    from apg_update import build

    from frl import rng, tree
    from frl.algorithms.apg import apg_gradient
    from frl.rollout import ACTION_LIMIT, make_unroll
    from frl.types import Rollout

    # A gradient that fell back to eager must not pass for a compiled one.
    warnings.filterwarnings("error", message="frl could not compile")
    env, policy, normalizer = build(num_envs)
    unroll = make_unroll(env, policy, normalizer, record=(), adjoint_limits=(ACTION_LIMIT,), horizon=horizon if one_draw else None, memory=mode)
    k_params, k_env, k_noise = rng.split(rng.key(0), 3)
    params, norm_state, env_params = policy.init(k_params), normalizer.init(), env.default_params
    env_state, noise = env.reset(env.row_keys(k_env), env_params), policy.noise(k_noise, horizon, num_envs)
    rollout = Rollout(env_state=env_state, env_params=env_params, noise=noise, objective_scale=torch.ones(()))
    hyper = {ACTION_LIMIT: torch.tensor(LIMIT / num_envs)}

    def gradient() -> Any:
        return apg_gradient(unroll, params, norm_state, rollout, unroll_kwargs={"hyper": hyper})[0]

    return gradient, horizon * sum(x.numel() * x.element_size() for x in tree.leaves(env_state.env))


def eager_gradient(num_envs: int, horizon: int) -> tuple[Callable[[], Any], int]:
    """The same for the eager loop, which draws fresh states only for rows that finish."""
    import torch
    from eager_point_mass import EagerApg, PointMass

    apg = EagerApg(PointMass(num_envs), horizon, LIMIT / num_envs)
    noise = torch.randn(horizon, num_envs, 2)
    return lambda: apg.backward(noise), 0


if __name__ == "__main__":
    main()
