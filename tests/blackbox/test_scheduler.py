"""Many questions of one scheduler: what goes wrong with one of them stays with it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, StoppingCriteria

from rag_windows import Generation, PassageCache, WindowedLM
from tests.blackbox.conftest import ROOT, Process

WAIT = 60
ASK: dict[str, Any] = {"passages": ["Passage one.", "Passage two."], "max_new_tokens": 12}
ERRORS = (
    KeyboardInterrupt,
    SystemExit,
    GeneratorExit,
    asyncio.CancelledError,
    MemoryError,
    ZeroDivisionError,
)


def long_passages(count: int) -> list[str]:
    """Each of them takes a forward pass of its own on a CPU."""
    return [f"{number} " + "word " * 96 for number in range(count)]


class Raising(LogitsProcessor, StoppingCriteria):
    """Raises at one of its calls, whatever it is called as."""

    def __init__(self, error: BaseException, at: int) -> None:
        self.error, self.left = error, at

    def __call__(self, *given: Any, **_: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return given[-1]


class Criterion(Raising):
    def __call__(self, *given: Any, **_: Any) -> Any:
        super().__call__(*given)
        return torch.zeros(len(given[0]), dtype=torch.bool)


def broken(where: str, error: BaseException, at: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A question that raises, and what `submit` is told beside it."""
    asked: dict[str, Any] = {**ASK, "query": "Broken?"}
    raising = Raising(error, at)
    if where == "rest":
        # The whole text is held back until it is known not to stop.
        return {**asked, "max_new_tokens": 6, "stop": "x" * 400}, {"on_chunk": Raising(error, 0)}
    if where == "on_chunk":
        return asked, {"on_chunk": raising}
    if where == "on_encoded":
        return {**asked, "on_encoded": Raising(error, 0)}, {}
    if where == "prefix_allowed_tokens_fn":

        def allowed(_: int, ids: torch.Tensor) -> list[int]:
            raising(ids)
            return [40, 41, 42]

        return {**asked, "prefix_allowed_tokens_fn": allowed}, {}
    if where == "stopping_criteria":
        return {**asked, "stopping_criteria": [Criterion(error, at)]}, {}
    return {**asked, "logits_processor": [raising]}, {}


PLACES = (
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "on_chunk",
    "on_encoded",
    "rest",
)


@pytest.fixture(scope="module")
def alone(small_lm: WindowedLM) -> list[str]:
    return [small_lm.generate(**ASK, query=f"Question {n}?").text for n in range(6)]


@pytest.mark.slow
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    where=st.sampled_from(PLACES),
    kind=st.sampled_from(ERRORS),
    at=st.integers(0, 3),
    place=st.integers(0, 6),
)
def test_whatever_a_callback_raises_ends_its_own_question(
    small_lm: WindowedLM,
    alone: list[str],
    where: str,
    kind: type[BaseException],
    at: int,
    place: int,
) -> None:
    error = kind("on purpose")
    bad, told = broken(where, error, at)
    futures: list[Future[Generation]] = []
    scheduler = small_lm.scheduler()
    for number in range(7):
        if number == place:
            failing = scheduler.submit(bad, **told)
        if number < 6:
            futures.append(scheduler.submit({**ASK, "query": f"Question {number}?"}))
    assert not wait([*futures, failing], WAIT).not_done
    assert [future.result().text for future in futures] == alone
    assert failing.exception() is error
    scheduler.close()


def test_a_future_s_callback_that_raises_disturbs_nobody(
    small_lm: WindowedLM, alone: list[str]
) -> None:
    with small_lm.scheduler() as scheduler:
        futures = [scheduler.submit({**ASK, "query": f"Question {n}?"}) for n in range(3)]
        for future in futures:
            future.add_done_callback(Raising(KeyboardInterrupt(), 0))
        assert not wait(futures, WAIT).not_done
        assert [future.result().text for future in futures] == alone[:3]
        assert scheduler.submit({**ASK, "query": "Question 3?"}).result(WAIT).text == alone[3]


def test_a_batch_that_an_exception_ends_leaves_nothing_behind(
    small_lm: WindowedLM, alone: list[str]
) -> None:
    """Also no claim on a window, for which others would wait."""
    lm = small_lm.with_cache(PassageCache("16MiB"))
    slow = {**ASK, "query": "Slow?", "passages": [*long_passages(3), *ASK["passages"]]}
    with pytest.raises(KeyboardInterrupt):
        lm.generate_batch([slow, broken("logits_processor", KeyboardInterrupt(), 0)[0]])
    begun = time.monotonic()
    assert lm.generate(**slow).text
    assert lm.generate(**ASK, query="Question 0?").text == alone[0]
    assert time.monotonic() - begun < WAIT


@pytest.mark.slow
def test_others_are_answered_while_a_long_question_is_encoded(
    small_lm: WindowedLM, alone: list[str]
) -> None:
    done: list[int] = []
    seen: list[int] = []
    others: list[Future[Generation]] = []
    with small_lm.scheduler() as scheduler:

        def on_encoded(now: int, total: int) -> None:
            done.append(now)
            if len(done) == 1:
                others.append(scheduler.submit({**ASK, "query": "Question 0?"}))
                others[0].add_done_callback(lambda _: seen.append(done[-1]))

        asked: dict[str, Any] = {"passages": long_passages(60), "max_new_tokens": 2}
        long = scheduler.submit({**asked, "query": "All?", "on_encoded": on_encoded})
        text = long.result(WAIT).text
        assert others[0].result(WAIT).text == alone[0]
    assert seen[0] < 40, "it waited until the other one's passages were encoded"
    assert done == sorted(done)
    assert done[-1] == 60
    assert text == small_lm.generate(**asked, query="All?").text


