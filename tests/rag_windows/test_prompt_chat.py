"""Prompts of chat models: exact without passages, one template with passages."""

from __future__ import annotations

from typing import Any

import pytest

from rag_windows import PromptError
from rag_windows.passage import Passage
from rag_windows.prompt.builder import Prompt
from rag_windows.prompt.conversation import Conversation
from rag_windows.prompt.template import ChatTemplate
from rag_windows.prompt.tokenizing import Piece
from tests.fixtures_tokenizers import NAMES, build

CHAT = [name for name in NAMES if build(name).tokenizer.chat_template]
REFUSES_SYSTEM = {"gemma"}

QUESTIONS = (
    "Who built the long white wall?",
    "  spaces   inside and around \n",
    "\n\nA line first, café 東京 <b>tag</b> 1 < 2 & [x]",
    "ends with a sign <",
)


def _conversations(question: str) -> list[list[dict[str, str]]]:
    user = {"role": "user", "content": question}
    earlier = [
        {"role": "user", "content": "Which town?"},
        {"role": "assistant", "content": " A quiet one. "},
    ]
    system = {"role": "system", "content": "Answer from the passages."}
    return [[user], [*earlier, user], [system, user], [system, *earlier, user]]


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("name", CHAT)
def test_without_passages_ids_are_those_of_apply_chat_template(name: str, question: str) -> None:
    tokenizer = build(name).tokenizer
    if name == "gemma":
        question = question.replace("<b>", "(b)").replace("</b>", "(/b)")
    prompt = Prompt(tokenizer)
    for messages in _conversations(question):
        if name in REFUSES_SYSTEM and messages[0]["role"] == "system":
            continue
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        parts = prompt.build(messages, [])
        assert parts.prefix_ids == ()
        assert parts.windows == ()
        assert list(parts.query_ids) == expected


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    model = getattr(tokenizer, "sp_model", None)
    if model is None:
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    return str(tokenizer.decode(ids)).replace("<0x0A>", "\n")


@pytest.mark.parametrize("name", [n for n in CHAT if build(n).lossless])
def test_with_passages_the_text_is_the_template_with_passages_before_the_question(
    name: str,
) -> None:
    tokenizer = build(name).tokenizer
    passages = [Passage("The wall is white.", title="Walls"), Passage("Ships came in spring.")]
    windows = "Walls\nThe wall is white.\n\nShips came in spring.\n\n"
    for messages in _conversations("Who sold the ships?"):
        if name in REFUSES_SYSTEM and messages[0]["role"] == "system":
            continue
        parts = Prompt(tokenizer).build(messages, passages)
        first = next(i for i, m in enumerate(messages) if m["role"] == "user")
        whole = [dict(message) for message in messages]
        whole[first]["content"] = windows + whole[first]["content"]
        expected = tokenizer.apply_chat_template(whole, add_generation_prompt=True)["input_ids"]
        ids = [*parts.prefix_ids, *(i for w in parts.windows for i in w.ids), *parts.query_ids]
        shown = _decoded(tokenizer, ids)
        if name == "gpt2-prefix-space":  # puts a space behind each control token, a window has none
            shown, reference = (
                shown.replace(" ", ""),
                _decoded(tokenizer, expected).replace(" ", ""),
            )
        else:
            reference = _decoded(tokenizer, expected)
        assert shown == reference
        if tokenizer.bos_token_id is not None and tokenizer.bos_token_id in expected:
            assert ids.count(tokenizer.bos_token_id) == expected.count(tokenizer.bos_token_id)
        assert _decoded(tokenizer, list(parts.windows[1].ids)).strip() == "Ships came in spring."


def test_a_refused_system_message_goes_before_the_passages_of_the_first_user_message() -> None:
    tokenizer = build("gemma").tokenizer
    parts = Prompt(tokenizer).build("Who?", [Passage("A wall.")], prefix="Be short.")
    assert tokenizer.decode(parts.prefix_ids) == "<s><start_of_turn>user\nBe short.\n\n"
    assert tokenizer.decode(parts.query_ids) == "Who?<end_of_turn>\n<start_of_turn>model\n"
    folded = [{"role": "user", "content": "Be short.\n\nWho?"}]
    expected = tokenizer.apply_chat_template(folded, add_generation_prompt=True)["input_ids"]
    assert list(Prompt(tokenizer).build("Who?", [], prefix="Be short.").query_ids) == expected


def test_prefix_comes_before_a_leading_system_message() -> None:
    tokenizer = build("tiktoken").tokenizer
    messages = [{"role": "system", "content": "Second."}, {"role": "user", "content": "Who?"}]
    parts = Prompt(tokenizer).build(messages, [Passage("A wall.")], prefix="First.")
    expected = "<|im_start|>system\nFirst.\n\nSecond.<|im_end|>\n<|im_start|>user\n"
    assert tokenizer.decode(parts.prefix_ids) == expected


def test_template_variables_reach_the_template() -> None:
    tokenizer = build("qwen3").tokenizer
    parts = Prompt(tokenizer, template_kwargs={"enable_thinking": False}).build("Who?", [])
    assert tokenizer.decode(parts.query_ids).endswith("assistant\n<think>\n\n</think>\n\n")
    assert tokenizer.convert_tokens_to_ids("</think>") in parts.query_ids
    plain = Prompt(tokenizer).build("Who?", [])
    assert "<think>" not in tokenizer.decode(plain.query_ids)


