"""Every endpoint and engine, every way of asking: one window a node, and the answer is right."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llama_index.core import Settings, get_response_synthesizer
from llama_index.core.chat_engine import (
    CondensePlusContextChatEngine,
    CondenseQuestionChatEngine,
    ContextChatEngine,
    SimpleChatEngine,
)
from llama_index.core.llms import ChatMessage, MockLLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import CitationQueryEngine, RetrieverQueryEngine
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import MetadataMode

from llama_index.llms.rag_windows import (
    ATTENTION_MASS,
    Parts,
    RagWindowsLLM,
    WindowCondensePlusContextChatEngine,
    WindowContextChatEngine,
    WindowPromptHelper,
    WindowSynthesizer,
)
from rag_windows import InputError, RagWindowsError
from tests.integrations.cases import PLACES, Case, case, one_window_each, reader
from tests.integrations.llama_index.asking import (
    BARE,
    WAYS,
    ListRetriever,
    ScriptedLLM,
    Year,
    ask,
    llm,
    nodes,
    nodes_of,
    told,
    user,
)


@pytest.fixture(autouse=True)
def windows_for_stock_engines() -> Iterator[None]:
    """The one setting that a user of stock engines makes."""
    before = Settings._prompt_helper
    Settings.prompt_helper = WindowPromptHelper()
    yield
    Settings._prompt_helper = before


def memory(*history: ChatMessage) -> ChatMemoryBuffer:
    return ChatMemoryBuffer.from_defaults(chat_history=list(history), token_limit=1000)


def stock(mode: Any, streams: bool = False, **options: Any) -> BaseSynthesizer:
    """LlamaIndex's own synthesizer; only the prompt helper is ours."""
    templates = {"text_qa_template": BARE, "summary_template": BARE}
    return get_response_synthesizer(
        llm=llm(), response_mode=mode, streaming=streams, **{**templates, **options}
    )


def windows(streams: bool = False, **options: Any) -> WindowSynthesizer:
    return WindowSynthesizer(llm(), text_qa_template=BARE, streaming=streams, **options)


# Each route: what is asked, by which verb, with what; the texts of its windows; whether source
# nodes tell their masses.

Asked = tuple[Any, str, tuple[Any, ...], dict[str, Any]]


def by_chat(one: Case, streams: bool) -> Asked:
    return llm(), "chat", (user(one.question),), {"nodes": nodes_of(one)}


def by_complete(one: Case, streams: bool) -> Asked:
    return llm(), "complete", (one.question,), {"passages": one.passages}


def by_predict(one: Case, streams: bool) -> Asked:
    parts = Parts.of(one.passages)
    return llm(), "predict", (BARE,), {"context_str": parts, "query_str": one.question}


def by_predict_as_text(one: Case, streams: bool) -> Asked:
    model = RagWindowsLLM(lm=reader(), max_new_tokens=16, is_chat_model=False)
    return model, *by_predict(one, streams)[1:]


def over(synthesizer: BaseSynthesizer, one: Case) -> Asked:
    found = ListRetriever(nodes_of(one))
    return RetrieverQueryEngine(found, synthesizer), "query", (one.question,), {}


def compact(one: Case, streams: bool) -> Asked:
    return over(stock("compact", streams), one)


def tree_summarize(one: Case, streams: bool) -> Asked:
    return over(stock("tree_summarize", streams), one)


def window_synthesizer(one: Case, streams: bool) -> Asked:
    return over(windows(streams), one)


def citation(one: Case, streams: bool) -> Asked:
    found, synthesizer = ListRetriever(nodes_of(one)), stock("compact", streams)
    engine = CitationQueryEngine(found, llm=llm(), response_synthesizer=synthesizer)
    return engine, "query", (one.question,), {}


def citation_windows(one: Case, streams: bool) -> Asked:
    found, synthesizer = ListRetriever(nodes_of(one)), windows(streams)
    engine = CitationQueryEngine(found, llm=llm(), response_synthesizer=synthesizer)
    return engine, "query", (one.question,), {}


def talks(kind: Any, one: Case, template: str) -> Asked:
    options = {"llm": llm(), "memory": memory(), template: "{context_str}"}
    engine = kind.from_defaults(ListRetriever(nodes_of(one)), **options)
    return engine, "chat", (one.question,), {}


def context(one: Case, streams: bool) -> Asked:
    return talks(ContextChatEngine, one, "context_template")


def condense(one: Case, streams: bool) -> Asked:
    return talks(CondensePlusContextChatEngine, one, "context_prompt")


