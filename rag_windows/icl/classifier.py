"""Classification by demonstrations in windows."""

from __future__ import annotations

import math
import sys
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self, TypedDict, cast

import torch

from rag_windows.engine import Engine
from rag_windows.errors import InputError, LimitError
from rag_windows.icl.demonstrations import (
    Demonstration,
    DemonstrationLike,
    Labels,
    Normalize,
    Sizes,
    Template,
    check_text,
    demonstrations_of,
    fill,
)
from rag_windows.icl.scoring import Score, score_queries
from rag_windows.methods import Method
from rag_windows.passage import Note
from rag_windows.prompt.builder import PromptParts
from rag_windows.prompt.conversation import Conversation
from rag_windows.request import BatchRequest, Messages, PassageLike, Request, check_limits, in_order


class ClassifyOptions(TypedDict, total=False):
    """Keyword arguments of `WindowedLM.classify`, which describes them."""

    template: Template | str | tuple[str, str] | None
    method: str | Method | None
    prefix: str | None
    normalize: Normalize
    calibrate_with: str | Sequence[str] | None
    windows: int | None
    window_tokens: int | None


@dataclass(frozen=True, slots=True)
class Classification:
    """One text's label.

    Attributes:
        text: as given.
        label: the one with the highest score; the first of equals.
        scores: of each label: its log-probability in nats, as a sum or as the mean of its tokens,
            and minus that of content-free inputs where these were asked for.
        probabilities: of each label, the softmax of the scores: among these labels only.
        windows: how many windows of demonstrations were read.
        notes: what the caller should know about a window, such as one that repeats another.
    """

    text: str
    label: str
    scores: Mapping[str, float]
    probabilities: Mapping[str, float]
    windows: int = 0
    notes: tuple[Note, ...] = field(default=(), repr=False)


def classify(
    engine: Engine,
    texts: Sequence[str],
    demonstrations: Sequence[DemonstrationLike],
    labels: Sequence[str] | None = None,
    *,
    template: Template | str | tuple[str, str] | None = None,
    method: str | Method | None = None,
    prefix: str | None = None,
    normalize: Normalize = "sum",
    calibrate_with: str | Sequence[str] | None = None,
    windows: int | None = None,
    window_tokens: int | None = None,
) -> list[Classification]:
    """Label texts, as `WindowedLM.classify` describes it."""
    sizes = Sizes(windows, window_tokens)
    if normalize not in ("sum", "mean"):
        raise InputError(f"normalize={normalize!r} must be 'sum' or 'mean'.")
    form = Template.of(template)
    examples = demonstrations_of(demonstrations)
    neutral = [calibrate_with] if isinstance(calibrate_with, str) else list(calibrate_with or ())
    for kind, given in (("Text", texts), ("Content-free text", neutral)):
        for index, text in enumerate(given):
            check_text(f"{kind} {index}", text)
    choices = labels_for(engine, form, labels, examples)
    if not texts:
        return []
    shown = Shown.of(
        engine,
        [*texts, *neutral],
        examples,
        [choices],
        form=form,
        method=engine.method_of(method),
        prefix=prefix,
        sizes=sizes,
    )
    return shown.judge(texts, [choices] * len(texts), normalize, neutral)[0]


def labels_for(
    engine: Engine,
    form: Template,
    labels: Sequence[str] | None,
    demonstrations: Sequence[DemonstrationLike] = (),
) -> Labels:
    """Labels as a model's tokens behind a text in this form."""
    prompt = engine.text.prompt
    gap = "" if prompt.is_chat else form.gap
    return Labels.of(
        labels,
        demonstrations_of(demonstrations),
        lambda label: prompt.encode_text(gap + label, continuation=True),
    )


