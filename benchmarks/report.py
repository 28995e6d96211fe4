"""Runs the benchmarks against all peers and writes what came out: ``results/report.json``, a table ``results/report.md`` with a met or missed mark for each
target (:mod:`reach`), and pictures.

The virtual environments of the peers are made first where they are missing (``peers/setup all``). A peer that cannot be installed, fails, or computes other
numbers than we do is a line that says so. Each part runs in a process of its own, one after the other, and what it printed is kept in ``build/report``, so
that a report that was stopped goes on where it was; parts that were measured with other sources of the library or of the benchmarks are measured again.
Nothing else should run on the machine.

``--compare`` ends with exit status 1 when a ratio is below that of ``baseline.json`` by more than the tolerance, and says which. The baseline holds ratios and
no times, so it is good on another machine of the same class, in the same kind of run (quick or not) that it was made by.

    python benchmarks/report.py --quick
    python benchmarks/report.py --compare
    python benchmarks/report.py --write-baseline --readme
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reach
import timing
from peers.interpreters import NAMES, SCRIPTS, interpreter, versions

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS, BASELINE = HERE / "results", HERE / "baseline.json"
BEGIN, END = "<!-- written by benchmarks/report.py -->", "<!-- end of what benchmarks/report.py wrote -->"
PEER_PACKAGES = {"jax": ("jax", "rejax"), "brax": ("brax", "jax"), "embodichain": ("embodichain",), "sb3": ("stable_baselines3",)}
PEER_PACKAGES |= {"torchrl": ("torchrl",), "torchopt": ("torchopt",)}


SIDES = {"eager": "eager autograd", "jax": "JAX lax.scan", "jax_split": "JAX, rows on 2 devices", "embodichain": "reference"}


@dataclass(frozen=True)
class Part:
    """One call of a script.

    Attributes:
        name: also that of its file.
        command: script and arguments.
        limit: seconds after which it is ended.
    """

    name: str
    command: tuple[str, ...]
    limit: float = 1200.0


PARTS = (
    Part("apg_64", ("apg_update.py", "--num-envs", "64", "--horizon", "64")),
    Part("optimizer_10k", ("optimizer.py", "--size", "10k")),
    Part("optimizer_20M", ("optimizer.py", "--size", "20M")),
    Part("memory", ("memory.py", "--modes", "recompute", "eager", "--horizons", "1024")),
    Part("cold_start", ("cold_start.py",)),
    Part("ppo", ("ppo.py",)),
    Part("adjoint_clip", ("adjoint_clip.py",)),
    Part("growth_steps", ("growth.py", "--over", "steps"), 2400.0),
    Part("apg_1024", ("apg_update.py", "--num-envs", "1024", "--horizon", "64")),
    Part("apg_4096", ("apg_update.py", "--num-envs", "4096", "--horizon", "32")),
    Part("growth_rows", ("growth.py", "--over", "rows"), 2400.0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short rounds and fewer points: a trial, not a measurement")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], metavar="PART", help="run these alone; the others are taken where they are")
    parser.add_argument("--fresh", action="store_true", help="forget the parts of a report that was stopped")
    parser.add_argument("--compare", action="store_true", help="compare with the baseline (with --only, these parts); exit status 1 when a ratio has fallen")
    parser.add_argument("--tolerance", type=float, default=reach.TOLERANCE, help="relative fall that is let pass (default %(default)s)")
    parser.add_argument("--write-baseline", action="store_true", help="make this run the baseline")
    parser.add_argument("--readme", action="store_true", help="put the table into README.md")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the workers are ended too
    folder, sources = ROOT / "build" / "report" / ("quick" if args.quick else "full"), fingerprint()
    folder.mkdir(parents=True, exist_ok=True)
    if args.fresh:
        for path in folder.glob("*.json"):
            path.unlink()
    say("environments of the peers")
    missing = prepare_peers()
    rows, failed = {}, {}
    for part in PARTS:
        kept = read(folder / f"{part.name}.json", sources)
        if kept is None and args.only and part.name not in args.only:
            failed[part.name] = "not asked for"
            continue
        if kept is None:
            say(part.name)
            kept, message = run(part, args.quick)
            if message:
                say(f"{part.name}: {message}")
                failed[part.name] = message
                continue
            write(folder / f"{part.name}.json", {"sources": sources, "rows": kept})
        rows[part.name] = kept
    report = {
        "quick": args.quick,
        "machine": machine(),
        "versions": timing.conditions("torch", "frl", "gymnasium", "numpy"),
        "peer_versions": {name: {package: versions(name).get(package) for package in packages} for name, packages in PEER_PACKAGES.items()},
        "failed": {**failed, **{f"environment of {name}": "could not be made" for name in missing}},
        "parts": rows,
    }
    found = reach.figures(rows)
    report["reach"] = {target.key: verdict(target, found.get(target.key)) for target in reach.targets()}
    RESULTS.mkdir(exist_ok=True)
    write(RESULTS / "report.json", report)
    pictures = draw(rows)
    text = markdown(report, found, pictures)
    (RESULTS / "report.md").write_text(text, encoding="utf-8")
    print(reach.table(found, lambda target: reason(target, report)))
    say(f"written: {RESULTS.relative_to(ROOT)}/report.md, report.json, {', '.join(pictures)}")
    if args.readme:
        into_readme(markdown(report, found, pictures, f"{RESULTS.relative_to(ROOT)}/"))
    if not failed:
        for part in PARTS:
            (folder / f"{part.name}.json").unlink()
    status = compare(found, args) if args.compare else 0
    if args.write_baseline:
        write(BASELINE, {"quick": args.quick, "machine": report["machine"]["processor"], "ratios": reach.baseline(found)})
        say(f"written: {BASELINE.relative_to(ROOT)}")
    sys.exit(status)


def compare(found: Mapping[str, reach.Figure], args: argparse.Namespace) -> int:
    """Say what has fallen; the exit status."""
    if not BASELINE.exists():
        say(f"{BASELINE.relative_to(ROOT)} does not exist; make it with --write-baseline")
        return 1
    before = json.loads(BASELINE.read_text(encoding="utf-8"))
    if before["quick"] != args.quick:
        say(f"the baseline was made {'with' if before['quick'] else 'without'} --quick: the comparison is rough")
    wanted = {key: ratio for key, ratio in before["ratios"].items() if not args.only or reach.part_of(key) in args.only}
    if not wanted:
        say("the baseline holds nothing to compare with; make it with --write-baseline")
        return 1
    worse = reach.fallen(wanted, reach.baseline(found), args.tolerance)
    for sentence in worse:
        print(f"fallen by more than {args.tolerance:.0%}: {sentence}")
    if not worse:
        print(f"no ratio has fallen by more than {args.tolerance:.0%} below the baseline")
    return 1 if worse else 0


# -- parts ---------------------------------------------------------------------------------------------------------------------------------------


def prepare_peers() -> list[str]:
    """Make the environments; names of those that could not be made."""
    if subprocess.run(["bash", str(SCRIPTS / "setup"), "all"], stdout=subprocess.DEVNULL, check=False).returncode == 0:
        return []
    return [name for name in NAMES if not (interpreter(name).parents[1] / "complete").exists()]


def run(part: Part, quick: bool) -> tuple[list[dict[str, Any]], str]:
    """Rows of a part, and what went wrong."""
    script, *arguments = part.command
    command = [sys.executable, str(HERE / script), *arguments, *(["--quick"] if quick else [])]
    # A session of its own, so that its workers can be ended with it.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment(), start_new_session=True)
    try:
        out, errors = process.communicate(timeout=part.limit)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as ended:
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate()
        if isinstance(ended, KeyboardInterrupt):
            raise
        return [], f"not finished after {part.limit:.0f} s"
    if process.returncode:
        print(errors, file=sys.stderr)
        last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")
        return [], f"exit status {process.returncode}: {last[-300:]}"
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")], ""


def environment() -> dict[str, str]:
    """Of the parts: this checkout is what is measured. OpenBLAS picks its kernels by itself, as numpy and jax come."""
    kept = {name: value for name, value in os.environ.items() if name not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "WANDB_MODE": "disabled"}


def fingerprint() -> str:
    """Of what is measured and what measures it."""
    files = [*(ROOT / "frl").rglob("*.py"), *HERE.rglob("*.py")]
    digest = hashlib.sha256()
    for path in sorted(files):
        if path.name not in ("report.py", "reach.py"):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def read(path: Path, sources: str) -> list[dict[str, Any]] | None:
    """Rows that are there already, if they are of the same sources."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return kept["rows"] if kept["sources"] == sources else None


