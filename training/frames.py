"""Texts around passages and questions, as prompt templates put them there; the reader ignores them.

Their words are drawn at random: what is to be learned is that such text may stand anywhere around
the question, not any particular instruction.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from training.vocabulary import COMMON

LEADS = ("", "Question: ", "Query: ", "User: ", "The question: ", "QUESTION:\n")
ENDS = ("", "\nAnswer:", "\nAnswer: ", "\nYour answer:", "\n\nANSWER:\n")
RULES = ("", "---------------------\n", "```\n", "====\n", "\n")


@dataclass(frozen=True, slots=True)
class Frame:
    """Text before the passages, before a question and after it."""

    before: str
    opening: str
    closing: str

    def around(self, question: str) -> str:
        """The question inside the frame."""
        return f"{self.opening}{question}{self.closing}"


def _instruction(rng: np.random.Generator) -> str:
    """One or two sentences of common words, often none."""
    sentences = []
    for _ in range(int(rng.integers(0, 3))):
        words = [COMMON[int(i)] for i in rng.integers(len(COMMON), size=rng.integers(3, 16))]
        sentences.append(" ".join(words) + ".:"[int(rng.random() < 0.2)])
    return " ".join(sentences)


def draw_frame(rng: np.random.Generator) -> Frame:
    """Draws a frame."""
    rule = RULES[int(rng.integers(len(RULES)))]
    before = _instruction(rng)
    before = f"{before}\n{rule}" if before and rng.random() < 0.6 else ""
    told = _instruction(rng)
    gap = "\n" if rng.random() < 0.7 else "\n\n"
    label = LEADS[int(rng.integers(len(LEADS)))]
    opening = (rule if before else "") + (f"{told}{gap}" if told else "") + label
    return Frame(before, opening, ENDS[int(rng.integers(len(ENDS)))])
