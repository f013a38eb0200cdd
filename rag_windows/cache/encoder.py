"""Encoding with a passage cache before it: only what nobody has encoded yet is computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch

from rag_windows.cache.codec import EXACT, Entry, is_finite, settle
from rag_windows.cache.fingerprint import ModelIdentity, TokenizerIdentity
from rag_windows.cache.keys import KeyScope
from rag_windows.cache.locks import FileLock
from rag_windows.cache.memory import compact, layer_devices, placed
from rag_windows.cache.passage_cache import PassageCache
from rag_windows.errors import NonFiniteError
from rag_windows.kv import Window
from rag_windows.methods import Method
from rag_windows.prefill import Encoded, Encoder, Prefill, Source, ToEncode

FOLLOW_S = 120.0
"""How long to wait for another thread or process that encodes a window, before doing it too."""

_POLL_S, _LONGEST_POLL_S = 0.005, 0.1
_PREFIX = Source("The prefix")


class CachedEncoder:
    """An `Encoder` that asks a cache first and tells it what it had to compute.

    Passages read one after the other (`Sequential`) are not cached: such a window depends on all
    passages and their order, so it would rarely be asked for again and would displace those that
    are. Their prefix is. With a lossy store the prefix is not: every window and answer reads it.
    """

    def __init__(
        self,
        encoder: Encoder,
        cache: PassageCache,
        model: ModelIdentity,
        tokenizer: TokenizerIdentity,
    ) -> None:
        self.runner = encoder
        self._cache = cache
        self._model = model
        self._tokenizer = tokenizer

    def prefill(self, asked: ToEncode) -> Prefill[Encoded]:
        """Find what one request reads, and encode the rest.

        Raises:
            NonFiniteError: keys or values hold NaN or infinity; the message names the passage.
        """
        fingerprint = self._model.fingerprint()
        if fingerprint is None:
            return self.runner.prefill(asked)
        scope = self.scope(fingerprint, asked.prefix_ids, asked.method.encoding)

        def still_same() -> bool:
            return self._model.fingerprint() == fingerprint

        return _Request(self.runner, self._cache, scope, asked, still_same).prefill()

    def missing(
        self, prefix_ids: Sequence[int], windows: Sequence[Sequence[int]], method: Method
    ) -> list[int]:
        """Indices of windows that the cache does not know of, by what it knows without reading."""
        fingerprint = self._model.fingerprint()
        if fingerprint is None or not method.windowed:
            return list(range(len(windows)))
        scope = self.scope(fingerprint, prefix_ids, method.encoding)
        places = zip(windows, ToEncode(prefix_ids, windows, method).starts, strict=True)
        keys = [scope.window_key(ids, start) for ids, start in places]
        return [index for index, key in enumerate(keys) if key not in self._cache]

    def identity(self) -> tuple[bytes | None, bytes]:
        """Fingerprints of the model, None if nothing can be said about it, and the tokenizer."""
        return self._model.fingerprint(), self._tokenizer.fingerprint()

    def scope(self, model: bytes, prefix_ids: Sequence[int], encoding: str) -> KeyScope:
        """Keys behind one prefix, of windows that are encoded in one way."""
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
    """A window that is missing."""

    key: str
    ids: tuple[int, ...]
    start: int
    source: Source


class _Request:
    """What one request finds and makes, and its dealings with others that want the same windows.

    A window is encoded once, by one thread of one process of those that share the cache. Nobody
    waits while others wait for him: a request first encodes what it has claimed.
    """

    def __init__(
        self,
        encoder: Encoder,
        cache: PassageCache,
        scope: KeyScope,
        asked: ToEncode,
        still_same: Callable[[], bool],
    ) -> None:
        self._encoder, self._cache = encoder, cache
        self._scope, self._asked, self._still_same = scope, asked, still_same
        self._head_key = scope.prefix_key()
        self._devices = layer_devices(encoder.model, len(encoder.sliding_windows))
        self._device = self._devices[0] if len({*self._devices}) == 1 else None
        self._epoch = self._cache.epoch
        self._fresh: dict[str, Entry] = {}
        self._unkept: list[str] = []
        self._bad: dict[str, Source] = {}
        self._joined = 0
        self._done = 0  # windows that were found at first
        self._locks: dict[str, FileLock] = {}
        self._landed: list[str] = []

    def prefill(self) -> Prefill[Encoded]:
        """See `CachedEncoder.prefill`."""
        asked, starts = self._asked, self._asked.starts
        sources = asked.sources or [Source(f"Window {i}") for i in range(len(asked.windows))]
        wanted: list[_Wanted] = []
        if asked.method.windowed:
            wanted = [
                _Wanted(self._scope.window_key(ids, start), tuple(ids), start, source)
                for ids, start, source in zip(asked.windows, starts, sources, strict=True)
            ]
        head: _Wanted | None = None
        if asked.prefix_ids and self._cache.store == EXACT:
            head = _Wanted(self._head_key, tuple(asked.prefix_ids), 0, _PREFIX)
        keys = [one.key for one in (*wanted, head) if one is not None]
        found = self._cache.quick(list(dict.fromkeys(keys)), self._device)
        try:
            prefix = yield from self._prefix(head, found)
            # At once: other processes need it for other passages, however long these here take.
            self._keep()
            if not asked.method.windowed:
                made = yield from self._encoder.prefill_windows(
                    prefix, asked.windows, starts, asked.method.refinement, asked.on_encoded
                )
                return self._encoded(prefix, made, wanted, found)
            missing = {one.key: one for one in wanted if one.key not in found}
            moved = {key: placed(entry.window, self._devices) for key, entry in found.items()}
            self._done = sum(one.key in found for one in wanted)
            if self._done or not missing:
                self._tell({})
            obtained = yield from self._obtain(missing, prefix)
            moved |= {key: placed(one.window, self._devices) for key, one in obtained.items()}
            found |= obtained
        finally:
            # Also after a failure: what is done is done, and a request that was cancelled may come
            # again.
            try:
                self._keep()
            finally:
                self._release()
        self._check()
        for one in wanted:
            self._cache.relabel(one.key, found[one.key], one.source.labels)
        # What was on disk does not know its ids.
        made = [replace(moved[one.key], ids=one.ids) for one in wanted]
        return self._encoded(prefix, made, wanted, found)

    def _encoded(
        self,
        prefix: Window | None,
        made: list[Window],
        wanted: Sequence[_Wanted],
        found: Mapping[str, Entry],
    ) -> Encoded:
        hits = {key: entry for key, entry in found.items() if key not in self._fresh}
        self._cache.count(
            hits=len(hits),
            misses=len(self._fresh),
            joined=self._joined,
            cached_tokens=sum(len(entry.window.ids) for entry in hits.values()),
            seconds_saved=sum(entry.cost_s for entry in hits.values()),
            seconds_spent=sum(entry.cost_s for entry in self._fresh.values()),
        )
        places = tuple(index for index, one in enumerate(wanted) if one.key in hits)
        cached = sum(len(wanted[index].ids) for index in places)
        if hits.keys() - {one.key for one in wanted}:
            cached += len(self._asked.prefix_ids)
        return Encoded(prefix, made, cached, places)

    def _prefix(self, head: _Wanted | None, found: dict[str, Entry]) -> Prefill[Window | None]:
        if head is None:
            return self._encoder.encode_prefix(self._asked.prefix_ids)
        if head.key not in found:
            found |= yield from self._obtain({head.key: head}, None)
            self._check()
        return replace(placed(found[head.key].window, self._devices), ids=head.ids)

    def _obtain(
        self, wanted: Mapping[str, _Wanted], prefix: Window | None
    ) -> Prefill[dict[str, Entry]]:
        """Get every window, by whatever way; those that are no numbers are missing."""
        flights = self._cache.flights
        got: dict[str, Entry] = {}
        followed: dict[str, Future[Entry | None]] = {}
        pause, deadline = 0.0, 0.0
        while left := [key for key in wanted if key not in got and key not in self._bad]:
            late = pause > 0 and time.monotonic() > deadline
            mine, theirs = flights.claim(key for key in left if key not in followed)
            followed |= theirs
            flying = set(mine)
            try:
                entries = self._cache.come(mine)
                if not pause:
                    rest = [key for key in mine if key not in entries]
                    entries |= self._cache.from_disk(rest, self._device)
                self._land(entries, flying, got)
                here = [key for key in mine if key in flying and self._lock(key)]
                self._land(self._written_meanwhile(here), flying, got)
                # What others encode is left to them, unless that takes too long.
                todo = [key for key in (left if late else here) if key not in got]
                for made in self._encode([wanted[key] for key in todo], prefix):
                    self._land(made, flying, got)
                    yield 0.0
            finally:
                for key in flying:
                    flights.land(key, None)
            for key, flight in list(followed.items()):
                if flight.done() or key in got:
                    entry = followed.pop(key).result() if key not in got else None
                    if entry is not None:
                        self._joined += 1
                        got[key] = entry
            if followed or not flying <= self._bad.keys():
                if not pause:
                    deadline = time.monotonic() + FOLLOW_S
                pause = min(_LONGEST_POLL_S, 2 * pause or _POLL_S)
                yield pause
                # Who asked is told while it waits as well, so that a deadline of theirs counts.
                self._tell(got)
        return got

    def _land(self, made: Mapping[str, Entry], flying: set[str], got: dict[str, Entry]) -> None:
        """Take windows, and hand those that were claimed to whoever follows."""
        got.update(made)
        for key in flying & made.keys():
            flying.remove(key)
            self._cache.flights.land(key, made[key])
            self._landed.append(key)
        if made.keys() - {self._head_key}:
            self._tell(got)

    def _lock(self, key: str) -> bool:
        """Be the only process that encodes a window; False if another one is."""
        disk = self._cache.disk
        lock = None if disk is None else disk.try_lock(key)
        if lock is not None:
            self._locks[key] = lock
        return disk is None or lock is not None

    def _written_meanwhile(self, locked: Sequence[str]) -> dict[str, Entry]:
        """Another process may have written a window after it was missed and before its lock."""
        disk = self._cache.disk
        there = [] if disk is None else [key for key in locked if key in disk]
        found = self._cache.from_disk(there, self._device)
        self._joined += len(found)
        return found

    def _encode(
        self, wanted: Sequence[_Wanted], prefix: Window | None
    ) -> Iterator[dict[str, Entry]]:
        """Encode windows, one batch after the other."""
        if not wanted:
            return
        ids, starts = [one.ids for one in wanted], [one.start for one in wanted]
        refinement = None if wanted[0].source is _PREFIX else self._asked.method.refinement
        ttl = self._asked.ttl or self._cache.ttl
        begun = time.perf_counter()
        for views in self._encoder.encode_batches(prefix, ids, starts, refinement):
            batch = {index: compact(window) for index, window in views.items()}
            bad = {index for index, window in batch.items() if not is_finite(window)}
            self._bad |= {wanted[index].key: wanted[index].source for index in bad}
            now, seconds = time.time(), time.perf_counter() - begun
            tokens = sum(len(window.ids) for window in batch.values())
            made: dict[str, Entry] = {}
            for index in batch.keys() - bad:
                one, window = wanted[index], batch[index]
                if self._cache.store != EXACT:
                    window = settle(self._cache.store, window)
                made[one.key] = Entry(
                    window=window,
                    cost_s=seconds * len(window.ids) / tokens,
                    labels=self._cache.digests(one.source.labels),
                    created=now,
                    expires=None if ttl is None else now + ttl,
                )
            self._fresh |= made
            self._unkept += made
            yield made
            begun = time.perf_counter()

    def _keep(self) -> None:
        """Store what was encoded, unless the weights were edited on the way."""
        keys, self._unkept = self._unkept, []
        if not keys or not self._still_same():
            return
        for device in {one for one in self._devices if one.type == "cuda"}:
            torch.cuda.synchronize(device)  # before another thread copies what was computed there
        for key in keys:
            lock = self._locks.pop(key, None)
            self._cache.keep(
                key,
                self._fresh[key],
                self._epoch,
                device=self._device,
                done=None if lock is None else lock.release,
                wait=self._asked.patient,
            )

    def _release(self) -> None:
        """Give back what was claimed; what this request keeps must be kept by now."""
        while self._landed:
            self._cache.flights.retire(self._landed.pop())
        while self._locks:
            self._locks.popitem()[1].release()

    def _tell(self, got: Mapping[str, Entry]) -> None:
        if self._asked.on_encoded is not None:
            total = len(self._asked.windows)
            self._asked.on_encoded(
                min(total, self._done + len(got.keys() - {self._head_key})), total
            )

    def _check(self) -> None:
        for source in self._bad.values():
            raise NonFiniteError(
                f"{source.name}: its keys or values are NaN or infinite, so no answer that reads "
                "it could be right, and it was not stored. Load the model in bfloat16 or float32 "
                "(float16 overflows), and check its weights."
            )
