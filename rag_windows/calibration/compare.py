"""A comparison: every method answers every question, and what does best becomes a profile."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product, starmap
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from rag_windows.calibration.profile import (
    Comparison,
    Cost,
    Figure,
    Mean,
    ModelFingerprint,
    Profile,
    Setting,
    formatted,
    sign,
    varying,
)
from rag_windows.calibration.words import contains
from rag_windows.engine import Engine
from rag_windows.errors import InputError, MethodError
from rag_windows.methods import APE, PCED, PCW, Auto, Method, Sequential, resolve, stands_by_itself
from rag_windows.methods.mateicl import SCHEDULES
from rag_windows.methods.registry import numbers_of, spelled, with_parameters
from rag_windows.passage import Passage
from rag_windows.prefill import EncodedContext
from rag_windows.prompt.conversation import Conversation
from rag_windows.request import BatchRequest, Messages, PassageLike, Request, check_limits
from rag_windows.sampling import FirstToken
from rag_windows.visible_text import strict_json
from rag_windows.windows import WindowStore

T = TypeVar("T")

By = Literal["labels", "agreement"]

Metric = Callable[[str, str], float]
"""From a greedy answer and a right one to a number; more is better."""

OnProgress = Callable[[str, int, int], None]
"""Called with what goes on, how much of it is done, and how much there is."""

Table = dict[Figure, dict[Method, list[float]]]
"""figure -> setting -> a value for each example."""

_THREE = spelled(with_parameters(Auto(), {"retrieve": 3}))
"""`Auto` with one passage more, of which some models and questions make more."""

METHODS_TO_ASK = (
    *("auto", _THREE, "query-likelihood", "pced"),
    *("ensemble:weights=entropy,pooling=minimum,beta=0.25", "pcw", "ape"),
)
"""What is compared where nobody names methods."""

METHODS_IN_ROWS = (
    *("auto", _THREE, "query-likelihood+sequential"),
    *("pced", "ensemble:weights=entropy,pooling=minimum,beta=0.25"),
)
"""The same where windows can't share one attention."""

KEEP_BYTES = 4 << 30
"""Bytes of keys and values stored for the next round at most; others are encoded again for it."""

FEWEST = 8
"""Fewest examples from which an interval is estimated."""

FOLDS = 4
RESAMPLES = 2000

VALUES = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1)
"""Coarse values of APE's temperature and scale; the paper searches 0.1 to 1.0."""

GRIDS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "ape": {"temperature": VALUES, "scale": VALUES},
    "deep-thinking": {"steps": (1, 2, 5, 10), "eta": (0.003, 0.01, 0.03, 0.1)},
    "mateicl": {"schedule": (*SCHEDULES, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0)},
}
"""Coarse values of methods that have a grid of their own."""


@dataclass(frozen=True, slots=True)
class Example:
    """One question that stands for those the model will get.

    Attributes:
        query: a question or a conversation, as in `WindowedLM.generate`.
        passages: what the retriever found for it, the useless ones included.
        answer: the right answer, or several of which each is right, the best known first; None for
            an unlabelled example.
        kind: a word for what kind of question it is; nothing reads it.

    Raises:
        InputError: a field has the wrong type, or the answer is blank.
    """

    query: Messages
    passages: Sequence[PassageLike] = ()
    answer: str | Sequence[str] | None = None
    kind: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.query, str | Sequence | Conversation):
            raise InputError("An example must have a 'query' (or 'question').")
        several = isinstance(self.answer, Sequence) and not isinstance(self.answer, str)
        for text in (*(self.answers if several and self.answer else [self.answer]), self.kind):
            if text is not None and not (isinstance(text, str) and text.strip()):
                raise InputError(
                    "An example's answer and kind must be text in quotes that is not blank, not "
                    f"{text!r}."
                )
        if several:
            object.__setattr__(self, "answer", self.answers)
        if isinstance(self.passages, str) or not isinstance(self.passages, Sequence):
            raise InputError(f"An example's passages must be a list, not {self.passages!r}.")
        object.__setattr__(self, "passages", tuple(map(Passage.of, self.passages)))

    @property
    def answers(self) -> tuple[str, ...]:
        """All right answers; none of an unlabelled example."""
        if self.answer is None:
            return ()
        return (self.answer,) if isinstance(self.answer, str) else tuple(self.answer)

    @classmethod
    def of(cls, value: Example | Mapping[str, Any]) -> Example:
        """Make an example from one, or from a mapping as a line of JSONL holds it.

        Its keys are ``query`` (or ``question``), ``passages``, ``answer`` (or ``answers``) and
        ``kind``. A passage's ``right``, by which `rag-windows eval passages` knows it, counts for
        nothing here, so that both take the same file.
        """
        if isinstance(value, Example):
            return value
        if not isinstance(value, Mapping):
            raise InputError(f"An example must be an Example or a mapping, not {value!r}.")
        given = {key: one for key, one in value.items() if one is not None}
        if isinstance(given.get("passages"), list):
            given["passages"] = [
                {key: part for key, part in one.items() if key != "right"}
                if isinstance(one, Mapping)
                else one
                for one in given["passages"]
            ]
        named = {"query": given.pop("question", None), "answer": given.pop("answers", None)}
        known = {one.name for one in dataclasses.fields(cls)}
        if unknown := sorted(map(str, given.keys() - known)):
            raise InputError(
                f"An example has the unknown key {unknown[0]!r}. Use question, passages, answer "
                "and kind."
            )
        return cls(**{**named, **given})


