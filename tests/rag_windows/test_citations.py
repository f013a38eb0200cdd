"""Attention weights of passages against the dense reference's explicit weights."""

from __future__ import annotations

from itertools import accumulate, chain, pairwise
from typing import Any

import pytest
import torch

from rag_windows import (
    APE,
    PCW,
    MateICL,
    Method,
    Sequential,
    StructuredPrompting,
    WindowedLM,
)
from rag_windows.attention.weights import WeightRecorder
from rag_windows.batching.loop import BatchLoop
from rag_windows.batching.row import Row
from rag_windows.steps.head_shares import head_shares
from tests.parity import dense, float64, zoo
from tests.rag_windows import small
from tests.rag_windows.attention import stand_in

PREFIX, QUERY = [0, 4, 70], [99, 65, 5, 30]
WINDOWS = [list(range(80, 95)), [33, 44], list(range(120, 153))]
FULL = [None] * small.model().config.num_hidden_layers
RULES: dict[str, tuple[Method, Any]] = {
    "pcw": (PCW(), dense.Rule()),
    "ape": (APE(0.7, 0.8), dense.Rule(0.7, 0.8)),
    "ape as printed": (APE(0.7, 0.8, "as printed"), dense.Rule(0.7, 0.8, "as printed")),
    "ape fixed ratio": (APE(1.3, 0.4, "fixed ratio"), dense.Rule(1.3, 0.4, "fixed ratio")),
    "structured prompting": (StructuredPrompting(), dense.Rule(weight=3, every=33)),
    "mateicl": (MateICL(0.6), dense.Rule(weight=0.6)),
}


def reference(
    model: Any, sliding: Any, rule: Any, query: list[int], prefix: list[int] = PREFIX
) -> torch.Tensor:
    """(windows + 2,) mean over layers and heads of the last row's weights, without the sink."""
    return by_head(model, sliding, rule, query, prefix).mean(dim=(0, 1))


def by_head(
    model: Any, sliding: Any, rule: Any, query: list[int], prefix: list[int] = PREFIX
) -> torch.Tensor:
    """(layers, heads, windows + 2), the same of each."""
    packed = dense.pack(prefix, WINDOWS, query)
    rows: list[torch.Tensor] = []
    original = dense.weights

    def keep(*given: Any) -> torch.Tensor:
        result = original(*given)
        rows.append(result[0, :, -1])
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "weights", keep)
        dense.logits(model, sliding, prefix, WINDOWS, query, rule)
    segments = [*range(1, len(WINDOWS) + 1), 0, len(WINDOWS) + 1]
    row = torch.stack(rows)
    shares = torch.stack([row[..., packed.segments == s].sum(-1) for s in segments], dim=-1)
    return (shares / shares.sum(-1, keepdim=True)).float()


def decoded(lm: WindowedLM, method: Method, prefix: list[int] = PREFIX, **options: Any) -> Any:
    context = lm.encode_ids(prefix, WINDOWS, method=method)
    options = {"max_new_tokens": 3, "do_sample": False, **options}
    return lm.engine.decoder.generate(context, QUERY, options=options, record_weights=True)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3_text-sliding", "gpt_oss"])
@pytest.mark.parametrize(
    ("rule", "backend"),
    [*((rule, "native") for rule in RULES), ("ape", "cpu"), ("ape", "reference")],
)
def test_weights_are_those_of_the_dense_softmax_at_each_step(
    name: str, rule: str, backend: str
) -> None:
    """Sinks, soft caps and sliding layers included."""
    model, (method, dense_rule) = zoo.shared(name), RULES[rule]
    with stand_in.forced(backend):
        made = decoded(WindowedLM.from_pretrained(model, tokenizer=None), method)
    for step in range(3):
        shares = made.recorder.average([made.recorder.first_position + step], [0])
        query = [*QUERY, *made.sequences[0][:step]]
        expected = reference(model, zoo.BY_NAME[name].sliding, dense_rule, query)
        assert torch.allclose(shares, expected, atol=1e-5), step


def test_weights_without_a_prefix_where_the_query_is_weighed() -> None:
    recorder = decoded(small.lm(), MateICL(3), prefix=[]).recorder
    shares = recorder.average([recorder.first_position], [0])
    expected = reference(small.model(), FULL, dense.Rule(weight=3), QUERY, prefix=[])
    assert torch.allclose(shares, expected, atol=1e-5)


