"""Which replica answers a question: pure functions of what replicas hold and how busy they are.

Passages are known by numbers of 32 bits, made with the tenant's salt: a replica that holds n
passages seems to hold one that it does not hold with a probability of n / 2**32, and then encodes
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass

import numpy as np
import xxhash

from rag_windows.interchange import fields, label_digest, salt_key
from rag_windows.passage import Passage
from rag_windows.request import content_label

LOAD_SHARE = 0.05
"""A question in progress at a replica counts as much as this share of a question's passages.

One of twenty passages: in simulations, which are in the repository's history, fleets encoded and
waited about the same from 0.01 to 0.1, and above that gave up what is resident for differences of
load that did not last.
"""

SENT_S = 5.0
"""Seconds for which a passage that was sent to a replica counts as held there."""


@dataclass(frozen=True, slots=True)
class RoutedQuestion:
    """What a router knows of a question.

    Attributes:
        digests: `passage_number` of each passage, in their order.
        sizes: characters of each.
        home: a hash of what questions over the same passages have in common (`home_of`).
    """

    digests: tuple[int, ...]
    sizes: tuple[int, ...]
    home: int


@dataclass(slots=True)
class Replica:
    """What a router knows of a replica; ranking changes nothing of it.

    Attributes:
        name: unique, and the same as long as the replica lives.
        held: numbers of the passages in its memory.
        load: questions in progress there.
    """

    name: str
    held: Set[int]
    load: float


class Held:
    """What a replica holds, as far as a router knows: what it published last, and was sent lately.

    Otherwise questions about the same new passages would go to several replicas until the first of
    these publishes them. `numbers` is a `Replica.held`; times are seconds of any one clock.
    """

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self._sent: dict[int, float] = {}
        self._looked = 0.0

    def published(self, numbers: Iterable[int], now: float) -> None:
        """Take over what the replica says."""
        self._sent = {one: at for one, at in self._sent.items() if now - at < SENT_S}
        self.numbers, self._looked = {*numbers, *self._sent}, now

    def sent(self, numbers: Iterable[int], now: float) -> None:
        """A question with these passages goes there."""
        new = dict.fromkeys(numbers, now)
        self._sent |= new
        self.numbers.update(new)  # in place: a `Replica` may hold it

    def late(self, now: float) -> bool:
        """Whether to call `published` again, although the replica says what it said before."""
        return bool(self._sent) and now - self._looked >= SENT_S


def resident(question: RoutedQuestion, replicas: Sequence[Replica]) -> list[int]:
    """The indices of all replicas: by the question's characters in memory, less the load."""
    sizes: dict[int, int] = {}
    for number, size in zip(question.digests, question.sizes, strict=True):
        sizes[number] = sizes.get(number, 0) + size
    asked, each = frozenset(sizes), LOAD_SHARE * sum(question.sizes)

    def worth(replica: Replica) -> float:
        held = sum(map(sizes.__getitem__, asked & replica.held))
        return held - each * replica.load

    return _ranked(replicas, question.home, worth)


def _ranked(replicas: Sequence[Replica], home: int, worth: Callable[[Replica], float]) -> list[int]:
    """Indices by worth; among equals by a rendezvous hash, in which each has a rank of its own."""
    keys = [(-worth(one), -_rendezvous(home, one.name), one.name) for one in replicas]
    return sorted(range(len(keys)), key=keys.__getitem__)


def _rendezvous(home: int, name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode(), seed=home % 2**64)


def home_of(*parts: str) -> int:
    """A hash of 64 bits, such as of a tenant and a corpus."""
    return xxhash.xxh3_64_intdigest(fields(*(part.encode() for part in parts)))


def passage_number(salt: str | bytes | None, passage: Passage) -> int:
    """The 32 bits by which replicas and routers know a passage of a tenant."""
    return number_of(label_digest(salt_key(salt), content_label(passage)))


def number_of(digest: str) -> int:
    """The same from what `PassageCache.resident` says of the passage."""
    return int(digest[:8], 16)


def pack(numbers: Iterable[int]) -> bytes:
    """What a replica publishes: 4 bytes for each number, in rising order."""
    return np.unique(np.fromiter(numbers, "<u4")).tobytes()


def unpack(packed: bytes) -> frozenset[int]:
    """The numbers that were packed."""
    return frozenset(np.frombuffer(packed, "<u4").tolist())
