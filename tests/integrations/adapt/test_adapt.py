"""An adapter that is trained on windows, from a model's own answers."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rag_windows import InputError, LimitError, Passage, UnsupportedModelError, WindowedLM
from rag_windows_adapt.lessons import (
    Asked,
    Lesson,
    Marked,
    MarkedLessons,
    OwnLessons,
    Teacher,
    question_in,
)
from rag_windows_adapt.training import METHOD, Trainer, TrainingPlan, train
from tests.blackbox.conftest import invoke
from tests.rag_windows import small, small_states

PLAYERS = {"Pellby": "lute", "Zelmont": "harp", "Orrin": "drum", "Takkel": "flute"}
PASSAGES = [Passage(f"{name} plays the {what}.", title=name) for name, what in PLAYERS.items()]
PLAN = TrainingPlan(questions=60, passages=4, update=1, rank=4, rate=3e-3, instruction="Answer.")


def asked(lm: WindowedLM) -> list[Lesson]:
    """What a model answers over each passage alone, as a lesson."""
    made = []
    for place, name in enumerate(PLAYERS):
        question = f"What does {name} play?"
        answer = lm.generate(
            question, [PASSAGES[place]], prefix="Answer.", method="sequential", max_new_tokens=6
        )
        made.append(Asked(question, (place,), answer.token_ids, answer.text))
    return [Lesson(tuple(PASSAGES), tuple(made))]


@pytest.fixture
def lm() -> WindowedLM:
    return WindowedLM.from_pretrained(small.build(), tokenizer=small.tokenizer(), method="pcw")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return dict(load_file(folder / "adapter_model.safetensors"))


@pytest.mark.slow
def test_it_learns_to_answer_over_windows_as_over_the_right_one(
    lm: WindowedLM, tmp_path: Path
) -> None:
    """What it learned is in the folder, and the model is as it was."""
    before = {name: one.clone() for name, one in lm.model.state_dict().items()}
    assert all(one.requires_grad for one in lm.model.parameters())
    trainer, lessons = Trainer(lm, replace(PLAN, questions=160)), asked(lm)
    assert train(trainer, cycle(lessons), tmp_path)
    losses = trainer.progress.divergence
    assert len(losses) == 40
    assert losses[-1] < 0.5 * losses[0]
    assert all(torch.equal(one, before[name]) for name, one in lm.model.state_dict().items())
    assert all(one.requires_grad and one.grad is None for one in lm.model.parameters())
    adapted = WindowedLM(lm.model, lm.tokenizer, window_adapter=tmp_path)
    assert adapted.method.name == "aligned"
    assert all(one.requires_grad for one in lm.model.parameters())
    made = json.loads((tmp_path / "window_adapter.json").read_text())
    assert made["trained"]["questions"] == 160
    assert made["model"]["fingerprint"]


def test_the_first_divergence_is_that_of_windows_and_of_the_right_one(lm: WindowedLM) -> None:
    """By the engine's own logits, which users read."""
    (lesson,) = asked(lm)
    expected = []
    for one in lesson.asked:
        logs = []
        for passages, by in ((PASSAGES, METHOD), ([PASSAGES[one.right[0]]], "pcw")):
            parts = lm.engine.text.prompt.build(one.question, passages, prefix="Answer.")
            windows = [window.ids for window in parts.windows]
            context = lm.engine.encoder.encode_ids(
                parts.prefix_ids, windows, lm.engine.method_of(by)
            )
            ids = torch.tensor([[*parts.query_ids, *one.answer[:-1]]])
            logits = lm.engine.decoder.forward(context, ids)[0, -len(one.answer) :]
            logs.append(logits.log_softmax(-1))
        student, teacher = logs
        expected.append((teacher.exp() * (teacher - student)).sum(-1).mean())
    assert Trainer(lm, PLAN).learn(lesson) == pytest.approx(float(sum(expected)) / 4, rel=1e-4)