def read_examples(path: str | Path) -> list[Example]:
    """Read examples from a JSONL file, one a line; an `InputError` names the line."""
    shape = '{"question": "...", "passages": ["...", "..."], "answer": "..."}'
    return read_lines(path, Example.of, shape)


def read_lines(path: str | Path, make: Callable[[Any], T], shape: str) -> list[T]:
    """Make something of each line of a JSONL file but blank ones; ``shape`` is an example."""
    made, place = [], str(path)
    try:
        # Not splitlines(): a JSON string may hold U+2028 and its like as they are.
        for number, line in enumerate(Path(path).read_text("utf-8-sig").split("\n"), start=1):
            place = f"{path}, line {number}"
            if line.strip():
                made.append(make(json.loads(strict_json(line))))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{path} can't be read: {why}. Check the path and the file.") from error
    except json.JSONDecodeError as error:
        raise InputError(
            f"{place} is not valid JSON at character {error.pos + 1}: {error.msg}. Write a line "
            f"such as {shape}."
        ) from error
    except (ValueError, TypeError, InputError) as error:
        raise InputError(f"{place} must be a line such as {shape}: {error}") from error
    if not made:
        raise InputError(f"{path} has no lines. Write lines such as {shape}.")
    return made


def compare(
    engine: Engine,
    examples: Iterable[Example | Mapping[str, Any]],
    *,
    methods: Sequence[str | Method] | None,
    grid: str | Method | None,
    by: By | None,
    metric: Metric | None,
    prefix: str | None,
    max_new_tokens: int,
    refine: bool,
    seed: int,
    keep_bytes: int,
    on_progress: OnProgress | None,
) -> Profile:
    """See `WindowedLM.compare`."""
    among = METHODS_IN_ROWS if engine.in_rows else METHODS_TO_ASK
    usual = [] if grid else [*among]
    asked = [engine.method_of(one) for one in methods or usual]
    numbers = [] if grid is None else [engine.method_of(grid), *default_grid(resolve(grid))]
    given = [Example.of(example) for example in examples]
    if by not in (None, "labels", "agreement"):
        raise InputError(f"by must be 'labels', 'agreement' or None, not {by!r}.")
    labelled = by == "labels" or (by is None and all(one.answer is not None for one in given))
    if metric is not None and not labelled:
        raise InputError(
            "metric= compares answers with right ones. Give every example an answer and leave "
            "by='agreement' out, or pass by='labels' to use only examples that have one."
        )
    if labelled:
        given = [one for one in given if one.answer is not None]
    # Nothing agrees with one prompt as one prompt does.
    base = Sequential() if labelled else Auto()
    coarse = [one for one in dict.fromkeys([base, *asked, *numbers]) if labelled or one.windowed]
    if len(coarse) < 2:
        raise InputError(
            f"There is nothing to compare {spelled(base)} with. Name other methods in methods=, "
            "or a method whose numbers to try in grid=, such as 'ape'."
        )
    work = _Measuring(engine, max_new_tokens, metric, keep_bytes, on_progress)
    ready, left_out = work.prepare(given, coarse, prefix, by_labels=labelled)
    if len(ready) < FEWEST:
        raise InputError(
            f"A comparison needs at least {FEWEST} {'labelled ' if labelled else ''}examples that "
            f"can be used, but got {len(ready)}. Give more: a few dozen make the choice "
            "trustworthy. " + " ".join(left_out[:3])
        )
    criteria: tuple[Figure, ...] = ("divergence",)
    if labelled:
        criteria = ("contains" if metric is None else "metric", "log-probability")
    measure = partial(work.measure, ready)
    choice = search(coarse, base, criteria, measure, refine=refine, seed=seed)
    count = len(work.table[criteria[0]][base])
    if count < len(ready):
        left_out.append(
            f"{count} of {len(ready)} examples were asked, because the comparison was interrupted."
        )
    elif work.unmeasured:
        left_out.append("Finer settings were left out, because the comparison was interrupted.")
    tried = [*coarse, *choice.fine]
    means = {
        figure: bootstrap([rows[one] for one in tried], seed) for figure, rows in work.table.items()
    }
    first = dict(zip(tried, means[criteria[0]], strict=True))
    as_right = [one for one in tried if labelled and first[one].value >= first[base].value]
    chosen, sentence = verdict(choice.best, base, choice.held_out, work.costs, count, as_right)
    return Profile(
        method=chosen,
        best=choice.best,
        base=base,
        verdict=sentence,
        criteria=criteria,
        settings=tuple(
            Setting(
                method=one,
                figures={figure: found[i] for figure, found in means.items()},
                fine=one in choice.fine,
                cost=work.costs[one],
            )
            for i, one in enumerate(tried)
        ),
        held_out=choice.held_out,
        examples=count,
        folds=FOLDS,
        seed=seed,
        left_out=tuple(left_out),
        interrupted=work.interrupted,
        model=ModelFingerprint.of(engine.model),
    )


