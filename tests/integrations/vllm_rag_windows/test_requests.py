"""What requests say of their windows, what is refused, and entries in a passage cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rag_windows import (
    APE,
    PCW,
    CacheError,
    InputError,
    MethodError,
    Passage,
    PassageCache,
    UnsupportedModelError,
)
from rag_windows.interchange import Prompt
from tests.rag_windows import small
from vllm_rag_windows import WindowedPrompt, WindowPrompts
from vllm_rag_windows.entries import Entries, EntryOptions, files_fingerprint
from vllm_rag_windows.prompts import SentWindows, checked
from vllm_rag_windows.support import check_engine, check_model

IDS = tuple(range(100, 120))


def test_a_prompt_is_cut_where_its_params_say() -> None:
    prompt = WindowedPrompt.of({"prefix": 2, "windows": [5, 3], "temperature": 0.9}, IDS)
    assert prompt == WindowedPrompt(IDS[:2], (IDS[2:7], IDS[7:10]), IDS[10:], 0.9)
    assert (prompt.read_tokens, prompt.rotation, prompt.encodes) == (10, 3, False)
    encoding = WindowedPrompt.of({"prefix": 2, "encode": True}, IDS)
    assert encoding == WindowedPrompt(IDS[:2], (IDS[2:],))
    assert encoding.encodes
    for one in (prompt, encoding, *prompt.encodings):
        assert WindowedPrompt.of(one.params, one.ids) == one
    assert WindowedPrompt.of(None, IDS) is None


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"windows": []}, "windows"),
        ({"windows": [0]}, "windows"),
        ({"windows": [5, "3"]}, "windows"),
        ({"windows": [20]}, "query"),
        ({"prefix": 19, "windows": [1]}, "query"),
        ({"prefix": -1, "windows": [1]}, "prefix"),
        ({"prefix": 2}, "windows"),
        ({"prefix": 20, "encode": True}, "behind the prefix"),
        ({"prefix": 2, "windows": [2], "encode": True}, "behind the prefix"),
        ({"windows": [1], "temperature": 0.0}, "temperature"),
        ({"windows": [1], "temperature": float("nan")}, "temperature"),
        ({"windows": [1], "method": "ape"}, "method"),
    ],
)
def test_params_that_make_no_sense_are_refused(params: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        WindowedPrompt.of(params, IDS)


def test_requests_hold_the_engine_s_own_prompt() -> None:
    two = {"text": "Two is black.", "title": "Two"}
    documents: list[Any] = ["One is white.", two, "One is white.", " "]
    made = WindowPrompts(small.tokenizer(), method="ape:temperature=0.8,scale=1").build(
        "What is white?", documents
    )
    passages = [Passage("One is white."), Passage("Two is black.", title="Two")]
    parts = Prompt(small.tokenizer()).build("What is white?", passages)
    windows = [window.ids for window in parts.windows]
    prefix = len(parts.prefix_ids)
    assert made.params == {
        "prefix": prefix,
        "windows": [len(ids) for ids in windows],
        "temperature": 0.8,
    }
    flat = tuple(token for ids in windows for token in ids)
    assert made.ids == (*parts.prefix_ids, *flat, *parts.query_ids)
    assert [one.ids for one in made.encodings] == [(*parts.prefix_ids, *ids) for ids in windows]
    bare = WindowPrompts(small.tokenizer()).build("What is white?", [])
    assert (bare.encodings, bare.params) == ((), None)


@pytest.mark.parametrize(
    "method",
    [
        *("ape", "structured-prompting", "mateicl", "ensemble", "sequential", "sink"),
        *("linked+pcw", "deep-thinking+pcw"),
    ],
)
def test_methods_that_are_more_than_a_temperature_are_refused(method: str) -> None:
    with pytest.raises(MethodError, match="vLLM"):
        WindowPrompts(small.tokenizer(), method=method)
    with pytest.raises(MethodError, match="vLLM"):
        WindowPrompts(small.tokenizer()).build("What is white?", [], method)


def test_methods_that_are_a_temperature() -> None:
    for method in (PCW(), "pcw", APE(temperature=0.9, scale=1.0), APE(1.0, 1.0, "as printed")):
        WindowPrompts(small.tokenizer(), method=method)


def test_encoding_requests_are_sent_once_unless_they_are_needed_again() -> None:
    asked = WindowedPrompt((1,), ((2, 3), (4,), (2, 3)), (5,))
    one, two = WindowedPrompt((1,), ((2, 3),)), WindowedPrompt((1,), ((4,),))
    encoded = SentWindows()
    assert encoded.missing([asked, asked]) == [one, two]
    encoded.note(one)
    assert encoded.missing([asked]) == [two]
    # The same tokens behind another prefix are another window.
    assert encoded.missing([WindowedPrompt((), ((1, 2, 3),), (5,))])
    encoded.forget(asked)
    assert encoded.missing([asked]) == [one, two]


def computed(tokens: int) -> list[torch.Tensor]:
    return [torch.randn(2, 2, tokens, 8) for _ in range(3)]


def test_entries_come_back_and_what_is_missing_is_named(tmp_path: Path) -> None:
    model = bytes(32)
    options = EntryOptions.model_validate({"memory": "4MiB", "path": str(tmp_path)})
    encode = WindowedPrompt.of({"prefix": 2, "encode": True}, IDS[:7])
    read = WindowedPrompt.of({"prefix": 2, "windows": [5, 3]}, IDS)
    assert encode is not None
    assert read is not None
    layers = computed(7)
    entries = Entries(options, model)
    entries.keep(encode, layers)
    with pytest.raises(CacheError, match="window 1"):
        entries.find(read)
    behind = WindowedPrompt.of({"prefix": 2, "encode": True}, (*IDS[:2], *IDS[7:10]))
    assert behind is not None
    entries.keep(behind, computed(5))
    entries.cache.close()
    again = Entries(EntryOptions.model_validate({"memory": None, "path": str(tmp_path)}), model)
    prefix, first, second = again.find(read)
    assert [prefix.start, first.start, second.start] == [0, 2, 2]
    for layer in range(3):
        torch.testing.assert_close(prefix.keys[layer], layers[layer][0, :, :2], atol=0, rtol=0)
        torch.testing.assert_close(first.values[layer], layers[layer][1, :, 2:], atol=0, rtol=0)
    with pytest.raises(CacheError, match="Not encoded"):
        Entries(
            EntryOptions.model_validate({"memory": None, "path": str(tmp_path)}), b"1" * 32
        ).find(read)
    again.cache.close()


def test_entries_of_the_engine_are_found_by_its_fingerprints(tmp_path: Path) -> None:
    with PassageCache(path=tmp_path) as cache:
        lm = small.wrapped(cache=cache)
        lm.warm(["One is white.", "Two is black."])
        model, tokenizer = lm.fingerprints()
    given = {"memory": None, "path": str(tmp_path), "tokenizer_fingerprint": tokenizer}
    asked = WindowPrompts(lm.tokenizer).build("What is white?", ["Two is black.", "One is white."])
    entries = Entries(EntryOptions.model_validate(given), bytes.fromhex(model))
    assert [len(one.ids) for one in entries.find(asked)] == [
        len(ids) for ids in (asked.prefix, *asked.windows)
    ]
    other = Entries(EntryOptions.model_validate({"path": str(tmp_path)}), bytes.fromhex(model))
    with pytest.raises(CacheError, match="Not encoded"):
        other.find(asked)
    with pytest.raises(InputError, match="not cached"):
        lm.with_cache(None).fingerprints()


def test_what_was_encoded_last_is_found_though_the_cache_has_no_room() -> None:
    # 7 tokens are 2,688 bytes here.
    entries = Entries(EntryOptions.model_validate({"memory": 1, "recent": 6000}), bytes(32))
    asked = []
    for number in range(3):
        ids = tuple(range(number * 50, number * 50 + 8))
        encode = WindowedPrompt.of({"prefix": 1, "encode": True}, (1, *ids[:6]))
        read = WindowedPrompt.of({"prefix": 1, "windows": [6]}, (1, *ids))
        assert encode is not None
        assert read is not None
        asked.append(read)
        entries.keep(encode, computed(7))
        assert len(entries.find(read)) == 2
    assert entries.find(asked[1])
    with pytest.raises(CacheError, match="window 0"):
        entries.find(asked[0])


def test_a_salt_keeps_entries_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = EntryOptions.model_validate({"memory": None, "path": str(tmp_path)})
    encode = WindowedPrompt.of({"encode": True}, IDS)
    assert encode is not None
    read = WindowedPrompt(encode.prefix, encode.windows, (1,))
    monkeypatch.setenv("RAG_WINDOWS_SALT", "one tenant")
    with_salt = Entries(options, bytes(32))
    with_salt.keep(encode, computed(len(IDS)))
    with_salt.cache.flush()
    assert with_salt.find(read)
    monkeypatch.delenv("RAG_WINDOWS_SALT")
    with pytest.raises(CacheError, match="Not encoded"):
        Entries(options, bytes(32)).find(read)
    with_salt.cache.close()


def test_keys_that_are_no_numbers_are_not_kept() -> None:
    encode = WindowedPrompt.of({"encode": True}, IDS)
    assert encode is not None
    bad = computed(len(IDS))
    bad[1][0, 0, 3] = torch.nan
    entries = Entries(EntryOptions.model_validate({"memory": "4MiB"}), bytes(32))
    with pytest.raises(CacheError, match="NaN"):
        entries.keep(encode, bad)


def test_options_that_are_none_are_refused() -> None:
    for given in ({"salt": "secret"}, {"model_fingerprint": "short"}, {"memory": 1.5}):
        with pytest.raises(InputError, match=next(iter(given))):
            checked(EntryOptions, given, "kv_connector_extra_config")


def test_fingerprints_follow_the_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no weights"):
        files_fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"one")
    one = files_fingerprint(tmp_path, "float32")
    assert one == files_fingerprint(tmp_path, "float32") != files_fingerprint(tmp_path, "bfloat16")
    (tmp_path / "model.safetensors").write_bytes(b"two")
    assert one != files_fingerprint(tmp_path, "float32")


def text(**changes: Any) -> SimpleNamespace:
    rope = {"rope_type": "default", "rope_theta": 1e4}
    plain = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "rope_parameters": rope,
    }
    return SimpleNamespace(**{**plain, **changes})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "gemma2"}, "gemma2"),
        ({"sliding_window": 4096}, "sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"attn_logit_softcapping": 50.0}, "caps"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "dynamic"),
    ],
)
def test_models_that_can_t_be_served_are_refused_by_name(
    changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=told):
        check_model(text(**changes))


def configured(**changes: Any) -> SimpleNamespace:
    plain = {
        "parallel_config": SimpleNamespace(tensor_parallel_size=1),
        "kv_transfer_config": SimpleNamespace(kv_role="kv_both", kv_load_failure_policy="fail"),
        "speculative_config": None,
        "lora_config": None,
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "model_config": SimpleNamespace(
            dtype=torch.bfloat16,
            hf_text_config=text(),
            is_hybrid=False,
            is_multimodal_model=False,
        ),
    }
    return SimpleNamespace(**{**plain, **changes})


def test_ordinary_models_are_served() -> None:
    check_engine(configured())
    for changes in ({"model_type": "qwen2", "sliding_window": 99, "use_sliding_window": False},):
        check_model(text(**changes))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"parallel_config": SimpleNamespace(tensor_parallel_size=2)}, "tensor-parallel-size=1"),
        ({"parallel_config": SimpleNamespace(data_parallel_size=2)}, "data-parallel-size=1"),
        ({"speculative_config": object()}, "speculative"),
        ({"lora_config": object()}, "LoRA"),
        ({"cache_config": SimpleNamespace(cache_dtype="fp8")}, "fp8"),
        (
            {"kv_transfer_config": SimpleNamespace(kv_role="kv_consumer")},
            "kv_both",
        ),
    ],
)
def test_settings_that_can_t_be_served_are_refused_by_name(
    changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(InputError, match=told):
        check_engine(configured(**changes))


@pytest.mark.slow
def test_what_vllm_imports_needs_no_transformers_of_ours() -> None:
    code = (
        "import sys, vllm_rag_windows, vllm_rag_windows.entries, vllm_rag_windows.paged\n"
        "import vllm_rag_windows.support\n"
        "print([name for name in sys.modules if name.partition('.')[0] == 'transformers'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=paths()
    )
    assert done.stdout.strip() == "[]"


def paths() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
