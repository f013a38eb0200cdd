"""Attention mass against the dense reference's explicit weights."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM

from rag_windows import APE, PCW, MateICL, Sequential, StructuredPrompting, WindowedLM
from rag_windows.attention.layout import WeightRecorder
from rag_windows.methods import Method
from tests.parity import dense, float64, weighted, zoo
from tests.parity.weighted import Weighed
from tests.rag_windows import small

PREFIX, QUERY = [0, 4, 70], [99, 65, 5, 30]
WINDOWS = [list(range(80, 95)), [33, 44], list(range(120, 153))]


def reference(model: object, rule: dense.Rule, query: list[int]) -> torch.Tensor:
    """(windows + 2,) mean over layers and heads of the last row's weights, without the sink."""
    packed = dense.pack(PREFIX, WINDOWS, query)
    kept: list[torch.Tensor] = []

    def keep(logits: torch.Tensor, *rest: object) -> torch.Tensor:
        result = original(logits, *rest)  # type: ignore[arg-type]  # passed on as they came
        kept.append(result[0, :, -1])
        return result

    original = dense.weights
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "weights", keep)
        reach = [4 if kind == "sliding_attention" else None for kind in _types(model)]
        dense.logits(model, reach, PREFIX, WINDOWS, query, rule)
    rows = torch.stack(kept)
    segments = [*range(1, len(WINDOWS) + 1), 0, len(WINDOWS) + 1]
    shares = torch.stack([rows[..., packed.segments == s].sum(-1) for s in segments], dim=-1)
    shares = shares / shares.sum(-1, keepdim=True)
    return shares.mean(dim=(0, 1)).float()


def _types(model: object) -> list[str]:
    config = model.config  # type: ignore[attr-defined]  # a transformers model
    return getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers


def measured(lm: WindowedLM, method: Method, query: list[int], tokens: int) -> torch.Tensor:
    """(tokens, windows + 2) shares of each answer token's row."""
    context = lm.encode_ids(PREFIX, WINDOWS, method=method)
    decoded = lm.engine.decoder.generate(
        context, query, options={"max_new_tokens": tokens, "do_sample": False}, record_mass=True
    )
    mass = decoded.mass
    assert mass is not None
    first = mass.first_position
    return torch.stack([mass.average([first + step], [0]) for step in range(tokens)])


RULES = {
    "pcw": (PCW(), dense.Rule()),
    "ape": (APE(0.7, 0.8), dense.Rule(0.7, 0.8)),
    "ape as printed": (APE(0.7, 0.8, "as printed"), dense.Rule(0.7, 0.8, "as printed")),
    "ape fixed ratio": (APE(1.3, 0.4, "fixed ratio"), dense.Rule(1.3, 0.4, "fixed ratio")),
}


@pytest.mark.parametrize("name", RULES)
def test_mass_is_that_of_the_dense_softmax_at_each_step(name: str) -> None:
    method, rule = RULES[name]
    lm = small.lm()
    context = lm.encode_ids(PREFIX, WINDOWS, method=method)
    answer = lm.generate_ids(context, QUERY, max_new_tokens=4)
    shares = measured(lm, method, QUERY, 4)
    for step in range(4):
        expected = reference(small.model(), rule, [*QUERY, *answer[:step]])
        assert torch.allclose(shares[step], expected, atol=1e-5), step


