"""What a calibration found: the method to use, and how every setting that was tried did."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass

from rag_windows.calibration.grid import varying
from rag_windows.calibration.model_fingerprint import ModelFingerprint
from rag_windows.calibration.strict_json import parse_json
from rag_windows.errors import MethodError, MissingExtraError, ProfileError, missing
from rag_windows.methods import METHODS, Method, describe, from_description
from rag_windows.methods.registry import numbers_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


FORMAT = "rag-windows calibration profile"
VERSION = 1

Figure = Literal["exact match", "metric", "log-probability", "divergence", "agreement"]

FIGURES: Mapping[str, str] = {
    "exact match": "share of greedy answers equal to the right one",
    "metric": "mean of the metric that was passed",
    "log-probability": "log-probability of the right answer with its end, in nats",
    "divergence": "KL from the sequential reader to this one, nats a token of its answer",
    "agreement": "share of greedy answers equal to the sequential reader's",
}
"""What is measured, and its unit."""

LOWER_IS_BETTER = frozenset(("divergence",))

MEASURE = "1 - sum of squared shares"
"""How `Profile.guard` measures the spread of attention; see `attention_spread`."""

_LONGEST = 500
"""Characters of an error that quotes what stands in a file."""

_CHECKED = ConfigDict(strict=True, allow_inf_nan=False)


def _method(value: Any) -> Method:
    if isinstance(value, Method):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"must be an object with a method's name and numbers, got {value!r}")
    try:
        return from_description(value)
    except MethodError as error:
        raise ValueError(str(error).rstrip(".")) from error


@dataclass(frozen=True, config=ConfigDict(strict=True, allow_inf_nan=False, extra="forbid"))
class _MultiHopThreshold:
    measure: Literal["1 - sum of squared shares"]
    threshold: Annotated[float, Field(ge=0, le=1)]
    false_alarms: Annotated[float, Field(ge=0, le=1)]
    missed: Annotated[float, Field(ge=0, le=1)]
    single_hop: int
    multi_hop: int


def _guard(value: dict[str, Any]) -> dict[str, Any]:
    try:
        return dataclasses.asdict(_MultiHopThreshold(**value))
    except ValidationError as error:
        raise ValueError(_problem(error)) from error


_Method = Annotated[Method, PlainValidator(_method), PlainSerializer(describe)]
_Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, config=_CHECKED)
class Mean:
    """A mean over examples with its 95% interval.

    Attributes:
        value: the mean.
        low: 2.5th percentile of the means of resampled examples.
        high: 97.5th percentile.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True, config=_CHECKED)
class Setting:
    """One setting that was tried.

    Attributes:
        method: with its numbers.
        figures: mean over the examples with a bootstrap 95% interval, by `FIGURES`' names.
        fine: whether it belongs to the second, finer round.
    """

    method: _Method
    figures: Annotated[dict[Figure, Mean], Field(min_length=1)]
    fine: bool = False


@dataclass(frozen=True, config=_CHECKED)
class Comparison:
    """The chosen settings against the default on examples that did not choose them.

    The examples are dealt into folds; for each, the rest choose a setting as the whole call does,
    and the fold judges it.

    Attributes:
        figure: what was measured.
        chosen: mean of the settings that were chosen.
        default: mean of the default on the same examples.
        difference: chosen minus default, example by example; above zero where chosen is better,
            whichever way the figure itself points.
    """

    figure: Figure
    chosen: Mean
    default: Mean
    difference: Mean

    @property
    def better(self) -> bool:
        """Whether the whole interval of the difference is on the better side of zero."""
        return self.difference.low > 0

    @property
    def worse(self) -> bool:
        """Whether the whole interval is on the worse side."""
        return self.difference.high < 0


