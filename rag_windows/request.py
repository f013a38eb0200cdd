"""A question and how it is answered: the options, checked and tokenized before any work."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, Protocol, cast, runtime_checkable

from rag_windows.cache.keys import fields as joined
from rag_windows.engine import Engine
from rag_windows.errors import InputError, LimitError
from rag_windows.guard import FallbackOption, few_short_passages, guard_of
from rag_windows.methods import Auto, Method, QueryLikelihood, Sequential, linked
from rag_windows.methods.linked import Choose, LinkTokens
from rag_windows.passage import DOCUMENT_KEYS, Note, Passage, WindowTokens, refuse_single
from rag_windows.prefill import (
    EncodedContext,
    EncodingPlan,
    OnEncoded,
    Prefill,
    Source,
    complete,
)
from rag_windows.prompt.answer_form import FORMS, with_form
from rag_windows.prompt.builder import Prompt, PromptParts
from rag_windows.prompt.conversation import Conversation
from rag_windows.prompt.detokenize import Detokenizer
from rag_windows.prompt.reasoning import ReasoningFormat
from rag_windows.results import Fallback
from rag_windows.sampling import (
    LogprobRecorder,
    check_names,
    check_numbers,
    recorder_of,
    whole_number,
)
from rag_windows.steps.recompute import check_passes
from rag_windows.steps.removal import refusal
from rag_windows.titles import Titles
from rag_windows.windows import WindowStore

Messages = str | Sequence[Mapping[str, Any]] | Conversation
PassageLike = Passage | str | Mapping[str, Any]

DEFAULT_NEW_TOKENS = 128

_PART = re.compile(r"(.+)#\d+", re.DOTALL)


@runtime_checkable
class Book(Protocol):
    """What stands in the place of passages and chooses those that a question reads."""

    def chosen(self, model: Any, asked: BatchRequest) -> tuple[Any, BatchRequest]:
        """The engine that answers, and the request with passages in the place of the book.

        Args:
            model: that was asked.
            asked: the request.

        Raises:
            InputError: the book is another model's, or can't serve this request.
        """


@dataclass(frozen=True, slots=True)
class Removals:
    """Which passages are left out.

    Attributes:
        top: only so many, those with the most attention; None for all that were read.
    """

    top: int | None = None

    @classmethod
    def of(cls, citations: bool | str) -> Removals | None:
        """What ``citations`` asks for: "removal", "removal:top=4", or True and False for none.

        Raises:
            InputError: it is something else.
        """
        if isinstance(citations, bool):
            return None
        found = _REMOVAL.fullmatch(citations) if isinstance(citations, str) else None
        if found is None:
            raise InputError(
                f"citations must be True, False, 'removal' or such as 'removal:top=4', not "
                f"{citations!r:.80}."
            )
        return cls(None if found[1] is None else int(found[1]))


_REMOVAL = re.compile(r"removal(?::top=([1-9]\d{0,8}))?")


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The arguments of `WindowedLM.generate`, which describes them, as one object.

    Attributes:
        options: what `generate` takes as ``generate_kwargs``.
    """

    query: Messages
    passages: Sequence[PassageLike] | Book = ()
    prefix: str | None = None
    method: str | Method | None = None
    max_new_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    citations: bool | str = True
    seed: int | None = None
    on_encoded: OnEncoded | None = None
    link_tokens: LinkTokens | None = None
    link_choose: Choose = "first"
    fallback: FallbackOption = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, request: BatchRequest | Mapping[str, Any]) -> BatchRequest:
        """A request from the keyword arguments of `WindowedLM.generate`.

        Raises:
            InputError: there is no query, or it is no request at all.
        """
        if isinstance(request, BatchRequest):
            return request
        if not isinstance(request, Mapping) or "query" not in request:
            raise InputError(
                "Each request must be a BatchRequest or a dict of generate's arguments with a "
                f"'query', not {type(request).__name__}."
            )
        own = {one.name for one in fields(cls)} - {"options"}
        named = {name: value for name, value in request.items() if name in own}
        options = {name: value for name, value in request.items() if name not in own}
        return cls(**named, options=options)


