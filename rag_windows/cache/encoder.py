"""Encoding through a passage cache: only what is not cached yet is computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch

from rag_windows.cache.codec import EXACT, Entry, is_finite, settle
from rag_windows.cache.fingerprint import ModelIdentity, TokenizerIdentity
from rag_windows.cache.keys import KeyScope
from rag_windows.cache.memory import compact, placed
from rag_windows.cache.passage_cache import PassageCache
from rag_windows.errors import NonFiniteError
from rag_windows.kv import Window
from rag_windows.prefill import (
    Encoded,
    EncodingPlan,
    ModelEncoder,
    OnEncoded,
    PlannedWindow,
    Prefill,
    Source,
)

FOLLOW_S = 120.0
"""How long to wait for another thread or process that encodes a window, before doing it too."""

_POLL_S, _LONGEST_POLL_S = 0.005, 0.1
_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.0005, 0.008  # for what comes from the shared store


class CachedEncoder:
    """A `ModelEncoder` that asks a cache first and stores there what it had to compute.

    What is read one after the other (`Sequential`) is not cached, but for the prefix: it depends on
    all passages and their order. A lossy store keeps no prefix: every window and answer reads it.
    """

    def __init__(
        self,
        encoder: ModelEncoder,
        cache: PassageCache,
        model: ModelIdentity,
        tokenizer: TokenizerIdentity,
    ) -> None:
        self.runner = encoder
        self._cache = cache
        self._model = model
        self._tokenizer = tokenizer

    def prefill(
        self,
        plan: EncodingPlan,
        on_encoded: OnEncoded | None = None,
        *,
        patient: bool = False,
        ttl: float | None = None,
    ) -> Prefill[Encoded]:
        """Find what one request reads, and encode the rest.

        Args:
            plan: what it reads.
            on_encoded: as in `WindowEncoder.prefill`.
            patient: whether to wait for the disk rather than leave something unwritten.
            ttl: seconds for which what is encoded now may be used, instead of the cache's own.

        Raises:
            NonFiniteError: keys or values hold NaN or infinity; the message names the passage.
        """
        fingerprint = self._model.fingerprint()
        if fingerprint is None:
            return self.runner.prefill(plan, on_encoded)
        scope = self.scope(fingerprint, plan.prefix_ids, plan.method.encoding)
        request = _Request(
            self.runner,
            self._cache,
            scope,
            plan,
            self._model,
            fingerprint,
            on_encoded=on_encoded,
            patient=patient,
            ttl=ttl or self._cache.ttl,
        )
        return request.prefill()

    def missing(self, plan: EncodingPlan) -> list[int]:
        """Indices of windows that the cache does not know of, by what it knows without reading."""
        _, keys = self.keys(plan)
        present = self._cache.present([key for key in keys if key is not None])
        return [index for index, key in enumerate(keys) if key not in present]

    def keys(self, plan: EncodingPlan) -> tuple[str | None, list[str | None]]:
        """Keys of the prefix and the windows; None for what is not cached."""
        fingerprint = self._model.fingerprint()
        if fingerprint is None:
            return None, [None] * len(plan.windows)
        scope = self.scope(fingerprint, plan.prefix_ids, plan.method.encoding)
        prefix = scope.prefix_key() if plan.prefix_ids and self._cache.store == EXACT else None
        if not plan.method.windowed:
            return prefix, [None] * len(plan.windows)
        return prefix, [scope.window_key(one.ids, one.start, one.before) for one in plan.windows]

    def identity(self) -> tuple[bytes | None, bytes]:
        """Fingerprints of the model, None if nothing can be said about it, and the tokenizer."""
        return self._model.fingerprint(), self._tokenizer.fingerprint()

    def scope(self, model: bytes, prefix_ids: Sequence[int], encoding: str) -> KeyScope:
        """Keys of windows that are encoded alike behind one prefix."""
        return KeyScope(
            self._cache.salt_key,
            model=model,
            tokenizer=self._tokenizer.fingerprint(),
            encoding=encoding,
            store=self._cache.store,
            prefix_ids=prefix_ids,
        )


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A window, or the prefix, that one request reads."""

    key: str
    planned: PlannedWindow


