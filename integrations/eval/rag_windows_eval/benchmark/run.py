"""`rag-windows bench`: rounds in which everything that is planned answers once."""

from __future__ import annotations

import ctypes
import gc
import platform
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from rag_windows.attention import native_kernel
from rag_windows.errors import InputError
from rag_windows.methods import describe, resolve
from rag_windows.model import WindowedLM
from rag_windows_eval.benchmark.answers import (
    Clock,
    all_answers,
    cold,
    greedy,
    new_cache,
    plain,
    seconds,
    warm_cache,
)
from rag_windows_eval.benchmark.profile import ProfiledStep
from rag_windows_eval.benchmark.result import (
    COLD,
    INT8,
    MEMORY,
    ONE_BY_ONE,
    SEQUENTIAL,
    TOGETHER,
    UNCITED,
    VARIANTS,
    BenchPlan,
    BenchRow,
    Concurrency,
    Machine,
    Result,
)
from rag_windows_eval.benchmark.workload import (
    DEFAULT,
    PREFIX_TOKENS,
    QUERY_TOKENS,
    BenchTexts,
    Workload,
    build,
    config_of,
    head_dim,
    step_bytes,
    token_bytes,
    weight_bytes,
)
from rag_windows_eval.files import surroundings

Tell = Callable[[str], None]
_WARM = 3
"""Tokens of an answer that is not counted: a prefill and two decode steps."""


def check(plan: BenchPlan) -> None:
    """Raise an `InputError`, before any work, for what would fail later."""
    if plan.shape is not None and plan.model is not None:
        raise InputError("--shape and --model can't both be given. Leave one of them out.")
    if plan.profile and (plan.questions or plan.against):
        raise InputError(
            "--profile can't be combined with --questions or --against. Leave them out."
        )
    config = config_of(plan)
    for method in (plan.method, *(plan.against or ())):
        resolve(method)
    known = (*VARIANTS, INT8)
    if unknown := [name for name in plan.way or () if name not in known]:
        raise InputError(f"--way must be one of {list(known)}, not {unknown[0]!r}.")
    if plan.context % plan.window:
        raise InputError(
            f"--context {plan.context} can't be divided into windows of {plan.window} tokens. Use "
            "a multiple of --window."
        )
    positions = getattr(config, "max_position_embeddings", None)
    whole = plan.context + PREFIX_TOKENS + QUERY_TOKENS + plan.new_tokens
    if plan.model is not None and positions is not None and whole > positions:
        raise InputError(
            f"{plan.model} has {positions} positions, but one prompt over {plan.context} tokens, "
            f"as transformers reads it, takes {whole}. Use a smaller --context."
        )


def wrapped(plan: BenchPlan) -> WindowedLM:
    """The model, with its tokenizer and method, and without a cache."""
    model, tokenizer = build(plan)
    return WindowedLM(model, tokenizer, method=plan.method)


