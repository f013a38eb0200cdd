"""What loads a model computes in a thread that ends with it, as if it were the caller's own."""

from __future__ import annotations

import contextvars
import signal
import threading
import time

import pytest
import torch

from rag_windows import ModelLoadError, WindowedLM
from rag_windows.loading import in_a_thread

TOLD: contextvars.ContextVar[str] = contextvars.ContextVar("told", default="nothing")


def loaders() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("rag-windows-load")]


def test_the_result_and_the_callers_context_are_there() -> None:
    TOLD.set("something")
    with torch.device("meta"):
        found = in_a_thread(
            lambda: (threading.current_thread().name, TOLD.get(), torch.zeros(1).device.type),
            "rag-windows-load",
        )
    assert found == ("rag-windows-load_0", "something", "meta")
    assert loaders() == []


def test_an_error_is_the_callers() -> None:
    with pytest.raises(ZeroDivisionError):
        in_a_thread(lambda: 1 / 0, "rag-windows-load")
    with pytest.raises(ModelLoadError, match="nowhere"):
        WindowedLM.from_pretrained("./nowhere")
    assert loaders() == []


def test_an_interruption_ends_the_work() -> None:
    begun, ended = threading.Event(), threading.Event()
    deadline, main = time.monotonic() + 20, threading.main_thread().ident or 0

    def work() -> None:
        begun.set()
        try:
            while time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            ended.set()

    def interrupt() -> None:
        begun.wait(10)
        signal.pthread_kill(main, signal.SIGINT)  # as Ctrl-C does

    # Whatever a test before this one has made of it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            in_a_thread(work, "rag-windows-load")
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.wait(10)
    assert time.monotonic() < deadline


def test_no_loader_is_left() -> None:
    lm = WindowedLM.from_pretrained("tiny-reader")
    assert loaders() == []
    assert lm.generate("Where?", ["Here."], max_new_tokens=2).text is not None
