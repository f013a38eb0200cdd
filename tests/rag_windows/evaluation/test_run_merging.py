"""Shards hold whole conversations, and put together they are the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rag_windows.errors import DataError, InputError
from rag_windows.evaluation.folder import RunFolder
from rag_windows.evaluation.merging import merge
from rag_windows.evaluation.options import RunOptions
from rag_windows.evaluation.record import Record, Speed
from rag_windows.evaluation.shard import Shard
from tests.rag_windows import small
from tests.rag_windows.evaluation.invented import arms_of, begin, go, invented, untimed

TASK = invented(4)
ARMS = arms_of("sequential", "ape", depths=(2,))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = []
    for number in (1, 2, 3):
        path = tmp_path_factory.mktemp(f"shard{number}")
        go(path, small.lm(), TASK, ARMS, shard=f"{number}/3")
        made.append(path)
    return made


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_shards_are_whole_conversations_and_everything(count: int) -> None:
    parts = [Shard(number, count).pick(TASK.examples) for number in range(1, count + 1)]
    keys = [one.key for part in parts for one in part]
    assert sorted(keys) == sorted(one.key for one in TASK.examples)
    groups = [{one.group for one in part} for part in parts]
    assert sum(map(len, groups)) == 4
    order = {one.key: number for number, one in enumerate(TASK.examples)}
    for part in parts:
        places = [order[one.key] for one in part]
        assert places == sorted(places)


@pytest.mark.parametrize("text", ["0/3", "4/3", "1/0", "1", "a/b", "1/3/5", "-1/3", "1 / 3"])
def test_other_shards_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"no part"):
        Shard.parse(text)


def test_a_shard_reads_back() -> None:
    assert Shard.parse(str(Shard(2, 5))) == Shard(2, 5)


def test_merged_is_what_one_run_gives(tmp_path: Path, shards: list[Path]) -> None:
    (shards[1] / "source.json").unlink(missing_ok=True)
    (shards[2] / "source.json").write_text('{"data": "dev.json"}')
    with begin(shards[0], small.lm(), TASK, ARMS, shard="1/3") as folder:
        folder.add([Speed("c0-0", "ape@2", 9, (0.5,), (0.25,))])
    go(tmp_path / "one", small.lm(), TASK, ARMS)
    assert merge(tmp_path / "merged", [shards[2], shards[0], shards[1]]) == ()
    merged, one = RunFolder.open(tmp_path / "merged"), RunFolder.open(tmp_path / "one")
    assert merged.manifest.settings == one.manifest.settings
    for arm in ARMS:
        found, expected = merged.records(arm.name), one.records(arm.name)
        assert list(found) == [example.key for example in TASK.examples]
        assert [untimed(r) for r in found.values()] == [untimed(r) for r in expected.values()]
        for record in found.values():
            assert all(merged.text(passage.text) for passage in record.passages)
    assert merged.speeds("ape@2")["c0-0"].cold_s == (0.5,)
    assert (tmp_path / "merged" / "source.json").read_text() == '{"data": "dev.json"}'
    before = (tmp_path / "merged" / "records.jsonl").read_bytes()
    merge(tmp_path / "merged", shards)
    assert (tmp_path / "merged" / "records.jsonl").read_bytes() == before


def test_a_missing_shard_is_named_and_may_be_allowed(tmp_path: Path, shards: list[Path]) -> None:
    out = tmp_path / "out"
    with pytest.raises(InputError, match=r"Missing: shard 2/3\. .*--allow-missing"):
        merge(out, [shards[0], shards[2]])
    assert not out.exists()
    assert merge(out, [shards[0], shards[2]], allow_missing=True) == ("Missing: shard 2/3.",)
    asked = Shard(2, 3).pick(TASK.examples)
    assert go(out, small.lm(), TASK, ARMS).answered == len(asked) * len(ARMS)
    merge(out, shards)


def test_an_unfinished_shard_is_told(tmp_path: Path, shards: list[Path]) -> None:
    begin(tmp_path / "b", small.lm(), TASK, ARMS, shard="2/3").close()
    folders = [shards[0], tmp_path / "b", shards[2]]
    with pytest.raises(InputError, match=r"sequential@2 lacks 2 answers, such as to 'c1-0'"):
        merge(tmp_path / "out", folders)
    assert len(merge(tmp_path / "out", folders, allow_missing=True)) == 2


def test_an_answer_stands_before_an_error(tmp_path: Path, shards: list[Path]) -> None:
    for name in ("a", "b"):
        with begin(tmp_path / name, small.lm(), TASK, ARMS, shard="1/3") as folder:
            folder.add([Record(k, a.name, "", error="x") for k in ("c0-0",) for a in ARMS])
    with begin(tmp_path / "b", small.lm(), TASK, ARMS, shard="1/3") as folder:
        folder.add([Record("c0-0", arm.name, "yes") for arm in ARMS])
    both = [tmp_path / "a", tmp_path / "b", *shards[1:]]
    first = merge(tmp_path / "out", [both[0], *both[2:]], allow_missing=True)
    assert "2 questions have an error instead of an answer." in first
    merge(tmp_path / "out", both, allow_missing=True)
    assert RunFolder.open(tmp_path / "out").records("ape@2")["c0-0"].answer == "yes"


def test_answers_that_differ_are_refused(tmp_path: Path, shards: list[Path]) -> None:
    with begin(tmp_path / "a", small.lm(), TASK, ARMS, shard="1/3") as folder:
        folder.add([Record("c0-0", "ape@2", "something else")])
    with pytest.raises(DataError, match="answer 'c0-0' differently with ape@2"):
        merge(tmp_path / "out", [tmp_path / "a", *shards])


def test_folders_that_do_not_belong_together(tmp_path: Path, shards: list[Path]) -> None:
    out = tmp_path / "out"
    with pytest.raises(InputError, match="Nothing to merge"):
        merge(out, [])
    with pytest.raises(InputError, match="named twice"):
        merge(out, [shards[0], shards[0]])
    with pytest.raises(InputError, match="into itself"):
        merge(shards[0], shards)
    begin(tmp_path / "whole", small.lm(), TASK, ARMS).close()
    with pytest.raises(InputError, match="a whole run"):
        merge(out, [shards[0], tmp_path / "whole"])
    begin(tmp_path / "half", small.lm(), TASK, ARMS, shard="2/2").close()
    with pytest.raises(InputError, match="1/3 and 2/2"):
        merge(out, [shards[0], tmp_path / "half"])
    other = RunOptions("Other.", 4)
    begin(tmp_path / "other", small.lm(), TASK, ARMS, shard="2/3", options=other).close()
    with pytest.raises(InputError, match=r"prefix is 'Answer\.' in 1/3 and 'Other\.' in 2/3"):
        merge(out, [shards[0], tmp_path / "other"])
    with pytest.raises(DataError, match=r"no manifest\.json"):
        merge(out, [tmp_path / "nothing"])
    assert not out.exists()
