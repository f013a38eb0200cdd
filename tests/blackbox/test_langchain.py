"""The LangChain adapter as its users meet it: stock parts, their caches, agents and errors."""

from __future__ import annotations

import enum
import json
import uuid
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.documents import Document
from langchain_core.exceptions import OutputParserException
from langchain_core.load import dumps, loads
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from pydantic import BaseModel, Field

from langchain_rag_windows import ChatRagWindows, RagWindows, create_windows_chain
from rag_windows import GenerationError, InputError, WindowedLM
from tests.blackbox.conftest import ANSWER, QUESTION, Process
from tests.integrations.langchain.asking import WAYS
from tests.tool_models import model, tokenizer

DOCUMENT = Document(
    "Vara Zelmont plays the harp. Vara Zelmont was born in Sulava.",
    id="zelmont",
    metadata={"title": "Zelmont"},
)


class Birth(BaseModel):
    """Where somebody was born."""

    town: str


@pytest.fixture
def chat(reader: WindowedLM) -> ChatRagWindows:
    return ChatRagWindows(lm=reader, max_tokens=16, temperature=0)


class Level(enum.IntEnum):
    LOW = 1


LOOPED: list[Any] = []
LOOPED.append(LOOPED)
TOLD: list[tuple[Any, Any]] = [
    (datetime(2020, 5, 6, 7, 8), "2020-05-06T07:08:00"),
    (Path("notes/a.md"), str(Path("notes/a.md"))),
    ({"a"}, ["a"]),
    (uuid.UUID(int=7), str(uuid.UUID(int=7))),
    (np.float32(0.5), 0.5),
    (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
    (Decimal("1.50"), "1.50"),
    (Level.LOW, 1),
    (Birth(town="Sulava"), {"town": "Sulava"}),
    (LOOPED, "[[...]]"),
    ({"a": [1, None, True, "x"]}, {"a": [1, None, True, "x"]}),
]
keys = st.one_of(st.text(max_size=3), st.integers(), st.uuids(), st.dates())
others = [b"\xff", 1j, object(), Birth, np.bool_(True), np.datetime64("2020-01-01"), "\ud800"]
values = st.recursive(
    st.one_of(keys, st.floats(), st.decimals(), st.sampled_from(others)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(held=values)
def test_citations_are_plain_json_whatever_documents_hold(reader: WindowedLM, held: object) -> None:
    told = {str(place): value for place, (value, _) in enumerate(TOLD)}
    document = DOCUMENT.model_copy(update={"metadata": {**told, "held": held}})
    chat = ChatRagWindows(lm=reader, max_tokens=2)
    metadata = chat.invoke(QUESTION, documents=[document]).response_metadata
    assert json.loads(json.dumps(metadata, allow_nan=False)) == metadata
    shown = metadata["citations"][0]["metadata"]
    assert {place: shown[place] for place in told} == {
        str(place): expected for place, (_, expected) in enumerate(TOLD)
    }


def test_an_answer_comes_back_from_a_cache_that_keeps_json(reader: WindowedLM) -> None:
    """As LangChain's SQLiteCache keeps it."""
    held = {"when": datetime(2020, 1, 1), "tags": {"a"}, "id": uuid.UUID(int=1), "n": np.int64(3)}
    given = {"documents": [DOCUMENT.model_copy(update={"metadata": held})]}
    asked: list[Any] = [(ChatRagWindows, [HumanMessage(QUESTION)]), (RagWindows, QUESTION)]
    for kind, question in asked:
        llm = kind(lm=reader, max_tokens=16, temperature=0)
        (answer,) = llm.generate([question], **given).generations[0]
        assert answer.text == ANSWER
        assert loads(dumps(answer), allowed_objects="core") == answer


GIVEN: dict[str, Any] = {"documents": [DOCUMENT]}
PROMPT = ChatPromptTemplate.from_messages([("human", "{context}{input}")])


def structured(chat: Any) -> Any:
    return chat.with_structured_output(Birth, method="json_mode", include_raw=True)


@pytest.mark.parametrize("way", [*WAYS, "bound", "configured", "bound behind", "chain"])
def test_documents_reach_a_model_with_structured_output(way: str, chat: ChatRagWindows) -> None:
    if way in WAYS:
        result = WAYS[way](structured(chat), QUESTION, **GIVEN)
    elif way == "chain":
        chain = create_windows_chain(structured(chat), PROMPT)
        result = chain.invoke({"context": [DOCUMENT], "input": QUESTION})
    else:
        result = {
            "bound": structured(chat.bind(**GIVEN)),
            "configured": structured(chat.with_config(tags=["a"]).bind(**GIVEN)),
            "bound behind": structured(chat).bind(**GIVEN),
        }[way].invoke(QUESTION)
    assert result["raw"].text == ANSWER
    assert [one["id"] for one in result["raw"].response_metadata["citations"]] == ["zelmont"]
    assert result["parsed"] is None
    assert isinstance(result["parsing_error"], OutputParserException)
    made = chat.with_structured_output(Birth, method="json_mode")
    with pytest.raises(OutputParserException, match=ANSWER):
        list(made.stream(QUESTION, **GIVEN))
    with pytest.raises(NotImplementedError, match=r"use method='json_schema'.* or method='json"):
        chat.with_structured_output(Birth)


@pytest.mark.slow
def test_a_long_prompt_without_documents_is_told_once_with_the_line_to_write(
    python: Process,
) -> None:
    done = python(
        "from langchain_classic.chains.combine_documents import create_stuff_documents_chain\n"
        "from langchain_core.documents import Document\n"
        "from langchain_core.prompts import ChatPromptTemplate\n"
        "from langchain_rag_windows import ChatRagWindows\n"
        "LONG = 'word ' * 700\n"
        "prompt = ChatPromptTemplate.from_messages([('human', '{context}')])\n"
        "llm = ChatRagWindows(model='tiny-reader', max_tokens=2)\n"
        "llm.invoke(LONG, documents=['A text.']); llm.invoke('word'); print('so far')\n"
        "create_stuff_documents_chain(llm, prompt).invoke({'context': [Document(LONG)]})\n"
        "list((prompt | llm).stream({'context': LONG}))\n"
    )
    assert done.returncode == 0, done.stderr
    (told,) = [row for row in done.stderr.splitlines() if "no passages" in row]
    assert "This prompt has 70" in told
    assert "llm.invoke(question, documents=docs)" in told
    assert "create_windows_chain(llm, prompt)" in told


def test_langchain_s_profile_tells_what_the_model_can_do(
    chat: ChatRagWindows, small_folder: Path
) -> None:
    expected = {"tool_calling": False, "text_inputs": True, "image_inputs": False}
    for llm, limit in ((chat, 8192), (ChatRagWindows(model=small_folder), 1024)):
        assert llm.profile is not None
        told: dict[str, Any] = {**llm.profile}
        assert told.items() >= {**expected, "max_input_tokens": limit}.items()
    assert ChatRagWindows(model="no/such-model").profile is None
    own = ChatRagWindows(model="tiny-reader", profile={"max_input_tokens": 5})
    assert own.profile == {"max_input_tokens": 5}
    middleware = SummarizationMiddleware(chat, trigger=("fraction", 0.5), keep=("messages", 2))
    agent = create_agent(chat, middleware=[middleware])
    said = agent.invoke({"messages": [HumanMessage("Hello?")]})["messages"]
    assert [message.type for message in said] == ["human", "ai"]


@pytest.mark.parametrize("kind", [str, Path])
def test_a_tokenizer_is_given_by_its_folder(kind: type, small_folder: Path) -> None:
    expected = ChatRagWindows(model=small_folder, max_tokens=2).invoke("Hello?").text
    options: dict[str, Any] = {"model": small_folder, "tokenizer": kind(small_folder)}
    assert ChatRagWindows(**options, max_tokens=2).invoke("Hello?").text == expected
    assert RagWindows(**options, max_tokens=2).invoke("Hello?") == expected
    with pytest.raises(ValueError, match="none"):
        ChatRagWindows(model=small_folder, tokenizer=kind(small_folder / "none")).invoke("Hello?")


@pytest.mark.parametrize(
    "more",
    [
        [SystemMessage("Answer in one word.")],
        [AIMessage("It was")],
        [SystemMessage("Answer in one word."), AIMessage("It was")],
        [AIMessage("In Oslo."), SystemMessage("That was wrong."), HumanMessage("Where, then?")],
    ],
)
def test_later_system_messages_and_answers_begun_are_read(
    small_lm: WindowedLM, more: list[AnyMessage]
) -> None:
    roles = {"system": "system", "human": "user", "ai": "assistant"}
    messages = [SystemMessage("Be brief."), HumanMessage("Where was Ada born?"), *more]
    written = [{"role": roles[m.type], "content": str(m.text)} for m in messages]
    chat = ChatRagWindows(lm=small_lm, max_tokens=4, temperature=0)
    expected = small_lm.generate(written, [{"text": "Ada was born in Oslo."}], max_new_tokens=4)
    for way in ("invoke", "stream"):
        answer = WAYS[way](chat, messages, documents=["Ada was born in Oslo."])
        assert answer.text == expected.text
        assert answer.usage_metadata["input_tokens"] == expected.usage.prompt_tokens
    agent: Any = create_agent(chat, tools=[], system_prompt="Be brief.")
    state = agent.invoke({"messages": messages[1:]})
    assert state["messages"][-1].text == small_lm.generate(written, max_new_tokens=4).text


class Wall(BaseModel):
    """A wall."""

    colour: Literal["white", "red"]
    metres: int = Field(ge=0, le=999)
    dry: bool


WALL = Wall.model_json_schema()


@pytest.mark.slow
@pytest.mark.parametrize("drawn", [{}, {"do_sample": True, "seed": 3, "temperature": 4.0}])
@pytest.mark.parametrize("options", [{}, {"method": "ensemble"}, {"num_beams": 2}])
def test_answers_are_held_to_their_own_schemas(
    options: dict[str, Any], drawn: dict[str, Any], small_lm: WindowedLM
) -> None:
    given = {**options, **drawn}
    texts = ["The wall is white.", "It is 12 m long."]
    asked: list[dict[str, Any]] = [
        {"query": "Which?", "passages": texts, "json_schema": WALL, **given},
        {"query": "How many?", "json_schema": {"enum": [1, 22, 333]}, **given},
        {"query": "Or?", "passages": texts, "grammar": 'start: "yes" | "no"', **given},
        {"query": "What?", "max_new_tokens": 5},
    ]
    wall, number, word, free = small_lm.generate_batch(asked)
    Wall.model_validate_json(wall.text)
    assert wall.finish_reason == "stop"
    assert json.loads(number.text) in (1, 22, 333)
    assert word.text in ("yes", "no")
    assert free.text == small_lm.generate("What?", max_new_tokens=5).text
    with small_lm.scheduler() as scheduler:
        again = [scheduler.submit(one) for one in asked]
        assert [one.result().text for one in again[:3]] == [wall.text, number.text, word.text]
    if "num_beams" not in options:
        pieces = small_lm.stream(**asked[0])
        assert "".join(piece.text for piece in pieces) == wall.text


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"json_schema": Wall}, "must be a mapping.*model_json_schema"),
        ({"json_schema": {"type": "nonsense"}}, "Invalid type: nonsense"),
        ({"json_schema": {"type": "string", "pattern": "(?!a)b"}}, "look-around"),
        ({"json_schema": {}, "grammar": "start: /a/"}, "one of them out"),
        ({"grammar": "start"}, "This grammar can't be used"),
        ({"top_logprobs": 3}, "needs logprobs=True"),
        ({"logprobs": True, "top_logprobs": 21}, "from 0 to 20"),
        ({"logprobs": True, "num_beams": 2}, "Leave num_beams"),
        ({"logprobs": True, "prompt_lookup_num_tokens": 2}, "one of them out"),
    ],
)
def test_forms_and_log_probabilities_that_can_not_be_had_are_refused(
    options: dict[str, Any], match: str, small_lm: WindowedLM
) -> None:
    with pytest.raises((InputError, GenerationError), match=match):
        small_lm.generate("Which?", ["A text."], max_new_tokens=3, **options)