@dataclass(frozen=True, slots=True)
class Request:
    """A `BatchRequest`, checked and tokenized.

    Attributes:
        engine: what answers it.
        plan: what is encoded for it, by its method; `with_method` changes both.
        options: for transformers' generate, ``max_new_tokens`` among them.
        started: ``time.perf_counter()`` at the call.
        fallback: what its guard found; where that was ``taken``, this is the request with passages
            read one after the other.
        reasoning: how its answers divide into reasoning and text; None where all is text.
        removals: which passages are left out afterwards; None for none.
    """

    engine: Engine
    parts: PromptParts
    passages: tuple[Passage, ...]
    method: Method
    plan: EncodingPlan
    max_new_tokens: int
    stop: tuple[str, ...]
    citations: bool
    seed: int | None
    options: Mapping[str, Any]
    on_encoded: OnEncoded | None
    started: float
    logprobs: LogprobRecorder | None = None
    fallback: Fallback | None = None
    reasoning: ReasoningFormat | None = None
    removals: Removals | None = None

    @classmethod
    def of(
        cls,
        engine: Engine,
        asked: BatchRequest | Mapping[str, Any],
        *,
        prompt: Prompt | None = None,
        max_window_tokens: int | None = None,
    ) -> Request:
        """Check and tokenize a question; a book chooses its passages, and its engine, first.

        Args:
            engine: that is asked.
            asked: the arguments of `WindowedLM.generate`.
            prompt: instead of the engine's own.
            max_window_tokens: instead of the engine's own.

        Raises:
            InputError, PromptError, LimitError: saying what to do.
        """
        started, asked = time.perf_counter(), BatchRequest.of(asked)
        if isinstance(asked.passages, Book):
            engine, asked = asked.passages.chosen(engine.model, asked)
        refuse_single(asked.passages)
        passages = tuple(Passage.of(one) for one in cast("Sequence[PassageLike]", asked.passages))
        tokens = asked.max_new_tokens
        if tokens is None:
            tokens = getattr(asked.options.get("generation_config"), "max_new_tokens", None)
        tokens = whole_number("max_new_tokens", DEFAULT_NEW_TOKENS if tokens is None else tokens)
        stop, seed = stop_strings(asked.stop), seed_of(asked.seed)
        removals = Removals.of(asked.citations)
        prompt, reasoning = prompt or engine.text.prompt, engine.text.reasoning
        held = any(asked.options.get(form) is not None for form in FORMS)

        def read_by(method: Method) -> Request:
            # One after the other, passages need no windows to be cut into.
            longest = None if in_order(method) else max_window_tokens or engine.max_window_tokens
            parts = prompt.build(
                asked.query,
                passages,
                prefix=asked.prefix,
                max_window_tokens=longest,
                neighbours=method.neighbours,
            )
            form = reasoning and reasoning.after(parts.answer_start)
            # A model that has not begun to think has no time for it where its answer has a form.
            if held and form is not None and not form.parts().thought:
                form = None
            options = _options(engine, asked.options, form)
            recorder = recorder_of(options)
            check_names(options, engine.model)
            limit = engine.position_limit if parts.windows else engine.prompt_limit
            request = cls(
                engine=engine,
                parts=parts,
                passages=passages,
                method=method,
                plan=encoding_plan(parts, passages, method),
                max_new_tokens=tokens,
                stop=stop,
                citations=bool(asked.citations),
                removals=removals,
                seed=seed,
                options={**options, "max_new_tokens": tokens},
                on_encoded=asked.on_encoded,
                started=started,
                logprobs=recorder,
                reasoning=form,
            )
            check_limits(request, limit)
            return request

        method = linked(engine.method_of(asked.method), asked.link_tokens, asked.link_choose)
        engine.plain_encoder.check_method(method)
        check_removals(removals, method)
        try:
            request = read_by(method)
        except LimitError:
            if not isinstance(method, Auto) or engine.in_rows:
                raise
            method = method.apart()
            request = read_by(method)
        windows = request.parts.windows
        if isinstance(method, Auto) and windows:
            request = request.noted(_seen(windows, method))
        unknown = engine.in_rows and method.combination is None and removals is None
        if unknown and windows and request.citations:
            request = request.noted(_NOT_MEASURED)
        guard = guard_of(asked.fallback)
        if guard is None or not windows or not method.windowed:
            return request
        found = few_short_passages(guard, windows)
        if found is None:
            return request
        try:
            ordinary = read_by(Sequential())
        except LimitError as error:
            message = (
                f"Windows may answer worse here, because {found.message}. The passages were "
                f"read in windows all the same, as one prompt does not hold them: {error}"
            )
            return replace(request, fallback=replace(found, taken=False, message=message))
        if removals is not None:
            ordinary = replace(ordinary, removals=None).noted(_NOT_REMOVED)
        message = f"The passages were read one after the other, because {found.message}."
        return replace(ordinary, fallback=replace(found, message=message))

    def noted(self, message: str) -> Request:
        """The same with one more note, about the method."""
        parts = self.parts
        notes = (*parts.notes, Note("method", None, message))
        return replace(self, parts=replace(parts, notes=notes))

    def with_method(self, method: Method) -> Request:
        """The same with another method, which takes windows as they were cut for this one."""
        return replace(self, method=method, plan=encoding_plan(self.parts, self.passages, method))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prefix, windows and query."""
        parts = self.parts
        return len(parts.prefix_ids) + len(parts.query_ids) + sum(self.plan.lengths)

    @property
    def detokenizer(self) -> Detokenizer:
        """Turns the tokens of an answer into text."""
        return (self.engine.text if self.reasoning is None else self.reasoning).detokenizer

    def divided(self, ids: Sequence[int]) -> tuple[str, str, str]:
        """What the tokens of an answer spell: all of it, the reasoning, what is for the user."""
        form, written = self.reasoning, self.detokenizer.text(ids)
        return (written, "", written) if form is None else (written, *form.split(written))

    def prefill(self, encoder: WindowStore | None = None) -> Prefill[EncodedContext]:
        """Encode what queries of it read, pass by pass."""
        return (encoder or self.engine.encoder).prefill(self.plan, self.on_encoded)

    def encode(self, encoder: WindowStore | None = None) -> EncodedContext:
        """`prefill`, at once."""
        return complete(self.prefill(encoder))

    def prefill_for_query(self, encoder: WindowStore | None = None) -> Prefill[EncodedContext]:
        """`prefill`, and what of the method waits for its own query."""
        context = yield from self.prefill(encoder)
        if context.waits:
            yield 0.0
        parts = self.parts
        return self.engine.decoder.for_query(context, parts.query_ids, parts.question)


def encoding_plan(parts: PromptParts, passages: Sequence[Passage], method: Method) -> EncodingPlan:
    """What is encoded for a prompt's parts; a passage is one citation group."""
    sources = [
        Source(f"Passage {passage_name(passage, index)}", labels_of(passage))
        for index, passage in enumerate(passages)
    ]
    windows = parts.windows
    return EncodingPlan.of(
        parts.prefix_ids,
        [window.ids for window in windows],
        method,
        chunks=[window.before for window in windows],
        sources=[sources[window.passage] for window in windows],
        groups=[window.passage for window in windows],
        scores=[passages[window.passage].score for window in windows],
        titles=Titles(tuple(passages), parts.asked),
    )


