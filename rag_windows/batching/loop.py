"""The loop of a batch: one forward pass gives each row its next token; rows come and go between."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import accumulate
from weakref import WeakValueDictionary

import torch

from rag_windows.attention.layers import check_tables, table_limit
from rag_windows.batching.row import Row
from rag_windows.cache.memory import compact
from rag_windows.generate import Decoder
from rag_windows.kv import Window
from rag_windows.loading import input_device
from rag_windows.prefill import PASS_TOKENS, Encoded, ModelEncoder, Prefill, ToEncode, WindowEncoder
from rag_windows.steps.packed_rows import Plan, RowCaches, read_rows

Key = tuple[Hashable, ...]


class SharedEncoder:
    """An encoder that first looks among the windows that rows of the batch read already.

    So requests of one batch encode a window once, with a passage cache or without. It holds no
    window itself: one that nobody reads any more is freed. Several prefills may run by turns in one
    thread.
    """

    def __init__(self, encoder: WindowEncoder) -> None:
        self._encoder = encoder
        self._windows: WeakValueDictionary[Key, Window] = WeakValueDictionary()

    @property
    def runner(self) -> ModelEncoder:
        """What runs the model."""
        return self._encoder.runner

    def prefill(self, asked: ToEncode) -> Prefill[Encoded]:
        """Encode what one request reads; what other rows read counts as cached."""
        self.runner.follow()
        prefix_key, keys = shared_keys(self.runner, asked)
        if self._encoder is self.runner:
            return (yield from self._shared(prefix_key, keys, asked))
        # A cache counts its hits and knows what it may hand out, so it is asked each time.
        encoded = yield from self._encoder.prefill(asked)
        prefix = encoded.prefix
        return replace(
            encoded,
            prefix=None if prefix is None else self._stored(prefix_key, prefix),
            windows=[self._stored(k, w) for k, w in zip(keys, encoded.windows, strict=True)],
        )

    def _shared(self, prefix_key: Key, keys: Sequence[Key], asked: ToEncode) -> Prefill[Encoded]:
        """Encode what no row reads; between two passes others may have encoded some of it."""
        prefix = self._windows.get(prefix_key)
        cached = 0 if prefix is None else len(asked.prefix_ids)
        if prefix is None and (made := self.runner.encode_prefix(asked.prefix_ids)) is not None:
            prefix = self._stored(prefix_key, made)
            yield 0.0
        windows, starts, before, reported = asked.windows, asked.starts, asked.before, 0
        read: dict[int, Window] = {}
        encoded: set[int] = set()
        while True:
            for index, key in enumerate(keys):
                if index not in read and (there := self._windows.get(key)) is not None:
                    read[index] = there
            if asked.on_encoded is not None and len(read) > reported:
                reported = len(read)
                asked.on_encoded(reported, len(keys))
            left = [index for index in range(len(keys)) if index not in read]
            if not left:
                break
            batches = self.runner.encode_batches(
                prefix,
                [windows[i] for i in left],
                [starts[i] for i in left],
                asked.method.refinement,
                [before[i] for i in left],
            )
            batch = next(batches)
            for at, window in batch.items():
                index = left[at]
                # In memory of its own, which is freed when nobody reads this one any more.
                read[index] = self._stored(keys[index], compact(window))
                encoded.add(index)
            yield 0.0
        found = tuple(index for index in range(len(keys)) if index not in encoded)
        cached += sum(len(windows[index]) for index in found)
        return Encoded(prefix, [read[index] for index in range(len(keys))], cached, found)

    def _stored(self, key: Key, window: Window) -> Window:
        """The window that rows read already, or this one."""
        there = self._windows.get(key)
        if there is None:
            # A row that reads the same text twice reads two windows, also where a cache has one.
            there = self._windows[key] = replace(window)
        return there


def shared_keys(runner: ModelEncoder, asked: ToEncode) -> tuple[Key, list[Key]]:
    """Keys by which rows of a batch find a prefix and windows; all differ within one request."""
    # After an edit of the model nothing of before is found.
    prefix = runner.mirror.version, _digest(asked.prefix_ids)
    method = asked.method
    seen: dict[Key, int] = {}
    keys: list[Key] = []
    for ids, start, before in zip(asked.windows, asked.starts, asked.before, strict=True):
        # One text of all passages is cited by its parts, which are not the same for others.
        whose = None if method.windowed else object()
        key = (prefix, method.encoding, whose, start, _digest(before), _digest(ids))
        seen[key] = seen.get(key, 0) + 1
        keys.append((*key, seen[key]))
    return prefix, keys


def _digest(ids: Sequence[int]) -> bytes:
    """A short key for tokens, however many they are."""
    return hashlib.sha256(array("q", ids).tobytes()).digest()


class BatchLoop:
    """Answers many questions at token level, a token of each at a time.

    What rows share is held and read once. Not for several threads at once.

    Attributes:
        encoder: encodes windows that no row reads yet.
        rows: that take part; those that have a KV cache stand first.
    """

    def __init__(self, encoder: WindowEncoder, decoder: Decoder) -> None:
        self.encoder = SharedEncoder(encoder)
        self._decoder = decoder
        model = decoder.runner.model
        self._device = input_device(model)
        config = model.config.get_text_config(decoder=True)
        self._table_limit = table_limit(config)
        self.rows: list[Row] = []
        self._caches = RowCaches()
        self._plan: Plan[Row] | None = None

    @property
    def capacity(self) -> tuple[int, int]:
        """Rows and tokens that the KV caches hold without growing."""
        held = next(iter(self._caches.keys.values()), None)
        return (0, 0) if held is None else (held.shape[0], held.shape[2])

    @property
    def new_rows(self) -> list[Row]:
        """Those that no pass has taken yet."""
        return self.rows[len(self._caches.lengths) :]

    def admit(self, row: Row) -> None:
        """Let a row, whose context comes from `encoder`, join before the next step."""
        check_tables(self._table_limit, row.last)
        self._replan()
        self.rows.append(row)

    @torch.no_grad()
    def step(self) -> list[Row]:
        """One forward pass, and a token for each row that took part; returns rows that ended.

        What a pass itself raises comes out here; then every row stands where it stood before, and
        the next step tries it again with those that were not dropped.
        """
        if not self.rows:
            return []
        if self._plan is None:
            self._plan = self._planned()
        now = self._plan
        lengths = [*self._caches.lengths]
        try:
            logits, _ = read_rows(
                self._decoder.runner, now, self._caches, now.newest, self._decoder.head_weights
            )
            largest = logits.argmax(dim=-1).tolist()
            now.recorder.settle()
        except BaseException:
            now.recorder.discard()
            self._caches.set_lengths(lengths)
            raise
        self._sample(now, logits, largest)
        ended = [row for row in now.rows if row.ended]
        if ended or len(now.rows) < len(self.rows) or now.old < len(now.rows):
            self._replan()
        for row in ended:
            self.drop(row)
        return ended

    def drop(self, row: Row) -> None:
        """Let a row leave, whether it ended or not."""
        index = self.rows.index(row)
        self._replan()
        row.leave()
        last = len(self._caches.lengths) - 1
        if index > last:
            self.rows.pop(index)
            return
        self._caches.remove(index)
        # The caches' last row took its place.
        self.rows[index] = self.rows[last]
        self.rows.pop(last)

    def _sample(self, now: Plan[Row], logits: torch.Tensor, largest: Sequence[int]) -> None:
        for index, row in enumerate(now.rows):
            try:
                row.take(largest[index] if row.greedy else row.sample(logits[index]))
            except BaseException as error:  # noqa: BLE001 - a caller's code; only its own row ends
                row.error, row.ended = error, True

    def _replan(self) -> None:
        """Discard the plan, and hand the attention weights that it recorded to the rows."""
        if self._plan is not None:
            self._plan.flush()
            self._plan = None

    def _planned(self) -> Plan[Row]:
        """A plan of the rows that have a KV cache, and of as many new ones as a pass takes."""
        old = len(self._caches.lengths)
        most = PASS_TOKENS[self._device.type != "cpu"]
        taken = 0
        for tokens in accumulate(len(row.fed) for row in self.new_rows):
            if taken and tokens > most:
                break
            taken += 1
        return Plan(self.rows[: old + taken], old)
