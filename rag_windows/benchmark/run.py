"""`rag-windows bench`: a model, the tokens that it reads, the ways to answer, and their times."""

from __future__ import annotations

import ctypes
import gc
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    StoppingCriteria,
)

from rag_windows.attention.native import kernel as native
from rag_windows.batching.loop import BatchLoop
from rag_windows.batching.rows import Row
from rag_windows.benchmark.result import (
    ALONE,
    COLD,
    DISK,
    MEMORY,
    SEQUENTIAL,
    TOGETHER,
    WAYS,
    Cell,
    Concurrency,
    Machine,
    Plan,
    Result,
)
from rag_windows.cache.passage_cache import PassageCache
from rag_windows.errors import InputError
from rag_windows.evaluation.files import surroundings
from rag_windows.loading import load as load_model
from rag_windows.loading import load_config
from rag_windows.methods import resolve
from rag_windows.methods.registry import describe
from rag_windows.model import WindowedLM
from rag_windows.prefill import complete, prefill_context

Tell = Callable[[str], None]
PREFIX_TOKENS = QUERY_TOKENS = 32
_POSITIONS = 262_144
_SIZE = "64GiB"
"""Of the caches: nothing is ever evicted."""

DEFAULT = "llama-0.25b"
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)
_ROPE = {"rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"}}
SHAPES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    DEFAULT: ("llama", (32_000, 1024, 2816, 16, 16, 4), {}),
    "qwen-0.5b": ("qwen2", (151_936, 896, 4864, 24, 14, 2), {"tie_word_embeddings": True}),
    "llama-3.1-8b": ("llama", (128_256, 4096, 14_336, 32, 32, 8), _ROPE),
    "tiny": ("llama", (512, 128, 384, 2, 4, 2), {}),
}
"""Families, `SIZES` and more of models whose weights are drawn at random; "tiny" is for tests and
says nothing about speed."""


def check(plan: Plan) -> None:
    """Refuse with an `InputError` before any work what would fail behind it."""
    if plan.shape is not None and plan.model is not None:
        raise InputError("--shape and --model exclude each other; leave one of them out.")
    config = config_of(plan)
    for method in (plan.method, *(plan.against or ())):
        resolve(method)
    if unknown := [way for way in plan.way or () if way not in WAYS]:
        raise InputError(f"--way {unknown[0]!r} is unknown; choose among {list(WAYS)}.")
    if plan.context % plan.window:
        raise InputError(
            f"A context of {plan.context} tokens can't be cut into windows of {plan.window}; "
            "take multiples."
        )
    positions = getattr(config, "max_position_embeddings", None)
    whole = plan.context + PREFIX_TOKENS + QUERY_TOKENS + plan.new_tokens
    if plan.model is not None and positions is not None and whole > positions:
        raise InputError(
            f"{plan.model} has {positions} positions, and transformers' one prompt over "
            f"{plan.context} tokens takes {whole}; take a shorter --context."
        )


def config_of(plan: Plan) -> PreTrainedConfig:
    """The configuration of what is timed."""
    if plan.model is not None:
        return load_config(plan.model).get_text_config(decoder=True)
    special = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    family, sizes, more = SHAPES[plan.shape or DEFAULT]
    named = dict(zip(SIZES, sizes, strict=True))
    return AutoConfig.for_model(
        family, max_position_embeddings=_POSITIONS, **named, **special, **more
    )


def build(plan: Plan) -> PreTrainedModel:
    """The model, in evaluation mode, on its device and in its precision."""
    dtype = getattr(torch, plan.dtype)
    if plan.model is not None:
        model, _ = load_model(plan.model, None, dtype=dtype, device_map=plan.device)
        return model.eval()
    torch.manual_seed(0)
    with torch.device(plan.device):
        made: PreTrainedModel = AutoModelForCausalLM.from_config(config_of(plan), dtype=dtype)
    return made.eval()


