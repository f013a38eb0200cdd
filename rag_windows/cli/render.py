"""How answers, passages and timings look in a terminal and in JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rag_windows.cli.errors import tell
from rag_windows.passage import Passage
from rag_windows.prompt.visible_text import one_line, visible

if TYPE_CHECKING:
    from rag_windows.methods.registry import MethodRow
    from rag_windows.passage import Note
    from rag_windows.results import Generation

_BAR = 16
_NAME = 32
_WITH_TEXTS = 72
_WITH_BARS = 36
_EIGHTHS = " ▏▎▍▌▋▊▉"
_PLAIN_WIDTH = 120


def console() -> Console:
    """Standard output, where nothing in a text is taken for markup."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PLAIN_WIDTH
    return Console(width=width, markup=False, highlight=False, emoji=False)


def plain_table(*, expand: bool = False) -> Table:
    """A table without lines."""
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", expand=expand)


def dim(text: str) -> None:
    """Print what stands beside an answer, such as figures."""
    console().print(visible(text), style="dim", soft_wrap=True)


def write_notes(notes: Iterable[str], *, as_json: bool) -> None:
    """Tell notes: on stderr where standard output is JSON."""
    for note in notes:
        if as_json:
            tell(f"Note: {note}")
        else:
            console().print(f"Note: {visible(note)}", style="yellow", soft_wrap=True)


def write_piece(text: str) -> None:
    """Write a piece of an answer as it comes."""
    sys.stdout.write(visible(text))
    sys.stdout.flush()


