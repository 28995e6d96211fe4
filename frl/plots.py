"""Learning curves as PNG and SVG: one line for each experiment, with a band over its runs.

Only numbers come in here; :mod:`frl.records` reads them from run directories.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SUFFIXES = (".png", ".svg")
BANDS = {"std": "one standard deviation", "ci": "95 % confidence interval of the mean", "range": "lowest to highest", "none": "no band"}
"""What the band of several runs can show."""
# Okabe and Ito: told apart with any colour vision.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_FEW = 40  # a curve of so many points has markers


class Curve(NamedTuple):
    """One metric of one run."""

    group: str  # experiment: curves of one group are averaged
    x: np.ndarray  # [n] increasing
    y: np.ndarray  # [n]
    low: np.ndarray | None = None  # [n] band of this run alone, such as the confidence interval of an evaluation
    high: np.ndarray | None = None


class Average(NamedTuple):
    """Several runs as one curve."""

    x: np.ndarray  # [n] places where every run has a value
    mean: np.ndarray  # [n]
    low: np.ndarray  # [n]
    high: np.ndarray  # [n]


def average(curves: Sequence[Curve], band: str = "std") -> Average:
    """Mean and band of several runs, where all of them have values; between its places a run is interpolated linearly.

    Args:
        curves: at least one, each with at least one place.
        band: a name in :data:`BANDS`.

    Raises:
        ValueError: for another band.
    """
    if band not in BANDS:
        raise ValueError(f"band must be one of {', '.join(BANDS)}, got {band!r}")
    begin, end = max(c.x[0] for c in curves), min(c.x[-1] for c in curves)
    places = np.unique(np.concatenate([c.x for c in curves]))
    places = places[(places >= begin) & (places <= end)]
    values = np.stack([np.interp(places, c.x, c.y) for c in curves])
    mean, count = values.mean(0), len(curves)
    if band == "range":
        return Average(places, mean, values.min(0), values.max(0))
    half = values.std(0, ddof=1) if count > 1 and band != "none" else np.zeros_like(mean)
    if band == "ci":
        half = 1.96 * half / math.sqrt(count)
    return Average(places, mean, mean - half, mean + half)


def plot_curves(
    panels: Mapping[str, Sequence[Curve]],
    paths: Sequence[str | Path],
    *,
    x_label: str,
    band: str = "std",
    title: str = "",
    limits: Mapping[str, tuple[float, float]] | None = None,
) -> list[Path]:
    """Draw learning curves, one panel for each metric.

    A group of several runs is a line for the mean and a band where all its runs have values, and a thin line for each run as far as it goes.

    Args:
        panels: ``{label of the vertical axis: curves}``; a curve without points is left out.
        paths: files to write, ``.png`` or ``.svg``; their folders are made.
        x_label: label of the horizontal axis.
        band: what the band shows, a name in :data:`BANDS`.
        title: above all panels.
        limits: of the vertical axis, by its label; of the data without.

    Returns:
        The paths.

    Raises:
        ValueError: for another suffix or band, or nothing to draw.
    """
    files = [Path(path) for path in paths]
    for path in files:
        if path.suffix.lower() not in SUFFIXES:
            raise ValueError(f"a plot ends in {' or '.join(SUFFIXES)}, got {path.name!r}")
    kept = {label: [curve for curve in curves if len(curve.x)] for label, curves in panels.items()}
    kept = {label: curves for label, curves in kept.items() if curves}
    if not kept:
        raise ValueError("there is nothing to draw: no run has a value of any of the metrics")
    import matplotlib
    from matplotlib.figure import Figure

    # Text stays text in an SVG, and the same curves give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "frl", "font.size": 9}):
        columns = min(3, len(kept))
        rows = -(-len(kept) // columns)
        figure = Figure(figsize=(4.2 * columns if columns > 1 else 5.6, 3.2 * rows + 0.3), dpi=110, layout="constrained")
        axes = list(np.ravel(figure.subplots(rows, columns, squeeze=False)))
        groups = list(dict.fromkeys(curve.group for curves in kept.values() for curve in curves))
        for ax, (label, curves) in zip(axes, kept.items(), strict=False):
            _panel(ax, curves, groups, band)
            ax.set(xlabel=x_label, ylabel=label, **({"ylim": limits[label]} if limits and label in limits else {}))
        for ax in axes[len(kept) :]:
            ax.set_visible(False)
        handles = {label: handle for ax in reversed(axes) for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
        if list(handles) != [title]:
            axes[0].legend(handles.values(), handles.keys(), loc="best", fontsize=8, framealpha=0.8)
        figure.suptitle(title, fontsize=11) if title else None
        for path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else {"Software": None})
    return files


def _panel(ax: Any, curves: Sequence[Curve], groups: Sequence[str], band: str) -> None:
    from matplotlib.ticker import EngFormatter

    for group in groups:
        members = [curve for curve in curves if curve.group == group]
        if not members:
            continue
        color = COLORS[groups.index(group) % len(COLORS)]
        style = {"color": color, "linestyle": ("-", "--", ":")[groups.index(group) // len(COLORS) % 3], "linewidth": 1.8}
        few = {"marker": "o", "markersize": 3} if max(len(curve.x) for curve in members) <= _FEW else {}
        if len(members) == 1:
            (curve,) = members
            ax.plot(curve.x, curve.y, label=group, **style, **few)
            if curve.low is not None and curve.high is not None:
                ax.fill_between(curve.x, curve.low, curve.high, color=color, alpha=0.2, linewidth=0)
            continue
        for curve in members:
            ax.plot(curve.x, curve.y, color=color, linewidth=0.6, alpha=0.5)
        shared = average(members, band)
        ax.plot(shared.x, shared.mean, label=f"{group} ({len(members)} runs)", **style, **few)
        if band != "none":
            ax.fill_between(shared.x, shared.low, shared.high, color=color, alpha=0.2, linewidth=0)
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.set_xlim(left=0)
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
