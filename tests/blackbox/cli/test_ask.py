"""The commands `ask` and `chat`: answers, JSON, sources, documents, and what a terminal shows."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from pypdf import PdfWriter

from rag_windows import WindowedLM
from tests.blackbox.cli.conftest import BRIDGE, HOSTILE, QUESTION, Told, refused
from tests.blackbox.conftest import Run

SHAPE = [
    *("answer", "passages", "supported", "statements", "usage", "timings", "method", "model"),
    *("fallback", "system", "notes"),
]


def test_json_has_exactly_this_shape(ask: Told, model: str) -> None:
    answer = ask("--max-new-tokens", "5")
    note = "The answer was cut at 5 new tokens; --max-new-tokens raises this limit."
    assert answer.pop("stderr") == f"Note: {note}\n"
    assert answer["notes"] == [note]
    assert list(answer) == SHAPE
    assert (answer["method"], answer["model"], answer["fallback"]) == ("ape", model, None)
    assert {key: type(value) for key, value in answer["usage"].items()} == {
        "prompt_tokens": int,
        "cached_tokens": int,
        "completion_tokens": int,
    }
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["timings"].keys() == {"encode_s", "ttft_s", "total_s"}
    assert 0 < answer["timings"]["encode_s"] < answer["timings"]["ttft_s"]
    assert answer["timings"]["ttft_s"] <= answer["timings"]["total_s"]
    first, second = answer["passages"]
    shape = {"id", "title", "text", "score", "mass", "drop", "supports"}
    assert first.keys() == second.keys() == shape
    assert answer["supported"] is first["drop"] is first["supports"] is None
    assert [first["id"], second["id"]] == ["docs/bridge.md#1", "lamps"]
    assert (first["title"], first["text"]) == ("The Halden Bridge", BRIDGE.splitlines()[2])
    assert second["text"] == HOSTILE
    assert first["score"] > second["score"] > 0
    assert 0 < first["mass"] + second["mass"] < 1


def test_passages_are_left_out(ask: Told, run: Run, docs: Path, model: str) -> None:
    answer = ask("--citations", "removal", "--max-new-tokens", "5")
    assert all(isinstance(one["drop"], float) for one in answer["passages"])
    assert {one["supports"] for one in answer["passages"]} <= {"yes", "no", "unsure"}
    assert isinstance(answer["supported"], bool)
    told = "No passage supports the answer"
    assert any(told in note for note in answer["notes"]) == (not answer["supported"])
    for said in answer["statements"]:
        assert said["text"] == answer["answer"][said["start"] : said["end"]]
    shown = run(
        *("ask", QUESTION, "--docs", "docs", "--model", model, "--max-new-tokens", "5"),
        *("--citations", "removal:top=1"),
    )
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout.count(" nats") <= 1
    for wrong in ("attn", "removal:top=0", "removal:4", ""):
        line = refused(run, "ask", QUESTION, "--docs", "docs", "--citations", wrong)
        assert "must be attention, removal, or such as removal:top=4" in line


def test_the_streamed_answer_its_sources_and_figures_are_shown(
    run: Run, ask: Told, model: str
) -> None:
    answer = ask("--max-new-tokens", "60")
    shown = run("ask", QUESTION, "--docs", "docs", "--model", model, "--max-new-tokens", "60")
    assert (shown.exit_code, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    unseen = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
    printable = unseen.sub(lambda found: f"\\x{ord(found[0]):02x}", answer["answer"])
    assert len(answer["answer"]) > 20
    assert shown.stdout.startswith(f"{printable}\n\n")
    for number, passage in enumerate(answer["passages"], start=1):
        (line,) = (one for one in lines if passage["id"] in one)
        assert line.startswith(f"{number} ")
        assert line.rstrip().endswith(f"{passage['mass']:.1%}")
    assert "first token after" in shown.stdout
    assert "cut at 60 new tokens; --max-new-tokens raises this limit" in shown.stdout


def test_hostile_text_is_shown_spelled_out(
    run: Run, docs: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    shown = run("ask", "lamps", "--docs", "docs", "--model", model, "--max-new-tokens", "1")
    row = next(line for line in shown.stdout.splitlines() if "lamps" in line)
    assert "[red]Lamps\\x07: Lamps of [bold red]Halden[/] \\x1b[31mred" in row
    assert not set("\x1b\x07\u202e") & set(shown.stdout + shown.stderr)
    told = run("ask", "lamps", "--docs", "docs", "--model", model, "--json")
    assert told.stdout.isascii()


@pytest.mark.parametrize("width", [28, 120])
def test_weights_are_whole_on_any_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = run("ask", "What does Zelwick Academy make?", "--top-k", "3", "--no-cache")
    rows = [line for line in shown.stdout.splitlines() if ".md#1" in line]
    assert len(rows) == 3
    assert all(len(row) <= width and re.search(r"\d\.\d%$", row) for row in rows), rows


def test_what_a_reader_should_know_is_told(run: Run, ask: Told, docs: Path, model: str) -> None:
    (docs / ".secret.md").write_text("x")
    for name in "abcd":
        (docs / f"{name}.png").write_text("x")
    (docs / "twice.jsonl").write_text('{"text": "Same bridge."}\n{"text": "Same bridge."}')
    why = "(.png files are not read)"
    left_out = f"docs/a.png {why}; docs/b.png {why}; docs/c.png {why}; and 1 more."
    notes = ask("--max-window-tokens", "50")["stderr"]
    assert f"Note: Left out: {left_out}" in notes
    assert "Passage 1 (docs/bridge.md#1) is longer than a window and was read in several" in notes
    same = run("ask", "same", "--docs", "docs", "--model", model, "--max-new-tokens", "2")
    # Of equal passages the retriever gives one.
    assert "docs/twice.jsonl:1#1" in same.stdout
    assert "docs/twice.jsonl:2#1" not in same.stdout
    none = run("ask", "xylophone", "--docs", "docs", "--model", model, "--json")
    assert json.loads(none.stdout)["passages"] == []
    assert "No passage shares a word with the question" in none.stderr


@pytest.mark.slow
def test_options_reach_the_engine(ask: Told, run: Run, model: str) -> None:
    base = ask()
    changes = [
        ask(*changed)["answer"]
        for changed in (
            ("--method", "sequential"),
            ("--method", "PCW"),
            ("--rag-temperature", "0.2", "--rag-scale", "0.3"),
            ("--system", "Answer in one word."),
            ("--temperature", "5", "--seed", "1"),
            ("--top-k", "1"),
        )
    ]
    assert base["answer"] not in changes
    assert ask("--temperature", "0", "--device", "cpu")["answer"] == base["answer"]
    sampled = {ask("--temperature", "5", "--seed", "1")["answer"] for _ in range(2)}
    assert sampled == {changes[4]}
    assert ask("--method", "ape:temperature=0.2,scale=0.3")["answer"] == changes[2]
    assert ask("--method", "ape:scale=1,temperature=1")["answer"] == changes[1]
    assert len(ask("--passage-words", "3")["passages"]) > 2
    assert ask("--dtype", "bfloat16")["usage"] == base["usage"]
    for tokens in ("all", "100%"):
        assert ask("--link-tokens", tokens)["answer"] == changes[0]
    assert "or 'all', not 1.0." in refused(run, "ask", "Who?", "--link-tokens", "1.0")
    assert ask("--link-tokens", "all", "--link-choose", "query")["answer"] == changes[0]
    fallen = ask("--fallback", "sequential")
    assert (fallen["answer"], fallen["fallback"]["taken"]) == (changes[0], True)
    assert fallen["fallback"]["signal"] == "few short passages"
    assert "The passages were read one after the other, because" in fallen["stderr"]


def test_the_environment_names_a_default_model(
    run: Run, docs: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("--docs", "docs", "--max-new-tokens", "2", "--json", "--device", "cpu")
    monkeypatch.setenv("RAG_WINDOWS_MODEL", model)
    assert json.loads(run("ask", QUESTION, *args).stdout)["model"] == model
    talked = run("chat", *args, stdin=f"{QUESTION}\n")
    assert json.loads(talked.stdout)["model"] == model
    named = run("ask", QUESTION, *args, "--model", "tiny-reader")
    assert json.loads(named.stdout)["model"] == "tiny-reader"


@pytest.mark.parametrize(
    "args",
    [
        ("--docs", "docs/bridge.md", "--docs", "docs/olsen.txt", QUESTION),
        ("--docs=docs/bridge.md", QUESTION, "--docs", "docs/olsen.txt"),
        ("--docs", "docs/[bo]*", "--", QUESTION),
    ],
)
def test_ways_to_name_documents(run: Run, docs: Path, model: str, args: tuple[str, ...]) -> None:
    result = run("ask", "--model", model, "--max-new-tokens", "1", "--json", *args)
    assert result.exit_code == 0, result.stderr
    assert [one["id"] for one in json.loads(result.stdout)["passages"]] == ["docs/bridge.md#1"]


def test_bad_files_are_listed_and_the_rest_is_read(
    run: Run, ask: Told, docs: Path, model: str
) -> None:
    (docs / "latin.txt").write_bytes("Das Café in Halden.".encode("latin-1"))
    (docs / "noise.txt").write_bytes(bytes(range(256)))
    (docs / "rows.jsonl").write_text('{"text": "Boats of Halden."}\n{"title": "x"}\n')
    (docs / "broken.pdf").write_bytes(b"%PDF-1.4\nnothing behind it")
    answer = ask()
    found = {one["id"] for one in answer["passages"]}
    assert found == {"docs/bridge.md#1", "lamps", "docs/rows.jsonl:1#1"}
    head, *listed = answer["stderr"].splitlines()[:5]
    assert head.startswith("Note: 4 files or lines ")
    for label, reason in (
        ("docs/broken.pdf", "not a PDF file"),
        ("docs/latin.txt:1", "not valid UTF-8"),
        ("docs/noise.txt", "binary"),
        ("docs/rows.jsonl:2", "not a JSON object"),
    ):
        assert any(line.startswith(f"- {label}: ") and reason in line for line in listed), listed
    stopped = run("ask", QUESTION, "--docs", "docs", "--model", model, "--strict")
    assert (stopped.exit_code, stopped.stdout) == (2, "")
    assert stopped.stderr.startswith("Error: 4 files or lines of the documents can't be read")
    assert set(stopped.stderr.splitlines()[1:]) == set(listed)


def pdf_file(text: str) -> bytes:
    """A PDF file of one page with a line of text, all of it ASCII; readers find its objects."""
    drawn = f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET"
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        "/Resources << /Font << /F1 5 0 R >> >> >>",
        f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    body = "".join(f"{number} 0 obj\n{one}\nendobj\n" for number, one in enumerate(objects, 1))
    return f"%PDF-1.4\n{body}trailer\n<< /Size 6 /Root 1 0 R >>\nstartxref\n0\n%%EOF\n".encode(
        "ascii"
    )


def test_the_text_of_a_pdf_is_read(
    run: Run, ask: Told, docs: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (docs / "tower.pdf").write_bytes(pdf_file("The tower of Halden has nine bells."))
    for named in ("docs", "docs/tower.pdf"):
        found = {one["id"]: one["text"] for one in ask("--docs", named)["passages"]}
        assert found["docs/tower.pdf#1"] == "The tower of Halden has nine bells."
    locked = PdfWriter(docs / "tower.pdf")
    locked.encrypt("a password", algorithm="RC4-128")
    locked.write(docs / "locked.pdf")
    assert "- docs/locked.pdf: it opens with a password only" in ask()["stderr"]
    monkeypatch.setitem(sys.modules, "pypdf", None)
    notes = ask()["stderr"]
    assert "- docs/tower.pdf: Reading PDF files needs pypdf" in notes
    assert 'pip install "rag-windows[pdf]"' in notes
    alone = refused(run, "ask", QUESTION, "--docs", "docs/tower.pdf", "--model", model)
    assert 'pip install "rag-windows[pdf]"' in alone


def test_a_file_is_read_once_its_package_is_installed(
    ask: Told, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (docs / "tower.pdf").write_bytes(pdf_file("The tower of Halden has nine bells."))
    os.utime(docs / "tower.pdf", ns=(0, 1))
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "pypdf", None)
        for _ in range(2):
            assert "- docs/tower.pdf: Reading PDF files needs pypdf" in ask()["stderr"]
    told = ask()
    assert "tower.pdf" not in told["stderr"]
    assert "docs/tower.pdf#1" in [one["id"] for one in told["passages"]]


def test_pages_that_were_not_read_are_reported(run: Run, ask: Told, docs: Path, model: str) -> None:
    words = pdf_file("The tower of Halden has nine bells.")
    (docs / "tower.pdf").write_bytes(words)
    drawn = PdfWriter()
    for page in (words, pdf_file("")):
        for _ in range(1 if page is words else 3):
            drawn.append(io.BytesIO(page))
    drawn.write(docs / "scan.pdf")
    note = "docs/scan.pdf: pages 2-4 of 4 without text; scanned pages need OCR first"
    for args in ((), ("--docs", "docs/scan.pdf")):
        assert f"Note: {note}.\n" in ask(*args)["stderr"]
    stopped = refused(run, "ask", QUESTION, "--docs", "docs", "--model", model, "--strict")
    assert note in stopped


def test_sources_show_their_places(
    run: Run, docs: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    drawn = PdfWriter()
    for number in (1, 2):
        drawn.append(io.BytesIO(pdf_file(f"The tower {number} of Halden has nine bells.")))
    drawn.write(docs / "tower.pdf")
    (docs / "guide.md").write_text(
        "# Guide\n\n## Towers\n\nHalden has a tower.\n\n## Walls\n\nOld ones.\n\nOf stone."
    )
    args = ("--docs", "docs", "--model", model, "--passage-words", "8", "--max-new-tokens", "2")
    shown = run("ask", "What has Halden, which tower?", *args).stdout
    assert "tower (page 1): The tower 1" in shown
    assert "tower (page 2, part 2): The tower 2" in shown
    assert "Guide (Towers): ## Towers" in shown


def test_a_title_that_fills_a_window_ends_no_question(ask: Told, docs: Path) -> None:
    (docs / "long.md").write_text(f"# {'Halden ' * 3300}\n\nThe bridge at Halden is old.")
    answer = ask("--docs", "docs", "--max-window-tokens", "40")
    told = "has a title that is too long for a window; only its beginning was read."
    assert any(note.endswith(told) for note in answer["notes"])
    assert len(answer["passages"]) > 3


@pytest.mark.slow
def test_long_work_is_told_on_standard_error(
    ask: Told, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = " ".join(f"Person {number} of Halden lives in Sulava." for number in range(600))
    (docs / "long.txt").write_text(words)
    long = ("--docs", "docs/long.txt", "--passage-words", "100000", "--max-window-tokens", "500")
    monkeypatch.setenv("RAG_WINDOWS_PROGRESS_S", "0.01")
    lines = ask(*long, "--model", "tiny-reader")["stderr"].splitlines()
    encoding = [line for line in lines if line.startswith("Encoding the passages: ")]
    assert all(line.endswith(" s so far.") for line in encoding)
    assert any(" of " in line for line in encoding), lines
    monkeypatch.setenv("RAG_WINDOWS_PROGRESS_S", "0")
    assert "so far" not in ask()["stderr"]


def test_the_sample_corpus_says_which_model_answers(run: Run) -> None:
    asked = ("ask", "What does Zelwick Academy make?", "--no-cache")
    last = run(*asked).stdout.splitlines()[-1]
    assert all(word in last for word in ("tiny-reader", "--docs", "--model"))
    assert "--model" not in run(*asked, "--model", "tiny-reader").stdout


@pytest.fixture
def queries(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the model is asked, turn by turn."""
    asked: list[Any] = []
    stream = WindowedLM.stream

    def record(self: WindowedLM, query: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(query)
        return stream(self, query, *args, **kwargs)

    monkeypatch.setattr(WindowedLM, "stream", record)
    return asked


def test_piped_questions_become_a_conversation(
    run: Run, docs: Path, model: str, queries: list[Any]
) -> None:
    result = run(
        *("chat", "--docs", "docs", "--model", model, "--max-new-tokens", "4", "--json"),
        stdin=f"{QUESTION}\n\n  \nIn which year?\n/help\n/clear\nboats\n/exit\nWho else?\n",
    )
    assert result.exit_code == 0, result.stderr
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [list(answer) for answer in answers] == [SHAPE] * 3
    first = {"role": "user", "content": QUESTION}
    told = {"role": "assistant", "content": answers[0]["answer"]}
    followed = {"role": "user", "content": "In which year?"}
    assert queries == [[first], [first, told, followed], [{"role": "user", "content": "boats"}]]
    # The follow-up names nothing itself: what was said before finds the passage.
    assert answers[1]["passages"][0]["id"] == "docs/bridge.md#1"
    assert "/exit" in result.stderr


def test_chat_shows_every_answer_with_its_sources(run: Run, docs: Path, model: str) -> None:
    args = ("chat", "--docs", "docs", "--model", model, "--max-new-tokens", "4")
    result = run(*args, stdin="bridge\nboats\n")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.count("first token after") == 2
    assert result.stdout.index("docs/bridge.md#1") < result.stdout.index("docs/more.jsonl:2#1")
    ended = run(*args, stdin="")
    assert (ended.exit_code, ended.stdout, ended.stderr) == (0, "", "")
    refused(run, *args, stdin="bridge " * 300 + "\nboats\n")


@pytest.mark.parametrize(
    ("given", "note"),
    [
        (("--max-window-tokens", "50"), "is longer than a window and was read in several"),
        (("--fallback", "sequential"), "The passages were read one after the other"),
        ((), "The answer was cut at 12 new tokens"),
    ],
)
def test_json_has_the_notes_that_a_terminal_shows(
    ask: Told, given: tuple[str, ...], note: str
) -> None:
    answer = ask(*given)
    assert any(note in one for one in answer["notes"]), answer["notes"]
    assert answer["stderr"] == "".join(f"Note: {one}\n" for one in answer["notes"])


def test_a_bar_shows_a_share_of_the_whole(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    shown = run("ask", "What does Zelwick Academy make?", "--top-k", "4").stdout
    rows = [line for line in shown.splitlines() if ".md#1" in line]
    assert len(rows) == 4
    for row in rows:
        eighths = sum("▏▎▍▌▋▊▉█".find(one) + 1 for one in row)
        share = float(row.split()[-1].removesuffix("%")) / 100
        assert abs(eighths - 16 * 8 * share) < 1, row


@pytest.mark.parametrize("width", [30, 120])
def test_long_ids_are_shown_with_both_ends(
    run: Run, docs: Path, model: str, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    name = "x" * 60
    path = Path("runbooks") / name
    path.mkdir(parents=True)
    (path / "harbour.md").write_text("The harbour of Halden.")
    options = ("--docs", "runbooks", "--model", model, "--max-new-tokens", "1", "--no-cache")
    shown = run("ask", "harbour", *options).stdout
    (line,) = (one for one in shown.splitlines() if "bour.md#1" in one)
    id_ = line.split()[1]
    start, dots, end = id_.partition("…")
    whole = f"runbooks/{name}/harbour.md#1"
    assert whole.startswith(start)
    assert whole.endswith(end)
    assert start.startswith("runb")
    assert (dots == "") == (id_ == whole)
