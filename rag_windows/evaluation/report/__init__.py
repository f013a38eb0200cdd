"""The report of a run: one HTML file that needs nothing else, and the same tables as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rag_windows import __version__
from rag_windows.evaluation.files import write_whole
from rag_windows.evaluation.report.charts import charts
from rag_windows.evaluation.report.tables import WORDS, deepest, overview, rendered, tables, verdict
from rag_windows.evaluation.run import RECORDS, REPORTS, RunFolder
from rag_windows.evaluation.summary import Summary
from rag_windows.evaluation.task import ReadPassage, Record, Task, digest_of

QUESTIONS = 10
"""Questions of a report in all; several runs share them."""

PASSAGES = 40
"""Passages of one question that are shown, and beside them those that a right answer rests on."""

TEXT = 2000
"""Characters of a passage, a message or an answer that are shown."""


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """One run; its ``command`` is shown, if it is known."""

    task: Task
    folder: RunFolder
    summary: Summary
    command: str = ""


def write_report(runs: Sequence[ReportedRun], folder: str | Path) -> tuple[Path, Path]:
    """Write a report of one run or of several, finished or not; gives its two paths.

    The HTML file holds all that it shows: it asks for no other file and runs no script.
    """
    count = max(2, QUESTIONS // len(runs))
    page = {
        "parts": [_part(run, f"run{place}", count) for place, run in enumerate(runs, start=1)],
        "together": overview([one.summary for one in runs]) if len(runs) > 1 else None,
        "version": __version__,
        "longest": TEXT,
        "words": WORDS,
    }
    css = files("rag_windows.evaluation.report").joinpath("templates/page.css")
    html, markdown = (Path(folder) / one for one in REPORTS)
    write_whole(html, rendered("page.html", css=css.read_text(encoding="utf-8"), **page))
    write_whole(markdown, rendered("page.md", **page) + "\n")
    return html, markdown


def _part(run: ReportedRun, anchor: str, count: int) -> dict[str, Any]:
    """What the templates show of one run."""
    summary, manifest = run.summary, run.folder.manifest
    bases = {arm.base for arm in summary.arms}
    metric, values = _values(run)
    records = run.folder.path / RECORDS
    changed = datetime.fromtimestamp(records.stat().st_mtime, UTC) if records.exists() else None
    # Machine and versions; of a run that went on elsewhere, all of them.
    made_with = pd.DataFrame(list(manifest.made_with), dtype=str).fillna("")
    return {
        "anchor": anchor,
        "title": run.folder.path.name,
        "manifest": manifest.settings,
        "settings": json.dumps(manifest.settings, indent=1, ensure_ascii=False),
        "changed": changed,
        "made_with": {label: "; then ".join(made_with[label].unique()) for label in made_with},
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


def _values(run: ReportedRun) -> tuple[str, pd.DataFrame]:
    """The first metric that judges single answers, and its values by place and arm."""
    examples, arms = run.task.examples, [arm.name for arm in run.summary.arms]
    found = {
        one: pd.DataFrame(index=range(len(examples)), columns=arms, dtype=float)
        for one in run.task.metrics
    }
    for arm in arms:
        records = run.folder.records(arm)
        places = [place for place, one in enumerate(examples) if one.key in records]
        asked = [examples[place] for place in places]
        for score in run.task.scores(asked, [records[one.key] for one in asked]) if asked else ():
            found[score.name].loc[places, arm] = np.array(score.values, dtype=float)
    judging = [metric for metric, one in found.items() if one.notna().any(axis=None)]
    return (judging or [""])[0], found[(judging or list(found))[0]]


def _chosen(run: ReportedRun, values: pd.DataFrame, count: int) -> list[tuple[int, str]]:
    """Places of questions, and why: a third largest gains, a third largest losses, some by chance.

    Without a base they are the best and the worst answers. Those that lack an answer come last.
    """
    arms, keys = deepest(run.summary), [one.key for one in run.task.examples]
    records = [[run.folder.records(arm.name).get(key) for arm in arms] for key in keys]
    whole = [all(one is not None and one.error is None for one in found) for found in records]
    compared = [arm for arm in arms if arm.base]
    changes = pd.DataFrame(
        {arm.name: values[arm.name] - values[arm.base] for arm in compared}
        or {arm.name: values[arm.name] for arm in arms}
    )
    points = changes[whole].stack().dropna()
    bases = {arm.name: arm.base for arm in compared}
    taken: dict[int, str] = {}
    for kind, sign, most in (("gain", 1, count // 3), ("loss", -1, 2 * (count // 3))):
        for (place, arm), value in points.sort_values(ascending=sign < 0, kind="stable").items():
            if len(taken) < most and place not in taken and (value * sign > 0 or not compared):
                taken[place] = f"{arm} has {value:.1f}"
                if compared:
                    taken[place] = f"{kind}: {arm} {value:+.1f} points against {bases[arm]}"
    digests = [digest_of(key) for key in keys]
    for place in sorted(range(len(keys)), key=lambda one: (not whole[one], digests[one])):
        if len(taken) < count:
            taken.setdefault(place, "drawn at random")
    return list(taken.items())


def _question(run: ReportedRun, values: pd.DataFrame, place: int, why: str) -> dict[str, Any]:
    """One question with its answers, and the passages that arms read, in the ranking's order."""
    example, deep = run.task.examples[place], deepest(run.summary)
    answers = [
        (arm, values.loc[place, arm.name], run.folder.records(arm.name).get(example.key))
        for arm in run.summary.arms
    ]
    records = [record for arm, _, record in answers if record is not None and arm in deep]
    order: dict[tuple[str, str | None], dict[str, ReadPassage]] = {}
    for record in sorted(records, key=_depth):
        for read in record.passages:
            order.setdefault((read.text, read.id), {})[record.arm] = read
    passages = []
    for rank, ((digest, key), reads) in enumerate(order.items(), start=1):
        if rank > PASSAGES and key not in example.evidence:
            continue
        spans = next((one.spans for one in reads.values() if one.spans), ())
        text = run.folder.texts.get(digest)
        passage = {
            "rank": rank,
            "evidence": key in example.evidence,
            "reads": reads,
            "mass": pd.Series([one.mass for one in reads.values()], dtype=float).mean(),
            "text": text,
            "windows": len(spans),
            "segments": list(segments((text or "")[:TEXT], spans)),
        }
        passages.append(passage)
    masses = {one.arm: [read.mass for read in one.passages] for one in records if one.passages}
    measured = [arm for arm, found in masses.items() if any(one is not None for one in found)]
    return {
        "example": example,
        "why": why,
        "answers": [one for one in answers if one[0] in deep],
        "more_answers": [one for one in answers if one[0] not in deep],
        "passages": passages,
        "in_all": len(order),
        "asked": len(records),
        "widest": max((one or 0.0 for found in masses.values() for one in found), default=0) or 1,
        "measured": measured,
        "unmeasured": [arm for arm in masses if arm not in measured],
        "missed": sorted(example.evidence - {key for _, key in order}) if order else [],
    }


def _depth(record: Record) -> int:
    return -len(record.passages)


def segments(text: str, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[str, int | None]]:
    """Cut a text into its windows, by their numbers from 1, and what no window held (None).

    Spans are characters, end exclusive; where two overlap, the first one counts.
    """
    done = 0
    for number, (start, end) in enumerate(spans, start=1):
        yield text[done:start], None
        yield text[max(start, done) : end], number
        done = max(done, end)
    yield text[done:], None
