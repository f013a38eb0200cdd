"""The rounds of a run: every way in turn, so that a noisy machine treats them alike."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from rag_windows.benchmark.clock import Timing
from rag_windows.benchmark.crowd import measure_crowd
from rag_windows.benchmark.floor import Floor, measure_floor
from rag_windows.benchmark.load import Load, load
from rag_windows.benchmark.memory import peak_bytes
from rag_windows.benchmark.result import Cell, FloorFigures, Machine, Result
from rag_windows.benchmark.shape import shape_named
from rag_windows.benchmark.way import COLD, DISK, MEMORY, PREFIX_KEPT, SEQUENTIAL, Way, all_ways
from rag_windows.model import WindowedLM

WAYS = (SEQUENTIAL, PREFIX_KEPT, COLD, MEMORY, DISK)
_WARM = (MEMORY, DISK)
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run.

    Attributes:
        shape: of the model.
        dtype: its precision.
        device: where it runs.
        contexts: tokens of all windows.
        windows: tokens of each window.
        ragged: whether windows of different lengths are run, too.
        tokens: numbers of new tokens to whose end time is taken.
        rounds: of each cell, after one that warms up where that is cheap.
        ways: which of `WAYS`.
        method: of the windows.
        questions: numbers of questions that are asked at once, over the first context and window.
    """

    shape: str = "llama-0.25b"
    dtype: str = "bfloat16"
    device: str = "cpu"
    contexts: tuple[int, ...] = (8192,)
    windows: tuple[int, ...] = (256,)
    ragged: bool = False
    tokens: tuple[int, ...] = (64,)
    rounds: int = 5
    ways: tuple[str, ...] = WAYS
    method: str = "ape"
    questions: tuple[int, ...] = ()


def run(plan: Plan, command: str, tell: Tell = lambda _: None) -> Result:
    """Make the model, measure the machine, and time every way.

    Raises:
        InputError: an unknown shape, or windows that don't divide a context.
    """
    shape = shape_named(plan.shape)
    model = shape.build(plan.device, getattr(torch, plan.dtype))
    floor = measure_floor(model)
    tell(
        f"This machine: {floor.flops_per_s / 1e9:,.0f} GFLOP/s in the model's linear layers, "
        f"{floor.bytes_per_s / 1e9:,.1f} GB/s from memory."
    )
    lm = WindowedLM(model, method=plan.method)
    cells = []
    for context in plan.contexts:
        for window in plan.windows:
            for ragged in (False, True)[: 1 + plan.ragged]:
                asked = load(model.config.vocab_size, context, window, ragged=ragged)
                with all_ways(lm, device=plan.device != "cpu") as ways:
                    chosen = [way for way in ways if way.name in plan.ways]
                    cells += _cells(plan, asked, window, ragged, chosen, floor, tell)
    crowds = []
    for count in plan.questions:
        crowds += measure_crowd(
            lm, count, plan.contexts[0], plan.windows[0], min(plan.tokens), plan.rounds
        )
        tell(f"{count} questions at once: done")
    return Result(
        plan.shape,
        plan.dtype,
        machine(plan.device),
        FloorFigures(floor.flops_per_s, floor.bytes_per_s),
        cells,
        crowds,
        command,
    )


def _cells(
    plan: Plan,
    asked: Load,
    window: int,
    ragged: bool,
    ways: Sequence[Way],
    floor: Floor,
    tell: Tell,
) -> list[Cell]:
    longest = max(plan.tokens)
    took: dict[str, list[Timing]] = {way.name: [] for way in ways}
    for way in ways:
        if way.name in _WARM:
            way.run(asked, 1)
    for number in range(plan.rounds):
        for way in ways:
            took[way.name].append(way.run(asked, longest))
        tell(f"{asked.context} tokens in windows of {window}: round {number + 1} of {plan.rounds}")
    return [_cell(plan, asked, window, ragged, way, took[way.name], floor) for way in ways]


def _cell(
    plan: Plan,
    asked: Load,
    window: int,
    ragged: bool,
    way: Way,
    timings: Sequence[Timing],
    floor: Floor,
) -> Cell:
    return Cell(
        context=asked.context,
        window=window,
        ragged=ragged,
        way=way.name,
        prefill_s=[one.first_s if one.encode_s is None else one.encode_s for one in timings],
        first_s=[one.first_s for one in timings],
        tokens_per_s=[one.tokens_per_s for one in timings],
        end_s={str(n): [one.end_s(n) for one in timings] for n in plan.tokens},
        prefill_floor_s=floor.prefill_s(len(asked.prompt)),
        decode_floor_s=floor.decode_s(len(asked.prompt)),
        peak_bytes=peak_bytes(lambda: way.run(asked, 2)) if way.name == COLD else None,
        kv_bytes=asked.context * floor.token,
        weight_bytes=floor.weights,
    )


def machine(device: str) -> Machine:
    """Names and versions."""
    name = platform.processor() or platform.machine()
    described = Path("/proc/cpuinfo")
    if device != "cpu" and torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    elif described.exists():
        lines = described.read_text(encoding="utf-8").splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = models[0] if models else name
    packages = ("torch", "transformers", "rag-windows")
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return Machine(name, torch.get_num_threads(), versions)
