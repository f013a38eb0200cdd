"""The LangChain adapter as its users meet it: stock parts, their caches, agents and errors."""

from __future__ import annotations

import asyncio
import enum
import json
import pickle
import runpy
import sqlite3
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.caches import BaseCache
from langchain_core.documents import Document
from langchain_core.exceptions import OutputParserException
from langchain_core.globals import set_llm_cache
from langchain_core.load import dumps, loads
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage
from langchain_core.outputs import Generation
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableParallel
from pydantic import BaseModel, Field

from langchain_rag_windows import ChatRagWindows, RagWindows, create_windows_chain
from rag_windows import GenerationError, InputError, MissingExtraError, WindowedLM
from tests.blackbox.conftest import ANSWER, QUESTION, ROOT, Process
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


class JSONCache(BaseCache):
    """As LangChain's SQLiteCache does it: what `dumps` writes stands in a table."""

    def __init__(self) -> None:
        self.table = sqlite3.connect(":memory:", check_same_thread=False)
        self.table.execute("create table answers (key text primary key, value text)")
        self.hits = 0

    def lookup(self, prompt: str, llm_string: str) -> Sequence[Generation] | None:
        row = self.table.execute(
            "select value from answers where key = ?", [prompt + llm_string]
        ).fetchone()
        if row is None:
            return None
        self.hits += 1
        return [loads(one, allowed_objects="core") for one in json.loads(row[0])]

    def update(self, prompt: str, llm_string: str, return_val: Sequence[Generation]) -> None:
        written = json.dumps([dumps(one) for one in return_val])
        self.table.execute("insert into answers values (?, ?)", [prompt + llm_string, written])

    def clear(self, **kwargs: Any) -> None:
        self.table.execute("delete from answers")


@pytest.fixture
def answers() -> Iterator[JSONCache]:
    made = JSONCache()
    set_llm_cache(made)
    yield made
    set_llm_cache(None)


class Colour(enum.Enum):
    RED = "red"


@enum.unique
class Level(enum.IntEnum):
    LOW = 1


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.datetimes(timezones=st.just(UTC)),
    st.dates(),
    st.times(),
    st.timedeltas(),
    st.uuids(),
    st.decimals(),
    st.complex_numbers(),
    st.sampled_from([Path("a/b"), Colour.RED, Level.LOW, Birth(town="Sulava"), object(), Birth]),
    st.floats(width=32).map(np.float32),
    st.integers(0, 255).map(np.uint8),
    st.booleans().map(np.bool_),
    st.just(np.arange(4).reshape(2, 2)),
    st.just(np.datetime64("2020-01-01")),
)
hashable = st.one_of(st.text(max_size=3), st.integers(), st.uuids(), st.dates())
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.sets(hashable, max_size=3),
        st.frozensets(hashable, max_size=3),
        st.dictionaries(hashable, inner, max_size=3),
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(held=values)
def test_citations_are_plain_json_whatever_documents_hold(reader: WindowedLM, held: object) -> None:
    chat = ChatRagWindows(lm=reader, max_tokens=2)
    document = DOCUMENT.model_copy(update={"metadata": {"title": "Zelmont", "held": held}})
    metadata = chat.invoke(QUESTION, documents=[document]).response_metadata
    written = json.dumps(metadata, allow_nan=False)
    assert json.loads(written) == metadata


def test_values_of_metadata_are_told_as_people_write_them(chat: ChatRagWindows) -> None:
    looped: list[Any] = []
    looped.append(looped)
    told = {
        "when": (datetime(2020, 5, 6, 7, 8), "2020-05-06T07:08:00"),
        "path": (Path("notes/a.md"), str(Path("notes/a.md"))),
        "tags": ({"a"}, ["a"]),
        "id": (uuid.UUID(int=7), str(uuid.UUID(int=7))),
        "share": (np.float32(0.5), 0.5),
        "vector": (np.arange(3), [0, 1, 2]),
        "price": (Decimal("1.50"), "1.50"),
        "level": (Level.LOW, 1),
        "loop": (looped, "[[...]]"),
        "plain": ({"a": [1, None, True, "x"]}, {"a": [1, None, True, "x"]}),
    }
    held = {name: value for name, (value, _) in told.items()}
    document = DOCUMENT.model_copy(update={"metadata": held})
    (cited,) = chat.invoke(QUESTION, documents=[document]).response_metadata["citations"]
    assert cited["metadata"] == {name: expected for name, (_, expected) in told.items()}


