"""What a calibration found: the method to use, and how every setting that was tried did."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rag_windows.calibration.intervals import Mean
from rag_windows.calibration.method_json import label
from rag_windows.calibration.stamp import ModelStamp
from rag_windows.errors import ProfileError
from rag_windows.methods import Method

if TYPE_CHECKING:
    from collections.abc import Sequence

Figure = Literal["exact match", "metric", "log-probability", "divergence", "agreement"]

FIGURES: Mapping[str, str] = {
    "exact match": "share of greedy answers equal to the right one",
    "metric": "mean of the metric that was passed",
    "log-probability": "log-probability of the right answer with its end, in nats",
    "divergence": "KL from the sequential reader to this one, nats a token of its answer",
    "agreement": "share of greedy answers equal to the sequential reader's",
}
"""What is measured, and its unit."""

_LONGEST = 500
"""Characters that are told of what is wrong with a profile."""

LOWER_IS_BETTER = frozenset(("divergence",))


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting that was tried.

    Attributes:
        method: with its numbers.
        figures: mean over the examples with a bootstrap 95% interval, by `FIGURES`' names.
        fine: whether it belongs to the second, finer round.
    """

    method: Method
    figures: Mapping[str, Mean]
    fine: bool = False


@dataclass(frozen=True, slots=True)
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

    figure: str
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


@dataclass(frozen=True, slots=True)
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
        guard: threshold of the attention's spread above which a question looks multi-hop, see
            `rag_windows.calibration.spread`; None without examples of both kinds.
    """

    method: Method
    best: Method
    default: Method
    beats_default: bool
    verdict: str
    criteria: tuple[str, ...]
    settings: tuple[Setting, ...]
    held_out: tuple[Comparison, ...]
    examples: int
    folds: int
    seed: int
    left_out: tuple[str, ...]
    model: ModelStamp
    guard: Mapping[str, Any] | None = None

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
        return sorted(self.settings, key=lambda one: rank(one.figures, self.criteria))

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, whole or not at all.

        Raises:
            ProfileError: the file can't be written.
        """
        from rag_windows.calibration.profile_json import dump

        text = dump(self)
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
        from rag_windows.calibration.profile_json import parse

        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(
                f"The profile {str(path)!r} can't be read: {error}. "
                "`rag-windows calibrate --out FILE` writes one."
            ) from error
        try:
            return parse(text)
        except ProfileError as error:
            told = str(error)
            if len(told) > _LONGEST:  # it quotes what stands in the file
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
        """Draw the settings into a PNG; see `rag_windows.calibration.heat_map.draw`."""
        from rag_windows.calibration.heat_map import draw

        draw(self, path)


def rank(figures: Mapping[str, Mean], criteria: Sequence[str]) -> tuple[float, ...]:
    """Sorting key of a setting: smaller is better."""
    return tuple(sign(name) * -figures[name].value for name in criteria)


def sign(figure: str) -> float:
    """+1 where more is better, -1 where less is."""
    return -1.0 if figure in LOWER_IS_BETTER else 1.0
