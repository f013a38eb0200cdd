"""What the readers are trained with: the world, its sequences, their token ids."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from rag_windows import Passage
from rag_windows.prompt.builder import Prompt
from tests.training.tasks import TASKS, draw_case
from training.samples import Sample, Turn, draw_sample
from training.tokens import ANSWER, Encoder, train_tokenizer, words
from training.train import CURRICULA, Draws, Settings
from training.world import NOT_STATED

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
                sample = draw_sample(rng, level.recipe, split)
                turns = [list(dataclasses.astuple(turn)) for turn in sample.turns]
                passages = [list(passage) for passage in sample.passages]
                plain = [passages, turns, sample.system, sample.before]
                found.update(json.dumps(plain).encode())
    assert found.hexdigest()[:16] == drawn
    assert sum(level.share for level in CURRICULA[name]) == pytest.approx(1)
    steps, found = Draws(Settings(tmp_path, curriculum=name), ENCODER), hashlib.sha256()
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
    *contexts, (query, loss) = ENCODER.parts(Sample(case.passages, (turn,)))
    assert [list(built.prefix_ids)] == [contexts[0][0]]
    assert [list(w.ids) for w in built.windows] == [part.ids for part in contexts[1:]]
    assert list(built.query_ids) == query[: loss.index(ANSWER)]


def test_every_word_is_one_token_with_and_without_a_space() -> None:
    for word in words():
        assert len(TOKENIZER.encode(word)) == len(TOKENIZER.encode(f" {word}")) == 1


def test_a_question_of_two_steps_needs_two_passages() -> None:
    with pytest.raises(ValueError, match="at least 2 passages"):
        draw_case(np.random.default_rng(0), "two-hop", 1)


@pytest.mark.parametrize("passages", [16, 64])
@pytest.mark.parametrize("seed", range(8))
def test_many_alike_can_be_drawn_where_names_run_out(passages: int, seed: int) -> None:
    case = draw_case(np.random.default_rng([seed, passages]), "many alike", passages)
    names = [title for title, _ in case.passages if title is not None]
    assert len(set(names)) == passages
    words = [set(name.split()) for name in names]
    alike = [any(one & other for other in words if other is not one) for one in words]
    assert sum(alike) > 0.9 * passages
