from __future__ import annotations

import re
from dataclasses import replace

import pytest

from rag_windows.evaluation.report.tables import terminal
from rag_windows.evaluation.report.text import escaped
from rag_windows.evaluation.summary import summarise_records
from tests.rag_windows.evaluation.summaries import ARMS, HarbourTask, records_of, speeds_of

TASK = HarbourTask()


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_the_arms() -> None:
    text = terminal(summarise_records(TASK, ARMS, records_of(TASK), speeds_of()))
    quality, cost, retrieval = (block.splitlines() for block in text.split("\n\n")[:3])
    assert cells(quality[0]) == ["arm", "right (95%)", "retention (95%)", "p", "length"]
    assert len({len(line) for line in quality}) == 1
    first, ape = cells(quality[2]), cells(quality[3])
    assert first[0] == "sequential@2"
    assert first[2:4] == ["–", "–"]
    assert all(re.fullmatch(r"\d+\.\d \(\d+\.\d to \d+\.\d\)", cell) for cell in ape[1:3])
    assert re.fullmatch(r"[01]\.\d{2,3}", ape[3])
    assert cells(cost[0])[1:] == ["TTFT cold", "TTFT warm", "windows encoded", "windows reused"]
    assert cells(cost[3]) == ["ape@2", "2.56 s", "0.2 s", "108", "36"]
    assert cells(retrieval[3])[0] == "4"
    assert cells(retrieval[3])[3] == "24"
    assert "36 questions in 12 groups" in text
    assert "against sequential@2, sequential@4." in text
    for arm in ARMS:
        assert f"12 answers of {arm.name} ended at the limit of their length" in text


def test_without_timed_contexts_the_run_itself_tells() -> None:
    text = terminal(summarise_records(TASK, ARMS, records_of(TASK)))
    assert "TTFT in the run" in text
    assert "TTFT cold" not in text
    assert re.search(r"\| pcw@4 +\| +0\.25 s \|", text)


def test_troubles_are_told() -> None:
    records = records_of(TASK)
    del records["ape@4"]["0/0"]
    one = records["pcw@2"]["1/0"]
    records["pcw@2"]["1/0"] = replace(one, answer="", error="broken", left_out=2)
    text = terminal(summarise_records(TASK, ARMS, records))
    assert "Not finished: answers are missing (ape@4 1). All figures are of the 35 of 36" in text
    assert "pcw@2 has no answer to 1 question because of an error" in text
    assert "pcw@2 left out 2 passages in 1 question: they did not fit" in text


def test_nothing_to_compare() -> None:
    text = terminal(summarise_records(TASK, ARMS, {}))
    assert "no question yet that every arm was asked" in text
    assert "|" not in text


def test_hostile_names_stay_in_their_cell() -> None:
    evil = "a|b\n| <script>*x*</script> \x1b[31m[l](http://e.vil) \u202e"
    task = HarbourTask(talks=2)
    task.name = evil
    arms = (replace(ARMS[0], label=evil), ARMS[1])
    records = records_of(task, arms)
    text = terminal(summarise_records(task, arms, records))
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
        ("&lt; `c`", r"&amp;lt; \`c\`"),
        ("<b>", "&lt;b&gt;"),
        ("1.5", "1.5"),
    ],
)
def test_escaping(text: str, shown: str) -> None:
    assert escaped(text) == shown
