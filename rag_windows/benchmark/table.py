"""A result as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rag_windows.benchmark.result import Cell, Result, exponent, median
from rag_windows.benchmark.way import COLD, SEQUENTIAL


def markdown(result: Result) -> str:
    """Tables of medians with the smallest and the largest round, ratios, and growth."""
    machine = result.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    lines = [
        f"{result.shape}, {result.dtype}, {machine.device}, {machine.threads} threads "
        f"({versions}). Measured in the same run: "
        f"{result.floor.linear_flops_per_s / 1e9:,.0f} GFLOP/s in the model's linear layers, "
        f"{result.floor.memory_bytes_per_s / 1e9:,.1f} GB/s from memory.",
        "",
        f"    {result.command}",
    ]
    for place in dict.fromkeys(cell.place for cell in result.cells):
        cells = [cell for cell in result.cells if cell.place == place]
        lines += ["", *_block(cells)]
    if growth := _growth(result.cells):
        lines += ["", *growth]
    if result.crowds:
        lines += ["", *_crowds(result)]
    return "\n".join(lines) + "\n"


def _block(cells: Sequence[Cell]) -> list[str]:
    first = cells[0]
    base = next((cell for cell in cells if cell.way == SEQUENTIAL), None)
    ends = list(first.end_s)
    head = ["way", "prefill", "of the floor", "first token", "sooner", "tokens/s", "faster"]
    head += ["of the floor"]
    for tokens in ends:
        head += [f"end of {tokens} tokens", "sooner"]
    sort = "ragged windows, about" if first.ragged else "windows of"
    rounds = len(first.first_s)
    lines = [
        f"### {first.context:,} tokens, {sort} {first.window}",
        "",
        f"Medians of {rounds} rounds (smallest to largest).",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
    ]
    for cell in cells:
        cold = cell.way in (COLD, SEQUENTIAL)
        row = [
            cell.way,
            spread(cell.prefill_s, "s"),
            percent(cell.prefill_floor_s / median(cell.prefill_s)) if cold else "",
            spread(cell.first_s, "s"),
            _times(base.first_s if base else [], cell.first_s),
            spread(cell.tokens_per_s, "/s"),
            _times(cell.tokens_per_s, base.tokens_per_s if base else []),
            percent(cell.decode_floor_s * median(cell.tokens_per_s)),
        ]
        for tokens in ends:
            row += [
                spread(cell.end_s[tokens], "s"),
                _times(base.end_s[tokens] if base else [], cell.end_s[tokens]),
            ]
        lines.append(f"| {' | '.join(row)} |")
    for cell in cells:
        if cell.peak_bytes is not None:
            kept = cell.kv_bytes + cell.weight_bytes
            over = max(0, cell.peak_bytes - cell.kv_bytes)
            lines += [
                "",
                f"Peak memory of {cell.way}: {cell.peak_bytes / 1e6:,.0f} MB, of which keys and "
                f"values take {cell.kv_bytes / 1e6:,.0f} MB; the rest is {over / kept:.1%} of "
                f"weights and keys and values together ({kept / 1e6:,.0f} MB).",
            ]
    return lines


def _growth(cells: Sequence[Cell]) -> list[str]:
    rows = []
    for way in dict.fromkeys(cell.way for cell in cells):
        for window, ragged in dict.fromkeys((c.window, c.ragged) for c in cells):
            own = [c for c in cells if (c.way, c.window, c.ragged) == (way, window, ragged)]
            contexts = [cell.context for cell in own]
            first = exponent(contexts, [median(cell.first_s) for cell in own])
            each = exponent(contexts, [1 / median(cell.tokens_per_s) for cell in own])
            if not math.isnan(first):
                sort = f"about {window}" if ragged else f"{window}"
                rows.append(f"| {way} | {sort} | {first:.2f} | {each:.2f} |")
    if not rows:
        return []
    return [
        "### Growth",
        "",
        "Exponent of time against tokens of context: 1 where twice the context takes twice the "
        "time.",
        "",
        "| way | windows of | first token | each further token |",
        "|---|---|---|---|",
        *rows,
    ]


def _crowds(result: Result) -> list[str]:
    lines = [
        "### Many questions that share half of their passages",
        "",
        "| questions | tokens of each | way | seconds for all | throughput |",
        "|---|---|---|---|---|",
    ]
    for crowd in result.crowds:
        alone = next(
            (
                one.seconds
                for one in result.crowds
                if (one.questions, one.context) == (crowd.questions, crowd.context)
                and one.way == "one by one"
            ),
            [],
        )
        lines.append(
            f"| {crowd.questions} | {crowd.context:,} | {crowd.way} | {spread(crowd.seconds, 's')} "
            f"| {_times(alone, crowd.seconds)} |"
        )
    return lines


def spread(values: Sequence[float], unit: str) -> str:
    """Median with the smallest and the largest."""
    if not values or math.isnan(median(values)):
        return "-"
    middle, low, high = (number(one) for one in (median(values), min(values), max(values)))
    return f"{middle} {unit} ({low} to {high})"


def number(value: float) -> str:
    """Three figures."""
    return f"{value:#.3g}".rstrip(".") if value < 1000 else f"{value:,.0f}"


def percent(share: float) -> str:
    """Rounded down, so that no aim seems met that is not."""
    return "-" if math.isnan(share) else f"{math.floor(share * 100)}%"


def _times(slow: Sequence[float], fast: Sequence[float]) -> str:
    if not slow or not fast:
        return ""
    ratio = median(slow) / median(fast)
    return "-" if math.isnan(ratio) else f"{math.floor(ratio * 100) / 100:.2f}x"
