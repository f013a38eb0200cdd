"""One request from prompt parts to a finished answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from transformers.generation.streamers import BaseStreamer

from rag_windows.context import EncodedContext, encode_context
from rag_windows.engine import Engine
from rag_windows.errors import StopIterationTold
from rag_windows.generate import Cancelled, Decoded, Decoder, FirstToken, StopStrings
from rag_windows.prefill import PrefillCancelledError, WindowEncoder
from rag_windows.prompt.builder import WindowTokens
from rag_windows.prompt.detokenize import Detokenizer
from rag_windows.request import Request, sources_of
from rag_windows.results import Citation, Fallback, FinishReason, Generation, Timings, Usage

T = TypeVar("T")

Encode = Callable[..., T]
"""`encode_context`, `prefill_parts`, or what takes the same arguments."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What a loop made of one request, as `generation_of` puts it into words.

    Attributes:
        ids: the generated tokens.
        masses: shares of the attention that the citation groups, the prefix and the query got, in
            this order; None where they were not recorded.
        cached_tokens: prompt tokens that were not computed for this request.
        windows: that were encoded or found.
        cached_windows: those of them that were found.
        chosen: which of the windows were read, where the method chose; None for all.
        timings: of the request.
        fallback: what a guard found, or None.
        stopped_early: whether it was cancelled.
        raw: what ``transformers`` gives.
    """

    ids: Sequence[int]
    masses: Sequence[float] | None
    cached_tokens: int
    windows: int
    cached_windows: int
    chosen: tuple[int, ...] | None
    timings: Timings
    fallback: Fallback | None
    stopped_early: bool
    raw: Any


def encode_request(
    encoder: WindowEncoder, request: Request, cancelled: threading.Event | None = None
) -> EncodedContext:
    """Encode what the request's query will read; a passage is one citation group.

    Raises:
        PrefillCancelledError: ``cancelled`` was set meanwhile.
    """
    return encoded_by(partial(encode_context, cancelled=cancelled), encoder, request)


def encoded_by(encode: Encode[T], encoder: WindowEncoder, request: Request) -> T:
    """What ``encode`` makes of a request's prefix and windows."""
    windows, told = request.parts.windows, request.on_encoded
    return encode(
        encoder,
        request.parts.prefix_ids,
        [window.ids for window in windows],
        request.method,
        groups=[window.passage for window in windows],
        on_encoded=None if told is None else StopIterationTold()(told),
        sources=sources_of(request.parts, request.passages),
        scores=[request.passages[window.passage].score for window in windows],
    )


def answer(
    engine: Engine,
    request: Request,
    streamer: BaseStreamer | None = None,
    cancelled: threading.Event | None = None,
) -> Generation:
    """Encode, generate, and put the result together."""
    encoder, decoder, detokenizer = engine.encoder, engine.decoder, engine.text.detokenizer
    try:
        request, context, fallback = _guarded(encoder, decoder, request, cancelled)
    except PrefillCancelledError:
        return unbegun(decoder, detokenizer, request)
    context = decoder.narrowed(context, request.parts.query_ids)
    encoded_at = time.perf_counter()
    first = FirstToken()

    def stopping(prompt_length: int) -> list[Any]:
        return criteria_of(request, detokenizer, first, cancelled, prompt_length)

    decoded = decoder.generate(
        context,
        request.parts.query_ids,
        options={**request.options, "max_new_tokens": request.max_new_tokens},
        seed=request.seed,
        record_mass=request.citations,
        streamer=streamer,
        stopping=stopping,
    )
    ended = time.perf_counter()
    timings = Timings(
        encode_s=encoded_at - request.started,
        ttft_s=(first.seen_at or ended) - request.started,
        total_s=ended - request.started,
    )
    stopped_early = cancelled is not None and cancelled.is_set()
    results = [
        generation_of(
            decoder,
            detokenizer,
            request,
            Answered(
                ids=decoded.sequences[index],
                masses=_masses(decoded, index) if request.citations else None,
                cached_tokens=context.cached_tokens,
                windows=context.encoded_windows + context.cached_windows,
                cached_windows=context.cached_windows,
                chosen=context.chosen,
                timings=timings,
                fallback=fallback,
                stopped_early=stopped_early,
                raw=decoded.raw,
            ),
        )
        for index in range(len(decoded.sequences))
    ]
    best = results[0]
    if len(results) == 1:
        return best
    return Generation(
        **{name: getattr(best, name) for name in Generation.__slots__ if name != "alternatives"},
        alternatives=tuple(results[1:]),
    )


