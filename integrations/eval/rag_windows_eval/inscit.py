"""INSCIT (Wu et al., TACL 2023, arXiv:2207.00746): its data, passages to search, predictions.

The data file is an object, conversation id -> ``{"turns": [...]}``. A turn has a ``context``, the
messages so far with the user's question last, and one or two ``labels``, each with a response, its
type and the passages that it rests on (none where nothing was found). Other fields are not read.
"""

from __future__ import annotations

import functools
import json
import re
import string
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field, field_validator

from rag_windows.calibration import ARTICLES, bag_f1
from rag_windows.errors import DataError
from rag_windows.passage import Passage
from rag_windows.visible_text import encodable
from rag_windows_eval.chatrag import chatrag_f1
from rag_windows_eval.files import Name, read, shown, validated, write_whole
from rag_windows_eval.task import AnswerRecord, Array, MetricScore, Reference, Task, TaskExample

TITLES = " - "
"""Between a page's title and those of its sections."""

_DELETED = dict.fromkeys(map(ord, string.punctuation))
_HEADERS = (["id", "text", "title"], ["id", "text"])


class _Evidence(BaseModel):
    passage_id: str
    passage_titles: list[str]
    passage_text: str

    def made(self) -> Passage:
        title = TITLES.join(self.passage_titles) or None
        return Passage(self.passage_text, self.passage_id, title)


class _Label(BaseModel):
    response: str
    responseType: str  # noqa: N815 - the file's name
    evidence: list[_Evidence]

    def reference(self) -> Reference:
        ids = dict.fromkeys(one.passage_id for one in self.evidence)
        return Reference(self.response, self.responseType, tuple(ids))


class _Turn(BaseModel):
    context: list[str]
    labels: Annotated[list[_Label], Field(min_length=1)]

    @field_validator("context")
    @classmethod
    def _odd(cls, value: list[str]) -> list[str]:
        if len(value) % 2 == 0:
            raise ValueError(
                "user and agent must take turns, and the last turn must be the user's question"
            )
        return value

    def example(self, name: str, number: int, passages: dict[str, Passage]) -> TaskExample:
        """The turn's example; what it rests on is added to the file's passages."""
        for one in (one for label in self.labels for one in label.evidence):
            # Section titles may be spelled differently; the first spelling stays.
            passages.setdefault(one.passage_id, one.made())
        references = tuple(label.reference() for label in self.labels)
        named = dict.fromkeys(name for one in references for name in one.evidence)
        roles = cycle(("user", "assistant"))
        return TaskExample(
            key=f"{name}/{number}",
            messages=tuple({"role": next(roles), "content": text} for text in self.context),
            references=references,
            group=name,
            kinds=tuple(dict.fromkeys(label.responseType for label in self.labels)),
            passages=tuple(passages[one] for one in named),
            details={"turn": number},
        )


class _Conversation(BaseModel):
    turns: list[_Turn]


class InscitTask(Task):
    """INSCIT, ready to be asked.

    Examples are one a turn, ``conversation/turn`` as their keys, turns counted from 1. A turn's
    kinds are the types of its labels: where two annotators chose differently, it counts in both.
    """

    @classmethod
    def read(
        cls,
        path: str | Path,
        *,
        corpus: str | Path | None = None,
        evidence: int = 1,
    ) -> InscitTask:
        """Read INSCIT's data file, and the passages to search, which are else its own evidence.

        ``evidence`` is how many passages count as that of an answer.
        """
        source, examples = read(path), list[TaskExample]()
        passages: dict[str, Passage] = {}
        for name, conversation in source.json(dict[str, _Conversation]).items():
            for number, turn in enumerate(conversation.turns, start=1):
                examples.append(turn.example(name, number, passages))
        if not examples:
            raise DataError(
                f"{path} holds no turn. Is it INSCIT's data file (dev.json or test.json)?"
            )
        pool, stamp = tuple(passages.values()), None
        if corpus is not None:
            pool, stamp = read_corpus(corpus)
        settings = {"data": source.stamp, "corpus": stamp, "evidence": evidence}
        return cls(name="inscit", examples=examples, settings=settings, pool=pool)

    def notes(self) -> list[str]:
        """How many passages of evidence are not in the pool."""
        named = {name for one in self.examples for name in one.evidence}
        missing = len(named - {one.id for one in self.pool})
        if not missing:
            return []
        return [
            f"{missing} evidence passages are not in the corpus, so no retriever can find them."
        ]

    def scores(
        self, examples: Sequence[TaskExample], records: Sequence[AnswerRecord]
    ) -> list[MetricScore]:
        """The official figures over these examples."""
        named = [evidence_of(one, self.settings["evidence"]) for one in records]
        return inscit_scores(examples, [one.answer for one in records], named)


