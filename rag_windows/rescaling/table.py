"""All methods as a table, made from their classes."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

from rag_windows.rescaling.base import Method
from rag_windows.rescaling.description import describe
from rag_windows.rescaling.registry import METHODS


@dataclass(frozen=True, slots=True)
class MethodRow:
    """What a user sees of a method.

    Attributes:
        name: as `resolve` takes it.
        formula: what it changes.
        summary: first line of its docstring, without markup.
        parameters: its parameters with their defaults, as JSON.
        paper: as the class names it.
    """

    name: str
    formula: str
    summary: str
    parameters: dict[str, Any]
    paper: str

    @property
    def papers(self) -> list[str]:
        """The papers' arXiv numbers."""
        return re.findall(r"arXiv:([\w.]+)", self.paper)

    @property
    def settings(self) -> str:
        """The parameters in one line, as ``name=value``; empty without any."""
        return ", ".join(f"{key}={_shown(value)}" for key, value in self.parameters.items())


def method_rows() -> list[MethodRow]:
    """One row a method, in the order of the registry."""
    return [_row(kind) for kind in METHODS.values()]


def markdown_table() -> str:
    """The rows as a Markdown table, papers as links."""
    lines = ["| method | what it is | formula | parameters | paper |", "|---|---|---|---|---|"]
    for row in method_rows():
        cells = (
            f"`{row.name}`",
            row.summary,
            f"`{row.formula}`",
            f"`{row.settings}`" if row.parameters else "-",
            ", ".join(f"[{paper}](https://arxiv.org/abs/{paper})" for paper in row.papers) or "-",
        )
        # A bar inside a cell would end it, in code as well.
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _row(kind: type[Method]) -> MethodRow:
    parameters = describe(kind())
    del parameters["name"]
    summary = (inspect.getdoc(kind) or "").partition("\n")[0].replace("``", "")
    return MethodRow(kind.name, kind.formula, summary, parameters, kind.paper)


def _shown(value: Any) -> str:
    return str(value["name"]) if isinstance(value, dict) else str(value)
