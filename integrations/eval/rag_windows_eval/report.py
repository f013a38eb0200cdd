"""The report of a run: one HTML file that needs nothing else, and the same tables as Markdown."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rag_windows import __version__
from rag_windows.visible_text import one_line, visible
from rag_windows_eval.files import write_whole
from rag_windows_eval.run import REPORTS, RunFolder
from rag_windows_eval.summary import Estimate, Summary, means
from rag_windows_eval.task import ReadPassage, Task, digest_of

# Text, figures and tables.

_NO_CHARACTERS = re.compile("[\ufdd0-\ufdef\ufffe\uffff]")
# What begins anything in Markdown inside a line, or at its start; an address becomes a link by
# itself. An underscore between letters or digits begins nothing.
_MARKS = re.compile(
    r"[\\`*\[\]|~$!#]|(?<![^\W_])_|_(?![^\W_])|^[-+=]|(?<=^\d)[.)](?=\s|$)|:(?=//)|(?<=www)\.",
    re.I,
)
_WORDS = {"f1": "F1", "bleu": "BLEU", "chatrag": "ChatRAG"}


def escaped(text: str) -> str:
    """Text on one line, escaped for Markdown and HTML."""
    # An entity is text to every Markdown dialect; a backslash before "<" is not.
    plain = html.escape(harmless(one_line(text)), quote=False)
    return _MARKS.sub(lambda match: "\\" + match[0], " ".join(plain.split()))


def harmless(text: str) -> str:
    """Spell out control characters, and replace what XML can't hold."""
    return visible(_NO_CHARACTERS.sub("\ufffd", text))


def name(text: str, longest: int = 120) -> str:
    """A foreign name on one line; a long one ends in an ellipsis."""
    cut = harmless(one_line(text[: 4 * longest]))
    return cut if len(cut) <= longest else cut[: longest - 1] + "…"


def metric_name(metric: str) -> str:
    """A metric's name in words, such as "response F1" for "response_f1"."""
    return name(" ".join(_WORDS.get(word, word) for word in metric.split("_")))


def number(value: float | None, digits: int = 1) -> str:
    """A number with fixed digits; a dash for a missing one."""
    if value is None or not math.isfinite(value):
        return "–"
    # No "-0.0"; and a hyphen would begin a list in Markdown.
    return f"{round(value, digits) + 0.0:,.{digits}f}".replace("-", "−")


def figure(estimate: Estimate) -> str:
    """A value with its interval, such as "98.1 (95.2 to 101.3)"."""
    inside = f" ({number(estimate.low)} to {number(estimate.high)})" if estimate.bounded else ""
    return number(estimate.value) + inside


def chance(value: float) -> str:
    """A p-value."""
    return "< 0.001" if value < 0.001 else number(value, 3)


def share(value: float | None) -> str:
    """A share from 0 to 1 in percent."""
    return "–" if value is None else f"{number(100 * value)}%"


def some(count: int, noun: str) -> str:
    """A number with its noun."""
    return f"{count:,} {noun if count == 1 else noun + 's'}"


