"""The page's smaller tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from benchmarks.judgement.entries import BASE, CALIBRATED, LINK_SHARES, PLAIN, linked
from benchmarks.judgement.estimates import ratio
from benchmarks.judgement.page import (
    NOT_RUN,
    accuracy_tables,
    percent,
    points,
    table,
)
from benchmarks.judgement.run import COST_TASK, SWEEP_PASSAGES, SWEEP_TASK
from benchmarks.judgement.summary import Summary
from rag_windows.evaluation.statistics.estimate import Estimate
from rag_windows.methods import from_description

TRAINED = 8
"""The most passages that the readers were trained with: there, sequential reading still fits."""

READERS = (PLAIN, "ape", CALIBRATED)
"""The methods that keep every window, as a user without further wishes would read."""


def blocks(summary: Summary, order: Sequence[str]) -> dict[str, Callable[[], str]]:
    """Every block of the page, by name."""
    return {
        "run": lambda: run_line(summary),
        "aims": lambda: aims(summary),
        "accuracy": lambda: accuracy_tables(summary, order),
        "retention": lambda: retention_table(summary, order),
        "calibration": lambda: calibration_table(summary),
        "citations": lambda: citation_table(summary, order),
        "links": lambda: link_table(summary),
        "steps": lambda: step_table(summary, order),
        "cost": lambda: cost_table(summary, order),
    }


def run_line(summary: Summary) -> str:
    """Where the figures come from."""
    if not summary.runs:
        return NOT_RUN
    seconds = sum((row.encode_s or 0.0) + row.read_s for row in summary.rows.values())
    last = summary.runs[-1]
    answers = sum(row.questions for row in summary.rows.values())
    compared = sum(cost.questions for cost in summary.costs.values())
    agreed = sum(cost.agreed for cost in summary.costs.values())
    return (
        f"`python benchmarks/methods.py`, {last.jobs} process{'' if last.jobs == 1 else 'es'} "
        f"of one thread each on {last.machine} (no GPU): {len(summary.rows):,} cells, "
        f"{answers:,} answers, "
        f"{seconds / 60:.0f} minutes of encoding and reading, the processes' together. "
        f"For {compared:,} questions the answer was also written by "
        f"`WindowedLM.generate`, token by token: it was right or wrong exactly as measured here "
        f"for {agreed:,} of them.\n"
    )


def retention_table(summary: Summary, order: Sequence[str]) -> str:
    """Right answers for each right one of the sequential reader, where that one still fits."""
    columns = [
        (model, task)
        for model, task in summary.sections
        if TRAINED in summary.passages(model, task)
    ]
    rows = []
    for label in order:
        found = [summary.rows.get((*column, TRAINED, label)) for column in columns]
        if label != BASE and any(found):
            rows.append([label, *(percent(r.retention) if r else "" for r in found)])
    head = [f"{task}, `{model}`" for model, task in columns]
    return table([f"{TRAINED} passages", *head], rows)


def calibration_table(summary: Summary) -> str:
    """What calibration found, and what that adds to the default on questions it did not see."""
    lines = []
    for model, choice in summary.choices.items():
        method = from_description(json.loads(choice.description))
        kept = "adopted" if choice.adopted else "not adopted, the default stays"
        lines.append(
            f"`{model}`: {choice.examples} labelled examples, {choice.seconds:.0f} s on one core; "
            f"the best setting is `{method!r}`, {kept}.\n"
        )
    rows = []
    for model, task in summary.sections:
        sizes = [size for size in (TRAINED, 64) if size in summary.passages(model, task)]
        changes = [points(summary.compared(model, task, s, CALIBRATED, "ape")) for s in sizes]
        if len(changes) == 2 and all(changes):
            rows.append([f"{task}, `{model}`", *changes])
    head = ["task", f"best setting adds at {TRAINED}", "at 64"]
    return "\n".join([*lines, table(head, rows)]) if lines else NOT_RUN


def citation_table(summary: Summary, order: Sequence[str]) -> str:
    """Right answers whose most attended passage holds the answer."""
    parts = []
    for model, task in summary.sections:
        if task != "single-hop":
            continue
        sizes = [size for size in summary.passages(model, task) if size > 1]
        rows = []
        for label in summary.labels(model, task, order):
            found = [summary.rows.get((model, task, size, label)) for size in sizes]
            if any(r is not None and r.cited is not None for r in found):
                rows.append([label, *(percent(r.cited) if r else "" for r in found)])
        parts.append(table([f"`{model}`", *map(str, sizes)], rows))
    return "\n".join(parts) or NOT_RUN


def link_table(summary: Summary) -> str:
    """Accuracy with more and more of each window's tokens encoded in sight of the others."""
    found = [pair for pair in summary.sections if pair[1] == SWEEP_TASK]
    if not found:
        return NOT_RUN
    model, task = found[0]
    first, deviation = zip(*(linked(share) for share in LINK_SHARES), strict=True)
    rows = []
    for share, labels in [
        ("0 (plain windows)", (PLAIN, PLAIN)),
        *(
            (f"{share:.0%}", (a.label, b.label))
            for share, a, b in zip(LINK_SHARES, first, deviation, strict=True)
        ),
        ("100% (sequential)", (BASE, BASE)),
    ]:
        cells = [summary.rows.get((model, task, SWEEP_PASSAGES, label)) for label in labels]
        if all(cells):
            rows.append(
                [
                    share,
                    *(percent(r.accuracy) for r in cells if r),
                    *(percent(r.retention) for r in cells if r),
                ]
            )
    head = [f"linked, {SWEEP_PASSAGES} passages", "first tokens", "highest deviation"]
    return table([*head, "first: of sequential's", "deviation: of sequential's"], rows)


