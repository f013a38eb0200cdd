"""A small task of invented conversations, and what runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rag_windows import METHODS, Passage, WindowedLM
from rag_windows_eval import run, task

PETS = ("lion", "donkey", "bear", "hare", "goose", "otter", "wren")


@dataclass(frozen=True, kw_only=True)
class Invented(task.Task):
    """Conversations of one, two, ... questions, over passages that share some texts."""

    name: str = "invented"
    settings: Mapping[str, Any] = field(default_factory=lambda: {"seed": 1})
    prefix: str | None = "Answer."
    max_new_tokens: int = 4

    def scores(
        self, examples: Sequence[task.TaskExample], records: Sequence[task.AnswerRecord]
    ) -> list[task.MetricScore]:
        """Exact match."""
        pairs = zip(examples, records, strict=True)
        return [
            task.MetricScore.mean(
                "exact", [100.0 * (r.answer == e.references[0].text) for e, r in pairs]
            )
        ]


def invented(conversations: int = 3) -> Invented:
    """A task of ``n (n + 1) / 2`` questions with three passages each."""
    made: list[task.TaskExample] = []
    for number in range(conversations):
        for turn in range(number + 1):
            asked = (number + turn) % len(PETS)
            held = [(asked + step) % len(PETS) for step in range(3)]
            made.append(
                task.TaskExample(
                    key=f"c{number}-{turn}",
                    messages=({"role": "user", "content": f"Which pet has Kadan {asked}?"},),
                    references=(task.Reference(PETS[asked], evidence=(f"p{asked}",)),),
                    group=f"c{number}",
                    passages=tuple(
                        Passage(f"Kadan {one} keeps a {PETS[one]}.", f"p{one}", f"Kadan {one}")
                        for one in held
                    ),
                )
            )
    return Invented(examples=made)


def given(example: task.TaskExample) -> Sequence[Passage]:
    """The passages that an example brings."""
    return example.passages


def arms_of(*names: str, depths: Sequence[int | None] = (None,)) -> tuple[run.Condition, ...]:
    """Arms by the names of their methods."""
    return run.conditions([(name, METHODS[name]()) for name in names], depths)


def begin(
    path: Path,
    lm: WindowedLM,
    task: Invented,
    compared: Sequence[run.Condition],
    *,
    fresh: bool = False,
    options: run.Generating | None = None,
) -> AbstractContextManager[run.RunFolder]:
    """A folder to run in."""
    chosen = options or run.Generating.of(task)
    manifest = run.Manifest.of(run.Described.of(lm), task, compared, {"kind": "given"}, chosen)
    return run.RunFolder.begin(path, manifest, fresh=fresh)


def go(
    path: Path,
    lm: WindowedLM,
    task: Invented,
    compared: Sequence[run.Condition],
    *,
    ranking: run.Ranking = given,
    answerer: run.Answerer | None = None,
    batch: int = 1,
    progress: Callable[[int, int], None] = print,
) -> list[task.AnswerRecord]:
    """Run a task to its end."""
    with begin(path, lm, task, compared) as folder:
        answerer = answerer or run.Generating.of(task).answer
        asking = run.asking_one(lm, answerer)
        return run.Run(task, compared, ranking, folder, asking, batch).answer(progress)
