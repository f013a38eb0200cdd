"""Examples for the tests of scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rag_windows.evaluation.task import Example, Reference, Score


def example(
    *texts: str,
    key: str = "talk/1",
    evidence: Sequence[Sequence[str]] | None = None,
    kinds: tuple[str, ...] = (),
    question: str = "Which one?",
    details: dict[str, Any] | None = None,
) -> Example:
    ids = evidence if evidence is not None else [()] * len(texts)
    references = tuple(
        Reference(text, evidence=tuple(names)) for text, names in zip(texts, ids, strict=True)
    )
    messages = ({"role": "user", "content": question},)
    return Example(key, messages, references, key, kinds, details=details or {})


def values(scores: Sequence[Score]) -> dict[str, float]:
    return {one.name: one.value for one in scores}
