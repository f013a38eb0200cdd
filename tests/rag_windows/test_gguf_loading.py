"""GGUF files: the numbers that transformers reads, in pieces and into the model one by one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils

from rag_windows import ModelLoadError, loading
from tests.blackbox.test_loading import write_gguf
from tests.rag_windows import small

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of blocks, in which a matrix takes more than one piece."""
    folder = tmp_path_factory.mktemp("packed")
    write_gguf(folder, small.build(hidden_size=64, intermediate_size=2**13), packed=True)
    return folder


def state(model: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = model.state_dict()
    return found


def same(one: Any, other: Any) -> bool:
    ours, theirs = state(one), state(other)
    pairs = ((ours[name], theirs[name]) for name in theirs)
    equal = all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
    return ours.keys() == theirs.keys() and equal


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_and_tokenizer_are_those_that_transformers_reads(folder: Path, dtype: str) -> None:
    model, tokenizer = loading.load(folder / "small.gguf", None, dtype=dtype)
    expected = AutoModelForCausalLM.from_pretrained(folder, gguf_file="small.gguf", dtype=dtype)
    assert same(model, expected)
    assert model.config.to_dict() == expected.config.to_dict()
    other = AutoTokenizer.from_pretrained(folder, gguf_file="small.gguf")
    assert tokenizer.get_vocab() == other.get_vocab()
    assert tokenizer("How deep?").input_ids == other("How deep?").input_ids


def test_tensors_that_transformers_rearranges_are_left_to_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(modeling_gguf_pytorch_utils.LlamaTensorProcessor):
        def process(self, weights: Any, name: str, **kwargs: Any) -> Any:
            return super().process(2 * weights, name, **kwargs)

    expected, _ = loading.load(folder / "small.gguf", None, dtype="float32")
    monkeypatch.setitem(modeling_gguf_pytorch_utils.TENSOR_PROCESSORS, "llama", Other)
    found, _ = loading.load(folder / "small.gguf", None, dtype="float32")
    for name, weight in state(found).items():
        assert torch.equal(weight, 2 * state(expected)[name])


def test_weights_are_unpacked_in_pieces_and_never_all_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpack, numbers = gguf.dequantize, []

    def counting(data: Any, kind: Any) -> Any:
        made = unpack(data, kind)
        numbers.append(made.size)
        return made

    monkeypatch.setattr(gguf, "dequantize", counting)
    model, _ = loading.load(folder / "small.gguf", None, dtype="float32")
    assert max(numbers) == 2**18
    assert sum(numbers) == sum(one.numel() for one in state(model).values())


def test_blocks_that_nobody_can_unpack_are_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(data: Any, kind: Any) -> Any:
        raise NotImplementedError(f"Dequantization for {kind.name} is not yet implemented")

    monkeypatch.setattr(gguf, "dequantize", unknown)
    with pytest.raises(ModelLoadError, match="can't be loaded"):
        loading.load(folder / "small.gguf", None)


def test_what_was_changed_for_loading_is_put_back(folder: Path) -> None:
    before = gguf.GGUFReader, gguf.get_tensor_name_map
    whole = modeling_gguf_pytorch_utils.load_gguf_checkpoint
    loading.load(folder / "small.gguf", None)
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before
    assert modeling_gguf_pytorch_utils.load_gguf_checkpoint is whole
