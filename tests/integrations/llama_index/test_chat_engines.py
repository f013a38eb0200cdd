"""Every chat engine, every way of asking, the fact in every place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from llama_index.core import Settings
from llama_index.core.chat_engine import (
    CondensePlusContextChatEngine,
    CondenseQuestionChatEngine,
    ContextChatEngine,
    SimpleChatEngine,
)
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.llms import ChatMessage, MockLLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import MetadataMode, NodeWithScore

from llama_index.llms.rag_windows import (
    ATTENTION_MASS,
    RagWindowsLLM,
    WindowCondensePlusContextChatEngine,
    WindowContextChatEngine,
    WindowPromptHelper,
    WindowSynthesizer,
)
from rag_windows import InputError, RagWindowsError
from tests.integrations.llama_index.cases import (
    BARE,
    Asked,
    ListRetriever,
    N,
    RecordingLM,
    draw,
    llm,
    one_for_each_place,
    read_apart,
    reader,
    recorded,
)
from tests.integrations.llama_index.events import chats, heard
from tests.integrations.llama_index.ways import WAYS, Way, chat


@pytest.fixture(autouse=True)
def windows_for_stock_engines() -> Iterator[None]:
    """The one setting that a user of stock chat engines makes."""
    before = Settings._prompt_helper
    Settings.prompt_helper = WindowPromptHelper()
    yield
    Settings._prompt_helper = before


def memory(history: Sequence[ChatMessage] = ()) -> ChatMemoryBuffer:
    return ChatMemoryBuffer.from_defaults(chat_history=list(history), token_limit=1000)


def context(asked: Asked, reading: RagWindowsLLM) -> BaseChatEngine:
    return ContextChatEngine.from_defaults(
        ListRetriever(asked.nodes), llm=reading, memory=memory(), context_template="{context_str}"
    )


def condense(asked: Asked, reading: RagWindowsLLM) -> BaseChatEngine:
    return CondensePlusContextChatEngine.from_defaults(
        ListRetriever(asked.nodes), llm=reading, memory=memory(), context_prompt="{context_str}"
    )


def window_context(asked: Asked, reading: RagWindowsLLM) -> BaseChatEngine:
    return WindowContextChatEngine.from_defaults(
        ListRetriever(asked.nodes), llm=reading, memory=memory(), context_template="{context_str}"
    )


def window_condense(asked: Asked, reading: RagWindowsLLM) -> BaseChatEngine:
    return WindowCondensePlusContextChatEngine.from_defaults(
        ListRetriever(asked.nodes), llm=reading, memory=memory(), context_prompt="{context_str}"
    )


def told(nodes: Sequence[NodeWithScore]) -> list[str]:
    return [one.node.get_content(metadata_mode=MetadataMode.LLM) for one in nodes]


def bodies(nodes: Sequence[NodeWithScore]) -> list[str]:
    return [one.text for one in nodes]


Engine = Callable[[Asked, RagWindowsLLM], BaseChatEngine]
Texts = Callable[[Sequence[NodeWithScore]], list[str]]

ENGINES: tuple[tuple[Engine, Texts], ...] = (
    (context, told),
    (condense, told),
    (window_context, bodies),
    (window_condense, bodies),
)


@pytest.mark.parametrize(("engine", "texts"), ENGINES)
@pytest.mark.parametrize("way", WAYS)
def test_each_node_is_a_window_and_the_fact_is_found(
    engine: Engine, texts: Texts, way: Way
) -> None:
    place = (4 * ENGINES.index((engine, texts)) + WAYS.index(way)) % N  # each place comes up
    asked = one_for_each_place()[place]
    with recorded() as generations:
        text, response = chat(engine(asked, llm()), asked.question, way)
    (generation,) = generations
    assert read_apart(generation, texts(asked.nodes))
    assert text == asked.answer
    assert [one.node_id for one in response.source_nodes] == [one.node_id for one in asked.nodes]
    masses = [one.metadata.get(ATTENTION_MASS) for one in response.source_nodes]
    ours = engine in (window_context, window_condense)
    assert masses == [one.mass if ours else None for one in generation.citations or ()]
    assert not any(ATTENTION_MASS in one.metadata for one in asked.nodes)


@pytest.mark.parametrize("engine_class", [ContextChatEngine, WindowContextChatEngine])
def test_the_stock_template_is_the_instruction(engine_class: type[ContextChatEngine]) -> None:
    asked = draw(3, 1, 3)
    engine = engine_class.from_defaults(
        ListRetriever(asked.nodes), llm=llm(), memory=memory(), system_prompt="Be kind."
    )
    with recorded() as generations:
        engine.chat(asked.question)
    assert len(generations[0].windows) == 3


@pytest.mark.parametrize("engine_class", [ContextChatEngine, WindowContextChatEngine])
def test_windows_do_not_depend_on_the_conversation(engine_class: type[ContextChatEngine]) -> None:
    asked = draw(3, 1, 3)
    engine = engine_class.from_defaults(ListRetriever(asked.nodes), llm=llm(), memory=memory())
    with recorded() as generations:
        engine.chat(asked.question)
        engine.chat("And then?")
    first, second = generations
    assert [w.ids for w in first.windows] == [w.ids for w in second.windows]
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    assert [message.role.value for message in engine.chat_history] == ["user", "assistant"] * 2


def test_braces_in_a_conversation_are_words() -> None:
    asked = draw(3, 1, 2)
    said = "What does {query_str} with {context_str} and {other} mean?"
    history = [ChatMessage(role="user", content=said), ChatMessage(role="assistant", content="?")]
    engine = WindowContextChatEngine.from_defaults(
        ListRetriever(asked.nodes), llm=llm(), memory=memory(history)
    )
    with heard() as events:
        engine.chat(asked.question)
    (messages,) = chats(events)
    assert [m.content for m in messages if m.role.value == "user"] == [said, asked.question]


@pytest.mark.parametrize("way", WAYS)
def test_condensing_into_a_query_engine(way: Way) -> None:
    asked = one_for_each_place()[4]
    # This engine asks its query engine for a stream or none, as it is asked itself.
    inner = RetrieverQueryEngine(
        ListRetriever(asked.nodes), WindowSynthesizer(llm(), text_qa_template=BARE)
    )
    engine = CondenseQuestionChatEngine.from_defaults(inner, llm=llm(), memory=memory())
    with recorded() as generations:
        text, _ = chat(engine, asked.question, way)
    (generation,) = generations
    assert read_apart(generation, bodies(asked.nodes))
    assert text == asked.answer


@pytest.mark.parametrize("way", WAYS)
def test_a_chat_without_nodes_is_an_ordinary_chat(way: Way) -> None:
    engine = SimpleChatEngine.from_defaults(llm=llm(), memory=memory())
    with recorded() as generations:
        text, _ = chat(engine, "Where was Alra Ashden born?", way)
    (generation,) = generations
    assert generation.windows == ()
    assert text == generation.text


@pytest.mark.parametrize(("engine", "texts"), [ENGINES[0], ENGINES[2]])
@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_failure_is_no_empty_response(engine: Engine, texts: Texts, way: Way) -> None:
    asked = draw(1, 0, 2)
    broken = RagWindowsLLM(lm=reader(), generate_kwargs={"num_beams": "two"})
    with pytest.raises(RagWindowsError, match="num_beams must be a whole number"):
        chat(engine(asked, broken), asked.question, way)


def test_another_llm_is_refused() -> None:
    retriever = ListRetriever(draw(1, 0, 2).nodes)
    with pytest.raises(InputError, match="MockLLM"):
        WindowContextChatEngine.from_defaults(retriever, llm=MockLLM())
    direct = WindowContextChatEngine(retriever, MockLLM(), memory(), prefix_messages=[])
    with pytest.raises(InputError, match="MockLLM"):
        direct.chat("Who is it?")


@pytest.mark.parametrize(
    "engine_class", [WindowContextChatEngine, WindowCondensePlusContextChatEngine]
)
def test_a_long_conversation_is_cut_to_what_a_prompt_holds(engine_class: Any) -> None:
    narrow = copy.deepcopy(reader().model)  # filling all of its positions would take seconds
    narrow.config.max_position_embeddings = 1024
    lm = RecordingLM.from_pretrained(narrow, tokenizer=reader().tokenizer)
    llm = RagWindowsLLM(lm=lm, max_new_tokens=8)
    asked = draw(3, 1, 2)
    options = {"skip_condense": True} if "Condense" in engine_class.__name__ else {}
    engine = engine_class.from_defaults(ListRetriever(asked.nodes), llm=llm, **options)
    for _ in range(9):
        engine.chat("Where was Alra Ashden born? " * 20)
    assert [len(generation.windows) for generation in lm.generations] == [2] * 9
    assert max(generation.usage.prompt_tokens for generation in lm.generations) > 300
