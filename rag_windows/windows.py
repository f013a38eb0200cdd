"""Where the windows of requests come from: found if they are anywhere, and encoded if not."""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

import torch

from rag_windows.cache.codec import EXACT, Entry, is_finite, settle
from rag_windows.cache.fingerprint import ModelIdentity, TokenizerIdentity
from rag_windows.cache.keys import KeyScope
from rag_windows.cache.memory import compact, placed
from rag_windows.cache.passage_cache import PassageCache
from rag_windows.errors import InputError, NonFiniteError
from rag_windows.kv import Window, WindowBuffer
from rag_windows.methods import Method
from rag_windows.prefill import (
    EncodedContext,
    EncodingPlan,
    ModelEncoder,
    OnEncoded,
    PlannedWindow,
    Prefill,
    Source,
    complete,
    read_by,
)
from rag_windows.steps.recompute import recompute

FOLLOW_S = 120.0
"""How long to wait for another thread or process that encodes a window, before doing it too."""

_POLL_S, _LONGEST_POLL_S = 0.005, 0.1
_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.0005, 0.008  # for what comes from the shared store


@dataclass(frozen=True, slots=True)
class Wanted:
    """A window, or the prefix, that one request reads.

    Attributes:
        key: what equal ones of other requests have in common; those of one request all differ.
        name: of its entry in the passage cache, or None; equal ones of one request have one name.
        planned: what is encoded.
    """

    key: Hashable
    name: str | None
    planned: PlannedWindow

    @property
    def id(self) -> Hashable:
        """Under which a request holds it: what has one name is encoded once."""
        return self.name or self.key


@dataclass(frozen=True, slots=True)
class Obtained:
    """Prefix and windows of one request.

    Attributes:
        prefix: None if it is empty.
        windows: in the order given.
        cached_tokens: those of all tokens that were not computed for this request.
        found: indices of windows that were not.
    """

    prefix: Window | None
    windows: list[Window] = field(repr=False)
    cached_tokens: int
    found: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheAccess:
    """A passage cache, and the model and tokenizer whose windows it is asked for."""

    cache: PassageCache
    model: ModelIdentity
    tokenizer: TokenizerIdentity

    def identity(self) -> tuple[bytes | None, bytes]:
        """Fingerprints of the model, None if nothing can be said about it, and the tokenizer."""
        return self.model.fingerprint(), self.tokenizer.fingerprint()

    def scope(self, model: bytes, prefix_ids: Sequence[int], encoding: str) -> KeyScope:
        """Names of windows that are encoded alike behind one prefix."""
        return KeyScope(
            self.cache.salt_key,
            model=model,
            tokenizer=self.tokenizer.fingerprint(),
            encoding=encoding,
            store=self.cache.store,
            prefix_ids=prefix_ids,
        )


