"""Many questions at once: each gets its own answer, whoever asks beside it, and a token a pass."""

from __future__ import annotations

import contextvars
import gc
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor

from rag_windows import (
    Chunk,
    Generation,
    GenerationError,
    InputError,
    LimitError,
    PassageCache,
    Scheduler,
    WindowedLM,
)
from rag_windows.batching.scheduler import MAX_EXCLUSIVE
from tests.parity import tolerances, zoo
from tests.parity.engine import Recorder
from tests.rag_windows import small

PASSAGES = tuple(f"Passage {i}: " + "abcdefgh"[i] * (5 + 4 * (i % 3)) for i in range(8))


METHODS = (
    *("pcw", "ape", "structured-prompting", "mateicl", "aligned:tokens=64+ape", "sequential"),
    *("auto", "query-likelihood:retrieve=2+ape", "codebook:retrieve=2,fusion=mean"),
)
NAMES = ("llama", "qwen3", "gpt2", "gemma3_text-sliding", "gpt_oss", "gemma2", "mistral-sliding")
ASK: dict[str, Any] = {"query": "Why?", "passages": PASSAGES[:3], "max_new_tokens": 12}
WAIT = 60


@cache
def lm_of(name: str) -> WindowedLM:
    """An architecture of the zoo, with the byte tokenizer."""
    entry = zoo.BY_NAME[name]
    size = len(small.tokenizer())
    model = zoo.build(replace(entry, options={**entry.options, "vocab_size": size}))
    return WindowedLM.from_pretrained(model, tokenizer=small.tokenizer())


def mixed(count: int = 9, tokens: int = 8) -> list[dict[str, Any]]:
    """Ragged questions of all methods: some share passages, some a prefix, one has no passages."""
    made: list[dict[str, Any]] = []
    for i in range(count):
        passages = [PASSAGES[0], PASSAGES[1], PASSAGES[2 + i % 6]]
        made.append(
            {
                "query": "why" + "?" * i,
                "passages": () if i == 5 else passages[: 1 + (i + 2) % 3],
                "prefix": "Be short." if i % 2 else None,
                "method": METHODS[i % len(METHODS)],
                "max_new_tokens": tokens - i % 3,
            }
        )
    return made


def alone(model: WindowedLM, requests: Sequence[Mapping[str, Any]]) -> list[Generation]:
    """What `generate` answers to each."""
    return [model.generate(**request) for request in requests]


def assert_same(batched: Sequence[Generation], single: Sequence[Generation]) -> None:
    """Answers are equal but for time, memory of what was shared, and rounding of the masses."""
    assert len(batched) == len(single)
    for mine, other in zip(batched, single, strict=True):
        assert mine.token_ids == other.token_ids
        assert (mine.text, mine.finish_reason) == (other.text, other.finish_reason)
        assert mine.usage.prompt_tokens == other.usage.prompt_tokens
        assert (mine.notes, mine.windows) == (other.notes, other.windows)
        assert (mine.citations is None) == (other.citations is None)
        for left, right in zip(mine.citations or (), other.citations or (), strict=True):
            assert (left.passage, left.id) == (right.passage, right.id)
            assert abs(left.mass - right.mass) < 1e-5
        for name in ("prefix_mass", "query_mass"):
            left, right = getattr(mine, name), getattr(other, name)
            assert (left is None) == (right is None)
            assert left is None or abs(left - right) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_answers_and_logits_are_those_of_generate(name: str) -> None:
    model = lm_of(name)
    single, batched = ([{**one, "logits_processor": [Recorder()]} for one in mixed()] for _ in "12")
    expected = alone(model, single)
    # Four at a time: the others join while some are in the middle of their answers.
    assert_same(model.generate_batch(batched, max_rows=4), expected)
    for mine, other in zip(batched, single, strict=True):
        ours, theirs = (torch.stack(one["logits_processor"][0].steps) for one in (mine, other))
        tolerances.agree(ours, theirs)


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
        {"stop": ["a", "e"]},
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
    together, single = lm.generate_batch(asked), alone(lm, asked)
    assert_same(together, single)
    assert len(together[1].alternatives) == len(single[1].alternatives)
    assert (together[1].fallback is None) == (single[1].fallback is None)


def test_a_shared_window_is_encoded_once() -> None:
    asked = [
        {**ASK, "query": f"Why {i}?", "passages": [*PASSAGES[:2], PASSAGES[2 + i]]}
        for i in range(4)
    ]
    lm = small.lm()
    with small.passes() as made:
        answers = lm.generate_batch(asked)
    # Of the prefix and two windows one question alone has the tokens to pay for.
    usage = [one.usage for one in answers]
    assert sorted(one.cached_windows for one in usage) == [0, 2, 2, 2]
    new = sum(one.prompt_tokens - one.cached_tokens for one in usage)
    assert sum(made) == new + sum(one.completion_tokens - 1 for one in usage)


