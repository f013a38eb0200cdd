"""What moved between two results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rag_windows.benchmark.crowd import ALONE
from rag_windows.benchmark.plan import SEQUENTIAL
from rag_windows.benchmark.result import Cell, Result, median
from rag_windows.benchmark.words import table

_SMALLEST = 0.02
_COLUMNS = ["of", "way", "figure", "before -> now", "ratio", "beside the plain way"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a result.

    Attributes:
        of: over what it was taken.
        way: how.
        name: of the figure.
        values: one a round.
        plain: the same figure of what it is compared with in the same run; empty without one.
    """

    of: str
    way: str
    name: str
    values: Sequence[float]
    plain: Sequence[float] = ()

    @property
    def beside(self) -> float | None:
        """Ratio to the plain way."""
        return median(self.values) / median(self.plain) if self.values and self.plain else None


def changes(old: Result, new: Result) -> list[str]:
    """Lines of a Markdown table, one for each figure that moved beyond its rounds' spread.

    Seconds are compared as they are and, since machines differ from run to run, beside those of
    the plain way (plain transformers, one question at a time, the first method) in the same run. A
    figure counts as moved where the ranges of the rounds of both runs don't meet and the medians
    are at least 2% apart.
    """
    before = {(one.of, one.way, one.name): one for one in _figures(old)}
    rows = []
    for now in _figures(new):
        then = before.get((now.of, now.way, now.name))
        if then is None or not _apart(then.values, now.values):
            continue
        was, is_now = then.beside, now.beside
        rows.append(
            [
                now.of,
                now.way,
                now.name,
                f"{median(then.values):.4g} -> {median(now.values):.4g}",
                f"{median(now.values) / median(then.values):.2f}",
                "" if was is None or is_now is None else f"{was:.2f} -> {is_now:.2f}",
            ]
        )
    told = []
    if _surroundings(old) != _surroundings(new):
        told = [
            "The two runs differ in model, method, machine or versions; compare the last column.",
            "",
        ]
    if not rows:
        return [*told, "Nothing moved beyond the spread of the rounds."]
    return [*told, *table(_COLUMNS, rows)]


def _surroundings(result: Result) -> tuple[object, ...]:
    return result.shape, result.dtype, result.machine, result.method


def _apart(one: Sequence[float], other: Sequence[float]) -> bool:
    if not one or not other or not (min(one) > max(other) or min(other) > max(one)):
        return False
    before, now = median(one), median(other)
    return abs(now - before) >= _SMALLEST * abs(before)


def _figures(result: Result) -> Iterator[Figure]:
    bases = {cell.place: cell for cell in result.cells if cell.way == SEQUENTIAL}
    for cell in result.cells:
        base = bases.get(cell.place)
        plain = {} if base is None or base is cell else _values(base)
        of = f"{cell.context:,} tokens, {cell.place.windows}"
        for name, values in _values(cell).items():
            yield Figure(of, cell.way, name, values, plain.get(name, ()))
    first: dict[object, Sequence[float]] = {}
    for reading in result.readings:
        of = f"{reading.context:,} tokens, {reading.place.windows}"
        plain_s = first.setdefault(reading.place, reading.token_s)
        yield Figure(of, reading.method, "seconds a token", reading.token_s, plain_s)
    alone = {(one.questions, one.context): one for one in result.crowds if one.way == ALONE}
    for crowd in result.crowds:
        single = alone.get((crowd.questions, crowd.context))
        of = f"{crowd.questions} questions, {crowd.context:,} tokens each"
        yield Figure(of, crowd.way, "seconds", crowd.seconds, single.seconds if single else ())


def _values(cell: Cell) -> dict[str, Sequence[float]]:
    ends = {f"end of {tokens} tokens": seconds for tokens, seconds in cell.end_s.items()}
    peak = {} if cell.peak_bytes is None else {"peak memory, MB": [cell.peak_bytes / 1e6]}
    return {
        "prefill": cell.prefill_s,
        "first token": cell.first_s,
        "tokens/s": cell.tokens_per_s,
        **ends,
        **peak,
    }
