"""Prefill: keys and values of the prefix and of the windows, each behind that prefix."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from transformers import PreTrainedModel

from rag_windows.attention.layers import check_tables, layer_reach, position_limit, table_limit
from rag_windows.attention.layout import AllCaptured, Capture, TextsLayout, use_layout
from rag_windows.attention.twin import Twin
from rag_windows.errors import GenerationError
from rag_windows.kv import Shelf, Window
from rag_windows.loading import input_device
from rag_windows.methods import Method
from rag_windows.methods.base import window_starts
from rag_windows.methods.steps import Refinement
from rag_windows.steps.refinement import check_room, refine

MAX_PADDING = 0.1
"""Share of a pass that may be padding, before windows go to the next one."""

FREE_PADDING = 4
"""Tokens of padding a window may always have: a pass of its own would cost more."""


def chunks(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group windows that are packed without padding, longest first.

    Args:
        lengths: tokens of each window.
        max_tokens: bound on the tokens of one chunk; a longer window is alone in its own.

    Returns:
        Indices into ``lengths``, each once; windows of equal length stand beside each other.
    """
    made: list[list[int]] = []
    held = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if made and held + lengths[index] <= max_tokens:
            made[-1].append(index)
            held += lengths[index]
        else:
            made.append([index])
            held = lengths[index]
    return made


def bucket_by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group windows of like length that are padded to the longest, longest first.

    Args:
        lengths: tokens of each window.
        max_tokens: bound on rows x longest row of one bucket; a longer window is alone in its own.

    Returns:
        Indices into ``lengths``, each once. In every bucket each window is at most
        ``max(FREE_PADDING, MAX_PADDING * longest)`` tokens shorter than the longest.
    """
    buckets: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = (
            bool(buckets)
            and longest - lengths[index] <= max(FREE_PADDING, MAX_PADDING * longest)
            and (len(buckets[-1]) + 1) * longest <= max_tokens
        )
        if fits:
            buckets[-1].append(index)
        else:
            buckets.append([index])
            longest = lengths[index]
    return buckets


class Passes:
    """Runs a model's decoder; holds no state of a call.

    No logits are computed, and of the last layer nothing behind its keys and values.

    Args:
        twin: the model with our attention.
        reach: of each layer, see `rag_windows.attention.layout.Layout`.
        table: positions of rotary tables that don't grow, or None; see `table_limit`.
    """

    def __init__(
        self, twin: PreTrainedModel, reach: tuple[int | None, ...], table: int | None
    ) -> None:
        self._twin = twin
        self._decoder: torch.nn.Module = twin.base_model
        self._reach = reach
        self._table = table
        # Where accelerate moves weights, it takes them back when a module returns.
        moved = any(hasattr(module, "_hf_hook") for module in twin.modules())
        self._last = None if moved else len(reach) - 1

    @torch.no_grad()
    def run(
        self,
        windows: Sequence[Sequence[int]],
        starts: Sequence[int],
        prefix: Window | None,
        before: Sequence[Window] = (),
    ) -> list[Window]:
        """One forward pass over windows, one behind the other without padding.

        Args:
            windows: token ids of each, at least one token each; those of equal length side by side.
            starts: position of each one's first token.
            prefix: what every window sees before itself, or None.
            before: a window for each, all of which its tokens see, too; or none.

        Returns:
            Their keys and values: views of the pass's own.
        """
        capture = Capture(self._last)
        lengths = [len(ids) for ids in windows]
        layout = TextsLayout(self._reach, lengths, starts, prefix, before, capture)
        check_tables(self._table, int(layout.positions.max()) + 1)
        device = input_device(self._twin)
        ids = torch.tensor([[token for window in windows for token in window]], device=device)
        with use_layout(layout), suppress(AllCaptured):
            self._decoder(
                ids, position_ids=layout.positions.unsqueeze(0).to(device), use_cache=False
            )
        layers = range(len(self._reach))
        made = []
        first = 0
        for window, start in zip(windows, starts, strict=True):
            place = slice(first, first + len(window))
            made.append(
                Window(
                    ids=tuple(window),
                    start=start,
                    keys=tuple(capture.keys[layer][0, :, place] for layer in layers),
                    values=tuple(capture.values[layer][0, :, place] for layer in layers),
                )
            )
            first = place.stop
        return made


T = TypeVar("T")

OnEncoded = Callable[[int, int], None]
"""Told how many windows are encoded, of how many."""

Prefill = Generator[float, None, T]
"""Encoding that stops after each forward pass, so that whoever runs it can do other work between.

