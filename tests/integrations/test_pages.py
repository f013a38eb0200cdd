"""The tables of docs/langchain.md and docs/llama_index.md, beside what the packages have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import langchain_classic.chains
import langchain_classic.chains.combine_documents
import langchain_core.tools
import llama_index.core.tools
import pytest
from llama_index.core.response_synthesizers import ResponseMode

import langchain_rag_windows
import llama_index.llms.rag_windows
from langchain_rag_windows import ChatRagWindows, RagWindows
from langchain_rag_windows.base_model import ALIASES
from llama_index.llms.rag_windows import RagWindowsLLM
from rag_windows import InputError
from tests.test_repository import ROOT

THEIRS = {
    "langchain": (
        *(langchain_classic.chains, langchain_classic.chains.combine_documents),
        langchain_core.tools,
    ),
    "llama_index": (llama_index.core.tools,),
}
OURS = {
    "langchain": (langchain_rag_windows,),
    "llama_index": (llama_index.llms.rag_windows, llama_index.core.tools),
}


def rows(page: str, table: str) -> Iterator[tuple[str, str, str]]:
    """First, last and all cells of each row."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    found = text.partition(f"<!-- {table} -->")[2].partition(f"<!-- /{table} -->")[0]
    lines = found.strip().splitlines()[2:]
    assert len(lines) > 4, f"{page}.md has lost its table of {table}"
    for line in lines:
        cells = line.strip("|").split(" | ")
        yield cells[0], cells[-1], line


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def names(cell: str) -> set[str]:
    """What is named as an argument: `name` or `name=...`."""
    found = {re.match(r"\w+\b(?==|$)", code) for code in codes(cell)}
    return {one[0] for one in found if one and one[0] not in ("trust_remote_code", "WindowedLM")}


@pytest.mark.parametrize("page", ["langchain", "llama_index"])
def test_arguments_that_the_page_names_are_there(page: str) -> None:
    if page == "langchain":
        known = (set(ChatRagWindows.model_fields) & set(RagWindows.model_fields)) | set(ALIASES)
    else:
        known = {*RagWindowsLLM.model_fields, "model", "lm", "tokenizer"}
    for there, here, line in rows(page, "arguments"):
        named = names(here)
        if "the same" in here:
            named |= names(there)
        assert named <= known, line


def test_arguments_that_the_page_calls_refused_are() -> None:
    refused = {
        name
        for there, here, _ in rows("llama_index", "arguments")
        if here.strip().startswith("refused")
        for name in names(there)
    }
    assert len(refused) > 2
    for name in refused:
        given: dict[str, Any] = {name: str}
        with pytest.raises(InputError, match=name):
            RagWindowsLLM("tiny-reader", **given)


@pytest.mark.parametrize("page", ["langchain", "llama_index"])
def test_classes_that_the_page_names_are_there(page: str) -> None:
    modes = {mode.value for mode in ResponseMode}
    for there, here, line in rows(page, "routes"):
        for cell, modules in ((there, THEIRS[page]), (here, OURS[page])):
            for code in codes(cell):
                name = re.match(r"(?:document_prompt=)?([A-Z]\w+|create_\w+)", code)
                known = not name or any(hasattr(module, name[1]) for module in modules)
                assert known, line
                if page == "llama_index" and re.fullmatch(r"[a-z_]+", code):
                    assert code in modes or code == "context_window", line
