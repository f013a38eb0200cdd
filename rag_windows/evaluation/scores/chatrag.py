"""ChatRAG-Bench's metrics (Liu et al., NeurIPS 2024), as its own script computes them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rag_windows.errors import InputError
from rag_windows.evaluation.example import Example
from rag_windows.evaluation.scores.alignment import check_aligned
from rag_windows.evaluation.scores.arithmetic import holds_result
from rag_windows.evaluation.scores.packages import check_packages
from rag_windows.evaluation.scores.refusal import SORRY, refuses, settled
from rag_windows.evaluation.scores.text_f1 import bag_f1, chatrag_words
from rag_windows.evaluation.task import Score

REFUSING = frozenset({"quac", "doqa_cooking", "doqa_movies", "doqa_travel"})
"""Datasets some of whose questions have no answer in their passages."""

_NUMBERS = "convfinqa"


def chatrag_metrics(dataset: str) -> tuple[str, ...]:
    """Names of what `chatrag_scores` gives for a dataset, the main one first."""
    if dataset == _NUMBERS:
        return ("accuracy",)
    if dataset in REFUSING:
        accuracies = ("unanswerable_accuracy", "answerable_accuracy", "mean_accuracy")
        return ("f1", "answerable_f1", *accuracies)
    return ("f1",)


def chatrag_scores(
    dataset: str,
    examples: Sequence[Example],
    answers: Sequence[str],
    answerable: Collection[str] | None = None,
) -> list[Score]:
    """Score answers as ChatRAG-Bench scores this dataset.

    - ConvFinQA has "accuracy" alone: `holds_result`, with the example's ``details["exe_answer"]``.
    - All others have "f1": `chatrag_f1`. INSCIT's additional answer `SORRY` is no reference.
    - QuAC and DoQA: `settled` answers are scored. "unanswerable_accuracy" is the share of questions
      whose first reference is `SORRY` that are answered so, "answerable_accuracy" the share of the
      others that are not, "mean_accuracy" the mean of both shares, and "answerable_f1" the F1 of
      the answerable ones.

    Args:
        dataset: its name in the benchmark, such as "doqa_movies".
        examples: references are all answers of the file in their order, empty ones included.
        answers: one an example.
        answerable: keys of those answerable questions that count for "answerable_accuracy" and
            "answerable_f1"; None for all. For QuAC the benchmark counts only those whose first five
            passages hold the answer; `read_answerable` reads such a list.

    Returns:
        One score for each of `chatrag_metrics`, in percent; NaN where no example counts.

    Raises:
        InputError: another number of answers than of examples, or no ``exe_answer`` in one.
        MissingExtraError: numpy is not installed, which QuAC and DoQA need.
    """
    check_aligned(examples, "answers", answers)
    answers = [one_line(answer) for answer in answers]
    if dataset == _NUMBERS:
        right = [_number_right(*pair) for pair in zip(examples, answers, strict=True)]
        return [Score.mean("accuracy", right)]
    if dataset in REFUSING:
        answers = [settled(answer) for answer in answers]
    f1: list[float | None] = []
    for example, answer in zip(examples, answers, strict=True):
        texts = [one.text for one in example.references]
        if dataset == "inscit":
            texts = [text for text in texts if text != SORRY]
        overlap = chatrag_f1(answer, texts)
        f1.append(None if overlap is None else 100 * overlap)
    if dataset not in REFUSING:
        return [Score.mean("f1", f1)]
    return [Score.mean("f1", f1), *_refusals(examples, answers, f1, answerable)]


def chatrag_f1(answer: str, references: Iterable[str]) -> float | None:
    """F1 of an answer with the best of its references, 0 to 1.

    References without text don't count; None if none has any.
    """
    words = chatrag_words(answer.strip().replace("</s>", ""))
    right = [chatrag_words(text) for text in references if text.strip()]
    return max((bag_f1(words, one) for one in right), default=None)


def one_line(answer: str) -> str:
    """The answer as it stands in a predictions file of the benchmark, which has one a line."""
    return answer.replace("\r\n", " ").replace("\n", " ").replace("\r", " ").strip()


def unanswerable(example: Example) -> bool:
    """Whether the benchmark says that the passages hold no answer."""
    return bool(example.references) and example.references[0].text == SORRY


def _refusals(
    examples: Sequence[Example],
    answers: Sequence[str],
    f1: Sequence[float | None],
    answerable: Collection[str] | None,
) -> list[Score]:
    check_packages("numpy")
    from rag_windows.evaluation.statistics.parts import Parts

    refused: list[float | None] = []
    answered: list[float | None] = []
    overlap: list[float | None] = []
    for example, answer, one in zip(examples, answers, f1, strict=True):
        said_sorry = refuses(answer)
        without = unanswerable(example)
        counts = not without and (answerable is None or example.key in answerable)
        refused.append(100.0 * said_sorry if without else None)
        answered.append(100.0 * (not said_sorry) if counts else None)
        overlap.append(one if counts else None)
    no = Score.mean("unanswerable_accuracy", refused)
    yes = Score.mean("answerable_accuracy", answered)
    # It counts both shares the same, however many questions each has, so it is no mean of theirs.
    both = Score(
        "mean_accuracy",
        (no.value + yes.value) / 2,
        (None,) * len(examples),
        Parts.of_means(refused, answered),
    )
    return [Score.mean("answerable_f1", overlap), no, yes, both]


def _number_right(example: Example, answer: str) -> float:
    result = example.details.get("exe_answer")
    if result is None or not example.references:
        raise InputError(f"{example.key} has no exe_answer or no answer; ConvFinQA needs both.")
    # A style may word the question as an instruction, which the benchmark's script never sees.
    conversation = example.details.get("conversation", example.messages)
    question = conversation[-1]["content"]
    return 100.0 * holds_result(answer, question, result, example.references[0].text)
