"""`rag-windows eval`: what a run writes, keeps, refuses and tells."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rag_windows import Generation, GenerationError, WindowedLM
from tests.blackbox.conftest import Process, Run

Eval = Callable[..., Any]
Lines = list[dict[str, Any]]

QUICK = ("--top-k", "2", "--max-new-tokens", "3")
ARMS = ("sequential@2", "auto@2", "ape@2")
TEXTS = {
    "Lighthouse:1": "The lighthouse of Orvell was built in 1811 out of grey stone.",
    "Lighthouse:2": "Its lamp burnt oil until 1902, when it was wired.",
    "Harbour:4": "The harbour freezes over in hard winters. “Ice”, they say, “keeps the boats”.",
}


def _label(response: str, kind: str, *names: str) -> dict[str, Any]:
    evidence = [
        {"passage_id": name, "passage_text": TEXTS[name], "passage_titles": [name.split(":")[0]]}
        for name in names
    ]
    return {"responseType": kind, "response": response, "evidence": evidence}


def inscit_data() -> dict[str, Any]:
    """Two conversations, three turns, three passages."""
    first = ["When was the lighthouse built?"]
    second = [*first, "In 1811.", "What did its lamp burn?"]
    oil = _label("Oil, until 1902.", "directAnswer", "Lighthouse:2")
    unsure = _label("Do you mean today?", "clarification", "Lighthouse:2", "Harbour:4")
    built = _label("In 1811.", "directAnswer", "Lighthouse:1")
    nothing = _label("I can't tell.", "noAnswerNoRelevantInfo")
    return {
        "coast_1": {
            "turns": [
                {"context": first, "labels": [built]},
                {"context": second, "labels": [oil, unsure]},
            ]
        },
        "coast/2": {"turns": [{"context": ["Who owns the ferry?"], "labels": [nothing]}]},
    }


def records(folder: Path) -> Lines:
    text = (folder / "records.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def one_line(stderr: str) -> str:
    (line,) = stderr.splitlines()
    assert line.startswith("Error: ")
    return line


def scores(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "dev.json"
    path.write_text(json.dumps(inscit_data()), encoding="utf-8")
    return path


@pytest.fixture
def inscit(run: Run, data: Path, small_folder: Path) -> Eval:
    """`rag-windows eval inscit` on that file with a small model."""

    def start(*more: str | Path) -> Any:
        return run("eval", "inscit", "--data", data, "--model", small_folder, *QUICK, *more)

    return start


def test_a_run_leaves_all_that_follows_from_its_answers(
    inscit: Eval, run: Run, data: Path, tmp_path: Path
) -> None:
    result = inscit("--out", "out")
    assert result.exit_code == 0, result.stderr
    out = tmp_path / "out"
    kept = records(out)
    assert len(kept) == 9
    assert {one["arm"] for one in kept} == set(ARMS)
    texts = {
        one["text"]: one["passage"]
        for one in map(json.loads, (out / "passages.jsonl").read_text().splitlines())
    }
    assert set(texts.values()) <= set(TEXTS.values())
    for one in kept:
        assert all(read["text"] in texts for read in one["passages"])
    for arm in ARMS:
        assert arm in result.stdout
        file = Path("out") / "predictions" / f"{arm}.json"
        scored = run("eval", "score", "inscit", "--data", data, "--predictions", file, "--json")
        figures = json.loads(scored.stdout)
        assert set(figures) == {"evidence_f1", "bleu", "response_f1", "chatrag_f1", "n"}
        (told,) = (one for one in scores(out)["arms"] if one["name"] == arm)
        for metric in told["results"]:
            assert metric["estimate"]["value"] == pytest.approx(figures[metric["metric"]])
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["keys"] == ["coast_1/1", "coast_1/2", "coast/2/1"]
    assert list(manifest["settings"]["arms"]) == list(ARMS)
    assert manifest["settings"]["model"]["name"] == "small-model0"
    assert all((out / name).stat().st_size > 1000 for name in ("report.html", "report.md"))


def test_without_the_extra_a_command_names_it_in_one_line(python: Process) -> None:
    packages = ["jinja2", "pandas", "sacrebleu", "scipy", "spacy", "tabulate"]
    done = python(
        f"import sys\nfor name in {packages}: sys.modules[name] = None\n"
        "from rag_windows.cli.commands import app as main\n"
        "for args in [['--help'], ['report', '--help'], ['report', 'runs']]:\n"
        "    sys.argv = ['rag-windows', 'eval', *args]\n"
        "    try:\n        main()\n"
        "    except SystemExit as end:\n        print('ended with', end.code)\n"
    )
    assert done.returncode == 0, done.stderr
    (told,) = done.stderr.splitlines()
    assert told.startswith("Error: ")
    assert '"rag-windows[eval]"' in told
    ends = [line for line in done.stdout.splitlines() if line.startswith("ended with")]
    assert ends == ["ended with 0", "ended with 0", "ended with 2"]


def test_the_summary_has_its_fields(inscit: Eval) -> None:
    told = json.loads(inscit("--out", "out", "--json").stdout)
    assert list(told) == [
        *("format", "version", "task", "metrics", "examples", "compared", "groups", "missing"),
        *("arms", "retrieval", "files"),
    ]
    assert told["metrics"] == ["response_f1", "bleu", "evidence_f1", "chatrag_f1"]
    assert (told["examples"], told["compared"], told["groups"]) == (3, 3, 2)
    arm = told["arms"][2]
    assert list(arm) == [
        *("name", "label", "top_k", "results", "kinds", "retrieval", "counters", "times"),
        *("cold_s", "warm_s", "timed"),
    ]
    assert list(arm["counters"]) == [
        *("windows_encoded", "windows_reused", "prompt_tokens", "cached_tokens"),
        *("completion_tokens", "left_out_passages", "left_out_questions", "errors", "unfinished"),
    ]
    result = arm["results"][0]
    assert list(result) == ["metric", "n", "estimate", "against"]
    assert list(result["estimate"]) == ["value", "low", "high"]
    assert list(result["against"]) == ["base", "difference", "retention", "p", "p_holm"]
    assert result["against"]["base"] == "sequential@2"
    assert [part["label"] for part in arm["kinds"]] == [
        *("directAnswer", "clarification", "noAnswerNoRelevantInfo"),
    ]
    assert [part["label"] for part in arm["retrieval"]] == ["found", "missed"]
    assert [one["top_k"] for one in told["retrieval"]] == [2]
    assert told["files"]["scores"] == "out/scores.json"


def test_the_same_command_asks_nothing_again(
    inscit: Eval, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = inscit("--json", "--methods", "ape")
    (folder,) = (tmp_path / "runs").iterdir()
    before = (folder / "records.jsonl").read_bytes()
    monkeypatch.setattr(WindowedLM, "generate", None)
    second = inscit("--json", "--methods", "ape")
    assert second.exit_code == 0, second.stderr
    assert (folder / "records.jsonl").read_bytes() == before
    assert json.loads(first.stdout) == json.loads(second.stdout)
    assert json.loads(first.stdout)["files"]["folder"] == f"runs/{folder.name}"


def test_other_settings_are_refused_unless_fresh(inscit: Eval, tmp_path: Path) -> None:
    assert inscit("--out", "out", "--methods", "ape").exit_code == 0
    before = (tmp_path / "out" / "records.jsonl").read_bytes()
    other = inscit("--out", "out", "--methods", "ape", "--system", "Be brief.")
    assert other.exit_code == 2
    assert "prefix is None there and 'Be brief.' now" in other.stderr.splitlines()[-1]
    assert (tmp_path / "out" / "records.jsonl").read_bytes() == before
    fresh = inscit("--out", "out", "--methods", "ape", "--system", "Be brief.", "--fresh")
    assert fresh.exit_code == 0, fresh.stderr
    assert (tmp_path / "out" / "records.jsonl").read_bytes() != before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then", "says"),
    [
        (("--top-k", "2"), ("--top-k", "1"), "it compares ape@2, and this command ape@1"),
        (("--top-k", "1,2"), ("--top-k", "1"), "it compares ape@1, ape@2, and this command ape@1"),
        ((), ("--methods", "pcw,linked"), "it compares ape@"),
        (("--methods", "all"), ("--methods", "ape"), " more, and "),
    ],
)
def test_other_conditions_are_named_briefly(
    inscit: Eval, first: tuple[str, ...], then: tuple[str, ...], says: str
) -> None:
    inscit("--out", "out", "--methods", "ape", "--limit", "1", *first)
    other = inscit("--out", "out", "--methods", "ape", "--limit", "1", *then)
    line = other.stderr.splitlines()[-1]
    assert other.exit_code == 2
    assert says in line
    assert len(line) < 420, line
    assert "arms" not in line


@pytest.mark.slow
def test_an_interruption_keeps_what_is_answered(
    inscit: Eval, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = WindowedLM.generate
    asked: list[Any] = []

    def interrupted(self: WindowedLM, *args: Any, **options: Any) -> Generation:
        if len(asked) == 4:
            raise KeyboardInterrupt
        asked.append(args)
        return generate(self, *args, **options)

    monkeypatch.setattr(WindowedLM, "generate", interrupted)
    monkeypatch.setattr("sys.argv", ["rag-windows", "eval", "inscit", "--fresh", "--out", "a b"])
    stopped = inscit("--out", "out")
    assert stopped.exit_code == 130
    (told,) = stopped.stderr.splitlines()
    assert told.endswith("Continue with: rag-windows eval inscit --out 'a b'")
    assert len(records(tmp_path / "out")) == 4
    assert inscit("--out", "out").exit_code == 130
    asked[:] = [None] * 5
    again = inscit("--out", "out")
    assert again.exit_code == 0, again.stderr
    found = [(one["key"], one["arm"]) for one in records(tmp_path / "out")]
    assert len(found) == len(set(found)) == 9


@pytest.mark.slow
def test_questions_without_an_answer_are_told_and_asked_again(
    inscit: Eval, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = WindowedLM.generate

    def failing(self: WindowedLM, query: Any, *args: Any, **options: Any) -> Generation:
        if "ferry" in str(query) and options["method"].name == "ape":
            raise GenerationError("No luck\x1b[31m.")
        return generate(self, query, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(WindowedLM, "generate", failing)
        result = inscit("--out", "out")
    assert result.exit_code == 2
    told = one_line(result.stderr)
    assert "Missing answers, which count as empty: 1," in told
    assert "'coast/2/1' with ape@2: No luck\\x1b[31m." in told
    assert "ape@2" in result.stdout
    (ape,) = (one for one in scores(tmp_path / "out")["arms"] if one["name"] == "ape@2")
    assert ape["counters"]["errors"] == 1
    again = inscit("--out", "out")
    assert again.exit_code == 0, again.stderr
    assert len(records(tmp_path / "out")) == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--methods", "ape,nope"), "Unknown method 'nope'"),
        (("--methods", "ape,,pcw"), "Unknown method ''"),
        (("--methods", "ape,ape"), "ape@2 is named twice"),
        (("--top-k", "0"), "--top-k"),
        (("--retriever", "dense"), "--embedder"),
        (("--retriever", "bm25", "--embedder", "x"), "--embedder"),
        (("--corpus", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--data", "nowhere.json"), "nowhere.json"),
        (("--data", "wrong.json"), "wrong.json, a, turns 1, labels 1, response: Field required"),
        (("--out", "dev.json"), "dev.json can't be created or locked"),
        (("--methods", "pcw:scale=0.5"), "scale"),
        (("--cache-memory", "much"), "memory='much' is not a size"),
        (("--limit", "0"), "--limit"),
        (("--profile", "nowhere.json", "--methods", "ape"), "nowhere.json"),
    ],
)
def test_arguments_are_refused_in_one_line(
    inscit: Eval, options: Sequence[str], message: str
) -> None:
    Path("wrong.json").write_text('{"a": {"turns": [{"context": ["Who?"], "labels": [{}]}]}}')
    result = inscit(*options)
    assert result.exit_code == 2
    assert message in one_line(result.stderr)


@pytest.mark.slow
def test_a_report_is_made_again_with_the_data_elsewhere(
    inscit: Eval, run: Run, data: Path, tmp_path: Path
) -> None:
    assert inscit("--out", "out", "--methods", "ape").exit_code == 0
    moved = tmp_path / "moved.json"
    shutil.move(data, moved)
    lost = run("eval", "report", "out", "--out", "again")
    assert lost.exit_code == 2
    assert "dev.json" in one_line(lost.stderr)
    found = run("eval", "report", "out", "out", "--out", "again", "--data", moved)
    assert found.exit_code == 0, found.stderr
    assert (tmp_path / "again" / "report.html").is_file()
    other = inscit_data()
    other["coast/2"]["turns"][0]["context"] = ["Who owns the harbour?"]
    moved.write_text(json.dumps(other), encoding="utf-8")
    wrong = run("eval", "report", "out", "--data", moved)
    assert wrong.exit_code == 2
    assert "used other data than" in one_line(wrong.stderr)
    for folder in ("nowhere", "."):
        assert one_line(run("eval", "report", folder).stderr)


def test_gold_reads_the_evidence_alone(inscit: Eval, tmp_path: Path) -> None:
    assert inscit("--out", "out", "--retriever", "gold", "--methods", "ape").exit_code == 0
    read = {one["key"]: [p["id"] for p in one["passages"]] for one in records(tmp_path / "out")}
    assert read == {
        "coast_1/1": ["Lighthouse:1"],
        "coast_1/2": ["Lighthouse:2", "Harbour:4"],
        "coast/2/1": [],
    }


def test_a_corpus_is_searched(inscit: Eval, tmp_path: Path) -> None:
    Path("c.tsv").write_text("id\ttext\ttitle\nO:1\tA lighthouse lamp.\tOrvell [SEP] Sea\n")
    result = inscit("--out", "out", "--corpus", "c.tsv", "--methods", "ape")
    assert result.exit_code == 0, result.stderr
    assert "3 evidence passages are not in the corpus" in result.stderr
    found = {(one["id"], one["title"]) for r in records(tmp_path / "out") for one in r["passages"]}
    assert found == {("O:1", "Orvell - Sea")}


def chatrag_row(**changes: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "When was the lighthouse wired?"}],
        "ctxs": [{"title": name, "text": text} for name, text in TEXTS.items()],
        "answers": ["In 1902.", "1902"],
        **changes,
    }


def test_chatrag_reads_the_passages_of_the_file(
    run: Run, tmp_path: Path, small_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # The second question is longer than the model's 1,024 positions.
    endless = [{"role": "user", "content": "When? " * 400}]
    rows = [chatrag_row(), chatrag_row(messages=endless), chatrag_row(answers=["x"])]
    Path("doc2dial.json").write_text(json.dumps(rows), encoding="utf-8")
    options = ("--data", "doc2dial.json", "--dataset", "doc2dial")
    asked = ("--model", small_folder, "--methods", "ape", "--top-k", "2", "--max-new-tokens", "8")
    result = run("eval", "chatrag", *options, *asked, "--out", "out")
    assert result.exit_code == 2
    assert "Missing answers, which count as empty: 1," in result.stderr
    file = tmp_path / "out" / "predictions" / "ape@2.txt"
    lines = file.read_text(encoding="utf-8").split("\n")
    assert [bool(line) for line in lines] == [True, False, True, False]
    scored = run("eval", "score", "chatrag", *options, "--predictions", file, "--json")
    assert json.loads(scored.stdout)["n"] == 3
    assert "f1" in run("eval", "score", "chatrag", *options, "--predictions", file).stdout
    wrong = run("eval", "chatrag", "--data", "doc2dial.json", "--dataset", "doc3dial")
    assert wrong.exit_code == 2
    assert "Choose one of doc2dial, quac" in one_line(wrong.stderr)


@pytest.mark.skipif(
    not {"RAG_WINDOWS_INSCIT", "RAG_WINDOWS_INSCIT_GOLDEN"} <= os.environ.keys(),
    reason="INSCIT's files are not here",
)
@pytest.mark.parametrize("name", ["first_sentence", "last_context"])
def test_official_scores_are_met(name: str, run: Run) -> None:
    golden = Path(os.environ["RAG_WINDOWS_INSCIT_GOLDEN"])
    predictions = golden / f"inscit_{name}.predictions.json"
    options = ("--data", os.environ["RAG_WINDOWS_INSCIT"], "--predictions", predictions, "--json")
    found = json.loads(run("eval", "score", "inscit", *options).stdout)
    official = json.loads((golden / f"inscit_{name}.scores.json").read_text())
    assert found == pytest.approx(official, rel=0, abs=1e-6)
    by_type = json.loads(run("eval", "score", "inscit", *options, "--by-type").stdout)
    assert sum(one["n"] for one in by_type.values()) == 502 + 77
