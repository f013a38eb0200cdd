"""What a run is asked and what it found: options, records in JSON, report, comparison, picture.

Field names are those of ``performance.json``. A "way" is one of the five ways to answer that are
timed; a "floor" is the roofline, the least time that the machine needs for what has to be computed
or read; "crowds" are numbers of questions asked at once. Lists hold one entry a round, in seconds
where nothing else is said.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.models import OptionInfo

from rag_windows.errors import MissingExtraError, missing

SEQUENTIAL = "transformers"
PREFIX_KEPT = "transformers, prefix kept"
COLD, MEMORY, DISK = "windows, cold", "windows, from memory", "windows, from disk"
WAYS = (SEQUENTIAL, PREFIX_KEPT, COLD, MEMORY, DISK)
ALONE, TOGETHER = "one by one", "together"

NONE = "-"
"""Where a figure was not taken."""
_SMALLEST = 0.02
"""Change of a median that is worth a line in a comparison."""


@dataclass(frozen=True, slots=True)
class Place:
    """What is read: tokens of all windows, tokens of each or on average, whether these differ."""

    context: int
    window: int
    ragged: bool

    def __str__(self) -> str:
        windows = "ragged windows, about" if self.ragged else "windows of"
        return f"{self.context:,} tokens, {windows} {self.window}"


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
    ragged: Annotated[
        bool, typer.Option("--ragged", help="Passages of different lengths, too, of this mean.")
    ] = False
    new_tokens: Annotated[
        list[int] | None, _option("Answers so long; repeatable. Default: 64.", least=2)
    ] = None
    questions: Annotated[
        list[int] | None, _option("So many at once, sharing passages; repeatable.", least=2)
    ] = None
    question_context: Annotated[
        int | None,
        _option("Tokens of each such question's passages. Default: the first --context.", least=2),
    ] = None
    against: Annotated[
        list[str] | None,
        _option(
            "A method to decode with beside --method, over the same windows; repeatable.", "NAME"
        ),
    ] = None
    dear_above: Annotated[
        int | None,
        _option(
            "Over longer contexts, plain transformers does only what the next two say.", least=2
        ),
    ] = None
    dear_rounds: Annotated[int, _option("Its rounds there.", least=1)] = 1
    dear_tokens: Annotated[int, _option("Its new tokens there.", least=2)] = 16
    memory: Annotated[
        bool, typer.Option(help="Measure peak memory, on the CPU in further processes.")
    ] = True
    profile: Annotated[
        bool, typer.Option("--profile", help="Take the time of a further token apart; CPU only.")
    ] = False
    rounds: Annotated[int, _option("In each, every way answers once.", least=1)] = 5
    way: Annotated[
        list[str] | None, _option("Only this way; repeatable. Default: all five.", "NAME")
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
                for ragged in (False, True)[: 1 + self.ragged]:
                    yield Place(context, window, ragged)

    @property
    def shared(self) -> Place:
        """What each of many questions reads."""
        first = next(self.places)
        return Place(self.question_context or first.context, first.window, ragged=False)

    @property
    def tokens(self) -> list[int]:
        """Numbers of new tokens to whose end time is taken."""
        return self.new_tokens or [64]

    def slow(self, way: str, context: int) -> bool:
        """Whether a way does less over so many tokens."""
        above = self.dear_above is not None and context > self.dear_above
        return above and way in (SEQUENTIAL, PREFIX_KEPT)

    def effort(self, way: str, context: int) -> tuple[int, int]:
        """In how many rounds a way takes part, and how many new tokens it makes."""
        if self.slow(way, context):
            return min(self.rounds, self.dear_rounds), min(max(self.tokens), self.dear_tokens)
        return self.rounds, max(self.tokens)


@dataclass(frozen=True, slots=True)
class Cell(Place):
    """One way over one context.

    `prefill_s` is until the query could be read, or to the first token where that is one step;
    `tokens_per_s` counts behind the first; `end_s` is to so many tokens, by their number. The
    floors are linear layers of the tokens that the prefill computes (None where it computes none)
    and reading weights, keys and values once. `peak_bytes` are beside the weights, `kv_bytes` those
    of the prompt's keys and values.
    """

    way: str
    prefill_s: list[float]
    first_s: list[float]
    tokens: int
    tokens_per_s: list[float]
    end_s: dict[str, list[float]]
    prefill_floor_s: float | None
    decode_floor_s: float
    peak_bytes: int | None
    kv_bytes: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Reading(Place):
    """One method that reads windows in memory: the first token, the median of those behind it."""

    method: str
    tokens: int
    first_s: list[float]
    token_s: list[float]


@dataclass(frozen=True, slots=True)
class Step(Place):
    """Milliseconds of a decode step: linear layers, attention over windows and else, the rest."""

    linear: float
    windows: float
    tail: float
    rest: float


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
    """What is measured over one place or of one crowd, and kept when a run is killed behind it."""

    cells: list[Cell] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    crowds: list[Concurrency] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a run took place, and whether the C kernel was "compiled" or "absent" on a CPU."""

    device: str
    threads: int
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machine reached in the run: products of matrices of the model's sizes, reading."""

    linear_flops_per_s: float
    memory_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """One run; `goes` counts the calls that it took, more than one after some were killed.

    Its JSON is that of `pydantic.TypeAdapter(Result)`.
    """

    format: Literal[2]
    shape: str
    dtype: str
    machine: Machine
    floor: Rates
    method: dict[str, Any]
    parts: list[Part]
    command: str
    goes: int


