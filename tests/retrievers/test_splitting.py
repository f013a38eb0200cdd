from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rag_windows import InputError
from rag_windows_retrievers import Document, split_document, split_documents

PIECES = [*"ab.!?\n \t#。東ー\"')\r\u2028\xa0", "a b. C ", "\n\n", "# a\n\n", "x" * 50]
WORD = re.compile("東|[^\\s東]{1,40}")
TEXT = st.lists(st.sampled_from(PIECES), max_size=100).map("".join)


@given(TEXT, st.integers(1, 12))
@example("#\n\n# a\n\n", 1)
@example("a b\n\n\x0c\n\nc d\n\n\xa0\n\ne", 1)
def test_sizes_are_kept_and_no_text_is_lost_or_repeated(text: str, words: int) -> None:
    passages = split_document(Document(text, "doc"), words=words)
    assert re.sub(r"\s", "", "".join(one.text for one in passages)) == re.sub(r"\s", "", text)
    for one in passages:
        start, end = one.metadata["start"], one.metadata["end"]
        assert text[start:end] == one.text == one.text.strip() != ""
        assert len(WORD.findall(one.text)) <= words


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


ROWS = [f"| {n} | St. Orla {n} | Dr. Ada Brandt | {1000 + n} |" for n in range(60)]
RULED = ["| Nr. | Clinic | Head | Phone |", "|---:|---|---|---|"]
LOG = [
    f"2026-11-28 10:{n:02}:00 {level} Worker {n} of St. Orla. Waits for Dr. Brandt!"
    for n, level in enumerate(["INFO", "WARN", "DEBUG"] * 15)
]
TRACE = ["Traceback (most recent call last):", "  File a.py, line 3. In main", "ValueError: No. 7"]
FUNCTION = ["def run{}(a):", "    # Call Dr. Brandt. Then wait.", "", "    return a. No"]
STANDING = {
    "Markdown table": [*RULED, *ROWS],
    "table without outer bars": ["a | b", "--|--", *(one.strip("| ") for one in ROWS)],
    "table in a quote": [f"> {one}" for one in [*RULED, *ROWS]],
    "CSV": ["nr,clinic,head", *(f"{n},St. Orla {n},Dr. Ada Brandt" for n in range(60))],
    "CSV with quotes": [f'{n},"St. Orla, No. {n}",Dr. Ada Brandt' for n in range(60)],
    "two columns": [f"St. Orla {n},Dr. Ada Brandt" for n in range(60)],
    "TSV": [f"St. Orla {n}\tDr. Ada Brandt. Head" for n in range(60)],
    "psql": ["  name  | head", "--------+------", *(f" St. O{n} | Dr. Brandt" for n in range(60))],
    "log": LOG,
    "log with traces": [one for n, entry in enumerate(LOG) for one in [entry, *TRACE[: n % 4]]],
    "log in brackets": [f"[{one[11:19]}] {one[20:]}" for one in LOG],
    "levels": [one[20:] for one in LOG],
    "bullets": [f"* St. Orla {n}. Dr. Brandt leads it" for n in range(60)],
    "numbers": [f"{n + 1}. St. Orla. Dr. Brandt leads it" for n in range(60)],
    "bullets of a PDF file": [f"• St. Orla {n}. Dr. Brandt leads it" for n in range(60)],
    "settings": [f"name.{'x' * (n % 9)} = St. Orla. Dr. Brandt" for n in range(60)],
    "keys": [f"Clinic: St. Orla {n}. Dr. Brandt" for n in range(60)],
    "verses": [f"The walls of St. Orla. {'The sea and Dr. Brandt' * (n % 3)}" for n in range(60)],
    "fenced code": ["```python", *(one.format(n) for n in range(20) for one in FUNCTION), "```"],
    "indented code": ["Call:", "", *(f"    {one}" for n in range(20) for one in FUNCTION if one)],
    "prose around": [
        "The following clinics are open. They are listed by number, and the heads as of today.",
        *("", *RULED, *ROWS, "", "Dr. Brandt left. St. Orla is closed."),
    ],
}


@pytest.mark.parametrize("kind", STANDING)
@pytest.mark.parametrize("ahead", ["", "# Clinics\n\n", "About St. Orla.\n"])
def test_lines_that_stand_by_themselves_are_not_torn(kind: str, ahead: str) -> None:
    text = ahead + "\n".join(STANDING[kind])
    passages = split_document(Document(text, "doc", "Clinics"), words=40)
    assert len(passages) > 3
    for one in passages:
        start, end = one.metadata["start"], one.metadata["end"]
        assert not text[:start].rpartition("\n")[2].strip(), text[start - 30 : start + 30]
        assert not text[end:].partition("\n")[0].strip(), text[end - 30 : end + 30]
        assert one.text.endswith(text[start:end])


@pytest.mark.parametrize("kind", ["Markdown table", "table in a quote", "CSV", "psql"])
def test_the_header_of_a_table_is_in_each_of_its_passages(kind: str) -> None:
    lines = STANDING[kind]
    header = "\n".join(lines[: 1 if kind == "CSV" else 2]).strip()
    text = "\n".join([*lines, "", "That was all."])
    passages = split_document(Document(text, "doc"), words=60)
    assert len(passages) > 2
    for one in passages:
        start, end = one.metadata["start"], one.metadata["end"]
        assert one.text.startswith(header)
        assert one.text == text[start:end] or one.text == f"{header}\n{text[start:end]}"
        assert one.text.count(header) == 1
        assert len(WORD.findall(one.text)) <= 60
    covered = [(one.metadata["start"], one.metadata["end"]) for one in passages]
    assert (covered[0][0], covered[-1][1]) == (len(text) - len(text.lstrip()), len(text))
    assert all(after - end in (1, 2) for (_, end), (after, _) in pairwise(covered))


