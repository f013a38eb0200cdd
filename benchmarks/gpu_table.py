"""The table of `make gpu STAGE=table`: what matters on a GPU, in one run of at most seven minutes.

Lines come in the order of what is asked first. Each is printed and kept as soon as it is known; an
exception costs its line alone, and a line for which no time is left is left out, and says so.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu_stages import BIG, LIMITS, SMALL, Case, Stage, compared
from rag_windows import WindowedLM
from rag_windows_eval.benchmark.answers import Answer, Clock, plain, warm_cache, windowed
from rag_windows_eval.benchmark.result import (
    MEMORY,
    ONE_BY_ONE,
    SEQUENTIAL,
    TOGETHER,
    UNCITED,
    BenchPlan,
    cost,
    number,
    percent,
    times,
)
from rag_windows_eval.benchmark.run import in_turn, measure_concurrency, measure_rate, wrapped
from rag_windows_eval.benchmark.workload import BenchTexts, Workload, step_bytes

BUDGET_S = 420.0
HEAD = ("tokens", "what", "first token", "sooner", "decode step", "of bandwidth", "asked", "met")
METHODS = ("pcw", "pced")
ROWS = (1, 2, 4, 8, 16, 32)
"""Numbers of windows of which the steps of `pced` are compared."""


class Table:
    """The lines of a table under way.

    ``left`` is how many seconds of `BUDGET_S` are left.
    """

    def __init__(self, stage: Stage, budget_s: float = BUDGET_S) -> None:
        self._stage, self._end = stage, time.monotonic() + budget_s
        self.lines: list[dict[str, Any]] = []
        about = stage.record
        versions = ", ".join(f"{name} {one}" for name, one in about["versions"].items())
        print(f"| {about['device']}, {versions}, commit {about['commit']}, {about['date']} |")
        print("\n".join(("| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|")), flush=True)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self._end - time.monotonic()

    def add(self, context: int | None, what: str, **figures: Any) -> None:
        """Print and keep a line.

        Args:
            context: tokens of all passages, or None.
            what: what was measured.
            figures: ``first_s`` and ``decode_s`` (seconds, one a round), ``base_s`` (first tokens
                of transformers over as many tokens), ``share`` (of the bandwidth), ``asked`` (the
                aim, in words), ``met``, ``said`` (in place of figures).
        """
        line = {"context": context, "what": what, **figures}
        self.lines.append(line)
        self._stage.keep("lines", self.lines)
        print("| " + " | ".join(cells(line)) + " |", flush=True)

    @contextmanager
    def trying(self, context: int | None, what: str, needs_s: float) -> Iterator[bool]:
        """Whether there is time for a line; what fails inside becomes the line."""
        if self.left < needs_s:
            self.add(context, what, said=f"left out: {self.left:.0f} s left of about {needs_s:g}")
            yield False
            return
        failed = True
        with self._stage.trying(what):
            yield True
            failed = False
        if failed:
            self.add(context, what, said=self._stage.errors[-1])
        gc.collect()
        if self._stage.device.type == "cuda":
            torch.cuda.empty_cache()


def cells(line: Mapping[str, Any]) -> list[str]:
    """The cells of a line, as text; see `HEAD`."""
    first, steps, share = line.get("first_s"), line.get("decode_s"), line.get("share")
    met = line.get("met")
    said = line.get("said")
    return [
        "" if line["context"] is None else f"{line['context']:,}",
        line["what"] + (f": {' '.join(said.replace('|', '/').split())}" if said else ""),
        f"{number(statistics.median(first))} s" if first else "-",
        times(line.get("base_s") or [], first or []),
        f"{number(statistics.median(steps) * 1000)} ms" if steps else "-",
        "-" if share is None else percent(share),
        line.get("asked") or "",
        "" if met is None else "yes" if met else "no",
    ]


def table(stage: Stage) -> None:
    """All lines, in the order of what is asked first."""
    made = Table(stage)
    small, device = stage.stand_in, stage.device
    stage.bounded("three rounds of 32 tokens, transformers one round from 32,768 tokens on")
    for kind in ("step", "query"):
        with made.trying(None, f"attention beside float64, a {kind}", 10) as runs:
            if runs:
                _right(made, stage, kind)
    plan = SMALL if small else replace(BIG, window=512, new_tokens=32)
    lm, rate = None, 1e10
    with made.trying(None, "weights of the 8B shape", 20) as runs:
        if runs:
            begun = time.monotonic()
            lm = wrapped(plan)
            took = time.monotonic() - begun
            rate = rate if small else measure_rate(device)
            said = f"made in {took:.0f} s; memory gives {rate / 1e9:,.0f} GB/s"
            made.add(None, "weights of the 8B shape", said=said)
    if lm is None:
        return
    sizes = ((8192, 512, 40.0), (32_768, 512, 70.0))
    for context, window, needs in sizes:
        own = plan if small else replace(plan, context=context, window=window)
        with made.trying(context, "texts and windows", 0):
            _of_context(made, lm, own, rate, needs)
    own = plan if small else replace(plan, context=131_072, window=1024)
    with made.trying(own.context, "texts and windows", 0):
        _of_context(made, lm, own, rate, 90.0, methods=("pcw",), aims=True)
    with made.trying(8192, "32 questions", 50) as runs:
        if runs:
            _together(made, lm, plan, small)
    with made.trying(None, "rows", 20) as runs:
        if runs:
            _rows(made, lm, plan if small else replace(plan, context=16_384), small)


def _right(made: Table, stage: Stage, kind: str) -> None:
    dtype = "bfloat16"
    case = Case(kind, 64 if stage.stand_in else 128, 4, dtype, None)
    row = compared(stage.device, 300 if stage.stand_in else 4096, case)
    limits = LIMITS[dtype]
    made.add(
        None,
        f"attention beside float64, a {kind}",
        said=f"output {row['output']:.1e}, log-sum-exp {row['lse']:.1e}, by {row['backend']}",
        asked=f"at most {limits[0]:g}, {limits[1]:g}",
        met=row["output"] <= limits[0] and row["lse"] <= limits[1],
    )


def _timed(
    answers: Mapping[str, Answer], asked: Workload, tokens: int, rounds: int
) -> dict[str, tuple[list[float], list[float]]]:
    """First tokens and decode steps of answers in turn, in seconds, after one that is not timed."""
    took: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in answers}
    for name, answer in answers.items():
        answer(asked.shortened(1) if name == SEQUENTIAL else asked, 3, Clock())
    for _, name in in_turn(answers, rounds):
        clock = Clock()
        answers[name](asked, tokens, clock)
        took[name][0].append(clock.stamps[0])
        took[name][1].append(clock.decode_s)
    return took


def _of_context(
    made: Table,
    lm: WindowedLM,
    plan: BenchPlan,
    rate: float,
    needs_s: float,
    *,
    methods: tuple[str, ...] = METHODS,
    aims: bool = False,
) -> None:
    """One prompt, then each method from memory, with citations and without."""
    context, tokens = plan.context, plan.new_tokens
    asked = BenchTexts(lm, context, plan.window).workload()
    least = step_bytes(lm.model, len(asked.prompt)) / rate
    base: list[float] = []
    ours: list[float] = []

    def one_prompt() -> None:
        with made.trying(context, SEQUENTIAL, needs_s / 3) as runs:
            if runs:
                rounds = 1 if context > 8192 else plan.rounds
                few = min(tokens, 8) if aims else tokens
                first, steps = _timed({SEQUENTIAL: plain(lm.model)}, asked, few, rounds)[SEQUENTIAL]
                base.extend(first)
                share = least / statistics.median(steps)
                made.add(context, SEQUENTIAL, first_s=first, decode_s=steps, share=share)

    # The longest prompt comes last: nothing that is asked before it shall wait for it.
    if not aims:
        one_prompt()
    with warm_cache(plan, lm) as cache:
        warm = lm.with_cache(cache)
        for method in methods:
            what = f"{method}, {MEMORY}"
            with made.trying(context, what, needs_s / 3) as runs:
                if not runs:
                    continue
                pair = {
                    what: windowed(warm, method=method),
                    what + UNCITED: windowed(warm, method=method, citations=False),
                }
                took = _timed(pair, asked, tokens, plan.rounds)
                ours = took[what][0]
                costs = [a / b for a, b in zip(took[what][1], took[what + UNCITED][1], strict=True)]
                middle = statistics.median(costs)
                for name, (first, steps) in took.items():
                    # What rows read besides is not in what is least.
                    share = least / statistics.median(steps) if method == "pcw" else None
                    figures: dict[str, Any] = {"first_s": first, "decode_s": steps, "share": share}
                    if aims and name == what:
                        figures |= {
                            "asked": "at least 60% of bandwidth",
                            "met": bool(share and share >= 0.6),
                        }
                    made.add(context, name, base_s=base, **figures)
                figures = {"asked": "at most 1.03x", "met": middle <= 1.03} if aims else {}
                made.add(
                    context, f"{method}, what citations cost a step", said=cost(costs), **figures
                )
        if not aims:
            return
    one_prompt()
    if ours and base:
        ratio = statistics.median(base) / statistics.median(ours)
        made.add(
            context,
            "first token of pcw from memory, against one prompt",
            first_s=ours,
            base_s=base,
            asked="at least 300x",
            met=ratio >= 300,
        )


def _together(made: Table, lm: WindowedLM, plan: BenchPlan, small: bool) -> None:
    own = replace(plan, questions=2 if small else 32, rounds=1, method="pcw")
    if not small:
        own = replace(own, context=8192, new_tokens=16)
    found = {one.name: one.seconds for one in measure_concurrency(own, lm)}
    alone, together = found[ONE_BY_ONE], found[TOGETHER]
    made.add(
        own.context,
        f"{own.questions} questions, pcw",
        said=(
            f"{number(statistics.median(alone))} s one by one, "
            f"{number(statistics.median(together))} s together ({times(alone, together)})"
        ),
    )


def _rows(made: Table, lm: WindowedLM, plan: BenchPlan, small: bool) -> None:
    """From which number of windows the rows of a question cost more than 1.2 times one."""
    asked = BenchTexts(lm, plan.context, plan.window).workload()
    steps: dict[int, float] = {}
    with warm_cache(plan, lm) as cache:
        answer = windowed(lm.with_cache(cache), method="pced")
        for count in ROWS:
            if count > len(asked.windows):
                break
            own = {"pced": answer}
            took = _timed(own, asked.shortened(count), plan.new_tokens, 1 if small else 2)
            steps[count] = statistics.median(took["pced"][1])
    first = next((n for n, s in steps.items() if s > 1.2 * steps[1]), None)
    each = ", ".join(f"{n}: {number(s * 1000)} ms" for n, s in steps.items())
    beyond = "none of these" if first is None else f"{first}"
    made.add(None, "pced, a step by windows", said=f"{each}; beyond 1.2x from {beyond}")
