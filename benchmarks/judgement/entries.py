"""The rows of the tables: which methods are judged, and which of them share their windows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rag_windows.errors import MethodError
from rag_windows.methods import Method, resolve
from rag_windows.methods.registry import METHODS

BASE = "sequential"
PLAIN = "pcw"
CALIBRATED = "ape calibrated"
DEAR = ("ensemble", "deep-thinking", "codebook")
"""Families that take several times as long as the others together."""

LINK_SHARES = (0.05, 0.15, 0.3, 0.5)
"""Shares of linked tokens whose accuracy is drawn, besides 0 (plain windows) and 1 (sequential)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One row.

    Attributes:
        label: its name on the page.
        family: rows of one family share a panel of the plots.
        make: builds the method; told what calibration found, and the number of passages.
    """

    label: str
    family: str
    make: Callable[[Method | None, int], Method]


def _named(name: str, /, **fields: object) -> Callable[[Method | None, int], Method]:
    return functools.partial(_build, name, fields)


def _build(
    name: str, fields: Mapping[str, object], calibrated: Method | None, passages: int
) -> Method:
    if name not in METHODS:
        raise MethodError(
            f"The judgement's list names the method {name!r}, which is not among {sorted(METHODS)}."
        )
    return METHODS[name](**fields) if fields else resolve(name)


def _naive_bayes(calibrated: Method | None, passages: int) -> Method:
    # The sum of what the windows say, less what was said without any once for each further one.
    return _build("ensemble", {"beta": passages - 1, "nucleus": 1}, calibrated, passages)


def _calibrated(calibrated: Method | None, passages: int) -> Method:
    if calibrated is None:
        raise MethodError(f"{CALIBRATED!r} needs the numbers that calibration found.")
    return calibrated


def entries() -> tuple[Entry, ...]:
    """The default list, in the order of the tables."""
    ape = resolve("ape")
    return (
        Entry(BASE, "sequential", _named(BASE)),
        Entry(PLAIN, "one merge", _named(PLAIN)),
        Entry("ape", "one merge", _named("ape")),
        Entry(CALIBRATED, "one merge", _calibrated),
        Entry("structured-prompting", "weighted query", _named("structured-prompting")),
        Entry("mateicl", "weighted query", _named("mateicl")),
        *(
            Entry(f"ensemble, {weights}", "ensemble", _named("ensemble", weights=weights))
            for weights in ("uniform", "retrieval", "entropy")
        ),
        Entry(
            "ensemble, surest (NBCE)",
            "ensemble",
            _named("ensemble", weights="entropy", pooling="minimum"),
        ),
        Entry("ensemble, naive Bayes", "ensemble", _naive_bayes),
        *(
            Entry(
                f"deep-thinking, {positions}",
                "deep-thinking",
                _named("deep-thinking", positions=positions),
            )
            for positions in ("continue", "reuse")
        ),
        Entry("deep-thinking + ape", "deep-thinking", _named("deep-thinking", reader=ape)),
        *(
            Entry(
                f"codebook, 8 by {fusion}",
                "codebook",
                _named("codebook", retrieve=8, fusion=fusion),
            )
            for fusion in ("concat", "mean")
        ),
        *linked(0.15),
    )


def linked(share: float) -> tuple[Entry, ...]:
    """Both choices of linked tokens at a share of them."""
    return tuple(
        Entry(
            f"linked {share:.0%}, {choose}",
            "linked",
            _named("linked", tokens=share, choose=choose),
        )
        for choose in ("first", "deviation")
    )


def chosen(labels: Sequence[str] | None) -> tuple[Entry, ...]:
    """The default list, or those of it that are named.

    Raises:
        MethodError: a name that is not on the list.
    """
    known = {entry.label: entry for entry in entries()}
    if labels is None:
        return tuple(known.values())
    unknown = [label for label in labels if label not in known]
    if unknown:
        raise MethodError(f"Unknown methods {unknown}; choose from {list(known)}.")
    return tuple(known[label] for label in labels)


def shares_windows(one: Method, other: Method) -> bool:
    """Whether a context encoded for one method can be read by another as it is."""
    return _encoding(one) == _encoding(other)


def _encoding(method: Method) -> tuple[object, ...]:
    # Where a step chooses among windows or combines them, a context keeps them singly.
    return (
        method.windowed,
        method.encoding,
        method.alignment,
        method.refinement,
        method.linking,
        method.selection is None,
        method.combination is None,
    )