def write(path: Path, value: Any) -> None:
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def verdict(target: reach.Target, figure: reach.Figure | None) -> dict[str, Any]:
    """A line of the table as values."""
    values = {} if figure is None else {"value": figure.value, "spread": figure.spread, "against": figure.against}
    return {"bound": target.bound, "at_least": target.at_least, "verdict": reach.judge(target, figure), **values}


# -- text ----------------------------------------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Processor, cores, memory, system."""
    fields: dict[str, str] = {}
    sizes = {"MemTotal": 0}
    if Path("/proc/cpuinfo").exists():
        fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())}
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines()}
    flags = fields.get("flags", "").split()
    vectors = "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else "no AVX2"
    return {
        "processor": f"{fields.get('model name', platform.processor() or platform.machine())} ({vectors})",
        "cores": os.cpu_count(),
        "memory_gib": round(sizes["MemTotal"] / 2**20),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
    }


def reason(target: reach.Target, report: Mapping[str, Any]) -> str:
    """Why a target has no figure."""
    part, side = reach.part_of(target.key), target.key.partition("/")[2]
    if part in report["failed"]:
        return report["failed"][part]
    told = [row["failed"] for row in report["parts"].get(part, ()) if "failed" in row]
    return next((f"{name}: {words}" for failures in told for name, words in failures.items() if name.startswith(side[:3])), "")


