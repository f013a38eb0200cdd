"""A calibration: every setting answers every example, and what does best becomes a profile."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from rag_windows.calibration.choose import (
    Table,
    bootstrap,
    default_grid,
    multi_hop_threshold,
    search,
    verdict,
)
from rag_windows.calibration.profile import Figure, ModelFingerprint, Profile, Setting, Threshold
from rag_windows.engine import Engine
from rag_windows.errors import InputError
from rag_windows.guard import Guard, attention_of_answer, attention_spread
from rag_windows.kv import Members
from rag_windows.methods import Method, resolve
from rag_windows.passage import Passage
from rag_windows.prefill import EncodedContext
from rag_windows.prompt.conversation import Conversation
from rag_windows.prompt.visible_text import strict_json
from rag_windows.request import Messages, PassageLike, Request, check_limits

_KEYS = ("query", "question", "passages", "answer", "kind")


@dataclass(frozen=True, slots=True)
class Example:
    """One question that stands for those the model will get.

    Attributes:
        query: a question or a conversation, as in `WindowedLM.generate`.
        passages: what the retriever found for it, the useless ones included.
        answer: the right answer, or None for an unlabelled example.
        kind: "multi-hop" marks a question whose answer needs several passages together; any other
            value, and None, counts as a question that one passage answers.

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

    @property
    def multi_hop(self) -> bool:
        """Whether the answer is said to need several passages."""
        return self.kind == "multi-hop"

    @classmethod
    def of(cls, value: Example | Mapping[str, Any]) -> Example:
        """Make an example from one, or from a mapping as a line of JSONL holds it.

        Args:
            value: keys ``query`` (or ``question``), ``passages``, ``answer``, ``kind``. Others are
                an error, so that no field is lost by a typo.

        Raises:
            InputError: no question, an unknown key, or a wrong type.
        """
        if isinstance(value, Example):
            return value
        if not isinstance(value, Mapping):
            raise InputError(f"An example must be an Example or a mapping, not {value!r}.")
        if unknown := sorted(str(key) for key in value if key not in _KEYS):
            raise InputError(f"Unknown example keys {unknown}; use {list(_KEYS)}.")
        given = {
            key: value[key] for key in ("passages", "answer", "kind") if value.get(key) is not None
        }
        return cls(value.get("query", value.get("question")), **given)


