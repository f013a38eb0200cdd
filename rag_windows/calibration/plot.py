"""A picture of a calibration: every setting that was tried, by its criterion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rag_windows.calibration.grid import varying
from rag_windows.calibration.profile import FIGURES, LOWER_IS_BETTER, Profile, Setting, label
from rag_windows.errors import MissingExtraError, ProfileError, missing
from rag_windows.methods import Method
from rag_windows.methods.registry import numbers_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAMES = {"temperature": "temperature T", "scale": "scale S", "eta": "step size η"}
_SYMBOLS = {"temperature": "T", "scale": "S", "eta": "η"}
_LEAST = 1e-4
"""Divergences below this have one colour: a logarithm has no zero."""
_BLUE, _RED = "#0072b2", "#d62728"
_DASHED = ("#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#7f7f7f")


def draw(profile: Profile, path: str | Path) -> None:
    """Draw the settings into a PNG file.

    Two numbers that were varied make a heat map: a cell for each pair of the coarse grid, with its
    value, and a dot for each setting of the finer round. The default and the best setting are
    marked. Of one number it is a curve with its intervals; of more than two, the two with the most
    values are shown, each cell with the best of the others.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ProfileError: no number was varied, or the file can't be written.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(missing("The picture", "matplotlib", "figures")) from error
    settings = [one for one in profile.settings if type(one.method) is type(profile.default)]
    values = varying(one.method for one in settings if not one.fine)
    most = sorted(values, key=lambda name: -len(values[name]))[:2]
    names = [name for name in values if name in most]
    if not names:
        raise ProfileError("No number of the method was varied, so there is nothing to draw.")
    criterion = profile.criteria[0]
    outcome = "beats the default" if profile.beats_default else "the default stays"
    with mpl.rc_context({"font.family": "DejaVu Sans", "font.size": 10}):
        figure = Figure(figsize=(8.4, 6.9) if len(names) == 2 else (8.4, 5.2))
        axes = figure.add_subplot()
        if len(names) == 2:
            _heat_map(axes, profile, settings, names)
        else:
            _curve(axes, profile, settings, names[0])
        axes.set_title(
            f"{profile.default.name} on {profile.model.name}, {profile.examples} examples: "
            f"{outcome}\n{criterion}: {FIGURES[criterion]}",
            fontsize=10.5,
            pad=12,
            loc="left",
            linespacing=1.5,
        )
        for spine in axes.spines.values():
            spine.set_visible(len(names) == 1 and spine.spine_type in ("left", "bottom"))
        try:
            figure.savefig(
                path,
                dpi=150,
                facecolor="white",
                bbox_inches="tight",
                format="png",
                metadata={"Software": None},
            )
        except OSError as error:
            raise ProfileError(f"The picture {str(path)!r} can't be written: {error}.") from error


def _curve(axes: Axes, profile: Profile, settings: Sequence[Setting], name: str) -> None:
    """The first criterion over one number; a setting with a word in its place is a dashed line."""
    criterion = profile.criteria[0]
    points = sorted(
        (numbers_of(one.method)[name], one.figures[criterion])
        for one in settings
        if name in numbers_of(one.method)
    )
    xs, means = zip(*points, strict=True)
    axes.fill_between(
        xs,
        [mean.low for mean in means],
        [mean.high for mean in means],
        color=_BLUE,
        alpha=0.18,
        linewidth=0,
        label="95% interval",
    )
    axes.plot(xs, [mean.value for mean in means], "o-", color=_BLUE, markersize=4)
    marked = ((profile.default, "default", "s", "black"), (profile.best, "best", "*", _RED))
    words = [one for one in settings if name not in numbers_of(one.method)]
    for place, one in enumerate(words):
        marks = ", ".join(text for method, text, *_ in marked if method == one.method)
        axes.axhline(
            one.figures[criterion].value,
            color=_DASHED[place % len(_DASHED)],
            linestyle="--",
            linewidth=1.2,
            label=f"{marks}{marks and ': '}{label(one.method)}",
        )
    for method, text, marker, colour in marked:
        if name in numbers_of(method):
            axes.scatter(
                [numbers_of(method)[name]],
                [profile.setting(method).figures[criterion].value],
                s=170,
                marker=marker,
                facecolors="none" if text == "default" else colour,
                edgecolors=colour,
                zorder=3,
                label=f"{text}: {label(method)}",
            )
    axes.set_xlabel(_NAMES.get(name, name), fontsize=11)
    axes.set_ylabel(_unit(criterion), fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9)


