"""The command line as a newcomer types it: every test goes through commands and their output."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rag_windows import APE, DeepThinking, DocumentError, MethodError, Passage, WindowedLM
from rag_windows_retrievers import load_documents
from tests.blackbox.conftest import QUESTION, ROOT, Process, Run

SHORT = ("--max-new-tokens", "2", "--json", "--no-cache", "--device", "cpu")


def test_the_base_install_brings_the_command_line() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    base = {Requirement(line).name for line in project["dependencies"]}
    assert {"typer", "rich", "bm25s", "huggingface-hub"} <= base


def test_without_any_extra_the_command_answers(python: Process) -> None:
    extras = ["accelerate", "datasets", "langchain", "langchain_core", "llama_index", "lm_eval"]
    extras += ["matplotlib", "pypdf", "sacrebleu", "sentence_transformers", "spacy"]
    done = python(
        f"import sys\nfor name in {extras}: sys.modules[name] = None\n"
        "sys.argv = ['rag-windows', 'ask', 'What does Zelwick Academy make?', '--device', 'cpu']\n"
        "from rag_windows.cli.app import main\nmain()"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("cheese\n")


@pytest.mark.parametrize("args", [(), ("cache",), ("eval",), ("eval", "score")])
def test_a_group_of_commands_shows_its_help(run: Run, args: tuple[str, ...]) -> None:
    lone = run(*args)
    assert (lone.exit_code, lone.stderr) == (0, "")
    assert lone.stdout.strip() == run(*args, "--help").stdout.strip()
    assert "Commands" in lone.stdout


@pytest.mark.parametrize("command", ["ask", "chat", "classify", "calibrate", "bench", "cache warm"])
def test_flags_take_no_value(run: Run, command: str) -> None:
    shown = run(*command.split(), "--help").stdout
    assert "<bool>" not in shown
    assert "--verbose" in shown


def test_options_that_a_command_does_without(run: Run) -> None:
    calibrate, warm = run("calibrate", "--help").stdout, run("cache", "warm", "--help").stdout
    assert "--rag-scale" not in calibrate
    assert "--profile" not in warm
    assert "--no-cache" not in warm
    assert run("cache", "warm", "--top-k", "3").exit_code == 2


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with two documents in ./notes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAG_WINDOWS_MODEL", raising=False)
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "bridge.txt").write_text("The bridge at Halden was built in 1931 by Mara Olsen.")
    (folder / "lamps.md").write_text("# Lamps\n\nThe lamps of Halden burn oil.")
    return folder


@pytest.mark.parametrize(
    "command", [("ask", "Who built the bridge?"), ("chat",), ("cache", "warm")]
)
def test_own_documents_are_not_answered_by_the_toy_model(
    run: Run, notes: Path, command: tuple[str, ...]
) -> None:
    refused = run(*command, "--docs", "notes", stdin="Who built the bridge?\n")
    assert (refused.exit_code, refused.stdout) == (2, "")
    (line,) = refused.stderr.splitlines()
    assert line.startswith("Error: --docs needs a model")
    assert all(word in line for word in ("RAG_WINDOWS_MODEL", "Hub", "--model tiny-reader forces"))


def test_the_toy_model_can_be_forced(run: Run, notes: Path) -> None:
    forced = run(
        "ask", "Who built the bridge?", "--docs", "notes", "--model", "tiny-reader", *SHORT
    )
    assert json.loads(forced.stdout)["model"] == "tiny-reader"


def test_the_environment_names_a_default_model(
    run: Run, notes: Path, small_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAG_WINDOWS_MODEL", str(small_folder))
    asked = run("ask", "Who built the bridge?", "--docs", "notes", *SHORT)
    assert json.loads(asked.stdout)["model"] == str(small_folder)
    talked = run("chat", "--docs", "notes", *SHORT, stdin="Who built the bridge?\n")
    assert json.loads(talked.stdout)["model"] == str(small_folder)
    named = run("ask", "Bridge?", "--docs", "notes", "--model", "tiny-reader", *SHORT)
    assert json.loads(named.stdout)["model"] == "tiny-reader"


@pytest.mark.parametrize("word", ["typo.md", "notes/bridge.txt", "notes/", "manual.pdf"])
def test_a_file_is_never_the_question(run: Run, notes: Path, word: str) -> None:
    refused = run("ask", "--docs", "notes", word, "--model", "tiny-reader", *SHORT)
    assert (refused.exit_code, refused.stdout) == (2, "")
    (line,) = refused.stderr.splitlines()
    assert repr(word) in line
    assert "--docs" in line


def test_files_are_repeated_options(run: Run, notes: Path) -> None:
    both = ("--docs", "notes/bridge.txt", "--docs", "notes/lamps.md")
    asked = run("ask", *both, "Who built Halden?", "--model", "tiny-reader", *SHORT)
    found = {one["id"] for one in json.loads(asked.stdout)["passages"]}
    assert found == {"notes/bridge.txt#1", "notes/lamps.md#1"}
    listed = run(
        *("ask", "Who built Halden?", "--docs", "notes/bridge.txt", "notes/lamps.md"),
        *("--model", "tiny-reader", *SHORT),
    )
    assert (listed.exit_code, listed.stdout) == (2, "")
    assert "(notes/lamps.md); each file of --docs needs a --docs of its own" in listed.stderr


@pytest.fixture
def bad(notes: Path) -> Path:
    """Beside the good ones, three files that can't be read and one whose second line can't."""
    (notes / "latin.txt").write_bytes("Das Café in Halden.".encode("latin-1"))
    (notes / "noise.txt").write_bytes(bytes(range(1, 256)) * 4)
    (notes / "rows.jsonl").write_text('{"text": "Boats of Halden."}\n{"title": "x"}\n')
    (notes / "broken.pdf").write_bytes(b"%PDF-1.4\nnothing behind it")
    return notes


def test_bad_files_are_listed_and_the_rest_is_read(run: Run, bad: Path) -> None:
    ask = ("ask", "What of Halden?", "--docs", "notes", "--model", "tiny-reader", *SHORT)
    asked = run(*ask)
    assert asked.exit_code == 0, asked.stderr
    found = {one["id"] for one in json.loads(asked.stdout)["passages"]}
    assert found == {"notes/bridge.txt#1", "notes/lamps.md#1", "notes/rows.jsonl:1#1"}
    head, *listed = asked.stderr.splitlines()[:5]
    assert head.startswith("Not read: 4 ")
    for label, reason in (
        ("notes/broken.pdf", "not a PDF file"),
        ("notes/latin.txt:1", "not valid UTF-8"),
        ("notes/noise.txt", "binary"),
        ("notes/rows.jsonl:2", "not a JSON object"),
    ):
        assert any(line.startswith(f"- {label}: ") and reason in line for line in listed), listed
    stopped = run(*ask, "--strict")
    assert (stopped.exit_code, stopped.stdout) == (2, "")
    assert stopped.stderr.startswith("Error: 4 of the documents' files and lines can't be read")
    assert set(stopped.stderr.splitlines()[1:]) == set(listed)


def test_python_tells_what_it_left_out(bad: Path) -> None:
    loaded = load_documents([bad], strict=False)
    assert len(loaded.documents) == 3
    assert sorted(one.label.rpartition("/")[2] for one in loaded.skipped if one.problem) == [
        "broken.pdf",
        "latin.txt:1",
        "noise.txt",
        "rows.jsonl:2",
    ]
    with pytest.raises(DocumentError):
        load_documents([bad])


def pdf_file(text: str) -> bytes:
    """A whole PDF file of one page with a line of text, all of it ASCII."""
    drawn = f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET"
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        "/Resources << /Font << /F1 5 0 R >> >> >>",
        f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    body, places = "%PDF-1.4\n", []
    for number, one in enumerate(objects, start=1):
        places.append(len(body))
        body += f"{number} 0 obj\n{one}\nendobj\n"
    rows = "".join(f"{place:010} 00000 n \n" for place in places)
    table = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{rows}"
    end = f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(body)}\n%%EOF\n"
    return f"{body}{table}{end}".encode("ascii")


@pytest.mark.parametrize("docs", ["notes", "notes/tower.pdf"])
def test_the_text_of_a_pdf_is_read(run: Run, notes: Path, docs: str) -> None:
    (notes / "tower.pdf").write_bytes(pdf_file("The tower of Rovholm has nine bells."))
    ask = ("ask", "How many bells in Rovholm?", "--docs", docs, "--model", "tiny-reader", *SHORT)
    (passage,) = json.loads(run(*ask).stdout)["passages"]
    assert passage["id"] == "notes/tower.pdf#1"
    assert passage["text"] == "The tower of Rovholm has nine bells."


def test_without_pypdf_a_line_says_so(
    run: Run, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pypdf", None)
    (notes / "tower.pdf").write_bytes(pdf_file("The tower of Rovholm has nine bells."))
    reader = ("--model", "tiny-reader", *SHORT)
    folder = run("ask", "Halden?", "--docs", "notes", *reader)
    assert folder.exit_code == 0, folder.stderr
    assert "- notes/tower.pdf: Reading PDF files needs pypdf" in folder.stderr
    assert 'pip install ".[pdf]"' in folder.stderr
    alone = run("ask", "Halden?", "--docs", "notes/tower.pdf", *reader)
    assert (alone.exit_code, alone.stdout) == (2, "")
    (line,) = alone.stderr.splitlines()
    assert 'pip install ".[pdf]"' in line
    assert "iconv" not in line


def answer(run: Run, *args: str | Path) -> str:
    asked = run("ask", "Who built the bridge?", "--docs", "notes", *args, *SHORT)
    assert asked.exit_code == 0, asked.stderr
    return str(json.loads(asked.stdout)["answer"])


def test_temperature_is_that_of_sampling(run: Run, notes: Path, small_folder: Path) -> None:
    model = ("--model", small_folder, "--max-new-tokens", "12")
    greedy = answer(run, *model)
    assert answer(run, *model, "--temperature", "0") == greedy
    drawn = {answer(run, *model, "--temperature", "5", "--seed", seed) for seed in "0123"}
    assert len(drawn) > 1
    assert answer(run, *model, "--temperature", "5", "--seed", "0") in drawn


def test_a_methods_numbers_stand_behind_its_name(run: Run, notes: Path, small_folder: Path) -> None:
    model = ("--model", small_folder, "--max-new-tokens", "12")
    numbers = answer(run, *model, "--method", "ape:temperature=0.2,scale=0.3")
    assert numbers == answer(run, *model, "--rag-temperature", "0.2", "--rag-scale", "0.3")
    assert numbers != answer(run, *model)
    assert answer(run, *model, "--method", "ape:scale=1,temperature=1") == answer(
        run, *model, "--method", "pcw"
    )


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("ape:temperature=0", "above 0"),
        ("ape:heat=1", "'heat=1'"),
        ("ape:0.9", "'0.9'"),
        ("ape:", "it has temperature, scale, form"),
        ("pcw:scale=1", "it has none"),
        ("ape:scale=1,scale=2", "written once"),
        ("ape:scale=warm", "'warm'"),
        ("deep-thinking:reader=ape", "'reader=ape'"),
    ],
)
def test_wrong_numbers_of_a_method_are_one_line(
    run: Run, notes: Path, method: str, message: str
) -> None:
    refused = run("ask", "Who?", "--docs", "notes", "--model", "tiny-reader", "--method", method)
    assert (refused.exit_code, refused.stdout) == (2, "")
    (line,) = refused.stderr.splitlines()
    assert message in line


def test_python_takes_the_same_names(reader: WindowedLM, passages: list[Passage]) -> None:
    by_name = reader.generate(QUESTION, passages, method="ape:temperature=0.5,scale=0.7")
    by_object = reader.generate(QUESTION, passages, method=APE(temperature=0.5, scale=0.7))
    assert by_name.citations == by_object.citations
    composed = WindowedLM.from_pretrained(
        "tiny-reader", method="deep-thinking:steps=2,eta=1e-2+ape:form=fixed ratio"
    )
    assert composed.method == DeepThinking(reader=APE(form="fixed ratio"), steps=2, eta=0.01)
    with pytest.raises(MethodError, match="sets no parameter of ape"):
        reader.generate(QUESTION, passages, method="ape:steps=3")


def test_evaluations_name_numbers_the_same_way(run: Run, tmp_path: Path) -> None:
    ran = run(
        *("eval", "long", "--model", "tiny-reader", "--passages", "2", "--questions", "1"),
        *("--methods", "pcw,ape:temperature=0.5,scale=0.7", "--out", tmp_path / "run"),
        *("--device", "cpu", "--json"),
    )
    assert ran.exit_code == 0, ran.stderr
    assert "ape:temperature=0.5,scale=0.7" in ran.stdout
    unknown = run("eval", "long", "--temperature", "0.9")
    assert unknown.exit_code == 2
    assert "--rag-temperature" in unknown.stderr


def test_long_work_is_told_on_standard_error(
    run: Run, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAG_WINDOWS_PROGRESS_S", "0.01")
    words = " ".join(f"Person {number} of Halden lives in Sulava." for number in range(600))
    (notes / "long.txt").write_text(words)
    asked = run(
        *("ask", "Who of Halden lives in Sulava?", "--docs", "notes/long.txt", *SHORT),
        *("--model", "tiny-reader", "--passage-words", "100000", "--max-window-tokens", "500"),
    )
    assert asked.exit_code == 0, asked.stderr
    assert len(json.loads(asked.stdout)["passages"]) == 1
    lines = asked.stderr.splitlines()
    for work in ("Loading tiny-reader: ", "Encoding the passages: "):
        told = [line for line in lines if line.startswith(work)]
        assert all(line.endswith(" s so far.") for line in told)
        assert any(" of " in line for line in told), lines


def test_no_line_about_progress_if_nobody_wants_it(
    run: Run, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAG_WINDOWS_PROGRESS_S", "0")
    asked = run("ask", "Halden?", "--docs", "notes", "--model", "tiny-reader", *SHORT)
    assert "so far" not in asked.stderr


def test_loading_tells_how_far_it_is(small_folder: Path) -> None:
    told: list[tuple[int, int]] = []
    WindowedLM.from_pretrained(small_folder, on_loaded=lambda *far: told.append(far))
    whole = told[0][1]
    assert told == [(done, whole) for done in range(whole + 1)]
    assert whole > 5
    WindowedLM.from_pretrained(small_folder)
    assert len(told) == whole + 1


def test_one_long_passage_tells_how_far_it_is(small_lm: WindowedLM) -> None:
    told: list[tuple[int, int]] = []
    long = Passage(" ".join(f"Word {number}." for number in range(400)))
    small_lm.generate("Which?", [long], max_new_tokens=1, on_encoded=lambda *far: told.append(far))
    whole = told[-1][1]
    assert whole > 4
    assert told[-1] == (whole, whole)
    assert len({done for done, _ in told}) > 2


@pytest.mark.parametrize("width", [28, 40, 60, 80, 120])
def test_weights_are_whole_on_any_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = run("ask", "What does Zelwick Academy make?", "--top-k", "3", "--no-cache")
    assert shown.exit_code == 0, shown.stderr
    rows = [line for line in shown.stdout.splitlines() if ".md#1" in line]
    assert len(rows) == 3
    assert all(len(row) <= width and re.search(r"\d\.\d%$", row) for row in rows), rows


BENCH = ("--context", "64", "--window", "16", "--rounds", "1", "--new-tokens", "2")
WAYS = ("--way", "transformers", "--way", "windows, cold", "--dtype", "float32")


def test_a_model_of_ones_own_is_timed(run: Run, small_folder: Path) -> None:
    timed = run("bench", "--model", small_folder, *BENCH, *WAYS, "--no-memory")
    assert timed.exit_code == 0, timed.stderr
    assert str(small_folder) in timed.stdout
    assert "| windows, cold |" in timed.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--shape", "tiny", *BENCH), "--shape and --model exclude each other"),
        (("--context", "1024"), "1024 positions"),
    ],
)
def test_what_can_not_be_timed_is_one_line(
    run: Run, small_folder: Path, args: tuple[str, ...], message: str
) -> None:
    refused = run("bench", "--model", small_folder, *args)
    assert refused.exit_code == 2
    (line,) = refused.stderr.splitlines()
    assert message in line


def test_the_formats_in_the_readme_are_read(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("demos.jsonl", "questions.jsonl"):
        (line,) = re.findall(rf"^    (\{{.*\}}) +# {name}$", readme, flags=re.MULTILINE)
        Path(name).write_text(f"{line}\n{line.replace('animal', 'plant')}\n" * 4)
    labelled = run("classify", "gidra blog", "--demos", "demos.jsonl", "--json")
    assert labelled.exit_code == 0, labelled.stderr
    calibrated = run(
        *("calibrate", "--examples", "questions.jsonl", "--method", "mateicl"),
        *("--model", "tiny-reader", "--max-new-tokens", "2", "--json"),
    )
    assert calibrated.exit_code == 0, calibrated.stderr
