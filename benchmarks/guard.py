"""What the guard is worth, where windows lose and where they don't.

    python benchmarks/guard.py [--contexts 60] [--timed 10] [--only two-hop] [--seed 1] [--quick]
        [--write]

Held-out questions of the embedded readers, four on each context, in cases in which plain windows
keep what one prompt knows and others in which something takes it from them: passages cut too small,
wrong numbers of a method, an ensemble, a codebook that leaves passages out. Each question is
answered with windows and from one prompt; a guarded answer is one of the two. Greedy answers are
judged in one pass over the right one, as in benchmarks/methods.py. The first question of so many
contexts as ``--timed`` says is also answered by `WindowedLM.generate` in the three ways, to take
its time and to see that it answers and decides alike.

Thresholds are chosen on every other context and tried on the rest. ``--write`` puts the tables into
docs/guard.md, too. One thread; at most ten minutes of it, with ``--quick`` a few seconds a case.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.guarding.asking import Asker, Outcome, Timing
from benchmarks.guarding.cases import CASES, PER_CONTEXT, Case
from benchmarks.guarding.tables import chosen_table, default_table, signal_table, time_table
from benchmarks.judgement.page import fill_page
from rag_windows import WindowedLM
from rag_windows.evaluation.machine import machine

PAGE = Path(__file__).resolve().parent.parent / "docs" / "guard.md"


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python benchmarks/guard.py", description=__doc__)
    parser.add_argument("--contexts", type=int, help=f"of each case, {PER_CONTEXT} questions each")
    parser.add_argument("--timed", type=int, help="contexts whose first question is timed")
    parser.add_argument("--only", nargs="+", help="cases whose label contains one of these")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a few questions a case")
    parser.add_argument("--write", action="store_true", help="fill docs/guard.md")
    options = parser.parse_args(given)
    options.contexts = options.contexts or (4 if options.quick else 60)
    options.timed = options.timed or (1 if options.quick else 10)
    if options.contexts < 2 or options.timed >= options.contexts:
        parser.error("at least two contexts, and more than are timed")
    options.cases = [
        case
        for case in CASES
        if not options.only or any(part in case.label for part in options.only)
    ]
    if not options.cases:
        parser.error(f"no case has any of {options.only} in its label")
    return options


def main(given: Sequence[str] | None = None) -> None:
    """The command."""
    options = arguments(given)
    torch.set_num_threads(1)
    begun = time.perf_counter()
    cases: list[Case] = options.cases
    models = {name: WindowedLM.from_pretrained(name) for name in {case.model for case in cases}}
    found: dict[Case, list[Outcome]] = {}
    timings: dict[Case, Timing] = {}
    for case in cases:
        asker = Asker(models[case.model], case)
        found[case] = asker.ask(options.contexts, options.seed)
        timings[case] = asker.time(options.timed, options.seed, found[case])
        seconds = time.perf_counter() - begun
        print(f"{case.label}: {len(found[case])} questions, {seconds:.0f} s", file=sys.stderr)
    blocks = {
        "run": run_line(found, timings, options.seed, time.process_time()),
        "default": default_table(found),
        "chosen": chosen_table(found),
        "signals": signal_table(found),
        "time": time_table(timings),
    }
    print("\n".join(blocks.values()))
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        made = {name: partial(str, text) for name, text in blocks.items()}
        PAGE.write_text(fill_page(page, made), encoding="utf-8")


def run_line(
    found: Mapping[Case, Sequence[Outcome]],
    timings: Mapping[Case, Timing],
    seed: int,
    seconds: float,
) -> str:
    """Where the figures come from."""
    agreed = sum(one.agreed for one in timings.values())
    compared = sum(one.compared for one in timings.values())
    return (
        f"`python benchmarks/guard.py`, one thread on {machine()} (no GPU), seed {seed}: "
        f"{sum(map(len, found.values())):,} questions in {len(found)} cases, {seconds / 60:.1f} "
        f"minutes of the processor. `WindowedLM.generate` answered and decided as judged here in "
        f"{agreed} of {compared} comparisons.\n"
    )


if __name__ == "__main__":
    main()
