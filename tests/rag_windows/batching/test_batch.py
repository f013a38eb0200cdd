"""What a batch promises beside the parity of greedy rows."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor

from rag_windows import (
    BatchRequest,
    GenerationError,
    InputError,
    LimitError,
    PassageCache,
    WindowedLM,
)
from rag_windows.batching.loop import BatchLoop
from rag_windows.batching.questions import Batch, checked
from rag_windows.prefill import Encoder
from rag_windows.results import Generation
from tests.rag_windows import small
from tests.rag_windows.batching import questions
from tests.rag_windows.batching.questions import PASSAGES

ASK: dict[str, Any] = {"query": "Why?", "passages": PASSAGES[:3], "max_new_tokens": 12}


def batch_of(requests: list[dict[str, Any]], lm: WindowedLM | None = None) -> Batch:
    lm = lm or small.lm()
    batch = Batch(lm.engine, len(requests))
    for request in requests:
        batch.admit(checked(lm.engine, BatchRequest.of(request)))
    return batch


def loop_of(batch: Batch) -> BatchLoop:
    return batch._loop


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 0.7, "seed": 1},
        {"do_sample": True, "top_k": 5, "min_p": 0.05, "seed": 2},
        {"do_sample": True, "top_p": 0.8, "repetition_penalty": 1.4, "seed": 3},
        {"no_repeat_ngram_size": 1},
        {"suppress_tokens": [10, 11, 12], "min_new_tokens": 3},
        {"generation_config": GenerationConfig(max_new_tokens=5, do_sample=False)},
        {"eos_token_id": list(range(30, 120))},
        {"num_beams": 2},
        {"do_sample": True, "num_return_sequences": 2, "seed": 4},
        {"method": "ensemble"},
        {"fallback": "sequential"},
        {"link_tokens": 2},
        {"method": "deep-thinking"},
        {"stop_strings": ["a", "e"]},
        {"citations": False},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_do_what_they_do_alone(options: dict[str, Any]) -> None:
    first = {"query": "Who?", "passages": PASSAGES[1:4], "max_new_tokens": 4}
    asked = [first, {**ASK, **options}, ASK]
    if "generation_config" in options:
        del asked[1]["max_new_tokens"]
    lm = small.lm()
    together, single = lm.generate_batch(asked), questions.alone(lm, asked)
    questions.assert_same(together, single)
    assert len(together[1].alternatives) == len(single[1].alternatives)
    assert (together[1].fallback is None) == (single[1].fallback is None)


def test_stop_strings_and_ends_come_at_different_times() -> None:
    lm = small.lm()
    text = lm.generate(**ASK).text
    asked = [ASK, {**ASK, "stop": text[3:5]}, {**ASK, "max_new_tokens": 1}, {**ASK, "stop": "\0"}]
    together = lm.generate_batch(asked)
    questions.assert_same(together, questions.alone(lm, asked))
    assert together[1].finish_reason == "stop"
    assert len(together[1].token_ids) < len(together[0].token_ids)


def test_a_shared_window_is_encoded_and_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[tuple[int, ...]] = []
    run = Encoder.run

    def counted(self: Encoder, windows: Any, *rest: Any) -> Any:
        encoded.extend(tuple(ids) for ids in windows)
        return run(self, windows, *rest)

    monkeypatch.setattr(Encoder, "run", counted)
    asked = [
        {**ASK, "query": f"Why {i}?", "passages": [*PASSAGES[:2], PASSAGES[2 + i]]}
        for i in range(4)
    ]
    batch = batch_of(asked)
    loop = loop_of(batch)
    while len(loop.rows) < len(asked):
        assert not batch.step()
    assert len(encoded) == len(set(encoded))
    batch.step()
    held = Counter(id(window) for row in loop.rows for window in (row.prefix, *row.windows))
    # The prefix and two windows are of all four; one window is each one's own.
    assert sorted(held.values()) == [1, 1, 1, 1, 4, 4, 4]


def test_what_nobody_reads_is_let_go() -> None:
    batch = batch_of([{**ASK, "max_new_tokens": 2}, {**ASK, "passages": PASSAGES[4:]}])
    while len(batch) == 2:
        batch.step()
    batch.step()
    loop = loop_of(batch)
    assert len(loop.encoder._windows) == 1 + len(loop.rows[0].windows)
    while batch:
        batch.step()
    assert not loop._caches.lengths


def test_the_same_text_twice_counts_twice() -> None:
    lm = small.lm()
    long = "same words " * 40
    asked = [{**ASK, "passages": [long]}] * 2
    short = WindowedLM.from_pretrained(
        small.model(), tokenizer=small.tokenizer(), max_window_tokens=11, header="none"
    )
    questions.assert_same(short.generate_batch(asked), questions.alone(short, asked))
    questions.assert_same(lm.generate_batch(asked), questions.alone(lm, asked))


def test_with_a_cache() -> None:
    lm = small.lm().with_cache(PassageCache("16MiB"))
    asked = questions.mixed(5)
    questions.assert_same(lm.generate_batch(asked), questions.alone(small.lm(), asked))
    again = lm.generate_batch(asked)
    questions.assert_same(again, questions.alone(small.lm(), asked))
    assert again[0].usage.cached_tokens > 0


def test_arguments_are_checked_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("something was encoded")

    monkeypatch.setattr(Encoder, "run", never)
    lm = small.lm()
    with pytest.raises(LimitError):
        lm.generate_batch([ASK, {**ASK, "max_new_tokens": 10**6}])
    with pytest.raises(InputError, match="query"):
        lm.generate_batch([ASK, {"passages": PASSAGES}])
    with pytest.raises(InputError, match="max_rows"):
        lm.generate_batch([ASK], max_rows=0)
    assert lm.generate_batch([]) == []


def test_an_option_that_cannot_be_had_is_refused_as_alone() -> None:
    with pytest.raises(GenerationError, match="attention_mask"):
        small.lm().generate_batch([{**ASK, "attention_mask": torch.ones(1, 1)}])
    with pytest.raises(GenerationError, match="output_attentions"):
        small.lm().generate_batch([{**ASK, "output_attentions": True}])


class Broken(LogitsProcessor):
    """Fails at the third token."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ZeroDivisionError("broken on purpose")
        return scores


def test_an_error_in_one_row_ends_that_row_alone() -> None:
    batch = batch_of([ASK, {**ASK, "logits_processor": [Broken()]}, {**ASK, "query": "Where?"}])
    ended = []
    while batch:
        ended += batch.step()
    by_type = [type(result).__name__ for _, result in ended]
    assert sorted(by_type) == ["Generation", "Generation", "ZeroDivisionError"]
    answers = [result for _, result in ended if isinstance(result, Generation)]
    expected = questions.alone(small.lm(), [ASK, {**ASK, "query": "Where?"}])
    assert {one.token_ids for one in answers} == {one.token_ids for one in expected}
    with pytest.raises(ZeroDivisionError):
        small.lm().generate_batch([ASK, {**ASK, "logits_processor": [Broken()]}])


def test_batches_leave_the_global_generator_to_others() -> None:
    state = torch.get_rng_state()
    small.lm().generate_batch([{**ASK, "do_sample": True, "seed": 5}] * 2)
    assert torch.equal(state, torch.get_rng_state())
