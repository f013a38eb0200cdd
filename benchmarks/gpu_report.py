"""The tables of `make gpu-report`: the records of `make gpu` as Markdown in documents."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.gpu import STAGES, Record, read
from benchmarks.gpu_table import HEAD, cells
from benchmarks.report import fill
from rag_windows_eval.benchmark.result import table

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
    yield from ["", *_targets(records.get("table"))]


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
            yield from [*SHOWN[name](one["results"]), ""]


def _cell(text: str) -> str:
    """A text as it can stand in a table."""
    return " ".join(text.replace("|", "/").replace("<", "&lt;").split())


def _targets(record: Record | None) -> Iterator[str]:
    """The lines of the table that something was asked of."""
    lines = [
        one for one in (record["results"].get("lines", []) if record else []) if one.get("asked")
    ]
    if not lines:
        yield "`make gpu STAGE=table` has not reached what is asked for."
        return
    yield from table(HEAD, map(cells, lines))


def _table(results: Record) -> Iterator[str]:
    yield from table(HEAD, map(cells, results["lines"]))


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
    "table": _table,
    "environment": _environment,
    "tests": _tests,
    "parity": _parity,
    "memory": _memory,
    "profile": _profile,
}
