"""Windows that are encoded with an adapter, and all else that is read without it."""

from __future__ import annotations

import contextlib
import json
import shutil
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, LlamaForCausalLM

from rag_windows import (
    MissingExtraError,
    ModelLoadError,
    Passage,
    PassageCache,
    UnsupportedModelError,
    WindowedLM,
    errors,
    window_adapter,
)
from rag_windows.cache import fingerprint
from rag_windows.window_adapter import FILE, Made
from tests.rag_windows import small, small_states

peft = pytest.importorskip("peft")

PASSAGES = [
    Passage("Aldan Pellby plays the lute.", title="Pellby"),
    Passage("Vara Zelmont plays the harp, and was born in Sulava.", title="Zelmont"),
    Passage("Nobody plays the drum."),
]
QUESTION, PREFIX = "Who plays the harp?", "Answer in a word."


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    small.build().save_pretrained(folder)
    small.tokenizer().save_pretrained(folder)
    return folder


def lora(model: LlamaForCausalLM, seed: int = 3) -> Any:
    torch.manual_seed(seed)
    settings = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False
    )
    return peft.get_peft_model(model, settings)


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    lora(LlamaForCausalLM.from_pretrained(base)).save_pretrained(folder)
    (folder / FILE).write_text(Made().model_dump_json())
    return folder


def changed(adapter: Path, folder: Path, name: str, text: str) -> Path:
    """A copy with another text in one of its files."""
    shutil.copytree(adapter, folder / "changed")
    (folder / "changed" / name).write_text(text)
    return folder / "changed"


def answer(lm: WindowedLM, passages: list[Passage] | None = None, **given: Any) -> tuple[int, ...]:
    read = PASSAGES if passages is None else passages
    return lm.generate(QUESTION, read, prefix=PREFIX, max_new_tokens=12, **given).token_ids


def of_transformers(
    model: LlamaForCausalLM, writer: LlamaForCausalLM, lm: WindowedLM
) -> torch.Tensor:
    """Logits of the question over windows that another model encoded, by transformers alone."""
    parts = lm.engine.text.prompt.build(QUESTION, PASSAGES, prefix=PREFIX)
    prefix, start = torch.tensor([parts.prefix_ids]), len(parts.prefix_ids)
    held = DynamicCache()
    model(prefix, past_key_values=held)
    layers = [[(one.keys, one.values)] for one in held.layers]
    for window in parts.windows:
        own = DynamicCache()
        for number, pairs in enumerate(layers):
            own.update(*pairs[0], number)
        places = torch.arange(start, start + len(window.ids))[None]
        writer(torch.tensor([window.ids]), position_ids=places, past_key_values=own)
        for pairs, one in zip(layers, own.layers, strict=True):
            pairs.append((one.keys[:, :, start:], one.values[:, :, start:]))
    whole = DynamicCache()
    for number, pairs in enumerate(layers):
        keys, values = zip(*pairs, strict=True)
        whole.update(torch.cat(keys, 2), torch.cat(values, 2), number)
    place = start + max(len(window.ids) for window in parts.windows)
    places = torch.arange(place, place + len(parts.query_ids))[None]
    query = torch.tensor([parts.query_ids])
    return model(query, position_ids=places, past_key_values=whole).logits


@torch.no_grad()
def test_windows_alone_are_encoded_with_it(base: Path, adapter: Path) -> None:
    """Prefix, question and answer are read with the model's own weights."""
    model = LlamaForCausalLM.from_pretrained(base).eval()
    writer = lora(LlamaForCausalLM.from_pretrained(base)).merge_and_unload().eval()
    lm = WindowedLM.from_pretrained(adapter)
    parts = lm.engine.text.prompt.build(QUESTION, PASSAGES, prefix=PREFIX)
    windows = [window.ids for window in parts.windows]
    context = lm.engine.encoder.encode_ids(parts.prefix_ids, windows, lm.method)
    found = lm.engine.decoder.forward(context, torch.tensor([parts.query_ids]))
    expected = of_transformers(model, writer, lm)
    assert torch.allclose(found, expected, atol=2e-4)
    assert not torch.allclose(expected, of_transformers(model, model, lm), atol=0.1)


