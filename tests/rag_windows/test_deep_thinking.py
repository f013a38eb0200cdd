from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rag_windows import (
    APE,
    PCW,
    DeepThinking,
    LimitError,
    MateICL,
    MethodError,
    Passage,
    Sequential,
    StructuredPrompting,
    WindowedLM,
)
from rag_windows.cache.passage_cache import PassageCache
from rag_windows.methods import Linked, Method, ParallelEnsemble, resolve
from rag_windows.prefill import Encoder
from tests.parity import zoo
from tests.rag_windows import small

PREFIX, QUERY = zoo.ids(4, 1), zoo.ids(3, 2)
WINDOWS = [zoo.ids(length, length) for length in (6, 7, 12)]
STRONG = DeepThinking(2, 0.3, 0.5)
READERS: tuple[Method, ...] = (APE(0.7, 0.8), StructuredPrompting(), MateICL(), ParallelEnsemble())


def logits(lm: WindowedLM, method: Method) -> torch.Tensor:
    return lm.logits(lm.encode_ids(PREFIX, WINDOWS, method=method), QUERY)


def cached(**options: Any) -> WindowedLM:
    return WindowedLM(zoo.shared("llama"), cache=PassageCache("20MB"), **options)


@pytest.mark.parametrize("reader", [PCW(), *READERS], ids=lambda reader: str(reader.name))
def test_no_steps_are_plain_windows_bit_for_bit(reader: Method) -> None:
    lm = WindowedLM(zoo.shared("llama"))
    none = DeepThinking(0, reader=reader)
    assert none.encoding == reader.encoding
    assert none.refinement is None
    assert torch.equal(logits(lm, none), logits(lm, reader))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": -1}, "steps must be a whole number"),
        ({"steps": 1.0}, "steps must be a whole number"),
        ({"steps": True}, "steps must be a whole number"),
        ({"eta": 0}, "eta must be above 0"),
        ({"eta": 1.01}, "eta must be above 0"),
        ({"eta": float("nan")}, "eta must be above 0"),
        ({"eta": "0.01"}, "eta must be above 0"),
        ({"momentum": -0.1}, "momentum must be at least 0"),
        ({"momentum": 1}, "momentum must be at least 0"),
        ({"momentum": None}, "momentum must be at least 0"),
        ({"positions": "behind"}, r"positions must be one of \['continue', 'reuse'\]"),
        ({"reader": "ape"}, "must be a method such as APE"),
        ({"reader": DeepThinking()}, "can't be combined with itself"),
        (
            {"reader": Linked(2)},
            r"can't be combined with linked.*Linked\(reader=DeepThinking\(\)\)",
        ),
    ],
)
def test_numbers_and_readers_outside_its_domain_are_refused(
    wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(MethodError, match=message):
        DeepThinking(**wrong)


def test_by_name() -> None:
    assert resolve("deep-thinking") == DeepThinking(5, 0.01, 0.9, "continue", reader=PCW())
    assert resolve("deep-thinking+ape") == DeepThinking(reader=APE())
    assert resolve("deep-thinking+sequential") == DeepThinking(reader=Sequential())


def test_every_number_is_part_of_the_encoding() -> None:
    variants = [
        PCW(),
        DeepThinking(),
        DeepThinking(steps=6),
        DeepThinking(eta=0.02),
        DeepThinking(momentum=0.0),
        DeepThinking(positions="reuse"),
    ]
    assert len({method.encoding for method in variants}) == len(variants)
    assert DeepThinking(eta=1).encoding == DeepThinking(eta=1.0).encoding
    assert DeepThinking(reader=APE(0.5, 0.5)).encoding == DeepThinking().encoding


def test_a_cache_keeps_refined_and_plain_windows_apart() -> None:
    lm, plain = cached(), WindowedLM(zoo.shared("llama"))
    total = len(PREFIX) + sum(map(len, WINDOWS))
    for method in (PCW(), STRONG, replace(STRONG, eta=0.2), replace(STRONG, positions="reuse")):
        first = lm.encode_ids(PREFIX, WINDOWS, method=method)
        assert first.cached_tokens == 0
        second = lm.encode_ids(PREFIX, WINDOWS[::-1], method=method)
        assert second.cached_tokens == total
        assert torch.equal(lm.logits(first, QUERY), logits(plain, method))
    read_otherwise = lm.encode_ids(PREFIX, WINDOWS, method=replace(STRONG, reader=APE(0.5, 0.7)))
    assert read_otherwise.cached_tokens == total


def test_a_second_question_runs_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = WindowedLM(
        small.model(), small.tokenizer(), method=DeepThinking(3), cache=PassageCache("20MB")
    )
    passages = ["One fact.", "Another, longer fact."]
    first = lm.generate("What?", passages, max_new_tokens=2)
    assert first.usage.cached_tokens == 0

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("a window was encoded again")

    monkeypatch.setattr(Encoder, "run", fail)
    second = lm.generate("And who?", passages[::-1], max_new_tokens=2)
    assert second.usage.cached_tokens >= sum(len(window.ids) for window in second.windows)


def test_passes_behind_a_window_need_positions_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked before any work, by name; "reuse" needs none."""
    lm = WindowedLM(small.model(), small.tokenizer(), max_window_tokens=900)
    passage = Passage("A sentence of some words. " * 24, id="p7")

    def fail(*args: object, **kwargs: object) -> None:
        raise InterruptedError("work was done")

    monkeypatch.setattr(Encoder, "run", fail)
    with pytest.raises(
        LimitError,
        match=r"A window of passage 1 \('p7'\) has 6\d\d tokens .* the model has 1024\. "
        r"Use positions='reuse', or set max_window_tokens=5\d\d or less\.",
    ):
        lm.generate("What?", ["One.", passage], method="deep-thinking", max_new_tokens=4)
    with pytest.raises(LimitError, match=r"The one window of all passages .* 5\d\d tokens in all"):
        lm.generate("What?", ["One.", passage], method="deep-thinking+sequential", max_new_tokens=4)
    reuse = DeepThinking(positions="reuse")
    with pytest.raises(InterruptedError):
        lm.generate("What?", ["One.", passage], method=reuse, max_new_tokens=4)


def test_token_ids_need_positions_too() -> None:
    """gpt2 has 256 learned ones."""
    lm = WindowedLM(zoo.shared("gpt2"))
    most = (256 - len(PREFIX)) // 2
    lm.encode_ids(PREFIX, [zoo.ids(most, 1)], method=DeepThinking(1))
    windows = [zoo.ids(5, 1), zoo.ids(most + 1, 1)]
    with pytest.raises(LimitError, match=f"Window 1 has {most + 1} tokens.*at most {most} tokens"):
        lm.encode_ids(PREFIX, windows, method=DeepThinking(1))
    lm.encode_ids(PREFIX, windows, method=DeepThinking(1, positions="reuse"))
    lm.encode_ids(PREFIX, windows, method=DeepThinking(0))


def test_one_long_window_is_refined_behind_a_cache_too() -> None:
    method = replace(STRONG, reader=Sequential())
    lm, plain = cached(), WindowedLM(zoo.shared("llama"))
    for _ in range(2):
        context = lm.encode_ids(PREFIX, WINDOWS, method=method)
        # Only the prefix is kept: such a window is rarely asked for again.
        assert context.cached_tokens in (0, len(PREFIX))
        assert torch.equal(lm.logits(context, QUERY), logits(plain, method))
    assert not torch.allclose(logits(plain, method), logits(plain, Sequential()), atol=1e-2)
