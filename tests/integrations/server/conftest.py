"""A server over the shipped model and the sample corpus: in this process, and behind a port."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest
from fastapi import FastAPI

from rag_windows import PassageCache, WindowedLM
from rag_windows.samples import samples_path
from rag_windows_retrievers import BM25Retriever, load_documents, split_documents
from rag_windows_server import Settings, create_app
from rag_windows_server.process import Server


@pytest.fixture(scope="session")
def lm() -> WindowedLM:
    """The shipped model with a cache in memory."""
    return WindowedLM.from_pretrained("tiny-reader", cache=PassageCache("64MiB"), device_map="cpu")


@pytest.fixture(scope="session")
def corpus() -> BM25Retriever:
    """The sample documents."""
    folder = samples_path() / "corpus"
    loaded = load_documents([folder], root=folder)
    return BM25Retriever(split_documents(loaded.documents, words=120))


@pytest.fixture
async def client(lm: WindowedLM, corpus: BM25Retriever) -> AsyncGenerator[httpx.AsyncClient]:
    """A client of a server with the sample documents."""
    async with asking(create_app(lm, Settings(), corpus)) as made:
        yield made


def asking(app: FastAPI) -> httpx.AsyncClient:
    """A client of an application in this process; it neither streams nor leaves."""
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60)


@contextmanager
def servers() -> Iterator[Callable[[FastAPI], str]]:
    """Let an application listen on a free port, in a thread; gives its address."""
    running: list[tuple[Server, threading.Thread]] = []

    def listen(app: FastAPI) -> str:
        server = Server(app, port=0, grace_s=0.0)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        running.append((server, thread))
        until = time.monotonic() + 30
        while not server.started and time.monotonic() < until:
            time.sleep(0.01)
        return server.address

    yield listen
    for server, _ in running:
        server.should_exit = True
    for _, thread in running:
        thread.join(timeout=30)
        assert not thread.is_alive()


@pytest.fixture
def listening() -> Iterator[Callable[[FastAPI], str]]:
    """Let applications listen until the test ends."""
    with servers() as listen:
        yield listen


@pytest.fixture(scope="session")
def address(lm: WindowedLM, corpus: BM25Retriever) -> Iterator[str]:
    """Where a server with the sample documents listens."""
    with servers() as listen:
        yield listen(create_app(lm, Settings(), corpus))
