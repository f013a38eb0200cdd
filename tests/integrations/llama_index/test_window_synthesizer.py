from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from llama_index.core.base.response.schema import PydanticResponse, StreamingResponse
from llama_index.core.llms import MockLLM
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.query_engine.citation_query_engine import CITATION_QA_TEMPLATE
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode

from llama_index.llms.rag_windows import (
    ATTENTION_MASS,
    RagWindowsLLM,
    SourceNode,
    WindowSynthesizer,
)
from llama_index.llms.rag_windows.synthesizer import NOTE
from rag_windows import GenerationError, InputError
from tests.integrations.llama_index.cases import (
    BARE,
    ListRetriever,
    draw,
    llm,
    one_for_each_place,
    reader,
    recorded,
)
from tests.integrations.llama_index.events import chats, heard
from tests.integrations.llama_index.scripted import ScriptedLLM, Year
from tests.integrations.llama_index.ways import WAYS, Way, query, streams


def windows(way: Way = "sync", **options: Any) -> WindowSynthesizer:
    return WindowSynthesizer(llm(), text_qa_template=BARE, streaming=streams(way), **options)


def plain_nodes(*texts: str) -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(text=t, id_=f"n{i}")) for i, t in enumerate(texts)]


def masses_of(response: Any) -> list[Any]:
    return [one.metadata.get(ATTENTION_MASS) for one in response.source_nodes]


def ask(synthesizer: WindowSynthesizer, nodes: list[NodeWithScore], way: Way) -> tuple[str, Any]:
    return query(RetrieverQueryEngine(ListRetriever(nodes), synthesizer), "Who is it?", way)


@pytest.mark.parametrize("way", WAYS)
def test_sources_are_copies_with_their_masses(way: Way) -> None:
    nodes = draw(3, 1, 4).nodes
    before = [one.model_dump() for one in nodes]
    with recorded() as generations:
        _, response = ask(windows(way), nodes, way)
    (generation,) = generations
    assert generation.citations is not None
    masses = masses_of(response)
    assert masses == [citation.mass for citation in generation.citations]
    assert all(mass > 0 for mass in masses)
    assert [one.node_id for one in response.source_nodes] == [one.node_id for one in nodes]
    assert [one.score for one in response.source_nodes] == [one.score for one in nodes]
    assert all(isinstance(one, SourceNode) for one in response.source_nodes)
    assert [getattr(one, "attention_mass", None) for one in response.source_nodes] == masses
    assert [one.model_dump() for one in nodes] == before
    for given, source in zip(nodes, response.source_nodes, strict=True):
        shown = source.node.get_content(metadata_mode=MetadataMode.LLM)
        assert shown == given.node.get_content(metadata_mode=MetadataMode.LLM)
        assert response.metadata[source.node_id][ATTENTION_MASS] == source.metadata[ATTENTION_MASS]


def test_masses_of_a_stream_are_there_at_its_end() -> None:
    response = windows("stream").synthesize("Who is it?", draw(3, 1, 2).nodes)
    assert isinstance(response, StreamingResponse)
    assert masses_of(response) == [None, None]
    list(response.response_gen)
    assert all(masses_of(response))


def test_asking_again_over_old_sources_leaves_their_masses() -> None:
    first = windows().synthesize("Who is it?", draw(3, 1, 3).nodes)
    masses = masses_of(first)
    second = windows().synthesize("When was it?", first.source_nodes[:2])
    assert masses_of(first) == masses
    assert masses_of(second) != masses[:2]


def test_blank_repeated_and_long_nodes_are_told() -> None:
    long = " ".join(f"Alra Ashden was born in {year}." for year in range(1800, 1900))
    nodes = plain_nodes("One.", " \n", "One.", long)
    small = RagWindowsLLM(lm=reader(), max_new_tokens=4)
    response = WindowSynthesizer(small).synthesize("Who is it?", nodes)
    notes = [str(one.metadata.get(NOTE, "")) for one in response.source_nodes]
    assert notes[0] == ""
    assert "has no text" in notes[1]
    assert "repeats passage 0" in notes[2]
    assert masses_of(response)[1:3] == [0.0, 0.0]
    assert masses_of(response)[0] > 0


@pytest.mark.parametrize("way", WAYS)
def test_each_event_comes_once(way: Way) -> None:
    with heard() as events:
        ask(windows(way), draw(3, 1, 2).nodes, way)
    counts = Counter(type(event).__name__ for event in events)
    for name in ("Synthesize", "GetResponse", "LLMChat"):
        assert counts[f"{name}StartEvent"] == counts[f"{name}EndEvent"] == 1


def test_the_template_becomes_the_instruction() -> None:
    template = ChatPromptTemplate.from_messages(
        [("system", "Be brief."), ("user", "Read:\n{context_str}\nTone: {tone}\nQ: {query_str}")]
    ).partial_format(tone="kind")
    asking = WindowSynthesizer(llm(), text_qa_template=template)
    with heard() as events, recorded() as generations:
        asking.synthesize("Who is it?", plain_nodes("One.", "Two."))
    (messages,) = chats(events)
    said = [(message.role.value, message.content) for message in messages]
    assert said[-1] == ("user", "Who is it?")
    instruction = "\n".join(text or "" for role, text in said if role == "system")
    assert "Be brief." in instruction
    assert "Tone: kind" in instruction
    assert "Who is it?" not in instruction
    assert len(generations[0].windows) == 2


