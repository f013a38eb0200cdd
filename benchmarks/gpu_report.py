"""The tables of `make gpu-report`: the records of `make gpu` as Markdown in documents."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.gpu import STAGES, Record, read
from benchmarks.report import fill
from rag_windows_eval.benchmark.result import (
    MEMORY,
    SEQUENTIAL,
    BenchRow,
    cost,
    percent,
    spread,
    table,
    times,
)

BLOCK = "gpu"
"""The name of the block that documents hold for the table."""


def write_report(out: Path, root: Path) -> int:
    """Put the tables into the documents of a checkout; the exit code, 2 where it was refused."""
    found = {name: record for name in STAGES if (record := read(out / f"{name}.json"))}
    records = {name: one for name, one in found.items() if not one["stand_in"]}
    if not records:
        tried = " but of stand-ins, which say nothing about a GPU" if found else ""
        print(
            f"There is nothing to report: {out} holds no record{tried}; do `make gpu` first.",
            file=sys.stderr,
        )
        return 2
    try:
        forms = {"short": "\n".join(summary(records)), "whole": "\n".join(report(records))}
    except (KeyError, TypeError) as error:
        print(
            f"{out} holds records of another version ({error!r}); do `make gpu FRESH=1`.",
            file=sys.stderr,
        )
        return 2
    fill(root, lambda form, name: forms[form] if name == BLOCK else None)
    print(f"{len(records)} of {len(STAGES)} stages")
    return 0


def summary(records: dict[str, Record]) -> Iterator[str]:
    """Lines: the machine, the date and the targets."""
    machines = {
        f"{one['device']}, driver {one['driver'] or 'unknown'} "
        f"({', '.join(f'{name} {version}' for name, version in one['versions'].items())})"
        for one in records.values()
        if one["device"]
    }
    dates = " and ".join(sorted({one["date"][:10] for one in records.values()}))
    yield (
        f"{'; '.join(sorted(machines)) or 'No stage reached the device'}. Weights are random. "
        f"`make gpu`, {dates}."
    )
    yield from ["", *_targets(records.get("speed-128k"))]


def report(records: dict[str, Record]) -> Iterator[str]:
    """Lines: the summary, every stage with how it ended, and what was measured."""
    yield from [*summary(records), ""]
    rows = []
    for name in STAGES:
        one = records.get(name)
        if one is None:
            rows.append([name, "not run", "-", "-", "-"])
            continue
        status = one["status"] + (f": {_cell(one['error'])}" if one["error"] else "")
        took = "-" if one["seconds"] is None else f"{one['seconds']:,.0f} s"
        rows.append([name, status, one["date"], one["commit"] or one["sources"], took])
    yield from [*table(["stage", "ended", "date", "commit", "took"], rows), ""]
    for name, one in records.items():
        if one["results"]:
            open_ = "" if one["status"] == "finished" else f" ({one['status']})"
            yield from [f"### {name}{open_}", ""]
            for bound in one["bounded"]:
                yield from [f"Bounded: {bound}.", ""]
            yield from [*SHOWN.get(name, _bench)(one["results"]), ""]


def _cell(text: str) -> str:
    """A text as it can stand in a table."""
    return " ".join(text.replace("|", "/").replace("<", "&lt;").split())


def _rows(results: Record) -> dict[str, BenchRow]:
    """The rows of all runs of a stage, by their ways."""
    return {row["name"]: BenchRow(**row) for one in results.values() for row in one["rows"]}


def _targets(record: Record | None) -> Iterator[str]:
    rows = _rows(record["results"]) if record else {}
    ours, theirs = rows.get(MEMORY), rows.get(SEQUENTIAL)
    costs = ours.citations_cost if ours else []
    share = ours.roofline_decode_s / statistics.median(ours.decode_s) if ours else None
    sooner = (
        statistics.median(theirs.first_s) / statistics.median(ours.first_s)
        if ours and theirs
        else None
    )
    middle = statistics.median(costs) if costs else None
    asked: list[tuple[str, str, str, bool | None]] = [
        ("decode step with citations, against without", cost(costs), "at most 1.03x",
         None if middle is None else middle <= 1.03),
        ("decode step, share of the bandwidth roofline", "-" if share is None else percent(share),
         "at least 60%", None if share is None else share >= 0.6),
        ("first token from memory, against plain transformers",
         times(theirs.first_s, ours.first_s) if ours and theirs else "-", "at least 300x",
         None if sooner is None else sooner >= 300),
    ]  # fmt: skip
    finished = record is not None and record["status"] == "finished"
    unknown = "not measured" if finished or record is None else f"stage {record['status']}"
    lines = []
    for name, reached, wanted, met in asked:
        known = finished and met is not None
        lines.append([name, reached, wanted, ("yes" if met else "no") if known else unknown])
    yield from table(["8B shape, 131,072 tokens", "reached", "asked", "met"], lines)


def _bench(results: Record) -> Iterator[str]:
    """The rows of a stage's runs of the bench, those of one context in one table."""
    runs = list(results.values())
    made = [(one["context"], one["window"], BenchRow(**row)) for one in runs for row in one["rows"]]
    bases = {context: row for context, _, row in made if row.name == SEQUENTIAL}
    lines = [
        [
            f"{context:,} in {window:,}",
            row.name,
            spread(row.first_s, "s"),
            times(bases[context].first_s if context in bases else [], row.first_s),
            spread([step * 1000 for step in row.decode_s], "ms"),
            times(bases[context].decode_s if context in bases else [], row.decode_s),
            percent(row.roofline_decode_s / statistics.median(row.decode_s)),
            cost(row.citations_cost),
        ]
        for context, window, row in made
    ]
    head = ["tokens in windows of", "way", "first token", "sooner", "decode step", "faster"]
    head += ["of the roofline", "citations cost"]
    yield from table(head, lines)
    for one in runs:
        if one["concurrency"]:
            alone = one["concurrency"][0]["seconds"]
            head = ["questions", "way", "seconds for all", "by the first", "citations cost"]
            lines = [
                [
                    *(f"{way['questions']}", way["name"], spread(way["seconds"], "s")),
                    *(times(alone, way["seconds"]), cost(way["citations_cost"])),
                ]
                for way in one["concurrency"]
            ]
            yield from ["", *table(head, lines)]


