"""The rows of a batch: what each reads, how its tokens are sampled, and what it has answered."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerationConfig, GenerationMode
from transformers.generation.streamers import BaseStreamer

from rag_windows.attention.segments import Part, Role
from rag_windows.generate import Decoder, with_config
from rag_windows.kv import Shelf, Window
from rag_windows.loading import input_device
from rag_windows.methods import Method, query_bias, window_starts
from rag_windows.prefill import (
    ContextParts,
    Encoded,
    Encoder,
    OnEncoded,
    Prefill,
    Source,
    WindowEncoder,
)
from rag_windows.sampling import refuse_model_inputs, seeded

Key = tuple[Hashable, ...]

_PAUSE_S = 0.001
"""Between two looks whether another request has encoded a window."""


class Slot:
    """One window, or one prefix, and who reads it.

    Attributes:
        window: its keys and values.
        key: by which other requests find it; None if it is of one request alone.
        prefix: whether it is a prefix.
        spans: tokens of each of its parts that are cited by themselves.
        readers: the rows that read it.
    """

    __slots__ = ("_layers", "key", "prefix", "readers", "spans", "window")

    def __init__(self, window: Window, key: Key | None = None, *, prefix: bool = False) -> None:
        self.window = window
        self.key = key
        self.prefix = prefix
        self.spans: tuple[int, ...] = (len(window.ids),)
        self.readers: set[Row] = set()
        self._layers: dict[int, list[list[Part]]] = {}

    def layers(self, span: int) -> list[list[Part]]:
        """By layer, keys and values of one of the spans."""
        if span not in self._layers:
            end = sum(self.spans[: span + 1])
            place = slice(end - self.spans[span], end)
            pairs = zip(self.window.keys, self.window.values, strict=True)
            self._layers[span] = [
                [(key[:, place].unsqueeze(0), value[:, place].unsqueeze(0))] for key, value in pairs
            ]
        return self._layers[span]


class SharedEncoder:
    """An encoder before which stand the windows that rows of the batch read already.

    Requests of one batch so encode a window once, with a passage cache or without. Several prefills
    may be under way, all of them in one thread.

    Args:
        encoder: what encodes the others.
    """

    def __init__(self, encoder: WindowEncoder) -> None:
        self._encoder = encoder
        self._slots: dict[Key, Slot] = {}
        self._by_window: dict[int, Slot] = {}
        # What prefills under way will read, and what each of them has taken upon itself.
        self._wanted: Counter[Key] = Counter()
        self._claimed: set[Key] = set()

    @property
    def runner(self) -> Encoder:
        """What runs the model."""
        return self._encoder.runner

    def __len__(self) -> int:
        return len(self._slots)

    def prefill(
        self,
        prefix_ids: Sequence[int],
        windows: Sequence[Sequence[int]],
        method: Method,
        sources: Sequence[Source] = (),
        on_encoded: OnEncoded | None = None,
    ) -> Prefill[Encoded]:
        """See `Encoder.prefill`; what other rows read counts as cached."""
        self.runner.follow()
        prefix_key = self._prefix_key(prefix_ids)
        keys = self._keys(prefix_key, prefix_ids, windows, method)
        if self._encoder is not self.runner:
            # A cache counts its hits and knows what it may hand out, so it is asked each time.
            encoded = yield from self._encoder.prefill(
                prefix_ids, windows, method, sources, on_encoded
            )
            prefix = encoded.prefix
            if prefix is not None:
                prefix = self._kept(prefix_key, prefix, prefix=True)
            made = [self._kept(k, w) for k, w in zip(keys, encoded.windows, strict=True)]
            return Encoded(prefix, made, encoded.cached_tokens, encoded.found)
        keys = [prefix_key, *keys]
        self._wanted.update(keys)
        try:
            encoded = yield from self._shared(keys, prefix_ids, windows, method, on_encoded)
        except BaseException:
            self._wanted.subtract(keys)
            self.tidy()
            raise
        self._wanted.subtract(keys)
        return encoded

    def slot(self, window: Window) -> Slot:
        """That of a window: the shared one, or a new one of this request alone."""
        return self._by_window.get(id(window)) or Slot(window)

    def tidy(self) -> None:
        """Forget what nobody reads or waits for."""
        self._wanted = +self._wanted
        self._slots = {
            key: slot for key, slot in self._slots.items() if slot.readers or key in self._wanted
        }
        self._by_window = {id(slot.window): slot for slot in self._slots.values()}

    def _shared(
        self,
        keys: Sequence[Key],
        prefix_ids: Sequence[int],
        windows: Sequence[Sequence[int]],
        method: Method,
        on_encoded: OnEncoded | None,
    ) -> Prefill[Encoded]:
        """See `prefill`; the first of ``keys`` is the prefix's."""
        runner = self.runner
        prefix_key, *keys = keys
        prefix: Window | None = None
        prefix_cached = prefix_key in self._slots
        if prefix_cached:
            prefix = self._slots[prefix_key].window
        elif prefix_ids and (prefix := runner.encode_prefix(prefix_ids)) is not None:
            prefix = self._kept(prefix_key, prefix, prefix=True)
            yield 0.0
        lengths = [len(ids) for ids in windows]
        starts = window_starts(method.alignment, len(prefix_ids), lengths)
        encoded: set[int] = set()
        told = 0

        def tell() -> None:
            nonlocal told
            done = sum(key in self._slots for key in keys)
            if on_encoded is not None and done > told:
                on_encoded(done, len(keys))
            told = done

        tell()
        while missing := [i for i, key in enumerate(keys) if key not in self._slots]:
            mine = [index for index in missing if keys[index] not in self._claimed]
            if not mine:
                yield _PAUSE_S
                tell()
                continue
            claims = {keys[index] for index in mine}
            self._claimed |= claims
            shelf = Shelf([lengths[index] for index in mine])
            ids, places = [windows[index] for index in mine], [starts[index] for index in mine]
            try:
                for batch in runner.encode_batches(prefix, ids, places, method.refinement):
                    for at, window in batch.items():
                        self._kept(keys[mine[at]], shelf.put(at, window))
                        encoded.add(mine[at])
                    tell()
                    yield 0.0
            finally:
                self._claimed -= claims
        if prefix is not None:
            # It may stand elsewhere by now.
            prefix = self._slots[prefix_key].window
        found = tuple(index for index in range(len(keys)) if index not in encoded)
        cached = len(prefix_ids) * prefix_cached + sum(lengths[index] for index in found)
        return Encoded(prefix, [self._slots[key].window for key in keys], cached, found)

    def _prefix_key(self, prefix_ids: Sequence[int]) -> Key:
        """That of the prefix; after an edit of the model it is another one."""
        return self.runner.twin.version, _digest(prefix_ids)

    def _keys(
        self,
        prefix: Key,
        prefix_ids: Sequence[int],
        windows: Sequence[Sequence[int]],
        method: Method,
    ) -> list[Key]:
        lengths = [len(ids) for ids in windows]
        starts = window_starts(method.alignment, len(prefix_ids), lengths)
        seen: dict[Key, int] = {}
        keys: list[Key] = []
        for ids, start in zip(windows, starts, strict=True):
            # One text of all passages is cited by its parts, which are not the same for others.
            whose = None if method.windowed else object()
            key = (prefix, method.encoding, whose, start, _digest(ids))
            # A row that reads the same text twice reads two windows.
            seen[key] = seen.get(key, 0) + 1
            keys.append((*key, seen[key]))
        return keys

    def _kept(self, key: Key, window: Window, *, prefix: bool = False) -> Window:
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = Slot(window, key, prefix=prefix)
            self._by_window[id(window)] = slot
        return slot.window


