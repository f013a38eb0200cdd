"""The command `rag-windows adapt`."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from rag_windows import cli
from rag_windows.cli import LoadOptions, SearchOptions, count, option, spreading
from rag_windows.errors import InputError, require

if TYPE_CHECKING:
    from rag_windows import WindowedLM
    from rag_windows.calibration import Example, Setting
    from rag_windows_adapt.lessons import Lesson, Marked, OwnLessons, Query
    from rag_windows_adapt.training import Progress, Trainer, TrainingPlan
    from rag_windows_eval.passages import PassagesQuestion

QUESTIONS = "questions.jsonl"
"""In the adapter's folder: what the model asked and answered."""

FEWEST = 8
"""Questions that a comparison needs."""

LEAST = 40
"""Fewest passages or questions to learn from."""

HELD_OUT = 40
"""Most of them that are for the report alone; a fifth of all where that is less."""


def add(app: typer.Typer) -> None:
    """Add it to those of `rag-windows`; the entry point of the group `rag_windows.commands`."""
    app.command()(adapt)


@spreading(
    without=(
        "top_k",
        "embedder",
        "method",
        "profile",
        "rag_temperature",
        "rag_scale",
        "quantization",
        "no_cache",
        "cache_dir",
        "shared",
        "shared_wait",
        "shared_apart",
    )
)
def adapt(
    *,
    search: SearchOptions,
    out: Annotated[
        str,
        option("DIR", "Folder of the adapter; the same command goes on where it was stopped."),
    ],
    train: Annotated[
        str | None,
        option(
            "FILE",
            "Learn from these questions, whose right passages are marked, in place of the model's "
            "own about --docs: a file as of rag-windows eval passages.",
        ),
    ] = None,
    test: Annotated[
        str | None,
        option(
            "FILE",
            "Questions for the report, in the same formats. Default: some that are not learned "
            "from.",
        ),
    ] = None,
    questions: Annotated[int, count("Questions that the model learns from.")] = 1000,
    hours: Annotated[
        float | None, option("H", "Stop after so many hours at the latest.", min=0.0)
    ] = None,
    passages: Annotated[int, option("N", "Passages that are read together.", min=2)] = 5,
    rank: Annotated[int, count("Rank of the adapter (LoRA).")] = 16,
    rate: Annotated[float, option("R", "Learning rate.", min=0.0)] = 3e-4,
    system: cli.Instruction = None,
    seed: Annotated[int, option("N", "Random seed.", min=0)] = 0,
    model: LoadOptions,
    json: cli.Json = False,
) -> None:
    """Teach a model to read passages side by side, from its own answers to one passage.

    The model answers each question from the right passage alone. The adapter learns to encode
    passages so that the same is answered over several of them. Questions are those of --train, or
    the model's own about the documents. Use the adapter as a model: --model DIR.
    """
    _check(out, search, train)
    model.check()
    folder = Path(out)
    require("rag-windows adapt", "peft", extra="adapt")
    tested = None if test is None else _tested(test, passages, seed)
    asked = None if train is None else _asked(train)
    read = [] if asked is not None else cli.read_passages(search, model)
    folder.mkdir(parents=True, exist_ok=True)
    # What is encoded on the way is of no use later.
    with cli.loaded_model(replace(model, no_cache=True)) as lm:
        from rag_windows_adapt.lessons import MarkedLessons, OwnLessons, Teacher
        from rag_windows_adapt.training import Trainer, TrainingPlan
        from rag_windows_adapt.training import train as train_on

        prefix = cli.instruction(system, model.name, lm)
        plan = TrainingPlan(
            questions, passages, rank=rank, rate=rate, instruction=prefix, seed=seed
        )
        teacher = Teacher(lm, folder / QUESTIONS, instruction=prefix)
        trainer = Trainer(lm, plan)
        if trainer.resume(folder):
            cli.tell(f"Going on after {trainer.progress.questions} questions.")
        lessons: Iterable[Lesson]
        if asked is None:
            unseen, learned = _split(read, seed)
            lessons = OwnLessons(teacher, learned, learned, count=passages, seed=seed)
        else:
            unlearned, some = _split(asked, seed) if tested is None else ([], asked)
            lessons = MarkedLessons(
                teacher, [one.marked for one in some], count=passages, seed=seed
            )
        with _stopped_by_ctrl_c() as stopped, cli.progress("Learning") as counted:
            hint = _Hint(trainer, hours)

            def on_lesson(progress: Progress) -> None:
                counted(min(progress.questions, questions), questions, "questions")
                hint(progress)

            finished = train_on(
                trainer,
                lessons,
                folder,
                until=lambda: stopped.is_set() or hint.over,
                on_lesson=on_lesson,
            )
        if stopped.is_set():
            cli.tell(
                f"Stopped after {trainer.progress.questions} of {questions} questions. The "
                f"adapter of these is in {out}; the same command goes on."
            )
            raise typer.Exit(130)
        if tested is None and asked is not None:
            tested = [one.example(passages, seed) for one in unlearned]
        own = tested is None
        if tested is None:
            held = OwnLessons(teacher, unseen, read, count=passages, seed=seed)
            tested = _held_out(held)
        rows = []
        if len(tested) < FEWEST:
            cli.tell(f"Note: {len(tested)} questions are too few for a comparison.")
        else:
            with cli.progress("Comparing"):
                rows = _report(lm, folder, tested, plan, labelled=not own)
    _show(rows, trainer, out, len(tested), finished=finished, labelled=not own, as_json=json)


