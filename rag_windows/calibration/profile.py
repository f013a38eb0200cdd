"""What a comparison found: the method to use, and how every setting that was tried did."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import secrets
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import (
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass
from transformers import PreTrainedModel

from rag_windows.cache.fingerprint import canonical, flat, plain_tensors
from rag_windows.cache.keys import fields
from rag_windows.errors import MethodError, ProfileError, require
from rag_windows.methods import Method, describe, resolve
from rag_windows.methods.registry import numbers_of, spelled
from rag_windows.visible_text import strict_json

FORMAT = "rag-windows calibration profile"
VERSION = 2

Figure = Literal["contains", "metric", "log-probability", "divergence", "agreement"]

"""What is measured, more is better but of the divergence.

"contains" is the share of greedy answers that hold the words of a right one, "metric" the mean of
the metric that was passed, "log-probability" that of the right answer with its end, in nats;
"divergence" is the KL from the sequential reader to this one, in nats a token of its answer, and
"agreement" the share of greedy answers equal to the sequential reader's.
"""

_NOT_OF_A_MODEL = ("dtype", "torch_dtype", "quantization_config", "transformers_version")
"""Of a config: how weights are held, which they show themselves, and what wrote it."""


def _method(value: Any) -> Method:
    try:
        return resolve(value)
    except MethodError as error:
        raise ValueError(str(error)) from error


_Method = Annotated[Method, PlainValidator(_method), PlainSerializer(describe)]
_Count = Annotated[int, Field(ge=0)]
_CHECKED = ConfigDict(strict=True, allow_inf_nan=False)


@dataclass(frozen=True, config=_CHECKED)
class Mean:
    """A mean over examples, and its 95% interval from resampled examples."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, config=_CHECKED)
class Cost:
    """What a setting costs, of the median example.

    Attributes:
        cold_s: seconds to the first token where nothing is encoded yet; None where a cache held
            some of every example.
        warm_s: the same over passages that were all encoded for other questions.
        tokens: tokens of passages that have to be encoded again even then, on average; None where
            they were not counted.
    """

    cold_s: float | None = None
    warm_s: float | None = None
    tokens: int | None = None


@dataclass(frozen=True, config=_CHECKED)
class Setting:
    """One setting that was tried, and its figures; ``fine`` are those of the second round."""

    method: _Method
    figures: Annotated[dict[Figure, Mean], Field(min_length=1)]
    fine: bool = False
    cost: Cost = dataclasses.field(default=Cost(), compare=False)


@dataclass(frozen=True, config=_CHECKED)
class Comparison:
    """The chosen settings against the base on examples that did not choose them.

    The examples are dealt into folds; for each, the rest choose a setting as the whole call does,
    and the fold judges it. ``difference`` is chosen minus base, example by example; above zero
    where chosen is better, whether more or less of the figure is better.
    """

    figure: Figure
    chosen: Mean
    base: Mean
    difference: Mean

    @property
    def better(self) -> bool:
        """Whether the whole interval of the difference is on the better side of zero."""
        return self.difference.low > 0


