"""Asking every question of a task with every arm, so that a run can be stopped at any time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rag_windows import Generation, Passage, PassageCache, WindowedLM
from rag_windows.errors import LimitError, MissingExtraError, ModelError, RagWindowsError
from rag_windows.evaluation.record import ReadPassage, Record, Speed
from rag_windows.evaluation.run import Arm, RunFolder, RunOptions
from rag_windows.evaluation.task import Example, Task

Asked = tuple[Example, Sequence[Passage]]
"""An example with its passages, best first, not more than the arm reads."""

Ranking = Callable[[Example], Sequence[Passage]]
Progress = Callable[[int, int], None]
"""Told how much is done, and of how much."""


def _silent(done: int, total: int) -> None:
    """Progress that nobody is told."""


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer's record, with the texts of the passages that it names."""

    record: Record
    texts: tuple[str, ...] = ()


class Answerer(Protocol):
    """How the examples of a task are answered."""

    @property
    def batch(self) -> int:
        """Examples that one call takes at most."""

    def answer(self, lm: WindowedLM, arm: Arm, asked: Sequence[Asked]) -> list[Answered]:
        """Answer some examples; an error of one alone is kept as its record."""


@dataclass(frozen=True, slots=True)
class Generating:
    """Writes answers freely, with the likeliest token each time."""

    options: RunOptions
    citations: bool = True

    batch = 1

    def answer(self, lm: WindowedLM, arm: Arm, asked: Sequence[Asked]) -> list[Answered]:
        """Answer each example by itself."""
        return [self._one(lm, arm, *one) for one in asked]

    def generate(
        self, lm: WindowedLM, arm: Arm, example: Example, passages: Sequence[Passage]
    ) -> Generation:
        """The answer over all of these passages."""
        return lm.generate(
            list(example.messages),
            passages,
            prefix=self.options.prefix,
            method=arm.method,
            max_new_tokens=self.options.max_new_tokens,
            citations=self.citations,
            seed=self.options.seed,
            do_sample=False,
            num_beams=1,
        )

    def fitting(
        self, lm: WindowedLM, arm: Arm, example: Example, passages: Sequence[Passage]
    ) -> tuple[Generation, Sequence[Passage]]:
        """An answer over as many passages from the top as fit, and those passages.

        Methods that read passages side by side read all of them: to leave out those at the end
        would not help. A request that does not fit is refused before any work.
        """
        try:
            return self.generate(lm, arm, example, passages), passages
        except LimitError:
            shorter, method = passages[:-1], arm.method
            in_order = method and (not method.windowed or method.alignment == "in order")
            if not in_order or not any(one.text.strip() for one in shorter):
                raise
        return self.fitting(lm, arm, example, shorter)

    def _one(
        self, lm: WindowedLM, arm: Arm, example: Example, passages: Sequence[Passage]
    ) -> Answered:
        generation, read = self.fitting(lm, arm, example, passages)
        spans: list[list[tuple[int, int]]] = [[] for _ in read]
        for window in generation.windows:
            spans[window.passage].append((window.start, window.end))
        # Where attention was not measured, citations are there all the same, and empty.
        measured = generation.citations if generation.prefix_mass is not None else None
        masses = {one.passage: one.mass for one in measured or ()}
        usage, timings = generation.usage, generation.timings
        record = Record(
            key=example.key,
            arm=arm.name,
            answer=generation.text,
            finish_reason=generation.finish_reason,
            passages=tuple(
                ReadPassage.of(passage, masses.get(place), tuple(spans[place]))
                for place, passage in enumerate(read)
            ),
            left_out=len(passages) - len(read),
            prefix_mass=generation.prefix_mass,
            query_mass=generation.query_mass,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            windows_encoded=usage.windows - usage.cached_windows,
            windows_reused=usage.cached_windows,
            encode_s=timings.encode_s,
            ttft_s=timings.ttft_s,
            total_s=timings.total_s,
            notes=tuple(note.message for note in generation.notes),
        )
        return Answered(record, tuple(passage.text for passage in read))


@dataclass(frozen=True, slots=True)
class Outcome:
    """How many answers a run added and found, and records of questions that have none."""

    answered: int
    kept: int
    failed: tuple[Record, ...]


