"""How many are labelled right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from rag_windows.evaluation.example import Example
from rag_windows.evaluation.record import Record
from rag_windows.evaluation.statistics.parts import Array, Parts
from rag_windows.evaluation.task import Score


def macro_f1(
    examples: Sequence[Example], records: Sequence[Record], labels: Sequence[str]
) -> Score:
    """Mean over labels of F1, in percent; a label that is neither right nor chosen counts not.

    An answer that is no label, as that of an error is, misses its own label and hits no other.
    """
    index = {label: number for number, label in enumerate(labels)}
    rows = np.zeros((len(examples), 3, len(labels)))
    for row, example, record in zip(rows, examples, records, strict=True):
        right, chosen = index[example.references[0].text], index.get(record.answer)
        if chosen == right:
            row[0, right] = 1
            continue
        row[2, right] = 1
        if chosen is not None:
            row[1, chosen] = 1
    parts = Parts(tuple(map(tuple, rows.reshape(len(examples), -1).tolist())), _macro)
    value = float(_macro(parts.array.sum(axis=0))) if examples else float("nan")
    return Score("macro_f1", value, (None,) * len(examples), parts)


def _macro(sums: Array) -> Array:
    """(..., 3 x labels) hits, false alarms and misses -> (...) percent."""
    hits, alarms, misses = np.split(sums, 3, axis=-1)
    whole = 2 * hits + alarms + misses
    counted = whole > 0
    each = np.divide(2 * hits, whole, out=np.zeros_like(whole), where=counted)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(100.0 * each.sum(axis=-1) / counted.sum(axis=-1))


def baselines(examples: Sequence[Example]) -> dict[str, float]:
    """Accuracy of two readers that see no text, in percent.

    Returns:
        "chance": one that guesses among the choices; "majority", where all examples have the same
        choices: one that always says the label which most of them have.
    """
    if not examples:
        return {}
    chance = sum(1.0 / len(one.choices) for one in examples) / len(examples)
    told = {"chance": round(100.0 * chance, 2)}
    if all(one.choices == examples[0].choices for one in examples):
        most = max(Counter(one.references[0].text for one in examples).values())
        told["majority"] = round(100.0 * most / len(examples), 2)
    return told
