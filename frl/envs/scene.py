"""A picture of one environment row as data: an environment says what there is to see, ``frl.render`` draws it.

Coordinates are the environment's own [m], x to the right and y up. Everything is plain numbers, so a scene can be compared, stored or drawn elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Circle(NamedTuple):
    """A disc, or a ring when ``filled`` is false."""

    center: tuple[float, float]
    radius: float
    color: str = "tab:blue"
    filled: bool = True


class Line(NamedTuple):
    """An open path through points; ``width`` in points of the picture."""

    points: Sequence[tuple[float, float]]
    color: str = "black"
    width: float = 2.0


class Polygon(NamedTuple):
    """A filled closed path through points."""

    points: Sequence[tuple[float, float]]
    color: str = "tab:blue"


class Picture(NamedTuple):
    """An image of another renderer's: ``pixels`` uint8 ``[H, W, 3]``, first row on top, between two corners."""

    pixels: Any
    lower_left: tuple[float, float]
    upper_right: tuple[float, float]


class Scene(NamedTuple):
    """What one state looks like.

    Attributes:
        xlim, ylim: limits of the picture [m]; the scale of both axes is the same.
        shapes: drawn in order.
        caption: a line of text under the picture.
    """

    xlim: tuple[float, float]
    ylim: tuple[float, float]
    shapes: Sequence[Circle | Line | Polygon | Picture]
    caption: str = ""