def _options(
    engine: Engine, given: Mapping[str, Any], reasoning: ReasoningFormat | None
) -> dict[str, Any]:
    """For transformers' generate; new each time: a form notes where its answer stands."""
    options = dict(given)
    if "stop_strings" in options:
        options.setdefault("tokenizer", engine.tokenizer)
    ends = engine.decoder.end_tokens(options)
    options = with_form(options, engine.tokenizer, engine.decoder.vocabulary, ends, reasoning)
    check_numbers(options)
    return options


_NOT_MEASURED = (
    "This model reads the chosen passages as one text, and its attention is not measured, so that "
    "no passage has a share of it. Use method='pced', or citations='removal' with 'auto'."
)

_NOT_REMOVED = (
    "One prompt holds all passages, of which none can be left out without encoding the others "
    "again: the citations are shares of the attention."
)


def _seen(windows: Sequence[WindowTokens], method: Auto) -> str:
    """What `Auto` makes of a request's windows, in words."""
    passages, chunks = len({one.passage for one in windows}), sum(bool(w.before) for w in windows)
    every = "the only passage is" if passages == 1 else f"all {passages} passages are"
    chosen, read = method.selection, f"{every} read by {method.reader.name}"
    if isinstance(chosen, QueryLikelihood):
        few = passages <= chosen.retrieve
        best = "the one that suits the question best is"
        if chosen.retrieve > 1:
            best = f"the {chosen.retrieve} that suit the question best are"
        how = "side by side" if chosen.reader.windowed else "in one prompt"
        if chunks and not chosen.reader.windowed:
            how += ", or side by side where one of them saw the chunks before it"
        which = every if few else f"of {passages} passages, {best}"
        read = f"{which} read {how}"
    if chunks:
        read += f"; {chunks} of {len(windows)} windows saw the chunks before them when encoded"
    return f"auto: {read}."