def test_the_same_text_twice_counts_twice() -> None:
    lm = small.lm()
    long = "same words " * 40
    asked = [{**ASK, "passages": [long]}] * 2
    short = small.wrapped(max_window_tokens=11, header="none")
    assert_same(short.generate_batch(asked), alone(short, asked))
    assert_same(lm.generate_batch(asked), alone(lm, asked))


def test_with_a_cache() -> None:
    lm = small.lm().with_cache(PassageCache("16MiB"))
    asked = mixed(5)
    assert_same(lm.generate_batch(asked), alone(small.lm(), asked))
    again = lm.generate_batch(asked)
    assert_same(again, alone(small.lm(), asked))
    assert again[0].usage.cached_tokens > 0


def test_arguments_are_checked_before_any_work() -> None:
    lm = small.lm()
    for name, value in (("attention_mask", torch.ones(1, 1)), ("output_attentions", True)):
        with pytest.raises(GenerationError, match=name):
            lm.generate_batch([{**ASK, name: value}])
    with small.passes() as made:
        with pytest.raises(LimitError):
            lm.generate_batch([ASK, {**ASK, "max_new_tokens": 10**6}])
        with pytest.raises(InputError, match="query"):
            lm.generate_batch([ASK, {"passages": PASSAGES}])
    assert not made
    with pytest.raises(InputError, match="max_rows"):
        lm.shared_scheduler(max_rows=0)
    assert lm.generate_batch([]) == []


