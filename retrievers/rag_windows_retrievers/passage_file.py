"""Passages as lines of JSON, beside the index that ranks them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from rag_windows.errors import InputError
from rag_windows.passage import Passage

NAME = "passages.jsonl"


def write_passages(folder: Path, passages: Iterable[Passage]) -> None:
    """Write `NAME` into the folder; scores are not kept.

    Raises:
        InputError: metadata that JSON can't hold.
    """
    with (folder / NAME).open("x", encoding="ascii", newline="\n") as stream:
        for number, one in enumerate(passages):
            row = {"text": one.text, "id": one.id, "title": one.title}
            try:
                stream.write(json.dumps({**row, "metadata": dict(one.metadata)}) + "\n")
            except (TypeError, ValueError, RecursionError) as error:
                name = f"passage {number}" if one.id is None else f"passage {one.id!r}"
                raise InputError(
                    f"The metadata of {name} can't be saved as JSON ({error}); "
                    "keep strings, numbers, lists and objects in it."
                ) from error


def read_passages(folder: Path) -> tuple[Passage, ...]:
    """Read `NAME` from the folder.

    Raises:
        ValueError, KeyError, TypeError: it is not what `write_passages` wrote.
    """
    with (folder / NAME).open(encoding="ascii") as stream:
        rows = [json.loads(line) for line in stream]
    return tuple(
        Passage(row["text"], id=row["id"], title=row["title"], metadata=row["metadata"])
        for row in rows
    )
