"""What matters on a GPU, as one table in at most seven minutes: `make gpu`.

    python -m benchmarks.gpu_table > table.md

Attention beside float64; the shape of Llama 3.1 8B over 8,192, 32,768 and 131,072 tokens; 32
questions together; rows. Weights are random. Lines come in the order of what is asked first. Each
is printed as soon as it is known; an exception costs its line alone, and a line for which no time
is left is left out, and says so. `--stand-in` tries all of it with tiny sizes on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiling

from rag_windows import WindowedLM
from rag_windows.attention import backends
from rag_windows.attention.native import kernel as native
from rag_windows.attention.segments import Queries, Reading, Rows, Segment, Segments
from rag_windows.attention.segments import read as attention
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
from rag_windows_eval.benchmark.run import (
    in_turn,
    machine,
    measure_concurrency,
    measure_rate,
    wrapped,
)
from rag_windows_eval.benchmark.workload import BenchTexts, Workload, step_bytes

BUDGET_S = 420.0
HEAD = ("tokens", "what", "first token", "sooner", "decode step", "of bandwidth", "asked", "met")
METHODS = ("pcw", "pced")
ROWS = (1, 2, 4, 8, 16, 32)
"""Numbers of windows of which the steps of `pced` are compared."""
BIG = BenchPlan(
    "llama-3.1-8b", device="cuda", dtype="bfloat16", window=512, new_tokens=32, rounds=3
)
SMALL = BenchPlan("tiny", dtype="float32", context=64, window=16, new_tokens=4, rounds=1)
LIMITS = (2e-2, 2e-4)
"""How far an output, by the largest one, and a log-sum-exp may lie from float64."""


class Table:
    """The lines of a table under way.

    ``left`` is how many seconds of `BUDGET_S` are left; ``failed`` whether an exception cost a
    line.
    """

    def __init__(self, budget_s: float = BUDGET_S) -> None:
        self._end, self.failed = time.monotonic() + budget_s, False
        print("\n".join(("| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|")), flush=True)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self._end - time.monotonic()

    def add(
        self,
        context: int | None,
        what: str,
        *,
        first_s: Sequence[float] = (),
        base_s: Sequence[float] = (),
        decode_s: Sequence[float] = (),
        share: float | None = None,
        asked: str = "",
        met: bool | None = None,
        said: str = "",
    ) -> None:
        """Print a line.

        Args:
            context: tokens of all passages, or None.
            what: what was measured.
            first_s: seconds to the first token, one a round.
            base_s: those of transformers over as many tokens.
            decode_s: seconds of a decode step, one a round.
            share: of the bandwidth.
            asked: the aim, in words.
            met: whether it is met.
            said: stands in place of figures.
        """
        cells = [
            "" if context is None else f"{context:,}",
            what + (f": {' '.join(said.replace('|', '/').split())}" if said else ""),
            f"{number(statistics.median(first_s))} s" if first_s else "-",
            times(base_s, first_s),
            f"{number(statistics.median(decode_s) * 1000)} ms" if decode_s else "-",
            "-" if share is None else percent(share),
            asked,
            "" if met is None else "yes" if met else "no",
        ]
        print("| " + " | ".join(cells) + " |", flush=True)

    @contextmanager
    def trying(self, context: int | None, what: str, needs_s: float) -> Iterator[bool]:
        """Whether there is time for a line; what fails inside becomes the line."""
        if self.left < needs_s:
            self.add(context, what, said=f"left out: {self.left:.0f} s left of about {needs_s:g}")
            yield False
            return
        try:
            yield True
        except Exception as error:  # noqa: BLE001 - it costs what is inside alone
            traceback.print_exc()
            self.failed = True
            self.add(context, what, said=repr(error)[:300])
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def table(made: Table, *, small: bool) -> None:
    """All lines, in the order of what is asked first."""
    plan = SMALL if small else BIG
    device = torch.device(plan.device)
    for kind, tokens in (("step", 1), ("query", 33)):
        with made.trying(None, f"attention beside float64, a {kind}", 10) as runs:
            if runs:
                right(made, device, kind, tokens, small=small)
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
    for context, needs in ((8192, 40.0), (32_768, 70.0)):
        own = plan if small else replace(plan, context=context)
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


def right(made: Table, device: torch.device, kind: str, tokens: int, *, small: bool) -> None:
    """The line of one kind of query: so many tokens read all windows."""
    dim, most = (64, 300) if small else (128, 4096)
    output, lse, backend = compared(device, dim, most, tokens)
    made.add(
        None,
        f"attention beside float64, a {kind}",
        said=f"output {output:.1e}, log-sum-exp {lse:.1e}, by {backend}",
        asked=f"at most {LIMITS[0]:g}, {LIMITS[1]:g}",
        met=output <= LIMITS[0] and lse <= LIMITS[1],
    )


def compared(device: torch.device, dim: int, most: int, tokens: int) -> tuple[float, float, str]:
    """The largest errors of output, by its largest number, and log-sum-exps; what answered.

    Tokens read windows of 1 to ``most`` tokens in bfloat16, four heads each kv head.
    """
    generator = torch.Generator().manual_seed(4 * dim)
    drawn = (most ** torch.rand(14, generator=generator)).long().tolist()
    lengths = [1, *drawn, most, most]
    kv_heads, heat, scale = 2, 0.9, dim**-0.5

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(device, torch.bfloat16)

    query = draw(tokens, kv_heads * 4, dim)
    parts = [(draw(1, kv_heads, n, dim), draw(1, kv_heads, n, dim)) for n in lengths]
    context = Segment("context", 0, most - 1, starts=[0] * len(parts), layers={0: parts})
    context.temperature = heat
    segments = Segments([context], tokens, static=True)
    rows = Rows(torch.arange(most, most + tokens))
    asked = Queries(0, query, rows, scale, None)
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with torch.inference_mode():
        segments.attend(asked, per_part=True)
        with profiling(activities=activities) as profiled:
            ((_, _, _, by_window),) = segments.attend(asked, per_part=True)
        output, _ = attention(Reading(rows, [segments]), asked)
    # The same in float64, window by window, and their merge.
    found = [
        backends.reference(
            [backends.AttentionRequest([(key.double(), value.double())], scale, temperature=heat)],
            query.double(),
        )
        for key, value in parts
    ]
    lses = torch.stack([one.lse for one in found])
    shares = torch.softmax(lses, dim=0).unsqueeze(-1)
    exact = (torch.stack([one.output for one in found]) * shares).sum(dim=0)
    lse = torch.cat([one for one in by_window or () if one is not None])
    return (
        ((output.double() - exact).abs().max() / exact.abs().max()).item(),
        (lse.double() - lses).abs().max().item(),
        backends_of({row.key for row in profiled.key_averages()}),
    )


BACKENDS = {
    "varlen": r"varlen",
    "fused": r"_scaled_dot_product_\w+",
    "native": re.escape(native.NAME),
}
"""What a profiler shows of each; on a device "native" is only what the others are called by."""


def backends_of(names: set[str]) -> str:
    """Which backends answered, by what a profiler saw."""
    found = [name for name, words in BACKENDS.items() if any(re.search(words, n) for n in names)]
    if "varlen" in found:
        found = [name for name in found if name != "native"]
    return " + ".join(found) or "reference"


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
                    aimed = aims and name == what
                    made.add(
                        context,
                        name,
                        first_s=first,
                        base_s=base,
                        decode_s=steps,
                        share=share,
                        asked="at least 60% of bandwidth" if aimed else "",
                        met=bool(share and share >= 0.6) if aimed else None,
                    )
                made.add(
                    context,
                    f"{method}, what citations cost a step",
                    said=cost(costs),
                    asked="at most 1.03x" if aims else "",
                    met=middle <= 1.03 if aims else None,
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the machine and the table; the exit code is 1 where an exception cost a line."""
    parser = argparse.ArgumentParser(description="What matters on a GPU, as one table.")
    parser.add_argument("--stand-in", action="store_true", help="tiny sizes on the CPU")
    small = parser.parse_args(arguments).stand_in
    if not small and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} of {sys.executable} sees no CUDA device.")
    about = machine(SMALL if small else BIG)
    versions = ", ".join(f"{name} {one}" for name, one in about.versions.items())
    print(f"{about.device}, {versions}, {datetime.now(UTC).date()}.")
    print("Three rounds of 32 tokens, of transformers one round from 32,768 tokens on.\n")
    made = Table()
    table(made, small=small)
    return int(made.failed)


if __name__ == "__main__":
    sys.exit(main())
