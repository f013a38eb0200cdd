"""What the readers are trained with: the world, its sequences, their token ids."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import lzma
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rag_windows import Passage
from rag_windows.prompt.builder import Prompt
from rag_windows.samples import samples_path
from rag_windows_eval.connected import FILE
from training.connected import Connected
from training.questions import rows
from training.samples import Sample, Turn
from training.tasks import CONNECTED, TASKS, draw, draw_case
from training.tokens import ANSWER, Encoder, train_tokenizer, words
from training.train import CURRICULA, Settings, Steps
from training.world import KINDS, NOT_STATED

TOKENIZER = train_tokenizer()
ENCODER = Encoder(TOKENIZER)


@pytest.mark.parametrize(
    ("name", "drawn", "encoded"),
    [
        ("reader", "17aae78f5aeeaaff", "c4313862257d6d99"),
        ("learner", "dacc3f69a7431ec7", "51caa81fa6c38cd2"),
    ],
)
def test_the_shipped_models_curricula_are_drawn_again(
    tmp_path: Path, name: str, drawn: str, encoded: str
) -> None:
    """Texts of all levels, and their batches: token ids, positions with gaps, marks of the loss.

    They are as they were when the models were trained, which says all of them that there is to say.
    """
    found = hashlib.sha256()
    for number, level in enumerate(CURRICULA[name]):
        rng = np.random.default_rng([0, number])
        for _ in range(20):
            for split in ("train", "held-out"):
                sample = draw(rng, level.recipe, split)
                turns = [list(dataclasses.astuple(turn)) for turn in sample.turns]
                passages = [list(passage) for passage in sample.passages]
                plain = [passages, turns, sample.system, sample.before]
                found.update(json.dumps(plain).encode())
    assert found.hexdigest()[:16] == drawn
    assert sum(level.share for level in CURRICULA[name]) == pytest.approx(1)
    steps, found = Steps(Settings(tmp_path, curriculum=name), ENCODER), hashlib.sha256()
    for number in range(len(CURRICULA[name])):
        for step in range(2):
            batch = steps.draw(number, np.random.default_rng([0, step, 1]))
            for tensor in (batch.ids, batch.positions, batch.loss):
                found.update(tensor.numpy().tobytes())
    assert found.hexdigest()[:16] == encoded


@pytest.mark.parametrize("task", TASKS)
def test_training_tokens_are_those_of_the_prompt(task: str) -> None:
    case = draw_case(np.random.default_rng(4), task, 8)
    assert case == draw_case(np.random.default_rng(4), task, 8)
    assert len(case.passages) == 8
    assert len(case.messages) == (3 if task == "follow-up" else 1)
    assert (case.answer == NOT_STATED) == (task == "not stated")
    passages = [Passage(text, title=title) for title, text in case.passages]
    built = Prompt(TOKENIZER).build(case.messages[-1]["content"], passages)
    turn = Turn(case.messages[-1]["content"], case.answer, None, "single", case.blind)
    *contexts, (query, loss, _) = ENCODER.parts(Sample(case.passages, (turn,)))
    assert [list(built.prefix_ids)] == [contexts[0][0]]
    assert [list(w.ids) for w in built.windows] == [part.ids for part in contexts[1:]]
    assert list(built.query_ids) == query[: loss.index(ANSWER)]


def test_every_word_is_one_token_with_and_without_a_space() -> None:
    for word in words():
        assert len(TOKENIZER.encode(word)) == len(TOKENIZER.encode(f" {word}")) == 1


NAMES = {f"{first} {second}" for kind in KINDS for first in kind.firsts for second in kind.seconds}


@pytest.mark.parametrize("passages", [2, 3, 8, 16])
@pytest.mark.parametrize("task", CONNECTED)
def test_no_passage_answers_a_connected_question_alone(task: str, passages: int) -> None:
    for seed in range(20):
        case = draw_case(np.random.default_rng(seed), task, passages)
        assert len(case.passages) == passages
        question = case.messages[-1]["content"]
        words = question.rstrip("?").split(" ")
        (name,) = {f"{a} {b}" for a, b in itertools.pairwise(words)} & NAMES
        named = [i for i, (_, text) in enumerate(case.passages) if name in text]
        stating = [i for i, (_, text) in enumerate(case.passages) if f" {case.answer}" in text]
        assert named
        assert stating
        if task == "corrections":  # its name is there, but with the value that held before
            assert len(named) == 2
            assert named[-1] in stating
            continue
        assert set(named).isdisjoint(stating) or len(stating) > 1
        assert min(named) < max(stating)
        if task == "split documents":
            titles = [title for title, _ in case.passages]
            starts = [case.documents.index(number) for number in case.documents]
            assert [title is not None for title in titles] == [
                start == place for place, start in enumerate(starts)
            ]


@pytest.mark.parametrize("task", CONNECTED)
def test_hints_say_whom_a_value_is_about(task: str) -> None:
    """Each begins where the entity is told or at its value, also where other words stand for it."""
    recipe = TASKS[task]
    assert isinstance(recipe, Connected)
    sample = draw(np.random.default_rng(5), replace(recipe, passages=8))
    parts = ENCODER.parts(sample)
    assert not any(any(hint) for part in (parts[0], parts[-1]) for hint in part.hints)
    for (title, text), hints, part in zip(sample.passages, sample.hints, parts[1:-1], strict=True):
        assert len(part.hints) == len(part.ids)
        told = {TOKENIZER.decode([*hint[:2]]).strip() for hint in part.hints if any(hint)}
        assert told == {hint.name for hint in hints}
        assert all(text[hint.start : hint.end].strip() for hint in hints)
        if task in ("split documents", "joined") and title is None:
            assert not any(hint.name in text for hint in hints)
        if task == "joined":
            links = {TOKENIZER.decode([*hint[2:]]).strip() for hint in part.hints if any(hint[2:])}
            assert links == {hint.link for hint in hints if hint.link is not None}
            assert bool(links) == (title is None)


def test_a_connected_task_needs_two_passages() -> None:
    for task in CONNECTED:
        with pytest.raises(ValueError, match="at least 2 passages"):
            draw_case(np.random.default_rng(0), task, 1)


def test_the_shipped_questions_are_those_that_the_generators_draw() -> None:
    """`python -m training.questions` writes them again after a change."""
    text = lzma.decompress((samples_path() / FILE).read_bytes()).decode("ascii")
    assert [json.loads(line) for line in text.splitlines()] == list(rows())


@pytest.mark.parametrize("passages", [16, 64])
@pytest.mark.parametrize("seed", range(8))
def test_many_alike_can_be_drawn_where_names_run_out(passages: int, seed: int) -> None:
    case = draw_case(np.random.default_rng([seed, passages]), "many alike", passages)
    names = [title for title, _ in case.passages if title is not None]
    assert len(set(names)) == passages
    words = [set(name.split()) for name in names]
    alike = [any(one & other for other in words if other is not one) for one in words]
    assert sum(alike) > 0.9 * passages
