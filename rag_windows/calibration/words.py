"""Whether an answer is a right one, by its words."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_BLANKED = dict.fromkeys(map(ord, string.punctuation), " ")


def chatrag_words(text: str) -> list[str]:
    """Words as ParlAI and ChatRAG-Bench count them: as SQuAD, but "don't" is "don", "t"."""
    return ARTICLES.sub(" ", text.lower().translate(_BLANKED)).split()


def contains(answer: str, wanted: str) -> bool:
    """Whether an answer holds all words of a text in a row, as `chatrag_words` counts them."""
    # Words hold no blank, so a match can't begin or end within one.
    said, right = (f" {' '.join(chatrag_words(text))} " for text in (answer, wanted))
    return right in said


def bag_f1(predicted: Sequence[str], right: Sequence[str], *, both_empty: float = 0.0) -> float:
    """F1 of two bags of words, 0 to 1; ``both_empty`` is 1 for SQuAD, 0 for ChatRAG-Bench."""
    if not predicted and not right:
        return both_empty
    common = (Counter(predicted) & Counter(right)).total()
    return 2 * common / (len(predicted) + len(right))
