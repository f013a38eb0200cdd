"""In-context classification: made-up words, labels with keywords of their own, and questions."""

from __future__ import annotations

import numpy as np

from training.recipes import Demonstrations, Sample, Turn
from training.words import LABELS, MADE_UP
from training.world import Split

FILLERS = 12
"""So many of the made-up words, the first ones, mean nothing in any sequence, as "the" and "of" do.

Were they drawn anew for each sequence, a word that is shown once could as well be a keyword: then
some questions have no right answer.
"""


def is_held_out(keyword: int, label: int) -> bool:
    """Whether a keyword (index) with this label (index) belongs to the held-out tenth."""
    return (3 * keyword + 7 * label) % 10 == 0


def draw_demonstrations(
    rng: np.random.Generator, recipe: Demonstrations, split: Split = "train"
) -> Sample:
    """Draws a labelling rule, lines that follow it, and questions on keywords among them."""
    labels = rng.permutation(len(LABELS))[: rng.integers(*recipe.labels, endpoint=True)]
    count = int(rng.integers(*recipe.keywords, endpoint=True))
    words = [w for w in rng.permutation(len(MADE_UP)) if w >= FILLERS]
    label_of: dict[int, int] = {}
    for label in labels.tolist():
        fitting = [w for w in words if is_held_out(w, label) == (split == "held-out")][:count]
        words = [w for w in words if w not in fitting]
        label_of.update(dict.fromkeys(fitting, label))
    keywords = list(label_of)

    def line(keyword: int) -> str:
        others = int(rng.integers(*recipe.words, endpoint=True)) - 1
        picked = [*rng.permutation(FILLERS)[:others], keyword]
        return " ".join(MADE_UP[picked[i]] for i in rng.permutation(len(picked)))

    total = recipe.passages * recipe.lines
    # Every keyword comes up once before any is repeated, as far as there are lines.
    drawn = [keywords[i] for i in rng.permutation(len(keywords))][:total]
    shown = list(drawn)
    drawn += [keywords[int(rng.integers(len(keywords)))] for _ in range(total - len(drawn))]
    drawn = [drawn[i] for i in rng.permutation(total)]
    rows = [f"{line(keyword)}: {LABELS[label_of[keyword]]}" for keyword in drawn]
    texts = ["\n".join(rows[i : i + recipe.lines]) for i in range(0, total, recipe.lines)]
    turns = []
    for _ in range(recipe.questions):
        keyword = shown[int(rng.integers(len(shown)))]
        answer = LABELS[label_of[keyword]]
        turns.append(Turn(f"{line(keyword)}:", answer, None, "classification", 1 / len(labels)))
    return Sample(tuple((None, text) for text in texts), tuple(turns))
