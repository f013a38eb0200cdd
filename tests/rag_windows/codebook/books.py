"""Passages and books that these tests share."""

from __future__ import annotations

from pathlib import Path

from rag_windows import APE, Codebook, Passage, PassageBook
from tests.rag_windows import small

TOPICS: tuple[str, ...] = ("cats", "dogs", "birds", "fish", "whales", "trees", "stones")
PASSAGES = [Passage(f"what is known about {one}", id=one) for one in TOPICS]
METHOD = Codebook(retrieve=3, reader=APE())
QUESTION = "tell me about birds"


def book(path: Path | None = None, method: Codebook = METHOD, **options: object) -> PassageBook:
    """An empty book of the small model, or the one in a folder."""
    return small.lm().codebook(method, path=path, **options)  # type: ignore[arg-type]  # options are codebook's own


def entries(path: Path) -> list[Path]:
    """Files of the windows and pages that a book keeps."""
    return sorted((path / "windows" / "entries").glob("*.safetensors"))
