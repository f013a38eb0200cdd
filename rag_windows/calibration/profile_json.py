"""The JSON form of a profile, checked entry by entry when it is read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rag_windows.calibration.intervals import Mean
from rag_windows.calibration.method_json import method_from_json, method_to_json
from rag_windows.calibration.profile import FIGURES, Comparison, Profile, Setting
from rag_windows.calibration.spread import guard_problem
from rag_windows.calibration.stamp import ModelStamp
from rag_windows.errors import DataError, ProfileError
from rag_windows.evaluation.data.fields import Place, shown
from rag_windows.evaluation.data.strict_json import parse as parse_json

FORMAT = "rag-windows calibration profile"
VERSION = 1

T = TypeVar("T")


def dump(profile: Profile) -> str:
    """The profile as JSON text."""
    data = {
        "format": FORMAT,
        "version": VERSION,
        "model": {"name": profile.model.name, "fingerprint": profile.model.fingerprint},
        "method": method_to_json(profile.method),
        "beats_default": profile.beats_default,
        "verdict": profile.verdict,
        "best": method_to_json(profile.best),
        "default": method_to_json(profile.default),
        "criteria": list(profile.criteria),
        "examples": profile.examples,
        "folds": profile.folds,
        "seed": profile.seed,
        "left_out": list(profile.left_out),
        "held_out": [
            {
                "figure": one.figure,
                "chosen": _mean_to_json(one.chosen),
                "default": _mean_to_json(one.default),
                "difference": _mean_to_json(one.difference),
            }
            for one in profile.held_out
        ],
        "guard": None if profile.guard is None else dict(profile.guard),
        "settings": [
            {
                "method": method_to_json(one.method),
                "fine": one.fine,
                "figures": {name: _mean_to_json(mean) for name, mean in one.figures.items()},
            }
            for one in profile.settings
        ],
    }
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def parse(text: str) -> Profile:
    """The profile of a JSON text.

    Raises:
        ProfileError: naming the entry that is missing or wrong; no full stop at its end.
    """
    try:
        data = parse_json(text, Place("its text"))
    except DataError as error:
        raise ProfileError(str(error).removesuffix(".")) from error
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise ProfileError(f"it is no {FORMAT}: its entry 'format' does not say so")
    if data.get("version") != VERSION:
        raise ProfileError(
            f"it has version {data.get('version')!r} and this rag-windows reads version {VERSION}; "
            "calibrate again, or use the rag-windows that wrote it"
        )
    try:
        profile = _profile(data)
    except RecursionError as error:
        raise ProfileError("lists and objects are nested too deeply; flatten them") from error
    if not profile.criteria:
        raise ProfileError("entry 'criteria': must name at least one figure")
    for number, setting in enumerate(profile.settings):
        missing = [name for name in profile.criteria if name not in setting.figures]
        if missing:
            raise ProfileError(f"entry 'settings': [{number}] lacks the figures {missing}")
    return profile


def _profile(data: Mapping[str, Any]) -> Profile:
    return Profile(
        method=_get(data, "method", method_from_json),
        best=_get(data, "best", method_from_json),
        default=_get(data, "default", method_from_json),
        beats_default=_get(data, "beats_default", _boolean),
        verdict=_get(data, "verdict", _text),
        criteria=_get(data, "criteria", _list_of(_figure)),
        settings=_get(data, "settings", _list_of(_setting)),
        held_out=_get(data, "held_out", _list_of(_comparison)),
        examples=_get(data, "examples", _count),
        folds=_get(data, "folds", _count),
        seed=_get(data, "seed", _count),
        left_out=_get(data, "left_out", _list_of(_text)),
        model=_get(data, "model", _model),
        guard=_get(data, "guard", _guard),
    )


def _get(data: Any, name: str, read: Callable[[Any], T]) -> T:
    if not isinstance(data, Mapping):
        raise ProfileError(f"expected an object, got {data!r}")
    if name not in data:
        raise ProfileError(f"the entry {name!r} is missing")
    try:
        return read(data[name])
    except ProfileError as error:
        raise ProfileError(f"entry {name!r}: {error}") from error


def _list_of(read: Callable[[Any], T]) -> Callable[[Any], tuple[T, ...]]:
    def read_all(value: Any) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise ProfileError(f"must be a list, got {value!r}")
        found = []
        for number, entry in enumerate(value):
            try:
                found.append(read(entry))
            except ProfileError as error:
                raise ProfileError(f"[{number}] {error}") from error
        return tuple(found)

    return read_all


def _mean_to_json(mean: Mean) -> dict[str, float]:
    return {"value": mean.value, "low": mean.low, "high": mean.high}


def _mean(value: Any) -> Mean:
    return Mean(
        _get(value, "value", _number), _get(value, "low", _number), _get(value, "high", _number)
    )


def _setting(value: Any) -> Setting:
    return Setting(
        _get(value, "method", method_from_json),
        _get(value, "figures", _figures),
        _get(value, "fine", _boolean),
    )


def _figures(value: Any) -> dict[str, Mean]:
    if not isinstance(value, Mapping) or not value:
        raise ProfileError(f"must be an object with figures, got {value!r}")
    return {_figure(name): _get(value, name, _mean) for name in value}


def _comparison(value: Any) -> Comparison:
    return Comparison(
        _get(value, "figure", _figure),
        _get(value, "chosen", _mean),
        _get(value, "default", _mean),
        _get(value, "difference", _mean),
    )


def _model(value: Any) -> ModelStamp:
    return ModelStamp(_get(value, "name", _text), _get(value, "fingerprint", _text))


def _guard(value: Any) -> Mapping[str, Any] | None:
    problem = guard_problem(value)
    if problem is not None:
        raise ProfileError(problem)
    return None if value is None else dict(value)


def _figure(value: Any) -> str:
    if value not in FIGURES:
        raise ProfileError(f"unknown figure {value!r}; this version knows {sorted(FIGURES)}")
    return str(value)


def _number(value: Any) -> float:
    try:
        if isinstance(value, bool) or not math.isfinite(value):
            raise TypeError
        return float(value)
    except (TypeError, OverflowError):
        raise ProfileError(f"must be a finite number, got {shown(value)}") from None


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ProfileError(f"must be a whole number from 0, got {value!r}")
    return value


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ProfileError(f"must be true or false, got {value!r}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ProfileError(f"must be a string, got {value!r}")
    return value
