"""Classification by demonstrations in windows, and scores of given choices."""

from __future__ import annotations

import math
import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Literal, TypedDict

import torch

from rag_windows.engine import Engine
from rag_windows.errors import InputError, LimitError
from rag_windows.icl.scoring import Ids, Score, likelihoods
from rag_windows.methods import Method
from rag_windows.passage import Note
from rag_windows.prompt.builder import Prompt, PromptParts
from rag_windows.prompt.conversation import Conversation
from rag_windows.request import BatchRequest, Messages, Request
from rag_windows.sampling import whole_number

Normalize = Literal["sum", "mean"]

UNLIMITED_BUDGET = 2048
"""Tokens of a window, for a model that names no limit of its positions."""

_LEAST = 2.0**-23
"""Share of a label's probability that its longer versions leave it at least: fp32 knows no less."""

_FIELD = re.compile(r"(\{text\}|\{label\})")


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A text with its right label; an `InputError` if one of them is no string, or blank."""

    text: str
    label: str

    def __post_init__(self) -> None:
        for name, value in (("text", self.text), ("label", self.label)):
            check_text(f"A demonstration's {name}", value)


DemonstrationLike = Demonstration | tuple[str, str] | Sequence[str] | Mapping[str, Any]
"""A demonstration, a pair (text, label), or a mapping with these two keys."""


def check_text(name: str, value: object) -> None:
    """Refuse what is no string, or blank."""
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{name} must be a string that is not blank, not {value!r}.")


def demonstrations_of(values: Sequence[DemonstrationLike]) -> list[Demonstration]:
    """Demonstrations as callers give them; the error names one by its index."""
    if isinstance(values, str | Mapping | Demonstration):
        raise InputError("demonstrations must be a list of (text, label) pairs. Wrap it in [].")
    made = []
    for index, value in enumerate(values):
        try:
            made.append(demonstration_of(value))
        except (InputError, TypeError) as error:
            raise InputError(
                f"Demonstration {index} must be a (text, label) pair, a mapping with the keys "
                f"'text' and 'label', or a Demonstration, not {value!r}: {error}"
            ) from error
    return made


def demonstration_of(value: DemonstrationLike) -> Demonstration:
    """One of them; a TypeError or an `InputError` says what is wrong."""
    if isinstance(value, Demonstration):
        return value
    if isinstance(value, str):
        raise TypeError("it is a single string")
    return Demonstration(**value) if isinstance(value, Mapping) else Demonstration(*value)


@dataclass(frozen=True, slots=True)
class Template:
    r"""Forms of a demonstration and of the question.

    ``{text}`` and ``{label}`` stand for the two; no other brace means anything, in the forms or in
    the texts.

    Attributes:
        demonstration: holds ``{text}`` and ``{label}``.
        query: holds ``{text}``; what a model goes on from. Empty: the demonstration up to its
            label, without the white space before it.
        separator: stands between two demonstrations of one window. Windows themselves end with a
            blank line, as passages do.

    Raises:
        InputError: a form lacks its ``{text}`` or ``{label}``, or the separator is empty.
    """

    demonstration: str = "{text}: {label}"
    query: str = ""
    separator: str = "\n"

    def __post_init__(self) -> None:
        given = (self.demonstration, self.query, self.separator)
        if not all(isinstance(part, str) for part in given):
            raise InputError(f"The template's parts must be strings, not {given!r}.")
        for name in ("{text}", "{label}"):
            if name not in self.demonstration:
                raise InputError(
                    f"The template's demonstration {self.demonstration!r} has no {name}. Write "
                    'something like "{text}: {label}".'
                )
        if not self.query:
            derived = self.demonstration.partition("{label}")[0].rstrip()
            object.__setattr__(self, "query", derived)
        if "{text}" not in self.query or "{label}" in self.query:
            raise InputError(
                f"The template's query {self.query!r} must hold {{text}} and no {{label}}. Give "
                'one beside the demonstration, such as ("{label}: {text}", "{text}:").'
            )
        if not self.separator:
            raise InputError(
                'The template\'s separator is empty. Use "\\n" to put each demonstration on a line.'
            )

    @classmethod
    def of(cls, value: Template | str | tuple[str, str] | None) -> Template:
        """A template from itself, a demonstration's form, a pair with the query's, or None."""
        if value is None:
            return cls()
        if isinstance(value, Template):
            return value
        if isinstance(value, str):
            return cls(value)
        if isinstance(value, tuple) and len(value) == 2:
            return cls(*value)
        raise InputError(
            f"template must be a Template, a string or a pair of strings, not {value!r}."
        )

    @property
    def gap(self) -> str:
        """The white space between a query and its label, where they are one text."""
        before = self.demonstration.partition("{label}")[0]
        return "" if self.query[-1].isspace() else before[len(before.rstrip()) :]

    def show(self, demonstration: Demonstration) -> str:
        """A demonstration in its form."""
        return _fill(self.demonstration, demonstration.text, demonstration.label)

    def ask(self, text: str) -> str:
        """A text in the form of the query."""
        return _fill(self.query, text, "")


def _fill(form: str, text: str, label: str) -> str:
    """In one pass, so that a field's name inside of a text stays what it is."""
    values = {"{text}": text, "{label}": label}
    return "".join(values.get(part, part) for part in _FIELD.split(form))


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
    """Label texts, as `WindowedLM.classify` describes it.

    With content-free texts it is contextual calibration (https://arxiv.org/abs/2102.09690, section
    5): ``q = softmax(W p)``, ``W = diag(p_cf)^-1``, ``p_cf`` the mean of the label probabilities
    over those texts. The label of highest ``q`` is that of highest ``log p - log p_cf``, and here
    the softmax of this difference is the probability.
    """
    if normalize not in ("sum", "mean"):
        raise InputError(f"normalize={normalize!r} must be 'sum' or 'mean'.")
    if windows is not None and window_tokens is not None:
        raise InputError("windows and window_tokens can't both be given. Leave one of them out.")
    for what, number in (("windows", windows), ("window_tokens", window_tokens)):
        if number is not None:
            whole_number(what, number)
    form, reader, prompt = Template.of(template), engine.reading_all(method), engine.text.prompt
    shown = demonstrations_of(demonstrations)
    neutral = [calibrate_with] if isinstance(calibrate_with, str) else list(calibrate_with or ())
    for kind, given in (("Text", texts), ("Content-free text", neutral)):
        for index, text in enumerate(given):
            check_text(f"{kind} {index}", text)
    names, ids = _labels(prompt, form, labels, shown)
    if not texts:
        return []
    questions = [
        replace(Conversation.of(form.ask(text), prefix), plain=True) for text in (*texts, *neutral)
    ]
    packed: list[str] = []
    if shown:
        cut = [prompt.around(one) for one in questions]
        budget = _budget(engine, reader, cut, max(map(len, ids)), window_tokens)
        continued = prompt.is_chat or bool(questions[0].system)
        packed = _packed(prompt, form, shown, budget, windows, continued)
    # Windows are as long as their demonstrations, which were counted.
    cut_by = {"prompt": prompt.without_header(), "max_window_tokens": sys.maxsize}
    asked = BatchRequest(questions[0], packed, method=reader)
    sums, parts = read(engine, questions, asked, ids, **cut_by)
    scores = torch.tensor([label_scores(ids, one, normalize) for one in sums], dtype=torch.float64)
    if neutral:
        scores = scores.log_softmax(-1)
        bias = scores[len(texts) :].logsumexp(0) - math.log(len(neutral))
        scores = scores - bias.clamp(min=math.log(sys.float_info.min))
    return [
        Classification(
            text=text,
            label=names[int(row.argmax())],
            scores=dict(zip(names, row.tolist(), strict=True)),
            probabilities=dict(zip(names, row.softmax(-1).tolist(), strict=True)),
            windows=len(parts.windows),
            notes=parts.notes,
        )
        for text, row in zip(texts, scores, strict=False)
    ]


