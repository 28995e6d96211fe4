"""What the benchmarks are to reach, what they reached, and whether a ratio has fallen: pure functions on the rows that the scripts print.

A *figure* is a value with its spread over the rounds. Ratios are ours over theirs, except where the name says cost or seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TOLERANCE = 0.2  # relative: how far a ratio may fall below the baseline's


@dataclass(frozen=True)
class Figure:
    """A measured value.

    Attributes:
        value: the median.
        spread: smallest and largest.
        against: the side that it was measured against, where there were several.
    """

    value: float
    spread: tuple[float, float] | None = None
    against: str = ""


@dataclass(frozen=True)
class Target:
    """A line of the table.

    Attributes:
        key: name of the figure; also its name in the baseline.
        work: what was done.
        measure: what was measured, against whom.
        bound: what is to be reached.
        at_least: whether the bound is a lower one.
        unit: behind the numbers: ``"x"``, ``"s"``, ``"%"``.
        ratio: whether the figure can be compared between machines, and so has a place in the baseline.
        tried: what was tried, for a line that is missed.
    """

    key: str
    work: str
    measure: str
    bound: float
    at_least: bool = True
    unit: str = "x"
    ratio: bool = True
    tried: str = ""


def targets() -> list[Target]:
    """The table of what is to be reached."""
    small, middle, large = "APG update, N=64, T=64", "APG update, N=1024, T=64", "APG update, N=4096, T=32"
    start, ppo = "`frl train`, seconds to the first update", "PPO CartPole, collect and update, 64 x 128, 4 x 4"
    return [
        Target("apg_64/jax", small, "speed against JAX `lax.scan`", 1.0, tried=TRIED["apg_small"]),
        Target("apg_64/embodichain", small, "speed against the reference", 20.0, tried=TRIED["apg_small"]),
        Target("apg_64/eager", small, "speed against eager autograd", 14.0, tried=TRIED["apg_small"]),
        Target("apg_1024/jax", middle, "speed against the best JAX arrangement", 1.5, tried=TRIED["apg_large"]),
        Target("apg_1024/embodichain", middle, "speed against the reference", 5.0, tried=TRIED["apg_large"]),
        Target("apg_1024/eager", middle, "speed against eager autograd", 4.0, tried=TRIED["apg_large"]),
        Target("apg_4096/jax", large, "speed against the best of JAX and brax", 1.4, tried=TRIED["apg_large"]),
        Target("apg_4096/embodichain", large, "speed against the reference", 3.0, tried=TRIED["apg_large"]),
        Target("apg_4096/products", large, "share of the arithmetic limit", 40.0, unit="%", tried=TRIED["apg_large"]),
        Target("cold_start/cold", start, "empty compiler cache", 15.0, at_least=False, unit="s", ratio=False, tried=TRIED["cold"]),
        Target("cold_start/warm", start, "full compiler cache", 6.0, at_least=False, unit="s", ratio=False, tried=TRIED["cold"]),
        Target("optimizer_10k/torch", "Adam and global clip, 10k parameters", "speed against torch fused", 1.0, tried=TRIED["optimizer"]),
        Target("optimizer_10k/torchopt", "Adam and global clip, 10k parameters", "speed against torchopt", 3.0, tried=TRIED["optimizer"]),
        Target("optimizer_20M/torch", "Adam and global clip, 20M parameters", "speed against torch fused", 1.0, tried=TRIED["optimizer"]),
        Target("optimizer_20M/torchopt", "Adam and global clip, 20M parameters", "speed against torchopt", 3.0, tried=TRIED["optimizer"]),
        Target("adjoint_clip", "adjoint clip, N=1024, T=64", "time of an update with it over one without", 1.05, at_least=False, tried=TRIED["clip"]),
        Target("ppo/sb3", ppo, "speed against stable-baselines3", 8.0, tried=TRIED["ppo"]),
        Target("ppo/rejax", ppo, "speed against rejax", 1.0, tried=TRIED["ppo"]),
        Target("memory", "gradient, N=1024, T=1024", "peak memory of plain autograd over ours (`recompute`)", 4.0, tried=TRIED["memory"]),
        Target("growth/rows", "N from 16 to 16384, T=64", "largest rise of the cost of a step from point to point", 1.5, at_least=False),
        Target("growth/steps", "T from 16 to 4096, N=64", "largest rise of the cost of a step from point to point", 1.5, at_least=False),
    ]


def part_of(key: str) -> str:
    """The part of a report that a figure comes from."""
    name, _, side = key.partition("/")
    return f"growth_{side}" if name == "growth" else name


TRIED = {
    "apg_small": "the time loop in C++, which calls kernels and products with buffers laid out once; rows in the last dimension; several steps in one graph "
    "(no faster, slower to compile); carry in one tensor (nothing); bias as a row of ones (slower); weight gradients in one product at the end (slower); rows "
    "in two shards (no faster); tables of pointers that are kept between calls; the whole update as one program; multiplications and additions in one "
    "instruction; random words by vectors. Half of what is left is products of 64 x 64 matrices (`costs.py`)",
    "apg_large": "rows in shards, one thread each; rows in the last dimension; saved activations instead of recomputation; resets and noise in one block "
    "before time starts; several steps in one graph (no faster); the bias added where its product is used; the whole update as one program; "
    "multiplications and additions in one instruction; masks in registers",
    "cold": "the first update eager; one step compiled for any horizon; all graphs captured before the first runs, the C++ compiler in the background; one "
    "precompiled header; random words as one operation",
    "optimizer": "the whole step in one compiled graph; loops over one tensor at a time; what is the same for all elements computed once; memory of old "
    "results written again; results written past the cache and into large pages; memory fetched ahead; the norm in one pass",
    "clip": "clip and statistics inside the compiled step",
    "ppo": "collection and all minibatches compiled; minibatches in parts, a thread each; permutations from keys, sorted by digits; advantages in one pass; "
    "bools read by vectors; the bias added where its product is used; collection and update one program each. Two "
    "thirds of an update are products at the processor's peak",
    "memory": "recomputation from about sqrt(T) boundaries",
}


# -- figures -------------------------------------------------------------------------------------------------------------------------------------


def figures(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Figure]:
    """Figures of the targets, by key, from the rows of each part of a report; without those that were not measured."""
    found: dict[str, Figure | None] = {}
    for part in ("apg_64", "apg_1024", "apg_4096"):
        for row in rows.get(part, ()):
            rivals = {"apg_64": ("jax",), "apg_1024": ("jax", "jax_split"), "apg_4096": ("jax", "jax_split", "brax")}[part]
            found[f"{part}/jax"] = hardest(row, rivals)
            for peer in ("embodichain", "eager"):
                found[f"{part}/{peer}"] = hardest(row, (peer,))
            found[f"{part}/products"] = hardest(row, ("products",), 100.0)
    for row in rows.get("cold_start", ()):
        for name in ("cold", "warm"):
            found[f"cold_start/{name}"] = Figure(row[f"{name}_seconds"], _pair(row[f"{name}_spread"]))
    for size in ("10k", "20M"):
        for row in rows.get(f"optimizer_{size}", ()):
            for peer in ("torch", "torchopt"):
                found[f"optimizer_{size}/{peer}"] = hardest(row, (peer,))
    for row in rows.get("adjoint_clip", ()):
        low, high = _pair(row["cost_spread"])
        found["adjoint_clip"] = Figure(1 + row["cost"], (1 + low, 1 + high))
    for row in rows.get("ppo", ()):
        for peer in ("sb3", "rejax"):
            found[f"ppo/{peer}"] = hardest(row, (peer,))
    peaks = {row["mode"]: row["peak_mib"] for row in rows.get("memory", ()) if row.get("horizon") == 1024 and "peak_mib" in row}
    if {"recompute", "eager"} <= peaks.keys():
        found["memory"] = Figure(peaks["eager"] / peaks["recompute"])
    for over in ("rows", "steps"):
        for row in rows.get(f"growth_{over}", ()):
            found[f"growth/{over}"] = Figure(row["largest_rise"])
    return {key: figure for key, figure in found.items() if figure is not None}


def hardest(row: Mapping[str, Any], rivals: Sequence[str], scale: float = 1.0) -> Figure | None:
    """The ratio to the fastest of the rivals that ran."""
    ran = [name for name in rivals if name in row["ratios"]]
    if not ran:
        return None
    name = min(ran, key=lambda rival: row["ratios"][rival])
    low, high = _pair(row["ratio_spreads"][name])
    return Figure(scale * row["ratios"][name], (scale * low, scale * high), name if len(rivals) > 1 else "")


def _pair(values: Sequence[float]) -> tuple[float, float]:
    low, high = values
    return low, high


# -- met or missed -------------------------------------------------------------------------------------------------------------------------------


def judge(target: Target, figure: Figure | None) -> str:
    """``"met"``, ``"missed"`` or ``"not measured"``."""
    if figure is None or figure.value != figure.value:
        return "not measured"
    return "met" if (figure.value >= target.bound if target.at_least else figure.value <= target.bound) else "missed"


def table(found: Mapping[str, Figure], why: Callable[[Target], str] = lambda target: "") -> str:
    """The table in Markdown, a line for each target, and below it what was tried for the lines that are missed.

    Args:
        found: by key.
        why: for a line that was not measured, the reason.
    """
    lines = ["| work | measured | to reach | reached | | note |", "|---|---|---:|---:|---|---|"]
    tried: list[str] = []
    for target in targets():
        figure = found.get(target.key)
        verdict = judge(target, figure)
        reached = "" if figure is None else number(figure, target.unit)
        note = why(target) if verdict == "not measured" else ""
        if verdict == "missed" and target.tried:
            if target.tried not in tried:
                tried.append(target.tried)
            note = f"tried: {tried.index(target.tried) + 1}"
        bound = f"{'at least' if target.at_least else 'at most'} {target.bound:g}{_unit(target.unit)}"
        lines.append("| " + " | ".join([target.work, target.measure, bound, reached, verdict, _cell(note)]) + " |")
    if tried:
        lines += ["", "What was tried for the lines that are missed:", "", *(f"{i}. {text}" for i, text in enumerate(tried, 1))]
    return "\n".join(lines) + "\n"


def number(figure: Figure, unit: str) -> str:
    """Value, unit, spread, and whom against."""
    text = f"{figure.value:.3g}{_unit(unit)}"
    if figure.spread is not None:
        text += f" ({figure.spread[0]:.3g} to {figure.spread[1]:.3g})"
    return f"{text}, {figure.against}" if figure.against else text


def _unit(unit: str) -> str:
    return unit if unit == "x" else f" {unit}"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


# -- against the baseline ------------------------------------------------------------------------------------------------------------------------


def baseline(found: Mapping[str, Figure]) -> dict[str, float]:
    """The ratios that can be compared with another run."""
    return {target.key: float(f"{found[target.key].value:.4g}") for target in targets() if target.ratio and target.key in found}


def fallen(before: Mapping[str, float], now: Mapping[str, float], tolerance: float = TOLERANCE) -> list[str]:
    """What is worse than the baseline by more than the tolerance, or was not measured: a sentence each.

    Args:
        before, now: :func:`baseline` of two runs.
        tolerance: relative.
    """
    known = {target.key: target for target in targets()}
    said = []
    for key, old in before.items():
        target = known.get(key)
        if target is None:
            said.append(f"{key}: in the baseline, but no such target is known")
        elif key not in now:
            said.append(f"{key}: {old:.3g} in the baseline, not measured now")
        elif (now[key] < old * (1 - tolerance)) if target.at_least else (now[key] > old * (1 + tolerance)):
            said.append(f"{key}: {old:.3g} in the baseline, {now[key]:.3g} now ({target.work}, {target.measure})")
    return said
