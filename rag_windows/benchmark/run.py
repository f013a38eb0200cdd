"""A run: rates of the machine, then every part of the plan, kept as it comes.

This module is also the program that answers for peak memory in a process of its own.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

import rag_windows
from rag_windows.attention.native import kernel as native
from rag_windows.batching.loop import BatchLoop
from rag_windows.batching.rows import Asked
from rag_windows.benchmark.result import (
    ALONE,
    COLD,
    DISK,
    FORMAT,
    MEMORY,
    PREFIX_KEPT,
    SEQUENTIAL,
    TOGETHER,
    Cell,
    Crowd,
    Machine,
    Part,
    Place,
    Rates,
    Reading,
    Result,
    Step,
)
from rag_windows.benchmark.workload import (
    SHORT,
    Load,
    Plan,
    Way,
    all_ways,
    head_dim,
    load,
    plain,
    sharing,
    synchronize,
    token_bytes,
    windowed,
)
from rag_windows.cache.passage_cache import PassageCache
from rag_windows.errors import DataError, GenerationError, InputError
from rag_windows.evaluation.machine import surroundings
from rag_windows.methods import Method, resolve
from rag_windows.methods.registry import describe
from rag_windows.model import WindowedLM
from rag_windows.prefill import EncodedContext, complete, prefill_parts

Tell = Callable[[str], None]
TORCH_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
_ROWS, _REPEATS, _STREAM_BYTES = 4096, 5, 1 << 29
_PROFILED_TOKENS, _PROFILED_ROUNDS = 16, 3
_PEAK_TOKENS = 2


def run(
    plan: Plan, command: str, tell: Tell = lambda _: None, partial_path: Path | None = None
) -> Result:
    """Make the model, measure the machine, and time everything that is planned.

    Args:
        plan: what to run.
        command: that asked for it.
        tell: called with what was done.
        partial_path: file in which parts are kept until the caller removes it; an unfinished run of
            the same settings that it holds is gone on with.

    Raises:
        InputError: an unknown shape or method, windows that don't divide a context, or a file of
            other settings.
        DataError: the file can't be read or written.
    """
    here = machine(plan)
    kept = Unfinished.begin(partial_path, _settings(plan, here))
    if kept.parts:
        tell(f"Going on with an unfinished run; parts of it in {partial_path}: {len(kept.parts)}.")
    lm = WindowedLM(plan.build(), method=plan.method)
    roofline = measure_roofline(lm.model)
    tell(
        f"This machine: {roofline.rates.linear_flops_per_s / 1e9:,.0f} GFLOP/s in the model's "
        f"linear layers, {roofline.rates.memory_bytes_per_s / 1e9:,.1f} GB/s from memory."
    )
    work: list[tuple[str, Callable[[], Part]]] = [
        (f"{one.context} {one.words}", partial(_alone, plan, one, lm, roofline, tell))
        for one in plan.places
    ]
    work += [(f"{one} questions", partial(_at_once, plan, one, lm)) for one in plan.questions]
    for name, each in work:
        if name not in kept.parts:
            kept.parts[name] = each()
            kept.save()
            tell(f"{name}: done")
    return Result(
        plan.model or plan.shape,
        plan.dtype,
        here,
        roofline.rates,
        describe(resolve(plan.method)),
        [kept.parts[name] for name, _ in work],
        command,
        kept.goes,
    )


def machine(plan: Plan) -> Machine:
    """Names and versions, and on a CPU whether the kernel in C serves the model."""
    versions = surroundings()
    device = versions.pop("machine")
    versions = {"python": platform.python_version(), **versions}
    if plan.device == "cpu":
        size = head_dim(plan.config())
        served = native.available(getattr(torch, plan.dtype), size, size)
        versions["C kernel"] = "compiled" if served else "absent"
    return Machine(device, torch.get_num_threads(), versions)


def _settings(plan: Plan, here: Machine) -> dict[str, Any]:
    """What parts of one result have in common, down to the sources that measured them."""
    home = Path(rag_windows.__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*home.rglob("*.py"), *home.rglob("*.c")]):
        digest.update(str(path.relative_to(home)).encode() + b"\0" + path.read_bytes())
    settings = {
        "format": FORMAT,
        "plan": dataclasses.asdict(plan),
        "machine": dataclasses.asdict(here),
        "code": digest.hexdigest()[:16],
    }
    return dict(json.loads(json.dumps(settings)))


@dataclass(slots=True)
class Unfinished:
    """What a run has found so far, kept in a file that each further part replaces as a whole.

    Attributes:
        path: of the file, or None.
        settings: what parts of one result must have in common, as JSON.
        goes: how often the run was begun, this time included.
        parts: by name.
    """

    path: Path | None
    settings: Mapping[str, Any]
    goes: int = 1
    parts: dict[str, Part] = field(default_factory=dict)

    @classmethod
    def begin(cls, path: Path | None, settings: Mapping[str, Any]) -> Unfinished:
        """A run, or the one that the file holds.

        Raises:
            DataError: the file can't be read or written, or holds something else.
            InputError: it is of other settings.
        """
        made = cls(path, settings)
        if path is not None and path.exists():
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
                differ = [key for key in settings if found["settings"].get(key) != settings[key]]
                if differ:
                    raise InputError(
                        f"{path} holds an unfinished run with other settings: another "
                        f"{' and another '.join(sorted(differ))}. Repeat the command that began "
                        "it, name another folder with --out, or delete that file."
                    )
                made.goes = int(found["goes"]) + 1
                made.parts = {name: Part.from_json(one) for name, one in found["parts"].items()}
            except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                raise DataError(
                    f"{path} is no unfinished run ({type(error).__name__}); delete the file to "
                    "begin anew."
                ) from error
        made.save()
        return made

    def save(self) -> None:
        """Replace the file.

        Raises:
            DataError: it can't be written.
        """
        if self.path is None:
            return
        parts = {name: dataclasses.asdict(part) for name, part in self.parts.items()}
        values = {"settings": self.settings, "goes": self.goes, "parts": parts}
        fresh = self.path.with_name(f"{self.path.name}.new")
        try:
            with fresh.open("w", encoding="utf-8") as file:
                json.dump(values, file)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self.path)
        except OSError as error:
            raise DataError(f"{self.path} can't be written: {error.strerror}.") from error


@dataclass(frozen=True, slots=True)
class Roofline:
    """The least that a prompt and a decode step can cost on this machine.

    Attributes:
        rates: that the machine reached.
        flops: of the linear layers, per prompt token.
        weights: bytes that every decode step reads: all but an embedding table apart from the
            vocabulary layer.
        token: bytes of keys and values of one token.
    """

    rates: Rates
    flops: float
    weights: int
    token: int

    def prefill_s(self, tokens: int) -> float:
        """Linear layers of a prompt; its attention and its vocabulary layer come on top."""
        return tokens * self.flops / self.rates.linear_flops_per_s

    def decode_s(self, context: int) -> float:
        """A decode step: all weights and all keys and values are read once."""
        return (self.weights + context * self.token) / self.rates.memory_bytes_per_s


def measure_roofline(model: PreTrainedModel) -> Roofline:
    """Time matrix products of the model's own sizes, and the reading of memory."""
    weight = next(model.parameters())
    # Every linear layer that each token of a prompt passes: not the vocabulary's.
    sizes = Counter(
        (module.in_features, module.out_features)
        for module in model.base_model.modules()
        if isinstance(module, torch.nn.Linear)
    )
    seconds = flops = 0.0
    for (inputs, outputs), count in sizes.items():
        rows = torch.randn(_ROWS, inputs, device=weight.device, dtype=weight.dtype)
        matrix = torch.randn(outputs, inputs, device=weight.device, dtype=weight.dtype)
        seconds += count * _best(partial(torch.nn.functional.linear, rows, matrix)) / _ROWS
        flops += count * 2.0 * inputs * outputs
    numbers = torch.ones(_STREAM_BYTES // 4, device=weight.device)
    rates = Rates(flops / seconds, _STREAM_BYTES / _best(numbers.sum))
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    unread = 0 if head is not None and head.weight is table else table.nbytes
    return Roofline(rates, flops, _weight_bytes(model) - unread, token_bytes(model))


def _weight_bytes(model: PreTrainedModel) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _best(work: Callable[[], object]) -> float:
    """Seconds of the quickest of several runs, after one that warms up."""
    work()
    return min(_seconds(work) for _ in range(_REPEATS))


def _seconds(work: Callable[[], object]) -> float:
    synchronize()
    begun = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - begun


def _alone(plan: Plan, place: Place, lm: WindowedLM, roofline: Roofline, tell: Tell) -> Part:
    """One question at a time over one context."""
    asked = load(int(lm.model.config.vocab_size), place)
    with all_ways(lm, device=plan.device != "cpu") as ways:
        chosen = {name: way for name, way in ways.items() if name in plan.ways}
        cells = _measure_ways(plan, place, lm, asked, chosen, roofline, tell)
    steps = [profile_step(lm, place, asked)] if plan.profile else []
    readings = []
    if plan.against:
        methods = list(dict.fromkeys((plan.method, *plan.against)))
        readings = measure_readings(lm, place, asked, methods, min(plan.tokens), plan.rounds)
    return Part(cells, readings, steps=steps)


def _at_once(plan: Plan, questions: int, lm: WindowedLM) -> Part:
    """Many questions over one context."""
    place = Place(plan.question_context or plan.contexts[0], plan.windows[0], ragged=False)
    crowds = measure_crowd(lm, questions, place, tokens=min(plan.tokens), rounds=plan.rounds)
    return Part(crowds=crowds)


def _measure_ways(
    plan: Plan,
    place: Place,
    lm: WindowedLM,
    asked: Load,
    ways: dict[str, Way],
    roofline: Roofline,
    tell: Tell,
) -> list[Cell]:
    """Time every way in every round, every second round in the opposite order.

    So a noisy machine treats them alike.
    """
    short = load(int(lm.model.config.vocab_size), SHORT)
    for name, way in ways.items():
        way(short, 2)
        if name in (MEMORY, DISK):
            way(asked, 1)
    timings: dict[str, list[Any]] = {name: [] for name in ways}
    for number in range(plan.rounds):
        for name in ways if number % 2 == 0 else reversed(ways):
            rounds, tokens = plan.effort(name, place.context)
            if number < rounds:
                timings[name].append(ways[name](asked, tokens))
        tell(f"{place.context} tokens, {place.words}: round {number + 1} of {plan.rounds}")
    prompt = len(asked.prompt)
    computed = {
        SEQUENTIAL: prompt,
        PREFIX_KEPT: prompt - len(asked.prefix),
        COLD: prompt - len(asked.query),
    }
    cells = []
    for name, own in timings.items():
        _, tokens = plan.effort(name, place.context)
        cells.append(
            Cell(
                **dataclasses.asdict(place),
                way=name,
                prefill_s=[one.prefill_s for one in own],
                first_s=[one.stamps[0] for one in own],
                tokens=tokens,
                tokens_per_s=[one.tokens_per_s for one in own],
                end_s={str(n): [t.stamps[n - 1] for t in own] for n in plan.tokens if n <= tokens},
                prefill_floor_s=(roofline.prefill_s(computed[name]) if name in computed else None),
                decode_floor_s=roofline.decode_s(prompt),
                peak_bytes=_peak(plan, place, name, partial(ways[name], asked, 2), tell),
                kv_bytes=prompt * roofline.token,
                weight_bytes=_weight_bytes(lm.model),
            )
        )
    return cells


def measure_readings(
    lm: WindowedLM, place: Place, asked: Load, methods: Sequence[str], tokens: int, rounds: int
) -> list[Reading]:
    """What methods cost at each token: all decode at once, a token of each in turn.

    Methods that encode alike read the same keys and values in memory. What ``generate`` does beside
    the model's pass is left out; it is the same for all.

    Args:
        lm: without a cache.
        place: that the load was made for.
        asked: what is read.
        methods: their names.
        tokens: new ones in each round, at least two.
        rounds: of every method.
    """
    contexts: list[EncodedContext] = []
    for method in map(resolve, methods):
        alike = next((one for one in contexts if encodes_alike(one.method, method)), None)
        if alike is None:
            contexts.append(lm.encode_ids(asked.prefix, asked.windows, method=method))
        else:
            contexts.append(dataclasses.replace(alike, method=method))
    decoders = [GreedyDecoder(lm, context, asked.query) for context in contexts]
    made = [
        Reading(**dataclasses.asdict(place), method=name, tokens=tokens, first_s=[], token_s=[])
        for name in methods
    ]
    for number in range(rounds + 1):
        firsts = [decoder.first() for decoder in decoders]
        steps: list[list[float]] = [[] for _ in decoders]
        for step in range(1, tokens if number else 2):
            # Neither goes first always, and a slow moment of the machine meets all of them.
            order = range(len(decoders)) if step % 2 else reversed(range(len(decoders)))
            for index in order:
                steps[index].append(decoders[index].step())
        if number:  # the round before only warms up
            for reading, first, own in zip(made, firsts, steps, strict=True):
                reading.first_s.append(first)
                reading.token_s.append(statistics.median(own))
    return made


def encodes_alike(one: Method, other: Method) -> bool:
    """Whether windows encoded for one method are those of the other, read by no further step."""

    def encoding(method: Method) -> tuple[object, ...]:
        return method.windowed, method.alignment, method.encoding

    def steps(method: Method) -> tuple[object, ...]:
        return method.refinement, method.recompute, method.selection, method.combination

    return encoding(one) == encoding(other) and not any((*steps(one), *steps(other)))


class GreedyDecoder:
    """One greedy answer, a decode step at a time.

    Args:
        lm: decodes.
        context: what is read.
        query: is answered.
    """

    def __init__(self, lm: WindowedLM, context: EncodedContext, query: Sequence[int]) -> None:
        self._decoder = lm.engine.decoder
        self._query = torch.tensor([query])
        self._context = self._decoder.narrowed(context, query)
        self._ids = self._query

    @property
    def token(self) -> int:
        """The last one."""
        return int(self._ids[0, -1])

    def first(self) -> float:
        """Begin anew and read the query; returns seconds to the first token."""
        self._cache, self._past, self._ids = self._context.new_cache(), 0, self._query
        return self.step()

    def step(self) -> float:
        """The next token; returns its seconds."""
        synchronize()
        begun = time.perf_counter()
        logits = self._decoder.forward(self._context, self._ids, self._cache, self._past, last=1)
        self._past += self._ids.shape[1]
        self._ids = logits[:, -1].argmax(dim=-1, keepdim=True)
        synchronize()
        return time.perf_counter() - begun


def measure_crowd(
    lm: WindowedLM, questions: int, place: Place, *, tokens: int, rounds: int
) -> list[Crowd]:
    """Answer questions one by one and together, in turn; their windows are in memory before.

    Args:
        lm: without a cache.
        questions: how many.
        place: what each reads.
        tokens: new ones of each.
        rounds: of both ways, every second one in the opposite order.

    Raises:
        GenerationError: both ways gave different tokens in fp32.
    """
    asked = sharing(int(lm.model.config.vocab_size), questions, place)
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens}
    answers: dict[str, list[list[int]]] = {}

    def alone(warm: WindowedLM) -> None:
        answers[ALONE] = [
            warm.generate_ids(warm.encode_ids(one.prefix, one.windows), one.query, **options)
            for one in asked
        ]

    def together(warm: WindowedLM) -> None:
        loop = BatchLoop(warm.engine.encoder, warm.engine.decoder)
        rows = []
        for one in asked:
            context = complete(prefill_parts(loop.encoder, one.prefix, one.windows, warm.method))
            row = loop.admit(Asked(context, one.query, {**options, "do_sample": False}))
            if row is None:
                raise GenerationError("The batch can't take these options; please report this.")
            rows.append(row)
        while loop.rows:
            for row in loop.step():
                if row.error is not None:
                    raise row.error
        answers[TOGETHER] = [list(row.sampler.result()) for row in rows]

    seconds: dict[str, list[float]] = {ALONE: [], TOGETHER: []}
    with PassageCache("64GiB") as cache:
        warm = lm.with_cache(cache)
        for one in asked:
            warm.encode_ids(one.prefix, one.windows)
        ways = [(ALONE, partial(alone, warm)), (TOGETHER, partial(together, warm))]
        for number in range(rounds):
            for name, way in ways if number % 2 == 0 else reversed(ways):
                seconds[name].append(_seconds(way))
            # In less precision, two tokens of nearly the same logit may change places.
            if lm.model.dtype.itemsize >= 4 and answers[ALONE] != answers[TOGETHER]:
                raise GenerationError(
                    "Questions answered together got other tokens than one by one; please report "
                    "this with the command that you ran."
                )
    return [Crowd(questions, place.context, name, own, tokens) for name, own in seconds.items()]


