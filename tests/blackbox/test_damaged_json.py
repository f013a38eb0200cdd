"""Profiles, records and examples that hold what JSON or a float can't: one clear error each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rag_windows import Profile, ProfileError
from tests.blackbox.conftest import Run, invoke
from tests.blackbox.test_compare import profile

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


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_profile_gives_one_clear_error(tmp_path: Path, damage: str) -> None:
    put, told = DAMAGED[damage]
    path = tmp_path / "profile.json"
    path.write_text(_put(profile().to_json(), "temperature", put), encoding="utf-8")
    with pytest.raises(ProfileError, match="can't be used") as caught:
        Profile.load(path)
    text = str(caught.value)
    assert told in text
    assert "\n" not in text
    assert len(text) < 1_500


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_line_gives_one_clear_error(tmp_path: Path, run: Run, damage: str) -> None:
    path = tmp_path / "lines.jsonl"
    put = DAMAGED[damage][0]
    path.write_text(f'{{"query": "Who?", "passages": ["A."], "answer": {put}}}\n')
    result = run("compare", "--questions", path)
    assert result.exit_code == 2
    assert "line 1" in result.stderr.lower()
    assert "Traceback" not in result.stderr


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records of a run over two conversations."""
    folder = tmp_path_factory.mktemp("evaluation")
    rows = [
        {
            "messages": [{"role": "user", "content": f"Where was {name} born?"}],
            "answers": ["Sulava"],
            "ctxs": [{"title": name, "text": f"{name} was born in Sulava."}],
        }
        for name in ("Vara Zelmont", "Valin Marby")
    ]
    data, out = folder / "data.json", folder / "out"
    data.write_text(json.dumps(rows), encoding="utf-8")
    result = invoke(
        *("eval", "chatrag", "--data", data, "--dataset", "doc2dial"),
        *("--methods", "ape", "--model", "tiny-reader", "--out", out),
    )
    assert result.exit_code == 0, result.stderr
    return out / "records.jsonl"


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_record_gives_one_clear_error(records: Path, run: Run, damage: str) -> None:
    put, told = DAMAGED[damage]
    text = records.read_text(encoding="utf-8")
    first, rest = text.split("\n", 1)
    records.write_text(f"{_put(first, 'ttft_s', put)}\n{rest}", encoding="utf-8")
    result = run("eval", "report", records.parent)
    records.write_text(text, encoding="utf-8")
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert "records.jsonl, line 1" in result.stderr.replace("\n", " ")
    assert told in result.stderr.replace("\n", " ")


def _put(text: str, field: str, value: str) -> str:
    """A JSON text with another value of the first field of this name."""
    start = text.index(f'"{field}":') + len(field) + 3
    skipped = len(text[start:]) - len(text[start:].lstrip())
    _, end = json.JSONDecoder().raw_decode(text, start + skipped)
    return f"{text[:start]} {value}{text[end:]}"
