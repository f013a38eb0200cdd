"""Nodes, blocks and templates on their way to the engine, and source nodes on their way back."""

from __future__ import annotations

import asyncio
import copy
import logging
from typing import Any, cast

import pytest
from llama_index.core.base.llms.types import (
    ChatMessage,
    CitableBlock,
    CitationBlock,
    ImageBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
)
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate, SelectorPromptTemplate
from llama_index.core.prompts.default_prompt_selectors import (
    DEFAULT_TEXT_QA_PROMPT_SEL,
    DEFAULT_TREE_SUMMARIZE_PROMPT_SEL,
)
from llama_index.core.prompts.default_prompts import DEFAULT_TEXT_QA_PROMPT
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.query_engine.citation_query_engine import CITATION_QA_TEMPLATE
from llama_index.core.response_synthesizers import (
    CompactAndRefine,
)
from llama_index.core.schema import MetadataMode, NodeRelationship, NodeWithScore, TextNode

from llama_index.llms.rag_windows import (
    ATTENTION_MASS,
    Parts,
    RagWindowsLLM,
    SourceNode,
    WindowOrderPostprocessor,
    WindowPromptHelper,
    WindowSynthesizer,
    passage_of_node,
)
from llama_index.llms.rag_windows.messages import read_messages
from llama_index.llms.rag_windows.templates import WindowedPrompt, WindowTemplate
from rag_windows import InputError, LimitError, Passage, PromptError
from tests.integrations.cases import PLACES, Case, case, one_window_each, reader
from tests.integrations.llama_index.asking import (
    BARE,
    WAYS,
    ListRetriever,
    Year,
    ask,
    llm,
    nodes,
    nodes_of,
    told,
    user,
)

# Blocks


def block(text: str, title: str = "", source: str = "") -> CitableBlock:
    return CitableBlock(title=title, source=source, content=[TextBlock(text=text)])


def as_blocks(one: Case) -> ChatMessage:
    made = [block(p.text, p.title or "", p.id or "") for p in one.passages]
    return ChatMessage(role="user", blocks=[*made, TextBlock(text=one.question)])


def test_each_citable_block_is_a_window_and_the_answer_cites_its_passage() -> None:
    one = case(PLACES[2])
    response = llm().chat([as_blocks(one)])
    assert one_window_each(response.raw["windows"], [p.text for p in one.passages])
    text, cited, *_ = response.message.blocks
    assert isinstance(text, TextBlock)
    assert text.text == response.message.content == one.answer
    assert isinstance(cited, CitationBlock)
    assert isinstance(cited.cited_content, TextBlock)
    right = one.passages[one.place]
    assert (cited.cited_content.text, cited.source, cited.title) == (
        *(right.text, right.id, right.title),
    )
    assert cited.additional_location_info == {"passage": one.place}
    *before, last = llm().stream_chat([as_blocks(one)])
    assert all(len(piece.message.blocks) == 1 for piece in before)
    assert isinstance(last.message.blocks[1], CitationBlock)
    # An answer can go back as history.
    memory = ChatMemoryBuffer.from_defaults()
    for message in (as_blocks(one), response.message, *user(one.question)):
        memory.put(message)
    again = [ChatMessage.model_validate_json(m.model_dump_json()) for m in memory.get_all()]
    assert llm().chat(again).message.content == one.answer


def test_messages_become_those_of_a_chat_template() -> None:
    asked = [
        block("first", "T", "id-1"),
        CitableBlock(title="", source="", content=[TextBlock(text="p")] * 2),
        TextBlock(text="d"),
    ]
    answer = [ThinkingBlock(content="hm"), TextBlock(text="c")]
    messages = [
        ChatMessage(role="system", content="One."),
        ChatMessage(role="developer", content="Two."),
        ChatMessage(role="user", blocks=[TextBlock(text="a"), TextBlock(text="b")]),
        ChatMessage(role="model", blocks=answer),
        ChatMessage(role="user", blocks=asked),
    ]
    read, passages = read_messages(messages)
    assert [(one["role"], one["content"]) for one in read] == [
        *(("system", "One.\n\nTwo."), ("user", "a\nb"), ("assistant", "c"), ("user", "d"))
    ]
    assert passages == [Passage("first", id="id-1", title="T"), Passage("p\np")]


