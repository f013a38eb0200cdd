"""All endpoints of the LLM: right answers, one window a node, plain JSON beside the text."""

from __future__ import annotations

import inspect
import json

import pytest
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse
from llama_index.core.schema import TextNode

from rag_windows import InputError
from tests.integrations.llama_index.cases import llm, one_for_each_place, recorded
from tests.integrations.llama_index.endpoints import ENDPOINTS, one_window_each, text_of, user

STREAMS = [name for name in ENDPOINTS if "stream" in name]


@pytest.mark.parametrize("name", ENDPOINTS)
def test_each_endpoint_reads_every_node_in_a_window_of_its_own(name: str) -> None:
    asked = one_for_each_place()[11]
    with recorded() as generations:
        responses = ENDPOINTS[name](llm(), asked.question, nodes=asked.nodes)
    assert text_of(responses[-1]) == asked.answer
    (generation,) = generations
    assert one_window_each(generation, asked.nodes)
    kind = CompletionResponse if "complete" in name else ChatResponse
    assert all(isinstance(response, kind) for response in responses)
    raw = responses[-1].raw
    assert json.loads(json.dumps(raw)) == raw
    assert [window["passage"] for window in raw["windows"]] == list(range(16))
    assert [one["id"] for one in raw["citations"]] == [n.node_id for n in asked.nodes]
    assert max(raw["citations"], key=lambda one: one["mass"])["passage"] == asked.place
    assert raw["usage"]["prompt_tokens"] == generation.usage.prompt_tokens
    assert raw["usage"]["total_tokens"] == sum(
        raw["usage"][key] for key in ("prompt_tokens", "completion_tokens")
    )
    assert raw["method"]["name"] == "ape"
    assert raw["finish_reason"] == "stop"
    assert 0 < raw["timings"]["encode_s"] < raw["timings"]["ttft_s"] < raw["timings"]["total_s"]


def test_the_fact_is_found_at_every_place() -> None:
    for asked in one_for_each_place():
        response = llm().chat(user(asked.question), nodes=asked.nodes)
        assert response.message.content == asked.answer, asked.place


@pytest.mark.parametrize("name", STREAMS)
def test_streams_are_cumulative_and_only_the_last_piece_has_the_rest(name: str) -> None:
    asked = one_for_each_place()[0]
    responses = ENDPOINTS[name](
        llm(), asked.question, nodes=asked.nodes, min_new_tokens=12, max_new_tokens=12
    )
    assert len(responses) > 2
    text = ""
    for response in responses:
        assert response.delta is not None
        text += response.delta
        assert text_of(response) == text
    assert [response.raw is None for response in responses] == [True] * (len(responses) - 1) + [
        False
    ]


def test_sync_streams_are_generators() -> None:
    assert inspect.isgenerator(llm().stream_chat(user("Where?")))
    assert inspect.isgenerator(llm().stream_complete("Where?"))


def test_without_passages_it_is_an_ordinary_chat_model() -> None:
    with recorded() as generations:
        response = llm().chat(user("Who is there?"), passages=[], nodes=None)
    assert generations[0].windows == ()
    assert not response.raw["citations"]
    assert len(response.message.blocks) == 1


def test_options_of_a_call_go_before_those_of_the_llm() -> None:
    asked = one_for_each_place()[3]
    response = llm().complete(
        asked.question, nodes=asked.nodes, method="pcw", max_new_tokens=1, citations=False
    )
    assert response.raw["method"] == {"name": "pcw"}
    assert response.raw["usage"]["completion_tokens"] == 1
    assert response.raw["citations"] is None


def test_a_method_without_windows_has_no_windows_on_record() -> None:
    asked = one_for_each_place()[3]
    assert (
        llm().complete(asked.question, nodes=asked.nodes, method="sequential").raw["windows"] == []
    )


def test_the_engine_tells_of_the_windows_while_they_are_encoded() -> None:
    asked = one_for_each_place()[2]
    told: list[tuple[int, int]] = []
    llm().complete(
        asked.question, nodes=asked.nodes, on_encoded=lambda done, total: told.append((done, total))
    )
    assert told[-1] == (16, 16)


def test_passages_may_be_strings_mappings_and_nodes_without_scores() -> None:
    asked = one_for_each_place()[5]
    mappings = [{"text": p.text, "title": p.title, "id": p.id} for p in asked.passages]
    bare = [node.node for node in asked.nodes]
    for options in ({"passages": mappings}, {"passages": asked.passages}, {"nodes": bare}):
        response = llm().complete(asked.question, **options)
        assert response.text == asked.answer
        assert response.raw["citations"][5]["id"] == asked.nodes[5].node_id


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"passages": ["a"], "nodes": [TextNode(text="b")]}, "in several ways at once"),
        ({"nodes": ["a text"]}, "as passages= instead"),
        ({"passages": "a text"}, "wrap a single one in"),
        ({"passages": [17]}, "must be a string"),
    ],
)
def test_wrong_passages_are_refused(options: dict[str, object], message: str) -> None:
    for name in ENDPOINTS:
        with pytest.raises(InputError, match=message):
            ENDPOINTS[name](llm(), "Where?", **options)


def test_a_conversation_keeps_its_history() -> None:
    asked = one_for_each_place()[4]
    history = [
        ChatMessage(role="system", content="Answer in few words."),
        ChatMessage(role="user", content=asked.question),
        ChatMessage(role="assistant", content=asked.answer),
        ChatMessage(role="user", content=asked.question),
    ]
    response = llm().chat(history, nodes=asked.nodes)
    assert response.message.content == asked.answer
