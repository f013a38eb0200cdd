"""Agents whose tool is a query engine over windows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.core.base.llms.types import ToolCallBlock
from llama_index.core.llms import ChatMessage
from llama_index.core.llms.mock import MockFunctionCallingLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.tools import QueryEngineTool

from llama_index.llms.rag_windows import WindowSynthesizer
from tests.integrations.llama_index.cases import (
    BARE,
    Asked,
    ListRetriever,
    llm,
    one_for_each_place,
    read_apart,
    recorded,
)


def tool(asked: Asked) -> QueryEngineTool:
    engine = RetrieverQueryEngine(
        ListRetriever(asked.nodes), WindowSynthesizer(llm(), text_qa_template=BARE)
    )
    return QueryEngineTool.from_defaults(engine, name="library", description="Answers questions.")


def deciding(*answers: ChatMessage) -> MockFunctionCallingLLM:
    """The agent's own model, which says these things one after the other."""
    left = list(answers)

    def say(messages: Sequence[ChatMessage], **kwargs: Any) -> ChatMessage:
        message = left.pop(0)
        if "{result}" in (message.content or ""):
            # The embedded reader's answer comes back as the last thing that was said.
            result = (messages[-1].content or "").removeprefix("Observation: ").strip()
            message = ChatMessage(
                role="assistant", content=(message.content or "").replace("{result}", result)
            )
        return message

    return MockFunctionCallingLLM(response_generator=say, is_chat_model=True)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_function_agents_tool_reads_windows(streaming: bool) -> None:
    asked = one_for_each_place()[6]
    call = ToolCallBlock(
        tool_name="library", tool_kwargs={"input": asked.question}, tool_call_id="1"
    )
    agent = FunctionAgent(
        tools=[tool(asked)],
        llm=deciding(
            ChatMessage(role="assistant", blocks=[call]),
            ChatMessage(role="assistant", content="It is {result}."),
        ),
        streaming=streaming,
    )
    check(agent, asked)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_react_agents_tool_reads_windows(streaming: bool) -> None:
    asked = one_for_each_place()[7]
    action = json.dumps({"input": asked.question})
    agent = ReActAgent(
        tools=[tool(asked)],
        llm=deciding(
            ChatMessage(
                role="assistant",
                content=f"Thought: I look it up.\nAction: library\nAction Input: {action}",
            ),
            ChatMessage(
                role="assistant", content="Thought: I can answer.\nAnswer: It is {result}."
            ),
        ),
        streaming=streaming,
    )
    check(agent, asked)


def check(agent: FunctionAgent | ReActAgent, asked: Asked) -> None:
    async def run() -> str:
        return str(await agent.run(asked.question))

    with recorded() as generations:
        answer = asyncio.run(run())
    (generation,) = generations
    assert read_apart(generation, [one.text for one in asked.nodes])
    assert answer == f"It is {asked.answer}."