class _Named(BaseModel):
    """A passage of a corpus in JSON."""

    id: Name
    text: str
    title: str | None = None


def read_corpus(path: str | Path) -> tuple[tuple[Passage, ...], dict[str, str]]:
    """Passages to search, in the order of the file, and its name and digest for a manifest.

    A line is a JSON object with "id", "text" and perhaps "title", or has these with tabs between
    them, quoted as in CSV or not; INSCIT's own script writes several headers. " [SEP] " between
    titles becomes " - ", as they are joined in INSCIT's data file.
    """
    source = read(path)
    found: dict[str, Passage] = {}
    for place, line in source.lines():
        if line.lstrip().startswith("{"):
            one = validated(_Named, line, place)
        else:
            columns = [_unquoted(column) for column in line.split("\t")]
            if columns in _HEADERS:
                continue
            if not 2 <= len(columns) <= 3:
                raise DataError(
                    f"{place} must be a JSON object, or id, text and title separated by tabs."
                )
            title = TITLES.join(re.split(r"\s*\[SEP\]\s*", "".join(columns[2:])))
            one = _Named(id=columns[0], text=columns[1], title=title)
        passage = Passage(one.text, one.id, one.title or None)
        name = str(passage.id)
        if not name or name in found:
            raise DataError(f"{place}: the id {shown(name)} is empty or appears twice. Change it.")
        found[name] = passage
    if not found:
        raise DataError(f"{path} holds no passage. Download or write it again.")
    return tuple(found.values()), source.stamp


def _unquoted(text: str) -> str:
    quoted = re.fullmatch(r'"((?:[^"]|"")*)"', text)
    return quoted[1].replace('""', '"') if quoted else text


def squad_words(text: str) -> list[str]:
    """Words as SQuAD counts them (Rajpurkar et al., EMNLP 2016).

    ASCII punctuation is deleted, so that "don't" becomes "dont", and then a, an and the.
    """
    return ARTICLES.sub(" ", text.lower().translate(_DELETED)).split()


def spaced(text: str) -> str:
    """The text with one blank between its words, which are those of spaCy's English rules.

    Their time grows with the square of a run of punctuation, so what has more than 5,000 characters
    stays in one piece. spaCy refuses half a surrogate pair, which becomes U+FFFD.
    """
    split, found = _english(), list[str]()
    for word in encodable(text).split():
        found += [word] if len(word) > 5000 else [token.text for token in split(word)]
    return " ".join(found)


@functools.cache
def _english() -> Callable[[str], Iterable[Any]]:
    import spacy

    # Not the pipeline around it, which refuses texts of more than a million characters.
    tokenizer: Callable[[str], Iterable[Any]] = spacy.blank("en").tokenizer
    return tokenizer


def bleu_score(answers: Sequence[str], references: Sequence[Sequence[str]]) -> MetricScore:
    """SacreBLEU (Post, WMT 2018) with its defaults: 13a tokens, 4-grams, exponential smoothing.

    Its sums over sentences are right n-grams, n-grams, length, length of the closest reference.
    """
    from sacrebleu.metrics.bleu import BLEU

    # `force` only keeps it from asking on stderr whether the text was tokenized before.
    metric = BLEU(force=True)
    rows = []
    for answer, right in zip(answers, references, strict=True):
        one = metric.corpus_score([answer], [[text] for text in right])
        rows.append((*one.counts, *one.totals, one.sys_len, one.ref_len))
    return MetricScore("bleu", np.array(rows, dtype=np.float64), bleu)


def bleu(sums: Array) -> Array:
    """BLEU-4 in percent, (...), of `bleu_score`'s sums, (..., 10)."""
    from sacrebleu.metrics.bleu import BLEU

    def one(row: Array) -> float:
        *counts, length, reference = row.astype(int).tolist()
        right, total = counts[:4], counts[4:]
        return BLEU.compute_bleu(right, total, length, reference, smooth_method="exp").score

    return np.apply_along_axis(one, -1, sums)


