"""Prefill: from tokens to what a query reads, the keys and values of prefix and windows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TypeVar

import torch
from transformers import DynamicCache, PreTrainedModel

from rag_windows.attention.layers import (
    check_tables,
    position_limit,
    sliding_windows_of,
    table_limit,
)
from rag_windows.attention.layout import AllCaptured, Capture, TextsLayout, use_layout
from rag_windows.attention.mirror import ModelMirror
from rag_windows.errors import GenerationError
from rag_windows.kv import Members, Window, Windows
from rag_windows.loading import input_device
from rag_windows.methods import DeepThinking, Method, Sequential
from rag_windows.methods.base import waits_for_query, window_starts
from rag_windows.steps.ensemble_cache import EnsembleCache
from rag_windows.steps.model_cache import ModelCache, RowsCache
from rag_windows.steps.recompute import check_passes, refine
from rag_windows.titles import Titles


def packed(lengths: Sequence[int], max_tokens: int) -> list[int]:
    """Indices of windows that share a forward pass of at most ``max_tokens``, longest first.

    Windows of equal length stand beside each other; one longer than a pass has a pass of its own.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    totals = accumulate(lengths[i] for i in order)
    fitting = [i for i, total in zip(order, totals, strict=True) if total <= max_tokens]
    return fitting or order[:1]


def beginnings(texts: Sequence[Sequence[int]], starts: Sequence[int]) -> list[list[int]]:
    """Indices of texts that one pass over the first of them serves: it begins with the others.

    A token sees only what stands in front of it, so it is the same in all of them.
    """
    runs: list[list[int]] = []
    # Sorted, a text stands in front of those that begin with it.
    for index in sorted(range(len(texts)), key=lambda i: (starts[i], *texts[i]), reverse=True):
        whole, text = texts[runs[-1][0]] if runs else (), texts[index]
        if runs and starts[index] == starts[runs[-1][0]] and whole[: len(text)] == text:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs


T = TypeVar("T")

OnEncoded = Callable[[int, int], None]
"""Called with the number of windows encoded and of all windows."""

Prefill = Generator[float, None, T]
"""Encoding that stops after each forward pass, so that whoever runs it can do other work between.

It yields the seconds for which it has nothing to do: 0 after a pass, more while it waits for others
that encode the same. Closing it ends the work; what a cache can use of it stays.
"""


class PrefillCancelledError(GenerationError):
    """The question was cancelled before its windows were encoded."""


def complete(prefill: Prefill[T], cancelled: threading.Event | None = None) -> T:
    """Run a prefill to its end.

    Raises:
        PrefillCancelledError: ``cancelled`` was set, which ends it between two passes.
    """
    try:
        while cancelled is None or not cancelled.is_set():
            try:
                pause = next(prefill)
            except StopIteration as end:
                made: T = end.value
                return made
            if pause:
                time.sleep(pause)
    finally:
        prefill.close()
    raise PrefillCancelledError("The question was cancelled while its passages were encoded.")


PASS_TOKENS = 512, 8192
"""Tokens of one forward pass of windows, on a CPU and on an accelerator.

A CPU is as fast with the smaller ones, and what a pass needs beside its keys and values is less.
"""


@dataclass(frozen=True, slots=True)
class Source:
    """What a window was made from.

    Attributes:
        name: how errors call it.
        labels: names of the passage and its document, by which a cache can forget it;
            the first one stands for the passage's content.
    """

    name: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedWindow:
    """A window before it is encoded.

    Attributes:
        ids: its tokens, at least one.
        start: position of the first of them.
        before: tokens directly in front of it, which it sees while it is encoded; their own keys
            and values are no part of it.
        source: what it was made from.
    """

    ids: tuple[int, ...]
    start: int
    before: tuple[int, ...]
    source: Source


