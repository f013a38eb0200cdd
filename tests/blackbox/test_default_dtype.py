"""PyTorch's default dtype, which programs set for models of their own, changes no answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rag_windows import PassageCache, WindowedLM
from tests.rag_windows import small

PASSAGES = [
    {"text": "The lake is deep and cold.", "score": 2.0},
    {"text": "The tower is old.", "score": 1.0},
    {"text": "A bridge leads over the river to the town.", "score": 0.5},
]
QUERY = "What is deep?"
FEW: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}

Way = Callable[[WindowedLM], Any]


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    yield request.param
    torch.set_default_dtype(torch.float32)


def answered(**options: Any) -> Way:
    def ask(lm: WindowedLM) -> Any:
        found = lm.generate(QUERY, PASSAGES, **{**FEW, **options})
        return found.token_ids, found.citations, found.prefix_mass, found.query_mass

    return ask


def batched(lm: WindowedLM) -> Any:
    methods = ("ape", "pcw", "structured-prompting", "ape:temperature=0.5")
    asked = [{"query": QUERY, "passages": PASSAGES, "method": one, **FEW} for one in methods]
    return [(one.token_ids, one.citations) for one in lm.generate_batch(asked)]


def booked(lm: WindowedLM) -> Any:
    book = lm.codebook(memory="64MiB")
    book.add(PASSAGES)
    found = lm.generate(QUERY, book, **FEW)
    return found.token_ids, found.citations


def cached(lm: WindowedLM) -> Any:
    with_cache = lm.with_cache(PassageCache(memory="64MiB", store="int8"))
    return [answered()(with_cache) for _ in range(2)]


WAYS: dict[str, Way] = {
    "ape": answered(),
    "right aligned": answered(method="structured-prompting"),
    "refined": answered(method="deep-thinking"),
    "ensemble": answered(method="ensemble"),
    "fused": answered(method="codebook"),
    "linked by query": answered(link_tokens=0.5, link_choose="query"),
    "linked by deviation": answered(link_tokens=3, link_choose="deviation"),
    "beams": answered(num_beams=2),
    "sampled": answered(do_sample=True, seed=3),
    "batch": batched,
    "book": booked,
    "cache": cached,
    "scores": lambda lm: lm.score(QUERY, PASSAGES, choices=["yes", "no way"]),
    "guard": answered(fallback="sequential"),
    "wrapped anew": lambda lm: answered()(small.wrapped()),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_does_not_depend_on_it(way: str, default: torch.dtype) -> None:
    lm = small.wrapped()
    expected = WAYS[way](lm)
    torch.set_default_dtype(default)
    assert WAYS[way](lm) == expected
