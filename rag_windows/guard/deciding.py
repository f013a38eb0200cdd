"""Whether a request is answered with windows or in the ordinary way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from rag_windows.calibration.spread import mass_spread
from rag_windows.context import EncodedContext
from rag_windows.decoding import Decoder
from rag_windows.guard.disagreement import disagreement, spans_of
from rag_windows.guard.fallback import Fallback, Signal
from rag_windows.guard.pilot import attention_masses
from rag_windows.guard.plan import FallbackPlan
from rag_windows.kv import PackedWindows

if TYPE_CHECKING:
    from rag_windows.request import Request

Encode = Callable[["Request"], EncodedContext]


def guarded(
    encode: Encode,
    decoder: Decoder,
    request: Request,
    cancelled: threading.Event | None = None,
) -> tuple[Request, EncodedContext, Fallback | None]:
    """The request to answer, encoded, and what its guard found.

    The signals are asked from the cheapest on, and the first that speaks decides. Nothing of the
    answer has been told to anybody by then.

    Args:
        encode: encodes a request.
        decoder: of the model.
        request: as it was asked.
        cancelled: ends the measurements early.

    Returns:
        The request itself, or the one that reads passages one after the other.
    """
    plan = request.fallback
    if plan is None or not request.method.windowed or not request.parts.windows:
        return request, encode(request), None
    found = few_short_passages(request, plan)
    if found is not None and plan.ordinary is not None:
        return plan.ordinary, encode(plan.ordinary), found
    context = encode(request)
    if found is None:
        found = measured(decoder, context, request, plan, cancelled)
    if found is None or plan.ordinary is None:
        return request, context, found
    del context  # the windows' keys make room for those of the whole prompt
    return plan.ordinary, encode(plan.ordinary), found


def few_short_passages(request: Request, plan: FallbackPlan) -> Fallback | None:
    """The signal "few short passages"; costs nothing."""
    windows, guard = request.parts.windows, plan.guard
    passages = len({window.passage for window in windows})
    tokens = sum(len(window.ids) for window in windows)
    if passages > guard.passages or tokens > guard.tokens:
        return None
    return _fallback(
        plan,
        "few short passages",
        tokens,
        guard.tokens,
        f"{passages} passages of {tokens} tokens together are at most {guard.passages} of "
        f"{guard.tokens} tokens",
    )


def measured(
    decoder: Decoder,
    context: EncodedContext,
    request: Request,
    plan: FallbackPlan,
    cancelled: threading.Event | None = None,
) -> Fallback | None:
    """The signals "multi-hop" and "disagreement", from the attention of the first answer tokens.

    Costs at most ``guard.rows`` answer tokens, and with a second signal one pass of the query for
    each of ``guard.asked`` windows. Where windows answer each for itself there is no attention to
    measure, and the guard stays silent; where they are chosen and fused for each query, only the
    spread is measured.
    """
    guard = plan.guard
    if request.method.combination is not None:
        return None
    query_ids = request.parts.query_ids
    packed = context.windows
    if not isinstance(packed, PackedWindows) or (
        plan.spread is None and guard.disagreement is None
    ):
        return None
    masses = attention_masses(decoder, context, query_ids, request.options, guard.rows, cancelled)
    if not masses or (cancelled is not None and cancelled.is_set()):
        return None
    if plan.spread is not None:
        spread = mass_spread(masses)
        if spread > plan.spread:
            reason = f"attention is spread over passages by {spread:.2f}, above {plan.spread:.2f}"
            return _fallback(plan, "multi-hop", spread, plan.spread, reason)
    if guard.disagreement is not None and request.method.selection is None:
        windows = request.parts.windows
        spans = spans_of(
            [len(one.ids) for one in windows], [one.passage for one in windows], masses
        )
        nats = disagreement(decoder, context, packed, query_ids, spans, guard.asked)
        if nats > guard.disagreement:
            reason = (
                f"the most-attended windows disagree by {nats:.2f} nats, above "
                f"{guard.disagreement:.2f}"
            )
            return _fallback(plan, "disagreement", nats, guard.disagreement, reason)
    return None


def _fallback(
    plan: FallbackPlan, signal: Signal, value: float, threshold: float, reason: str
) -> Fallback:
    taken = plan.ordinary is not None
    done = (
        "so they were read one after the other"
        if taken
        else f"but they were read in windows, because one after the other they don't fit: "
        f"{plan.obstacle}"
    )
    return Fallback(signal, float(value), float(threshold), taken, f"{reason}; {done}.")