@dataclass(frozen=True, slots=True)
class Shown:
    """Demonstrations packed into windows, for texts no longer than those it was made for."""

    engine: Engine
    form: Template
    windows: tuple[str, ...]
    method: Method
    prefix: str | None

    @classmethod
    def of(
        cls,
        engine: Engine,
        texts: Sequence[str],
        demonstrations: Sequence[Demonstration],
        choices: Sequence[Labels],
        *,
        form: Template,
        method: Method,
        prefix: str | None,
        sizes: Sizes,
    ) -> Self:
        """Pack demonstrations into windows; the longest text and label leave the least room."""
        empty = cls(engine, form, (), method, prefix)
        if not demonstrations:
            return empty
        prompt, limit = engine.text.prompt, engine.position_limit
        questions = [empty._question(text) for text in texts]
        both = [prompt.around(question) for question in questions]
        fixed = max(len(before) + len(query) for before, query in both)
        fixed += max(len(ids) for labels in choices for ids in labels.ids)
        if limit is not None and fixed >= limit:
            raise LimitError(
                f"The prefix, the longest text and the longest label make {fixed} tokens, and the "
                f"model has {limit} positions: no demonstration would fit. Shorten the text."
            )
        left = None if limit is None else limit - fixed
        if left is not None and limit is not None and method.refinement is not None:
            behind = limit - max(len(before) for before, _ in both)
            left = bisect_right(range(left + 1), behind, key=method.refinement.reach) - 1
        continues = prompt.is_chat or bool(questions[0].system)

        def size_of(text: str) -> int:
            return len(prompt.encode_text(f"{text}\n\n", continuation=continues))

        shown = [form.show(one) for one in demonstrations]
        room = sizes.room(left, limit)
        made = fill(shown, form.separator, size_of, room, sizes.windows)
        return replace(empty, windows=tuple(made))

    def judge(
        self,
        texts: Sequence[str],
        choices: Sequence[Labels],
        normalize: Normalize = "sum",
        neutral: Sequence[str] = (),
    ) -> tuple[list[Classification], Read]:
        """Choose a label for each text; the windows are encoded once for all of them.

        With content-free texts it is contextual calibration (https://arxiv.org/abs/2102.09690,
        section 5): ``q = softmax(W p)``, ``W = diag(p_cf)^-1``, ``p_cf`` the mean of the label
        probabilities over those texts. The label of highest ``q`` is that of highest ``log p - log
        p_cf``, and here the softmax of this difference is the probability.
        """
        kinds = list(dict.fromkeys(choices)) if neutral else []
        asked = [*texts, *(text for _ in kinds for text in neutral)]
        each = [*choices, *(labels for labels in kinds for _ in neutral)]
        result = read(
            self.engine,
            [self._question(text) for text in asked],
            self.windows,
            [labels.ids for labels in each],
            prefix=None,
            method=self.method,
            # A window is as long as its demonstrations, which are counted already.
            max_window_tokens=sys.maxsize,
            headers=False,
        )
        rows = [
            torch.tensor(labels.scores(sums, normalize), dtype=torch.float64)
            for labels, sums in zip(each, result.sums, strict=True)
        ]
        bias = {}
        for labels in kinds:
            own = [row for one, row in zip(each, rows, strict=True) if one is labels]
            free = torch.stack(own[-len(neutral) :]).log_softmax(-1)
            means = free.logsumexp(0) - math.log(len(neutral))
            bias[labels] = means.clamp(min=math.log(sys.float_info.min))
        found = []
        for text, labels, row in zip(texts, choices, rows, strict=False):
            scores = row.log_softmax(-1) - bias[labels] if neutral else row
            found.append(
                Classification(
                    text=text,
                    label=labels.names[int(scores.argmax())],
                    scores=dict(zip(labels.names, scores.tolist(), strict=True)),
                    probabilities=dict(zip(labels.names, scores.softmax(-1).tolist(), strict=True)),
                    windows=len(result.parts.windows),
                    notes=result.parts.notes,
                )
            )
        return found, result

    def fits(self, text: str, choices: Sequence[Labels]) -> bool:
        """Whether windows that are read one after the other fit beside a text and its choice."""
        if not in_order(self.method):
            return True
        try:
            self.engine.request(
                self._question(text),
                self.windows,
                prompt=self.engine.text.prompt.without_header(),
                prefix=None,
                method=self.method,
                max_new_tokens=max(len(ids) for labels in choices for ids in labels.ids),
                max_window_tokens=sys.maxsize,
            )
        except LimitError:
            return False
        return True

    def _question(self, text: str) -> Conversation:
        return replace(Conversation.of(self.form.ask(text), self.prefix), plain=True)


@dataclass(frozen=True, slots=True)
class Read:
    """What reading gave: the sums of choices by question, and what prefix and windows cost."""

    sums: list[list[float]]
    parts: PromptParts
    query_tokens: list[int]
    context_tokens: int
    cached_tokens: int
    encoded_windows: int
    cached_windows: int
    encode_s: float


def read(
    engine: Engine,
    questions: Sequence[Messages],
    passages: Sequence[PassageLike],
    choices: Sequence[Sequence[Sequence[int]]],
    *,
    prefix: str | None,
    method: str | Method | None,
    max_window_tokens: int | None = None,
    headers: bool = True,
) -> Read:
    """Score choices behind every question (at least one); passages are encoded once for all.

    Once for each prefix, to be exact: conversations may bring system messages of their own.
    """
    prompt = engine.text.prompt if headers else engine.text.prompt.without_header()
    longest = max((len(ids) for one in choices for ids in one), default=1)

    def request_for(question: Messages) -> Request:
        return engine.request(
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
        parts = replace(request.parts, query_ids=max((queries[i] for i in kind), key=len))
        limit = engine.position_limit if parts.windows else engine.prompt_limit
        check_limits(parts, request.passages, request.method, request.max_new_tokens, limit)
        requests.append(request)
    sums: dict[int, list[float]] = {}
    contexts = []
    seconds = 0.0
    for request, kind in zip(requests, alike.values(), strict=True):
        begun = time.perf_counter()
        context = engine.encode(request)
        seconds += time.perf_counter() - begun
        contexts.append(context)
        offered: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for index in kind:
            offered.setdefault(tuple(map(tuple, choices[index])), []).append(index)
        for ids, group in offered.items():
            scored = score_queries(engine.decoder, context, [queries[i] for i in group], ids)
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


def score_choices(
    engine: Engine, queries: Sequence[Messages], asked: BatchRequest, choices: Sequence[str]
) -> list[list[Score]]:
    """Score choices behind each query; the rest of what was asked holds for all of them."""
    ids = [engine.text.prompt.encode_text(choice, continuation=True) for choice in choices]
    passages = cast("Sequence[PassageLike]", asked.passages)
    offered = [ids] * len(queries)
    rows = read(engine, queries, passages, offered, prefix=asked.prefix, method=asked.method).sums
    return [
        [Score(*one) for one in zip(choices, sums, map(len, ids), strict=True)] for sums in rows
    ]
