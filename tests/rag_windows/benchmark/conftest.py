"""One run of the smallest shape, which several tests look at."""

from __future__ import annotations

import pytest

from rag_windows.benchmark.plan import Plan
from rag_windows.benchmark.result import Result
from rag_windows.benchmark.run import run

PLAN = Plan(
    shape="tiny",
    dtype="float32",
    contexts=(128, 256),
    windows=(32,),
    ragged=True,
    tokens=(2, 4),
    rounds=2,
    against=("pcw", "structured-prompting"),
    questions=(3,),
    dear_above=128,
    dear_rounds=1,
    dear_tokens=3,
    memory=False,
)


@pytest.fixture(scope="session")
def result() -> Result:
    return run(PLAN, "rag-windows bench --shape tiny")
