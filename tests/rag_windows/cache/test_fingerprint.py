"""Fingerprints: another one for every model that computes other keys and values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rag_windows import InputError, PassageCache, WindowedLM
from rag_windows.cache import fingerprint
from rag_windows.integration import tokenizer_fingerprint
from tests.rag_windows import small


def fresh() -> PreTrainedModel:
    model = copy.deepcopy(small.model())
    model.model.layers[0].mlp.scales = {"adapter": 0.5}
    return model


def wrapped(model: PreTrainedModel) -> WindowedLM:
    return WindowedLM(model, cache=PassageCache("1MB"))


def known(lm: WindowedLM) -> str | None:
    """What a wrapped model's cache knows it by, if it does."""
    try:
        return lm.fingerprints()[0]
    except InputError:
        return None


def weight(model: PreTrainedModel) -> torch.nn.Parameter:
    return model.get_parameter("model.layers.1.mlp.up_proj.weight")


def by_data(model: PreTrainedModel) -> None:
    """All of it: PyTorch counts no such edit, and a few bytes of each tensor are looked at."""
    weight(model).data.mul_(1.5)


def by_step(model: PreTrainedModel) -> None:
    weight(model).grad = torch.ones_like(weight(model))
    torch.optim.SGD([weight(model)], lr=0.1).step()


def by_swap(model: PreTrainedModel) -> None:
    weight(model).data = weight(model).detach().flip(0).contiguous()


def by_buffer(model: PreTrainedModel) -> None:
    model.model.rotary_emb.inv_freq.data.mul_(1.1)


def by_switch(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.scales["adapter"] = 0.25


def by_config(model: PreTrainedModel) -> None:
    model.config.rms_norm_eps = 1e-3


EDITS: tuple[Callable[[PreTrainedModel], None], ...] = (
    *(by_data, by_step, by_swap, by_buffer, by_switch, by_config),
)


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_an_edit_in_place_is_seen_in_the_next_call(edit: Callable[[Any], None]) -> None:
    model = fresh()
    lm = wrapped(model)
    before = known(lm)
    assert known(lm) == before == known(wrapped(fresh()))
    edit(model)
    after = known(lm)
    assert after != before
    assert after == known(wrapped(model)), "a new look at the edited model says another"


def test_what_changes_no_key_changes_no_fingerprint() -> None:
    """Using a model, names of files, an edit that is undone, weights that are tied or equal."""
    model = fresh()
    model.lm_head.weight = model.get_input_embeddings().weight
    lm = wrapped(model)
    before = known(lm)
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, output_hidden_states=True)
    model.train().eval()
    model.config._name_or_path = model.name_or_path = "/another/folder"
    assert known(lm) == before
    original = weight(model).detach().clone()
    by_step(model)
    assert known(lm) != before
    weight(model).data.copy_(original)
    assert known(lm) == before
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    assert known(lm) == before


def test_arithmetic_counts() -> None:
    lm = wrapped(fresh())
    before = known(lm)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert known(lm) != before
    assert known(lm) == before


def test_nothing_is_said_about_a_model_with_foreign_hooks(caplog: Any) -> None:
    model = fresh()
    lm = wrapped(model)
    before = known(lm)
    for _ in range(2):
        handle = model.model.layers[0].register_forward_hook(lambda *_: None)
        assert known(lm) is None
        handle.remove()
        assert known(lm) == before
    assert len(caplog.records) == 1, "said once"


class Scales:
    """As bitsandbytes keeps beside its codes."""

    def __init__(self, absmax: float) -> None:
        self.absmax = torch.tensor([absmax])


def test_scales_of_quantized_weights_and_weights_kept_off_the_device_count() -> None:
    prints = []
    for absmax in (1.0, 2.0):
        model = fresh()
        weight(model).__dict__["quant_state"] = Scales(absmax)
        prints.append(known(wrapped(model)))
    assert prints[0] != prints[1]
    accelerate = pytest.importorskip("accelerate")
    prints = []
    for factor in (1.0, 1.0, 2.0):
        model = fresh()
        weight(model).data.mul_(factor)
        accelerate.cpu_offload(model, execution_device="cpu")
        prints.append(known(wrapped(model)))
    assert prints[0] == prints[1] != prints[2]
    assert prints[0] is not None


def test_a_model_can_be_read_before_its_first_question(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = WindowedLM(small.model(), small.tokenizer(), cache=PassageCache("1MB"))
    lm.fingerprints()

    def again(*_: Any) -> bytes:
        raise AssertionError("read by a question")

    monkeypatch.setattr(fingerprint, "tokenizer_fingerprint", again)
    monkeypatch.setattr(fingerprint, "_Reading", again)
    lm.generate("Who?", ["Anna.", "Bert."], max_new_tokens=1)
    assert lm.generate("Who?", ["Bert."], max_new_tokens=1).usage.cached_windows == 1


def test_a_tokenizer_counts_with_its_template_and_tokens() -> None:
    plain = copy.deepcopy(small.tokenizer())
    prints = {tokenizer_fingerprint(plain)}
    plain(["a", "b c"], padding=True, truncation=True, max_length=3)
    assert tokenizer_fingerprint(plain) in prints, "padding and truncation do not count"
    other = copy.deepcopy(plain)
    lm = WindowedLM(small.model(), other, cache=PassageCache("1MB"))
    seen = {bytes.fromhex(lm.fingerprints()[1])}
    assert seen == prints
    for change in (
        lambda: setattr(other, "chat_template", small.TEMPLATE + " "),
        lambda: other.add_special_tokens({"additional_special_tokens": ["<|other|>"]}),
        lambda: other.add_tokens(["word"]),
    ):
        change()
        seen.add(bytes.fromhex(lm.fingerprints()[1]))
        prints.add(tokenizer_fingerprint(other))
    assert len(prints) == 4
    assert seen == prints
