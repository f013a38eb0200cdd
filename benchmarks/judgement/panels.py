"""What the pictures share: colours, axes, and legends that stand beside a panel."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks.judgement.entries import BASE, Entry

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
"""Okabe and Ito's, which readers with any colour vision tell apart; markers differ, too."""

MARKERS = ("o", "s", "^", "D", "v")
GREY, INK = "#c8c8c8", "#222222"
DPI = 110


def families_of(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """Labels by family; the sequential reader is drawn in every panel and has none."""
    families: dict[str, list[str]] = {}
    for entry in entries:
        if entry.label != BASE:
            families.setdefault(entry.family, []).append(entry.label)
    return families


def windows_axis(axes: Axes, sizes: Sequence[int]) -> None:
    """Numbers of passages, each as far from the next as its double."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))


def plain(axes: Axes) -> None:
    """Nothing that carries no figure, but a thin grid."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)


def legend_right(axes: Axes) -> None:
    """The legend on the right of its panel: inside it would cover lines at 0 or at 100."""
    axes.legend(
        fontsize=8,
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        borderaxespad=0,
        frameon=False,
        labelspacing=0.8,
    )


def legend_below(axes: Axes, offset: float, size: float = 8) -> None:
    """The legend below its panel.

    Args:
        axes: the panel.
        offset: from the panel's lower edge, as a share of its height: room for the labels.
        size: of the letters.
    """
    axes.legend(
        fontsize=size,
        loc="upper center",
        bbox_to_anchor=(0.5, -offset),
        borderaxespad=0,
        frameon=False,
    )