class WindowStore:
    """Finds prefixes and windows, and encodes those that are nowhere.

    It asks in this order: the windows that rows of the same batch read now (see `for_batch`), or,
    where there is a cache, its accelerator, host memory, disk and shared store; then the model. A
    cache counts its hits and knows what it may hand out, so it is asked first, and the rows only
    share what it gave.

    What is read one after the other (`Sequential`) is not cached, but for the prefix: it depends on
    all passages and their order. Every store keeps a prefix as computed: all windows and answers
    read it.

    Attributes:
        runner: runs the model.
        access: to a passage cache, or None.
        reading: of a batch, the windows that its rows read now, by `Wanted.key`; else None.
    """

    def __init__(self, runner: ModelEncoder, access: CacheAccess | None = None) -> None:
        self.runner, self.access = runner, access
        self.reading: WeakValueDictionary[Hashable, Window] | None = None

    def for_batch(self) -> WindowStore:
        """The same for the rows of one batch, which share windows, with a passage cache or without.

        It holds no window itself: one that nobody reads any more is freed. Several prefills may
        run by turns in one thread.
        """
        store = WindowStore(self.runner, self.access)
        store.reading = WeakValueDictionary()
        return store

    def obtain(
        self,
        plan: EncodingPlan,
        on_encoded: OnEncoded | None = None,
        *,
        patient: bool = False,
        ttl: float | None = None,
    ) -> Prefill[Obtained]:
        """Find what one request reads, and encode the rest.

        Args:
            plan: what it reads.
            on_encoded: called after each forward pass; windows that were found count.
            patient: whether a cache waits for the disk rather than leave something unwritten.
            ttl: seconds for which a cache may use what is encoded now, instead of its own.

        Raises:
            NonFiniteError: keys or values for a cache hold NaN or infinity; the message names the
                passage.
        """
        if self.access is None:
            self.runner.follow()
        model = self._fingerprint()  # which follows, too
        if self.access is None or model is None:
            return _Search(self, plan, model, on_encoded).run()
        return _CachedSearch(self, plan, model, on_encoded, self.access, patient, ttl).run()

    def prefill(
        self, plan: EncodingPlan, on_encoded: OnEncoded | None = None
    ) -> Prefill[EncodedContext]:
        """What queries read of a plan; ``on_encoded`` as in `obtain`.

        Raises:
            InputError: a window without a score that the method needs.
            NonFiniteError: as in `obtain`.
        """
        if not plan.windows:
            start, form = len(plan.prefix_ids), self.runner.form
            return EncodedContext(plan.prefix_ids, None, plan.method, start, form=form)
        plan.check_scores()
        obtained = yield from self.obtain(plan, on_encoded)
        made, method = obtained.windows, plan.method
        scores = tuple(score for score in plan.scores if score is not None)
        scores = scores if len(scores) == len(made) else ()
        n_groups = max(plan.groups) + 1
        context = EncodedContext(
            prefix_ids=plan.prefix_ids,
            prefix=obtained.prefix,
            method=method,
            query_start=max(window.end for window in made),
            windows=read_by(
                method,
                made,
                plan.groups,
                n_groups,
                scores,
                plan.lengths,
                rows=self.runner.form is not None,
            ),
            form=self.runner.form,
            lengths=plan.lengths,
            groups=plan.groups,
            n_groups=n_groups,
            scores=scores,
            cached_tokens=obtained.cached_tokens,
            encoded_windows=len(made) - len(obtained.found),
            found=obtained.found,
            titles=plan.titles,
        )
        if method.recompute is None or context.waits:
            return context
        again = recompute(self.runner.of_windows, made, obtained.prefix, method.recompute)
        return context.encoded_again(*again)

    def encode_ids(
        self,
        prefix_ids: Sequence[int],
        windows: Sequence[Sequence[int]],
        method: Method,
        *,
        scores: Sequence[float | None] = (),
        before: Sequence[Sequence[int]] = (),
    ) -> EncodedContext:
        """Encode token ids at once, each window a citation group of its own.

        ``before`` is of each window one chunk in front of it, which may have no tokens; or none.

        Raises:
            InputError: a window without tokens or without a score that the method needs, or
                ``before`` of other windows or for a method without neighbours.
        """
        self.runner.check_method(method)
        if before and not method.neighbours:
            raise InputError(
                f"The method {method.name!r} encodes windows without neighbours. Use one such as "
                "'neighbours+pcw', or leave before= out."
            )
        if before and len(before) != len(windows):
            raise InputError(
                f"before= has {len(before)} lists for {len(windows)} windows. Give one for each, "
                "an empty one where nothing stands in front."
            )
        chunks = [[tuple(ids)] for ids in before]
        plan = EncodingPlan.of(prefix_ids, windows, method, chunks=chunks, scores=scores)
        if 0 in plan.lengths:
            raise InputError(f"Window {plan.lengths.index(0)} has no tokens. Leave it out.")
        return complete(self.prefill(plan))

    def reads(self, plan: EncodingPlan) -> list[Wanted]:
        """The prefix, if there is one, and the windows of a plan."""
        head, windows = self.wanted(plan, self._fingerprint())
        return windows if head is None else [head, *windows]

    def missing(self, plan: EncodingPlan) -> list[int]:
        """Indices of windows that the cache does not know of, by what it knows without reading."""
        _, windows = self.wanted(plan, self._fingerprint())
        names = [one.name for one in windows if one.name is not None]
        present = set() if self.access is None else self.access.cache.present(names)
        return [index for index, one in enumerate(windows) if one.name not in present]

    def _fingerprint(self) -> bytes | None:
        """The model's; None if it is unknown, or not asked for: only a cache needs it."""
        return None if self.access is None else self.access.model.fingerprint()

    def wanted(self, plan: EncodingPlan, model: bytes | None) -> tuple[Wanted | None, list[Wanted]]:
        """The prefix, None if it is empty, and the windows, for a fingerprint of the model."""
        access, encoding = self.access, plan.method.encoding
        scope = None
        if access is not None and model is not None:
            scope = access.scope(model, plan.prefix_ids, encoding)
        # After an edit of the model nothing of before is found.
        version, head = self.runner.mirror.version, None
        if plan.prefix_ids:
            name = None if scope is None else scope.prefix_key()
            planned = PlannedWindow(plan.prefix_ids, 0, (), Source("The prefix"))
            head = Wanted(name or (version, _digest(plan.prefix_ids)), name, planned)
        behind = version, None if head is None else head.key
        windows: list[Wanted] = []
        equal: Counter[Hashable] = Counter()
        for one in plan.windows:
            key: Hashable
            name = None
            if not plan.method.windowed:
                # One text of all passages is cited by its parts, which are not the same for others.
                key = object()
            elif scope is not None:
                key = name = scope.window_key(one.ids, one.start, one.before)
            else:
                key = behind, encoding, one.start, _digest(one.before), _digest(one.ids)
            equal[key] += 1
            windows.append(Wanted((key, equal[key]), name, one))
        return head, windows