def profile_step(lm: WindowedLM, place: Place, asked: Load) -> Step:
    """Where the time of a decode step goes, passes of the model alone.

    All figures are of the quickest of three rounds, under the profiler, which makes what is neither
    a linear layer nor attention look dearer than it is.

    Args:
        lm: on the CPU, with or without a cache.
        place: what stands in the result.
        asked: what is read.
    """
    decoder = GreedyDecoder(lm, lm.encode_ids(asked.prefix, asked.windows), asked.query)

    def decode() -> None:
        for _ in range(_PROFILED_TOKENS):
            decoder.step()

    rounds = []
    for _ in range(_PROFILED_ROUNDS):
        decoder.first()
        decoder.step()
        rounds.append([took / _PROFILED_TOKENS for took in _profiled(decode, place.context)])
    whole, linear, windows, tail = min(rounds)
    return Step(
        **dataclasses.asdict(place),
        linear=linear,
        windows=windows,
        tail=tail,
        rest=whole - linear - windows - tail,
    )


def _profiled(work: Callable[[], None], windows: int) -> tuple[float, float, float, float]:
    """Milliseconds of all, linear layers, attention over so many tokens, and other attention."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        whole = _seconds(work) * 1e3
    linear = over_windows = other = 0.0
    for event in seen.key_averages(group_by_input_shape=True):
        took = event.cpu_time_total / 1e3
        over = event.key == TORCH_ATTENTION
        if event.key == "aten::linear":
            linear += took
        elif event.key == native.NAME or (over and event.input_shapes[1][2] == windows):
            # The kernel in C is asked for many keys alone, and these are the windows'.
            over_windows += took
        elif over:
            other += took
    return whole, linear, over_windows, other


def _peak(plan: Plan, place: Place, way: str, work: Callable[[], object], tell: Tell) -> int | None:
    """Bytes at the peak of one way; None where it was not measured."""
    if not plan.memory or way not in (SEQUENTIAL, COLD) or plan.slow(way, place.context):
        return None
    if plan.device != "cpu":
        return peak_bytes(work, plan.device)
    if way == SEQUENTIAL:  # one prompt is the same however it would be cut
        place = Place(place.context, place.context, ragged=False)
    try:
        return peak_apart(plan, place, way, torch.get_num_threads())
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        tell(f"Peak memory of {way} was not measured: {error}")
        return None


@functools.lru_cache
def peak_apart(plan: Plan, place: Place, way: str, threads: int) -> int | None:
    """Peak memory in a process of its own: memory that other ways freed would hide a part of it.

    Raises:
        OSError: the process can't be started.
        CalledProcessError: it failed, as for lack of memory; it says on stderr why.
        ValueError: it answered something else.
    """
    asked = json.dumps([dataclasses.asdict(plan), dataclasses.asdict(place), way, threads])
    # It imports what this process would, wherever that comes from.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(  # noqa: S603 # this Python and this module, no shell
        [sys.executable, "-m", __name__, asked],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    answer = json.loads(lines[-1] if lines else "")
    return None if answer is None else int(answer)


def _answer_for_peak(asked: str) -> int | None:
    """Make the model and answer once; for a process that does nothing else."""
    plan_fields, place_fields, name, threads = json.loads(asked)
    plan, place = Plan(**plan_fields), Place(**place_fields)
    torch.set_num_threads(threads)
    model = plan.build()
    way = plain(model) if name == SEQUENTIAL else windowed(WindowedLM(model, method=plan.method))
    vocabulary = int(model.config.vocab_size)
    way(load(vocabulary, SHORT), _PEAK_TOKENS)
    prompt = load(vocabulary, place)
    return peak_bytes(lambda: way(prompt, _PEAK_TOKENS), "cpu")


def peak_bytes(work: Callable[[], object], device: str) -> int | None:
    """Bytes that a run needed at its peak beside those in use before it.

    On an accelerator what PyTorch allocated there; else this process's resident memory.

    Returns:
        None where the kernel does not tell it; only Linux does.
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


if __name__ == "__main__":
    print(json.dumps(_answer_for_peak(sys.argv[1])))
