"""The passage cache and the codebook: where they run, who waits for whom, what they keep."""

from __future__ import annotations

from pathlib import Path

from tests.blackbox.conftest import ANSWER, Process

WITHOUT_LOCKS = """
import os, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel
sys.modules["fcntl"] = None
for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_DIRECTORY", "O_NONBLOCK", "fork", "register_at_fork",
             "geteuid", "preadv", "pwrite", "fchmod", "sysconf"):
    delattr(os, name)
from rag_windows import Passage, PassageCache, WindowedLM
from rag_windows.errors import CacheError
passages = [Passage("Vara Zelmont plays the harp. Vara Zelmont was born in Sulava.", id="one")]
"""
"""What a process on Windows does not have; torch and transformers bring their own ways around."""


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


def test_a_stopped_process_stops_no_other_one_that_uses_its_book(
    python: Process, tmp_path: Path
) -> None:
    """Its writer is stopped at many moments; at some of them it is in the midst of a change."""
    done = python(
        """
import os, random, signal, subprocess, sys, time
from rag_windows import WindowedLM
from rag_windows.errors import CacheError

def opened():
    return WindowedLM.from_pretrained("tiny-reader").codebook(path=FOLDER, wait_s=0.5)

if len(sys.argv) > 1:
    with opened() as book:
        print("ready", flush=True)
        while True:
            book.add([{"id": "other", "text": "Aldan Pellby was born in Birholm."}])
            book.remove("other")

book = opened()
book.add([{"id": "one", "text": "Vara Zelmont was born in Sulava."}])
code = sys.orig_argv[sys.orig_argv.index("-c") + 1]
writer = subprocess.Popen([sys.executable, "-c", code, "writer"], stdout=subprocess.PIPE)
writer.stdout.readline()
try:
    for _ in range(100):
        time.sleep(random.uniform(0.0, 0.02))
        os.kill(writer.pid, signal.SIGSTOP)
        print(book.lm.generate("Where was Vara Zelmont born?", book).text)
        start = time.monotonic()
        try:
            book.add([{"id": "two", "text": "Ilvo Tarrent was born in Merrin."}])
            book.remove("two")
        except CacheError as error:
            print(0.4 < time.monotonic() - start < 5, f"process {writer.pid}," in str(error))
            print(error)
            break
        os.kill(writer.pid, signal.SIGCONT)
finally:
    writer.kill()
    writer.wait()
book.add([{"id": "two", "text": "Ilvo Tarrent was born in Merrin."}])
print(len(book) in (2, 3))
""".replace("FOLDER", repr(str(tmp_path / "book"))),
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    *answers, timely, message, last = done.stdout.splitlines()
    assert set(answers) == {ANSWER}
    assert timely == "True True", message
    assert "wait_s" in message
    assert last == "True"
