"""A server in this process, over the shipped model and the sample corpus."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import httpx
import pytest

from rag_windows import PassageCache, WindowedLM
from rag_windows.samples import samples_path
from rag_windows.server import Settings, create_app
from rag_windows_retrievers import BM25Retriever, load_documents, split_documents


@pytest.fixture(scope="session")
def lm() -> WindowedLM:
    """The shipped model with a cache in memory."""
    return WindowedLM.from_pretrained("tiny-reader", cache=PassageCache("64MiB"), device_map="cpu")


@pytest.fixture(scope="session")
def corpus() -> BM25Retriever:
    """The sample documents."""
    folder = samples_path() / "corpus"
    return BM25Retriever(
        split_documents(load_documents([folder], root=folder).documents, words=120)
    )


@pytest.fixture
async def client(lm: WindowedLM, corpus: BM25Retriever) -> AsyncGenerator[httpx.AsyncClient]:
    """A client of a server with the sample documents."""
    app = create_app(lm, Settings(), corpus)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as made:
        yield made
