"""What a request may ask: sizes, blank questions, counts, chunks, and errors of a caller's code."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from rag_windows import METHODS, GenerationError, InputError, LimitError, WindowedLM
from tests.rag_windows import small

TEXTS = ["One two three.", "Four five six."]
SMALL: dict[str, Any] = {"passages": TEXTS, "max_new_tokens": 4}

Ask = Callable[..., Any]


def _generate(lm: WindowedLM, query: Any, **arguments: Any) -> Any:
    return lm.generate(query, **arguments).text


def _stream(lm: WindowedLM, query: Any, **arguments: Any) -> Any:
    return "".join(chunk.text for chunk in lm.stream(query, **arguments))


def _batch(lm: WindowedLM, query: Any, **arguments: Any) -> Any:
    return lm.generate_batch([{"query": "Who?"}, {"query": query, **arguments}])[1].text


def _scheduled(lm: WindowedLM, query: Any, **arguments: Any) -> Any:
    with lm.scheduler() as scheduler:
        return scheduler.submit({"query": query, **arguments}).result(timeout=60).text


def _score(lm: WindowedLM, query: Any, **arguments: Any) -> Any:
    scores = lm.score(query, arguments.get("passages", ()), ["yes", "no"])
    return [round(one.logprob, 3) for one in scores]


def _score_batch(lm: WindowedLM, query: Any, **arguments: Any) -> Any:
    scores = lm.score_batch(["Who?", query], arguments.get("passages", ()), ["yes", "no"])[1]
    return [round(one.logprob, 3) for one in scores]


ANSWERS: dict[str, Ask] = {
    "generate": _generate,
    "stream": _stream,
    "batch": _batch,
    "scheduler": _scheduled,
}
WAYS: dict[str, Ask] = {**ANSWERS, "score": _score, "score_batch": _score_batch}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("passages", [(), [" "]], ids=["none", "blank"])
def test_a_prompt_beyond_the_positions_is_refused_without_passages(
    small_lm: WindowedLM, way: str, passages: list[str]
) -> None:
    with pytest.raises(LimitError, match=r"1024 positions.*passages="):
        WAYS[way](small_lm, "word " * 300, passages=passages)


@pytest.mark.parametrize("method", ["ape", "sequential", "ensemble", "codebook"])
def test_a_prompt_that_just_fits_is_answered(small_lm: WindowedLM, method: str) -> None:
    prompt = small_lm.generate("?", max_new_tokens=1).usage.prompt_tokens
    longest = "w" * (small.POSITIONS - prompt - 5) + "?"
    answer = small_lm.generate(longest, method=method, max_new_tokens=5)
    assert answer.usage.prompt_tokens + 5 == small.POSITIONS
    with pytest.raises(LimitError):
        small_lm.generate(longest + "w", method=method, max_new_tokens=5)


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}, 128),
        (
            {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 6,
                "long_factor": [2.0] * 6,
                "original_max_position_embeddings": 32,
            },
            64,
        ),
    ],
    ids=["dynamic", "longrope"],
)
def test_tables_that_grow_leave_a_plain_prompt_all_positions(
    rope: dict[str, Any], positions: int
) -> None:
    model = small.build(max_position_embeddings=64, rope_parameters=rope)
    lm = WindowedLM(model, small.tokenizer())
    prompt = lm.generate("?", max_new_tokens=1).usage.prompt_tokens
    fits = "w" * (positions - prompt - 4) + "?"
    assert lm.generate(fits, max_new_tokens=4).token_ids
    with pytest.raises(LimitError, match=f"{positions} positions"):
        lm.generate(fits + "ww", max_new_tokens=4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "query",
    [
        " \t\n",
        [
            {"role": "user", "content": "Who?"},
            {"role": "assistant", "content": "Somebody."},
            {"role": "user", "content": "\u00a0\n"},
        ],
    ],
    ids=["white", "last message"],
)
def test_a_blank_question_is_refused(small_lm: WindowedLM, way: str, query: Any) -> None:
    with pytest.raises(InputError, match="question is blank"):
        WAYS[way](small_lm, query, passages=TEXTS)


def test_other_blank_messages_are_read(small_lm: WindowedLM) -> None:
    messages = [
        {"role": "user", "content": " "},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "Who?"},
    ]
    assert small_lm.generate(messages, TEXTS, max_new_tokens=2).token_ids


@pytest.mark.slow
@settings(max_examples=24, deadline=None)
@given(
    size=st.integers(1, 40),
    method=st.sampled_from(sorted(METHODS)),
    question=st.text("abcd ?", min_size=1, max_size=30).filter(str.strip),
)
def test_a_prompt_read_in_chunks_gives_the_same_answer(
    size: int, method: str, question: str
) -> None:
    lm = small.lm()
    whole = lm.generate(question, TEXTS, method=method, max_new_tokens=4)
    chunked = lm.generate(question, TEXTS, method=method, max_new_tokens=4, prefill_chunk_size=size)
    assert chunked.token_ids == whole.token_ids
    assert whole.citations is not None
    assert chunked.citations is not None
    assert [one.mass for one in chunked.citations] == pytest.approx(
        [one.mass for one in whole.citations], abs=1e-5
    )
    assert chunked.prefix_mass == pytest.approx(whole.prefix_mass, abs=1e-5)


BAD_COUNTS = [0, -1, 2.5, "8", True, math.nan, math.inf]


@pytest.mark.parametrize("way", ANSWERS)
@pytest.mark.parametrize(
    "name", ["max_new_tokens", "num_beams", "num_return_sequences", "prefill_chunk_size"]
)
@pytest.mark.parametrize("value", BAD_COUNTS, ids=repr)
def test_what_is_no_count_is_refused(small_lm: WindowedLM, way: str, name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{name} must be"):
        ANSWERS[way](small_lm, "Who?", **{**SMALL, name: value})


@pytest.mark.parametrize("name", ["max_new_tokens", "num_beams"])
def test_what_is_no_count_in_a_config_is_refused(small_lm: WindowedLM, name: str) -> None:
    config = GenerationConfig()
    setattr(config, name, 0)
    with pytest.raises(InputError, match=f"{name} must be"):
        small_lm.generate("Who?", TEXTS, generation_config=config)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("max_tokens", "'max_new_tokens'"),
        ("system", "'prefix'"),
        ("documents", "'passages'"),
        ("temprature", "'temperature'"),
        ("colour", "Leave it out"),
    ],
)
@pytest.mark.parametrize("way", ANSWERS)
def test_an_argument_that_nobody_knows_is_refused_with_the_one_that_was_meant(
    small_lm: WindowedLM, way: str, name: str, advice: str
) -> None:
    with pytest.raises(InputError, match=f"called '{name}'.*{advice}"):
        ANSWERS[way](small_lm, "Who?", **{**SMALL, name: 3})


@pytest.mark.parametrize("value", [-1, -0.1, math.nan, math.inf, "warm", True], ids=repr)
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
def test_numbers_that_no_sampling_has_are_refused(
    small_lm: WindowedLM, name: str, value: Any
) -> None:
    """Also where it does not sample, which transformers only warns of."""
    for options in ({name: value}, {name: value, "do_sample": True}):
        with pytest.raises(InputError, match=f"{name} must be a number"):
            small_lm.generate("Who?", **SMALL, **options)
    with pytest.raises(InputError, match=r"top_p must be a number from 0 to 1, not 1\.1"):
        small_lm.generate("Who?", **SMALL, top_p=1.1)


@pytest.mark.parametrize("value", BAD_COUNTS, ids=repr)
def test_sizes_of_batches_windows_and_passes_are_counts(small_lm: WindowedLM, value: Any) -> None:
    with pytest.raises(InputError, match="max_rows must be"):
        small_lm.generate_batch([{"query": "Who?", **SMALL}], max_rows=value)
    with pytest.raises(InputError, match="max_rows must be"):
        small_lm.scheduler(max_rows=value)
    for name in ("max_window_tokens", "max_batch_tokens"):
        with pytest.raises(InputError, match=f"{name} must be"):
            small.wrapped(**{name: value})
    with pytest.raises(InputError, match="max_new_tokens must be"):
        small_lm.generate_ids(small_lm.encode_ids([1], [[5, 6]]), [7], max_new_tokens=value)


@pytest.mark.parametrize("seed", ["x", 1.5, math.nan, True, 2**64, -(2**63) - 1], ids=repr)
def test_what_seeds_no_generator_is_refused(small_lm: WindowedLM, seed: Any) -> None:
    with pytest.raises(InputError, match="seed must be"):
        small_lm.generate("Who?", seed=seed, **SMALL)


@pytest.mark.parametrize("stop", [3, [3], b"x", [b"x"]], ids=repr)
def test_what_is_no_stop_string_is_refused(small_lm: WindowedLM, stop: Any) -> None:
    with pytest.raises(InputError, match="stop must be"):
        small_lm.generate("Who?", stop=stop, **SMALL)


def test_whole_numbers_of_other_types_count(small_lm: WindowedLM) -> None:
    two: Any = torch.tensor(2)
    answer = small_lm.generate("Who?", TEXTS, max_new_tokens=two, seed=two)
    assert answer.token_ids == small_lm.generate("Who?", TEXTS, max_new_tokens=2).token_ids


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("method", ["ape", "ensemble", "codebook", "sequential"])
def test_a_context_of_a_model_with_other_layers_is_refused(
    small_lm: WindowedLM, layers: int, method: str
) -> None:
    other = WindowedLM(small.build(num_hidden_layers=layers))
    context = other.encode_ids([1, 2], [[5, 6], [7]], method=method)
    with pytest.raises(InputError, match=f"another model: it has {layers} layers"):
        small_lm.generate_ids(context, [8, 9], max_new_tokens=2)
    with pytest.raises(InputError, match=f"another model: it has {layers} layers"):
        small_lm.logits(context, [8, 9])


def stop_iteration(*_: object) -> Any:
    """A callback of somebody who called next() without a default."""
    return next(iter(()))


def test_a_stop_iteration_of_a_callback_does_not_hold_up_who_waits() -> None:
    """No future can carry one."""
    with small.wrapped().scheduler() as scheduler:
        asked = scheduler.submit({"query": "Who?", **SMALL}, on_chunk=stop_iteration)
        with pytest.raises(GenerationError, match="StopIteration"):
            asked.result(timeout=60)


def test_an_answer_without_passages_cites_nothing() -> None:
    """Programs that loop over what is cited need no case of their own for it."""
    lm = small.lm()
    for passages in ([], ["", " \n"], [*TEXTS, ""]):
        answer = lm.generate("Who?", passages, max_new_tokens=3)
        assert answer.citations is not None
        assert len(answer.citations) == len(passages)
        assert {one.passage for one in answer.cited} <= {0, 1}
        masses = [one.mass for one in answer.cited]
        assert masses == sorted(masses, reverse=True)
        assert bool(masses) == (passages[:2] == TEXTS)
    assert lm.generate("Who?", TEXTS, max_new_tokens=3, citations=False).cited == ()
