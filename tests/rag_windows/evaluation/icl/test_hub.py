"""Named tasks from the Hub, which here is a module of our own."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rag_windows import DataError, InputError, MissingExtraError
from rag_windows.evaluation.icl import IclOptions, IclTask
from rag_windows.evaluation.icl_data import NAMED
from rag_windows.icl import Demonstration

ROWS = {
    "train": [{"sentence": f"text {i} ", "label": i % 2} for i in range(10)],
    "validation": [{"sentence": "  ", "label": 0}, {"sentence": "fine", "label": 1}],
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was asked of the Hub."""
    made: list[tuple[Any, ...]] = []

    def load_dataset(path: str, name: str | None = None, *, split: str) -> list[dict[str, Any]]:
        made.append((path, name, split))
        return ROWS[split]

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined] # a module of our own
    monkeypatch.setitem(sys.modules, "datasets", module)
    return made


def test_a_named_task_is_loaded_and_worded(asked: list[tuple[Any, ...]]) -> None:
    task = IclTask.open("sst2", options=IclOptions(demonstrations=2))
    assert asked == [("nyu-mll/glue", "sst2", "train"), ("nyu-mll/glue", "sst2", "validation")]
    (example,) = task.examples
    assert (example.question, example.references[0].text) == ("fine", "positive")
    assert example.choices == ("negative", "positive")
    (first, second) = task.shown(None, 0)
    assert {first.label, second.label} == {"negative", "positive"}
    one = Demonstration("fun", "positive")
    assert task.template.show(one) == "Review: fun\nSentiment: positive"
    assert task.template.ask("fun") == "Review: fun\nSentiment:"
    assert task.template.separator == "\n==\n"
    assert task.settings["data"]["hub"] == "nyu-mll/glue"
    other = IclTask.open("sst2", options=IclOptions(wording="structured-prompting"))
    assert other.template.show(one) == "Sentence: fun Sentiment: positive"


def test_the_wordings_of_papers() -> None:
    known = {name: NAMED[name].wordings["pcw"] for name in ("sst5", "trec", "agnews")}
    assert known["sst5"].labels == ("terrible", "bad", "okay", "good", "great")
    assert known["trec"].template.ask("Why?") == "Question: Why?\nType:"
    assert known["agnews"].template.ask("It rains.") == "input: It rains.\ntype:"
    theirs = NAMED["agnews"].wordings["structured-prompting"]
    assert theirs.labels == ("World", "Sports", "Business", "Technology")


def test_other_columns_are_told(
    asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ROWS, "train", [{"sentence": "a", "label": -1}])
    with pytest.raises(DataError, match="split train, row 1: the columns 'sentence' and 'label'"):
        IclTask.open("sst2")


def test_without_a_network_local_files_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("datasets")

    def load_dataset(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'SetFit/sst5' on the Hub\nand more")

    module.load_dataset = load_dataset  # type: ignore[attr-defined] # a module of our own
    monkeypatch.setitem(sys.modules, "datasets", module)
    with pytest.raises(DataError, match=r"Couldn't reach .* --task sst5 --demos FILE --test FILE"):
        IclTask.open("sst5")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"\.\[eval-hub\]"):
        IclTask.open("sst5")


def test_names_and_files_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'sst3' is neither a file nor one of agnews, mr, sst2"):
        IclTask.open("sst3")
    with pytest.raises(InputError, match="--test goes with a named task"):
        IclTask.open("a.jsonl", test=tmp_path / "b.jsonl")
    with pytest.raises(InputError, match="texts of mr to ask are missing"):
        IclTask.open("mr", demonstrations=tmp_path / "b.jsonl")
    with pytest.raises(InputError, match="mr has labels of its own"):
        IclTask.open("mr", options=IclOptions(labels=["a", "b"]))
    with pytest.raises(InputError, match="wording='his' is none of pcw, structured-prompting"):
        IclTask.open("mr", options=IclOptions(wording="his"))  # type: ignore[arg-type] # refused
    with pytest.raises(DataError, match=r"a.jsonl: it can.t be read"):
        IclTask.open(str(tmp_path / "a.jsonl"))
