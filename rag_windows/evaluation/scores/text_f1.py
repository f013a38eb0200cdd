"""Word overlap of two texts: the two normalisations in use, and F1 of the words left."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_DELETED = dict.fromkeys(map(ord, string.punctuation))
_BLANKED = dict.fromkeys(map(ord, string.punctuation), " ")


def squad_words(text: str) -> list[str]:
    """Words as SQuAD counts them (Rajpurkar et al., EMNLP 2016).

    Lower case; ASCII punctuation is deleted, so that "don't" becomes "dont"; then the articles a,
    an and the are taken out and the rest is split at white space.
    """
    return _ARTICLES.sub(" ", text.lower().translate(_DELETED)).split()


def chatrag_words(text: str) -> list[str]:
    """Words as ParlAI and, with it, ChatRAG-Bench (Liu et al., NeurIPS 2024) count them.

    As `squad_words`, but ASCII punctuation separates: "don't" becomes "don" and "t".
    """
    return _ARTICLES.sub(" ", text.lower().translate(_BLANKED)).split()


def bag_f1(predicted: Sequence[str], right: Sequence[str], *, both_empty: float = 0.0) -> float:
    """F1 of two bags of words, 0 to 1: harmonic mean of precision and recall of the common words.

    Args:
        predicted: words of the answer; a word counts as often as it comes.
        right: words of the reference.
        both_empty: the result where neither side has a word. SQuAD says 1, ChatRAG-Bench 0.
    """
    if not predicted and not right:
        return both_empty
    common = (Counter(predicted) & Counter(right)).total()
    return 2 * common / (len(predicted) + len(right))