def read_examples(path: str | Path) -> list[Example]:
    """Read examples from a JSONL file, one a line; blank lines are left out.

    Raises:
        InputError: the file can't be read, or a line is no example; the message names the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The examples {str(path)!r} can't be read: {error}.") from error
    examples = []
    # Not splitlines(): a JSON string may hold U+2028 and its like as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            examples.append(Example.of(json.loads(strict_json(line))))
        except (ValueError, InputError) as error:
            raise InputError(
                f"{str(path)!r}, line {number}, is no example: {error} Write one a line, such as "
                '{"query": "...", "passages": ["...", "..."], "answer": "..."}.'
            ) from error
    if not examples:
        raise InputError(f"{str(path)!r} holds no examples.")
    return examples


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
    """What `WindowedLM.calibrate` does, with its arguments."""
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
    work = _Measuring(engine, max_new_tokens, metric, keep_bytes, on_progress or _silent)
    ready, left_out = work.prepare(given, coarse, prefix, need_reference=not labelled)
    if len(ready) < FEWEST:
        raise InputError(
            f"Calibration needs at least {FEWEST} {'labelled ' if labelled else ''}examples that "
            f"can be used, and got {len(ready)}; a few dozen make the choice trustworthy. "
            + " ".join(left_out[:3])
        )
    criteria: tuple[Figure, ...] = ("divergence",)
    if labelled:
        criteria = ("exact match" if metric is None else "metric", "log-probability")
    numbers = [one.number for one in ready]
    measure = partial(work.measure, ready)
    choice = search(coarse, default, numbers, criteria, measure, refine=refine, seed=seed)
    beats_default, sentence = verdict(choice.best, default, choice.held_out)
    chosen = choice.best if beats_default else default
    tried = [*coarse, *choice.fine]
    means: dict[Any, Any] = {
        figure: bootstrap([list(rows[one].values()) for one in tried], seed)
        for figure, rows in work.table.items()
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
        guard=work.threshold(ready, chosen),
    )


def _silent(what: str, done: int, whole: int | None) -> None:
    """Nobody listens."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """One example, tokenized for windows, with the answers that every setting is held against.

    ``gold`` is the right answer and an end token; ``reference`` the sequential reader's greedy
    answer and the distribution of each of its tokens, (tokens, vocabulary) log-probabilities.
    """

    number: int
    example: Example
    request: Request
    gold: tuple[int, ...] | None
    reference: tuple[tuple[int, ...], torch.Tensor] | None


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
        report: OnProgress,
    ) -> None:
        self.table: Table = {}
        self._engine = engine
        self._metric = metric
        self._greedy = {"max_new_tokens": max_new_tokens, "do_sample": False, "num_beams": 1}
        self._report = report
        self._ends = sorted(engine.decoder.end_tokens({}))
        self._bytes_left = keep_bytes
        self._kept: dict[Hashable, EncodedContext] = {}
        self._latest: dict[Hashable, EncodedContext] = {}

    def prepare(
        self,
        examples: Sequence[Example],
        settings: Sequence[Method],
        prefix: str | None,
        *,
        need_reference: bool,
    ) -> tuple[list[_Ready], list[str]]:
        """Examples that fit every setting, and a sentence for each that does not.

        Those that don't fit one after the other are left out only where they need a reference.
        """
        engine, count = self._engine, int(self._greedy["max_new_tokens"])
        ready, left_out = [], []
        for number, example in enumerate(examples):
            self._report("Reading sequentially", number, len(examples))
            ask = partial(engine.request, example.query, example.passages, prefix=prefix)
            reference = gold = None
            try:
                request = ask(method="pcw", max_new_tokens=count)
                if not request.parts.windows:
                    raise InputError("it has no passages.")
                for one in settings:
                    limit = engine.position_limit
                    check_limits(request.parts, request.passages, one, count, limit)
                try:
                    reference = self._read_in_order(ask(method="sequential", max_new_tokens=count))
                except InputError as error:
                    if need_reference:
                        raise
                    left_out.append(
                        f"Example {number + 1} is not compared with sequential reading: {error}"
                    )
            except InputError as error:
                left_out.append(f"Example {number + 1} was left out: {error}")
                continue
            if example.answer is not None:
                text = engine.text.prompt.encode_text(example.answer.strip(), continuation=True)
                # Any end token will do: what counts is the distribution from which it is taken.
                gold = (*text, *self._ends[:1])
            ready.append(_Ready(number, example, request, gold, reference))
        self._report("Reading sequentially", len(examples), len(examples))
        return ready, left_out

    def _read_in_order(self, request: Request) -> tuple[tuple[int, ...], torch.Tensor]:
        # Encoded once and thrown away: nobody would ask a cache for this order of passages again.
        context = self._engine.encode(request, encoder=self._engine.plain_encoder)
        query = request.parts.query_ids
        decoded = self._engine.decoder.generate(context, query, options=self._greedy)
        ids = tuple(decoded.sequences[0])
        return ids, self._along(context, query, [ids])[0]

    def _along(
        self, context: EncodedContext, query: Sequence[int], answers: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """(tokens, vocabulary) log-probabilities along each answer, in one forward pass."""
        decoder = self._engine.decoder
        if context.method.selection is not None:
            context = decoder.narrowed(context, query)
        longest = max(map(len, answers))
        # The last token of an answer is predicted, never read.
        rows = torch.zeros(len(answers), len(query) + longest - 1, dtype=torch.int64)
        for row, answer in zip(rows, answers, strict=True):
            row[: len(query) + len(answer) - 1] = torch.tensor([*query, *answer[:-1]])
        logits = decoder.forward(context, rows, last=longest)
        return [
            one[: len(answer)].float().log_softmax(dim=-1)
            for one, answer in zip(logits, answers, strict=True)
        ]

    def measure(self, examples: Sequence[_Ready], settings: Sequence[Method]) -> Table:
        """The table, with settings that were not in it yet."""
        known = next(iter(self.table.values()), {})
        fresh = [one for one in dict.fromkeys(settings) if one not in known]
        # Side by side where they share an encoding, in the order given otherwise.
        keys = list(dict.fromkeys(map(_encoding, fresh)))
        fresh.sort(key=lambda one: keys.index(_encoding(one)))
        whole = len(fresh) * len(examples)
        for place, example in enumerate(examples):
            for number, method in enumerate(fresh):
                self._report("Trying settings", place * len(fresh) + number, whole)
                for figure, value in self._figures(example, method).items():
                    self.table.setdefault(figure, {}).setdefault(method, {})[example.number] = value
        self._report("Trying settings", whole, whole)
        return self.table

    @torch.no_grad()
    def _figures(self, ready: _Ready, method: Method) -> dict[str, float]:
        """`FIGURES` of one setting on one example."""
        ids, wanted = ready.reference or (None, None)
        answers = list(dict.fromkeys(one for one in (ready.gold, ids) if one is not None))
        if not answers:
            return {}
        context, query = self._context(ready, method), ready.request.parts.query_ids
        found = dict(zip(answers, self._along(context, query, answers), strict=True))
        figures: dict[str, float] = {}
        if ready.gold is not None:
            rows, end = found[ready.gold], min(1, len(self._ends))
            text = ready.gold[: len(ready.gold) - end]
            likeliest = rows.argmax(dim=-1).tolist()
            total = rows[range(len(text)), list(text)].sum()
            if end:
                total = total + rows[-1, self._ends].logsumexp(dim=-1)
            if self._metric is None:
                right = likeliest[: len(text)] == list(text)
                right = right and (not end or likeliest[-1] in self._ends)
                figures["exact match"] = float(right)
            else:
                figures["metric"] = self._by_metric(ready, context, self._metric)
            figures["log-probability"] = float(total)
        if ids is not None and wanted is not None:
            rows = found[ids]
            # A token that the reference never takes adds nothing, whatever the other says of it.
            terms = (wanted.exp() * (wanted - rows)).masked_fill(wanted == -torch.inf, 0.0)
            figures["divergence"] = float(terms.sum(dim=-1).mean().clamp(min=0.0))
            figures["agreement"] = float(rows.argmax(dim=-1).tolist() == list(ids))
        return figures

    def _by_metric(self, ready: _Ready, context: EncodedContext, metric: Metric) -> float:
        query = ready.request.parts.query_ids
        decoded = self._engine.decoder.generate(context, query, options=self._greedy)
        text = self._engine.text.detokenizer.text(decoded.sequences[0], ())
        return float(metric(text.strip(), ready.example.answer or ""))

    def threshold(self, examples: Sequence[_Ready], method: Method) -> Threshold | None:
        """The guard's threshold, from the spread of attention while greedy answers begin."""
        spreads: dict[bool, list[float]] = {one.example.multi_hop: [] for one in examples}
        if len(spreads) < 2:
            return None
        for place, one in enumerate(examples):
            self._report("Measuring attention", place, len(examples))
            context, query = self._context(one, method), one.request.parts.query_ids
            # Over as many tokens as the guard writes to measure it.
            weights = attention_of_answer(self._engine.decoder, context, query, {}, Guard().rows)
            if weights:
                spreads[one.example.multi_hop].append(attention_spread(weights))
        self._report("Measuring attention", len(examples), len(examples))
        return multi_hop_threshold(spreads[False], spreads[True])

    def _context(self, ready: _Ready, method: Method) -> EncodedContext:
        key = (ready.number, _encoding(method))
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
