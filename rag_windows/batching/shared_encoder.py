"""Windows that several rows of a batch read: encoded once, held while somebody reads them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import replace
from weakref import WeakValueDictionary

from rag_windows.kv import Shelf, Window
from rag_windows.prefill import Encoded, Encoder, Prefill, ToEncode, WindowEncoder

Key = tuple[Hashable, ...]

_PAUSE_S = 0.001
"""Between two looks whether another request has encoded a window."""


class SharedEncoder:
    """An encoder before which stand the windows that rows of the batch read already.

    Requests of one batch so encode a window once, with a passage cache or without. It holds no
    window itself: one that no row and no prefill holds any more is gone. Several prefills may be
    under way, all of them in one thread.

    Args:
        encoder: what encodes the others.
    """

    def __init__(self, encoder: WindowEncoder) -> None:
        self._encoder = encoder
        self._windows: WeakValueDictionary[Key, Window] = WeakValueDictionary()
        # What each prefill under way has taken upon itself.
        self._claimed: set[Key] = set()

    @property
    def runner(self) -> Encoder:
        """What runs the model."""
        return self._encoder.runner

    def prefill(self, asked: ToEncode) -> Prefill[Encoded]:
        """Encode what one request reads; what other rows read counts as cached."""
        self.runner.follow()
        # After an edit of the model nothing of before is found.
        prefix_key = self.runner.twin.version, _digest(asked.prefix_ids)
        keys = _keys(prefix_key, asked)
        if self._encoder is self.runner:
            return (yield from self._shared(prefix_key, keys, asked))
        # A cache counts its hits and knows what it may hand out, so it is asked each time.
        encoded = yield from self._encoder.prefill(asked)
        prefix = encoded.prefix
        return replace(
            encoded,
            prefix=None if prefix is None else self._kept(prefix_key, prefix),
            windows=[self._kept(k, w) for k, w in zip(keys, encoded.windows, strict=True)],
        )

    def _shared(self, prefix_key: Key, keys: Sequence[Key], asked: ToEncode) -> Prefill[Encoded]:
        """Encode what no row reads and no other prefill is encoding; wait for what another is."""
        prefix = self._windows.get(prefix_key)
        cached = 0 if prefix is None else len(asked.prefix_ids)
        if prefix is None and (made := self.runner.encode_prefix(asked.prefix_ids)) is not None:
            prefix = self._kept(prefix_key, made)
            yield 0.0
        lengths, starts = [len(ids) for ids in asked.windows], asked.starts
        read: dict[int, Window] = {}
        encoded: set[int] = set()
        told = 0
        while True:
            for index, key in enumerate(keys):
                if index not in read and (there := self._windows.get(key)) is not None:
                    read[index] = there
            told = _tell(asked, len(read), told)
            if len(read) == len(keys):
                break
            mine = [i for i, key in enumerate(keys) if i not in read and key not in self._claimed]
            if not mine:
                yield _PAUSE_S
                continue
            claims = {keys[index] for index in mine}
            self._claimed |= claims
            shelf = Shelf([lengths[index] for index in mine])
            ids, places = [asked.windows[i] for i in mine], [starts[i] for i in mine]
            batches = self.runner.encode_batches(prefix, ids, places, asked.method.refinement)
            try:
                for batch in batches:
                    for at, window in batch.items():
                        read[mine[at]] = self._kept(keys[mine[at]], shelf.put(at, window))
                        encoded.add(mine[at])
                    told = _tell(asked, len(read), told)
                    yield 0.0
            finally:
                self._claimed -= claims
        found = tuple(index for index in range(len(keys)) if index not in encoded)
        cached += sum(lengths[index] for index in found)
        return Encoded(prefix, [read[index] for index in range(len(keys))], cached, found)

    def _kept(self, key: Key, window: Window) -> Window:
        """The window that rows read already, or this one."""
        there = self._windows.get(key)
        if there is None:
            # A row that reads the same text twice reads two windows, also where a cache has one.
            there = self._windows[key] = replace(window)
        return there


def _tell(asked: ToEncode, done: int, told: int) -> int:
    """Say how many windows are done, if they are more than were told."""
    if asked.on_encoded is not None and done > told:
        asked.on_encoded(done, len(asked.windows))
    return done


def _keys(prefix: Key, asked: ToEncode) -> list[Key]:
    method = asked.method
    seen: dict[Key, int] = {}
    keys: list[Key] = []
    for ids, start in zip(asked.windows, asked.starts, strict=True):
        # One text of all passages is cited by its parts, which are not the same for others.
        whose = None if method.windowed else object()
        key = (prefix, method.encoding, whose, start, _digest(ids))
        seen[key] = seen.get(key, 0) + 1
        keys.append((*key, seen[key]))
    return keys


def _digest(ids: Sequence[int]) -> bytes:
    """Stands for tokens, and costs nothing to look up however many they are."""
    return hashlib.sha256(array("q", ids).tobytes()).digest()