def _memory(results: Record) -> Iterator[str]:
    yield from table(
        ["tokens", "way", "weights", "keys and values", "peak beside the weights"],
        [
            [
                f"{row['context']:,}",
                row["way"],
                *(
                    "-" if row[name] is None else f"{row[name] / 1e9:,.2f} GB"
                    for name in ("weights", "kv", "peak")
                ),
            ]
            for row in results["rows"]
        ],
    )


def _parity(results: Record) -> Iterator[str]:
    yield "The largest distance from float64 over steps, queries and texts of ragged windows."
    yield ""
    worst: dict[tuple[str, ...], list[Record]] = {}
    for row in results["rows"]:
        cap = "-" if row["softcap"] is None else f"{row['softcap']:g}"
        size = f"{row['dim']}", f"{row['groups']}", row["dtype"], cap
        worst.setdefault(size, []).append(row)
    yield from table(
        ["head size", "heads a kv head", "dtype", "soft cap", "output", "log-sum-exp", "backends"],
        [
            [
                *size,
                *(f"{max(one[error] for one in rows):.1e}" for error in ("output", "lse")),
                ", ".join(sorted({f"{one['kind']}: {one['backend']}" for one in rows})),
            ]
            for size, rows in worst.items()
        ],
    )


def _profile(results: Record) -> Iterator[str]:
    if "kinds_s" not in results:
        yield f"A decode step took {results['token_s'] * 1000:.2f} ms; no profile was taken."
        return
    whole, busy = results["token_s"], results["busy_s"]
    yield (
        f"A decode step took {whole * 1000:.2f} ms; kernels ran for {busy * 1000:.2f} ms of it, "
        f"gaps between them were {max(0.0, 1 - busy / whole):.0%}. For each token there were "
        + ", ".join(
            f"{count:g} {name.replace('_', ' ')}" for name, count in results["counts"].items()
        )
        + "."
    )
    yield ""
    kinds = sorted(results["kinds_s"].items(), key=lambda one: -one[1])
    lines = [[kind, f"{s * 1000:.3f} ms", f"{s / busy:.0%}", "-"] for kind, s in kinds]
    for top in results["top"]:
        took = top["seconds"]
        name = f"`{top['name'].replace('|', '/')}`"
        lines.append([name, f"{took * 1000:.3f} ms", f"{took / busy:.0%}", f"{top['calls']:g}"])
    yield from table(["kernels", "of a token", "share", "calls"], lines)


def _environment(results: Record) -> Iterator[str]:
    device = results.get("device", {})
    rates = {
        name.replace("_", " "): f"{value:.3g}"
        for name, value in results.items()
        if isinstance(value, float)
    }
    yield ", ".join(f"{name} {value}" for name, value in {**device, **rates}.items()) + "."
    if absent := [line for line, has in results["packages"].items() if has is None]:
        yield f"Not installed: {', '.join(absent)}."


def _tests(results: Record) -> Iterator[str]:
    outcomes = list(results["tests"].values())
    yield ", ".join(f"{outcomes.count(one)} {one}" for one in sorted(set(outcomes))) + "."


SHOWN: dict[str, Callable[[Record], Iterator[str]]] = {
    "environment": _environment,
    "tests": _tests,
    "parity": _parity,
    "memory": _memory,
    "profile": _profile,
}
