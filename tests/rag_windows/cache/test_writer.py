"""The background writer: in order, bounded, and done before it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from rag_windows.cache.writer import Writer

Job = Callable[[bool], None]


def noting(told: list[bool], seconds: float = 0.0) -> Job:
    def job(do: bool) -> None:
        time.sleep(seconds)
        told.append(do)

    return job


def waiting(gate: threading.Event) -> Job:
    def job(do: bool) -> None:
        gate.wait(30)

    return job


def test_jobs_are_done_in_order_and_flush_waits_for_them() -> None:
    writer = Writer(100)
    done: list[int] = []

    def adding(number: int) -> Job:
        def job(do: bool) -> None:
            time.sleep(0.002)
            done.append(number)

        return job

    for number in range(5):
        writer.submit(adding(number), 10)
    assert writer.flush(30)
    assert done == list(range(5))


def test_what_finds_no_room_is_told_so_at_once() -> None:
    writer = Writer(10)
    gate = threading.Event()
    told: list[bool] = []
    assert writer.submit(waiting(gate), 8)
    assert not writer.submit(told.append, 8)
    assert told == [False]
    assert writer.dropped == 1
    assert not writer.flush(0.01)
    gate.set()
    assert writer.flush(30)
    assert writer.submit(told.append, 1000), "a job larger than the bound waits alone"
    assert writer.flush(30)
    assert told == [False, True]


def test_a_patient_caller_waits_for_room() -> None:
    writer = Writer(10)
    told: list[bool] = []
    for _ in range(20):
        assert writer.submit(noting(told, 0.001), 8, wait=True)
    assert writer.flush(30)
    assert told == [True] * 20


def test_after_closing_nothing_is_taken() -> None:
    writer = Writer(10)
    told: list[bool] = []
    writer.submit(told.append, 1)
    writer.close()
    assert not writer.submit(told.append, 1)
    assert told == [True, False]


def test_the_thread_ends_when_nothing_is_left_and_starts_again() -> None:
    writer = Writer(10, linger_s=0.01)
    names: list[str] = []
    for _ in range(2):
        writer.submit(lambda _: names.append(threading.current_thread().name), 1)
        assert writer.flush(30)
        deadline = time.monotonic() + 30
        while any(t.name == "rag-windows-cache" for t in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.005)
    assert names == ["rag-windows-cache"] * 2


def test_a_job_that_raises_does_not_stop_the_next() -> None:
    def failing(do: bool) -> None:
        raise RuntimeError("on purpose")

    writer = Writer(10)
    told: list[bool] = []
    before = threading.excepthook
    threading.excepthook = lambda _: None
    try:
        writer.submit(failing, 1)
        assert writer.flush(30)
        writer.submit(told.append, 1)
        assert writer.flush(30)
    finally:
        threading.excepthook = before
    assert told == [True]


def test_what_waits_is_written_before_the_interpreter_ends() -> None:
    code = (
        "import time; from rag_windows.cache.writer import Writer; w = Writer(100)\n"
        "w.submit(lambda do: (time.sleep(0.3), print('written', do)), 1)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.stdout.strip() == "written True", ended.stderr


def test_a_forked_child_has_a_writer_of_its_own() -> None:
    writer = Writer(100)
    gate = threading.Event()
    writer.submit(waiting(gate), 1)
    child = os.fork()
    if child == 0:
        told: list[bool] = []
        writer.submit(told.append, 1)
        os._exit(0 if writer.flush(30) and told == [True] else 1)
    gate.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert writer.flush(30)