def test_what_can_not_be_shown_is_refused() -> None:
    image = ImageBlock(image=b"")
    picture = CitableBlock(title="A picture", source="", content=[image])
    both = {"nodes": nodes("One.")}
    refused: list[tuple[Any, str, dict[str, Any]]] = [
        ([*user("Where?"), ChatMessage(role=MessageRole.TOOL, content="42")], "must follow", {}),
        ([ChatMessage(role="user", blocks=[image])], "ImageBlock", {}),
        ([ChatMessage(role="user", blocks=[picture])], "A picture", {}),
        ([as_blocks(case(PLACES[0]))], r"citable blocks \(8\) and nodes=", both),
        ([], "non-empty list", {}),
    ]
    for messages, match, options in refused:
        with pytest.raises((InputError, PromptError), match=match):
            llm().chat(messages, **options)


def test_a_node_keeps_what_llama_index_shows_of_it() -> None:
    def node(*hidden: str, **metadata: Any) -> TextNode:
        text, excluded = "The text.", list(hidden)
        return TextNode(text=text, id_="n1", metadata=metadata, excluded_llm_metadata_keys=excluded)

    metadata = {"title": "A title", "year": 1900, "secret": "x"}
    known = Passage("year: 1900\n\nThe text.", "n1", "A title", 0.5, metadata)
    assert passage_of_node(NodeWithScore(node=node("secret", **metadata), score=0.5)) == known
    hidden = passage_of_node(node(*metadata, **metadata))
    assert hidden == Passage("The text.", id="n1", metadata=metadata)
    assert passage_of_node(node(title=" ")).title is None


VALUES: dict[str, Any] = {"context_str": Parts.of(["A passage."]), "query_str": "Who?"}


def shown(prompt: Any, **arguments: Any) -> list[tuple[str, str | None]]:
    template = WindowTemplate.of(prompt, {**VALUES, **arguments}, llm())
    return [(message.role.value, message.content) for message in template.format_messages()]


@pytest.mark.parametrize(
    "template",
    [DEFAULT_TEXT_QA_PROMPT_SEL, DEFAULT_TEXT_QA_PROMPT, DEFAULT_TREE_SUMMARIZE_PROMPT_SEL],
)
def test_a_stock_template_leaves_the_question_alone(template: Any) -> None:
    *system, asked = shown(template)
    assert asked == ("user", "Who?")
    assert {role for role, _ in system} == {"system"}
    instruction = "\n".join(text or "" for _, text in system)
    assert "not prior knowledge" in instruction
    assert all(word not in instruction for word in ("---", "Query:", "Answer:", "A passage", "Who"))
    assert shown(template, query_str="And when?")[:-1] == system, "a window depends on none"


MAPPED = PromptTemplate(
    "Say.\n{documents}\n{question}",
    template_var_mappings={"context_str": "documents", "query_str": "question"},
)
SAID = [("system", "Say."), ("user", "Who?")]
TALK = ChatPromptTemplate(
    [
        ChatMessage(role="system", content="Be kind.\n-----\n{context_str}\n-----\nUse it."),
        ChatMessage(role="user", content="Do you know {context_str} or {query_str}?"),
        ChatMessage(role="assistant", content="I do."),
        ChatMessage(role="user", content="In short: {query_str}"),
    ]
)
FRAMED = PromptTemplate(
    "Answer in German.\n\nContext: {context_str}\n\nQuestion: {query_str}\nFollow {rule}.\nAnswer:"
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (PromptTemplate("Say.\n{context_str}\n{query_str}"), SAID),
        (MAPPED, SAID),
        (SelectorPromptTemplate(FRAMED, conditionals=[(lambda _: True, MAPPED)]), SAID),
        (FRAMED, [("system", "Answer in German.\n\nFollow rule 3."), ("user", "Who?")]),
        (
            PromptTemplate(
                "----\na\n----\n\nb {context_str} c\nRules:\n{query_str}\nRefined Answer: "
            ),
            [("system", "----\na\n----\n\nb  c"), ("user", "Who?")],
        ),
        (
            TALK,
            [
                ("system", "Be kind.\nUse it."),
                ("user", "Do you know  or Who??"),
                ("assistant", "I do."),
                ("user", "In short: Who?"),
            ],
        ),
    ],
)
def test_what_stands_around_passages_and_question_is_the_instruction(
    template: Any, expected: Any
) -> None:
    assert shown(template, rule="rule 3") == expected


