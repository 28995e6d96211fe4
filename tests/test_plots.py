"""Learning curves: averages by their laws, pictures by their bytes."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frl.plots import BANDS, Curve, average, plot_curves

bands = st.sampled_from([band for band in BANDS if band != "none"])


@st.composite
def families(draw: st.DrawFn, least: int = 1) -> list[Curve]:
    """Runs of one experiment, of different lengths and places, that overlap."""
    curves = []
    for _ in range(draw(st.integers(least, 5))):
        places = draw(st.lists(st.integers(0, 100), min_size=2, max_size=8, unique=True).map(sorted))
        x = np.array([-1.0, *places, 101.0])
        y = np.array(draw(st.lists(st.floats(-100, 100, allow_subnormal=False), min_size=len(x), max_size=len(x))))
        curves.append(Curve("a", x, y))
    return curves


@given(curves=families(), band=bands)
def test_the_mean_of_runs(curves: list[Curve], band: str):
    found = average(curves, band)
    places = sorted({float(x) for curve in curves for x in curve.x})
    assert found.x.tolist() == places
    for i, place in enumerate(places):
        values = [float(np.interp(place, c.x, c.y)) for c in curves]
        mean, n = math.fsum(values) / len(values), len(values)
        assert found.mean[i] == pytest.approx(mean, abs=1e-9)
        std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1)) if n > 1 else 0.0
        low, high = {"std": (mean - std, mean + std), "ci": (mean - 1.96 * std / n**0.5, mean + 1.96 * std / n**0.5), "range": (min(values), max(values))}[band]
        assert (found.low[i], found.high[i]) == (pytest.approx(low, abs=1e-9), pytest.approx(high, abs=1e-9))


@given(curves=families(least=2), band=bands, order=st.randoms(use_true_random=False))
def test_the_order_of_runs_does_not_matter(curves: list[Curve], band: str, order: Any):
    shuffled = order.sample(curves, len(curves))
    for a, b in zip(average(curves, band), average(shuffled, band), strict=True):
        assert np.allclose(a, b, atol=1e-9)


@given(curves=families(), band=st.sampled_from(list(BANDS)))
def test_one_run_repeated_is_itself_without_a_band(curves: list[Curve], band: str):
    found = average([curves[0]] * 3, band)
    assert np.allclose(found.mean, curves[0].y)
    assert np.allclose(found.low, curves[0].y)
    assert np.allclose(found.high, curves[0].y)


def test_a_run_that_stopped_early_ends_the_mean():
    long, short = Curve("a", np.array([0.0, 10.0, 20.0, 30.0]), np.zeros(4)), Curve("a", np.array([5.0, 15.0]), np.ones(2))
    found = average([long, short])
    assert found.x.tolist() == [5, 10, 15]
    assert found.mean.tolist() == [0.5] * 3
    apart = average([short, Curve("a", np.array([20.0, 30.0]), np.ones(2))])
    assert apart.x.size == apart.mean.size == 0


def test_an_unknown_band():
    with pytest.raises(ValueError, match="std, ci, range, none"):
        average([Curve("a", np.arange(2.0), np.arange(2.0))], "iqr")


# ---- pictures ----


def some_curves() -> dict[str, list[Curve]]:
    x = np.arange(0.0, 5000.0, 500.0)
    first = [Curve("first way", x[: 10 - seed], seed**2 + x[: 10 - seed] / 1000) for seed in range(3)]
    other = Curve("second way", x, -x / 1000, low=-x / 1000 - 1, high=-x / 1000 + 1)
    return {"return": [*first, other], "success": [other, Curve("first way", x[:0], x[:0])], "nothing": [Curve("first way", x[:0], x[:0])]}


def texts(path: Path) -> str:
    return " ".join(ElementTree.parse(path).getroot().itertext())


def test_png_and_svg(tmp_path: Path):
    files = plot_curves(some_curves(), [tmp_path / "new" / "a.png", tmp_path / "new" / "a.SVG"], x_label="steps", title="two ways")
    png, svg = (path.read_bytes() for path in files)
    assert png.startswith(b"\x89PNG")
    assert len(png) < 100_000
    shown = texts(files[1])
    assert all(word in shown for word in ("first way (3 runs)", "second way", "two ways", "steps", "return", "success", "4k"))
    assert "nothing" not in shown
    again = plot_curves(some_curves(), [tmp_path / "b.png", tmp_path / "b.svg"], x_label="steps", title="two ways")
    assert [path.read_bytes() for path in again] == [png, svg]


def test_the_picture_depends_on_the_band_and_the_limits(tmp_path: Path):
    def drawn(**options: Any) -> bytes:
        (path,) = plot_curves(some_curves(), [tmp_path / "a.png"], x_label="steps", **options)
        return path.read_bytes()

    pictures = [drawn(band=band) for band in BANDS] + [drawn(limits={"success": (-20.0, 20.0)})]
    assert len(set(pictures)) == len(pictures)


def test_every_run_of_an_experiment_is_drawn_to_its_end(tmp_path: Path):
    def lines(curves: list[Curve]) -> list[Any]:
        found = []
        from matplotlib.axes import Axes

        plot = Axes.plot
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Axes, "plot", lambda self, x, y, **options: (found.append((np.array(x), np.array(y))), plot(self, x, y, **options))[1])
            plot_curves({"y": curves}, [tmp_path / "a.png"], x_label="x")
        return found

    curves = [Curve("a", np.arange(float(n)), np.arange(float(n)) * n) for n in (3, 9)]
    found = lines(curves)
    assert len(found) == 3  # both runs and their mean
    for curve in curves:
        assert any(np.array_equal(x, curve.x) and np.array_equal(y, curve.y) for x, y in found)
    assert any(x.tolist() == [0, 1, 2] and y.tolist() == [0, 6, 12] for x, y in found)


def test_what_cannot_be_drawn(tmp_path: Path):
    with pytest.raises(ValueError, match=r"\.png or \.svg, got 'a\.jpg'"):
        plot_curves(some_curves(), [tmp_path / "a.jpg"], x_label="x")
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_curves({"y": [Curve("a", np.zeros(0), np.zeros(0))]}, [tmp_path / "a.png"], x_label="x")
    assert not list(tmp_path.iterdir())
