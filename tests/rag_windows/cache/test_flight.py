"""Single flight: one leads, the others follow, nobody hangs."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from rag_windows.cache.passage_cache import Flights


def test_one_leads_and_the_others_get_what_it_landed() -> None:
    flights: Flights[str] = Flights()
    mine, theirs = flights.claim(["a", "b", "a"])
    assert (mine, theirs) == (["a", "b"], {})
    mine, theirs = flights.claim(["b", "c"])
    assert mine == ["c"]
    assert list(theirs) == ["b"]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(theirs["b"].result, 30.0)
        flights.land("b", "value")
        assert waiting.result(30) == "value"


def test_a_landed_claim_is_found_until_it_is_retired() -> None:
    flights: Flights[str] = Flights()
    flights.claim(["a"])
    flights.land("a", "value")
    mine, theirs = flights.claim(["a"])
    assert not mine
    assert theirs["a"].result(0) == "value"
    flights.retire("a")
    assert flights.claim(["a"]) == (["a"], {})


def test_a_failed_leader_leaves_the_claim_to_the_next() -> None:
    flights: Flights[str] = Flights()
    flights.claim(["a"])
    _, theirs = flights.claim(["a"])
    flights.land("a", None)
    assert theirs["a"].result(1) is None
    assert flights.claim(["a"]) == (["a"], {})


def test_of_many_threads_one_leads() -> None:
    flights: Flights[int] = Flights()
    barrier = threading.Barrier(8)
    led: list[int] = []

    def fly(number: int) -> int | None:
        barrier.wait()
        mine, theirs = flights.claim(["a"])
        if mine:
            led.append(number)
            flights.land("a", number)
            return number
        return theirs["a"].result(30)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(fly, range(8)))
    assert len(led) == 1
    assert results == led * 8
