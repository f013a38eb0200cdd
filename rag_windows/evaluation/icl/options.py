"""How a task of demonstrations is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from rag_windows.errors import InputError
from rag_windows.evaluation.icl.item import ChoicesAs
from rag_windows.evaluation.icl.named import Wording
from rag_windows.icl import Template
from rag_windows.icl.classifier import Normalize, check_normalize
from rag_windows.icl.packing import Sizes

USUAL_WINDOWS = 8
"""So many windows are filled where nobody says how many..."""
USUAL_DEMONSTRATIONS = 8
"""...if there are as many demonstrations for each: fewer windows otherwise."""


@dataclass(frozen=True, slots=True)
class IclOptions:
    """Options of an `IclTask`.

    Attributes:
        demonstrations: how many are shown by an arm that names no number of its own.
        seeds: of the draw of demonstrations; every text is asked once for each.
        balanced: whether labels take turns in the draw; multiple choice is never balanced.
        windows: how many windows they are spread over, at most one a demonstration.
        window_tokens: or how long a window is at most. None for both: a window for every eight
            demonstrations, up to eight windows; more where eight don't hold them.
        normalize: whether choices are compared by the "sum" or the "mean" of their tokens'
            log-probabilities. None: the mean for the texts of multiple choice, else the sum.
        calibrate_with: content-free texts whose label probabilities divide the others; see
            `WindowedLM.classify`.
        template: instead of the task's own.
        labels: of a classification, instead of those that its demonstrations have.
        wording: of a named task: "pcw" or "structured-prompting".
        choices_as: whether multiple choice is answered by the "text" of a choice or by its letter,
            with all choices in the question ("letters").
        texts: how many are asked, drawn with the first seed; None for all.

    Raises:
        InputError: an option that can't be used.
    """

    demonstrations: int = 32
    seeds: tuple[int, ...] = (0,)
    balanced: bool = True
    windows: int | None = None
    window_tokens: int | None = None
    normalize: Normalize | None = None
    calibrate_with: Sequence[str] = ()
    template: Template | None = None
    labels: Sequence[str] | None = None
    wording: Wording = "pcw"
    choices_as: ChoicesAs = "text"
    texts: int | None = None

    def __post_init__(self) -> None:
        if self.normalize is not None:
            check_normalize(self.normalize)
        if self.choices_as not in get_args(ChoicesAs):
            raise InputError(f"choices_as={self.choices_as!r} must be 'text' or 'letters'.")
        Sizes(self.windows, self.window_tokens)
        least = {"demonstrations": 0, "windows": 1, "texts": 1}
        for name, value in least.items():
            given = getattr(self, name)
            if given is not None and given < value:
                raise InputError(f"{name} must be at least {value}, not {given}.")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise InputError(f"seeds must be different numbers, at least one, not {self.seeds}.")
        if isinstance(self.calibrate_with, str) or any(
            not one.strip() for one in self.calibrate_with
        ):
            raise InputError("calibrate_with must be a list of texts that are not blank.")

    def sizes(self, shown: int) -> tuple[Sizes, ...]:
        """Ways to fill windows with so many demonstrations, the wanted one first."""
        if self.window_tokens is not None:
            return (Sizes(window_tokens=self.window_tokens),)
        if self.windows is not None:
            return (Sizes(windows=max(1, min(self.windows, shown))),)
        usual = min(USUAL_WINDOWS, shown // USUAL_DEMONSTRATIONS)
        return Sizes(windows=max(1, usual)), Sizes()

    @property
    def settings(self) -> dict[str, Any]:
        """What answers depend on, for a manifest."""
        return {
            "demonstrations": self.demonstrations,
            "seeds": list(self.seeds),
            "balanced": self.balanced,
            "windows": self.windows,
            "window_tokens": self.window_tokens,
            "calibrate_with": list(self.calibrate_with),
            "choices_as": self.choices_as,
            "texts": self.texts,
        }
