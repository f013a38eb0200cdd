"""The passages of a run, each text once, by its digest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from rag_windows.errors import DataError
from rag_windows.evaluation.lines import JsonLines


def digest_of(text: str) -> str:
    """What names a text: the first 32 hex digits of its sha256."""
    # A file may spell half a surrogate pair, which UTF-8 has no bytes for.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class Texts(Mapping[str, str]):
    """Texts by their digests, from a passages.jsonl and into it.

    Args:
        path: of the file, which need not exist.

    Attributes:
        torn: bytes of a last line that a killed run left without its end.

    Raises:
        DataError: a line holds something else, or another text than its digest says.
    """

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)
        self._texts: dict[str, str] = {}
        for number, line in self._lines:
            name, text = line.get("text"), line.get("passage")
            if set(line) != {"text", "passage"} or not isinstance(text, str):
                raise DataError(
                    f"{path}, line {number}, must hold 'text', a digest, and 'passage', a string."
                )
            if name != digest_of(text):
                raise DataError(
                    f"{path}, line {number}: the passage is not the one whose digest stands in "
                    "'text'; the file was changed. Begin anew in another folder."
                )
            self._texts[name] = text
        self.torn = self._lines.torn

    def __getitem__(self, name: str) -> str:
        """The text of a digest; `KeyError` if it is not there."""
        return self._texts[name]

    def __contains__(self, name: object) -> bool:
        return name in self._texts

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, texts: Iterable[str]) -> None:
        """Keep those that are not there yet; they are on the medium afterwards.

        Raises:
            DataError: they can't be written.
        """
        new = {name: text for text in texts if (name := digest_of(text)) not in self._texts}
        self._lines.append(*({"text": name, "passage": text} for name, text in new.items()))
        self._texts |= new
