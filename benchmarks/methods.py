"""The judgement of the methods: writes the tables and pictures of docs/methods.md.

    python benchmarks/methods.py [--quick] [--tasks single-hop ...] [--passages 1 8 64]
        [--dear 1 8 64] [--methods pcw ape ...] [--questions 1000] [--jobs 2] [--fresh] [--draw]

Every method answers the same held-out questions of the embedded readers over 1 to 64 passages; what
is measured, and how, stands on the page itself. Each finished cell is kept in a journal
(runs/methods.jsonl), so an interrupted run goes on where it stopped, and a run with more methods or
tasks adds what is missing. A journal of other weights, seeds or numbers of questions is refused;
after a change of the engine start with ``--fresh``.

Ensembles, Deep-Thinking and codebooks take several times as long as all other methods together;
``--dear 1 8 64`` asks them over these numbers of passages only.

``--draw`` asks nothing: it writes page and pictures from what the journal holds. Give it a copy of
the journal while another run writes to it.

``--quick`` asks a few questions over 2 and 8 passages and writes into runs/methods-quick instead of
docs.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.judgement.cases import TASKS
from benchmarks.judgement.entries import chosen, entries
from benchmarks.judgement.journal import Journal
from benchmarks.judgement.page import fill_page
from benchmarks.judgement.plots import draw_all
from benchmarks.judgement.run import Plan, run
from benchmarks.judgement.summary import Summary
from benchmarks.judgement.tables import blocks

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "methods.md"
QUICK = ROOT / "runs" / "methods-quick"
PASSAGES = (1, 2, 4, 8, 16, 32, 64)
LEARNED = ("two-hop", "classification")
"""Tasks that only the second reader has learned."""


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python benchmarks/methods.py", description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--passages", nargs="+", type=int)
    parser.add_argument(
        "--dear", nargs="+", type=int, help="numbers for the slow families; default: as the others"
    )
    parser.add_argument("--methods", nargs="+", help="labels of the tables; default: all")
    parser.add_argument("--questions", type=int, help="of each cell")
    parser.add_argument("--timed", type=int, help="questions of each cost")
    parser.add_argument("--examples", type=int, help="that calibration sees, per model")
    parser.add_argument("--reader", default="tiny-reader")
    parser.add_argument("--learner", default="tiny-learner", help="for two-hop and classification")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="processes, with one thread each")
    parser.add_argument("--quick", action="store_true", help="a few questions, in seconds")
    parser.add_argument("--fresh", action="store_true", help="forget what is in the journal")
    parser.add_argument("--draw", action="store_true", help="ask nothing, write what is there")
    parser.add_argument("--journal", type=Path)
    parser.add_argument("--out", type=Path, help="where the page goes, and its pictures beside it")
    options = parser.parse_args(given)
    quick = options.quick
    options.passages = options.passages or ((2, 8) if quick else PASSAGES)
    options.dear = options.dear or options.passages
    options.questions = options.questions or (8 if quick else 1000)
    options.timed = options.timed or (1 if quick else 3)
    options.examples = options.examples or (8 if quick else 42)
    options.out = options.out or (QUICK if quick else PAGE.parent)
    name = "methods-quick.jsonl" if quick else "methods.jsonl"
    options.journal = options.journal or ROOT / "runs" / name
    if options.draw and (options.fresh or not options.journal.exists()):
        parser.error(f"--draw needs a journal, and {options.journal} is not there or to be emptied")
    return options


def plan_of(options: argparse.Namespace) -> Plan:
    """What the command line asks for."""
    return Plan(
        models={
            task: (options.learner,) if task in LEARNED else (options.reader,)
            for task in options.tasks
        },
        passages=tuple(options.passages),
        dear=tuple(options.dear),
        entries=chosen(options.methods),
        questions=options.questions,
        timed=options.timed,
        examples=options.examples,
        seed=options.seed,
        jobs=options.jobs,
    )


def write(journal: Journal, out: Path) -> list[Path]:
    """Write page, pictures and all figures as JSON.

    Returns:
        The files written.
    """
    summary = Summary(journal.records)
    named = entries()
    page = fill_page(
        PAGE.read_text(encoding="utf-8"), blocks(summary, [entry.label for entry in named])
    )
    beside = out / "methods"
    files = draw_all(summary, named, beside)
    (out / "methods.md").write_text(page, encoding="utf-8")
    figures = {
        name: "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]"
        for name, rows in summary.as_json().items()
    }
    body = ",\n".join(f"{json.dumps(name)}: {rows}" for name, rows in figures.items())
    (beside / "figures.json").write_text(f"{{\n{body}\n}}\n", encoding="utf-8")
    return [out / "methods.md", beside / "figures.json", *files]


def main(given: Sequence[str] | None = None) -> None:
    """The command."""
    options = arguments(given)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("judgement").setLevel(logging.INFO)
    if options.fresh:
        options.journal.unlink(missing_ok=True)
    plan = plan_of(options)
    journal = Journal(options.journal, plan.settings())
    if not options.draw:
        run(plan, journal)
    for path in write(journal, options.out):
        print(path)


if __name__ == "__main__":
    main()
