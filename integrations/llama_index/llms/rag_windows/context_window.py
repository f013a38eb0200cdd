"""How many of LlamaIndex's tokens one prompt of a model holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from jinja2.exceptions import TemplateError
from llama_index.core.utils import get_tokenizer

SAMPLES = (
    (
        "Which invoices of Zielinski & Brandt GmbH, Wroclaw, were still open on 31 March 2019?",
        "Nos. 20418-A (EUR 13,870.55, due 2019-02-28), 20431 (EUR 902.10) and 20577-C "
        "(EUR 148,066.00, 30 days net). Contact: Dr. Agnieszka Wojciechowska, +48 71 555 01 92, "
        "a.wojciechowska@zielinski-brandt.example; reference WRO/2019/0331/7.",
        "And how much of that, in per cent, was paid by the 15th of May?",
    ),
    (
        "Why does `retry(max_attempts=5)` raise TimeoutError although the handler isn't called?",
        "Because `_deadline_ns` is computed once, in `Client.__init__()`; see "
        "https://docs.example.org/v2/retries#deadlines. Pass `deadline=None`, or subclass "
        "BackoffPolicy:\n\n    class Patient(BackoffPolicy):\n        base_delay_ms = 250\n"
        "        jitter = (0.8, 1.25)\n\nEigenvalue-like re-initialization isn't thread-safe.",
        "Is asyncio.wait_for() an alternative for the HTTP/2 multiplexer?",
    ),
)
"""Conversations (user, assistant, user) of names and figures, and of code; prose takes less."""


def fitting(
    tokenizer: Any, template_kwargs: Mapping[str, Any], positions: int, system: str | None
) -> int:
    """How many of LlamaIndex's tokens fit a model's positions behind an instruction, at least 1."""
    count = get_tokenizer()

    def tokens(texts: Sequence[str], instruction: str | None = None) -> int:
        messages = [{"role": "system", "content": instruction}] if instruction else []
        roles = ("user", "assistant", "user")
        messages += [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
        written = "\n\n".join(f"{each['role']}: {each['content']}" for each in messages)
        if getattr(tokenizer, "chat_template", None):
            with suppress(TemplateError):  # one that knows no system message, for example
                written = tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **template_kwargs
                )
        return len(tokenizer(written, add_special_tokens=False)["input_ids"])

    fixed = tokens(["."])
    ratios = [
        (tokens(texts) - fixed) / sum(len(count(text)) for text in texts) for texts in SAMPLES
    ]
    return max(1, int((positions - tokens(["."], system)) / max(1.0, *ratios)))
