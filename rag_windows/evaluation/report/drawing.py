"""What all charts of a report share: sizes, axes, legend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rag_windows.errors import MissingExtraError, missing
from rag_windows.evaluation.report.palette import GRID, GROUND, INK, SOFT, Look
from rag_windows.evaluation.report.svg import inline
from rag_windows.prompt.visible_text import one_line

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE, NARROW = 860, 350
"""Widths in CSS pixels; a chart is drawn for each, since text doesn't shrink with a screen."""

_TEXT = 14.0
_LONGEST_LABEL = 34


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture for both widths.

    Attributes:
        name: unique in the page.
        title: above it.
        about: below it: what is drawn, and how it is read.
        wide: SVG for a desk.
        narrow: for a phone.
    """

    name: str
    title: str
    about: str
    wide: str
    narrow: str


def chart(name: str, title: str, about: str, draw: Callable[[int], Figure]) -> Chart:
    """Draw for both widths.

    Args:
        name: unique in the page, of letters, digits and hyphens.
        title: above it.
        about: below it.
        draw: takes the width in CSS pixels.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    with _settings(name):
        wide = inline(draw(WIDE), f"{name}-w", title, about)
        narrow = inline(draw(NARROW), f"{name}-n", title, about)
    return Chart(name, title, about, wide, narrow)


@contextmanager
def _settings(salt: str) -> Iterator[None]:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingExtraError(
            missing("The report with its charts", "matplotlib", "eval")
        ) from error
    with mpl.rc_context(
        {
            "axes.edgecolor": SOFT,
            "axes.labelcolor": INK,
            "axes.titlecolor": INK,
            "font.family": "DejaVu Sans",
            "font.size": _TEXT,
            "svg.fonttype": "none",
            "svg.hashsalt": salt,
            "text.color": INK,
            # A "$" in a dataset's own words starts no formula.
            "text.parse_math": False,
            "xtick.color": SOFT,
            "xtick.labelcolor": INK,
            "ytick.color": SOFT,
            "ytick.labelcolor": INK,
        }
    ):
        yield


def blank(width: int, height: int) -> Figure:
    """An empty figure; sizes in CSS pixels."""
    from matplotlib.figure import Figure

    # SVG's unit is matplotlib's point, of which 72 make an inch.
    return Figure(figsize=(width / 72, height / 72), layout="constrained")


def plain(axes: Axes, *, grid: Literal["both", "x", "y"] = "both") -> None:
    """Two spines and a faint grid."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis=grid, color=GRID, linewidth=1)
    axes.set_axisbelow(True)


def line(
    axes: Axes,
    look: Look,
    xs: Sequence[float],
    ys: Sequence[float],
    band: tuple[Sequence[float], Sequence[float]] | None = None,
    *,
    label: str,
    order: int = 0,
) -> None:
    """A line with its markers and its band; later ones are smaller, so that none hides another."""
    if band is not None:
        axes.fill_between(xs, *band, color=look.colour, alpha=0.13, linewidth=0, zorder=2)
    axes.plot(
        xs,
        ys,
        color=look.colour,
        linestyle=look.dash,
        marker=look.marker,
        markersize=max(5.0, 9 - 0.8 * order),
        markeredgecolor=GROUND,
        markeredgewidth=0.8,
        linewidth=max(1.6, 2.6 - 0.2 * order),
        label=short(label),
        zorder=4 + order / 100,
    )


def legend(figure: Figure, handles: Sequence[Artist], labels: Sequence[str], columns: int) -> None:
    """Below the panels."""
    figure.legend(
        handles,
        labels,
        loc="outside lower left",
        ncols=columns,
        frameon=False,
        handlelength=3.2,
        columnspacing=1.6,
    )


def columns_of_legend(labels: Sequence[str], width: int) -> int:
    """As many as a width in CSS pixels holds of these labels."""
    longest = max(len(short(one)) for one in labels)
    return max(1, min(len(labels), int(width / (longest * _TEXT * 0.6 + 62))))


def short(text: str, longest: int = _LONGEST_LABEL) -> str:
    """A name of others on one line; a long one ends in an ellipsis, and is whole in the tables."""
    shown = one_line(text)
    # matplotlib leaves labels that begin with "_" out of a legend.
    shown = "\u200b" + shown if shown.startswith("_") else shown
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"
