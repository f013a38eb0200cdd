"""The passage cache and the codebook: where they run, who waits for whom, what they keep."""

from __future__ import annotations

import json
import sys
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_windows import InputError, Passage, PassageCache, WindowedLM
from tests.blackbox.conftest import ANSWER, Process, Run
from tests.rag_windows import small

WITHOUT_LOCKS = """
import os, shutil, sys
shutil._use_fd_functions = False  # asked for when it was imported
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel
sys.modules["fcntl"] = None
for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_DIRECTORY", "O_NONBLOCK", "fork", "register_at_fork",
             "geteuid", "preadv", "pwrite", "fchmod", "sysconf"):
    delattr(os, name)
from rag_windows import Passage, PassageCache, WindowedLM
from rag_windows import CacheError
passages = [Passage("Vara Zelmont plays the harp. Vara Zelmont was born in Sulava.", id="one")]
"""
"""What a process on Windows does not have; torch and transformers bring their own ways around."""


@pytest.mark.slow
def test_only_the_disk_tier_needs_file_locks(python: Process, tmp_path: Path) -> None:
    done = python(
        WITHOUT_LOCKS
        + """
for cache in (PassageCache("100MB"), True):
    lm = WindowedLM.from_pretrained("tiny-reader", cache=cache)
    for _ in range(2):
        answer = lm.generate("Where was Vara Zelmont born?", passages)
    print(answer.text, answer.usage.cached_tokens > 0, list(lm.cache.stats().tiers))
for make in (
    lambda: PassageCache(path=sys.argv[0]),
    lambda: PassageCache.default(sys.argv[0]),
    lambda: lm.codebook(path=sys.argv[0]),
):
    try:
        make()
    except CacheError as error:
        print(error)
""".replace("sys.argv[0]", repr(str(tmp_path / "windows")))
    )
    assert done.returncode == 0, done.stderr
    found = done.stdout.splitlines()
    assert found[:2] == [f"{ANSWER} True ['memory']"] * 2
    assert len(found) == 5
    for line in found[2:]:
        assert "file locks" in line
        assert "memory" in line, "what to do instead"
    assert not (tmp_path / "windows").exists()