def test_what_does_not_fit_the_model_is_refused_before_it_teaches_anything() -> None:
    """By name, also where rotary positions have no table that would end."""
    # Windows end at the 512th position behind the prefix.
    model = small.build(max_position_embeddings=608)
    lm = WindowedLM.from_pretrained(model, tokenizer=small.tokenizer())
    (lesson,) = asked(lm)
    trainer = Trainer(lm, PLAN)
    trainer.learn(lesson)
    before = trainer.progress.lessons
    talk = replace(lesson.asked[0], answer=lesson.asked[0].answer * 40)
    with pytest.raises(LimitError, match="positions"):
        trainer.learn(replace(lesson, asked=(talk,)))
    short = small.build(max_position_embeddings=500)
    with pytest.raises(LimitError, match="multiples of"):
        Trainer(WindowedLM.from_pretrained(short, tokenizer=small.tokenizer()), PLAN).learn(lesson)
    assert trainer.progress.lessons == before


def test_lessons_that_are_too_long_for_the_model_are_left_out(tmp_path: Path) -> None:
    """The others are learned from, as without them, also after a stop between; all is an error."""
    # Windows end at the 512th position behind the prefix.
    model = small.build(max_position_embeddings=608)
    lm = WindowedLM.from_pretrained(model, tokenizer=small.tokenizer())
    plan = replace(PLAN, questions=16)
    (lesson,) = asked(lm)
    first = lesson.asked[0]
    long = replace(lesson, asked=(replace(first, answer=first.answer * 40),))
    empty = replace(lesson, asked=())
    mixed = [long, lesson, lesson, long, empty, long, lesson, lesson]
    whole, parts = Trainer(lm, plan), Trainer(lm, plan)
    assert train(whole, [lesson] * 4, tmp_path / "whole")
    assert not train(parts, mixed, tmp_path / "parts", until=lambda: parts.progress.lessons == 5)
    again = Trainer(lm, plan)
    assert again.resume(tmp_path / "parts")
    assert train(again, mixed, tmp_path / "parts")
    assert (again.progress.lessons, again.progress.left_out) == (8, 3)
    assert again.progress.divergence == whole.progress.divergence
    for name, one in weights(tmp_path / "whole").items():
        assert torch.equal(one, weights(tmp_path / "parts")[name])
    with pytest.raises(LimitError, match="positions"):
        train(Trainer(lm, plan), cycle([long]), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_right_passages_that_are_too_long_for_the_model_make_no_lesson(tmp_path: Path) -> None:
    """And are not read again at the next start."""
    model = small.build(max_position_embeddings=96)
    lm = WindowedLM.from_pretrained(model, tokenizer=small.tokenizer())
    given = [
        Marked("Who plays?", (Passage("harp " * 200), *PASSAGES), (True, *[False] * 4)),
        Marked("Who plays the harp?", tuple(PASSAGES), (False, True, False, False)),
    ]
    for _ in range(2):
        teacher = Teacher(lm, tmp_path / "questions.jsonl", instruction=None)
        lessons = iter(MarkedLessons(teacher, given, count=2, seed=0))
        assert {next(lessons).asked[0].question for _ in range(6)} == {"Who plays the harp?"}
    assert len((tmp_path / "questions.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_stopped_and_continued_it_learns_the_same(lm: WindowedLM, tmp_path: Path) -> None:
    lessons = asked(lm) * 20
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(Trainer(lm, PLAN), lessons, whole)
    first = Trainer(lm, PLAN)
    assert not train(first, lessons, parts, until=lambda: first.progress.lessons == 6)
    second = Trainer(lm, PLAN)
    assert second.resume(parts)
    assert second.progress.questions == 24
    assert train(second, lessons, parts)
    for name, one in weights(whole).items():
        assert torch.equal(one, weights(parts)[name])
    assert not (parts / "training.pt").exists()


def test_several_lessons_are_an_update(lm: WindowedLM, tmp_path: Path) -> None:
    """Those behind the last update make one by themselves when training stops."""
    plan = replace(PLAN, update=3)
    trainer, lessons = Trainer(lm, plan), asked(lm) * 20
    assert not train(trainer, lessons, tmp_path, until=lambda: trainer.progress.lessons == 7)
    assert trainer.progress.updates == 3
    again = Trainer(lm, plan)
    assert again.resume(tmp_path)
    assert again.progress.updates == 3
    assert train(again, lessons, tmp_path)


def test_what_fails_keeps_what_was_learned(lm: WindowedLM, tmp_path: Path) -> None:
    def failing() -> Iterator[Lesson]:
        yield from asked(lm) * 3
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk"):
        train(Trainer(lm, PLAN), failing(), tmp_path)
    trainer = Trainer(lm, PLAN)
    assert trainer.resume(tmp_path)
    assert trainer.progress.lessons == 3


def test_other_settings_and_models_are_refused(lm: WindowedLM, tmp_path: Path) -> None:
    trainer = Trainer(lm, PLAN)
    train(trainer, asked(lm), tmp_path)
    with pytest.raises(InputError, match="other settings: rank"):
        Trainer(lm, replace(PLAN, rank=2)).resume(tmp_path)
    assert Trainer(lm, replace(PLAN, questions=90)).resume(tmp_path)
    larger = small.build(hidden_size=64, intermediate_size=96)
    other = WindowedLM.from_pretrained(larger, tokenizer=small.tokenizer())
    with pytest.raises(InputError, match="another model"):
        Trainer(other, PLAN).resume(tmp_path)
    with pytest.raises(UnsupportedModelError, match="a row of its own"):
        Trainer(small_states.wrapped(), PLAN)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('"Who plays the harp?"\nBecause it says so.', "Who plays the harp?"),
        (
            "Who plays the harp, the lute and the drum?",
            "Who plays the harp, the lute and the drum?",
        ),
        ("Zelmont plays the harp.", None),
        ("What is the title of this passage?", None),
        ("Who plays?", None),
        ("", None),
    ],
)
def test_only_a_question_about_something_is_taken(text: str, found: str | None) -> None:
    assert question_in(text) == found


class Asking:
    """Asks and answers as a model would, and counts what it is asked."""

    def __init__(self, lm: WindowedLM) -> None:
        self._lm, self.requests = lm, 0

    def generate_batch(self, requests: list[dict[str, Any]]) -> list[Any]:
        self.requests += len(requests)
        made = self._lm.generate_batch([{**one, "max_new_tokens": 4} for one in requests])
        return [
            replace(one, text=f"What does {asked['passages'][0].title} play?")
            if str(asked["query"]).startswith("Write one question")
            else replace(one, text="An instrument.")
            for one, asked in zip(made, requests, strict=True)
        ]


def test_lessons_hold_passages_that_a_question_finds(lm: WindowedLM, tmp_path: Path) -> None:
    model: Any = Asking(lm)
    own = Teacher(model, tmp_path / "questions.jsonl", instruction=None)
    others = [Passage(f"Nothing number {number} is here.") for number in range(9)]
    lessons = iter(OwnLessons(own, PASSAGES, [*PASSAGES, *others], count=3, seed=0))
    found = [next(lessons) for _ in range(8)]
    for lesson in found:
        assert len({passage.text for passage in lesson.passages}) == 3
        for one in lesson.asked:
            (place,) = one.right
            assert one.question == f"What does {lesson.passages[place].title} play?"
    # Nothing is asked twice, here or at the next start.
    asked_for = model.requests
    again = Teacher(model, tmp_path / "questions.jsonl", instruction=None)
    same = iter(OwnLessons(again, PASSAGES, [*PASSAGES, *others], count=3, seed=0))
    assert [next(same) for _ in range(8)] == found
    assert model.requests == asked_for


def test_people_s_questions_come_with_their_right_passages_and_some_others(
    lm: WindowedLM, tmp_path: Path
) -> None:
    """One with two right ones, one with more than a lesson has, and a conversation."""
    model: Any = Asking(lm)
    said = zip(("user", "assistant", "user"), ("Who?", "Orrin.", "What?"), strict=True)
    turns = tuple({"role": role, "content": text} for role, text in said)
    others = tuple(Passage(f"Nothing number {number} is here.") for number in range(9))
    given = [
        Marked("Who plays the harp?", (*others, *PASSAGES[:2]), (False,) * 9 + (True, True)),
        Marked("Who plays?", tuple(PASSAGES), (True,) * 4),
        Marked(turns, (PASSAGES[2], *others), (True,) + (False,) * 9),
    ]
    teacher = Teacher(model, tmp_path / "questions.jsonl", instruction=None)
    lessons = iter(MarkedLessons(teacher, given, count=3, seed=0))
    found = [next(lessons) for _ in range(30)]
    for lesson in found:
        (one,) = lesson.asked
        (of,) = [each for each in given if each.question == one.question]
        right = [each for each, marked in zip(of.passages, of.right, strict=True) if marked]
        assert [lesson.passages[place] for place in one.right] == right
        assert len({passage.text for passage in lesson.passages}) == max(3, len(right))
        assert all(passage in of.passages for passage in lesson.passages)
    assert model.requests == 3
    assert len({tuple(one.text for one in lesson.passages) for lesson in found}) > 20
    again = Teacher(model, tmp_path / "questions.jsonl", instruction=None)
    same = iter(MarkedLessons(again, given, count=3, seed=0))
    assert [next(same) for _ in range(30)] == found
    assert model.requests == 3


def test_the_teacher_reads_several_right_passages_in_one_prompt(lm: WindowedLM) -> None:
    """What windows differ from is the answer over both, as an ordinary prompt has them."""
    answer = lm.generate(
        "Who plays?", PASSAGES[1::-1], prefix="Answer.", method="sequential", max_new_tokens=6
    )
    lesson = Lesson(tuple(PASSAGES), (Asked("Who plays?", (1, 0), answer.token_ids),))
    logs = []
    for passages, method in ((PASSAGES, METHOD), (PASSAGES[1::-1], "sequential")):
        parts = lm.engine.text.prompt.build("Who plays?", passages, prefix="Answer.")
        windows = [window.ids for window in parts.windows]
        chosen = lm.engine.method_of(method)
        context = lm.engine.encoder.encode_ids(parts.prefix_ids, windows, chosen)
        ids = torch.tensor([[*parts.query_ids, *answer.token_ids[:-1]]])
        logits = lm.engine.decoder.forward(context, ids)[0, -len(answer.token_ids) :]
        logs.append(logits.log_softmax(-1))
    expected = (logs[1].exp() * (logs[1] - logs[0])).sum(-1).mean()
    assert Trainer(lm, PLAN).learn(lesson) == pytest.approx(float(expected), rel=1e-4)


def test_a_damaged_file_of_questions_is_named(lm: WindowedLM, tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").write_text('{"passage": "a", "question": null}\n{"question"')
    with pytest.raises(InputError, match="line 2"):
        Teacher(lm, tmp_path / "questions.jsonl", instruction=None)


def test_a_model_that_asks_nothing_is_told_so(lm: WindowedLM) -> None:
    lessons = OwnLessons(Teacher(lm, None, instruction=None), PASSAGES, PASSAGES, count=3, seed=0)
    with pytest.raises(InputError, match="Take a larger model"):
        next(iter(lessons))


# The command.


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    small.build().save_pretrained(folder)
    small.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    for number in range(45):
        (folder / f"Person{number}.txt").write_text(f"Person{number} plays instrument {number}.")
    return folder


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that ask what can be used, and answer as they are."""

    def texts(self: Teacher, asked: Any, tokens: int, prefix: str | None) -> list[Any]:
        made = self._lm.generate_batch(
            [
                {"query": query, "passages": passages, "max_new_tokens": 3, "prefix": prefix}
                for query, passages in asked
            ]
        )
        named = [f"What is it that {passages[0].title} plays?" for _, passages in asked]
        return [replace(one, text=name) for one, name in zip(made, named, strict=True)]

    monkeypatch.setattr(Teacher, "_generate", texts)


def command(docs: Path, base: Path, out: Path, *more: str) -> Any:
    return invoke("adapt", "--docs", docs, "--model", base, "--out", out, "--rank", "2", *more)


@pytest.mark.slow
@pytest.mark.usefixtures("asking")
def test_the_command_writes_an_adapter_and_reports(docs: Path, base: Path, tmp_path: Path) -> None:
    out = tmp_path / "adapter"
    done = command(docs, base, out, "--questions", "30", "--passages", "3")
    assert done.exit_code == 0, done.output
    assert "windows, with the adapter" in done.stdout
    assert f"--model {out}" in done.stdout.replace("\n", "")
    answer = invoke("ask", "Who?", "--docs", docs, "--model", out, "--no-cache", "--json")
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["method"] == "aligned"
    again = command(docs, base, out)
    assert again.exit_code == 2
    assert "Name another folder" in again.stderr


def people(number: int) -> dict[str, Any]:
    """A question that somebody asked, with a right passage and nine others."""
    passages = [
        {"text": f"Person{other} plays instrument {other}.", "right": other == number}
        for other in range(10)
    ]
    return {"question": f"What plays {number}?", "answer": str(number), "passages": passages}


@pytest.mark.slow
def test_the_command_learns_from_people_s_questions(base: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "questions.jsonl", tmp_path / "adapter"
    lines = [json.dumps({**people(number % 10), "id": str(number)}) for number in range(50)]
    file.write_text("\n".join(lines))
    given = ("adapt", "--train", file, "--model", base, "--rank", "2", "--questions", "12")
    done = invoke(*given, "--out", out, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["finished"]
    assert found["questions"] == 12
    assert found["tested"] == 10
    assert found["figure"] == "right"
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(lines[:8]))
    done = invoke(*given, "--out", tmp_path / "other", "--test", few)
    assert done.exit_code == 0, done.output
    assert "8 questions;" in done.stdout.replace("\n", " ")


@pytest.mark.slow
@pytest.mark.usefixtures("asking")
def test_the_hours_end_it_and_the_same_command_goes_on(
    docs: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "adapter"
    given = ("--questions", "12", "--passages", "3")
    first = command(docs, base, out, *given, "--hours", "0", "--json")
    assert first.exit_code == 0, first.output
    told = json.loads(first.stdout)
    assert not told["finished"]
    assert 0 < told["questions"] < 12
    with monkeypatch.context() as patch:
        # A comparison that was interrupted may have asked other questions than the next one.
        interrupted = SimpleNamespace(interrupted=True)
        patch.setattr(WindowedLM, "compare", lambda *_, **__: interrupted)
        stopped = command(docs, base, out, *given, "--hours", "0", "--json")
        assert (stopped.exit_code, stopped.stdout) == (130, "")
    second = json.loads(command(docs, base, out, *given, "--json").stdout)
    assert second["finished"]
    assert second["questions"] >= 12
    assert set(second["figures"]) == {"one prompt", "windows", "windows, with the adapter"}


@pytest.mark.usefixtures("asking")
def test_ctrl_c_leaves_an_adapter(
    docs: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn = Trainer.learn

    def interrupted(self: Trainer, lesson: Lesson) -> float:
        if self.progress.lessons == 2:
            signal.raise_signal(signal.SIGINT)
        return learn(self, lesson)

    monkeypatch.setattr(Trainer, "learn", interrupted)
    out = tmp_path / "adapter"
    done = command(docs, base, out, "--questions", "90", "--passages", "3")
    assert done.exit_code == 130, done.output
    assert "the same command goes on" in done.stderr.replace("\n", " ")
    assert WindowedLM.from_pretrained(out).method.name == "aligned"


def test_bad_input_is_refused_before_anything_is_loaded(
    docs: Path, base: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "note.txt").write_text("x")
    for out in ("file", "other"):
        assert command(docs, base, tmp_path / out).exit_code == 2
    few = tmp_path / "few"
    few.mkdir()
    (few / "one.txt").write_text("Only one passage.")
    done = command(few, base, tmp_path / "adapter")
    assert done.exit_code == 2
    assert "more documents" in done.stderr.replace("\n", " ")
    few = tmp_path / "few.jsonl"
    few.write_text(json.dumps(people(0)) + "\n")
    for option, number in (("--test", 8), ("--train", 40)):
        source = () if option == "--train" else ("--docs", docs)
        done = invoke("adapt", *source, "--model", base, "--out", tmp_path / "a", option, few)
        assert done.exit_code == 2
        assert f"at least {number}" in done.stderr.replace("\n", " ")
    done = command(docs, base, tmp_path / "a", "--train", str(few))
    assert done.exit_code == 2
    assert "Leave out one of them" in done.stderr.replace("\n", " ")
