import filecmp
import json
from pathlib import Path

from rag_windows_retrievers import load_documents
from training.corpus import draw_corpus, write_corpus
from training.corpus_answers import SAMPLES


def test_the_shipped_samples_are_what_the_command_writes(tmp_path: Path) -> None:
    write_corpus(tmp_path, 7)
    write_corpus(tmp_path, 7)
    names = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    shipped = sorted(str(p.relative_to(SAMPLES)) for p in SAMPLES.rglob("*") if p.is_file())
    assert names == shipped
    assert filecmp.cmpfiles(tmp_path, SAMPLES, names, shallow=False)[1:] == ([], [])


def test_names_are_held_out_and_answers_stand_in_their_document() -> None:
    entries, questions = draw_corpus(7)
    assert len(entries) >= 60
    texts = {entry.file: entry.text for entry in entries}
    for entry in entries:
        kind = entry.entity.kind
        first = list(kind.firsts).index(entry.entity.first)
        assert kind.is_held_out(first, list(kind.seconds).index(entry.entity.second))
    assert len(questions) == 2 * len(entries)
    for question in questions:
        assert question.title in question.question
        assert question.answer in texts[question.document]


def test_documents_are_read_with_their_titles() -> None:
    documents = load_documents([SAMPLES / "corpus"]).documents
    titles = {document.title for document in documents}
    assert len(titles) == len(documents)
    for task in json.loads((SAMPLES / "demo.json").read_text(encoding="utf-8")):
        assert any(title and title in task["question"] for title in titles)
    tops = [task["top_k"] for task in json.loads((SAMPLES / "demo.json").read_text())]
    assert len(tops) == 3
    assert max(tops) == 32