@pytest.mark.slow
def test_a_stopped_process_stops_no_other_one_that_uses_its_book(
    python: Process, tmp_path: Path
) -> None:
    """A writer is stopped where it puts the book's new file in place, in the midst of a change."""
    done = python(
        """
import os, pathlib, signal, subprocess, sys, time
from rag_windows import CacheError, WindowedLM

def stop(one, other, *rest, **options):
    if str(other).endswith("book.json"):
        os.kill(os.getpid(), signal.SIGSTOP)

book = WindowedLM.from_pretrained("tiny-reader").codebook(path=FOLDER, wait_s=0.5)
if len(sys.argv) > 1:
    os.replace = os.rename = pathlib.Path.replace = pathlib.Path.rename = stop
    book.add([{"id": "other", "text": "Aldan Pellby was born in Birholm."}])
book.add([{"id": "one", "text": "Vara Zelmont was born in Sulava."}])
code = sys.orig_argv[sys.orig_argv.index("-c") + 1]
writer = subprocess.Popen([sys.executable, "-c", code, "writer"])
os.waitpid(writer.pid, os.WUNTRACED)
two = [{"id": "two", "text": "Ilvo Tarrent was born in Merrin."}]
start = time.monotonic()
try:
    book.add(two)
except CacheError as error:
    print(0.4 < time.monotonic() - start < 5, f"process {writer.pid}," in str(error))
    print(error)
print(book.lm.generate("Where was Vara Zelmont born?", book).text)
writer.kill()
writer.wait()
book.add(two)
print(len(book))
""".replace("FOLDER", repr(str(tmp_path / "book"))),
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    timely, message, answer, count = done.stdout.splitlines()
    assert timely == "True True", message
    assert "wait_s" in message
    assert answer == ANSWER
    assert count == "2"


SECRET = "The patient of bed nine has the grey fever."
CASES = [
    Passage(SECRET, id="case-4711#2", title="Grey fever", metadata={"source": "ward/nine.txt"}),
    Passage("The harvest of Merrin was late.", id="harvest"),
]


def hits(lm: WindowedLM, passages: list[Passage] = CASES) -> int:
    """How many of the passages were encoded already; now all are."""
    return lm.warm(passages).present


@pytest.fixture
def tenants(small_lm: WindowedLM, tmp_path: Path) -> tuple[WindowedLM, WindowedLM]:
    """Two tenants that have encoded CASES, on one folder."""
    ours = PassageCache("100MB", path=tmp_path / "windows", salt="ours")
    both = small_lm.with_cache(ours), small_lm.with_cache(ours.tenant("theirs"))
    for lm in both:
        assert [hits(lm), hits(lm)] == [0, 2]
    return both


def test_a_tenant_forgets_its_own_windows_and_no_others(
    tenants: tuple[WindowedLM, WindowedLM],
) -> None:
    ours, theirs = tenants
    assert ours.cache is not None
    assert theirs.cache is not None
    assert theirs.cache.invalidate(["case-4711"]) == 1
    assert theirs.cache.invalidate(["case-4711"]) == 0, "ours does not count"
    assert hits(ours) == 2
    assert hits(theirs) == 1
    assert theirs.cache.tenant("nobody").invalidate(["case-4711", "harvest", "ward/nine.txt"]) == 0
    assert ours.cache.invalidate("ward/nine.txt") == 1
    assert [hits(ours), hits(theirs)] == [1, 2]


def test_an_operator_forgets_by_entry_and_by_digest(
    tenants: tuple[WindowedLM, WindowedLM], run: Run, tmp_path: Path
) -> None:
    ours, theirs = tenants
    assert ours.cache is not None
    assert theirs.cache is not None
    mine, other = (lm.cache.digests(["case-4711"])[0] for lm in tenants if lm.cache is not None)
    assert mine != other
    assert theirs.cache.invalidate([mine], every_tenant=True) == 1
    assert [hits(ours), hits(theirs)] == [1, 2]

    folder = tmp_path / "windows"
    before = len(list((folder / "entries").iterdir()))

    def told(*arguments: str) -> int:
        result = run("cache", "invalidate", *arguments, "--cache-dir", folder, "--json")
        assert result.exit_code == 0, result.stderr
        return int(json.loads(result.stdout)["removed"])

    assert told("case-4711") == 0, "nobody's without a salt"
    assert told(mine, other, "--every-tenant") == 2
    entry = next((folder / "entries").iterdir())
    assert told(entry.stem, "--every-tenant") == 1
    assert len(list((folder / "entries").iterdir())) == before - 3
    refused = run("cache", "invalidate", "case-4711", "--every-tenant", "--cache-dir", folder)
    assert refused.exit_code != 0
    assert "digest" in refused.stderr
    with pytest.raises(InputError, match="salt"):
        ours.cache.invalidate("case-4711", every_tenant=True)


def test_files_hold_no_ids_labels_or_text(
    tenants: tuple[WindowedLM, WindowedLM], tmp_path: Path
) -> None:
    lm = tenants[0]
    assert lm.tokenizer is not None
    ids = lm.tokenizer("grey fever", add_special_tokens=False)["input_ids"]
    told = [
        part.encode()
        for part in ("case-4711", "Grey fever", "grey fever", "nine", "harvest", "Merrin", "ours")
    ]
    told += [array(size, ids).tobytes() for size in "qihH"]
    files = [path for path in (tmp_path / "windows").rglob("*") if path.is_file()]
    assert len(files) >= 6
    for path in files:
        held = str(path.relative_to(tmp_path)).encode() + path.read_bytes()
        for part in told:
            assert part not in held, (path.name, part)


@given(st.text(min_size=1), st.text(min_size=1))
@settings(max_examples=15, deadline=None)
def test_any_id_is_found_again(small_lm: WindowedLM, one: str, two: str) -> None:
    lm = small_lm.with_cache(PassageCache("10MB", salt="ours"))
    assert lm.cache is not None
    passages = [Passage("The first.", id=one), Passage("The second.", metadata={"source": two})]
    hits(lm, passages)
    assert lm.cache.invalidate([one, two]) == 2
    assert hits(lm, passages) == 0


def test_linked_windows_from_disk_are_those_that_were_encoded(
    small_lm: WindowedLM, tmp_path: Path
) -> None:
    """Linking reads token ids, which the files do not hold."""
    answers = [
        small_lm.with_cache(cache).generate("Who?", CASES, method="linked", max_new_tokens=8)
        for cache in (None, *(PassageCache(None, path=tmp_path / "windows") for _ in range(2)))
    ]
    assert answers[2].usage.cached_tokens > answers[1].usage.cached_tokens
    assert len({answer.text for answer in answers}) == 1


FORKING = """
import itertools, os, signal, sys, tempfile, threading
from rag_windows import PassageCache, WindowedLM

def in_child(work):
    "What comes of work in a forked child: True, False, or 'hangs'."

    pid = os.fork()
    if not pid:
        signal.alarm(20)
        right = False
        try:
            right = work()
        finally:
            os._exit(0 if right else 1)
    status = os.waitpid(pid, 0)[1]
    return "hangs" if os.WIFSIGNALED(status) else status == 0

def answer(lm, passages, **options):
    return lm.generate("Who?", passages, max_new_tokens=4, **options).text
"""


@pytest.mark.slow
def test_a_child_does_not_wait_for_threads_of_its_parent(
    python: Process, small_folder: Path
) -> None:
    """What the parent encodes and answers when it forks, the child encodes and answers itself."""
    done = python(
        FORKING
        + """
lm = WindowedLM.from_pretrained(FOLDER, max_batch_tokens=64, device_map=None)
texts = [f"{n} is a passage of more than sixty-four tokens, which are bytes." for n in "123"]
expected = answer(lm, texts)
lm = lm.with_cache(PassageCache("100MB"))
begun, end = threading.Event(), threading.Event()

def held(*progress):
    begun.set()
    end.wait()

thread = threading.Thread(target=answer, args=(lm, texts), kwargs={"on_encoded": held})
thread.start()
begun.wait()
print("encoding", in_child(lambda: answer(lm, texts) == expected))
end.set()
thread.join()

begun, end = threading.Event(), threading.Event()
with lm.scheduler() as scheduler:
    asked = {"query": "Who?", "passages": texts, "max_new_tokens": 4}
    first = scheduler.submit(asked, on_chunk=held)
    begun.wait()
    waits = scheduler.submit(asked)
    print("scheduled", in_child(lambda: scheduler.answer(asked).text == expected))
    end.set()
    print("parent", [first.result().text, waits.result().text] == [expected] * 2)
""".replace("FOLDER", repr(str(small_folder)))
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["encoding True", "scheduled True", "parent True"]


@pytest.mark.slow
def test_children_that_are_forked_at_any_moment_can_use_the_cache(
    python: Process, small_folder: Path, tmp_path: Path
) -> None:
    done = python(
        FORKING
        + """
sys.setswitchinterval(1e-5)
lm = WindowedLM.from_pretrained(FOLDER, device_map=None)
lm = lm.with_cache(PassageCache("20MB", path=CACHE))
book = lm.codebook()
book.add([{"id": "held", "text": "A passage that is held."}])
known = ["A passage that is known."]
expected = answer(lm, known), answer(lm, book)
stop = threading.Event()

def ask(first):
    for number in itertools.count(first):
        if stop.is_set():
            return
        answer(lm, [f"Passage number {number}.", *known])

def look():
    while not stop.is_set():
        lm.cache.stats()
        lm.cache.invalidate("nobody's")
        book.search("Who?")

threads = [threading.Thread(target=ask, args=(first,)) for first in (0, 10_000)]
threads.append(threading.Thread(target=look))
for thread in threads:
    thread.start()

def work():
    new = answer(lm, ["Nobody has seen this one."])
    lm.cache.flush()
    return bool(new) and (answer(lm, known), answer(lm, book)) == expected

found = []
while len(found) < 15 and found[-1:] != ["hangs"]:
    found.append(in_child(work))
stop.set()
for thread in threads:
    thread.join()
print(found.count(True), found[-1])
""".replace("FOLDER", repr(str(small_folder))).replace("CACHE", repr(str(tmp_path / "windows"))),
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["15", "True"], done.stdout + done.stderr


def operations(lm: WindowedLM, windows: list[list[int]]) -> int:
    """Calls, of Python's functions and of C's, that a request makes whose windows are in memory."""
    made = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    for _ in range(2):
        lm.encode_ids([0, 4], windows)
    sys.setprofile(count)
    try:
        context = lm.encode_ids([0, 4], windows)
    finally:
        sys.setprofile(None)
    assert context.cached_windows == len(windows)
    return made


def test_a_request_from_memory_does_little_for_each_layer_and_each_window() -> None:
    """A layer has 13 modules and 9 tensors; walking the module tree once takes 90 calls a layer."""
    windows = [[80 + number, 90, 91] for number in range(34)]

    def asked(layers: int, count: int) -> int:
        lm = WindowedLM(small.build(num_hidden_layers=layers), cache=PassageCache("64MiB"))
        return operations(lm, windows[:count])

    few = asked(4, 2)
    assert (asked(36, 2) - few) / 32 < 130
    assert (asked(4, 34) - few) / 32 < 110


ADAPTER = """
from langchain_rag_windows import ChatRagWindows
llm = ChatRagWindows(lm=lm, max_tokens=4)
call = lambda: asyncio.run(llm.ainvoke("Who?")).content
"""


@pytest.mark.slow
def test_a_child_has_threads_of_its_own_for_awaited_calls(
    python: Process, small_folder: Path
) -> None:
    done = python(
        FORKING
        + "import asyncio\n"
        + f"lm = WindowedLM.from_pretrained({str(small_folder)!r}, device_map=None)\n"
        + ADAPTER
        + "first = call()\nprint(in_child(lambda: call() == first), call() == first)\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True"]