def write_json(value: Any) -> None:
    """Write one JSON value on one line, in ASCII, so that no terminal or encoding minds."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def answer_object(
    generation: Generation, passages: Sequence[Passage], method: str, model: str
) -> dict[str, Any]:
    """The object that --json prints.

    Args:
        generation: the answer, with citations.
        passages: in the order given to the model.
        method: the method's name.
        model: as asked for.
    """
    masses = _masses(generation, passages)
    return {
        "answer": generation.text,
        "passages": [
            {name: getattr(one, name) for name in ("id", "title", "text", "score")} | {"mass": mass}
            for one, mass in zip(passages, masses, strict=True)
        ],
        "usage": {
            name: getattr(generation.usage, name)
            for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
        },
        "timings": {
            name: getattr(generation.timings, name) for name in ("encode_s", "ttft_s", "total_s")
        },
        "method": method,
        "model": model,
        "fallback": None if generation.fallback is None else generation.fallback.as_dict(),
    }


def show_passages(out: Console, generation: Generation, passages: Sequence[Passage]) -> None:
    """Print the passages, each with its attention mass as a bar, and what got the rest."""
    if not passages:
        return
    masses = _masses(generation, passages)
    longest = max((mass for mass in masses if mass is not None), default=0.0)
    # On a narrow terminal the texts go first, then the bars; weights are never cut.
    texts, bar = out.width >= _WITH_TEXTS, _BAR if out.width >= _WITH_TEXTS else len("attention")
    bars = out.width >= _WITH_BARS
    weights = ["" if mass is None else f"{mass:.1%}" for mass in masses]
    widest = max(map(len, weights))
    beside = len(f"{len(passages)}") + widest + 4 + (bar + 2) * bars
    longest_name = _NAME if texts else max(4, min(_NAME, out.width - beside))
    table = plain_table(expand=texts)
    table.add_column("", justify="right", no_wrap=True, style="dim")
    table.add_column("passage", no_wrap=True)
    if texts:
        table.add_column("text", no_wrap=True, overflow="ellipsis", ratio=1, style="dim")
    if bars:
        table.add_column("attention", width=bar, no_wrap=True, style="cyan")
    table.add_column("", justify="right", no_wrap=True, min_width=widest)
    for number, (passage, mass) in enumerate(zip(passages, masses, strict=True), start=1):
        style = "bold" if mass is not None and mass == longest > 0 else ""
        cells = [Text(str(number)), Text(_name(passage, longest_name), style=style)]
        if texts:
            cells.append(Text(_excerpt(passage)))
        if bars:
            cells.append(Text("" if mass is None else _bar(mass, longest, bar, out)))
        table.add_row(*cells, Text(weights[number - 1], style=style))
    out.print(table)
    if generation.prefix_mass is not None and generation.query_mass is not None:
        out.print(
            f"The rest of the attention: prefix {generation.prefix_mass:.1%}, "
            f"question and answer {generation.query_mass:.1%}.",
            style="dim",
            soft_wrap=True,
        )


def show_figures(generation: Generation, model: str, method: str) -> None:
    """Print timings and token counts in one line."""
    usage, timings = generation.usage, generation.timings
    dim(
        f"{model}, {method}: passages encoded in {timings.encode_s:.2f} s, first token after "
        f"{timings.ttft_s:.2f} s, all after {timings.total_s:.2f} s; {usage.prompt_tokens} prompt "
        f"tokens ({usage.cached_tokens} cached), {usage.completion_tokens} generated."
    )


def notes(generation: Generation, passages: Sequence[Passage], limit: int) -> list[str]:
    """What the reader of an answer should know about how it came to be.

    Passages are counted from 1, as `show_passages` does.
    """
    lines = [_note(note, passages) for note in generation.notes]
    if generation.fallback is not None:
        lines.append(f"Guard ({generation.fallback.signal}): {generation.fallback.message}")
    if generation.finish_reason == "length":
        lines.append(
            f"The answer ends at the limit of {limit} new tokens; --max-new-tokens raises it."
        )
    return lines


def show_methods(out: Console, rows: Sequence[MethodRow]) -> None:
    """Print every method: name, formula and paper, then what it is and its parameters."""
    width = max(len(row.name) for row in rows) + 2
    for row in rows:
        line = Text(row.name.ljust(width), style="bold")
        line.append(row.formula, style="not bold")
        line.append(f"  ({row.paper})" if row.papers else "", style="not bold dim")
        out.print(line, soft_wrap=True)
        out.print(Text(" " * width + row.summary), soft_wrap=True)
        if row.parameters:
            out.print(Text(" " * width + row.settings), style="dim", soft_wrap=True)
    wrapped = [row.name for row in rows if "reader" in row.parameters]
    if wrapped:
        out.print(
            f"{', '.join(wrapped)} leave the reading to another method: {wrapped[0]}+ape.",
            style="dim",
            soft_wrap=True,
        )


def _note(note: Note, passages: Sequence[Passage]) -> str:
    name = f"Passage {note.passage + 1}"
    if passages[note.passage].id is not None:
        name += f" ({passages[note.passage].id})"
    if note.kind == "duplicate" and note.of is not None:
        return f"{name} repeats passage {note.of + 1}, which was read instead."
    if note.kind == "split":
        return f"{name} is longer than a window and was read in several."
    return f"{name} holds no text that the model knows and was left out."


def _masses(generation: Generation, passages: Sequence[Passage]) -> list[float | None]:
    masses: list[float | None] = [None] * len(passages)
    for citation in generation.citations or ():
        masses[citation.passage] = citation.mass
    return masses


def _name(passage: Passage, longest: int) -> str:
    name = one_line(passage.id or passage.title or "-")
    # Of a long path, the end tells most.
    return name if len(name) <= longest else "…" + name[1 - longest :]


def _excerpt(passage: Passage) -> str:
    text = one_line(passage.text[:400])
    return f"{one_line(passage.title)}: {text}" if passage.title else text


def _bar(mass: float, longest: float, width: int, out: Console) -> str:
    cells = width * mass / longest if longest > 0 else 0.0
    if not out.encoding.lower().startswith("utf"):
        return "#" * round(cells)
    full, eighths = divmod(round(cells * 8), 8)
    return "█" * full + (_EIGHTHS[eighths] if eighths else "")
