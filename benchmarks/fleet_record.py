"""The simulator beside three real caches, in one process and without Ray.

    python -m benchmarks.fleet_record [--questions 300]     # 2 minutes on 2 cores

The shipped model answers questions over three passage caches, each for itself, and the routings
choose between them by what `PassageCache.resident` tells every ten questions. Six questions count
as under way at a time. What was encoded is compared with what `benchmarks.fleet` says of the same
questions. `benchmarks.serve_fleet` asks real replicas.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence

from benchmarks.fleet import Record, RecordedQuestion, checked
from rag_windows import BatchRequest, Passage, PassageCache, WindowedLM
from rag_windows.request import Request
from rag_windows_server.fleet.routing import (
    ROUTINGS,
    Held,
    Replica,
    RoutedQuestion,
    number_of,
    passage_number,
)

TOPICS, OF_TOPIC, OWN, ALL = 60, 10, 6, 8
"""Passages are in topics, drawn by Zipf's law; a question has 6 of its topic, and 2 of all."""
NAMES = ["r0", "r1", "r2"]
APART_S, UNDER_WAY, PUBLISHED = 0.1, 6, 10
WORDS = "the of and a to in is was that for on with as by at from his her they which or had an be"


def recorded(lm: WindowedLM, routing: str, count: int, memory: int) -> Record:
    """Ask so many questions over three caches of so many bytes."""
    rng = random.Random(0)
    passages = [
        Passage(f"Letter {number}. " + " ".join(rng.choices(WORDS.split(), k=rng.randint(30, 80))))
        for number in range(TOPICS * OF_TOPIC)
    ]
    numbers = [passage_number(None, one) for one in passages]
    ranked = rng.sample(range(len(passages)), len(passages))
    caches = [PassageCache(memory) for _ in NAMES]
    models, known = [lm.with_cache(cache) for cache in caches], [Held() for _ in NAMES]
    random.seed(0)  # of the routing by chance
    told: list[RecordedQuestion] = []
    for index in range(count):
        now = index * APART_S
        if index % PUBLISHED == 0:
            for cache, held in zip(caches, known, strict=True):
                held.published(map(number_of, cache.resident()), now)
        (topic,) = rng.choices(range(TOPICS), [1 / (rank + 1) for rank in range(TOPICS)])
        chosen = rng.sample(range(topic * OF_TOPIC, (topic + 1) * OF_TOPIC), OWN)
        while len(chosen) < ALL:
            (other,) = rng.choices(ranked, [1 / (rank + 1) for rank in range(len(ranked))])
            chosen += [other] if other not in chosen else []
        rng.shuffle(chosen)
        busy = [one.replica for one in told[-UNDER_WAY:]]
        fleet = [
            Replica(name, held.numbers, busy.count(name))
            for name, held in zip(NAMES, known, strict=True)
        ]
        digests = tuple(numbers[one] for one in chosen)
        asked = RoutedQuestion(digests, tuple(len(passages[one].text) for one in chosen), 0)
        best = ROUTINGS[routing](asked, fleet)[0]
        known[best].sent(digests, now)
        given = [passages[one] for one in chosen]
        request = Request.of(lm.engine, BatchRequest("What?", given))
        tokens = [len(window.ids) for window in request.parts.windows]
        answer = models[best].generate("What?", given, max_new_tokens=1)
        cached = max(0, answer.usage.cached_tokens - len(request.parts.prefix_ids))
        told.append(
            RecordedQuestion(
                arrival_s=now,
                passages=chosen,
                tokens=tokens,
                replica=NAMES[best],
                encoded_tokens=sum(tokens) - cached,
                first_token_s=0.0,
                whole_s=UNDER_WAY * APART_S,
            )
        )
    tiers = [cache.stats().tiers["memory"] for cache in caches]
    window_tokens = sum(sum(one.tokens) for one in told) / sum(len(one.tokens) for one in told)
    window_bytes = sum(tier.bytes for tier in tiers) / sum(tier.entries for tier in tiers)
    return Record.model_validate(
        {
            "routing": routing,
            "replicas": NAMES,
            "memory_bytes": memory,
            "token_bytes": window_bytes / window_tokens,
            "publish_s": PUBLISHED * APART_S,
            "questions": [one.model_dump() for one in told],
        }
    )


def main(given: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--memory", type=int, default=75_000_000, help="bytes of each cache")
    options = parser.parse_args(given)
    lm = WindowedLM.from_pretrained("tiny-reader", device_map="cpu")
    for routing in ("resident", "consistent", "random"):
        print(
            f"{routing}:\n\n{checked(recorded(lm, routing, options.questions, options.memory))}\n"
        )


if __name__ == "__main__":
    main()