@pytest.mark.parametrize("kind", [ChatRagWindows, RagWindows])
def test_an_answer_comes_back_from_a_cache_that_keeps_json(
    kind: type, reader: WindowedLM, answers: JSONCache
) -> None:
    llm = kind(lm=reader, max_tokens=16, temperature=0)
    held = {"when": datetime(2020, 1, 1), "tags": {"a"}, "id": uuid.UUID(int=1), "n": np.int64(3)}
    document = DOCUMENT.model_copy(update={"metadata": held})
    first, again = (llm.invoke(QUESTION, documents=[document]) for _ in range(2))
    assert answers.hits == 1
    if kind is RagWindows:
        assert first == again == ANSWER
    else:
        assert first.text == again.text == ANSWER
        assert first.response_metadata == again.response_metadata


Asked = Callable[[ChatRagWindows], Any]


def asked_by_invoke(chat: ChatRagWindows) -> Any:
    made = chat.with_structured_output(Birth, method="json_mode", include_raw=True)
    return made.invoke(QUESTION, documents=[DOCUMENT])


def asked_by_ainvoke(chat: ChatRagWindows) -> Any:
    made = chat.with_structured_output(Birth, method="json_mode", include_raw=True)
    return asyncio.run(made.ainvoke(QUESTION, documents=[DOCUMENT]))


def asked_by_batch(chat: ChatRagWindows) -> Any:
    made = chat.with_structured_output(Birth, method="json_mode", include_raw=True)
    return made.batch([QUESTION], documents=[DOCUMENT])[0]


def asked_by_stream(chat: ChatRagWindows) -> Any:
    made = chat.with_structured_output(Birth, method="json_mode", include_raw=True)
    pieces = list(made.stream(QUESTION, documents=[DOCUMENT]))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = whole + piece
    return whole


def asked_by_astream(chat: ChatRagWindows) -> Any:
    made = chat.with_structured_output(Birth, method="json_mode", include_raw=True)

    async def pieces() -> Any:
        whole: Any = None
        async for piece in made.astream(QUESTION, documents=[DOCUMENT]):
            whole = piece if whole is None else whole + piece
        return whole

    return asyncio.run(pieces())


def asked_bound_before(chat: ChatRagWindows) -> Any:
    bound: Any = chat.bind(documents=[DOCUMENT])
    made = bound.with_structured_output(Birth, method="json_mode", include_raw=True)
    return made.invoke(QUESTION)


def asked_configured_and_bound_before(chat: ChatRagWindows) -> Any:
    bound: Any = chat.with_config(tags=["a"]).bind(documents=[DOCUMENT])
    made = bound.with_structured_output(Birth, method="json_mode", include_raw=True)
    return made.invoke(QUESTION)


def asked_bound_behind(chat: ChatRagWindows) -> Any:
    made = chat.with_structured_output(Birth, method="json_mode", include_raw=True)
    return made.bind(documents=[DOCUMENT]).invoke(QUESTION)


def asked_by_a_chain(chat: ChatRagWindows) -> Any:
    made = chat.with_structured_output(Birth, method="json_mode", include_raw=True)
    prompt = ChatPromptTemplate.from_messages([("human", "{context}{input}")])
    return create_windows_chain(made, prompt).invoke({"context": [DOCUMENT], "input": QUESTION})


@pytest.mark.parametrize(
    "asked",
    [
        asked_by_invoke,
        asked_by_ainvoke,
        asked_by_batch,
        asked_by_stream,
        asked_by_astream,
        asked_bound_before,
        asked_configured_and_bound_before,
        asked_bound_behind,
        asked_by_a_chain,
    ],
)
def test_documents_reach_a_model_with_structured_output(asked: Asked, chat: ChatRagWindows) -> None:
    result = asked(chat)
    assert result["raw"].text == ANSWER
    assert [one["id"] for one in result["raw"].response_metadata["citations"]] == ["zelmont"]
    assert result["parsed"] is None
    assert isinstance(result["parsing_error"], OutputParserException)


def test_a_stream_of_structured_output_without_the_raw_message_takes_documents_too(
    chat: ChatRagWindows,
) -> None:
    made = chat.with_structured_output(Birth, method="json_mode")
    with pytest.raises(OutputParserException, match=ANSWER):
        list(made.stream(QUESTION, documents=[DOCUMENT]))