def _digest(ids: Sequence[int]) -> bytes:
    """A short key for tokens, however many they are."""
    return hashlib.sha256(array("q", ids).tobytes()).digest()


class _Search:
    """What one request reads: found among the windows of a batch, or encoded pass by pass."""

    def __init__(
        self,
        store: WindowStore,
        plan: EncodingPlan,
        model: bytes | None,
        on_encoded: OnEncoded | None,
    ) -> None:
        self._runner, self._reading = store.runner, store.reading
        self._method, self._on_encoded = plan.method, on_encoded
        self._head, self._windows = store.wanted(plan, model)
        self._got: dict[Hashable, Window] = {}
        self._computed: set[Hashable] = set()
        self._bad: dict[Hashable, Source] = {}
        self._places = {one.id: index for index, one in enumerate(self._windows)}
        lengths = [len(self._runner.ids_of(one)) for one in plan.windows]
        self._buffer = WindowBuffer(lengths)

    def run(self) -> Prefill[Obtained]:
        """See `WindowStore.obtain`."""
        head, windows, prefix = self._head, self._windows, None
        try:
            if head is not None:
                yield from self._obtain([head], None)
                self._check()
                # At once: other processes need it for other passages, however long these here take.
                self._keep()
                (prefix,) = self._handed([head])
            if any(one.id in self._got for one in windows):
                self._notify()
            yield from self._obtain(windows, prefix)
        finally:
            # Also after a failure: finished windows are valid, and a cancelled request may come
            # again.
            self._end()
        self._check()
        made = self._handed(windows)
        found = tuple(i for i, one in enumerate(windows) if one.id not in self._computed)
        cached = sum(len(windows[i].planned.ids) for i in found)
        if head is not None and head.id not in self._computed:
            cached += len(head.planned.ids)
        self._count()
        return Obtained(prefix, made, cached, found)

    def _obtain(self, wanted: Sequence[Wanted], prefix: Window | None) -> Prefill[None]:
        """Find or encode all of them, but for those that are NaN or infinite."""
        while todo := (yield from self._to_encode(wanted)):
            while todo := self._left(todo):
                # Between two passes other prefills of the batch may encode some of them.
                self._encode(todo, prefix)
                yield 0.0

    def _left(self, wanted: Sequence[Wanted]) -> list[Wanted]:
        """Those that are missing, each name once; what rows of the batch read now is taken."""
        left = [one for one in wanted if one.id not in self._got and one.id not in self._bad]
        if self._reading is not None:
            there = {one.id: self._reading.get(one.key) for one in left if one.name is None}
            found = {key: window for key, window in there.items() if window is not None}
            if found:
                self._land(found)
                left = [one for one in left if one.id not in found]
        return list({one.id: one for one in left}.values())

    def _to_encode(self, wanted: Sequence[Wanted]) -> Prefill[list[Wanted]]:
        """Those that this request has to encode; none if all of them are there."""
        yield from ()
        return self._left(wanted)

    def _encode(self, wanted: Sequence[Wanted], prefix: Window | None) -> None:
        """Run one forward pass over as many of them as it takes."""
        of_window = wanted[0] is not self._head and self._method.windowed
        runner = self._runner.of_windows if of_window else self._runner
        refinement = None if wanted[0] is self._head else self._method.refinement
        begun = time.perf_counter()
        planned = [one.planned for one in wanted]
        made = runner.encode_pass(prefix, planned, refinement)
        self._take([(wanted[index], window) for index, window in made.items()], begun)

    def _take(self, made: Sequence[tuple[Wanted, Window]], begun: float) -> None:
        """Copy what one pass, which began at this time, gave as views of its tensors."""
        self._computed |= {one.id for one, _ in made}
        self._land({one.id: self._copied(one, window) for one, window in made})

    def _copied(self, one: Wanted, window: Window) -> Window:
        """The same window without the others of its pass, which the prefix does not have."""
        if self._reading is None and one is self._head:
            return window
        # Windows that are read in rows are no neighbours in memory.
        if self._reading is None:
            apart = self._runner.form is not None
            return compact(window) if apart else self._buffer.put(self._places[one.id], window)
        # In memory of its own, which is freed when nobody reads this one any more.
        own = window if one is self._head else compact(window)
        return self._reading.setdefault(one.key, own)

    def _land(self, made: Mapping[Hashable, Window]) -> None:
        self._got.update(made)
        if made.keys() - {self._head and self._head.id}:
            self._notify()

    def _notify(self) -> None:
        if self._on_encoded is not None:
            done = sum(one.id in self._got for one in self._windows)
            self._on_encoded(done, len(self._windows))

    def _handed(self, wanted: Sequence[Wanted]) -> list[Window]:
        """The windows as queries read them."""
        return [self._got[one.id] for one in wanted]

    def _check(self) -> None:
        for source in self._bad.values():
            raise NonFiniteError(
                f"{source.name} has keys or values that are NaN or infinite, so no answer that "
                "reads it could be right. It was not stored. Load the model in bfloat16 or "
                "float32 (float16 overflows), and check its weights."
            )

    def _keep(self) -> None:
        """Store what was encoded."""

    def _end(self) -> None:
        """Store the rest, and leave to others what they wait for."""

    def _count(self) -> None:
        """Add to statistics."""


