"""LlamaIndex's users: what they write for other LLMs, written for ours."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from llama_index.core import Document, SummaryIndex
from llama_index.core.bridge.pydantic import ValidationError
from llama_index.core.chat_engine import SimpleChatEngine

from llama_index.llms.rag_windows import RagWindowsLLM
from rag_windows import WindowedLM
from tests.blackbox.conftest import Process
from tests.integrations.llama_index.asking import Told, told
from tests.tool_models import model as wide_model
from tests.tool_models import tokenizer as byte_tokenizer

TEXT = (
    "The ferry was run by Zelmont & Daughters until 1984; 23,450 people crossed in its last year, "
    "mostly on Sundays. Vara Zelmont, who plays the harp, kept the accounts. "
)


def test_the_constructor_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValidationError, match="temprature"):
        RagWindowsLLM("tiny-reader", temprature=0.5)
    with pytest.raises(TypeError, match="the same argument"):
        RagWindowsLLM("tiny-reader", max_tokens=3, max_new_tokens=3)


def test_max_tokens_is_max_new_tokens(small_lm: WindowedLM) -> None:
    model = RagWindowsLLM(lm=small_lm, max_tokens=3)
    assert model.metadata.num_output == 3
    assert model.complete("Who?").raw["usage"]["completion_tokens"] == 3
    assert model.complete("Who?", max_tokens=5).raw["usage"]["completion_tokens"] == 5
    with pytest.raises(TypeError, match="the same argument"):
        model.complete("Who?", max_tokens=5, max_new_tokens=5)


def test_a_temperature_samples_and_zero_does_not(small_lm: WindowedLM) -> None:
    def answers(model: RagWindowsLLM, **options: Any) -> set[str]:
        return {model.complete("Who?", seed=seed, **options).text for seed in range(4)}

    plain = RagWindowsLLM(lm=small_lm, max_tokens=8)
    warm = RagWindowsLLM(lm=small_lm, max_tokens=8, temperature=1.5)
    greedy = answers(plain)
    assert len(greedy) == 1
    assert len(answers(warm)) > 1
    assert len(answers(plain, temperature=1.5)) > 1
    assert answers(warm, temperature=0) == answers(warm, do_sample=False) == greedy
    assert answers(RagWindowsLLM(lm=small_lm, max_tokens=8, temperature=0)) == greedy
    again = RagWindowsLLM.from_dict({**warm.to_dict(), "model_name": "tiny-reader"})
    assert again.temperature == 1.5


def sizes(seen: Told) -> list[int]:
    """The tokens of every prompt that LlamaIndex made."""
    return [raw["usage"]["prompt_tokens"] for raw in seen.raws()]


@pytest.mark.parametrize(
    "mode", ["compact", "refine", "tree_summarize", "compact_accumulate", "simple_summarize"]
)
def test_what_stock_engines_pack_into_one_prompt_fits_it(mode: str) -> None:
    llm = RagWindowsLLM(lm=WindowedLM(wide_model(), byte_tokenizer("hermes")), max_tokens=8)
    documents = [Document(text=f"{i}. {TEXT * (9 * i)}") for i in range(5)]
    engine = SummaryIndex.from_documents(documents).as_query_engine(llm=llm, response_mode=mode)
    with told() as seen:
        engine.query("Who kept the accounts?")
    limit = llm.position_limit
    assert limit == 8192
    assert len(sizes(seen)) > 1 or mode == "simple_summarize"
    assert limit / 4 < max(sizes(seen)) <= limit - 8


@pytest.mark.parametrize("max_tokens", [8, 500])
def test_the_memory_of_a_stock_chat_engine_fits_a_prompt(
    reader: WindowedLM, max_tokens: int
) -> None:
    narrow = copy.deepcopy(reader.model)
    narrow.config.max_position_embeddings = 1536
    lm = WindowedLM(narrow, reader.tokenizer)
    llm = RagWindowsLLM(lm=lm, max_tokens=max_tokens, system_prompt="Be kind. " * 9)
    engine = SimpleChatEngine.from_defaults(llm=llm)
    with told() as seen:
        for turn in range(12):
            engine.chat(f"{turn}. {TEXT}")
    assert 200 < max(sizes(seen)) <= 1536 - max_tokens


STOCK = """
from llama_index.core import Document, SummaryIndex
from llama_index.core.bridge.pydantic import ValidationError
from llama_index.llms.rag_windows import RagWindowsLLM, WindowSynthesizer

llm = RagWindowsLLM("tiny-reader", max_tokens=2)
index = SummaryIndex.from_documents([Document(text="Vara Zelmont plays the harp. " * 100)])
llm.complete("Who plays the harp?")
index.as_query_engine(llm=llm, response_synthesizer=WindowSynthesizer(llm)).query("Who?")
print("nothing yet", flush=True)
for _ in range(2):
    list(index.as_query_engine(llm=llm, streaming=True).query("Who?").response_gen)
"""


@pytest.mark.slow
def test_glued_documents_are_told_once_with_the_line_to_write(python: Process) -> None:
    ended = python(STOCK)
    assert ended.returncode == 0, ended.stderr
    (told,) = [line for line in ended.stderr.splitlines() if "tokens and no passages" in line]
    assert "response_synthesizer=WindowSynthesizer(llm)" in told
