"""One request's way through the cache: look up, encode what is missing, keep it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from rag_windows.cache.codec import codec_named, settle
from rag_windows.cache.device import Mover, compact, is_finite, layer_devices, ready
from rag_windows.cache.entry import Entry
from rag_windows.cache.keys import KeyScope
from rag_windows.cache.misses import Misses, Wanted
from rag_windows.cache.passage_cache import PassageCache
from rag_windows.cache.tiers import Counted
from rag_windows.errors import NonFiniteError
from rag_windows.forks import cached_property
from rag_windows.kv import Window
from rag_windows.methods import Method
from rag_windows.methods.base import window_starts
from rag_windows.methods.steps import Refinement
from rag_windows.prefill import Encoded, Encoder, OnEncoded, Prefill, Source

EXACT = "as computed"
_PREFIX = Source("The prefix")


@dataclass(slots=True)
class _Fresh:
    """A window that this request encoded."""

    key: str
    entry: Entry


class CachedRun:
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
        with_prefix = bool(self._prefix_ids) and self._cache.store == EXACT
        prefix_key = self._scope.prefix_key() if with_prefix else None
        asked = dict.fromkeys([*keys, *([prefix_key] if prefix_key else [])])
        found = self._cache.quick(list(asked), self._one_device)
        total, done = len(windows), 0

        def told(now: int = 0) -> None:
            if on_encoded is not None:
                on_encoded(min(total, done + now), total)

        # While it waits, who asked is told as well, so that a deadline of theirs counts.
        misses = Misses(self._cache, self._one_device, told)
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
            self._cache.relabel(key, found[key], source.labels, self._epoch)
        self._count(found, misses)
        computed = {fresh.key for fresh in self._fresh}
        hits = tuple(index for index, key in enumerate(keys) if key not in computed)
        cached = sum(lengths[index] for index in hits) + self._prefix_hit(prefix_key)
        # What was on disk does not know its ids.
        made = [replace(moved[key], ids=tuple(ids)) for key, ids in zip(keys, windows, strict=True)]
        return Encoded(prefix, made, cached, hits)

    def _prefix(
        self, key: str | None, found: dict[str, Entry], misses: Misses
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

    def _keep(self, misses: Misses) -> None:
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

    def _count(self, found: dict[str, Entry], misses: Misses) -> None:
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
        return layer_devices(self._encoder.model, len(self._encoder.reach))

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
