"""The tier that machines share: kinds of stores, requests that read it, what operators do to it."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rag_windows import CacheError, InputError, MissingExtraError, Passage, PassageCache, WindowedLM
from rag_windows.cache import remote, shared
from tests.rag_windows import small
from tests.rag_windows.cache.disk_cases import end_of, in_child, key_of, right
from tests.rag_windows.cache.shared_cases import (
    between,
    calls,
    failing,
    filled,
    fresh,
    labelled,
    labels,
)

NUMBERS = range(6)
PASSAGES = [Passage(f"Fact {number}: {'more ' * number}", id=str(number)) for number in range(4)]


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    """Options of moto's S3, with one bucket."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {"key": "k", "secret": "s", "endpoint_url": f"http://{host}:{port}"}
    import s3fs

    s3fs.S3FileSystem(**options).mkdir("bucket")
    yield options
    server.stop()


@pytest.fixture(params=["memory", "folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Options of a cache over an empty store."""
    if request.param == "s3":
        options = request.getfixturevalue("s3")
        return {"shared": f"s3://bucket/{tmp_path.name}", "shared_options": options}
    return {"shared": fresh() if request.param == "memory" else tmp_path / "store"}


def machine(place: dict[str, Any], **options: Any) -> WindowedLM:
    """A model with a cache of its own over a store that others use as well."""
    cache = PassageCache(**{"memory": "1MB", "shared_wait": 20.0, **place, **options})
    return WindowedLM(small.model(), small.tokenizer(), cache=cache)


def ask(lm: WindowedLM, passages: list[Passage] = PASSAGES) -> tuple[int, int]:
    """Hits and misses of one question, the prefix among them."""
    assert lm.cache is not None
    before = lm.cache.stats()
    answer = lm.generate("What?", passages, max_new_tokens=2)
    assert answer.token_ids == expected(passages)
    assert lm.cache.flush(60)
    after = lm.cache.stats()
    return after.hits - before.hits, after.misses - before.misses


def expected(passages: list[Passage]) -> tuple[int, ...]:
    return tuple(small.lm().generate("What?", passages, max_new_tokens=2).token_ids)


def counted(lm: WindowedLM) -> Any:
    assert lm.cache is not None
    return lm.cache.stats().tiers["shared"]


def test_what_one_machine_encoded_the_others_read(place: dict[str, Any]) -> None:
    first, second = machine(place), machine(place)
    assert [ask(first), ask(second), ask(second)] == [(0, 5), (5, 0), (5, 0)]
    stats = counted(second)
    assert (stats.hits, stats.misses, stats.stored) == (5, 0, 0), "then they are in memory"
    assert (stats.entries, stats.bytes, stats.limit_bytes) == (0, 0, 0)
    assert second.cache is not None
    assert second.cache.shared is not None
    entries, size = second.cache.shared.contents()
    assert entries == 5
    assert size > 5000
    assert second.cache.verify() == (5, 0)
    assert 'tier_hits_total{tier="shared"} 5\n' in second.cache.metrics()
    assert 'tier_bytes{tier="shared"}' not in second.cache.metrics()


def test_large_entries_are_read_in_parts(
    monkeypatch: pytest.MonkeyPatch, place: dict[str, Any]
) -> None:
    monkeypatch.setattr(shared, "_PART_BYTES", 1 << 15)
    tier = shared.SharedTier(str(place["shared"]), place.get("shared_options"))
    sizes = [5, 400, 1600, 3000]
    for tokens in sizes:
        assert tier.put(key_of(tokens), labelled(tokens, tokens))
    told: list[str] = []
    between(tier, calls(told))
    found = tier.get_many([key_of(tokens) for tokens in sizes])
    assert len(found) == 4
    assert all(right(found[key_of(tokens)], tokens, tokens) for tokens in sizes)
    assert told == ["cat_file"] * (1 + 1 + 4 + 8)
    assert tier.verify() == (4, 0)


def test_a_passage_is_forgotten_by_any_of_its_ids_on_every_machine(place: dict[str, Any]) -> None:
    first, second, third = (machine(place) for _ in range(3))
    ask(first)
    assert ask(second, [Passage(PASSAGES[2].text, id="copy")]) == (2, 0)
    assert third.cache is not None
    assert third.cache.invalidate("copy") == 1
    assert third.cache.invalidate(["copy", "2"]) == 0
    assert ask(third) == (4, 1)
    assert third.cache.invalidate("2") == 1, "the marker of an entry that came again"
    assert third.cache.invalidate(third.cache.digests("3"), every_tenant=True) == 1
    third.cache.clear()
    assert ask(machine(place)) == (0, 5)


def test_what_came_is_on_disk_as_well_and_reads_need_no_listing(tmp_path: Path) -> None:
    place = {"shared": fresh(), "path": tmp_path / "w"}
    ask(machine({"shared": place["shared"]}))
    lm = machine(place, memory=None)
    told: list[str] = []
    between(lm.cache, calls(told))
    assert [ask(lm), ask(lm)] == [(5, 0), (5, 0)]
    assert set(told) == {"cat_file"}
    assert len(told) == 5, "afterwards they are on disk"
    told.clear()
    assert ask(lm, [Passage("Something new.", id="new")]) == (1, 1)
    assert lm.cache is not None
    lm.cache.stats()
    lm.cache.metrics()
    assert set(told) == {"cat_file", "pipe_file"}


def test_tenants_are_apart_by_key_and_if_wanted_by_folder() -> None:
    for apart in (False, True):
        url = fresh()
        lm = machine({"shared": url, "shared_apart": apart})
        assert lm.cache is not None
        ours, theirs = (lm.with_cache(lm.cache.tenant(name)) for name in ("ours", "theirs"))
        assert [ask(ours), ask(theirs), ask(ours)] == [(0, 5), (0, 5), (5, 0)]
        operator = PassageCache(None, shared=url)
        assert operator.shared is not None
        assert operator.shared.contents()[0] == 10
        assert operator.verify() == (10, 0)
        assert ours.cache is not None
        assert ours.cache.shared is not None
        # What an operator names by a tenant's folder is that tenant's alone.
        folder = shared.SharedTier(ours.cache.shared.url)
        assert folder.contents()[0] == (5 if apart else 10)
        if apart:
            folder.clear()
            assert operator.shared.contents()[0] == 5
        digests = ours.cache.digests("1")
        assert operator.invalidate(digests, every_tenant=True) == (0 if apart else 1)
        assert theirs.cache is not None
        assert theirs.cache.invalidate("1") == 1
        assert operator.shared.contents()[0] == (4 if apart else 8)


def test_entries_go_by_age_and_when_their_time_is_up(
    monkeypatch: pytest.MonkeyPatch, place: dict[str, Any]
) -> None:
    lm = machine(place, ttl=1000)
    assert ask(lm) == (0, 5)
    assert lm.cache is not None
    cache, now = lm.cache, time.time()
    assert [cache.prune(), cache.prune(older_than_s=3600)] == [0, 0]
    assert ask(machine(place)) == (5, 0)
    monkeypatch.setattr(time, "time", lambda: now + 1001)
    late = machine(place)
    assert ask(late) == (0, 5), "what has expired is a miss, and is written anew"
    assert counted(late).expired == 5
    assert ask(machine(place)) == (5, 0)
    assert cache.prune() == 5, "in this machine's memory"
    assert cache.prune(older_than_s=-3600) == 5
    assert cache.shared is not None
    assert cache.shared.contents() == (0, 0)


def test_damaged_entries_miss_are_replaced_and_found_by_verify(tmp_path: Path) -> None:
    store = tmp_path / "store"
    place = {"shared": store}
    ask(machine(place))
    paths = sorted(store.rglob("*.safetensors"))
    paths[0].write_bytes(paths[0].read_bytes()[:-1] + b"?")
    paths[1].write_bytes(paths[2].read_bytes())
    lm = machine(place)
    assert ask(lm) == (3, 2)
    assert counted(lm).quarantined == 2
    assert ask(machine(place)) == (5, 0)
    paths[0].write_bytes(b"")
    for marker in (store / "labels").rglob("*"):
        if marker.is_file():
            marker.unlink()
    foreign = store / "entries" / "notes.txt"
    foreign.write_text("not ours")
    operator = PassageCache(None, shared=store)
    assert operator.verify() == (5, 1)
    assert operator.verify() == (4, 0)
    assert operator.invalidate([str(number) for number in range(4)]) >= 3, "markers are back"
    operator.clear()
    assert [path for path in store.rglob("*") if path.is_file()] == [foreign]


def test_files_half_written_are_never_read_and_go(tmp_path: Path) -> None:
    tier = filled(str(tmp_path), NUMBERS)
    told: list[str] = []

    def cut(name: str, plain: Any, *given: Any, **options: Any) -> Any:
        told.append(name)
        if name == "pipe_file" and given[1]:
            plain(given[0], given[1][:100])
            raise OSError(28, "No space left on device")
        return plain(*given, **options)

    between(tier, cut)
    assert not tier.put(key_of(9), labelled(9))
    assert not list(tmp_path.rglob("*.tmp"))
    assert not tier.get_many([key_of(9)])
    assert tier.stats().failed == 1
    left = tmp_path / "entries" / "ab" / f"{key_of(9)}.safetensors.{'a' * 16}.tmp"
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(b"half")
    os.utime(left, (time.time() - 90_000,) * 2)
    assert tier.prune(time.time()) == 0
    assert not left.exists()
    assert tier.contents()[0] == len(NUMBERS)


# Slow stores, and those that fail


def slow(seconds: float) -> Any:
    def act(name: str, plain: Any, *given: Any, **options: Any) -> Any:
        if name == "cat_file":
            time.sleep(seconds)
        return plain(*given, **options)

    return act


def test_a_request_waits_no_longer_than_encoding_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rag_windows.cache.passage_cache._LEAST_WAIT_S", 0.01)
    place: dict[str, Any] = {"shared": fresh(), "shared_wait": None}
    ask(machine(place))
    lm = machine(place)
    assert lm.cache is not None
    between(lm.cache, slow(5.0))
    lm.generate("Warm?", ["up"], max_new_tokens=1)
    begun = time.perf_counter()
    assert ask(lm) == (1, 4)
    assert time.perf_counter() - begun < 4
    assert counted(lm).late == 6
    # One that encodes slowly waits longer.
    patient = machine(place)
    assert patient.cache is not None
    between(patient.cache, slow(0.3))
    access = patient.engine.encoder.access
    assert access is not None
    fingerprint = access.model.fingerprint()
    assert fingerprint is not None
    patient.cache.measured(fingerprint, 1, 1000.0)  # too little to tell
    patient.cache.measured(fingerprint, 1000, 10_000.0)
    assert ask(patient) == (5, 0)


def test_requests_for_the_same_windows_read_them_once() -> None:
    place = {"shared": fresh()}
    ask(machine(place))
    lm = machine(place)
    told: list[str] = []

    def act(name: str, plain: Any, *given: Any, **options: Any) -> Any:
        told.append(name)
        time.sleep(0.05)
        return plain(*given, **options)

    between(lm.cache, act)
    wanted = expected(PASSAGES)
    with ThreadPoolExecutor(8) as threads:
        asked = [
            threads.submit(lm.generate, "What?", PASSAGES, max_new_tokens=2) for _ in "12345678"
        ]
        assert all(tuple(one.result(60).token_ids) == wanted for one in asked)
    assert told == ["cat_file"] * 5


def test_who_waits_for_the_store_keeps_no_other_row_of_the_batch_waiting() -> None:
    place = {"shared": fresh()}
    ask(machine(place))
    lm = machine(place)
    lm.generate("What?", [PASSAGES[0]], max_new_tokens=1)
    answered, asked_store = threading.Event(), threading.Event()

    def until_answered(name: str, plain: Any, *given: Any, **options: Any) -> Any:
        asked_store.set()
        assert answered.wait(30)
        return plain(*given, **options)

    between(lm.cache, until_answered)
    with lm.scheduler() as scheduler:
        waiting = scheduler.submit({"query": "What?", "passages": PASSAGES, "max_new_tokens": 2})
        assert asked_store.wait(30)
        other = scheduler.submit({"query": "Who?", "passages": PASSAGES[:1], "max_new_tokens": 20})
        assert other.result(15).token_ids
        assert not waiting.done()
        answered.set()
        assert tuple(waiting.result(30).token_ids) == expected(PASSAGES)


def test_what_is_forgotten_while_it_is_read_does_not_stay() -> None:
    """Both windows are read, then forgotten, and only then do they come to the request."""
    place = {"shared": fresh()}
    ask(machine(place))
    lm = machine(place)
    assert lm.cache is not None
    cache, both = lm.cache, threading.Barrier(3)
    digests = cache.digests(["1", "2"])
    keys = shared.SharedTier(place["shared"]).keys_with(digests)
    assert len(keys) == 2

    def forgotten_on_the_way(name: str, plain: Any, *given: Any, **options: Any) -> Any:
        found = plain(*given, **options)
        if name == "cat_file" and any(key in given[0] for key in keys):
            both.wait(30)
            both.wait(30)
        return found

    between(cache, forgotten_on_the_way)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask, lm)
        both.wait(30)
        assert cache.invalidate(["1", "2"]) == 2
        both.wait(30)
        assert asked.result(30) == (5, 0)
    assert cache.memory is not None
    assert cache.memory.keys_with(digests) == []
    assert shared.SharedTier(place["shared"]).keys_with(digests) == []


def test_reads_run_beside_each_other() -> None:
    tier = filled(fresh(), range(16))
    between(tier, slow(0.3))
    begun = time.perf_counter()
    assert len(tier.get_many([key_of(number) for number in range(16)])) == 16
    assert time.perf_counter() - begun < 3


def test_a_store_that_is_gone_costs_next_to_nothing(caplog: pytest.LogCaptureFixture) -> None:
    place = {"shared": fresh()}
    ask(machine(place))
    lm = machine(place)
    told: list[str] = []

    def dead(name: str, plain: Any, *given: Any, **options: Any) -> Any:
        told.append(name)
        raise ConnectionRefusedError("nobody there")

    between(lm.cache, dead)
    with caplog.at_level(logging.WARNING, "rag_windows"):
        for number in range(10):
            assert ask(lm, [Passage(f"New {number}.", id=str(number))])[1] >= 1
    assert told.count("cat_file") <= 4, "three requests, then a pause"
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2, "one of reading, one of writing"
    assert "nobody there" in warnings[0]
    assert counted(lm).failed >= 3
    assert counted(lm).refused > 0
    assert lm.cache is not None
    with pytest.raises(CacheError, match="nobody there"):
        lm.cache.invalidate("1")
    assert ask(lm) == (1, 4), "the prefix is here; what was invalidated is not"


@pytest.mark.slow
def test_a_store_that_is_quick_with_what_it_lacks_alone_is_left_alone() -> None:
    tier = filled(fresh(), range(3))
    between(tier, slow(0.5))
    for number in range(3):
        assert not tier.get_many([key_of(100 + number)])
        assert not tier.get_many([key_of(number)], within_s=0.01)
    assert tier.reading([key_of(0)], 1.0) is None


def test_pauses_grow_and_end_when_the_store_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pauses = remote.Pauses()
    for strike in range(3):
        assert pauses.may()
        assert pauses.failed() == (strike == 2)
    lengths = []
    for _ in range(8):
        begun = now
        while not pauses.may():
            now += 0.5
        assert not pauses.may(), "one alone tries"
        assert pauses.failed()
        lengths.append(now - begun)
    assert lengths == [1, 2, 4, 8, 16, 32, 60, 60]
    now += 60
    assert pauses.may()
    pauses.well()
    assert pauses.may()
    assert pauses.may()


@pytest.mark.slow
def test_a_call_that_hangs_keeps_nobody() -> None:
    tier = filled(fresh(), NUMBERS)
    stuck = threading.Event()

    def hang(name: str, plain: Any, *given: Any, **options: Any) -> Any:
        if name == "cat_file" and key_of(2) in given[0]:
            stuck.wait(30)
        return plain(*given, **options)

    between(tier, hang)
    begun = time.perf_counter()
    found = tier.get_many([key_of(number) for number in NUMBERS], within_s=1.5)
    assert time.perf_counter() - begun < 10
    assert set(found) == {key_of(number) for number in NUMBERS if number != 2}
    assert tier.stats().late == 1
    stuck.set()


def test_a_store_without_room_or_that_must_not_be_written_is_read() -> None:
    place = {"shared": fresh()}
    ask(machine(place))
    for error in (OSError(28, "No space left on device"), PermissionError("read only")):
        lm = machine(place)
        between(lm.cache, failing(error, "pipe_file"))
        assert ask(lm, [*PASSAGES, Passage(f"New: {error}.")]) == (5, 1)
        assert counted(lm).failed == 1
        assert ask(machine(place)) == (5, 0)


def test_a_child_process_reads_with_connections_of_its_own(tmp_path: Path) -> None:
    tier = filled(str(tmp_path), NUMBERS)
    before = tier.remote.system

    def child() -> bool:
        found = tier.get_many([key_of(number) for number in NUMBERS])
        fine = tier.remote.system is not before and tier.put(key_of(7), labelled(7))
        return fine and all(right(found[key_of(number)], number) for number in NUMBERS)

    assert end_of(in_child(child)) == 0
    assert tier.get_many([key_of(7)])


def test_labels_from_a_store_name_no_paths(tmp_path: Path) -> None:
    tier = shared.SharedTier(str(tmp_path / "store"))
    tier.add_labels(key_of(1), ["../../escaped", "/etc/x", *labels("fine")])
    assert [path.name for path in (tmp_path / "store" / "labels").iterdir()] == labels("fine")
    assert not (tmp_path / "escaped").exists()


def test_the_warmed_store_serves_others_and_is_not_encoded_again(place: dict[str, Any]) -> None:
    first, second = machine(place), machine(place)
    assert first.warm(PASSAGES).encoded == 4
    warmed = second.warm(PASSAGES)
    assert (warmed.encoded, warmed.present) == (0, 4)


def test_options_that_make_no_sense() -> None:
    for url, options in (
        ("nonsense://bucket", {}),
        ("memory://x", {"shared_wait": 0}),
        ("memory://x", {"shared_wait": -1.0}),
    ):
        with pytest.raises(InputError):
            PassageCache("1MB", shared=url, **options)
    with pytest.raises(InputError, match="shared="):
        PassageCache(None)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(
        MissingExtraError, match=r"needs gcsfs,.*run: pip install .*shared.* gcsfs$"
    ):
        PassageCache("1MB", shared="gs://bucket/prefix")