def test_a_chain_refuses_what_hands_no_documents_on(chat: ChatRagWindows) -> None:
    prompt = ChatPromptTemplate.from_messages([("human", "{context}{input}")])
    losing: list[Any] = [RunnableParallel(raw=chat), prompt | chat]
    for lost in losing:
        with pytest.raises(ValueError, match="hands no documents on to the model in it"):
            create_windows_chain(lost, prompt)


def test_a_long_prompt_without_documents_is_told_once_with_the_line_to_write(
    python: Process, tmp_path: Path
) -> None:
    script = tmp_path / "users_own.py"
    script.write_text(
        "from langchain_classic.chains.combine_documents import create_stuff_documents_chain\n"
        "from langchain_core.documents import Document\n"
        "from langchain_core.prompts import ChatPromptTemplate\n"
        "from langchain_rag_windows import ChatRagWindows\n"
        "LONG = 'word ' * 700\n"
        "prompt = ChatPromptTemplate.from_messages([('human', '{context}')])\n"
        "llm = ChatRagWindows(model='tiny-reader', max_tokens=2)\n"
        "llm.invoke(LONG, documents=['A text.']); llm.invoke('word')\n"
        "create_stuff_documents_chain(llm, prompt).invoke({'context': [Document(LONG)]})\n"
        "list((prompt | llm).stream({'context': LONG}))\n",
        encoding="utf-8",
    )
    done = python(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')")
    assert done.returncode == 0, done.stderr
    (told,) = [row for row in done.stderr.splitlines() if "no passages" in row]
    assert told.startswith("This prompt has 70")
    assert "llm.invoke(question, documents=docs)" in told
    assert "create_windows_chain(llm, prompt)" in told


def test_the_adapter_without_langchain_says_what_to_install(python: Process) -> None:
    done = python("import sys; sys.modules['langchain_core'] = None; import langchain_rag_windows")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: The LangChain adapter needs langchain-core, which is not installed; "
        'run: pip install ".[langchain]"'
    )


def test_an_example_without_the_stock_chains_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "langchain_classic.chains", None)
    with pytest.raises(SystemExit, match="not installed; run: pip install langchain-classic"):
        runpy.run_path(str(ROOT / "examples/langchain_stuff_chain.py"))


def test_langchain_s_profile_tells_what_the_model_can_do(
    chat: ChatRagWindows, small_folder: Path
) -> None:
    for llm, limit in ((chat, 8192), (ChatRagWindows(model=small_folder), 1024)):
        assert llm.profile is not None
        assert llm.profile["max_input_tokens"] == limit
        assert llm.profile["tool_calling"] is False
        assert llm.profile["text_inputs"] is True
        assert llm.profile["image_inputs"] is False
    assert ChatRagWindows(model="no/such-model").profile is None
    own = ChatRagWindows(model="tiny-reader", profile={"max_input_tokens": 5})
    assert own.profile == {"max_input_tokens": 5}


def test_summarization_is_configured_by_the_profile(chat: ChatRagWindows) -> None:
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


def test_structured_output_without_tools_names_what_works_instead(chat: ChatRagWindows) -> None:
    with pytest.raises(
        NotImplementedError, match=r"use method='json_schema'.* or method='json_mode'"
    ):
        chat.with_structured_output(Birth)


def test_a_model_around_loaded_weights_says_how_to_make_one_that_can_be_pickled(
    chat: ChatRagWindows, reader: WindowedLM
) -> None:
    for llm in (chat, RagWindows(lm=reader)):
        with pytest.raises(TypeError, match=r"Make it with model=, a name or a folder"):
            pickle.dumps(llm)
    named = ChatRagWindows(model="tiny-reader", max_tokens=16)
    again = pickle.loads(pickle.dumps(named))  # noqa: S301 - our own
    assert again.invoke(QUESTION, documents=[DOCUMENT]).text == ANSWER


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
    for documents in ([], [DOCUMENT]):
        given = [{"text": d.page_content, **d.metadata} for d in documents]
        expected = small_lm.generate(written, given, max_new_tokens=4)
        answer = chat.invoke(messages, documents=documents)
        assert answer.text == expected.text
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["input_tokens"] == expected.usage.prompt_tokens
        streamed = list(chat.stream(messages, documents=documents))
        assert "".join(str(chunk.text) for chunk in streamed) == expected.text
    agent: Any = create_agent(chat, tools=[], system_prompt="Be brief.")
    state = agent.invoke({"messages": messages[1:]})
    assert state["messages"][-1].text == small_lm.generate(written, max_new_tokens=4).text


