import dataclasses
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from rag_windows.passage import Passage
from rag_windows.prompt.builder import Prompt
from training.curriculum import CURRICULA
from training.phrasing import NOT_STATED
from training.samples import Demonstrations, Recipe, Sample, Turn, draw_sample
from training.tasks import TASKS, draw_case
from training.tokens import ANSWER, NAME, REST, Encoder
from training.train import Settings, Trainer
from training.world import Split

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
LINKED = replace(WIDE, linked=True, hops=0.6)


@pytest.mark.parametrize(
    ("name", "digest"), [("reader", "17aae78f5aeeaaff"), ("learner", "dacc3f69a7431ec7")]
)
def test_the_shipped_models_curricula_are_drawn_again(name: str, digest: str) -> None:
    """Texts of all levels, as they were when the models were trained."""
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
    assert found.hexdigest()[:16] == digest


@pytest.mark.parametrize(
    ("name", "digest"), [("reader", "c4313862257d6d99"), ("learner", "51caa81fa6c38cd2")]
)
def test_their_batches_are_the_same_token_ids(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, name: str, digest: str
) -> None:
    trainer = Trainer(Settings(tmp_path, curriculum=name), tokenizer)
    found = hashlib.sha256()
    for level in range(len(CURRICULA[name])):
        for step in range(2):
            batch = trainer.draw(level, np.random.default_rng([0, step, 1]))
            for tensor in (batch.ids, batch.positions, batch.loss):
                found.update(tensor.numpy().tobytes())
    assert found.hexdigest()[:16] == digest


