"""The cache as users hold it: options, tenants, forgetting, warming, files of older versions."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest

from rag_windows import (
    CacheError,
    InputError,
    NonFiniteError,
    Passage,
    PassageCache,
    WindowedLM,
)
from rag_windows.integration import labels_of
from tests.rag_windows import small

PASSAGES = [
    Passage("The first.", id="one"),
    Passage("The second.", id="two"),
    Passage("The third.", id="report#3", metadata={"source": "report.txt"}),
]


def model(cache: PassageCache, **options: Any) -> WindowedLM:
    return WindowedLM(small.model(), small.tokenizer(), cache=cache, **options)


def ask(lm: WindowedLM, passages: Any = PASSAGES) -> tuple[int, int]:
    """Hits and misses of one question, the prefix among them."""
    assert lm.cache is not None
    before = lm.cache.stats()
    lm.generate("What?", passages, max_new_tokens=1)
    lm.cache.flush()
    after = lm.cache.stats()
    return after.hits - before.hits, after.misses - before.misses


def test_windows_survive_the_process_that_made_them_and_stay_in_memory(tmp_path: Path) -> None:
    with PassageCache(path=tmp_path / "w", memory="1MB") as cache:
        assert ask(model(cache)) == (0, 4)
        assert cache.verify() == (4, 0)
    with PassageCache(path=tmp_path / "w", memory=None) as cache:
        assert ask(model(cache)) == (4, 0)
        assert list(cache.stats().tiers) == ["disk"]
    with PassageCache(path=tmp_path / "w") as cache:
        lm = model(cache)
        assert ask(lm) == ask(lm) == (4, 0)
        assert cache.stats().tiers["disk"].hits == 4
        cache.clear()
        assert ask(lm) == (0, 4)


def test_checking_a_folder_keeps_windows_of_every_form(tmp_path: Path) -> None:
    for form in ("as computed", "int8"):
        with PassageCache(path=tmp_path / "w", store=form) as cache:
            assert ask(model(cache)) == (0, 4)
    with PassageCache(path=tmp_path / "w") as cache:
        assert cache.verify() == (8, 0)


@pytest.mark.parametrize("memory", ["1MB", None], ids=["memory", "disk"])
def test_a_store_of_8_bits_holds_the_prefix_as_computed(tmp_path: Path, memory: Any) -> None:
    """It is found again, after a restart as well, and answers are those of the first time."""
    where: dict[str, Any] = {"memory": memory, "path": tmp_path / "w", "store": "int8"}
    with PassageCache(**where) as cache:
        lm = model(cache)
        assert ask(lm) == (0, 4)
        assert ask(lm) == (4, 0)
        made = [lm.generate("What?", PASSAGES, max_new_tokens=4)]
    with PassageCache(**where) as cache:
        assert ask(model(cache)) == (4, 0)
        made += [model(cache).generate("What?", PASSAGES, max_new_tokens=4) for _ in range(2)]
    with PassageCache("1MB", store="int8") as cache:
        made.append(model(cache).generate("What?", PASSAGES, max_new_tokens=4))
    for one in made[1:]:
        assert one.token_ids == made[0].token_ids
        assert one.citations == made[0].citations


def test_the_salt_is_no_part_of_a_request() -> None:
    """Nothing that a request carries reaches it."""
    lm = model(PassageCache("1MB", salt="ours"))
    with pytest.raises(InputError, match="salt"):
        lm.generate("What?", PASSAGES, salt="theirs", max_new_tokens=1)
    with pytest.raises(InputError, match="salt"):
        lm.generate("What?", [{"text": "x", "salt": "theirs"}])


def test_equal_texts_are_forgotten_by_any_of_their_ids(tmp_path: Path) -> None:
    """Also by an id that another process noted, after the disk has given the window up."""
    with PassageCache("1MB", path=tmp_path / "w") as cache:
        ask(model(cache))
        assert ask(model(cache), [Passage("The first.", id="copy")]) == (2, 0)
        with PassageCache("1MB", path=tmp_path / "w") as other:
            assert ask(model(other)) == (4, 0)
            assert other.disk is not None
            assert other.disk.remove(other.disk.keys_with(other.digests("copy"))) == 1
            assert other.invalidate("copy") == 1
        assert cache.invalidate("copy") == 1
        assert cache.invalidate("one") == 0


def test_what_memory_holds_is_told_by_its_content(tmp_path: Path) -> None:
    """A fleet's router looks for passages where they are resident: each tenant for its own."""
    cache = PassageCache("1MB", path=tmp_path / "w")
    theirs = cache.tenant("theirs")
    assert cache.resident() == set()
    ask(model(cache))
    ask(model(theirs), [Passage("The first.", id="another")])
    ours = {*cache.digests([labels_of(one)[0] for one in PASSAGES])}
    told = ours | {*theirs.digests(labels_of(PASSAGES[0])[0])}
    assert len(told) == 4
    assert cache.resident() == theirs.resident() == told
    cache.invalidate("two")
    assert cache.resident() == told - {*cache.digests(labels_of(PASSAGES[1])[0])}
    cache.flush()
    with PassageCache("1MB", path=tmp_path / "w") as later:
        assert later.resident() == set()  # on disk is not resident
        ask(model(later), [Passage("The third.", title=None, id="else")])
        assert later.resident() == {*cache.digests(labels_of(PASSAGES[2])[0])}