def inscit_scores(
    examples: Sequence[TaskExample], answers: Sequence[str], evidence: Sequence[Collection[str]]
) -> list[MetricScore]:
    """Score answers and ids of the passages that they rest on, as INSCIT's own script does.

    The best of the references counts. Words are those of spaCy's English rules, normalised as in
    SQuAD, and for "chatrag_f1" those of ChatRAG-Bench, of the answer as it was written. An empty
    list of evidence scores 0, also where the reference names no passage.
    """
    plain, right, response, found, overlap = [], [], [], [], []
    for example, answer, named in zip(examples, answers, map(set, evidence), strict=True):
        texts = [one.text for one in example.references]
        plain.append(_plain(answer))
        right.append([_plain(text) for text in texts])
        words = squad_words(spaced(plain[-1]))
        pairs = [(words, squad_words(spaced(text))) for text in right[-1]]
        response.append(100 * max(bag_f1(*pair, both_empty=1.0) for pair in pairs))
        sets = [set(one.evidence) for one in example.references] if named else []
        shares = (200 * len(named & one) / (len(named) + len(one)) for one in sets)
        found.append(max(shares, default=0.0))
        overlap.append(chatrag_f1(answer, texts))
    return [
        MetricScore.mean("response_f1", response),
        bleu_score(plain, right),
        MetricScore.mean("evidence_f1", found),
        MetricScore.mean("chatrag_f1", overlap),
    ]


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


class _Predicted(BaseModel):
    passage_id: str


class _Output(BaseModel):
    response: str
    evidence: list[_Predicted]


class _Prediction(BaseModel):
    conv_id: str
    turn_id: Annotated[int, BeforeValidator(lambda one: int(one) if isinstance(one, str) else one)]
    context: list[str]
    output: _Output


def evidence_of(record: AnswerRecord, count: int = 1) -> tuple[str, ...]:
    """Ids of so many passages that got most attention; unmeasured ones follow, best retrieved."""
    # The sort is stable: equal ones stay in the order of the ranking.
    ranked = sorted(record.passages, key=lambda one: 1.0 if one.mass is None else -one.mass)
    return tuple(dict.fromkeys(one.id for one in ranked if one.id is not None))[:count]


def write_predictions(
    path: str | Path,
    examples: Sequence[TaskExample],
    records: Mapping[str, AnswerRecord],
    evidence: int = 1,
) -> None:
    """Write one condition's answers, by the examples' keys, as INSCIT's script reads them."""
    rows = [
        {
            "conv_id": example.group,
            "turn_id": example.details["turn"],
            "context": [message["content"] for message in example.conversation],
            "output": {
                "response": record.answer,
                "evidence": [{"passage_id": name} for name in evidence_of(record, evidence)],
            },
        }
        for example in examples
        if (record := records.get(example.key)) is not None
    ]
    write_whole(path, json.dumps(rows, ensure_ascii=False, indent=1) + "\n")


def read_predictions(
    path: str | Path, examples: Sequence[TaskExample]
) -> list[tuple[str, tuple[str, ...]]]:
    """Answers with the ids of their evidence, in the order of the examples; one for each."""
    listed = read(path).json(list[_Prediction])
    rows = {f"{row.conv_id}/{row.turn_id}": row for row in listed}
    found = []
    for example in examples:
        row = rows.get(example.key)
        # The official script joins a context before it compares.
        context = " ".join(message["content"] for message in example.conversation)
        if row is None or " ".join(row.context) != context:
            raise DataError(
                f"{path}: turn {shown(example.key)} has no prediction, or one with another "
                "context. Predict every turn of the data file."
            )
        found.append((row.output.response, tuple(one.passage_id for one in row.output.evidence)))
    if len(listed) > len(examples):
        raise DataError(
            f"{path}: a turn is predicted twice, or is not in the data file. Predict "
            "every turn of the data file once."
        )
    return found


def score_inscit(
    data: Path, predictions: Path, *, by_type: bool = False
) -> dict[str, dict[str, float]]:
    """The figures of INSCIT's own script, in its order, ChatRAG-Bench's F1, and how many turns.

    By response type, or under "" for all turns. A turn whose annotators chose different types
    counts in each of them, with all its references.
    """
    examples = InscitTask.read(data).examples
    pairs = list(zip(examples, read_predictions(predictions, examples), strict=True))
    made = {}
    for kind in dict.fromkeys(kind for one in examples for kind in one.kinds) if by_type else [""]:
        some = [(one, *said) for one, said in pairs if not by_type or kind in one.kinds]
        values = {one.name: one.value for one in inscit_scores(*zip(*some, strict=True))}
        official = ("evidence_f1", "bleu", "response_f1", "chatrag_f1")
        made[kind] = {**{name: values[name] for name in official}, "n": len(some)}
    return made
