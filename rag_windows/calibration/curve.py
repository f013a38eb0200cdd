"""A calibration of one number as a curve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rag_windows.calibration.method_json import label
from rag_windows.calibration.profile import Profile, Setting
from rag_windows.methods.registry import numbers_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINE = "#0072b2"
_OTHERS = ("#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#7f7f7f")


def draw_curve(axes: Axes, profile: Profile, settings: Sequence[Setting], name: str) -> None:
    """Draw the first criterion over one number, with its intervals.

    A setting that has a word in place of the number (a named schedule) is a dashed line.
    """
    criterion = profile.criteria[0]
    points = sorted(
        (numbers_of(one.method)[name], one.figures[criterion])
        for one in settings
        if name in numbers_of(one.method)
    )
    xs = [x for x, _ in points]
    axes.fill_between(
        xs,
        [mean.low for _, mean in points],
        [mean.high for _, mean in points],
        color=_LINE,
        alpha=0.18,
        linewidth=0,
        label="95% interval",
    )
    axes.plot(xs, [mean.value for _, mean in points], "o-", color=_LINE, markersize=4)
    words = [one for one in settings if name not in numbers_of(one.method)]
    for place, one in enumerate(words):
        axes.axhline(
            one.figures[criterion].value,
            color=_OTHERS[place % len(_OTHERS)],
            linestyle="--",
            linewidth=1.2,
            label=_named(profile, one),
        )
    for method, mark, text, face, edge in (
        (profile.default, "s", "default", "none", "black"),
        (profile.best, "*", "best", "#d62728", "#d62728"),
    ):
        if name in numbers_of(method):
            axes.plot(
                [numbers_of(method)[name]],
                [profile.setting(method).figures[criterion].value],
                mark,
                markersize=13,
                markerfacecolor=face,
                markeredgecolor=edge,
                linestyle="none",
                label=f"{text}: {label(method)}",
            )
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _named(profile: Profile, one: Setting) -> str:
    marks = [
        text
        for text, method in (("default", profile.default), ("best", profile.best))
        if method == one.method
    ]
    return f"{', '.join(marks)}: {label(one.method)}" if marks else label(one.method)