class Fence(TypedDict):
    """A fence."""

    colour: Literal["white", "red"]


GATE = {"title": "Gate", "type": "object", "properties": {"open": {"type": "boolean"}}}
ROW = {"type": "array", "items": {"enum": [1]}, "maxItems": 2}
LOOKING = {"title": "a", "type": "object", "properties": {"b": {"pattern": "(?!a)b"}}}


@pytest.mark.slow
def test_structured_output_is_right_by_construction(small_lm: WindowedLM) -> None:
    def held(llm: ChatRagWindows, schema: Any = Wall, **options: Any) -> Any:
        return llm.with_structured_output(schema, method="json_schema", **options)

    for rows in (1, 8):
        llm = ChatRagWindows(lm=small_lm, batch_rows=rows)
        for schema in (Wall, Fence, GATE, ROW):
            made = held(llm, schema)
            answers = made.batch(["Which?", "How?"], documents=[DOCUMENT])
            for answer in [*answers, made.invoke("Who?"), *made.stream("Or?")]:
                assert isinstance(answer, Wall if schema is Wall else dict | list)
    raw = held(llm, include_raw=True).invoke("Which?")
    assert raw["parsed"] == Wall.model_validate_json(raw["raw"].text)
    with pytest.raises(OutputParserException, match="cut at max_tokens"):
        held(ChatRagWindows(lm=small_lm, max_tokens=5)).invoke("Which?")
    with pytest.raises(ValueError, match="look-around"):
        held(llm, LOOKING)


