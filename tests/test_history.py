"""Histories packed and unpacked: every bit, names and order, however often they were packed on the way."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frl.history import PackedHistory, unpack_history

names = st.lists(st.sampled_from(["global_step", "num_updates", "loss", "a.b", "ä"]), unique=True, max_size=4)
records = st.lists(
    names.flatmap(lambda keys: st.fixed_dictionaries({key: st.integers(0, 2**53) if key.endswith(("step", "updates")) else st.floats() for key in keys})),
    max_size=8,
)


@given(history=records, cuts=st.lists(st.integers(0, 8), max_size=4))
def test_every_bit_comes_back(history: list[dict[str, float]], cuts: list[int]):
    packed = PackedHistory()
    for cut in sorted(cuts):
        packed.follow(history[:cut])
    values, layout = packed.follow(history)
    back = unpack_history(values, layout)
    assert [list(record) for record in back] == [list(record) for record in history]
    assert repr(back) == repr(history)  # NaN, -0.0 and the kinds of numbers included
    assert values.dtype == torch.float64


def test_records_with_the_same_names_share_them():
    _, layout = PackedHistory().follow([{"a": 1.0, "b": 2.0}] * 3 + [{"b": 1.0, "a": 2.0}] + [{"a": 0.0, "b": 0.0}] * 2)
    assert layout == [[3, ["a", "b"]], [1, ["b", "a"]], [2, ["a", "b"]]]


def test_what_was_packed_does_not_change_when_the_history_grows():
    packed, history = PackedHistory(), [{"a": 1.0}]
    values, layout = packed.follow(history)
    packed.follow([*history, {"a": 2.0}, {"b": math.nan}])
    assert values.tolist() == [1.0]
    assert layout == [[1, ["a"]]]


@pytest.mark.parametrize("layout", [None, 3, [[1]], [["x", ["a"]]], [[2, ["a"]]], [[-1, ["a"]]], [[1, ["a", "b"]]], []])
def test_a_layout_that_does_not_fit_is_refused(layout: object):
    with pytest.raises(ValueError, match="layout of a history"):
        unpack_history(torch.zeros(1, dtype=torch.float64), layout)
