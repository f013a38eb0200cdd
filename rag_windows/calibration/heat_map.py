"""A picture of a calibration: every setting that was tried, by its criterion."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rag_windows.calibration.curve import draw_curve
from rag_windows.calibration.grid import varying
from rag_windows.calibration.profile import FIGURES, LOWER_IS_BETTER, Profile, Setting
from rag_windows.errors import MissingExtraError, ProfileError
from rag_windows.hints import missing
from rag_windows.methods.registry import numbers_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from rag_windows.methods import Method

_NAMES = {"temperature": "temperature T", "scale": "scale S", "eta": "step size η"}
_SYMBOLS = {"temperature": "T", "scale": "S", "eta": "η"}
_LEAST = 1e-4
"""Divergences below this have one colour: a logarithm has no zero."""


def draw(profile: Profile, path: str | Path) -> None:
    """Draw the settings into a PNG file.

    Two numbers that were varied make a heat map: a cell for each pair of the coarse grid, with its
    value, and a dot for each setting of the finer round. The default and the best setting are
    marked. Of one number it is a curve with its intervals; of more than two, the two with the most
    values are shown, each cell with the best of the others.

    Args:
        profile: with at least two settings.
        path: of the picture; its folder exists.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ProfileError: no number was varied, or the file can't be written.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(missing("The picture", "matplotlib", "figures")) from error
    kin = [one for one in profile.settings if type(one.method) is type(profile.default)]
    axes_names = _axes([one for one in kin if not one.fine])
    if not axes_names:
        raise ProfileError("No number of the method was varied, so there is nothing to draw.")
    with mpl.rc_context({"font.family": "DejaVu Sans", "font.size": 10}):
        figure = Figure(figsize=(8.4, 6.9) if len(axes_names) == 2 else (8.4, 5.2))
        axes = figure.add_subplot()
        if len(axes_names) == 2:
            _heat_map(axes, profile, kin, axes_names)
        else:
            draw_curve(axes, profile, kin, axes_names[0])
            axes.set_xlabel(_NAMES.get(axes_names[0], axes_names[0]), fontsize=11)
            axes.set_ylabel(_unit(profile.criteria[0]), fontsize=10)
        axes.set_title(_title(profile), fontsize=10.5, pad=12, loc="left", linespacing=1.5)
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


def _axes(settings: Sequence[Setting]) -> list[str]:
    """One or two numbers: those with the most values, in the order of the method's fields."""
    values = varying(one.method for one in settings)
    most = sorted(values, key=lambda name: -len(values[name]))[:2]
    return [name for name in values if name in most]


def _title(profile: Profile) -> str:
    outcome = "beats the default" if profile.beats_default else "the default stays"
    criterion = profile.criteria[0]
    return (
        f"{profile.default.name} on {profile.model.name}, {profile.examples} examples: {outcome}\n"
        f"{criterion}: {FIGURES[criterion]}"
    )


def _heat_map(
    axes: Axes,
    profile: Profile,
    settings: Sequence[Setting],
    names: Sequence[str],
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
    cells = _best_of_cells(coarse, names, criterion, lower=lower)
    shown = [*cells.values(), *(one.figures[criterion].value for one in fine)]
    norm: Any
    if lower:
        norm = LogNorm(max(_LEAST, min(shown)), max(10 * _LEAST, *shown), clip=True)
    else:
        norm = Normalize(min(shown), max(max(shown), min(shown) + 1e-6))
    colours: Any = ScalarMappable(norm, "viridis_r" if lower else "viridis")
    grid = [[cells.get((y, x), math.nan) for x in xs] for y in ys]
    axes.imshow(grid, cmap=colours.cmap, norm=norm, origin="lower", aspect="auto")
    for (y, x), value in cells.items():
        axes.text(
            xs.index(x),
            ys.index(y),
            _shown(value),
            ha="center",
            va="center",
            fontsize=8.5,
            color=_ink(colours.to_rgba(value)),
            zorder=2,
        )
    places = [_place(xs, ys, one.method, names) for one in fine]
    if places:
        axes.scatter(
            [x for x, _ in places],
            [y for _, y in places],
            s=54,
            linewidths=1.0,
            zorder=3,
            facecolors=[colours.to_rgba(one.figures[criterion].value) for one in fine],
            edgecolors="white",
        )
        axes.scatter([], [], s=54, facecolors="#999999", edgecolors="white", label="finer round")
    if _has(profile.default, names):
        left, bottom = _place(xs, ys, profile.default, names)
        frame = Rectangle((left - 0.47, bottom - 0.45), 0.94, 0.9, fill=False, zorder=4)
        frame.set(edgecolor="black", linewidth=2.4)
        frame.set_label(f"default: {_short(profile.default, names)}")
        axes.add_patch(frame)
    if type(profile.best) is type(profile.default) and _has(profile.best, names):
        x, y = _place(xs, ys, profile.best, names)
        axes.scatter(
            [x],
            # In the middle of a cell stands its value.
            [y + 0.29 if x == int(x) and y == int(y) else y],
            s=230,
            marker="*",
            facecolors="#d62728",
            edgecolors="white",
            linewidths=1.0,
            zorder=5,
            label=f"best: {_short(profile.best, names)}",
        )
    axes.set_xticks(range(len(xs)), [f"{x:g}" for x in xs])
    axes.set_yticks(range(len(ys)), [f"{y:g}" for y in ys])
    axes.set_xlabel(_NAMES.get(names[1], names[1]), fontsize=11)
    axes.set_ylabel(_NAMES.get(names[0], names[0]), fontsize=11)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
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


def _best_of_cells(
    settings: Sequence[Setting], names: Sequence[str], criterion: str, *, lower: bool
) -> dict[tuple[float, float], float]:
    cells: dict[tuple[float, float], float] = {}
    for one in settings:
        numbers = numbers_of(one.method)
        place = (numbers[names[0]], numbers[names[1]])
        value = one.figures[criterion].value
        known = cells.get(place, value)
        cells[place] = min(known, value) if lower else max(known, value)
    return cells


def _has(method: Method, names: Sequence[str]) -> bool:
    return set(names) <= numbers_of(method).keys()


def _place(
    xs: Sequence[float], ys: Sequence[float], method: Method, names: Sequence[str]
) -> tuple[float, float]:
    """Where a setting stands among the evenly spaced values of both axes."""
    numbers = numbers_of(method)
    return _along(xs, numbers[names[1]]), _along(ys, numbers[names[0]])


def _along(values: Sequence[float], value: float) -> float:
    right = min(max(bisect_left(values, value), 1), len(values) - 1)
    low, high = values[right - 1], values[right]
    return min(max(right - 1 + (value - low) / (high - low), -0.5), len(values) - 0.5)


def _short(method: Method, names: Sequence[str]) -> str:
    numbers = numbers_of(method)
    return ", ".join(f"{_SYMBOLS.get(name, name)} {numbers[name]:g}" for name in names)


def _shown(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.2g}" if abs(value) < 0.1 else f"{value:.2f}"


def _ink(colour: Any) -> str:
    red, green, blue = colour[:3]
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def _unit(criterion: str) -> str:
    better = "lower" if criterion in LOWER_IS_BETTER else "higher"
    return f"{criterion} ({better} is better)"