@pytest.mark.parametrize("kind", [None, "hermes", "llama", "mistral"])
def test_agents_answer_in_the_form_of_a_schema(kind: str | None, small_lm: WindowedLM) -> None:
    lm = small_lm
    if kind is not None:
        lm = WindowedLM.from_pretrained(model(), tokenizer=tokenizer(kind))
    llm = ChatRagWindows(lm=lm, max_tokens=200)
    agent: Any = create_agent(llm, tools=[], response_format=Wall)
    answer = agent.invoke({"messages": [HumanMessage("Which?")]})["structured_response"]
    assert isinstance(answer, Wall)
    if kind is None:
        return
    assert llm.with_structured_output(Wall).invoke("Which?", documents=[DOCUMENT]).metres >= 0
    strict = llm.with_structured_output(Wall, strict=True, include_raw=True).invoke("Which?")
    assert isinstance(strict["parsed"], Wall)
    (call,) = strict["raw"].tool_calls
    assert call["name"] == "Wall"
    (call,) = llm.bind_tools([Wall, Fence], tool_choice="any").invoke("Which?").tool_calls
    assert call["name"] in ("Wall", "Fence")
    with pytest.raises(ValueError, match="response_format and tools can't be combined"):
        llm.bind_tools([Wall], response_format={"type": "json_schema"}).invoke("Which?")


