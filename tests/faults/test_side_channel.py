"""Row: tenants. Time to first token does not tell a stranger what is cached under another salt."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rag_windows import PassageCache, WindowedLM
from tests.rag_windows import small

PAIRS = 40
SURE = 0.2
"""A fair coin shows at most a fifth heads, or a fifth tails, in 0.02% of 40 throws."""


def passages(kind: str, number: int) -> list[str]:
    """Four texts of 150 bytes that no other kind and number have."""
    return [f"{kind} {number:03}.{part}: ".ljust(150, "x") for part in range(4)]


def first_token(lm: WindowedLM, texts: list[str]) -> float:
    return lm.generate("?", texts, max_new_tokens=1, citations=False).timings.ttft_s


def model(cache: PassageCache) -> WindowedLM:
    return WindowedLM(small.model(), small.tokenizer(), cache=cache)


def share_faster(lm: WindowedLM, one: str, other: str) -> float:
    """How often `one` answers sooner than `other`, asked in turn, who goes first by chance."""
    rng = random.Random(0)
    faster = 0
    for number in range(PAIRS):
        order = rng.sample([one, other], 2)
        seconds = {kind: first_token(lm, passages(kind, number)) for kind in order}
        faster += seconds[one] < seconds[other]
    return faster / PAIRS


@contextmanager
def tenants(path: Path, pairs: int) -> Iterator[tuple[WindowedLM, WindowedLM]]:
    """A victim whose passages of kind "known" are cached, and a stranger on the same tiers."""
    with PassageCache("200MB", path=path, salt="victim") as cache:
        victim, stranger = model(cache), model(cache.tenant("stranger"))
        for number in range(pairs):
            first_token(victim, passages("known", number))
        first_token(stranger, passages("neither", 0))  # the prefix is everybody's
        cache.flush()
        yield victim, stranger


def test_first_tokens_tell_a_stranger_nothing(tmp_path: Path) -> None:
    with tenants(tmp_path / "w", PAIRS) as (victim, stranger):
        assert SURE < share_faster(stranger, "known", "unknown") < 1 - SURE
        # The same measurement does tell the owner, so it would have seen a difference.
        assert share_faster(victim, "known", "nowhere") > 1 - SURE


def test_a_strangers_lookup_does_the_work_of_an_unknown_one(tmp_path: Path) -> None:
    done: dict[str, list[int]] = {}
    with tenants(tmp_path / "w", 2) as (_, stranger):
        cache = stranger.cache
        assert cache is not None
        for kind in ("known", "unknown"):
            before = cache.stats()
            generation = stranger.generate("?", passages(kind, 1), max_new_tokens=1)
            cache.flush()
            after = cache.stats()
            counters = [after.hits - before.hits, after.misses - before.misses]
            for name in ("memory", "disk"):
                one, two = before.tiers[name], after.tiers[name]
                counters += [two.hits - one.hits, two.misses - one.misses, two.stored - one.stored]
            done[kind] = [*counters, generation.usage.cached_tokens]
    assert done["known"] == done["unknown"]
    assert done["known"][:2] == [1, 4]
