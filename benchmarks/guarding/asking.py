"""Every question answered in both ways, with what the guard would have measured."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.guarding.cases import Case
from benchmarks.judgement.cases import Group, Question
from benchmarks.judgement.ensembles import read_ensembles, scored
from benchmarks.judgement.reading import Reader, Reading
from rag_windows import Guard, WindowedLM
from rag_windows.answer import encode_request
from rag_windows.calibration.spread import mass_spread
from rag_windows.context import EncodedContext
from rag_windows.guard.deciding import few_short_passages
from rag_windows.guard.disagreement import disagreement, spans_of
from rag_windows.guard.pilot import attention_masses
from rag_windows.guard.plan import FallbackPlan
from rag_windows.kv import PackedWindows
from rag_windows.prompt import Prompt
from rag_windows.request import Request, check_request
from rag_windows.rescaling import Sequential

MOST_TOKENS = 40
"""Greater than any right answer."""

GUARD = Guard()


@dataclass(frozen=True, slots=True)
class Outcome:
    """One question.

    Attributes:
        context: number of its context; questions of one context go together.
        windows: whether the answer with windows is right.
        ordinary: whether the answer from one prompt is.
        few: whether "few short passages" speaks, with its default numbers.
        spread: of the attention, or None where it can't be measured.
        disagreement: nats, or None likewise.
    """

    context: int
    windows: bool
    ordinary: bool
    few: bool
    spread: float | None
    disagreement: float | None

    @property
    def by_default(self) -> bool:
        """Whether ``fallback="sequential"`` answers from one prompt."""
        return self.few


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds a question by ``WindowedLM.generate``, medians, nothing kept between questions.

    Attributes:
        windows: without a guard.
        ordinary: from one prompt.
        guarded: with the guard's defaults.
        agreed: answers and decisions of the three that are those of the `Outcome`.
        compared: how many were held against it.
    """

    windows: float
    ordinary: float
    guarded: float
    agreed: int
    compared: int


class Asker:
    """Asks the questions of a case.

    Args:
        lm: the case's model.
        case: what is asked.
    """

    def __init__(self, lm: WindowedLM, case: Case) -> None:
        self.lm = WindowedLM(
            lm.model, tokenizer=lm.tokenizer, max_window_tokens=case.max_window_tokens
        )
        self.case = case
        self._reader = Reader(self.lm)
        self._prompt = Prompt(self.lm.tokenizer)

    def ask(self, contexts: int, seed: int) -> list[Outcome]:
        """Ask all questions of so many contexts."""
        return [
            outcome
            for number, group in enumerate(self.case.groups(contexts, seed))
            for outcome in self._group(number, group)
        ]

    def time(self, contexts: int, seed: int, outcomes: list[Outcome]) -> Timing:
        """Ask the first question of so many contexts, in the three ways in turn.

        Args:
            contexts: how many; one before them warms everything up and is not counted.
            seed: as it was asked with.
            outcomes: of these contexts, and of more.
        """
        found: dict[int, Outcome] = {}
        for outcome in outcomes:
            found.setdefault(outcome.context, outcome)
        seconds: list[tuple[float, ...]] = []
        agreed = 0
        for number, group in enumerate(self.case.groups(contexts + 1, seed)):
            question = group.questions[0]
            passages = scored(group, question)
            made = [
                self.lm.generate(
                    list(question.messages),
                    passages,
                    method=method,
                    max_new_tokens=MOST_TOKENS,
                    do_sample=False,
                    citations=False,
                    fallback=fallback,
                )
                for method, fallback in (
                    (self.case.method, None),
                    (Sequential(), None),
                    (self.case.method, GUARD),
                )
            ]
            expected = found.get(number)
            if not number or expected is None:
                continue
            seconds.append(tuple(one.timings.total_s for one in made))
            right = [one.text.strip() == question.answer for one in made]
            taken = made[2].fallback is not None and made[2].fallback.taken
            agreed += right[0] == expected.windows
            agreed += right[1] == expected.ordinary
            agreed += taken == expected.by_default
        medians = [statistics.median(column) for column in zip(*seconds, strict=True)]
        return Timing(medians[0], medians[1], medians[2], agreed, 3 * len(seconds))

    def _group(self, number: int, group: Group) -> list[Outcome]:
        prepared = self._reader.prepare(group)
        ordinary = self._reader.read(self._reader.encode(prepared, Sequential()), prepared)
        requests = [self._request(group, question) for question in group.questions]
        context: EncodedContext | None = None
        if self.case.method.combination is None:
            context = encode_request(self.lm._encoder, requests[0])
            windows: list[Reading] = self._reader.read(context, prepared)
        else:
            windows = read_ensembles(self._reader, prepared, [self.case.method])[0]
        return [
            self._outcome(number, read.right, other.right, request, context)
            for read, other, request in zip(windows, ordinary, requests, strict=True)
        ]

    def _outcome(
        self,
        number: int,
        windows: bool,
        ordinary: bool,
        request: Request,
        context: EncodedContext | None,
    ) -> Outcome:
        few = few_short_passages(request, FallbackPlan(GUARD, None, request)) is not None
        spread, nats = (None, None) if context is None else self._signals(context, request)
        return Outcome(number, windows, ordinary, few, spread, nats)

    def _request(self, group: Group, question: Question) -> Request:
        return check_request(
            self._prompt,
            list(question.messages),
            group.passages,
            prefix=None,
            method=self.case.method,
            max_window_tokens=self.case.max_window_tokens,
            position_limit=None,
        )

    def _signals(self, context: EncodedContext, request: Request) -> tuple[float, float | None]:
        """Spread and disagreement, as the guard takes them."""
        decoder, query = self.lm._decoder, request.parts.query_ids
        masses = attention_masses(decoder, context, query, {}, GUARD.rows)
        if self.case.method.selection is not None or not isinstance(context.windows, PackedWindows):
            return mass_spread(masses), None
        windows = request.parts.windows
        spans = spans_of(
            [len(one.ids) for one in windows], [one.passage for one in windows], masses
        )
        nats = disagreement(decoder, context, context.windows, query, spans, GUARD.asked)
        return mass_spread(masses), nats