def _check(out: str, search: SearchOptions, train: str | None) -> None:
    if train is not None and (search.docs or search.index is not None):
        raise InputError(
            "The questions of --train bring their passages, so --docs and --index would not be "
            "read. Leave out one of them."
        )
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out {out!r} is a file. Name a folder, or one that does not exist yet.")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    there = {one.name for one in folder.iterdir()}
    if "training.pt" not in there and there != {QUESTIONS}:
        raise InputError(
            f"--out {out!r} holds a finished adapter, or something else. Name another folder."
        )


@dataclass(frozen=True, slots=True)
class _Question:
    """A question of a file, to learn from or to test with."""

    given: PassagesQuestion

    @property
    def marked(self) -> Marked:
        from rag_windows_adapt.lessons import Marked

        return Marked(self.query, self.given.passages, self.given.right)

    @property
    def query(self) -> Query:
        turns = self.given.turns
        if len(turns) == 1:
            return turns[0]
        pairs = zip(cycle(("user", "assistant")), turns, strict=False)
        return tuple({"role": role, "content": text} for role, text in pairs)

    def example(self, count: int, seed: int) -> Example:
        from rag_windows.calibration import Example

        read = self.given.reading(count, seed)
        query = self.query if isinstance(self.query, str) else list(self.query)
        return Example(query, read.passages, self.given.answers)


def _questions(path: str) -> list[_Question]:
    from rag_windows_eval.files import read
    from rag_windows_eval.passages import questions_of

    return [_Question(one) for one in questions_of(read(path))]


def _tested(path: str, passages: int, seed: int) -> list[Example]:
    found = [one.example(passages, seed) for one in _questions(path)]
    if len(found) < FEWEST:
        raise InputError(f"{path!r} has {len(found)} questions. Give at least {FEWEST}.")
    return found


def _asked(path: str) -> list[_Question]:
    found = [one for one in _questions(path) if any(one.given.right)]
    if len(found) < LEAST:
        raise InputError(
            f"{path!r} has {len(found)} questions with a passage that is marked as right. Give at "
            f"least {LEAST}."
        )
    return found


T = TypeVar("T")


