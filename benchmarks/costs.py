"""What does an update spend its time on?

Every statement of the compiled loops is timed by the processor's clock, and put with others of its kind: matrix products, the kernels between them, random
words, sorting. What is left of the wall-clock time is Python and torch: flattening and checking arguments, transforms, allocation, launches. The clock is read
twice for each statement, so that loops over few rows come out a little slower than they are.

One thread unless told otherwise. A worker process runs each case alone, with a compiler cache of its own, for the code is not that of an ordinary run.

    python benchmarks/costs.py                  APG with 64 and 1024 rows, and PPO
    python benchmarks/costs.py --case ppo
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import timing

CASES = ("apg_64", "apg_1024", "ppo")
KINDS = {"mm": "products", "addmm": "products", "bmm": "products", "philox": "random words", "sort": "sorting"}
MARK = "frl costs: "
CLOCK = """
#include <chrono>
#include <cstdio>
#if defined(__x86_64__)
static inline unsigned long long frl_clock() { return __builtin_ia32_rdtsc(); }
#else
static inline unsigned long long frl_clock() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
#endif
static unsigned long long frl_time[%d];
// Tells the nanoseconds of each statement when the process ends.
struct FrlCosts {
  const unsigned long long clock = frl_clock();
  const std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  ~FrlCosts() {
    const double ns = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count(), scale = ns / (frl_clock() - clock);
    fprintf(stderr, "\\n%s%%s [", %s);
    for (int i = 0; i < %d; ++i) fprintf(stderr, "%%s%%.0f", i ? ", " : "", scale * frl_time[i]);
    fprintf(stderr, "]\\n");
  }
} frl_costs;
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--out", help="append the JSON lines to this file")
    parser.add_argument("--worker", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.threads, args.updates)
        return
    for case in args.case:
        timing.emit(measure(case, args.threads, args.updates), args.out)


def measure(case: str, threads: int, updates: int) -> dict[str, Any]:
    conditions = timing.conditions("torch", "frl")
    with tempfile.TemporaryDirectory(prefix="frl-costs-") as folder:
        command = [sys.executable, __file__, "--worker", case, "--threads", str(threads), "--updates", str(updates)]
        environment = {**os.environ, **dict.fromkeys(timing.THREAD_VARIABLES, str(threads)), **timing.compiler_cache(Path(folder))}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    told = json.loads(done.stdout.splitlines()[-1])
    costs: dict[str, float] = defaultdict(float)
    for line in done.stderr.splitlines():
        if line.startswith(MARK):
            labels, figures = told["labels"][line[len(MARK) :].split(" ", 1)[0]], json.loads(line[line.index("[") :])
            for label, nanoseconds in zip(labels, figures, strict=True):
                costs[label] += nanoseconds * 1e-6 / told["runs"]
    native = sum(costs.values())
    rows = dict(sorted(costs.items(), key=lambda item: -item[1]))
    return {
        "benchmark": "costs",
        "case": case,
        "threads": threads,
        "milliseconds": told["milliseconds"],
        "compiled_ms": {label: round(ms, 3) for label, ms in rows.items() if ms >= 0.005},
        "python_and_torch_ms": round(told["milliseconds"] - native, 3),
        **conditions,
    }


def work(case: str, threads: int, updates: int) -> None:
    """Run one case with timed statements, and tell what each statement is; libraries tell their times when the process ends."""
    import torch

    from frl import compile as compiler
    from frl.native import loop as native_loop
    from frl.native import source as native_source

    torch.set_num_threads(threads)
    labels: dict[str, list[str]] = {}
    name = ""
    plain_statements, plain_source, plain_loop = native_source.statements, native_loop.source, compiler.Kernel.loop

    def statements(program: Any, calls: Sequence[tuple], n: int, place: Callable, replaced: dict[int, str]) -> list[str]:
        lines = []
        for i, call in enumerate(calls):
            told = plain_statements(program, [call], n, place, {0: replaced[i]} if i in replaced else {})
            if call[0] in ("beside", "loop"):  # what is inside is timed by itself
                lines += told
                continue
            at = len(program.labels) if hasattr(program, "labels") else 0
            program.labels = [*getattr(program, "labels", []), KINDS.get(call[0], "kernels")]
            lines.append(f"{{ const auto clock = frl_clock(); {' '.join(told)} frl_time[{at}] += frl_clock() - clock; }}")
        return lines

    def source(program: Any, body: list[str], *others: Any, **options: Any) -> str:
        key = f"library_{len(labels)}"
        way = "backward" if "--t" in body[0] else "forward"
        found = getattr(program, "labels", [])
        labels[key] = [f"{name}, {way}: {kind}" for kind in found]
        text, count = plain_source(program, body, *others, **options), max(1, len(found))
        at = text.index("static void run(int64_t length")
        return text[:at] + CLOCK % (count, MARK, json.dumps(key), len(found)) + text[at:]

    def loop(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal name
        outer, name = name, re.sub(r"^_", "", self._name)
        try:
            return plain_loop(self, *args, **options)
        finally:
            name = outer

    with (
        mock.patch.object(native_source, "statements", statements),
        mock.patch.object(native_loop, "source", source),
        mock.patch.object(compiler.Kernel, "loop", loop),
    ):
        update = build(case)
        for _ in range(3):
            update()
    start = time.perf_counter()
    for _ in range(updates):
        update()
    milliseconds = 1e3 * (time.perf_counter() - start) / updates
    print(json.dumps({"labels": labels, "runs": updates + 3, "milliseconds": milliseconds}), flush=True)


def build(case: str) -> Callable[[], None]:
    """An update of one case."""
    from frl import rng

    if case == "ppo":
        import ppo

        algorithm = ppo.make("cartpole", 64, 128, 4, 4)
    else:
        import apg_update

        rows = int(case.removeprefix("apg_"))
        algorithm = apg_update.make(rows, 64, 0.01 / rows)[1]
    state = algorithm.init(rng.key(0))

    def update() -> None:
        nonlocal state
        state, rollout = algorithm.collect(state)
        state = algorithm.update(state, rollout)

    return update


if __name__ == "__main__":
    main()
