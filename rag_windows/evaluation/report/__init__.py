"""The report of a run: one HTML file that needs nothing else, and the same tables as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from rag_windows import __version__
from rag_windows.errors import InputError
from rag_windows.evaluation.files import write_whole
from rag_windows.evaluation.report.charts import Chart, charts
from rag_windows.evaluation.report.questions import HOW, OPEN, Question, ReportedRun, questions
from rag_windows.evaluation.report.tables import (
    Table,
    Verdict,
    overview,
    tables,
    troubles,
    verdicts,
)
from rag_windows.evaluation.report.text import escaped, listed, metric_name, name, shown, some
from rag_windows.evaluation.run import RECORDS, REPORTS, RunFolder
from rag_windows.evaluation.summary import Summary
from rag_windows.evaluation.task import Task

__all__ = ["ReportedRun", "reported", "write_report"]

QUESTIONS = 10
"""Questions of a report in all; several runs share them."""

_SETTINGS = 20_000
"""Characters of settings and of a command that are shown."""

READING = {
    "Intervals": "A 95% interval comes from a paired bootstrap: whole conversations are drawn "
    "again, with replacement, since the questions of one conversation are no independent evidence. "
    "A wide interval says that there are too few questions to tell.",
    "Kept": "An arm's figure in percent of its base's on the same questions. 100% is as good as "
    "the base; more is better.",
    "p": "The chance of a difference at least as large if both arms answered equally well, from a "
    "paired permutation test that exchanges the two arms for whole conversations. p (Holm) is "
    "corrected for all comparisons of the run; below 0.05 a difference is called shown. “No "
    "difference shown” doesn't say that there is none: read the interval.",
    "Retrieval": "Which part of the evidence is among the passages. A reader can't use what the "
    "retriever doesn't find, so the same retrieval stands beside every arm of a depth.",
    "Attention": "The share of the attention of the answer's tokens that went to a passage, "
    "averaged over layers and heads. It shows where a model looked, not why it answered as it did.",
    "Which questions count": "All figures are of the questions that every arm of the run has a "
    "record of. An error counts as an empty answer.",
}
"""What the figures are, by headings."""


@dataclass(frozen=True, slots=True)
class Part:
    """One run's part of a report.

    Attributes:
        anchor: id of its section.
        title: its heading.
        head: what was run, names with values.
        settings: all of them, as JSON.
        command: that made the run; empty where it is not known.
        verdicts: a sentence an arm.
        troubles: what went otherwise than wished.
        tables: quality, the main metric against the base, and the others.
        charts: and what is said where there is none.
        questions: with answers and passages.
        how: the questions were chosen, and what stands beside the answers.
    """

    anchor: str
    title: str
    head: tuple[tuple[str, str], ...]
    settings: str
    command: str
    verdicts: tuple[Verdict, ...]
    troubles: tuple[str, ...]
    tables: tuple[Table, ...]
    charts: tuple[Chart, ...]
    questions: tuple[Question, ...]
    how: str


def reported(task: Task, folder: RunFolder, summary: Summary, *, command: str = "") -> ReportedRun:
    """What a report of a run is written from; one that is not finished will do.

    Args:
        task: that the run asks.
        folder: of the run.
        summary: of the run.
        command: that made the run, to be shown.
    """
    names = [arm.name for arm in folder.manifest.arms]
    records = {(arm, key): record for arm in names for key, record in folder.records(arm).items()}
    written, date = folder.path / RECORDS, ""
    if written.is_file():
        changed = datetime.fromtimestamp(written.stat().st_mtime, UTC)
        date = changed.strftime("%Y-%m-%d %H:%M UTC")
    metric, values = values_of(task, names, records)
    return ReportedRun(
        settings=folder.manifest.settings,
        summary=summary,
        examples=task.examples,
        records=records,
        texts=folder.texts,
        metric=metric,
        values=values,
        made_with=folder.manifest.made_with,
        date=date,
        command=command,
        title=folder.path.name,
    )


def values_of(
    task: Task, arms: Sequence[str], records: Mapping[tuple[str, str], Any]
) -> tuple[str, dict[tuple[str, str], float]]:
    """The first metric that judges single answers, with its value for every answer there is."""
    found: dict[str, dict[tuple[str, str], float]] = {metric: {} for metric in task.metrics}
    for arm in arms:
        if asked := [one for one in task.examples if (arm, one.key) in records]:
            for score in task.scores(asked, [records[arm, one.key] for one in asked]):
                for example, value in zip(asked, score.values, strict=True):
                    if value is not None:
                        found[score.name][arm, example.key] = value
    return next(((metric, one) for metric, one in found.items() if one), ("", {}))


def write_report(runs: Sequence[ReportedRun], folder: str | Path) -> tuple[Path, Path]:
    """Write a report of one run or of several.

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
    shares = [QUESTIONS // len(runs) + (n < QUESTIONS % len(runs)) for n in range(len(runs))]
    parts = [_part(run, n, max(2, shares[n - 1])) for n, run in enumerate(runs, start=1)]
    title = f"Evaluation: {listed(list(dict.fromkeys(name(one.summary.task) for one in runs)))}"
    together = None
    if len(runs) > 1:
        together = overview([(p.title, run.summary) for p, run in zip(parts, runs, strict=True)])
    page, text = _html(title, parts, together), "\n".join(_markdown(title, parts, together))
    html, markdown = (Path(folder) / one for one in REPORTS)
    write_whole(html, page)
    write_whole(markdown, text + "\n")
    return html, markdown


def _part(run: ReportedRun, place: int, count: int) -> Part:
    summary, anchor = run.summary, f"run{place}"
    if run.examples:
        beside = "No metric of this dataset judges single answers, so none stands beside them."
        if run.metric:
            beside = f"Beside each answer stands its {metric_name(run.metric)}, percent."
        how = f"{HOW} {beside}"
    else:
        how = "There is no question to show."
    return Part(
        anchor=anchor,
        title=name(run.title) or f"Run {place}",
        head=tuple((label, name(value, 400)) for label, value in _head(run) if value),
        settings=json.dumps(run.settings, indent=1, ensure_ascii=False, default=str),
        command=run.command,
        verdicts=tuple(verdicts(summary)),
        troubles=tuple(troubles(summary)),
        tables=tuple(tables(summary)),
        charts=tuple(charts(summary, anchor)),
        questions=tuple(questions(run, count)),
        how=how,
    )


def _head(run: ReportedRun) -> Iterator[tuple[str, str]]:
    held, summary = run.settings, run.summary
    count = f"{summary.compared:,}"
    if summary.compared != summary.examples:
        count += f" of {summary.examples:,}"
    if summary.groups < summary.compared:
        turns = any(len(one.messages) > 1 for one in run.examples)
        count += f", from {some(summary.groups, 'conversation' if turns else 'group')}"
    model = held.get("model") or {}
    weights = model.get("sha256") and f"weights {model['sha256'][:12]}"
    details = ", ".join(one for one in (model.get("dtype"), weights) if one)
    tokens = held.get("max_new_tokens")
    yield "task", summary.task
    yield "questions", count
    yield "model", _words(model.get("name")) + (f" ({details})" if details else "")
    yield "arms", ", ".join(arm.name for arm in summary.arms)
    yield "retriever", _words(held.get("retriever"))
    yield "longest answer", f"{tokens} tokens" if tokens is not None else ""
    yield "seed", _words(held.get("seed"))
    yield "last answer", run.date
    # Machine and versions; of a run that went on elsewhere, all of them.
    labels = dict.fromkeys(label for one in run.made_with for label in one)
    for label in sorted(labels, key=lambda one: one != "machine"):
        values = dict.fromkeys(_words(one.get(label)) for one in run.made_with)
        yield label, "; then ".join(values)


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        told = ((key, _words(entry)) for key, entry in value.items())
        return ", ".join(f"{key} {words}" for key, words in told if words)
    return "" if value is None else str(value)


def _html(title: str, parts: Sequence[Part], together: Table | None) -> str:
    """The page; every text is escaped but for the package's own charts and style sheet."""
    environment = Environment(
        loader=PackageLoader("rag_windows.evaluation.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"shown": shown, "name": name, "some": some}
    css = files("rag_windows.evaluation.report").joinpath("templates/page.css")
    return environment.get_template("page.html").render(
        title=title,
        version=__version__,
        parts=parts,
        together=together,
        reading=READING,
        open=OPEN,
        settings_length=_SETTINGS,
        css=css.read_text(encoding="utf-8"),
    )


def _markdown(title: str, parts: Sequence[Part], together: Table | None) -> Iterator[str]:
    """The same sentences and tables; charts and passages are in the HTML."""
    yield f"# {escaped(title)}\n"
    yield from _table(together) if together else ()
    for part in parts:
        if len(parts) > 1:
            yield f"## {escaped(part.title)}\n"
        for label, value in part.head:
            yield f"- {label}: {escaped(value)}"
        yield ""
        for verdict in sorted(part.verdicts, key=lambda one: not one.deepest):
            yield f"- {escaped(verdict.text)}"
        yield ""
        if part.troubles:
            yield "To be known:\n"
            yield from (f"- {escaped(one)}" for one in part.troubles)
            yield ""
        for table in part.tables:
            yield from _table(table)
        for chart in part.charts:
            told = "See report.html." if chart.svg else escaped(chart.about)
            yield f"- {escaped(chart.title)}: {told}"
        yield ""
        if part.questions:
            yield "Questions; their passages and the attention on them are in report.html:\n"
        for question in part.questions:
            yield f"- {escaped(name(question.example.question, 160))} ({escaped(question.why)})"
            for reference in question.example.references[:2]:
                yield f"  - right: {_beginning(reference.text)}"
            for answer in question.answers:
                yield f"  - {escaped(answer.arm)}, {answer.score}: {_beginning(answer.text)}"
        yield f"\n{escaped(part.how)}\n"
        if part.command:
            # An indented block ends at no mark that its text may hold.
            yield "To do it again:\n"
            yield from (f"    {line}" for line in shown(part.command, _SETTINGS).text.splitlines())
            yield ""
    yield "## How to read this\n"
    yield from (f"- **{head}**: {escaped(words)}" for head, words in READING.items())


def _table(table: Table) -> Iterator[str]:
    yield f"**{escaped(table.caption)}**\n"
    yield f"{table.markdown()}\n"
    if table.note:
        yield f"{escaped(table.note)}\n"


def _beginning(text: str) -> str:
    """The beginning of a text; the whole is in the HTML."""
    plain = " ".join(text.split())
    return escaped(plain if len(plain) <= 300 else f"{plain[:300]} …") or "(empty)"
