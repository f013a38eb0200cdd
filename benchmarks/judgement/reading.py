"""Greedy answers without decoding: one pass over question and right answer compares them.

Greedy decoding gives the right answer, ended where it ends, exactly if at each of its tokens and
at its end token the most likely token is that one: up to the first difference both see the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.judgement.cases import Group, Question
from rag_windows import WindowedLM
from rag_windows.attention.layout import WeightRecorder
from rag_windows.methods import Method
from rag_windows.prefill import EncodedContext, encode_context
from rag_windows.prompt.builder import Prompt

MOST_LOGITS = 1 << 25
"""Logits that one pass over questions holds at most."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A question in token ids.

    Attributes:
        query_ids: question and assistant header, a conversation before them.
        answer_ids: the right answer with its end token.
        value_from: index of the answer's token where the value asked for begins.
        passage: the passage that states it, or None.
    """

    query_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    value_from: int
    passage: int | None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A context with its questions in token ids."""

    prefix_ids: tuple[int, ...]
    windows: tuple[tuple[int, ...], ...]
    asked: tuple[Asked, ...]
    texts: Group


@dataclass(frozen=True, slots=True)
class Reading:
    """What greedy decoding would have written.

    Attributes:
        right: whether it is the right answer, whole.
        value: whether the value is right behind the right steps before it.
        cited: the passage of highest attention mass, or None where it wasn't measured.
    """

    right: bool
    value: bool
    cited: int | None


class Reader:
    """Reads prepared contexts with one model.

    Args:
        lm: with a tokenizer whose end of turn ends the answers.
    """

    def __init__(self, lm: WindowedLM) -> None:
        self.lm = lm
        self._prompt = Prompt(lm.tokenizer)
        ends = lm.model.generation_config.eos_token_id
        self._end = ends if isinstance(ends, int) else ends[0]

    def prepare(self, group: Group) -> Prepared:
        """Tokenize as `WindowedLM.generate` does."""
        first = self._prompt.build(list(group.questions[0].messages), group.passages)
        return Prepared(
            first.prefix_ids,
            tuple(window.ids for window in first.windows),
            tuple(self._asked(group, question) for question in group.questions),
            group,
        )

    def _asked(self, group: Group, question: Question) -> Asked:
        # The passages' own tokens don't depend on the question; one is enough to open the slot.
        parts = self._prompt.build(list(question.messages), group.passages[:1])
        answer = self._prompt.encode_text(question.answer, continuation=True)
        steps = self._prompt.encode_text(question.steps, continuation=True)
        if answer[: len(steps)] != steps:
            raise ValueError(f"{question.steps!r} is no beginning of {question.answer!r} in tokens")
        return Asked(parts.query_ids, (*answer, self._end), len(steps), question.passage)

    def encode(
        self, prepared: Prepared, method: Method, scores: Sequence[float] = ()
    ) -> EncodedContext:
        """Encode a context for a method.

        Args:
            prepared: the context.
            method: how it will be read.
            scores: of the passages, for methods that weigh by them.
        """
        return encode_context(
            self.lm.engine.encoder,
            prepared.prefix_ids,
            prepared.windows,
            method,
            groups=range(len(prepared.windows)),
            scores=scores,
        )

    def read(
        self, context: EncodedContext, prepared: Prepared, *, citations: bool = False
    ) -> list[Reading]:
        """Answer a context's questions, as rows of shared passes where its method allows.

        Args:
            context: of ``prepared``, encoded.
            prepared: the questions.
            citations: whether to see which passage gets most attention.
        """
        asked = prepared.asked
        if context.method.selection is not None:
            # Which windows are read is chosen anew for every question.
            narrowed = (self.lm.engine.decoder.narrowed(context, one.query_ids) for one in asked)
            return [
                self._read(own, [one], citations)[0]
                for own, one in zip(narrowed, asked, strict=True)
            ]
        longest = max(len(one.query_ids) + len(one.answer_ids) for one in asked)
        at_once = max(1, MOST_LOGITS // (longest * self.lm.engine.decoder.vocabulary))
        readings: list[Reading] = []
        for start in range(0, len(asked), at_once):
            readings += self._read(context, asked[start : start + at_once], citations)
        return readings

    def _read(
        self, context: EncodedContext, asked: Sequence[Asked], citations: bool
    ) -> list[Reading]:
        ids, first = rows_of(asked)
        mass = None
        if citations and context.windows is not None:
            mass = WeightRecorder(context.query_start + first)
        logits = self.lm.engine.decoder.forward(context, ids, last=ids.shape[1] - first, mass=mass)
        readings = judged(logits.argmax(dim=-1).tolist(), asked, first)
        if mass is None:
            return readings
        for number, one in enumerate(asked):
            begin = context.query_start + len(one.query_ids) - 1
            places = list(range(begin, begin + len(one.answer_ids)))
            shares = mass.average(places, [number] * len(places))[:-2]
            readings[number] = replace(readings[number], cited=int(shares.argmax()))
        return readings


def rows_of(asked: Sequence[Asked]) -> tuple[torch.Tensor, int]:
    """Questions with their answers as right-padded rows.

    Returns:
        (rows, tokens) int64, and the first token behind which a right answer may begin.
    """
    rows = [[*one.query_ids, *one.answer_ids] for one in asked]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
    return ids, min(len(one.query_ids) for one in asked) - 1


def judged(chosen: Sequence[Sequence[int]], asked: Sequence[Asked], first: int) -> list[Reading]:
    """Compare the most likely tokens with the right ones.

    Args:
        chosen: per question, the most likely next token behind token ``first`` of its row, behind
            the one after it, and so on.
        asked: the questions.
        first: from `rows_of`.
    """
    readings = []
    for row, one in zip(chosen, asked, strict=True):
        begin = len(one.query_ids) - 1 - first
        written = tuple(row[begin : begin + len(one.answer_ids)])
        value = slice(one.value_from, None)
        readings.append(
            Reading(
                right=written == one.answer_ids,
                value=written[value] == one.answer_ids[value],
                cited=None,
            )
        )
    return readings