def markdown(report: Mapping[str, Any], found: Mapping[str, reach.Figure], pictures: Sequence[str], where: str = "") -> str:
    """The report; ``where`` is the way to the pictures."""
    is_on, using, parts = report["machine"], report["versions"], report["parts"]
    rivals = ", ".join(f"{package} {number}" for packages in report["peer_versions"].values() for package, number in packages.items() if number)
    kind = "`python benchmarks/report.py --quick` (a trial: short rounds)" if report["quick"] else "`python benchmarks/report.py`"
    lines = [
        f"{kind} on {is_on['cores']} cores of {is_on['processor']}, {is_on['memory_gib']} GiB, {is_on['system']}; Python {using['python']}, "
        f"torch {using['torch']}, float32; {rivals}. Load average at the start of the parts: {load(parts)}. "
        "Medians over alternating blocks of one run, in brackets the smallest and the largest.",
        "",
        reach.table(found, lambda target: reason(target, report)),
    ]
    lines += [f"![{name.removesuffix('.png').replace('_', ' ')}]({where}{name})" for name in pictures] + [""]
    speeds = [(part, row) for part in ("apg_64", "apg_1024", "apg_4096") for row in parts.get(part, ())]
    if speeds:
        sides = list(dict.fromkeys(side for _, row in speeds for side in row["env_steps_per_s"]))
        lines += [
            "Complete APG updates, thousand env steps/s:",
            "",
            "| N x T | " + " | ".join(label(side) for side in sides) + " |",
            "|---|" + "---:|" * len(sides),
        ]
        for _, row in speeds:
            cells = [f"{row['env_steps_per_s'][side] / 1e3:,.0f}" if side in row["env_steps_per_s"] else "failed" for side in sides]
            lines.append(f"| {row['num_envs']} x {row['horizon']} | " + " | ".join(cells) + " |")
        row = speeds[0][1]
        first = ", ".join(f"{label(side)} {seconds:.1f}" for side, seconds in row["seconds_to_first_update"].items())
        worst = [max((row[name] or 0.0) for _, row in speeds) for name in ("gradient_difference", "return_difference")]
        lines += [
            "",
            f"Before timing, gradients agree to {worst[0]:.1e} and returns to {worst[1]:.1e} with {', '.join(label(side) for side in row['checked_against'])}. "
            f"Seconds from the start of a process to its first update at N=64: {first}.",
            "",
        ]
    for row in parts.get("cold_start", ()):
        lines += [
            f"`frl train {row['config']}`, whose first update is eager, has done 8 updates after {row['cold_settled_seconds']:.1f} s with an empty cache and "
            f"after {row['warm_settled_seconds']:.1f} s with a full one; `import torch` alone takes {row['import_torch_seconds']:.1f} s.",
            "",
        ]
    for row in parts.get("ppo", ()):
        rates = ", ".join(f"{side} {rate / 1e3:,.0f}k" for side, rate in row["env_steps_per_s"].items())
        lines += [f"PPO on CartPole, env steps/s: {rates}.", ""]
    for size in ("10k", "20M"):
        for row in parts.get(f"optimizer_{size}", ()):
            times = ", ".join(f"{side} {time / 1e3:.3g}" for side, time in row["us_per_step"].items())
            lines += [f"Adam with a global clip, {size} parameters, ms: {times}.", ""]
    peaks = [f"{row['mode']} {row['peak_mib']:.0f}" for row in parts.get("memory", ()) if "peak_mib" in row]
    if peaks:
        lines += [f"Peak memory of a gradient at N=1024, T=1024, MiB: {', '.join(peaks)}.", ""]
    told = {name: words for name, words in report["failed"].items() if words != "not asked for"}
    told |= {f"{part}, {side}": words for part, rows in parts.items() for row in rows for side, words in row.get("failed", {}).items()}
    if told:
        lines += ["Failed:", "", *(f"* {name}: {' '.join(words.split())}" for name, words in told.items()), ""]
    return "\n".join(lines)