def window_context(one: Case, streams: bool) -> Asked:
    return talks(WindowContextChatEngine, one, "context_template")


def window_condense(one: Case, streams: bool) -> Asked:
    return talks(WindowCondensePlusContextChatEngine, one, "context_prompt")


def condense_question(one: Case, streams: bool) -> Asked:
    # This engine asks its query engine for a stream or none, as it is asked itself.
    inner = RetrieverQueryEngine(ListRetriever(nodes_of(one)), windows())
    engine = CondenseQuestionChatEngine.from_defaults(inner, llm=llm(), memory=memory())
    return engine, "chat", (one.question,), {}


def bodies(one: Case) -> list[str]:
    """The nodes' texts; their titles head the windows."""
    return [passage.text for passage in one.passages]


def shown(one: Case) -> list[str]:
    """What LlamaIndex shows a model of each node."""
    return [node.node.get_content(metadata_mode=MetadataMode.LLM) for node in nodes_of(one)]


def numbered(one: Case) -> list[str]:
    return [f"Source {i}:\n{text}\n" for i, text in enumerate(bodies(one), 1)]


def numbered_shown(one: Case) -> list[str]:
    pairs = zip(one.passages, numbered(one), strict=True)
    return [f"title: {passage.title}\n\n{text.strip()}" for passage, text in pairs]


