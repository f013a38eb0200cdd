"""Many questions about the same passages, each with the same choices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rag_windows.answer import encode_request
from rag_windows.limits import check_limits
from rag_windows.prompt import PromptParts
from rag_windows.request import Messages, PassageLike, Request
from rag_windows.rescaling import Method
from rag_windows.scoring import Ids, score_queries

if TYPE_CHECKING:
    from rag_windows.text_level import TextLM


@dataclass(frozen=True, slots=True)
class Read:
    """What reading gave.

    Attributes:
        sums: a list a question, of one log-probability a choice, in nats.
        parts: the prompt of the first question, whose windows all of them read.
        query_tokens: of each question.
        context_tokens: of prefix and windows.
        cached_tokens: those of them that were found in the passage cache.
        encoded_windows: how many windows were computed.
        cached_windows: how many were found in the passage cache.
        encode_s: seconds that prefix and windows took.
    """

    sums: list[list[float]]
    parts: PromptParts
    query_tokens: list[int]
    context_tokens: int
    cached_tokens: int
    encoded_windows: int
    cached_windows: int
    encode_s: float


def read(
    lm: TextLM,
    questions: Sequence[Messages],
    passages: Sequence[PassageLike],
    choices: Sequence[Ids],
    *,
    prefix: str | None,
    method: str | Method | None,
    max_window_tokens: int | None = None,
    headers: bool = True,
) -> Read:
    """Score choices behind every question; passages are encoded once for all of them.

    Once for each prefix, to be exact: conversations may bring system messages of their own.

    Args:
        lm: the model.
        questions: at least one, each as in `WindowedLM.generate`.
        passages: read by all.
        choices: token ids.
        prefix: system prompt.
        method: instead of the model's.
        max_window_tokens: instead of the model's.
        headers: whether windows have the model's header.

    Raises:
        InputError, PromptError, LimitError: before any work.
    """
    return read_each(
        lm,
        questions,
        passages,
        [choices] * len(questions),
        prefix=prefix,
        method=method,
        max_window_tokens=max_window_tokens,
        headers=headers,
    )


def read_each(
    lm: TextLM,
    questions: Sequence[Messages],
    passages: Sequence[PassageLike],
    choices: Sequence[Sequence[Ids]],
    *,
    prefix: str | None,
    method: str | Method | None,
    max_window_tokens: int | None = None,
    headers: bool = True,
) -> Read:
    """`read` where each question brings choices of its own.

    Args:
        lm: the model.
        questions: at least one.
        passages: read by all.
        choices: token ids of the choices, a list a question. Questions with the same ones share
            passes.
        prefix: system prompt.
        method: instead of the model's.
        max_window_tokens: instead of the model's.
        headers: whether windows have the model's header.

    Raises:
        InputError, PromptError, LimitError: before any work.
    """
    prompt = lm._text().prompt if headers else lm._text().prompt.without_header()
    longest = max((len(ids) for one in choices for ids in one), default=1)

    def request_for(question: Messages) -> Request:
        return lm._request(
            question,
            passages,
            prompt=prompt,
            prefix=prefix,
            method=method,
            max_new_tokens=max(1, longest),
            max_window_tokens=max_window_tokens,
        )

    first = request_for(questions[0])
    alike: dict[tuple[int, ...], list[int]] = {}
    queries = []
    for index, question in enumerate(questions):
        before, query = prompt.around(question, prefix=prefix, windows=bool(first.parts.windows))
        alike.setdefault(before, []).append(index)
        queries.append(query)
    requests = []
    for before, kind in alike.items():
        same = before == first.parts.prefix_ids
        request = first if same else request_for(questions[kind[0]])
        longest_query = max((queries[index] for index in kind), key=len)
        parts = replace(request.parts, query_ids=longest_query)
        limit = lm._limit if parts.windows else lm._prompt_limit
        check_limits(parts, request.passages, request.method, request.max_new_tokens, limit)
        requests.append(request)
    sums: dict[int, list[float]] = {}
    contexts = []
    seconds = 0.0
    for request, kind in zip(requests, alike.values(), strict=True):
        begun = time.perf_counter()
        context = encode_request(lm._encoder, request)
        seconds += time.perf_counter() - begun
        contexts.append(context)
        offered: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for index in kind:
            offered.setdefault(tuple(map(tuple, choices[index])), []).append(index)
        for ids, group in offered.items():
            scored = score_queries(lm._decoder, context, [queries[i] for i in group], ids)
            sums |= dict(zip(group, scored, strict=True))
    return Read(
        [sums[index] for index in range(len(questions))],
        first.parts,
        query_tokens=[len(query) for query in queries],
        context_tokens=len(first.parts.prefix_ids)
        + sum(len(window.ids) for window in first.parts.windows),
        cached_tokens=sum(one.cached_tokens for one in contexts),
        encoded_windows=sum(one.encoded_windows for one in contexts),
        cached_windows=sum(one.cached_windows for one in contexts),
        encode_s=seconds,
    )