class Gate(LogitsProcessor):
    """Holds a row at its second token until it is opened."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            self.reached.set()
            assert self.open.wait(WAIT)
        return scores


def gated(scheduler: Scheduler) -> tuple[Any, Gate]:
    """A question that is in the middle of its answer."""
    gate = Gate()
    future = scheduler.submit({**ASK, "logits_processor": [gate]})
    assert gate.reached.wait(WAIT)
    return future, gate


def test_threads_get_their_own_answers() -> None:
    lm = small.lm()
    asked = mixed(12)
    expected = alone(lm, asked)
    with lm.scheduler(max_rows=5) as scheduler, ThreadPoolExecutor(6) as threads:
        got = list(threads.map(lambda one: scheduler.submit(one).result(WAIT), asked))
    assert_same(got, expected)


def test_cancelling() -> None:
    lm = small.lm()
    with lm.scheduler(max_rows=1) as scheduler:
        running, gate = gated(scheduler)
        waiting = scheduler.submit(ASK)
        assert waiting.cancel()
        assert not running.cancel()
        gate.open.set()
        with pytest.raises(CancelledError):
            waiting.result(WAIT)
        cut = running.result(WAIT)
        assert cut.finish_reason == "cancelled"
        assert cut.token_ids == lm.generate(**ASK).token_ids[: len(cut.token_ids)]
        assert len(cut.token_ids) == 2
        assert scheduler.submit(ASK).result(WAIT).text == lm.generate(**ASK).text


def test_the_worker_ends_when_nobody_asks() -> None:
    before = {*threading.enumerate()}
    scheduler = small.lm().scheduler()
    running, gate = gated(scheduler)
    started = {*threading.enumerate()} - before
    (worker,) = (one for one in started if one.name == "rag-windows-batch")
    gate.open.set()
    assert running.result(WAIT).text
    worker.join(WAIT)
    assert not worker.is_alive()
    assert scheduler.submit(ASK).result(WAIT).text
    scheduler.close()
    with pytest.raises(GenerationError, match="closed"):
        scheduler.submit(ASK)


def test_closing_can_cancel() -> None:
    scheduler = small.lm().scheduler(max_rows=1)
    running, gate = gated(scheduler)
    waiting = scheduler.submit(ASK)
    closer = threading.Thread(target=scheduler.close, kwargs={"cancel": True})
    closer.start()
    while not waiting.cancelled():
        pass
    gate.open.set()
    closer.join(WAIT)
    assert running.result(WAIT).finish_reason == "cancelled"


def test_who_asks_for_as_many_rows_gets_the_same() -> None:
    lm = small.wrapped()
    first = lm.shared_scheduler(max_rows=8)
    assert lm.shared_scheduler(max_rows=8) is first
    assert lm.shared_scheduler(max_rows=9) is not first
    # Another cache is another tenant's: its windows are not for this one's questions.
    assert lm.with_cache(True).shared_scheduler(max_rows=8) is not first
    first.close()
    again = lm.shared_scheduler(max_rows=8)
    assert again is not first
    assert again.answer(ASK).text == lm.generate(**ASK).text


def test_it_keeps_no_model_alive() -> None:
    lm = small.wrapped()
    lm.shared_scheduler().submit(ASK).result(WAIT)
    gone = weakref.ref(lm)
    del lm
    for thread in threading.enumerate():
        if thread.name == "rag-windows-batch":
            thread.join(WAIT)
    end = time.monotonic() + WAIT
    while gone() is not None and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert gone() is None


def test_a_lone_question_is_answered_as_generate_does() -> None:
    """Not in a step of a batch."""
    lm = small.wrapped()
    scheduler = lm.shared_scheduler()
    chunks: list[Chunk | None] = []
    where: list[str] = []

    def noted(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        where.append(threading.current_thread().name)
        return scores

    asked = {**ASK, "logits_processor": [noted]}
    answer = scheduler.submit(asked, idle=lambda: True, on_chunk=chunks.append).result(WAIT)
    assert "rag-windows-batch" not in where
    assert answer.citations == lm.generate(**ASK).citations
    pieces = [chunk.text for chunk in chunks if chunk is not None]
    assert "".join(pieces) == answer.text
    assert len(pieces) > 1
    where.clear()
    scheduler.submit(asked, idle=lambda: False).result(WAIT)
    scheduler.answer(asked)
    assert {*where} == {"rag-windows-batch"}


def test_those_that_come_while_a_lone_one_is_answered_share_steps() -> None:
    lm, slow = small.wrapped(), Gate()
    scheduler = lm.shared_scheduler()
    asked = mixed(4)
    lone = scheduler.submit({**ASK, "logits_processor": [slow]}, idle=lambda: True)
    assert slow.reached.wait(WAIT)
    with small.passes() as made:
        others = [scheduler.submit(one, idle=lambda: True) for one in asked]
        got = [one.result(WAIT) for one in others]
    slow.open.set()
    assert lone.result(WAIT).text == lm.generate(**ASK).text
    assert_same(got, alone(lm, asked))
    assert len(made) < sum(one.usage.completion_tokens for one in got)


def test_a_lone_question_that_fails_leaves_nothing_behind() -> None:
    scheduler, asked = small.wrapped().shared_scheduler(), []

    def idle() -> bool:
        asked.append("nobody else is there")
        return True

    def fails(done: int, total: int) -> None:
        raise ZeroDivisionError("on purpose")

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            scheduler.submit({**ASK, "on_encoded": fails}, idle=idle).result(WAIT)
    scheduler.submit(ASK, idle=idle).result(WAIT)
    assert len(asked) == 3, "a question that was left would be somebody else"


def test_questions_of_a_kind_that_stands_alone_wait_in_line() -> None:
    lm = small.wrapped()
    scheduler = lm.shared_scheduler()
    gates = [Gate() for _ in range(MAX_EXCLUSIVE + 1)]
    alone = {**ASK, "method": "ensemble"}
    asked = [scheduler.submit({**alone, "logits_processor": [gate]}) for gate in gates]
    for gate in gates[:MAX_EXCLUSIVE]:
        assert gate.reached.wait(WAIT)
    assert not gates[MAX_EXCLUSIVE].reached.wait(0.1), "one more than are answered at a time"
    last = scheduler.submit(alone)
    assert last.cancel(), "one that waits can be cancelled at once"
    for gate in gates:
        gate.open.set()
    assert {one.result(WAIT).text for one in asked} == {lm.generate(**alone).text}


def test_a_callback_may_ask_too() -> None:
    """Without deadlock: the worker can't answer what it waits for itself."""
    lm = small.wrapped()
    scheduler = lm.shared_scheduler()
    inner: list[str] = []

    def told(done: int, total: int) -> None:
        inner.append(scheduler.answer(ASK).text)

    for kind in ({}, {"method": "ensemble"}):
        request = {**ASK, "query": "Where?", "on_encoded": told, **kind}
        assert scheduler.submit(request).result(WAIT).text
    assert set(inner) == {lm.generate(**ASK).text}


@pytest.mark.parametrize("kind", [{}, {"method": "ensemble"}])
def test_callbacks_run_in_the_context_of_who_asks(kind: dict[str, Any]) -> None:
    variable = contextvars.ContextVar("variable", default="unset")
    scheduler = small.wrapped().shared_scheduler()
    seen: list[str] = []

    def told(chunk: Chunk | None) -> None:
        if chunk is not None:
            seen.append(variable.get())

    for value in ("one", "two"):
        variable.set(value)
        request = {**ASK, "on_encoded": lambda *_: seen.append(variable.get()), **kind}
        scheduler.submit(request, on_chunk=told).result(WAIT)
        assert set(seen) == {value}
        assert len(seen) > 2
        seen.clear()
