"""Windows and prefixes that the rows of a batch read, each held once however many read it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from rag_windows.encoding import Encoded, Encoder, OnEncoded, Source, WindowEncoder
from rag_windows.rescaling import Method, window_starts
from rag_windows.windows import Window

if TYPE_CHECKING:
    from rag_windows.batch.row import Row

Key = tuple[Hashable, ...]


class Slot:
    """One window, or one prefix, and who reads it.

    Attributes:
        window: its keys and values; where they stand may change, what they are may not.
        key: by which other requests find it; None if it is of one request alone.
        prefix: whether it is a prefix.
        spans: tokens of each of its parts that are cited by themselves.
        readers: the rows that read it.
    """

    __slots__ = ("key", "prefix", "readers", "spans", "window")

    def __init__(self, window: Window, key: Key | None = None, *, prefix: bool = False) -> None:
        self.window = window
        self.key = key
        self.prefix = prefix
        self.spans: tuple[int, ...] = (len(window.ids),)
        self.readers: set[Row] = set()


class SharedEncoder:
    """An encoder before which stand the windows that rows of the batch read already.

    Requests of one batch so encode a window once, with a passage cache or without. It is used by
    one thread at a time.

    Args:
        encoder: what encodes the others.
    """

    def __init__(self, encoder: WindowEncoder) -> None:
        self._encoder = encoder
        self._slots: dict[Key, Slot] = {}
        self._by_window: dict[int, Slot] = {}
        self._version = encoder.runner.twin.version

    @property
    def runner(self) -> Encoder:
        """What runs the model."""
        return self._encoder.runner

    def __len__(self) -> int:
        return len(self._slots)

    def encode(
        self,
        prefix_ids: Sequence[int],
        windows: Sequence[Sequence[int]],
        method: Method,
        sources: Sequence[Source] = (),
        on_encoded: OnEncoded | None = None,
    ) -> Encoded:
        """See `Encoder.encode`; what other rows read counts as cached."""
        self.runner.follow()
        if self._version != self.runner.twin.version:
            # What rows read that were there before the edit is theirs alone.
            self._version = self.runner.twin.version
            self._slots, self._by_window = {}, {}
        if self._encoder is not self.runner:
            # A cache counts its hits and knows what it may hand out, so it is asked each time.
            encoded = self._encoder.encode(prefix_ids, windows, method, sources, on_encoded)
            keys = self._keys(prefix_ids, windows, method)
            prefix = encoded.prefix
            if prefix is not None:
                prefix = self._kept((tuple(prefix_ids),), prefix, prefix=True)
            made = [self._kept(k, w) for k, w in zip(keys, encoded.windows, strict=True)]
            return Encoded(prefix, made, encoded.cached_tokens, encoded.found)
        return self._encode(prefix_ids, windows, method, on_encoded)

    def slot(self, window: Window) -> Slot:
        """That of a window: the shared one, or a new one of this request alone."""
        return self._by_window.get(id(window)) or Slot(window)

    def tidy(self) -> None:
        """Forget what nobody reads, and hand out the rest where it stands now."""
        self._slots = {key: slot for key, slot in self._slots.items() if slot.readers}
        self._by_window = {id(slot.window): slot for slot in self._slots.values()}

    def _encode(
        self,
        prefix_ids: Sequence[int],
        windows: Sequence[Sequence[int]],
        method: Method,
        on_encoded: OnEncoded | None,
    ) -> Encoded:
        runner = self.runner
        cached = 0
        prefix_key: Key = (tuple(prefix_ids),)
        prefix: Window | None = None
        if prefix_key in self._slots:
            prefix = self._slots[prefix_key].window
            cached += len(prefix_ids)
        elif prefix_ids:
            prefix = runner.encode_prefix(prefix_ids)
            if prefix is not None:
                prefix = self._kept(prefix_key, prefix, prefix=True)
        lengths = [len(ids) for ids in windows]
        starts = window_starts(method.alignment, len(prefix_ids), lengths)
        keys = self._keys(prefix_ids, windows, method)
        found = tuple(i for i, key in enumerate(keys) if key in self._slots)
        rest = [i for i, key in enumerate(keys) if key not in self._slots]
        cached += sum(lengths[i] for i in found)

        def told(done: int, _: int) -> None:
            if on_encoded is not None:
                on_encoded(len(found) + done, len(windows))

        if found:
            told(0, len(rest))
        made = runner.encode_windows(
            prefix, [windows[i] for i in rest], told, [starts[i] for i in rest], method.refinement
        )
        for index, window in zip(rest, made, strict=True):
            self._kept(keys[index], window)
        return Encoded(prefix, [self._slots[key].window for key in keys], cached, found)

    def _keys(
        self, prefix_ids: Sequence[int], windows: Sequence[Sequence[int]], method: Method
    ) -> list[Key]:
        lengths = [len(ids) for ids in windows]
        starts = window_starts(method.alignment, len(prefix_ids), lengths)
        seen: dict[Key, int] = {}
        keys: list[Key] = []
        for ids, start in zip(windows, starts, strict=True):
            # One text of all passages is cited by its parts, which are not the same for others.
            whose = None if method.windowed else object()
            key = (tuple(prefix_ids), method.encoding, whose, start, tuple(ids))
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
