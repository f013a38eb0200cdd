"""Windows and prefixes that the rows of a batch read, each held once however many read it."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from rag_windows.attention.segments import Part
from rag_windows.encoding import Encoded, Encoder, OnEncoded, Prefill, Source, WindowEncoder
from rag_windows.kv import Shelf, Window
from rag_windows.rescaling import Method, window_starts

if TYPE_CHECKING:
    from rag_windows.batch.row import Row

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