@dataclass(frozen=True, config=_CHECKED)
class Profile:
    """The result of `WindowedLM.calibrate`; ``from_pretrained(profile=...)`` uses it.

    Attributes:
        method: what to use: `best` if it beats the default on held-out examples, else `default`.
        best: the best setting on all examples.
        default: what it was compared with.
        beats_default: whether `best` replaced the default.
        verdict: the same in one sentence, with the figures.
        criteria: names of the figures that decided: the first one, and behind it what breaks ties.
        settings: every setting, in the order tried.
        held_out: one comparison for each of `criteria`.
        examples: how many examples decided.
        folds: into how many parts they were dealt for the comparison.
        seed: of the folds and the resampling.
        left_out: what was left out and why, one sentence each.
        model: which model this is for.
        guard: threshold of the attention's spread above which a question looks multi-hop, with its
            error rates; None without examples of both kinds.
    """

    method: _Method
    best: _Method
    default: _Method
    beats_default: bool
    verdict: str
    criteria: Annotated[tuple[Figure, ...], Field(min_length=1)]
    settings: tuple[Setting, ...]
    held_out: tuple[Comparison, ...]
    examples: _Count
    folds: _Count
    seed: _Count
    left_out: tuple[str, ...]
    model: ModelFingerprint
    guard: Annotated[dict[str, Any], AfterValidator(_guard)] | None = None

    def __post_init__(self) -> None:
        for number, setting in enumerate(self.settings):
            missing = [name for name in self.criteria if name not in setting.figures]
            if missing:
                raise ValueError(f"entry 'settings': [{number}] lacks the figures {missing}")

    def setting(self, method: Method) -> Setting:
        """The row of one method.

        Raises:
            ProfileError: it was not tried.
        """
        for one in self.settings:
            if one.method == method:
                return one
        raise ProfileError(f"The profile has no row of {label(method)}.")

    def ranked(self) -> list[Setting]:
        """Settings, the best on all examples first."""

        def key(one: Setting) -> list[float]:
            return [sign(name) * -one.figures[name].value for name in self.criteria]

        return sorted(self.settings, key=key)

    def to_json(self) -> str:
        """The profile as JSON text.

        Raises:
            ProfileError: one of its methods can't be read back.
        """
        for method in (self.method, self.best, self.default, *(s.method for s in self.settings)):
            _check_kept(method)
        data = _PROFILE.dump_python(self, mode="json")
        whole = {"format": FORMAT, "version": VERSION, **data}
        return json.dumps(whole, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """The profile of a JSON text.

        Raises:
            ProfileError: naming the entry that is missing or wrong; no full stop at its end.
        """
        try:
            data = parse_json(text)
            if not isinstance(data, Mapping) or data.get("format") != FORMAT:
                raise ValueError(f"it is no {FORMAT}: its entry 'format' does not say so")
            if data.get("version") != VERSION:
                raise ValueError(
                    f"it has version {data.get('version')!r} and this rag-windows reads version "
                    f"{VERSION}; calibrate again, or use the rag-windows that wrote it"
                )
            return _PROFILE.validate_json(json.dumps(data))
        except ValidationError as error:
            raise ProfileError(_problem(error)) from error
        except ValueError as error:
            raise ProfileError(str(error)) from error
        except RecursionError as error:
            raise ProfileError("lists and objects are nested too deeply; flatten them") from error

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, whole or not at all.

        Raises:
            ProfileError: the file can't be written.
        """
        text = self.to_json()
        target = Path(path)
        try:
            handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(text)
                os.chmod(name, 0o644)
                os.replace(name, target)
            except OSError:
                os.unlink(name)
                raise
        except OSError as error:
            raise ProfileError(f"The profile {str(path)!r} can't be written: {error}.") from error

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile that `save` wrote.

        Raises:
            ProfileError: it can't be read, is of another version, or does not hold what it must.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(
                f"The profile {str(path)!r} can't be read: {error}. "
                "`rag-windows calibrate --out FILE` writes one."
            ) from error
        try:
            return cls.from_json(text)
        except ProfileError as error:
            told = str(error)
            if len(told) > _LONGEST:
                told = f"{told[:_LONGEST]}..."
            raise ProfileError(f"The profile {str(path)!r} can't be used: {told}.") from error

    @classmethod
    def of(cls, value: Profile | str | Path) -> Profile:
        """A profile as it is, or one loaded from a path.

        Raises:
            ProfileError: see `load`; or neither of both.
        """
        if isinstance(value, Profile):
            return value
        if isinstance(value, str | Path):
            return cls.load(value)
        raise ProfileError(
            f"profile must be a Profile or the path of one, not {type(value).__name__}."
        )

    def plot(self, path: str | Path) -> None:
        """Draw the settings into a PNG: a map of two numbers, or a curve of one.

        Raises:
            MissingExtraError: matplotlib is not installed.
            ProfileError: no number was varied, or the file can't be written.
        """
        draw(self, path)


_PROFILE = TypeAdapter(Profile)


def sign(figure: str) -> float:
    """+1 where more is better, -1 where less is."""
    return -1.0 if figure in LOWER_IS_BETTER else 1.0


def label(method: Method) -> str:
    """A method and its parameters on one line, such as ``ape(temperature=0.9, scale=0.8)``.

    Parameters that are no numbers are left out where they have their documented default, unless
    there are no others.
    """
    values = {
        field.name: (getattr(method, field.name), field.default)
        for field in dataclasses.fields(method)  # type: ignore[arg-type] # they are dataclasses
    }
    told = [name for name, (value, default) in values.items() if value != default or _number(value)]
    # A method that has no numbers is told by its words.
    shown = [f"{name}={_shown(values[name][0])}" for name in told or values]
    return f"{method.name}({', '.join(shown)})"


def _number(value: Any) -> bool:
    return isinstance(value, Method | int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    if isinstance(value, Method):
        return label(value)
    return f"{value:g}" if _number(value) else repr(value)


def _check_kept(method: Method) -> None:
    try:
        kept = from_description(describe(method)) == method
    except MethodError:
        kept = False
    if not kept:
        raise ProfileError(
            f"A profile can't hold {method!r}: it takes the methods {sorted(METHODS)}, with "
            "numbers and text as parameters. Calibrate one of these."
        )


def _problem(error: ValidationError) -> str:
    """The first thing that is wrong, and where."""
    first = error.errors(include_url=False)[0]
    told = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"]
    name, *inside = first["loc"] or ("",)
    place = " ".join(f"[{one}]" if isinstance(one, int) else f"{one!r}" for one in inside)
    return f"entry {name!r}: {place}{place and ': '}{told}" if name else told


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
