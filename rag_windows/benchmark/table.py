"""A result as Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rag_windows.benchmark.growth import growth
from rag_windows.benchmark.plan import SEQUENTIAL
from rag_windows.benchmark.result import Cell, Result, median
from rag_windows.benchmark.sections import crowds, readings, steps
from rag_windows.benchmark.words import NONE, megabytes, percent, spread, table, times


def markdown(result: Result) -> str:
    """Tables of medians with the smallest and the largest round, ratios, and growth."""
    machine = result.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    threads = "thread" if machine.threads == 1 else "threads"
    goes = f" The run took {result.goes} calls; the rates are the last one's."
    lines = [
        f"{result.shape}, {result.dtype}, {machine.device}, {machine.threads} {threads} "
        f"({versions}). Windows are read by {_method(result.method)}. Measured in the same run: "
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
        lines += ["", f"### {place.context:,} tokens, {place.windows}", "", *_block(cells)]
        lines += _left_out(cells)
        lines += _memory(cells)
        lines += readings([one for one in result.readings if one.place == place])
        lines += steps([one for one in result.steps if one.place == place])
    lines += growth(result.cells)
    lines += crowds(result.crowds)
    return "\n".join(lines) + "\n"


def _method(described: Mapping[str, object]) -> str:
    numbers = ", ".join(f"{name} {value}" for name, value in described.items() if name != "name")
    return f"{described.get('name')} ({numbers})" if numbers else str(described.get("name"))


def _block(cells: Sequence[Cell]) -> list[str]:
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
            row += [
                spread(own, "s"),
                times(base.end_s.get(str(tokens), []) if base else [], own),
            ]
        rows.append(row)
    return table(head, rows)


def _left_out(cells: Sequence[Cell]) -> list[str]:
    """What some ways did less than others, in words."""
    rounds = max(len(cell.first_s) for cell in cells)
    tokens = max(cell.tokens for cell in cells)
    told = [
        f"{cell.way}: {len(cell.first_s)} of {rounds} rounds, {cell.tokens} of {tokens} new tokens"
        for cell in cells
        if (len(cell.first_s), cell.tokens) != (rounds, tokens)
    ]
    most = f"{rounds} round{'s' if rounds > 1 else ''}."
    return ["", " ".join([most, *(f"{one}." for one in told)])]


def _memory(cells: Sequence[Cell]) -> list[str]:
    rows = [
        [
            cell.way,
            megabytes(cell.weight_bytes),
            megabytes(cell.kv_bytes),
            megabytes(cell.peak_bytes),
            f"{math.ceil(cell.excess * 1000) / 10:.1f}%",
        ]
        for cell in cells
        if cell.peak_bytes is not None and cell.excess is not None
    ]
    if not rows:
        return []
    return [
        "",
        "Memory of one prefill and two tokens (on the CPU in a process of its own); the last "
        "column is the peak above weights, keys and values as a share of these, rounded up.",
        "",
        *table(
            [
                "way",
                "weights",
                "keys and values",
                "peak beside the weights",
                "above what is needed",
            ],
            rows,
        ),
    ]
