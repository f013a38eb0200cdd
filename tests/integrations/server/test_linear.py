"""What reads a request takes time in proportion to its length, whatever stands in it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from rag_windows import WindowedLM
from rag_windows_server import Settings, create_app
from rag_windows_server.bodies import tools_of
from rag_windows_server.documents import parse_sources
from tests.integrations.server.conftest import asking
from tests.integrations.server.test_chat import QUESTION, ask, body
from tests.integrations.server.test_ways import TEXT

MOST_TIMES = 9
"""Four times the input may take so many times the work: linear work takes 4, quadratic 16."""


def grows(work: Callable[[Any], object], made: Callable[[int], Any], size: int) -> float:
    """How many times longer a four times larger input takes, in seconds of this thread."""

    def seconds(given: Any) -> float:
        begun = time.thread_time()
        work(given)
        return time.thread_time() - begun

    small, large = made(size), made(4 * size)
    # The shortest of several: whatever else runs here only adds to some of them.
    return min(seconds(large) for _ in range(3)) / min(seconds(small) for _ in range(3))


async def test_a_large_message_is_parsed_at_once(lm: WindowedLM) -> None:
    """Of 200 kB, which took 20 s; they are too long for this server, which says so."""
    content = "<source>" * 25_000 + QUESTION
    async with asking(create_app(lm, Settings(parse_sources=True, most_prompt_tokens=100))) as one:
        begun = time.process_time()
        answer = await one.post(
            "/v1/chat/completions", json=body(messages=[{"role": "user", "content": content}])
        )
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert time.process_time() - begun < 10


MEANT = [
    (f'<source id="1" name="A">{TEXT}</source>{QUESTION}', [("1", "A", TEXT)], QUESTION),
    ("<source>a<source>b</source>c", [(None, None, "a<source>b")], "c"),
    ("<source>a</source> \n<source>b", [(None, None, "a")], "<source>b"),
    ("</source><source>a</source>", [(None, None, "a")], "</source>"),
    ('<source xid="2" id="3">a</source>', [("3", None, "a")], ""),
    ('<source name="&amp;&#65;">a</source>', [(None, "&A", "a")], ""),
    (f'<source name="&#{"9" * 5000};">a</source>', [(None, f"&#{'9' * 5000};", "a")], ""),
    ("<sources>a</source>", [], "<sources>a</source>"),
]


@pytest.mark.parametrize(("text", "found", "rest"), MEANT, ids=range(len(MEANT)))
def test_sources_are_read_as_before(
    text: str, found: list[tuple[str | None, str | None, str]], rest: str
) -> None:
    left, passages = parse_sources(text)
    assert left == rest
    assert [(one.id, one.title, one.text) for one in passages] == found


def test_allowed_tools() -> None:
    def given(count: int) -> tuple[list[Any], Any]:
        tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(count)]
        names = [{"type": "function", "name": f"g{i}"} for i in range(count)]
        return tools, {"type": "allowed_tools", "tools": names}

    assert grows(lambda one: tools_of(*one), given, 1_000) < MOST_TIMES


async def test_stop_strings_are_few(client: httpx.AsyncClient) -> None:
    """Each is looked for behind every token of an answer."""
    many = body(stop=[f"stop {i}" for i in range(1000)])
    answer = await client.post("/v1/chat/completions", json=many)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stop")
    few = [f"stop {i}" for i in range(16)]
    assert (await ask(client, stop=few))["choices"][0]["message"]["content"] == "cheese"


async def test_an_endless_number_is_no_token(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/chat/completions", json=body(logit_bias={"1" * 5000: 1}))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logit_bias")
    assert len(json.dumps(answer.json())) < 400
