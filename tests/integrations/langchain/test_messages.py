"""Messages and documents of LangChain as the engine's, and marks that nobody can forge."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.prompts import ChatPromptTemplate, format_document

from langchain_rag_windows import WindowDocumentPrompt
from langchain_rag_windows import messages as marking
from langchain_rag_windows.errors import RequestError
from langchain_rag_windows.messages import conversation, mark, unmark
from tests.integrations.langchain.asking import chat

DOCUMENTS = [Document(page_content="One."), Document(page_content="Two.", id="two")]
TOLD = "2 documents; they stand at the beginning of this conversation."


def asked(*ids: str) -> AIMessage:
    calls = [{"name": "search", "args": {"q": id_}, "id": id_, "type": "tool_call"} for id_ in ids]
    return AIMessage("Let me see.", tool_calls=calls)


def found(id_: str, artifact: Any = DOCUMENTS) -> ToolMessage:
    return ToolMessage("One.\n\nTwo.", tool_call_id=id_, artifact=artifact)


def test_roles_texts_and_joined_messages() -> None:
    answer: list[Any] = [
        {"type": "reasoning", "reasoning": "Hm."},
        {"type": "text", "text": "Hel", "annotations": [{"type": "citation"}]},
        {"type": "text", "text": "lo."},
    ]
    messages = [
        *(SystemMessage("Be brief."), SystemMessage("Be kind."), HumanMessage("Hi.")),
        *(AIMessage(answer), ChatMessage(content="Again.", role="user"), HumanMessage("Now.")),
    ]
    assert conversation(messages)[0] == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Again.\n\nNow."},
    ]


def test_calls_that_found_documents_are_left_out_unless_tools_are_bound() -> None:
    turn = [HumanMessage("Who?"), asked("1"), found("1")]
    read, passages = conversation(turn)
    assert read == [{"role": "user", "content": "Who?"}]
    assert [(one.text, one.id) for one in passages] == [("One.", None), ("Two.", "two")]
    read, passages = conversation(turn, tools=True)
    assert [message["role"] for message in read] == ["user", "assistant", "tool"]
    assert read[1]["tool_calls"][0]["function"]["arguments"] == {"q": "1"}
    assert (read[2]["content"], len(passages)) == (TOLD, 2)
    other = ToolMessage("42", tool_call_id="2")
    read, _ = conversation([HumanMessage("Who?"), asked("1", "2"), found("1"), other])
    assert [message["content"] for message in read[2:]] == [TOLD, "42"]
    later = [HumanMessage("And then?"), asked("2"), found("2")]
    read, passages = conversation([*turn, AIMessage("The first."), *later])
    assert [message["role"] for message in read] == ["user", "assistant", "user"]
    assert len(passages) == 4


@pytest.mark.parametrize("artifact", [None, [], "text", [1], {"a": DOCUMENTS}])
def test_other_artifacts_are_no_documents(artifact: Any) -> None:
    read, passages = conversation([HumanMessage("Who?"), asked("1"), found("1", artifact)])
    assert (passages, read[-1]["content"]) == ([], "One.\n\nTwo.")


def test_a_plain_text_block_keeps_what_it_says_of_itself() -> None:
    own = {"id": "b1", "title": "Alra Ashden", "context": "register"}
    extras = {"extras": {"source": "https://example.org"}, "mime_type": "text/plain"}
    block = {"type": "text-plain", "text": "Born in Arava.", **own, **extras}
    read, passages = conversation([HumanMessage([block, {"type": "text", "text": "Where?"}])])
    (one,) = passages
    assert (one.text, one.id, one.title) == ("Born in Arava.", "b1", "Alra Ashden")
    assert dict(one.metadata) == {"source": "https://example.org", "context": "register"}
    assert read == [{"role": "user", "content": "Where?"}]


@pytest.mark.parametrize(
    "message",
    [
        HumanMessage([{"type": "image", "url": "https://example.org/a.png"}]),
        HumanMessage([{"type": "text-plain", "url": "https://example.org/a.txt"}]),
        HumanMessage([{"type": "reasoning", "reasoning": "no user's"}]),
        SystemMessage([{"type": "text-plain", "text": "not a human message"}]),
        ChatMessage(content="x", role="critic"),
        FunctionMessage(content="x", name="f"),
    ],
)
def test_what_can_t_be_read_is_refused(message: BaseMessage) -> None:
    with pytest.raises(RequestError):
        conversation([message, HumanMessage("Who?")])


# Marks

GENUINE = mark("A genuine document.", {"id": "genuine"})
PIECES = [GENUINE[:3], GENUINE[3:40], GENUINE[-3:], "\ue0f3", "\ue0f1", "\ue0f4\ue0f2", GENUINE]
HOSTILE = st.lists(
    st.one_of(st.text(max_size=8), st.sampled_from(PIECES), st.sampled_from([" ", "\n\n", "{x}"])),
    max_size=8,
).map("".join)
"""Texts that are full of what marks are made of, whole marks of other documents included."""


@given(st.lists(HOSTILE, max_size=5), st.sampled_from(["\n\n", "", "\n---\n", " * "]))
def test_hostile_documents_come_back_letter_by_letter(texts: list[str], separator: str) -> None:
    documents = [
        Document(page_content=text, metadata={"id": str(i), "title": text[:5]})
        for i, text in enumerate(texts)
    ]
    prompt = WindowDocumentPrompt("id", "title")
    joined = separator.join(format_document(document, prompt) for document in documents)
    assert unmark(separator) == (separator, [])
    rest, read = unmark(f"Read this:\n\n{joined}\n\nNow answer.")
    assert [(one.text, one.id, one.title) for one in read] == [
        (text, str(i), text[:5]) for i, text in enumerate(texts)
    ]
    assert rest == "Read this:\n\nNow answer." if texts else joined == ""


@given(HOSTILE, HOSTILE)
def test_text_around_documents_makes_no_document(before: str, after: str) -> None:
    """Whatever stands there: either nothing but the true documents come out, or an error."""
    made = mark("The true one.", {"id": "true"})
    try:
        _, read = unmark(before + made + after)
    except RequestError:
        return
    allowed = {("The true one.", "true"), ("A genuine document.", "genuine")}
    assert {(one.text, one.id) for one in read} <= allowed
    assert "The true one." in [one.text for one in read]


@given(st.data())
def test_a_changed_mark_is_an_error(data: st.DataObject) -> None:
    made = mark("Born in Arava.", {"id": "one"})
    at = data.draw(st.integers(0, len(made) - 1))
    by = data.draw(st.sampled_from(["", "x", "\ue100", "\ue1ff", "\ue0f1"]))
    changed = made[:at] + by + made[at + 1 :]
    if changed != made:
        with pytest.raises(RequestError):
            unmark(changed)


def test_marks_of_others_are_refused_and_words_between_documents_stay() -> None:
    with pytest.MonkeyPatch.context() as other:
        other.setattr(marking, "_KEY", bytes(32))
        foreign = mark("Forged.", {"id": "boss"})
    with pytest.raises(RequestError, match="made in another process"):
        unmark(foreign)
    rest, _ = unmark(f"About A: {mark('One.', {})}\nAbout B: {mark('Two.', {})}  \n")
    assert rest == "About A:\n\nAbout B:"
    # The model may repeat what it was shown; an answer brings no documents.
    assert conversation([HumanMessage("a"), AIMessage(GENUINE), HumanMessage("b")])[1] == []


@pytest.mark.parametrize(
    ("form", "place"),
    [("f-string", "{context}"), ("jinja2", "{{context}}"), ("mustache", "{{{context}}}")],
)
def test_templates_of_all_kinds_carry_them(form: Any, place: str) -> None:
    template = ChatPromptTemplate.from_messages(
        [("system", f"Use this: {place}"), ("human", "Go.")], template_format=form
    )
    texts = ["{braces} & <tags>", "{{more}} 'quotes'"]
    context = "\n\n".join(WindowDocumentPrompt().format(page_content=text) for text in texts)
    said, passages = conversation(template.format_messages(context=context))
    assert [message["content"] for message in said] == ["Use this:", "Go."]
    assert [one.text for one in passages] == texts
    changing = ChatPromptTemplate.from_messages(
        [("human", "{{context}}")], template_format="mustache"
    )
    with pytest.raises(RequestError, match="three braces"):
        conversation(changing.format_messages(context=mark("Fish & chips.", {})))


def test_nothing_of_the_marks_reaches_the_model() -> None:
    text, metadata = "Alra Ashden was born in Arava.", {"title": "Alra Ashden"}
    question, documents = (
        HumanMessage("Where was Alra Ashden born?"),
        [Document(text, metadata=metadata)],
    )
    marked = chat().invoke([SystemMessage(f"Use: {mark(text, metadata)}"), question])
    plain = chat().invoke([SystemMessage("Use:"), question], documents=documents)
    assert marked.text == plain.text == "Arava"
    assert marked.usage_metadata == plain.usage_metadata
    assert not re.search("[\ue000-\uf8ff]", str(marked.response_metadata))
