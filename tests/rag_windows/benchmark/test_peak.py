"""Peak memory, in this process and in one of its own."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rag_windows.benchmark import peak
from rag_windows.benchmark.load import load
from rag_windows.benchmark.memory import peak_bytes
from rag_windows.benchmark.peak import Asked, Peaks, peak_apart
from rag_windows.benchmark.plan import COLD, MEMORY, SEQUENTIAL, Place, Plan
from rag_windows.benchmark.shape import shape_named, token_bytes
from rag_windows.benchmark.way import Way

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process's peak")
PLACE = Place(4096, 256, ragged=False)
LOAD = load(500, 64, 16)


def _way(name: str) -> Way:
    return Way(name, lambda _load, _tokens: pytest.fail("answered in this process"))


@linux
def test_peak_memory_sees_what_is_gone_at_the_end() -> None:
    size = 64 * 2**20

    def work() -> None:
        torch.ones(size // 4).sum()

    for _ in range(2):
        found = peak_bytes(work)
        assert found is not None
        assert size * 0.9 < found < size * 1.5


@linux
def test_a_process_of_its_own_sees_the_keys_and_values() -> None:
    ways = (SEQUENTIAL, COLD)
    asked = [
        Asked("tiny", None, "float32", "ape", way, 4096, 256, ragged=False, threads=1)
        for way in ways
    ]
    needed = 4096 * token_bytes(shape_named("tiny").build("meta", torch.float32))
    with ThreadPoolExecutor(len(asked)) as pool:  # most of their time is the start
        for found in pool.map(peak_apart, asked):
            assert found is not None
            assert needed < found < needed + 400 * 2**20


def test_a_process_that_fails_leaves_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(asked: Asked) -> int:
        raise subprocess.CalledProcessError(-9, "python")

    monkeypatch.setattr(peak, "peak_apart", killed)
    told: list[str] = []
    assert Peaks(Plan(), told.append).of(_way(COLD), PLACE, LOAD) is None
    assert "windows, cold was not measured" in told[0]
    assert "SIGKILL" in told[0]


def test_one_prompt_is_measured_once_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Asked] = []

    def measured(one: Asked) -> int:
        asked.append(one)
        return len(asked)

    monkeypatch.setattr(peak, "peak_apart", measured)
    peaks = Peaks(Plan(dear_above=4096), print)
    places = [Place(4096, 256, ragged=False), Place(4096, 1024, ragged=True)]
    assert [peaks.of(_way(SEQUENTIAL), place, LOAD) for place in places] == [1, 1]
    assert [peaks.of(_way(COLD), place, LOAD) for place in places] == [2, 3]
    assert peaks.of(_way(MEMORY), places[0], LOAD) is None
    dear = Place(8192, 256, ragged=False)
    assert peaks.of(_way(SEQUENTIAL), dear, LOAD) is None
    assert peaks.of(_way(COLD), dear, LOAD) == 4
    assert Peaks(Plan(memory=False), print).of(_way(COLD), dear, LOAD) is None
    assert [(one.way, one.window, one.ragged) for one in asked[1:3]] == [
        (COLD, 256, False),
        (COLD, 1024, True),
    ]
