"""Texts that make a careless regular expression take minutes: every route stays quick."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatStartEvent
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate, RichPromptTemplate
from llama_index_instrumentation import get_dispatcher

from llama_index.llms.rag_windows import Parts, RagWindowsLLM
from rag_windows import LimitError, PassageCache, RagWindowsError, WindowedLM
from rag_windows_retrievers import load_documents, split_documents

SIZE = 64_000
UNITS = [" ", "\t", "\n ", "#", "_", ".' "]
TEXTS = {
    f"{unit!r} {name}": make((unit * SIZE)[:SIZE])
    for unit in UNITS
    for name, make in {
        "alone": lambda run: run,
        "in the middle": lambda run: f"x{run}\x01x",
        "heading": lambda run: f"# {run}a#\nb",
        "heading, closed": lambda run: f"# a {run}#x",
    }.items()
}


@contextmanager
def quickly(seconds: float = 10.0) -> Iterator[None]:
    """A square of 64,000 steps takes far longer, on a busy machine too."""
    begun = time.process_time()
    yield
    assert time.process_time() - begun < seconds


@pytest.mark.slow
def test_documents_are_read_and_split_in_linear_time(tmp_path: Path) -> None:
    for number, text in enumerate(TEXTS.values()):
        line = json.dumps({"text": text, "title": text, "id": text})
        (tmp_path / f"{number}.jsonl").write_text(line)
        (tmp_path / f"{number}.md").write_text(text, newline="")
        (tmp_path / f"{number}.txt").write_text(text, newline="")
    with quickly(60.0):
        assert split_documents(load_documents([tmp_path]).documents)


class Seen(BaseEventHandler):
    """Keeps what the LLM is asked."""

    asked: list[list[tuple[str, str | None]]]

    def handle(self, event: Any, **_: Any) -> None:
        if isinstance(event, LLMChatStartEvent):
            self.asked.append([(m.role.value, m.content) for m in event.messages])


def predicted(
    lm: WindowedLM, prompt: BasePromptTemplate, **values: str
) -> list[tuple[str, str | None]]:
    """The messages that a template becomes, its passages apart."""
    seen = Seen(asked=[])
    dispatcher = get_dispatcher()
    dispatcher.add_event_handler(seen)
    try:
        given = {"context_str": Parts.of(["The harbour is old."]), "query_str": "Who?"}
        RagWindowsLLM(lm=lm, max_new_tokens=1).predict(prompt, **given, **values)
    finally:
        dispatcher.event_handlers.remove(seen)
    (messages,) = seen.asked
    return messages


@pytest.mark.parametrize("unit", ["_", " ", "_ ", ":", "a:", "-", "\n", "_\n"])
def test_a_template_is_read_in_linear_time(small_lm: WindowedLM, unit: str) -> None:
    run = (unit * SIZE)[:SIZE]
    framed = PromptTemplate(f"Say.\n{run}x{{context_str}}\n{{query_str}}\n{run}x")
    with quickly(), suppress(LimitError):
        predicted(small_lm, framed)
    given = PromptTemplate("{rules}\n{context_str}\n{query_str}\nAnswer:")
    with quickly(), pytest.raises(LimitError):
        predicted(small_lm, given, rules=f"x{run}x")


TAKEN = "Be kind.\n\n\n---\nImportant note:"
ASKED = ("user", "Who?")


@pytest.mark.parametrize(
    ("prompt", "rest"),
    [
        (PromptTemplate("{rules}\n---\n{context_str}\n---\n{query_str}\nAnswer: "), TAKEN),
        (PromptTemplate("{query_str}\nObey:\n{context_str}\n{rules}\nNow:\n"), f"Obey:\n{TAKEN}"),
        (
            RichPromptTemplate("{{ rules | upper }}\n{{ context_str }}\n{{ query_str }}"),
            TAKEN.upper(),
        ),
    ],
)
def test_no_line_of_a_variable_is_dropped(
    small_lm: WindowedLM, prompt: BasePromptTemplate, rest: str
) -> None:
    assert predicted(small_lm, prompt, rules=TAKEN) == [("system", rest), ASKED]


def test_a_size_is_read_in_linear_time() -> None:
    for size in (f"1{' ' * SIZE}!", f"{' ' * SIZE}!", "9" * SIZE, "1" * SIZE + "x"):
        with quickly(), pytest.raises(RagWindowsError, match="is not a size"):
            PassageCache(memory=size)
