"""What `rag-windows bench` is asked and what it found: options, records in JSON, tables.

Field names are those of ``performance.json``. A "floor" is the least time that the machine needs
for what has to be read; "crowds" are numbers of questions asked at once. Lists hold one entry a
round, in seconds where nothing else is said.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer
from typer.models import OptionInfo

SEQUENTIAL = "transformers"
COLD, MEMORY, DISK = "windows, cold", "windows, from memory", "windows, from disk"
WAYS = (SEQUENTIAL, COLD, MEMORY, DISK)
ALONE, TOGETHER = "one by one", "together"


def _option(text: str, metavar: str = "N", least: int | None = None) -> OptionInfo:
    made: OptionInfo = typer.Option(help=text, metavar=metavar, min=least)
    return made


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run: the options of `rag-windows bench`."""

    shape: Annotated[
        Literal["llama-0.25b", "qwen-0.5b", "llama-3.1-8b", "tiny"] | None,
        typer.Option(help="Of random weights; tiny tries the command. Default: llama-0.25b."),
    ] = None
    model: Annotated[
        str | None,
        _option("Time this model instead: a local folder or a name on the Hub.", "MODEL"),
    ] = None
    context: Annotated[int, _option("Tokens of all passages.", least=2)] = 8192
    window: Annotated[int, _option("Tokens of a passage.", least=2)] = 256
    new_tokens: Annotated[int, _option("Length of an answer.", least=2)] = 64
    questions: Annotated[
        int | None, _option("So many at once, too, which share half of their passages.", least=2)
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


@dataclass(frozen=True, slots=True)
class Cell:
    """One way.

    `prefill_s` is until the query could be read, or to the first token where that is one step;
    `tokens_per_s` counts behind the first; `end_s` is to the last. The floor
    of a further token is reading weights, keys and values once. `peak_bytes` are beside the
    weights, `kv_bytes` those of the prompt's keys and values.
    """

    way: str
    prefill_s: list[float]
    first_s: list[float]
    tokens_per_s: list[float]
    end_s: list[float]
    decode_floor_s: float
    peak_bytes: int | None
    kv_bytes: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Questions over half shared passages, one by one or together: seconds for all of them."""

    questions: int
    way: str
    seconds: list[float]


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
    context: int
    window: int
    tokens: int
    cells: list[Cell]
    crowds: list[Concurrency]
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
        return "-"
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
        '"transformers", those and shares rounded down; "-" was not measured.',
    ]
    lines += ["", f"### {result.context:,} tokens, windows of {result.window}", ""]
    return "\n".join([*lines, *_ways(result), *_memory(result.cells), *_crowds(result)])


def _ways(result: Result) -> list[str]:
    cells = result.cells
    base = next((cell for cell in cells if cell.way == SEQUENTIAL), None)
    head = ["way", "prefill", "first token", "sooner", "tokens/s", "faster", "of the floor"]
    head += [f"end of {result.tokens} tokens", "sooner"]
    rows = []
    for cell in cells:
        rows.append(
            [
                cell.way,
                spread(cell.prefill_s, "s"),
                spread(cell.first_s, "s"),
                times(base.first_s if base else [], cell.first_s),
                spread(cell.tokens_per_s, "/s"),
                times(cell.tokens_per_s, base.tokens_per_s if base else []),
                percent(cell.decode_floor_s * statistics.median(cell.tokens_per_s)),
                spread(cell.end_s, "s"),
                times(base.end_s if base else [], cell.end_s),
            ]
        )
    return [*table(head, rows), "", f"{len(cells[0].first_s)} rounds.", ""]


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


def _crowds(result: Result) -> list[str]:
    if not result.crowds:
        return []
    alone = next(one.seconds for one in result.crowds if one.way == ALONE)
    rows = []
    for one in result.crowds:
        rate = one.questions * result.tokens / statistics.median(one.seconds)
        shown = spread(one.seconds, "s"), f"{number(rate)} /s", times(alone, one.seconds)
        rows.append([f"{one.questions}", one.way, *shown])
    return [
        "### Many questions that share half of their passages, windows in memory",
        "",
        *table(["questions", "way", "seconds for all", "tokens", "throughput"], rows),
    ]
