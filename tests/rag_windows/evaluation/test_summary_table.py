from __future__ import annotations

import re
from dataclasses import replace

import pytest

from rag_windows.evaluation.markdown import escaped, markdown_table
from rag_windows.evaluation.summary_making import summarise_records
from rag_windows.evaluation.summary_table import summary_table
from tests.rag_windows.evaluation.summaries import ARMS, HarbourTask, records_of, speeds_of

TASK = HarbourTask()


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_the_arms() -> None:
    text = summary_table(summarise_records(TASK, ARMS, records_of(TASK), speeds_of()))
    quality, cost, retrieval = (block.splitlines() for block in text.split("\n\n")[:3])
    assert cells(quality[0]) == ["arm", "right (95%)", "retention (95%)", "p", "length", "whole"]
    assert len({len(line) for line in quality}) == 1
    first, ape = cells(quality[2]), cells(quality[3])
    assert first[0] == "sequential@2"
    assert first[2:4] == ["–", "–"]
    assert all(re.fullmatch(r"\d+\.\d \(\d+\.\d to \d+\.\d\)", cell) for cell in ape[1:3])
    assert re.fullmatch(r"[01]\.\d{3}", ape[3])
    assert cells(cost[0])[1:] == ["TTFT cold", "TTFT warm", "windows encoded", "windows reused"]
    assert cells(cost[3]) == ["ape@2", "2.56 s", "0.2 s", "108", "36"]
    assert cells(retrieval[3])[0] == "4"
    assert cells(retrieval[3])[3] == "24"
    assert "36 questions in 12 groups" in text
    assert "against sequential@2, sequential@4." in text
    wanted = ", ".join(f"{arm.name} 12" for arm in ARMS)
    assert f"\nAnswers that ended at the greatest length: {wanted}.\n" in text


def test_without_timed_contexts_the_run_itself_tells() -> None:
    text = summary_table(summarise_records(TASK, ARMS, records_of(TASK)))
    assert "TTFT in the run" in text
    assert "TTFT cold" not in text
    assert "| pcw@4        |          0.25 s |" in text


def test_troubles_are_told() -> None:
    records = records_of(TASK)
    del records["ape@4"]["0/0"]
    one = records["pcw@2"]["1/0"]
    records["pcw@2"]["1/0"] = replace(one, answer="", error="broken", left_out=2)
    text = summary_table(summarise_records(TASK, ARMS, records))
    assert "Not finished: answers are missing (ape@4 1). All figures are of the 35 of 36" in text
    assert "Questions that ended in an error, and count as wrong: pcw@2 1." in text
    assert "did not fit the model's positions: pcw@2 2 passages of 1 question." in text


def test_nothing_to_compare() -> None:
    text = summary_table(summarise_records(TASK, ARMS, {}))
    assert "no question yet that every arm was asked" in text
    assert "|" not in text


def test_hostile_names_stay_in_their_cell() -> None:
    evil = "a|b\n| <script>*x*</script> \x1b[31m[l](http://e.vil) \u202e"
    task = HarbourTask(talks=2)
    task.name = evil
    arms = (replace(ARMS[0], name=evil), ARMS[1])
    records = records_of(task, arms)
    text = summary_table(summarise_records(task, arms, records))
    head, _, first, _ = text.splitlines()[:4]
    assert len(cells(first)) == len(cells(head))
    assert "\x1b" not in text
    assert "\u202e" not in text
    for mark in ("<", "[l]", "*x", "://"):
        assert not re.search(rf"(?<!\\){re.escape(mark)}", text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("response_f1", "response_f1"),
        ("_x_ and a_b", r"\_x\_ and a_b"),
        ("- a", r"\- a"),
        ("1. a", r"1\. a"),
        ("www.e.vil", r"www\.e.vil"),
        ("ape@20", "ape@20"),
        ("a\\|b", r"a\\\|b"),
        ("&lt; `c`", r"\&lt; \`c\`"),
    ],
)
def test_escaping(text: str, shown: str) -> None:
    assert escaped(text) == shown


def test_columns_are_aligned() -> None:
    assert markdown_table(["a", "figure"], [["long name", "1"]]) == (
        "| a         | figure |\n| --------- | -----: |\n| long name |      1 |\n"
    )
