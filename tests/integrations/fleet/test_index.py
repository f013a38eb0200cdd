"""A fleet of two readers over one index: what one of them changes, all of them know."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from rag_windows_retrievers import Document, Index
from tests.integrations.fleet.conftest import KEYS, Deploy

pytestmark = pytest.mark.fleet

CHAT = "/v1/chat/completions"
ASKED = {
    "model": "tiny-reader",
    "messages": [{"role": "user", "content": "What does Zelwick Academy make?"}],
}


async def test_documents_of_a_fleet(serving: str, deploy: Deploy, tmp_path: Path) -> None:
    Index(tmp_path / "index").add(Document("Zelwick Academy makes cheese.", "a/b", named=True))
    deploy(index=str(tmp_path / "index"))
    headers = {"Authorization": f"Bearer {KEYS['anna']}"}
    async with httpx.AsyncClient(base_url=serving, timeout=60, headers=headers) as client:

        async def read() -> set[str]:
            answer = (await client.post(CHAT, json=ASKED)).json()["choices"][0]
            return {one["id"] for one in answer["message"]["citations"]}

        readers: set[str] = set()
        async with asyncio.timeout(60):
            while len(readers) < 2:
                answers = [client.post(CHAT, json=ASKED) for _ in range(40)]
                readers |= {one.headers["x-reader"] for one in await asyncio.gather(*answers)}
        sent: dict[str, Any] = {"documents": [{"id": "new", "text": "Zelwick Academy burned."}]}
        assert (await client.post("/v1/documents", json=sent)).json()["added"] == ["new"]
        assert [await read() for _ in range(6)] == [{"a/b", "new"}] * 6
        gone = (await client.delete("/v1/documents/a/b")).json()
        assert (gone["documents"], gone["passages"]) == (1, 1)
        # Of each reader's memory, or of the disk that both share.
        assert gone["windows"] >= 1
        assert [await read() for _ in range(6)] == [{"new"}] * 6
        assert (await client.delete("/v1/documents/a/b")).status_code == 404
        (file,) = (await client.get("/v1/files")).json()["data"]
        assert (await client.delete(f"/v1/files/{file['id']}")).json()["deleted"]
        passages = (await client.delete("/v1/passages/new")).json()
        assert (passages["passages"], passages["lasting"]) == (0, True)