def step_table(summary: Summary, order: Sequence[str]) -> str:
    """Two-hop answers: the whole, and the value once the steps before it are right."""
    parts = []
    for model, task in summary.sections:
        if task != "two-hop":
            continue
        sizes = summary.passages(model, task)
        rows = []
        for label in summary.labels(model, task, order):
            found = [summary.rows.get((model, task, size, label)) for size in sizes]
            rows.append([label, *(percent(r.value) if r else "" for r in found)])
        parts.append(table([f"`{model}`", *map(str, sizes)], rows))
    return "\n".join(parts) or NOT_RUN


def cost_table(summary: Summary, order: Sequence[str]) -> str:
    """Milliseconds to encode and to answer, medians."""
    sizes = sorted({size for size, _ in summary.costs})
    rows = []
    for label in order:
        found = [summary.costs.get((size, label)) for size in sizes]
        if any(found):
            rows.append(
                [
                    label,
                    *(
                        f"{1e3 * c.encode_s:.0f} + {1e3 * c.answer_s:.0f}" if c else ""
                        for c in found
                    ),
                ]
            )
    return table(["encode + answer, ms", *map(str, sizes)], rows)


def aims(summary: Summary) -> str:
    """What was asked of the methods, and whether it holds."""
    rows: list[list[str]] = []

    def add(aim: str, method: str, found: Estimate | None, least: float) -> None:
        if found is not None:
            verdict = "yes" if found.value >= least else "**no**"
            rows.append([aim, method, percent(found), verdict])

    readers = dict.fromkeys(model for model, task in summary.sections if task == COST_TASK)
    for model in readers:
        for label in READERS:
            row = summary.rows.get((model, COST_TASK, TRAINED, label))
            aim = f"single-hop at {TRAINED} passages, `{model}`: at least 99% of sequential's"
            add(aim, label, row.retention if row else None, 0.99)
        for label in READERS:
            few = summary.answers(model, COST_TASK, TRAINED, label)
            many = summary.answers(model, COST_TASK, 64, label)
            aim = f"single-hop at 64, `{model}`: at least 95% of its own at {TRAINED}"
            add(aim, label, ratio(many, few) if few and many else None, 0.95)
    for model, task in summary.sections:
        if task == SWEEP_TASK:
            for entry in linked(0.15):
                row = summary.rows.get((model, task, SWEEP_PASSAGES, entry.label))
                aim = f"two-hop at {SWEEP_PASSAGES}, `{model}`: at least 90% of sequential's"
                add(aim, entry.label, row.retention if row else None, 0.9)
    for model in readers:
        for size in summary.passages(model, COST_TASK):
            row = summary.rows.get((model, COST_TASK, size, "ape"))
            aim = f"right answers at {size} passages, `{model}`: cited passage holds 95%"
            if size > 1:
                add(aim, "ape", row.cited if row else None, 0.95)
    for model, choice in summary.choices.items():
        verdict = "yes" if choice.seconds < 60 else "**no**"
        took = f"{choice.seconds:.0f} s"
        rows.append([f"calibration under 60 s, `{model}`", "ape", took, verdict])
        never = f"calibration never worse than the default, `{model}`"
        if not choice.adopted:
            rows.append([never, "ape", "the default was chosen", "yes"])
            continue
        for section in summary.sections:
            if section[0] == model:
                rows += _choice_rows(summary, *section)
    return table(["aim", "method", "measured", "met"], rows)


def _choice_rows(summary: Summary, model: str, task: str) -> list[list[str]]:
    """Whether what calibration chose is worse than the default beyond the interval."""
    rows = []
    for size in (TRAINED, 64):
        change = summary.compared(model, task, size, CALIBRATED, "ape")
        if change is not None:
            aim = f"calibration never worse than the default: {task}, {size} passages, `{model}`"
            verdict = "yes" if change.high >= 0 else "**no**"
            rows.append([aim, CALIBRATED, f"{points(change)} points", verdict])
    return rows
