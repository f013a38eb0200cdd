"""Row: tenants. What a stranger's request does is the same whether or not another salt has it."""

from __future__ import annotations

from pathlib import Path

from rag_windows import PassageCache, WindowedLM
from tests.rag_windows import small


def passages(kind: str, number: int) -> list[str]:
    """Four texts of 150 bytes that no other kind and number have."""
    return [f"{kind} {number:03}.{part}: ".ljust(150, "x") for part in range(4)]


def model(cache: PassageCache) -> WindowedLM:
    return WindowedLM(small.model(), small.tokenizer(), cache=cache)


def test_a_strangers_lookup_does_the_work_of_an_unknown_one(tmp_path: Path) -> None:
    done: dict[str, list[int]] = {}
    with PassageCache("200MB", path=tmp_path / "w", salt="victim") as shared:
        cache = shared.tenant("stranger")
        victim, stranger = model(shared), model(cache)
        for number in range(2):
            victim.generate("?", passages("known", number), max_new_tokens=1)
        # The prefix is everybody's.
        stranger.generate("?", passages("neither", 0), max_new_tokens=1)
        shared.flush()
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
