"""The dense reference against models as transformers runs them, and the engine against both.

Every architecture, layout and rule; then identities that hold without any reference.
"""

from __future__ import annotations

import copy

import pytest
import torch

from rag_windows import PCW, Sequential

from . import dense, engine, tolerances, zoo
from .cases import CASES, RULES, Case, case, expected, expected_steps, plain
from .dense import Rule

FEW = (
    *("llama", "gpt2", "gemma2", "gemma3_text-sliding"),
    *("gpt_oss", "mistral-sliding", "gemma4_text", "opt"),
)
"""Some of each kind: learned positions, sliding layers, soft caps, sinks."""
# All rules where every kind of window occurs; the other layouts with those that weigh it most.
PREFILLS = [
    *(("ragged", ruled) for ruled in RULES if ruled != "as used"),
    ("no prefix", "as printed"),
    ("no prefix", "as used"),
    ("long prefix", "as used, sharp"),
    ("one-token query", "as used"),
]
STEPS = [
    *((name, "as used") for name in zoo.NAMES),
    *((name, ruled) for name in ("llama", "gemma2", "gpt_oss", "gpt2") for ruled in RULES),
]


@pytest.mark.parametrize(
    ("name", "which", "ruled"),
    [
        *((name, "ragged", "as used") for name in zoo.NAMES),
        *((name, *layout) for name in FEW for layout in PREFILLS),
    ],
)
def test_prefill(name: str, which: str, ruled: str) -> None:
    one, rule = CASES[which], RULES[ruled]
    rows = engine.logits(name, one, engine.method(rule))
    assert rows.dtype == torch.float32
    tolerances.agree(rows, expected(name, one, rule))


@pytest.mark.parametrize(("name", "ruled"), dict.fromkeys(STEPS))
def test_each_decoded_step(name: str, ruled: str) -> None:
    """Steps run one token at a time through the cache; far enough to leave a sliding reach."""
    rule, forced = RULES[ruled], zoo.ids(12, 99)
    one = case(5, (1, 7, 12), 3, seed=31)
    steps = engine.steps(name, one, engine.method(rule), forced)
    tolerances.agree(steps, expected_steps(name, one, rule, forced))
    context = engine.encoded(name, one, engine.method(rule))
    teacher_forced = engine.shared(name).logits(context, [*one.query, *forced[:-1]])
    tolerances.agree(teacher_forced, expected(name, one, rule, forced[:-1]))


@pytest.mark.parametrize("name", zoo.NAMES)
def test_bf16(name: str) -> None:
    """Within a bound taken from the model's own bf16 error on the same tokens."""
    entry, one, rule = zoo.BY_NAME[name], CASES["ragged"], RULES["as used"]
    model = zoo.build(entry, dtype=torch.bfloat16)
    exact = copy.deepcopy(model).float()
    rows = engine.rows(engine.wrap(model), one, rule)
    assert rows.dtype == torch.float32
    reference = dense.logits(exact, entry.sliding, one.prefix, one.windows, one.query, rule)
    tolerances.agree_in_bf16(rows, reference, model, exact, one.flat)


@pytest.mark.parametrize("name", zoo.NAMES)
def test_one_window_is_full_attention(name: str) -> None:
    one = case(5, (21,), 6)
    tolerances.agree(engine.logits(name, one, PCW()), plain(name, one))


@pytest.mark.parametrize("name", zoo.NAMES)
def test_no_window_is_the_plain_model(name: str) -> None:
    one = case(9, (), 6)
    tolerances.agree(engine.logits(name, one, engine.method(RULES["as used"])), plain(name, one))