Route = Callable[[Case, bool], Asked]
ROUTES: dict[Route, tuple[Callable[[Case], list[str]], bool]] = {
    **dict.fromkeys((by_chat, by_complete, by_predict, by_predict_as_text), (bodies, False)),
    **dict.fromkeys((compact, tree_summarize, context, condense), (shown, False)),
    **dict.fromkeys((window_synthesizer, window_context, window_condense), (bodies, True)),
    citation: (numbered_shown, False),
    citation_windows: (numbered, True),
    condense_question: (bodies, False),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("route", ROUTES)
def test_each_node_is_a_window_and_the_answer_is_right(route: Route, way: str) -> None:
    one = case(PLACES[(list(ROUTES).index(route) + WAYS.index(way)) % len(PLACES)])
    target, verb, given, options = route(one, "stream" in way)
    with told() as seen:
        text, response, _ = ask(target, verb, way, *given, **options)
    assert text == one.answer
    (raw,) = seen.raws()
    texts, weighed = ROUTES[route]
    assert one_window_each(raw["windows"], texts(one))
    strongest = max(raw["citations"], key=lambda entry: entry["mass"])
    assert strongest["passage"] == one.place
    if route is by_chat:
        assert [entry["id"] for entry in raw["citations"]] == [p.id for p in one.passages]
    sources = getattr(response, "source_nodes", None)
    if sources and "citation" not in route.__name__ and "condense_q" not in route.__name__:
        masses = [source.metadata.get(ATTENTION_MASS) for source in sources]
        assert masses == [entry["mass"] if weighed else None for entry in raw["citations"]]
        assert [source.node_id for source in sources] == [p.id for p in one.passages]


@pytest.mark.parametrize(
    ("mode", "calls"),
    [
        ("compact_accumulate", [3]),
        ("accumulate", [1, 1, 1]),
        ("refine", [1, 1, 1]),
        ("simple_summarize", [0]),
    ],
)
def test_what_a_call_of_the_other_modes_reads(mode: Any, calls: list[int]) -> None:
    with told() as seen:
        stock(mode).synthesize("Who is it?", nodes("One.", "Two.", "Three."))
    assert [len(raw["windows"]) for raw in seen.raws()] == calls


def test_a_bound_on_windows_makes_several_calls_and_loses_nothing() -> None:
    with pytest.raises(InputError, match="at least 2"):
        WindowPromptHelper(max_windows=1)
    helper = WindowPromptHelper(max_windows=3)
    with told() as seen:
        stock("tree_summarize", prompt_helper=helper).synthesize(
            "Who is it?", nodes("One.", "Two.", "Three.", "Four.", "Five.")
        )
    first, second, summaries = seen.raws()
    assert [len(first["windows"]), len(second["windows"])] == [3, 2]
    assert len(summaries["windows"]) + len(summaries["notes"]) == 2


@pytest.mark.parametrize("mode", ["compact", "tree_summarize"])
def test_the_stock_templates_keep_nodes_apart_and_hostile_texts_too(mode: Any) -> None:
    texts = ["One.\n\n\ue000Two.\n\n------\nQuery: {query_str} {context_str}", "Three."]
    for synthesizer in (
        get_response_synthesizer(llm=llm(), response_mode=mode),
        WindowSynthesizer(llm()),
    ):
        with told() as seen:
            synthesizer.synthesize("Who is it?", nodes(*texts))
        (raw,) = seen.raws()
        assert one_window_each(raw["windows"], texts)


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("mode", ["compact", "tree_summarize"])
def test_stock_modes_answer_with_an_object_over_windows(mode: Any, way: str) -> None:
    scripted = ScriptedLLM(lm=reader(), max_new_tokens=2, says='{"year": 1861}')
    synthesizer = get_response_synthesizer(llm=scripted, response_mode=mode, output_cls=Year)
    engine = RetrieverQueryEngine(ListRetriever(nodes("One.", "Two.")), synthesizer)
    with told() as seen:
        _, response, _ = ask(engine, "query", way, "When?")
    assert response.response == Year(year=1861)
    assert [len(raw["windows"]) for raw in seen.raws()] == [2]
    broken = get_response_synthesizer(llm=llm(), response_mode=mode, output_cls=Year)
    with pytest.raises(RagWindowsError):
        broken.synthesize("When?", nodes("One."))


ENGINES = pytest.mark.parametrize("kind", [ContextChatEngine, WindowContextChatEngine])


@ENGINES
def test_windows_do_not_depend_on_the_conversation(kind: Any) -> None:
    found = ListRetriever(nodes("One.", "Two."))
    engine = kind.from_defaults(found, llm=llm(), memory=memory(), system_prompt="Be kind.")
    with told() as seen:
        engine.chat("Who is it?")
        engine.chat("And then?")
    first, second = seen.raws()
    assert first["windows"] == second["windows"]
    assert len(first["windows"]) == 2
    assert second["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"]
    assert [message.role.value for message in engine.chat_history] == ["user", "assistant"] * 2


def test_braces_in_a_conversation_are_words() -> None:
    said = "What does {query_str} with {context_str} and {other} mean?"
    history = memory(*user(said), ChatMessage(role="assistant", content="?"))
    found = ListRetriever(nodes("One."))
    engine = WindowContextChatEngine.from_defaults(found, llm=llm(), memory=history)
    with told() as seen:
        engine.chat("Who?")
    (messages,) = seen.chats()
    assert [m.content for m in messages if m.role.value == "user"] == [said, "Who?"]


@pytest.mark.parametrize("way", WAYS)
def test_a_chat_without_nodes_is_an_ordinary_chat(way: str) -> None:
    engine = SimpleChatEngine.from_defaults(llm=llm(), memory=memory())
    with told() as seen:
        text, _, _ = ask(engine, "chat", way, "Where was Alra Ashden born?")
    (raw,) = seen.raws()
    assert raw["windows"] == []
    assert text == llm().chat(user("Where was Alra Ashden born?")).message.content


def test_what_an_engine_can_not_use_is_refused() -> None:
    found = ListRetriever(nodes("One."))
    with pytest.raises(InputError, match="MockLLM"):
        WindowContextChatEngine.from_defaults(found, llm=MockLLM())
    direct = WindowContextChatEngine(found, MockLLM(), memory(), prefix_messages=[])
    with pytest.raises(InputError, match="MockLLM"):
        direct.chat("Who is it?")
    with pytest.raises(InputError, match="MockLLM"):
        WindowSynthesizer(MockLLM())  # type: ignore[arg-type]  # the refusal is what is tested


@pytest.mark.parametrize("kind", [WindowContextChatEngine, WindowCondensePlusContextChatEngine])
def test_a_long_conversation_is_cut_to_what_a_prompt_holds(kind: Any) -> None:
    narrow = copy.deepcopy(reader().model)  # filling all of its positions would take seconds
    narrow.config.max_position_embeddings = 1024
    model = RagWindowsLLM(model=narrow, tokenizer=reader().tokenizer, max_new_tokens=2)
    options = {"skip_condense": True} if "Condense" in kind.__name__ else {}
    engine = kind.from_defaults(ListRetriever(nodes("One.")), llm=model, **options)
    with told() as seen:
        for _ in range(8):
            engine.chat("Where was Alra Ashden born? " * 6)
    sizes = [raw["usage"]["prompt_tokens"] for raw in seen.raws()]
    turn = sizes[1] - sizes[0]
    assert sizes[:3] == [sizes[0], sizes[0] + turn, sizes[0] + 2 * turn], "it remembers"
    assert max(sizes) == max(sizes[:6]) < 1024 / 2, "and is cut to half a window"


def test_nothing_here_needs_openai() -> None:
    assert not any(name.split(".")[0] == "openai" for name in sys.modules)
    assert "llama_index.llms.openai" not in sys.modules
