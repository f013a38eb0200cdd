"""The model that reads passages as windows: rag-windows' front door."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, Unpack, overload

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rag_windows import loading
from rag_windows.batching.questions import answer_all, checked
from rag_windows.batching.scheduler import Scheduler, shared_scheduler
from rag_windows.cache.passage_cache import PassageCache, Size
from rag_windows.calibration import Example, Profile
from rag_windows.calibration.calibrate import KEEP_BYTES, By, Metric, OnProgress, calibrate
from rag_windows.codebook.book import OnPrepared, PassageBook
from rag_windows.engine import Engine, OnWarmed, Warmed
from rag_windows.errors import InputError, stop_iteration_told
from rag_windows.guard import FallbackOption
from rag_windows.icl.classifier import (
    Classification,
    ClassifyOptions,
    DemonstrationLike,
    classify,
    score_choices,
)
from rag_windows.icl.scoring import Score
from rag_windows.methods import Method
from rag_windows.methods.linked import Choose, LinkTokens
from rag_windows.passage import passages_of
from rag_windows.prefill import EncodedContext, OnEncoded, encode_context
from rag_windows.prompt.builder import Header
from rag_windows.prompt.conversation import Conversation
from rag_windows.request import DEFAULT_NEW_TOKENS, BatchRequest, Messages, PassageLike
from rag_windows.results import Chunk, Generation
from rag_windows.sampling import check_counts, whole_number


class WindowedLM:
    """A local causal LM that reads each passage in a window of its own.

    Make one with `from_pretrained`. It is safe to call from many threads at once, with different
    passages and methods; the wrapped model itself stays as it is for everybody else. Who edits it
    (adapters, weights, modules, attributes) edits what reads the windows: the next call sees it.

    Attributes:
        header: of each window: its name, or the function that writes it.
        template_kwargs: further variables of the chat template.
        profile: of a calibration, or None.
        engine: what it is made of, for packages that build on it; it may change at any time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        method: str | Method | None = None,
        header: Header = "title",
        template_kwargs: Mapping[str, Any] | None = None,
        profile: Profile | str | Path | None = None,
        **options: Any,
    ) -> None:
        self.profile = None if profile is None else Profile.of(profile)
        if method is None:
            method = "ape" if self.profile is None else self.profile.method
        self.engine = Engine(
            model,
            tokenizer,
            method=method,
            header=header,
            template_kwargs=template_kwargs,
            **options,
        )
        if self.profile is not None and (told := self.profile.model.mismatch(model)):
            warnings.warn(told, UserWarning, stacklevel=3)
        self.header = header
        self.template_kwargs = dict(template_kwargs or {})

    @property
    def model(self) -> PreTrainedModel:
        """The plain model, untouched."""
        return self.engine.model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer; None for token-level work only."""
        return self.engine.tokenizer

    @property
    def method(self) -> Method:
        """The default method."""
        return self.engine.method

    @property
    def cache(self) -> PassageCache | None:
        """The passage cache, or None."""
        return self.engine.cache

    @property
    def max_window_tokens(self) -> int | None:
        """A passage of more tokens becomes several windows; None for no limit."""
        return self.engine.max_window_tokens

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        method: str | Method | None = None,
        max_window_tokens: int | None = None,
        header: Header = "title",
        template_kwargs: Mapping[str, Any] | None = None,
        text_tokens: Collection[str] = (),
        max_batch_tokens: int | None = None,
        cache: PassageCache | bool | None = None,
        profile: Profile | str | Path | None = None,
        dtype: str | torch.dtype = "auto",
        device_map: Any = None,
        **model_kwargs: Any,
    ) -> Self:
        """Load a model and make it read windows.

        Args:
            model: Hub name, local folder, "tiny-reader" (shipped), a GGUF file, a PEFT adapter's
                folder or Hub name (needs the extra ``peft``), or a loaded model.
            tokenizer: instead of the model's own, or the name or folder of one; a loaded model
                needs one for text.
            method: default method, by name ("ape", "pcw", "sequential") or as an object; None takes
                the profile's, and "ape" without one.
            max_window_tokens: a longer passage becomes several; default: half the positions.
            header: "title", "none", "number", "number+title", or a function of (passage, number).
            template_kwargs: for the chat template, such as ``{"enable_thinking": False}``.
            text_tokens: control tokens that passages may spell after all; see `Prompt`.
            max_batch_tokens: tokens in one encoding pass; None for what suits the device.
            cache: keeps encoded windows: a `PassageCache`, or True for one with good defaults.
            profile: of a calibration, or the path of one: brings the method; a warning tells if it
                was made for another model.
            dtype: of the weights, for a model loaded here.
            device_map: where they go: "cpu", "cuda", "cuda:1"; "auto" or a mapping spreads them
                (needs accelerate). None for the best device: CUDA where there is one.
            model_kwargs: for ``AutoModelForCausalLM.from_pretrained``: revision,
                quantization_config, gguf_file (needs the extra ``gguf``), ...; arguments of
                ``BitsAndBytesConfig`` such as ``load_in_4bit`` are taken as well.

        Raises:
            InputError: a device that is not there.
            MissingExtraError: what is asked for needs a package that is not installed.
            ModelLoadError: not found, or can't be loaded.
            UnsupportedModelError: its attention can't be split into windows.
            ProfileError: the profile can't be used.
        """
        if profile is not None:
            # A profile that can't be used is told before gigabytes are loaded.
            profile = Profile.of(profile)
        loaded, own_tokenizer = loading.resolve(
            model, tokenizer, dtype=dtype, device_map=device_map, **model_kwargs
        )
        return cls(
            loaded,
            own_tokenizer,
            method=method,
            max_window_tokens=max_window_tokens,
            header=header,
            template_kwargs=template_kwargs,
            text_tokens=text_tokens,
            max_batch_tokens=max_batch_tokens,
            cache=cache,
            revision=model_kwargs.get("revision"),
            profile=profile,
        )

    def with_cache(self, cache: PassageCache | bool | None) -> Self:
        """The same model and options with another cache, such as that of a tenant, or none."""
        other = copy.copy(self)
        other.engine = self.engine.with_cache(cache)
        return other

    @stop_iteration_told
    def generate(
        self,
        query: Messages,
        passages: Sequence[PassageLike] | PassageBook = (),
        *,
        prefix: str | None = None,
        method: str | Method | None = None,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        citations: bool = True,
        seed: int | None = None,
        on_encoded: OnEncoded | None = None,
        link_tokens: LinkTokens | None = None,
        link_choose: Choose = "first",
        fallback: FallbackOption = None,
        **generate_kwargs: Any,
    ) -> Generation:
        """Answer a question over passages.

        Without passages this is the model's own ``generate``, bit for bit.

        Args:
            query: a question, or a conversation as ``[{"role": ..., "content": ...}, ...]``, in any
                order that the chat template takes, or a `Conversation`. Where it ends with the
                assistant, the answer goes on with that message, and its text is what was added.
            passages: in any order; blank and duplicate ones are left out and told in ``notes``.
                Or a book of them, made by `codebook`, that chooses those which are read.
            prefix: system prompt, read by every window and by the query.
            method: instead of the default one.
            max_new_tokens: 128 unless given here or in a ``generation_config``.
            stop: the text ends before any of these strings.
            citations: whether to measure each passage's attention mass.
            seed: for sampling, private to this call; None uses PyTorch's global generator.
            on_encoded: called while passages are encoded, with the windows done and all of them.
            link_tokens: tokens of each window that are encoded in sight of the others: a number
                (int), a share of the window (float), or "all", which is sequential; see `Linked`.
            link_choose: which ones: "first" or those of largest "deviation".
            fallback: "sequential" or a `Guard`: where windows are likely to lose, the passages are
                read one after the other, and ``Generation.fallback`` says why.
            generate_kwargs: any option of ``transformers`` generate: do_sample, temperature,
                top_p, num_beams, logits_processor, stop_strings, ... Beside them
                ``json_schema`` (a mapping) or ``grammar`` (llguidance's Lark), to which the answer
                is held token by token (needs the extra ``structured``; see docs/langchain.md),
                and ``logprobs=True`` with ``top_logprobs`` (0 to 20) for
                ``Generation.logprobs``.

        Raises:
            InputError, PromptError, LimitError: before any work.
            MissingExtraError: a form for the answer without the extra ``structured``.
            GenerationError: an option that can't work with windows.
        """
        asked = BatchRequest(
            query,
            passages,
            prefix=prefix,
            method=method,
            max_new_tokens=max_new_tokens,
            stop=stop,
            citations=citations,
            seed=seed,
            on_encoded=on_encoded,
            link_tokens=link_tokens,
            link_choose=link_choose,
            fallback=fallback,
            options=generate_kwargs,
        )
        engine, request = self.engine.ask(asked)
        return engine.answer(request)

    @stop_iteration_told
    def stream(
        self,
        query: Messages,
        passages: Sequence[PassageLike] | PassageBook = (),
        **arguments: Any,
    ) -> Iterator[Chunk]:
        """Like `generate`, piece by piece; the last chunk carries the whole `Generation`.

        The joined chunks are exactly ``generate``'s text. Closing the iterator stops the work. With
        beams, where no token is final before the end, one chunk comes. Arguments are checked at
        the call, before the first chunk is asked for.

        Args:
            query: as in `generate`.
            passages: as in `generate`.
            arguments: the others of `generate`.
        """
        asked = BatchRequest.of({**arguments, "query": query, "passages": passages})
        engine, request = self.engine.ask(asked)
        return engine.stream(request)

    @stop_iteration_told
    def generate_batch(
        self,
        requests: Sequence[Mapping[str, Any] | BatchRequest],
        *,
        max_rows: int = 32,
        max_bytes: Size | None = None,
    ) -> list[Generation]:
        """Answer many questions together, with the answers that `generate` gives one by one.

        Each forward pass gives every question its next token, so the weights are read once for all
        of them, and windows that several questions read are encoded, held and read once (they count
        as cached tokens then). A question that
        ends makes room for the next. Questions whose options need a loop of their own (beams,
        several sequences, assistants, scores or hidden states, stop_strings), ensembles, books and
        guarded ones are answered one by one, as `generate` does it.

        Greedy answers are those of `generate`, and sampled ones with a ``seed`` too, up to the
        rounding of floating point: in bfloat16 two tokens of nearly the same logit may change
        places. Without a seed, rows draw from PyTorch's global generator in turn.

        Args:
            requests: the keyword arguments of `generate` each, as a dict or a `BatchRequest`.
            max_rows: so many are answered at a time.
            max_bytes: memory that those which are answered at a time may take: bytes, a text such
                as "8GiB", or a share of what is free now, such as "50%". By default it is 75% of
                what is free where the model is; on devices that don't tell (neither CUDA nor CPU),
                there is no such bound. Others wait, in order. What counts is the KV cache of each,
                as it is in the end, windows that neither the passage cache holds where they are
                read nor another question reads, and a bound for one forward pass.

        Returns:
            One answer a request, in their order. ``raw`` holds the sequence alone.

        Raises:
            InputError, PromptError, LimitError: in any of them, before any work; a question that
                needs more memory than there is for all together is such a `LimitError`.
            GenerationError: as in `generate`; then no answer is returned.
        """
        whole_number("max_rows", max_rows)
        questions = [checked(self.engine, BatchRequest.of(request)) for request in requests]
        return answer_all(self.engine, questions, max_rows, max_bytes)

    def scheduler(self, *, max_rows: int = 32, max_bytes: Size | None = None) -> Scheduler:
        """A new `Scheduler`, with which threads and tasks that ask at once share forward passes.

        Args:
            max_rows: so many questions are answered at a time; more wait in line.
            max_bytes: memory that they may take, see `generate_batch`; questions that are answered
                apart count as well.
        """
        return Scheduler(self.engine, max_rows=max_rows, max_bytes=max_bytes)

    def shared_scheduler(self, *, max_rows: int = 32, max_bytes: Size | None = None) -> Scheduler:
        """The `scheduler` of all who call this with equal arguments, in whatever thread or task.

        The adapters for LangChain and LlamaIndex ask it. It needs no closing.

        Args:
            max_rows: see `scheduler`.
            max_bytes: see `scheduler`; schedulers with different arguments know nothing of each
                other.
        """
        return shared_scheduler(
            self,
            (max_rows, max_bytes),
            lambda: self.scheduler(max_rows=max_rows, max_bytes=max_bytes),
        )

    @stop_iteration_told
    def warm(
        self,
        passages: Iterable[PassageLike],
        *,
        prefix: str | None = None,
        conversation: Messages | None = None,
        on_warmed: OnWarmed | None = None,
        ttl: float | None = None,
    ) -> Warmed:
        """Encode passages ahead of the questions, and put them into the cache.

        What the cache holds already is left out, so a call that was interrupted goes on where it
        stopped. Windows fit requests of the same prefix: the same system prompt and tools.

        Args:
            passages: as in `generate`; an iterable is read as it goes.
            prefix: as requests will have it.
            conversation: where requests hold a system message or tools, one such request.
            on_warmed: called with the passages done, and with all of them if that is known.
            ttl: seconds for which these may be used, instead of the cache's own.

        Raises:
            InputError: this model has no cache, or its header numbers the passages.
        """
        return self.engine.warm(
            passages,
            prefix=prefix,
            conversation=conversation,
            on_warmed=on_warmed,
            ttl=ttl,
        )

    @stop_iteration_told
    def warm_from_retriever(self, retriever: object, **options: Any) -> Warmed:
        """`warm` with all documents that a retriever, index or store can list.

        Args:
            retriever: one of ours; a LangChain retriever, vector store or index of documents; a
                LlamaIndex index, retriever or document store.
            options: of `warm`.

        Raises:
            InputError: it does not let its documents be listed; warm() takes them as a list.
        """
        return self.warm(passages_of(retriever), **options)

    @stop_iteration_told
    def score(
        self,
        query: Messages,
        passages: Sequence[PassageLike] | PassageBook,
        choices: Sequence[str],
        *,
        prefix: str | None = None,
        method: str | Method | None = None,
    ) -> list[Score]:
        """How likely the model finds each choice as the answer.

        Args:
            query: as in `generate`, like those below but for the choices.
            passages: read in windows; or a book, as in `generate`.
            choices: answers, tokenized as text on their own behind the assistant header.
            prefix: system prompt.
            method: instead of the default one.

        Returns:
            One score a choice, in order; log-probabilities in nats.
        """
        return self.score_batch([query], passages, choices, prefix=prefix, method=method)[0]

    @stop_iteration_told
    def score_batch(
        self,
        queries: Sequence[Messages],
        passages: Sequence[PassageLike] | PassageBook,
        choices: Sequence[str],
        *,
        prefix: str | None = None,
        method: str | Method | None = None,
    ) -> list[list[Score]]:
        """`score` for many queries about the same passages, which are encoded once.

        Args:
            queries: a list of what `score` takes.
            passages: read by all of them, as the choices and what follows.
            choices: answers.
            prefix: system prompt.
            method: instead of the default one.

        Returns:
            The scores of each query, in order.
        """
        if isinstance(queries, str | Conversation):
            raise InputError(
                "queries must be a list, not a single query. Wrap it in [], or call score()."
            )
        if not queries:
            return []
        asked = BatchRequest(queries[0], passages, prefix=prefix, method=method)
        if not isinstance(passages, PassageBook):
            return score_choices(self.engine, queries, asked, choices)
        found = []
        for query in queries:  # each of them reads passages of its own
            engine, chosen = passages.chosen(self.model, replace(asked, query=query))
            found += score_choices(engine, [query], chosen, choices)
        return found

    @overload
    def classify(
        self,
        text: str,
        demonstrations: Sequence[DemonstrationLike],
        labels: Sequence[str] | None = None,
        **options: Unpack[ClassifyOptions],
    ) -> Classification: ...

    @overload
    def classify(
        self,
        text: list[str] | tuple[str, ...],
        demonstrations: Sequence[DemonstrationLike],
        labels: Sequence[str] | None = None,
        **options: Unpack[ClassifyOptions],
    ) -> list[Classification]: ...

    @stop_iteration_told
    def classify(
        self,
        text: str | Sequence[str],
        demonstrations: Sequence[DemonstrationLike],
        labels: Sequence[str] | None = None,
        **options: Unpack[ClassifyOptions],
    ) -> Classification | list[Classification]:
        """Label texts as demonstrations show it: in-context learning with many windows.

        Demonstrations are packed into windows, whole ones only and in the order given, about as
        many tokens in each; so their number is not bound by the model's context length. They are
        encoded once for all texts. A chat model gets the text as the user's message and the label
        as its answer; a model without a chat template goes on from plain text,
        ``demonstrations | text: label``.

        Args:
            text: one, or a list of them.
            demonstrations: (text, label) pairs, mappings with these keys, or `Demonstration`. None
                at all is allowed: the labels are then judged by the text alone.
            labels: to choose from, at least two; None takes those of the demonstrations.
            template: a `Template`, the form of a demonstration ("{text}: {label}", the default), or
                a pair of that and the text's form ("{text}:").
            method: instead of the default one.
            prefix: system prompt.
            normalize: whether labels are compared by the "sum" of their tokens' log-probabilities,
                the default, or by the "mean". Where one label begins another, it counts as chosen
                only when the longer one isn't.
            calibrate_with: content-free texts, such as "N/A", whose label probabilities divide
                the others (https://arxiv.org/abs/2102.09690).
            windows: how many to spread the demonstrations over; by default, as few as hold them.
            window_tokens: or how long a window may be; by default, what the model's positions leave
                beside the longest text, rounded down to eighths of them.

        Raises:
            InputError: labels, demonstrations, texts or options that can't be used.
            LimitError: a demonstration that fits no window, or with a method that reads one after
                the other, more of them than fit.
        """
        texts = [text] if isinstance(text, str) else list(text)
        found = classify(self.engine, texts, demonstrations, labels, **options)
        return found[0] if isinstance(text, str) else found

    @stop_iteration_told
    def calibrate(
        self,
        examples: Iterable[Example | Mapping[str, Any]],
        *,
        method: str | Method = "ape",
        settings: Sequence[Method] | None = None,
        by: By | None = None,
        metric: Metric | None = None,
        prefix: str | None = None,
        max_new_tokens: int = 32,
        refine: bool = True,
        seed: int = 0,
        keep_bytes: int = KEEP_BYTES,
        on_progress: OnProgress | None = None,
    ) -> Profile:
        """Find the numbers of a method for this model and documents like the examples'.

        Every setting answers every example, teacher-forced: one forward pass over the question and
        its answer, beside windows that are encoded once. The best of a coarse grid is followed by a
        finer round around it. The choice counts only if it beats the default on examples that
        did not choose it.

        Args:
            examples: a few dozen, as `Example` or mappings with "query", "passages" and perhaps
                "answer" and "kind". Take passages as your retriever finds them.
            method: what is calibrated, and with its numbers the default that has to be beaten.
            settings: methods to try instead of those that `default_grid` makes.
            by: "labels" (the greedy answer equals the right one; the right answer's log-probability
                between equals) or "agreement" (least KL divergence from the distribution of the
                same model that reads the passages one after the other, over its own greedy
                answer); None takes labels where every example has an answer.
            metric: from a greedy answer and the right one to a number, more is better, instead of
                equality. Each setting then generates its answers, which takes longer.
            prefix: system prompt, as requests will have it.
            max_new_tokens: length of the sequential reader's answer, and of a metric's answers.
            refine: whether there is a second, finer round.
            seed: of folds and bootstrap intervals.
            keep_bytes: keys and values that are kept between the rounds at most.
            on_progress: told what goes on, how much of it is done, and how much there is.

        Raises:
            InputError: fewer than eight examples can be used, or settings that read no windows.
        """
        return calibrate(
            self.engine,
            examples,
            method=method,
            settings=settings,
            by=by,
            metric=metric,
            prefix=prefix,
            max_new_tokens=max_new_tokens,
            refine=refine,
            seed=seed,
            keep_bytes=keep_bytes,
            on_progress=on_progress,
        )

    @stop_iteration_told
    def codebook(
        self,
        method: str | Method | None = None,
        *,
        path: str | Path | None = None,
        prefix: str | None = None,
        conversation: Messages | None = None,
        memory: Size | None = "4GiB",
        disk: Size | None = None,
        salt: str | bytes | None = None,
        wait_s: float = 60.0,
        on_loaded: OnPrepared | None = None,
    ) -> PassageBook:
        """Make a store of encoded passages, or open the one in a folder.

        ::

            book = lm.codebook(Codebook(retrieve=4, reader=APE()), path="my-book")
            book.add(passages)
            lm.generate("Who crowned the queen?", book)

        Args:
            method: a `Codebook`, or one with a codebook as its reader; of any other method, and
                of the model's own for None, a codebook with that method as its reader.
            path: a folder in which the book is kept; None keeps it in memory alone.
            prefix: system prompt, as requests will have it.
            conversation: where requests hold a system message or tools, one such request.
            memory: host memory for windows, beside the keys that are searched.
            disk: disk space for windows, with a path; 50 GiB by default.
            salt: secret of a tenant; see `PassageCache`.
            wait_s: how long a change waits for one of another process on the same folder, in
                seconds; then it is a CacheError that names that process.
            on_loaded: called while a book is opened, with the passages done and all of them.

        Raises:
            InputError: a method or header whose windows depend on a request.
            CacheError: the folder can't be used, is damaged, or was made with something else.
        """
        folder = None if path is None else Path(path).expanduser()
        cache = PassageCache(
            memory,
            disk if folder is not None else None,
            None if folder is None else folder / "windows",
            salt=salt,
        )
        return PassageBook(
            self.with_cache(cache),
            cache,
            self.engine.method_of(method),
            path=folder,
            prefix=prefix,
            conversation=conversation,
            wait_s=wait_s,
            on_loaded=on_loaded,
        )

    def encode_ids(
        self,
        prefix_ids: Sequence[int],
        windows: Sequence[Sequence[int]],
        *,
        method: str | Method | None = None,
        scores: Sequence[float] = (),
    ) -> EncodedContext:
        """Encode token ids as they are.

        Args:
            prefix_ids: may be empty.
            windows: one list of ids a window; no windows make an ordinary prompt.
            method: instead of the default one.
            scores: retrieval score of each window, for a method that reads them.
        """
        return encode_context(
            self.engine.encoder, prefix_ids, windows, self.engine.method_of(method), scores=scores
        )

    def logits(self, context: EncodedContext, query_ids: Sequence[int]) -> torch.Tensor:
        """Logits of each query token.

        Returns:
            (len(query_ids), vocabulary), fp32, on the model's device; of an ensemble, the
            log-probabilities of its windows together.
        """
        if not query_ids:
            raise InputError(
                "logits needs at least one query token. Give query_ids that are not empty."
            )
        ids = torch.tensor([list(query_ids)], dtype=torch.int64)
        return self.engine.decoder.forward(context, ids)[0].float()

    def generate_ids(
        self,
        context: EncodedContext,
        query_ids: Sequence[int],
        *,
        max_new_tokens: int = DEFAULT_NEW_TOKENS,
        seed: int | None = None,
        **generate_kwargs: Any,
    ) -> list[int]:
        """Continue a query at token level, greedily unless told otherwise.

        Returns:
            The generated ids, end token included.

        Raises:
            InputError: a context of another model, no query tokens, or a count that is none.
        """
        check_counts({"max_new_tokens": max_new_tokens, **generate_kwargs})
        options = {"max_new_tokens": max_new_tokens, **generate_kwargs}
        if "generation_config" not in options:
            options.setdefault("do_sample", False)
        decoded = self.engine.decoder.generate(context, query_ids, options=options, seed=seed)
        return decoded.sequences[0]