def test_sequential_passages_have_weights_of_their_own() -> None:
    recorder = decoded(small.lm(), Sequential()).recorder
    shares = recorder.average([recorder.first_position], [0])
    ids = [*chain(PREFIX, *WINDOWS, QUERY)]
    eager = float64.twin(small.model(), "eager")
    with torch.no_grad():
        attentions = eager(torch.tensor([ids]), output_attentions=True).attentions
    row = torch.stack([layer[0, :, -1] for layer in attentions]).mean(dim=(0, 1)).float()
    borders = [0, *accumulate(map(len, (PREFIX, *WINDOWS, QUERY)))]
    prefix, *groups, query = [row[a:b].sum() for a, b in pairwise(borders)]
    assert torch.allclose(shares, torch.stack([*groups, prefix, query]), atol=1e-5)


def test_beams_follow_the_winning_beam() -> None:
    made = decoded(small.lm(), APE(0.7, 0.8), num_beams=3)
    for step, row in enumerate(made.rows[0]):
        shares = made.recorder.average([made.recorder.first_position + step], [row])
        query = [*QUERY, *made.sequences[0][:step]]
        expected = reference(small.model(), FULL, dense.Rule(0.7, 0.8), query)
        assert torch.allclose(shares, expected, atol=1e-5), step


def test_switched_off_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **more: object) -> None:
        raise AssertionError("attention mass was computed")

    monkeypatch.setattr("rag_windows.attention.weights.WeightRecorder.add", fail)
    out = small.lm().generate("What?", ["One."], max_new_tokens=3, citations=False)
    assert (out.citations, out.prefix_mass, out.query_mass) == (None, None, None)
    with pytest.raises(AssertionError, match="was computed"):
        small.lm().generate("What?", ["One."], max_new_tokens=3)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3_text-sliding"])
@pytest.mark.parametrize("rule", ["pcw", "ape"])
def test_what_each_head_looks_at(name: str, rule: str) -> None:
    model, (method, dense_rule) = zoo.shared(name), RULES[rule]
    lm = WindowedLM.from_pretrained(model, tokenizer=None)
    (answer,) = decoded(lm, method).sequences
    single = [
        by_head(model, zoo.BY_NAME[name].sliding, dense_rule, [*QUERY, *answer[:step]])
        for step in range(len(answer))
    ]
    context = lm.encode_ids(PREFIX, WINDOWS, method=method)
    shares = head_shares(lm.engine.decoder.runner, context, QUERY, answer)
    assert shares is not None
    assert torch.allclose(shares, torch.stack(single).sum(dim=0)[..., :-2], atol=1e-4)


def test_what_a_failed_pass_recorded_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is tried again, and after a second failure without one of the rows."""
    lm, method = small.lm(), APE(0.7, 0.8)
    decoder, context = lm.engine.decoder, lm.encode_ids(PREFIX, WINDOWS, method=method)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    loop = BatchLoop(lm.engine.encoder, decoder)
    queries = [QUERY, QUERY[1:], QUERY[:3]]
    rows = [
        Row(decoder, context, query, options, cited=place != 1)
        for place, query in enumerate(queries)
    ]
    for row in rows:
        loop.admit(row)
    add, layers = WeightRecorder.add, iter(range(100))

    def failing(self: WeightRecorder, weights: Any) -> None:
        add(self, weights)
        # The first layer of the first pass, twice, and the last one of another.
        if next(layers) in (0, 1, 7):
            raise RuntimeError("no memory")

    monkeypatch.setattr(WeightRecorder, "add", failing)
    failed = 0
    while loop.rows:
        try:
            loop.step()
        except RuntimeError:
            failed += 1
            if failed == 2:
                loop.drop(rows[1])
    assert failed == 3
    monkeypatch.undo()
    assert rows[1].attention() is None
    for row, query in ((rows[0], queries[0]), (rows[2], queries[2])):
        made = decoder.generate(context, query, options=options, record_weights=True)
        assert row.tokens() == made.sequences[0]
        expected = torch.tensor(made.token_weights(0))
        assert torch.allclose(torch.tensor(row.attention()), expected, atol=1e-4)
