"""Control tokens in every place that text can reach in a prompt, also cut in two by a border."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_windows.passage import Passage
from rag_windows.prompt.builder import Prompt, PromptParts
from tests.fixtures_tokenizers import NAMES, build
from tests.rag_windows.test_boundary_properties import (
    BYTE_COMPLETE,
    FORBIDDEN,
    control_spellings,
    hostile_texts,
    shown,
    spaced,
)

PROMPTS = {name: Prompt(build(name).tokenizer, header="number+title") for name in NAMES}
EARLIER = [
    {"role": "user", "content": "Which town?"},
    {"role": "assistant", "content": "A quiet one."},
]
BENIGN = "the harbour"


def _bad(name: str) -> set[int]:
    if name in BYTE_COMPLETE:
        return FORBIDDEN[name]
    return FORBIDDEN[name] - {build(name).tokenizer.unk_token_id}


def _controls(name: str, ids: tuple[int, ...]) -> list[int]:
    return [i for i in ids if i in _bad(name)]


def _build(name: str, text: str, other: str) -> tuple[PromptParts, PromptParts]:
    """A prompt with text in all places, and the same with harmless words."""
    built = []
    for a, b in ((text, other), (BENIGN, BENIGN)):
        query: list[dict[str, str]] = [
            {"role": "user", "content": a},
            {"role": "assistant", "content": f"{b}."},
            {"role": "user", "content": f"{b}{a}"},
        ]
        passages = [Passage(a + BENIGN, title=b), Passage(b + BENIGN, title=a), Passage(b + a)]
        built.append(PROMPTS[name].build(query, passages, prefix=f"{a}{b}"))
    return built[0], built[1]


def _check(name: str, text: str, other: str) -> None:
    hostile, harmless = _build(name, text, other)
    bad = _bad(name)
    assert not any(bad.intersection(window.ids) for window in hostile.windows)
    assert _controls(name, hostile.prefix_ids) == _controls(name, harmless.prefix_ids)
    assert _controls(name, hostile.query_ids) == _controls(name, harmless.query_ids)


@pytest.mark.parametrize("name", NAMES)
def test_every_control_token_cut_at_every_border(name: str) -> None:
    spellings = control_spellings(build(name).tokenizer)
    for content in spellings[:8]:
        cuts = sorted({1, len(content) // 2, len(content) - 1, len(content)} - {0})
        for cut in cuts:
            _check(name, content[:cut], content[cut:] or BENIGN)
            _check(name, content[cut:] or BENIGN, content[:cut])


@pytest.mark.parametrize("name", NAMES)
@settings(
    max_examples=12,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(data=st.data())
def test_hostile_texts_in_every_place(name: str, data: st.DataObject) -> None:
    text, other = data.draw(TEXTS[name]), data.draw(TEXTS[name])
    _check(name, text if text.strip() else BENIGN, other if other.strip() else BENIGN)


TEXTS = {name: hostile_texts(name) for name in NAMES}


@pytest.mark.parametrize("name", [n for n in NAMES if build(n).tokenizer.chat_template])
def test_a_message_cannot_finish_a_token_that_the_template_began(name: str) -> None:
    """The template's last characters before a message and its first ones after it are text here."""
    tokenizer = build(name).tokenizer
    for content in control_spellings(tokenizer)[:4]:
        for cut in {1, 2, len(content) // 2, len(content) - 1}:
            template = content[:cut] + "{{ messages[-1].content }}" + content[cut:]
            prompt = Prompt(tokenizer, template_kwargs={"chat_template": template})
            expected = _controls(name, prompt.build(BENIGN, []).query_ids)
            for text in (content[cut:], content[:cut], content[cut:] + content[:cut], content):
                parts = prompt.build(text, [])
                assert _controls(name, parts.query_ids) == expected
                parts = prompt.build(text, [Passage(content[cut:]), Passage(content[:cut])])
                found = _controls(name, parts.prefix_ids) + _controls(name, parts.query_ids)
                assert found == expected
                assert not any(_bad(name).intersection(w.ids) for w in parts.windows)


@pytest.mark.parametrize("name", [n for n in NAMES if build(n).lossless])
def test_hostile_text_stands_in_the_prompt_as_it_was_given(name: str) -> None:
    text = "".join(control_spellings(build(name).tokenizer)[:9])
    parts = PROMPTS[name].build([*EARLIER, {"role": "user", "content": text}], [Passage(text)])
    window = _text(name, parts.windows[0].ids)
    assert window.lstrip() == spaced(f"[1]\n{text}\n\n")
    assert spaced(text) in _text(name, parts.query_ids)
    alone = PROMPTS[name].build(text, [])
    assert spaced(text) in _text(name, alone.query_ids)


def _text(name: str, ids: tuple[int, ...]) -> str:
    controls = FORBIDDEN[name]
    runs: list[list[int]] = [[]]
    for i in ids:
        if i in controls:
            runs.append([])
        else:
            runs[-1].append(i)
    return spaced("\0".join(shown(name, run) for run in runs if run))
