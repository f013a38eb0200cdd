"""A wrapped model and the one path of a request: check, prefill, generate, result.

No public interface: `WindowedLM` is.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Self, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from rag_windows.attention.hook import register
from rag_windows.attention.layers import (
    check_attention,
    check_config,
    position_limit,
    probe_ids,
    prompt_limit,
)
from rag_windows.attention.mirror import ModelMirror
from rag_windows.cache.fingerprint import ModelIdentity, TokenizerIdentity
from rag_windows.cache.passage_cache import PassageCache
from rag_windows.citations import TokenWeights, cited, is_supported, shares_of, statements
from rag_windows.errors import (
    GenerationError,
    InputError,
    LimitError,
    ModelError,
    ProfileError,
    report_stop_iteration,
)
from rag_windows.generate import Decoder
from rag_windows.guard import few_short_passages, guard_of, multi_hop
from rag_windows.loading import input_device
from rag_windows.methods import APE, PCW, Auto, Method, QueryLikelihood, Sequential, linked, resolve
from rag_windows.passage import Passage, WindowTokens, refuse_single, with_neighbours
from rag_windows.prefill import (
    EncodedContext,
    ModelEncoder,
    Prefill,
    PrefillCancelledError,
    complete,
)
from rag_windows.prompt.answer_form import FORMS, with_form
from rag_windows.prompt.builder import Header, Prompt
from rag_windows.prompt.detokenize import Detokenizer, Pieces, cut
from rag_windows.prompt.reasoning import ReasoningFormat
from rag_windows.request import (
    DEFAULT_NEW_TOKENS,
    BatchRequest,
    Book,
    Messages,
    PassageLike,
    Removals,
    Request,
    check_limits,
    check_removals,
    encoding_plan,
    in_order,
    seed_of,
    stop_strings,
)
from rag_windows.results import (
    Fallback,
    FinishReason,
    Generation,
    Statement,
    Timings,
    Usage,
)
from rag_windows.sampling import (
    Cancelled,
    FirstToken,
    StopStrings,
    check_counts,
    recorder_of,
    whole_number,
)
from rag_windows.steps.removal import Removal
from rag_windows.windows import CacheAccess, WindowStore

logger = logging.getLogger(__name__)

OnWarmed = Callable[[int, int | None], None]
"""Called with the number of passages done and of all; None where that is not known."""

CHUNK = 32
"""Passages that are looked up, encoded and stored together; an interruption loses no more."""


@dataclass(frozen=True, slots=True)
class Warmed:
    """What warming did.

    Attributes:
        passages: read, blank and repeated ones included.
        encoded: windows that were encoded.
        present: windows that were there already.
        tokens: of the encoded windows.
        seconds: the whole call.
    """

    passages: int = 0
    encoded: int = 0
    present: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TextParts:
    """What only a model with a tokenizer has."""

    prompt: Prompt
    detokenizer: Detokenizer
    reasoning: ReasoningFormat | None


class Engine:
    """A model, its prompt and its cache. Threads may share one; nothing of a call stays in it.

    Attributes:
        position_limit: positions that windows may use, or None for no limit.
        prompt_limit: those of a prompt without windows.
        plain_encoder: runs the model over windows.
        encoder: finds windows where there is a cache, and encodes the others.
        numbered: whether windows hold where their passage stands among the others.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        method: str | Method = "auto",
        max_window_tokens: int | None = None,
        header: Header = "title",
        template_kwargs: Mapping[str, Any] | None = None,
        text_tokens: Collection[str] = (),
        max_batch_tokens: int | None = None,
        cache: PassageCache | bool | None = None,
        revision: str | None = None,
    ) -> None:
        if max_batch_tokens is not None:
            max_batch_tokens = whole_number("max_batch_tokens", max_batch_tokens)
        self.model = model
        self.method = resolve(method)
        register()
        check_config(model)
        mirror = ModelMirror(model)
        self.plain_encoder = ModelEncoder(mirror, max_batch_tokens)
        self.decoder = Decoder(model, self.plain_encoder)
        self._clock_known = False
        self._text: TextParts | None = None
        if tokenizer is not None:
            prompt = Prompt(
                tokenizer, header=header, template_kwargs=template_kwargs, text_tokens=text_tokens
            )
            reasoning = ReasoningFormat.of(tokenizer, template_kwargs or {})
            self._text = TextParts(prompt, Detokenizer(tokenizer), reasoning)
        prompt_or_none = None if self._text is None else self._text.prompt
        mirror.check = functools.partial(_check, model, self.decoder, prompt_or_none)
        mirror.check()
        self._tokenizer_identity = TokenizerIdentity(tokenizer)
        self._revision = revision
        self._attach(PassageCache.of(cache))
        self.tokenizer = tokenizer
        self.position_limit = position_limit(model.config)
        self.prompt_limit = prompt_limit(model.config)
        if max_window_tokens is not None:
            max_window_tokens = whole_number("max_window_tokens", max_window_tokens)
        half = self.position_limit // 2 if self.position_limit else None
        self.max_window_tokens = max_window_tokens or half
        self.numbered = header in ("number", "number+title")

    def weigh_heads(self, heads: Sequence[Sequence[float]]) -> None:
        """Let the attention of each layer's heads count so much in citations.

        Raises:
            ProfileError: the model has other layers or heads.
        """
        config = self.model.config.get_text_config(decoder=True)
        layers, found = int(config.num_hidden_layers), int(config.num_attention_heads)
        if [len(one) for one in heads] != [found] * layers:
            raise ProfileError(
                f"The profile weighs {len(heads)} layers of {len(heads[0]) if heads else 0} heads, "
                f"but this model has {layers} of {found}. Fit them again with `rag-windows eval "
                "heads`."
            )
        device = input_device(self.model)
        self.decoder.head_weights = torch.tensor(heads, dtype=torch.float32, device=device)

    def with_cache(self, cache: PassageCache | bool | None) -> Self:
        """The same with another cache, or none."""
        other = copy.copy(self)
        other._attach(PassageCache.of(cache))
        return other

    @property
    def text(self) -> TextParts:
        """What only a model with a tokenizer has.

        Raises:
            ModelError: there is none.
        """
        if self._text is None:
            raise ModelError(
                "This model has no tokenizer, so it takes token ids only. Pass tokenizer= to "
                "from_pretrained."
            )
        return self._text

    def method_of(self, method: str | Method | None) -> Method:
        """A method by name, itself, or the default one for None."""
        return self.method if method is None else resolve(method)

    def reading_all(self, method: str | Method | None) -> Method:
        """The same for what reads all windows: demonstrations, or those that a book chose.

        "auto" chooses among passages, so "ape" stands in for it where no method is named.
        """
        chosen = self.method_of(method)
        return APE() if method is None and isinstance(chosen, Auto) else chosen

    def _attach(self, cache: PassageCache | None) -> None:
        self.cache = cache
        plain = self.plain_encoder
        access = None
        if cache is not None:
            self._warn_of_clock()
            identity = ModelIdentity(self.model, plain, self._revision, cache.weight_sums)
            access = CacheAccess(cache, identity, self._tokenizer_identity)
        self.encoder = WindowStore(plain, access)

    def _warn_of_clock(self) -> None:
        """Say once that the cache finds little, where the chat template asks the clock."""
        if self._text is None or self._clock_known:
            return
        self._clock_known = True
        if (clock := self._text.prompt.clock) is not None:
            logger.warning("%s", clock)

    def ask(self, asked: BatchRequest) -> tuple[Engine, Request]:
        """What answers a question, and the checked question; a book chooses its passages first.

        Raises:
            InputError, PromptError, LimitError: saying what to do.
        """
        started = time.perf_counter()
        engine = self
        if isinstance(asked.passages, Book):
            engine, asked = asked.passages.chosen(self.model, asked)
        return engine, engine._checked(asked, started)

    def request(
        self,
        query: Messages,
        passages: Sequence[PassageLike],
        *,
        prompt: Prompt | None = None,
        max_window_tokens: int | None = None,
        **arguments: Any,
    ) -> Request:
        """Check and tokenize a question, with arguments as in `WindowedLM.generate`.

        ``prompt`` and ``max_window_tokens`` stand in for the model's own.
        """
        asked = BatchRequest.of({"query": query, "passages": passages, **arguments})
        return self._checked(asked, time.perf_counter(), prompt, max_window_tokens)

    def _checked(
        self,
        asked: BatchRequest,
        started: float,
        prompt: Prompt | None = None,
        max_window_tokens: int | None = None,
    ) -> Request:
        refuse_single(asked.passages)
        passages = tuple(Passage.of(one) for one in cast("Sequence[PassageLike]", asked.passages))
        tokens = asked.max_new_tokens
        if tokens is None:
            tokens = getattr(asked.options.get("generation_config"), "max_new_tokens", None)
        tokens = whole_number("max_new_tokens", DEFAULT_NEW_TOKENS if tokens is None else tokens)
        stop, seed = stop_strings(asked.stop), seed_of(asked.seed)
        removals = Removals.of(asked.citations)
        prompt, reasoning = prompt or self.text.prompt, self.text.reasoning
        held = any(asked.options.get(form) is not None for form in FORMS)

        def read_by(method: Method) -> Request:
            # One after the other, passages need no windows to be cut into.
            longest = None if in_order(method) else max_window_tokens or self.max_window_tokens
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
            options = self._options(asked.options, form)
            recorder = recorder_of(options)
            limit = self.position_limit if parts.windows else self.prompt_limit
            request = Request(
                parts=parts,
                passages=passages,
                method=method,
                plan=encoding_plan(parts, passages, method),
                max_new_tokens=tokens,
                stop=stop,
                citations=bool(asked.citations),
                removals=removals,
                seed=seed,
                options=options,
                on_encoded=asked.on_encoded,
                started=started,
                logprobs=recorder,
                reasoning=form,
            )
            check_limits(request, limit)
            return request

        method = linked(self.method_of(asked.method), asked.link_tokens, asked.link_choose)
        check_removals(removals, method)
        try:
            request = read_by(method)
        except LimitError:
            if not isinstance(method, Auto):
                raise
            method = method.apart()
            request = read_by(method)
        windows = request.parts.windows
        if isinstance(method, Auto) and windows:
            request = request.noted(_seen(windows, method))
        guard = guard_of(asked.fallback)
        if guard is None or not windows or not method.windowed:
            return request
        if guard.spread is None and few_short_passages(guard, windows) is None:
            return request
        ordinary: Request | LimitError
        try:
            ordinary = read_by(Sequential())
        except LimitError as error:
            ordinary = error
        if removals is not None and isinstance(ordinary, Request):
            ordinary = replace(ordinary, removals=None).noted(_NOT_REMOVED)
        return replace(request, guard=guard, ordinary=ordinary)

    def _options(
        self, given: Mapping[str, Any], reasoning: ReasoningFormat | None
    ) -> dict[str, Any]:
        """For transformers' generate; new each time: a form notes where its answer stands."""
        options = dict(given)
        if "stop_strings" in options:
            options.setdefault("tokenizer", self.tokenizer)
        ends = self.decoder.end_tokens(options)
        options = with_form(options, self.tokenizer, self.decoder.vocabulary, ends, reasoning)
        check_counts(options)
        return options

    def prefill(
        self, request: Request, encoder: WindowStore | None = None
    ) -> Prefill[EncodedContext]:
        """Encode what queries of a request read, pass by pass."""
        encoder, report = encoder or self.encoder, request.on_encoded
        report = None if report is None else report_stop_iteration(report)
        return encoder.prefill(request.plan, report)

    def prefill_for_query(
        self, request: Request, encoder: WindowStore | None = None
    ) -> Prefill[EncodedContext]:
        """`prefill`, and what of the method waits for the request's own query."""
        context = yield from self.prefill(request, encoder)
        if context.waits:
            yield 0.0
        parts = request.parts
        return self.decoder.for_query(context, parts.query_ids, parts.question)

    def encode(
        self,
        request: Request,
        cancelled: threading.Event | None = None,
        encoder: WindowStore | None = None,
    ) -> EncodedContext:
        """`prefill`, at once.

        Raises:
            PrefillCancelledError: ``cancelled`` was set meanwhile.
        """
        return complete(self.prefill(request, encoder), cancelled)

    def answer(
        self,
        request: Request,
        streamer: BaseStreamer | None = None,
        cancelled: threading.Event | None = None,
    ) -> Generation:
        """Encode, generate, and put the result together; ``cancelled`` ends it when set."""
        try:
            request, context, fallback = self._guarded(request, cancelled)
        except PrefillCancelledError:
            return self.unbegun(request)
        query_ids = request.parts.query_ids
        encoded_at = time.perf_counter()
        first = FirstToken()
        decoded = self.decoder.generate(
            context,
            query_ids,
            options={**request.options, "max_new_tokens": request.max_new_tokens},
            seed=request.seed,
            record_weights=request.citations,
            weigh_heads=True,
            streamer=streamer,
            stopping=lambda length: self.criteria(request, first, cancelled, length),
        )
        stopped_early = cancelled is not None and cancelled.is_set()
        found = []
        for index, ids in enumerate(decoded.sequences):
            weights = decoded.token_weights(index) if request.citations else None
            removal = self.removal(request, context, ids, weights, cancelled)
            found.append((ids, weights, removal))
        timings = Timings.of(request.started, encoded_at, first.seen_at)
        results = [
            self.generation(
                request,
                ids,
                weights,
                cached_tokens=context.cached_tokens,
                windows=context.encoded_windows + context.cached_windows,
                cached_windows=context.cached_windows,
                timings=timings,
                stopped_early=stopped_early,
                chosen=context.chosen,
                fallback=fallback,
                raw=decoded.raw,
                removal=removal,
            )
            for ids, weights, removal in found
        ]
        return replace(results[0], alternatives=tuple(results[1:]))

    def removal(
        self,
        request: Request,
        context: EncodedContext,
        ids: Sequence[int],
        weights: TokenWeights | None,
        cancelled: threading.Event | None = None,
    ) -> Removal | None:
        """What an answer loses without each passage, if that was asked for and there is any.

        ``weights`` are as in `generation`. What is cancelled ends between two passes, without.
        """
        asked = request.removals
        if asked is None or context.windows is None or not ids:
            return None

        def check() -> None:
            if cancelled is not None and cancelled.is_set():
                raise PrefillCancelledError("The question was cancelled.")

        groups = list(dict.fromkeys(context.groups))
        if asked.top is not None and weights is not None:
            masses = shares_of(weights)
            groups = sorted(groups, key=lambda group: -masses[group])[: asked.top]
        try:
            return self.decoder.removal(context, request.parts.query_ids, ids, groups, check)
        except PrefillCancelledError:
            return None

    def warm(
        self,
        passages: Iterable[PassageLike],
        *,
        prefix: str | None,
        conversation: Messages | None,
        on_warmed: OnWarmed | None,
        ttl: float | None,
    ) -> Warmed:
        """See `WindowedLM.warm`."""
        begun = time.perf_counter()
        encoder, cache = self.encoder, self.cache
        if cache is None:
            raise InputError(
                "This model has no passage cache to warm. Load it with cache=True or "
                "cache=PassageCache(...)."
            )
        self._check_warmable(passages, ttl)
        if self.method.neighbours and isinstance(passages, Sequence):
            passages = with_neighbours(passages)
        total = len(passages) if isinstance(passages, Sized) else None
        done = encoded = present = tokens = 0
        remaining = iter(passages)
        while chunk := [Passage.of(passage) for passage in islice(remaining, CHUNK)]:
            plan = self.request(conversation or "?", chunk, prefix=prefix).plan
            if missing := encoder.missing(plan):
                complete(encoder.obtain(plan.only(missing), patient=True, ttl=ttl))
            done += len(chunk)
            encoded += len(missing)
            present += len(plan.windows) - len(missing)
            tokens += sum(plan.lengths[index] for index in missing)
            if on_warmed is not None:
                on_warmed(done, total)
        cache.flush()
        return Warmed(done, encoded, present, tokens, time.perf_counter() - begun)

    def _check_warmable(self, passages: Iterable[PassageLike], ttl: float | None) -> None:
        refuse_single(passages)
        if ttl is not None and not ttl > 0:
            raise InputError(f"ttl must be None or a number of seconds above 0, not {ttl!r}.")
        if self.numbered:
            raise InputError(
                "A header with a passage's number can't be warmed, because the number is only "
                "known with a question. Load the model with header='title' or header='none'."
            )
        if not self.method.windowed or self.method.alignment != "left":
            raise InputError(
                f"The method {self.method.name!r} can't be warmed, because a passage's position "
                "depends on the other passages of its request. Load the model with a method "
                "whose windows all start behind the prefix, such as 'ape'."
            )

    def pieces(
        self,
        request: Request,
        put: Callable[[str], None],
        put_reasoning: Callable[[str], None] | None,
    ) -> Pieces:
        """What hands on the text and the reasoning of a request's answer as they come."""
        form = request.reasoning
        if form is None:
            return Pieces(self.text.detokenizer, request.stop, put)
        return Pieces(form.detokenizer, request.stop, put, form.parts(), put_reasoning)

    def _guarded(
        self, request: Request, cancelled: threading.Event | None
    ) -> tuple[Request, EncodedContext, Fallback | None]:
        """The request to answer, encoded, and what its guard found.

        The signals are asked from the cheapest on, and the first that speaks decides.
        """
        guard, ordinary = request.guard, request.ordinary
        if guard is None:
            return request, complete(self.prefill_for_query(request), cancelled), None
        found = few_short_passages(guard, request.parts.windows)
        if found is None or not isinstance(ordinary, Request):
            context = complete(self.prefill_for_query(request), cancelled)
            if found is None:
                stopping = [*(request.options.get("stopping_criteria") or [])]
                stopping += [] if cancelled is None else [Cancelled(cancelled)]
                query_ids = request.parts.query_ids
                found = multi_hop(guard, self.decoder, context, query_ids, stopping)
            if found is None or (cancelled is not None and cancelled.is_set()):
                return request, context, None
            if not isinstance(ordinary, Request):
                message = (
                    f"Windows may answer worse here, because {found.message}. The passages were "
                    f"read in windows all the same, as one prompt does not hold them: {ordinary}"
                )
                return request, context, replace(found, taken=False, message=message)
            del context  # frees the windows' keys for those of the whole prompt
        message = f"The passages were read one after the other, because {found.message}."
        return ordinary, self.encode(ordinary, cancelled), replace(found, message=message)

    def criteria(
        self,
        request: Request,
        first: FirstToken,
        cancelled: threading.Event | None,
        prompt_length: int,
    ) -> list[StoppingCriteria]:
        """Our stopping criteria for a request, beside those in its options."""
        criteria: list[StoppingCriteria] = [first]
        if cancelled is not None:
            criteria.append(Cancelled(cancelled))
        if request.stop:
            form = request.reasoning
            read_by, parts = (
                (self.text.detokenizer, None) if form is None else (form.detokenizer, form.parts())
            )
            criteria.append(StopStrings(read_by, request.stop, prompt_length, parts))
        return criteria

    def unbegun(self, request: Request) -> Generation:
        """What was written for a request that was cancelled while it was encoded: nothing."""
        now = time.perf_counter()
        return self.generation(
            request, (), None, timings=Timings.of(request.started, now, now), stopped_early=True
        )

    def generation(
        self,
        request: Request,
        ids: Sequence[int],
        weights: TokenWeights | None,
        *,
        timings: Timings,
        stopped_early: bool,
        cached_tokens: int = 0,
        windows: int = 0,
        cached_windows: int = 0,
        chosen: tuple[int, ...] | None = None,
        fallback: Fallback | None = None,
        raw: Any = None,
        removal: Removal | None = None,
    ) -> Generation:
        """Put a result together.

        Args:
            weights: of each token, attention of the citation groups, the prefix and the query, in
                this order; None where it was not recorded.
            chosen: which of the windows were read, where the method chose; None for all.
        """
        parts = request.parts
        made = parts.windows if request.method.windowed else ()
        tokens = (parts.prefix_ids, parts.query_ids, *(window.ids for window in parts.windows))
        citations = prefix_mass = query_mass = None
        if request.citations:
            citations, prefix_mass, query_mass = cited(request.passages, weights, removal)
        form = request.reasoning
        written, reasoning, text = self.divided(request, ids)
        answer = cut(text, request.stop)
        return Generation(
            text=answer,
            token_ids=tuple(ids),
            finish_reason=self._finish_reason(request, ids, written, text, stopped_early),
            usage=Usage(
                sum(map(len, tokens)),
                cached_tokens,
                len(ids),
                windows,
                cached_windows,
                0 if form is None else form.tokens(ids),
            ),
            timings=timings,
            citations=citations,
            prefix_mass=prefix_mass,
            query_mass=query_mass,
            notes=parts.notes,
            windows=made if chosen is None or not made else tuple(made[i] for i in chosen),
            fallback=fallback,
            logprobs=None if request.logprobs is None else request.logprobs.tokens(ids),
            raw=raw,
            reasoning=reasoning,
            supported=None if removal is None else is_supported(float(removal.gain.sum())),
            statements=self._statements(request, ids, written, text, answer, weights, removal),
        )

    def _statements(
        self,
        request: Request,
        ids: Sequence[int],
        written: str,
        text: str,
        answer: str,
        weights: TokenWeights | None,
        removal: Removal | None,
    ) -> tuple[Statement, ...]:
        """The sentences of an answer, and the passages that carried each of them."""
        if weights is None or not request.citations:
            return ()
        detokenizer = (self.text if request.reasoning is None else request.reasoning).detokenizer
        # What is for the user stands behind the reasoning.
        start = max(0, written.rfind(text))
        spans = [(a - start, b - start) for a, b in detokenizer.spans(ids, written)]
        return statements(answer, spans, request.passages, weights, removal)

    def divided(self, request: Request, ids: Sequence[int]) -> tuple[str, str, str]:
        """What the tokens of an answer spell: all of it, the reasoning, what is for the user."""
        form = request.reasoning
        written = (self.text if form is None else form).detokenizer.text(ids)
        return (written, "", written) if form is None else (written, *form.split(written))

    def _finish_reason(
        self,
        request: Request,
        ids: Sequence[int],
        written: str,
        text: str,
        stopped_early: bool,
    ) -> FinishReason:
        """``written`` is that of all ``ids``, ``text`` what of it is for the user."""
        if ids and ids[-1] in self.decoder.end_tokens(request.options):
            return "stop"
        strings = request.options.get("stop_strings") or ()
        strings = (strings,) if isinstance(strings, str) else tuple(strings)
        if any(string in text for string in request.stop):
            return "stop"
        if any(string in written for string in strings):
            return "stop"
        if stopped_early:
            return "cancelled"
        timed = request.options.get("max_time") is not None
        return "length" if timed or len(ids) >= request.max_new_tokens else "stop"