def test_loss_falls_on_answers_and_known_names_only(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder, rng = Encoder(tokenizer), np.random.default_rng(0)
    for _ in range(20):
        sample = draw_sample(rng, WIDE)
        batch = encoder.batch([sample], rng, 0.0)
        ids, loss = batch.ids[0], batch.loss[0]
        expected = []
        for turn in sample.turns:
            expected += [*encoder.text(turn.answer), encoder.end]
        assert ids[(loss == ANSWER) | (loss == REST)].tolist() == expected
        assert int((loss == ANSWER).sum()) == len(sample.turns)
        marked = tokenizer.convert_ids_to_tokens(ids[loss == NAME].tolist())
        titles = [title for title, _ in sample.passages if title]
        seconds = {"Ġ" + title.split()[1] for title in titles}
        assert marked
        assert set(marked) <= seconds
        mentions = sum(text.count(title) for title, text in sample.passages if title)
        asked = sum(turn.name is not None for turn in sample.turns)
        assert len(marked) == mentions + asked


def test_answers_stand_in_their_passage(tokenizer: PreTrainedTokenizerFast) -> None:
    del tokenizer
    rng, tasks = np.random.default_rng(1), set()
    for _ in range(50):
        sample = draw_sample(rng, WIDE)
        for turn in sample.turns:
            tasks.add(turn.task)
            if turn.answer != NOT_STATED:
                assert turn.passage is not None
                assert turn.answer in sample.passages[turn.passage][1]
                assert 0 < turn.blind <= 1
    assert tasks == {"single", "follow-up", "not stated"}


def test_training_shows_at_most_eight_passages_and_every_task() -> None:
    for name, levels in CURRICULA.items():
        tasks: set[str] = set()
        for level in levels:
            rng = np.random.default_rng(2)
            for _ in range(20):
                sample = draw_sample(rng, level.recipe)
                assert 1 <= len(sample.passages) <= 8
                tasks.update(turn.task for turn in sample.turns)
        wanted = {"single", "follow-up", "not stated"}
        if name == "learner":
            wanted |= {"two-hop", "open hop", "classification"}
        assert tasks == wanted
        assert sum(level.share for level in levels) == pytest.approx(1)


def test_a_two_hop_answer_names_the_link_and_a_value_of_another_passage(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    encoder, rng = Encoder(tokenizer), np.random.default_rng(3)
    hops = 0
    for _ in range(20):
        sample = draw_sample(rng, LINKED)
        passages = dict(sample.passages)
        for turn in sample.turns:
            if turn.task != "two-hop":
                continue
            hops += 1
            assert turn.bridge is not None
            assert turn.name is not None
            assert turn.bridge in passages[turn.name]
            assert turn.bridge not in turn.question
            assert turn.steps is not None
            assert turn.steps.startswith(turn.bridge)
            assert turn.steps.count(turn.bridge) == 2
            assert turn.steps.endswith("?")
            assert turn.answer.removeprefix(f"{turn.steps} ") in passages[turn.bridge]
        _, loss = encoder.parts(sample)[-1]
        bridged = sum(turn.bridge is not None for turn in sample.turns)
        assert loss.count(ANSWER) == len(sample.turns) + bridged
    assert hops > 50


@pytest.mark.parametrize("split", ["train", "held-out"])
def test_demonstrations_show_the_keyword_of_every_question_with_its_label(split: Split) -> None:
    rng = np.random.default_rng(4)
    for passages in (1, 4):
        sample = draw_sample(rng, Demonstrations(passages), split)
        lines = [line for _, text in sample.passages for line in text.splitlines()]
        assert len(lines) == 8 * passages
        assert {title for title, _ in sample.passages} == {None}
        for turn in sample.turns:
            same = [line for line in lines if line.endswith(f": {turn.answer}")]
            others = [line for line in lines if line not in same]
            words = turn.question.rstrip(":").split()
            telling = [w for w in words if all(w not in line.split(":")[0] for line in others)]
            assert any(word in line for line in same for word in words)
            assert telling or len(others) == 0


def test_frames_surround_passages_and_questions(tokenizer: PreTrainedTokenizerFast) -> None:
    rng, befores = np.random.default_rng(5), 0
    for _ in range(30):
        sample = draw_sample(rng, replace(WIDE, framed=1.0, follow=0.0))
        befores += bool(sample.before)
        prefix, _ = Encoder(tokenizer).parts(sample)[0]
        assert tokenizer.decode(prefix).endswith(f"<|user|>{sample.before}")
        for turn in sample.turns:
            assert turn.name is None or turn.name in turn.question
    assert befores > 3


@pytest.mark.parametrize("task", list(TASKS))
def test_training_tokens_are_those_of_the_prompt(
    tokenizer: PreTrainedTokenizerFast, task: str
) -> None:
    case = draw_case(np.random.default_rng(2), task, 3)
    passages = [Passage(text, title=title) for title, text in case.passages]
    built = Prompt(tokenizer).build(case.messages[-1]["content"], passages)
    encoder = Encoder(tokenizer)
    turn = Turn(case.messages[-1]["content"], case.answer, None, "single", case.blind)
    *contexts, (query, loss) = encoder.parts(Sample(case.passages, (turn,)))
    assert [list(built.prefix_ids)] == [contexts[0][0]]
    assert [list(w.ids) for w in built.windows] == [ids for ids, _ in contexts[1:]]
    assert list(built.query_ids) == query[: loss.index(ANSWER)]


def test_positions_have_gaps_between_parts_and_none_inside(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    encoder, rng = Encoder(tokenizer), np.random.default_rng(0)
    samples = [draw_sample(rng, WIDE) for _ in range(4)]
    even = encoder.batch(samples, rng, 0.0)
    for row, sample in enumerate(samples):
        length = sum(len(ids) for ids, _ in encoder.parts(sample))
        assert even.positions[row, :length].tolist() == list(range(length))
    jittered = encoder.batch(samples, rng, 1.0)
    for row, sample in enumerate(samples):
        start = 0
        last = -1
        for ids, _ in encoder.parts(sample):
            places = jittered.positions[row, start : start + len(ids)].tolist()
            assert places == list(range(places[0], places[0] + len(ids)))
            assert places[0] > last
            start, last = start + len(ids), places[-1]


@pytest.mark.parametrize("task", list(TASKS))
def test_cases_are_repeatable_and_of_their_task(task: str) -> None:
    case = draw_case(np.random.default_rng(4), task, 8)
    assert case == draw_case(np.random.default_rng(4), task, 8)
    assert len(case.passages) == 8
    assert len(case.messages) == (3 if task == "follow-up" else 1)
    assert (case.answer == NOT_STATED) == (task == "not stated")
