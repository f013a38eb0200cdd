"""Corpora encoded and benchmarks asked over processes of Ray's: the same as by one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rag_windows import DocumentError, InputError, ModelLoadError, PassageCache, WindowedLM
from rag_windows_eval import run as runs
from rag_windows_retrievers import load_documents, split_documents
from rag_windows_server.fleet import FleetOptions, data
from tests.blackbox import conftest as blackbox
from tests.blackbox.conftest import Run
from tests.blackbox.test_evaluation import inscit_data

small_folder, run = blackbox.small_folder, blackbox.run

pytestmark = [pytest.mark.fleet, pytest.mark.usefixtures("cluster")]

FILES, LINES = 16, 640
PASSAGES = FILES + LINES
MANY = 4000
"""Passages that take long enough to be interrupted."""


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of which one line can't be read."""
    folder = tmp_path_factory.mktemp("docs")
    for number in range(FILES):
        (folder / f"{number}.md").write_text(f"# Lighthouse {number}\n\nIt burns oil. {number}")
    told = "It takes on board what stands at the pier, and it calls at every island. " * 3
    lines = [{"text": f"Ferry {n} leaves at {n}. {told}", "id": f"f{n}"} for n in range(LINES)]
    text = "\n".join([*map(json.dumps, lines), "nothing"])
    (folder / "ferries.jsonl").write_text(text)
    return folder


Options = Callable[..., FleetOptions]


@pytest.fixture
def options(small_folder: Path, docs: Path, tmp_path: Path) -> Options:
    """Of two processes that encode these files into a folder."""

    def make(**more: Any) -> FleetOptions:
        given = {"model": str(small_folder), "docs": (str(docs),), "shared": str(tmp_path / "w")}
        return FleetOptions.model_validate({**given, "replicas": 2, **more})

    return make


def workers(title: str) -> Iterator[int]:
    """Processes of this test's Ray whose titles hold a word; others may run on the machine."""
    stats = {}
    for one in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (one / "stat").read_text().rpartition(")")[2].split()
            told = (one / "cmdline").read_bytes().decode(errors="replace")
            if words[0] != "Z":
                stats[int(one.name)] = (int(words[1]), told)
    for number, (parent, told) in stats.items():
        above = parent
        while above in stats and above != os.getpid():
            above = stats[above][0]
        if above == os.getpid() and "ray" in told and title in told:
            yield number


def test_a_corpus_is_encoded_once_whoever_dies(
    options: Options, docs: Path, tmp_path: Path
) -> None:
    told, killed = list[int](), list[int]()

    def count(done: int, _: object) -> None:
        told.append(done)
        if not killed:
            killed.append(next(workers("ray::Model")))
            os.kill(killed[0], signal.SIGKILL)

    first = data.warm(options(), prefix="Answer.", on_warmed=count)
    assert killed
    assert first.warmed.passages == PASSAGES
    assert told == sorted(told)
    assert len(told) > 3
    assert first.unwritten == 0
    (bad,) = first.skipped
    assert bad.label.endswith(f"/ferries.jsonl:{LINES + 1}")
    passages = split_documents(load_documents([docs], strict=False).documents)
    with PassageCache(shared=str(tmp_path / "w")) as cache:
        lm = WindowedLM.from_pretrained(str(options().model), cache=cache)
        here = lm.warm(passages, prefix="Answer.")
        asked = lm.generate("When?", passages[:3], prefix="Answer.", max_new_tokens=2)
    assert (here.encoded, here.present) == (0, PASSAGES)
    assert asked.usage.cached_windows == 3
    alone = WindowedLM.from_pretrained(str(options().model))
    expected = alone.generate("When?", passages[:3], prefix="Answer.", max_new_tokens=2)
    assert asked.text == expected.text


def test_an_interrupted_command_goes_on(options: Options, tmp_path: Path, cluster: str) -> None:
    docs = tmp_path / "many.jsonl"
    lines = [{"text": f"Ferry {n} leaves at {n}. " * 9, "id": f"f{n}"} for n in range(MANY)]
    docs.write_text("\n".join(map(json.dumps, lines)))
    made, store = options(replicas=1, docs=(str(docs),)), tmp_path / "w" / "entries"
    given = ["--docs", docs, "--shared", tmp_path / "w", "--model", made.model, "--replicas", 1]
    given += ["--system", ""]  # as the options below have it
    command = [sys.executable, "-m", "rag_windows.cli", "warm", *given, "--ray", cluster]
    before = {*workers("ray::Model")}
    # A shell's background job ignores SIGINT, and so would what it starts.
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen([str(word) for word in command], stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, ours)
    while len(list(store.glob("*/*"))) < 64:
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "Traceback" not in told
    while {*workers("ray::Model")} - before:
        time.sleep(0.1)
    written = len(list(store.glob("*/*.safetensors")))
    again = data.warm(made).warmed
    assert again.passages == MANY
    assert written - 1 <= again.present <= written, "the prefix is an entry, too"
    assert 0 < again.encoded == MANY - again.present