@pytest.mark.parametrize("name", zoo.NAMES)
def test_no_window_generates_bit_for_bit_as_the_plain_model(name: str) -> None:
    model, one = zoo.shared(name), case(9, (), 6)
    lm = engine.shared(name)
    context = lm.encode_ids(one.prefix, [])
    tokens, steps = engine.decode(lm, context, one.query, 8)
    plain = model.generate(
        torch.tensor([one.flat]),
        max_new_tokens=8,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert tokens == plain.sequences[0, len(one.flat) :].tolist()
    assert torch.equal(steps, torch.cat(plain.logits))


@pytest.mark.parametrize("name", zoo.NAMES)
def test_sequential_is_the_plain_model(name: str) -> None:
    one = CASES["ragged"]
    tolerances.agree(engine.logits(name, one, Sequential()), plain(name, one))


def test_order_of_windows_does_not_matter() -> None:
    one, method = CASES["ragged"], engine.method(RULES["as used"])
    other = Case(one.prefix, one.windows[::-1], one.query)
    both = (engine.logits("gpt_oss", each, method) for each in (other, one))
    tolerances.agree(*both)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_a_window_given_twice(name: str) -> None:
    """A passage given twice counts twice; S = 1/2 of "fixed ratio" takes just that back."""
    lm, one = engine.shared(name), case(5, (9,), 4)
    single = engine.rows(lm, one, Rule())
    twice = Case(one.prefix, one.windows * 2, one.query)
    halved = engine.rows(lm, twice, Rule(1.0, 0.5, "fixed ratio"))
    assert tolerances.gap(engine.rows(lm, twice, Rule()), single) > tolerances.MATTERS
    tolerances.agree(halved, single)


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gpt_oss"])
def test_a_context_can_be_read_again(name: str) -> None:
    lm, one = engine.shared(name), CASES["ragged"]
    context = lm.encode_ids(one.prefix, one.windows, method=engine.method(RULES["as used"]))
    first = lm.logits(context, one.query)
    tokens = lm.generate_ids(context, one.query, max_new_tokens=4)
    lm.logits(context, zoo.ids(17, 5))
    assert tolerances.gap(lm.logits(context, one.query), first) == 0.0
    assert lm.generate_ids(context, one.query, max_new_tokens=4) == tokens


@pytest.mark.parametrize("name", ["llama", "gemma3_text-sliding"])
def test_long_decode_through_many_windows(name: str) -> None:
    """Forty windows and a decode longer than any of them keep to the reference."""
    rule, forced = RULES["as used"], zoo.ids(40, 3)
    one = case(3, tuple(1 + i * 5 % 11 for i in range(40)), 4, seed=57)
    steps = engine.steps(name, one, engine.method(rule), forced)
    tolerances.agree(steps, expected_steps(name, one, rule, forced))


@pytest.mark.parametrize(
    ("name", "which"),
    dict.fromkeys([*((one, "ragged") for one in zoo.NAMES), *(("gpt_oss", one) for one in CASES)]),
)
def test_explicit_softmax_is_the_masked_forward(name: str, which: str) -> None:
    entry, one = zoo.BY_NAME[name], CASES[which]
    packed = dense.pack(one.prefix, one.windows, one.query)
    masked = dense.masked_logits(zoo.shared(name), entry.sliding, packed, entry.mask_by_type)
    tolerances.agree(masked, expected(name, one))


def test_rule_by_hand() -> None:
    """Two context keys and one of the query, one head, worked out on paper."""
    packed = dense.pack([], [[1], [2]], [3])
    rule = dense.Rule(temperature=0.5, scale=0.8)
    logits = torch.tensor([[[[0.0, 0, 0], [0, 0, 0], [0.3, -0.2, 0.1]]]], dtype=torch.float64)
    row = dense.weights(logits, None, packed.visible(None), packed, rule)[0, 0, 2]
    sharp = torch.tensor([0.6, -0.4], dtype=torch.float64).exp()
    mass = sharp.sum() ** 0.8
    own = torch.tensor(0.1, dtype=torch.float64).exp()
    expected = torch.cat([mass * sharp / sharp.sum(), own[None]]) / (mass + own)
    torch.testing.assert_close(row, expected, rtol=1e-12, atol=1e-12)