def check_removals(removals: Removals | None, method: Method) -> None:
    """Refuse to leave passages out of what they can't be left out of.

    Raises:
        InputError: naming the method and why.
    """
    reason = None if removals is None else refusal(method)
    if reason is not None:
        raise InputError(
            f"citations='removal' leaves passages out of what was read, but {method.name!r} "
            f"{reason}. Use citations by attention, or a method such as 'auto', 'ape' or 'pced'."
        )


def check_citations(citations: bool | str, method: Method) -> None:
    """Refuse a value of ``citations``, or one that a method can't serve.

    Raises:
        InputError: saying what to use.
    """
    check_removals(Removals.of(citations), method)


def in_order(method: Method) -> bool:
    """Whether passages stand one after the other, so that all of them share the positions."""
    return not method.windowed or method.alignment == "in order"


def check_limits(request: Request, limit: int | None) -> None:
    """Refuse a request whose last token would stand beyond the model's positions.

    With windows side by side the query follows the longest one, so only that one counts; read or
    placed one after the other, all of them do.

    Raises:
        LimitError: naming the passage (or the query) that is too long, its size and the limit.
    """
    if limit is None:
        return
    parts, passages, plan = request.parts, request.passages, request.plan
    method, max_new_tokens = plan.method, request.max_new_tokens
    prefix, query = len(parts.prefix_ids), len(parts.query_ids)
    free = limit - prefix - query - max_new_tokens
    if free < (1 if parts.windows else 0):
        raise LimitError(
            f"The request does not fit the model: a prefix of {prefix} tokens, a query of {query} "
            f"tokens and {max_new_tokens} new tokens need {limit - free} of the model's {limit} "
            "positions and leave none for passages. Shorten the question or the conversation, or "
            "ask for fewer new tokens. Pass retrieved text as passages=, which are read in "
            "windows."
        )

    def name(index: int) -> str:
        number = parts.windows[index].passage
        return f"Passage {passage_name(passages[number], number)}"

    for index, window in enumerate(() if in_order(method) else plan.windows):
        length, seen = len(window.ids), len(window.before)
        if seen + length > free:
            fitting = free - seen
            advice = f"Set max_window_tokens={free} or less, which splits it into several windows."
            if seen:
                advice = (
                    f"It is encoded behind {seen} tokens of neighbours or sink, which have to fit "
                    f"as well. Let it see fewer of them, such as neighbours:chunks=1"
                    + (f", or set max_window_tokens={fitting} or less." if fitting > 0 else ".")
                )
            raise LimitError(
                f"{name(index)} needs a window of {length} tokens, but the model's {limit} "
                f"positions leave {free} beside prefix, query and new tokens. {advice}"
            )
    if isinstance(method.alignment, int):
        last = max((one.start + len(one.ids) - prefix for one in plan.windows), default=0)
        if last > free:
            raise LimitError(
                f"Windows end at multiples of {method.alignment} tokens behind the prefix, the "
                f"last at {last}, but the model's {limit} positions leave {free} beside prefix, "
                "query and new tokens. Name a smaller multiple, such as 'aligned:tokens=64+ape'."
            )
    together = list(accumulate(plan.lengths)) if in_order(method) else []
    for index, tokens in enumerate(together):
        if tokens > free:
            raise LimitError(
                f"The passages do not fit the model one after the other: {name(index)} has "
                f"{plan.lengths[index]} tokens, {tokens} with the passages before it, but the "
                f"model's {limit} positions leave {free} beside prefix, query and new tokens. Give "
                "fewer passages, or use a method with windows, such as 'ape' or 'pcw'."
            )
    if isinstance(method.selection, QueryLikelihood) and not method.selection.reader.windowed:
        _check_chosen(method.selection, request, free, limit)
    if method.refinement is not None:
        starts = [window.start - len(window.before) for window in plan.windows]
        whole = [len(window.before) + len(window.ids) for window in plan.windows]
        named = name if method.windowed else lambda _: "All passages together"
        check_passes(method.refinement, starts, whole, limit, named)