def head_dim(config: PreTrainedConfig) -> int:
    """Of keys and values."""
    own = getattr(config, "head_dim", None)
    return int(own or config.hidden_size // config.num_attention_heads)


def token_bytes(model: PreTrainedModel) -> int:
    """Bytes of the keys and values of one token, all layers."""
    config = model.config.get_text_config(decoder=True)
    numbers = config.num_hidden_layers * 2 * config.num_key_value_heads * head_dim(config)
    return int(numbers * next(model.parameters()).element_size())


@dataclass(frozen=True, slots=True)
class Load:
    """One prompt of random tokens: a prefix, windows and a query."""

    prefix: tuple[int, ...]
    windows: tuple[tuple[int, ...], ...]
    query: tuple[int, ...]

    @property
    def prompt(self) -> list[int]:
        """The same as one text."""
        return [*self.prefix, *(token for ids in self.windows for token in ids), *self.query]


def load(vocabulary: int, context: int, window: int, seed: int = 0) -> Load:
    """Random tokens, without the first ones, which may be control tokens."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> tuple[int, ...]:
        first = min(300, vocabulary // 2)
        return tuple(torch.randint(first, vocabulary, (count,), generator=generator).tolist())

    windows = tuple(ids(window) for _ in range(context // window))
    return Load(ids(PREFIX_TOKENS), windows, ids(QUERY_TOKENS))


def sharing(vocabulary: int, questions: int, context: int, window: int) -> list[Load]:
    """Prompts of which any two share half of their windows, in different orders."""
    base = load(vocabulary, context, window)
    common = base.windows[: len(base.windows) // 2]
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(questions):
        own = load(vocabulary, context, window, seed=1 + number)
        windows = [*common, *own.windows[len(common) :]]
        order = torch.randperm(len(windows), generator=generator).tolist()
        made.append(Load(base.prefix, tuple(windows[i] for i in order), own.query))
    return made


def now() -> float:
    """Seconds, once the accelerator, if there is one, has done what it was asked."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(work: Callable[[], object]) -> float:
    """Of a call."""
    begun = now()
    work()
    return now() - begun


class Clock(StoppingCriteria):
    """Writes down when each token of an answer is there; never stops anything.

    `stamps` are seconds from the start to each token; for `prefill_s`, see `Cell`.
    """

    def __init__(self) -> None:
        self.begun, self.prefill_s = now(), 0.0
        self.stamps: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Called by transformers after every token."""
        self.stamps.append(now() - self.begun)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


Way = Callable[[Load, int], Clock]
"""From a prompt and a number of tokens to when they came."""


def plain(model: PreTrainedModel) -> Way:
    """Everything as one prompt through ``generate``: what most users run."""

    def run(load: Load, tokens: int) -> Clock:
        prompt = torch.tensor([load.prompt], device=model.device)
        clock = Clock()
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            stopping_criteria=[clock],
        )
        clock.prefill_s = clock.stamps[0]
        return clock

    return run


def windowed(lm: WindowedLM, method: str | None = None) -> Way:
    """Windows by a model with the cache that it has."""

    def run(load: Load, tokens: int) -> Clock:
        clock = Clock()
        context = lm.encode_ids(load.prefix, load.windows, method=method)
        clock.prefill_s = now() - clock.begun
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        lm.generate_ids(context, load.query, stopping_criteria=[clock], **options)
        return clock

    return run


@contextmanager
def all_ways(lm: WindowedLM, plan: Plan) -> Iterator[dict[str, Way]]:
    """Every way that is planned, by name; on an accelerator the warm windows are kept there."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rag-windows-bench-")))
        device = None if plan.device == "cpu" else _SIZE
        memory = stack.enter_context(PassageCache(_SIZE, device=device))
        disk = stack.enter_context(PassageCache(None, disk=_SIZE, path=folder / "windows"))
        warm = lm.with_cache(memory)
        ways = {
            SEQUENTIAL: plain(lm.model),
            COLD: windowed(lm),
            MEMORY: windowed(warm),
            DISK: windowed(lm.with_cache(disk)),
        }
        ways = {name: way for name, way in ways.items() if name in (plan.way or WAYS)}
        yield ways | {f"{MEMORY}, {name}": windowed(warm, name) for name in plan.against or ()}


