"""Shares of answers that are right to the word."""

from __future__ import annotations

from collections.abc import Sequence

from rag_windows.evaluation.example import Example
from rag_windows.evaluation.scores.alignment import check_aligned
from rag_windows.evaluation.scores.text_f1 import squad_words
from rag_windows.evaluation.task import Score


def accuracy(examples: Sequence[Example], answers: Sequence[str]) -> Score:
    """Answers that are a reference, letter by letter: for those chosen among given ones.

    Raises:
        InputError: another number of answers than of examples.
    """
    check_aligned(examples, "answers", answers)
    return Score.mean(
        "accuracy",
        [
            100.0 * any(answer == one.text for one in example.references)
            for example, answer in zip(examples, answers, strict=True)
        ],
    )


def exact_match(examples: Sequence[Example], answers: Sequence[str]) -> Score:
    """Answers with the words of a reference, as SQuAD normalises them, and no others.

    Raises:
        InputError: another number of answers than of examples.
    """
    check_aligned(examples, "answers", answers)
    values: list[float] = []
    for example, answer in zip(examples, answers, strict=True):
        words = squad_words(answer)
        values.append(100.0 * any(words == squad_words(one.text) for one in example.references))
    return Score.mean("exact_match", values)


def contained(examples: Sequence[Example], answers: Sequence[str]) -> Score:
    """Answers that hold all words of a reference in a row, as SQuAD normalises them.

    A reference without words, such as "?!", is searched for letter by letter; an empty one is found
    nowhere.

    Raises:
        InputError: another number of answers than of examples.
    """
    check_aligned(examples, "answers", answers)
    return Score.mean(
        "contained",
        [
            100.0 * any(_holds(answer, one.text) for one in example.references)
            for example, answer in zip(examples, answers, strict=True)
        ],
    )


def _holds(answer: str, text: str) -> bool:
    wanted = squad_words(text)
    if not wanted:
        return bool(text.strip()) and text.strip() in answer
    # Words hold no blank, so with a blank on each side a match can't begin or end within one.
    return f" {' '.join(wanted)} " in f" {' '.join(squad_words(answer))} "
