"""Peak memory of one way in a process of its own: memory that other ways freed would hide it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rag_windows.benchmark.load import Load, load
from rag_windows.benchmark.memory import peak_bytes
from rag_windows.benchmark.plan import COLD, SEQUENTIAL, Place, Plan
from rag_windows.benchmark.shape import timed
from rag_windows.benchmark.way import Way, sequential, windows
from rag_windows.model import WindowedLM

_TOKENS = 2
_MEASURED = (SEQUENTIAL, COLD)


@dataclass(frozen=True, slots=True)
class Asked:
    """What such a process answers.

    Attributes:
        shape: of the model.
        model: name or folder of a trained one instead, or None.
        dtype: its precision.
        method: of the windows.
        way: `SEQUENTIAL` or `COLD`.
        context: tokens of all windows.
        window: tokens of each, or on average.
        ragged: whether their lengths differ.
        threads: of PyTorch.
    """

    shape: str
    model: str | None
    dtype: str
    method: str
    way: str
    context: int
    window: int
    ragged: bool
    threads: int


class Peaks:
    """Peaks of a run; that of one prompt is the same however it would be cut.

    Args:
        plan: of the run.
        tell: called with what went wrong.
    """

    def __init__(self, plan: Plan, tell: Callable[[str], None]) -> None:
        self._plan = plan
        self._tell = tell
        self._known: dict[tuple[str, Place | int], int | None] = {}

    def of(self, way: Way, place: Place, asked: Load) -> int | None:
        """Bytes beside the weights, keys and values included; None where they were not measured."""
        plan = self._plan
        dear = plan.dear(way.name, place.context)
        if not plan.memory or way.name not in _MEASURED or dear:
            return None
        key = (way.name, place.context if way.name == SEQUENTIAL else place)
        if key not in self._known:
            self._known[key] = self._measured(way, place, asked)
        return self._known[key]

    def _measured(self, way: Way, place: Place, asked: Load) -> int | None:
        plan = self._plan
        if plan.device != "cpu":
            return peak_bytes(lambda: way.run(asked, _TOKENS), plan.device)
        try:
            return peak_apart(
                Asked(
                    plan.shape,
                    plan.model,
                    plan.dtype,
                    plan.method,
                    way.name,
                    place.context,
                    place.window,
                    place.ragged,
                    torch.get_num_threads(),
                )
            )
        except (OSError, subprocess.CalledProcessError, ValueError) as error:
            self._tell(f"Peak memory of {way.name} was not measured: {error}")
            return None


def peak_apart(asked: Asked) -> int | None:
    """Start the process, and wait for its answer.

    Raises:
        OSError: it can't be started.
        CalledProcessError: it failed, as for lack of memory; it says on stderr why.
        ValueError: it answered something else.
    """
    # It imports what this process would, wherever that comes from.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(  # noqa: S603 # this Python and this module, no shell
        [sys.executable, "-m", __name__, json.dumps(dataclasses.asdict(asked))],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    answer = json.loads(lines[-1] if lines else "")
    return None if answer is None else int(answer)


def measure(asked: Asked) -> int | None:
    """Make the model and answer once; for a process that does nothing else."""
    torch.set_num_threads(asked.threads)
    model = timed(asked.shape, asked.model).build("cpu", getattr(torch, asked.dtype))
    lm = WindowedLM(model, method=asked.method)
    way = sequential(model) if asked.way == SEQUENTIAL else windows(lm, COLD)
    vocabulary = model.config.vocab_size
    # What is loaded and started on the first use belongs to no prompt.
    way.run(load(vocabulary, 32, 16), _TOKENS)
    prompt = load(vocabulary, asked.context, asked.window, ragged=asked.ragged)
    return peak_bytes(lambda: way.run(prompt, _TOKENS))


if __name__ == "__main__":
    print(json.dumps(measure(Asked(**json.loads(sys.argv[1])))))