def in_turn(names: Iterable[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Every name in every round, in alternating order, so that noise affects all names alike."""
    order = list(names)
    for number in range(rounds):
        for name in order if number % 2 == 0 else reversed(order):
            yield number, name


def run(plan: BenchPlan, command: str, tell: Tell = lambda _: None) -> Result:
    """Make the model, measure the machine, and time everything that is planned."""
    lm = wrapped(plan)
    rate = measure_rate(lm.model.device)
    asked = BenchTexts(lm, plan.context, plan.window).workload()
    return Result(
        format=4,
        shape=plan.model or plan.shape or DEFAULT,
        dtype=plan.dtype,
        machine=machine(plan),
        roofline={"memory_bytes_per_s": rate},
        method=describe(resolve(plan.method)),
        context=plan.context,
        window=plan.window,
        prompt_tokens=len(asked.prompt),
        tokens=plan.new_tokens,
        baseline=SEQUENTIAL,
        rows=measure_rows(plan, lm, asked, rate, tell),
        concurrency=measure_concurrency(plan, lm) if plan.questions else [],
        command=command,
        date=datetime.now(UTC).date().isoformat(),
    )


def profiled(plan: BenchPlan) -> str:
    """Where a decode step's time goes, of each --way; of windows from memory without one."""
    lm = wrapped(plan)
    asked = BenchTexts(lm, plan.context, plan.window).workload()
    texts = []
    with all_answers(lm, plan) as answers:
        for name, answer in answers.items():
            if name in (plan.way or [MEMORY]):
                if name != SEQUENTIAL:
                    answer(asked, _WARM, Clock())
                step = ProfiledStep(lm.model)
                answer(asked, ProfiledStep.TOKENS, step)
                texts += [f"### {name}, {plan.context:,} tokens", "", step.markdown(), ""]
    return "\n".join(texts)


def machine(plan: BenchPlan) -> Machine:
    """Names and versions, and on a CPU whether the kernel in C serves the model."""
    versions = surroundings()
    device = versions.pop("machine")
    versions = {"python": platform.python_version(), **versions}
    if plan.device == "cpu":
        size = head_dim(config_of(plan))
        served = native_kernel(getattr(torch, plan.dtype), size, size) is not None
        versions["C kernel"] = "compiled" if served else "absent"
    return Machine(device, torch.get_num_threads(), versions)


def measure_rate(device: torch.device) -> float:
    """Bytes of memory read in a second, the quickest of several times."""
    numbers = torch.ones(1 << 27, dtype=torch.float32, device=device)
    numbers.sum()
    return numbers.nbytes / min(seconds(numbers.sum) for _ in range(5))


@dataclass
class _Times:
    """Seconds of one row, one entry a round."""

    prefill_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)

    def add(self, clock: Clock) -> None:
        self.prefill_s.append(clock.prefill_s)
        self.first_s.append(clock.stamps[0])
        self.decode_s.append(clock.decode_s)
        self.end_s.append(clock.end_s)


def _cost(name: str, values: dict[str, list[float]]) -> list[float]:
    """Cost of citations in each round: a value divided by the one without citations."""
    return [
        with_them / without
        for with_them, without in zip(values[name], values.get(name + UNCITED, ()), strict=False)
    ]


def measure_rows(
    plan: BenchPlan, lm: WindowedLM, asked: Workload, rate: float, tell: Tell
) -> list[BenchRow]:
    """Time one question at a time.

    Before the rounds everything answers once with a few tokens, so that nothing is compiled or
    loaded in them: windows read the whole question, the slower one prompt less.
    """
    with all_answers(lm, plan) as answers:
        for name, answer in answers.items():
            answer(asked.shortened(1) if name == SEQUENTIAL else asked, _WARM, Clock())
        took = {name: _Times() for name in answers}
        for number, name in in_turn(took, plan.rounds):
            clock = Clock()
            answers[name](asked, plan.new_tokens, clock)
            took[name].add(clock)
            tell(f"{name}, round {number + 1} of {plan.rounds}")
        peaks = {
            name: _peak(plan, name, partial(answer, asked, 2, Clock()), tell)
            for name, answer in answers.items()
            if plan.memory and name in (SEQUENTIAL, COLD)
        }
    prompt, steps = len(asked.prompt), {name: own.decode_s for name, own in took.items()}
    return [
        BenchRow(
            name=name,
            prefill_s=own.prefill_s,
            first_s=own.first_s,
            decode_s=own.decode_s,
            end_s=own.end_s,
            citations_cost=_cost(name, steps),
            roofline_decode_s=step_bytes(lm.model, prompt) / rate,
            peak_bytes=peaks.get(name),
            kv_bytes=prompt * token_bytes(lm.model),
            weight_bytes=weight_bytes(lm.model),
        )
        for name, own in took.items()
    ]


def measure_concurrency(plan: BenchPlan, lm: WindowedLM) -> list[Concurrency]:
    """Answer questions one by one and together, in turn; their windows are in memory before."""
    questions = plan.questions or 0
    asked = BenchTexts(lm, plan.context, plan.window).sharing(questions)
    with warm_cache(plan, lm) as cache:
        warm = lm.with_cache(cache)

        def requests(citations: bool, tokens: int = plan.new_tokens) -> list[dict[str, Any]]:
            return [
                {
                    **{"query": one.question, "passages": one.passages, "prefix": one.system},
                    **{"citations": citations, **greedy(tokens)},
                }
                for one in asked
            ]

        def one_by_one(citations: bool) -> None:
            for one in requests(citations):
                warm.generate(**one)

        def together(citations: bool) -> None:
            warm.generate_batch(requests(citations), max_rows=questions)

        # Those with and without citations follow each other.
        answers = {
            ONE_BY_ONE: partial(one_by_one, True),
            ONE_BY_ONE + UNCITED: partial(one_by_one, False),
            TOGETHER: partial(together, True),
            TOGETHER + UNCITED: partial(together, False),
        }
        took: dict[str, list[float]] = {name: [] for name in answers}
        for one in requests(True, _WARM):
            warm.generate(**one)
        for citations in (True, False):
            warm.generate_batch(requests(citations, _WARM), max_rows=questions)
        for _, name in in_turn(answers, plan.rounds):
            took[name].append(seconds(answers[name]))
    return [Concurrency(questions, name, own, _cost(name, took)) for name, own in took.items()]


def _peak(plan: BenchPlan, name: str, work: Callable[[], object], tell: Tell) -> int | None:
    """Peak bytes of one variant; None where they could not be measured."""
    if plan.device != "cpu":
        return peak_bytes(work, plan.device)
    try:
        # A process of its own: memory that other variants freed would hide a part of it.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(peak_separately, plan, name, torch.get_num_threads()).result()
    except (OSError, RuntimeError, MemoryError) as error:
        tell(f"Peak memory of {name} was not measured: {error}")
        return None


def peak_separately(plan: BenchPlan, name: str, threads: int) -> int | None:
    """Make the model and answer once; for a process that does nothing else."""
    torch.set_num_threads(threads)
    lm = wrapped(plan)
    asked = BenchTexts(lm, plan.context, plan.window).workload()
    with new_cache() as cache:
        answer = plain(lm.model) if name == SEQUENTIAL else cold(lm, cache)
        answer(asked.shortened(1), _WARM, Clock())
        return peak_bytes(partial(answer, asked, 2, Clock()), "cpu")


def peak_bytes(work: Callable[[], object], device: str) -> int | None:
    """Bytes that a run needed at its peak, without those in use before it.

    On the CPU resident memory, or None where the kernel does not report it; only Linux does.
    """
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - allocated
    gc.collect()
    # Freed memory goes back, so that it can't be used again unseen; only glibc can do that.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        # The largest resident size becomes today's.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = _kilobytes("VmRSS")
        work()
        return (_kilobytes("VmHWM") - before) * 1024
    except OSError:
        return None


def _kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