It yields the seconds for which it has nothing to do: 0 after a pass, more while it waits for others
that encode the same. Closing it ends the work; what a cache can use of it is kept.
"""


class PrefillCancelledError(GenerationError):
    """The question was cancelled before its windows were encoded."""


def complete(prefill: Prefill[T], cancelled: threading.Event | None = None) -> T:
    """Run a prefill to its end.

    Args:
        prefill: not begun yet.
        cancelled: ends it between two passes when set.

    Raises:
        PrefillCancelledError: it was cancelled.
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
        labels: ids of the passage and its document, by which a cache can be told to forget it.
    """

    name: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Encoded:
    """Prefix and windows of one request.

    Attributes:
        prefix: None if it is empty.
        windows: in the order given.
        cached_tokens: those of all tokens that were not computed for this request.
        found: indices of windows that were not.
    """

    prefix: Window | None
    windows: list[Window] = field(repr=False)
    cached_tokens: int = 0
    found: tuple[int, ...] = ()


class WindowEncoder(Protocol):
    """What turns prefix and windows into keys and values: an `Encoder`, or a cache before one."""

    def prefill(
        self,
        prefix_ids: Sequence[int],
        windows: Sequence[Sequence[int]],
        method: Method,
        sources: Sequence[Source] = (),
        on_encoded: OnEncoded | None = None,
    ) -> Prefill[Encoded]:
        """See `Encoder.prefill`."""

    @property
    def runner(self) -> Encoder:
        """What runs the model."""


class Encoder:
    """Runs the model over prefix and windows and keeps each layer's keys and values.

    It holds no state of a call, so threads may share one.

    Args:
        twin: the model with our attention. What is edited in the model is taken over by the next
            `follow`.
        max_batch_tokens: bound on one forward pass, padding included where there is any; a single
            longer window still runs alone. None for `PASS_TOKENS`.
    """

    def __init__(self, twin: Twin, max_batch_tokens: int | None = None) -> None:
        self.twin = twin
        self._max_batch_tokens = max_batch_tokens
        self._derive()

    def follow(self) -> None:
        """Take over what was edited in the model since the last call.

        Raises:
            UnsupportedModelError: what it became can't be split into windows.
        """
        self.twin.follow()
        if self._version != self.twin.version:
            self._derive()

    def _derive(self) -> None:
        self._version = self.twin.version
        config = self.model.config.get_text_config(decoder=True)
        self.reach = layer_reach(config)
        self._passes = Passes(self.model, self.reach, table_limit(config))
        self._position_limit = position_limit(self.model.config)

    @property
    def runner(self) -> Encoder:
        """Itself."""
        return self

    @property
    def model(self) -> PreTrainedModel:
        """The model that encodes."""
        return self.twin.model

    def prefill(
        self,
        prefix_ids: Sequence[int],
        windows: Sequence[Sequence[int]],
        method: Method,
        sources: Sequence[Source] = (),
        on_encoded: OnEncoded | None = None,
    ) -> Prefill[Encoded]:
        """Encode what one request reads.

        Args:
            prefix_ids: may be empty.
            windows: token ids, each of at least one token.
            method: how they will be read.
            sources: of each window, for who stores them.
            on_encoded: called after each forward pass with the windows done and all of them.
        """
        self.follow()
        prefix = self.encode_prefix(prefix_ids)
        starts = window_starts(method.alignment, len(prefix_ids), [len(ids) for ids in windows])
        if prefix is not None:
            yield 0.0
        made = yield from self.prefill_windows(
            prefix, windows, on_encoded, starts, method.refinement
        )
        return Encoded(prefix, made)

    def encode_prefix(self, ids: Sequence[int]) -> Window | None:
        """Encode the prefix at positions 0..p-1; None if it is empty."""
        if not ids:
            return None
        return self.run([ids], [0], None)[0]

    def encode_windows(
        self,
        prefix: Window | None,
        windows: Sequence[Sequence[int]],
        on_encoded: OnEncoded | None = None,
        starts: Sequence[int] | None = None,
        refinement: Refinement | None = None,
    ) -> list[Window]:
        """`prefill_windows`, at once."""
        return complete(self.prefill_windows(prefix, windows, on_encoded, starts, refinement))

    def prefill_windows(
        self,
        prefix: Window | None,
        windows: Sequence[Sequence[int]],
        on_encoded: OnEncoded | None = None,
        starts: Sequence[int] | None = None,
        refinement: Refinement | None = None,
    ) -> Prefill[list[Window]]:
        """Encode each window behind the prefix.

        Windows share forward passes, packed without padding.

        Args:
            prefix: from `encode_prefix`.
            windows: token ids, each of at least one token, of any lengths.
            on_encoded: called after each forward pass with the windows done and all of them.
            starts: position of each window's first token; right behind the prefix by default.
            refinement: what changes the windows of each batch.

        Returns:
            One window each, in the order given.
        """
        encoded: dict[int, Window] = {}
        shelf = Shelf([len(ids) for ids in windows])
        for batch in self.encode_batches(prefix, windows, starts, refinement):
            encoded |= {index: shelf.put(index, window) for index, window in batch.items()}
            if on_encoded is not None:
                on_encoded(len(encoded), len(windows))
            yield 0.0
        return [encoded[index] for index in range(len(windows))]

    def encode_batches(
        self,
        prefix: Window | None,
        windows: Sequence[Sequence[int]],
        starts: Sequence[int] | None = None,
        refinement: Refinement | None = None,
    ) -> Iterator[dict[int, Window]]:
        """Like `encode_windows`, one forward pass after the other: windows by their index."""
        lengths = [len(ids) for ids in windows]
        if starts is None:
            starts = [0 if prefix is None else len(prefix.ids)] * len(windows)
        if refinement is not None:
            check_room(refinement, starts, lengths, self._position_limit, "Window {}".format)
        most = self._max_batch_tokens
        if most is None:
            most = PASS_TOKENS[input_device(self.model).type != "cpu"]
        for chunk in chunks(lengths, most):
            made = self.run([windows[i] for i in chunk], [starts[i] for i in chunk], prefix)
            if refinement is not None:
                made = refine(refinement, self.run, made, prefix)
            yield dict(zip(chunk, made, strict=True))

    def run(
        self,
        windows: Sequence[Sequence[int]],
        starts: Sequence[int],
        prefix: Window | None,
        before: Sequence[Window] = (),
    ) -> list[Window]:
        """See `Passes.run`."""
        return self._passes.run(windows, starts, prefix, before)
