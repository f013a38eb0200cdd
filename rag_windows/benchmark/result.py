"""What `rag-windows bench` is asked and what it found: options, records in JSON, tables.

Field names are those of ``performance.json``. A "way" is one of the ways to answer that are timed;
a "floor" is the roofline, the least time that the machine needs for what has to be read; "crowds"
are numbers of questions asked at once. Lists hold one entry a round, in seconds where nothing else
is said.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import typer
from typer.models import OptionInfo

SEQUENTIAL = "transformers"
COLD, MEMORY, DISK = "windows, cold", "windows, from memory", "windows, from disk"
WAYS = (SEQUENTIAL, COLD, MEMORY, DISK)
ALONE, TOGETHER = "one by one", "together"

NONE = "-"
"""Where a figure was not taken."""


@dataclass(frozen=True, slots=True)
class Place:
    """What is read: tokens of all windows, and of each."""

    context: int
    window: int

    def __str__(self) -> str:
        return f"{self.context:,} tokens, windows of {self.window}"


def _option(text: str, metavar: str = "N", least: int | None = None) -> OptionInfo:
    made: OptionInfo = typer.Option(help=text, metavar=metavar, min=least)
    return made


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run: the options of `rag-windows bench`."""

    shape: Annotated[
        str | None,
        _option(
            "llama-0.25b, qwen-0.5b, llama-3.1-8b (random weights); tiny tries the command. "
            "Default: llama-0.25b.",
            "NAME",
        ),
    ] = None
    model: Annotated[
        str | None,
        _option("Time this model instead: a local folder or a name on the Hub.", "MODEL"),
    ] = None
    context: Annotated[
        list[int] | None, _option("Tokens of all passages; repeatable. Default: 8192.", least=2)
    ] = None
    window: Annotated[
        list[int] | None, _option("Tokens of a passage; repeatable. Default: 256.", least=2)
    ] = None
    new_tokens: Annotated[
        list[int] | None, _option("Answers so long; repeatable. Default: 64.", least=2)
    ] = None
    questions: Annotated[
        list[int] | None,
        _option("So many at once, sharing passages of the first --context; repeatable.", least=2),
    ] = None
    against: Annotated[
        list[str] | None,
        _option("A method to time beside --method, its windows in memory; repeatable.", "NAME"),
    ] = None
    memory: Annotated[
        bool, typer.Option(help="Measure peak memory, on the CPU in further processes.")
    ] = True
    rounds: Annotated[int, _option("In each, every way answers once.", least=1)] = 5
    way: Annotated[
        list[str] | None, _option("Only this way; repeatable. Default: all four.", "NAME")
    ] = None
    device: Annotated[str, _option("cpu or cuda.", "DEVICE")] = "cpu"
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option(help="Of the weights.")
    ] = "bfloat16"
    method: Annotated[str, typer.Option(metavar="NAME")] = "ape"

    @property
    def places(self) -> Iterator[Place]:
        """What is read, in the order in which it is run."""
        for context in self.context or [8192]:
            for window in self.window or [256]:
                yield Place(context, window)

    @property
    def tokens(self) -> list[int]:
        """Numbers of new tokens to whose end time is taken."""
        return self.new_tokens or [64]


@dataclass(frozen=True, slots=True)
class Cell(Place):
    """One way over one context.

    `prefill_s` is until the query could be read, or to the first token where that is one step;
    `tokens_per_s` counts behind the first; `end_s` is to so many tokens, by their number. The floor
    of a further token is reading weights, keys and values once. `peak_bytes` are beside the
    weights, `kv_bytes` those of the prompt's keys and values.
    """

    way: str
    prefill_s: list[float]
    first_s: list[float]
    tokens: int
    tokens_per_s: list[float]
    end_s: dict[str, list[float]]
    decode_floor_s: float
    peak_bytes: int | None
    kv_bytes: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Questions over half shared passages, one by one or together: seconds for all of them."""

    questions: int
    context: int
    way: str
    seconds: list[float]
    tokens: int


@dataclass(frozen=True, slots=True)
class Part:
    """What is measured over one place, or of one number of questions."""

    cells: list[Cell] = field(default_factory=list)
    crowds: list[Concurrency] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a run took place, and whether the C kernel was "compiled" or "absent" on a CPU."""

    device: str
    threads: int
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class Result:
    """One run; its JSON is that of `pydantic.TypeAdapter(Result)`.

    `floor` says as ``memory_bytes_per_s`` how fast the machine read memory in the run.
    """

    format: Literal[3]
    shape: str
    dtype: str
    machine: Machine
    floor: dict[str, float]
    method: dict[str, Any]
    parts: list[Part]
    command: str


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return [lines[0], f"|{'---|' * len(head)}", *lines[1:]]


