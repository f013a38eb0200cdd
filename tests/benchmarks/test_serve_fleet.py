"""What the load test of a fleet asks, and what it counts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from benchmarks import serve_fleet
from benchmarks.serve import Answer
from benchmarks.serve_fleet import OF_TOPIC, OTHERS, OWN, TOPICS, Fleet


def test_questions_share_passages_by_zipf_s_law() -> None:
    drawn = serve_fleet.drawn(4000)
    assert drawn == serve_fleet.drawn(4000)
    assert drawn != serve_fleet.drawn(4000, seed=1)
    topics: Counter[int] = Counter()
    for numbers in drawn:
        assert len({*numbers}) == len(numbers) == OWN + OTHERS
        ((topic, own),) = Counter(one // OF_TOPIC for one in numbers).most_common(1)
        assert own >= OWN
        topics[topic] += 1
    harmonic = sum(1 / rank for rank in range(1, TOPICS + 1))
    for rank in (1, 2, 4):
        assert topics[rank - 1] / 4000 == pytest.approx(1 / rank / harmonic, rel=0.2)
    # Their order says nothing: the first passage is a topic's as often as the last one.
    first, last = ({one[place] for one in drawn} for place in (0, -1))
    assert len(first) > 500 < len(last)


def test_tokens_and_windows_are_counted_from_usage() -> None:
    run = Fleet("a run", 3, 1)
    for cached, windows in ((0, 0), (40, 1), (100, 2)):
        usage = {"prompt_tokens": 110, "prompt_tokens_details": {"cached_tokens": cached}}
        rag = {"rag": {"windows": 2, "cached_windows": windows}}
        answer = Answer("", rag, usage, {serve_fleet.REPLICA: "one"}, 0.25, 0.5)
        run.add(answer)
    assert (run.tokens, run.windows) == ([110, 70, 10], [2, 1, 0])
    assert run.replicas == ["one"] * 3
    run.seconds, run.first_s = 2.0, [0.25] * 3
    run.counters = serve_fleet.counted(
        'rag_windows_cache_misses_total{replica="one"} 3\n'
        'rag_windows_cache_hits_total{replica="one"} 3\n'
        'rag_windows_cache_misses_total{replica="two"} 2\n'
        'rag_windows_cache_tier_hits_total{replica="two",tier="shared"} 6\n'
    )
    assert (run.count("misses"), run.count("shared: hits")) == (5, 6)
    (row,) = serve_fleet.shown([run])[2:]
    assert "| 63.3 | 1.00 | 2.00 | 100% | 1.5 | 250 ms, 250 ms |" in row


def test_processes_are_found_with_all_that_they_started() -> None:
    code = "import subprocess; subprocess.run(['sleep', '60'])"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            found: dict[int, str] = {}
            while "sleep 60" not in found.values():
                found = serve_fleet.processes(process.pid)
            assert process.pid in found
            assert found.items() <= serve_fleet.processes(os.getpid()).items()
            assert serve_fleet.readers(process.pid) == []
        finally:
            for one in found:
                os.kill(one, 9)
