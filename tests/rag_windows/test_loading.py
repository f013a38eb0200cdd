from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2Model, T5Config, T5ForConditionalGeneration

from rag_windows import InputError, ModelLoadError, UnsupportedModelError, WindowedLM
from tests.rag_windows import small


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    small.model().save_pretrained(path)
    small.tokenizer().save_pretrained(path)
    return path


def test_a_local_folder(folder: Path) -> None:
    lm = WindowedLM.from_pretrained(folder, method="pcw")
    again = small.lm().generate("What?", ["One."], method="pcw", max_new_tokens=5)
    assert lm.generate("What?", ["One."], max_new_tokens=5).token_ids == again.token_ids


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16])
def test_a_dtype(folder: Path, dtype: Any) -> None:
    lm = WindowedLM.from_pretrained(str(folder), dtype=dtype)
    assert lm.model.dtype == (torch.bfloat16 if dtype == "bfloat16" else dtype)
    logits = lm.logits(lm.encode_ids([5, 6], [[7, 8, 9], [10]]), [11, 12])
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}])
def test_a_device_map(folder: Path, device_map: Any) -> None:
    lm = WindowedLM.from_pretrained(folder, device_map=device_map)
    expected = small.lm().generate("What?", ["One.", "Two."], max_new_tokens=5).token_ids
    assert lm.generate("What?", ["One.", "Two."], max_new_tokens=5).token_ids == expected


def test_a_model_dispatched_with_offloaded_layers(folder: Path, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = type(small.model()).from_pretrained(folder).eval()
    accelerate.cpu_offload(model, execution_device="cpu")
    lm = WindowedLM.from_pretrained(model, tokenizer=small.tokenizer())
    expected = small.lm().generate("What?", ["One.", "Two."], max_new_tokens=5).token_ids
    assert lm.generate("What?", ["One.", "Two."], max_new_tokens=5).token_ids == expected


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("./nowhere", {}, "There is no model folder './nowhere'"),
        ("someone/unknown-model", {}, "can't be reached or does not know it"),
        ("tiny-reader", {"trust_remote_code": True}, "is refused"),
        ("{empty}", {}, "holds no config.json"),
        ("{folder}", {"dtype": "float7"}, "Unknown dtype 'float7'"),
    ],
)
def test_what_cannot_be_loaded_says_why(
    name: str, options: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    name = name.format(folder=folder, empty=tmp_path)
    with pytest.raises(ModelLoadError, match=message):
        WindowedLM.from_pretrained(name, **options)


def test_pickled_weights_are_never_loaded(folder: Path, tmp_path: Path) -> None:
    small.tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    torch.save(small.model().state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="pickled weights are never loaded"):
        WindowedLM.from_pretrained(tmp_path)


def test_a_broken_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-type"}))
    with pytest.raises(ModelLoadError, match="can't be loaded"):
        WindowedLM.from_pretrained(tmp_path)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(InputError, match="not Linear"):
        WindowedLM.from_pretrained(torch.nn.Linear(2, 2))


def test_a_model_of_another_kind(tmp_path: Path) -> None:
    T5Config(vocab_size=50, d_model=16).save_pretrained(tmp_path)
    small.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="is no causal language model"):
        WindowedLM.from_pretrained(tmp_path)


def test_options_of_loading_do_not_apply_to_a_loaded_model() -> None:
    with pytest.raises(InputError, match="loaded already"):
        WindowedLM.from_pretrained(small.model(), dtype="bfloat16")


def test_models_that_cannot_read_windows_are_refused_by_name() -> None:
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )
    with pytest.raises(UnsupportedModelError, match=r"'t5'.*encoder-decoder"):
        WindowedLM.from_pretrained(t5)
    headless = GPT2Model(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(UnsupportedModelError, match=r"'gpt2'.*no language-model head"):
        WindowedLM.from_pretrained(headless)