def test_log_probabilities_come_in_the_usual_form(reader: WindowedLM) -> None:
    asked: dict[str, Any] = {**GIVEN, "logprobs": True, "top_logprobs": 3}
    for rows in (1, 8):
        llm = ChatRagWindows(lm=reader, batch_rows=rows, temperature=0, max_tokens=16)
        for way in ("invoke", "batch", "stream"):
            message = WAYS[way](llm, QUESTION, **asked)
            content = message.response_metadata["logprobs"]["content"]
            assert "".join(entry["token"] for entry in content).strip() == message.text == ANSWER
            for entry in content:
                assert entry["token"] == bytes(entry["bytes"]).decode()
                assert entry["logprob"] <= 0
                assert len(entry["top_logprobs"]) == 3
                # Greedily, so that the token is the likeliest one.
                assert entry["top_logprobs"][0]["token"] == entry["token"]
                assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
            json.dumps(message.response_metadata)
    assert "logprobs" not in llm.invoke(QUESTION, **GIVEN).response_metadata
    info = RagWindows(lm=reader, logprobs=True).generate([QUESTION]).generations[0][0]
    assert info.generation_info is not None
    assert info.generation_info["logprobs"]["content"][0]["top_logprobs"] == []


def test_log_probabilities_are_the_model_s_own(small_lm: WindowedLM) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 6, "logprobs": True}
    plain = small_lm.generate("Which?", ["A text."], **asked)
    drawn: dict[str, Any] = {"do_sample": True, "temperature": 1e-6, "seed": 1}
    warm = small_lm.generate("Which?", ["A text."], **asked, **drawn)
    assert plain.logprobs is not None
    assert [one.id for one in plain.logprobs] == list(plain.token_ids)
    assert warm.logprobs == plain.logprobs
