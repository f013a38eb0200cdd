"""Encodes passages before the first question and puts them into the cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from itertools import islice

from rag_windows.engine import Engine
from rag_windows.errors import InputError
from rag_windows.methods import stands_by_itself
from rag_windows.passage import Passage, refuse_single, with_neighbours
from rag_windows.prefill import complete
from rag_windows.request import BatchRequest, Messages, PassageLike, Request

OnWarmed = Callable[[int, int | None], None]
"""Called with the number of passages done and of all; None where that is not known."""

CHUNK = 32
"""Passages that are looked up, encoded and stored together; an interruption loses no more."""


@dataclass(frozen=True, slots=True)
class Warmed:
    """What warming did.

    Attributes:
        passages: read, blank and repeated ones included.
        encoded: windows that were encoded.
        present: windows that were there already.
        tokens: of the encoded windows.
        seconds: the whole call.
    """

    passages: int = 0
    encoded: int = 0
    present: int = 0
    tokens: int = 0
    seconds: float = 0.0


def warm(
    engine: Engine,
    passages: Iterable[PassageLike],
    *,
    prefix: str | None,
    conversation: Messages | None,
    on_warmed: OnWarmed | None,
    ttl: float | None,
) -> Warmed:
    """See `WindowedLM.warm`."""
    begun = time.perf_counter()
    encoder, cache = engine.encoder, engine.cache
    if cache is None:
        raise InputError(
            "This model has no passage cache to warm. Load it with cache=True or "
            "cache=PassageCache(...)."
        )
    _check_warmable(engine, passages, ttl)
    if engine.method.neighbours and isinstance(passages, Sequence):
        passages = with_neighbours(passages)
    total = len(passages) if isinstance(passages, Sized) else None
    done = encoded = present = tokens = 0
    remaining = iter(passages)
    while chunk := [Passage.of(passage) for passage in islice(remaining, CHUNK)]:
        plan = Request.of(engine, BatchRequest(conversation or "?", chunk, prefix)).plan
        if missing := encoder.missing(plan):
            complete(encoder.obtain(plan.only(missing), patient=True, ttl=ttl))
        done += len(chunk)
        encoded += len(missing)
        present += len(plan.windows) - len(missing)
        tokens += sum(plan.lengths[index] for index in missing)
        if on_warmed is not None:
            on_warmed(done, total)
    cache.flush()
    return Warmed(done, encoded, present, tokens, time.perf_counter() - begun)


def _check_warmable(engine: Engine, passages: Iterable[PassageLike], ttl: float | None) -> None:
    refuse_single(passages)
    if ttl is not None and not ttl > 0:
        raise InputError(f"ttl must be None or a number of seconds above 0, not {ttl!r}.")
    if engine.numbered:
        raise InputError(
            "A header with a passage's number can't be warmed, because the number is only "
            "known with a question. Load the model with header='title' or header='none'."
        )
    if not engine.method.windowed or not stands_by_itself(engine.method.alignment):
        raise InputError(
            f"The method {engine.method.name!r} can't be warmed, because a passage's position "
            "depends on the other passages of its request. Load the model with a method "
            "whose windows all start behind the prefix, such as 'ape'."
        )