def test_a_template_that_would_lose_the_passages_is_refused() -> None:
    losing = PromptTemplate(
        "{context_str}\n{query_str}", function_mappings={"context_str": lambda **_: "all of it"}
    )
    for prompt in (PromptTemplate("Tell me: {query_str}"), losing):
        with pytest.raises(InputError, match="would be lost"):
            llm().predict(prompt, **VALUES)
    with pytest.raises(InputError, match="all hold passages"):
        llm().predict(PromptTemplate("{a}{b}"), a=Parts.of(["a"]), b=Parts.of(["b"]))
    plain = llm()._get_messages(BARE, context_str="A passage.", query_str="Who?")
    assert [message.content for message in plain] == ["A passage.\nWho?"]


@pytest.mark.parametrize("chat", [True, False])
def test_the_system_prompt_is_given_once_and_first(chat: bool) -> None:
    model = RagWindowsLLM(lm=reader(), system_prompt="Be brief.", is_chat_model=chat)
    prompt = PromptTemplate("Say.\n{context_str}\n{query_str}")
    text = model._get_prompt(prompt, **VALUES)
    assert isinstance(text, WindowedPrompt)
    messages = model._get_messages(prompt, **VALUES) if chat else text.messages
    assert [m.content for m in messages if m.role.value == "system"] == ["Be brief.", "Say."]
    assert model._get_prompt(PromptTemplate("{query_str}"), query_str="Who?") == "Who?"


def test_parts_survive_copies_and_read_as_text() -> None:
    parts = Parts.of(["One.", {"text": "Two.", "title": "T", "id": "2"}])
    assert parts == "One.\n\nTwo."
    for again in (copy.copy(parts), copy.deepcopy(parts)):
        assert isinstance(again, Parts)
        assert again.passages == parts.passages
    assert type(parts.strip()) is str
    assert len(llm().complete("Who?", passages=parts).raw["windows"]) == 2
    with pytest.raises(InputError, match="Give passages as"):
        llm().complete(parts)


# WindowSynthesizer and its source nodes


def windows(way: str = "sync", **options: Any) -> WindowSynthesizer:
    return WindowSynthesizer(llm(), text_qa_template=BARE, streaming="stream" in way, **options)


def masses(response: Any) -> list[Any]:
    return [one.metadata.get(ATTENTION_MASS) for one in response.source_nodes]


@pytest.mark.parametrize("way", WAYS)
def test_sources_are_copies_with_their_masses_and_events_come_once(way: str) -> None:
    given = nodes_of(case(PLACES[0]))
    before = [one.model_dump() for one in given]
    with told() as seen:
        engine = RetrieverQueryEngine(ListRetriever(given), windows(way))
        _, response, _ = ask(engine, "query", way, "Who is it?")
    assert all(isinstance(one, SourceNode) for one in response.source_nodes)
    assert [one.attention_mass for one in response.source_nodes] == masses(response)
    assert [one.model_dump() for one in given] == before
    for one, source in zip(given, response.source_nodes, strict=True):
        assert (one.node_id, one.score) == (source.node_id, source.score)
        text = one.node.get_content(metadata_mode=MetadataMode.LLM)
        assert source.node.get_content(metadata_mode=MetadataMode.LLM) == text
        assert response.metadata[source.node_id][ATTENTION_MASS] == source.attention_mass
    for name in ("SynthesizeStart", "GetResponseStart", "LLMChatStart", "SynthesizeEnd"):
        assert len(seen.named(f"{name}Event")) == 1


def test_masses_of_a_stream_come_at_its_end_and_stay() -> None:
    response: Any = windows("stream").synthesize("Who is it?", nodes("One.", "Two.", "Three."))
    assert masses(response) == [None] * 3
    list(response.response_gen)
    first = masses(response)
    assert all(first)
    second = windows().synthesize("When was it?", response.source_nodes[:2])
    assert masses(response) == first
    assert masses(second) != first[:2]


