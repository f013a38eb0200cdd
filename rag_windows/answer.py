"""One request from prompt parts to a finished answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from transformers.generation.streamers import BaseStreamer

from rag_windows.context import EncodedContext, encode_context
from rag_windows.decoding import Decoded, Decoder
from rag_windows.detokenize import Detokenizer
from rag_windows.encoding import WindowEncoder
from rag_windows.generation import Citation, FinishReason, Generation, Timings, Usage
from rag_windows.guard.deciding import guarded
from rag_windows.guard.fallback import Fallback
from rag_windows.prompt import WindowTokens
from rag_windows.request import Request
from rag_windows.sources import sources_of
from rag_windows.stopping import Cancelled, FirstToken, StopStrings


def encode_request(encoder: WindowEncoder, request: Request) -> EncodedContext:
    """Encode what the request's query will read; a passage is one citation group."""
    windows = request.parts.windows
    return encode_context(
        encoder,
        request.parts.prefix_ids,
        [window.ids for window in windows],
        request.method,
        groups=[window.passage for window in windows],
        on_encoded=request.on_encoded,
        sources=sources_of(request.parts, request.passages),
        scores=[request.passages[window.passage].score for window in windows],
    )


def answer(
    encoder: WindowEncoder,
    decoder: Decoder,
    detokenizer: Detokenizer,
    request: Request,
    streamer: BaseStreamer | None = None,
    cancelled: threading.Event | None = None,
) -> Generation:
    """Encode, generate, and put the result together."""
    request, context, fallback = guarded(
        lambda asked: encode_request(encoder, asked), decoder, request, cancelled
    )
    context = decoder.narrowed(context, request.parts.query_ids)
    encoded_at = time.perf_counter()
    first = FirstToken()

    def stopping(prompt_length: int) -> list[Any]:
        criteria: list[Any] = [first]
        if cancelled is not None:
            criteria.append(Cancelled(cancelled))
        if request.stop:
            criteria.append(StopStrings(detokenizer, request.stop, prompt_length))
        return criteria

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
        _generation(
            decoder,
            detokenizer,
            request,
            context,
            decoded,
            index,
            timings,
            fallback,
            stopped_early=stopped_early,
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


def _generation(
    decoder: Decoder,
    detokenizer: Detokenizer,
    request: Request,
    context: EncodedContext,
    decoded: Decoded,
    index: int,
    timings: Timings,
    fallback: Fallback | None,
    *,
    stopped_early: bool,
) -> Generation:
    ids = decoded.sequences[index]
    prompt_tokens = len(context.prefix_ids) + context.window_tokens + len(request.parts.query_ids)
    citations, prefix_mass, query_mass = _citations(request, context, decoded, index)
    return Generation(
        text=detokenizer.text(ids, request.stop),
        token_ids=tuple(ids),
        finish_reason=_finish_reason(decoder, detokenizer, request, ids, stopped_early),
        usage=Usage(
            prompt_tokens,
            context.cached_tokens,
            len(ids),
            windows=context.encoded_windows + context.cached_windows,
            cached_windows=context.cached_windows,
        ),
        timings=timings,
        citations=citations,
        prefix_mass=prefix_mass,
        query_mass=query_mass,
        notes=request.parts.notes,
        fallback=fallback,
        windows=_windows_read(request, context),
        raw=decoded.raw,
    )


def _windows_read(request: Request, context: EncodedContext) -> tuple[WindowTokens, ...]:
    if not request.method.windowed:
        return ()
    windows = request.parts.windows
    return windows if context.chosen is None else tuple(windows[i] for i in context.chosen)


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


def _citations(
    request: Request, context: EncodedContext, decoded: Decoded, index: int
) -> tuple[tuple[Citation, ...] | None, float | None, float | None]:
    if not request.citations:
        return None, None, None
    if decoded.mass is None or context.windows is None:
        return tuple(Citation(i, p.id, 0.0) for i, p in enumerate(request.passages)), None, None
    first = decoded.mass.first_position
    rows = decoded.rows[index]
    positions = list(range(first, first + len(rows)))
    *groups, prefix, query = decoded.mass.average(positions, rows).tolist()
    masses = [*groups, *[0.0] * (len(request.passages) - len(groups))]
    citations = tuple(
        Citation(number, passage.id, masses[number])
        for number, passage in enumerate(request.passages)
    )
    return citations, prefix, query
