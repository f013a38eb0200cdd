"""`rag-windows eval suite`: what it asks, refuses, measures, keeps and reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rag_windows import METHODS as ALL
from rag_windows import Passage
from rag_windows_eval.cli.suite import duration
from rag_windows_eval.run import Condition, Search
from rag_windows_eval.task import Reference, Task, TaskExample
from tests.blackbox.conftest import Run
from tests.blackbox.test_evaluation import inscit_data, records

METHODS = ("sequential", "pcw")
QUICK = ("--methods", ",".join(METHODS), "--max-new-tokens", "2", "--top-k", "2")
Eval = Callable[..., Any]


def chatrag_rows(count: int) -> list[dict[str, Any]]:
    """Questions whose passages are one and the same list."""
    passages = [{"title": f"Pier {n}", "text": f"Ferry {n} leaves at {n}."} for n in range(3)]
    return [
        {
            "messages": [{"role": "user", "content": f"When leaves ferry {n}?"}],
            "answers": [f"At {n}."],
            "ctxs": passages,
        }
        for n in range(count)
    ]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """INSCIT's file, and two sets of ChatRAG-Bench in a folder as the Hub has it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dev.json").write_text(json.dumps(inscit_data()), encoding="utf-8")
    for name in ("quac/test.json", "coqa/dev.json"):
        path = tmp_path / "bench" / "data" / name
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(chatrag_rows(7)), encoding="utf-8")
    return tmp_path


@pytest.fixture
def suite(run: Run, files: Path, small_folder: Path) -> Eval:
    """The command with a small model and these files."""

    def start(sets: str, *more: str | Path) -> Any:
        data = ("--inscit", "dev.json", "--chatrag", "bench", "--sets", sets)
        return run("eval", "suite", "--model", small_folder, *QUICK, *data, *more)

    return start


@pytest.mark.slow
def test_a_suite_is_one_report_of_runs_that_stand_for_themselves(
    suite: Eval, run: Run, files: Path
) -> None:
    sets = ("inscit", "chatrag/quac", "chatrag/coqa")
    done = suite(",".join(sets), "--limit", "6", "--out", "out", "--json")
    assert done.exit_code == 0, done.stderr
    told, out = json.loads(done.stdout), files / "out"
    assert list(told["sets"]) == list(sets)
    assert "answers to questions of 3 sets are left: about" in done.stderr
    assert told["measured"] == 3 + 5 + 5
    assert told["answers_s"] > 0
    assert told["estimate_s"] > 0
    kept = {name: records(out / name.replace("/", "-")) for name in sets}
    assert {name: len(own) for name, own in kept.items()} == {
        name: len(METHODS) * (3 if name == "inscit" else 6) for name in sets
    }
    for name, summary in told["sets"].items():
        assert summary == json.loads(
            json.dumps(
                {
                    **json.loads(Path(summary["files"]["scores"]).read_text()),
                    **{"files": summary["files"]},
                }
            )
        ), name
        timed = [one for one in kept[name] if one["warm_s"] is not None]
        assert {one["timed"] for one in summary["arms"]} == {len(timed) / len(METHODS)}
        for one in timed:
            assert one["windows_reused"] == 0, "cold"
        for arm in summary["arms"]:
            own = sorted(one["ttft_s"] for one in timed if one["arm"] == arm["name"])
            assert own[0] <= arm["cold_s"] <= own[-1]
    (mean,) = told["means"]
    assert (mean["kind"], mean["runs"], mean["metric"]) == ("chatrag", 2, "f1")
    for place, arm in enumerate(mean["arms"]):
        own = [
            told["sets"][name]["arms"][place]["results"][0]["estimate"]["value"]
            for name in ("chatrag/quac", "chatrag/coqa")
        ]
        assert arm["estimate"]["value"] == pytest.approx(sum(own) / 2)
    page = (out / "report.html").read_text(encoding="utf-8")
    text = (out / "report.md").read_text(encoding="utf-8").replace("\\", "")
    for words in (
        *("All runs: quality of answers", "All runs: percent of the base", "cold / warm"),
        *("inscit: response F1", "chatrag/quac: F1"),
        *("mean of 2 sets of chatrag: F1", "measured questions; its answers took"),
    ):
        assert words in page
        assert words in text
    again = run("eval", "report", "out")
    assert again.exit_code == 0, again.stderr
    assert "mean of 2 sets of chatrag: F1" in again.stdout.replace("\\", "")
    assert (out / "report.html").read_text(encoding="utf-8") == page


