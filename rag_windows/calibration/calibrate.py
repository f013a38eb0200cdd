"""A calibration: every setting answers every example, and what does best becomes a profile."""

from __future__ import annotations

import dataclasses
import json
import math
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
    Figure,
    Mean,
    ModelFingerprint,
    Profile,
    Setting,
    label,
    sign,
    varying,
)
from rag_windows.engine import Engine
from rag_windows.errors import InputError, MethodError, stop_iteration_told
from rag_windows.methods import APE, Method, resolve
from rag_windows.methods.mateicl import SCHEDULES
from rag_windows.methods.registry import numbers_of, with_parameters
from rag_windows.passage import Passage
from rag_windows.prefill import EncodedContext
from rag_windows.prompt.conversation import Conversation
from rag_windows.prompt.visible_text import strict_json
from rag_windows.request import Messages, PassageLike, Request, check_limits

T = TypeVar("T")

By = Literal["labels", "agreement"]

Metric = Callable[[str, str], float]
"""From a greedy answer and the right one to a number; more is better."""

OnProgress = Callable[[str, int, int], None]
"""Called with what goes on, how much of it is done, and how much there is."""

Table = dict[Figure, dict[Method, list[float]]]
"""figure -> setting -> a value for each example."""

KEEP_BYTES = 4 << 30
"""Keys and values that are kept for the next round at most; others are encoded again for it."""

FEWEST = 8
"""Examples below which no interval is worth its name."""

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
            raise InputError("An example must have a 'query' (or 'question').")
        for text in (self.answer, self.kind):
            if text is not None and not (isinstance(text, str) and text.strip()):
                raise InputError(
                    f"An example's answer and kind must be text that is not blank, not {text!r}."
                )
        if isinstance(self.passages, str) or not isinstance(self.passages, Sequence):
            raise InputError(f"An example's passages must be a list, not {self.passages!r}.")
        object.__setattr__(self, "passages", tuple(map(Passage.of, self.passages)))

    @classmethod
    def of(cls, value: Example | Mapping[str, Any]) -> Example:
        """Make an example from one, or from a mapping as a line of JSONL holds it.

        Its keys are ``query`` (or ``question``), ``passages``, ``answer`` and ``kind``.
        """
        if isinstance(value, Example):
            return value
        if not isinstance(value, Mapping):
            raise InputError(f"An example must be an Example or a mapping, not {value!r}.")
        given = {key: one for key, one in value.items() if one is not None}
        try:
            return cls(**{"query": given.pop("question", None), **given})
        except TypeError as error:
            raise InputError(
                f"An example has an unknown key: {error}. Use query, passages, answer and kind."
            ) from error


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
        raise InputError(f"{place} must be a line such as {shape}: {error}") from error
    if not made:
        raise InputError(f"{path} has no lines. Write lines such as {shape}.")
    return made


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
        if not isinstance(one, Method) or not one.windowed:
            raise InputError(
                f"Only methods that read windows can be calibrated, not {one!r}. Choose "
                "one such as 'ape'."
            )
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
    work = _Measuring(engine, max_new_tokens, metric, keep_bytes, on_progress)
    ready, left_out = work.prepare(given, coarse, prefix, by_labels=labelled)
    if len(ready) < FEWEST:
        raise InputError(
            f"Calibration needs at least {FEWEST} {'labelled ' if labelled else ''}examples that "
            f"can be used, but got {len(ready)}. Give more: a few dozen make the choice "
            "trustworthy. " + " ".join(left_out[:3])
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
        folds=FOLDS,
        seed=seed,
        left_out=tuple(left_out),
        model=ModelFingerprint.of(engine.model),
    )