def median(values: Sequence[float]) -> float:
    """NaN for none."""
    return statistics.median(values) if values else math.nan


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return [lines[0], f"|{'---|' * len(head)}", *lines[1:]]


def number(value: float) -> str:
    """Three figures."""
    return f"{value:#.3g}".rstrip(".") if value < 1000 else f"{value:,.0f}"


def spread(values: Sequence[float], unit: str) -> str:
    """Median with the smallest and the largest."""
    if not values:
        return NONE
    middle, low, high = (number(one) for one in (median(values), min(values), max(values)))
    return f"{middle} {unit}" + (f" ({low} to {high})" if len(values) > 1 else "")


def percent(share: float) -> str:
    """Rounded down, so that no aim seems met that is not."""
    return NONE if math.isnan(share) else f"{math.floor(share * 100)}%"


def times(slow: Sequence[float], fast: Sequence[float]) -> str:
    """How many times as large the median is, rounded down."""
    if not slow or not fast:
        return NONE
    return f"{math.floor(median(slow) / median(fast) * 100) / 100:.2f}x"


def markdown(result: Result) -> str:
    """Tables of medians with the smallest and the largest round, ratios, and growth."""
    machine = result.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    threads = "thread" if machine.threads == 1 else "threads"
    numbers = ", ".join(f"{key} {one}" for key, one in result.method.items() if key != "name")
    method = f"{result.method.get('name')}" + (f" ({numbers})" if numbers else "")
    goes = f" The run took {result.goes} calls; the rates are the last one's."
    lines = [
        f"{result.shape}, {result.dtype}, {machine.device}, {machine.threads} {threads} "
        f"({versions}). Windows are read by {method}. Measured in the same run: "
        f"{result.floor.linear_flops_per_s / 1e9:,.0f} GFLOP/s in the model's linear layers, "
        f"{result.floor.memory_bytes_per_s / 1e9:,.1f} GB/s from memory."
        + (goes if result.goes > 1 else ""),
        "",
        f"    {result.command}",
        "",
        "Medians of the rounds (smallest to largest). Floors: of a prefill, all linear layers over "
        "the tokens that it computes, at that rate (windows leave out the last layer behind its "
        "keys and values, which counts here all the same); of a further token, reading all weights "
        'and the keys and values of the prompt once. Ratios are to "transformers", those and '
        f'shares rounded down; "{NONE}" was not measured.',
    ]
    for part in result.parts:
        if part.cells:
            lines += ["", f"### {part.cells[0]}", "", *_ways(part.cells)]
            lines += _memory(part.cells)
            lines += _readings(part.readings)
            lines += _steps(part.steps)
    lines += _growth([cell for part in result.parts for cell in part.cells])
    lines += _crowds([crowd for part in result.parts for crowd in part.crowds])
    return "\n".join(lines) + "\n"


def _ways(cells: Sequence[Cell]) -> list[str]:
    base = next((cell for cell in cells if cell.way == SEQUENTIAL), None)
    ends = sorted({int(tokens) for cell in cells for tokens in cell.end_s})
    head = ["way", "prefill", "of the floor", "first token", "sooner", "tokens/s", "faster"]
    head += ["of the floor"]
    for tokens in ends:
        head += [f"end of {tokens} tokens", "sooner"]
    rows = []
    for cell in cells:
        floor = math.nan if cell.prefill_floor_s is None else cell.prefill_floor_s
        row = [
            cell.way,
            spread(cell.prefill_s, "s"),
            percent(floor / median(cell.prefill_s)),
            spread(cell.first_s, "s"),
            times(base.first_s if base else [], cell.first_s),
            spread(cell.tokens_per_s, "/s"),
            times(cell.tokens_per_s, base.tokens_per_s if base else []),
            percent(cell.decode_floor_s * median(cell.tokens_per_s)),
        ]
        for tokens in ends:
            own = cell.end_s.get(str(tokens), [])
            row += [spread(own, "s"), times(base.end_s.get(str(tokens), []) if base else [], own)]
        rows.append(row)
    rounds = max(len(cell.first_s) for cell in cells)
    tokens = max(cell.tokens for cell in cells)
    less = [
        f"{cell.way}: {len(cell.first_s)} of {rounds} rounds, {cell.tokens} of {tokens} new tokens."
        for cell in cells
        if (len(cell.first_s), cell.tokens) != (rounds, tokens)
    ]
    most = f"{rounds} round{'s' if rounds > 1 else ''}."
    return [*table(head, rows), "", " ".join([most, *less])]


