"""Tools in LlamaIndex: a model whose answers are written beforehand calls them by its template."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from llama_index.core.agent.workflow import (
    AgentStream,
    AgentWorkflow,
    FunctionAgent,
    ReActAgent,
    ToolCallResult,
)
from llama_index.core.base.llms.types import CitableBlock, TextBlock, ThinkingBlock
from llama_index.core.llms import ChatMessage
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.tools import FunctionTool, QueryEngineTool
from pydantic import BaseModel

from llama_index.llms.rag_windows import Parts, RagWindowsLLM, WindowSynthesizer
from rag_windows import WindowedLM
from tests.integrations.llama_index.asking import WAYS, ListRetriever, ask, nodes
from tests.tool_models import model, scripted, tokenizer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


ADD = FunctionTool.from_defaults(add)


def saying(
    *answers: str, kind: str = "hermes", **options: Any
) -> tuple[RagWindowsLLM, list[tuple[Any, list[Any]]]]:
    """A model with this kind of chat template that gives these answers, and what it was asked."""
    lm = scripted(kind, *answers)
    return RagWindowsLLM(lm=lm, **options), lm.asked


def add_up(llm: RagWindowsLLM, way: str = "sync", **given: Any) -> Any:
    """The answer to a sum, whose text streams as it comes."""
    text, _, pieces = ask(llm, "tools", way, [ADD], user_msg="2 + 3?", **given)
    if "stream" in way:
        assert [piece.delta for piece in pieces[: len(text)]] == list(text)
    return pieces[-1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["hermes", "mistral", "llama"])
def test_a_call_comes_back_with_its_arguments(way: str, kind: str) -> None:
    written = {
        "hermes": f"So.\n{CALL}",
        "llama": '{"name": "add", "parameters": {"a": 2, "b": 3}}',
        "mistral": '[CALLS] [{"name": "add", "arguments": {"a": 2, "b": 3}, "id": "abc123def"}]',
    }
    llm, asked = saying(written[kind], kind=kind)
    response = add_up(llm, way)
    (call,) = llm.get_tool_calls_from_response(response)
    assert (call.tool_name, call.tool_kwargs) == ("add", {"a": 2, "b": 3})
    assert call.tool_id
    assert (response.message.content or "") == ("So." if kind == "hermes" else "")
    assert response.raw["finish_reason"] == "tool_calls"
    assert "Add two numbers." in str(asked[0][0].tools)


def test_text_without_a_call_is_text() -> None:
    llm, _ = saying("Five.")
    response = add_up(llm)
    assert response.message.content == "Five."
    assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
    with pytest.raises(RuntimeError, match=r"should have called a tool but answered 'Five\.'"):
        llm.get_tool_calls_from_response(response)


def test_one_call_or_several_as_asked() -> None:
    for parallel in (True, False):
        llm, _ = saying(f"{CALL}\n{CALL}")
        response = add_up(llm, allow_parallel_tool_calls=parallel)
        assert len(llm.get_tool_calls_from_response(response)) == 1 + parallel


@pytest.mark.parametrize(
    "forced", [{"tool_required": True}, {"tool_choice": "add"}, {"tool_choice": "required"}]
)
def test_a_call_can_be_forced(forced: dict[str, Any]) -> None:
    llm, asked = saying(' {"a": 2, "b": 3}}\n</tool_call>')
    answer = llm.predict_and_call([ADD], user_msg="2 + 3?", **forced)
    assert str(answer) == "5"
    llm, _ = saying(CALL)
    assert str(asyncio.run(llm.apredict_and_call([ADD], user_msg="2 + 3?"))) == "5"
    assert asked[0][0].opening.endswith('{"name": "add", "arguments":')


def test_a_call_that_can_not_be_read_is_told() -> None:
    llm, _ = saying("<tool_call>{</tool_call>")
    response = add_up(llm)
    assert response.message.content == "{"
    assert "not valid JSON" in response.raw["broken_calls"][0]["error"]
    with pytest.raises(RuntimeError, match="not valid JSON"):
        llm.get_tool_calls_from_response(response)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_function_agent_calls_its_tool_and_answers(streaming: bool) -> None:
    llm, asked = saying(CALL, "It is 5.")
    agent = FunctionAgent(tools=[add], llm=llm, system_prompt="Add.", streaming=streaming)
    memory = ChatMemoryBuffer.from_defaults(token_limit=3000)

    async def run() -> tuple[str, list[str]]:
        handler = agent.run("2 + 3?", memory=memory)
        texts = [
            event.delta async for event in handler.stream_events() if isinstance(event, AgentStream)
        ]
        return str(await handler), texts

    answer, texts = asyncio.run(run())
    assert answer == "It is 5."
    assert "".join(texts) == ("It is 5." if streaming else "")
    assert [(turn.role, turn.content) for turn in asked[1][0].turns][-1] == ("tool", "5")
    assert [message.role.value for message in memory.get_all()] == [
        *("user", "assistant", "tool", "assistant")
    ]
    again = [ChatMessage.model_validate_json(m.model_dump_json()) for m in memory.get_all()]
    other, _ = saying("Yes.")
    assert other.chat([*again, ChatMessage(content="Sure?")]).message.content == "Yes."


def test_a_workflow_of_agents_hands_over() -> None:
    over = (
        '<tool_call>\n{"name": "handoff", "arguments": {"to_agent": "adder", "reason": "sums"}}\n'
        "</tool_call>"
    )
    llm, asked = saying(over, CALL, "It is 5.")
    workflow = AgentWorkflow(
        agents=[
            FunctionAgent(name="host", description="Greets.", llm=llm, can_handoff_to=["adder"]),
            FunctionAgent(name="adder", description="Adds.", llm=llm, tools=[ADD]),
        ],
        root_agent="host",
    )

    async def run() -> str:
        return str(await workflow.run(user_msg="2 + 3?"))

    assert asyncio.run(run()) == "It is 5."
    assert len(asked) == 3


@pytest.mark.parametrize("agent_class", [FunctionAgent, ReActAgent])
def test_a_query_engine_is_a_tool_that_reads_windows(agent_class: Any) -> None:
    call = '<tool_call>\n{"name": "library", "arguments": {"input": "Which colour?"}}\n</tool_call>'
    if agent_class is ReActAgent:
        call = 'Thought: Look.\nAction: library\nAction Input: {"input": "Which colour?"}'
    llm, asked = saying(call, "White.", "Thought: I know.\nAnswer: It is white.")
    engine = RetrieverQueryEngine(
        ListRetriever(nodes("The wall is white.", "No.")), WindowSynthesizer(llm)
    )
    library = QueryEngineTool.from_defaults(engine, name="library", description="Answers.")

    async def run() -> tuple[str, list[Any]]:
        handler = agent_class(tools=[library], llm=llm).run("Which colour?")
        called = [one async for one in handler.stream_events() if isinstance(one, ToolCallResult)]
        return str(await handler), called

    answer, (called,) = asyncio.run(run())
    assert answer.endswith("It is white.")
    assert len(asked) == 3
    assert str(called.tool_output) == "White."
    masses = [one.attention_mass for one in called.tool_output.raw_output.source_nodes]
    assert len(masses) == 2
    assert all(masses)


def test_citable_blocks_of_a_tool_are_windows() -> None:
    def look_up(query: str) -> list[CitableBlock]:
        """Look things up."""
        texts = ("The wall is white.", "The door is red.")
        return [
            CitableBlock(title=text[4:8], source=text[4:8], content=[TextBlock(text=text)])
            for text in texts
        ]

    call = '<tool_call>\n{"name": "look_up", "arguments": {"query": "wall"}}\n</tool_call>'
    llm, asked = saying(call, "White.")

    async def run() -> Any:
        return await FunctionAgent(tools=[look_up], llm=llm).run("Which colour?")

    output = asyncio.run(run())
    assert str(output) == "White."
    assert [entry["passage"] for entry in output.raw["windows"]] == [0, 1]
    assert [entry["id"] for entry in output.raw["citations"]] == ["wall", "door"]
    assert "2 passages" in asked[1][0].turns[-1].content


class Sum(BaseModel):
    """A sum."""

    result: int


ADDING = PromptTemplate("Add {what}")
ASK = PromptTemplate("{context_str}\nAdd {query_str}")
VALUES: dict[str, Any] = {"context_str": Parts.of(["Two is even."]), "query_str": "2 and 3"}


class Verdict(BaseModel):
    """Whether it is so."""

    sure: bool


@pytest.mark.parametrize("kind", ["hermes", "llama"])
def test_a_forced_call_is_held_to_its_schema(kind: str) -> None:
    lm = WindowedLM(model(), tokenizer(kind))
    llm = RagWindowsLLM(lm=lm, max_tokens=60)  # of random weights, which write random letters
    assert isinstance(llm.structured_predict(Verdict, ADDING, what="2 and 3"), Verdict)
    with pytest.raises(RuntimeError, match=r"can't answer this call|should have called a tool"):
        llm.structured_predict(Verdict, ADDING, {"max_tokens": 3}, what="2 and 3")


def test_a_structured_answer_is_a_forced_call_that_reads_windows() -> None:
    llm, asked = saying(' {"result": 5}}\n</tool_call>')
    made = llm.structured_predict(Sum, ASK, **VALUES)
    assert made == Sum(result=5)
    assert [passage.text for passage in asked[0][1]] == ["Two is even."]
    assert asked[0][0].opening.endswith('{"name": "Sum", "arguments":')
    llm, _ = saying(' {"result": 5}}\n</tool_call>')
    assert asyncio.run(llm.astructured_predict(Sum, ADDING, what="2 and 3")) == made


def test_structured_answers_stay_text_where_no_call_can_be_begun() -> None:
    llm, _ = saying('Hm.</think>{"result": 5}', kind="thinking")
    assert llm.structured_predict(Sum, ADDING, what="2 and 3") == Sum(result=5)
    llm, _ = saying("Two and three.</think>Five.", kind="thinking")
    reasoning, text = add_up(llm).message.blocks
    assert isinstance(reasoning, ThinkingBlock)
    assert (reasoning.content, text.text) == ("Two and three.", "Five.")


def test_a_structured_answer_still_streams() -> None:
    llm, asked = saying('{"result": 5}')
    made = list(llm.stream_structured_predict(Sum, ASK, **VALUES))
    assert made[-1] == Sum(result=5)
    assert [passage.text for passage in asked[0][1]] == ["Two is even."]


def test_a_template_without_tools_says_so(reader: WindowedLM) -> None:
    llm = RagWindowsLLM(lm=reader)
    assert not llm.metadata.is_function_calling_model
    with pytest.raises(NotImplementedError, match="does not show the tools"):
        llm.chat_with_tools([ADD], user_msg="2 + 3?")
    with pytest.raises(RuntimeError, match="can't be forced"):
        saying(kind="thinking")[0].chat_with_tools([ADD], user_msg="2?", tool_required=True)
    with pytest.raises(RuntimeError, match="names no known tool"):
        saying()[0].chat_with_tools([ADD], user_msg="2?", tool_choice="divide")
    with pytest.raises(RuntimeError, match="Use chat"):
        saying()[0].complete("2 + 3?", tools=[ADD])
