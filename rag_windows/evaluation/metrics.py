"""How good answers are: what the datasets' own scripts have in common."""

from __future__ import annotations

import functools
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from rag_windows.errors import MissingExtraError, install
from rag_windows.evaluation.task import Array, Score
from rag_windows.prompt.visible_text import encodable

LONGEST = 5000

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_DELETED = dict.fromkeys(map(ord, string.punctuation))
_BLANKED = dict.fromkeys(map(ord, string.punctuation), " ")


def check_packages(*names: str) -> None:
    """Make sure that packages are there, such as "spacy"; before a long run, not after it."""
    if absent := [name for name in names if find_spec(name) is None]:
        raise MissingExtraError(
            f"Scoring needs what is not installed: {', '.join(absent)}; run: {install('eval')}"
        )


def squad_words(text: str) -> list[str]:
    """Words as SQuAD counts them (Rajpurkar et al., EMNLP 2016).

    ASCII punctuation is deleted, so that "don't" becomes "dont", and then a, an and the.
    """
    return _ARTICLES.sub(" ", text.lower().translate(_DELETED)).split()


def chatrag_words(text: str) -> list[str]:
    """Words as ParlAI and ChatRAG-Bench count them: as `squad_words`, but "don't" is "don", "t"."""
    return _ARTICLES.sub(" ", text.lower().translate(_BLANKED)).split()


def spaced(text: str) -> str:
    """The text with one blank between its words, which are those of spaCy's English rules.

    Their time grows with the square of a run of punctuation, so what has more than `LONGEST`
    characters stays in one piece. spaCy refuses half a surrogate pair, which becomes U+FFFD.
    """
    split, found = _english(), list[str]()
    for word in encodable(text).split():
        found += [word] if len(word) > LONGEST else [token.text for token in split(word)]
    return " ".join(found)


@functools.cache
def _english() -> Callable[[str], Iterable[Any]]:
    check_packages("spacy")
    import spacy

    # Not the pipeline around it, which refuses texts of more than a million characters.
    tokenizer: Callable[[str], Iterable[Any]] = spacy.blank("en").tokenizer
    return tokenizer


def bag_f1(predicted: Sequence[str], right: Sequence[str], *, both_empty: float = 0.0) -> float:
    """F1 of two bags of words, 0 to 1; ``both_empty`` is 1 for SQuAD, 0 for ChatRAG-Bench."""
    if not predicted and not right:
        return both_empty
    common = (Counter(predicted) & Counter(right)).total()
    return 2 * common / (len(predicted) + len(right))


def chatrag_f1(answer: str, references: Iterable[str]) -> float | None:
    """F1 as ChatRAG-Bench counts it, with the best of the references that have text; percent."""
    words = chatrag_words(answer.strip().replace("</s>", ""))
    right = [chatrag_words(text) for text in references if text.strip()]
    return max((100 * bag_f1(words, one) for one in right), default=None)


def bleu_score(answers: Sequence[str], references: Sequence[Sequence[str]]) -> Score:
    """SacreBLEU (Post, WMT 2018) with its defaults: 13a tokens, 4-grams, exponential smoothing.

    Its sums over sentences are right n-grams, n-grams, length, length of the closest reference.
    """
    check_packages("sacrebleu")
    from sacrebleu.metrics.bleu import BLEU

    # `force` only keeps it from asking on stderr whether the text was tokenized before.
    metric = BLEU(force=True)
    rows = []
    for answer, right in zip(answers, references, strict=True):
        one = metric.corpus_score([answer], [[text] for text in right])
        rows.append((*one.counts, *one.totals, one.sys_len, one.ref_len))
    return Score.of_sums("bleu", np.array(rows, dtype=np.float64).reshape(-1, 10), bleu)


def bleu(sums: Array) -> Array:
    """BLEU-4 in percent, (...), of `bleu_score`'s sums, (..., 10)."""
    from sacrebleu.metrics.bleu import BLEU

    def one(row: Array) -> float:
        *counts, length, reference = row.astype(int).tolist()
        right, total = counts[:4], counts[4:]
        return BLEU.compute_bleu(right, total, length, reference, smooth_method="exp").score

    return np.apply_along_axis(one, -1, sums)
