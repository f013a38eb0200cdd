"""A report's parts, put together once for HTML and Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rag_windows.evaluation.report.choosing import HOW
from rag_windows.evaluation.report.drawing import Chart
from rag_windows.evaluation.report.examples import ExampleView, about_values, examples
from rag_windows.evaluation.report.pictures import Absent, pictures
from rag_windows.evaluation.report.reported import ReportedRun
from rag_windows.evaluation.report.sentences import Verdict, counters, verdicts
from rag_windows.evaluation.report.settings import Settings, settings
from rag_windows.evaluation.report.shown import name
from rag_windows.evaluation.report.tables import Table, all_of, overview

EXAMPLES = 10
"""Questions of a report in all; several runs share them."""

_SEVERAL = 2
_FIRST = 2
"""Tables before the charts: quality, and the main metric against the base."""

READING = (
    (
        "Intervals",
        "A 95% interval comes from a paired bootstrap: whole conversations are drawn again, with "
        "replacement, since the questions of one conversation are no independent evidence. A wide "
        "interval says that there are too few questions to tell.",
    ),
    (
        "Kept",
        "An arm's figure in percent of its base's on the same questions. 100% is as good as the "
        "base; more is better.",
    ),
    (
        "p",
        "The chance of a difference at least as large if both arms answered equally well, from a "
        "paired permutation test that exchanges the two arms for whole conversations. p (Holm) is "
        "corrected for all comparisons of the run; below 0.05 a difference is called shown. “No "
        "difference shown” doesn't say that there is none: read the interval.",
    ),
    (
        "Retrieval",
        "Which part of the evidence is among the passages. A reader can't use what the retriever "
        "doesn't find, so the same retrieval stands beside every arm of a depth.",
    ),
    (
        "Attention",
        "The share of the attention of the answer's tokens that went to a passage, averaged over "
        "layers and heads. It shows where a model looked, not why it answered as it did.",
    ),
    (
        "Which questions count",
        "All figures are of the questions that every arm of the run has a record of. An error "
        "counts as an empty answer.",
    ),
)
"""What the figures are, by headings."""


@dataclass(frozen=True, slots=True)
class Part:
    """One run's part of a report.

    Attributes:
        anchor: id of its section.
        title: its heading.
        settings: what was run.
        verdicts: a sentence an arm, of the most passages.
        more_verdicts: likewise, of fewer.
        counters: what went otherwise than wished.
        first_tables: what a reader wants first.
        tables: the others.
        pictures: charts, and what is said where there is none.
        examples: questions.
        how: the questions were chosen, and what stands beside the answers.
    """

    anchor: str
    title: str
    settings: Settings
    verdicts: tuple[Verdict, ...]
    more_verdicts: tuple[Verdict, ...]
    counters: tuple[str, ...]
    first_tables: tuple[Table, ...]
    tables: tuple[Table, ...]
    pictures: tuple[Chart | Absent, ...]
    examples: tuple[ExampleView, ...]
    how: str


def parts(runs: Sequence[ReportedRun]) -> list[Part]:
    """Everything that a report says, as plain text and charts.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    shares = [EXAMPLES // len(runs) + (place < EXAMPLES % len(runs)) for place in range(len(runs))]
    return [
        _part(run, place, max(2, share))
        for place, (run, share) in enumerate(zip(runs, shares, strict=True), start=1)
    ]


def across(runs: Sequence[ReportedRun], made: Sequence[Part]) -> Table | None:
    """All runs in one table; None of a single run."""
    if len(runs) < _SEVERAL:
        return None
    titles = [part.title for part in made]
    return overview(list(zip(titles, (run.summary for run in runs), strict=True)))


def _part(run: ReportedRun, place: int, count: int) -> Part:
    summary = run.summary
    anchor = f"run{place}"
    found = examples(run, count)
    if found:
        how = f"{HOW} {about_values(run)}"
    elif summary.examples and not run.examples:
        how = (
            "The dataset's own file is not at hand, so no question can be shown: name it with "
            "--data when the report is written."
        )
    else:
        how = "There is no question to show."
    tables = tuple(all_of(summary))
    said = verdicts(summary)
    return Part(
        anchor=anchor,
        title=name(run.title) or f"Run {place}",
        settings=settings(run),
        verdicts=tuple(one for one in said if one.deepest),
        more_verdicts=tuple(one for one in said if not one.deepest),
        counters=tuple(counters(summary)),
        first_tables=tables[:_FIRST],
        tables=tables[_FIRST:],
        pictures=tuple(pictures(summary, anchor)),
        examples=tuple(found),
        how=how,
    )
