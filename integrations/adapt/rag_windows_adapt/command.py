"""The command `rag-windows adapt`."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_windows import cli
from rag_windows.cli import LoadOptions, SearchOptions, count, option, spreading
from rag_windows.errors import InputError, require

if TYPE_CHECKING:
    from rag_windows import Passage, WindowedLM
    from rag_windows.calibration import Example
    from rag_windows.calibration.profile import Figure, Setting
    from rag_windows_adapt.lessons import Lessons
    from rag_windows_adapt.training import Plan, Progress, Trainer

QUESTIONS = "questions.jsonl"
"""In the adapter's folder: what the model asked and answered."""

FEWEST = 8
"""Questions that a comparison needs."""

HELD_OUT = 40
"""Most passages whose questions are for the report alone, a fifth of all where that is less."""


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
    questions: Annotated[int, count("Questions that the model learns from.")] = 1000,
    hours: Annotated[
        float | None, option("H", "Stop after so many hours at the latest.", min=0.0)
    ] = None,
    passages: Annotated[int, option("N", "Passages that are read together.", min=2)] = 5,
    rank: Annotated[int, count("Rank of the adapter (LoRA).")] = 16,
    rate: Annotated[float, option("R", "Learning rate.", min=0.0)] = 2e-4,
    test: Annotated[
        str | None,
        option(
            "FILE",
            'Questions for the report, as of rag-windows compare: JSONL with "question", '
            '"answer" and "passages". Default: questions of the model\'s own.',
        ),
    ] = None,
    system: cli.Instruction = None,
    seed: Annotated[int, option("N", "Random seed.", min=0)] = 0,
    model: LoadOptions,
    json: cli.Json = False,
) -> None:
    """Teach a model to read passages side by side as well as one by one, from its own answers.

    The model asks itself questions about the documents and answers each from the right passage
    alone. The adapter learns to encode passages so that the same is answered over several of them.
    Use it as a model: --model DIR.
    """
    _check(out)
    model.check()
    folder = Path(out)
    examples = None if test is None else _examples(test)
    require("rag-windows adapt", "peft", extra="adapt")
    read = cli.read_passages(search, model)
    folder.mkdir(parents=True, exist_ok=True)
    # What is encoded on the way is of no use later.
    with cli.loaded_model(replace(model, no_cache=True)) as lm:
        from rag_windows_adapt.lessons import Lessons, OwnQuestions
        from rag_windows_adapt.training import Plan, Trainer, train

        prefix = cli.instruction(system, model.name, lm)
        plan = Plan(questions, passages, rank, rate, prefix, seed)
        own = OwnQuestions(lm, folder / QUESTIONS, instruction=prefix)
        unseen, learned = _split(read, seed)
        trainer = Trainer(lm, plan)
        resumed = trainer.resume(folder)
        lessons = Lessons(own, learned, learned, count=passages, seed=seed)
        if resumed:
            cli.tell(f"Going on after {trainer.progress.questions} questions.")
        with _stopped_by_ctrl_c() as stopped, cli.progress("Learning") as counted:
            hint = _Hint(trainer, hours)

            def on_lesson(progress: Progress) -> None:
                counted(min(progress.questions, questions), questions, "questions")
                hint(progress)

            finished = train(
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
        if examples is None:
            held = Lessons(own, unseen, read, count=passages, seed=seed)
            examples = _held_out(held)
        rows = []
        if len(examples) < FEWEST:
            cli.tell(f"Note: {len(examples)} questions are too few for a comparison.")
        else:
            with cli.progress("Comparing"):
                rows = _report(lm, folder, examples, plan, labelled=test is not None)
    _show(
        rows,
        trainer,
        out,
        len(examples),
        finished=finished,
        labelled=test is not None,
        as_json=json,
    )


def _check(out: str) -> None:
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


def _examples(path: str) -> list[Example]:
    from rag_windows.calibration import read_examples

    examples = read_examples(path)
    if len(examples) < FEWEST:
        raise InputError(f"{path!r} has {len(examples)} questions. Give at least {FEWEST}.")
    for place, one in enumerate(examples, 1):
        if not one.passages or not one.answers:
            raise InputError(
                f"Question {place} of {path!r} lacks passages or an answer. Give it both."
            )
    return list(examples)


def _split(passages: Sequence[Passage], seed: int) -> tuple[list[Passage], list[Passage]]:
    """Passages for the report, and those that are learned from."""
    from rag_windows_adapt.lessons import LEAST_PASSAGES

    if len(passages) < LEAST_PASSAGES:
        raise InputError(
            f"The documents have {len(passages)} passages; an adapter needs {LEAST_PASSAGES} at "
            "least. Name more documents, or shorter passages with --passage-words."
        )
    order = list(passages)
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


def _held_out(lessons: Lessons) -> list[Example]:
    from rag_windows.calibration import Example

    found = []
    for lesson in lessons.held_out():
        (asked,) = lesson.asked
        found.append(Example(asked.question, lesson.passages, asked.text))
    return found


def _report(
    lm: WindowedLM, folder: Path, examples: Sequence[Example], plan: Plan, *, labelled: bool
) -> list[tuple[str, Setting]]:
    """One prompt, windows without the adapter, and windows with it."""
    from rag_windows import WindowedLM
    from rag_windows.calibration import bag_f1, chatrag_words

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
    profiles = [
        one.compare(
            examples,
            ["sequential", "pcw"],
            metric=None if labelled else overlap,
            prefix=plan.instruction,
            seed=plan.seed,
        )
        for one in (lm, adapted)
    ]
    before, after = ({one.method.name: one for one in profile.settings} for profile in profiles)
    return [
        ("one prompt", before["sequential"]),
        ("windows", before["pcw"]),
        ("windows, with the adapter", after["pcw"]),
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
    figure: Figure = "contains" if labelled else "metric"
    progress = trainer.progress
    if as_json:
        figures = {name: asdict(one.figures[figure]) for name, one in rows}
        cli.write_json(
            {
                "adapter": out,
                "finished": finished,
                "questions": progress.questions,
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
    if not finished:
        cli.show(
            f"{progress.questions} of {trainer.plan.questions} questions were learned from; the "
            "same command goes on."
        )
    cli.show(f"Use it: --model {out}", "bold")
