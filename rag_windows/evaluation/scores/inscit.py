"""INSCIT's metrics (Wu et al., TACL 2023), as its own script computes them.

F1 and BLEU compare with all answers that annotators gave. Response types have no part in it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rag_windows.errors import InputError
from rag_windows.evaluation.example import Example
from rag_windows.evaluation.scores.alignment import check_aligned
from rag_windows.evaluation.scores.bleu import bleu_score
from rag_windows.evaluation.scores.chatrag import chatrag_f1
from rag_windows.evaluation.scores.english import spaced
from rag_windows.evaluation.scores.packages import check_packages
from rag_windows.evaluation.scores.text_f1 import bag_f1, squad_words
from rag_windows.evaluation.task import Score

INSCIT_METRICS = ("response_f1", "bleu", "evidence_f1", "chatrag_f1")
"""Names of what `inscit_scores` gives, the main one first."""

PACKAGES = ("sacrebleu", "spacy", "numpy")
"""What `inscit_scores` needs; `check_packages` tells whether it is there."""


def inscit_scores(
    examples: Sequence[Example], answers: Sequence[str], evidence: Sequence[Collection[str]]
) -> list[Score]:
    """Score answers and the passages that they rest on.

    - response_f1: words of spaCy's English rules, normalised as in SQuAD; best of the references.
    - bleu: SacreBLEU of all answers together; see `bleu_score`.
    - evidence_f1: of sets of passage ids; best of the references; 0 for an empty prediction, also
      where the reference names no passage.
    - chatrag_f1: words as ChatRAG-Bench counts them, of the answer as it was written.

    Args:
        examples: with at least one reference each.
        answers: one an example.
        evidence: ids of passages, one collection an example.

    Returns:
        One score for each of `INSCIT_METRICS`, in percent.

    Raises:
        InputError: another number of answers than of examples, or an example without reference.
        MissingExtraError: sacrebleu, spaCy or numpy is not installed.
    """
    check_aligned(examples, "answers", answers)
    check_aligned(examples, "evidence lists", evidence)
    for example in examples:
        if not example.references:
            raise InputError(f"{example.key} has no reference, so no answer to it can be scored.")
    check_packages(*PACKAGES)
    plain = [_plain(one) for one in answers]
    references = [[_plain(one.text) for one in example.references] for example in examples]
    response = [_response_f1(*pair) for pair in zip(plain, references, strict=True)]
    found = [_evidence_f1(*pair) for pair in zip(evidence, examples, strict=True)]
    overlap = [
        chatrag_f1(answer, [one.text for one in example.references])
        for answer, example in zip(answers, examples, strict=True)
    ]
    return [
        Score.mean("response_f1", [100 * one for one in response]),
        bleu_score(plain, references),
        Score.mean("evidence_f1", [100 * one for one in found]),
        Score.mean("chatrag_f1", [None if one is None else 100 * one for one in overlap]),
    ]


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def _response_f1(answer: str, references: Sequence[str]) -> float:
    words = squad_words(spaced(answer))
    return max(bag_f1(words, squad_words(spaced(one)), both_empty=1.0) for one in references)


def _evidence_f1(predicted: Collection[str], example: Example) -> float:
    named = set(predicted)
    if not named:
        return 0.0
    right = [set(one.evidence) for one in example.references]
    return max(2 * len(named & one) / (len(named) + len(one)) for one in right)