def test_what_is_not_there_is_named_and_nothing_begins(
    run: Run, suite: Eval, files: Path, small_folder: Path
) -> None:
    model = ("--model", small_folder, "--out", "out")
    told = run("eval", "suite", *model).stderr
    assert "The files of 13 of 13 sets are missing" in told
    assert "github.com/ellenmellon/INSCIT" in told
    assert "hf download nvidia/ChatRAG-Bench" in told
    lacking = suite("chatrag/quac,chatrag/sqa", "--out", "out")
    assert lacking.exit_code == 2
    assert "chatrag/sqa: sqa/test.json is not in bench" in lacking.stderr
    assert "Those that can be asked: --sets chatrag/quac" in lacking.stderr
    unknown = suite("chatrag/squad", "--out", "out")
    assert "There is no set 'chatrag/squad'" in unknown.stderr
    assert not (files / "out").exists()


@pytest.mark.slow
def test_a_suite_goes_on_with_the_sets_that_it_lacks(suite: Eval, files: Path) -> None:
    assert suite("chatrag/quac", "--limit", "6", "--out", "out").exit_code == 0
    before = records(files / "out" / "chatrag-quac")
    more = suite("chatrag/quac,chatrag/coqa", "--limit", "6", "--out", "out")
    assert more.exit_code == 0, more.stderr
    assert records(files / "out" / "chatrag-quac") == before
    assert len(records(files / "out" / "chatrag-coqa")) == 12
    other = suite("chatrag/coqa", "--limit", "5", "--out", "out")
    assert other.exit_code == 2
    assert "other settings" in other.stderr


class Letters:
    """Embeds a text as how often it has each letter."""

    name, dimension, asked = "letters", 26, 0

    def embed(self, texts: Sequence[str], *, query: bool, progress: Any = None) -> Any:
        import numpy as np

        self.asked += 0 if query else len(texts)
        rows = [[text.lower().count(chr(97 + n)) for n in range(26)] for text in texts]
        return np.array(rows, dtype=np.float32)


def test_an_embedder_ranks_each_questions_own_passages(tmp_path: Path) -> None:
    passages = tuple(Passage(text, id=text) for text in ("aaaa", "bbb", "ccccc", "ab"))

    def example(key: str, question: str, *own: Passage) -> TaskExample:
        asked = ({"role": "user", "content": question},)
        return TaskExample(key, asked, (Reference("a"),), key, passages=own)

    class Plain(Task):
        def scores(self, examples: Any, records: Any) -> Any:
            raise NotImplementedError

    examples = [example("1", "b", *passages), example("2", "c", *passages[1:])]
    task, letters = Plain(name="plain", examples=examples, settings={}), Letters()
    ranking = Search("dense", 2, letters).over(task, tmp_path)
    found = [[one.id for one in ranking(one)] for one in examples]
    assert found == [["bbb", "ab"], ["ccccc", "bbb"]]
    assert letters.asked == 4, "what the question before had is not embedded again"


@pytest.mark.parametrize(
    ("seconds", "words"), [(3.4, "3 seconds"), (120, "2 minutes"), (9000, "2.5 hours")]
)
def test_times_are_told_as_people_do(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_arms_of_all_methods_are_all() -> None:
    from rag_windows_eval.cli.app import SuiteOptions
    from rag_windows_eval.cli.running import compared

    found = [arm.label for arm in compared(SuiteOptions(), [None])]
    assert found[0] == "sequential"
    assert sorted(found) == sorted(ALL)
    assert all(isinstance(arm, Condition) for arm in compared(SuiteOptions(methods="pcw"), [None]))


@pytest.mark.slow
def test_files_of_questions_with_passages_are_sets(suite: Eval, files: Path) -> None:
    rows = [
        {
            "question": f"When leaves ferry {n}?",
            "answers": [f"At {n}."],
            "passages": [{"text": f"Ferry {i} leaves at {i}.", "right": i == n} for i in range(3)],
        }
        for n in range(3)
    ]
    lines = "\n".join(map(json.dumps, rows))
    (files / "ferries.jsonl").write_text(lines, encoding="utf-8")
    (files / "more").mkdir()
    (files / "more" / "ferries.jsonl").write_text(lines, encoding="utf-8")
    named = ("--passages", "ferries.jsonl")
    for sets in ("passages", "passages/ferries"):
        done = suite(sets, *named, "--out", "out", "--json")
        assert done.exit_code == 0, done.stderr
        told = json.loads(done.stdout)["sets"]
        assert list(told) == ["passages/ferries"]
        assert told["passages/ferries"]["examples"] == 3
    twice = suite("passages", *named, "--passages", "more/ferries.jsonl")
    assert "Two files of --passages have the same name" in twice.stderr
    assert "none.jsonl is not there" in suite("passages", "--passages", "none.jsonl").stderr
    assert "There is no set 'passages'" in suite("passages").stderr
