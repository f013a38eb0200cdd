"""Methods that weigh the query against a dense float64 softmax over weighed keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch

from rag_windows import PCW, Aligned, MateICL, Method, StructuredPrompting

from . import dense, engine, tolerances, zoo
from .cases import CASES, case, expected, expected_steps
from .dense import Rule

NAMES = [
    "llama",
    "qwen3",
    "gpt2",
    "opt",
    "gemma2",
    "gemma3_text",
    "gemma3_text-sliding",
    "gpt_oss",
]
METHODS: dict[str, tuple[Method, Callable[[Sequence[Sequence[int]]], Rule]]] = {
    "structured prompting": (
        StructuredPrompting(),
        lambda windows: Rule(weight=len(windows), every=max(map(len, windows))),
    ),
    "mateicl, 3": (MateICL(3), lambda _: Rule(weight=3)),
    "mateicl, sqrt": (MateICL(), lambda windows: Rule(weight=math.sqrt(len(windows)))),
    "mateicl, a function": (
        MateICL(lambda n: 0.4 * n),
        lambda windows: Rule(weight=0.4 * len(windows)),
    ),
    "aligned": (Aligned(8), lambda _: Rule(every=8)),
    "aligned structured prompting": (
        Aligned(64, reader=StructuredPrompting()),
        lambda windows: Rule(weight=len(windows), every=64),
    ),
}
PREFILLS = [
    *(
        (name, method, "ragged")
        for name in NAMES
        for method in ("structured prompting", "mateicl, sqrt", "aligned")
    ),
    *(("llama", method, "ragged") for method in ("mateicl, 3", "mateicl, a function")),
    ("llama", "aligned structured prompting", "no prefix"),
    *(
        (name, "structured prompting", which)
        for name in ("llama", "gemma3_text-sliding", "gpt_oss")
        for which in ("no prefix", "long prefix")
    ),
]
STEPS = [
    *((name, "structured prompting") for name in NAMES),
    *((name, "aligned") for name in ("llama", "gemma3_text-sliding")),
    *((name, "mateicl, sqrt") for name in ("llama", "qwen3", "gpt2", "gemma3_text")),
]


@pytest.mark.parametrize(("name", "method", "which"), PREFILLS)
def test_prefill(name: str, method: str, which: str) -> None:
    (ours, rule), one = METHODS[method], CASES[which]
    tolerances.agree(engine.logits(name, one, ours), expected(name, one, rule(one.windows)))


@pytest.mark.parametrize(("name", "method"), STEPS)
def test_each_decoded_step(name: str, method: str) -> None:
    """Generated tokens are part of the weighed query; far enough to leave a sliding reach."""
    (ours, rule), forced = METHODS[method], zoo.ids(12, 99)
    one = case(5, (1, 7, 12), 3, seed=31)
    reference = expected_steps(name, one, rule(one.windows), forced)
    tolerances.agree(engine.steps(name, one, ours, forced), reference)


def test_a_weight_is_as_many_copies() -> None:
    """A key of each of two windows and one of the query, which stands there three times."""
    packed = dense.pack([], [[1], [2]], [3])
    logits = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64).expand(1, 1, 3, 3)
    row = dense.weights(logits, None, packed.visible(None), packed, Rule(weight=3))[0, 0, 2]
    copied = logits[0, 0, 2, [0, 1, 2, 2, 2]].softmax(-1)
    torch.testing.assert_close(row, torch.cat([copied[:2], copied[2:].sum(-1, keepdim=True)]))


@pytest.mark.parametrize("method", METHODS)
def test_the_weight_matters(method: str) -> None:
    one = CASES["ragged"]
    rows = [engine.logits("llama", one, other) for other in (METHODS[method][0], PCW())]
    assert tolerances.gap(*rows) > tolerances.MATTERS


@pytest.mark.parametrize("name", ["gpt2", "gemma3_text-sliding"])
def test_the_alignment_matters(name: str) -> None:
    rules = Rule(weight=4), Rule(weight=4, every=33)
    rows = [expected(name, CASES["ragged"], rule) for rule in rules]
    assert tolerances.gap(*rows) > tolerances.MATTERS


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text"])
def test_one_window_is_ordinary_attention(name: str) -> None:
    one = case(5, (20,), 6)
    plain = engine.logits(name, one, PCW())
    for method in (StructuredPrompting(), MateICL(), MateICL("log"), MateICL("thirds")):
        assert torch.equal(engine.logits(name, one, method), plain)


def test_windows_that_fill_their_multiple_stand_where_others_do() -> None:
    one = case(5, (8, 8, 8), 6)
    assert torch.equal(*(engine.logits("llama", one, method) for method in (Aligned(8), PCW())))


def test_windows_of_one_length_need_no_alignment() -> None:
    methods = StructuredPrompting(), MateICL("linear")
    one = case(5, (9, 9, 9), 6)
    assert torch.equal(*(engine.logits("gemma3_text-sliding", one, method) for method in methods))