class Wall(BaseModel):
    """A wall."""

    colour: Literal["white", "red"]
    metres: int = Field(ge=0, le=999)
    dry: bool


WALL = Wall.model_json_schema()


@pytest.mark.parametrize("method", ["ape", "sequential", "ensemble"])
def test_an_answer_is_held_to_a_json_schema(method: str, small_lm: WindowedLM) -> None:
    texts = ["The wall is white.", "It is 12 m long."]
    made = small_lm.generate("Which?", texts, method=method, json_schema=WALL)
    Wall.model_validate_json(made.text)
    assert made.finish_reason == "stop"
    pieces = small_lm.stream("Which?", texts, method=method, json_schema=WALL)
    assert "".join(piece.text for piece in pieces) == made.text


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**31), temperature=st.floats(0.5, 5), beams=st.sampled_from([1, 1, 2]))
def test_answers_of_a_batch_are_held_to_their_own_schemas(
    small_lm: WindowedLM, seed: int, temperature: float, beams: int
) -> None:
    drawn = {"do_sample": True, "seed": seed, "temperature": temperature, "num_beams": beams}
    texts = ["The wall is white."]
    asked: list[dict[str, Any]] = [
        {"query": "Which?", "passages": texts, "json_schema": WALL, **drawn},
        {"query": "How many?", "json_schema": {"enum": [1, 22, 333]}, **drawn},
        {"query": "Or?", "passages": texts, "grammar": 'start: "yes" | "no"', **drawn},
        {"query": "What?", "max_new_tokens": 5},
    ]
    wall, number, word, free = small_lm.generate_batch(asked)
    Wall.model_validate_json(wall.text)
    assert json.loads(number.text) in (1, 22, 333)
    assert word.text in ("yes", "no")
    assert free.text == small_lm.generate("What?", max_new_tokens=5).text
    with small_lm.scheduler() as scheduler:
        again = [scheduler.submit(one) for one in asked]
        assert [one.result().text for one in again[:3]] == [wall.text, number.text, word.text]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"json_schema": 3}, "must be a JSON schema as a mapping"),
        ({"json_schema": Wall}, "model_json_schema"),
        ({"json_schema": {"type": "nonsense"}}, "Invalid type: nonsense"),
        ({"json_schema": {"type": "string", "pattern": "(?!a)b"}}, "look-around"),
        ({"json_schema": {}, "grammar": "start: /a/"}, "give one of them"),
        ({"grammar": "start"}, "Answers can't be held to this grammar"),
    ],
)
def test_a_form_that_can_not_be_kept_is_refused(
    options: dict[str, Any], match: str, small_lm: WindowedLM
) -> None:
    with pytest.raises(InputError, match=match):
        small_lm.generate("Which?", ["A text."], **options)


def test_without_the_extra_a_form_is_refused_with_the_remedy(
    small_lm: WindowedLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r'run: pip install "\.\[structured\]"'):
        small_lm.generate("Which?", json_schema=WALL)
    with pytest.raises(MissingExtraError, match=r'run: pip install "\.\[structured\]"'):
        ChatRagWindows(lm=small_lm).with_structured_output(Wall, method="json_schema")


class Fence(TypedDict):
    """A fence."""

    colour: Literal["white", "red"]


GATE = {"title": "Gate", "type": "object", "properties": {"open": {"type": "boolean"}}}


def test_structured_output_is_right_by_construction(small_lm: WindowedLM) -> None:
    for rows in (1, 8):
        llm = ChatRagWindows(lm=small_lm, batch_rows=rows)
        for schema in (Wall, Fence, GATE, {"type": "array", "items": {"enum": [1]}, "maxItems": 2}):
            made = llm.with_structured_output(schema, method="json_schema")
            answers = made.batch(["Which?", "How?"], documents=[DOCUMENT])
            for answer in [*answers, made.invoke("Who?"), *made.stream("Or?")]:
                assert isinstance(answer, Wall if schema is Wall else dict | list)
    raw = llm.with_structured_output(Wall, method="json_schema", include_raw=True).invoke("Which?")
    assert raw["parsed"] == Wall.model_validate_json(raw["raw"].text)
    with pytest.raises(OutputParserException, match="cut at max_tokens"):
        ChatRagWindows(lm=small_lm, max_tokens=5).with_structured_output(
            Wall, method="json_schema"
        ).invoke("Which?")
    with pytest.raises(ValueError, match="look-around"):
        llm.with_structured_output(
            {"title": "a", "type": "object", "properties": {"b": {"pattern": "(?!a)b"}}},
            method="json_schema",
        )