def _check_chosen(selection: QueryLikelihood, request: Request, free: int, limit: int) -> None:
    """Refuse more passages in one prompt than fit, whichever the query chooses."""
    tokens: dict[int, int] = {}
    for window, planned in zip(request.parts.windows, request.plan.windows, strict=True):
        read = request.engine.plain_encoder.ids_of(planned)
        tokens[window.passage] = tokens.get(window.passage, 0) + len(read)
    longest = sorted(tokens.values(), reverse=True)
    together = sum(longest[: selection.retrieve])
    if together > free:
        fitting = sum(1 for total in accumulate(longest) if total <= free)
        raise LimitError(
            f"The {selection.retrieve} passages that {selection.name} reads in one prompt may have "
            f"{together} tokens, but the model's {limit} positions leave {free} beside prefix, "
            f"query and new tokens. "
            + (f"Set retrieve={fitting} or less." if fitting else "Read them with 'pcw'.")
        )


def passage_name(passage: Passage, index: int) -> str:
    """How errors and notes call a passage: its number, and its id or title if it has one."""
    label = passage.id or passage.title
    return f"{index}" if label is None else f"{index} ({label!r})"


def content_label(passage: Passage) -> str:
    """Equal for passages of equal title and text, whatever their ids, and only for these.

    A fleet finds out by it where a passage's windows are, without a model or a tokenizer.
    """
    said = (passage.title or "", passage.text)
    content = joined(*(one.encode("utf-8", "surrogatepass") for one in said))
    return f"content:{hashlib.sha256(content).hexdigest()}"


def labels_of(passage: Passage) -> tuple[str, ...]:
    """What a cache knows a passage's windows by, beside their keys: its content, then its ids.

    `content_label` comes first. The ids are the passage's own; its document's, which is an id
    without the ``#3`` that splitting adds, `Passage.document`, and what the metadata say. The
    chunks in front of it that it was encoded in sight of are known only by their document.
    """
    labels = {content_label(passage): None}
    if passage.id:
        labels[passage.id] = None
        if part := _PART.fullmatch(passage.id):
            labels[part[1]] = None
    if passage.document:
        labels[passage.document] = None
    for key in DOCUMENT_KEYS:
        value = passage.metadata.get(key)
        if isinstance(value, str) and value:
            labels[value] = None
    return tuple(labels)


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """What ends a text, checked."""
    strings = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(strings, Iterable) or not all(isinstance(one, str) for one in strings):
        raise InputError(f"stop must be a string or a list of strings, not {stop!r}.")
    if "" in strings:
        raise InputError("A stop string must not be empty. Leave it out.")
    return tuple(strings)


def seed_of(seed: object) -> int | None:
    """What seeds a generator of PyTorch's, or None."""
    if seed is None:
        return None
    number = whole_number("seed", seed, least=-(2**63))
    if number >= 2**64:
        raise InputError(f"seed must be below 2**64, not {seed!r}.")
    return number