class _CachedSearch(_Search):
    """The same through a passage cache, with claims on windows that others want, too.

    A window is encoded once, by one thread of one process of those that share the cache. A request
    first encodes and stores what it has claimed, and only then waits for others.
    """

    def __init__(
        self,
        store: WindowStore,
        plan: EncodingPlan,
        model: bytes,
        on_encoded: OnEncoded | None,
        access: CacheAccess,
        patient: bool,
        ttl: float | None,
    ) -> None:
        super().__init__(store, plan, model, on_encoded)
        self._cache, self._model, self._fingerprint = access.cache, access.model, model
        self._patient, self._ttl = patient, ttl or access.cache.ttl
        self._devices = access.model.devices
        self._device = self._devices[0] if len({*self._devices}) == 1 else None
        self._epoch = self._cache.epoch
        self._unstored: list[str] = []
        self._joined = 0
        self._claimed: set[str] = set()
        self._followed: dict[str, Future[Entry | None]] = {}  # what others have claimed
        self._locks: dict[str, Callable[[], None]] = {}  # what releases them
        self._fetched: set[str] = set()  # asked of the shared store
        asked = (*self._windows, *([] if self._head is None else [self._head]))
        names = dict.fromkeys(one.name for one in asked if one.name is not None)
        self._entries = self._cache.quick(list(names), self._device)
        self._got.update({name: entry.window for name, entry in self._entries.items()})

    def _to_encode(self, wanted: Sequence[Wanted]) -> Prefill[list[Wanted]]:
        """What this request has claimed and found nowhere; waits while others encode the rest."""
        if not wanted or wanted[0].name is None:
            return (yield from super()._to_encode(wanted))
        pause, deadline = 0.0, 0.0
        while left := self._left(wanted):
            mine = yield from self._claim({one.name: one for one in left if one.name is not None})
            # What others encode is left to them, unless that takes too long.
            late = pause > 0 and time.monotonic() > deadline
            if todo := self._left(left if late else mine):
                return todo
            self._join()
            if self._left(left):
                # Others may wait for what is done, while we wait for them.
                self._keep()
                if not pause:
                    deadline = time.monotonic() + FOLLOW_S
                pause = min(_LONGEST_POLL_S, 2 * pause or _POLL_S)
                yield pause
                # The caller is notified while it waits as well, so that its deadline counts.
                self._notify()
        return []

    def _claim(self, left: Mapping[str, Wanted]) -> Prefill[list[Wanted]]:
        """Claim what nobody else encodes, and look for it on disk and in the shared store.

        Returns:
            What this request may encode; some of it may have been found.
        """
        cache, disk = self._cache, self._cache.disk
        new, theirs = cache.flights.claim(
            name for name in left if name not in self._followed and name not in self._claimed
        )
        self._claimed |= {*new}
        self._followed |= theirs
        self._hand_on(cache.again(new, self._device))
        mine = [name for name in left if name not in self._followed and self._lock(name)]
        if disk is not None:
            # Another process may have written it after it was missed and before its lock.
            written = cache.from_disk([name for name in mine if name in disk], self._device)
            self._joined += len(written)
            self._hand_on(written)
        yield from self._fetch([left[name] for name in mine if name not in self._got])
        return [left[name] for name in mine]

    def _join(self) -> None:
        """Take what others have encoded meanwhile; what they failed to encode is claimed again."""
        for name in [name for name, flight in self._followed.items() if flight.done()]:
            entry = self._followed.pop(name).result()
            if entry is not None and name not in self._got:
                self._joined += 1
                self._hold({name: entry})

    def _fetch(self, wanted: Sequence[Wanted]) -> Prefill[None]:
        """Read windows from the shared store, once, while that is quicker than encoding them."""
        names = {one.name: one for one in wanted if one.name is not None}
        asked = [name for name in names if name not in self._fetched]
        self._fetched |= {*asked}
        tokens = sum(len(names[name].planned.ids) for name in asked)
        reading = self._cache.from_shared(asked, tokens, self._fingerprint)
        if reading is None:
            return
        pause = _SHORTEST_LOOK_S
        try:
            while True:
                under_way = reading.under_way
                landed = reading.landed()
                self._cache.take_in(landed, self._epoch, self._device)
                self._hand_on(landed)
                if not under_way:
                    break
                yield pause
                pause = min(_LONGEST_LOOK_S, 2 * pause)
        finally:
            reading.close()

    def _lock(self, name: str) -> bool:
        """Be the only process that encodes a window; False if it is there or another one is."""
        disk = self._cache.disk
        if name in self._got or disk is None or name in self._locks:
            return name not in self._got
        release = disk.try_lock(name)
        if release is not None:
            self._locks[name] = release
        return release is not None

    def _take(self, made: Sequence[tuple[Wanted, Window]], begun: float) -> None:
        """The same; what is cached has memory of its own and the numbers that later hits give."""
        if made[0][0].name is None:
            super()._take(made, begun)
            return
        copies = [(one, compact(window)) for one, window in made]
        finite = [is_finite(window) for _, window in copies]
        now, seconds = time.time(), time.perf_counter() - begun
        tokens = sum(len(window.ids) for _, window in copies)
        self._cache.measured(self._fingerprint, tokens, seconds)
        entries: dict[str, Entry] = {}
        for (one, window), good in zip(copies, finite, strict=True):
            source = one.planned.source
            if not good:
                self._bad[one.id] = source
            elif one.name is not None:
                store, exact = self._cache.store, one is self._head
                entries[one.name] = Entry(
                    window=window if exact or store == EXACT else settle(store, window),
                    cost_s=seconds * len(window.ids) / tokens,
                    labels=self._cache.digests(source.labels),
                    created=now,
                    expires=None if self._ttl is None else now + self._ttl,
                    exact=exact,
                )
        self._computed |= entries.keys()
        self._unstored += entries
        self._hand_on(entries)

    def _hold(self, entries: Mapping[str, Entry]) -> None:
        self._entries.update(entries)
        self._got.update({name: entry.window for name, entry in entries.items()})

    def _hand_on(self, entries: Mapping[str, Entry]) -> None:
        """Hold entries, and give those that were claimed to whoever follows."""
        self._hold(entries)
        for name in self._claimed & entries.keys():
            self._cache.flights.land(name, entries[name])
        self._land({name: entry.window for name, entry in entries.items()})

    def _handed(self, wanted: Sequence[Wanted]) -> list[Window]:
        """The same, on the devices where the model computes."""
        names = [one.name for one in wanted if one.name is not None]
        if not names:
            return super()._handed(wanted)
        here = {name: self._entries[name] for name in names}
        self._entries |= self._cache.on_accelerator(here, self._device)
        made = []
        for one, name in zip(wanted, names, strict=True):
            entry = self._entries[name]
            self._cache.relabel(name, entry, one.planned.source.labels)
            # Entries from disk lack their ids.
            ids = self._runner.ids_of(one.planned)
            window = replace(placed(entry.window, self._devices), ids=ids)
            if self._reading is not None:
                window = self._reading.setdefault(one.key, window)
            made.append(window)
        return made

    def _keep(self) -> None:
        """Store what was encoded, unless the weights were edited meanwhile."""
        names, self._unstored = self._unstored, []
        if not names or self._model.fingerprint() != self._fingerprint:
            return
        for device in {one for one in self._devices if one.type == "cuda"}:
            torch.cuda.synchronize(device)  # before another thread copies what was computed there
        for name in names:
            self._cache.keep(
                name,
                self._entries[name],
                self._epoch,
                device=self._device,
                done=self._locks.pop(name, None),
                wait=self._patient,
            )

    def _end(self) -> None:
        """Store the rest, end the claims, and release the locks."""
        try:
            self._keep()
        finally:
            for name in self._claimed:
                self._cache.flights.end(name)
            for release in self._locks.values():
                release()

    def _count(self) -> None:
        found = [one for name, one in self._entries.items() if name not in self._computed]
        made = [one for name, one in self._entries.items() if name in self._computed]
        self._cache.count(
            hits=len(found),
            misses=len(made),
            joined=self._joined,
            cached_tokens=sum(len(entry.window.ids) for entry in found),
            seconds_saved=sum(entry.cost_s for entry in found),
            seconds_spent=sum(entry.cost_s for entry in made),
        )
