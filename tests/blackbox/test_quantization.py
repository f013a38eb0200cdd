"""`quantization="int8"`: answers as of the unpacked weights, from half the memory."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rag_windows import InputError, PassageCache, WindowedLM
from tests.blackbox.test_loading import logits, write_gguf
from tests.rag_windows import small

pytest.importorskip("gguf")
PASSAGES = ["The well is nine metres deep.", "Zelwick has two wells."]


@pytest.fixture(scope="module", params=["folder", "tied folder", "gguf", "tied gguf"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model with 64 channels, in each form that weights come in."""
    folder = tmp_path_factory.mktemp("quantized")
    model = small.build(hidden_size=64, tie_word_embeddings=request.param.startswith("tied"))
    if request.param.endswith("folder"):
        model.save_pretrained(folder)
        small.tokenizer().save_pretrained(folder)
        return folder
    write_gguf(folder, model, packed=True)
    return folder / "small.gguf"


def load(place: Path, **settings: Any) -> WindowedLM:
    return WindowedLM.from_pretrained(place, device_map="cpu", method="ape", **settings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_are_near_those_of_the_unpacked_weights(place: Path, dtype: str) -> None:
    plain, packed = load(place, dtype=dtype), load(place, dtype=dtype, quantization="int8")
    found, expected = logits(packed).float(), logits(plain).float()
    assert float((found - expected).norm() / expected.norm()) < 0.1
    assert packed.generate("How deep?", PASSAGES, max_new_tokens=3).token_ids
    matrices = [one for one in packed.model.parameters() if one.ndim == 2]
    assert {one.dtype for one in matrices} == {torch.int8}
    assert packed.model.dtype == getattr(torch, dtype)
    sizes = [
        sum(one.nbytes for one in model.parameters() if one.ndim == 2)
        for model in (plain.model, packed.model)
    ]
    assert sizes[1] * plain.model.dtype.itemsize == sizes[0]


def test_each_load_packs_to_the_same_numbers(place: Path) -> None:
    one, other = (load(place, quantization="int8").model.state_dict() for _ in range(2))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_windows_of_packed_weights_are_cached_separately(place: Path, tmp_path: Path) -> None:
    def cached(**settings: Any) -> bool:
        with PassageCache(path=tmp_path) as cache:
            lm = load(place, cache=cache, dtype="float32", **settings)
            return lm.generate("How deep?", PASSAGES, max_new_tokens=1).usage.cached_tokens > 0

    assert not cached()
    assert not cached(quantization="int8")
    assert cached()
    assert cached(quantization="int8")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quantization": "int4"}, "must be one of"),
        ({"quantization": "int8", "load_in_8bit": True}, "can't be combined with load_in_8bit"),
        ({"quantization": "int8", "dequantize": True}, "can't be combined with dequantize"),
        ({"quantization": "int8", "quantization_config": {"a": 1}}, "with quantization_config"),
        ({"quantization": "int8", "device_map": "auto"}, "is for CPUs"),
    ],
)
def test_what_does_not_fit_is_refused(
    settings: dict[str, Any], words: str, small_folder: Path
) -> None:
    with pytest.raises(InputError, match=words):
        WindowedLM.from_pretrained(small_folder, **{"device_map": "cpu", **settings})


def test_loaded_models_and_adapters_are_not_packed(adapter: Path, small_lm: WindowedLM) -> None:
    with pytest.raises(InputError, match="loaded already"):
        WindowedLM.from_pretrained(
            small_lm.model, tokenizer=small_lm.tokenizer, quantization="int8"
        )
    with pytest.raises(InputError, match="adapter"):
        WindowedLM.from_pretrained(adapter, device_map="cpu", quantization="int8")
