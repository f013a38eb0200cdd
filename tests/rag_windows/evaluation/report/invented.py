"""Runs that never were, small and large, for reports to be written of."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rag_windows import Passage
from rag_windows.evaluation.record import ReadPassage, Record, Speed, digest_of
from rag_windows.evaluation.report import ReportedRun, values_of
from rag_windows.evaluation.run import Arm
from rag_windows.evaluation.summary import summarise_records
from rag_windows.evaluation.task import Example, Reference, Score

KINDS = ("directAnswer", "clarification", "noAnswerButRelevantInfo")
METHODS = ("sequential", "ape", "pcw", "deep-thinking+ape")
_WORDS = (
    "the harbour of Velmor was dug by miners from the upper valley and closed twice in hard "
    "winters when ice reached the second lighthouse and boats stayed behind the long stone wall"
).split()


@dataclass(frozen=True)
class Asked:
    """A task whose scores stand in the records' own texts: "0.4" is 40 percent."""

    examples: tuple[Example, ...]
    name: str = "invented"
    pool: Sequence[Passage] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    prefix: str | None = None
    max_new_tokens: int = 64
    metrics: Sequence[str] = ("response_f1", "evidence_f1")

    def scores(self, examples: Sequence[Example], records: Sequence[Record]) -> list[Score]:
        """Of the answers' last words."""
        values = [100 * float((one.answer or "0").split()[-1]) for one in records]
        return [Score.mean(name, values) for name in self.metrics]


def example(place: int, *, kinds: Sequence[str] = KINDS) -> Example:
    """The fourth turn of a conversation; conversations have five questions."""
    asked = f"And what happened to the harbour of Velmor in winter {place}, if anything?"
    return Example(
        key=f"harbour{place // 5}/{place % 5 + 1}",
        messages=(
            {"role": "user", "content": "Who dug the harbour of Velmor?"},
            {"role": "assistant", "content": "Miners from the upper valley dug it."},
            {"role": "user", "content": asked},
        ),
        references=(
            Reference(f"It closed in winter {place}.", "directAnswer", (f"Velmor:{place % 7}",)),
            Reference("Which harbour do you mean?", "clarification"),
        ),
        group=f"harbour{place // 5}",
        kinds=(kinds[place % len(kinds)],) if kinds else (),
    )


def text(place: int, words: int = 90) -> str:
    """A passage."""
    drawn = random.Random(place)
    return f"Velmor, part {place}. " + " ".join(drawn.choice(_WORDS) for _ in range(words)) + "."


def record(
    asked: Example, place: int, arm: Arm, texts: dict[str, str], count: int, **other: Any
) -> Record:
    """An answer over ``count`` passages, of which some have several windows."""
    drawn = random.Random(f"{place} {arm.name}")
    depth = min(count, arm.top_k or count)
    weights = [drawn.random() ** 3 + 0.02 for _ in range(depth)]
    measured = arm.label != "sequential"
    passages = []
    for rank in range(depth):
        number = (place + rank) % 23
        body = text(number, 90 if number % 4 else 330)
        texts[digest_of(body)] = body
        half = len(body) // 2
        spans = ((0, len(body)),) if number % 4 else ((0, half), (half, len(body)))
        passages.append(
            ReadPassage(
                text=digest_of(body),
                id=f"Velmor:{number}",
                title=f"Velmor and its harbour, {number}",
                score=10.0 - rank,
                mass=0.6 * weights[rank] / sum(weights) if measured else None,
                spans=spans if measured else (),
            )
        )
    quality = min(1.0, max(0.0, drawn.gauss(0.45 + 0.01 * depth - 0.04 * len(arm.label) / 9, 0.3)))
    values: dict[str, Any] = {
        "answer": f"The harbour closed for {place} days, with a likeness of {quality:.3f}",
        "passages": tuple(passages),
        "prefix_mass": 0.25 if measured else None,
        "query_mass": 0.15 if measured else None,
        "prompt_tokens": 150 * depth + 60,
        "completion_tokens": 14,
        "windows_encoded": depth if arm.label == "ape" else 0,
        "windows_reused": 0 if arm.label == "ape" else depth * measured,
        "encode_s": 0.01 * depth,
        "ttft_s": 0.02 * depth,
        "total_s": 0.1 + 0.02 * depth,
    }
    return Record(asked.key, arm.name, **{**values, **other})


def arms(methods: Sequence[str], depths: Sequence[int | None]) -> list[Arm]:
    """Each method at each depth."""
    return [Arm(label, top_k=depth) for depth in depths for label in methods]


def speeds(compared: Iterable[Arm], count: int = 12) -> dict[str, list[Speed]]:
    """Warm times of windows hardly grow; those of one sequence do."""
    found: dict[str, list[Speed]] = {}
    for arm in compared:
        for place in range(count):
            tokens = 140 * (arm.top_k or 8) + 11 * place
            cold = tokens * (0.0006 if arm.label == "sequential" else 0.0005)
            warm = cold * 0.95 if arm.label == "sequential" else 0.02 + cold / 40
            found.setdefault(arm.name, []).append(
                Speed(
                    f"harbour{place // 5}/{place % 5 + 1}",
                    arm.name,
                    tokens,
                    (cold,) * 3,
                    (warm,) * 3,
                )
            )
    return found


def run(
    *,
    methods: Sequence[str] = METHODS,
    depths: Sequence[int | None] = (1, 5, 20),
    questions: int = 60,
    passages: int = 20,
    kinds: Sequence[str] = KINDS,
    timed: bool = True,
    **other: Any,
) -> ReportedRun:
    """A whole run; ``other`` replaces fields of the report's input."""
    task = Asked(tuple(example(place, kinds=kinds) for place in range(questions)))
    compared = arms(methods, depths)
    texts: dict[str, str] = {}
    records = {
        arm.name: {
            one.key: record(one, place, arm, texts, passages)
            for place, one in enumerate(task.examples)
        }
        for arm in compared
    }
    return reported(task, compared, records, texts, speeds(compared) if timed else {}, **other)


def reported(
    task: Asked,
    compared: Sequence[Arm],
    records: Mapping[str, Mapping[str, Record]],
    texts: Mapping[str, str],
    timed: Mapping[str, list[Speed]] | None = None,
    **other: Any,
) -> ReportedRun:
    """What a report is written from, summary and all."""
    held = {(arm, key): one for arm, found in records.items() for key, one in found.items()}
    names = [arm.name for arm in compared]
    values: dict[str, Any] = {
        "settings": {
            "task": {"name": task.name, "data": "sha256:0f3a"},
            "model": {"name": "invented/reader-8b", "dtype": "bfloat16", "sha256": "ab" * 32},
            "retriever": {"kind": "bm25", "k1": 1.2},
            "max_new_tokens": 64,
            "seed": 0,
        },
        "summary": summarise_records(task, compared, records, timed),
        "examples": task.examples,
        "records": held,
        "texts": texts,
        **dict(zip(("metric", "values"), values_of(task, names, held), strict=True)),
        "made_with": ({"rag-windows": "0.1.0", "machine": "2 cores of an invented processor"},),
        "date": "2026-11-21 18:00 UTC",
        "command": "rag-windows eval inscit --data dev.json --methods sequential,ape --top-k 1,5",
        "title": "invented",
    }
    return ReportedRun(**{**values, **other})