@pytest.mark.parametrize("way", WAYS)
def test_sources_tell_what_the_answer_loses_without_them(way: str) -> None:
    """As the engine says it, and no model is shown it."""
    model = RagWindowsLLM(lm=reader(), max_new_tokens=4, citations="removal")
    given = nodes("Ann plays the lute.", "Bea plays the harp.")
    synthesizer = WindowSynthesizer(model, text_qa_template=BARE, streaming="stream" in way)
    engine = RetrieverQueryEngine(ListRetriever(given), synthesizer)
    _, response, _ = ask(engine, "query", way, "What does Ann play?")
    texts = [one.node.get_content() for one in given]
    prompt: dict[str, Any] = {"prefix": "", "max_new_tokens": 4, "citations": "removal"}
    expected = reader().generate("What does Ann play?", texts, do_sample=False, **prompt)
    found = [one.metadata for one in response.source_nodes]
    assert expected.citations is not None
    for citation, metadata in zip(expected.citations, found, strict=True):
        assert metadata["answer_drop"] == pytest.approx(citation.drop, abs=1e-3)
        assert metadata["answer_supports"] == citation.supports
    carried = [(one.text, each.passage) for one in expected.statements for each in one.citations]
    assert [
        (one["text"], place)
        for place, metadata in enumerate(found)
        for one in metadata.get("answer_statements", ())
    ] == sorted(carried, key=lambda pair: pair[1])
    for source in response.source_nodes:
        shown = source.node.get_content(metadata_mode=MetadataMode.LLM)
        assert "answer_" not in shown