def test_the_citation_engines_template_can_be_used() -> None:
    asking = WindowSynthesizer(llm(), text_qa_template=CITATION_QA_TEMPLATE)
    with heard() as events, recorded() as generations:
        asking.synthesize("Who is it?", plain_nodes("One.", "Two."))
    (messages,) = chats(events)
    assert "solely on the provided sources" in (messages[0].content or "")
    assert messages[-1].content == "Who is it?"
    assert len(generations[0].windows) == 2


def test_the_llms_own_system_prompt_is_kept() -> None:
    speaking = RagWindowsLLM(lm=reader(), max_new_tokens=2, system_prompt="Speak softly.")
    with heard() as events:
        WindowSynthesizer(speaking).synthesize("Who is it?", plain_nodes("One."))
    (messages,) = chats(events)
    system = [message.content for message in messages if message.role.value == "system"]
    assert system[0] == "Speak softly."
    assert len(system) > 1


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (PromptTemplate("{context_str}"), "{query_str}"),
        (PromptTemplate("{query_str}"), "{context_str}"),
        (PromptTemplate("{context_str}\n{query_str}\n{style}"), "style"),
        (BARE.partial_format(query_str="Always this?"), "question"),
        (
            PromptTemplate(
                "{context_str}\n{query_str}", function_mappings={"context_str": lambda **_: ""}
            ),
            "function",
        ),
        ("{context_str}\n{query_str}", "PromptTemplate"),
    ],
)
def test_templates_that_would_drop_something_are_refused(template: Any, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        WindowSynthesizer(llm(), text_qa_template=template)
    with pytest.raises(InputError, match=complaint):
        windows().update_prompts({"text_qa_template": template})


def test_renamed_variables_are_followed() -> None:
    renamed = PromptTemplate(
        "{docs}\n{q}", template_var_mappings={"context_str": "docs", "query_str": "q"}
    )
    asked = one_for_each_place()[0]
    response = WindowSynthesizer(llm(), text_qa_template=renamed).synthesize(
        asked.question, asked.nodes
    )
    assert str(response) == asked.answer


@pytest.mark.parametrize("way", WAYS[:2])
def test_an_object_is_answered_where_asked(way: Way) -> None:
    scripted = ScriptedLLM(lm=reader(), max_new_tokens=2, says='{"year": 1861}')
    asking = WindowSynthesizer(scripted, output_cls=Year)
    with recorded() as generations:
        _, response = ask(asking, plain_nodes("One.", "Two."), way)
    assert isinstance(response, PydanticResponse)
    assert response.response == Year(year=1861)
    assert len(generations[0].windows) == 2


def test_what_is_no_object_is_an_error() -> None:
    asking = WindowSynthesizer(llm(), output_cls=Year)
    with pytest.raises(GenerationError, match="JSON of Year"):
        asking.synthesize("Who is it?", plain_nodes("One."))
    with pytest.raises(InputError, match="streaming"):
        WindowSynthesizer(llm(), output_cls=Year, streaming=True)


def test_another_llm_is_refused() -> None:
    with pytest.raises(InputError, match="MockLLM"):
        WindowSynthesizer(MockLLM())  # type: ignore[arg-type]  # the refusal is what is tested


def test_no_nodes_are_answered_without_the_model() -> None:
    with recorded() as generations:
        assert str(windows().synthesize("Who is it?", [])) == "Empty Response"
        mine = windows(empty_response="Nothing found.").synthesize("Who is it?", [])
    assert str(mine) == "Nothing found."
    assert generations == []


def test_further_nodes_are_returned_and_options_passed_on() -> None:
    further = plain_nodes("Further.")
    with recorded() as generations:
        response = windows().synthesize(
            "Who is it?", plain_nodes("One."), further, max_new_tokens=1, method="pcw"
        )
    assert response.source_nodes[1:] == further
    assert len(generations[0].token_ids) == 1


def test_texts_alone_can_be_read_too() -> None:
    asked = one_for_each_place()[1]
    texts = [f"{one.metadata['title']}\n{one.text}" for one in asked.nodes]
    with recorded() as generations:
        assert windows().get_response(asked.question, texts) == asked.answer
    assert len(generations[0].windows) == len(texts)


def test_a_stream_that_is_closed_stops() -> None:
    with recorded() as generations:
        response = windows("stream").synthesize("Who is it?", draw(3, 1, 2).nodes)
        assert isinstance(response, StreamingResponse)
        next(iter(response.response_gen))
        response.response_gen.close()
    assert generations == []
    assert masses_of(response) == [None, None]


def test_many_ask_at_once() -> None:
    asked = one_for_each_place()[:8]

    async def everybody() -> list[Any]:
        asking = windows()
        return await asyncio.gather(*(asking.asynthesize(one.question, one.nodes) for one in asked))

    answers = asyncio.run(everybody())
    assert [str(answer) for answer in answers] == [one.answer for one in asked]