@pytest.mark.parametrize("kind", [{}, {"method": "ensemble"}, {"cache": True}])
def test_cancelling_counts_while_passages_are_encoded(
    small_lm: WindowedLM, kind: dict[str, Any]
) -> None:
    options = dict(kind)
    lm = small_lm.with_cache(PassageCache("64MiB") if options.pop("cache", False) else None)
    begun, done = threading.Event(), 0

    def on_encoded(now: int, total: int) -> None:
        nonlocal done
        done = now
        begun.set()

    with lm.scheduler(max_rows=1) as scheduler:
        asked = {"passages": long_passages(300), "on_encoded": on_encoded, **options}
        future = scheduler.submit({**asked, "query": "All?"})
        assert begun.wait(WAIT)
        assert not future.cancel()
        cut = future.result(WAIT)
        assert done < 300
        assert (cut.text, cut.token_ids, cut.finish_reason) == ("", (), "cancelled")
        assert scheduler.submit({**ASK, "query": "Next?"}).result(WAIT).text


STOPS_ITSELF = """
import os, signal, sys
from rag_windows import PassageCache, WindowedLM
lm = WindowedLM.from_pretrained(sys.argv[1], cache=PassageCache("16MiB", path=sys.argv[2]))
lm.generate("Who?", ["Another."], max_new_tokens=1)
lm.cache.flush()  # the prefix, which all questions read
def stop(done, total):
    os.kill(os.getpid(), signal.SIGSTOP)
lm.generate("Who?", ["Stalled " * 60, "Stalled too " * 40], on_encoded=stop, max_new_tokens=1)
"""


@pytest.fixture
def stalled(small_folder: Path, tmp_path: Path) -> Iterator[tuple[WindowedLM, list[str]]]:
    """A model, and passages that a stopped process has begun to encode for the same cache."""
    passages = ["Stalled " * 60, "Stalled too " * 40]
    command = [sys.executable, "-c", STOPS_ITSELF, str(small_folder), str(tmp_path)]
    child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])
        cache = PassageCache("16MiB", path=tmp_path)
        yield WindowedLM.from_pretrained(small_folder, cache=cache), passages
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(WAIT)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="processes can't be stopped here")
def test_nobody_waits_for_a_stopped_process_but_who_wants_the_same(
    stalled: tuple[WindowedLM, list[str]],
) -> None:
    lm, passages = stalled
    with lm.scheduler(max_rows=8) as scheduler:
        stuck = [scheduler.submit({"query": f"{n}?", "passages": passages}) for n in range(2)]
        other = scheduler.submit({**ASK, "query": "Other?"})
        assert len(other.result(WAIT).token_ids) == 12
        assert not any(future.done() for future in stuck)
        for future in stuck:
            future.cancel()
        assert {future.result(WAIT).finish_reason for future in stuck} == {"cancelled"}


UNFINISHED = """
import threading
from tests.rag_windows import small
begun = threading.Event()
lm = small.lm()
def stream(passages, **more):
    return lm.stream("Why?", passages, min_new_tokens=400, max_new_tokens=400, **more)
answering = stream(["a", "b"])
next(answering)
long = [str(n) + "word " * 96 for n in range(400)]
encoding = stream(long, on_encoded=lambda *_: begun.set())
threading.Thread(target=next, args=(encoding, None), daemon=True).start()
begun.wait(60)
"""


@pytest.mark.slow
def test_a_program_may_end_with_unfinished_streams(python: Process) -> None:
    ended = python(UNFINISHED)
    assert ended.returncode == 0, ended.stderr


OUT_OF_MEMORY = """
import resource
from concurrent.futures import wait
from rag_windows import PassageCache
from tests.rag_windows import small
lm = small.lm().with_cache(PassageCache("2GiB"))
def ask(n):
    passages = [f"Passage {n} " + "abc " * 20, "Shared " + "xyz " * 30]
    return dict(query=f"Why {n}?", passages=passages, max_new_tokens=24, min_new_tokens=24)
expected = [small.lm().generate(**ask(n)).text for n in range(8)]
large = dict(query="All?", passages=[f"{n} " + "word " * 96 for n in range(500)])
scheduler = lm.scheduler()
scheduler.submit(ask(99)).result()
status = open("/proc/self/status").read().split()
size = int(status[status.index("VmSize:") + 1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size + 50 * 2**20,) * 2)
asked = [scheduler.submit(ask(n)) for n in range(4)]
failing = scheduler.submit(large)
asked += [scheduler.submit(ask(n)) for n in range(4, 8)]
assert not wait([*asked, failing], 100).not_done, "a question was lost"
assert [one.result().text for one in asked] == expected
print(type(failing.exception()).__name__)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of Linux")
def test_a_question_without_memory_fails_alone(python: Process) -> None:
    ended = python(OUT_OF_MEMORY)
    assert ended.returncode == 0, ended.stderr
    # How much of what is free can be had differs, so now and then it is enough.
    assert ended.stdout.strip() in ("RuntimeError", "MemoryError", "NoneType")
