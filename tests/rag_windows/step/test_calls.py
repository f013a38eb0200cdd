"""Which calls are served, and that what belongs to one call stays with it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from rag_windows import WindowedLM
from rag_windows.step.tail import StaticTail
from rag_windows.stopping import Cancelled
from tests.rag_windows import small

from . import models
from .models import OTHER, PREFIX, QUERY, WINDOWS, answer, expected, ids


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"do_sample": True, "num_return_sequences": 2},
        {"output_hidden_states": True},
        {"prompt_lookup_num_tokens": 2},
        {"disable_compile": True},
    ],
    ids=lambda options: next(reversed(options)),
)
def test_what_is_more_than_a_row_takes_ordinary_steps(options: dict[str, Any]) -> None:
    lm, tapes = models.recorded_small()
    made = ids(lm, 12, seed=3, **options)
    assert tapes.recorded == 0
    assert made == ids(small.lm(), 12, seed=3, **options)


def test_a_hooked_module_takes_ordinary_steps() -> None:
    lm, tapes = models.recorded_small()
    seen: list[int] = []
    layer = lm.model.model.layers[0]
    handle = layer.register_forward_hook(lambda *_: seen.append(1))
    try:
        ids(lm, 12)
    finally:
        handle.remove()
    assert tapes.recorded == 0
    assert len(seen) >= 12


def test_hooks_that_transformers_leaves_behind_do_not_count() -> None:
    lm, tapes = models.recorded_small()
    ids(lm, 4, output_hidden_states=True)
    assert any(module._forward_hooks for module in lm.model.modules())
    ids(lm, 12)
    assert tapes.recorded == 1


def test_an_ensemble_and_a_question_without_windows_take_ordinary_steps() -> None:
    lm, tapes = models.recorded_small()
    context = lm.encode_ids(PREFIX, WINDOWS, method="ensemble", scores=[1.0, 1.0])
    answer(lm, context, 12)
    answer(lm, lm.encode_ids(PREFIX, []), 12)
    assert tapes.recorded == 0


def test_threads_do_not_share_what_a_step_reads() -> None:
    lm, tapes = models.recorded_small(max_recordings=3)
    contexts = [lm.encode_ids(PREFIX, windows) for windows in (WINDOWS, OTHER)]
    wanted = [expected(30, windows) for windows in (WINDOWS, OTHER)]
    barrier = threading.Barrier(4)

    def ask(number: int) -> list[Any]:
        barrier.wait()
        return [answer(lm, contexts[number % 2], 30) for _ in range(3)]

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(4)))
    for number, made in enumerate(answers):
        assert made == [wanted[number % 2]] * 3
    assert tapes.played > 100


def test_a_call_that_fails_gives_back_what_it_was_lent() -> None:
    lm, _ = models.recorded_small(max_recordings=1)
    context = lm.encode_ids(PREFIX, WINDOWS)

    def failing(token_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        if token_ids.shape[1] > len(PREFIX) + len(QUERY) + 6:
            raise ValueError("enough")
        return torch.zeros(1, dtype=torch.bool)

    with pytest.raises(ValueError, match="enough"):
        answer(lm, context, 12, stopping_criteria=[failing])
    assert not models.steps(lm)._holders
    assert ids(lm, 12) == expected(12)


def test_a_cancelled_call_stops_within_a_token() -> None:
    lm, tapes = models.recorded_small()
    event = threading.Event()

    def cancel(token_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        if tapes.played == 3:
            event.set()
        return torch.zeros(1, dtype=torch.bool)

    made = lm._decoder.generate(
        lm.encode_ids(PREFIX, WINDOWS),
        QUERY,
        options={"max_new_tokens": 50, "min_new_tokens": 50},
        stopping=lambda _: [cancel, Cancelled(event)],
    )
    assert tapes.played == 3
    assert made.sequences[0] == expected(50)[: len(made.sequences[0])]


def test_streamed_text_is_the_answer() -> None:
    lm, tapes = models.recorded_small()
    options: dict[str, Any] = {"max_new_tokens": 24, "min_new_tokens": 24, "stop": "zz"}
    wanted = small.lm().generate("Why?", ["Because."], **options)
    chunks = list(lm.stream("Why?", ["Because."], **options))
    assert "".join(chunk.text for chunk in chunks) == wanted.text
    assert tapes.recorded == 1


def tail(lm: WindowedLM, new_tokens: int) -> Any:
    context = lm.encode_ids(PREFIX, WINDOWS)
    made = lm._decoder.generate(context, QUERY, options={"max_new_tokens": new_tokens})
    return made.raw.past_key_values


def test_the_cpu_and_short_answers_have_ordinary_tails() -> None:
    assert small.lm()._decoder.steps is None
    assert type(tail(small.lm(), 20)) is DynamicCache
    lm, _ = models.recorded_small(pays_from=10)
    assert type(tail(lm, 10)) is DynamicCache
    assert type(tail(lm, 11)) is StaticTail
