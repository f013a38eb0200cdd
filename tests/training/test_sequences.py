from dataclasses import replace

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from rag_windows.passage import Passage
from rag_windows.prompt import Prompt
from training.curriculum import LEVELS
from training.phrasing import NOT_STATED
from training.samples import draw_sample
from training.sequences import ANSWER, NAME, REST, Encoder
from training.tasks import TASKS, as_sample, draw_case

WIDE = replace(LEVELS[-2], entities=4, questions=30, system=0.5)


def test_the_same_seed_gives_the_same_samples() -> None:
    first = [draw_sample(np.random.default_rng(5), WIDE) for _ in range(2)]
    assert first[0] == first[1]
    assert draw_sample(np.random.default_rng(6), WIDE) != first[0]


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
        titles = [title for title, _ in sample.passages]
        seconds = {"Ġ" + title.split()[1] for title in titles}
        assert marked
        assert set(marked) <= seconds
        mentions = sum(text.count(title) for title, text in sample.passages)
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


@pytest.mark.parametrize("task", list(TASKS))
def test_training_tokens_are_those_of_the_prompt(
    tokenizer: PreTrainedTokenizerFast, task: str
) -> None:
    case = draw_case(np.random.default_rng(2), task, 3)
    passages = [Passage(text, title=title) for title, text in case.passages]
    built = Prompt(tokenizer).build(case.messages[-1]["content"], passages)
    encoder = Encoder(tokenizer)
    *contexts, (query, loss) = encoder.parts(as_sample(case))
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
