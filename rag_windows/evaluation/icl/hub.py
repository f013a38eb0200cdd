"""A named task's data from the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from rag_windows.errors import DataError, MissingExtraError, missing
from rag_windows.evaluation.data.fields import Place, shown
from rag_windows.evaluation.icl.item import Item, Items
from rag_windows.evaluation.icl.named import NAMED, Worded


def load(name: str, worded: Worded) -> Items:
    """Download a task, or take it from the cache of `datasets`.

    Raises:
        MissingExtraError: `datasets` is not installed.
        DataError: there is no network, or the data set is not what it was.
    """
    named = NAMED[name]
    demonstrations, first = _split(name, named.demonstrations, worded)
    test, second = _split(name, named.test, worded)
    return Items(
        "classification",
        demonstrations,
        test,
        worded.labels,
        {
            "hub": named.hub,
            "demonstrations": first,
            "test": second,
        },
    )


def _split(name: str, split: str, worded: Worded) -> tuple[tuple[Item, ...], dict[str, object]]:
    """The texts of a split, without the blank ones; and what a manifest keeps of it."""
    named = NAMED[name]
    place = Place(f"{named.hub}, split {split}")
    digest = hashlib.sha256()
    items: list[Item] = []
    blank = 0
    for number, row in enumerate(_rows(name, split), start=1):
        text, label = row.get(named.text), row.get(named.label)
        digest.update(json.dumps([text, label]).encode())
        if not isinstance(text, str) or label not in named.classes:
            raise place.at(f"row {number}").error(
                f"the columns {named.text!r} and {named.label!r} hold {shown(text)} and "
                f"{shown(label)}, not a text and one of {list(named.classes)}; the data set has "
                "changed. Give local files with --demos and --test."
            )
        if not text.strip():
            blank += 1
            continue
        items.append(
            Item(f"{split}/{number}", text.strip(), worded.labels, named.classes.index(label))
        )
    if not items:
        raise place.error(f"it holds no texts but {blank} blank ones.")
    return tuple(items), {"split": split, "blank": blank, "sha256": digest.hexdigest()}


def _rows(name: str, split: str) -> Any:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingExtraError(
            missing(
                f"The task {name!r}, which comes from the Hugging Face Hub,", "datasets", "eval-hub"
            )
            + ", or give local files with --demos and --test."
        ) from error
    named = NAMED[name]
    try:
        return load_dataset(named.hub, named.config, split=split)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise DataError(
            f"The task {name!r} can't be loaded from the Hugging Face Hub ({named.hub}, split "
            f"{split}: {reason}). Without a network, give local files: --task {name} --demos "
            'FILE --test FILE, JSON lines such as {"text": "...", "label": "..."}.'
        ) from error
