"""Pytrees: the only importer of ``optree``.

Dict keys are visited in sorted order, so two dicts with the same entries flatten to the same leaves whatever their insertion order. ``None`` is a leafless
node and carries nothing; state uses ``()`` for absence. ``NamedTuple`` fields are visited in order.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

PyTree = Any

_NAMESPACE = ""


def map(fn: Callable, tree: PyTree, *rest: PyTree) -> PyTree:
    """Apply ``fn`` to matching leaves of one or more trees of the same structure."""
    return optree.tree_map(fn, tree, *rest, namespace=_NAMESPACE)


def leaves(tree: PyTree) -> list[Any]:
    """The leaves in order."""
    return optree.tree_leaves(tree, namespace=_NAMESPACE)


def flatten(tree: PyTree) -> tuple[list[Any], Any]:
    """``(leaves, structure)``; ``unflatten(structure, leaves)`` undoes it. A structure is hashable and compares equal by shape of tree."""
    return optree.tree_flatten(tree, namespace=_NAMESPACE)


def unflatten(structure: Any, values: Sequence[Any]) -> PyTree:
    """Inverse of :func:`flatten`."""
    return optree.tree_unflatten(structure, values)


def structure(tree: PyTree) -> Any:
    """The structure alone."""
    return optree.tree_structure(tree, namespace=_NAMESPACE)


def path_name(path: Sequence[Any]) -> str:
    """A key path as text: ``params.layers.0.weight``."""
    return ".".join(str(part) for part in path)


def items(tree: PyTree) -> list[tuple[str, Any]]:
    """``[(dotted key path, leaf), ...]``; ``NamedTuple`` fields appear by name."""
    accessors, values, _ = optree.tree_flatten_with_accessor(tree, namespace=_NAMESPACE)
    names = []
    for accessor in accessors:
        names.append(".".join(str(getattr(entry, "field", entry.entry)) for entry in accessor))
    return builtins.list(zip(names, values, strict=True))


def differences(got: PyTree, expected: PyTree) -> list[str]:
    """Every difference of structure, shape or dtype between two trees of tensors, one line for each key path."""
    have, want = dict(items(got)), dict(items(expected))
    problems = [f"{name}: missing" for name in want if name not in have]
    problems += [f"{name}: unexpected" for name in have if name not in want]
    for name in want:
        if name not in have or not isinstance(want[name], Tensor):
            continue
        a, b = have[name], want[name]
        if not isinstance(a, Tensor):
            problems.append(f"{name}: got {type(a).__name__}, expected a tensor")
        elif a.shape != b.shape:
            problems.append(f"{name}: got shape {tuple(a.shape)}, expected {tuple(b.shape)}")
        elif a.dtype != b.dtype:
            problems.append(f"{name}: got {a.dtype}, expected {b.dtype}")
    if not problems and structure(got) != structure(expected):
        problems.append(f"got structure {structure(got)}, expected {structure(expected)}")
    return problems


def check_same(got: PyTree, expected: PyTree, what: str = "tree") -> None:
    """Raise ``ValueError`` that lists the :func:`differences` of two trees of tensors."""
    problems = differences(got, expected)
    if problems:
        raise ValueError(f"{what} does not match:\n  " + "\n  ".join(problems))


def stack(trees: Sequence[PyTree], dim: int = 0) -> PyTree:
    """Stack matching leaves along a new dimension."""
    return map(lambda *xs: torch.stack(xs, dim), *trees)


def index(tree: PyTree, i: Any) -> PyTree:
    """``leaf[i]`` for every leaf."""
    return map(lambda x: x[i], tree)


def where(mask: Tensor, yes: PyTree, no: PyTree) -> PyTree:
    """``torch.where`` leaf by leaf; ``mask`` is broadcast from the left (rows first)."""

    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(mask.reshape(mask.shape + (1,) * (a.ndim - mask.ndim)), a, b)

    return map(pick, yes, no)


def detach(tree: PyTree) -> PyTree:
    """Cut every leaf out of the autograd graph."""
    return map(lambda x: x.detach(), tree)


def floating(tree: PyTree) -> list[Tensor]:
    """The floating-point leaves."""
    return [x for x in leaves(tree) if isinstance(x, Tensor) and x.is_floating_point()]


def all_finite(tree: PyTree) -> Tensor:
    """0-d bool: every element of every floating leaf is finite."""
    parts = floating(tree)
    if not parts:
        return torch.ones((), dtype=torch.bool)
    return torch.stack([torch.isfinite(x).all() for x in parts]).all()
