"""Questions with their answers, as a report shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rag_windows.evaluation.example import Example
from rag_windows.evaluation.record import Record
from rag_windows.evaluation.report.choosing import chosen
from rag_windows.evaluation.report.passages import PassageList, passage_list
from rag_windows.evaluation.report.reported import ReportedRun, deepest
from rag_windows.evaluation.report.sentences import metric_name
from rag_windows.evaluation.report.shown import Shown, listed, name, number, share, shown, some

_MESSAGES = 12
_REFERENCES = 8


@dataclass(frozen=True, slots=True)
class Message:
    """Of a conversation."""

    role: str
    text: Shown


@dataclass(frozen=True, slots=True)
class ReferenceView:
    """A right answer with its kind."""

    text: Shown
    kind: str


@dataclass(frozen=True, slots=True)
class AnswerView:
    """What one arm answered.

    Attributes:
        arm: name.
        score: in percent, or a dash.
        text: empty where there is no answer.
        notes: sentences: an error, a cut, where the rest of the attention went.
    """

    arm: str
    score: str
    text: Shown
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExampleView:
    """One question.

    Attributes:
        key: of the example.
        question: on one line.
        why: it was chosen.
        earlier: messages before the fold's end, with what is left out told in ``earlier_note``.
        earlier_note: empty where nothing is left out.
        asked: the last message.
        references: right answers.
        references_note: tells of those that are not shown.
        answers: one an arm of the most passages.
        more_answers: likewise of fewer.
        passages: all that was read.
    """

    key: str
    question: str
    why: str
    earlier: tuple[Message, ...]
    earlier_note: str
    asked: Message
    references: tuple[ReferenceView, ...]
    references_note: str
    answers: tuple[AnswerView, ...]
    more_answers: tuple[AnswerView, ...]
    passages: PassageList


def examples(run: ReportedRun, count: int) -> list[ExampleView]:
    """The questions that `choosing` takes, at most ``count``."""
    return [_view(run, run.examples[one.place], one.why) for one in chosen(run, count)]


def _view(run: ReportedRun, example: Example, why: str) -> ExampleView:
    earlier, last = example.messages[:-1], example.messages[-1]
    kept = earlier[-_MESSAGES:]
    left = len(earlier) - len(kept)
    references = example.references[:_REFERENCES]
    more = len(example.references) - len(references)
    deep = deepest(run.summary)
    others = [arm for arm in run.summary.arms if arm not in deep]
    records = [
        record for arm in deep if (record := run.records.get((arm.name, example.key))) is not None
    ]
    return ExampleView(
        key=name(example.key),
        question=name(example.question, 160),
        why=why,
        earlier=tuple(_message(one) for one in kept),
        earlier_note=f"{some(left, 'earlier message')} not shown" if left else "",
        asked=_message(last),
        references=tuple(
            ReferenceView(shown(one.text), name(one.kind or "")) for one in references
        ),
        references_note=f"{some(more, 'more right answer')} not shown" if more else "",
        answers=tuple(_answer(run, arm.name, example.key) for arm in deep),
        more_answers=tuple(_answer(run, arm.name, example.key) for arm in others),
        passages=passage_list(records, example.evidence, run.texts),
    )


def _message(message: Mapping[str, str]) -> Message:
    return Message(name(message["role"]), shown(message["content"]))


def _answer(run: ReportedRun, arm: str, key: str) -> AnswerView:
    record = run.records.get((arm, key))
    value = run.values.of.get((arm, key))
    if record is None:
        return AnswerView(name(arm), "–", Shown(""), ("No record: not asked yet.",))
    return AnswerView(name(arm), number(value), shown(record.answer), tuple(_notes(record)))


def _notes(record: Record) -> Sequence[str]:
    found = []
    if record.error is not None:
        found.append(f"Error: {name(record.error, 400)}")
    elif not record.answer.strip():
        found.append("An empty answer.")
    if record.finish_reason == "length":
        found.append("Ended at the limit of its length.")
    if record.left_out:
        found.append(f"{some(record.left_out, 'passage')} did not fit and were left out.")
    if record.scores:
        ranked = sorted(record.scores.items(), key=lambda one: -one[1])
        found.append(
            "Log-probabilities: " + listed([f"{name(k, 40)} {number(v, 2)}" for k, v in ranked], 6)
        )
    if record.prefix_mass is not None and record.query_mass is not None:
        passages = sum(one.mass or 0.0 for one in record.passages)
        found.append(
            f"Attention: passages {share(passages)}, instruction {share(record.prefix_mass)}, "
            f"question and answer {share(record.query_mass)}."
        )
    found.extend(f"Note: {name(one, 300)}" for one in record.notes[:5])
    if len(record.notes) > 5:
        found.append(f"{some(len(record.notes) - 5, 'more note')} in records.jsonl.")
    return found


def about_values(run: ReportedRun) -> str:
    """Which metric stands beside the answers."""
    if not run.values.metric:
        return "No metric of this dataset judges single answers, so none stands beside them."
    return f"Beside each answer stands its {metric_name(run.values.metric)}, percent."
