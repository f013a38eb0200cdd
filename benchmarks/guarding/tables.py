"""What was found, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.guarding.asking import Outcome, Timing
from benchmarks.guarding.cases import Case
from benchmarks.guarding.choosing import (
    SIGNALS,
    Guarded,
    Signal,
    above,
    choose,
    guarded,
    halves,
    parted,
    separation,
)
from benchmarks.judgement.page import points, table

Found = Mapping[Case, Sequence[Outcome]]


def default_table(found: Found) -> str:
    """``fallback="sequential"`` on all questions: nothing is chosen, so nothing is held back."""
    head = ["case", "windows", "sequential", "guarded", "gain, points", "fell back"]
    rows = []
    for case, outcomes in found.items():
        made = guarded(outcomes, lambda one: one.by_default)
        rows.append([case.label, *_shares(made), *_fallen(made)])
    return table([*head, "rescued", "spoilt", "nothing changed", "at random"], rows)


def chosen_table(found: Found) -> str:
    """Thresholds chosen on every other context, tried on the rest."""
    head = ["case", "signal", "threshold", "windows", "sequential", "guarded", "gain, points"]
    rows = [
        row
        for label, outcomes in _with_mixtures(found).items()
        for name, signal in SIGNALS.items()
        if all(signal(one) is not None for one in outcomes)
        for row in [_chosen(label, name, signal, outcomes)]
    ]
    fallen = ["fell back", "rescued", "spoilt", "nothing changed", "at random"]
    return table([*head, *fallen], rows)


def signal_table(found: Found) -> str:
    """What the signals measured: 5th, 50th and 95th percentile, and how well they tell apart."""
    head = ["case", "signal", "lost", "of them", "all others", "told apart"]
    rows = []
    for label, outcomes in _with_mixtures(found).items():
        for name, signal in SIGNALS.items():
            if any(signal(one) is None for one in outcomes):
                continue
            lost, kept = parted(outcomes, signal)
            apart = separation(lost, kept)
            rows.append(
                [
                    label,
                    name,
                    f"{len(lost)} of {len(outcomes)}",
                    _percentiles(lost),
                    _percentiles(kept),
                    "" if apart is None else f"{apart:.2f}",
                ]
            )
    return table(head, rows)


def time_table(timings: Mapping[Case, Timing]) -> str:
    """Milliseconds of one question."""
    return table(
        ["ms a question", "windows", "sequential", "guarded by default"],
        [
            [case.label, *(f"{1e3 * one:.0f}" for one in (t.windows, t.ordinary, t.guarded))]
            for case, t in timings.items()
        ],
    )


def _with_mixtures(found: Found) -> dict[str, list[Outcome]]:
    """The cases, and all of a model's that the guard can measure, as one."""
    labelled = {case.label: list(outcomes) for case, outcomes in found.items()}
    for model in dict.fromkeys(case.model for case in found):
        own = [
            outcomes
            for case, outcomes in found.items()
            if case.model == model
            and all(signal(one) is not None for one in outcomes for signal in SIGNALS.values())
        ]
        if len(own) < 2:
            continue
        # Contexts of different cases are different ones, and stay in their halves.
        step = 2 * max(1 + one.context for outcomes in own for one in outcomes)
        labelled[f"all measured ones of {model}"] = [
            _moved(one, number * step) for number, outcomes in enumerate(own) for one in outcomes
        ]
    return labelled


def _moved(one: Outcome, by: int) -> Outcome:
    return Outcome(
        one.context + by, one.windows, one.ordinary, one.few, one.spread, one.disagreement
    )


def _chosen(label: str, name: str, signal: Signal, outcomes: Sequence[Outcome]) -> list[str]:
    choosing, testing = halves(outcomes)
    threshold = choose(choosing, signal)
    made = guarded(testing, above(signal, threshold))
    shown = "never" if np.isinf(threshold) else f"{threshold:.2f}"
    return [label, name, shown, *_shares(made), *_fallen(made)]


def _shares(made: Guarded) -> list[str]:
    shares = (made.windows, made.ordinary, made.guarded)
    return [*(f"{100 * share:.1f}" for share in shares), points(made.gain)]


def _fallen(made: Guarded) -> list[str]:
    same = made.fell - made.rescued - made.spoilt
    shares = (made.fell, made.rescued, made.spoilt, same, made.at_random)
    return [f"{100 * share:.1f}" for share in shares]


def _percentiles(values: np.ndarray) -> str:
    if not len(values):
        return ""
    return ", ".join(f"{value:.2f}" for value in np.percentile(values, (5, 50, 95)))
