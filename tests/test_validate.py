"""Single values at the edge: what is taken, what is refused, and with which words."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frl.validate import require_choice, require_count, require_number, require_switch

NO_NUMBERS = [None, "1", "1e-4", True, False, np.True_, [1], math.nan, 1j, torch.tensor(1.0)]


def test_counts():
    for value in (3, np.int64(3), np.uint8(3)):
        assert require_count("n", value) == 3
        assert type(require_count("n", value)) is int
    assert require_count("n", 0, 0) == 0
    with pytest.raises(ValueError, match=r"^n must be an integer of at least 1, got True$"):
        require_count("n", True)
    with pytest.raises(ValueError, match=r"^n must be an integer of at least 2, got 1$"):
        require_count("n", 1, 2)


@pytest.mark.parametrize("value", [*NO_NUMBERS, 0, -1, 1.0, 2.7, math.inf], ids=repr)
def test_what_is_no_count(value: Any):
    with pytest.raises(ValueError, match="n must be an integer"):
        require_count("n", value)


def test_numbers():
    assert require_number("x", 3, above=2) == 3.0
    assert type(require_number("x", 3)) is float
    assert require_number("x", np.float32(0.5)) == require_number("x", Fraction(1, 2)) == 0.5
    with pytest.raises(ValueError, match=r"^x must be a finite number above 0 and at most 1, got 2$"):
        require_number("x", 2, above=0.0, at_most=1.0)
    with pytest.raises(ValueError, match=r"^x must be a finite number at least 0 and below 1, got 1.0$"):
        require_number("x", 1.0, at_least=0.0, below=1.0)
    with pytest.raises(ValueError, match=r"^x must be a finite number, got nan$"):
        require_number("x", math.nan)


@pytest.mark.parametrize("value", [*NO_NUMBERS, math.inf, -math.inf], ids=repr)
def test_what_is_no_number(value: Any):
    with pytest.raises(ValueError, match="x must be a finite number"):
        require_number("x", value)


bounds = st.integers(-3, 3)


@given(x=bounds, above=bounds, at_least=bounds, below=bounds, at_most=bounds)
def test_bounds_are_open_or_closed_as_their_names_say(x: int, above: int, at_least: int, below: int, at_most: int):
    inside = x > above and x >= at_least and x < below and x <= at_most
    try:
        assert require_number("x", x, above=above, at_least=at_least, below=below, at_most=at_most) == x
        assert inside
    except ValueError:
        assert not inside


def test_switches():
    assert require_switch("s", True) is True
    assert require_switch("s", False) is False
    assert require_switch("s", None, optional=True) is False
    for value in (1, 0, "true", "false", None, np.True_):
        with pytest.raises(ValueError, match="^s must be true or false, got "):
            require_switch("s", value)


def test_choices():
    assert require_choice("mode", "max", ("max", "min")) == "max"
    with pytest.raises(ValueError, match=r"^mode must be one of 'max', 'min', got 'maxx'; did you mean 'max'\?$"):
        require_choice("mode", "maxx", ("max", "min"))
    for value in ("", None, 1, True, ["max"]):
        with pytest.raises(ValueError, match="^mode must be one of 'max', 'min', got "):
            require_choice("mode", value, ("max", "min"))
