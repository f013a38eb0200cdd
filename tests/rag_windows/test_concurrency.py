"""Whole requests, texts and seeds included, from many threads on one model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from rag_windows import APE, PCW, Linked, Sequential
from tests.rag_windows import small

METHODS = (
    *(PCW(), Sequential(), APE(0.7, 0.8), APE(0.9, 0.6, "as printed"), APE(1.2, 0.5)),
    *(
        Linked(1),
        Linked("all"),
        Linked(0.5, reader=APE()),
        Linked(1, "query"),
        Linked(0.5, "query"),
    ),
)


def request(number: int) -> dict[str, Any]:
    passages = [f"Fact {number}.{i}: " + "word " * (3 * i + number) for i in range(1 + number % 4)]
    options: dict[str, Any] = {"method": METHODS[number % len(METHODS)], "max_new_tokens": 8}
    if number % 3 == 0:
        options |= {"do_sample": True, "seed": number}
    if number % 5 == 0:
        options |= {"num_beams": 2}
    if number % 7 == 0:
        passages = []
    return {"query": f"What is {number}?", "passages": passages, **options}


def answer(number: int) -> tuple[str, tuple[int, ...], list[float]]:
    arguments = request(number)
    if number % 2:
        generation = list(small.lm().stream(**arguments))[-1].generation
        assert generation is not None
    else:
        generation = small.lm().generate(**arguments)
    masses = [round(citation.mass, 4) for citation in generation.citations or ()]
    return generation.text, generation.token_ids, masses


def test_threads_answer_as_they_would_alone() -> None:
    numbers = list(range(40))
    serial = [answer(number) for number in numbers]
    inputs = torch.tensor([[0, 4, 70, 71, 99]])
    plain = small.model()(inputs).logits

    def mixed(number: int) -> Any:
        if number < 0:
            return torch.equal(small.model()(inputs).logits, plain)
        return answer(number)

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(mixed, [n for number in numbers for n in (number, -1)]))
    assert results[::2] == serial
    assert all(results[1::2]), "the plain model changed while windows were read"
