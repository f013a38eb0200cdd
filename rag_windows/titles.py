"""Which of a question's passages name another one by its title."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rag_windows.passage import Passage

SHORTEST, LONGEST = 3, 200
"""Characters of titles that count: shorter ones stand in any text, and looking for a long one in a
text made to almost hold it often takes time by the product of their lengths."""


@dataclass(frozen=True, slots=True)
class Titles:
    """Titles and texts of the passages that a question brings.

    Attributes:
        passages: by the number of their citation group.
        asked: what the user said: a title that stands there tells nothing about the passages.
    """

    passages: tuple[Passage, ...]
    asked: str

    def named_by(self, passage: int) -> frozenset[int]:
        """Passages of other titles, by number, whose title stands in the text of this one.

        It stands there as a word or several, written alike, of 3 to 200 characters. What stands in
        brackets at a title's end tells titles apart and is left out: "Heat (film)" is named by
        "Heat".
        """
        text, own = self.passages[passage].text, _bare(self.passages[passage].title)
        said = self.asked.casefold()
        return frozenset(
            number
            for number, one in enumerate(self.passages)
            if SHORTEST <= len(title := _bare(one.title)) <= LONGEST
            and title != own
            and _stands(title, text)
            and not _stands(title.casefold(), said)
        )


def _bare(title: str | None) -> str:
    bare = (title or "").strip()
    opens = bare.rfind("(") if bare.endswith(")") else -1
    return bare[:opens].rstrip() if opens > 0 else bare


def _stands(words: str, text: str) -> bool:
    if words not in text:
        return False
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text) is not None
