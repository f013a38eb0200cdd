"""Encoding passages ahead of the questions about them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from itertools import islice

from rag_windows.cache.encoder import CachedEncoder
from rag_windows.engine import Engine
from rag_windows.errors import InputError
from rag_windows.passage import Passage
from rag_windows.prefill import complete
from rag_windows.request import Messages, PassageLike

OnWarmed = Callable[[int, int | None], None]
"""Told how many passages are done, and of how many; None where that is not known."""

CHUNK = 32
"""Passages that are looked up, encoded and stored together; an interruption loses no more."""

_ANY_QUESTION = "?"


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
    encoder = engine.encoder
    if engine.cache is None or not isinstance(encoder, CachedEncoder):
        raise InputError(
            "This model has no cache to warm; load it with cache=True or cache=PassageCache(...)."
        )
    if isinstance(passages, str | Passage | Mapping):
        raise InputError("passages must be a list of passages, not a single one; wrap it in [].")
    if engine.numbered:
        raise InputError(
            "The header writes a passage's number into its window, and numbers are only known with "
            "a question; load the model with header='title' or header='none' to warm it."
        )
    if ttl is not None and not ttl > 0:
        raise InputError(f"ttl={ttl!r} must be a number of seconds above zero, or None.")
    if not engine.method.windowed:
        raise InputError(
            f"The method {engine.method.name!r} reads passages one after the other, so none can be "
            "encoded ahead; load the model with a method that has windows, such as 'ape'."
        )
    if engine.method.alignment != "left":
        raise InputError(
            f"With the method {engine.method.name!r} a window's place depends on the others of its "
            "request, so none can be encoded ahead; load the model with a method whose windows all "
            "start behind the prefix, such as 'ape'."
        )
    total = len(passages) if isinstance(passages, Sized) else None
    done = encoded = present = tokens = 0
    for chunk in _chunks(passages):
        question = _ANY_QUESTION if conversation is None else conversation
        request = engine.request(question, chunk, prefix=prefix, method=None)
        parts = request.parts
        windows = [window.ids for window in parts.windows]
        missing = encoder.missing(parts.prefix_ids, windows, request.method)
        if missing:
            sources = request.sources
            complete(
                encoder.prefill(
                    parts.prefix_ids,
                    [windows[index] for index in missing],
                    request.method,
                    [sources[index] for index in missing],
                    patient=True,
                    ttl=ttl,
                )
            )
        done += len(chunk)
        encoded += len(missing)
        present += len(windows) - len(missing)
        tokens += sum(len(windows[index]) for index in missing)
        if on_warmed is not None:
            on_warmed(done, total)
    engine.cache.flush()
    return Warmed(done, encoded, present, tokens, time.perf_counter() - begun)


def _chunks(passages: Iterable[PassageLike]) -> Iterator[list[Passage]]:
    rest = iter(passages)
    while chunk := [Passage.of(passage) for passage in islice(rest, CHUNK)]:
        yield chunk