@dataclass(frozen=True, config=_CHECKED)
class ModelFingerprint:
    """Identifies a model by the name that it was loaded by, a folder's last part, and by content.

    The hex digest is over its config and about a thousand places of every weight, which
    distinguishes models, fine-tunings and precisions without reading all of it.
    """

    name: str
    fingerprint: str

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelFingerprint:
        """That of a loaded model."""
        path = str(getattr(model.config, "_name_or_path", "") or "")
        # A folder's path means nothing elsewhere, and may be private.
        name = os.path.basename(os.path.normpath(path)) if os.path.isdir(path) else path
        config = model.config.to_dict()
        described = [canonical({key: config[key] for key in config if key not in _NOT_OF_A_MODEL})]
        sums = []
        for parameter, value in model.named_parameters():
            for part, tensor in plain_tensors(parameter, value.data):
                described.append(f"{part} {tensor.dtype} {tuple(tensor.shape)}".encode())
                if tensor.device.type != "meta" and tensor.numel():
                    sums.append(_sampled(tensor).cpu())
        if sums:
            described.append(torch.cat(sums).numpy().tobytes())
        return cls(name or type(model).__name__, hashlib.sha256(fields(*described)).hexdigest())

    def mismatch(self, model: PreTrainedModel) -> str | None:
        """A warning for the user of a profile that was made for another model."""
        own = ModelFingerprint.of(model)
        if own.fingerprint == self.fingerprint:
            return None
        return (
            f"The profile was made for {self.name!r} ({self.fingerprint[:12]}), but this model is "
            f"{own.name!r} ({own.fingerprint[:12]}), with other weights or another precision. The "
            "profile's numbers may not suit it. Compare again to be sure."
        )


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over about 1024 words of 64 bits, spread evenly; bytes left over do not count."""
    numbers = flat(tensor)
    aligned = numbers[: numbers.numel() // 8 * 8]
    if aligned.storage_offset() % 8:
        aligned = aligned.clone()
    words = aligned.view(torch.int64)
    return words[:: max(1, words.numel() // 1024)].sum().view(1)


@dataclass(frozen=True, config=_CHECKED)
class Profile:
    """The result of `WindowedLM.compare`; ``from_pretrained(profile=...)`` uses it.

    Attributes:
        method: what to use: `best`, unless it did worse than `base` on held-out examples.
        best: the best setting on all examples.
        base: what the others are compared with: one prompt; without right answers, "auto".
        verdict: what to take and why, in a few sentences with the figures.
        criteria: names of the figures that decided: the first one, and behind it what breaks ties.
        settings: every setting, in the order tried.
        held_out: one comparison for each of `criteria`.
        examples: how many examples decided.
        folds: into how many parts they were dealt for the comparison.
        left_out: what was left out and why, one sentence each.
        interrupted: whether Ctrl-C ended the measuring early; `left_out` says what is missing.
    """

    method: _Method
    best: _Method
    base: _Method
    verdict: str
    criteria: Annotated[tuple[Figure, ...], Field(min_length=1)]
    settings: tuple[Setting, ...]
    held_out: tuple[Comparison, ...]
    examples: _Count
    folds: _Count
    seed: _Count
    left_out: tuple[str, ...]
    model: ModelFingerprint
    interrupted: bool = False

    def __post_init__(self) -> None:
        if any(set(self.criteria) - one.figures.keys() for one in self.settings):
            raise ValueError(f"some settings have no figures for the criteria {self.criteria}")

    def setting(self, method: Method) -> Setting:
        """The row of one method; a `ProfileError` if it was not tried."""
        for one in self.settings:
            if one.method == method:
                return one
        raise ProfileError(
            f"The profile has no setting {spelled(method)}. Its settings are in profile.settings."
        )

    def ranked(self) -> list[Setting]:
        """Settings, the best on all examples first."""

        def key(one: Setting) -> list[float]:
            # Rounded, so that equal shares summed in another order are equal.
            return [round(-sign(name) * one.figures[name].value, 9) for name in self.criteria]

        return sorted(self.settings, key=key)

    def to_json(self) -> str:
        """The profile as JSON text; a `ProfileError` if one of its methods can't be read back."""
        file = {"format": FORMAT, "version": VERSION, **_PROFILE.dump_python(self, mode="json")}
        text = json.dumps(file, indent=1) + "\n"
        with contextlib.suppress(ProfileError):
            if Profile.from_json(text) == self:
                return text
        raise ProfileError(
            f"A profile can't store {self.best!r}. Compare this package's methods, with "
            "numbers and text as parameters."
        )

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """The profile of a JSON text; a `ProfileError` names the entry that is missing or wrong."""
        try:
            data = json.loads(text := strict_json(text))
            found = [data.get("format"), data.get("version")] if isinstance(data, dict) else data
            if found != [FORMAT, VERSION]:
                raise ProfileError(
                    f"it is not a {FORMAT} of version {VERSION}, which this rag-windows reads. "
                    "Compare again, or use the rag-windows that wrote it."
                )
            return _PROFILE.validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise ProfileError(f"entry {place!r}: {first['msg']}") from error
        except ValueError as error:
            raise ProfileError(f"not valid JSON: {error}.") from error

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, whole or, with a `ProfileError`, not at all."""
        text, target = self.to_json(), Path(path)
        unfinished = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
        try:
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(target)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise ProfileError(f"The profile {str(path)!r} can't be written: {error}.") from error

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile that `save` wrote; a `ProfileError` says what is wrong with it."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ProfileError) as error:
            why = str(getattr(error, "strerror", None) or error)[:500].rstrip(".")
            raise ProfileError(
                f"The profile {str(path)!r} can't be used: {why}. Write a new one "
                "with `rag-windows compare --out FILE`."
            ) from error

    @classmethod
    def of(cls, value: Profile | str | Path) -> Profile:
        """A profile as it is, or one loaded from a path."""
        if isinstance(value, Profile):
            return value
        if isinstance(value, str | Path):
            return cls.load(value)
        raise ProfileError(f"profile must be a Profile or the path of one, not {value!r}.")

    def plot(self, path: str | Path) -> None:
        """Draw the settings into a PNG, over the two numbers with most values.

        Raises:
            MissingExtraError: matplotlib is not installed.
            ProfileError: no number was varied, or the file can't be written.
        """
        require("The picture", "matplotlib", extra="figures")
        from matplotlib import figure as figures

        ranked = self.ranked()
        kinds = Counter(type(one.method) for one in ranked)
        alike = [one for one in reversed(ranked) if type(one.method) is kinds.most_common(1)[0][0]]
        values = varying(one.method for one in alike if not one.fine)
        names = sorted(values, key=lambda name: -len(values[name]))[:2]
        if not names:
            raise ProfileError(
                "There is nothing to draw, because no method's numbers were tried. Name one with "
                "numbers in grid=, such as 'ape'."
            )
        criterion = self.criteria[0]
        unit = f"{criterion} ({'lower' if sign(criterion) < 0 else 'higher'} is better)"
        placed = [one for one in alike if set(names) <= numbers_of(one.method).keys()]
        shown = [one.figures[criterion].value for one in placed]
        x, y, *_ = (*([numbers_of(one.method)[name] for one in placed] for name in names), shown)
        figure = figures.Figure(figsize=(8.4, 6.4), layout="constrained")
        axes = figure.add_subplot(xlabel=names[0], ylabel=[*names, unit][1])
        colours = "viridis_r" if sign(criterion) < 0 else "viridis"
        sizes = [150 if one.fine else 600 for one in placed]
        points = axes.scatter(x, y, s=sizes, c=shown, cmap=colours, marker="s", alpha=0.7)
        figure.colorbar(points, label=unit)
        best = alike[-1].method
        text = f"best of these: {spelled(best)}"
        axes.plot(x[-1:], y[-1:], "r*", fillstyle="none", markersize=20, label=text)
        axes.set_title(f"{best.name} on {self.model.name}, {self.examples} examples")
        figure.legend(loc="outside lower center", ncols=2, frameon=False, markerscale=0.5)
        try:
            figure.savefig(path, dpi=150, format="png", metadata={"Software": None})
        except OSError as error:
            raise ProfileError(f"The picture {str(path)!r} can't be written: {error}.") from error


_PROFILE = TypeAdapter(Profile)


def sign(figure: str) -> float:
    """+1 where more is better, -1 where less is."""
    return -1.0 if figure == "divergence" else 1.0


def formatted(figure: str, value: float) -> str:
    """A figure as people read it, to three digits; shares are in percent, without the sign."""
    # Zero is added because a negative zero has a sign as well.
    shown = value * (100 if figure == "contains" else 1) + 0.0
    return f"{shown:.0f}" if 1000 <= abs(shown) < math.inf else f"{shown:.3g}"


def varying(settings: Iterable[Method]) -> dict[str, list[float]]:
    """Numbers in which settings differ: name -> sorted values."""
    values: dict[str, set[float]] = {}
    for setting in settings:
        for name, value in numbers_of(setting).items():
            values.setdefault(name, set()).add(value)
    return {name: sorted(some) for name, some in values.items() if len(some) > 1}
