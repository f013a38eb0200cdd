"""The passages that a record of ChatRAG-Bench brings, whatever form they have there."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

from rag_windows.evaluation.data.fields import (
    Place,
    checked,
    field,
    kind_of,
    optional,
    record_of,
    shown,
)
from rag_windows.passage import Passage

_LISTS = ("ctxs", "documents", "document")


def passages_of(record: Any, place: Place) -> tuple[Passage, ...]:
    """A record's passages in the order of the file, which is their rank.

    They are its ``ctxs``, or where these are missing its ``documents``, or its ``document``: a text
    or an object with ``text``, and maybe ``title``, ``id`` and ``score``, or a list of such. A
    table (a list of rows) as a text becomes lines with " | " between cells. A passage without an
    id is named after its text.

    Raises:
        DataError: there is none, or one is of another form.
    """
    record = record_of(record, place)
    for name in _LISTS:
        value = record.get(name)
        if value is None or value == []:
            continue
        if name == "document" and (not isinstance(value, list) or _is_table(value)):
            return (_passage(value, place.at('"document"')),)
        many = checked(value, list, place, f'"{name}"')
        return tuple(
            _passage(one, place.at(f'"{name}" {number}')) for number, one in enumerate(many, 1)
        )
    raise place.error('it has no passages; give them as "ctxs", "documents" or "document".')


def gold_of(record: Any) -> tuple[Passage, ...]:
    """The right passages as a record names them in ``ground_truth_ctx``; none where it doesn't.

    The field is not needed for an answer, and has several forms. What is none of them is left out.
    """
    value = record.get("ground_truth_ctx")
    found = []
    for one in value if isinstance(value, list) else [value]:
        text = one.get("ctx", one.get("text")) if isinstance(one, dict) else one
        if isinstance(text, str) and text.strip():
            title = one.get("title") if isinstance(one, dict) else None
            found.append(Passage(text, name_of(text), title if isinstance(title, str) else None))
    return tuple(found)


def found_among(gold: Iterable[Passage], passages: Iterable[Passage]) -> Iterator[tuple[str, bool]]:
    """Ids of right passages, and whether each is one of the passages; texts are compared."""
    ids = {_words(one.text): str(one.id) for one in reversed(tuple(passages))}
    for one in gold:
        found = ids.get(_words(one.text))
        yield (str(one.id), False) if found is None else (found, True)


def name_of(text: str) -> str:
    """An id for a text that has none."""
    return hashlib.sha256(_words(text).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _words(text: str) -> str:
    return " ".join(text.split())


def _passage(value: Any, place: Place) -> Passage:
    if isinstance(value, str) or _is_table(value):
        text = _text(value, place)
        return Passage(text, name_of(text))
    if not isinstance(value, dict):
        raise place.error(f"a passage must be an object or a string, not {kind_of(value)}.")
    if isinstance(value.get("text"), str):
        text = field(value, "text", str, place)
    elif value.get("text") is None:
        raise place.error('"text" is missing; it must be a string.')
    else:
        text = _text(value["text"], place)
    name = value.get("id")
    if isinstance(name, bool) or not isinstance(name, str | int | None):
        raise place.error(f'"id" must be a string or a whole number, not {kind_of(name)}.')
    title = optional(value, "title", str, place)
    return Passage(
        text,
        id=name_of(text) if name is None or name == "" else str(name),
        title=title or None,
        score=_score(value.get("score"), place),
    )


def _score(value: Any, place: Place) -> float | None:
    if isinstance(value, str):
        # DPR writes them as strings.
        try:
            score = float(value)
        except ValueError:
            score = math.nan
        if not math.isfinite(score):
            raise place.error(f'"score" must be a number, not {shown(value)}.')
        return score
    return None if value is None else float(checked(value, float, place, '"score"'))


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, list) for one in value)


def _text(value: Any, place: Place) -> str:
    if isinstance(value, str):
        return value
    if not _is_table(value):
        raise place.error(f'"text" must be a string or a list of rows, not {kind_of(value)}.')
    for row, cells in enumerate(value, start=1):
        for cell in cells:
            if isinstance(cell, dict | list):
                raise place.error(f"a cell in row {row} must be a text or a number.")
    return "\n".join(" | ".join("" if c is None else str(c) for c in cells) for cells in value)
