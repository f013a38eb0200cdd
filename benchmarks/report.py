"""Write the tables of measured runs into the documents.

    rag-windows bench --context 8192 --out benchmarks/results/performance/8k
    python benchmarks/report.py [FOLDER]

Where the table of ``benchmarks/results/performance/8k/performance.json`` belongs, a document holds
the lines ``<!-- bench: 8k -->`` and ``<!-- /bench -->``; what is between them is replaced. A run
that is not there leaves what stands. ``benchmarks/gpu_report.py`` fills the block ``gpu``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from rag_windows_eval.benchmark.result import Result, markdown, summary

RUNS = Path("benchmarks", "results", "performance")
DOCUMENTS = {
    "README.md": "short",
    "docs/results.md": "short",
    "benchmarks/results/performance.md": "whole",
}
"""By its path in a checkout, which form of a table a document gets."""
_BLOCK = re.compile(r"(<!-- bench: (\S+) -->\n)(.*?)(<!-- /bench -->)", re.DOTALL)


def read(path: Path) -> Result:
    """One run.

    Raises:
        pydantic.ValidationError: the file is of another format.
    """
    return TypeAdapter(Result).validate_json(path.read_bytes())


def of_runs(root: Path, form: str, name: str) -> str | None:
    """The table of a run of a checkout; None where there is no such run."""
    run = root / RUNS / name / "performance.json"
    return {"short": summary, "whole": markdown}[form](read(run)) if run.is_file() else None


def filled(text: str, table: Callable[[str], str | None]) -> str:
    """A text with the tables of the blocks whose names `table` knows; others stay as they are."""

    def block(found: re.Match[str]) -> str:
        made = table(found[2])
        return found[0] if made is None else found[1] + made.strip("\n") + "\n" + found[4]

    return _BLOCK.sub(block, text)


def fill(root: Path, table: Callable[[str, str], str | None]) -> None:
    """Fill every document of a checkout; `table` makes a table of its form and its name."""
    for document, form in DOCUMENTS.items():
        path = root / document
        before = path.read_text(encoding="utf-8")
        after = filled(before, partial(table, form))
        path.write_text(after, encoding="utf-8")
        print(f"{document}: {'written' if after != before else 'nothing new'}")


def main(root: Path) -> None:
    """Fill in the runs of a checkout."""
    fill(root, partial(of_runs, root))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1])