def label(side: str) -> str:
    return SIDES.get(side, side)


def load(parts: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    seen = [row["loadavg"] for rows in parts.values() for row in rows if "loadavg" in row]
    return f"{min(seen):.1f} to {max(seen):.1f}" if seen else "unknown"


def into_readme(text: str) -> None:
    """Put the report between its two marks."""
    path = ROOT / "README.md"
    before, found, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not (found and closed):
        raise SystemExit(f"README.md lacks the lines '{BEGIN}' and '{END}'")
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


# -- pictures ------------------------------------------------------------------------------------------------------------------------------------


def draw(parts: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Pictures of what was measured: their file names."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    made = []
    speeds = [row for part in ("apg_64", "apg_1024", "apg_4096") for row in parts.get(part, ())]
    if speeds:
        sides = list(dict.fromkeys(side for row in speeds for side in row["env_steps_per_s"] if side != "products"))
        figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
        width = 0.85 / len(sides)
        for i, side in enumerate(sides):
            has = [(j, row) for j, row in enumerate(speeds) if side in row["env_steps_per_s"]]
            heights = [row["env_steps_per_s"][side] / 1e3 for _, row in has]
            low = [max(0.0, y - row["spread"][side][0] / 1e3) for y, (_, row) in zip(heights, has, strict=True)]
            high = [max(0.0, row["spread"][side][1] / 1e3 - y) for y, (_, row) in zip(heights, has, strict=True)]
            places = [j + (i - (len(sides) - 1) / 2) * width for j, _ in has]
            colour = "tab:red" if side == "frl" else plt.get_cmap("Blues")(0.3 + 0.6 * i / len(sides))
            bars = axes.bar(places, heights, width, yerr=(low, high), label=label(side), color=colour, error_kw={"lw": 0.8, "ecolor": "0.4"})
            axes.bar_label(bars, [f"{y:,.0f}" for y in heights], fontsize=7, padding=2)
        axes.margins(y=0.1)
        axes.set_xticks(range(len(speeds)), [f"N={row['num_envs']}, T={row['horizon']}" for row in speeds])
        axes.set_ylabel("thousand env steps/s")
        axes.set_title("A complete APG update on PointMass, two cores")
        figure.legend(loc="outside lower center", ncols=len(sides), fontsize=8, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        made.append(_save(figure, "report_apg.png"))
    growth = [(over, row) for over in ("rows", "steps") for row in parts.get(f"growth_{over}", ())]
    if growth:
        figure, panels = plt.subplots(1, len(growth), figsize=(4.2 * len(growth), 3.6), layout="constrained", squeeze=False)
        for axes, (over, row) in zip(panels[0], growth, strict=True):
            x, y = [point["size"] for point in row["points"]], [point["ns_per_env_step"] for point in row["points"]]
            axes.plot(x, y, "o-", color="tab:red")
            axes.set_xscale("log", base=2)
            axes.set_xticks(x, [str(size) for size in x], rotation=45 if len(x) > 6 else 0)
            axes.set_ylim(0, 1.1 * max(y))
            axes.set_xlabel("rows N, at T=64" if over == "rows" else "steps T, at N=64")
            axes.set_ylabel("ns for an env step of an update")
            axes.grid(alpha=0.3)
        figure.suptitle("How the cost of an APG update grows")
        made.append(_save(figure, "report_growth.png"))
    return made


def _save(figure: Any, name: str) -> str:
    import matplotlib.pyplot as plt

    figure.savefig(RESULTS / name, dpi=130)
    plt.close(figure)
    return name


if __name__ == "__main__":
    main()
