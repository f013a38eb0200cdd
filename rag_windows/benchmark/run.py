"""A run: the model, the machine, then every part, kept as it comes."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from rag_windows.attention.native import kernel as native
from rag_windows.benchmark.crowd import measure_crowd
from rag_windows.benchmark.floor import Floor, measure_floor
from rag_windows.benchmark.journal import Journal, sources
from rag_windows.benchmark.load import load
from rag_windows.benchmark.peak import Peaks
from rag_windows.benchmark.plan import Place, Plan
from rag_windows.benchmark.profile import profile_step
from rag_windows.benchmark.reading import measure_readings
from rag_windows.benchmark.result import FORMAT, FloorFigures, Machine, Part, Result
from rag_windows.benchmark.rounds import measure_ways
from rag_windows.benchmark.shape import Pretrained, Shape, timed
from rag_windows.benchmark.way import all_ways
from rag_windows.evaluation.machine import surroundings
from rag_windows.methods import resolve
from rag_windows.methods.registry import describe
from rag_windows.model import WindowedLM

Tell = Callable[[str], None]


def run(
    plan: Plan, command: str, tell: Tell = lambda _: None, journal: Path | None = None
) -> Result:
    """Make the model, measure the machine, and time everything that is planned.

    Args:
        plan: what to run.
        command: that asked for it.
        tell: called with what was done.
        journal: file in which parts are kept until the caller removes it; an unfinished run of the
            same settings that it holds is gone on with.

    Raises:
        InputError: an unknown shape or method, windows that don't divide a context, or a journal
            of other settings.
        DataError: the journal can't be read or written.
    """
    shape = timed(plan.shape, plan.model)
    here = machine(plan, shape)
    settings = {
        "format": FORMAT,
        "plan": dataclasses.asdict(plan),
        "machine": dataclasses.asdict(here),
        "code": sources(),
    }
    kept = Journal(journal, settings)
    if len(kept):
        tell(f"Going on with an unfinished run; parts of it in {journal}: {len(kept)}.")
    model = shape.build(plan.device, getattr(torch, plan.dtype))
    floor = measure_floor(model)
    tell(
        f"This machine: {floor.flops_per_s / 1e9:,.0f} GFLOP/s in the model's linear layers, "
        f"{floor.bytes_per_s / 1e9:,.1f} GB/s from memory."
    )
    lm = WindowedLM(model, method=plan.method)
    peaks = Peaks(plan, tell)
    work: list[tuple[str, Callable[[], Part]]] = [
        (f"{one.context} {one.windows}", partial(_single, plan, one, lm, floor, peaks, tell))
        for one in plan.places
    ]
    work += [(f"{one} questions", partial(_many, plan, one, lm, tell)) for one in plan.questions]
    parts = []
    for name, measure in work:
        part = kept.part(name)
        if part is None:
            part = measure()
            kept.add(name, part)
        parts.append(part)
    return Result(
        shape.name,
        plan.dtype,
        here,
        FloorFigures(floor.flops_per_s, floor.bytes_per_s),
        describe(resolve(plan.method)),
        parts,
        command,
        kept.goes,
    )


def _single(
    plan: Plan, place: Place, lm: WindowedLM, floor: Floor, peaks: Peaks, tell: Tell
) -> Part:
    with all_ways(lm, device=plan.device != "cpu") as ways:
        chosen = [way for way in ways if way.name in plan.ways]
        cells = measure_ways(plan, place, lm, chosen, floor, peaks, tell)
    asked = load(lm.model.config.vocab_size, place.context, place.window, ragged=place.ragged)
    steps = []
    if plan.profile:
        steps = [profile_step(lm, place, asked)]
        tell(f"{place.context} tokens, {place.windows}: a further token taken apart")
    if not plan.against:
        return Part(cells, steps=steps)
    methods = list(dict.fromkeys((plan.method, *plan.against)))
    readings = measure_readings(lm, place, asked, methods, min(plan.tokens), plan.rounds)
    tell(f"{place.context} tokens, {place.windows}: {len(methods)} methods beside each other")
    return Part(cells, readings, steps=steps)


def _many(plan: Plan, questions: int, lm: WindowedLM, tell: Tell) -> Part:
    context = plan.question_context or plan.contexts[0]
    window = plan.windows[0]
    crowds = measure_crowd(lm, questions, context, window, min(plan.tokens), plan.rounds)
    tell(f"{questions} questions at once: done")
    return Part(crowds=crowds)


def machine(plan: Plan, shape: Shape | Pretrained) -> Machine:
    """Names and versions, and on a CPU whether the kernel in C serves the shape."""
    versions = surroundings()
    device = versions.pop("machine")
    versions = {"python": platform.python_version(), **versions}
    if plan.device == "cpu":
        served = native.available(getattr(torch, plan.dtype), shape.head_dim, shape.head_dim)
        versions["C kernel"] = "compiled" if served else "absent"
    return Machine(device, torch.get_num_threads(), versions)
