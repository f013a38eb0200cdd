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


def compared_words(answer: str, wanted: str) -> tuple[list[str], list[str]]:
    """Words of both, as `chatrag_words` counts them.

    Articles count where the wanted text has no other words, such as the grade "A"; and where it has
    none at all, what stands between blanks.
    """
    texts = answer, wanted
    for words in (chatrag_words, lambda text: text.lower().translate(_BLANKED).split(), str.split):
        said, right = map(words, texts)
        if right:
            break
    return said, right


def contains(answer: str, wanted: str) -> bool:
    """Whether an answer holds all words of a text in a row, as `compared_words` counts them."""
    said, right = compared_words(answer, wanted)
    # Words hold no blank, so a match can't begin or end within one.
    return bool(right) and f" {' '.join(right)} " in f" {' '.join(said)} "


def bag_f1(predicted: Sequence[str], right: Sequence[str], *, both_empty: float = 0.0) -> float:
    """F1 of two bags of words, 0 to 1; ``both_empty`` is 1 for SQuAD, 0 for ChatRAG-Bench."""
    if not predicted and not right:
        return both_empty
    common = (Counter(predicted) & Counter(right)).total()
    return 2 * common / (len(predicted) + len(right))