@pytest.mark.parametrize("how", ["clear", "invalidate", "remove"])
def test_what_is_read_from_disk_while_it_is_forgotten_does_not_stay(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PassageCache("1MB", path=tmp_path / "w") as cache:
        ask(model(cache), PASSAGES[:1])
        assert cache.disk is not None
        (key,) = cache.disk.keys_with(cache.digests("one"))
        name = "clear" if how == "clear" else "remove"
        original = getattr(cache.disk, name)
        read: list[int] = []

        def late(*arguments: Any) -> Any:
            # Memory is through already, the disk is not.
            read.append(len(cache.from_disk([key])))
            return original(*arguments)

        monkeypatch.setattr(cache.disk, name, late)
        {
            "clear": cache.clear,
            "invalidate": lambda: cache.invalidate("one"),
            "remove": lambda: cache.remove([key]),
        }[how]()
        assert read[0] == 1
        assert key not in cache


def test_entries_whose_time_is_up_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PassageCache("1MB", ttl=1000)
    lm = model(cache)
    assert [ask(lm), ask(lm), cache.prune()] == [(0, 4), (4, 0), 0]
    later = time.time() + 1001
    monkeypatch.setattr(time, "time", lambda: later)
    assert ask(lm) == (0, 4)


def test_options_that_make_no_sense(tmp_path: Path) -> None:
    wrong: list[dict[str, Any]] = [{"memory": None}, {"ttl": 0}, {"ttl": -1.0}]
    for options in (*wrong, {"store": "int4"}, {"salt": ""}, {"salt": 5}):
        with pytest.raises(InputError):
            PassageCache(**options)
    assert PassageCache.of(None) is PassageCache.of(False) is None
    with pytest.raises(InputError, match="PassageCache"):
        PassageCache.of("folder")  # type: ignore[arg-type] # on purpose
    with PassageCache.default(tmp_path / "w") as made:
        assert set(made.stats().tiers) == {"memory", "disk"}
        assert made.path == tmp_path / "w"
    with pytest.raises(CacheError, match="disk"):
        PassageCache("1MB").verify()


def test_what_is_no_number_is_an_error_that_names_the_passage() -> None:
    broken = copy.deepcopy(small.model())
    odd = small.tokenizer().encode("~", add_special_tokens=False)[0]
    broken.get_input_embeddings().weight.data[odd, 0] = float("nan")
    cache = PassageCache("1MB")
    lm = WindowedLM(broken, small.tokenizer(), cache=cache)
    with pytest.raises(NonFiniteError, match=r"Passage 1 \('bad'\).*not stored"):
        lm.generate("What?", [PASSAGES[0], Passage("It is ~.", id="bad"), PASSAGES[1]])
    assert cache.stats().tiers["memory"].entries == 3, "the sound ones and the prefix are kept"
    assert ask(lm, PASSAGES[:2]) == (3, 0)


def test_warming_is_resumable_and_serves_requests(tmp_path: Path) -> None:
    many = [Passage(f"Number {i}.", id=str(i)) for i in range(70)]
    with PassageCache("1MB", path=tmp_path / "w") as cache:
        lm = model(cache)

        def stop(done: int, total: int | None) -> None:
            assert total == 70
            if done > 40:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            lm.warm(many, prefix="Be brief.", on_warmed=stop)
        warmed = lm.warm(many, prefix="Be brief.")
        assert (warmed.passages, warmed.encoded, warmed.present) == (70, 6, 64)
        hits = lm.generate("Who?", many[60:66], prefix="Be brief.", max_new_tokens=1)
        assert hits.usage.cached_tokens > sum(len(window.ids) for window in hits.windows)
        assert cache.stats().tiers["disk"].entries == 71
        assert lm.warm(iter(many), prefix="Be brief.").encoded == 0


def test_aligned_windows_are_warmed_and_found_beside_any_others() -> None:
    many = ["It is here.", "That was said there, a long time ago, by somebody.", "No."]
    lm = model(PassageCache("1MB"), method="aligned:tokens=64+ape")
    assert lm.warm(many).encoded == 3
    for some in (many, many[::-1], many[:1], many[1:]):
        made = lm.generate("What?", some, max_new_tokens=2)
        assert (made.usage.cached_windows, made.usage.windows) == (len(some), len(some))


def test_what_can_not_be_warmed() -> None:
    with pytest.raises(InputError, match="cache=True"):
        small.lm().warm(PASSAGES)
    for options in (
        {"header": "number"},
        {"method": "sequential"},
        {"method": "structured-prompting"},
    ):
        with pytest.raises(InputError, match=next(iter(options.values()))):
            model(PassageCache("1MB"), **options).warm(PASSAGES)
    with pytest.raises(InputError, match="list"):
        model(PassageCache("1MB")).warm("one text")


@pytest.mark.gpu
@pytest.mark.parametrize("store", ["as computed", "int8"])
def test_a_device_tier_and_pinned_memory_on_cuda(store: str, tmp_path: Path) -> None:
    on_device = PassageCache("50MB", device_bytes="50MB", path=tmp_path / "w", store=store)
    lm = WindowedLM(copy.deepcopy(small.model()).cuda(), small.tokenizer(), cache=on_device)
    cold = lm.generate("What?", PASSAGES, max_new_tokens=4)
    assert lm.generate("What?", PASSAGES, max_new_tokens=4).token_ids == cold.token_ids
    on_device.flush()
    tiers = on_device.stats().tiers
    assert tiers["device"].hits == tiers["memory"].entries == tiers["disk"].entries == 4
    for other in (
        PassageCache("50MB", store=store),
        PassageCache(None, path=tmp_path / "w", store=store),
    ):
        lm = lm.with_cache(other)
        lm.generate("What?", PASSAGES[:2], max_new_tokens=4)
        other.flush()
        mixed = lm.generate("What?", PASSAGES, max_new_tokens=4)
        assert mixed.token_ids == cold.token_ids
        assert mixed.usage.cached_tokens > 0