def _digest(ids: Sequence[int]) -> bytes:
    """Stands for tokens, and costs nothing to look up however many they are."""
    return hashlib.sha256(array("q", ids).tobytes()).digest()


OPTIONS = frozenset(
    (
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "do_sample",
        "eos_token_id",
        "epsilon_cutoff",
        "eta_cutoff",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "generation_config",
        "logits_processor",
        "max_new_tokens",
        "max_time",
        "min_length",
        "min_new_tokens",
        "min_p",
        "no_repeat_ngram_size",
        "pad_token_id",
        "prefix_allowed_tokens_fn",
        "remove_invalid_values",
        "renormalize_logits",
        "repetition_penalty",
        "sequence_bias",
        "stopping_criteria",
        "suppress_tokens",
        "temperature",
        "tokenizer",
        "top_h",
        "top_k",
        "top_p",
        "typical_p",
    )
)
"""Options of ``generate`` that choose the next token of one row, or say when to stop."""

PLAIN: Mapping[str, tuple[Any, ...]] = {
    "assistant_early_exit": (None, False),
    "cache_implementation": (None, False, "hybrid"),
    "guidance_scale": (None, 1),
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "output_logits": (None, False),
    "output_scores": (None, False),
    "prompt_lookup_num_tokens": (None,),
    "stop_strings": (None,),
    "token_healing": (None, False),
    "watermarking_config": (None,),
}
"""Options that a config may set, too, and the values with which a row can be one of a batch."""

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def served(decoder: Decoder, options: Mapping[str, Any]) -> bool:
    """Whether a row of a batch can do what these options ask for."""
    if not OPTIONS.issuperset(name for name, value in options.items() if value is not None):
        return False
    return all(decoder.option(options, name) in values for name, values in PLAIN.items())


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What ``generate`` makes of its arguments before its loop begins."""

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig


def _prepared(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **_: Any,
) -> _Prepared:
    return _Prepared(logits_processor, stopping_criteria, generation_config)


class Chooser:
    """Chooses the tokens of one row as ``generate`` would.

    ``generate`` itself prepares the processors and criteria, so that defaults, order and refusals
    are its own; then it hands over to its caller's loop.

    Attributes:
        ids: the tokens chosen so far.
        ended: whether a criterion has ended the row.

    Args:
        decoder: of the model.
        prompt: tokens that processors see before the generated ones.
        options: of ``generate``.
        criteria: stopping criteria beside those in ``options``.
        seed: of a private generator, or None for PyTorch's global one.
        streamer: told the prompt and each token; or None.
        windowed: whether the row reads windows.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompt: Sequence[int],
        options: Mapping[str, Any],
        criteria: Sequence[Any],
        seed: int | None,
        streamer: BaseStreamer | None,
        *,
        windowed: bool,
    ) -> None:
        refuse_model_inputs(options)
        model = decoder.runner.model if windowed else decoder.model
        device = input_device(model)
        arguments = with_config(decoder.arguments(options, len(prompt), criteria))
        self._given = torch.tensor([list(prompt)], dtype=torch.int64, device=device)
        prepared: Any = model.generate(self._given, custom_generate=_prepared, **arguments)
        self._processors = prepared.processors
        self._criteria = prepared.criteria
        self.sampling = bool(prepared.config.do_sample)
        self.servable = prepared.config.get_generation_mode() in _MODES
        self._ends = decoder.end_tokens(arguments)
        self._scope: AbstractContextManager[Any] = seeded(seed, device)
        self._streamer = streamer
        self.ids: list[int] = []
        self.ended = False
        if streamer is not None:
            streamer.put(self._given.cpu())

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is the token."""
        return not self.sampling and not self._processors

    @property
    def sequence(self) -> torch.Tensor:
        """(1, tokens) int64: the prompt and what was chosen."""
        return self._given

    def choose(self, logits: torch.Tensor) -> int:
        """The next token.

        Args:
            logits: (vocabulary,) fp32, not changed.
        """
        with self._scope:
            scores = self._processors(self._given, logits.unsqueeze(0).clone())
            if not self.sampling:
                return int(scores.argmax(dim=-1))
            chances = torch.nn.functional.softmax(scores, dim=-1)
            return int(torch.multinomial(chances, num_samples=1))

    def take(self, token: int) -> None:
        """Append a token, and ask the criteria whether it was the last."""
        new = self._given.new_tensor([[token]])
        self.ids.append(token)
        self._given = torch.cat([self._given, new], dim=1)
        if self._streamer is not None:
            self._streamer.put(new[0].cpu())
        # Scores are kept for nobody, as without output_scores.
        self.ended = bool(self._criteria(self._given, None).all())
        if self.ended and self._streamer is not None:
            self._streamer.end()

    def result(self) -> list[int]:
        """The chosen tokens, up to the first that ends a text."""
        end = next(
            (i + 1 for i, token in enumerate(self.ids) if token in self._ends), len(self.ids)
        )
        return self.ids[:end]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a loop is asked at token level.

    Attributes:
        context: prefix and windows.
        query_ids: at least one token.
        options: of ``PreTrainedModel.generate``; those that `served` lets pass.
        criteria: stopping criteria beside those in ``options``.
        seed: of a private generator, or None for PyTorch's global one.
        record_mass: whether to record attention mass.
        streamer: as in transformers, or None.
    """

    context: ContextParts
    query_ids: Sequence[int]
    options: dict[str, Any]
    criteria: Sequence[Any] = ()
    seed: int | None = None
    record_mass: bool = False
    streamer: BaseStreamer | None = field(default=None, repr=False)


