"""What a run found: records, their JSON, the report, a comparison of two runs, and a picture.

Field names are those of ``performance.json``. A "way" is one of the five ways to answer that are
timed; a "floor" is the roofline, the least time that the machine needs for what has to be computed
or read; a "crowd" is a number of questions asked at once.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rag_windows.errors import DataError, MissingExtraError, missing

FORMAT = 2
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
    """What is read.

    Attributes:
        context: tokens of all windows.
        window: tokens of each, or on average.
        ragged: whether their lengths differ.
    """

    context: int
    window: int
    ragged: bool

    @property
    def words(self) -> str:
        """The windows' length in words."""
        if self.ragged:
            return f"ragged windows, about {self.window}"
        return f"windows of {self.window}"

    @property
    def place(self) -> Place:
        """This alone, without what was measured there."""
        return Place(self.context, self.window, self.ragged)


@dataclass(frozen=True, slots=True)
class Cell(Place):
    """One way over one context; lists hold one entry a round, in seconds.

    Attributes:
        prefill_s: until the query could be read; until the first token where that is one step.
        first_s: to the first token.
        tokens: new ones in each round.
        tokens_per_s: behind the first.
        end_s: to so many new tokens, by their number; those that were made.
        prefill_floor_s: linear layers of the tokens that the prefill computes, at the measured
            rate; None where it computes none.
        decode_floor_s: reading weights, keys and values once.
        peak_bytes: beside the weights, with keys and values; None where it was not measured.
        kv_bytes: keys and values of the prompt.
        weight_bytes: of the model, all of them.
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
    """One method that reads windows in memory; lists hold one entry a round, in seconds.

    Attributes:
        method: its name; its numbers are its defaults.
        tokens: new ones in each round.
        first_s: to the first token, the windows being there.
        token_s: median over the decode steps behind it.
    """

    method: str
    tokens: int
    first_s: list[float]
    token_s: list[float]


@dataclass(frozen=True, slots=True)
class Step(Place):
    """Where the time of a decode step goes, in milliseconds.

    Attributes:
        linear: the model's linear layers, its vocabulary layer among them.
        windows: attention over the windows.
        tail: attention over prefix, question and what was written.
        rest: norms, rotary positions, merging, choosing the token, Python.
    """

    linear: float
    windows: float
    tail: float
    rest: float


@dataclass(frozen=True, slots=True)
class Crowd:
    """Questions asked at once, which share half of their passages.

    Attributes:
        questions: how many.
        context: tokens of each.
        way: `ALONE` or `TOGETHER`.
        seconds: for all of them, one entry a round.
        tokens: generated for each.
    """

    questions: int
    context: int
    way: str
    seconds: list[float]
    tokens: int


@dataclass(frozen=True, slots=True)
class Part:
    """What is measured at a stretch, and kept when a run is killed behind it."""

    cells: list[Cell] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    crowds: list[Crowd] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Part:
        """From what `dataclasses.asdict` makes of one.

        Raises:
            TypeError, KeyError: it is something else.
        """
        return cls(
            [Cell(**one) for one in values["cells"]],
            [Reading(**one) for one in values["readings"]],
            [Crowd(**one) for one in values["crowds"]],
            [Step(**one) for one in values["steps"]],
        )


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a run took place.

    Attributes:
        device: the accelerator's or processor's name.
        threads: of PyTorch on the processor.
        versions: of Python, torch, transformers and rag-windows; on a CPU also whether the C kernel
            is "compiled" or "absent".
    """

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
    """One run.

    Attributes:
        shape: of the model.
        dtype: its precision.
        machine: where.
        floor: rates of the machine.
        method: of the windows, with its numbers.
        parts: what was measured.
        command: that made it.
        goes: calls that it took; more than one after some were killed.
    """

    shape: str
    dtype: str
    machine: Machine
    floor: Rates
    method: dict[str, Any]
    parts: list[Part]
    command: str
    goes: int = 1

    @property
    def cells(self) -> list[Cell]:
        """Single questions."""
        return [cell for part in self.parts for cell in part.cells]

    @property
    def readings(self) -> list[Reading]:
        """Methods beside each other."""
        return [reading for part in self.parts for reading in part.readings]

    @property
    def crowds(self) -> list[Crowd]:
        """Many questions at once."""
        return [crowd for part in self.parts for crowd in part.crowds]

    @property
    def steps(self) -> list[Step]:
        """Decode steps taken apart."""
        return [step for part in self.parts for step in part.steps]

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        values = {"format": FORMAT, **dataclasses.asdict(self)}
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read what `save` wrote.

        Raises:
            DataError: it is something else.
        """
        try:
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if values.pop("format") != FORMAT:
                raise ValueError(f"not of format {FORMAT}")
            values["machine"] = Machine(**values["machine"])
            values["floor"] = Rates(**values["floor"])
            values["parts"] = [Part.from_json(one) for one in values["parts"]]
            return cls(**values)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{path} is no result of rag-windows bench ({type(error).__name__}: {error}); name "
                "a JSON file that it wrote."
            ) from error


def median(values: Sequence[float]) -> float:
    """NaN for none."""
    return statistics.median(values) if values else math.nan


def exponent(contexts: Sequence[int], seconds: Sequence[float]) -> float:
    """Slope of a line through both logarithms: 1 where twice the context takes twice the time.

    NaN for fewer than two contexts.
    """
    if len(set(contexts)) < 2:
        return math.nan
    logs = [[math.log(one) for one in values] for values in (contexts, seconds)]
    return statistics.linear_regression(*logs).slope


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def number(value: float) -> str:
    """Three figures."""
    return f"{value:#.3g}".rstrip(".") if value < 1000 else f"{value:,.0f}"


def spread(values: Sequence[float], unit: str) -> str:
    """Median with the smallest and the largest."""
    if not values or math.isnan(median(values)):
        return NONE
    middle, low, high = (number(one) for one in (median(values), min(values), max(values)))
    return f"{middle} {unit} ({low} to {high})" if len(values) > 1 else f"{middle} {unit}"


def percent(share: float) -> str:
    """Rounded down, so that no aim seems met that is not."""
    return NONE if math.isnan(share) else f"{math.floor(share * 100)}%"


def times(slow: Sequence[float], fast: Sequence[float]) -> str:
    """How many times as large the median is, rounded down."""
    ratio = median(slow) / median(fast) if slow and fast else math.nan
    return NONE if math.isnan(ratio) else f"{math.floor(ratio * 100) / 100:.2f}x"


def markdown(result: Result) -> str:
    """Tables of medians with the smallest and the largest round, ratios, and growth."""
    machine = result.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    threads = "thread" if machine.threads == 1 else "threads"
    goes = f" The run took {result.goes} calls; the rates are the last one's."
    numbers = ", ".join(f"{key} {one}" for key, one in result.method.items() if key != "name")
    method = f"{result.method.get('name')}" + (f" ({numbers})" if numbers else "")
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
    for place in dict.fromkeys(cell.place for cell in result.cells):
        cells = [cell for cell in result.cells if cell.place == place]
        lines += ["", f"### {place.context:,} tokens, {place.words}", "", *_ways(cells)]
        lines += _memory(cells)
        lines += _readings([one for one in result.readings if one.place == place])
        lines += _steps([one for one in result.steps if one.place == place])
    lines += _growth(result.cells)
    lines += _crowds(result.crowds)
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


def _memory(cells: Sequence[Cell]) -> list[str]:
    rows = []
    for cell in cells:
        if cell.peak_bytes is not None:
            needed = cell.weight_bytes + cell.kv_bytes
            excess = (cell.peak_bytes - cell.kv_bytes) / needed
            sizes = (cell.weight_bytes, cell.kv_bytes, cell.peak_bytes)
            shown = [f"{size / 1e6:,.0f} MB" for size in sizes]
            rows.append([cell.way, *shown, f"{math.ceil(excess * 1000) / 10:.1f}%"])
    if not rows:
        return []
    head = ["way", "weights", "keys and values", "peak beside the weights", "above what is needed"]
    return [
        "",
        "Memory of one prefill and two tokens (on the CPU in a process of its own); the last "
        "column is the peak above weights, keys and values as a share of these, rounded up.",
        "",
        *table(head, rows),
    ]


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
    return [
        "",
        f"Methods over these windows in memory, a token of each in turn, {len(base.first_s)} "
        f"rounds of {base.tokens} tokens, passes of the model alone; the time of a further token "
        "is the median over a round's, and the last column compares within each round.",
        "",
        *table(["method", "first token", "a further token", f"more than {base.method}"], rows),
    ]


def _steps(found: Sequence[Step]) -> list[str]:
    if not found:
        return []
    rows = []
    for one in found:
        own = (one.linear, one.windows, one.tail, one.rest)
        rows.append([f"{number(each)} ms" for each in (*own, sum(own))])
    head = ["linear layers", "attention over windows", "over prefix, question and answer"]
    return [
        "",
        "A further token over windows in memory, taken apart (the quickest of three rounds, under "
        "a profiler, which makes all else look dearer than it is):",
        "",
        *table([*head, "all else", "together"], rows),
    ]


def _growth(cells: Sequence[Cell]) -> list[str]:
    """Exponents of each way and window length; empty for a single context."""
    kinds: dict[tuple[str, int, bool], list[Cell]] = {}
    for cell in cells:
        kinds.setdefault((cell.way, cell.window, cell.ragged), []).append(cell)
    rows = []
    for (way, window, ragged), own in kinds.items():
        at = [cell.context for cell in own]
        if len(set(at)) < 2:
            continue
        slopes = [
            exponent(at, [figure(cell) for cell in own])
            for figure in (
                lambda cell: median(cell.prefill_s),
                lambda cell: median(cell.first_s),
                lambda cell: 1 / median(cell.tokens_per_s),
            )
        ]
        length = f"about {window}" if ragged else f"{window}"
        contexts = f"{len(set(at))} ({min(at):,} to {max(at):,})"
        shown = [NONE if math.isnan(slope) else f"{slope:.2f}" for slope in slopes]
        rows.append([way, length, contexts, *shown])
    if not rows:
        return []
    head = ["way", "windows of", "contexts", "prefill", "first token", "each further token"]
    return [
        "",
        "### Growth",
        "",
        "Exponent of time against the context, and so against the number of windows: 1 where twice "
        "as many take twice the time. It is the slope of a straight line through the logarithms of "
        "the medians over these contexts.",
        "",
        *table(head, rows),
    ]


def _crowds(found: Sequence[Crowd]) -> list[str]:
    if not found:
        return []
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
    head = ["questions", "tokens of each", "way", "seconds for all", "tokens", "throughput"]
    return [
        "",
        "### Many questions that share half of their passages",
        "",
        f"{found[0].tokens} new tokens for each; their windows are in memory.",
        "",
        *table(head, rows),
    ]


def changes(old: Result, new: Result) -> list[str]:
    """Lines of a Markdown table, one for each figure that moved beyond its rounds' spread.

    Seconds are compared as they are and, since machines differ from run to run, beside those of
    the plain way (plain transformers, one question at a time, the first method) in the same run. A
    figure counts as moved where the ranges of the rounds of both runs don't meet and the medians
    are at least 2% apart.
    """
    before = _figures(old)
    rows = []
    for key, (now, plain) in _figures(new).items():
        then, plain_then = before.get(key, ([], []))
        if not _apart(then, now):
            continue
        was, is_now = median(then), median(now)
        beside = ""
        if plain and plain_then:
            beside = f"{was / median(plain_then):.2f} -> {is_now / median(plain):.2f}"
        rows.append([*key, f"{was:.4g} -> {is_now:.4g}", f"{is_now / was:.2f}", beside])
    told = []
    same = ("shape", "dtype", "machine", "method")
    if any(getattr(old, name) != getattr(new, name) for name in same):
        told = [
            "The two runs differ in model, method, machine or versions; compare the last column.",
            "",
        ]
    if not rows:
        return [*told, "Nothing moved beyond the spread of the rounds."]
    head = ["of", "way", "figure", "before -> now", "ratio", "beside the plain way"]
    return [*told, *table(head, rows)]


def _apart(one: Sequence[float], other: Sequence[float]) -> bool:
    if not one or not other or not (min(one) > max(other) or min(other) > max(one)):
        return False
    return abs(median(other) - median(one)) >= _SMALLEST * abs(median(one))


def _figures(result: Result) -> dict[tuple[str, str, str], tuple[list[float], list[float]]]:
    """(over what, way, figure) -> its rounds, and those of the plain way in the same run."""
    found: dict[tuple[str, str, str], tuple[list[float], list[float]]] = {}
    bases = {cell.place: _values(cell) for cell in result.cells if cell.way == SEQUENTIAL}
    for cell in result.cells:
        plain = {} if cell.way == SEQUENTIAL else bases.get(cell.place, {})
        of = f"{cell.context:,} tokens, {cell.words}"
        for name, values in _values(cell).items():
            found[of, cell.way, name] = (values, plain.get(name, []))
    first: dict[Place, list[float]] = {}
    for one in result.readings:
        of = f"{one.context:,} tokens, {one.words}"
        base = first.setdefault(one.place, one.token_s)
        found[of, one.method, "seconds a token"] = (one.token_s, base)
    alone = {(one.questions, one.context): one for one in result.crowds if one.way == ALONE}
    for crowd in result.crowds:
        single = alone.get((crowd.questions, crowd.context))
        of = f"{crowd.questions} questions, {crowd.context:,} tokens each"
        found[of, crowd.way, "seconds"] = (crowd.seconds, single.seconds if single else [])
    return found


def _values(cell: Cell) -> dict[str, list[float]]:
    peak = {} if cell.peak_bytes is None else {"peak memory, MB": [cell.peak_bytes / 1e6]}
    return {
        "prefill": cell.prefill_s,
        "first token": cell.first_s,
        "tokens/s": cell.tokens_per_s,
        **{f"end of {tokens} tokens": seconds for tokens, seconds in cell.end_s.items()},
        **peak,
    }


def draw(result: Result, path: Path) -> None:
    """Seconds to the first token and tokens per second against the context, as PNG.

    Each length of windows has a row of its own.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullFormatter
    except ImportError as error:
        raise MissingExtraError(missing("Drawing", "matplotlib", "figures")) from error
    panels: tuple[tuple[Callable[[Cell], list[float]], str], ...] = (
        (lambda cell: cell.first_s, "Seconds to the first token"),
        (lambda cell: cell.tokens_per_s, "Tokens per second behind the first"),
    )
    marks = "osD^v"
    colours = ("#555555", "#a8751a", "#1f6fb4", "#c0392b", "#2e8b57")
    styles = dict(zip(WAYS, zip(marks, colours, strict=True), strict=True))
    sorts = list(dict.fromkeys(cell.words for cell in result.cells))
    contexts = sorted({cell.context for cell in result.cells})
    names = [f"{one // 1024}K" if one % 1024 == 0 else f"{one:,}" for one in contexts]
    figure = Figure(figsize=(11, 0.9 + 3.4 * len(sorts)), layout="constrained")
    grid = figure.subplots(len(sorts), 2, squeeze=False)
    for row, words in zip(grid, sorts, strict=True):
        for axes, (rounds_of, title) in zip(row, panels, strict=True):
            for way, (mark, colour) in styles.items():
                own = [one for one in result.cells if (one.words, one.way) == (words, way)]
                if not own:
                    continue
                rounds = [rounds_of(cell) for cell in own]
                middle = [median(one) for one in rounds]
                below = [median(one) - min(one) for one in rounds]
                above = [max(one) - median(one) for one in rounds]
                at = [cell.context for cell in own]
                style = {"marker": mark, "color": colour, "capsize": 3, "label": way}
                axes.errorbar(at, middle, yerr=[below, above], **style)
            axes.set_title(title, loc="left", fontsize=11)
            axes.set_xlabel(f"tokens of context, {words}", fontsize=9)
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.set_xticks(contexts, names)
            axes.grid(visible=True, which="major", alpha=0.3)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    plural = "s" if result.machine.threads > 1 else ""
    title = (
        f"{result.shape}, {result.dtype}, {result.machine.device}, "
        f"{result.machine.threads} thread{plural}; medians, smallest and largest round"
    )
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