def _split(given: Sequence[T], seed: int) -> tuple[list[T], list[T]]:
    """What is for the report, and what is learned from."""
    if len(given) < LEAST:
        raise InputError(
            f"The documents have {len(given)} passages; an adapter needs {LEAST} at least. Name "
            "more documents, or shorter passages with --passage-words."
        )
    order = list(given)
    random.Random(seed).shuffle(order)
    cut = min(HELD_OUT, len(order) // 5)
    return order[:cut], order[cut:]


class _Hint:
    """Says once how long it takes, and knows when the hours are over."""

    def __init__(self, trainer: Trainer, hours: float | None) -> None:
        self._begun = trainer.progress.seconds
        self._first: tuple[int, float] | None = None
        self._hours, self._wanted, self._said = hours, trainer.plan.questions, False
        self.over = False

    def __call__(self, progress: Progress) -> None:
        spent = progress.seconds - self._begun
        self.over = self._hours is not None and spent > self._hours * 3600
        # The first lessons wait for the first questions, those of several lessons.
        if self._first is None:
            self._first = progress.questions, progress.seconds
        asked, seconds = self._first
        if not self._said and progress.lessons >= 16 and progress.questions > asked:
            self._said = True
            a_question = (progress.seconds - seconds) / (progress.questions - asked)
            left = (self._wanted - progress.questions) * a_question / 3600
            cli.tell(
                f"About {left:.1f} more hours for {self._wanted} questions on this machine. "
                "Ctrl-C stops it, with an adapter of what was learned."
            )


@contextmanager
def _stopped_by_ctrl_c() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; the second one interrupts as ever."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before = signal.getsignal(signal.SIGINT)

    def stop(*_: Any) -> None:
        stopped.set()
        signal.signal(signal.SIGINT, before)
        cli.tell("Stopping after this lesson. Ctrl-C again stops at once.")

    signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


def _held_out(lessons: OwnLessons) -> list[Example]:
    from rag_windows.calibration import Example

    found = []
    for lesson in lessons.held_out():
        (asked,) = lesson.asked
        found.append(Example(str(asked.question), lesson.passages, asked.text))
    return found


def _report(
    lm: WindowedLM, folder: Path, examples: Sequence[Example], plan: TrainingPlan, *, labelled: bool
) -> list[tuple[str, Setting]]:
    """One prompt, windows without the adapter, and windows with it."""
    from rag_windows import WindowedLM
    from rag_windows.calibration import bag_f1, chatrag_words
    from rag_windows.methods import resolve
    from rag_windows_adapt.training import METHOD

    def overlap(answer: str, right: str) -> float:
        return bag_f1(chatrag_words(answer), chatrag_words(right))

    adapted = WindowedLM(
        lm.model,
        lm.tokenizer,
        header=lm.header,
        template_kwargs=lm.template_kwargs,
        max_window_tokens=lm.max_window_tokens,
        window_adapter=folder,
    )
    profiles = []
    for one in (lm, adapted):
        profile = one.compare(
            examples,
            ["sequential", METHOD],
            metric=None if labelled else overlap,
            prefix=plan.instruction,
            seed=plan.seed,
        )
        # Figures of different questions can't stand beside each other.
        if profile.interrupted:
            raise KeyboardInterrupt
        profiles.append(profile)
    windows = resolve(METHOD).name
    before, after = ({one.method.name: one for one in profile.settings} for profile in profiles)
    return [
        ("one prompt", before["sequential"]),
        ("windows", before[windows]),
        ("windows, with the adapter", after[windows]),
    ]


def _show(
    rows: Sequence[tuple[str, Setting]],
    trainer: Trainer,
    out: str,
    count: int,
    *,
    finished: bool,
    labelled: bool,
    as_json: bool,
) -> None:
    figure: Literal["contains", "metric"] = "contains" if labelled else "metric"
    progress = trainer.progress
    if as_json:
        figures = {name: asdict(one.figures[figure]) for name, one in rows}
        cli.write_json(
            {
                "adapter": out,
                "finished": finished,
                "questions": progress.questions,
                "left_out": progress.left_out,
                "seconds": progress.seconds,
                "divergence": progress.divergence,
                "tested": count,
                "figure": "right" if labelled else "f1",
                "figures": figures,
            }
        )
        return
    table = cli.plain_table("passages as", "right answers" if labelled else "F1 to the teacher")
    for name, one in rows:
        mean = one.figures[figure]
        low, value, high = (f"{100 * number:.3g}" for number in (mean.low, mean.value, mean.high))
        table.add_row(name, f"{value}% ({low} to {high})")
    whose = "questions" if labelled else "questions of the model's own that it did not learn from"
    if rows:
        cli.console().print(table)
        cli.show(f"{count} {whose}; 95% confidence intervals in brackets.", "dim")
    if progress.left_out:
        cli.show(
            f"{progress.left_out} of {progress.lessons} lessons were left out, too long for the "
            "model. Fewer --passages, or shorter ones, fit."
        )
    if not finished:
        cli.show(
            f"{progress.questions} of {trainer.plan.questions} questions were learned from; the "
            "same command goes on."
        )
    cli.show(f"Use it: --model {out}", "bold")
