import filecmp
import json
from pathlib import Path

import numpy as np

from rag_windows_retrievers import load_documents
from training.corpus import draw_conversations, draw_entries, draw_questions, write_corpus
from training.corpus_answers import SAMPLES


def test_the_shipped_samples_are_what_the_command_writes(tmp_path: Path) -> None:
    write_corpus(tmp_path, 7)
    write_corpus(tmp_path, 7)
    names = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    shipped = sorted(str(p.relative_to(SAMPLES)) for p in SAMPLES.rglob("*") if p.is_file())
    assert names == shipped
    assert filecmp.cmpfiles(tmp_path, SAMPLES, names, shallow=False)[1:] == ([], [])


def test_names_are_held_out_and_answers_stand_in_their_document() -> None:
    rng = np.random.default_rng(7)
    entries = draw_entries(rng)
    assert len(entries) == 300
    texts = {entry.file: entry.text for entry in entries}
    for entry in entries:
        kind = entry.entity.kind
        first = list(kind.firsts).index(entry.entity.first)
        assert kind.is_held_out(first, list(kind.seconds).index(entry.entity.second))
    questions = draw_questions(rng, entries)
    assert len(questions) == 100
    for question in questions:
        if question.task == "not stated":
            assert question.answer == "not stated"
            continue
        assert question.document
        assert question.title
        assert question.title in question.question
        assert question.answer in texts[question.document]
    assert sum(question.task == "single" for question in questions) == 80


def test_the_second_question_of_a_conversation_names_nothing() -> None:
    rng = np.random.default_rng(7)
    entries = draw_entries(rng)
    texts = {entry.file: entry.text for entry in entries}
    conversations = draw_conversations(rng, entries)
    assert len(conversations) == 25
    for first, second in conversations:
        assert second.document == first.document
        assert second.document
        assert second.title
        assert second.title.split()[0] not in second.question
        assert second.answer in texts[second.document]
        assert second.question != first.question


def test_documents_are_read_with_their_titles() -> None:
    documents = load_documents([SAMPLES / "corpus"]).documents
    titles = {document.title for document in documents}
    assert len(titles) == len(documents)
    for task in json.loads((SAMPLES / "demo.json").read_text(encoding="utf-8")):
        assert any(title and title in task["question"] for title in titles)
    tops = [task["top_k"] for task in json.loads((SAMPLES / "demo.json").read_text())]
    assert len(tops) == 3
    assert max(tops) == 32