def _guarded(
    encoder: WindowEncoder,
    decoder: Decoder,
    request: Request,
    cancelled: threading.Event | None,
) -> tuple[Request, EncodedContext, Fallback | None]:
    """The request to answer, encoded, and what its guard found.

    The signals are asked from the cheapest on, and the first that speaks decides. Nothing of the
    answer has been told to anybody by then.

    Returns:
        The request itself, or the one that reads passages one after the other.
    """
    plan = request.fallback
    if plan is None:
        return request, encode_request(encoder, request, cancelled), None
    found = plan.few_short_passages(request.parts.windows)
    if found is None or plan.ordinary is None:
        context = encode_request(encoder, request, cancelled)
        if found is None:
            query_ids = request.parts.query_ids
            found = plan.multi_hop(decoder, context, query_ids, request.options, cancelled)
        if found is None or plan.ordinary is None:
            return request, context, found
        del context  # the windows' keys make room for those of the whole prompt
    return plan.ordinary, encode_request(encoder, plan.ordinary, cancelled), found


def unbegun(decoder: Decoder, detokenizer: Detokenizer, request: Request) -> Generation:
    """What was written for a request that was cancelled while it was encoded: nothing."""
    seconds = time.perf_counter() - request.started
    answered = Answered(
        ids=(),
        masses=None,
        cached_tokens=0,
        windows=0,
        cached_windows=0,
        chosen=None,
        timings=Timings(encode_s=seconds, ttft_s=seconds, total_s=seconds),
        fallback=None,
        stopped_early=True,
        raw=None,
    )
    return generation_of(decoder, detokenizer, request, answered)


def criteria_of(
    request: Request,
    detokenizer: Detokenizer,
    first: FirstToken,
    cancelled: threading.Event | None,
    prompt_length: int,
) -> list[Any]:
    """Our stopping criteria for a request, beside those in its options."""
    criteria: list[Any] = [first]
    if cancelled is not None:
        criteria.append(Cancelled(cancelled))
    if request.stop:
        criteria.append(StopStrings(detokenizer, request.stop, prompt_length))
    return criteria


def generation_of(
    decoder: Decoder, detokenizer: Detokenizer, request: Request, answered: Answered
) -> Generation:
    """Put a result together."""
    ids, parts = answered.ids, request.parts
    windows = sum(len(window.ids) for window in parts.windows)
    prompt_tokens = len(parts.prefix_ids) + windows + len(parts.query_ids)
    citations, prefix_mass, query_mass = _citations(request, answered.masses)
    return Generation(
        text=detokenizer.text(ids, request.stop),
        token_ids=tuple(ids),
        finish_reason=_finish_reason(decoder, detokenizer, request, ids, answered.stopped_early),
        usage=Usage(
            prompt_tokens,
            answered.cached_tokens,
            len(ids),
            windows=answered.windows,
            cached_windows=answered.cached_windows,
        ),
        timings=answered.timings,
        citations=citations,
        logprobs=None if request.logprobs is None else request.logprobs.tokens(ids),
        prefix_mass=prefix_mass,
        query_mass=query_mass,
        notes=parts.notes,
        fallback=answered.fallback,
        windows=_windows_read(request, answered.chosen),
        raw=answered.raw,
    )


def _windows_read(request: Request, chosen: tuple[int, ...] | None) -> tuple[WindowTokens, ...]:
    if not request.method.windowed:
        return ()
    windows = request.parts.windows
    return windows if chosen is None else tuple(windows[i] for i in chosen)


def _finish_reason(
    decoder: Decoder,
    detokenizer: Detokenizer,
    request: Request,
    ids: Sequence[int],
    stopped_early: bool,
) -> FinishReason:
    if ids and ids[-1] in decoder.end_tokens(request.options):
        return "stop"
    strings = request.options.get("stop_strings") or ()
    strings = (strings,) if isinstance(strings, str) else tuple(strings)
    if detokenizer.find_stop(ids, (*request.stop, *strings)) is not None:
        return "stop"
    if stopped_early:
        return "cancelled"
    timed = request.options.get("max_time") is not None
    return "length" if timed or len(ids) >= request.max_new_tokens else "stop"


def _masses(decoded: Decoded, index: int) -> list[float] | None:
    if decoded.mass is None:
        return None
    first = decoded.mass.first_position
    rows = decoded.rows[index]
    return decoded.mass.average(list(range(first, first + len(rows))), rows).tolist()


def _citations(
    request: Request, masses: Sequence[float] | None
) -> tuple[tuple[Citation, ...] | None, float | None, float | None]:
    if not request.citations:
        return None, None, None
    if masses is None:
        return tuple(Citation(i, p.id, 0.0) for i, p in enumerate(request.passages)), None, None
    *groups, prefix, query = masses
    groups = [*groups, *[0.0] * (len(request.passages) - len(groups))]
    citations = tuple(
        Citation(number, passage.id, groups[number])
        for number, passage in enumerate(request.passages)
    )
    return citations, prefix, query
