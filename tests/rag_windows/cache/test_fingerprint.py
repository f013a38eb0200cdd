"""Fingerprints: another one for every model that computes other keys and values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rag_windows.attention.hook import register
from rag_windows.attention.twin import Twin
from rag_windows.cache.fingerprint import (
    ModelIdentity,
    TokenizerIdentity,
    plain_tensors,
    tokenizer_fingerprint,
)
from tests.rag_windows import small


def fresh() -> PreTrainedModel:
    return copy.deepcopy(small.model())


def identity(model: PreTrainedModel, **options: Any) -> ModelIdentity:
    register()
    return ModelIdentity(model, Twin(model), **options)


def weight(model: PreTrainedModel) -> torch.nn.Parameter:
    return model.get_parameter("model.layers.1.mlp.up_proj.weight")


def by_data(model: PreTrainedModel) -> None:
    weight(model).data[3, 5] += 0.01


def by_numpy(model: PreTrainedModel) -> None:
    weight(model).detach().numpy()[3, 5] += 0.01


def by_copy(model: PreTrainedModel) -> None:
    with torch.no_grad():
        weight(model).mul_(1.01)


def by_state(model: PreTrainedModel) -> None:
    state = {name: value + 1e-3 for name, value in model.state_dict().items()}
    model.load_state_dict(state)


def by_step(model: PreTrainedModel) -> None:
    weight(model).grad = torch.ones_like(weight(model))
    torch.optim.SGD([weight(model)], lr=0.1).step()
    weight(model).grad = None


def by_parameter(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(weight(model) * 2)


def by_swap(model: PreTrainedModel) -> None:
    weight(model).data = weight(model).detach().flip(0).contiguous()


def by_rows(model: PreTrainedModel) -> None:
    """The same numbers in another order: a plain sum would not see it."""
    weight(model).data.copy_(weight(model).detach().flip(0).clone())


def by_buffer(model: PreTrainedModel) -> None:
    model.model.rotary_emb.inv_freq.data.mul_(1.1)


EDITS: tuple[Callable[[PreTrainedModel], None], ...] = (
    by_data,
    by_numpy,
    by_copy,
    by_state,
    by_step,
    by_parameter,
    by_swap,
    by_rows,
    by_buffer,
)


def test_equal_models_have_equal_fingerprints() -> None:
    one, other = identity(fresh()), identity(fresh())
    assert one.fingerprint() == other.fingerprint() == one.fingerprint()
    assert len(one.fingerprint() or b"") == 32


def test_using_a_model_changes_nothing() -> None:
    model = fresh()
    known = identity(model)
    before = known.fingerprint()
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, output_hidden_states=True)
    model.train().eval()
    assert known.fingerprint() == before


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_an_edit_in_place_is_seen_in_the_next_call(edit: Callable[[Any], None]) -> None:
    model = fresh()
    known = identity(model)
    before = known.fingerprint()
    edit(model)
    after = known.fingerprint()
    assert after != before
    assert after == identity(model).fingerprint(), "a new look at the edited model says another"


def test_an_edit_that_is_undone_is_the_same_model_again() -> None:
    model = fresh()
    known = identity(model)
    before = known.fingerprint()
    original = weight(model).detach().clone()
    by_copy(model)
    assert known.fingerprint() != before
    weight(model).data.copy_(original)
    assert known.fingerprint() == before


def test_a_large_model_is_sampled_and_summed_in_turn() -> None:
    """With next to nothing summed in a call: a whole tensor at once, one element within a round."""
    model = fresh()
    known = identity(model, probe_bytes=1)
    before = known.fingerprint()
    weight(model).data.mul_(1.5)
    assert known.fingerprint() != before
    before = known.fingerprint()
    model.get_input_embeddings().weight.data.view(-1)[-1] += 1
    rounds = len(list(model.parameters())) + len(list(model.buffers()))
    seen = [known.fingerprint() for _ in range(rounds + 1)]
    assert seen[-1] != before


def test_tied_weights_count_once_and_their_tie_counts() -> None:
    tied = fresh()
    tied.lm_head.weight = tied.get_input_embeddings().weight
    known = identity(tied)
    before = known.fingerprint()
    tied.lm_head.weight = torch.nn.Parameter(tied.lm_head.weight.detach().clone())
    # The same numbers give the same keys and values, tied or not.
    assert known.fingerprint() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_differ(dtype: torch.dtype) -> None:
    assert identity(fresh().to(dtype)).fingerprint() != identity(fresh()).fingerprint()


@pytest.mark.parametrize(
    ("name", "value"),
    [("rms_norm_eps", 1e-3), ("rope_parameters", {"rope_type": "default", "rope_theta": 5e5})],
)
def test_configs_differ(name: str, value: Any) -> None:
    model = fresh()
    setattr(model.config, name, value)
    assert identity(model).fingerprint() != identity(fresh()).fingerprint()


def test_names_of_files_do_not_matter() -> None:
    model = fresh()
    model.config._name_or_path = model.name_or_path = "/another/folder"
    assert identity(model).fingerprint() == identity(fresh()).fingerprint()


def test_revisions_differ() -> None:
    prints = {identity(fresh(), revision=name).fingerprint() for name in (None, "main", "v2")}
    assert len(prints) == 3
    model = fresh()
    model.config._commit_hash = "abc"
    assert identity(model).fingerprint() not in prints


def test_attributes_of_modules_count() -> None:
    model = fresh()
    model.model.layers[0].self_attn.scaling *= 2
    assert identity(model).fingerprint() != identity(fresh()).fingerprint()


def test_automatic_mixed_precision_counts() -> None:
    known = identity(fresh())
    before = known.fingerprint()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert known.fingerprint() != before
    assert known.fingerprint() == before


def test_nothing_is_said_about_a_model_with_foreign_hooks() -> None:
    model = fresh()
    known = identity(model)
    before = known.fingerprint()
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    assert known.fingerprint() is None
    handle.remove()
    assert known.fingerprint() == before
    model.model.layers[0].forward = model.model.layers[0].forward
    assert identity(model).fingerprint() is None


class Scales:
    """As bitsandbytes keeps beside its codes."""

    def __init__(self, absmax: float) -> None:
        self.absmax = torch.tensor([absmax])


def test_scales_of_quantized_weights_count() -> None:
    prints = []
    for absmax in (1.0, 2.0):
        model = fresh()
        weight(model).__dict__["quant_state"] = Scales(absmax)
        names = [name for name, _ in plain_tensors("w", weight(model))]
        assert names == ["w", "w.quant_state.absmax"]
        prints.append(identity(model).fingerprint())
    assert prints[0] != prints[1]


def test_weights_kept_off_the_device_count() -> None:
    accelerate = pytest.importorskip("accelerate")
    prints = []
    for factor in (1.0, 1.0, 2.0):
        model = fresh()
        weight(model).data.mul_(factor)
        accelerate.cpu_offload(model, execution_device="cpu")
        assert weight(model).device.type == "meta"
        prints.append(identity(model).fingerprint())
    assert prints[0] == prints[1] != prints[2]
    assert prints[0] is not None


def test_a_tokenizer_counts_with_its_template_and_tokens() -> None:
    plain = small.tokenizer()
    prints = {tokenizer_fingerprint(plain)}
    for change in ("template", "token", "vocabulary"):
        other = copy.deepcopy(plain)
        if change == "template":
            other.chat_template = small.TEMPLATE + " "
        elif change == "token":
            other.add_special_tokens({"additional_special_tokens": ["<|other|>"]})
        else:
            other.add_tokens(["word"])
        prints.add(tokenizer_fingerprint(other))
    assert len(prints) == 4
    assert tokenizer_fingerprint(copy.deepcopy(plain)) in prints


def test_padding_and_truncation_do_not_count() -> None:
    tokenizer = copy.deepcopy(small.tokenizer())
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["a", "b c"], padding=True, truncation=True, max_length=3)
    assert tokenizer_fingerprint(tokenizer) == before


def test_a_template_that_is_changed_later_is_seen() -> None:
    tokenizer = copy.deepcopy(small.tokenizer())
    known = TokenizerIdentity(tokenizer)
    before = known.fingerprint()
    assert known.fingerprint() == before
    tokenizer.chat_template = small.TEMPLATE + " "
    assert known.fingerprint() != before
