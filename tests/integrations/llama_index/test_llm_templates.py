"""Templates with passages: instruction to the prefix, passages to windows, question to the user."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate, SelectorPromptTemplate
from llama_index.core.prompts.default_prompt_selectors import (
    DEFAULT_REFINE_PROMPT_SEL,
    DEFAULT_TEXT_QA_PROMPT_SEL,
    DEFAULT_TREE_SUMMARIZE_PROMPT_SEL,
)
from llama_index.core.prompts.default_prompts import DEFAULT_TEXT_QA_PROMPT

from llama_index.llms.rag_windows import Parts, RagWindowsLLM
from llama_index.llms.rag_windows.templates import WindowedPrompt, window_messages, without
from rag_windows import GenerationError, InputError
from tests.integrations.llama_index.cases import llm, one_for_each_place, reader, recorded
from tests.integrations.llama_index.endpoints import one_window_each

CALLS = ("predict", "stream", "apredict", "astream")
STOCK = {
    "qa": DEFAULT_TEXT_QA_PROMPT_SEL,
    "qa as text": DEFAULT_TEXT_QA_PROMPT,
    "tree summarize": DEFAULT_TREE_SUMMARIZE_PROMPT_SEL,
}


def call(name: str, model: RagWindowsLLM, prompt: Any, **arguments: Any) -> str:
    async def awaited() -> str:
        result = await getattr(model, name)(prompt, **arguments)
        return result if isinstance(result, str) else "".join([piece async for piece in result])

    if name.startswith("a"):
        return asyncio.run(awaited())
    return "".join(getattr(model, name)(prompt, **arguments))


def shown(prompt: Any, **arguments: Any) -> list[tuple[str, str | None]]:
    values = {"context_str": Parts.of(["A passage."]), "query_str": "Who?", **arguments}
    return [(m.role.value, m.content) for m in window_messages(prompt, values, llm())]


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_parts_become_windows(name: str, chat: bool) -> None:
    asked = one_for_each_place()[9]
    model = RagWindowsLLM(lm=reader(), max_new_tokens=16, is_chat_model=chat)
    prompt = PromptTemplate("{context_str}\n{query_str}")
    with recorded() as generations:
        answer = call(
            name, model, prompt, context_str=Parts.of(asked.passages), query_str=asked.question
        )
    assert answer == asked.answer
    assert one_window_each(generations[0], asked.nodes)


@pytest.mark.parametrize("name", STOCK)
def test_a_stock_template_leaves_the_question_alone(name: str) -> None:
    *system, (role, content) = shown(STOCK[name])
    assert (role, content) == ("user", "Who?")
    instruction = "\n".join(text or "" for _, text in system)
    assert {role for role, _ in system} == {"system"}
    assert "not prior knowledge" in instruction
    assert all(word not in instruction for word in ("---", "Query:", "Answer:", "A passage", "Who"))


def test_windows_do_not_depend_on_the_question() -> None:
    parts = Parts.of(["One.", "Two."])
    records = []
    for question in ("Who is it?", "Where was that, and when?"):
        with recorded() as generations:
            llm().predict(DEFAULT_TEXT_QA_PROMPT_SEL, context_str=parts, query_str=question)
        records.append([(w.ids, w.passage) for w in generations[0].windows])
    assert records[0] == records[1]
    before = window_messages(
        DEFAULT_TEXT_QA_PROMPT_SEL, {"context_str": parts, "query_str": "a"}, llm()
    )
    after = window_messages(
        DEFAULT_TEXT_QA_PROMPT_SEL, {"context_str": parts, "query_str": "b"}, llm()
    )
    assert before[:-1] == after[:-1]


def test_the_refine_template_keeps_the_answer_so_far() -> None:
    values = {
        "context_msg": Parts.of(["A passage."]),
        "existing_answer": "Perhaps Ada.",
        "query_str": "Who?",
    }
    messages = window_messages(DEFAULT_REFINE_PROMPT_SEL, values, llm())
    assert messages[-1].content is not None
    whole = "\n".join(m.content or "" for m in messages)
    assert "Perhaps Ada." in whole
    assert "Who?" in whole
    assert "A passage." not in whole


def test_a_context_in_the_system_message_leaves_history_and_question_alone() -> None:
    prompt = ChatPromptTemplate(
        [
            ChatMessage(role="system", content="Be kind.\n-----\n{context_str}\n-----\nUse it."),
            ChatMessage(role="user", content="Do you know {context_str} or {query_str}?"),
            ChatMessage(role="assistant", content="I do."),
            ChatMessage(role="user", content="In short: {query_str}"),
        ]
    )
    assert shown(prompt) == [
        ("system", "Be kind.\nUse it."),
        ("user", "Do you know  or Who??"),
        ("assistant", "I do."),
        ("user", "In short: Who?"),
    ]


def test_what_stands_around_the_question_is_the_instruction() -> None:
    prompt = PromptTemplate(
        "Answer in German.\n\nContext: {context_str}\n\nQuestion: {query_str}\nFollow {rule}.\n"
        "Answer:"
    )
    assert shown(prompt, rule="rule 3") == [
        ("system", "Answer in German.\n\nFollow rule 3."),
        ("user", "Who?"),
    ]


def test_partial_mapped_and_selected_templates_work() -> None:
    parts = Parts.of(["A passage."])
    partial = PromptTemplate("Say.\n{context_str}\n{query_str}").partial_format(context_str=parts)
    assert [m.content for m in window_messages(partial, {"query_str": "Who?"}, llm())] == [
        "Say.",
        "Who?",
    ]
    mapped = PromptTemplate(
        "Say.\n{documents}\n{question}",
        template_var_mappings={"context_str": "documents", "query_str": "question"},
    )
    assert shown(mapped) == [("system", "Say."), ("user", "Who?")]
    selected = SelectorPromptTemplate(
        PromptTemplate("No.\n{context_str}"), conditionals=[(lambda _: True, mapped)]
    )
    assert shown(selected) == [("system", "Say."), ("user", "Who?")]
    bulleted = PromptTemplate(
        "Say.\n{context_str}\n{query_str}",
        function_mappings={"context_str": lambda **values: f"- {values['context_str']}"},
    )
    assert shown(bulleted) == [("system", "Say."), ("user", "Who?")]


def test_a_template_that_would_lose_the_passages_is_refused() -> None:
    losing = PromptTemplate(
        "{context_str}\n{query_str}", function_mappings={"context_str": lambda **_: "all of it"}
    )
    for prompt in (PromptTemplate("Tell me: {query_str}"), losing):
        with pytest.raises(InputError, match="would be lost"):
            llm().predict(prompt, context_str=Parts.of(["A passage."]), query_str="Who?")
    with pytest.raises(InputError, match="all hold passages"):
        llm().predict(
            PromptTemplate("{a}{b}{query_str}"), a=Parts.of("a"), b=Parts.of("b"), query_str="Who?"
        )
    with pytest.raises(InputError, match=r"Parts\.of"):
        window_messages(losing, {"context_str": "plain"}, llm())


def test_without_parts_templates_are_llama_indexs_own() -> None:
    prompt = PromptTemplate("Context: {context_str}\nQuery: {query_str}\nAnswer:")
    with recorded() as generations:
        llm().predict(prompt, context_str="A passage.", query_str="Who?")
    assert generations[0].windows == ()
    plain = llm()._get_messages(prompt, context_str="A passage.", query_str="Who?")
    assert [m.content for m in plain] == ["Context: A passage.\nQuery: Who?\nAnswer:"]


def test_the_system_prompt_is_given_once_and_first() -> None:
    for chat in (True, False):
        model = RagWindowsLLM(lm=reader(), system_prompt="Be brief.", is_chat_model=chat)
        arguments: dict[str, Any] = {"context_str": Parts.of(["A."]), "query_str": "Who?"}
        prompt = PromptTemplate("Say.\n{context_str}\n{query_str}")
        if chat:
            messages = model._get_messages(prompt, **arguments)
        else:
            text = model._get_prompt(prompt, **arguments)
            assert isinstance(text, WindowedPrompt)
            messages = list(text.messages)
        system = [m.content for m in messages if m.role == MessageRole.SYSTEM]
        assert system == ["Be brief.", "Say."]
        plain = model._get_prompt(PromptTemplate("{query_str}"), query_str="Who?")
        assert plain == "Who?"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\n----\nX\n----\nb", "a\nb"),
        ("a\n\n----\n\nX\n\n----\n\nb", "a\n\nb"),
        ("----\na\n----\n\nb X c", "----\na\n----\n\nb  c"),
        ("Context information: X\nb", "b"),
        ("Here are the documents: X\nb", "Here are the documents: \nb"),
        ("b\nX\nRefined Answer: ", "b"),
        ("Rules for you to follow:\nX", "Rules for you to follow:"),
        ("X", ""),
    ],
)
def test_what_frames_a_mark_goes_with_it(text: str, expected: str) -> None:
    assert without(text, ("X",)) == expected


def test_parts_survive_copies_and_read_as_text() -> None:
    parts = Parts.of(["One.", {"text": "Two.", "title": "T", "id": "2"}])
    assert parts == "One.\n\nTwo."
    for again in (copy.copy(parts), copy.deepcopy(parts)):
        assert isinstance(again, Parts)
        assert again.passages == parts.passages
    assert type(parts.strip()) is str
    answer = llm().complete("Who?", passages=parts)
    assert len(answer.raw["windows"]) == 2
    with pytest.raises(InputError, match="without a question"):
        llm().complete(parts)


class Answer(BaseModel):
    name: str


def structured(name: str, prompt: Any, **arguments: Any) -> Any:
    async def awaited() -> Any:
        result = await getattr(llm(), name)(Answer, prompt, **arguments)
        return [one async for one in result] if "stream" in name else result

    if name.startswith("a"):
        return asyncio.run(awaited())
    result = getattr(llm(), name)(Answer, prompt, **arguments)
    return list(result) if "stream" in name else result


@pytest.mark.parametrize("name", ["structured_predict", "astructured_predict"])
def test_structured_answers_read_windows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = one_for_each_place()[2]
    monkeypatch.setattr(PydanticOutputParser, "parse", lambda self, text: Answer(name=text))
    # The schema is an instruction that the small reader was never shown.
    monkeypatch.setattr(PydanticOutputParser, "format", lambda self, query: query)
    prompt = PromptTemplate("{context_str}\n{query_str}")
    with recorded() as generations:
        answer = structured(
            name, prompt, context_str=Parts.of(asked.passages), query_str=asked.question
        )
    assert answer == Answer(name=asked.answer)
    assert one_window_each(generations[0], asked.nodes)


@pytest.mark.parametrize("name", ["structured_predict", "astructured_predict"])
def test_a_structured_answer_that_cannot_be_read_is_no_empty_response(name: str) -> None:
    with pytest.raises(GenerationError, match="can't answer this call"):
        structured(
            name,
            PromptTemplate("{context_str}\n{query_str}"),
            context_str=Parts.of(["A passage."]),
            query_str="Who?",
        )


@pytest.mark.parametrize("name", ["stream_structured_predict", "astream_structured_predict"])
def test_structured_streams_read_windows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = one_for_each_place()[2]

    def objects(response: Any, *arguments: Any, **options: Any) -> Answer:
        return Answer(name=response.message.content)

    monkeypatch.setattr("llama_index.core.program.llm_program.process_streaming_objects", objects)
    monkeypatch.setattr(PydanticOutputParser, "format", lambda self, query: query)
    with recorded() as generations:
        answers = structured(
            name,
            PromptTemplate("{context_str}\n{query_str}"),
            context_str=Parts.of(asked.passages),
            query_str=asked.question,
        )
    assert answers[-1] == Answer(name=asked.answer)
    assert one_window_each(generations[0], asked.nodes)