def _heat_map(
    axes: Axes, profile: Profile, settings: Sequence[Setting], names: Sequence[str]
) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import FuncFormatter

    criterion = profile.criteria[0]
    lower = criterion in LOWER_IS_BETTER
    placed = [one for one in settings if _has(one.method, names)]
    coarse = [one for one in placed if not one.fine]
    fine = [one for one in placed if one.fine]
    ys, xs = (varying(one.method for one in coarse)[name] for name in names)

    def place(method: Method) -> tuple[float, float]:
        """Where a setting stands among the evenly spaced values of both axes."""
        y, x = (numbers_of(method)[name] for name in names)
        return float(np.interp(x, xs, range(len(xs)))), float(np.interp(y, ys, range(len(ys))))

    grid = np.full((len(ys), len(xs)), math.nan)
    better = np.fmin if lower else np.fmax
    for one in coarse:
        column, row = map(int, place(one.method))
        grid[row, column] = better(grid[row, column], one.figures[criterion].value)
    shown = [*grid[~np.isnan(grid)], *(one.figures[criterion].value for one in fine)]
    norm: Any = Normalize(min(shown), max(max(shown), min(shown) + 1e-6))
    if lower:
        norm = LogNorm(max(_LEAST, min(shown)), max(10 * _LEAST, *shown), clip=True)
    colours: Any = ScalarMappable(norm, "viridis_r" if lower else "viridis")
    axes.imshow(grid, cmap=colours.cmap, norm=norm, origin="lower", aspect="auto")
    for (row, column), value in np.ndenumerate(grid):
        if math.isnan(value):
            continue
        red, green, blue, _ = colours.to_rgba(value)
        light = 0.299 * red + 0.587 * green + 0.114 * blue > 0.5
        axes.text(
            column,
            row,
            f"{value:.2g}" if 0 < abs(value) < 0.1 else f"{value:.2f}" if value else "0",
            ha="center",
            va="center",
            fontsize=8.5,
            color="black" if light else "white",
            zorder=2,
        )
    if fine:
        places = np.array([place(one.method) for one in fine])
        axes.scatter(
            places[:, 0],
            places[:, 1],
            s=54,
            zorder=3,
            facecolors=[colours.to_rgba(one.figures[criterion].value) for one in fine],
            edgecolors="white",
        )
        axes.scatter([], [], s=54, facecolors="#999999", edgecolors="white", label="finer round")
    if _has(profile.default, names):
        x, y = place(profile.default)
        frame = Rectangle((x - 0.47, y - 0.45), 0.94, 0.9, fill=False, zorder=4)
        frame.set(edgecolor="black", linewidth=2.4)
        frame.set_label(f"default: {_short(profile.default, names)}")
        axes.add_patch(frame)
    if type(profile.best) is type(profile.default) and _has(profile.best, names):
        x, y = place(profile.best)
        axes.scatter(
            [x],
            # In the middle of a cell stands its value.
            [y + 0.29 if x == int(x) and y == int(y) else y],
            s=230,
            marker="*",
            facecolors=_RED,
            edgecolors="white",
            zorder=5,
            label=f"best: {_short(profile.best, names)}",
        )
    axes.set_xticks(range(len(xs)), [f"{x:g}" for x in xs])
    axes.set_yticks(range(len(ys)), [f"{y:g}" for y in ys])
    axes.set_xlabel(_NAMES.get(names[1], names[1]), fontsize=11)
    axes.set_ylabel(_NAMES.get(names[0], names[0]), fontsize=11)
    axes.tick_params(length=0)
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    bar = axes.figure.colorbar(colours, ax=axes, pad=0.02, format=plain)
    bar.set_label(_unit(criterion), fontsize=10)
    bar.outline.set_visible(False)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(0.0, -0.1),
        ncols=3,
        frameon=False,
        fontsize=9,
        handletextpad=0.4,
        columnspacing=1.6,
    )


def _has(method: Method, names: Sequence[str]) -> bool:
    return set(names) <= numbers_of(method).keys()


def _short(method: Method, names: Sequence[str]) -> str:
    numbers = numbers_of(method)
    return ", ".join(f"{_SYMBOLS.get(name, name)} {numbers[name]:g}" for name in names)


def _unit(criterion: str) -> str:
    better = "lower" if criterion in LOWER_IS_BETTER else "higher"
    return f"{criterion} ({better} is better)"
