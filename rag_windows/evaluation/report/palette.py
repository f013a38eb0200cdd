"""Colours, markers and dashes: what tells methods apart, on light and on dark ground."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

INK, SOFT, GRID, GROUND = "#010101", "#020202", "#030303", "#040404"
"""Stand-ins for matplotlib; the page gives them their colours by its style sheet."""

_STAND_INS = {INK: "ink", SOFT: "soft", GRID: "grid", GROUND: "ground"}

_COLOURS = ("#0101f1", "#0101f2", "#0101f3", "#0101f4", "#0101f5", "#0101f6")
_MARKERS = ("s", "^", "D", "v", "P", "X", "<", "p", "*", ">", "h", "d")
_DASHES: tuple[Any, ...] = (
    "-",
    (0, (6, 2)),
    (0, (2, 1.5)),
    (0, (7, 2, 1.5, 2)),
    (0, (4, 1.5, 1.5, 1.5, 1.5, 1.5)),
)


@dataclass(frozen=True, slots=True)
class Look:
    """How one method is drawn.

    Attributes:
        colour: a stand-in.
        marker: matplotlib's name of a shape.
        dash: matplotlib's line style.
    """

    colour: str
    marker: str
    dash: Any


def looks(methods: Sequence[str], base: str) -> dict[str, Look]:
    """One for each method; the base is drawn in ink, and no two of twelve others look alike."""
    others = [name for name in methods if name != base]
    found = {
        name: Look(*(kinds[place % len(kinds)] for kinds in (_COLOURS, _MARKERS, _DASHES)))
        for place, name in enumerate(others)
    }
    return {base: Look(INK, "o", "-"), **found}


def variables() -> dict[str, str]:
    """The style sheet's name of each stand-in."""
    lines = {colour: f"line{place}" for place, colour in enumerate(_COLOURS, start=1)}
    return {**_STAND_INS, **lines}
