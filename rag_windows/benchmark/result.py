"""What a run of the benchmark found, as JSON and back."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rag_windows.benchmark.plan import Place
from rag_windows.errors import DataError

FORMAT = 2


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a run took place.

    Attributes:
        device: the accelerator's or processor's name.
        threads: of PyTorch on the processor.
        versions: of Python, torch, transformers and rag-windows; on a CPU also whether the C kernel
            is "compiled" or "absent".
    """

    device: str
    threads: int
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class FloorFigures:
    """What was measured of the machine in the same run; see `floor.Floor`."""

    linear_flops_per_s: float
    memory_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One way over one context; lists hold one entry a round, in seconds.

    Attributes:
        context: tokens of all windows.
        window: tokens of each, or on average.
        ragged: whether their lengths differ.
        way: its name.
        prefill_s: until the query could be read; until the first token where that is one step.
        first_s: to the first token.
        tokens: new ones in each round.
        tokens_per_s: behind the first.
        end_s: to so many new tokens, by their number; those that were made.
        prefill_floor_s: linear layers of the tokens that the prefill computes, at the measured
            rate; None where it computes none.
        decode_floor_s: reading weights, keys and values once.
        peak_bytes: beside the weights, with keys and values; None where it was not measured.
        kv_bytes: keys and values of the prompt.
        weight_bytes: of the model, all of them.
    """

    context: int
    window: int
    ragged: bool
    way: str
    prefill_s: list[float]
    first_s: list[float]
    tokens: int
    tokens_per_s: list[float]
    end_s: dict[str, list[float]]
    prefill_floor_s: float | None
    decode_floor_s: float
    peak_bytes: int | None
    kv_bytes: int
    weight_bytes: int

    @property
    def place(self) -> Place:
        """What it is compared within."""
        return Place(self.context, self.window, self.ragged)

    @property
    def excess(self) -> float | None:
        """Peak memory above weights, keys and values, as a share of these; None if not measured."""
        if self.peak_bytes is None:
            return None
        needed = self.weight_bytes + self.kv_bytes
        return (self.peak_bytes - self.kv_bytes) / needed


@dataclass(frozen=True, slots=True)
class Crowd:
    """Many questions that share half of their passages.

    Attributes:
        questions: how many.
        context: tokens of each.
        way: "one by one" or "together".
        seconds: for all of them, one entry a round.
        tokens: generated for each.
    """

    questions: int
    context: int
    way: str
    seconds: list[float]
    tokens: int


@dataclass(frozen=True, slots=True)
class Reading:
    """One method that reads windows in memory; lists hold one entry a round, in seconds.

    Attributes:
        context: tokens of all windows.
        window: tokens of each, or on average.
        ragged: whether their lengths differ.
        method: its name; its numbers are its defaults.
        tokens: new ones in each round.
        first_s: to the first token, the windows being there.
        token_s: median over the further tokens.
    """

    context: int
    window: int
    ragged: bool
    method: str
    tokens: int
    first_s: list[float]
    token_s: list[float]

    @property
    def place(self) -> Place:
        """What it is compared within."""
        return Place(self.context, self.window, self.ragged)


@dataclass(frozen=True, slots=True)
class Step:
    """Where the time of a further token goes, in milliseconds.

    Attributes:
        context: tokens of all windows.
        window: tokens of each, or on average.
        ragged: whether their lengths differ.
        linear: the model's linear layers, its vocabulary layer among them.
        windows: attention over the windows.
        tail: attention over prefix, question and what was written.
        rest: norms, rotary positions, merging, choosing the token, Python.
    """

    context: int
    window: int
    ragged: bool
    linear: float
    windows: float
    tail: float
    rest: float

    @property
    def place(self) -> Place:
        """What was read."""
        return Place(self.context, self.window, self.ragged)

    @property
    def total(self) -> float:
        """All of it."""
        return self.linear + self.windows + self.tail + self.rest


@dataclass(frozen=True, slots=True)
class Part:
    """What is measured at a stretch, and kept when a run is killed behind it."""

    cells: list[Cell] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    crowds: list[Crowd] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Part:
        """From what `dataclasses.asdict` makes of one.

        Raises:
            TypeError, KeyError: it is something else.
        """
        return cls(
            [Cell(**one) for one in values["cells"]],
            [Reading(**one) for one in values["readings"]],
            [Crowd(**one) for one in values["crowds"]],
            [Step(**one) for one in values["steps"]],
        )


@dataclass(frozen=True, slots=True)
class Result:
    """One run.

    Attributes:
        shape: of the model.
        dtype: its precision.
        machine: where.
        floor: of the machine.
        method: of the windows, with its numbers.
        parts: what was measured.
        command: that made it.
        goes: calls that it took; more than one after some were killed.
    """

    shape: str
    dtype: str
    machine: Machine
    floor: FloorFigures
    method: dict[str, Any]
    parts: list[Part]
    command: str
    goes: int = 1

    @property
    def cells(self) -> list[Cell]:
        """Single questions."""
        return [cell for part in self.parts for cell in part.cells]

    @property
    def readings(self) -> list[Reading]:
        """Methods beside each other."""
        return [reading for part in self.parts for reading in part.readings]

    @property
    def crowds(self) -> list[Crowd]:
        """Many questions at once."""
        return [crowd for part in self.parts for crowd in part.crowds]

    @property
    def steps(self) -> list[Step]:
        """Further tokens taken apart."""
        return [step for part in self.parts for step in part.steps]

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        values = {"format": FORMAT, **dataclasses.asdict(self)}
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read what `save` wrote.

        Raises:
            DataError: it is something else.
        """
        try:
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if values.pop("format") != FORMAT:
                raise ValueError(f"not of format {FORMAT}")
            values["machine"] = Machine(**values["machine"])
            values["floor"] = FloorFigures(**values["floor"])
            values["parts"] = [Part.from_json(one) for one in values["parts"]]
            return cls(**values)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{path} is no result of rag-windows bench ({type(error).__name__}: {error}); name "
                "a JSON file that it wrote."
            ) from error


def median(values: Sequence[float]) -> float:
    """NaN for none."""
    return statistics.median(values) if values else math.nan


def exponent(contexts: Sequence[int], seconds: Sequence[float]) -> float:
    """Slope of a line through both logarithms: 1 where twice the context takes twice the time.

    NaN for fewer than two contexts.
    """
    if len(set(contexts)) < 2:
        return math.nan
    slope, _ = statistics.linear_regression(
        [math.log(one) for one in contexts], [math.log(one) for one in seconds]
    )
    return slope
