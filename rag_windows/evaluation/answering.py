"""One arm's answer to a question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rag_windows.evaluation.arm import Arm
from rag_windows.evaluation.example import Example
from rag_windows.evaluation.fitting import fitting
from rag_windows.evaluation.options import RunOptions
from rag_windows.evaluation.record import ReadPassage, Record
from rag_windows.model import WindowedLM
from rag_windows.passage import Passage
from rag_windows.results import Generation

Asked = tuple[Example, Sequence[Passage]]
"""An example with its passages, best first, not more than the arm reads."""


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer's record with the texts that it names.

    Attributes:
        record: the line of a run's journal.
        texts: of its passages, in their order.
    """

    record: Record
    texts: tuple[str, ...] = ()


class Answerer(Protocol):
    """How the examples of a task are answered."""

    @property
    def batch(self) -> int:
        """Examples that one call takes at most."""
        ...

    def answer(self, lm: WindowedLM, arm: Arm, asked: Sequence[Asked]) -> list[Answered]:
        """Answer some examples with one arm.

        Raises:
            RagWindowsError: of several, they are asked again one by one; of one, it is kept as the
                example's error.
        """
        ...


class Generating:
    """Writes answers freely, with the likeliest token each time.

    Args:
        options: of the run.
    """

    batch = 1

    def __init__(self, options: RunOptions) -> None:
        self._options = options

    def answer(self, lm: WindowedLM, arm: Arm, asked: Sequence[Asked]) -> list[Answered]:
        """See `Answerer`."""
        return [self._one(lm, arm, example, passages) for example, passages in asked]

    def _one(
        self, lm: WindowedLM, arm: Arm, example: Example, passages: Sequence[Passage]
    ) -> Answered:
        options = self._options
        query = list(example.messages)
        count = fitting(
            lm,
            query,
            passages,
            arm.method,
            prefix=options.prefix,
            max_new_tokens=options.max_new_tokens,
        )
        read = passages[:count]
        generation = lm.generate(
            query,
            read,
            prefix=options.prefix,
            method=arm.method,
            max_new_tokens=options.max_new_tokens,
            stop=options.stop,
            citations=options.citations,
            seed=options.seed,
            do_sample=False,
            num_beams=1,
        )
        left_out = len(passages) - count
        record = record_of(generation, example.key, arm.name, read, left_out)
        return Answered(record, tuple(passage.text for passage in read))


def record_of(
    generation: Generation, key: str, arm: str, passages: Sequence[Passage], left_out: int = 0
) -> Record:
    """What is kept of a generation.

    Args:
        generation: as the model gave it.
        key: of the example.
        arm: that answered it.
        passages: as they were given to the model.
        left_out: passages that were not.
    """
    spans: list[list[tuple[int, int]]] = [[] for _ in passages]
    for window in generation.windows:
        spans[window.passage].append((window.start, window.end))
    masses: list[float | None] = [None] * len(passages)
    # Where attention was not measured, citations are there all the same, and empty.
    if generation.prefix_mass is not None:
        for citation in generation.citations or ():
            masses[citation.passage] = citation.mass
    usage, timings = generation.usage, generation.timings
    return Record(
        key=key,
        arm=arm,
        answer=generation.text,
        finish_reason=generation.finish_reason,
        passages=tuple(
            ReadPassage.of(passage, mass, tuple(held))
            for passage, mass, held in zip(passages, masses, spans, strict=True)
        ),
        left_out=left_out,
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