@dataclass(frozen=True, slots=True)
class _Ready:
    """One example, and the answer that every setting is compared with.

    That is the right answer and an end token; or the sequential reader's greedy answer, with the
    log-probabilities, (tokens, vocabulary), along it. ``in_order`` is the request whose passages
    stand in one prompt.
    """

    example: Example
    request: Request
    in_order: Request
    answer: tuple[int, ...]
    distribution: torch.Tensor | None


@dataclass(slots=True)
class _Measuring:
    """Fills the table of figures, one round of settings after the other."""

    engine: Engine
    max_new_tokens: int
    metric: Metric | None
    bytes_left: int
    on_progress: OnProgress | None
    table: Table = field(default_factory=dict)
    stored: dict[Hashable, EncodedContext] = field(default_factory=dict)
    latest: dict[Hashable, EncodedContext] = field(default_factory=dict)
    encode_s: dict[Hashable, float] = field(default_factory=dict)
    timed: dict[Method, list[tuple[float | None, float, int | None]]] = field(default_factory=dict)
    interrupted: bool = False
    unmeasured: bool = False

    @property
    def ends(self) -> list[int]:
        return sorted(self.engine.decoder.end_tokens({}))

    @property
    def costs(self) -> dict[Method, Cost]:
        """What each setting cost on the median example."""
        found = {}
        for method, rows in self.timed.items():
            columns = zip(*rows, strict=True)
            encode, first, tokens = ([one for one in each if one is not None] for each in columns)
            first_s = float(np.median(first))
            cold = float(np.median(encode)) + first_s if encode else None
            again = _encodes_anew(method)
            found[method] = Cost(
                cold_s=cold,
                warm_s=cold if again else first_s,
                tokens=round(float(np.mean(tokens))) if tokens else None,
            )
        return found

    def answer(
        self, context: EncodedContext, query: Sequence[int], tokens: int | None = None
    ) -> tuple[tuple[int, ...], float]:
        """A greedy answer, and the seconds to its first token."""
        count = tokens or self.max_new_tokens
        options = {"max_new_tokens": count, "do_sample": False, "num_beams": 1}
        first, begun = FirstToken(), time.perf_counter()
        decoded = self.engine.decoder.generate(
            context, query, options=options, stopping=lambda _: [first]
        )
        return tuple(decoded.sequences[0]), (first.seen_at or time.perf_counter()) - begun

    def _counted(self, what: str, items: Sequence[T]) -> Iterator[T]:
        report = self.on_progress or (lambda *_: None)
        for done, item in enumerate(items):
            report(what, done, len(items))
            yield item
        report(what, len(items), len(items))

    def prepare(
        self,
        examples: Sequence[Example],
        settings: Sequence[Method],
        prefix: str | None,
        *,
        by_labels: bool,
    ) -> tuple[list[_Ready], list[str]]:
        """Examples that fit every setting, and a sentence for each that does not."""
        engine, count = self.engine, self.max_new_tokens
        # A request of neighbours holds them all; each setting takes its own number.
        reader = PCED.name if engine.in_rows else PCW.name
        if any(one.neighbours for one in settings):
            reader = f"neighbours+{reader}"
        ready, left_out = [], []
        numbered = list(enumerate(examples, start=1))
        for number, example in self._counted("Reading the examples", numbered):
            asked = BatchRequest(example.query, example.passages, prefix, max_new_tokens=count)
            try:
                request = Request.of(engine, dataclasses.replace(asked, method=reader))
                if not request.parts.windows:
                    raise InputError("it has no passages.")
                read = Request.of(engine, dataclasses.replace(asked, method="sequential"))
                for one in settings:
                    by_setting = request.with_method(one)
                    check_limits(by_setting, engine.position_limit)
                    by_setting.plan.check_scores()
                if by_labels:
                    encode = engine.text.prompt.encode_text
                    text = encode(example.answers[0].strip(), continuation=True)
                    # Any end token will do: what counts is the distribution that it is taken from.
                    ready.append(_Ready(example, request, read, (*text, *self.ends[:1]), None))
                else:
                    context = self._in_order(read)
                    answer, _ = self.answer(context, query := read.parts.query_ids)
                    along = self._along(context, query, answer)
                    ready.append(_Ready(example, request, read, answer, along))
            except InputError as error:
                left_out.append(f"Example {number} was left out: {error}")
        return ready, left_out

    @torch.no_grad()
    def _along(
        self, context: EncodedContext, query: Sequence[int], answer: Sequence[int]
    ) -> torch.Tensor:
        """(tokens, vocabulary) log-probabilities along an answer, in one forward pass."""
        decoder = self.engine.decoder
        # The last token of an answer is predicted, never read.
        ids = torch.tensor([[*query, *answer[:-1]]])
        logits = decoder.forward(context, ids, last=len(answer))
        return logits[0].float().log_softmax(dim=-1)

    def measure(self, examples: Sequence[_Ready], settings: Sequence[Method]) -> Table:
        """The table, with settings that were not in it yet.

        An interruption ends all measuring. What is complete stays: every setting of the first round
        on the examples before it, if these are at least `FEWEST`; else the interruption goes on.
        """
        known = [*next(iter(self.table.values()), {})]
        fresh = [one for one in dict.fromkeys(settings) if one not in known]
        if self.interrupted or not fresh:
            self.unmeasured |= bool(fresh)
            return self.table
        # One after the other read what is encoded alike.
        fresh.sort(key=lambda one: (repr(_encoding(one)), one.neighbours))
        asked = list(product(enumerate(examples), fresh))
        try:
            for (number, example), method in self._counted("Trying settings", asked):
                for figure, value in self._figures(number, example, method).items():
                    self.table.setdefault(figure, {}).setdefault(method, []).append(value)
        except KeyboardInterrupt:
            first = known or fresh
            found = [rows.get(one, ()) for rows in self.table.values() for one in first]
            if (complete := min(map(len, found), default=0)) < FEWEST:
                raise
            for rows in self.table.values():
                _cut(rows, first, complete)
            _cut(self.timed, first, complete)
            self.interrupted, self.unmeasured = True, bool(known)
        return self.table

    def _figures(self, number: int, ready: _Ready, method: Method) -> dict[Figure, float]:
        """What decides between settings, of one setting on one example."""
        given, encode_s = self._context(number, ready, method)
        parts = (ready.request if method.windowed else ready.in_order).parts
        query, begun = parts.query_ids, time.perf_counter()
        context = self.engine.decoder.for_query(given, query, parts.question)
        chosen_s = time.perf_counter() - begun
        wanted = ready.distribution
        said, first_s = self.answer(context, query, None if wanted is None else 1)
        known = {id(one) for one in given.each}
        tokens: int | None = sum(len(one.ids) for one in context.each if id(one) not in known)
        if not method.windowed:
            tokens = given.window_tokens
        elif method.recompute is not None:
            tokens = None
        self.timed.setdefault(method, []).append((encode_s, chosen_s + first_s, tokens))
        rows = self._along(context, query, ready.answer)
        likeliest = rows.argmax(dim=-1).tolist()
        if wanted is not None:
            # A token that the reference never takes adds nothing, whatever the other says of it.
            terms = (wanted.exp() * (wanted - rows)).masked_fill(wanted == -torch.inf, 0.0)
            return {
                "divergence": float(terms.sum(dim=-1).mean().clamp(min=0.0)),
                "agreement": float(likeliest == list(ready.answer)),
            }
        text = ready.answer[: len(ready.answer) - len(self.ends[:1])]
        total = rows[range(len(text)), list(text)].sum()
        if self.ends:
            total = total + rows[-1, self.ends].logsumexp(dim=-1)
        *_, shown = ready.request.divided(said)
        metric = self.metric or contains
        met = max(float(metric(shown.strip(), one)) for one in ready.example.answers)
        figure: Figure = "contains" if self.metric is None else "metric"
        return {figure: met, "log-probability": float(total)}

    def _in_order(self, request: Request) -> EncodedContext:
        """Not cached: nothing else would read this order of passages."""
        return request.encode(WindowStore(self.engine.plain_encoder))

    def _context(
        self, number: int, ready: _Ready, method: Method
    ) -> tuple[EncodedContext, float | None]:
        """What is read, and the seconds that encoding took; None if a cache had some of it."""
        chunks = any(window.before for window in ready.request.parts.windows)
        key = (number, _encoding(method), method.neighbours if chunks else 0)
        context = self.stored.get(key) or self.latest.get(key)
        if context is None:
            begun = time.perf_counter()
            if method.windowed:
                context = ready.request.with_method(method).encode()
            else:
                context = self._in_order(ready.in_order.with_method(method))
            if not context.cached_tokens:
                self.encode_s[key] = time.perf_counter() - begun
            size = sum(one.nbytes for one in context.each)
            self.latest = {key: context}  # which the next settings ask for as well
            if size <= self.bytes_left:
                self.bytes_left -= size
                self.stored[key] = context
        read = dataclasses.replace(context, method=method)
        if method.windowed and method.recompute is None:
            read = read.narrowed(read.each, read.groups, read.scores)
        return read, self.encode_s.get(key)


