"""Shares with intervals; whole contexts are drawn again, since their questions go together."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rag_windows.evaluation.statistics.estimate import Estimate
from rag_windows.evaluation.statistics.parts import Array
from rag_windows.evaluation.statistics.resampling import RESAMPLES, draw, generator, interval


@dataclass(frozen=True, slots=True)
class Answers:
    """Right answers and questions, per context; equal contexts in equal order are comparable."""

    right: Array
    asked: Array

    @classmethod
    def of(cls, marks: Sequence[str]) -> Answers:
        """From one string a context, ``1`` for each right answer and ``0`` for each wrong one."""
        right = np.array([mark.count("1") for mark in marks], dtype=np.float64)
        return cls(right, np.array([len(mark) for mark in marks], dtype=np.float64))


@functools.cache
def _draws(contexts: int, stream: int = 0) -> Array:
    """(resamples, contexts): how often each context is drawn; equal for equal arguments."""
    return draw(contexts, RESAMPLES, generator(contexts, stream))


def share(answers: Answers) -> Estimate:
    """Right answers among all."""
    draws = _draws(len(answers.asked))
    return interval(
        float(answers.right.sum() / answers.asked.sum()),
        (draws @ answers.right) / (draws @ answers.asked),
    )


def difference(answers: Answers, base: Answers) -> Estimate:
    """Share minus the share of ``base`` on the same questions, paired by context."""
    draws = _draws(len(answers.asked))
    change = answers.right - base.right
    return interval(
        float(change.sum() / answers.asked.sum()), (draws @ change) / (draws @ answers.asked)
    )


def retention(answers: Answers, base: Answers) -> Estimate | None:
    """Right answers for each right one of ``base``, paired by context; None where it has none."""
    if not base.right.sum():
        return None
    draws = _draws(len(answers.asked))
    with np.errstate(divide="ignore", invalid="ignore"):
        resampled = (draws @ answers.right) / (draws @ base.right)
    return interval(float(answers.right.sum() / base.right.sum()), resampled)


def ratio(answers: Answers, base: Answers) -> Estimate | None:
    """Share over the share of ``base`` on other contexts, drawn apart; None where that is 0."""
    if not base.right.sum():
        return None
    own, other = _draws(len(answers.asked), 1), _draws(len(base.asked), 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = (own @ answers.right) / (own @ answers.asked)
        bases = (other @ base.right) / (other @ base.asked)
        value = answers.right.sum() / answers.asked.sum() * base.asked.sum() / base.right.sum()
        return interval(float(value), shares / bases)
