"""Reasoning in both frameworks: where theirs stands, whole and streamed, with tools and without."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from llama_index.core.base.llms.types import ChatMessage, TextBlock, ThinkingBlock

from langchain_rag_windows import ChatRagWindows, RagWindows
from llama_index.llms.rag_windows import RagWindowsLLM, WindowSynthesizer
from tests.integrations.llama_index.asking import nodes
from tests.tool_models import SEARCH, ScriptedLM, scripted

SCRIPT = "Sulava?\nYes.</think>\n\nSulava"
REASONING, TEXT = "Sulava?\nYes.", "Sulava"
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'


def thinker(*answers: str) -> ScriptedLM:
    return scripted("thinking", *answers or [SCRIPT] * 2)


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream"])
@pytest.mark.parametrize("tools", [False, True])
def test_langchain_has_a_block_of_reasoning(way: str, tools: bool) -> None:
    llm: Any = ChatRagWindows(lm=thinker())
    llm = llm.bind_tools([SEARCH]) if tools else llm

    async def streamed() -> list[Any]:
        return [chunk async for chunk in llm.astream("Where?")]

    message: Any
    chunks: list[Any] = []
    if way == "invoke":
        message = llm.invoke("Where?")
    elif way == "ainvoke":
        message = asyncio.run(llm.ainvoke("Where?"))
    else:
        chunks = [*llm.stream("Where?")] if way == "stream" else asyncio.run(streamed())
        message = chunks[0]
        for chunk in chunks[1:]:
            message += chunk
    kind: Any = AIMessageChunk if chunks else AIMessage
    assert isinstance(message, kind)
    assert message.content == TEXT
    assert message.additional_kwargs["reasoning_content"] == REASONING
    assert [block["type"] for block in message.content_blocks] == ["reasoning", "text"]
    assert message.content_blocks[0]["reasoning"] == REASONING
    assert message.usage_metadata["output_token_details"]["reasoning"] == len(
        SCRIPT.partition("\n\n")[0]
    )
    if chunks:
        kinds = [
            [block["type"] for block in chunk.content_blocks]
            for chunk in chunks
            if chunk.content_blocks
        ]
        assert kinds[0] == ["reasoning"]
        assert kinds.count(["reasoning"]) > 5
    again = [HumanMessage("Where?"), message, HumanMessage("Sure?")]
    assert llm.invoke(again).content == TEXT


def test_langchain_s_text_model_answers_without_it() -> None:
    llm = RagWindows(lm=thinker(*[SCRIPT] * 3))
    assert llm.invoke("Where?") == TEXT
    assert "".join(llm.stream("Where?")) == TEXT
    generation: Any = llm.generate(["Where?"]).generations[0][0]
    assert generation.generation_info["reasoning_content"] == REASONING


def test_langchain_calls_tools_behind_it() -> None:
    llm = ChatRagWindows(lm=thinker(f"Hm.</think>{CALL}")).bind_tools([SEARCH])
    message = llm.invoke("Where?")
    assert message.additional_kwargs["reasoning_content"] == "Hm."
    assert [call["args"] for call in message.tool_calls] == [{"query": "x"}]
    assert message.content == ""


@pytest.mark.parametrize("way", ["chat", "achat", "stream_chat", "astream_chat"])
@pytest.mark.parametrize("tools", [False, True])
def test_llama_index_has_a_thinking_block(way: str, tools: bool) -> None:
    llm = RagWindowsLLM(lm=thinker())
    options: dict[str, Any] = {"tools": [SEARCH]} if tools else {}
    asked = [ChatMessage(role="user", content="Where?")]

    async def streamed() -> list[Any]:
        return [one async for one in await llm.astream_chat(asked, **options)]

    pieces: list[Any] = []
    if way == "chat":
        response = llm.chat(asked, **options)
    elif way == "achat":
        response = asyncio.run(llm.achat(asked, **options))
    else:
        sync = way == "stream_chat"
        pieces = [*llm.stream_chat(asked, **options)] if sync else asyncio.run(streamed())
        response = pieces[-1]
    assert response.message.content == TEXT
    thought, said = response.message.blocks[:2]
    assert (type(thought), type(said)) == (ThinkingBlock, TextBlock)
    assert thought.content == REASONING
    if pieces:
        assert "".join(one.delta or "" for one in pieces) == TEXT
        deltas = [one.additional_kwargs.get("thinking_delta", "") for one in pieces]
        assert "".join(deltas) == REASONING
        assert sum(map(bool, deltas)) > 5
    again = [*asked, response.message, ChatMessage(role="user", content="Sure?")]
    assert llm.chat(again).message.content == TEXT


def test_llama_index_completes_and_synthesizes_without_it() -> None:
    llm = RagWindowsLLM(lm=thinker(*[SCRIPT] * 4))
    whole = llm.complete("Where?")
    assert (whole.text, whole.raw["reasoning"]) == (TEXT, REASONING)
    pieces = [*llm.stream_complete("Where?")]
    assert "".join(one.delta or "" for one in pieces) == pieces[-1].text == TEXT
    assert str(WindowSynthesizer(llm).synthesize("Where?", nodes("Sulava."))) == TEXT
    stream = WindowSynthesizer(llm, streaming=True).synthesize("Where?", nodes("Sulava."))
    assert str(stream) == TEXT


@pytest.mark.parametrize("template", ["hermes", "llama"])
def test_a_model_without_markers_says_them(template: str) -> None:
    lm = scripted(template, *["a</think>b"] * 2)
    assert ChatRagWindows(lm=lm).invoke("Where?").content == "a</think>b"
    response = RagWindowsLLM(lm=lm).chat([ChatMessage(role="user", content="Where?")])
    assert response.message.content == "a</think>b"