def test_a_header_leaves_its_rows_enough_and_a_row_is_rather_whole_than_headed() -> None:
    wide = "| " + " | ".join(f"column {n}" for n in range(20)) + " |\n|" + "---|" * 20
    rows = "\n".join("| " + " | ".join(f"{n}.{i}" for i in range(20)) + " |" for n in range(5))
    passages = split_document(Document(f"{wide}\n{rows}", "doc"), words=64)
    assert [one.text for one in passages[-5:]] == rows.split("\n")
    table = "\n".join([*RULED, *("| 1 | " + "word " * 20 + "| x | 1 |" for _ in range(3))])
    found = split_document(Document(table, "doc"), words=30)
    assert [one.text.count("word") for one in found][-2:] == [20, 20]
    assert not any("Nr." in one.text for one in found[-2:])


@pytest.mark.parametrize(
    "lines",
    [
        [
            "The bridge of Halden was built in 1931 by the engineer Mara Olsen, who had",
            "studied in Tirmouth. She later moved to Sulava, where she built two more",
            "bridges (both of stone). The first of them fell in 1950. The second stands",
            "to this day. A third was planned, but it was never built, since the council",
            "of Halden had no money left after the war. Many people regretted that.",
        ],
        [
            "Die Brücke von Halden wurde 1931 von der Ingenieurin Mara Olsen",
            "Gebaut. Sie hatte in Tirmouth Mathematik studiert und zog später",
            "nach Sulava. Dort baute sie noch zwei Brücken über den Fluss. Die",
            "Erste davon stürzte 1950 ein. Die zweite steht bis zum heutigen Tag.",
        ],
        [
            "- The bridge of Halden was built in 1931 by the engineer Mara Olsen, who",
            "  had studied in Tirmouth. She later moved to Sulava, where she built two",
            "  more bridges. The first of them fell in 1950. The second stands to this",
            "  day. A third was planned. It was never built.",
        ],
        [
            "城市位于河流入海口，是经济和贸易中心。桥建于一九三一年，",
            "由工程师设计。第一座桥后来倒塌了。第二座桥至今仍在使用，",
            "每天有许多人经过。人们都很喜欢它。",
        ],
    ],
)
def test_wrapped_prose_is_cut_between_sentences(lines: list[str]) -> None:
    passages = split_document(Document("\n".join(lines), "doc"), words=25)
    assert len(passages) > 1
    assert all(one.text[-1] in ".。" for one in passages)


@pytest.mark.parametrize(
    "heading", ["## What? Who?", "What? Who?\n=====", "Next\n----", "### Next\n\n#### Further"]
)
def test_a_heading_stays_with_what_follows_it(heading: str) -> None:
    text = f"One two three four.\n\n{heading}\n\nFive six seven. Eight nine ten eleven."
    passages = split_document(Document(text, "doc"), words=9)
    assert passages[0].text == "One two three four."
    assert passages[1].text.startswith(f"{heading}\n\nFive")


def test_passages_say_which_section_they_begin_in() -> None:
    words = "One two three four five six seven eight.\n\n"
    text = (
        f"# Guide\n\n{words}## Set *up*\n\n{words}### `Linux`\n\n{words}{words}"
        f"Windows\n-------\n\n{words}- # not a section\n\n{words}"
    )
    passages = split_document(Document(text, "doc", "Guide"), words=14)
    assert [one.metadata.get("section") for one in passages] == [
        *(None, "Set up", "Set up > Linux", "Set up > Linux", "Windows", "Windows")
    ]
    assert [one.place for one in passages][:3] == [None, "Set up, part 2", "Set up > Linux, part 3"]
    assert len({(one.document, one.place) for one in passages}) == len(passages)


def test_a_document_may_have_metadata_of_our_names() -> None:
    own = {"source": "radio", "start": 3.5, "end": 7.0, "section": "news", "passage_end": "x"}
    (one,) = split_document(Document("a", "doc", metadata=own))
    assert one.metadata == {**own, "passage_start": 0, "passage_passage_end": 1}


@given(st.text("ab 東-", max_size=300))
@example("word " * 3300)
@example("x" * 5000)
@example("東" * 40)
def test_a_long_title_is_cut(title: str) -> None:
    (one,) = split_document(Document("Text.", "doc", title))
    assert one.title is not None
    assert len(WORD.findall(one.title)) <= 32
    if one.title != title:
        assert one.metadata["title"] == title
        assert title.startswith(one.title.removesuffix("…"))
        assert len(WORD.findall(one.title)) == 32


def test_ids_titles_and_metadata() -> None:
    long = Document("a b c d", "x.md", "Title", named=True, metadata={"source": "x.md"})
    first, second, whole = split_documents([long, Document("a b", "k", named=True)], words=2)
    assert (first.id, second.id, whole.id) == ("x.md#1", "x.md#2", "k")
    assert first.title == second.title == "Title"
    assert second.metadata == {"source": "x.md", "start": 4, "end": 7}


def test_sizes_that_are_refused() -> None:
    with pytest.raises(InputError, match="at least 1 word, not 0"):
        split_document(Document("a", "doc"), words=0)


def test_passages_of_a_document_know_what_stands_in_front_of_them() -> None:
    passages = split_document(Document("a b c d e f", "x.md"), words=2)
    assert [(one.document, one.index) for one in passages] == [("x.md", i) for i in range(3)]
    assert [one.before for one in passages] == [(), ("a b",), ("a b", "c d")]