def test_earlier_reasoning_is_left_out_as_the_template_does_it() -> None:
    tokenizer = build("qwen3").tokenizer
    messages = [
        {"role": "user", "content": "Which town?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nA quiet one."},
        {"role": "user", "content": "Who built it?"},
    ]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert list(Prompt(tokenizer).build(messages, []).query_ids) == expected
    shown = tokenizer.decode(Prompt(tokenizer).build(messages, [Passage("x")]).query_ids)
    assert "hm" not in shown
    assert "A quiet one." in shown


def _with_template(template: str) -> Prompt:
    tokenizer = build("tiktoken").tokenizer
    return Prompt(tokenizer, template_kwargs={"chat_template": template})


def test_a_template_that_upper_cases_is_followed() -> None:
    tokenizer = build("tiktoken").tokenizer
    template = "{% for m in messages %}<|im_start|>{{ m.content | upper }}<|im_end|>{% endfor %}"
    parts = _with_template(template).build(" who? ", [Passage("a wall")])
    assert tokenizer.decode(parts.query_ids) == " WHO? <|im_end|>"
    assert tokenizer.decode(parts.windows[0].ids) == "a wall\n\n"


def test_a_template_that_writes_an_earlier_message_twice_is_followed() -> None:
    tokenizer = build("tiktoken").tokenizer
    template = (
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
        "again: {{ messages[-1].content }}"
    )
    messages = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Two?"},
    ]
    parts = _with_template(template).build(messages, [Passage("a wall")])
    assert tokenizer.decode(parts.query_ids).endswith("<|im_start|>Two?<|im_end|>again: Two?")
    with pytest.raises(PromptError, match="2 times"):
        _with_template(template).build("One?", [Passage("a wall")])


def test_a_system_message_that_the_template_drops_is_folded() -> None:
    tokenizer = build("tiktoken").tokenizer
    template = (
        "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.content }}<|im_end|>"
        "{% endif %}{% endfor %}"
    )
    parts = _with_template(template).build("Who?", [Passage("a wall")], prefix="Be short.")
    assert tokenizer.decode(parts.prefix_ids) == "<|im_start|>Be short.\n\n"


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{% for m in messages %}{{ m.content[:3] }}{% endfor %}", "leaves out|changes"),
        ("{% for m in messages %}{{ m.content | replace('?', '') }}{% endfor %}", "changes"),
        ("{% for m in messages %}{{ m.content.split('is')[-1] }}{% endfor %}", "changes"),
        (
            "{% for m in messages %}{% if 'What' in m.content %}<|im_start|>{% endif %}"
            "{{ m.content }}{% endfor %}",
            "changes",
        ),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "leaves out message 0"),
        ("{{ raise_exception('only on sundays') }}", "only on sundays"),
        ("{{ messages[7].content }}", "refuses this conversation"),
    ],
)
def test_a_template_that_cannot_be_followed_is_refused(template: str, match: str) -> None:
    with pytest.raises(PromptError, match=match):
        _with_template(template).build("What is that?", [Passage("a wall")])
    with pytest.raises(PromptError, match=match):
        _with_template(template).build("What is that?", [])


def test_a_message_cannot_steer_the_template() -> None:
    """Text that a template would look for is refused rather than obeyed."""
    template = (
        "{% for m in messages %}{% if m.content.startswith('<tool>') %}<|fim_prefix|>{% endif %}"
        "<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    )
    tokenizer = build("tiktoken").tokenizer
    parts = _with_template(template).build("Who?", [Passage("<tool>")])
    assert tokenizer.convert_tokens_to_ids("<|fim_prefix|>") not in parts.prefix_ids
    with pytest.raises(PromptError, match="changes message 0"):
        _with_template(template).build("<tool>", [])


def test_roles_out_of_turn_are_refused_in_the_templates_words() -> None:
    messages = [{"role": "user", "content": "One?"}, {"role": "user", "content": "Two?"}]
    with pytest.raises(PromptError, match="roles must go user, assistant"):
        Prompt(build("llama2").tokenizer).build(messages, [])


def test_private_use_characters_in_text_are_only_text() -> None:
    tokenizer = build("tiktoken").tokenizer
    odd = "".join(chr(0xE000 + i) for i in range(64)) + "\ue100\ue101\uf8ff"
    parts = Prompt(tokenizer).build(odd, [Passage(odd)])
    assert odd in tokenizer.decode(parts.query_ids)
    assert tokenizer.decode(parts.windows[0].ids) == f"{odd}\n\n"


def test_a_placeholder_is_never_one_that_a_text_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    nonces = iter(["\ue000" * 16, "\ue001" * 16])
    monkeypatch.setattr("rag_windows.prompt.template._nonce", lambda: next(nonces))
    tokenizer = build("tiktoken").tokenizer
    parts = Prompt(tokenizer).build("\ue000" * 20, [])
    assert "\ue000" * 20 in tokenizer.decode(parts.query_ids)


def test_a_template_that_shows_the_time_may_see_it_move_on() -> None:
    class Clock:
        """Shows 11:59 once, then 12:00."""

        times = iter(["11:59"])

        def apply_chat_template(self, messages: list[dict[str, str]], **kwargs: Any) -> str:
            return f"{next(self.times, '12:00')} {messages[0]['content']}"

    conversation = Conversation.of("Who?")
    _, pieces = ChatTemplate(Clock(), {}).cut(conversation, slot=False)
    assert pieces == [Piece("12:00 ", trusted=True), Piece("Who?")]


def test_variables_that_the_prompt_sets_are_refused() -> None:
    with pytest.raises(PromptError, match="add_generation_prompt"):
        Prompt(build("llama3").tokenizer, template_kwargs={"add_generation_prompt": False})
