"""A calibration: every setting answers every example, and what does best becomes a profile."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from rag_windows.calibration.choose import (
    Table,
    bootstrap,
    default_grid,
    search,
    verdict,
)
from rag_windows.calibration.profile import (
    Figure,
    ModelFingerprint,
    Profile,
    Setting,
)
from rag_windows.engine import Engine
from rag_windows.errors import InputError
from rag_windows.kv import Members
from rag_windows.methods import Method, resolve
from rag_windows.passage import Passage
from rag_windows.prefill import EncodedContext
from rag_windows.prompt.conversation import Conversation
from rag_windows.prompt.visible_text import strict_json
from rag_windows.request import Messages, PassageLike, Request, check_limits

T = TypeVar("T")

_KEYS = ("query", "question", "passages", "answer", "kind")


@dataclass(frozen=True, slots=True)
class Example:
    """One question that stands for those the model will get.

    Attributes:
        query: a question or a conversation, as in `WindowedLM.generate`.
        passages: what the retriever found for it, the useless ones included.
        answer: the right answer, or None for an unlabelled example.
        kind: a word for what kind of question it is; nothing reads it.

    Raises:
        InputError: a field has the wrong type, or the answer is blank.
    """

    query: Messages
    passages: Sequence[PassageLike] = ()
    answer: str | None = None
    kind: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.query, str | Sequence | Conversation):
            raise InputError("An example needs a 'query' (or 'question').")
        if not all(isinstance(text, str | None) for text in (self.answer, self.kind)):
            raise InputError(
                f"An example's answer and kind must be strings: {self.answer!r}, {self.kind!r}."
            )
        if self.answer is not None and not self.answer.strip():
            raise InputError("An example's answer is blank; leave it out where there is none.")
        if isinstance(self.passages, str) or not isinstance(self.passages, Sequence):
            raise InputError(f"An example's passages must be a list, not {self.passages!r}.")
        object.__setattr__(self, "passages", tuple(map(Passage.of, self.passages)))

    @classmethod
    def of(cls, value: Example | Mapping[str, Any]) -> Example:
        """Make an example from one, or from a mapping as a line of JSONL holds it.

        Its keys are ``query`` (or ``question``), ``passages``, ``answer`` and ``kind``; others are
        an `InputError`, so that no field is lost by a typo.
        """
        if isinstance(value, Example):
            return value
        if not isinstance(value, Mapping):
            raise InputError(f"An example must be an Example or a mapping, not {value!r}.")
        if unknown := sorted(str(key) for key in value if key not in _KEYS):
            raise InputError(f"Unknown example keys {unknown}; use {list(_KEYS)}.")
        given = {key: one for key, one in value.items() if one is not None}
        query = given.pop("question", None)
        return cls(**{"query": query, **given})


def read_examples(path: str | Path) -> list[Example]:
    """Read examples from a JSONL file, one a line; an `InputError` names the line."""
    shape = '{"query": "...", "passages": ["...", "..."], "answer": "..."}'
    return read_lines(path, Example.of, shape)


def read_lines(path: str | Path, make: Callable[[Any], T], shape: str) -> list[T]:
    """What is made of the lines of a JSONL file, all of a shape; blank ones are left out."""
    made, place = [], str(path)
    try:
        # Not splitlines(): a JSON string may hold U+2028 and its like as they are.
        for number, line in enumerate(Path(path).read_text("utf-8-sig").split("\n"), start=1):
            place = f"{path}, line {number}"
            if line.strip():
                made.append(make(json.loads(strict_json(line))))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} can't be read: {error}.") from error
    except (ValueError, TypeError, InputError) as error:
        raise InputError(f"{place} is no line such as {shape}: {error}") from error
    if not made:
        raise InputError(f"{path} holds no line such as {shape}.")
    return made


By = Literal["labels", "agreement"]

KEEP_BYTES = 4 << 30
"""Keys and values that are kept for the next round at most; others are encoded again for it."""

FEWEST = 8
"""Examples below which no interval is worth its name."""

Metric = Callable[[str, str], float]
"""From a greedy answer and the right one to a number; more is better."""

OnProgress = Callable[[str, int, int | None], None]
"""Called with what goes on, how much of it is done, and how much there is."""


def calibrate(
    engine: Engine,
    examples: Iterable[Example | Mapping[str, Any]],
    *,
    method: str | Method,
    settings: Sequence[Method] | None,
    by: By | None,
    metric: Metric | None,
    prefix: str | None,
    max_new_tokens: int,
    refine: bool,
    seed: int,
    keep_bytes: int,
    on_progress: OnProgress | None,
) -> Profile:
    """See `WindowedLM.calibrate`."""
    default = resolve(method)
    coarse = list(dict.fromkeys([default, *(settings or default_grid(default))]))
    for one in coarse:
        if not isinstance(one, Method):
            raise InputError(f"settings must be methods such as APE(0.8, 0.7), got {one!r}.")
        if not one.windowed:
            raise InputError(
                f"The method {one.name!r} reads no windows, so there is nothing to calibrate."
            )
    given = [Example.of(example) for example in examples]
    if by not in (None, "labels", "agreement"):
        raise InputError(f"by must be 'labels', 'agreement' or None, got {by!r}.")
    labelled = by == "labels" or (by is None and all(one.answer is not None for one in given))
    if metric is not None and not labelled:
        raise InputError("A metric compares with right answers: give every example one, or by=.")
    if labelled:
        given = [one for one in given if one.answer is not None]
    work = _Measuring(engine, max_new_tokens, metric, keep_bytes, on_progress)
    ready, left_out = work.prepare(given, coarse, prefix, by_labels=labelled)
    if len(ready) < FEWEST:
        raise InputError(
            f"Calibration needs at least {FEWEST} {'labelled ' if labelled else ''}examples that "
            f"can be used, and got {len(ready)}; a few dozen make the choice trustworthy. "
            + " ".join(left_out[:3])
        )
    criteria: tuple[Figure, ...] = ("divergence",)
    if labelled:
        criteria = ("exact match" if metric is None else "metric", "log-probability")
    measure = partial(work.measure, ready)
    choice = search(coarse, default, len(ready), criteria, measure, refine=refine, seed=seed)
    beats_default, sentence = verdict(choice.best, default, choice.held_out)
    chosen = choice.best if beats_default else default
    tried = [*coarse, *choice.fine]
    means = {
        figure: bootstrap([rows[one] for one in tried], seed) for figure, rows in work.table.items()
    }
    return Profile(
        method=chosen,
        best=choice.best,
        default=default,
        beats_default=beats_default,
        verdict=sentence,
        criteria=criteria,
        settings=tuple(
            Setting(one, {figure: found[i] for figure, found in means.items()}, one in choice.fine)
            for i, one in enumerate(tried)
        ),
        held_out=choice.held_out,
        examples=len(ready),
        folds=choice.folds,
        seed=seed,
        left_out=tuple(left_out),
        model=ModelFingerprint.of(engine.model),
    )


@dataclass(frozen=True, slots=True)
class _Ready:
    """One example, tokenized for windows, and the answer that every setting is held against.

    That is the right answer and an end token; or the sequential reader's greedy answer, with the
    distribution of each of its tokens, (tokens, vocabulary) log-probabilities.
    """

    example: Example
    request: Request
    answer: tuple[int, ...]
    distribution: torch.Tensor | None


class _Measuring:
    """Fills the table of figures, one round of settings after the other.

    Windows are encoded once for all settings that encode them alike, if they fit into
    ``keep_bytes``.
    """

    def __init__(
        self,
        engine: Engine,
        max_new_tokens: int,
        metric: Metric | None,
        keep_bytes: int,
        on_progress: OnProgress | None,
    ) -> None:
        self.table: Table = {}
        self._engine = engine
        self._metric = metric
        self._greedy = {"max_new_tokens": max_new_tokens, "do_sample": False, "num_beams": 1}
        self._on_progress = on_progress
        self._ends = sorted(engine.decoder.end_tokens({}))
        self._bytes_left = keep_bytes
        self._kept: dict[Hashable, EncodedContext] = {}
        self._latest: dict[Hashable, EncodedContext] = {}

    def _counted(self, what: str, items: Sequence[T]) -> Iterator[T]:
        """The items, with progress."""
        told = self._on_progress or (lambda *_: None)
        for done, item in enumerate(items):
            told(what, done, len(items))
            yield item
        told(what, len(items), len(items))

    def prepare(
        self,
        examples: Sequence[Example],
        settings: Sequence[Method],
        prefix: str | None,
        *,
        by_labels: bool,
    ) -> tuple[list[_Ready], list[str]]:
        """Examples that fit every setting, and a sentence for each that does not."""
        engine, count = self._engine, int(self._greedy["max_new_tokens"])
        ready, left_out = [], []
        numbered = list(enumerate(examples, start=1))
        for number, example in self._counted("Reading the examples", numbered):
            ask = partial(engine.request, example.query, example.passages, prefix=prefix)
            try:
                request = ask(method="pcw", max_new_tokens=count)
                if not request.parts.windows:
                    raise InputError("it has no passages.")
                for one in settings:
                    limit = engine.position_limit
                    check_limits(request.parts, request.passages, one, count, limit)
                if by_labels:
                    encode = engine.text.prompt.encode_text
                    text = encode((example.answer or "").strip(), continuation=True)
                    # Any end token will do: what counts is the distribution that it is taken from.
                    ready.append(_Ready(example, request, (*text, *self._ends[:1]), None))
                else:
                    in_order = ask(method="sequential", max_new_tokens=count)
                    ready.append(_Ready(example, request, *self._read_in_order(in_order)))
            except InputError as error:
                left_out.append(f"Example {number} was left out: {error}")
        return ready, left_out

    def _read_in_order(self, request: Request) -> tuple[tuple[int, ...], torch.Tensor]:
        # Encoded once and thrown away: nobody would ask a cache for this order of passages again.
        context = self._engine.encode(request, encoder=self._engine.plain_encoder)
        query = request.parts.query_ids
        decoded = self._engine.decoder.generate(context, query, options=self._greedy)
        ids = tuple(decoded.sequences[0])
        return ids, self._along(context, query, ids)

    @torch.no_grad()
    def _along(
        self, context: EncodedContext, query: Sequence[int], answer: Sequence[int]
    ) -> torch.Tensor:
        """(tokens, vocabulary) log-probabilities along an answer, in one forward pass."""
        decoder = self._engine.decoder
        # The last token of an answer is predicted, never read.
        ids = torch.tensor([[*query, *answer[:-1]]])
        logits = decoder.forward(decoder.narrowed(context, query), ids, last=len(answer))
        return logits[0].float().log_softmax(dim=-1)

    def measure(self, examples: Sequence[_Ready], settings: Sequence[Method]) -> Table:
        """The table, with settings that were not in it yet."""
        known = next(iter(self.table.values()), {})
        # Side by side where they share an encoding.
        alike: dict[Hashable, dict[Method, None]] = {}
        for one in settings:
            if one not in known:
                alike.setdefault(_encoding(one), {})[one] = None
        fresh = [one for group in alike.values() for one in group]
        asked = list(product(enumerate(examples), fresh))
        for (number, example), method in self._counted("Trying settings", asked):
            for figure, value in self._figures(number, example, method).items():
                self.table.setdefault(figure, {}).setdefault(method, []).append(value)
        return self.table

    def _figures(self, number: int, ready: _Ready, method: Method) -> dict[Figure, float]:
        """What decides between settings, of one setting on one example."""
        context, query = self._context(number, ready, method), ready.request.parts.query_ids
        rows, wanted = self._along(context, query, ready.answer), ready.distribution
        likeliest = rows.argmax(dim=-1).tolist()
        if wanted is not None:
            # A token that the reference never takes adds nothing, whatever the other says of it.
            terms = (wanted.exp() * (wanted - rows)).masked_fill(wanted == -torch.inf, 0.0)
            return {
                "divergence": float(terms.sum(dim=-1).mean().clamp(min=0.0)),
                "agreement": float(likeliest == list(ready.answer)),
            }
        text = ready.answer[: len(ready.answer) - len(self._ends[:1])]
        total = rows[range(len(text)), list(text)].sum()
        right = likeliest[: len(text)] == list(text)
        if self._ends:
            total = total + rows[-1, self._ends].logsumexp(dim=-1)
            right = right and likeliest[-1] in self._ends
        if self._metric is None:
            return {"exact match": float(right), "log-probability": float(total)}
        decoded = self._engine.decoder.generate(context, query, options=self._greedy)
        said = self._engine.text.detokenizer.text(decoded.sequences[0], ()).strip()
        met = self._metric(said, ready.example.answer or "")
        return {"metric": float(met), "log-probability": float(total)}

    def _context(self, number: int, ready: _Ready, method: Method) -> EncodedContext:
        key = (number, _encoding(method))
        context = self._kept.get(key) or self._latest.get(key)
        if context is None:
            context = self._engine.encode(dataclasses.replace(ready.request, method=method))
            windows = context.windows
            held = windows.windows if isinstance(windows, Members) else [windows]
            size = sum(x.nbytes for one in held if one for x in (*one.keys, *one.values))
            if size <= self._bytes_left:
                self._bytes_left -= size
                self._kept[key] = context
            else:
                # The next settings ask for it as well; the next example does not.
                self._latest = {key: context}
        return dataclasses.replace(context, method=method)


def _encoding(method: Method) -> Hashable:
    """Equal for methods whose encoded contexts differ in nothing but how they are read."""
    return (
        method.windowed,
        method.encoding,
        method.alignment,
        repr(method.recompute),
        method.selection is None,
        # Of an ensemble the windows lie as rows, with weights of its own.
        None if method.combination is None else repr(method),
    )
