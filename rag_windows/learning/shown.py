"""Demonstrations in windows, ready for any number of texts."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from rag_windows.conversation import Conversation
from rag_windows.errors import LimitError
from rag_windows.learning.classification import (
    Classification,
    Normalize,
    classified,
    content_free,
    log_softmax,
    scores_of,
)
from rag_windows.learning.demonstration import Demonstration
from rag_windows.learning.labels import Labels
from rag_windows.learning.reading import Read, read_each
from rag_windows.learning.sizing import Sizes, fill
from rag_windows.learning.template import Template
from rag_windows.limits import in_order
from rag_windows.rescaling import Method
from rag_windows.rescaling.steps import Refinement

if TYPE_CHECKING:
    from rag_windows.text_level import TextLM


@dataclass(frozen=True, slots=True)
class Judged:
    """Labels for texts.

    Attributes:
        labels: one a text.
        read: how they were found: the texts first, content-free ones behind them.
    """

    labels: list[Classification]
    read: Read


@dataclass(frozen=True, slots=True)
class Shown:
    """Demonstrations packed into windows, for texts that are no longer than those it was made for.

    Attributes:
        lm: the model.
        form: how demonstrations and texts are written.
        windows: the windows' texts.
        method: how they are read.
        prefix: system prompt.
    """

    lm: TextLM
    form: Template
    windows: tuple[str, ...]
    method: Method
    prefix: str | None

    @classmethod
    def of(
        cls,
        lm: TextLM,
        texts: Sequence[str],
        demonstrations: Sequence[Demonstration],
        choices: Sequence[Labels],
        *,
        form: Template,
        method: Method,
        prefix: str | None,
        sizes: Sizes,
    ) -> Self:
        """Pack demonstrations into windows.

        Args:
            lm: the model.
            texts: at least one; the longest leaves the windows the least room.
            demonstrations: in this order; none is allowed.
            choices: what the texts are judged by; the longest counts, as above.
            form: of demonstrations and texts.
            method: how the windows are read.
            prefix: system prompt.
            sizes: how many windows, or how long.

        Raises:
            LimitError: a demonstration that fits no window.
        """
        shown = [form.show(one) for one in demonstrations]
        empty = cls(lm, form, (), method, prefix)
        questions = [empty._question(text) for text in texts]
        longest = max(len(ids) for labels in choices for ids in labels.ids)
        made = _windows(lm, shown, form, questions, longest, sizes, method.refinement)
        return replace(empty, windows=tuple(made))

    def judge(
        self,
        texts: Sequence[str],
        choices: Sequence[Labels],
        normalize: Normalize = "sum",
        neutral: Sequence[str] = (),
    ) -> Judged:
        """Choose a label for each text; the windows are encoded once for all of them.

        Args:
            texts: at least one.
            choices: the labels of each; texts with the same ones share passes.
            normalize: how the tokens of a label are counted together.
            neutral: content-free texts, judged by the same labels.

        Raises:
            LimitError: read one after the other, the windows don't fit the model's positions.
        """
        kinds = list(dict.fromkeys(choices)) if neutral else []
        asked = [*texts, *(text for _ in kinds for text in neutral)]
        each = [*choices, *(labels for labels in kinds for _ in neutral)]
        result = read_each(
            self.lm,
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
            scores_of(labels, sums, normalize)
            for labels, sums in zip(each, result.sums, strict=True)
        ]
        if neutral:
            behind = rows[len(texts) :]
            step = len(neutral)
            bias = {
                labels: content_free(behind[i * step : (i + 1) * step])
                for i, labels in enumerate(kinds)
            }
            rows = [
                [a - b for a, b in zip(log_softmax(row), bias[labels], strict=True)]
                for row, labels in zip(rows, choices, strict=False)
            ]
        parts = result.parts
        found = [
            classified(text, labels, row, len(parts.windows), parts.notes)
            for text, labels, row in zip(texts, choices, rows, strict=False)
        ]
        return Judged(found, result)

    def fits(self, text: str, choices: Sequence[Labels]) -> bool:
        """Whether the windows fit the model's positions beside a text and its longest choice.

        Packed windows always do where they are read side by side; read one after the other, all of
        them together may not.
        """
        if not in_order(self.method):
            return True
        try:
            self.lm._request(
                self._question(text),
                self.windows,
                prompt=self.lm._text().prompt.without_header(),
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


def _windows(
    lm: TextLM,
    shown: Sequence[str],
    form: Template,
    questions: Sequence[Conversation],
    longest_choice: int,
    sizes: Sizes,
    refinement: Refinement | None,
) -> list[str]:
    """The windows' texts."""
    if not shown:
        return []
    prompt = lm._text().prompt
    both = [prompt.around(question) for question in questions]
    fixed = max(len(before) + len(query) for before, query in both) + longest_choice
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
