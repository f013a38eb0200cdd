"""A fleet of readers whose model keeps states."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from rag_windows import WindowedLM
from tests.integrations.fleet.conftest import KEYS, Deploy
from tests.integrations.fleet.test_fleet import CHAT
from tests.integrations.server.test_chat import DOCUMENTS, QUESTION, body
from tests.rag_windows import small, small_states


async def test_a_model_that_keeps_states_is_read_in_rows(
    serving: str, deploy: Deploy, tmp_path: Path
) -> None:
    small_states.model().save_pretrained(tmp_path)
    small.tokenizer().save_pretrained(tmp_path)
    lm = WindowedLM.from_pretrained(tmp_path, device_map="cpu")
    expected = lm.generate(QUESTION, DOCUMENTS, prefix="Say.", do_sample=False, max_new_tokens=6)
    said = [{"role": "system", "content": "Say."}, {"role": "user", "content": QUESTION}]
    question = body(documents=DOCUMENTS, messages=said, max_tokens=6)
    await asyncio.to_thread(deploy, model=str(tmp_path))

    headers = {"Authorization": f"Bearer {KEYS['anna']}"}
    async with httpx.AsyncClient(base_url=serving, timeout=60, headers=headers) as client:
        answers = [await client.post(CHAT, json=question) for _ in range(2)]
    for answer, cached in zip(answers, (0, len(DOCUMENTS)), strict=True):
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        assert message["content"] == expected.text
        assert message["rag"]["cached_windows"] == cached
    assert len({answer.headers["x-reader"] for answer in answers}) == 1