def run(
    lm: WindowedLM,
    task: Task,
    arms: Sequence[Arm],
    ranking: Ranking,
    folder: RunFolder,
    *,
    answerer: Answerer,
    progress: Progress = _silent,
) -> Outcome:
    """Answer what the folder lacks, and keep each answer as it comes.

    All arms answer an example before the next one is asked, so an arm finds in the model's cache
    what those before it encoded. An error of one question is kept as its record, and asked again by
    the next run. What concerns the whole run is raised, and all that was answered stays: a model or
    a package that can't be used, a full disk, memory that does not suffice, an interruption.
    """
    rankings: dict[str, Sequence[Passage]] = {}

    def lacks(arm: Arm, example: Example) -> bool:
        record = folder.records(arm.name).get(example.key)
        return record is None or record.error is not None

    def ranked(example: Example) -> Sequence[Passage]:
        if example.key not in rankings:
            rankings[example.key] = ranking(example)
        return rankings[example.key]

    def ask(arm: Arm, examples: Sequence[Example]) -> None:
        try:
            asked = [(one, ranked(one)[: arm.top_k]) for one in examples]
            answers = answerer.answer(lm, arm, asked)
        except (ModelError, MissingExtraError):
            raise
        except RagWindowsError as error:
            if len(examples) > 1:
                for one in examples:
                    ask(arm, [one])
                return
            answers = [Answered(Record(examples[0].key, arm.name, "", error=str(error)))]
        texts = [text for answer in answers for text in answer.texts]
        folder.add([answer.record for answer in answers], texts)

    total = len(task.examples) * len(arms)
    kept = done = sum(not lacks(arm, one) for one in task.examples for arm in arms)
    progress(done, total)
    for start in range(0, len(task.examples), answerer.batch):
        block = task.examples[start : start + answerer.batch]
        for arm in arms:
            if lacking := [one for one in block if lacks(arm, one)]:
                ask(arm, lacking)
                done += len(lacking)
                progress(done, total)
        rankings.clear()
    records = [folder.records(arm.name)[one.key] for arm in arms for one in task.examples]
    failed = tuple(one for one in records if one.error is not None)
    return Outcome(total - kept - len(failed), kept, failed)


def measure_speed(
    lm: WindowedLM,
    task: Task,
    arms: Sequence[Arm],
    ranking: Ranking,
    folder: RunFolder,
    count: int,
    *,
    options: RunOptions,
    progress: Progress = _silent,
    rounds: int = 3,
) -> tuple[str, ...]:
    """Time the first token of so many examples, evenly spaced, with every arm, and keep it.

    Each example is asked with an empty cache once before anything is timed. Then come rounds of one
    cold and one warm call, in turns the one first or the other, so that a machine that slows down
    is no advantage for either. What was measured in an earlier run is not measured again. The
    model's own cache is neither read nor filled.

    Returns:
        What could not be measured, and why.
    """
    chosen, notes = evenly(task.examples, count), list[str]()
    asking = Generating(replace(options, max_new_tokens=1), citations=False)

    def timed(arm: Arm, example: Example, passages: Sequence[Passage]) -> Speed:
        first, passages = asking.fitting(warm, arm, example, passages)
        bare = asking.generate(cold, arm, example, ())
        seconds: dict[WindowedLM, list[float]] = {cold: [], warm: []}
        for number in range(rounds):
            for one in (cold, warm) if number % 2 == 0 else (warm, cold):
                found = asking.generate(one, arm, example, passages)
                seconds[one].append(found.timings.ttft_s)
        tokens = first.usage.prompt_tokens - bare.usage.prompt_tokens
        return Speed(example.key, arm.name, tokens, tuple(seconds[cold]), tuple(seconds[warm]))

    with PassageCache(memory="4GiB") as cache:
        cold, warm = lm.with_cache(None), lm.with_cache(cache)
        for place, example in enumerate(chosen):
            progress(place, len(chosen))
            lacking = [arm for arm in arms if example.key not in folder.speeds(arm.name)]
            try:
                passages = ranking(example) if lacking else ()
                for arm in lacking:
                    folder.add([timed(arm, example, passages[: arm.top_k])])
            except (ModelError, MissingExtraError):
                raise
            except RagWindowsError as error:
                notes.append(f"{example.key}: not timed: {error}")
            # A cache that fills up would begin to refuse windows.
            cache.clear()
    return tuple(notes)


def evenly(examples: Sequence[Example], count: int) -> Sequence[Example]:
    """So many examples at even distances, the first and the last one among them."""
    last = len(examples) - 1
    if count > last:
        return examples
    return [examples[number * last // max(1, count - 1)] for number in range(count)]
