"""Chat templates that write the time: it is one time for a request, and the cache says so."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from typing import Any

import pytest

from rag_windows import PassageCache, PromptError, WindowedLM
from tests.rag_windows import small

PASSAGES = ["The lake is deep and cold.", "The tower is old."]
TAIL = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}<|assistant|>"
DAY = "{{ date_string or strftime_now('%d %b %Y') }}"


def wrapped(clock: str, *, cache: bool = False, **options: Any) -> WindowedLM:
    stored = PassageCache(memory="64MiB") if cache else None
    return small.templated(clock + TAIL, cache=stored, method="pcw", **options)


@pytest.mark.parametrize("changes", [0, 1, 2])
def test_a_day_that_ends_while_a_request_is_written(
    changes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = wrapped(DAY)
    asked = 0

    class Clock:
        """Each of the first times that it is asked, another day begins."""

        @staticmethod
        def now() -> datetime:
            nonlocal asked
            asked += 1
            return datetime(2026, 1, 1) + timedelta(days=min(asked, 1 + changes * 2))

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
    prompt = lm.engine.text.prompt
    if changes == 2:
        with pytest.raises(PromptError, match="can't be followed safely"):
            prompt.around("Why?", windows=False)
    else:
        text = lm.tokenizer.decode(prompt.around("Why?", windows=False)[1])
        assert text.startswith("04 Jan 2026" if changes else "02 Jan 2026")


def test_the_cache_says_once_what_a_clock_costs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="rag_windows")
    lm = wrapped(DAY, cache=True)
    lm.tenant("a secret").generate("Why?", PASSAGES, max_new_tokens=1)
    lm.generate("Why?", PASSAGES, max_new_tokens=1)
    (said,) = [one.getMessage() for one in caplog.records]
    assert "strftime_now" in said
    assert "template_kwargs" in said


@pytest.mark.parametrize(
    ("clock", "options"),
    [(DAY, {"template_kwargs": {"date_string": "today"}}), ("", {})],
    ids=["fixed", "none"],
)
def test_a_clock_that_stands_still_is_no_news(
    clock: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="rag_windows")
    wrapped(clock, cache=True, **options).generate("Why?", PASSAGES, max_new_tokens=1)
    wrapped(DAY).generate("Why?", PASSAGES, max_new_tokens=1)
    assert not caplog.records