class _Request:
    """What one request finds and encodes, and its claims on windows that others want, too.

    A window is encoded once, by one thread of one process of those that share the cache. A request
    first encodes and stores what it has claimed, and only then waits for others.
    """

    def __init__(
        self,
        encoder: ModelEncoder,
        cache: PassageCache,
        scope: KeyScope,
        plan: EncodingPlan,
        model: ModelIdentity,
        fingerprint: bytes,
        *,
        on_encoded: OnEncoded | None,
        patient: bool,
        ttl: float | None,
    ) -> None:
        self._encoder, self._cache = encoder, cache
        self._plan, self._model, self._fingerprint = plan, model, fingerprint
        self._on_encoded, self._patient, self._ttl = on_encoded, patient, ttl
        self._devices = model.devices
        self._device = self._devices[0] if len({*self._devices}) == 1 else None
        self._epoch = cache.epoch
        self._wanted: list[_Wanted] = []
        if plan.method.windowed:
            self._wanted = [
                _Wanted(scope.window_key(one.ids, one.start, one.before), one)
                for one in plan.windows
            ]
        self._head: _Wanted | None = None
        if plan.prefix_ids and cache.store == EXACT:
            planned = PlannedWindow(plan.prefix_ids, 0, (), Source("The prefix"))
            self._head = _Wanted(scope.prefix_key(), planned)
        self._got: dict[str, Entry] = {}
        self._fresh: dict[str, Entry] = {}
        self._unstored: list[str] = []
        self._bad: dict[str, Source] = {}
        self._joined = 0
        self._claimed: set[str] = set()
        self._locks: dict[str, Callable[[], None]] = {}  # what releases them
        self._fetched: set[str] = set()  # asked of the shared store

    def prefill(self) -> Prefill[Encoded]:
        """See `CachedEncoder.prefill`."""
        plan, wanted, head = self._plan, self._wanted, self._head
        keys = [one.key for one in (*wanted, head) if one is not None]
        self._got = self._cache.quick(list(dict.fromkeys(keys)), self._device)
        try:
            if head is None:
                prefix = self._encoder.encode_prefix(plan.prefix_ids)
            else:
                yield from self._obtain([head], None)
                self._check()
                # At once: other processes need it for other passages, however long these here take.
                self._keep()
                prefix = self._found([head])[0]
            if not plan.method.windowed:
                made = yield from self._encoder.prefill_windows(prefix, plan, self._on_encoded)
            else:
                missing = [one for one in wanted if one.key not in self._got]
                if not missing or len(missing) < len(wanted):
                    self._notify()
                yield from self._obtain(missing, prefix)
        finally:
            # Also after a failure: finished windows are valid, and a cancelled request may come
            # again.
            try:
                self._keep()
            finally:
                for key in self._claimed:
                    self._cache.flights.end(key)
                for release in self._locks.values():
                    release()
        if plan.method.windowed:
            self._check()
            for one in wanted:
                self._cache.relabel(one.key, self._got[one.key], one.planned.source.labels)
            made = self._found(wanted)
        return self._encoded(prefix, made)

    def _found(self, wanted: Sequence[_Wanted]) -> list[Window]:
        """The windows, on the devices where the model computes."""
        got = {one.key: self._got[one.key] for one in wanted}
        self._got |= self._cache.on_accelerator(got, self._device)
        # Entries from disk lack their ids.
        return [
            replace(placed(self._got[one.key].window, self._devices), ids=one.planned.ids)
            for one in wanted
        ]

    def _encoded(self, prefix: Window | None, made: list[Window]) -> Encoded:
        hits = {key: entry for key, entry in self._got.items() if key not in self._fresh}
        self._cache.count(
            hits=len(hits),
            misses=len(self._fresh),
            joined=self._joined,
            cached_tokens=sum(len(entry.window.ids) for entry in hits.values()),
            seconds_saved=sum(entry.cost_s for entry in hits.values()),
            seconds_spent=sum(entry.cost_s for entry in self._fresh.values()),
        )
        places = tuple(index for index, one in enumerate(self._wanted) if one.key in hits)
        cached = sum(len(self._wanted[index].planned.ids) for index in places)
        if self._head is not None and self._head.key in hits:
            cached += len(self._head.planned.ids)
        return Encoded(prefix, made, cached, places)

    def _obtain(self, asked: Sequence[_Wanted], prefix: Window | None) -> Prefill[None]:
        """Find or encode every window; those that are NaN or infinite are missing."""
        flights, disk = self._cache.flights, self._cache.disk
        wanted = {one.key: one for one in asked}
        followed: dict[str, Future[Entry | None]] = {}
        pause, deadline = 0.0, 0.0
        while left := [key for key in wanted if key not in self._got and key not in self._bad]:
            late = pause > 0 and time.monotonic() > deadline
            new, theirs = flights.claim(
                key for key in left if key not in followed and key not in self._claimed
            )
            self._claimed |= {*new}
            followed |= theirs
            self._land(self._cache.again(new, self._device))
            locked = [key for key in left if key not in followed and self._lock(key)]
            if disk is not None:
                # Another process may have written it after it was missed and before its lock.
                written = self._cache.from_disk([k for k in locked if k in disk], self._device)
                self._joined += len(written)
                self._land(written)
            yield from self._fetch([wanted[key] for key in locked if key not in self._got])
            # What others encode is left to them, unless that takes too long.
            todo = [key for key in (left if late else locked) if key not in self._got]
            for made in self._encode([wanted[key] for key in todo], prefix):
                self._land(made)
                yield 0.0
            for key, flight in list(followed.items()):
                if flight.done() or key in self._got:
                    entry = followed.pop(key).result() if key not in self._got else None
                    if entry is not None:
                        self._joined += 1
                        self._got[key] = entry
            if any(key not in self._got and key not in self._bad for key in wanted):
                # Others may wait for what is done, while we wait for them.
                self._keep()
                if not pause:
                    deadline = time.monotonic() + FOLLOW_S
                pause = min(_LONGEST_POLL_S, 2 * pause or _POLL_S)
                yield pause
                # The caller is notified while it waits as well, so that its deadline counts.
                self._notify()

    def _fetch(self, wanted: Sequence[_Wanted]) -> Prefill[None]:
        """Read windows from the shared store, once, while that is quicker than encoding them."""
        asked = [one for one in wanted if one.key not in self._fetched]
        self._fetched |= {one.key for one in asked}
        tokens = sum(len(one.planned.ids) for one in asked)
        keys = [one.key for one in asked]
        reading = self._cache.from_shared(keys, tokens, self._fingerprint)
        if reading is None:
            return
        pause = _SHORTEST_LOOK_S
        try:
            while True:
                under_way = reading.under_way
                landed = reading.landed()
                self._cache.take_in(landed, self._epoch, self._device)
                self._land(landed)
                if not under_way:
                    break
                yield pause
                pause = min(_LONGEST_LOOK_S, 2 * pause)
        finally:
            reading.close()

    def _land(self, made: Mapping[str, Entry]) -> None:
        """Take windows, and hand those that were claimed to whoever follows."""
        self._got.update(made)
        for key in self._claimed & made.keys():
            self._cache.flights.land(key, made[key])
        if made.keys() - {self._head and self._head.key}:
            self._notify()

    def _lock(self, key: str) -> bool:
        """Be the only process that encodes a window; False if it is there or another one is."""
        disk = self._cache.disk
        if key in self._got or disk is None or key in self._locks:
            return key not in self._got
        release = disk.try_lock(key)
        if release is not None:
            self._locks[key] = release
        return release is not None

    def _encode(
        self, wanted: Sequence[_Wanted], prefix: Window | None
    ) -> Iterator[dict[str, Entry]]:
        """Encode windows, one batch after the other."""
        if not wanted:
            return
        planned = [one.planned for one in wanted]
        refinement = None if wanted[0] is self._head else self._plan.method.refinement
        begun = time.perf_counter()
        for views in self._encoder.encode_batches(prefix, planned, refinement):
            batch = {index: compact(window) for index, window in views.items()}
            bad = {index for index, window in batch.items() if not is_finite(window)}
            self._bad |= {wanted[index].key: planned[index].source for index in bad}
            now, seconds = time.time(), time.perf_counter() - begun
            tokens = sum(len(window.ids) for window in batch.values())
            self._cache.measured(self._fingerprint, tokens, seconds)
            made: dict[str, Entry] = {}
            for index in batch.keys() - bad:
                one, window = wanted[index], batch[index]
                if self._cache.store != EXACT:
                    window = settle(self._cache.store, window)
                made[one.key] = Entry(
                    window=window,
                    cost_s=seconds * len(window.ids) / tokens,
                    labels=self._cache.digests(one.planned.source.labels),
                    created=now,
                    expires=None if self._ttl is None else now + self._ttl,
                )
            self._fresh |= made
            self._unstored += made
            yield made
            begun = time.perf_counter()

    def _keep(self) -> None:
        """Store what was encoded, unless the weights were edited meanwhile."""
        keys, self._unstored = self._unstored, []
        if not keys or self._model.fingerprint() != self._fingerprint:
            return
        for device in {one for one in self._devices if one.type == "cuda"}:
            torch.cuda.synchronize(device)  # before another thread copies what was computed there
        for key in keys:
            self._cache.keep(
                key,
                self._fresh[key],
                self._epoch,
                device=self._device,
                done=self._locks.pop(key, None),
                wait=self._patient,
            )

    def _notify(self) -> None:
        if self._on_encoded is not None:
            done = sum(one.key in self._got for one in self._wanted)
            self._on_encoded(done, len(self._plan.windows))

    def _check(self) -> None:
        for source in self._bad.values():
            raise NonFiniteError(
                f"{source.name} has keys or values that are NaN or infinite, so no answer that "
                "reads it could be right. It was not stored. Load the model in bfloat16 or "
                "float32 (float16 overflows), and check its weights."
            )