@pytest.mark.parametrize("passages", [PASSAGES, []], ids=["one-prompt", "no-passage"])
def test_what_is_no_window_is_read_as_without_it(
    base: Path, adapter: Path, passages: list[Passage]
) -> None:
    plain, adapted = (WindowedLM.from_pretrained(one) for one in (base, adapter))
    answers = [answer(lm, passages, method="sequential") for lm in (plain, adapted)]
    assert answers[0] == answers[1]
    assert answer(plain, method="pcw") != answer(adapted, method="pcw")


def test_its_method_is_the_default_and_any_other_can_be_named(base: Path, adapter: Path) -> None:
    """The model's own configuration names "ape"."""
    assert WindowedLM.from_pretrained(base).method.name == "ape"
    assert WindowedLM.from_pretrained(adapter).method.name == "pcw"
    lm = WindowedLM.from_pretrained(base, window_adapter=adapter, method="sequential")
    assert lm.method.name == "sequential"
    for method in ("ape", "pced", "auto", "linked", "ensemble", "neighbours+pcw", "deep-thinking"):
        assert answer(lm, method=method)


def test_it_is_the_same_given_as_model_or_beside_one(base: Path, adapter: Path) -> None:
    whole = WindowedLM.from_pretrained(adapter)
    named = WindowedLM.from_pretrained(base, window_adapter=adapter)
    model = LlamaForCausalLM.from_pretrained(base)
    loaded = WindowedLM.from_pretrained(
        model, tokenizer=small.tokenizer(), window_adapter=str(adapter)
    )
    assert answer(whole) == answer(named) == answer(loaded)
    assert type(loaded.model) is LlamaForCausalLM
    assert not any("lora" in name for name, _ in loaded.model.named_parameters())


def test_its_windows_are_cached_apart(base: Path, adapter: Path, tmp_path: Path) -> None:
    expected = [answer(WindowedLM.from_pretrained(one), method="pcw") for one in (base, adapter)]
    for _ in range(2):
        for source, right in zip((base, adapter), expected, strict=True):
            cache = PassageCache(path=tmp_path / "cache", disk="1GiB")
            lm = WindowedLM.from_pretrained(source, cache=cache)
            assert answer(lm, method="pcw") == right
            cache.close()
    assert cache.stats().hits


def test_threads_read_with_it_and_without_it_at_once(base: Path, adapter: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(base).eval()
    both = [
        WindowedLM(model, small.tokenizer(), method="pcw", window_adapter=one)
        for one in (None, adapter)
    ]
    expected = [answer(lm) for lm in both]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(answer, both * 6)]
    assert found == expected * 6


def test_an_edit_of_the_model_reaches_its_windows(base: Path, adapter: Path) -> None:
    """Of a weight in place, and of a module that is replaced."""
    lm = WindowedLM.from_pretrained(adapter, cache=True)
    before = answer(lm)
    layer = lm.model.model.layers[0].mlp
    with torch.no_grad():
        layer.down_proj.weight.mul_(-2)
    negative = answer(lm)
    assert negative != before
    other = torch.nn.Linear(64, 48, bias=False)
    other.weight.data = layer.down_proj.weight.data / -2
    layer.down_proj = other
    assert answer(lm) == before


def test_a_warning_names_another_model(base: Path, adapter: Path, tmp_path: Path) -> None:
    made = Made(model={"name": "other", "fingerprint": "0" * 64}).model_dump_json()
    folder = changed(adapter, tmp_path, FILE, made)
    with pytest.warns(UserWarning, match="The adapter was made for 'other'"):
        WindowedLM.from_pretrained(folder)


def test_what_can_not_be_used_is_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(adapter, plain)
    (plain / FILE).unlink()
    with pytest.raises(ModelLoadError, match="holds no adapter for windows"):
        WindowedLM.from_pretrained(base, window_adapter=plain)
    larger = small.build(hidden_size=64, intermediate_size=96)
    with pytest.raises(ModelLoadError, match="can't be used with this model"):
        WindowedLM(larger, small.tokenizer(), window_adapter=adapter)
    with pytest.raises(ModelLoadError, match="other layers"):
        WindowedLM(small.build(num_hidden_layers=1), small.tokenizer(), window_adapter=adapter)
    with pytest.raises(UnsupportedModelError, match="int8"):
        WindowedLM.from_pretrained(base, window_adapter=adapter, quantization="int8")
    pickled = tmp_path / "pickled"
    shutil.copytree(adapter, pickled)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    with pytest.raises(ModelLoadError, match="has no adapter_model"):
        WindowedLM.from_pretrained(pickled)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": 2}',
        '{"method": "unheard"}',
        '{"tokens": "all"}',
    ],
)
def test_a_damaged_file_is_refused(adapter: Path, tmp_path: Path, text: str) -> None:
    with pytest.raises(ModelLoadError):
        WindowedLM.from_pretrained(changed(adapter, tmp_path, FILE, text))


