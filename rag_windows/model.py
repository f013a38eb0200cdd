"""The model that reads passages in windows: where to start with rag-windows."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self, Unpack, overload

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rag_windows import loading
from rag_windows.batching.batch import answer_all
from rag_windows.batching.questions import Question, stream
from rag_windows.batching.scheduler import Scheduler, shared_scheduler
from rag_windows.cache.passage_cache import PassageCache, Size
from rag_windows.calibration import Example, Profile
from rag_windows.calibration.compare import KEEP_BYTES, By, Metric, OnProgress, compare
from rag_windows.calibration.profile import ModelFingerprint
from rag_windows.codebook.book import OnPrepared, PassageBook
from rag_windows.engine import Engine
from rag_windows.errors import InputError
from rag_windows.folders import in_home
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
from rag_windows.prefill import EncodedContext, OnEncoded
from rag_windows.prompt.builder import Header
from rag_windows.prompt.conversation import Conversation, behind_own_system
from rag_windows.request import DEFAULT_NEW_TOKENS, BatchRequest, Messages, PassageLike
from rag_windows.results import Chunk, Generation
from rag_windows.sampling import check_names, check_numbers, whole_number
from rag_windows.warm import OnWarmed, Warmed, warm
from rag_windows.window_adapter import WindowAdapter

OWN_METHOD = "rag_windows_method"
"""In a model's config: the method with which it was trained to read."""


