"""Reasoning in answers: by the markers of each family, whole, streamed and cut."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import LogitsProcessor

from rag_windows import APE, Chunk, WindowedLM
from tests import tool_models
from tests.rag_windows import small

PLAIN = small.TEMPLATE
OPENED = PLAIN.replace("<|assistant|>{% endif %}", "<|assistant|><think>\n{% endif %}")
# Qwen3's: open unless it is switched off, and then closed at once.
QWEN = PLAIN.replace(
    "<|assistant|>{% endif %}",
    "<|assistant|>{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}",
).replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
MISTRAL = PLAIN.replace("{{ m.content }}", "{{ m.content }}{# [THINK] [/THINK] #}")
HARMONY = PLAIN.replace("{{ m.content }}", "{{ m.content }}{# <|channel|> #}")
SPECIAL = {
    MISTRAL: ["[THINK]", "[/THINK]"],
    HARMONY: ["<|channel|>", "<|message|>", "<|start|>", "<|end|>"],
}


def scripted(template: str, *answers: str, ends: bool = True, **options: Any) -> Any:
    """A model with this template that gives these answers one after the other."""
    made = copy.deepcopy(small.tokenizer())
    made.chat_template = template
    markers = SPECIAL.get(template, [])
    made.add_tokens([AddedToken(name, special=True) for name in markers], special_tokens=True)
    if template is QWEN:
        made.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    lm = tool_models.ScriptedLM(tool_models.model(), made, **options)
    remaining = iter(answers)
    lm.script = lambda _: next(remaining)
    lm.asked, lm.ends = [], ends
    return lm


CASES = {
    "opened": (OPENED, "Sulava?\nYes.\n</think>\n\nSulava", "Sulava?\nYes.", "Sulava"),
    "the marker again": (OPENED, "a</think>Use </think> and <think>.", "a", None),
    "written": (QWEN, "<think>\nSulava?\n</think>\n\nSulava", "Sulava?", "Sulava"),
    "empty": (QWEN, "<think>\n\n</think>\n\nSulava", "", "Sulava"),
    "none": (QWEN, " Sulava\n", "", " Sulava\n"),
    "later": (QWEN, "The tag <think> opens it.", "", "The tag <think> opens it."),
    "half a marker": (QWEN, "<thin", "", "<thin"),
    "special tokens": (MISTRAL, "[THINK]Hm é[/THINK]Sulava é", "Hm é", "Sulava é"),
    "channels": (
        HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>S.",
        "Hm.",
        "S.",
    ),
    "channels, no analysis": (HARMONY, "<|channel|>final<|message|>Sulava", "", "Sulava"),
    "channels, none": (HARMONY, "Sulava", "", "Sulava"),
    "no such marker": (PLAIN, "a</think>b", "", "a</think>b"),
    "no such marker, whole": (PLAIN, "<think>a</think>b", "", "<think>a</think>b"),
}


@pytest.mark.parametrize("case", CASES)
def test_reasoning_stands_beside_the_answer(case: str) -> None:
    template, script, reasoning, text = CASES[case]
    text = script.partition("</think>")[2] if text is None else text
    lm = scripted(template, script, script, script)
    whole = lm.generate("Where?", ["Sulava is a town."])
    assert (whole.reasoning, whole.text, whole.finish_reason) == (reasoning, text, "stop")
    chunks = [*lm.stream("Where?", ["Sulava is a town."])]
    assert "".join(chunk.text for chunk in chunks) == text
    assert "".join(chunk.reasoning for chunk in chunks) == reasoning
    assert (chunks[-1].generation.text, chunks[-1].generation.reasoning) == (text, reasoning)
    if reasoning and text:
        first = next(index for index, chunk in enumerate(chunks) if chunk.text)
        assert first >= 1
        assert not any(chunk.reasoning for chunk in chunks[first:])
    usage = whole.usage
    assert usage.completion_tokens == len(whole.token_ids)
    thought = whole.token_ids[: usage.reasoning_tokens]
    assert bool(thought) == (reasoning != "" or case == "empty")
    assert lm.tokenizer.decode(
        whole.token_ids[len(thought) : -1], skip_special_tokens=True
    ).endswith(text)
    told: list[Chunk | None] = []
    with lm.scheduler() as scheduler:
        asked = {"query": "Where?", "passages": ["Sulava is a town."]}
        answer = scheduler.submit(asked, on_chunk=told.append).result(60)
    thoughts = "".join(chunk.reasoning for chunk in told if chunk is not None)
    assert (answer.text, answer.reasoning, thoughts) == (text, reasoning, reasoning)


@pytest.mark.parametrize("case", CASES)
def test_sentences_are_those_of_the_answer(case: str) -> None:
    template, script, _, text = CASES[case]
    text = script.partition("</think>")[2] if text is None else text
    lm = scripted(template, script, script)
    whole = lm.generate("Where?", ["Sulava is a town."], citations="removal")
    assert "".join(one.text for one in whole.statements).replace(" ", "") == text.replace(
        " ", ""
    ).replace("\n", "")
    for one in whole.statements:
        assert whole.text[one.start : one.end] == one.text
    cut = scripted(template, script).generate("Where?", ["Sulava is a town."], stop=text[-2:])
    assert all(cut.text[one.start : one.end] == one.text for one in cut.statements)


@pytest.mark.parametrize(
    ("template", "script"),
    [(OPENED, "Sulava? Hm, "), (QWEN, "<think>\nSulava? Hm, "), (MISTRAL, "[THINK]Sulava? Hm, ")],
)
def test_what_the_limit_cuts_is_reasoning(template: str, script: str) -> None:
    lm = scripted(template, script, script, ends=False)
    whole = lm.generate("Where?")
    assert (whole.text, whole.reasoning) == ("", "Sulava? Hm,")
    assert whole.finish_reason == "length"
    assert whole.usage.reasoning_tokens == whole.usage.completion_tokens
    assert "".join(chunk.reasoning for chunk in lm.stream("Where?")) == whole.reasoning


@pytest.mark.parametrize("stop", ["\n\n", "S", "</think>"])
def test_stop_strings_end_the_answer_and_not_the_reasoning(stop: str) -> None:
    script = "S, a\n\nb.</think>\n\nPelly\n\nS, and </think> more"
    lm = scripted(OPENED, script, script)
    whole = lm.generate("Where?", stop=stop)
    text = script.partition("</think>")[2].lstrip().partition(stop)[0]
    assert (whole.text, whole.reasoning) == (text, "S, a\n\nb.")
    assert whole.finish_reason == "stop"
    assert len(whole.token_ids) < len(script)
    chunks = [*lm.stream("Where?", stop=stop)]
    assert "".join(chunk.text for chunk in chunks) == text


def test_an_assistant_s_message_that_is_continued_is_no_reasoning() -> None:
    lm = scripted(OPENED, "va")
    begun = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Sula"}]
    answer = lm.generate(begun)
    assert (answer.text, answer.reasoning) == ("va", "")


def test_thinking_can_be_switched_off() -> None:
    off = {"enable_thinking": False}
    lm = scripted(QWEN, "Sulava</think>", template_kwargs=off)
    answer = lm.generate("Where?")
    assert (answer.text, answer.reasoning) == ("Sulava</think>", "")


def test_a_response_template_of_the_tokenizer_counts() -> None:
    lm = scripted(PLAIN, "Let me see. ANSWER: Sulava.")
    lm.tokenizer.response_template = {
        "start_anchor": "<|assistant|>",
        "fields": {
            "thinking": {"close": "ANSWER:"},
            "content": {"open": "ANSWER:"},
            "tool_calls": {"open": "CALL", "repeats": True},
        },
    }
    again = WindowedLM(lm.model, lm.tokenizer)
    form = again.engine.text.reasoning
    assert form is not None
    parts = form.after("<s><|assistant|>").split("Let me see. ANSWER: Sulava.")
    assert parts == ("Let me see.", "Sulava.")


FORM = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}


class Script(LogitsProcessor):
    """Makes the model write a text, as far as it may."""

    def __init__(self, lm: Any, text: str) -> None:
        self._ids = lm.tokenizer(text, add_special_tokens=False)["input_ids"]
        self._start: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        length = input_ids.shape[1]
        self._start = length if self._start is None else self._start
        if length - self._start < len(self._ids):
            scores = scores.clone()
            scores[:, self._ids[length - self._start]] += 1e6
        return scores


@pytest.mark.parametrize("how", ["generate", "stream", "batch"])
@pytest.mark.parametrize("template", [OPENED, QWEN])
def test_a_form_holds_the_answer_and_not_the_reasoning(template: str, how: str) -> None:
    pytest.importorskip("llguidance")
    lm = scripted(template, "x")
    lm = WindowedLM(lm.model, lm.tokenizer)
    script = "Hm, </s>1.</think>\n\nIt is one."
    options: Any = {"json_schema": FORM, "logits_processor": [Script(lm, script)]}
    answer: Any
    if how == "generate":
        answer = lm.generate("Where?", **options)
    elif how == "stream":
        *_, last = lm.stream("Where?", **options)
        answer = last.generation
    else:
        (answer, _) = lm.generate_batch([{"query": "Where?", **options}, {"query": "Who?"}])
    assert answer.text == '{"a": 1}'
    assert answer.reasoning.startswith("Hm, ") == (template is OPENED)
    assert answer.finish_reason == "stop"


def test_beams_divide_too() -> None:
    lm = WindowedLM(tool_models.model(), scripted(OPENED, "x").tokenizer)
    answer = lm.generate("Where?", num_beams=2, num_return_sequences=2, max_new_tokens=4, stop="é")
    for one in (answer, *answer.alternatives):
        assert one.text == ""
        assert one.usage.reasoning_tokens == len(one.token_ids)


def test_a_metric_of_compare_sees_the_answer() -> None:
    lm = WindowedLM(tool_models.model(), scripted(OPENED, "x").tokenizer)
    seen: list[str] = []

    def metric(said: str, right: str) -> float:
        seen.append(said)
        return 0.0

    examples = [{"query": f"{i}?", "passages": ["One."], "answer": "1"} for i in range(8)]
    lm.compare(examples, [APE(0.7, 0.9)], metric=metric, max_new_tokens=3, refine=False)
    assert seen
    assert set(seen) == {""}
