"""Options of `rag-windows bench`, its results in JSON, and tables of them.

Field names are those of ``performance.json``. The "roofline" is the least time that the machine
needs for what has to be read. Lists hold one entry a round, in seconds where nothing else is said.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer
from typer.models import OptionInfo

from rag_windows.methods import resolve, spelled

SEQUENTIAL = "transformers"
COLD, DISK, MEMORY = "windows, cold", "windows, from disk", "windows, from memory"
UNCITED = ", no citations"
VARIANTS = (SEQUENTIAL, COLD, DISK, MEMORY, MEMORY + UNCITED)
"""Those with and without citations stand side by side, so they follow each other in a round."""
INT8 = MEMORY + ", int8"
"""Timed where it is named: the same windows in 8 bits a number."""
ONE_BY_ONE, TOGETHER = "one by one", "together"


def _option(text: str, metavar: str = "N", least: int | None = None) -> OptionInfo:
    made: OptionInfo = typer.Option(help=text, metavar=metavar, min=least)
    return made


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The options of `rag-windows bench`."""

    shape: Annotated[
        Literal["llama-0.25b", "qwen-0.5b", "qwen3.5-0.3b", "llama-3.1-8b", "tiny"] | None,
        typer.Option(
            help=(
                "Shape of a model with random weights; tiny only tries the command. "
                "Default: llama-0.25b."
            )
        ),
    ] = None
    model: Annotated[
        str | None,
        _option("Time this model instead: a local folder or a name on the Hub.", "MODEL"),
    ] = None
    context: Annotated[int, _option("Number of tokens of all passages together.", least=2)] = 8192
    window: Annotated[int, _option("Number of tokens of one passage.", least=2)] = 256
    new_tokens: Annotated[int, _option("Number of tokens of an answer.", least=2)] = 64
    questions: Annotated[
        int | None,
        _option(
            "Also time N questions asked at once, which share half of their passages.", least=2
        ),
    ] = None
    against: Annotated[
        list[str] | None,
        _option("Another method to time, its windows in memory; can be repeated.", "NAME"),
    ] = None
    memory: Annotated[
        bool, typer.Option(help="Measure peak memory (on the CPU, in separate processes).")
    ] = True
    rounds: Annotated[
        int, _option("Number of rounds; in each, every way of answering runs once.", least=1)
    ] = 5
    way: Annotated[
        list[str] | None,
        _option("Time only this way of answering; can be repeated. Default: all.", "NAME"),
    ] = None
    profile: Annotated[
        bool,
        typer.Option("--profile", help=f"Show where a decode step's time goes ({MEMORY!r})."),
    ] = False
    device: Annotated[str, _option("Device of the model: cpu or cuda.", "DEVICE")] = "cpu"
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"],
        typer.Option(help="Number format of the weights."),
    ] = "bfloat16"
    method: Annotated[str, _option("Method that reads the windows.", "NAME")] = "auto"


@dataclass(frozen=True, slots=True)
class BenchRow:
    """Figures of one variant.

    `prefill_s` is until the query could be read, or to the first token where that is one step;
    `decode_s` is a decode step, the mean over the tokens behind the first; `end_s` is until the
    answer is returned, its citations included. `citations_cost` is `decode_s` by that of the same
    without citations, in each round; empty where that was not measured. The roofline of a decode
    step is reading weights, keys and values once. `peak_bytes` leave out the weights, `kv_bytes`
    those of the prompt's keys and values.
    """

    name: str
    prefill_s: list[float]
    first_s: list[float]
    decode_s: list[float]
    end_s: list[float]
    citations_cost: list[float]
    roofline_decode_s: float
    peak_bytes: int | None
    kv_bytes: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Questions over half shared passages, one by one or together: seconds for all of them."""

    questions: int
    name: str
    seconds: list[float]
    citations_cost: list[float]


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a run took place, and whether the C kernel was "compiled" or "absent" on a CPU."""

    device: str
    threads: int
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class Result:
    """One run; its JSON is that of `pydantic.TypeAdapter(Result)`.

    `date` is the day of the run (YYYY-MM-DD, UTC).
    `roofline` says as ``memory_bytes_per_s`` how fast the machine read memory in the run,
    `prompt_tokens` are those of the whole prompt, `tokens` those of an answer, `baseline` names
    the row to which ratios are taken.
    """

    format: Literal[4]
    shape: str
    dtype: str
    machine: Machine
    roofline: dict[str, float]
    method: dict[str, Any]
    context: int
    window: int
    prompt_tokens: int
    tokens: int
    baseline: str
    rows: list[BenchRow]
    concurrency: list[Concurrency]
    command: str
    date: str


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return [lines[0], f"|{'---|' * len(head)}", *lines[1:]]


def number(value: float) -> str:
    """A number with three significant digits."""
    return f"{value:#.3g}".rstrip(".") if value < 1000 else f"{value:,.0f}"


def spread(values: Sequence[float], unit: str) -> str:
    """Median with the smallest and the largest."""
    middle, low, high = map(number, (statistics.median(values), min(values), max(values)))
    return f"{middle} {unit}" + (f" ({low} to {high})" if len(values) > 1 else "")