class Row:
    """One row of the batch.

    Attributes:
        slots: what it reads: prefix and windows.
        fed: tokens that the next forward pass takes: at first the whole tail, then the newest.
        position: of the first of those.
        temperature: divides the logits of its windows.
        slope: of their log-sum-exp.
        shift: added to it then.
        query_bias: added to the log-sum-exp of its own tokens.
        windowed: whether it reads windows.
        cited: whether attention mass is recorded.
        chooser: turns logits into tokens.
        error: what ended it, if something did.

    Args:
        asked: the question.
        slots: the prefix's, if there is one, then one a window.
        chooser: of this row.
    """

    __slots__ = (
        "_first_spans",
        "_groups",
        "_mass",
        "_n_groups",
        "chooser",
        "cited",
        "error",
        "fed",
        "position",
        "query_bias",
        "shift",
        "slope",
        "slots",
        "temperature",
        "windowed",
    )

    def __init__(self, asked: Asked, slots: Sequence[Slot], chooser: Chooser) -> None:
        context = asked.context
        self.windowed = bool(context.windows)
        self.slots = tuple(slots)
        # Without windows nothing else holds the prefix, so it is the beginning of the tail.
        self.fed = [*(() if self.windowed else context.prefix_ids), *asked.query_ids]
        self.position = context.query_start if self.windowed else 0
        method = context.method
        self.temperature, self.slope, self.shift = method.temperature, method.slope, method.shift
        self.query_bias = query_bias(method, len(context.windows)) if self.windowed else 0.0
        self.cited = asked.record_mass and self.windowed
        self.chooser = chooser
        self.error: BaseException | None = None
        self._groups = torch.tensor(context.groups, dtype=torch.int64)
        self._n_groups = context.n_groups
        # Of each part of each window, then of the prefix and of the row's own tokens.
        self._mass = torch.zeros(len(context.groups) + 2)
        self._first_spans: dict[int, int] = {}
        spans = 0
        for slot in self.slots:
            slot.readers.add(self)
            if not slot.prefix:
                self._first_spans[id(slot)] = spans
                spans += len(slot.spans)

    @property
    def ended(self) -> bool:
        """Whether it needs no further token."""
        return self.error is not None or self.chooser.ended

    def leave(self) -> None:
        """Read nothing any more."""
        for slot in self.slots:
            slot.readers.discard(self)

    def take(self, token: int) -> None:
        """Feed a token to the next pass, behind those fed before."""
        self.position += len(self.fed)
        self.fed = [token]

    def add_context(self, slot: Slot, span: int, share: float) -> None:
        """Add to the attention weight of a span of a window; only the shares mean something."""
        self._mass[self._first_spans[id(slot)] + span] += share

    def add_weight(self, role: Role, share: float) -> None:
        """Add to the attention weight of the prefix or the query."""
        self._mass[-2 if role == "prefix" else -1] += share

    def masses(self) -> list[float] | None:
        """Shares of the citation groups, the prefix and the row's own tokens; None if unrecorded.

        They sum to one.
        """
        if not self.cited:
            return None
        groups = torch.zeros(self._n_groups).index_add_(0, self._groups, self._mass[:-2])
        whole = torch.cat([groups, self._mass[-2:]])
        return (whole / whole.sum()).tolist()
