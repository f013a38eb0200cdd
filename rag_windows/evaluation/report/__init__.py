"""The report of a run: one HTML file that needs nothing else, and the same tables as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from rag_windows import __version__
from rag_windows.errors import InputError
from rag_windows.evaluation.files import write_whole
from rag_windows.evaluation.report.charts import charts
from rag_windows.evaluation.report.tables import WORDS, deepest, overview, tables, verdict
from rag_windows.evaluation.report.text import listed, name, rendered, some
from rag_windows.evaluation.run import RECORDS, REPORTS, RunFolder
from rag_windows.evaluation.summary import Summary
from rag_windows.evaluation.task import ReadPassage, Record, Task, digest_of

QUESTIONS = 10
"""Questions of a report in all; several runs share them."""

PASSAGES = 40
"""Passages of one question that are shown, and beside them those that a right answer rests on."""

TEXT = 2000
"""Characters of a passage, a message or an answer that are shown."""

_Keyed = Mapping[tuple[str, str], Any]
"""By name of the arm and key of the example."""


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """One run; its ``command`` is shown, if it is known."""

    task: Task
    folder: RunFolder
    summary: Summary
    command: str = ""


def write_report(runs: Sequence[ReportedRun], folder: str | Path) -> tuple[Path, Path]:
    """Write a report of one run or of several, also of those that are not finished.

    The HTML file holds all that it shows: it asks for no other file and runs no script.

    Args:
        runs: at least one.
        folder: where both files go; made if it is missing.

    Returns:
        Paths of the HTML and of the Markdown file.

    Raises:
        InputError: no run.
        MissingExtraError: matplotlib is not installed.
        DataError: a file can't be written.
    """
    if not runs:
        raise InputError("Nothing to report: name at least one run's folder.")
    count = max(2, QUESTIONS // len(runs))
    titles = [name(run.folder.path.name) or f"Run {n}" for n, run in enumerate(runs, start=1)]
    page: dict[str, Any] = {
        "title": "Evaluation: " + listed(list({run.summary.task: None for run in runs})),
        "parts": [_part(run, f"run{n}", count) for n, run in enumerate(runs, start=1)],
        "version": __version__,
        "together": None,
    }
    if len(runs) > 1:
        page["together"] = overview(
            [(title, run.summary) for title, run in zip(titles, runs, strict=True)]
        )
    css = files("rag_windows.evaluation.report").joinpath("templates/page.css")
    html, markdown = (Path(folder) / one for one in REPORTS)
    write_whole(
        html, rendered("page.html", css=css.read_text(encoding="utf-8"), words=WORDS, **page)
    )
    write_whole(markdown, rendered("page.md", **page) + "\n")
    return html, markdown


def _part(run: ReportedRun, anchor: str, count: int) -> dict[str, Any]:
    """What the templates show of one run."""
    summary = run.summary
    metric, values = _values(run)
    bases = {arm.base for arm in summary.arms}
    return {
        "anchor": anchor,
        "title": run.folder.path.name,
        "head": {label: value for label, value in _head(run) if value},
        "settings": json.dumps(run.folder.manifest.settings, indent=1, ensure_ascii=False),
        "command": run.command,
        "summary": summary,
        "verdicts": [(arm, *verdict(arm, bases)) for arm in summary.arms if summary.compared],
        "deepest": deepest(summary),
        "tables": list(tables(summary)),
        "charts": charts(summary, anchor),
        "metric": metric,
        "questions": [
            _question(run, values, place, why) for place, why in _chosen(run, values, count)
        ],
    }


def _head(run: ReportedRun) -> Iterator[tuple[str, str]]:
    held, summary = run.folder.manifest.settings, run.summary
    count = f"{summary.compared:,} of {summary.examples:,}, from {some(summary.groups, 'group')}"
    model, tokens = held.get("model") or {}, held.get("max_new_tokens")
    weights = model.get("sha256") and f"weights {model['sha256'][:12]}"
    records = run.folder.path / RECORDS
    yield "task", summary.task
    yield "questions", count
    yield "model", ", ".join(filter(None, (model.get("name"), model.get("dtype"), weights)))
    yield "arms", ", ".join(arm.name for arm in summary.arms)
    yield "retriever", _words(held.get("retriever"))
    yield "longest answer", "" if tokens is None else f"{tokens} tokens"
    yield "seed", _words(held.get("seed"))
    if records.is_file():
        changed = datetime.fromtimestamp(records.stat().st_mtime, UTC)
        yield "last answer", f"{changed:%Y-%m-%d %H:%M} UTC"
    # Machine and versions; of a run that went on elsewhere, all of them.
    made_with = run.folder.manifest.made_with
    for label in {label: None for one in made_with for label in one}:
        yield label, "; then ".join({_words(one.get(label)): None for one in made_with})


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        told = ((key, _words(entry)) for key, entry in value.items())
        return ", ".join(f"{key} {words}" for key, words in told if words)
    return "" if value is None else str(value)


def _values(run: ReportedRun) -> tuple[str, _Keyed]:
    """The first metric that judges single answers, with its value for every answer there is."""
    found: dict[str, dict[tuple[str, str], float]] = {metric: {} for metric in run.task.metrics}
    for arm in run.summary.arms:
        records = run.folder.records(arm.name)
        asked = [one for one in run.task.examples if one.key in records]
        for score in run.task.scores(asked, [records[one.key] for one in asked]) if asked else ():
            for example, value in zip(asked, score.values, strict=True):
                if value is not None:
                    found[score.name][arm.name, example.key] = value
    return next(((metric, one) for metric, one in found.items() if one), ("", {}))


def _chosen(run: ReportedRun, values: _Keyed, count: int) -> list[tuple[int, str]]:
    """Places of questions, and why: a third largest gains, a third largest losses, some by chance.

    Without a base they are the best and the worst answers. Those that lack an answer come last.
    """
    arms, examples = deepest(run.summary), run.task.examples
    compared = any(arm.base for arm in arms)
    changes, whole = [], set()
    for place, example in enumerate(examples):
        records = [run.folder.records(arm.name).get(example.key) for arm in arms]
        if any(one is None or one.error is not None for one in records):
            continue
        whole.add(place)
        for arm in arms:
            value = values.get((arm.name, example.key))
            before = values.get((str(arm.base), example.key)) if compared else 0.0
            if value is not None and before is not None:
                changes.append((value - before, place, arm))
    taken: dict[int, str] = {}
    for sign, kind in ((1, "gain"), (-1, "loss")):
        left = count // 3
        for points, place, arm in sorted(changes, key=lambda one: (-sign * one[0], one[1])):
            if left and place not in taken and (points * sign > 0 or not compared):
                against = f"{kind}: {arm.name} {points:+.1f} points against {arm.base}"
                taken[place] = against if compared else f"{arm.name} has {points:.1f}"
                left -= 1
    digests = [digest_of(one.key) for one in examples]
    for place in sorted(range(len(examples)), key=lambda one: (one not in whole, digests[one])):
        if len(taken) < count:
            taken.setdefault(place, "drawn at random")
    return list(taken.items())


def _question(run: ReportedRun, values: _Keyed, place: int, why: str) -> dict[str, Any]:
    """One question with its answers and passages."""
    example, deep = run.task.examples[place], deepest(run.summary)
    records = {arm.name: run.folder.records(arm.name).get(example.key) for arm in run.summary.arms}
    answers = [
        (arm, values.get((arm.name, example.key)), records[arm.name]) for arm in run.summary.arms
    ]
    read = [record for arm in deep if (record := records[arm.name]) is not None]
    passages = _passages(read, example.evidence, run.folder.texts)
    masses = [one.mass or 0.0 for record in read for one in record.passages]
    ids = {one.id for record in read for one in record.passages}
    measured = [one.arm for one in read if any(p.mass is not None for p in one.passages)]
    return {
        "example": example,
        "why": why,
        "answers": [one for one in answers if one[0] in deep],
        "more_answers": [one for one in answers if one[0] not in deep],
        "passages": [one for one in passages if one["rank"] <= PASSAGES or one["evidence"]],
        "in_all": len(passages),
        "widest": max(masses, default=0.0) or 1.0,
        "measured": measured,
        "unmeasured": [one.arm for one in read if one.passages and one.arm not in measured],
        "missed": sorted(example.evidence - ids) if ids else [],
    }


def _passages(
    records: Sequence[Record], evidence: frozenset[str], texts: Mapping[str, str]
) -> list[dict[str, Any]]:
    """All that the arms read for one question, in the order of the ranking."""
    order: dict[tuple[str, str | None], dict[str, ReadPassage]] = {}
    for record in sorted(records, key=lambda one: -len(one.passages)):
        for read in record.passages:
            order.setdefault((read.text, read.id), {})[record.arm] = read
    found = []
    for rank, ((digest, key), reads) in enumerate(order.items(), start=1):
        spans = next((one.spans for one in reads.values() if one.spans), ())
        masses = [one.mass for one in reads.values() if one.mass is not None]
        found.append(
            {
                "rank": rank,
                "evidence": key in evidence,
                "reads": reads,
                "everywhere": len(reads) == len(records),
                "mass": sum(masses) / len(masses) if masses else 0.0,
                "text": texts.get(digest),
                "windows": len(spans),
                "segments": list(segments(texts.get(digest, "")[:TEXT], spans)),
            }
        )
    return found


def segments(text: str, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[str, int | None]]:
    """Cut a text into its windows, by their numbers from 1, and what no window held (None).

    Spans are characters, end exclusive; where two overlap, the first one counts.
    """
    done = 0
    for number, (start, end) in enumerate(spans, start=1):
        start, end = max(start, done), min(end, len(text))
        if start < end:
            if done < start:
                yield text[done:start], None
            yield text[start:end], number
            done = end
    if done < len(text):
        yield text[done:], None
