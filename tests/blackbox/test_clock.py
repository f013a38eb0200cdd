"""Chat templates that write the time: it stands still for a request, and the cache says so."""

from __future__ import annotations

import copy
import logging
import time
from datetime import datetime
from typing import Any

import pytest

from rag_windows import PassageCache, WindowedLM, integration
from tests.rag_windows import small

PASSAGES = ["The lake is deep and cold.", "The tower is old."]
SYSTEM = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How deep?"}]
CONTINUED = [*SYSTEM, {"role": "assistant", "content": "It is"}]
TAIL = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}<|assistant|>"

FINE = {
    "microseconds": "{{ strftime_now('%H:%M:%S.%f') }}",
    "a joined format": "{% set f = '%' ~ 'f' %}{{ strftime_now('%Y-' ~ f) }}",
    "in a macro": "{% macro now() %}{{ strftime_now('%f') }}{% endmacro %}{{ now() }}",
    "asked for first": "{% if strftime_now is defined %}{{ strftime_now('%f%%') }}{% endif %}",
    "twice": "{{ strftime_now('%f') }} and {{ strftime_now('%S.%f') }}",
}


def wrapped(clock: str, *, cache: bool = False, **options: Any) -> WindowedLM:
    stored = PassageCache(memory="64MiB") if cache else None
    return small.templated(clock + TAIL, cache=stored, method="pcw", **options)


@pytest.mark.parametrize("clock", FINE.values(), ids=FINE)
def test_any_clock_is_one_time_for_a_request(clock: str) -> None:
    lm = wrapped(clock)
    for query in ("How deep?", SYSTEM, CONTINUED):
        assert lm.generate(query, PASSAGES, max_new_tokens=1).token_ids
        assert lm.generate(query, max_new_tokens=1).token_ids


@pytest.mark.parametrize("before", ["", "  \n ", "{# said #} "])
@pytest.mark.parametrize("form", ["%A, %B %-d; 100%%d", "%c and %x"])
def test_the_text_is_that_of_transformers(form: str, before: str) -> None:
    clock = f"{before}<{{{{ strftime_now('{form}') }}}}>"
    lm = wrapped(clock)
    while True:
        now = datetime.now().replace(microsecond=0)
        ids = lm.engine.text.prompt.around("Why?", windows=False)[1]
        plain = lm.tokenizer.apply_chat_template(
            [{"role": "user", "content": "Why?"}], tokenize=False, add_generation_prompt=True
        )
        if datetime.now().replace(microsecond=0) == now:
            break
    assert lm.tokenizer.decode(ids) == plain
    assert now.strftime(form) in plain


def test_tools_are_understood_under_a_clock() -> None:
    template = (
        "{{ strftime_now('%f') }}{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}{% for c in m.tool_calls %}"
        "<call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</call>"
        "{% endfor %}{% else %}{{ m.content }}{% endif %}</s>{% endfor %}<assistant>"
    )
    tokenizer = copy.deepcopy(small.tokenizer())
    tokenizer.chat_template = template
    for _ in range(5):
        assert integration.ToolFormat.of(tokenizer, {}).begin == "<call>"


@pytest.mark.parametrize(
    ("form", "often"),
    [("%f", "second"), ("%H:%M:%S", "second"), ("%H:%M", "minute"), ("%d %b %Y", "day")],
)
def test_the_cache_says_once_what_a_clock_costs(
    form: str, often: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="rag_windows")
    lm = wrapped(f"{{{{ strftime_now('{form}') }}}}", cache=True)
    lm.tenant("a secret").generate("Why?", PASSAGES, max_new_tokens=1)
    lm.generate("Why?", PASSAGES, max_new_tokens=1)
    assert [one.getMessage() for one in caplog.records].count(caplog.records[0].getMessage()) == 1
    assert f"changes every {often}" in caplog.text
    assert "template_kwargs" in caplog.text


@pytest.mark.parametrize(
    ("clock", "options"),
    [
        ("{{ date_string or strftime_now('%S') }}", {"template_kwargs": {"date_string": "today"}}),
        ("", {}),
        ("{# strftime_now #}{% if false %}{{ strftime_now('%f') }}{% endif %}", {}),
    ],
    ids=["fixed", "none", "never asked"],
)
def test_a_clock_that_stands_still_costs_nothing(
    clock: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="rag_windows")
    lm = wrapped(clock, cache=True, **options)
    lm.generate("Why?", PASSAGES, max_new_tokens=1)
    time.sleep(1.0)
    again = lm.generate("How?", PASSAGES, max_new_tokens=1)
    assert again.usage.cached_windows == len(PASSAGES)
    assert not caplog.records


def test_without_a_cache_a_clock_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="rag_windows")
    wrapped("{{ strftime_now('%f') }}").generate("Why?", PASSAGES, max_new_tokens=1)
    assert not caplog.records
