"""What a calibration found: the method to use, and how every setting that was tried did."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

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

from rag_windows.calibration.model_fingerprint import ModelFingerprint
from rag_windows.calibration.strict_json import parse_json
from rag_windows.errors import MethodError, ProfileError
from rag_windows.methods import METHODS, Method, describe, from_description

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
"""How `Profile.guard` measures the spread of attention; see `mass_spread`."""

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
        from rag_windows.calibration.plot import draw

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