def _cut(rows: dict[Method, list[T]], methods: Sequence[Method], count: int) -> None:
    """Leave rows of these methods only, and so many of their first entries."""
    for method in [*rows]:
        if method in methods:
            del rows[method][count:]
        else:
            del rows[method]


def _encoding(method: Method) -> Hashable:
    """Equal for methods whose encoded contexts differ in nothing but how they are read."""
    return method.windowed, method.encoding, method.alignment, repr(method.recompute)


def _encodes_anew(method: Method) -> bool:
    """Whether passages that were encoded before have to be encoded again in another order."""
    return (
        not method.windowed
        or not stands_by_itself(method.alignment)
        or method.recompute is not None
    )


def ape_grid(
    temperatures: Iterable[float] = VALUES, scales: Iterable[float] = VALUES
) -> tuple[Method, ...]:
    """APE at every pair of temperature and scale."""
    return tuple(starmap(APE, product(temperatures, scales)))


def default_grid(method: Method) -> tuple[Method, ...]:
    """The settings that are tried for a method where no grid is given.

    Where `GRIDS` has none, each number in its fields is tried at its value times 1/4, 1/2, 1, 2
    and 4 (whole numbers stay whole and at least 1), in all combinations. What a method refuses is
    left out; the numbers of a reader inside it stay as they are.
    """
    # What the reader of a method does is the reader's own: calibrate that one first.
    own = {one.name for one in dataclasses.fields(method)}
    found = {name: _around(one) for name, one in numbers_of(method).items() if name in own}
    values = GRIDS.get(method.name, found)
    if not values:
        raise InputError(
            f"The method {method.name!r} has no numbers to choose. Name one that has, such as "
            "'ape', or give methods= as a list."
        )
    return tuple(_combinations(method, values))