def _section(text: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table below its text; nothing without rows."""
    return ["", text, "", *table(head, rows)] if rows else []


def _memory(cells: Sequence[Cell]) -> list[str]:
    rows = []
    for cell in cells:
        if cell.peak_bytes is not None:
            excess = (cell.peak_bytes - cell.kv_bytes) / (cell.weight_bytes + cell.kv_bytes)
            sizes = (cell.weight_bytes, cell.kv_bytes, cell.peak_bytes)
            shown = [f"{size / 1e6:,.0f} MB" for size in sizes]
            rows.append([cell.way, *shown, f"{math.ceil(excess * 1000) / 10:.1f}%"])
    return _section(
        "Memory of one prefill and two tokens (on the CPU in a process of its own); the last "
        "column is the peak above weights, keys and values as a share of these, rounded up.",
        ["way", "weights", "keys and values", "peak beside the weights", "above what is needed"],
        rows,
    )


def _readings(found: Sequence[Reading]) -> list[str]:
    """What each method costs at a token, beside plain windows, else beside the last method."""
    if not found:
        return []
    base = next((one for one in found if one.method == "pcw"), found[-1])
    rows = []
    for one in found:
        pairs = zip(one.token_s, base.token_s, strict=True)
        more = [100 * (own / other - 1) for own, other in pairs]
        beside = f"{median(more):+.1f}% ({min(more):+.1f}% to {max(more):+.1f}%)"
        each = [1000 * seconds for seconds in one.token_s]
        first = spread(one.first_s, "s")
        rows.append([one.method, first, spread(each, "ms"), "" if one is base else beside])
    return _section(
        f"Methods over these windows in memory, a token of each in turn, {len(base.first_s)} "
        f"rounds of {base.tokens} tokens, passes of the model alone; the time of a further token "
        "is the median over a round's, and the last column compares within each round.",
        ["method", "first token", "a further token", f"more than {base.method}"],
        rows,
    )


def _steps(found: Sequence[Step]) -> list[str]:
    own = [(one.linear, one.windows, one.tail, one.rest) for one in found]
    head = ["linear layers", "attention over windows", "over prefix, question and answer"]
    return _section(
        "A further token over windows in memory, taken apart (the quickest of three rounds, under "
        "a profiler, which makes all else look dearer than it is):",
        [*head, "all else", "together"],
        [[f"{number(each)} ms" for each in (*parts, sum(parts))] for parts in own],
    )


def _growth(cells: Sequence[Cell]) -> list[str]:
    """Exponents of each way and window length; empty for a single context."""
    kinds: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        length = f"about {cell.window}" if cell.ragged else f"{cell.window}"
        kinds.setdefault((cell.way, length), []).append(cell)
    rows = []
    for kind, own in kinds.items():
        at = [cell.context for cell in own]
        if len(set(at)) > 1:
            seconds = (
                [median(cell.prefill_s) for cell in own],
                [median(cell.first_s) for cell in own],
                [1 / median(cell.tokens_per_s) for cell in own],
            )
            contexts = f"{len(set(at))} ({min(at):,} to {max(at):,})"
            rows.append([*kind, contexts, *(f"{exponent(at, one):.2f}" for one in seconds)])
    return _section(
        "### Growth\n\nExponent of time against the context, and so against the number of windows: "
        "1 where twice as many take twice the time. It is the slope of a straight line through the "
        "logarithms of the medians over these contexts.",
        ["way", "windows of", "contexts", "prefill", "first token", "each further token"],
        rows,
    )


def exponent(contexts: Sequence[int], seconds: Sequence[float]) -> float:
    """Slope of a line through both logarithms: 1 where twice the context takes twice the time."""
    logs = [[math.log(one) for one in values] for values in (contexts, seconds)]
    return statistics.linear_regression(*logs).slope


def _crowds(found: Sequence[Concurrency]) -> list[str]:
    alone = {(one.questions, one.context): one.seconds for one in found if one.way == ALONE}
    rows = [
        [
            f"{one.questions}",
            f"{one.context:,}",
            one.way,
            spread(one.seconds, "s"),
            f"{number(one.questions * one.tokens / median(one.seconds))} /s",
            times(alone.get((one.questions, one.context), []), one.seconds),
        ]
        for one in found
    ]
    return _section(
        "### Many questions that share half of their passages\n\n"
        f"{found[0].tokens if found else 0} new tokens for each; their windows are in memory.",
        ["questions", "tokens of each", "way", "seconds for all", "tokens", "throughput"],
        rows,
    )


def changes(old: Result, new: Result) -> str:
    """A Markdown table, with a line for each figure that moved beyond its rounds' spread.

    Seconds are compared as they are and, since machines differ from run to run, beside those of
    the plain way (plain transformers, one question at a time, the first method) in the same run. A
    figure counts as moved where the ranges of the rounds of both runs don't meet and the medians
    are at least 2% apart.
    """
    before, after = _figures(old), _figures(new)
    rows = []
    for (of, way, figure), (now, plain) in after.items():
        then = before.get((of, way, figure), ([], ""))[0]
        if not then or not (min(then) > max(now) or min(now) > max(then)):
            continue
        was, is_now, beside = median(then), median(now), ""
        if abs(is_now - was) < _SMALLEST * abs(was):
            continue
        if (base := (of, plain, figure)) in before and base in after:
            ratios = was / median(before[base][0]), is_now / median(after[base][0])
            beside = f"{ratios[0]:.2f} -> {ratios[1]:.2f}"
        moved = f"{was:.4g} -> {is_now:.4g}"
        rows.append([of, way, figure, moved, f"{is_now / was:.2f}", beside])
    lines = ["Nothing moved beyond the spread of the rounds."]
    if rows:
        head = ["of", "way", "figure", "before -> now", "ratio", "beside the plain way"]
        lines = table(head, rows)
    same = ("shape", "dtype", "machine", "method")
    if any(getattr(old, name) != getattr(new, name) for name in same):
        told = "The two runs differ in model, method, machine or versions; compare the last column."
        lines = [told, "", *lines]
    return "\n".join(lines)


def _figures(result: Result) -> dict[tuple[str, str, str], tuple[list[float], str]]:
    """(over what, way, figure) -> its rounds, and the plain way to compare them with."""
    found: dict[tuple[str, str, str], tuple[list[float], str]] = {}
    for part in result.parts:
        for cell in part.cells:
            values = {
                "prefill": cell.prefill_s,
                "first token": cell.first_s,
                "tokens/s": cell.tokens_per_s,
                **{f"end of {tokens} tokens": seconds for tokens, seconds in cell.end_s.items()},
            }
            if cell.peak_bytes is not None:
                values["peak memory, MB"] = [cell.peak_bytes / 1e6]
            for name, own in values.items():
                found[str(cell), cell.way, name] = own, SEQUENTIAL
        for one in part.readings:
            found[str(one), one.method, "seconds a token"] = one.token_s, part.readings[0].method
        for crowd in part.crowds:
            of = f"{crowd.questions} questions, {crowd.context:,} tokens each"
            found[of, crowd.way, "seconds"] = crowd.seconds, ALONE
    return found


def draw(result: Result, path: Path) -> None:
    """Seconds to the first token and tokens per second against the context, as PNG.

    Each length of windows has a row of its own. Without matplotlib, a `MissingExtraError`.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(missing("Drawing", "matplotlib", "figures")) from error
    cells = [cell for part in result.parts for cell in part.cells]
    kinds = list(dict.fromkeys((cell.window, cell.ragged) for cell in cells))
    contexts = sorted({cell.context for cell in cells})
    names = [f"{one // 1024}K" if one % 1024 == 0 else f"{one:,}" for one in contexts]
    figure = Figure(figsize=(11, 0.9 + 3.4 * len(kinds)), layout="constrained")
    grid = figure.subplots(len(kinds), 2, squeeze=False)
    for row, kind in zip(grid, kinds, strict=True):
        for number_of, way in enumerate(WAYS):
            own = [one for one in cells if ((one.window, one.ragged), one.way) == (kind, way)]
            at = [cell.context for cell in own]
            rounds = ([cell.first_s for cell in own], [cell.tokens_per_s for cell in own])
            for axes, values in zip(row, rounds, strict=True):
                middle = [median(one) for one in values]
                below = [median(one) - min(one) for one in values]
                above = [max(one) - median(one) for one in values]
                style = {"marker": "osD^v"[number_of], "capsize": 3, "label": way}
                if own:
                    axes.errorbar(at, middle, yerr=[below, above], color=f"C{number_of}", **style)
        titles = ("Seconds to the first token", "Tokens per second behind the first")
        for axes, title in zip(row, titles, strict=True):
            axes.set_title(title, loc="left", fontsize=11)
            words = f"{'about ' if kind[1] else ''}{kind[0]}"
            axes.set_xlabel(f"tokens of context, windows of {words}", fontsize=9)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.set_xticks(contexts, names)
            axes.grid(visible=True, which="both", alpha=0.3)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    title = (
        f"{result.shape}, {result.dtype}, {result.machine.device}, {result.machine.threads} "
        "thread(s); medians, smallest and largest round"
    )
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    figure.savefig(path, dpi=120)