def percent(share: float) -> str:
    """A share in percent, rounded down, so that it never looks better than it is."""
    return f"{math.floor(share * 100)}%"


def times(slow: Sequence[float], fast: Sequence[float]) -> str:
    """How many times as large the median is: rounded down, to three figures or whole numbers."""
    if not slow or not fast:
        return "-"
    ratio = statistics.median(slow) / statistics.median(fast)
    digits = 2 if ratio < 10 else 1 if ratio < 100 else 0
    return f"{math.floor(ratio * 10**digits) / 10**digits:,.{digits}f}x"


def cost(ratios: Sequence[float]) -> str:
    """Median of each round's ratio with the smallest and the largest, rounded up."""
    if not ratios:
        return "-"
    middle, low, high = (
        f"{math.ceil(one * 1000 - 1e-9) / 1000:.3f}x"
        for one in (statistics.median(ratios), min(ratios), max(ratios))
    )
    return middle + (f" ({low} to {high})" if len(ratios) > 1 else "")


EXPLAINED = (
    f'"{SEQUENTIAL}" has everything in one prompt; "windows" are `generate` over text with '
    "citations and the cache of the command line: the default path. Medians of the rounds "
    "(smallest to largest). The roofline of a decode step is reading all weights and the keys "
    "and values of the prompt once, at memory's rate. "
    f'Ratios are to "{SEQUENTIAL}", those and shares rounded down. What citations cost is a '
    "decode step with them by one without, in the same round, rounded up. "
    '"-" was not measured.'
)


def markdown(result: Result) -> str:
    """Tables of medians with the smallest and the largest round, and ratios."""
    machine = result.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    lines = [
        f"{result.shape}, {result.dtype}, {machine.device}, {_threads(result)} "
        f"({versions}). Windows are read by {spelled(resolve(result.method))}. Memory gave "
        f"{result.roofline['memory_bytes_per_s'] / 1e9:,.1f} GB/s in the same run"
        f" of {result.date}.",
        *("", f"    {result.command}"),
        *("", EXPLAINED),
        *("", f"### {result.context:,} tokens, windows of {result.window}", ""),
    ]
    if result.concurrency:
        together = [
            "### Many questions that share half of their passages, windows in memory",
            "",
            "One by one by `generate`, together by `generate_batch`; citations cost by the whole "
            "time.",
            "",
            *table(*_concurrency(result)),
        ]
    else:
        together = []
    return "\n".join([*lines, *_rows(result), *_memory(result.rows), *together])


def _threads(result: Result) -> str:
    count = result.machine.threads
    return f"{count} thread" + "s" * (count != 1)


def _rows(result: Result) -> list[str]:
    rows = result.rows
    base = next((row for row in rows if row.name == result.baseline), None)
    head = ["way", "prefill", "first token", "sooner", "decode step", "faster", "of the roofline"]
    head += ["citations cost", f"end of {result.tokens} tokens", "sooner"]
    lines = []
    for row in rows:
        lines.append(
            [
                row.name,
                spread(row.prefill_s, "s"),
                spread(row.first_s, "s"),
                times(base.first_s if base else [], row.first_s),
                spread([one * 1000 for one in row.decode_s], "ms"),
                times(base.decode_s if base else [], row.decode_s),
                percent(row.roofline_decode_s / statistics.median(row.decode_s)),
                cost(row.citations_cost),
                spread(row.end_s, "s"),
                times(base.end_s if base else [], row.end_s),
            ]
        )
    rounds = "1 round" if len(rows[0].first_s) == 1 else f"{len(rows[0].first_s)} rounds"
    note = f"{rounds}, a prompt of {result.prompt_tokens:,} tokens."
    return [*table(head, lines), "", note, ""]


def _memory(rows: Sequence[BenchRow]) -> list[str]:
    lines = []
    for row in rows:
        if row.peak_bytes is not None:
            excess = (row.peak_bytes - row.kv_bytes) / (row.weight_bytes + row.kv_bytes)
            sizes = (row.weight_bytes, row.kv_bytes, row.peak_bytes)
            shown = [f"{size / 1e6:,.0f} MB" for size in sizes]
            lines.append([row.name, *shown, f"{math.ceil(excess * 1000) / 10:.1f}%"])
    if not lines:
        return []
    head = ["way", "weights", "keys and values", "peak beside the weights", "above what is needed"]
    return [
        "Memory of one prefill and two tokens (on the CPU in a process of its own); the last "
        "column is the peak above weights, keys and values as a share of these, rounded up.",
        *("", *table(head, lines), ""),
    ]


def _concurrency(result: Result) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of many questions."""
    seconds = {one.name: one.seconds for one in result.concurrency}
    lines = []
    for one in result.concurrency:
        one_by_one = seconds[ONE_BY_ONE + (UNCITED if one.name.endswith(UNCITED) else "")]
        rate = one.questions * result.tokens / statistics.median(one.seconds)
        shown = spread(one.seconds, "s"), f"{number(rate)} /s", times(one_by_one, one.seconds)
        lines.append([f"{one.questions}", one.name, *shown, cost(one.citations_cost)])
    head = ["questions", "way", "seconds for all", "tokens", "throughput", "citations cost"]
    return head, lines