@pytest.mark.parametrize("text", ["", "[]", json.dumps({"peft_type": "LORA"})])
def test_a_damaged_configuration_is_refused(adapter: Path, tmp_path: Path, text: str) -> None:
    with pytest.raises(ModelLoadError):
        WindowedLM.from_pretrained(changed(adapter, tmp_path, "adapter_config.json", text))


def test_the_hub_is_not_asked_for_what_is_here(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever called a model there as the shipped one would be read in its place."""
    asked: list[str] = []

    def look(source: str, name: str, **_: Any) -> None:
        asked.append(source)

    monkeypatch.setattr(window_adapter, "cached_file", look)
    (file := tmp_path / "model.gguf").write_bytes(b"")
    assert WindowedLM.from_pretrained("tiny-reader").generate("?", max_new_tokens=1).token_ids
    assert window_adapter.WindowAdapter.find("tiny-reader") is None
    assert window_adapter.WindowAdapter.find(file) is None
    assert not asked
    assert window_adapter.WindowAdapter.find(base) is None
    assert {*asked} == {str(base)}


def test_a_model_that_reads_in_rows_has_none(adapter: Path) -> None:
    model = small_states.build()
    with pytest.raises(UnsupportedModelError, match="in a row of its own"):
        WindowedLM(model, small.tokenizer(), window_adapter=adapter)


def test_it_names_the_extra_that_it_needs(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "installed", lambda package: package != "peft")
    with pytest.raises(MissingExtraError, match="peft"):
        WindowedLM.from_pretrained(adapter)


def test_its_files_count_among_those_of_the_model(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else weights of one adapter that share a fast checksum with another's would pass for them."""
    other = tmp_path / "other"
    shutil.copytree(adapter, other)
    weights = load_file(other / "adapter_model.safetensors")
    save_file({name: -one for name, one in weights.items()}, other / "adapter_model.safetensors")
    same = types.SimpleNamespace(update=lambda data: None, digest=lambda: bytes(16))
    alike = types.SimpleNamespace(xxh3_128=lambda data: same)
    monkeypatch.setattr(fingerprint, "xxhash", alike)

    def prints(source: Path) -> tuple[str, str]:
        cache = PassageCache(path=tmp_path / "cache", disk="1GiB", salt="secret")
        with contextlib.closing(cache):
            return WindowedLM.from_pretrained(source, cache=cache).fingerprints()

    assert prints(adapter) == prints(adapter)
    assert prints(adapter) != prints(other)


def test_gradients_through_windows_are_those_of_transformers(base: Path) -> None:
    """A kernel that gives none of its log-sum-exps would lose how windows compete."""
    reader = LlamaForCausalLM.from_pretrained(base).eval().requires_grad_(False)
    writers = [LlamaForCausalLM.from_pretrained(base).eval() for _ in range(2)]
    lm, other = (WindowedLM(one, small.tokenizer(), method="pcw") for one in (reader, writers[0]))
    parts = lm.engine.text.prompt.build(QUESTION, PASSAGES, prefix=PREFIX)
    windows, start = [window.ids for window in parts.windows], len(parts.prefix_ids)
    context = lm.engine.encoder.encode_ids(parts.prefix_ids, windows, lm.method)
    with torch.no_grad():
        [head] = lm.engine.plain_encoder.run([parts.prefix_ids], [0], None)
    made = other.engine.plain_encoder.run(windows, [start] * 3, head, gradients=True)
    asked = torch.tensor([parts.query_ids])
    found = lm.engine.decoder.forward(context.narrowed(made, range(3)), asked, gradients=True)
    found.square().sum().backward()
    of_transformers(reader, writers[1], lm).square().sum().backward()
    pairs = zip(writers[0].named_parameters(), writers[1].parameters(), strict=True)
    compared = 0
    for (name, own), one in pairs:
        if one.grad is not None and one.grad.abs().max() > 0:
            assert own.grad is not None, name
            assert torch.allclose(
                own.grad, one.grad, rtol=1e-3, atol=1e-3 * float(one.grad.abs().max())
            ), name
            compared += 1
    assert compared > 9
