"""Profiles, records and examples that hold what JSON or a float can't: one clear error each."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from rag_windows import APE, PCW, ProfileError, WindowedLM
from tests.blackbox.conftest import Run, invoke
from tests.rag_windows import small

DEEP = "[" * 100_000 + "]" * 100_000
DIGITS = "9" * 5_000
DAMAGED = {
    "nested 100,000 deep": (DEEP, "nested too deeply"),
    "nested 300 deep": ('{"a": ' * 300 + "1" + "}" * 300, ""),
    "5,000 digits": (DIGITS, "digits"),
    "400 digits": ("9" * 400, ""),
    "beyond floats": ("1e999", "float values"),
    "NaN": ("NaN", "not a number in JSON"),
    "infinity": ("-Infinity", "not a number in JSON"),
    "duplicate keys": ('{"b": 1, "b": 2}', "appears twice"),
}
"""What stands in the place of a number, and what the error says of it."""


@pytest.fixture(scope="session")
def profile_text(tmp_path_factory: pytest.TempPathFactory, small_lm: WindowedLM) -> str:
    """A profile as it is saved."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    examples = [
        {"query": f"Who is {i}?", "passages": [f"One {i}.", "Two."], "answer": "A"}
        for i in range(8)
    ]
    made = small_lm.compare(examples, [APE(), PCW(), APE(0.5, 0.5)], refine=False)
    made.save(path)
    return path.read_text(encoding="utf-8")


def load(path: Path) -> WindowedLM:
    """The small model with this profile, which may have been made for another one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return WindowedLM.from_pretrained(small.model(), tokenizer=small.tokenizer(), profile=path)


def one_line(error: BaseException) -> str:
    """The message of an error, which stands on one line and is not endless."""
    text = str(error)
    assert "\n" not in text
    assert len(text) < 1_500
    return text


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("field", ["temperature", "examples", "value", "verdict", "version"])
def test_a_damaged_profile_gives_one_clear_error(
    tmp_path: Path, profile_text: str, damage: str, field: str
) -> None:
    put, told = DAMAGED[damage]
    path = tmp_path / "profile.json"
    path.write_text(_put(profile_text, field, put), encoding="utf-8")
    if (damage, field) == ("400 digits", "examples"):
        load(path)  # a count may be as large as it likes
        return
    with pytest.raises(ProfileError, match="can't be used") as caught:
        load(path)
    assert told in one_line(caught.value)


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["compare", "--questions"], '{{"query": "Who?", "passages": ["A."], "answer": {}}}\n'),
        (["classify", "good", "--demos"], '{{"text": "nice", "label": {}}}\n'),
    ],
)
def test_damaged_lines_give_one_clear_error(
    tmp_path: Path, run: Run, damage: str, command: list[str], line: str
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(line.format(DAMAGED[damage][0]))
    result = run(*command, path)
    assert result.exit_code == 2
    assert "line 1" in result.stderr.lower()
    assert "Traceback" not in result.stderr


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run over four conversations; two have more tokens than the model takes."""
    folder = tmp_path_factory.mktemp("evaluation")
    rows = [
        {
            "messages": [{"role": "user", "content": f"Where was {name} born?" * repeated}],
            "answers": ["Sulava"],
            "ctxs": [{"title": name, "text": f"{name} was born in Sulava."}],
        }
        for name, repeated in (
            *(("Vara Zelmont", 1), ("Aldan Pellby", 3_000)),
            *(("Valin Marby", 1), ("Vaven Lorridge", 3_000)),
        )
    ]
    (folder / "data.json").write_text(json.dumps(rows), encoding="utf-8")
    result = invoke(*_command(folder))
    assert result.exit_code == 2
    assert "count as empty: 2" in result.stderr
    return folder


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("field", ["ttft_s", "prompt_tokens", "mass"])
def test_a_damaged_record_gives_one_clear_error(
    tmp_path: Path, run_folder: Path, run: Run, damage: str, field: str
) -> None:
    put, told = DAMAGED[damage]
    out = tmp_path / "out"
    out.mkdir()
    for file in (run_folder / "out").iterdir():
        if file.is_file():
            (out / file.name).write_bytes(file.read_bytes())
    records = out / "records.jsonl"
    first, rest = records.read_text(encoding="utf-8").split("\n", 1)
    records.write_text(f"{_put(first, field, put)}\n{rest}", encoding="utf-8")
    result = run("eval", "report", out)
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert "records.jsonl, line 1" in result.stderr.replace("\n", " ")
    assert told in result.stderr.replace("\n", " ")


def _command(folder: Path) -> list[str]:
    return [
        *("eval", "chatrag", "--data", str(folder / "data.json"), "--dataset", "doc2dial"),
        *("--methods", "ape", "--model", "tiny-reader"),
        *("--out", str(folder / "out")),
    ]


def _put(text: str, field: str, value: str) -> str:
    """A JSON text with another value of the first field of this name."""
    start = text.index(f'"{field}":') + len(field) + 3
    skipped = len(text[start:]) - len(text[start:].lstrip())
    _, end = json.JSONDecoder().raw_decode(text, start + skipped)
    return f"{text[:start]} {value}{text[end:]}"
