"""In-context learning: demonstrations in windows, a text behind them, and a label for it."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rag_windows.conversation import Conversation
from rag_windows.errors import InputError, LimitError
from rag_windows.learning.classification import (
    Classification,
    Normalize,
    check_normalize,
    classified,
    content_free,
    log_softmax,
    scores_of,
)
from rag_windows.learning.demonstration import DemonstrationLike, demonstrations_of
from rag_windows.learning.labels import Labels
from rag_windows.learning.reading import read
from rag_windows.learning.sizing import Sizes, fill
from rag_windows.learning.template import Template
from rag_windows.rescaling import Method
from rag_windows.rescaling.steps import Refinement

if TYPE_CHECKING:
    from rag_windows.text_level import TextLM


def classify(
    lm: TextLM,
    texts: Sequence[str],
    demonstrations: Sequence[DemonstrationLike],
    labels: Sequence[str] | None,
    *,
    template: Template | str | tuple[str, str] | None,
    method: str | Method | None,
    prefix: str | None,
    normalize: Normalize,
    calibrate_with: str | Sequence[str] | None,
    sizes: Sizes,
) -> list[Classification]:
    """See `WindowedLM.classify`."""
    check_normalize(normalize)
    form = Template.of(template)
    shown = demonstrations_of(demonstrations)
    neutral = [calibrate_with] if isinstance(calibrate_with, str) else list(calibrate_with or ())
    for kind, given in (("Text", texts), ("Content-free text", neutral)):
        for index, text in enumerate(given):
            if not isinstance(text, str) or not text.strip():
                raise InputError(
                    f"{kind} {index} must be a string that is not blank, not {text!r}."
                )
    prompt = lm._text().prompt
    gap = "" if prompt.is_chat else form.gap
    choices = Labels.of(
        labels, shown, lambda label: prompt.encode_text(gap + label, continuation=True)
    )
    if not texts:
        return []
    asked = [*texts, *neutral]
    questions = [replace(Conversation.of(form.ask(text), prefix), plain=True) for text in asked]
    reader = lm._method(method)
    texts_shown = [form.show(one) for one in shown]
    windows = _windows(lm, texts_shown, form, questions, choices, sizes, reader.refinement)
    result = read(
        lm,
        questions,
        windows,
        choices.ids,
        prefix=None,
        method=reader,
        # A window is as long as its demonstrations, which are counted already.
        max_window_tokens=sys.maxsize,
        headers=False,
    )
    rows = [scores_of(choices, sums, normalize) for sums in result.sums]
    if neutral:
        bias = content_free(rows[len(texts) :])
        rows = [[a - b for a, b in zip(log_softmax(row), bias, strict=True)] for row in rows]
    parts = result.parts
    return [
        classified(text, choices, row, len(parts.windows), parts.notes)
        for text, row in zip(texts, rows, strict=False)
    ]


def _windows(
    lm: TextLM,
    shown: Sequence[str],
    form: Template,
    questions: Sequence[Conversation],
    choices: Labels,
    sizes: Sizes,
    refinement: Refinement | None,
) -> list[str]:
    """The windows' texts."""
    if not shown:
        return []
    prompt = lm._text().prompt
    both = [prompt.around(question) for question in questions]
    fixed = max(len(before) + len(query) for before, query in both)
    fixed += max(len(ids) for ids in choices.ids)
    limit = lm._limit
    if limit is not None and fixed >= limit:
        raise LimitError(
            f"The prefix, the longest text and the longest label make {fixed} tokens, and the "
            f"model has {limit} positions: no demonstration would fit. Shorten the text."
        )
    continues = prompt.is_chat or bool(questions[0].system)

    def size_of(text: str) -> int:
        return len(prompt.encode_text(f"{text}\n\n", continuation=continues))

    left = None if limit is None else limit - fixed
    if left is not None and limit is not None and refinement is not None:
        behind = limit - max(len(before) for before, _ in both)
        left = bisect_right(range(left + 1), behind, key=refinement.positions) - 1
    room = sizes.room(left, limit)
    return fill(shown, form.separator, size_of, room, sizes.windows)
