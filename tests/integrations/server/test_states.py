"""A server over a model whose passages are read in rows."""

from __future__ import annotations

import asyncio

from rag_windows import PassageCache
from rag_windows_server import Settings, create_app
from tests.rag_windows import small_states

from .conftest import asking

BODY = {
    "messages": [{"role": "user", "content": "When did the mill burn?"}],
    "documents": [{"text": "The mill burned in 1904.", "id": "a"}, {"text": "Snow.", "id": "b"}],
    "max_tokens": 6,
}


async def test_it_answers_several_at_once_with_citations_and_refuses_by_name() -> None:
    with PassageCache("4MiB") as cache:
        app = create_app(small_states.wrapped("mamba2", cache=cache), Settings())
        async with asking(app) as client:
            paths, models = "/v1/chat/completions", (await client.get("/v1/models")).json()
            body = {**BODY, "model": models["data"][0]["id"]}
            made = await asyncio.gather(*(client.post(paths, json=body) for _ in range(4)))
            assert {one.status_code for one in made} == {200}
            bodies = [one.json() for one in made]
            assert len({one["choices"][0]["message"]["content"] for one in bodies}) == 1
            assert cache.stats().tiers["memory"].entries == 3
            late = await client.post(paths, json={**body, "citations": "removal"})
            assert late.status_code == 200
            assert late.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            refused = await client.post(paths, json={**body, "method": "ape"})
            assert refused.status_code == 400
            assert "pced" in refused.json()["error"]["message"]
            metrics = await client.get("/metrics")
            assert "rag_windows_cache" in metrics.text