def _around(value: float) -> list[float]:
    values = [value * factor for factor in (0.25, 0.5, 1, 2, 4)]
    return [max(1, round(one)) for one in values] if isinstance(value, int) else values


def _combinations(method: Method, values: Mapping[str, Sequence[Any]]) -> list[Method]:
    """The method at every combination of values that it takes."""
    made: dict[Method, None] = {}
    for combination in product(*values.values()):
        with suppress(MethodError):
            made[with_parameters(method, dict(zip(values, combination, strict=True)))] = None
    return list(made)


def finer(best: Method, settings: Sequence[Method]) -> list[Method]:
    """Settings midway between the best one and its neighbours in the grid, in every direction."""
    here = numbers_of(best)
    choices: dict[str, list[float]] = {}
    for name, values in varying(one for one in settings if type(one) is type(best)).items():
        if name in here:  # not where it is a number in other settings, and a word in this one
            place = values.index(here[name])
            near = values[max(0, place - 1) : place + 2]
            choices[name] = sorted({_midpoint(here[name], other) for other in near})
    known = set(settings)
    return [one for one in _combinations(best, choices) if one not in known]


def _midpoint(one: float, other: float) -> float:
    """The geometric mean, to three digits; a whole number between whole numbers."""
    if one == other:
        return one
    if isinstance(one, int) and isinstance(other, int):
        return (one + other) // 2
    if one > 0 and other > 0:
        return float(f"{math.sqrt(one * other):.3g}")
    return (one + other) / 2