class WindowedLM:
    """A local causal LM that reads each passage in a window of its own.

    Make one with `from_pretrained`. Many threads may call it at once, with different passages and
    methods. The wrapped model is not changed. If you change it yourself (adapters, weights,
    modules, attributes), the next call uses the changed model.

    Attributes:
        header: the line at the start of each window: its name, or the function that writes it.
        template_kwargs: further variables of the chat template.
        profile: that of a comparison, or None.
        engine: the parts below, for packages that build on this one; it may change at any time.
    """

    # Of a tenant's model: the one whose schedulers it shares.
    _host: WindowedLM | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        method: str | Method | None = None,
        header: Header = "title",
        template_kwargs: Mapping[str, Any] | None = None,
        profile: Profile | str | Path | None = None,
        window_adapter: str | Path | WindowAdapter | None = None,
        **options: Any,
    ) -> None:
        self.profile = None if profile is None else Profile.of(profile)
        adapter = None if window_adapter is None else WindowAdapter.of(window_adapter)
        if method is None and self.profile is not None:
            method = self.profile.method
        elif method is None:
            own = getattr(model.config, OWN_METHOD, None)
            method = own if adapter is None else adapter.made.method
        self.engine = loading.in_a_thread(
            lambda: Engine(
                model,
                tokenizer,
                method=method,
                header=header,
                template_kwargs=template_kwargs,
                window_adapter=adapter,
                **options,
            ),
            "rag-windows-load",
        )
        if adapter is not None and adapter.made.model is not None:
            made_for = ModelFingerprint(**adapter.made.model)
            if made_for.fingerprint != ModelFingerprint.of(model).fingerprint:
                warnings.warn(
                    f"The adapter was made for {made_for.name!r}, and this is another model, or "
                    "the same in another precision. It may not suit this one.",
                    UserWarning,
                    stacklevel=3,
                )
        if self.profile is not None and (message := self.profile.model.mismatch(model)):
            warnings.warn(message, UserWarning, stacklevel=3)
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
        window_adapter: str | Path | None = None,
        dtype: str | torch.dtype = "auto",
        device_map: Any = None,
        dequantize: bool = False,
        quantization: Literal["int8"] | None = None,
        **model_kwargs: Any,
    ) -> Self:
        """Load a model and make it read windows.

        Args:
            model: Hub name, local folder, "tiny-reader" (shipped), a GGUF file, a PEFT adapter's
                folder or Hub name (needs the extra ``peft``), or a loaded model.
            tokenizer: a tokenizer, or its name or folder, to use instead of the model's own. A
                loaded model needs one to read text.
            method: default method, by name ("ape", "pcw", "sequential") or as an object. None takes
                the profile's method; without a profile the one that the model's config names as
                ``rag_windows_method``, or else "auto".
            max_window_tokens: a longer passage is split into several windows; by default half of
                the model's positions.
            header: "title", "none", "number", "number+title", or a function of (passage, number).
            template_kwargs: for the chat template, such as ``{"enable_thinking": False}``.
            text_tokens: control tokens that passages may contain as ordinary text; see `Prompt`.
            max_batch_tokens: tokens in one encoding pass; None for what suits the device.
            cache: keeps encoded windows: a `PassageCache`, or True for one with good defaults.
            profile: of a comparison, or the path of one: brings the method; a warning tells if it
                was made for another model.
            window_adapter: folder or Hub name of what ``rag-windows adapt`` wrote: windows are
                encoded with it, all else is read without. Given as ``model``, it brings its base
                model and its method.
            dtype: number format of the weights of a model that is loaded here.
            device_map: where the weights go: "cpu", "cuda", "cuda:1"; "auto" or a mapping spreads
                them (needs accelerate). None takes CUDA where there is a device, else the CPU.
            dequantize: unpack the weights of a GGUF file into ``dtype`` when it is loaded, where
                transformers would keep its blocks packed. It keeps those of few architectures, so
                for most models this changes nothing.
            quantization: "int8" packs linear layers and embeddings into 8 bits a weight, with a
                scale for each row, on a CPU: half the memory of bfloat16.
            model_kwargs: for ``AutoModelForCausalLM.from_pretrained``: revision,
                quantization_config, gguf_file (needs the extra ``gguf``), ...; arguments of
                ``BitsAndBytesConfig`` such as ``load_in_4bit`` are taken as well.

        Raises:
            InputError: the device does not exist.
            MissingExtraError: a package that this needs is not installed.
            ModelLoadError: the model can't be found or loaded.
            UnsupportedModelError: its attention can't be split into windows.
            ProfileError: the profile can't be used.
        """
        if profile is not None:
            # A profile that can't be used is an error before gigabytes are loaded.
            profile = Profile.of(profile)
        if dequantize:
            model_kwargs["dequantize"] = True
        if quantization is not None:
            model_kwargs["quantization"] = quantization
        # As is an adapter.
        adapter = None if window_adapter is None else WindowAdapter.of(window_adapter)
        if adapter is None and isinstance(model, str | Path):
            adapter = WindowAdapter.find(model, **loading.hub_options(model_kwargs))
            if adapter is not None:
                # The revision is the adapter's.
                model, _ = adapter.base, model_kwargs.pop("revision", None)
        loaded, own_tokenizer = loading.in_a_thread(
            lambda: loading.resolve(
                model, tokenizer, dtype=dtype, device_map=device_map, **model_kwargs
            ),
            "rag-windows-load",
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
            window_adapter=adapter,
        )

    def with_cache(self, cache: PassageCache | bool | None) -> Self:
        """The same model and options with another cache, such as that of a tenant, or none."""
        other = copy.copy(self)
        other.engine = self.engine.with_cache(cache)
        other._host = None
        return other

    def tenant(self, salt: str | bytes) -> Self:
        """The same model for one of several tenants, who share its memory and forward passes.

        No tenant finds a window of another's, in the cache or in a batch. See `PassageCache`.

        Args:
            salt: secret of the tenant. Never take it from a request.
        """
        other = self.with_cache(None if self.cache is None else self.cache.tenant(salt))
        other._host = self._host or self
        return other

    def fingerprints(self) -> tuple[str, str]:
        """Those of model and tokenizer that entries are filed under: 64 hexadecimal digits each.

        Another inference engine finds this model's entries by them (docs/vllm.md). The first call
        reads all weights, as the first request does: call it when nothing of the model will be
        edited any more, and the first question does not wait for that.

        Raises:
            InputError: there is no cache, or windows of this model are not cached.
        """
        access = self.engine.encoder.access
        model, tokenizer = (None, b"") if access is None else access.identity()
        if model is None:
            raise InputError(
                "Windows of this model are not cached, so it has no fingerprint. Load it with "
                "cache=True or a PassageCache; where there is one, a warning says what prevents it."
            )
        return model.hex(), tokenizer.hex()

    def behind_own_system(self, instruction: str) -> str:
        """An instruction for ``prefix=`` that keeps the chat template's own system message.

        Without a system prompt many chat templates write one of their own, such as "You are a
        helpful assistant.", with which the model was trained. A ``prefix`` replaces it; small
        models then answer worse (benchmarks/results/instructions.md).

        Args:
            instruction: what the answer should be like.

        Returns:
            The template's own message with the instruction behind it, or the instruction alone
            where the template has none.
        """
        return behind_own_system(self.tokenizer, self.template_kwargs, instruction)

    def generate(
        self,
        query: Messages,
        passages: Sequence[PassageLike] | PassageBook = (),
        *,
        prefix: str | None = None,
        method: str | Method | None = None,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        citations: bool | str = True,
        seed: int | None = None,
        on_encoded: OnEncoded | None = None,
        link_tokens: LinkTokens | None = None,
        link_choose: Choose = "first",
        fallback: FallbackOption = None,
        **generate_kwargs: Any,
    ) -> Generation:
        """Answer a question over passages.

        Without passages the answer is exactly that of the model's own ``generate``.

        Args:
            query: a question; a conversation as ``[{"role": ..., "content": ...}, ...]``, in any
                order that the chat template accepts; or a `Conversation`. If the last message is
                the assistant's, the answer continues it and holds only the added text.
            passages: in any order. Blank and duplicate passages are left out, and ``notes`` says
                so. Or a book made by `codebook`, which chooses the passages to read.
            prefix: system prompt, which every window and the query read.
            method: method for this call instead of the default one.
            max_new_tokens: 128 unless given here or in a ``generation_config``.
            stop: strings before which the text ends.
            citations: whether to measure each passage's share of the attention. "removal" also
                leaves each passage that was read out afterwards, and `Citation.drop` says what
                the answer's log-probability loses, at the cost of one more pass over question
                and answer for each passage; "removal:top=4" leaves out the four with most
                attention. Nothing is encoded again, but where the method read few passages in one
                prompt.
            seed: seed for sampling in this call; None uses PyTorch's global generator.
            on_encoded: called while passages are encoded, with the number of windows done and the
                number of all windows.
            link_tokens: tokens of each window to encode again with the other windows in view: a
                number (int), a share of the window (float), or "all", which equals sequential
                reading; see `Linked`.
            link_choose: which tokens: the "first" ones, those with the largest "deviation", or
                those to which the "query" or its "last" token attends most, which reads it twice.
            fallback: "sequential" or a `Guard`: where windows are likely to answer worse, the
                passages are read one after the other, and ``Generation.fallback`` says why.
            generate_kwargs: any option of ``transformers`` generate: do_sample, temperature,
                top_p, num_beams, logits_processor, stop_strings, ... There are also
                ``json_schema`` (a mapping) or ``grammar`` (llguidance's Lark), to which the answer
                is held token by token (needs the extra ``structured``; see docs/langchain.md),
                and ``logprobs=True`` with ``top_logprobs`` (0 to 20) for
                ``Generation.logprobs``.

        Raises:
            InputError, PromptError, LimitError: an argument can't be used; nothing was computed.
            MissingExtraError: ``json_schema`` or ``grammar`` without the extra ``structured``.
            GenerationError: an option can't work with windows.
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
        return Question(self.engine, asked).answer()

    def stream(
        self,
        query: Messages,
        passages: Sequence[PassageLike] | PassageBook = (),
        **arguments: Any,
    ) -> Iterator[Chunk]:
        """Like `generate`, as a stream of chunks; the last chunk holds the whole `Generation`.

        The chunks joined are exactly the text of ``generate``. Closing the iterator stops the
        work. With beams there is a single chunk, because no token is final before the end.
        Arguments are checked at the call, before the first chunk.

        Args:
            query: as in `generate`.
            passages: as in `generate`.
            arguments: the other arguments of `generate`.
        """
        asked = BatchRequest.of({**arguments, "query": query, "passages": passages})
        return stream(self.engine, asked)

    # What `help` and editors show: the arguments by name.
    stream.__signature__ = inspect.signature(generate).replace(  # type: ignore[attr-defined]  # what inspect looks at first
        return_annotation="Iterator[Chunk]"
    )

    def generate_batch(
        self,
        requests: Sequence[Mapping[str, Any] | BatchRequest],
        *,
        max_rows: int = 32,
        max_bytes: Size | None = None,
    ) -> list[Generation]:
        """Answer many questions together; the answers are those that `generate` gives one by one.

        One forward pass gives every question its next token, so the weights are read once for all
        questions. Windows that several questions read are encoded, held and read once, and count
        as cached tokens. When a question is answered, the next one takes its place. Some questions
        are answered one by one, as by `generate`: those with beams, several sequences, assistants,
        scores or hidden states, or stop_strings; those with an ensemble or a book.

        Greedy answers, and sampled answers with a ``seed``, equal those of `generate` up to
        floating-point rounding: in bfloat16 two tokens with nearly equal logits may swap. Without
        a seed, the questions draw from PyTorch's global generator in turn.

        Args:
            requests: for each question the keyword arguments of `generate`, as a dict or a
                `BatchRequest`.
            max_rows: number of questions that are answered at a time.
            max_bytes: memory for the questions that are answered at a time: bytes, a text such as
                "8GiB", or a share of what is free now, such as "50%". The others wait, in order.
                The default is 75% of what is free on the model's device; devices other than CUDA
                and CPU, which do not report it, have no limit. It has to hold each question's KV
                cache at its final size, the windows that neither the passage cache nor another
                question holds, and one forward pass.

        Returns:
            One answer for each request, in their order. ``raw`` holds only the sequence.

        Raises:
            InputError, PromptError, LimitError: one of the requests can't be answered, for example
                because it needs more memory than ``max_bytes``; nothing was computed.
            GenerationError: as in `generate`; no answer is returned then.
        """
        whole_number("max_rows", max_rows)
        questions = [Question(self.engine, request) for request in requests]
        return answer_all(self.engine, questions, max_rows, max_bytes)

    def scheduler(self, *, max_rows: int = 32, max_bytes: Size | None = None) -> Scheduler:
        """A new `Scheduler`: threads and tasks that ask at the same time share forward passes.

        Args:
            max_rows: number of questions that are answered at a time; the others wait.
            max_bytes: memory for these questions, see `generate_batch`; questions that are answered
                one by one count as well.
        """
        return Scheduler(self.engine, max_rows=max_rows, max_bytes=max_bytes)

    def shared_scheduler(self, *, max_rows: int = 32, max_bytes: Size | None = None) -> Scheduler:
        """The one `scheduler` for all calls with equal arguments, in any thread or task.

        The adapters for LangChain and LlamaIndex use it. It need not be closed.

        Args:
            max_rows: see `scheduler`.
            max_bytes: see `scheduler`. Schedulers with different arguments do not share memory
                limits.
        """
        host = self._host or self
        return shared_scheduler(
            host,
            (max_rows, max_bytes),
            lambda: host.scheduler(max_rows=max_rows, max_bytes=max_bytes),
        )

    def warm(
        self,
        passages: Iterable[PassageLike],
        *,
        prefix: str | None = None,
        conversation: Messages | None = None,
        on_warmed: OnWarmed | None = None,
        ttl: float | None = None,
    ) -> Warmed:
        """Encode passages before the first question, and put them into the cache.

        Passages that the cache holds already are skipped, so a repeated call continues where an
        interrupted one stopped. The windows fit requests with the same prefix: the same system
        prompt and tools.

        Args:
            passages: as in `generate`; an iterable is read one passage at a time. A list is taken
                for the whole corpus where the model's method is one such as `Neighbours`: then
                `with_neighbours` fills in what is missing.
            prefix: the same system prompt as in the later requests.
            conversation: if the requests hold a system message or tools, one such request.
            on_warmed: called with the number of passages done, and the number of all passages
                where it is known.
            ttl: seconds for which these windows may be used, instead of the cache's own.

        Raises:
            InputError: this model has no cache, or its header numbers the passages.
        """
        return warm(
            self.engine,
            passages,
            prefix=prefix,
            conversation=conversation,
            on_warmed=on_warmed,
            ttl=ttl,
        )

    def warm_from_retriever(self, retriever: object, **options: Any) -> Warmed:
        """Call `warm` with all documents that a retriever, index or store can list.

        Args:
            retriever: a retriever of rag-windows; a LangChain retriever, vector store or index of
                documents; a LlamaIndex index, retriever or document store.
            options: the other arguments of `warm`.

        Raises:
            InputError: the retriever can't list its documents; give them to `warm` as a list.
        """
        return self.warm(passages_of(retriever), **options)

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
            query: as in `generate`.
            passages: as in `generate`; or a book.
            choices: the answers to compare, each tokenized on its own behind the assistant header.
            prefix: system prompt.
            method: method for this call instead of the default one.

        Returns:
            One score for each choice, in order; log-probabilities are in nats.
        """
        return self.score_batch([query], passages, choices, prefix=prefix, method=method)[0]

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
            queries: a list of queries as in `score`.
            passages: as in `score`, the same for all queries.
            choices: as in `score`, the same for all queries.
            prefix: system prompt.
            method: method for this call instead of the default one.

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

    def classify(
        self,
        text: str | Sequence[str],
        demonstrations: Sequence[DemonstrationLike],
        labels: Sequence[str] | None = None,
        **options: Unpack[ClassifyOptions],
    ) -> Classification | list[Classification]:
        """Label texts by demonstrations: in-context learning with many windows.

        Demonstrations are spread over windows in the order given, with about as many tokens in
        each, and none is cut. So the model's context length does not limit their number. They are
        encoded once for all texts. A chat model gets the text as the user's message and the label
        as its answer; a model without a chat template continues plain text,
        ``demonstrations | text: label``.

        Args:
            text: one text, or a list of texts.
            demonstrations: (text, label) pairs, mappings with these keys, or `Demonstration`. The
                list may be empty: the labels are then judged by the text only.
            labels: at least two labels to choose from; None takes those of the demonstrations.
            template: a `Template`, the form of a demonstration ("{text}: {label}", the default), or
                a pair of that and the text's form ("{text}:").
            method: method for this call instead of the default one.
            prefix: system prompt.
            normalize: whether labels are compared by the "sum" of their tokens' log-probabilities,
                the default, or by the "mean". If one label is the beginning of another, it is
                chosen only where the longer one is not.
            calibrate_with: content-free texts, such as "N/A", whose label probabilities divide
                the others (https://arxiv.org/abs/2102.09690).
            windows: number of windows for the demonstrations; by default as few as hold them.
            window_tokens: instead, the largest number of tokens of a window; by default what the
                model's positions leave beside the longest text, rounded down to eighths of them.

        Raises:
            InputError: labels, demonstrations, texts or options can't be used.
            LimitError: a demonstration fits no window, or a method that reads demonstrations one
                after the other got more than fit.
        """
        texts = [text] if isinstance(text, str) else list(text)
        found = classify(self.engine, texts, demonstrations, labels, **options)
        return found[0] if isinstance(text, str) else found

    def compare(
        self,
        examples: Iterable[Example | Mapping[str, Any]],
        methods: Sequence[str | Method] | None = None,
        *,
        grid: str | Method | None = None,
        by: By | None = None,
        metric: Metric | None = None,
        prefix: str | None = None,
        max_new_tokens: int = 32,
        refine: bool = True,
        seed: int = 0,
        keep_bytes: int = KEEP_BYTES,
        on_progress: OnProgress | None = None,
    ) -> Profile:
        """Compare methods with one prompt, on this model and questions of yours, and choose one.

        Every method answers every question; passages are encoded once for all methods that encode
        them alike. What to take is the method that is best, unless methods that are best on some of
        the questions do worse than one prompt on the others. `Profile.verdict` says it in words.

        It takes about as long as the answers do: examples times methods times the seconds of one
        answer. An interruption (Ctrl-C) ends it earlier: once every method has answered eight
        examples, the profile is of those that all methods have answered, without a second round;
        its ``interrupted`` is true, and ``left_out`` says how many they are. Before that, the
        `KeyboardInterrupt` is raised as ever.

        Args:
            examples: a few dozen, as `Example` or mappings with "query", "passages" and, if you
                have them, "answer" (or "answers") and "kind". Take passages as your retriever finds
                them.
            methods: what to compare; None for `rag_windows.calibration.METHODS_TO_ASK`, or for
                nothing else beside a ``grid``.
            grid: a method whose numbers to try as well, over those that `default_grid` makes, and
                then over a finer grid around the best.
            by: "labels" (how often the answer holds the words of the right one, and between equal
                methods the right answer's log-probability) or "agreement" (the smallest KL
                divergence from the same model reading the passages in one prompt, over its own
                greedy answer; compared with "auto" then). None takes labels where every example has
                an answer.
            metric: a function of a greedy answer and a right one, larger is better, instead of
                whether its words are in there.
            prefix: the same system prompt as in the later requests.
            max_new_tokens: length of the answers.
            refine: whether there is a second, finer round of a grid.
            seed: seed of folds and bootstrap intervals.
            keep_bytes: largest size of the keys and values that are stored between the rounds.
            on_progress: called with the name of the step, how much of it is done, and how much
                there is.

        Raises:
            InputError: fewer than eight examples can be used, or there is nothing to compare.
        """
        return compare(
            self.engine,
            examples,
            methods=methods,
            grid=grid,
            by=by,
            metric=metric,
            prefix=prefix,
            max_new_tokens=max_new_tokens,
            refine=refine,
            seed=seed,
            keep_bytes=keep_bytes,
            on_progress=on_progress,
        )

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
        """Make a collection of encoded passages (a book), or open the one in a folder.

        ::

            book = lm.codebook(Codebook(retrieve=4, reader=APE()), path="my-book")
            book.add(passages)
            lm.generate("Who crowned the queen?", book)

        Args:
            method: a `Codebook`, or a method that reads with one. Any other method (None: the
                model's own, or "ape" in place of "auto") becomes the reader of a codebook.
            path: the book's folder; None keeps the book in memory only.
            prefix: the same system prompt as in the later requests.
            conversation: if the requests hold a system message or tools, one such request.
            memory: host memory for windows, beside the keys that are searched.
            disk: disk space for windows, if there is a path; 50 GiB by default.
            salt: secret of a tenant; see `PassageCache`.
            wait_s: seconds for which a change waits for another process that changes the same
                folder; after them it is a CacheError that names the process.
            on_loaded: called while a book is opened, with the number of passages done and of all.

        Raises:
            InputError: the windows of this method or header depend on a request.
            CacheError: the folder can't be used, is damaged, or was made with other settings.
        """
        folder = None if path is None else in_home(path)
        cache = PassageCache(
            memory,
            disk if folder is not None else None,
            None if folder is None else folder / "windows",
            salt=salt,
        )
        return PassageBook(
            self.with_cache(cache),
            cache,
            self.engine.reading_all(method),
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
        before: Sequence[Sequence[int]] = (),
    ) -> EncodedContext:
        """Encode token ids as they are.

        Args:
            prefix_ids: ids of the prefix, which may be empty.
            windows: one list of ids for each window; without windows it is an ordinary prompt.
            method: method instead of the default one.
            scores: retrieval score of each window, for a method that uses scores.
            before: ids in front of each window in its document, for a method with neighbours.
        """
        by = self.engine.method_of(method)
        return self.engine.encoder.encode_ids(prefix_ids, windows, by, scores=scores, before=before)

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
        """Continue a query at token level, greedily by default.

        Returns:
            The generated ids, end token included.

        Raises:
            InputError: a context of another model, no query tokens, a count that is none, or an
                argument that nobody knows.
        """
        check_numbers({"max_new_tokens": max_new_tokens, **generate_kwargs})
        check_names(generate_kwargs, self.model)
        options = {"max_new_tokens": max_new_tokens, **generate_kwargs}
        if "generation_config" not in options:
            options.setdefault("do_sample", False)
        decoded = self.engine.decoder.generate(context, query_ids, options=options, seed=seed)
        return decoded.sequences[0]