def rendered(template: str, **values: Any) -> str:
    """A template filled in, with every value escaped for HTML, or for Markdown in an ".md"."""
    made = Environment(
        loader=PackageLoader("rag_windows_eval"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_in_markdown if template.endswith(".md") else _in_html,
    )
    filters = (figure, metric_name, name, number, share, some)
    made.filters |= {one.__name__: one for one in filters}
    made.globals["zip"] = zip
    return made.get_template(template).render(**values)


def _in_html(value: Any) -> Any:
    # Jinja escapes what is no Markup.
    return value if isinstance(value, Markup) else harmless(str(value))


def _in_markdown(value: Any) -> Markup:
    return value if isinstance(value, Markup) else Markup(escaped(str(value)))  # noqa: S704 - escaped


WORDS = frozenset({"condition", "base", "evidence", "kind"})
"""Columns that hold words; the others hold figures."""

_TIMES = {"encoding, s": "encode_s", "first token, s": "ttft_s", "answer, s": "total_s"}


@dataclass(frozen=True, slots=True, eq=False)
class ReportTable:
    """A table of strings; its kind selects the caption, and the page shows a folded one closed."""

    kind: str
    frame: pd.DataFrame
    metric: str = ""
    folded: bool = False
    most: int | None = None
    """In Markdown, which does not scroll: the most columns after the first one."""

    @property
    def markdown(self) -> Markup:
        """The table in Markdown, aligned as plain text, too; foreign names are escaped."""
        first, *others = self.frame.columns
        most = self.most or len(others)
        pieces = [[first, *others[at : at + most]] for at in range(0, len(others), most)]
        return Markup("\n\n").join(self._markdown(columns) for columns in pieces)

    def _markdown(self, columns: list[str]) -> Markup:
        sides = ["left" if head in WORDS else "right" for head in columns]
        frame = self.frame[columns].map(name).map(escaped).rename(columns=escaped)
        made = frame.to_markdown(index=False, disable_numparse=True, colalign=sides)
        return Markup(made)  # noqa: S704 - escaped above


def tables(summary: Summary) -> Iterator[ReportTable]:
    """Every table, in the order of a report."""
    conditions = summary["arms"]
    if summary["compared"]:
        yield ReportTable("quality", _quality(summary))
        for place, metric in enumerate(summary["metrics"]):
            rows = [_row(one["name"], one["results"][place]) for one in conditions]
            frame = pd.DataFrame([row for row in rows if row["base"]])
            if len(frame):
                yield ReportTable("base", frame.drop(columns="value, %"), metric, folded=place > 0)
        for kind, parts in (("kind", "kinds"), ("evidence", "retrieval")):
            found = [
                {kind: part["label"]} | _row(condition["name"], part["results"][0])
                for condition in conditions
                for part in condition[parts]
            ]
            if found:
                frame = pd.DataFrame(found).sort_values(kind, kind="stable")
                columns = [kind, "condition", "value, %", "retention, %", "n"]
                yield ReportTable(
                    kind, frame[columns], summary["metrics"][0], folded=len(frame) > 8
                )
    work = [
        {"condition": condition["name"]}
        | {head.replace("_", " "): f"{count:,}" for head, count in condition["counters"].items()}
        | {head: number((condition["times"] or {}).get(field), 3) for head, field in _TIMES.items()}
        | {f"first token, {one}, s": number(condition[f"{one}_s"], 3) for one in ("cold", "warm")}
        for condition in conditions
    ]
    yield ReportTable("work", pd.DataFrame(work), folded=True)


def _quality(summary: Summary) -> pd.DataFrame:
    rows = [
        {"condition": condition["name"]}
        | {metric_name(one["metric"]): figure(one["estimate"]) for one in condition["results"]}
        for condition in summary["arms"]
    ]
    return pd.DataFrame(rows)


def _row(condition: str, result: Summary) -> dict[str, str]:
    """A result as cells, compared with its base, where it has one."""
    nothing = dict.fromkeys(("difference", "retention"), Estimate(math.nan))
    against = result["against"] or {"base": "", "p": math.nan, "p_holm": math.nan, **nothing}
    return {
        "condition": condition,
        "value, %": figure(result["estimate"]),
        "difference, points": figure(against["difference"]),
        "retention, %": figure(against["retention"]),
        "p": chance(against["p"]),
        "p (Holm)": chance(against["p_holm"]),
        "n": f"{result['n']:,}",
        "base": against["base"],
    }


def overview(runs: Sequence[ReportedRun]) -> Iterator[ReportTable]:
    """All runs side by side: quality, retention, first tokens; a row a condition, a column a run.

    Runs of one kind with the same metric, such as "chatrag/quac" and "chatrag/coqa", have a mean.
    """
    quality, retention, first = (dict[str, dict[str, str]]() for _ in range(3))
    for run, metric, summary in _columns(runs):
        conditions, column = summary["arms"], f"{run}: {metric_name(metric)}"
        # One number of passages needs no mention; the runs of a suite need not have the same.
        whole = len({condition["top_k"] for condition in conditions}) > 1
        for condition in conditions:
            row = condition["name"] if whole else condition["label"]
            result = condition["results"][0] if "results" in condition else condition
            against = result["against"]
            retained = "base" if against is None else figure(against["retention"])
            quality.setdefault(row, {})[column] = figure(result["estimate"])
            retention.setdefault(row, {})[column] = retained
            if "results" in condition:
                seconds = f"{number(condition['cold_s'], 3)} / {number(condition['warm_s'], 3)}"
                first.setdefault(row, {})[run] = seconds
    for kind, rows in (("all", quality), ("retention", retention), ("first", first)):
        if rows:
            frame = pd.DataFrame.from_dict(rows, orient="index").fillna("–")
            yield ReportTable(kind, frame.rename_axis("condition").reset_index(), most=4)


def _columns(runs: Sequence[ReportedRun]) -> Iterator[tuple[str, str, Summary]]:
    """Name, main metric and summary of runs with figures; a mean follows the last of its runs."""
    tasks, behind = [one.summary["task"] for one in runs], _alike(runs)
    for place, run in enumerate(runs):
        if metrics := run.summary["metrics"]:
            numbered = f"{place + 1}. " if tasks.count(tasks[place]) > 1 else ""
            yield f"{numbered}{name(tasks[place])}", metrics[0], run.summary
        if place in behind:
            mean = _mean_of(behind[place])
            sets = f"mean of {some(mean['runs'], 'set')} of {name(mean['kind'])}"
            yield sets, mean["metric"], mean


def means_of(runs: Sequence[ReportedRun]) -> list[Summary]:
    """The means over runs of one kind with the same metric and the same conditions."""
    return [_mean_of(own) for own in _alike(runs).values()]


def _mean_of(runs: Sequence[ReportedRun]) -> Summary:
    found = means([(one.task, one.folder) for one in runs])
    return {"kind": runs[0].summary["task"].partition("/")[0], **found}


def _alike(runs: Sequence[ReportedRun]) -> dict[int, list[ReportedRun]]:
    """Runs that have a mean, by the place of the last of them."""
    tasks = [one.summary["task"] for one in runs]
    kinds: dict[tuple[str, ...], list[int]] = {}
    for place, run in enumerate(runs):
        task, metrics = tasks[place], run.summary["metrics"]
        if "/" in task and metrics and tasks.count(task) == 1:
            conditions = [condition["name"] for condition in run.summary["arms"]]
            kinds.setdefault((task.partition("/")[0], metrics[0], *conditions), []).append(place)
    return {own[-1]: [runs[at] for at in own] for own in kinds.values() if len(own) > 1}


def terminal(summary: Summary) -> str:
    """The quality of a run, as Markdown that is also plain text."""
    shown = [one for one in tables(summary) if one.kind in ("quality", "base") and not one.folded]
    return rendered("terminal.md", summary=summary, tables=shown).strip()


def terminal_of_all(runs: Sequence[ReportedRun], hours: str = "") -> str:
    """Several runs side by side, as Markdown that is also plain text."""
    return rendered("together.md", tables=list(overview(runs)), hours=hours).strip()


# The page.

QUESTIONS = 10
"""Questions of a report in all; several runs share them."""

TEXT = 2000
"""Characters of a passage, a message or an answer that are shown."""


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """One run; its ``command`` is shown, if it is known."""

    task: Task
    folder: RunFolder
    summary: Summary
    command: str = ""


def write_report(
    runs: Sequence[ReportedRun], folder: str | Path, hours: str = ""
) -> tuple[Path, Path]:
    """Write a report of one run or of several, finished or not; gives its two paths.

    ``hours`` are a sentence on how long the runs took.

    The HTML file holds all that it shows: it asks for no other file and runs no script.
    """
    count = max(2, QUESTIONS // len(runs))
    page = {
        "parts": [_part(run, f"run{place}", count) for place, run in enumerate(runs, start=1)],
        "together": list(overview(runs)) if len(runs) > 1 else [],
        "hours": hours,
        "version": __version__,
        "longest": TEXT,
        "words": WORDS,
    }
    css = files("rag_windows_eval").joinpath("templates/page.css")
    html, markdown = (Path(folder) / one for one in REPORTS)
    write_whole(html, rendered("page.html", css=css.read_text(encoding="utf-8"), **page))
    write_whole(markdown, rendered("page.md", **page) + "\n")
    return html, markdown


def _part(run: ReportedRun, anchor: str, count: int) -> dict[str, Any]:
    """What the templates show of one run."""
    summary, manifest = run.summary, run.folder.manifest
    # Machine and versions; of a run that went on elsewhere, all of them.
    made_with = pd.DataFrame(list(manifest.made_with), dtype=str).fillna("")
    values = _values(run)
    return {
        "anchor": anchor,
        "title": run.folder.path.name,
        "manifest": manifest.settings,
        "settings": json.dumps(manifest.settings, indent=1, ensure_ascii=False),
        "made_with": {label: "; then ".join(made_with[label].unique()) for label in made_with},
        "command": run.command,
        "summary": summary,
        "tables": list(tables(summary)),
        "questions": [_question(run, values, place) for place in _chosen(run, values, count)],
    }


def _values(run: ReportedRun) -> pd.DataFrame:
    """The main metric of single answers, by the example's place and the condition."""
    examples, conditions = run.task.examples, [one["name"] for one in run.summary["arms"]]
    found = pd.DataFrame(index=range(len(examples)), columns=conditions, dtype=float)
    for condition in conditions:
        records = run.folder.records[condition]
        places = [place for place, one in enumerate(examples) if one.key in records]
        asked = [examples[place] for place in places]
        if asked:
            main, *_ = run.task.scores(asked, [records[one.key] for one in asked])
            found.loc[places, condition] = main.values
    return found


def _chosen(run: ReportedRun, values: pd.DataFrame, count: int) -> list[int]:
    """Places of the questions whose answers differ most; those that a condition lacks come last."""
    spread = values.max(axis=1, skipna=False) - values.min(axis=1, skipna=False)
    digests = [digest_of(one.key) for one in run.task.examples]
    order = pd.DataFrame({"spread": -spread, "digest": digests}).sort_values(["spread", "digest"])
    return order.index[:count].tolist()


def _question(run: ReportedRun, values: pd.DataFrame, place: int) -> dict[str, Any]:
    """One question with its answers, and the passages that conditions read, in ranking order."""
    example = run.task.examples[place]
    found = {condition: run.folder.records[condition].get(example.key) for condition in values}
    conditions = run.folder.manifest.conditions
    most = max(condition.top_k or 0 for condition in conditions)
    deepest = [found[condition.name] for condition in conditions if (condition.top_k or 0) == most]
    deep = [record for record in deepest if record is not None]
    order: dict[tuple[str, str | None], dict[str, ReadPassage]] = {}
    for record in deep:
        for read in record.passages:
            order.setdefault((read.text, read.id), {})[record.arm] = read
    passages: list[dict[str, Any]] = [
        {
            "evidence": key in example.evidence,
            "reads": reads,
            "mass": max(one.mass or 0.0 for one in reads.values()),
            "text": run.folder.texts.get(digest),
        }
        for (digest, key), reads in order.items()
    ]
    return {
        "example": example,
        "answers": [(name, values.loc[place, name], record) for name, record in found.items()],
        "passages": passages,
        "readers": [record.arm for record in deep],
        "widest": max((one["mass"] for one in passages), default=0.0) or 1.0,
        "missed": sorted(example.evidence - {key for _, key in order}) if order else [],
    }