def rest_of(generation: Generation, streamer: Pieces | None) -> tuple[str, str]:
    """What of an answer's reasoning and text was not streamed yet.

    Raises:
        GenerationError: the whole answer differs from what was.
    """
    if streamer is None:
        return generation.reasoning, generation.text
    reasoning, text = streamer.sent_reasoning, streamer.sent
    if not (generation.text.startswith(text) and generation.reasoning.startswith(reasoning)):
        raise GenerationError(
            "The tokenizer changed text that was already streamed. Use generate(), or leave "
            "on_text out, with this tokenizer."
        )
    return generation.reasoning[len(reasoning) :], generation.text[len(text) :]


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
        best = "the one that makes the question likeliest is"
        if chosen.retrieve > 1:
            best = f"the {chosen.retrieve} that make the question likeliest are"
        how = "side by side" if chosen.reader.windowed else "in one prompt"
        if chunks and not chosen.reader.windowed:
            how += ", or side by side where one of them saw the chunks before it"
        which = every if few else f"of {passages} passages, {best}"
        read = f"{which} read {how}"
    if chunks:
        read += f"; {chunks} of {len(windows)} windows saw the chunks before them when encoded"
    return f"auto: {read}."


def _check(model: PreTrainedModel, decoder: Decoder, prompt: Prompt | None) -> None:
    """Refuse a model whose attention can't be split, when it is wrapped and when it was edited."""

    def split(prefix: Sequence[int], window: Sequence[int], query: Sequence[int]) -> torch.Tensor:
        context = WindowStore(decoder.runner).encode_ids(prefix, [window], PCW())
        return decoder.forward(context, torch.tensor([list(query)]))[0].float()

    check_config(model)
    ids = probe_ids(decoder.vocabulary, None if prompt is None else prompt.encode_text)
    check_attention(model, split, ids)
