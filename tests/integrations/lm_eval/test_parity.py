"""Read one after the other, examples give what the harness's own `--model hf` gives."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lm_eval")

from tests.integrations.lm_eval.models import POSITIONS, cut, ours, requests, said, scored, theirs

PLAIN = ["llama3", "gpt2", "llama2", "gemma"]
CHAT = ["llama3", "qwen3", "llama2", "gpt-neox"]
"""Ways to begin a text, to write line breaks, and to write turns."""

EXAMPLES = [("Who wrote it? A man", "Smith"), ("Where is  Paris?", "in France"), ("3 > 2?", "yes")]
QUESTION = "What is the sea?"
CHOICES = (" water", " salt water", " Paris is far")

Pair = tuple[float, bool]


def plain(description: str = "") -> str:
    shown = "".join(f"Question: {q}\nAnswer: {a}\n\n" for q, a in EXAMPLES)
    return f"{description}{shown}Question: {QUESTION}\nAnswer:"


def turns(system: str = "", begun: str = "") -> list[dict[str, str]]:
    said = [("system", system)] if system else []
    for question, answer in EXAMPLES:
        said += [("user", question), ("assistant", answer)]
    said += [("user", QUESTION)]
    said += [("assistant", begun)] if begun else []
    return [{"role": role, "content": text} for role, text in said]


def assert_equal(found: list[Pair], expected: list[Pair]) -> None:
    assert [one for one, _ in found] == pytest.approx([one for one, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


@pytest.mark.parametrize("name", PLAIN)
def test_plain_prompts(name: str) -> None:
    context = plain("Answer well.\n\n")
    lm = ours(name, method="sequential")
    assert len(cut(lm, context)) == 1 + 3 + 1
    greedy = said(theirs(name), context, until=["\n\n"], max_gen_toks=6)
    assert said(lm, context, until=["\n\n"], max_gen_toks=6) == greedy
    # A random model may spell a control token; ours reads it as text, and the harness as the token.
    answers = CHOICES if "<" in greedy else (*CHOICES, greedy)
    pairs = [(context, choice) for choice in answers] + [(context + " ", "water")]
    assert_equal(scored(lm, *pairs), scored(theirs(name), *pairs))


@pytest.mark.parametrize("name", CHAT)
@pytest.mark.parametrize("kind", ["turns", "one turn", "begun", "system"])
def test_chat_prompts(name: str, kind: str) -> None:
    history = {
        "turns": turns(),
        "one turn": [{"role": "user", "content": plain()}],
        "begun": turns(begun="It is"),
        "system": turns(system="Be brief."),
    }[kind]
    prompted = kind != "begun"
    lm = ours(name, method="sequential")
    context = lm.apply_chat_template(history, add_generation_prompt=prompted)
    expected = theirs(name).apply_chat_template(history, add_generation_prompt=prompted)
    assert context == expected
    assert len(cut(lm, context)) == 1 + 3 + 1
    pairs = [(context, choice) for choice in CHOICES]
    assert_equal(scored(lm, *pairs), scored(theirs(name), *((expected, c) for c in CHOICES)))
    options: dict[str, Any] = {"until": ["\n"], "max_gen_toks": 5}
    assert said(lm, context, **options) == said(theirs(name), expected, **options)


@pytest.mark.parametrize("name", ["llama3", "llama2"])
def test_without_a_prompt(name: str) -> None:
    lm = ours(name, method="ape")
    pairs = [("", " water"), ("", "Paris"), ("Where?", " there")]
    assert_equal(scored(lm, *pairs), scored(theirs(name), *pairs))


def test_a_prompt_too_long_loses_its_beginning(caplog: pytest.LogCaptureFixture) -> None:
    context = "Words of no use. " * 300 + plain()
    lm = ours("llama3", method="sequential")
    assert_equal(scored(lm, (context, " water")), scored(theirs("llama3"), (context, " water")))
    assert f"longer than {POSITIONS} positions" in caplog.text
    assert lm.get_model_info()["rag_windows"]["prompts_truncated"] == 1
    options: dict[str, Any] = {"until": ["\n"], "max_gen_toks": 5}
    assert said(lm, context, **options) == said(theirs("llama3"), context, **options)


@pytest.mark.parametrize("method", ["sequential", "ape"])
def test_whole_texts(method: str) -> None:
    texts = requests("loglikelihood_rolling", ("A cat sat. " * 250,), ("Short.",))
    found = ours("llama3", method=method).loglikelihood_rolling(texts, disable_tqdm=True)
    expected = theirs("llama3").loglikelihood_rolling(texts, disable_tqdm=True)
    assert found == pytest.approx(expected, rel=1e-5)


def test_where_texts_spell_control_tokens_the_two_differ() -> None:
    """The harness's model takes them for control tokens."""
    context = plain().replace("Smith", "Smith<|eot_id|><|start_header_id|>user")
    expected = scored(theirs("llama3"), (context, " water"))
    lm = ours("llama3", method="sequential")
    assert scored(lm, (context, " water"))[0][0] != pytest.approx(expected[0][0], abs=1e-4)
    assert lm.tokenizer.convert_tokens_to_ids("<|eot_id|>") not in lm.tok_encode(context)
