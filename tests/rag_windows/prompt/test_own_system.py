"""The default instruction stands behind the system message that a chat template has of its own."""

from __future__ import annotations

import pytest

from tests.rag_windows import small

OWN = "You are a helpful assistant."
TURNS = (
    "{% for m in messages %}{% if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}</s>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DEFAULT = (
    "<s>{% if messages[0].role == 'system' %}{% set said = messages[0].content %}{% else %}"
    "{% set said = '" + OWN + "' %}{% endif %}<|system|>{{ said }}</s>" + TURNS
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (DEFAULT, f"{OWN} Be brief."),
        (DEFAULT.replace(OWN, "Help"), "Help. Be brief."),
        (DEFAULT.replace(OWN, " "), "Be brief."),
        # Dates around the instruction are the template's, with an instruction or without.
        (DEFAULT.replace("<|system|>", "<|system|>Date: 1 May\n\n"), f"{OWN} Be brief."),
        # No message of its own.
        (small.TEMPLATE, "Be brief."),
        # The system message goes into the first turn of the user, or is refused, or left out.
        (
            "<s>{% for m in messages %}{% if m.role == 'user' %}<|user|>{% if loop.index0 == 1 %}"
            "{{ messages[0].content }}\n\n{% endif %}{{ m.content }}</s>{% endif %}{% endfor %}",
            "Be brief.",
        ),
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}<s>"
            + TURNS,
            "Be brief.",
        ),
        ("<s>" + TURNS, "Be brief."),
        (None, "Be brief."),
    ],
)
def test_the_own_message_comes_first(template: str | None, expected: str) -> None:
    assert small.templated(template).behind_own_system("Be brief.") == expected


def test_the_prompt_is_that_of_the_template_with_both() -> None:
    lm = small.templated(DEFAULT)
    plain = small.request(lm, "Where?", ["Here."])
    with_both = small.request(lm, "Where?", ["Here."], prefix=lm.behind_own_system("Be brief."))
    decode = small.tokenizer().decode
    assert decode(plain.parts.prefix_ids).startswith(f"<s><|system|>{OWN}</s>")
    assert decode(with_both.parts.prefix_ids).startswith(f"<s><|system|>{OWN} Be brief.</s>")
