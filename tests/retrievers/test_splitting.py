from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rag_windows import InputError
from rag_windows_retrievers import Document, TokenBudget, split_document, split_documents

PIECES = [*"ab.!?\n \t#。東ー\"')\r\u2028\xa0", "a b. C ", "\n\n", "# a\n\n", "x" * 50]
WORD = re.compile("東|[^\\s東]{1,40}")
TEXT = st.lists(st.sampled_from(PIECES), max_size=100).map("".join)


def bytes_and_joints(text: str) -> int:
    """A count that is no sum over parts: each byte counts, and a gap costs two more."""
    return len(text.encode()) + 2 * text.count(" ")


@given(TEXT, st.integers(1, 12), st.integers(4, 40))
@example("#\n\n# a\n\n", 1, 4)
@example("a" * 100, 1, 40)
def test_sizes_are_kept_and_no_text_is_lost_or_repeated(text: str, words: int, limit: int) -> None:
    document = Document(text, "doc")
    by_words = split_document(document, words=words)
    by_tokens = split_document(document, tokens=TokenBudget(limit, bytes_and_joints))
    for passages in (by_words, by_tokens):
        assert re.sub(r"\s", "", "".join(one.text for one in passages)) == re.sub(r"\s", "", text)
        for one in passages:
            start, end = one.metadata["start"], one.metadata["end"]
            assert text[start:end] == one.text == one.text.strip() != ""
    assert all(len(WORD.findall(one.text)) <= words for one in by_words)
    assert all(bytes_and_joints(one.text) <= limit for one in by_tokens)


@pytest.mark.parametrize(
    ("text", "words", "parts"),
    [
        ("a b c\n\nd e\n\nf g h i\n \nj", 5, ["a b c\n\nd e", "f g h i\n \nj"]),
        (
            'One two three. Four "five six." Seven e.g. eight nine? Ten',
            4,
            ["One two three.", 'Four "five six."', "Seven e.g. eight nine?", "Ten"],
        ),
        ("- a b\n- c d\n- e f", 3, ["- a b", "- c d", "- e f"]),
        ("a b c d e f g", 3, ["a b c", "d e f", "g"]),
        ("東京は大きい。京都は古い。", 7, ["東京は大きい。", "京都は古い。"]),
        ("x" * 1000, 10, ["x" * 400, "x" * 400, "x" * 200]),
        ("One two three four.\n\n## Next\n\nFive.", 5, ["One two three four.", "## Next\n\nFive."]),
        ("a b c d e f g h i j k", 8, ["a b c d e f g h", "i j k"]),
    ],
)
def test_cuts_fall_where_a_reader_would_cut(text: str, words: int, parts: list[str]) -> None:
    assert [one.text for one in split_document(Document(text, "doc"), words=words)] == parts


def test_ids_titles_and_metadata() -> None:
    long = Document("a b c d", "x.md", "Title", named=True, metadata={"source": "x.md"})
    first, second, whole = split_documents([long, Document("a b", "k", named=True)], words=2)
    assert (first.id, second.id, whole.id) == ("x.md#1", "x.md#2", "k")
    assert first.title == second.title == "Title"
    assert second.metadata == {"source": "x.md", "start": 4, "end": 7}


def test_sizes_that_are_refused() -> None:
    with pytest.raises(InputError, match="at least 1 word or token, not 0"):
        split_document(Document("a", "doc"), words=0)
    with pytest.raises(InputError, match="can't hold the character '東', which has 3"):
        split_document(Document("東", "doc"), tokens=TokenBudget(2, bytes_and_joints))


def test_passages_of_a_document_know_what_stands_in_front_of_them() -> None:
    passages = split_document(Document("a b c d e f", "x.md"), words=2)
    assert [(one.document, one.index) for one in passages] == [("x.md", i) for i in range(3)]
    assert [one.before for one in passages] == [(), ("a b",), ("a b", "c d")]