def test_mass_with_sinks_and_sliding_layers() -> None:
    torch.manual_seed(3)
    config = GptOssConfig(
        vocab_size=262, hidden_size=32, intermediate_size=32, num_hidden_layers=4, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=512, sliding_window=4, initializer_range=0.2, rope_parameters={
            "rope_type": "default", "rope_theta": 10000.0}, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    model = GptOssForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_()
    lm = WindowedLM.from_pretrained(model)
    shares = measured(lm, APE(0.8, 0.9), QUERY, 3)
    context = lm.encode_ids(PREFIX, WINDOWS, method=APE(0.8, 0.9))
    answer = lm.generate_ids(context, QUERY, max_new_tokens=3)
    for step in range(3):
        expected = reference(model, dense.Rule(0.8, 0.9), [*QUERY, *answer[:step]])
        assert torch.allclose(shares[step], expected, atol=1e-5), step


@pytest.mark.parametrize("name", ["llama", "gemma3_text-sliding", "gpt_oss"])
@pytest.mark.parametrize(
    ("method", "rule"),
    [
        (StructuredPrompting(), Weighed(copies=3, right=True)),
        (MateICL(0.6), Weighed(weight=0.6)),
    ],
    ids=["structured prompting", "mateicl"],
)
def test_mass_where_the_query_is_weighed(name: str, method: Method, rule: Weighed) -> None:
    """Prefix and query are segments of their own there; sinks and sliding layers included."""
    model = zoo.shared(name)
    lm = WindowedLM.from_pretrained(model, tokenizer=None)
    context = lm.encode_ids(PREFIX, WINDOWS, method=method)
    answer = lm.generate_ids(context, QUERY, max_new_tokens=3)
    shares = measured(lm, method, QUERY, 3)
    assert torch.allclose(shares.sum(dim=1), torch.ones(3), atol=1e-6)
    for step in range(3):
        _, packed, kept = weighted.run(
            model, zoo.BY_NAME[name].sliding, PREFIX, WINDOWS, [*QUERY, *answer[:step]], rule
        )
        assert torch.allclose(shares[step], weighted.shares(packed, kept), atol=1e-5), step


def test_mass_without_a_prefix_where_the_query_is_weighed() -> None:
    lm = small.lm()
    context = lm.encode_ids([], WINDOWS, method=MateICL(3))
    decoded = lm.engine.decoder.generate(
        context, QUERY, options={"max_new_tokens": 1}, record_mass=True
    )
    assert decoded.mass is not None
    shares = decoded.mass.average([decoded.mass.first_position], [0])
    reach = [None] * small.model().config.num_hidden_layers
    _, packed, kept = weighted.run(small.model(), reach, [], WINDOWS, QUERY, Weighed(copies=3))
    assert torch.allclose(shares, weighted.shares(packed, kept), atol=1e-5)


def test_sequential_passages_have_mass_of_their_own() -> None:
    lm = small.lm()
    context = lm.encode_ids(PREFIX, WINDOWS, method=Sequential())
    decoded = lm.engine.decoder.generate(
        context, QUERY, options={"max_new_tokens": 1}, record_mass=True
    )
    assert decoded.mass is not None
    shares = decoded.mass.average([decoded.mass.first_position], [0])
    ids = [*PREFIX, *(token for window in WINDOWS for token in window), *QUERY]
    eager = float64.twin(small.model(), "eager")
    with torch.no_grad():
        attentions = eager(torch.tensor([ids]), output_attentions=True).attentions
    row = torch.stack([layer[0, :, -1] for layer in attentions]).mean(dim=(0, 1)).float()
    borders = [0, len(PREFIX)]
    for window in WINDOWS:
        borders.append(borders[-1] + len(window))
    borders.append(len(ids))
    prefix, *groups, query = [row[a:b].sum() for a, b in pairwise(borders)]
    assert torch.allclose(shares, torch.stack([*groups, prefix, query]), atol=1e-5)


def test_beams_follow_the_winning_beam() -> None:
    lm = small.lm()
    context = lm.encode_ids(PREFIX, WINDOWS, method=APE(0.7, 0.8))
    options = {"max_new_tokens": 4, "num_beams": 3, "do_sample": False}
    decoded = lm.engine.decoder.generate(context, QUERY, options=options, record_mass=True)
    mass, answer = decoded.mass, decoded.sequences[0]
    assert mass is not None
    for step in range(len(answer)):
        shares = mass.average([mass.first_position + step], [decoded.rows[0][step]])
        expected = reference(small.model(), dense.Rule(0.7, 0.8), [*QUERY, *answer[:step]])
        assert torch.allclose(shares, expected, atol=1e-5), step


def test_switched_off_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("attention mass was computed")

    monkeypatch.setattr(WeightRecorder, "put", fail)
    out = small.lm().generate("What?", ["One."], max_new_tokens=3, citations=False)
    assert (out.citations, out.prefix_mass, out.query_mass) == (None, None, None)
    with pytest.raises(AssertionError, match="was computed"):
        small.lm().generate("What?", ["One."], max_new_tokens=3)


def test_mass_points_at_the_passage_that_is_read() -> None:
    lm = small.lm()
    out = lm.generate("What?", ["One.", "Two, longer.", "Three."], max_new_tokens=5)
    turned = lm.generate("What?", ["Three.", "One.", "Two, longer."], max_new_tokens=5)
    assert out.citations is not None
    assert turned.citations is not None
    assert out.token_ids == turned.token_ids
    for here, there in ((0, 1), (1, 2), (2, 0)):
        assert out.citations[here].mass == pytest.approx(turned.citations[there].mass, abs=1e-5)