def _labels(
    prompt: Prompt,
    form: Template,
    labels: Sequence[str] | None,
    demonstrations: Sequence[Demonstration],
) -> tuple[tuple[str, ...], list[Ids]]:
    """Labels, checked and tokenized; those of the demonstrations, by their first one, for None."""
    if isinstance(labels, str):
        raise InputError("labels must be a list of strings, not one string. Wrap them in [].")
    if labels is None:
        labels = list(dict.fromkeys(one.label for one in demonstrations))
    for label in labels:
        check_text("A label", label)
    if len(labels) < 2:
        raise InputError(f"Labels to choose from must be at least two, not {list(labels)}.")
    for index, one in enumerate(demonstrations):
        if one.label not in labels:
            raise InputError(
                f"Demonstration {index} has the label {one.label!r}, which is not one of "
                f"{list(labels)}. Add it to the labels, or leave the demonstration out."
            )
    gap = "" if prompt.is_chat else form.gap
    ids = [tuple(prompt.encode_text(gap + label, continuation=True)) for label in labels]
    for index, tokens in enumerate(ids):
        if not tokens or tokens in ids[:index]:
            raise InputError(
                f"The label {labels[index]!r} can't be told from the others of {list(labels)}: it "
                "is given twice, has the same tokens as another, or has none. Use other words."
            )
    return tuple(labels), ids


