"""Scores of a finished file of predictions, without a run or a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rag_windows.evaluation.data.chatrag import ChatRagTask
from rag_windows.evaluation.data.chatrag_answers import read_answers
from rag_windows.evaluation.data.inscit import InscitTask
from rag_windows.evaluation.data.inscit_predictions import read_predictions
from rag_windows.evaluation.example import Example
from rag_windows.evaluation.scores.answerable import read_answerable
from rag_windows.evaluation.scores.chatrag import chatrag_scores
from rag_windows.evaluation.scores.inscit import inscit_scores
from rag_windows.evaluation.scores.kinds import by_kind
from rag_windows.evaluation.task import Score

Predicted = tuple[str, Sequence[str]]
"""An answer and the ids of its evidence."""

_OFFICIAL = ("evidence_f1", "bleu", "response_f1", "chatrag_f1")
"""In the order in which INSCIT's own script tells them."""


def score_inscit(data: str | Path, predictions: str | Path) -> dict[str, float]:
    """The figures of INSCIT's own script, and ChatRAG-Bench's F1.

    Args:
        data: INSCIT's data file.
        predictions: in INSCIT's format; one for every turn of the data file.

    Returns:
        "evidence_f1", "bleu", "response_f1" and "chatrag_f1" in percent, and "n", the number of
        turns. A figure that no turn counts for is NaN.

    Raises:
        DataError: a file can't be read, or they do not belong together; names file and record.
        MissingExtraError: see `inscit_scores`.
    """
    examples, predicted = _inscit(data, predictions)
    return _official(_scores(examples, predicted))


def score_inscit_by_type(data: str | Path, predictions: str | Path) -> dict[str, dict[str, float]]:
    """What `score_inscit` gives, for the turns of each response type.

    A turn whose annotators chose different types counts in each of them, with all its references.

    Args:
        data: see `score_inscit`.
        predictions: likewise.

    Returns:
        Response type -> the figures of its turns, with their number; types in the order of the
        data file.

    Raises:
        DataError: see `score_inscit`.
        MissingExtraError: likewise.
    """
    found = by_kind(*_inscit(data, predictions), _scores)
    return {kind: _official(scores) for kind, scores in found.items()}


def score_chatrag(
    data: str | Path,
    dataset: str,
    predictions: str | Path,
    answerable: str | Path | None = None,
) -> dict[str, float]:
    """The figures of ChatRAG-Bench's own script.

    Args:
        data: the dataset's file.
        dataset: its name in the benchmark, such as "doc2dial".
        predictions: a line an answer, in the order of the data file.
        answerable: see `read_answerable`; None to count all answerable questions.

    Returns:
        What `chatrag_scores` gives, by name, in percent; and "n", the number of records. A figure
        that no record counts for is NaN.

    Raises:
        DataError: an unknown dataset, a file that can't be read, or files that do not belong
            together.
        MissingExtraError: see `chatrag_scores`.
    """
    examples = ChatRagTask.read(data, dataset, style="plain").examples
    answers = read_answers(predictions, len(examples))
    keys = None if answerable is None else read_answerable(answerable, examples)
    scores = chatrag_scores(dataset, examples, answers, keys)
    return {**{one.name: one.value for one in scores}, "n": len(examples)}


def _inscit(
    data: str | Path, predictions: str | Path
) -> tuple[tuple[Example, ...], list[Predicted]]:
    examples = InscitTask.read(data).examples
    found = read_predictions(predictions, examples)
    return examples, list(zip(found.answers, found.evidence, strict=True))


def _scores(examples: Sequence[Example], predicted: Sequence[Predicted]) -> list[Score]:
    return inscit_scores(
        examples, [answer for answer, _ in predicted], [names for _, names in predicted]
    )


def _official(scores: Sequence[Score]) -> dict[str, float]:
    found = {one.name: one.value for one in scores}
    return {**{name: found[name] for name in _OFFICIAL}, "n": len(scores[0].values)}