@dataclass(frozen=True, slots=True)
class _Ready:
    """One example, and the answer that every setting is held against.

    That is the right answer and an end token; or the sequential reader's greedy answer, with the
    log-probabilities, (tokens, vocabulary), along it.
    """

    example: Example
    request: Request
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
    kept: dict[Hashable, EncodedContext] = field(default_factory=dict)
    latest: dict[Hashable, EncodedContext] = field(default_factory=dict)

    @property
    def ends(self) -> list[int]:
        return sorted(self.engine.decoder.end_tokens({}))

    def answer(self, context: EncodedContext, query: Sequence[int]) -> tuple[int, ...]:
        options = {"max_new_tokens": self.max_new_tokens, "do_sample": False, "num_beams": 1}
        return tuple(self.engine.decoder.generate(context, query, options=options).sequences[0])

    def _counted(self, what: str, items: Sequence[T]) -> Iterator[T]:
        told = stop_iteration_told(self.on_progress or (lambda *_: None))
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
        engine, count = self.engine, self.max_new_tokens
        # A request of neighbours holds them all; each setting takes its own number.
        reader = "neighbours+pcw" if any(one.neighbours for one in settings) else "pcw"
        ready, left_out = [], []
        numbered = list(enumerate(examples, start=1))
        for number, example in self._counted("Reading the examples", numbered):
            ask = partial(engine.request, example.query, example.passages, prefix=prefix)
            try:
                request = ask(method=reader, max_new_tokens=count)
                if not request.parts.windows:
                    raise InputError("it has no passages.")
                for one in settings:
                    limit = engine.position_limit
                    check_limits(request.parts, request.passages, one, count, limit)
                if by_labels:
                    encode = engine.text.prompt.encode_text
                    text = encode((example.answer or "").strip(), continuation=True)
                    # Any end token will do: what counts is the distribution that it is taken from.
                    ready.append(_Ready(example, request, (*text, *self.ends[:1]), None))
                else:
                    # Thrown away: nobody would ask a cache for this order of passages again.
                    read = ask(method="sequential", max_new_tokens=count)
                    context = engine.encode(read, encoder=engine.plain_encoder)
                    answer = self.answer(context, query := read.parts.query_ids)
                    along = self._along(context, query, answer)
                    ready.append(_Ready(example, request, answer, along))
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
        logits = decoder.forward(decoder.for_query(context, query), ids, last=len(answer))
        return logits[0].float().log_softmax(dim=-1)

    def measure(self, examples: Sequence[_Ready], settings: Sequence[Method]) -> Table:
        """The table, with settings that were not in it yet."""
        known = next(iter(self.table.values()), {})
        fresh = [one for one in dict.fromkeys(settings) if one not in known]
        fresh.sort(key=lambda one: repr(_encoding(one)))  # one encoding for neighbours
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
        text = ready.answer[: len(ready.answer) - len(self.ends[:1])]
        total = rows[range(len(text)), list(text)].sum()
        right = likeliest[: len(text)] == list(text)
        if self.ends:
            total = total + rows[-1, self.ends].logsumexp(dim=-1)
            right = right and likeliest[-1] in self.ends
        if self.metric is None:
            return {"exact match": float(right), "log-probability": float(total)}
        *_, said = self.engine.divided(ready.request, self.answer(context, query))
        met = self.metric(said.strip(), ready.example.answer or "")
        return {"metric": float(met), "log-probability": float(total)}

    def _context(self, number: int, ready: _Ready, method: Method) -> EncodedContext:
        key = (number, _encoding(method))
        context = self.kept.get(key) or self.latest.get(key)
        if context is None:
            context = self.engine.encode(dataclasses.replace(ready.request, method=method))
            size = sum(x.nbytes for one in context.each for x in (*one.keys, *one.values))
            self.latest = {key: context}  # which the next settings ask for as well
            if size <= self.bytes_left:
                self.bytes_left -= size
                self.kept[key] = context
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
            f"The method {method.name!r} has no numbers to choose. Calibrate one that has, such "
            "as 'ape', or give settings= as a list of methods."
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
    """Settings half-way between the best one and its neighbours in the grid, in every direction."""
    here = numbers_of(best)
    choices: dict[str, list[float]] = {}
    for name, values in varying(one for one in settings if type(one) is type(best)).items():
        if name in here:  # not where it is a number in other settings, and a word in this one
            place = values.index(here[name])
            near = values[max(0, place - 1) : place + 2]
            choices[name] = sorted({_half_way(here[name], other) for other in near})
    known = set(settings)
    return [one for one in _combinations(best, choices) if one not in known]


def _half_way(one: float, other: float) -> float:
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
    """The best setting on all examples, those of the second round, and how choices held out."""

    best: Method
    fine: tuple[Method, ...]
    held_out: tuple[Comparison, ...]


def search(
    coarse: Sequence[Method],
    default: Method,
    examples: int,
    criteria: Sequence[Figure],
    measure: Callable[[Sequence[Method]], Table],
    *,
    refine: bool,
    seed: int,
) -> Choice:
    """Choose among settings, and compare the choice with the default on held-out examples.

    Every fold makes the whole choice, the finer round included, on the examples outside of it.
    """
    table = measure(coarse)
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(seed)).tolist()
    folds = [order[fold::FOLDS] for fold in range(FOLDS)]
    choosing = [[one for one in range(examples) if one not in fold] for fold in folds]
    choosing.append(list(range(examples)))
    rounds: list[list[Method]] = [[] for _ in choosing]
    if refine:
        rounds = [finer(_best(coarse, table, some, criteria), coarse) for some in choosing]
        table = measure([one for some in rounds for one in some])
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
        gains = [sign(figure) * (a - b) for a, b in zip(chosen, rows[default], strict=True)]
        means = bootstrap([chosen, rows[default], gains], seed)
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


def verdict(best: Method, default: Method, held_out: Sequence[Comparison]) -> tuple[bool, str]:
    """Whether the choice replaces the default, by the first figure that tells, and why."""
    shown = "; ".join(
        f"{one.figure} {one.chosen.value:.4g} against {one.default.value:.4g}, 95% interval of the "
        f"gain {one.difference.low:.2g} to {one.difference.high:.2g}"
        for one in held_out
    )
    if best == default:
        return False, f"The default {label(default)} is the best of all settings ({shown})."
    for one in held_out:
        if one.better:
            return True, (
                f"{label(best)} beats the default {label(default)} on held-out examples by its "
                f"{one.figure} ({shown})."
            )
        if one.difference.value < 0:
            break
    return False, (
        f"No setting reliably beats the default {label(default)} on held-out examples, so the "
        f"default stays. The best setting on all examples is {label(best)} ({shown})."
    )