@dataclass(frozen=True, slots=True)
class EncodingPlan:
    """What one request reads, before it is encoded.

    Attributes:
        prefix_ids: tokens of the prefix.
        method: how windows are encoded and read: the request's method, or `Sequential` where that
            one encodes every token again in sight of those before it, as an ordinary prompt does.
        windows: as they are encoded; a method that is not windowed has one, of all tokens.
        lengths: tokens of each window, as they were given.
        groups: citation group of each of those.
        scores: retrieval score of each of those, None where it has none.
        titles: of the passages, which are the citation groups; None where only tokens are known.
    """

    prefix_ids: tuple[int, ...]
    method: Method
    windows: tuple[PlannedWindow, ...]
    lengths: tuple[int, ...]
    groups: tuple[int, ...]
    scores: tuple[float | None, ...]
    titles: Titles | None = None

    @classmethod
    def of(
        cls,
        prefix_ids: Sequence[int],
        windows: Sequence[Sequence[int]],
        method: Method,
        *,
        chunks: Sequence[Sequence[Sequence[int]]] = (),
        sources: Sequence[Source] = (),
        groups: Sequence[int] | None = None,
        scores: Sequence[float | None] = (),
        titles: Titles | None = None,
    ) -> EncodingPlan:
        """Plan how prefix and windows are encoded for one method.

        Args:
            windows: token ids of each, at least one.
            chunks: of each window, the token ids of the chunks in front of it in its document,
                nearest last; the method says how many of them it sees. Or none.
            sources: of each window, for errors and a cache; or none.
            groups: by default each window is its own.
            scores: or none.
            titles: of the citation groups, or None.
        """
        prefix_ids, ids = tuple(prefix_ids), [tuple(one) for one in windows]
        lengths = tuple(map(len, ids))
        sources = sources or [Source(f"Window {i}") for i in range(len(ids))]
        if method.recompute is not None and method.recompute.everything(lengths):
            method = Sequential()
        if method.windowed:
            before = _seen(method, prefix_ids, chunks or [()] * len(ids))
        else:
            ids = [tuple(token for one in ids for token in one)] if ids else []
            before, sources = [()] * len(ids), [Source("All passages")] * len(ids)
        starts = window_starts(
            method.alignment, len(prefix_ids), [*map(len, ids)], [*map(len, before)]
        )
        return cls(
            prefix_ids,
            method,
            tuple(map(PlannedWindow, ids, starts, before, sources)),
            lengths,
            tuple(range(len(lengths)) if groups is None else groups),
            tuple(scores) or (None,) * len(lengths),
            titles,
        )

    def only(self, indices: Sequence[int]) -> EncodingPlan:
        """The same with some of the windows, for a method that is windowed."""
        return replace(
            self,
            windows=tuple(self.windows[i] for i in indices),
            lengths=tuple(self.lengths[i] for i in indices),
            groups=tuple(self.groups[i] for i in indices),
            scores=tuple(self.scores[i] for i in indices),
        )

    def check_scores(self) -> None:
        """Refuse windows without a score that the method needs.

        Raises:
            InputError: naming the first of them.
        """
        if self.method.combination is not None:
            names = [window.source.name for window in self.windows]
            self.method.combination.check(self.scores, names)


def _seen(
    method: Method, prefix_ids: tuple[int, ...], chunks: Sequence[Sequence[Sequence[int]]]
) -> list[tuple[int, ...]]:
    """Token ids in front of each window, which it sees while it is encoded."""
    sink, count = prefix_ids[: method.sink], method.neighbours
    near = [of_window[-count:] if count else () for of_window in chunks]
    return [(*sink, *(token for ids in each for token in ids)) for each in near]


