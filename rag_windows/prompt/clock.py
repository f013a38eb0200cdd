"""The clock of chat templates (``strftime_now``): it stands still while a request is written."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

CLOCK = "strftime_now"

# transformers hands a template data and no functions, so the one that asks the clock is replaced by
# a macro, which finds the time in data. The line's end belongs to the block, as blocks are trimmed.
_MACRO = (
    "{% macro strftime_now(format) %}"
    "{% set found = namespace(text=format.replace('%%', '\\x00')) %}"
    "{% for directive, value in rag_windows_clock.items() %}"
    "{% set found.text = found.text.replace(directive, value) %}"
    "{% endfor %}"
    "{{ found.text.replace('\\x00', '%') }}"
    "{% endmacro %}\n"
)
_FLAGS = ("", "-", "_", "0", "^", "#")
_DIRECTIVES = "aAbBcCdDeFgGhHIjklmMnpPrRsStTuUVwWxXyYzZf"


def with_clock(tokenizer: Any, variables: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """Arguments of ``apply_chat_template`` by which a template's clock shows one time.

    A template that never asks the clock gets what it would get without this.
    """
    template = tokenizer.get_chat_template(variables.get("chat_template"), variables.get("tools"))
    if CLOCK not in template:
        return dict(variables)
    shown: dict[str, str] = {}
    for directive in (f"%{flag}{letter}" for letter in _DIRECTIVES for flag in _FLAGS):
        # Flags are glibc's; other platforms refuse some.
        with suppress(ValueError):
            shown[directive] = now.strftime(directive)
    return {**variables, "chat_template": _MACRO + template, "rag_windows_clock": shown}
