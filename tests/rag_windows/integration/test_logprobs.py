"""Log-probabilities of tokens as OpenAI's models tell them: their bytes joined are the text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rag_windows import Generation, Timings, Usage
from rag_windows.integration import logprob_content
from rag_windows.results import TokenLogprob
from tests import tool_models
from tests.fixtures_tokenizers import NAMES, build
from tests.rag_windows import small
from tests.rag_windows.prompt.test_reasoning import MISTRAL, OPENED, QWEN, scripted

TEXT = "Zoë's café in 東京 costs 5 € 😀.\n\nIt opens at 9."
KINDS = (*NAMES, "small")
PLAIN: Any = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}


def answer(tokenizer: Any, ids: list[int], stop: str | None = None) -> Generation:
    text = tokenizer.decode(ids, **PLAIN)
    return Generation(
        text=small.before(text, *([] if stop is None else [stop])),
        token_ids=tuple(ids),
        finish_reason="stop",
        usage=Usage(1, 0, len(ids)),
        timings=Timings(0.0, 0.0, 0.0),
        logprobs=tuple(TokenLogprob(id_, -1.0, ((id_, -1.0),)) for id_ in ids),
    )


def made(kind: str) -> Any:
    return tool_models.tokenizer("hermes") if kind == "small" else build(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [None, "\n\n", "京", "ffé", "café", "Zoë", "€", "pens"])
def test_the_bytes_of_all_tokens_are_the_text(kind: str, stop: str | None) -> None:
    tokenizer = made(kind)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    ids = [*ids, tokenizer.eos_token_id or ids[-1]]
    generation = answer(tokenizer, ids, stop)
    content = logprob_content(generation, tokenizer)
    assert all(entry["bytes"] for entry in content)
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == generation.text
    for entry in content:
        (top,) = entry["top_logprobs"]
        assert bytes(entry["bytes"]) in bytes(top["bytes"])
        assert entry["token"] == bytes(entry["bytes"]).decode(errors="replace")


@pytest.mark.parametrize("kind", ["small", "llama3", "llama2"])
def test_bytes_that_are_no_text_end_nothing(kind: str) -> None:
    tokenizer = made(kind)
    ids = tokenizer("a 東", add_special_tokens=False)["input_ids"][:-1]
    ids += tokenizer(" b\n\nc", add_special_tokens=False)["input_ids"]
    for stop in (None, "\n\n"):
        content = logprob_content(answer(tokenizer, ids, stop), tokenizer)
        told = b"".join(bytes(entry["bytes"]) for entry in content).decode(errors="replace")
        assert told.endswith(" b\n\nc" if stop is None else " b")


@pytest.mark.parametrize("stop", [None, " b", "b.", "é"])
@pytest.mark.parametrize("template", [OPENED, QWEN, MISTRAL])
def test_tokens_of_the_reasoning_are_left_out(template: str, stop: str | None) -> None:
    opening, closing = ("[THINK]", "[/THINK]") if template is MISTRAL else ("<think>", "</think>")
    opening = "" if template is OPENED else opening
    lm = scripted(template, f"{opening}Sulé, a b.{closing}\n\nSulé, a b.")
    generation = lm.generate("Where?", stop=stop, logprobs=True, top_logprobs=2)
    assert len(generation.logprobs) == len(generation.token_ids)
    content = logprob_content(generation, lm.tokenizer)
    told = b"".join(bytes(entry["bytes"]) for entry in content).decode()
    assert told == generation.text == small.before("Sulé, a b.", *([stop] if stop else []))
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)


def test_a_token_that_ends_the_reasoning_and_begins_the_answer_is_told_in_part() -> None:
    tokenizer = made("llama3")
    together = tokenizer("ing", add_special_tokens=False)["input_ids"][0]
    piece = tokenizer.decode([together], **PLAIN)
    generation = answer(tokenizer, [together, together])
    usage = replace(generation.usage, reasoning_tokens=1)
    generation = replace(generation, text=piece[1:] + piece, usage=usage)
    content = logprob_content(generation, tokenizer)
    assert "".join(entry["token"] for entry in content) == generation.text