@dataclass(frozen=True, slots=True)
class Choice:
    """The best setting on all examples, the second round's, and what held-out examples say."""

    best: Method
    fine: tuple[Method, ...]
    held_out: tuple[Comparison, ...]


def search(
    coarse: Sequence[Method],
    base: Method,
    criteria: Sequence[Figure],
    measure: Callable[[Sequence[Method]], Table],
    *,
    refine: bool,
    seed: int,
) -> Choice:
    """Choose among settings, and compare the choice with the base on held-out examples.

    Every fold makes the whole choice, the finer round included, on the examples outside of it.
    Where the finer round was interrupted, no fold makes it.
    """
    table = measure(coarse)
    examples = len(table[criteria[0]][base])
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(seed)).tolist()
    folds = [order[fold::FOLDS] for fold in range(FOLDS)]
    choosing = [[one for one in range(examples) if one not in fold] for fold in folds]
    choosing.append(list(range(examples)))
    rounds: list[list[Method]] = [[] for _ in choosing]
    if refine:
        rounds = [finer(_best(coarse, table, some, criteria), coarse) for some in choosing]
        table = measure([one for some in rounds for one in some])
        rounds = [[one for one in some if one in table[criteria[0]]] for some in rounds]
    fine = tuple(dict.fromkeys(one for some in rounds for one in some))
    held = [
        _best([*coarse, *own], table, some, criteria)
        for own, some in zip(rounds[:-1], choosing[:-1], strict=True)
    ]
    # Of all that was tried, so that it is the first of `Profile.ranked`.
    best = _best([*coarse, *fine], table, choosing[-1], criteria)
    chose = {number: one for fold, one in zip(folds, held, strict=True) for number in fold}
    comparisons = []
    for figure in criteria:
        rows = table[figure]
        chosen = [rows[chose[number]][number] for number in range(examples)]
        gains = [sign(figure) * (a - b) for a, b in zip(chosen, rows[base], strict=True)]
        means = bootstrap([chosen, rows[base], gains], seed)
        comparisons.append(Comparison(figure, *means))
    return Choice(best, fine, tuple(comparisons))


