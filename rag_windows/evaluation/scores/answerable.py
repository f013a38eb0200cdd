"""A list of the answerable questions that count."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rag_windows.evaluation.data.fields import checked
from rag_windows.evaluation.data.reading import read
from rag_windows.evaluation.example import Example
from rag_windows.evaluation.scores.chatrag import unanswerable


def read_answerable(path: str | Path, examples: Sequence[Example]) -> frozenset[str]:
    """Keys of the questions that a list names, for `chatrag_scores`.

    ChatRAG-Bench's scorer holds such a list for QuAC, ``quac_correct_retrieved_instance_idx_list``:
    the answerable questions whose first five passages hold the right answer. It is not part of this
    project; save it as JSON.

    Args:
        path: JSON, a list of numbers: each the position of a question among the answerable ones of
            the dataset, from 0.
        examples: the whole dataset, in the order of its file.

    Raises:
        DataError: the file can't be read, is no such list, or names a question that isn't there.
    """
    source = read(path)
    listed = checked(source.json(), list, source.place, "the file's content")
    keys = [example.key for example in examples if not unanswerable(example)]
    chosen: set[str] = set()
    for entry, value in enumerate(listed, start=1):
        number = checked(value, int, source.place, f"entry {entry}")
        if not 0 <= number < len(keys):
            raise source.place.error(
                f"entry {entry} is {number}, but the {len(keys)} answerable questions are counted "
                "from 0; take the list that belongs to this dataset."
            )
        chosen.add(keys[number])
    return frozenset(chosen)
