"""Trees: round trips, names, order of keys, selection by row."""

# The stubs of torch.func know neither argnums nor has_aux, and wrong arguments are passed on purpose.
# pyright: reportCallIssue=false, reportAssignmentType=false, reportArgumentType=false, reportUnusedExpression=false

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vmap

from frl import tree
from tests.strategies import assert_trees_equal, draw


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


LEAVES = st.builds(
    lambda seed, size, dtype: draw(size, seed=seed).to(dtype),
    st.integers(0, 99),
    st.integers(0, 3),
    st.sampled_from([torch.float64, torch.float32, torch.int64]),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abcde"), inner, max_size=3),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=8,
)


@given(TREES)
def test_flatten_and_unflatten_are_inverse(values):
    leaves, structure = tree.flatten(values)
    again = tree.unflatten(structure, leaves)
    assert type(again) is type(values)
    assert structure == tree.structure(values)
    assert hash(structure) == hash(tree.structure(again))
    assert_trees_equal(again, values)
    assert all(a is b for a, b in zip(leaves, tree.leaves(values), strict=True))


@given(TREES)
def test_items_name_the_leaves_in_order(values):
    names, leaves = zip(*tree.items(values), strict=True) if tree.items(values) else ((), ())
    assert len(set(names)) == len(names)
    assert all(a is b for a, b in zip(leaves, tree.leaves(values), strict=True))


def test_key_paths_show_field_names_keys_and_positions():
    values = {"params": Pair(first=torch.ones(1), second=[torch.ones(2), {"w": torch.ones(3)}]), "n": torch.ones(())}
    assert [name for name, _ in tree.items(values)] == ["n", "params.first", "params.second.0", "params.second.1.w"]
    assert tree.items(torch.ones(2))[0][0] == ""


def test_insertion_order_of_a_dict_does_not_matter():
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    one, two = {"b": b, "a": a}, {"a": a, "b": b}
    assert tree.structure(one) == tree.structure(two)
    assert [x is y for x, y in zip(tree.leaves(one), tree.leaves(two), strict=True)] == [True, True]
    total = tree.map(lambda x, y: x + 10 * y, one, two)
    assert torch.equal(total["a"], 11 * a)
    assert torch.equal(total["b"], 11 * b)
    assert_trees_equal(tree.unflatten(tree.structure(one), tree.leaves(two)), two)


def test_absence_has_no_leaves():
    assert tree.leaves({"a": (), "b": None}) == []
    assert tree.map(lambda x: x + 1, {"a": (), "b": torch.zeros(())})["a"] == ()
    assert tree.structure(()) != tree.structure(None)


def test_map_refuses_trees_of_different_structure():
    with pytest.raises(ValueError, match=r".+"):
        tree.map(lambda a, b: a + b, {"a": torch.ones(1)}, {"b": torch.ones(1)})


@pytest.mark.parametrize(
    ("got", "parts"),
    [
        ({"a": torch.zeros(2), "b": {"c": torch.zeros(3)}}, ()),
        ({"a": torch.zeros(2)}, ("b.c: missing",)),
        ({"a": torch.zeros(2), "b": {"c": torch.zeros(3), "d": torch.zeros(1)}}, ("b.d: unexpected",)),
        (
            {"a": torch.zeros(4), "b": {"c": torch.zeros(3, dtype=torch.float64)}},
            ("a: got shape (4,), expected (2,)", "b.c: got torch.float64, expected torch.float32"),
        ),
        ({"a": 1.0, "b": {"c": torch.zeros(3)}}, ("a: got float, expected a tensor",)),
        ({"a": torch.zeros(2), "b": {"c": torch.zeros(3)}, "e": ()}, ("structure",)),
    ],
)
def test_check_same_lists_every_difference_by_key_path(got, parts):
    expected = {"a": torch.zeros(2), "b": {"c": torch.zeros(3)}}
    if not parts:
        tree.check_same(got, expected)
        return
    with pytest.raises(ValueError, match="the state does not match") as error:
        tree.check_same(got, expected, "the state")
    assert all(part in str(error.value) for part in parts)


@given(TREES, st.integers(1, 3))
def test_index_undoes_stack(values, count):
    versions = [tree.map(lambda x, i=i: x + i, values) for i in range(count)]
    stacked = tree.stack(versions)
    for i in range(count):
        assert_trees_equal(tree.index(stacked, i), versions[i])


def test_where_broadcasts_the_mask_over_rows():
    mask = torch.tensor([True, False, True])
    yes = {"a": draw(3, 2, 2), "n": torch.arange(3), "s": draw(3, seed=2)}
    no = tree.map(lambda x: -x - 1, yes)
    got = tree.where(mask, yes, no)
    for name in yes:
        for i in range(3):
            assert torch.equal(got[name][i], (yes if mask[i] else no)[name][i])
    assert torch.equal(tree.where(torch.tensor(True), yes, no)["a"], yes["a"])


@given(TREES)
def test_all_finite_looks_at_floating_elements_alone(values):
    assert bool(tree.all_finite(values))
    assert all(x is y for x, y in zip(tree.floating(values), [x for x in tree.leaves(values) if x.is_floating_point()], strict=True))
    for bad in (math.nan, math.inf, -math.inf):
        spoilt = tree.map(lambda x, bad=bad: torch.cat((x, x.new_full((1,), bad))) if x.is_floating_point() else x, values)
        assert bool(tree.all_finite(spoilt)) == (not tree.floating(values))


def test_detach_cuts_every_leaf():
    def f(x):
        cut = tree.detach({"a": x * 2, "n": torch.arange(2)})
        return (cut["a"] * x).sum()

    x = draw(3)
    assert torch.equal(grad(f)(x), 2 * x)


def test_all_finite_works_by_member_under_vmap():
    values = {"a": draw(4, 3), "b": draw(4, 2, 2, seed=1)}
    values["a"][2, 1] = math.inf
    assert vmap(tree.all_finite)(values).tolist() == [True, True, False, True]
