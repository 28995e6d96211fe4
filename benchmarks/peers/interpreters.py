"""Where the interpreters of the peers are; ``benchmarks/peers/setup`` makes them."""

from __future__ import annotations

from pathlib import Path

PLACE = Path(__file__).resolve().parents[2] / "build" / "peers"
NAMES = ("embodichain", "jax", "brax", "sb3", "torchrl", "torchopt")
SCRIPTS = Path(__file__).resolve().parent


def interpreter(name: str) -> Path:
    """Python of a peer's virtual environment; it may not exist."""
    if name not in NAMES:
        raise ValueError(f"unknown peer {name!r} (known: {', '.join(NAMES)})")
    return PLACE / name / "bin" / "python"


def versions(name: str) -> dict[str, str]:
    """``{package: version}`` of a peer's environment, empty where it has not been made."""
    try:
        lines = (PLACE / name / "freeze.txt").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    return {package.split("[")[0].strip(): number.strip() for package, found, number in (line.partition("==") for line in lines) if found}