def number(value: float) -> str:
    """Three figures."""
    return f"{value:#.3g}".rstrip(".") if value < 1000 else f"{value:,.0f}"


def spread(values: Sequence[float], unit: str) -> str:
    """Median with the smallest and the largest."""
    middle, low, high = map(number, (statistics.median(values), min(values), max(values)))
    return f"{middle} {unit}" + (f" ({low} to {high})" if len(values) > 1 else "")


def percent(share: float) -> str:
    """Rounded down, so that no aim seems met that is not."""
    return f"{math.floor(share * 100)}%"


def times(slow: Sequence[float], fast: Sequence[float]) -> str:
    """How many times as large the median is, rounded down."""
    if not slow or not fast:
        return NONE
    return f"{math.floor(statistics.median(slow) / statistics.median(fast) * 100) / 100:.2f}x"


def markdown(result: Result) -> str:
    """Tables of medians with the smallest and the largest round, and ratios."""
    machine = result.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    threads = "thread" if machine.threads == 1 else "threads"
    numbers = ", ".join(f"{key} {one}" for key, one in result.method.items() if key != "name")
    method = f"{result.method.get('name')}" + (f" ({numbers})" if numbers else "")
    lines = [
        f"{result.shape}, {result.dtype}, {machine.device}, {machine.threads} {threads} "
        f"({versions}). Windows are read by {method}. Memory gave "
        f"{result.floor['memory_bytes_per_s'] / 1e9:,.1f} GB/s in the same run.",
        "",
        f"    {result.command}",
        "",
        "Medians of the rounds (smallest to largest). The floor of a further token is reading all "
        "weights and the keys and values of the prompt once, at that rate. Ratios are to "
        f'"transformers", those and shares rounded down; "{NONE}" was not measured.',
    ]
    for part in result.parts:
        if part.cells:
            lines += ["", f"### {part.cells[0]}", "", *_ways(part.cells), *_memory(part.cells)]
    return "\n".join(lines + _crowds([crowd for part in result.parts for crowd in part.crowds]))


def _ways(cells: Sequence[Cell]) -> list[str]:
    base = next((cell for cell in cells if cell.way == SEQUENTIAL), None)
    head = ["way", "prefill", "first token", "sooner", "tokens/s", "faster", "of the floor"]
    for tokens in cells[0].end_s:
        head += [f"end of {tokens} tokens", "sooner"]
    rows = []
    for cell in cells:
        row = [
            cell.way,
            spread(cell.prefill_s, "s"),
            spread(cell.first_s, "s"),
            times(base.first_s if base else [], cell.first_s),
            spread(cell.tokens_per_s, "/s"),
            times(cell.tokens_per_s, base.tokens_per_s if base else []),
            percent(cell.decode_floor_s * statistics.median(cell.tokens_per_s)),
        ]
        for tokens, own in cell.end_s.items():
            row += [spread(own, "s"), times(base.end_s[tokens] if base else [], own)]
        rows.append(row)
    return [*table(head, rows), "", f"{len(cells[0].first_s)} round(s).", ""]


def _memory(cells: Sequence[Cell]) -> list[str]:
    rows = []
    for cell in cells:
        if cell.peak_bytes is not None:
            excess = (cell.peak_bytes - cell.kv_bytes) / (cell.weight_bytes + cell.kv_bytes)
            sizes = (cell.weight_bytes, cell.kv_bytes, cell.peak_bytes)
            shown = [f"{size / 1e6:,.0f} MB" for size in sizes]
            rows.append([cell.way, *shown, f"{math.ceil(excess * 1000) / 10:.1f}%"])
    if not rows:
        return []
    head = ["way", "weights", "keys and values", "peak beside the weights", "above what is needed"]
    return [
        "Memory of one prefill and two tokens (on the CPU in a process of its own); the last "
        "column is the peak above weights, keys and values as a share of these, rounded up.",
        *("", *table(head, rows), ""),
    ]


def _crowds(found: Sequence[Concurrency]) -> list[str]:
    if not found:
        return []
    alone = {one.questions: one.seconds for one in found if one.way == ALONE}
    rows = [
        [
            f"{one.questions}",
            f"{one.context:,}",
            one.way,
            spread(one.seconds, "s"),
            f"{number(one.questions * one.tokens / statistics.median(one.seconds))} /s",
            times(alone[one.questions], one.seconds),
        ]
        for one in found
    ]
    head = ["questions", "tokens of each", "way", "seconds for all", "tokens", "throughput"]
    return [
        "### Many questions that share half of their passages",
        "",
        f"{found[0].tokens} new tokens for each; their windows are in memory.",
        *("", *table(head, rows), ""),
    ]
