"""Marked documents in text: they come back as they were, and nothing can make one up."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate, format_document
from langchain_core.runnables import RunnableLambda

from langchain_rag_windows import ChatRagWindows, WindowDocumentPrompt
from langchain_rag_windows import documents as sentinels
from langchain_rag_windows.documents import conversation, mark, unmark
from langchain_rag_windows.errors import RequestError
from tests.integrations.langchain.drawn import reader

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
    rest, found = unmark(f"Read this:\n\n{joined}\n\nNow answer.")
    assert [passage.text for passage in found] == texts
    assert [passage.id for passage in found] == [str(i) for i in range(len(texts))]
    assert [passage.title for passage in found] == [text[:5] for text in texts]
    assert rest == "Read this:\n\nNow answer." if texts else joined == ""


@given(HOSTILE, HOSTILE)
def test_text_around_documents_makes_no_document(before: str, after: str) -> None:
    """Whatever stands there: either nothing but the true documents come out, or an error."""
    made = mark("The true one.", {"id": "true"})
    try:
        _rest, found = unmark(before + made + after)
    except RequestError:
        return
    allowed = {("The true one.", "true"), ("A genuine document.", "genuine")}
    assert {(p.text, p.id) for p in found} <= allowed
    assert "The true one." in [p.text for p in found]


@given(st.data())
def test_a_changed_mark_is_an_error(data: st.DataObject) -> None:
    made = mark("Born in Arava.", {"id": "one"})
    at = data.draw(st.integers(0, len(made) - 1))
    by = data.draw(st.sampled_from(["", "x", "\ue100", "\ue1ff", "\ue0f1"]))
    changed = made[:at] + by + made[at + 1 :]
    if changed == made:
        return
    try:
        _rest, found = unmark(changed)
    except RequestError:
        return
    # Only the head's first mark may go unnoticed, and then the end mark would not.
    raise AssertionError(f"{changed!r} was read as {found!r}")


@given(st.text())
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert unmark(text) == (text, [])


def test_private_use_characters_of_icon_fonts_are_ordinary_text() -> None:
    text = "\uf8ff \ue0f3 \ue100\ue1ff \ue0f2"
    assert unmark(text)[0] == text
    assert unmark(mark(text, {}))[1][0].text == text


def test_marks_of_another_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other:
        other.setattr(sentinels, "_KEY", bytes(32))
        foreign = mark("Forged.", {"id": "boss"})
    with pytest.raises(RequestError, match="made in another process"):
        unmark(foreign)


def test_words_between_documents_stay() -> None:
    first, second = mark("One.", {}), mark("Two.", {})
    rest, _found = unmark(f"About A: {first}\nAbout B: {second}  \n")
    assert rest == "About A:\n\nAbout B:"


def test_a_document_in_an_earlier_answer_is_no_document() -> None:
    """The model may repeat what it was shown; an answer brings no documents."""
    _, passages = conversation([HumanMessage("a"), AIMessage(GENUINE), HumanMessage("b")])
    assert passages == []


@pytest.mark.parametrize("form", ["f-string", "jinja2", "mustache"])
def test_templates_of_all_kinds_carry_them(form: Any) -> None:
    context = {"f-string": "{context}", "jinja2": "{{context}}", "mustache": "{{{context}}}"}[form]
    template = ChatPromptTemplate.from_messages(
        [("system", f"Use this: {context}"), ("human", "Go.")], template_format=form
    )
    seen: list[Any] = []

    def note(prompt: Any) -> str:
        seen.append(conversation(prompt.to_messages()))
        return ""

    chain = create_stuff_documents_chain(
        RunnableLambda(note), template, document_prompt=WindowDocumentPrompt()
    )
    texts = ["{braces} & <tags>", "{{more}} 'quotes'"]
    chain.invoke({"context": [Document(page_content=text) for text in texts]})
    assert [passage.text for passage in seen[0][1]] == texts
    assert [message["content"] for message in seen[0][0]] == ["Use this:", "Go."]


def test_a_template_that_changes_documents_is_told() -> None:
    template = ChatPromptTemplate.from_messages(
        [("human", "{{context}}")], template_format="mustache"
    )
    text = WindowDocumentPrompt().format(page_content="Fish & chips.")
    with pytest.raises(RequestError, match="three braces"):
        conversation(template.format_messages(context=text))


def test_missing_metadata_is_langchain_s_error() -> None:
    with pytest.raises(ValueError, match="missing metadata"):
        format_document(Document(page_content="x"), WindowDocumentPrompt("title"))


def test_nothing_of_the_marks_reaches_the_model() -> None:
    made = mark("Alra Ashden was born in Arava.", {"title": "Alra Ashden"})
    model = ChatRagWindows(lm=reader(), max_tokens=8)
    model.invoke([SystemMessage(f"Use: {made}"), HumanMessage("Where was Alra Ashden born?")])
    record = reader().generations[-1]
    tokenizer: Any = reader().tokenizer
    shown = "".join(tokenizer.decode(window.ids) for window in record.windows)
    assert "Arava" in shown
    assert not re.search("[\ue000-\uf8ff]", shown)
    plain = model.invoke(
        [SystemMessage("Use:"), HumanMessage("Where was Alra Ashden born?")],
        documents=[
            Document(
                page_content="Alra Ashden was born in Arava.", metadata={"title": "Alra Ashden"}
            )
        ],
    )
    assert plain.usage_metadata is not None
    assert record.usage.prompt_tokens == plain.usage_metadata["input_tokens"]
