"""Greedy answers without decoding: one pass over question and right answer tells whether they agree.

Greedy decoding gives the right answer, ended where it ends, exactly if at each of its tokens and at
its end token the most likely token is that one: up to the first difference both see the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.judgement.cases import Group, Question
from rag_windows import WindowedLM
from rag_windows.attention.mass import MassRecorder
from rag_windows.context import EncodedContext, encode_context
from rag_windows.prompt import Prompt
from rag_windows.rescaling import Method

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

    def encode(self, prepared: Prepared, method: Method) -> EncodedContext:
        """Encode a context for a method."""
        return self.lm.encode_ids(prepared.prefix_ids, prepared.windows, method=method)

    def read(
        self, context: EncodedContext, asked: Sequence[Asked], *, citations: bool = False
    ) -> list[Reading]:
        """Answer questions on one encoded context, as rows of shared passes."""
        longest = max(len(one.query_ids) + len(one.answer_ids) for one in asked)
        at_once = max(1, MOST_LOGITS // (longest * self.lm.model.config.vocab_size))
        readings: list[Reading] = []
        for start in range(0, len(asked), at_once):
            readings += self._read(context, asked[start : start + at_once], citations)
        return readings

    def _read(
        self, context: EncodedContext, asked: Sequence[Asked], citations: bool
    ) -> list[Reading]:
        rows = [[*one.query_ids, *one.answer_ids] for one in asked]
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
        first = context.query_start + min(len(one.query_ids) for one in asked) - 1
        mass = MassRecorder(first) if citations and context.windows is not None else None
        chosen = self.lm._decoder.forward(context, ids, mass=mass).argmax(dim=-1).tolist()
        readings = []
        for number, one in enumerate(asked):
            start = len(one.query_ids) - 1
            written = chosen[number][start : start + len(one.answer_ids)]
            cited = None
            if mass is not None:
                begin = context.query_start + start
                places = list(range(begin, begin + len(one.answer_ids)))
                cited = int(mass.average(places, [number] * len(places))[:-2].argmax())
            readings.append(reading(written, one, cited))
        return readings


def reading(written: Sequence[int], asked: Asked, cited: int | None = None) -> Reading:
    """Compare the most likely tokens behind the right ones with the right ones."""
    value = slice(asked.value_from, None)
    return Reading(
        right=tuple(written) == asked.answer_ids,
        value=tuple(written[value]) == asked.answer_ids[value],
        cited=cited,
    )
