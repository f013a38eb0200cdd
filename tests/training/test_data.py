"""What the readers are trained with: the world, its sequences, their token ids."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_windows import Passage
from rag_windows.prompt.builder import Prompt
from training.curriculum import CURRICULA
from training.samples import Recipe, Sample, Turn, draw_sample
from training.tasks import TASKS, draw_case
from training.tokens import ANSWER, CONTROL, NAME, REST, Encoder, train_tokenizer, words
from training.train import Settings, Trainer
from training.world import KINDS, NOT_STATED, draw_name, is_held_out

TOKENIZER = train_tokenizer()
ENCODER = Encoder(TOKENIZER)
WIDE = Recipe(
    4,
    questions=30,
    kin=0.25,
    missing=0.1,
    unstated=0.1,
    pronouns=0.25,
    surnames=0.1,
    follow=0.25,
    system=0.5,
)


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
    """Texts and batches of all levels, as they were when the models were trained."""
    found = hashlib.sha256()
    tasks: set[str] = set()
    for number, level in enumerate(CURRICULA[name]):
        rng = np.random.default_rng([0, number])
        for _ in range(20):
            for split in ("train", "held-out"):
                sample = draw_sample(rng, level.recipe, split)
                turns = [list(dataclasses.astuple(turn)) for turn in sample.turns]
                passages = [list(passage) for passage in sample.passages]
                plain = [passages, turns, sample.system, sample.before]
                found.update(json.dumps(plain).encode())
                assert 1 <= len(sample.passages) <= 8
                tasks.update(turn.task for turn in sample.turns)
    assert found.hexdigest()[:16] == drawn
    learned = {"two-hop", "open hop", "classification"} if name == "learner" else set()
    assert tasks == {"single", "follow-up", "not stated"} | learned
    assert sum(level.share for level in CURRICULA[name]) == pytest.approx(1)
    trainer, found = Trainer(Settings(tmp_path, curriculum=name), TOKENIZER), hashlib.sha256()
    for number in range(len(CURRICULA[name])):
        for step in range(2):
            batch = trainer.draw(number, np.random.default_rng([0, step, 1]))
            for tensor in (batch.ids, batch.positions, batch.loss):
                found.update(tensor.numpy().tobytes())
    assert found.hexdigest()[:16] == encoded


def test_names_and_pairs_of_forms_are_held_out() -> None:
    rng = np.random.default_rng(0)
    for kind in KINDS:
        trained = {draw_name(rng, kind, "train") for _ in range(3000)}
        assert not trained & {draw_name(rng, kind, "held-out") for _ in range(300)}
        for relation in kind.relations.values():
            assert (len(relation.statements), len(relation.questions)) == (3, 4)
            for split in ("train", "held-out"):
                assert is_held_out(*relation.draw_pair(rng, split)) == (split == "held-out")


def test_loss_falls_on_answers_and_known_names_only() -> None:
    rng, tasks = np.random.default_rng(0), set()
    for _ in range(20):
        sample = draw_sample(rng, WIDE)
        batch = ENCODER.batch([sample], rng, 0.0)
        ids, loss = batch.ids[0], batch.loss[0]
        expected = []
        for turn in sample.turns:
            tasks.add(turn.task)
            expected += [*ENCODER.text(turn.answer), ENCODER.end]
            if turn.answer != NOT_STATED:
                assert turn.passage is not None
                assert turn.answer in sample.passages[turn.passage][1]
                assert 0 < turn.blind <= 1
        assert ids[(loss == ANSWER) | (loss == REST)].tolist() == expected
        assert int((loss == ANSWER).sum()) == len(sample.turns)
        marked = TOKENIZER.convert_ids_to_tokens(ids[loss == NAME].tolist())
        assert set(marked) <= {"Ġ" + title.split()[1] for title, _ in sample.passages if title}
        mentions = sum(text.count(title) for title, text in sample.passages if title)
        assert len(marked) == mentions + sum(turn.name is not None for turn in sample.turns)
    assert tasks == {"single", "follow-up", "not stated"}


def test_a_two_hop_answer_names_the_link_and_a_value_of_another_passage() -> None:
    rng, hops = np.random.default_rng(3), 0
    for _ in range(20):
        sample = draw_sample(rng, replace(WIDE, linked=True, hops=0.6))
        passages = dict(sample.passages)
        for turn in sample.turns:
            if turn.task == "two-hop":
                hops += 1
                assert None not in (turn.bridge, turn.name, turn.steps)
                assert str(turn.bridge) in passages[turn.name]
                assert str(turn.bridge) not in turn.question
                assert str(turn.steps).startswith(str(turn.bridge))
                assert turn.answer.removeprefix(f"{turn.steps} ") in passages[turn.bridge]
    assert hops > 50


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
    *contexts, (query, loss) = ENCODER.parts(Sample(case.passages, (turn,)))
    assert [list(built.prefix_ids)] == [contexts[0][0]]
    assert [list(w.ids) for w in built.windows] == [ids for ids, _ in contexts[1:]]
    assert list(built.query_ids) == query[: loss.index(ANSWER)]


def test_positions_have_gaps_between_parts_and_none_inside() -> None:
    rng = np.random.default_rng(0)
    samples = [draw_sample(rng, WIDE) for _ in range(4)]
    even, jittered = (ENCODER.batch(samples, rng, chance) for chance in (0.0, 1.0))
    for row, sample in enumerate(samples):
        start, last = 0, -1
        for ids, _ in ENCODER.parts(sample):
            places = jittered.positions[row, start : start + len(ids)].tolist()
            assert places == list(range(places[0], places[0] + len(ids)))
            assert places[0] > last
            start, last = start + len(ids), places[-1]
        assert even.positions[row, :start].tolist() == list(range(start))


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    encoding = TOKENIZER.backend_tokenizer.encode(text, add_special_tokens=False)
    if not any(token in text for token in CONTROL):
        assert TOKENIZER.decode(encoding.ids) == text


def test_every_word_is_one_token_with_and_without_a_space() -> None:
    for word in words():
        assert len(TOKENIZER.encode(word)) == len(TOKENIZER.encode(f" {word}")) == 1
    again = train_tokenizer().backend_tokenizer.to_str()
    assert again == TOKENIZER.backend_tokenizer.to_str()
