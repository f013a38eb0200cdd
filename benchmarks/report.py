"""Write the tables of measured runs into the documents.

    rag-windows bench --context 8192 --out docs/performance/8k
    python benchmarks/report.py [FOLDER]

A document holds, where the table of ``docs/performance/8k/performance.json`` belongs, the lines
``<!-- bench: 8k -->`` and ``<!-- /bench -->``: what stands between them is replaced. README gets
the short table. Runs that are not there leave what stands.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from pydantic import TypeAdapter

from rag_windows.benchmark.result import Result, markdown, summary

DOCUMENTS: dict[str, Callable[[Result], str]] = {
    "README.md": summary,
    "docs/performance.md": markdown,
}
_BLOCK = re.compile(r"(<!-- bench: (\S+) -->\n)(.*?)(<!-- /bench -->)", re.DOTALL)


def read(path: Path) -> Result:
    """One run.

    Raises:
        pydantic.ValidationError: the file is of another format.
    """
    return TypeAdapter(Result).validate_json(path.read_bytes())


def filled(text: str, runs: Path, render: Callable[[Result], str]) -> str:
    """A document with the tables of the runs in a folder."""

    def block(found: re.Match[str]) -> str:
        run = runs / found[2] / "performance.json"
        inside = render(read(run)).strip("\n") + "\n" if run.is_file() else found[3]
        return f"{found[1]}{inside}{found[4]}"

    return _BLOCK.sub(block, text)


def main(root: Path) -> None:
    """Fill every document of a checkout."""
    for name, render in DOCUMENTS.items():
        path = root / name
        before = path.read_text(encoding="utf-8")
        after = filled(before, root / "docs" / "performance", render)
        path.write_text(after, encoding="utf-8")
        print(f"{name}: {'written' if after != before else 'nothing new'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1])
