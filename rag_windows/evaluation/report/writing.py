"""report.html and report.md."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from rag_windows import __version__
from rag_windows.errors import InputError
from rag_windows.evaluation.data.writing import write_whole
from rag_windows.evaluation.report.markdown import markdown
from rag_windows.evaluation.report.page import READING, Part, across, parts
from rag_windows.evaluation.report.reported import ReportedRun
from rag_windows.evaluation.report.shown import listed, name
from rag_windows.evaluation.report.tables import Table

HTML, MARKDOWN = "report.html", "report.md"


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
    made = parts(runs)
    title = "Evaluation: " + listed(list(dict.fromkeys(name(one.summary.task) for one in runs)))
    together = across(runs, made)
    page, text = html(title, made, together), markdown(title, made, together)
    paths = Path(folder) / HTML, Path(folder) / MARKDOWN
    write_whole(paths[0], page)
    write_whole(paths[1], text)
    return paths


def html(title: str, made: Sequence[Part], together: Table | None = None) -> str:
    """The page; every text is escaped but for the package's own charts and style sheet."""
    environment = Environment(
        loader=PackageLoader("rag_windows.evaluation.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    css = files("rag_windows.evaluation.report").joinpath("templates/page.css")
    return environment.get_template("page.html").render(
        title=title,
        version=__version__,
        parts=made,
        together=together,
        reading=READING,
        css=css.read_text(encoding="utf-8"),
    )
