"""Messages and the pages about them: what a page quotes is what the source says."""

from __future__ import annotations

import re

import pytest

import rag_windows
from docs import messages
from tests.test_repository import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
TEXTS = sorted({one.text for one in messages.messages()})

NOT_PLAIN = (
    r", got |\banew\b|\bmend\b|\bperhaps\b|\bstands? twice\b|(?<!here )\b(is|are) no\b|\bdear\b"
    r"|\bcrowd\b|\bslot\b|\bstacks?\b|; (use|give|leave|check|choose|pass|make|set) "
)
"""What messages do not say: it is "must be X, not Y", and the remedy is a sentence of its own."""

NAMES = "windows |score |dtype|logits |logprobs |rag-windows "
"""Of arguments, calls and the program, with which messages begin as well."""

PARTS = ("binary, ", "its ", "not a ", "not valid ", "…; install that ")
"""Beginnings of reasons that stand behind the name of a file."""


def quoted() -> list[str]:
    """The messages in the first columns of the page's tables."""
    cells = re.findall(r"^\| (`.+?`) \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [text for cell in cells for text in re.findall(r"`(.+?)`", cell)]


@pytest.mark.parametrize("text", quoted())
def test_what_the_page_quotes_is_in_the_source(text: str) -> None:
    assert any(text in one for one in (*TEXTS, *messages.strings(), *messages.errors()))


def test_every_class_of_errors_is_on_the_page() -> None:
    classes = {name for name in rag_windows.__all__ if name.endswith("Error")}
    text = PAGE.read_text(encoding="utf-8")
    assert {name for name in classes if f"`{name}`" not in text} == set()
    assert classes <= {*messages.errors()}


def test_the_list_holds_messages_of_every_kind() -> None:
    page = messages.on_page_markdown((ROOT / "docs" / "messages.md").read_text(encoding="utf-8"))
    for line in (
        "## MissingExtraError",
        'Reading PDF files needs pypdf, which is not installed; run: pip install "rag-',
        "- Model '…' is gated: … Ask for access",
        "- The chat template refuses this conversation",
        "- Note: Passages are not cached.",
    ):
        assert line in page
    assert messages.MARK not in page
    headings = re.findall(r"^## (\w+Error)$", page, flags=re.MULTILINE)
    assert len(headings) == len(set(headings)) > 15


def test_messages_are_plain_sentences() -> None:
    whole = [one for one in messages.messages() if one.kind != messages.OPTIONS]
    texts = [one.text for one in whole if not one.text.startswith(PARTS)]
    assert [text for text in texts if re.search(NOT_PLAIN, text)] == []
    assert [text for text in texts if text[-1] not in '.…:"?'] == []
    # A message begins with a capital, or with the name of what is wrong.
    begun = [text for text in texts if not re.match(rf"[A-Z…'/]|--|[a-z]+[=(_.]|{NAMES}", text)]
    assert [text for text in begun if " must " not in text] == []
