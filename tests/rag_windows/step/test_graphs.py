"""The order in which CUDA graphs are asked for things, and a device's own, where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rag_windows import APE, WindowedLM
from rag_windows.step.graphs import CudaGraphs
from rag_windows.step.serving import VARIABLE, steps_of
from tests.parity import zoo
from tests.parity.cases import CASES

from . import models


class Stream:
    """Tells what is asked of it."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self._told = name, told

    def wait_stream(self, other: Stream) -> None:
        self._told.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Any) -> None:
        self._told.append(f"{self.name} waits for the last turn")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the stand-ins of torch.cuda's classes were asked, in order."""
    told: list[str] = []
    current = [Stream("caller", told)]

    @contextmanager
    def use(stream: Stream) -> Iterator[None]:
        current.append(stream)
        try:
            yield
        finally:
            current.pop()

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        yield

    class Graph:
        def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
            told.append(f"begin on {current[-1].name}, {pool}, {capture_error_mode}")

        def capture_end(self) -> None:
            told.append("end")

        def replay(self) -> None:
            told.append("launch")

    class Event:
        def record(self, stream: Stream) -> None:
            told.append(f"turn of {stream.name} ends")

    for name, stand_in in {
        "graph_pool_handle": lambda: "pool",
        "Stream": lambda device: Stream("side", told),
        "current_stream": lambda: current[-1],
        "stream": use,
        "device": on,
        "CUDAGraph": Graph,
        "Event": Event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return told


def test_a_recording_is_made_beside_the_callers_stream(told: list[str]) -> None:
    graphs = CudaGraphs(torch.device("cuda:0"))
    result = torch.zeros(1)

    def run() -> tuple[torch.Tensor, ...]:
        told.append("run")
        return (result,)

    with graphs.turn():
        replay = graphs.record(run)
        assert replay()[0] is result
    assert told == [
        "caller waits for the last turn",
        "side waits for caller",
        "run",
        "begin on side, pool, thread_local",
        "run",
        "end",
        "caller waits for side",
        "launch",
        "turn of caller ends",
    ]


def test_a_recording_that_fails_is_ended_and_the_turn_given_on(told: list[str]) -> None:
    graphs = CudaGraphs(torch.device("cuda:0"))
    runs: list[int] = []

    def run() -> tuple[torch.Tensor, ...]:
        runs.append(1)
        if len(runs) == 2:
            raise RuntimeError("not permitted")
        return ()

    with pytest.raises(RuntimeError, match="not permitted"), graphs.turn():
        graphs.record(run)
    assert told[-2:] == ["end", "turn of caller ends"]
    with graphs.turn():
        pass


def test_recordings_are_for_whole_models_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    assert steps_of(zoo.shared("llama")) is None
    spread = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))
    assert steps_of(spread) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gemma3_text-sliding"])
def test_cuda_graphs_give_what_ordinary_steps_give(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, method = CASES["ragged"], APE(temperature=0.7, scale=0.8)
    monkeypatch.setenv(VARIABLE, "1")
    model = zoo.build(zoo.BY_NAME[name], dtype=dtype).to("cuda")
    lm = WindowedLM.from_pretrained(model, tokenizer=None, method=method)
    steps = lm._decoder.steps
    assert steps is not None
    steps.eager_steps, steps.pays_from = 1, 2
    context = lm.encode_ids(case.prefix, case.windows)
    made: list[bool] = []
    prove = steps.prove

    def proving(recorded: Any, *args: Any) -> None:
        prove(recorded, *args)
        made.append(recorded.proven)

    monkeypatch.setattr(steps, "prove", proving)
    logits = [models.decode(lm, context, case.query, 40)[1] for _ in range(2)]
    assert made == [True, True]
    lm._decoder.steps = None
    expected = models.decode(lm, context, case.query, 40)[1]
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    for launched in logits:
        # Beyond the first token that differs by rounding, other tokens are read.
        same = (launched.argmax(-1) == expected.argmax(-1)).long().cumprod(0).bool()
        assert same.sum() > 3
        gap = (launched[same] - expected[same]).abs().amax() / expected.abs().amax()
        assert gap.item() <= tolerance
