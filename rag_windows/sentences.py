"""Sentences of a text: where each begins and ends."""

from __future__ import annotations

import re
from collections.abc import Iterator

from markdown_it import MarkdownIt

_MARK = re.compile(r"\s*(?:(?:[-*+•]|#{1,6}|>|\(?\d{1,3}[.)])\s+)*")
"""What stands in front of a line's first sentence: list marks, headings, quotes."""


_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_SURROGATE = re.compile("[\ud800-\udfff]")


def sentences(text: str) -> list[tuple[int, int]]:
    """First character and end of each sentence, without the space around it.

    A line's end ends a sentence, so that entries of lists and rows of tables are sentences. A block
    of code is one. Abbreviations are those of English; other languages' marks are known.
    """
    found = []
    for start, end in _blocks(text):
        block = text[start:end]
        left = len(block) - len(block.lstrip())
        if body := block.strip():
            found.append((start + left, start + left + len(body)))
    return found


def _blocks(text: str) -> Iterator[tuple[int, int]]:
    """Sentences with the space around them; joined they are the text."""
    from sentencex import get_sentence_boundaries

    # Of one character each, as places count characters; the segmenter takes no lone surrogate.
    text = _SURROGATE.sub("\ufffd", text)
    lines = _LINE.findall(text)
    code: dict[int, int] = {}
    for token in MarkdownIt("commonmark").parse(text) if "\n" in text else ():
        if token.type in ("fence", "code_block") and token.map is not None:
            code[token.map[0]] = token.map[1]
    start = line = 0
    while line < len(lines):
        last = code.get(line, line + 1)
        block = "".join(lines[line:last])
        if line in code or block.lstrip().startswith("|"):
            yield start, start + len(block)
        else:
            mark = _MARK.match(block)
            skipped = 0 if mark is None else mark.end()
            at = start
            for one in get_sentence_boundaries("en", block[skipped:]):
                end = start + skipped + one["end_index"]
                yield at, end
                at = end
            if at < start + len(block):
                yield at, start + len(block)
        start, line = start + len(block), last