def test_the_template_becomes_the_instruction() -> None:
    model = RagWindowsLLM(lm=reader(), max_new_tokens=2, system_prompt="Speak softly.")
    template = ChatPromptTemplate.from_messages(
        [("system", "Be brief."), ("user", "{context_str}\nTone: {tone}\nQ: {query_str}")]
    ).partial_format(tone="kind")
    with told() as seen:
        synthesizer = WindowSynthesizer(model, text_qa_template=template)
        synthesizer.synthesize("Who is it?", nodes("One.", "Two."))
        citing = WindowSynthesizer(llm(), text_qa_template=CITATION_QA_TEMPLATE)
        citing.synthesize("Who is it?", nodes("One."))
    messages, cited = seen.chats()
    system = ["Speak softly.", "Be brief.", "Tone: kind"]
    assert [message.content for message in messages] == [*system, "Who is it?"]
    assert [len(raw["windows"]) for raw in seen.raws()] == [2, 1]
    assert "solely on the provided sources" in str(cited[0].content)


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (PromptTemplate("{context_str}"), "{query_str}"),
        (PromptTemplate("{query_str}"), "{context_str}"),
        (PromptTemplate("{context_str}\n{query_str}\n{style}"), "style"),
        (BARE.partial_format(query_str="Always this?"), "question"),
        ("{context_str}\n{query_str}", "PromptTemplate"),
    ],
)
def test_templates_that_would_drop_something_are_refused(template: Any, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        WindowSynthesizer(llm(), text_qa_template=template)
    with pytest.raises(InputError, match=complaint):
        windows().update_prompts({"text_qa_template": template})


def test_blank_and_repeated_nodes_are_told() -> None:
    response = windows().synthesize("Who is it?", nodes("One.", " \n", "One."))
    first, *notes = [one.metadata.get("rag_windows_note", "") for one in response.source_nodes]
    assert first == ""
    assert "has no text" in notes[0]
    assert "repeats passage 0" in notes[1]
    assert masses(response)[1:] == [0.0, 0.0]


def test_no_nodes_further_nodes_and_texts_alone() -> None:
    with pytest.raises(InputError, match="streaming"):
        WindowSynthesizer(llm(), output_cls=Year, streaming=True)
    with told() as seen:
        assert str(windows().synthesize("Who is it?", [])) == "Empty Response"
        mine = windows(empty_response="Nothing found.").synthesize("Who is it?", [])
    assert (str(mine), seen.raws()) == ("Nothing found.", [])
    further, options = nodes("Further."), {"max_new_tokens": 1, "method": "pcw"}
    with told() as seen:
        response = windows().synthesize("Who?", nodes("One."), further, **options)
        windows().get_response("Who?", ["One.", "Two."])
    assert response.source_nodes[1:] == further
    first, second = seen.raws()
    assert (first["usage"]["completion_tokens"], first["method"]) == (1, {"name": "pcw"})
    assert len(second["windows"]) == 2


@pytest.mark.parametrize("streaming", [False, True])
def test_bad_input_is_no_empty_response(streaming: bool) -> None:
    asked = "Who?", [Parts.of(["A passage."])]
    for given, error in (
        ({"generate_kwargs": {"num_beams": "two"}}, InputError),
        ({"max_new_tokens": 10**6, "context_window": 10**8}, LimitError),
    ):
        wrong = RagWindowsLLM(lm=reader(), **given)
        stock = CompactAndRefine(llm=wrong, prompt_helper=WindowPromptHelper(), streaming=streaming)
        for made in (stock, WindowSynthesizer(wrong, streaming=streaming)):
            with pytest.raises(error):
                list(cast(Any, made.get_response(*asked)))


# WindowOrderPostprocessor


def scored(text: str, name: str, score: float | None = None, **fields: Any) -> NodeWithScore:
    return NodeWithScore(node=TextNode(text=text, id_=name, **fields), score=score)


def part(name: str, start: int | None, score: float) -> NodeWithScore:
    source = {NodeRelationship.SOURCE: TextNode(id_=name[0]).as_related_node_info()}
    return scored(name, name, score, relationships=source, start_char_idx=start)


SCORED = [
    scored(name, name, score) for name, score in zip("abcd", (0.1, None, 0.9, 0.1), strict=True)
]
TITLED = [
    scored("It opened in 1861.", name, score, metadata={"title": title})
    for name, score, title in (("a", 0.2, "Castle"), ("b", 0.5, "Tannery"), ("c", 0.1, " castle"))
]


@pytest.mark.parametrize(
    ("order", "given", "expected"),
    [
        ("score", SCORED, "c a d b"),
        ("score-ascending", SCORED, "b d a c"),
        ("given", SCORED, "a b c d"),
        ("score", TITLED, "b a"),
        (
            "document",
            [
                *(part("x2", 50, 0.5), part("y1", 0, 0.9), part("x1", 10, 0.1)),
                *(part("x-", None, 0.8), scored("alone", "alone", 0.6)),
            ],
            "y1 x1 x2 x- alone",
        ),
    ],
)
def test_nodes_are_put_in_order(order: Any, given: list[NodeWithScore], expected: str) -> None:
    post = WindowOrderPostprocessor(order=order)
    for found in (post.postprocess_nodes(given), asyncio.run(post.apostprocess_nodes(given))):
        assert [one.node_id for one in found] == expected.split()
    with pytest.raises(ValueError, match="document"):
        WindowOrderPostprocessor(order="alphabet")  # type: ignore[arg-type]  # it is refused


def test_duplicates_leave_the_best_score_and_a_record(caplog: pytest.LogCaptureFixture) -> None:
    given = [
        scored("The  bridge was\nbuilt.", "a", 0.2, metadata={"page": 1}),
        scored("Another text.", "b", 0.5),
        scored("the bridge WAS built.", "c", 0.7),
        scored("Another text.", "b", 0.1),
    ]
    before = [one.model_dump() for one in given]
    with caplog.at_level(logging.INFO):
        kept = WindowOrderPostprocessor().postprocess_nodes(given)
    assert [one.model_dump() for one in given] == before
    assert [(one.node_id, one.score) for one in kept] == [("c", 0.7), ("b", 0.5)]
    records = [one.metadata["rag_windows_duplicates"] for one in kept]
    assert records == [
        [{"id": "a", "score": 0.2}],
        [{"id": "b", "score": 0.1}],
    ]
    assert "were left out, because they are the same as node c" in caplog.text
    # The record is for people: no model and no embedding gets to see it.
    for mode in (MetadataMode.LLM, MetadataMode.EMBED):
        assert kept[0].node.get_content(metadata_mode=mode) == "the bridge WAS built."
