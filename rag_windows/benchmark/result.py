"""What a run of the benchmark found, as JSON and back."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rag_windows.errors import DataError

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a run took place.

    Attributes:
        device: the accelerator's or processor's name.
        threads: of PyTorch on the processor.
        versions: of Python, torch, transformers and rag-windows.
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
        tokens_per_s: behind the first.
        end_s: to so many new tokens, by their number.
        prefill_floor_s: linear layers of the prompt at the measured rate.
        decode_floor_s: reading weights, keys and values once.
        peak_bytes: beyond what was in use before; None where it was not measured.
        kv_bytes: keys and values of the context.
        weight_bytes: of the model.
    """

    context: int
    window: int
    ragged: bool
    way: str
    prefill_s: list[float]
    first_s: list[float]
    tokens_per_s: list[float]
    end_s: dict[str, list[float]]
    prefill_floor_s: float
    decode_floor_s: float
    peak_bytes: int | None
    kv_bytes: int
    weight_bytes: int

    @property
    def place(self) -> tuple[int, int, bool]:
        """What it is compared within."""
        return self.context, self.window, self.ragged


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
class Result:
    """One run.

    Attributes:
        shape: of the model.
        dtype: its precision.
        machine: where.
        floor: of the machine.
        cells: single questions.
        crowds: many at once.
        command: that made it.
    """

    shape: str
    dtype: str
    machine: Machine
    floor: FloorFigures
    cells: list[Cell]
    crowds: list[Crowd]
    command: str

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
            values["cells"] = [Cell(**one) for one in values["cells"]]
            values["crowds"] = [Crowd(**one) for one in values["crowds"]]
            return cls(**values)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
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