def test_what_can_not_be_warmed_is_refused(options: Options, tmp_path: Path) -> None:
    (tmp_path / "empty.md").write_text(" ")
    with pytest.raises(DocumentError, match=r"No text found in .*empty.md"):
        data.warm(options(docs=(str(tmp_path / "empty.md"),)))
    with pytest.raises(DocumentError, match=rf"ferries.jsonl:{LINES + 1}: "):
        data.warm(options(), strict=True)
    with pytest.raises(InputError, match="need a store"):
        data.warm(options(shared=None))


def test_errors_of_processes_are_raised_here(options: Options, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"^The model folder '.*nowhere' does not exist"):
        data.warm(options(model=str(tmp_path / "nowhere")))


def lengths(lm: WindowedLM, item: int) -> Sequence[tuple[int, int]]:
    """An item, and by which process it was answered."""
    time.sleep(0.1)
    return [(item, os.getpid())]


def test_questions_are_asked_when_a_model_is_free_and_again_when_it_dies(
    options: Options,
) -> None:
    models, taken = data.Models(options()), list[int]()

    def items() -> Iterator[int]:
        for item in range(9):
            taken.append(item)
            yield item

    answers = models.map(lengths, items())
    next(answers)
    assert len(taken) == 3
    assert len(list(answers)) == 8
    names = models.each(lambda lm: os.getpid())
    assert len(set(names)) == 2
    found = list[tuple[int, int]]()
    for answer in models.map(lengths, range(30)):
        if len(found) == 5:
            os.kill(names[0], signal.SIGKILL)
        found.append(answer)
    assert sorted(item for item, _ in found) == list(range(30))
    assert len({process for _, process in found}) == 3, "another one is in its place"


def test_caches_of_one_machine_share_its_free_memory(options: Options) -> None:
    assert data._divided(options(cache_memory="50%")).cache_memory == "25.0000%"
    assert data._divided(options(cache_memory="1GiB")).cache_memory == "1GiB"


@pytest.fixture
def evaluated(run: Run, small_folder: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """What `eval inscit` writes into a folder."""
    (tmp_path / "dev.json").write_text(json.dumps(inscit_data()))

    def go(name: str, *more: str) -> dict[str, Any]:
        given = ("--data", tmp_path / "dev.json", "--model", small_folder, "--top-k", "1,2")
        folder = tmp_path / name
        done = run("eval", "inscit", *given, "--max-new-tokens", "3", "--out", folder, *more)
        assert done.exit_code == 0, done.stderr
        files = sorted((folder / "predictions").iterdir())
        return {
            "predictions": {one.name: one.read_text() for one in files},
            "scores": json.loads((folder / "scores.json").read_text()),
            "manifest": json.loads((folder / "manifest.json").read_text()),
        }

    return go


def test_an_evaluation_has_the_same_figures(
    evaluated: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    here, there = evaluated("here"), evaluated("there", "--replicas", "2")
    assert len(here["predictions"]) == 6
    assert there["predictions"] == here["predictions"]
    assert there["manifest"] == here["manifest"]
    assert [one["results"] for one in there["scores"]["arms"]] == [
        one["results"] for one in here["scores"]["arms"]
    ]
    folder = runs.RunFolder.open(tmp_path / "here")
    other = runs.RunFolder.open(tmp_path / "there")
    for arm, records in folder.records.items():
        for key, record in records.items():
            assert other.records[arm][key].answer == record.answer
            assert other.records[arm][key].passages == record.passages
    file = tmp_path / "there" / "records.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:7]))
    assert evaluated("there")["predictions"] == here["predictions"], "it goes on without Ray"
    assert len(file.read_text().splitlines()) == len(lines)


def test_models_that_differ_are_refused(
    evaluated: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def each(self: data.Models, function: Callable[..., runs.Described]) -> list[runs.Described]:
        return [runs.Described({"sha256": name}, {}) for name in ("a", "b")]

    monkeypatch.setattr(data.Models, "each", each)
    with pytest.raises(AssertionError, match="different models: sha256 is 'a' there and 'b'"):
        evaluated("differs", "--replicas", "2")


def test_a_cluster_that_is_not_there_is_named() -> None:
    code = (
        "from rag_windows_server.fleet.cluster import cluster\n"
        "with cluster('127.0.0.1:1', 1, 1): pass"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert "There is no cluster of Ray at 127.0.0.1:1" in done.stderr.splitlines()[-1]
