"""``fallback=``: when passages are read in one prompt, and what the answer tells of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rag_windows import Generation, Guard, InputError
from tests.rag_windows import small

PASSAGES = ["The tower is old.", "The river is wide.", "The bridge is new.", "The lamp is lit."]
SILENT = Guard(passages=0)


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
def test_a_guard_that_finds_nothing_changes_nothing(options: dict[str, Any]) -> None:
    guarded, plain = ask(SILENT, **options), ask(**options)
    assert guarded.fallback is None
    assert guarded.token_ids == plain.token_ids
    assert guarded.citations == plain.citations


def test_windows_where_one_prompt_would_not_fit() -> None:
    passages = [f"{name} {'x' * 300}" for name in "abcd"]
    made = ask(Guard(tokens=4096), passages)
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
def test_nothing_to_guard(options: dict[str, Any]) -> None:
    few = ask(Guard(passages=9), **options).fallback
    assert (few is not None and few.taken) == (options == {"method": "ensemble"})


@pytest.mark.parametrize("numbers", [{"passages": -1}, {"tokens": 1.5}])
def test_numbers_outside_their_domain_are_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(numbers))):
        Guard(**numbers)


def test_an_unknown_fallback_is_refused() -> None:
    wrong: Any
    for wrong in ("pcw", True, 1):
        with pytest.raises(InputError, match="'sequential' or a Guard"):
            small.lm().stream("What?", PASSAGES, fallback=wrong)