def in_turn(names: Iterable[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Every name in every round, in turns of order: so a noisy machine treats them alike."""
    order = list(names)
    for number in range(rounds):
        for name in order if number % 2 == 0 else reversed(order):
            yield number, name


def run(plan: Plan, command: str, tell: Tell = lambda _: None) -> Result:
    """Make the model, measure the machine, and time everything that is planned."""
    lm = WindowedLM(build(plan), method=plan.method)
    rate = measure_rate(lm.model.device)
    return Result(
        format=3,
        shape=plan.model or plan.shape or DEFAULT,
        dtype=plan.dtype,
        machine=machine(plan),
        floor={"memory_bytes_per_s": rate},
        method=describe(resolve(plan.method)),
        context=plan.context,
        window=plan.window,
        tokens=plan.new_tokens,
        cells=measure_ways(plan, lm, rate, tell),
        crowds=measure_concurrency(plan, lm) if plan.questions else [],
        command=command,
    )


def machine(plan: Plan) -> Machine:
    """Names and versions, and on a CPU whether the kernel in C serves the model."""
    versions = surroundings()
    device = versions.pop("machine")
    versions = {"python": platform.python_version(), **versions}
    if plan.device == "cpu":
        size = head_dim(config_of(plan))
        served = native.kernel(getattr(torch, plan.dtype), size, size) is not None
        versions["C kernel"] = "compiled" if served else "absent"
    return Machine(device, torch.get_num_threads(), versions)


def measure_rate(device: torch.device) -> float:
    """Bytes of memory read in a second, the quickest of several times."""
    numbers = torch.ones(1 << 27, device=device)
    numbers.sum()
    return numbers.nbytes / min(seconds(numbers.sum) for _ in range(5))


def step_bytes(model: PreTrainedModel, context: int) -> int:
    """What every decode step reads: all weights, and the keys and values of a context once.

    Of an embedding table apart from the vocabulary layer, one row is read.
    """
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    unread = 0 if head is not None and head.weight is table else table.nbytes
    return _weight_bytes(model) - unread + context * token_bytes(model)


def _weight_bytes(model: PreTrainedModel) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def measure_ways(plan: Plan, lm: WindowedLM, rate: float, tell: Tell) -> list[Cell]:
    """One question at a time; a short one before, for all that is loaded on the first use."""
    vocabulary = int(lm.model.config.vocab_size)
    asked, short = load(vocabulary, plan.context, plan.window), load(vocabulary, 32, 16)
    with all_ways(lm, plan) as ways:
        timings: dict[str, list[Clock]] = {name: [] for name in ways}
        for name, way in ways.items():
            way(short, 2)
            if name not in (SEQUENTIAL, COLD):
                way(asked, 1)
        for number, name in in_turn(ways, plan.rounds):
            timings[name].append(ways[name](asked, plan.new_tokens))
            tell(f"{name}, round {number + 1} of {plan.rounds}")
        peaks = {
            name: _peak(plan, name, partial(way, asked, 2), tell)
            for name, way in ways.items()
            if plan.memory and name in (SEQUENTIAL, COLD)
        }
    prompt = len(asked.prompt)
    return [
        Cell(
            way=name,
            prefill_s=[one.prefill_s for one in own],
            first_s=[one.stamps[0] for one in own],
            tokens_per_s=[(plan.new_tokens - 1) / (one.stamps[-1] - one.stamps[0]) for one in own],
            end_s=[one.stamps[-1] for one in own],
            decode_floor_s=step_bytes(lm.model, prompt) / rate,
            peak_bytes=peaks.get(name),
            kv_bytes=prompt * token_bytes(lm.model),
            weight_bytes=_weight_bytes(lm.model),
        )
        for name, own in timings.items()
    ]


def measure_concurrency(plan: Plan, lm: WindowedLM) -> list[Concurrency]:
    """Answer questions one by one and together, in turn; their windows are in memory before."""
    questions = plan.questions or 0
    asked = sharing(int(lm.model.config.vocab_size), questions, plan.context, plan.window)
    length = {"max_new_tokens": plan.new_tokens, "min_new_tokens": plan.new_tokens}
    with PassageCache(_SIZE) as cache:
        warm = lm.with_cache(cache)

        def alone() -> None:
            for one in asked:
                context = warm.encode_ids(one.prefix, one.windows)
                warm.generate_ids(context, one.query, **length)

        def together() -> None:
            loop = BatchLoop(warm.engine.encoder, warm.engine.decoder)
            for one in asked:
                parts = prefill_context(loop.encoder, one.prefix, one.windows, warm.method)
                options = {**length, "do_sample": False}
                loop.admit(Row(warm.engine.decoder, complete(parts), one.query, options))
            while loop.rows:
                for row in loop.step():
                    if row.error is not None:
                        raise row.error

        ways = {ALONE: alone, TOGETHER: together}
        took: dict[str, list[float]] = {name: [] for name in ways}
        for one in asked:
            warm.encode_ids(one.prefix, one.windows)
        for _, name in in_turn(ways, plan.rounds):
            took[name].append(seconds(ways[name]))
    return [Concurrency(questions, name, own) for name, own in took.items()]


def _peak(plan: Plan, way: str, work: Callable[[], object], tell: Tell) -> int | None:
    """Bytes at the peak of one way; None where it could not be measured."""
    if plan.device != "cpu":
        return peak_bytes(work, plan.device)
    try:
        # A process of its own: memory that other ways freed would hide a part of it.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(peak_apart, plan, way, torch.get_num_threads()).result()
    except (OSError, RuntimeError, MemoryError) as error:
        tell(f"Peak memory of {way} was not measured: {error}")
        return None


def peak_apart(plan: Plan, name: str, threads: int) -> int | None:
    """Make the model and answer once; for a process that does nothing else."""
    torch.set_num_threads(threads)
    model = build(plan)
    way = plain(model) if name == SEQUENTIAL else windowed(WindowedLM(model, method=plan.method))
    vocabulary = int(model.config.vocab_size)
    way(load(vocabulary, 32, 16), 2)
    asked = load(vocabulary, plan.context, plan.window)
    return peak_bytes(partial(way, asked, 2), "cpu")


def peak_bytes(work: Callable[[], object], device: str) -> int | None:
    """Bytes that a run needed at its peak beside those in use before it.

    On the CPU resident memory, or None where the kernel does not tell it; only Linux does.
    """
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - allocated
    gc.collect()
    # Freed memory goes back, so that it can't be used again unseen; glibc alone can do that.
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