def test_an_agent_without_tools_answers_in_the_form_of_a_schema(small_lm: WindowedLM) -> None:
    agent: Any = create_agent(ChatRagWindows(lm=small_lm), response_format=Wall)
    assert isinstance(
        agent.invoke({"messages": [HumanMessage("Which?")]})["structured_response"], Wall
    )


@pytest.mark.parametrize("kind", ["hermes", "llama", "mistral"])
def test_forced_calls_are_held_to_their_schema(kind: str) -> None:
    lm = WindowedLM.from_pretrained(model(), tokenizer=tokenizer(kind))
    llm = ChatRagWindows(lm=lm, max_tokens=200)
    assert llm.with_structured_output(Wall).invoke("Which?", documents=[DOCUMENT]).metres >= 0
    strict = llm.with_structured_output(Wall, strict=True, include_raw=True).invoke("Which?")
    assert isinstance(strict["parsed"], Wall)
    (call,) = strict["raw"].tool_calls
    assert call["name"] == "Wall"
    several = llm.bind_tools([Wall, Fence], tool_choice="any").invoke("Which?")
    assert {call["name"] for call in several.tool_calls} <= {"Wall", "Fence"}
    assert len(several.tool_calls) == 1
    agent: Any = create_agent(llm, tools=[], response_format=Wall)
    assert isinstance(
        agent.invoke({"messages": [HumanMessage("Which?")]})["structured_response"], Wall
    )
    with pytest.raises(ValueError, match="can't call a tool"):
        llm.bind_tools([Wall], response_format={"type": "json_object"}).invoke("Which?")


def test_log_probabilities_come_in_the_usual_form(reader: WindowedLM) -> None:
    for rows in (1, 8):
        llm = ChatRagWindows(lm=reader, batch_rows=rows, temperature=0, max_tokens=16)
        asked: dict[str, Any] = {"documents": [DOCUMENT], "logprobs": True, "top_logprobs": 3}
        whole = llm.invoke(QUESTION, **asked)
        (batched,) = llm.bind(**asked).batch([QUESTION])
        streamed = None
        for piece in llm.stream(QUESTION, **asked):
            streamed = piece if streamed is None else streamed + piece
        for message in (whole, batched, streamed):
            assert message is not None
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
    assert "logprobs" not in llm.invoke(QUESTION, documents=[DOCUMENT]).response_metadata
    made = ChatRagWindows(lm=reader, logprobs=True).invoke(QUESTION, documents=[DOCUMENT])
    assert made.response_metadata["logprobs"]["content"][0]["top_logprobs"] == []
    info = RagWindows(lm=reader).generate([QUESTION], logprobs=True).generations[0][0]
    assert info.generation_info is not None
    assert info.generation_info["logprobs"]["content"]


def test_log_probabilities_are_the_model_s_own(small_lm: WindowedLM) -> None:
    plain = small_lm.generate("Which?", ["A text."], max_new_tokens=6, logprobs=True)
    warm = small_lm.generate(
        "Which?",
        ["A text."],
        max_new_tokens=6,
        logprobs=True,
        do_sample=True,
        temperature=1e-6,
        seed=1,
    )
    assert plain.logprobs is not None
    assert [one.id for one in plain.logprobs] == list(plain.token_ids)
    assert warm.logprobs == plain.logprobs


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"top_logprobs": 3}, "needs logprobs=True"),
        ({"logprobs": True, "top_logprobs": 21}, "from 0 to 20"),
        ({"logprobs": 3}, "True or False"),
        ({"logprobs": True, "num_beams": 2}, "leave num_beams"),
        ({"logprobs": True, "prompt_lookup_num_tokens": 2}, "leave one of them out"),
    ],
)
def test_log_probabilities_that_can_not_be_had_are_refused(
    options: dict[str, Any], match: str, small_lm: WindowedLM
) -> None:
    with pytest.raises((InputError, GenerationError), match=match):
        small_lm.generate("Which?", ["A text."], max_new_tokens=3, **options)
