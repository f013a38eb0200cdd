"""One retrieved text, and the windows made from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rag_windows.errors import InputError


@dataclass(frozen=True, slots=True)
class Passage:
    """One retrieved text with what the retriever knows about it.

    Attributes:
        text: the passage itself; blank text makes no window, and is told.
        id: the caller's name for it, carried through to citations.
        title: an optional title, shown to the model by the default header.
        score: the retriever's score, whatever its unit.
        metadata: anything else; never read by the engine.
    """

    text: str
    id: str | None = None
    title: str | None = None
    score: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value, kinds in (
            ("text", self.text, str),
            ("id", self.id, (str, type(None))),
            ("title", self.title, (str, type(None))),
        ):
            if not isinstance(value, kinds):
                raise InputError(
                    f"Passage.{name} must be a string, not {type(value).__name__}; "
                    f"convert it first, for example Passage({name}=str(value))."
                )

    @classmethod
    def of(cls, value: str | Passage | Mapping[str, Any]) -> Passage:
        """Make a passage from a string, a passage, or a mapping with a ``text`` key.

        Args:
            value: a mapping may use ``text`` or ``page_content`` for the text, ``id``, ``title``,
                ``score`` and ``metadata``; a title or id inside ``metadata`` is used when none
                stands beside it. Other keys are an error, so that no field is lost by a typo.

        Raises:
            InputError: the value is none of these, or a mapping lacks its text.
        """
        if isinstance(value, Passage):
            return value
        if isinstance(value, str):
            return cls(text=value)
        if not isinstance(value, Mapping):
            raise InputError(
                f"A passage must be a string, a Passage or a mapping with a 'text' key, "
                f"not {type(value).__name__}."
            )
        known = {"text", "page_content", "id", "title", "score", "metadata"}
        unknown = sorted(str(key) for key in value.keys() - known)
        if unknown:
            raise InputError(
                f"Unknown passage keys {unknown}; use {sorted(known)}, "
                "and put anything else into 'metadata'."
            )
        text = value.get("text", value.get("page_content"))
        if text is None:
            raise InputError("A passage mapping needs a 'text' key (or 'page_content').")
        metadata = value.get("metadata") or {}
        identity = value.get("id", metadata.get("id"))
        score = value.get("score")
        return cls(
            text=text,
            id=None if identity is None else str(identity),
            title=value.get("title", metadata.get("title")),
            score=None if score is None else float(score),
            metadata=dict(metadata),
        )


@dataclass(frozen=True, slots=True)
class WindowTokens:
    """One window.

    Attributes:
        ids: token ids, header and closing blank line included.
        passage: index into the passages as given.
        part: index of this window among the passage's windows.
        parts: number of the passage's windows.
        start: first character of ``passage.text`` in it.
        end: character of ``passage.text`` behind its last one.
    """

    ids: tuple[int, ...]
    passage: int
    part: int
    parts: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Note:
    """Something the caller should know about a passage.

    Attributes:
        kind: ``blank`` and ``duplicate`` passages make no window of their own; a ``split`` one
            makes several.
        passage: index into the passages as given.
        message: the same in words.
        of: for a duplicate, the index of the first passage that equals it.
    """

    kind: Literal["blank", "duplicate", "split"]
    passage: int
    message: str
    of: int | None = None