class ModelEncoder:
    """Runs the model over prefix and windows and keeps each layer's keys and values.

    It holds no state of a call, so threads may share one.

    Args:
        mirror: the model with our attention.
        max_batch_tokens: tokens of one forward pass, but for a single longer window; None for
            `PASS_TOKENS`.

    Attributes:
        form: of the model's own cache, where rows go on from that; None where windows share one
            attention.
        make_writer: makes the encoder of windows, where those have one of their own; see
            `window_adapter`.
        adapter: folder or Hub name of the adapter in the model, if it is known.
    """

    form: ModelCache | None = None
    make_writer: Callable[[], ModelEncoder] | None = None
    adapter: str | None = None
    _writer: ModelEncoder | None = None

    def __init__(self, mirror: ModelMirror, max_batch_tokens: int | None = None) -> None:
        self.mirror = mirror
        self._max_batch_tokens = max_batch_tokens
        self._derive()

    def follow(self) -> None:
        """Take over what was edited in the model since the last call.

        Raises:
            UnsupportedModelError: what it became can't be split into windows.
        """
        self.mirror.follow()
        if self._version != self.mirror.version:
            self._writer = None
            self._derive()
        if self.make_writer is not None:
            self.of_windows.follow()

    @property
    def of_windows(self) -> ModelEncoder:
        """What encodes windows: this one, or one of the same weights and an adapter."""
        if self.make_writer is None:
            return self
        writer = self._writer
        if writer is None:
            writer = self._writer = self.make_writer()
        return writer

    def _derive(self) -> None:
        version = self.mirror.version
        config = self.model.config.get_text_config(decoder=True)
        self.sliding_windows = sliding_windows_of(config)
        self._table_limit = table_limit(config)
        self._position_limit = position_limit(self.model.config)
        # Where accelerate moves weights, it takes them back when a module returns.
        moved = any(hasattr(module, "_hf_hook") for module in self.model.modules())
        self._last_layer = None if moved else len(self.sliding_windows) - 1
        # Last: another thread that reads it now has what it stands for.
        self._version = version

    @property
    def model(self) -> PreTrainedModel:
        """The model that encodes."""
        return self.mirror.model

    @property
    def pass_tokens(self) -> int:
        """Tokens of one forward pass of windows, but for a single longer one."""
        if self._max_batch_tokens is not None:
            return self._max_batch_tokens
        return PASS_TOKENS[input_device(self.model).type != "cpu"]

    def encode_pass(
        self,
        prefix: Window | None,
        windows: Sequence[PlannedWindow],
        refinement: DeepThinking | None = None,
    ) -> dict[int, Window]:
        """Encode some windows in one forward pass, packed without padding: the longest ones.

        Each one's tokens ``before`` run with it, directly in front, and what they give is left out.

        Returns:
            Windows by their index, as views of the pass's tensors.
        """
        texts = [one.before + one.ids for one in windows]
        firsts = [one.start - len(one.before) for one in windows]
        # A refined token has seen all of its text, so that no other text has the same one.
        separate = refinement is not None or not any(one.before for one in windows)
        runs = [[i] for i in range(len(windows))] if separate else beginnings(texts, firsts)
        lengths = [len(texts[run[0]]) for run in runs]
        if refinement is not None:
            check_passes(refinement, firsts, lengths, self._position_limit, "Window {}".format)
        runs = [runs[i] for i in packed(lengths, self.pass_tokens)]
        longest = [run[0] for run in runs]
        made = self.run([texts[i] for i in longest], [firsts[i] for i in longest], prefix)
        if refinement is not None:
            made = refine(refinement, self.run, made, prefix)
        return {
            i: window.stretch(len(windows[i].before), len(texts[i]))
            for run, window in zip(runs, made, strict=True)
            for i in run
        }

    def ids_of(self, planned: PlannedWindow) -> tuple[int, ...]:
        """Tokens of the window that is encoded for a planned one."""
        return planned.ids

    def check_method(self, method: Method) -> None:
        """Refuse, with a MethodError, a method whose windows can't be encoded or read."""

    def run(
        self,
        windows: Sequence[Sequence[int]],
        starts: Sequence[int],
        prefix: Window | None,
        before: Sequence[Window] = (),
        *,
        gradients: bool = False,
    ) -> list[Window]:
        """One forward pass over windows, one behind the other without padding.

        No logits are computed, and of the last layer nothing behind its keys and values.

        Args:
            windows: token ids of each; those of equal length side by side.
            starts: position of each one's first token.
            prefix: what every window sees before itself.
            before: a window for each, all of which its tokens see, too; or none.
            gradients: whether they flow back through the pass.

        Returns:
            Their keys and values: views of the pass's own.
        """
        capture = Capture(self._last_layer)
        lengths = [len(ids) for ids in windows]
        layout = TextsLayout(self.sliding_windows, lengths, starts, prefix, before, capture)
        check_tables(self._table_limit, int(layout.positions.max()) + 1)
        device = input_device(self.model)
        ids = torch.tensor([[token for window in windows for token in window]], device=device)
        with torch.set_grad_enabled(gradients), use_layout(layout), suppress(AllCaptured):
            self.model.base_model(
                ids, position_ids=layout.positions.unsqueeze(0).to(device), use_cache=False
            )
        layers = range(len(self.sliding_windows))
        ends = accumulate(lengths)
        return [
            Window(
                ids=tuple(window),
                start=start,
                keys=tuple(capture.keys[layer][0, :, end - len(window) : end] for layer in layers),
                values=tuple(
                    capture.values[layer][0, :, end - len(window) : end] for layer in layers
                ),
            )
            for window, start, end in zip(windows, starts, ends, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class EncodedContext:
    """Prefix and windows, encoded; immutable, so any number of queries and threads may share it.

    Attributes:
        prefix_ids: tokens of the prefix.
        prefix: its keys and values, or None without a prefix or without windows.
        method: how queries read the windows.
        query_start: position of the query's first token: where the furthest window ends.
        windows: in order, as a query of the method reads them: together, or as members of an
            ensemble. A method that is not windowed has one, of all tokens. None where there are
            none: then the context is an ordinary prompt.
        lengths: tokens of each window, as they were given.
        groups: citation group of each of those.
        n_groups: number of citation groups.
        scores: retrieval score of each; empty if not all have one.
        cached_tokens: those of prefix and windows that were not computed for this context.
        encoded_windows: how many windows were computed for it.
        found: indices of those that were not.
        settled: whether a step that waits for the query was taken, so that this context serves one
            query only; see `waits`.
        chosen: where the method chooses windows for each query: None before, then which of all
            windows are read; `lengths` remain those of all.
        separate: where passages are read in one prompt, the same passages as windows of their own,
            in the order in which they are read.
        form: of the model's own cache, where rows go on from that.
        titles: see `EncodingPlan`.
    """

    prefix_ids: tuple[int, ...]
    prefix: Window | None
    method: Method
    query_start: int
    windows: Windows | Members | None = None
    lengths: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    n_groups: int = 0
    scores: tuple[float, ...] = ()
    cached_tokens: int = 0
    encoded_windows: int = 0
    found: tuple[int, ...] = ()
    settled: bool = False
    chosen: tuple[int, ...] | None = None
    separate: EncodedContext | None = field(default=None, repr=False)
    form: ModelCache | None = field(default=None, repr=False)
    titles: Titles | None = field(default=None, repr=False)

    @property
    def waits(self) -> bool:
        """Whether it has to know the query before it can be read; see `Decoder.for_query`."""
        return self.windows is not None and not self.settled and waits_for_query(self.method)

    @property
    def cached_windows(self) -> int:
        """How many windows were found."""
        return len(self.found)

    @property
    def window_tokens(self) -> int:
        """Tokens in all windows together."""
        return sum(self.lengths)

    @property
    def each(self) -> tuple[Window, ...]:
        """The windows one by one, in order."""
        return () if self.windows is None else self.windows.windows

    def narrowed(
        self, windows: Sequence[Window], groups: Sequence[int], scores: Sequence[float] = ()
    ) -> EncodedContext:
        """The same context with other windows, such as some of `each`, and what is theirs."""
        return replace(
            self,
            windows=read_by(
                self.method, windows, groups, self.n_groups, scores, rows=self.form is not None
            ),
            query_start=max(window.end for window in windows),
            groups=tuple(groups),
            scores=tuple(scores),
        )

    def choosing(self, groups: Collection[int]) -> EncodedContext:
        """The same for one query, with only the windows of some citation groups, in order."""
        chosen = [index for index, group in enumerate(self.groups) if group in groups]
        narrow = self.narrowed(
            [self.each[i] for i in chosen],
            [self.groups[i] for i in chosen],
            [self.scores[i] for i in chosen] if self.scores else [],
        )
        return replace(narrow, chosen=tuple(chosen), settled=True)

    def encoded_again(self, windows: Sequence[Window], again: Sequence[int]) -> EncodedContext:
        """The same with other keys and values of the windows, of which so many tokens are new."""
        return replace(
            self,
            windows=read_by(
                self.method, windows, self.groups, self.n_groups, self.scores, self.lengths
            ),
            cached_tokens=self.cached_tokens - sum(again[index] for index in self.found),
        )

    def new_cache(self, rows: int = 1) -> DynamicCache:
        """A fresh HF cache that holds the prefix, for ``rows`` queries, a batch row each.

        In an ensemble, each query takes a row a window, of which callers need not know.

        It has no config on purpose: with one, sliding layers would forget the prefix by counting
        tokens instead of positions.
        """
        if self.form is not None:
            if not isinstance(self.windows, Members):
                return self.form.fresh()
            return RowsCache(self.form, self.windows, self.prefix, rows, self.query_start)
        cache = DynamicCache()
        if isinstance(self.windows, Members):
            cache = EnsembleCache(self.windows.per_query)
            rows *= self.windows.per_query
        if self.prefix is not None:
            pairs = zip(self.prefix.keys, self.prefix.values, strict=True)
            for layer, (key, value) in enumerate(pairs):
                cache.update(
                    key.unsqueeze(0).expand(rows, -1, -1, -1),
                    value.unsqueeze(0).expand(rows, -1, -1, -1),
                    layer,
                )
        return cache


def read_by(
    method: Method,
    windows: Sequence[Window],
    groups: Sequence[int],
    n_groups: int,
    scores: Sequence[float],
    spans: Sequence[int] | None = None,
    *,
    rows: bool = False,
) -> Windows | Members:
    """Windows as queries of a method read them; see `EncodedContext` and `Windows.of`.

    With ``rows`` each is read in a row of its own, and one is read alone.
    """
    combination = method.combination
    if combination is None and rows:
        # What is chosen among them later is in no order yet.
        fixed = torch.full((len(windows),), 1 / len(windows))
        own = [*groups][: len(windows)]
        return Members(tuple(windows), False, fixed, torch.tensor(own), n_groups)
    if combination is None:
        return Windows.of(windows, groups, n_groups, spans)
    return Members(
        windows=tuple(windows),
        prior=combination.prior,
        fixed=combination.fixed(scores, groups),
        groups=torch.tensor(list(groups)),
        n_groups=n_groups,
    )
