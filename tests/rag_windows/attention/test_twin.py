from __future__ import annotations

import copy

import torch

from rag_windows import WindowedLM
from rag_windows.attention.twin import Twin
from tests.rag_windows import small

WINDOWS, QUERY = [[80, 81, 82, 83], [90, 91]], [99, 65, 5]


def test_a_twin_shares_every_weight_and_no_config() -> None:
    model = small.model()
    twin = Twin(model).model
    names = dict(twin.named_parameters())
    assert names.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert names[name] is parameter
    ours = {id(module) for module in twin.modules()}
    assert not ours & {id(module) for module in model.modules()}
    assert model.config._attn_implementation == "sdpa"
    for module in twin.modules():
        if hasattr(module, "config"):
            assert module.config._attn_implementation == "rag_windows"
            assert module.config is twin.config


def test_forward_hooks_of_the_model_are_called() -> None:
    model = copy.deepcopy(small.model())
    seen = []
    model.model.layers[0].register_forward_hook(lambda *args: seen.append(1))
    lm = WindowedLM.from_pretrained(model)
    seen.clear()
    lm.encode_ids([0, 4], WINDOWS)
    assert seen


def test_two_wrappers_of_one_model_do_not_meet() -> None:
    model = small.model()
    one = WindowedLM.from_pretrained(model, method="pcw")
    two = WindowedLM.from_pretrained(model, method="ape")
    assert one.model is two.model is model
    a = one.logits(one.encode_ids([0, 4], WINDOWS), QUERY)
    b = two.logits(two.encode_ids([0, 4], WINDOWS), QUERY)
    assert not torch.allclose(a, b)
    assert torch.equal(a, one.logits(one.encode_ids([0, 4], WINDOWS), QUERY))