def _budget(
    engine: Engine, method: Method, cut: Sequence[tuple[Ids, Ids]], answer: int, asked: int | None
) -> int:
    """Tokens of a window that prefixes, questions and an answer leave."""
    limit, refinement = engine.position_limit, method.refinement
    if limit is None:
        return asked or UNLIMITED_BUDGET
    left = limit - max(len(before) + len(query) for before, query in cut) - answer
    if left <= 0:
        raise LimitError(
            f"The prefix, the longest text and the longest label make {limit - left} tokens, but "
            f"the model has {limit} positions, so no demonstration would fit. Shorten the text."
        )
    if refinement is not None and refinement.positions == "continue":
        # A further pass stands behind its window.
        left = min(left, (limit - max(len(before) for before, _ in cut)) // 2)
    if asked is None:
        # In eighths of the positions: texts of other lengths mostly find the same windows cached.
        step = limit // 8
        return left // step * step if 0 < step <= left else left
    if asked > left:
        raise LimitError(
            f"window_tokens={asked} is too large: the prefix, the longest text and its label "
            f"leave {left} of the model's {limit} positions. Use at most {left}."
        )
    return asked


def _packed(
    prompt: Prompt,
    form: Template,
    demonstrations: Sequence[Demonstration],
    budget: int,
    windows: int | None,
    continued: bool,
) -> list[str]:
    """Texts of windows, about ``budget`` tokens at most, of whole demonstrations, in order.

    Slightly more where a tokenizer makes more tokens of neighbours than of each by itself.
    """
    shown = [form.show(one) for one in demonstrations]
    texts = [f"{one}\n\n" for one in ("", *(text + form.separator for text in shown))]
    around, *sizes = (len(prompt.encode_text(one, continuation=continued)) for one in texts)
    for index, size in enumerate(sizes):
        if size > budget:
            raise LimitError(
                f"Demonstration {index} ({shown[index][:40]!r}...) needs a window of {size} "
                f"tokens, but a window holds {budget}. Shorten it or leave it out; demonstrations "
                "are never cut."
            )
    packed = pack([size - around for size in sizes], budget - around, windows)
    return [form.separator.join(shown[one.start : one.stop]) for one in packed]


def pack(sizes: Sequence[int], budget: int, windows: int | None = None) -> list[range]:
    """Put neighbours into as few windows as hold them, or into so many, all about as full.

    Each size is at most ``budget``. Ranges of indices follow each other, none of them is empty.
    """
    if windows is not None and windows > len(sizes):
        raise InputError(
            f"windows must be between 1 and {len(sizes)}, the number of demonstrations, not "
            f"{windows}."
        )
    sums = [0, *accumulate(sizes)]
    fewest = start = 0
    while start < len(sizes):
        start = bisect_right(sums, sums[start] + budget) - 1
        fewest += 1
    count = windows or fewest
    if count < fewest:
        raise LimitError(
            f"{len(sizes)} demonstrations with {sums[-1]} tokens do not fit windows={count}, as a "
            f"window holds {budget} tokens. Use windows={fewest} or more."
        )
    # The first demonstration from which on the last windows hold all the rest.
    earliest = [len(sizes)]
    for _ in range(count):
        earliest.append(bisect_left(sums, sums[earliest[-1]] - budget))
    ends = [0]
    for left in range(count - 1, 0, -1):
        ideal = sums[-1] * (count - left) / count
        near = bisect_left(sums, ideal)
        if near and ideal - sums[near - 1] < sums[near] - ideal:
            near -= 1
        furthest = bisect_right(sums, sums[ends[-1]] + budget) - 1
        least = max(earliest[left], ends[-1] + 1)
        ends.append(max(least, min(near, furthest, len(sizes) - left)))
    return [range(a, b) for a, b in pairwise([*ends, len(sizes)])]


def label_scores(ids: Sequence[Ids], sums: Sequence[float], normalize: Normalize) -> list[float]:
    """Labels' scores from the summed log-probabilities of their tokens, in nats.

    ``sums`` counts "art" whenever the answer is "article": here each label gets what is not a
    longer one's, ``log(P(label) - sum of P(longer))``.
    """
    values = list(sums)
    # The longest first: what these keep is what the shorter ones lose.
    for index in sorted(range(len(sums)), key=lambda place: -len(ids[place])):
        own = ids[index]
        taken = sum(
            math.exp(values[place] - sums[index])
            for place, other in enumerate(ids)
            if len(other) > len(own) and other[: len(own)] == own
        )
        values[index] += math.log(max(1.0 - taken, _LEAST))
    if normalize == "mean":
        return [value / len(own) for value, own in zip(values, ids, strict=True)]
    return values


def read(
    engine: Engine,
    questions: Sequence[Messages],
    asked: BatchRequest,
    choices: Sequence[Ids],
    **cut_by: Any,
) -> tuple[list[list[float]], PromptParts]:
    """Log-probabilities of choices behind each question (at least one), and the first one's prompt.

    Passages are encoded once for all; once for each prefix, to be exact: conversations may bring
    system messages of their own. Of ``asked`` all but the query holds for every question;
    ``cut_by`` are further arguments of `Request.of`.
    """
    asked = replace(asked, max_new_tokens=max(map(len, choices)))

    def ask(query: Messages) -> Request:
        return Request.of(engine, replace(asked, query=query), **cut_by)

    first = ask(questions[0])
    prompt, windows = engine.text.prompt, bool(first.parts.windows)
    cut = [prompt.around(one, prefix=asked.prefix, windows=windows) for one in questions]
    alike: dict[Ids, list[int]] = {}
    for index, (before, _) in enumerate(cut):
        alike.setdefault(before, []).append(index)
    requests = []
    for own in alike.values():
        # The longest one is checked for all of them, and all before any work.
        most = max(own, key=lambda index: len(cut[index][1]))
        requests.append(ask(questions[most]) if most else first)
    sums: dict[int, list[float]] = {}
    for request, own in zip(requests, alike.values(), strict=True):
        pairs = [(cut[index][1], ids) for index in own for ids in choices]
        found = iter(likelihoods(engine.decoder, request.encode(), pairs))
        sums |= {index: [next(found).logprob for _ in choices] for index in own}
    return [sums[index] for index in range(len(questions))], first.parts


def score_choices(
    engine: Engine, queries: Sequence[Messages], asked: BatchRequest, choices: Sequence[str]
) -> list[list[Score]]:
    """Score choices behind each query; the rest of what was asked holds for all of them."""
    if not choices:
        raise InputError("score needs at least one choice.")
    ids = [tuple(engine.text.prompt.encode_text(one, continuation=True)) for one in choices]
    if () in ids:
        raise InputError(f"Choice {ids.index(())} has no tokens. Leave it out.")
    sums, _ = read(engine, queries, asked, ids)
    return [[Score(*one) for one in zip(choices, row, map(len, ids), strict=True)] for row in sums]
