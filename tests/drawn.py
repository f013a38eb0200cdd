"""Questions and demonstrations in the invented world of the small models.

No training saw their names, their pairs of phrasings, or their pairs of word and label. The
programs that made drawn.json and trained the models are in the folder training/ of the commit
4998c693.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from rag_windows import Passage

DRAWN: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


class Drawn(NamedTuple):
    """A question that one of the passages answers."""

    question: str
    answer: str
    passages: tuple[Passage, ...]


def questions(name: str) -> list[Drawn]:
    """Those of one name in drawn.json."""
    return [
        Drawn(
            one["question"],
            one["answer"],
            tuple(Passage(text, title=title) for title, text in one["passages"]),
        )
        for one in DRAWN[name]
    ]