def _best(
    settings: Iterable[Method], table: Table, numbers: Sequence[int], criteria: Sequence[Figure]
) -> Method:
    """The setting with the best means over these examples, of equal ones by the next criterion."""

    def key(method: Method) -> list[float]:
        means = (sum(table[name][method][n] for n in numbers) / len(numbers) for name in criteria)
        # Rounded, so that equal shares summed in another order are equal.
        return [round(-sign(name) * mean, 9) for name, mean in zip(criteria, means, strict=True)]

    return min(settings, key=key)


def bootstrap(rows: Sequence[Sequence[float]], seed: int) -> list[Mean]:
    """Percentile bootstrap (B. Efron, Annals of Statistics 1979) of the mean of each row.

    Rows are resampled alike: entry ``i`` of each is the same example.
    """
    values = np.asarray(rows, dtype=np.float64)
    count = values.shape[1]
    # torch's draws and not scipy's: the figures of profiles that users keep are from these.
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(count, (RESAMPLES, count), generator=generator).numpy()
    found = []
    for row in values:
        low, high = np.percentile(row[drawn].mean(axis=1), (2.5, 97.5))
        found.append(Mean(float(row.mean()), float(low), float(high)))
    return found


def verdict(
    best: Method,
    base: Method,
    held_out: Sequence[Comparison],
    costs: Mapping[Method, Cost],
    examples: int,
    as_right: Sequence[Method] = (),
) -> tuple[Method, str]:
    """What to use, by the first figure that decides, and why.

    ``as_right`` are methods that did at least as well as the base by the first figure.
    """
    named = "one prompt" if isinstance(base, Sequential) else spelled(base)
    as_many = "as many right answers" if held_out[0].figure == "contains" else "as good a metric"

    def sooner(method: Method) -> float:
        was, now = costs[base].warm_s, costs[method].warm_s
        return round(was / now, 1) if was and now else 0.0

    # Rounded, as the choice itself is.
    first = next((one for one in held_out if round(one.difference.value, 9)), held_out[0])
    tie = "" if first is held_out[0] else f"{as_many} as {named}, so the "
    check = _check(first, named, tie)
    if first.difference.low <= 0 <= first.difference.high:
        check += (
            f" The interval includes 0: the difference may be chance, and {examples} questions are "
            "too few to decide."
        )
    taken, quick = base, max(as_right, key=sooner, default=base)
    over = f"If time counts, {spelled(quick)} had at least {as_many} on all questions, and over"
    if best == base:
        had = _had(held_out[0].figure, held_out[0].base.value)
        text = f"Take {named}: no other method was better on these {examples} questions ({had})."
        if len(as_right) > 1:
            text += f" Methods with {as_many} had no higher log-probability of the right answer."
    elif first.difference.value < 0:
        text = (
            f"Take {named}: {spelled(best)} was best on all {examples} questions, but a check does "
            f"not confirm it. {check}"
        )
    else:
        taken, quick, over = best, best, "Over"
        text = f"Take {spelled(best)}: it was best on all {examples} questions. {check}"
    if sooner(quick) > 1:
        text += f" {over} encoded passages its first token comes {sooner(quick):.1f}x as soon."
    return taken, text


_HAD: Mapping[Figure, str] = {
    "contains": "{}% right answers",
    "metric": "a metric of {}",
    "log-probability": "log-probability of the right answer decides, {}",
    "divergence": "a divergence from one prompt of {}",
}


def _had(figure: Figure, value: float) -> str:
    return _HAD[figure].format(formatted(figure, value))


def _check(one: Comparison, named: str, tie: str) -> str:
    """What chosen methods did on other questions; ``tie`` says what was equal before."""
    values = (one.base.value, *dataclasses.astuple(one.difference))
    was, gain, low, high = (formatted(one.figure, value) for value in values)
    sign, points = ("%", " points") if one.figure == "contains" else ("", "")
    nearer = "nearer 0 is better; " if one.figure in ("log-probability", "divergence") else ""
    return (
        "As a check, methods were chosen on three quarters of the questions and judged on the "
        f"rest: they had {tie}{_had(one.figure, one.chosen.value)}, {named} {was}{sign} ({nearer}"
        f"gain {gain}{points}, 95% interval {low} to {high})."
    )
