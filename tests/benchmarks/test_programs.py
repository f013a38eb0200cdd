"""The programs outside of the package run, and their figures are what they say."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from benchmarks import (
    cache,
    document_questions,
    inscit_passages,
    look_alikes,
    recall,
    serve,
)
from rag_windows_eval.inscit import InscitTask
from rag_windows_eval.passages import PassagesTask
from rag_windows_retrievers import BM25Retriever, last_turns

WORDS = "red green blue grey black white long short old new fast slow".split()
SIZES, COSTS = cache.catalogue(1000, seed=1)
LIMIT = sum(SIZES) // 20


def test_records_look_alike_and_one_has_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "look_alikes.jsonl"
    monkeypatch.setattr("sys.argv", ["look_alikes.py", "60", "--out", str(path)])
    look_alikes.main()
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len({row["question"] for row in rows}) > 40
    for row in rows:
        titles = [one["title"] for one in row["passages"]]
        assert len(set(titles)) == len(titles) == look_alikes.RECORDS
        (right,) = (one for one in row["passages"] if one["right"])
        assert row["answers"][0] in right["text"]
        subject = right["title"].removesuffix(" office").removeprefix("Course: ")
        assert subject in row["question"]
    (task,) = [PassagesTask.read(str(path), sizes=(8,))]
    assert {len(one.passages) for one in task.examples} == {8}


def test_inscits_turns_bring_their_evidence_and_what_a_search_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def label(*names: str) -> dict[str, Any]:
        told = [
            {"passage_id": name, "passage_titles": [name], "passage_text": f"{name} is a cheese."}
            for name in names
        ]
        return {"response": f"{names}", "responseType": "directAnswer", "evidence": told}

    many = [f"Cheese {number}" for number in range(6)]
    context = ["Which cheese is Brie?", "A cheese.", "And Camembert, is it a cheese?"]
    turns = [
        {"context": context[:1], "labels": [label("Brie")]},
        {"context": context, "labels": [label("Camembert"), label("Brie")]},
        {"context": ["What are they?"], "labels": [label(*many)]},
        {"context": ["Who are you?"], "labels": [label()]},
    ]
    data, out = tmp_path / "dev.json", tmp_path / "inscit.jsonl"
    data.write_text(json.dumps({"one": {"turns": turns}}))
    monkeypatch.setattr("sys.argv", ["inscit_passages.py", str(data), "--out", str(out)])
    inscit_passages.main()
    found = {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}
    # One turn has no evidence, and one has too much.
    assert found.keys() == {"one/1", "one/2"}
    assert found["one/2"]["question"] == context
    for key, wanted in {"one/1": {"Brie"}, "one/2": {"Camembert", "Brie"}}.items():
        read = found[key]["passages"]
        assert {one["title"] for one in read if one["right"]} == wanted
        assert len({one["title"] for one in read}) == len(read) == inscit_passages.PASSAGES
    assert len(PassagesTask.read(str(out), sizes=(5,)).examples) == 2


def test_questions_over_documents_bring_the_chunks_that_a_search_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [f"The {word} ferry leaves pier {n} in {n} minutes." for n, word in enumerate(WORDS)]
    text = "\n\n".join(f"{one} {'It sails on. ' * 30}" for one in said)
    monkeypatch.setattr(document_questions, "DOCUMENTS", ("ferries", "packed"))
    (tmp_path / "ferries.md").write_text(text, encoding="utf-8")
    (tmp_path / "packed.md.gz").write_bytes(gzip.compress(text.encode()))
    rows = ["question,references,corpus_id"]
    for name in ("ferries", "packed"):
        for one, word in zip(said, WORDS, strict=True):
            start = text.index(one)
            span = {"content": one, "start_index": start, "end_index": start + len(one)}
            told = json.dumps([span]).replace('"', '""')
            rows.append(f'When leaves the {word} ferry?,"{told}",{name}')
        rows.append(f'Who sails?,"{told}",{name}')
    (tmp_path / "questions_df.csv").write_text("\n".join(rows), encoding="utf-8")
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr("sys.argv", ["", str(tmp_path), "--chunks", "3", "--out", str(out)])
    document_questions.main()
    found = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    # Of what nothing tells, three chunks are found by chance, and the right one is not among them.
    assert len({row["id"] for row in found}) == 2 * len(WORDS)
    for row in found:
        assert len(row["passages"]) == 3
        (right,) = (one for one in row["passages"] if one["right"])
        assert row["answers"][0] in right["text"]
        place = said.index(row["answers"][0])
        assert len(right["before"]) == min(place, 8)
    (task,) = [PassagesTask.read(str(out))]
    read = {len(one.before) for example in task.examples for one in example.passages}
    assert max(read) == 8


def test_the_policy_comes_close_to_perfect_frequencies_and_is_over_lru() -> None:
    trace = cache.zipf(1000, 1.0, requests=24_000, warm_up=12_000, seed=3)
    made = {
        name: cache.replay(trace, SIZES, COSTS, make(LIMIT))
        for name, make in cache.POLICIES.items()
    }
    assert made["ours"][1] > 0.95 * cache.perfect_frequencies(trace, SIZES, COSTS, LIMIT)
    assert min(made["ours"] - made["LRU"]) > 5
    alike = np.ones(1000)
    assert made["ours, hits"][0] > 0.95 * cache.perfect_frequencies(trace, SIZES, alike, LIMIT)
    assert cache.perfect_frequencies(trace, SIZES, alike, 20 * LIMIT + 20) == pytest.approx(100)
    assert cache.perfect_frequencies(trace, SIZES, alike, 0) == 0


@pytest.mark.parametrize("together", [0, 1])
def test_a_scan_costs_less_than_two_points(together: int) -> None:
    more_sizes, more_costs = cache.catalogue(1000, seed=2)
    both = SIZES + more_sizes, np.concatenate([COSTS, more_costs])
    trace = cache.zipf(1000, 1.0, requests=10_000, warm_up=0, seed=3)
    traces = cache.scanned(trace, 6000, range(1000, 2000), together)
    after, before = (cache.replay(one, *both, cache.POLICIES["ours"](LIMIT)) for one in traces)
    assert max(before - after) < 2


def test_a_hot_set_that_shifts_is_followed_as_fast_as_lru_does() -> None:
    trace = cache.shifting(1000, 1500, requests=12_000, warm_up=3000, seed=4)
    ours, lru = (
        cache.replay(trace, SIZES, COSTS, cache.POLICIES[name](4 * LIMIT))
        for name in ("ours", "LRU")
    )
    assert min(ours - lru) > -0.5


@pytest.mark.slow
def test_the_policy_s_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    cache.main(["--quick"])
    printed = capsys.readouterr().out
    for words in ("| Zipf 1.3 | 20% |", "| scan in one run | 1% |"):
        assert words in printed


def test_recall_is_what_can_be_counted_by_hand(tmp_path: Path) -> None:
    texts = {"A": "bridge bridge", "B": "bridge harbour", "C": "lakes"}

    def turn(context: list[str], *labels: str) -> dict[str, Any]:
        evidence = [
            [
                {"passage_id": name, "passage_text": texts[name], "passage_titles": ["T", name]}
                for name in label
            ]
            for label in labels
        ]
        labelled = [
            {"responseType": "directAnswer", "response": "", "evidence": one} for one in evidence
        ]
        return {"context": context, "labels": labelled}

    turns = [
        turn(["bridge"], "A"),
        turn(["bridge", "Yes.", "bridge?"], "B", "BC"),
        turn(["why"], ""),
    ]
    (tmp_path / "dev.json").write_text(json.dumps({"one": {"turns": turns}}))
    task = InscitTask.read(tmp_path / "dev.json")
    found = [one for one in task.examples if one.evidence]
    assert len(found) == 2
    # A, B is found both times: first rank 1 of 1, then rank 2 for one of two.
    found_at = recall.measure(BM25Retriever(task.pool), last_turns(0), found)
    assert found_at == [50.0, 75.0, 75.0, 50.0, 100.0, 100.0, 75.0]


async def test_the_load_test_counts_what_is_wrong_lost_and_asked_again() -> None:
    right = serve.Question("Who?", ["a"], "Nobody", [0.5])
    said: list[Any] = ["Nobody", None, "Nobody", "Somebody", "Nobody", "half", "Nobody"]
    weights = iter([0.5, 0.5, 0.5, 0.4, 0.5])

    def stream(_: httpx.Request) -> httpx.Response:
        text = said.pop(0)
        if text is None:
            raise httpx.ConnectError("nobody listens")
        delta: dict[str, Any] = {"content": text}
        if text != "half":
            delta["citations"] = [{"weight": next(weights)}]
        choice = {"delta": delta, "finish_reason": None if text == "half" else "stop"}
        event = json.dumps({"choices": [choice]})
        end = "" if text == "half" else "data: [DONE]\n\n"
        return httpx.Response(200, text=f"data: {event}\n\n{end}")

    run = serve.Run("a run", 5, 1)
    transport = httpx.MockTransport(stream)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        for _ in range(5):
            await serve.answered(client, right, run)
    # "Somebody", and a weight of 0.4; a connection that was none, and half an answer.
    assert (run.wrong, run.lost, run.again, len(run.first_s)) == (2, 0, 2, 5)
    run.seconds = 2.0
    told = serve.shown(serve.Result("", [run], 1.0, 16))
    assert "| a run | 5, 1 at a time | 0 | 0 | 2 | 0 | 2.5 |" in told
