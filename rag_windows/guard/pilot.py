"""The first tokens of an answer, written to see where they look, and thrown away."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from rag_windows.context import EncodedContext
from rag_windows.decoding import Decoder
from rag_windows.stopping import Cancelled

PLAIN = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1}
"""How the first tokens are written, whatever the answer's own options."""


def attention_masses(
    decoder: Decoder,
    context: EncodedContext,
    query_ids: Sequence[int],
    options: Mapping[str, Any],
    rows: int,
    cancelled: threading.Event | None = None,
) -> list[float]:
    """Attention mass of each citation group over the first greedy answer tokens.

    Args:
        decoder: of the model.
        context: with windows that are read together.
        query_ids: the query.
        options: of the answer; only those that stop it count here.
        rows: answer tokens at most.
        cancelled: ends it early.

    Returns:
        Shares of the attention, averaged over layers, heads and tokens.
    """

    def stopping(_: int) -> list[Any]:
        return [] if cancelled is None else [Cancelled(cancelled)]

    decoded = decoder.generate(
        context,
        query_ids,
        options={
            **PLAIN,
            "max_new_tokens": rows,
            "stopping_criteria": options.get("stopping_criteria"),
        },
        record_mass=True,
        stopping=stopping,
    )
    if decoded.mass is None:
        return []
    first = decoded.mass.first_position
    steps = decoded.rows[0]
    masses = decoded.mass.average(list(range(first, first + len(steps))), steps).tolist()
    return [float(mass) for mass in masses[:-2]]
