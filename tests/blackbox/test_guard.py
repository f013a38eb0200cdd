"""``fallback=``: when passages are read in one prompt, and what the answer tells of it."""

from __future__ import annotations

import json
import math
import threading
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria

from rag_windows import Generation, Guard, InputError
from tests.rag_windows import small

PASSAGES = ["The tower is old.", "The river is wide.", "The bridge is new.", "The lamp is lit."]
SILENT = Guard(passages=0)
ALWAYS = Guard(passages=0, spread=0.0)


def ask(fallback: Any = None, passages: Any = PASSAGES, **options: Any) -> Generation:
    options = {"max_new_tokens": 12, "do_sample": False, **options}
    return small.lm().generate("What?", passages, fallback=fallback, **options)


def test_few_short_passages_are_read_in_one_prompt() -> None:
    seen: list[tuple[int, int]] = []
    made = ask(
        Guard(passages=4, tokens=400), on_encoded=lambda done, total: seen.append((done, total))
    )
    assert made.fallback is not None
    assert made.fallback.signal == "few short passages"
    assert made.fallback.taken
    assert 60 < made.fallback.measured < made.fallback.threshold == 400
    assert "4 passages" in made.fallback.message
    assert seen == [(1, 1)]  # no window was encoded for it
    assert made.windows == ()
    ordinary = ask(method="sequential")
    assert made.token_ids == ordinary.token_ids
    assert made.citations == ordinary.citations
    assert made.usage == ordinary.usage
    json.dumps(made.fallback.as_dict())
    named = ask("sequential", PASSAGES[:2]).fallback
    assert named is not None
    assert named.signal == "few short passages"


@pytest.mark.parametrize("guard", [Guard(passages=3), Guard(passages=4, tokens=20)])
def test_more_or_longer_passages_are_not_few_or_short(guard: Guard) -> None:
    assert ask(guard).fallback is None


@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True, "seed": 3}, {"num_beams": 2}, {"link_tokens": 3}]
)
@pytest.mark.parametrize("guard", [SILENT, Guard(passages=0, spread=1.0)])
def test_a_guard_that_finds_nothing_changes_nothing(guard: Guard, options: dict[str, Any]) -> None:
    guarded, plain = ask(guard, **options), ask(**options)
    assert guarded.fallback is None
    assert guarded.token_ids == plain.token_ids
    assert guarded.citations == plain.citations


def test_spread_of_the_first_tokens() -> None:
    masses = [citation.mass for citation in ask(max_new_tokens=5).citations or ()]
    expected = 1 - sum((mass / sum(masses)) ** 2 for mass in masses)
    assert 0 < expected < 1
    found = ask(Guard(passages=0, spread=expected - 0.01, rows=5)).fallback
    assert found is not None
    assert (found.signal, found.taken) == ("multi-hop", True)
    assert found.measured == pytest.approx(expected, abs=1e-6)
    assert ask(Guard(passages=0, spread=expected + 0.01, rows=5)).fallback is None


def test_windows_where_one_prompt_would_not_fit() -> None:
    passages = [f"{name} {'x' * 300}" for name in "abcd"]
    made = ask(ALWAYS, passages)
    assert made.fallback is not None
    assert not made.fallback.taken
    assert "as one prompt does not hold them" in made.fallback.message
    assert "positions" in made.fallback.message
    plain = ask(None, passages)
    assert made.token_ids == plain.token_ids
    assert len(made.windows) == 4


@pytest.mark.parametrize(
    "options", [{"method": "sequential"}, {"passages": ()}, {"method": "ensemble"}]
)
def test_nothing_to_guard_and_no_attention_to_measure(options: dict[str, Any]) -> None:
    assert ask(ALWAYS, **options).fallback is None
    few = ask(Guard(passages=9), **options).fallback
    assert (few is not None and few.taken) == (options == {"method": "ensemble"})


@pytest.mark.parametrize("guard", [None, SILENT, ALWAYS, "sequential"])
def test_a_stream_is_exactly_the_generation(guard: Any) -> None:
    whole = ask(guard)
    chunks = list(
        small.lm().stream("What?", PASSAGES, max_new_tokens=12, do_sample=False, fallback=guard)
    )
    assert "".join(chunk.text for chunk in chunks) == whole.text
    last = chunks[-1].generation
    assert last is not None
    assert (last.token_ids, last.fallback) == (whole.token_ids, whole.fallback)


def test_what_stops_the_answer_stops_the_measurement() -> None:
    steps = 0

    class Third(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            nonlocal steps
            steps += 1
            return torch.full((len(input_ids),), steps % 3 == 0)

    guard = Guard(passages=0, spread=1.0, rows=200)
    made = ask(guard, max_new_tokens=200, stopping_criteria=[Third()])
    assert (steps, len(made.token_ids)) == (6, 3)


def test_threads_with_other_guards() -> None:
    guards = [None, SILENT, ALWAYS, Guard(passages=4)] * 2
    alone = [ask(guard) for guard in guards]
    found: list[Any] = [None] * len(guards)

    def work(index: int) -> None:
        found[index] = ask(guards[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(guards))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(one.token_ids, one.fallback) for one in found] == [
        (one.token_ids, one.fallback) for one in alone
    ]


@pytest.mark.parametrize(
    "numbers",
    [
        {"passages": -1},
        {"tokens": 1.5},
        {"rows": 0},
        {"spread": math.nan},
        {"spread": "high"},
    ],
)
def test_numbers_outside_their_domain_are_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(numbers))):
        Guard(**numbers)


def test_an_unknown_fallback_is_refused() -> None:
    wrong: Any
    for wrong in ("pcw", True, 1):
        with pytest.raises(InputError, match="'sequential' or a Guard"):
            small.lm().stream("What?", PASSAGES, fallback=wrong)
