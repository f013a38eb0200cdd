"""Draws the questions of `rag-windows eval suite`: rag_windows/samples/connected.jsonl.xz.

python -m training.questions
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from rag_windows.samples import samples_path
from rag_windows_eval.connected import CONNECTED, FILE
from training.samples import Recipe
from training.tasks import TASKS, draw

QUESTIONS, SEED = 200, 21
PASSAGES, ALIKE = 8, 16
KIN = 0.9
"""Of many alike: held-out names that share words are few, and sixteen of them are not to be had."""


def rows() -> Iterator[dict[str, Any]]:
    """The lines of the file: held-out names and phrasings, one question for each context."""
    for name in CONNECTED:
        task = name.replace("-", " ")
        rng = np.random.default_rng([SEED, *task.encode()])
        recipe = TASKS[task]
        recipe = (
            replace(recipe, entities=ALIKE, kin=KIN)
            if isinstance(recipe, Recipe)
            else replace(recipe, passages=PASSAGES)
        )
        wanted = "single" if isinstance(recipe, Recipe) else task
        for _ in range(QUESTIONS):
            while (sample := draw(rng, recipe, "held-out")).turns[0].task != wanted:
                pass
            (turn,) = sample.turns
            yield {
                "task": name,
                "question": turn.question,
                "answer": turn.answer,
                "passages": [list(one) for one in sample.passages],
                "documents": list(sample.documents or range(len(sample.passages))),
            }


def main() -> None:
    """Write the file."""
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows())
    path = samples_path() / FILE
    path.write_bytes(lzma.compress(text.encode("ascii"), preset=9))
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
