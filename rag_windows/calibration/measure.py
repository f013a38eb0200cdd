"""How every setting does on every example: one forward pass over a question and its answers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch

from rag_windows.calibration.example import Example
from rag_windows.engine import Engine
from rag_windows.errors import InputError
from rag_windows.generate import Decoder
from rag_windows.guard import Guard, attention_of_answer, attention_spread
from rag_windows.kv import Members
from rag_windows.methods import Method, Sequential
from rag_windows.prefill import EncodedContext
from rag_windows.request import Request, check_limits

KEEP_BYTES = 4 << 30
"""Keys and values that are kept for the next round at most; others are encoded again for it."""

Metric = Callable[[str, str], float]
"""From a greedy answer and the right one to a number; more is better."""

OnProgress = Callable[[str, int, int | None], None]
"""Told what goes on, how much of it is done, and how much there is."""

Table = dict[str, dict[Method, dict[int, float]]]
"""figure -> setting -> number of the example -> value."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The sequential reader's greedy answer.

    Attributes:
        ids: its tokens, end token included.
        logprobs: (tokens, vocabulary) fp32: the distribution of each.
    """

    ids: tuple[int, ...]
    logprobs: torch.Tensor = field(repr=False)


@dataclass(frozen=True, slots=True)
class Prepared:
    """One example, tokenized, with the answers that every setting is held against.

    Attributes:
        number: of the example, counted from 0.
        example: as it was given.
        request: tokenized for windows.
        gold: tokens of the right answer, without an end; None if unlabelled.
        reference: None where the passages don't fit one after the other.
    """

    number: int
    example: Example
    request: Request
    gold: tuple[int, ...] | None
    reference: Reference | None


def prepare(
    engine: Engine,
    examples: Sequence[Example],
    settings: Sequence[Method],
    *,
    prefix: str | None,
    max_new_tokens: int,
    need_reference: bool,
    on_progress: OnProgress,
) -> tuple[list[Prepared], list[str]]:
    """Tokenize the examples and let the sequential reader answer them.

    Args:
        engine: the model.
        examples: as given.
        settings: that every example has to fit.
        prefix: system prompt, as requests will have it.
        max_new_tokens: of the sequential reader's answer.
        need_reference: leave out examples whose passages don't fit one after the other.
        on_progress: told how many examples are read.

    Returns:
        The examples that can be used, and a sentence for each that can't or that lacks a reference.
    """
    ready, left_out = [], []
    for number, example in enumerate(examples):
        on_progress("Reading sequentially", number, len(examples))
        asked = functools.partial(
            engine.request,
            example.query,
            example.passages,
            prefix=prefix,
            max_new_tokens=max_new_tokens,
        )
        reference = None
        try:
            request = asked(method="pcw")
            if not request.parts.windows:
                raise InputError("it has no passages.")
            for one in settings:
                check_limits(
                    request.parts, request.passages, one, max_new_tokens, engine.position_limit
                )
            try:
                reference = _reference(engine, asked(method=Sequential()), max_new_tokens)
            except InputError as error:
                if need_reference:
                    raise
                left_out.append(
                    f"Example {number + 1} is not compared with sequential reading: {error}"
                )
        except InputError as error:
            left_out.append(f"Example {number + 1} was left out: {error}")
            continue
        gold = None
        if example.answer is not None:
            prompt = engine.text.prompt
            gold = tuple(prompt.encode_text(example.answer.strip(), continuation=True))
        ready.append(Prepared(number, example, request, gold, reference))
    on_progress("Reading sequentially", len(examples), len(examples))
    return ready, left_out


def _reference(engine: Engine, request: Request, max_new_tokens: int) -> Reference:
    # Encoded once and thrown away: nobody would ask a cache for this order of passages again.
    context = engine.encode(request, encoder=engine.plain_encoder)
    query = request.parts.query_ids
    ids = engine.decoder.generate(context, query, options=_greedy(max_new_tokens)).sequences[0]
    (logprobs,) = forced_logprobs(engine.decoder, context, query, [ids])
    return Reference(tuple(ids), logprobs)


def _greedy(max_new_tokens: int) -> dict[str, object]:
    return {"max_new_tokens": max_new_tokens, "do_sample": False, "num_beams": 1}


def forced_logprobs(
    decoder: Decoder,
    context: EncodedContext,
    query_ids: Sequence[int],
    answers: Sequence[Sequence[int]],
) -> list[torch.Tensor]:
    """Next-token distributions along given answers (teacher forcing), in one forward pass.

    Args:
        decoder: of the model.
        context: what the query reads, under its method.
        query_ids: at least one token.
        answers: token ids, at least one each.

    Returns:
        For each answer (tokens, vocabulary) log-probabilities, fp32: row ``i`` is the distribution
        from which token ``i`` would be taken after those before it.
    """
    if context.method.selection is not None:
        context = decoder.narrowed(context, query_ids)
    longest = max(len(answer) for answer in answers)
    # The last token of an answer is predicted, never read.
    rows = torch.zeros(len(answers), len(query_ids) + longest - 1, dtype=torch.int64)
    for row, answer in enumerate(answers):
        read = [*query_ids, *answer[:-1]]
        rows[row, : len(read)] = torch.tensor(read, dtype=torch.int64)
    logits = decoder.forward(context, rows, last=longest)
    return [
        logits[row, : len(answer)].float().log_softmax(dim=-1) for row, answer in enumerate(answers)
    ]


def encoding_key(method: Method) -> Hashable:
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


class Measuring:
    """Fills the table of figures, one round of settings after the other.

    An example's windows are encoded once for all settings that encode them alike, as long as they
    fit into ``keep_bytes``; the others are encoded once a round.

    Attributes:
        table: what was measured so far.

    Args:
        engine: the model; its passage cache is used where it has one.
        examples: prepared ones.
        metric: instead of the exact match; then each setting generates its answers.
        max_new_tokens: of those.
        keep_bytes: see `KEEP_BYTES`.
    """

    def __init__(
        self,
        engine: Engine,
        examples: Sequence[Prepared],
        *,
        metric: Metric | None = None,
        max_new_tokens: int = 32,
        keep_bytes: int = KEEP_BYTES,
    ) -> None:
        self._engine = engine
        self._examples = examples
        self._metric = metric
        self._max_new_tokens = max_new_tokens
        self._ends = sorted(engine.decoder.end_tokens({}))
        self._bytes_left = keep_bytes
        self._kept: dict[Hashable, EncodedContext] = {}
        self._latest: dict[Hashable, EncodedContext] = {}
        self.table: Table = {}

    def run(self, settings: Sequence[Method], on_progress: OnProgress) -> None:
        """Measure settings that were not measured yet on all examples."""
        known = next(iter(self.table.values()), {})
        fresh = [one for one in dict.fromkeys(settings) if one not in known]
        # Side by side where they share an encoding, in the order given otherwise.
        keys = list(dict.fromkeys(map(encoding_key, fresh)))
        fresh.sort(key=lambda one: keys.index(encoding_key(one)))
        whole = len(fresh) * len(self._examples)
        for place, prepared in enumerate(self._examples):
            for number, method in enumerate(fresh):
                on_progress("Trying settings", place * len(fresh) + number, whole)
                for figure, value in self._figures(prepared, method).items():
                    rows = self.table.setdefault(figure, {}).setdefault(method, {})
                    rows[prepared.number] = value
        on_progress("Trying settings", whole, whole)

    def spread(self, prepared: Prepared, method: Method) -> float | None:
        """Spread of the attention over the passages while the greedy answer begins.

        Over as many tokens as the guard writes to measure it. None where the method records no
        attention weights.
        """
        masses = attention_of_answer(
            self._engine.decoder,
            self._context(prepared, method),
            prepared.request.parts.query_ids,
            {},
            Guard().rows,
        )
        return attention_spread(masses) if masses else None

    def _context(self, prepared: Prepared, method: Method) -> EncodedContext:
        key = (prepared.number, encoding_key(method))
        context = self._kept.get(key) or self._latest.get(key)
        if context is None:
            request = dataclasses.replace(prepared.request, method=method)
            context = self._engine.encode(request)
            size = _bytes(context)
            if size <= self._bytes_left:
                self._bytes_left -= size
                self._kept[key] = context
            else:
                # The next settings ask for it as well; the next example does not.
                self._latest = {key: context}
        return dataclasses.replace(context, method=method)

    @torch.no_grad()
    def _figures(self, prepared: Prepared, method: Method) -> dict[str, float]:
        """The figures of one setting on one example, see `rag_windows.calibration.profile`."""
        answers: list[tuple[int, ...]] = []
        if prepared.gold is not None:
            # Any end token will do: what counts is the distribution from which it is taken.
            answers.append((*prepared.gold, *self._ends[:1]))
        if prepared.reference is not None and prepared.reference.ids not in answers:
            answers.append(prepared.reference.ids)
        if not answers:
            return {}
        context = self._context(prepared, method)
        query = prepared.request.parts.query_ids
        rows = forced_logprobs(self._engine.decoder, context, query, answers)
        found = dict(zip(answers, rows, strict=True))
        figures: dict[str, float] = {}
        if prepared.gold is not None:
            figures |= self._by_label(prepared.gold, found[answers[0]])
            if self._metric is not None:
                del figures["exact match"]
                figures["metric"] = self._by_metric(prepared, context, self._metric)
        if prepared.reference is not None:
            figures |= _by_reference(prepared.reference, found[prepared.reference.ids])
        return figures

    def _by_label(self, gold: tuple[int, ...], logprobs: torch.Tensor) -> dict[str, float]:
        chosen = logprobs.argmax(dim=-1).tolist()
        target = torch.tensor(gold, device=logprobs.device).unsqueeze(1)
        total = logprobs[: len(gold)].gather(1, target).sum()
        right = chosen[: len(gold)] == list(gold)
        if self._ends:
            right = right and chosen[-1] in self._ends
            total = total + logprobs[-1, self._ends].logsumexp(dim=-1)
        return {"exact match": float(right), "log-probability": float(total)}

    def _by_metric(self, prepared: Prepared, context: EncodedContext, metric: Metric) -> float:
        decoded = self._engine.decoder.generate(
            context, prepared.request.parts.query_ids, options=_greedy(self._max_new_tokens)
        )
        text = self._engine.text.detokenizer.text(decoded.sequences[0], ())
        return float(metric(text.strip(), prepared.example.answer or ""))


def _by_reference(reference: Reference, logprobs: torch.Tensor) -> dict[str, float]:
    terms = reference.logprobs.exp() * (reference.logprobs - logprobs)
    # A token that the reference never takes adds nothing, whatever the other says of it.
    terms = terms.masked_fill(reference.logprobs == -torch.inf, 0.0)
    agrees = logprobs.argmax(dim=-1).tolist() == list(reference.ids)
    divergence = float(terms.sum(dim=-1).mean().clamp(min=0.0))
    return {"divergence": divergence, "agreement": float(agrees)}


def _bytes(context: EncodedContext) -> int:
    windows = context.windows
    if windows is None:
        return 0
    held = windows.windows if isinstance(windows, Members) else [windows]
    return sum(tensor.nbytes for one in held for tensor in (*one.keys, *one.values))
