"""Calibration of a model, as a method of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rag_windows.calibration.calibrating import By, calibrate
from rag_windows.calibration.contexts import KEEP_BYTES
from rag_windows.calibration.example import Example
from rag_windows.calibration.measuring import Metric
from rag_windows.calibration.prepared import OnProgress
from rag_windows.calibration.profile import Profile
from rag_windows.errors import StopIterationTold
from rag_windows.rescaling import Method
from rag_windows.text_level import TextLM


class CalibratingLM(TextLM):
    """A model that finds out which numbers of a method suit it."""

    @StopIterationTold()
    def calibrate(
        self,
        examples: Iterable[Example | Mapping[str, Any]],
        *,
        method: str | Method = "ape",
        settings: Sequence[Method] | None = None,
        by: By | None = None,
        metric: Metric | None = None,
        prefix: str | None = None,
        max_new_tokens: int = 32,
        refine: bool = True,
        seed: int = 0,
        keep_bytes: int = KEEP_BYTES,
        on_progress: OnProgress | None = None,
    ) -> Profile:
        """Find the numbers of a method for this model and documents like the examples'.

        Every setting answers every example, teacher-forced: one forward pass over the question and
        its answer, beside windows that are encoded once. The best of a coarse grid is followed by a
        finer round around it. The choice counts only if it beats the default on examples that
        did not choose it.

        Args:
            examples: a few dozen, as `Example` or mappings with "query", "passages" and perhaps
                "answer" and "kind". Take passages as your retriever finds them.
            method: what is calibrated, and with its numbers the default that has to be beaten.
            settings: methods to try instead of those that `default_grid` makes.
            by: "labels" (the greedy answer equals the right one; the right answer's log-probability
                between equals) or "agreement" (least KL divergence from the distribution of the
                same model that reads the passages one after the other, over its own greedy
                answer); None takes labels where every example has an answer.
            metric: from a greedy answer and the right one to a number, more is better, instead of
                equality. Each setting then generates its answers, which takes longer.
            prefix: system prompt, as requests will have it.
            max_new_tokens: length of the sequential reader's answer, and of a metric's answers.
            refine: whether there is a second, finer round.
            seed: of folds and bootstrap intervals.
            keep_bytes: keys and values that are kept between the rounds at most.
            on_progress: told what goes on, how much of it is done, and how much there is.

        Raises:
            InputError: fewer than eight examples can be used, or settings that read no windows.
        """
        return calibrate(
            self,
            examples,
            method=method,
            settings=settings,
            by=by,
            metric=metric,
            prefix=prefix,
            max_new_tokens=max_new_tokens,
            refine=refine,
            seed=seed,
            keep_bytes=keep_bytes,
            on_progress=on_progress,
        )
