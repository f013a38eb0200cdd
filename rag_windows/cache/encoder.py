"""Encoding with a passage cache before it: only what nobody has encoded yet is computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import torch

from rag_windows.cache.codec import Entry, codec_named, is_finite, settle
from rag_windows.cache.fingerprint import ModelIdentity, TokenizerIdentity
from rag_windows.cache.keys import KeyScope
from rag_windows.cache.locks import FileLock
from rag_windows.cache.passage_cache import Counted, PassageCache
from rag_windows.cache.transfer import Mover, compact, layer_devices, ready
from rag_windows.errors import NonFiniteError
from rag_windows.kv import Window
from rag_windows.methods import Method
from rag_windows.methods.base import window_starts
from rag_windows.methods.steps import Refinement
from rag_windows.prefill import Encoded, Encoder, OnEncoded, Prefill, Source, ToEncode
from rag_windows.threads import cached_property

_PREFIX = Source("The prefix")

FOLLOW_S = 120.0
"""How long to wait for another thread or process that encodes a window, before doing it too."""

_POLL_S = 0.005
_LONGEST_POLL_S = 0.1

Compute = Callable[[Sequence["Wanted"]], Iterator[Mapping[str, Entry | None]]]
"""Encodes windows and yields those of each pass by their keys; None for one that failed."""

Pauses = Generator[float, None, None]
"""See `rag_windows.prefill.Prefill`."""


class CachedEncoder:
    """An `Encoder` that asks a cache first and tells it what it had to compute.

    Passages read one after the other (`Sequential`) are not cached: such a window depends on all
    passages and their order, so it would rarely be asked for again and would displace those that
    are. Their prefix is. With a lossy store the prefix is not: every window and answer reads it.

    Args:
        encoder: that computes.
        cache: that keeps.
        model: what the model is.
        tokenizer: what the tokenizer is.
    """

    def __init__(
        self,
        encoder: Encoder,
        cache: PassageCache,
        model: ModelIdentity,
        tokenizer: TokenizerIdentity,
    ) -> None:
        self._encoder = encoder
        self._cache = cache
        self._model = model
        self._tokenizer = tokenizer

    @property
    def runner(self) -> Encoder:
        """What runs the model."""
        return self._encoder

    def prefill(self, asked: ToEncode) -> Prefill[Encoded]:
        """Find what one request reads, and encode the rest.

        Raises:
            NonFiniteError: keys or values hold NaN or infinity; the message names the passage.
        """
        fingerprint = self._model.fingerprint()
        if fingerprint is None:
            return self._encoder.prefill(asked)
        run = _Run(
            self._encoder,
            self._cache,
            self.scope(fingerprint, asked.prefix_ids, asked.method),
            lambda: self._model.fingerprint() == fingerprint,
            asked.prefix_ids,
            asked.method,
            patient=asked.patient,
            ttl=asked.ttl or self._cache.ttl,
        )
        return run.prefill(asked.windows, asked.sources, asked.on_encoded)

    def missing(
        self, prefix_ids: Sequence[int], windows: Sequence[Sequence[int]], method: Method
    ) -> list[int]:
        """Indices of windows that the cache does not know of, by what it knows without reading."""
        fingerprint = self._model.fingerprint()
        if fingerprint is None or not method.windowed:
            return list(range(len(windows)))
        scope = self.scope(fingerprint, prefix_ids, method)
        starts = window_starts(method.alignment, len(prefix_ids), [len(ids) for ids in windows])
        return [
            index
            for index, (ids, start) in enumerate(zip(windows, starts, strict=True))
            if scope.window_key(ids, start) not in self._cache
        ]

    def identity(self) -> tuple[bytes | None, bytes]:
        """Fingerprints of the model, None if nothing can be said about it, and the tokenizer."""
        return self._model.fingerprint(), self._tokenizer.fingerprint()

    def scope(self, fingerprint: bytes, prefix_ids: Sequence[int], method: Method) -> KeyScope:
        """Keys behind one prefix."""
        return KeyScope(
            self._cache.salt_key,
            model=fingerprint,
            tokenizer=self._tokenizer.fingerprint(),
            encoding=method.encoding,
            store=self._cache.store,
            prefix_ids=prefix_ids,
        )


@dataclass(slots=True)
class _Fresh:
    """A window that this request encoded."""

    key: str
    entry: Entry


class _Run:
    """What one request finds and makes.

    Args:
        encoder: that computes.
        cache: that keeps.
        scope: the keys behind this request's prefix.
        still_same: whether the model is what it was when the keys were made.
        prefix_ids: may be empty.
        method: how the windows will be read.
        patient: wait for the disk rather than leave something unwritten.
        ttl: seconds for which what is encoded now may be used; None for ever.
    """

    def __init__(
        self,
        encoder: Encoder,
        cache: PassageCache,
        scope: KeyScope,
        still_same: Callable[[], bool],
        prefix_ids: Sequence[int],
        method: Method,
        *,
        patient: bool,
        ttl: float | None,
    ) -> None:
        self._encoder = encoder
        self._cache = cache
        self._scope = scope
        self._still_same = still_same
        self._prefix_ids = tuple(prefix_ids)
        self._method = method
        self._patient = patient
        self._ttl = ttl
        self._epoch = self._cache.epoch
        self._codec = codec_named(self._cache.store)
        self._fresh: list[_Fresh] = []
        self._kept = 0
        self._bad: Source | None = None

    def prefill(
        self,
        windows: Sequence[Sequence[int]],
        sources: Sequence[Source],
        on_encoded: OnEncoded | None,
    ) -> Prefill[Encoded]:
        """See `CachedEncoder.prefill`."""
        lengths = [len(ids) for ids in windows]
        starts = window_starts(self._method.alignment, len(self._prefix_ids), lengths)
        if not sources:
            sources = [Source(f"Window {index}") for index in range(len(windows))]
        keys: list[str] = []
        if self._method.windowed:
            keys = [
                self._scope.window_key(ids, start)
                for ids, start in zip(windows, starts, strict=True)
            ]
        places = dict(zip(keys, starts, strict=False))
        with_prefix = bool(self._prefix_ids) and self._codec.exact
        prefix_key = self._scope.prefix_key() if with_prefix else None
        asked = dict.fromkeys([*keys, *([prefix_key] if prefix_key else [])])
        found = self._cache.quick(list(asked), self._one_device)
        total, done = len(windows), 0

        def told(now: int = 0) -> None:
            if on_encoded is not None:
                on_encoded(min(total, done + now), total)

        # While it waits, who asked is told as well, so that a deadline of theirs counts.
        misses = _Misses(self._cache, self._one_device, told)
        try:
            prefix = yield from self._prefix(prefix_key, found, misses)
            # At once: other processes need it for other passages, however long these here take.
            self._keep(misses)
            if not self._method.windowed:
                made = yield from self._encoder.prefill_windows(
                    prefix, windows, on_encoded, starts, self._method.refinement
                )
                self._count(found, misses)
                return Encoded(prefix, made, self._prefix_hit(prefix_key))
            wanted = {
                key: Wanted(key, tuple(ids), source)
                for key, ids, source in zip(keys, windows, sources, strict=True)
                if key not in found
            }
            moved = {key: self._mover.start(found[key].window) for key in keys if key in found}
            done = sum(key in moved for key in keys)
            if done or not wanted:
                told()

            def encode(rest: Sequence[Wanted]) -> Iterator[Mapping[str, Entry | None]]:
                return self._compute(rest, prefix, places, self._method.refinement)

            obtained = yield from misses.obtain(wanted, encode, told)
            for key, entry in obtained.items():
                moved[key] = self._mover.start(entry.window)
            found |= obtained
            self._mover.finish()
        finally:
            # Also after a failure: what is done is done, and a request that was cancelled may come
            # again.
            try:
                self._keep(misses)
            finally:
                misses.release()
        if self._bad is not None:
            raise NonFiniteError(_bad(self._bad))
        for key, source in zip(keys, sources, strict=True):
            self._cache.relabel(key, found[key], source.labels)
        self._count(found, misses)
        computed = {fresh.key for fresh in self._fresh}
        hits = tuple(index for index, key in enumerate(keys) if key not in computed)
        cached = sum(lengths[index] for index in hits) + self._prefix_hit(prefix_key)
        # What was on disk does not know its ids.
        made = [replace(moved[key], ids=tuple(ids)) for key, ids in zip(keys, windows, strict=True)]
        return Encoded(prefix, made, cached, hits)

    def _prefix(
        self, key: str | None, found: dict[str, Entry], misses: _Misses
    ) -> Prefill[Window | None]:
        if key is None:
            return self._encoder.encode_prefix(self._prefix_ids)
        if key not in found:
            wanted = {key: Wanted(key, self._prefix_ids, _PREFIX)}
            found |= yield from misses.obtain(
                wanted, lambda rest: self._compute(rest, None, {key: 0}, None), None
            )
        if self._bad is not None:
            raise NonFiniteError(_bad(self._bad))
        moved = self._mover.start(found[key].window)
        self._mover.finish()
        return replace(moved, ids=self._prefix_ids)

    def _compute(
        self,
        wanted: Sequence[Wanted],
        prefix: Window | None,
        places: Mapping[str, int],
        refinement: Refinement | None,
    ) -> Iterator[Mapping[str, Entry | None]]:
        """Encode windows, one batch after the other; None for one that is no number."""
        starts = [places[one.key] for one in wanted]
        begun = time.perf_counter()
        ids = [one.ids for one in wanted]
        for batch in self._encoder.encode_batches(prefix, ids, starts, refinement):
            sound = {index: is_finite(window) for index, window in batch.items()}
            now = time.time()
            seconds = time.perf_counter() - begun
            tokens = sum(len(window.ids) for window in batch.values())
            made: dict[str, Entry | None] = {}
            for index, window in batch.items():
                one = wanted[index]
                if not sound[index]:
                    self._bad = self._bad or one.source
                    made[one.key] = None
                    continue
                entry = Entry(
                    window=self._settled(compact(window)),
                    cost_s=seconds * len(window.ids) / tokens,
                    labels=self._cache.digests(one.source.labels),
                    created=now,
                    expires=None if self._ttl is None else now + self._ttl,
                )
                self._fresh.append(_Fresh(one.key, entry))
                made[one.key] = entry
            yield made
            begun = time.perf_counter()

    def _settled(self, window: Window) -> Window:
        """What a later request will find: the same answer, whether a window was cached or not."""
        return window if self._codec.exact else settle(self._codec, window)

    def _keep(self, misses: _Misses) -> None:
        """Store what was encoded, unless the weights were edited on the way."""
        rest = self._fresh[self._kept :]
        self._kept = len(self._fresh)
        if not rest or not self._still_same():
            return
        computed = ready(self._devices)
        for fresh in rest:
            self._cache.keep(
                fresh.key,
                fresh.entry,
                self._epoch,
                device=self._one_device,
                ready=computed,
                done=misses.handed_over(fresh.key),
                wait=self._patient,
            )

    def _count(self, found: dict[str, Entry], misses: _Misses) -> None:
        computed = {fresh.key for fresh in self._fresh}
        hits = [entry for key, entry in found.items() if key not in computed]
        self._cache.count(
            Counted(
                hits=len(hits),
                misses=len(computed),
                joined=misses.joined,
                cached_tokens=sum(len(entry.window.ids) for entry in hits),
                seconds_saved=sum(entry.cost_s for entry in hits),
                seconds_spent=sum(fresh.entry.cost_s for fresh in self._fresh),
            )
        )

    def _prefix_hit(self, key: str | None) -> int:
        """Tokens of the prefix, if it was found."""
        if key is None or any(fresh.key == key for fresh in self._fresh):
            return 0
        return len(self._prefix_ids)

    @cached_property
    def _devices(self) -> tuple[torch.device, ...]:
        return layer_devices(self._encoder.model, len(self._encoder.sliding_windows))

    @cached_property
    def _one_device(self) -> torch.device | None:
        devices = set(self._devices)
        return devices.pop() if len(devices) == 1 else None

    @cached_property
    def _mover(self) -> Mover:
        return Mover(self._devices)


def _bad(source: Source) -> str:
    return (
        f"{source.name}: its keys or values are NaN or infinite, so no answer that reads it could "
        "be right, and it was not stored. Load the model in bfloat16 or float32 (float16 "
        "overflows), and check its weights."
    )


@dataclass(frozen=True, slots=True)
class Wanted:
    """A window that is missing."""

    key: str
    ids: tuple[int, ...]
    source: Source


class _Misses:
    """One request's dealings with others that want the same windows.

    A window is encoded once, by one thread of one process of those that share the cache. Nobody
    waits while others wait for him: a request first encodes what it has claimed.

    Attributes:
        joined: windows that another thread or process encoded for this request.

    Args:
        cache: in which they are looked up.
        device: where they are wanted.
        waiting: called now and then while this request waits for others; what it raises ends it.
    """

    def __init__(
        self,
        cache: PassageCache,
        device: torch.device | None,
        waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self.joined = 0
        self._waiting = waiting
        self._cache = cache
        self._device = device
        self._locks: dict[str, FileLock] = {}
        self._landed: list[str] = []

    def obtain(
        self,
        wanted: Mapping[str, Wanted],
        compute: Compute,
        told: Callable[[int], None] | None,
    ) -> Generator[float, None, dict[str, Entry]]:
        """Get every window, by whatever way; see `rag_windows.prefill.Prefill`.

        Args:
            wanted: by key.
            compute: encodes those that must be.
            told: called now and then with how many there are.

        Returns:
            The entries by key; those that `compute` failed to make are missing.
        """
        got: dict[str, Entry] = {}
        left = dict(wanted)
        hasty: dict[str, Wanted] = {}
        while left:
            mine, theirs = self._cache.flights.claim(left)
            yield from self._lead({key: left.pop(key) for key in mine}, compute, got, told)
            yield from self._wait(partial(_all_done, theirs.values()), _POLL_S)
            for key, flight in theirs.items():
                entry = flight.result() if flight.done() else None
                if entry is not None:
                    got[key] = entry
                    self.joined += 1
                    del left[key]
                elif not flight.done():
                    hasty[key] = left.pop(key)
            if told is not None and theirs:
                told(len(got))
        if hasty:
            for made in compute(list(hasty.values())):
                got |= {key: entry for key, entry in made.items() if entry is not None}
                yield 0.0
        return got

    def handed_over(self, key: str) -> Callable[[], None] | None:
        """Gives back a window's lock; to be called once it is on disk, or will not be."""
        lock = self._locks.pop(key, None)
        return None if lock is None else lock.release

    def release(self) -> None:
        """Give back what was not handed over; what this request keeps must be kept by now."""
        while self._landed:
            self._cache.flights.retire(self._landed.pop())
        while self._locks:
            self._locks.popitem()[1].release()

    def _lead(
        self,
        mine: Mapping[str, Wanted],
        compute: Compute,
        got: dict[str, Entry],
        told: Callable[[int], None] | None,
    ) -> Pauses:
        flying = dict(mine)

        def land(key: str, entry: Entry | None) -> None:
            if flying.pop(key, None) is not None:
                self._cache.flights.land(key, entry)
                if entry is not None:
                    self._landed.append(key)
                    got[key] = entry

        try:
            for key, entry in self._cache.slow(list(mine), self._device).items():
                land(key, entry)
            here, elsewhere = self._lock(list(flying))
            self._written_meanwhile(here, land)
            rest = [mine[key] for key in here if key in flying]
            yield from self._compute(rest, compute, land, told, got)
            if told is not None and not here:
                told(len(got))
            yield from self._await(elsewhere, land)
            left_over = [key for key in elsewhere if key in flying]
            self._lock(left_over)
            rest = [mine[key] for key in left_over]
            yield from self._compute(rest, compute, land, told, got)
        finally:
            for key in list(flying):
                land(key, None)

    def _compute(
        self,
        wanted: Sequence[Wanted],
        compute: Compute,
        land: Callable[[str, Entry | None], None],
        told: Callable[[int], None] | None,
        got: Mapping[str, Entry],
    ) -> Pauses:
        if not wanted:
            return
        for made in compute(wanted):
            for key, entry in made.items():
                land(key, entry)
                if told is not None and entry is not None:
                    told(len(got))
            yield 0.0

    def _lock(self, keys: Sequence[str]) -> tuple[list[str], list[str]]:
        """Keys that no other process encodes, locked now, and those that one does."""
        disk = self._cache.disk
        if disk is None or not keys:
            return list(keys), []
        here, elsewhere = [], []
        for key in keys:
            lock = disk.try_lock(key)
            if lock is None:
                elsewhere.append(key)
            else:
                self._locks[key] = lock
                here.append(key)
        return here, elsewhere

    def _written_meanwhile(
        self, locked: Sequence[str], land: Callable[[str, Entry | None], None]
    ) -> None:
        """Another process may have written a window after it was missed and before its lock."""
        disk = self._cache.disk
        if disk is None:
            return
        there = [key for key in locked if key in disk]
        if there:
            for key, entry in self._cache.from_disk(there, self._device).items():
                land(key, entry)
                self.joined += 1

    def _await(self, keys: Sequence[str], land: Callable[[str, Entry | None], None]) -> Pauses:
        """Wait until another process has written windows, has given up, or takes too long."""
        disk = self._cache.disk
        left = list(keys)
        if disk is None:
            return

        def all_free() -> bool:
            free = [key for key in left if not disk.locked(key)]
            found = self._cache.from_disk(free, self._device) if free else {}
            for key, entry in found.items():
                land(key, entry)
                self.joined += 1
            left[:] = [key for key in left if key not in free]
            return not left

        yield from self._wait(all_free, _LONGEST_POLL_S)

    def _wait(self, over: Callable[[], bool], longest: float) -> Pauses:
        """Pause until others are done, or take too long."""
        deadline = time.monotonic() + FOLLOW_S
        pause = _POLL_S
        while not over() and time.monotonic() < deadline:
            yield pause
            self._waiting()
            pause = min(longest, 2 * pause)


def _all_done(flights: Iterable[Future[Entry | None]]) -> bool:
    return all(flight.done() for flight in flights)
