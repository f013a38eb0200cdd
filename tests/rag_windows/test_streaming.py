from __future__ import annotations

import copy
import inspect
import threading
import time
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from rag_windows import Chunk, GenerationError, LimitError, WindowedLM
from rag_windows.integration import PassageLike
from tests.rag_windows import small

PASSAGES: list[PassageLike] = [
    "The tower is old.",
    {"text": "The river is wide.", "title": "River"},
]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "seed": 1, "max_new_tokens": 60},
        {"do_sample": True, "seed": 2, "stop": ["e", "xyz"]},
        {"num_beams": 3},
        {"do_sample": True, "num_return_sequences": 2, "seed": 1},
        {"prompt_lookup_num_tokens": 3},
        {"prompt_lookup_num_tokens": 3, "stop": ["e", "xyz"]},
        {"method": "sequential"},
        {"method": "ensemble"},
        {"method": "ensemble", "num_beams": 2},
        {"fallback": "sequential"},
        {"passages": ()},
    ],
)
def test_a_stream_is_exactly_the_generation(options: dict[str, Any]) -> None:
    arguments = {"passages": PASSAGES, "max_new_tokens": 15, **options}
    passages = arguments.pop("passages")
    whole = small.lm().generate("What?", passages, **arguments)
    chunks = list(small.lm().stream("What?", passages, **arguments))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [chunk.generation is None for chunk in chunks[:-1]] == [True] * (len(chunks) - 1)
    last = chunks[-1].generation
    assert last is not None
    assert (last.text, last.token_ids) == (whole.text, whole.token_ids)
    assert (last.finish_reason, last.fallback) == (whole.finish_reason, whole.fallback)


@pytest.mark.parametrize("shared", [False, True], ids=["stream", "scheduler"])
def test_a_long_answer_is_not_decoded_anew_for_each_token(shared: bool) -> None:
    tokenizer = copy.deepcopy(small.tokenizer())
    decode, decoded = tokenizer.decode, 0

    def counting(ids: list[int], **options: Any) -> Any:
        nonlocal decoded
        decoded += len(ids)
        return decode(ids, **options)

    tokenizer.decode = counting
    lm = WindowedLM.from_pretrained(small.model(), tokenizer=tokenizer)
    options: dict[str, Any] = {"max_new_tokens": 300, "min_new_tokens": 300, "stop": "never said"}
    pieces: list[str] = []
    told: list[Chunk | None] = []
    if shared:
        with lm.scheduler() as scheduler:
            asked = {"query": "What?", "passages": PASSAGES, **options}
            generation = scheduler.submit(asked, on_chunk=told.append).result()
        pieces += [chunk.text for chunk in told if chunk is not None]
    else:
        chunks = list(lm.stream("What?", PASSAGES, **options))
        pieces += [chunk.text for chunk in chunks]
        last = chunks[-1].generation
        assert last is not None
        generation = last
    assert len(generation.token_ids) == 300
    assert "".join(pieces) == generation.text
    # Once for the stream, once for the stop string, each with some context, and once at the end.
    assert decoded <= 20 * 300


@pytest.mark.parametrize("options", [{}, {"stop": ["e"]}, {"num_beams": 2}])
def test_a_scheduler_gives_the_chunks_of_a_stream(options: dict[str, Any]) -> None:
    arguments = {"passages": PASSAGES, "max_new_tokens": 15, **options}
    chunks: list[Chunk | None] = []
    with small.lm().scheduler() as scheduler:
        made = scheduler.submit({"query": "What?", **arguments}, on_chunk=chunks.append).result()
    streamed = list(small.lm().stream("What?", **arguments))
    *pieces, last, end = chunks
    assert end is None
    assert last is not None
    assert last.generation is made
    assert pieces == streamed[:-1]
    assert last.text == streamed[-1].text


class Steps(LogitsProcessor):
    """Counts decoding steps; may wait or fail in one of them."""

    def __init__(self, fail_at: int = -1, wait_at: int = -1) -> None:
        self.count = 0
        self.fail_at = fail_at
        self.wait_at = wait_at
        self.go_on = threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.count == self.fail_at:
            raise ArithmeticError("step failed")
        if self.count == self.wait_at:
            self.go_on.wait(20)
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, small.tokenizer().convert_tokens_to_ids("a")] = 0.0
        return chosen


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rag-windows-stream"]


def test_closing_a_stream_stops_the_work() -> None:
    steps = Steps()
    chunks = small.lm().stream(
        "What?", PASSAGES, max_new_tokens=900, logits_processor=LogitsProcessorList([steps])
    )
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]  # a generator
    assert steps.count < 900
    assert workers() == []
    done = steps.count
    time.sleep(0.05)
    assert steps.count == done


def test_text_comes_while_the_rest_is_still_unwritten() -> None:
    steps = Steps(wait_at=4)
    chunks = small.lm().stream(
        "What?", PASSAGES, max_new_tokens=6, logits_processor=LogitsProcessorList([steps])
    )
    first = next(chunks)
    assert first.text
    assert steps.count <= 4
    steps.go_on.set()
    assert list(chunks)[-1].generation is not None


def test_an_exception_in_the_worker_reaches_the_consumer() -> None:
    chunks = small.lm().stream(
        "What?", PASSAGES, logits_processor=LogitsProcessorList([Steps(fail_at=3)])
    )
    with pytest.raises(ArithmeticError, match="step failed"):
        list(chunks)
    assert workers() == []
    assert small.lm().generate("What?", PASSAGES, max_new_tokens=2).text is not None


def test_bad_arguments_fail_at_the_call() -> None:
    with pytest.raises(LimitError):
        small.lm().stream("What?", PASSAGES, max_new_tokens=small.POSITIONS)
    with pytest.raises(GenerationError):
        list(small.lm().stream("What?", PASSAGES, cache_implementation="static"))


def test_an_unread_stream_starts_no_work() -> None:
    chunks = small.lm().stream("What?", PASSAGES)
    assert workers() == []
    chunks.close()  # type: ignore[attr-defined]  # a generator


def test_a_stream_shows_the_arguments_of_generate() -> None:
    streamed, whole = inspect.signature(WindowedLM.stream), inspect.signature(WindowedLM.generate)
    assert streamed.parameters.keys() == whole.parameters.keys()
    assert streamed.return_annotation == "Iterator[Chunk]"
