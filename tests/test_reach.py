"""The pure part of the benchmark report: met or missed, and the comparison with the baseline."""

from __future__ import annotations

import argparse
import importlib
import json
import math
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def reach(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("reach")


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("report")


def row(ratios: dict[str, float], **more: object) -> dict[str, object]:
    return {"ratios": ratios, "ratio_spreads": {side: [0.9 * x, 1.1 * x] for side, x in ratios.items()}, **more}


def all_rows() -> dict[str, list[dict[str, object]]]:
    """Rows as the scripts print them, in which every target is just reached."""
    return {
        "apg_64": [row({"jax": 1.0, "jax_split": 0.5, "embodichain": 20.0, "eager": 14.0, "products": 0.1})],
        "apg_1024": [row({"jax": 2.0, "jax_split": 1.5, "embodichain": 5.0, "eager": 4.0, "products": 0.2})],
        "apg_4096": [row({"jax": 2.0, "jax_split": 1.6, "brax": 1.4, "embodichain": 3.0, "eager": 2.0, "products": 0.4})],
        "cold_start": [{"cold_seconds": 15.0, "cold_spread": [14.0, 16.0], "warm_seconds": 6.0, "warm_spread": [5.0, 7.0]}],
        "optimizer_10k": [row({"torch": 1.0, "foreach": 0.5, "torchopt": 3.0})],
        "optimizer_20M": [row({"torch": 1.0, "foreach": 0.5, "torchopt": 3.0})],
        "adjoint_clip": [{"cost": 0.05, "cost_spread": [0.0, 0.1]}],
        "ppo": [row({"sb3": 8.0, "rejax": 1.0, "torchrl": 20.0})],
        "memory": [
            {"mode": "recompute", "horizon": 1024, "peak_mib": 100.0},
            {"mode": "eager", "horizon": 1024, "peak_mib": 400.0},
            {"growth_exponents": {}},
        ],
        "growth_rows": [{"largest_rise": 1.5}],
        "growth_steps": [{"largest_rise": 1.5}],
    }


def test_a_bound_that_is_just_reached_is_met(reach: ModuleType):
    found = reach.figures(all_rows())
    assert {target.key for target in reach.targets()} <= found.keys()
    for target in reach.targets():
        assert reach.judge(target, found[target.key]) == "met", target.key


def test_a_little_less_is_missed(reach: ModuleType):
    found = reach.figures(all_rows())
    for target in reach.targets():
        worse = found[target.key].value * (0.999 if target.at_least else 1.001)
        assert reach.judge(target, reach.Figure(worse)) == "missed", target.key


def test_the_fastest_rival_counts(reach: ModuleType):
    found = reach.figures(all_rows())
    # At 64 rows it is the plain scan; from 1024 on whichever arrangement is best, at 4096 brax too.
    assert (found["apg_64/jax"].value, found["apg_64/jax"].against) == (1.0, "")
    assert (found["apg_1024/jax"].value, found["apg_1024/jax"].against) == (1.5, "jax_split")
    assert (found["apg_4096/jax"].value, found["apg_4096/jax"].against) == (1.4, "brax")
    assert found["apg_4096/jax"].spread == pytest.approx((1.26, 1.54))
    assert found["apg_4096/products"].value == pytest.approx(40.0)


def test_a_peer_that_failed_is_a_line_that_says_so(reach: ModuleType):
    rows = all_rows()
    rows["apg_64"] = [row({"eager": 14.0}, failed={"jax": "no such | module"})]
    del rows["ppo"]
    found = reach.figures(rows)
    assert "apg_64/jax" not in found
    text = reach.table(found, lambda target: "no such | module")
    lines = {line.split(" | ")[1]: line for line in text.splitlines() if line.startswith("| APG update, N=64")}
    assert "not measured | no such \\| module |" in lines["speed against JAX `lax.scan`"]
    assert "| met |" in lines["speed against eager autograd"]
    assert len(text.splitlines()) == 2 + len(reach.targets())
    assert all(line.count(" | ") == 5 for line in text.replace("\\|", "").splitlines()[2:])


def test_nan_is_not_measured(reach: ModuleType):
    assert reach.judge(reach.targets()[0], reach.Figure(math.nan)) == "not measured"
    assert reach.judge(reach.targets()[0], None) == "not measured"


def test_a_missed_line_says_what_was_tried(reach: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(reach.TRIED, "clip", "this and that")
    missed, met = (reach.table({"adjoint_clip": reach.Figure(value)}) for value in (1.2, 1.0))
    assert "| missed | tried: 1 |" in missed
    assert missed.endswith("\n1. this and that\n")
    assert "this and that" not in met


def test_the_comparison_finds_what_has_fallen(reach: ModuleType):
    before = reach.baseline(reach.figures(all_rows()))
    assert "cold_start/cold" not in before  # seconds say nothing on another machine
    assert reach.fallen(before, before, 0.0) == []
    for target in reach.targets():
        if not target.ratio:
            continue
        better, worse = (1.5, 0.7) if target.at_least else (0.7, 1.5)
        assert reach.fallen(before, {**before, target.key: better * before[target.key]}, 0.2) == []
        (said,) = reach.fallen(before, {**before, target.key: worse * before[target.key]}, 0.2)
        assert said.startswith(f"{target.key}:")
        within = 0.81 if target.at_least else 1.19
        assert reach.fallen(before, {**before, target.key: within * before[target.key]}, 0.2) == []


def test_what_was_not_measured_has_fallen(reach: ModuleType):
    assert reach.fallen({"ppo/sb3": 8.0}, {}, 0.2) == ["ppo/sb3: 8 in the baseline, not measured now"]
    assert reach.fallen({"gone": 8.0}, {"gone": 8.0}, 0.2) == ["gone: in the baseline, but no such target is known"]


def test_the_baseline_of_the_repository_is_one(reach: ModuleType):
    known = {target.key for target in reach.targets() if target.ratio}
    saved = json.loads((ROOT / "benchmarks" / "baseline.json").read_text(encoding="utf-8"))
    assert set(saved["ratios"]) <= known
    assert all(value > 0 for value in saved["ratios"].values())


def test_every_part_is_a_script_with_its_options(report: ModuleType):
    names = {part.name for part in report.PARTS}
    for target in report.reach.targets():
        assert report.reach.part_of(target.key) in names
    for part in report.PARTS:
        assert (ROOT / "benchmarks" / part.command[0]).is_file()


def test_compare_ends_with_its_status(report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(report, "BASELINE", tmp_path / "baseline.json")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    found = report.reach.figures(all_rows())

    def status(**options: object) -> int:
        return report.compare(found, argparse.Namespace(**{"quick": False, "only": None, "tolerance": 0.2, **options}))

    assert status() == 1  # there is none
    ratios = report.reach.baseline(found)
    report.write(tmp_path / "baseline.json", {"quick": False, "ratios": ratios})
    assert status() == 0
    report.write(tmp_path / "baseline.json", {"quick": False, "ratios": {**ratios, "ppo/sb3": 80.0}})
    assert status() == 1
    assert "fallen by more than 20%: ppo/sb3: 80 in the baseline, 8 now" in capsys.readouterr().out
    assert status(only=["memory"]) == 0
    assert status(only=["cold_start"]) == 1  # seconds have no place in it
    assert status(tolerance=0.95) == 0


def test_parts_of_other_sources_are_measured_again(report: ModuleType, tmp_path: Path):
    path = tmp_path / "part.json"
    assert report.read(path, "a") is None
    report.write(path, {"sources": "a", "rows": [{"x": 1}]})
    assert report.read(path, "a") == [{"x": 1}]
    assert report.read(path, "b") is None
    path.write_text("{", encoding="utf-8")
    assert report.read(path, "a") is None


def test_a_report_of_nothing_is_written(report: ModuleType):
    empty = {"quick": True, "machine": report.machine(), "versions": {"python": "3", "torch": "2"}, "peer_versions": {}, "parts": {}}
    text = report.markdown({**empty, "failed": {"ppo": "exit status 1:\nboom"}}, {}, [])
    assert "* ppo: exit status 1: boom" in text
    assert text.count("not measured") == len(report.reach.targets())
