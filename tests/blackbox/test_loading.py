"""How models are found, loaded and placed, and what is said when they can't be."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import GPT2Config, GPT2Model, T5Config, T5ForConditionalGeneration

from langchain_rag_windows import ChatRagWindows
from llama_index.llms.rag_windows import RagWindowsLLM
from rag_windows import (
    InputError,
    MissingExtraError,
    ModelLoadError,
    PassageCache,
    UnsupportedModelError,
    WindowedLM,
)
from tests.blackbox.conftest import Process, Run
from tests.rag_windows import small


class Loading(Exception):
    """Stops a load when it comes to the weights, and says with which options."""


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options that transformers is asked to load weights with; nothing is loaded."""
    seen: list[dict[str, Any]] = []

    def record(name: str, **kwargs: Any) -> None:
        seen.append(kwargs)
        raise OSError("no weights in this test")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", record)
    return seen


def devices(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """A machine with so many CUDA devices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def ways(folder: Path, run: Run, **given: Any) -> dict[str, Callable[[], object]]:
    """Each way to load a model, by its name."""
    device = ["--device", str(given["device_map"])] if given else []
    return {
        "python": lambda: WindowedLM.from_pretrained(folder, **given),
        "langchain": lambda: ChatRagWindows(model=str(folder), **given).invoke("Who?"),
        "llama-index": lambda: RagWindowsLLM(str(folder), **given).complete("Who?"),
        "command": lambda: run("ask", "Who?", "--model", folder, "--no-cache", *device),
    }


WAYS = ("python", "langchain", "llama-index", "command")


@pytest.mark.parametrize(
    ("way", "count", "named", "place"),
    [
        ("python", 0, None, None),
        ("python", 1, None, "cuda"),
        ("python", 2, None, "auto"),
        ("python", 2, "cpu", "cpu"),
        *((way, 2, "cuda:1", "cuda:1") for way in WAYS),
    ],
)
def test_the_best_device_is_taken_or_the_one_that_is_named(
    way: str,
    count: int,
    named: str | None,
    place: str | None,
    small_folder: Path,
    run: Run,
    options: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices(monkeypatch, count)
    given = {} if named is None else {"device_map": named}
    with contextlib.suppress(ModelLoadError):
        ways(small_folder, run, **given)[way]()
    assert [asked.get("device_map") for asked in options] == [place]


@pytest.mark.parametrize("way", WAYS)
def test_a_device_that_is_not_there_is_one_clear_line(
    way: str, small_folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices(monkeypatch, 0)
    work = ways(small_folder, run, device_map="cuda:1")[way]
    if way == "command":
        result: Any = work()
        assert result.exit_code == 2
        told = result.stderr
    else:
        with pytest.raises(InputError) as caught:
            work()
        told = str(caught.value)
    assert "no CUDA device" in told
    assert "cuda:1" in told
    assert "cpu" in told
    assert len(told.strip().splitlines()) <= 2


def test_a_dtype(small_folder: Path) -> None:
    lm = WindowedLM.from_pretrained(str(small_folder), dtype="bfloat16")
    assert lm.model.dtype == torch.bfloat16
    logits = lm.logits(lm.encode_ids([5, 6], [[7, 8, 9], [10]]), [11, 12])
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()


def test_a_model_dispatched_with_offloaded_layers(small_folder: Path, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = type(small.model()).from_pretrained(small_folder).eval()
    accelerate.cpu_offload(model, execution_device="cpu")
    lm = WindowedLM.from_pretrained(model, tokenizer=small.tokenizer())
    expected = small.lm().generate("What?", ["One.", "Two."], max_new_tokens=5).token_ids
    assert lm.generate("What?", ["One.", "Two."], max_new_tokens=5).token_ids == expected


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("./nowhere", {}, "model folder './nowhere' does not exist"),
        ("someone/unknown-model", {}, "can't be reached or does not know it"),
        ("tiny-reader", {"trust_remote_code": True}, "is refused"),
        ("{empty}", {}, "holds no config.json"),
        ("{folder}", {"dtype": "float7"}, "dtype='float7' is unknown"),
    ],
)
def test_what_cannot_be_loaded_says_why(
    name: str, options: dict[str, Any], message: str, small_folder: Path, tmp_path: Path
) -> None:
    name = name.format(folder=small_folder, empty=tmp_path)
    with pytest.raises(ModelLoadError, match=message):
        WindowedLM.from_pretrained(name, **options)


def test_pickled_weights_are_never_loaded(small_folder: Path, tmp_path: Path) -> None:
    small.tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((small_folder / "config.json").read_text())
    torch.save(small.model().state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="Pickled weights are never loaded"):
        WindowedLM.from_pretrained(tmp_path)


def test_a_broken_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-type"}))
    with pytest.raises(ModelLoadError, match="can't be loaded"):
        WindowedLM.from_pretrained(tmp_path)


def test_what_is_no_model_and_options_that_do_not_apply_are_refused() -> None:
    with pytest.raises(InputError, match="not Linear"):
        WindowedLM.from_pretrained(torch.nn.Linear(2, 2))
    with pytest.raises(InputError, match="loaded already"):
        WindowedLM.from_pretrained(small.model(), dtype="bfloat16")


def test_a_model_of_another_kind(tmp_path: Path) -> None:
    T5Config(vocab_size=50, d_model=16).save_pretrained(tmp_path)
    small.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="is not a causal language model"):
        WindowedLM.from_pretrained(tmp_path)


def test_models_that_cannot_read_windows_are_refused_by_name() -> None:
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )
    with pytest.raises(UnsupportedModelError, match=r"'t5'.*encoder-decoder"):
        WindowedLM.from_pretrained(t5)
    headless = GPT2Model(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(UnsupportedModelError, match=r"'gpt2'.*no language-model head"):
        WindowedLM.from_pretrained(headless)


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """As if a package were not installed."""
    found = importlib.util.find_spec

    def find_spec(name: str, *rest: Any) -> Any:
        return None if name.partition(".")[0] == package else found(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


@pytest.mark.parametrize("place", ["auto", {"": "cpu"}])
def test_spreading_a_model_names_the_extra_that_it_needs(
    place: Any, small_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "accelerate")
    with pytest.raises(MissingExtraError, match=r"accelerate.*pip install \"rag-windows\[cuda\]\""):
        WindowedLM.from_pretrained(small_folder, device_map=place)
    lm = WindowedLM.from_pretrained(small_folder, device_map="cpu")
    assert lm.generate("Who?", ["One."], max_new_tokens=2).token_ids


@pytest.mark.parametrize(
    ("asked", "place"), [(None, "cuda"), ("cuda:1", "cuda:1"), (torch.device("cuda"), "cuda")]
)
def test_one_cuda_device_needs_no_extra(
    asked: Any, place: str, small_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "accelerate")
    devices(monkeypatch, 2)
    places: list[str] = []

    def to(self: torch.nn.Module, place: object) -> torch.nn.Module:
        places.append(str(place))
        return self

    monkeypatch.setattr(transformers.PreTrainedModel, "to", to)
    WindowedLM.from_pretrained(small_folder, device_map=asked)
    assert places == [place]


@pytest.mark.parametrize(
    "given",
    [
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}},
    ],
)
def test_quantization_goes_where_transformers_takes_it(
    given: dict[str, Any], small_folder: Path, options: list[dict[str, Any]]
) -> None:
    with pytest.raises(ModelLoadError):
        WindowedLM.from_pretrained(small_folder, **given)
    (asked,) = options
    assert "load_in_4bit" not in asked
    assert asked["quantization_config"]["load_in_4bit"] is True
    assert asked["quantization_config"]["bnb_4bit_quant_type"] == "nf4"


def test_quantization_is_given_once(small_folder: Path) -> None:
    config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(InputError, match="load_in_4bit can't be combined with quantization_config"):
        WindowedLM.from_pretrained(small_folder, load_in_4bit=True, quantization_config=config)


class Gate(BaseHTTPRequestHandler):
    """A model hub that has one gated model."""

    def do_GET(self) -> None:
        if "/api/models/" in self.path:
            body = json.dumps({"id": "someone/gated", "sha": "0" * 40, "siblings": []}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_response(403)
        self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("X-Error-Message", "Access to model someone/gated is restricted.")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815 - http.server's own name

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Gate)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_gated_model_keeps_its_page_and_the_way_in(
    hub: str, python: Process, tmp_path: Path
) -> None:
    done: subprocess.CompletedProcess[str] = python(
        "from rag_windows import WindowedLM, RagWindowsError\n"
        "try:\n"
        "    WindowedLM.from_pretrained('someone/gated')\n"
        "except RagWindowsError as error:\n"
        "    print('told:', error)\n",
        HF_ENDPOINT=hub,
        HF_HUB_OFFLINE="0",
        TRANSFORMERS_OFFLINE="0",
        HF_HOME=str(tmp_path),
        NO_PROXY="127.0.0.1",
        no_proxy="127.0.0.1",
    )
    (told,) = [line for line in done.stdout.splitlines() if line.startswith("told:")]
    assert "gated" in told, done.stdout
    assert "/someone/gated" in told.split("gated:", 1)[-1]
    assert "hf auth login" in told
    assert "token=" in told


peft = pytest.importorskip("peft")


PASSAGES = ["The lake is deep and cold.", "The tower is old."]


def ids(lm: WindowedLM) -> tuple[int, ...]:
    return lm.generate("How deep?", PASSAGES, method="pcw", max_new_tokens=8).token_ids


def logits(lm: WindowedLM) -> torch.Tensor:
    return lm.logits(lm.encode_ids([0, 4], [[80, 81, 82], [90, 91]], method="ape"), [99, 65])


def test_a_folder_of_an_adapter_is_loaded_with_its_base(adapter: Path, small_folder: Path) -> None:
    """Windows see the adapter: they answer as the base with the adapter's weights merged in."""
    lm = WindowedLM.from_pretrained(adapter)
    base = transformers.AutoModelForCausalLM.from_pretrained(small_folder)
    merged = peft.PeftModel.from_pretrained(base, adapter).merge_and_unload().eval()
    expected = WindowedLM.from_pretrained(merged, tokenizer=small.tokenizer())
    assert torch.allclose(logits(lm), logits(expected), atol=1e-4)
    assert ids(lm) == ids(expected)
    plain = WindowedLM.from_pretrained(small_folder)
    assert not torch.allclose(logits(lm), logits(plain), atol=1e-2)


def test_windows_of_an_adapter_are_cached_apart(adapter: Path, small_folder: Path) -> None:
    cache = PassageCache(memory="16MiB")
    plain = WindowedLM.from_pretrained(small_folder, cache=cache)
    adapted = WindowedLM.from_pretrained(adapter, cache=cache)
    again = WindowedLM.from_pretrained(adapter, cache=cache)
    first = plain.generate("How deep?", PASSAGES, max_new_tokens=2)
    other = adapted.generate("How deep?", PASSAGES, max_new_tokens=2)
    found = again.generate("How deep?", PASSAGES, max_new_tokens=2)
    assert (first.usage.cached_tokens, other.usage.cached_tokens) == (0, 0)
    assert found.usage.cached_tokens > 0
    assert found.token_ids == other.token_ids


def test_a_pickled_adapter_is_refused(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    torch.save({}, tmp_path / "adapter_model.bin")
    with pytest.raises(ModelLoadError, match="Pickled weights are never loaded"):
        WindowedLM.from_pretrained(tmp_path)


gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def gguf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the small model as `small.gguf` and nothing else."""
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(folder, small.model())
    return folder


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file whose matrices are stored in 8-bit blocks."""
    folder = tmp_path_factory.mktemp("packed")
    write_gguf(folder, small.build(hidden_size=64), packed=True)
    return folder / "small.gguf"


def write_gguf(folder: Path, model: Any, *, packed: bool = False) -> None:
    """Write `small.gguf`, as llama.cpp's converter does."""
    tokenizer, config = small.tokenizer(), model.config
    writer = gguf.GGUFWriter(folder / "small.gguf", "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in vocabulary])
    special = set(tokenizer.all_special_tokens)
    kinds = [
        gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t, _ in vocabulary
    ]
    writer.add_token_scores([0.0] * len(vocabulary))
    writer.add_token_types(kinds)
    writer.add_token_merges([])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_chat_template(small.TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        stem, kind = name.rsplit(".", 1)
        array = weight.float()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for projection, count in heads.items():
            if projection in stem:
                # llama.cpp keeps the two halves of a rotation beside each other.
                array = array.view(count, 2, -1, array.shape[1]).transpose(1, 2)
                array = array.reshape(weight.shape)
        numbers, q8 = array.contiguous().numpy(), gguf.GGMLQuantizationType.Q8_0
        raw = q8 if packed and numbers.ndim == 2 else None
        stored = numbers if raw is None else gguf.quants.quantize(numbers, raw)
        writer.add_tensor(f"{names.get_name(stem)}.{kind}", stored, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_loaded_by_its_option_or_its_path(
    gguf_folder: Path, small_lm: WindowedLM
) -> None:
    for lm in (
        WindowedLM.from_pretrained(gguf_folder, gguf_file="small.gguf"),
        WindowedLM.from_pretrained(gguf_folder / "small.gguf"),
    ):
        assert torch.allclose(logits(lm), logits(small_lm), atol=1e-3)
        assert lm.generate("How deep?", PASSAGES, max_new_tokens=3).token_ids


def test_the_header_of_a_gguf_file_is_parsed_once(
    gguf_folder: Path, small_lm: WindowedLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[Path] = []
    usual, parse = gguf.GGUFReader, gguf.GGUFReader.__init__

    def counting(self: Any, path: Any, *rest: Any) -> None:
        parsed.append(Path(path))
        parse(self, path, *rest)

    monkeypatch.setattr(gguf.GGUFReader, "__init__", counting)
    with ThreadPoolExecutor(2) as pool:
        loaded = [*pool.map(WindowedLM.from_pretrained, [gguf_folder / "small.gguf"] * 2)]
    # Not again for another load: the file may have changed since.
    assert parsed == [gguf_folder / "small.gguf"] * 2
    assert gguf.GGUFReader is usual
    for lm in loaded:
        assert torch.allclose(logits(lm), logits(small_lm), atol=1e-3)


@pytest.mark.parametrize("way", ["langchain", "llama-index"])
def test_adapters_and_gguf_files_load_in_the_frameworks(
    way: str, gguf_folder: Path, adapter: Path, run: Run
) -> None:
    for path in (gguf_folder / "small.gguf", adapter):
        ways(path, run)[way]()


def test_adapters_and_gguf_files_name_the_extra_that_they_need(
    gguf_folder: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package, path in {"gguf": gguf_folder / "small.gguf", "peft": adapter}.items():
        without(monkeypatch, package)
        remedy = rf"{package}.*install \"rag-windows\[{package}\]\""
        with pytest.raises(MissingExtraError, match=remedy):
            WindowedLM.from_pretrained(path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dequantize_unpacks_the_blocks_of_a_gguf_file(packed: Path, dtype: str) -> None:
    model = WindowedLM.from_pretrained(packed, dequantize=True, dtype=dtype).model
    matrices = [one for one in model.parameters() if one.ndim == 2]
    assert {one.dtype for one in matrices} == {getattr(torch, dtype)}
    expected = small.build(hidden_size=64).model.layers[0].mlp.up_proj.weight
    found = model.model.layers[0].mlp.up_proj.weight.float()
    assert torch.allclose(found, expected, atol=0.02)


def test_dequantize_is_for_gguf_files_that_are_loaded_here(
    packed: Path, tmp_path: Path, small_lm: WindowedLM
) -> None:
    small_lm.model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="blocks of a GGUF file"):
        WindowedLM.from_pretrained(tmp_path, tokenizer=small_lm.tokenizer, dequantize=True)
    with pytest.raises(InputError, match="quantization_config"):
        WindowedLM.from_pretrained(
            packed, dequantize=True, quantization_config={"quant_method": "gguf"}
        )
    with pytest.raises(InputError, match="loaded already"):
        WindowedLM.from_pretrained(small_lm.model, tokenizer=small_lm.tokenizer, dequantize=True)


@pytest.mark.parametrize("form", ["folder", "gguf", "dequantized"])
def test_loading_and_answering_write_nothing(
    form: str, packed: Path, tmp_path: Path, small_lm: WindowedLM, capfd: pytest.CaptureFixture[str]
) -> None:
    small_lm.model.save_pretrained(tmp_path)
    small_lm.tokenizer.save_pretrained(tmp_path)
    capfd.readouterr()
    place = tmp_path if form == "folder" else packed
    lm = WindowedLM.from_pretrained(place, dequantize=form == "dequantized")
    lm.generate("How deep?", PASSAGES, max_new_tokens=2)
    assert capfd.readouterr() == ("", "")


def test_a_folder_of_gguf_files_says_how_to_name_one(gguf_folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="gguf_file="):
        WindowedLM.from_pretrained(gguf_folder)


def test_models_loaded_by_several_threads_are_whole(
    small_folder: Path, small_lm: WindowedLM
) -> None:
    with ThreadPoolExecutor(4) as pool:
        loaded = [
            one.result()
            for one in [pool.submit(WindowedLM.from_pretrained, small_folder) for _ in range(8)]
        ]
    expected = small_lm.generate("What?", ["One."], max_new_tokens=3).token_ids
    for one in loaded:
        assert one.generate("What?", ["One."], max_new_tokens=3).token_ids == expected


def test_a_model_of_the_repository_is_loaded_by_name_from_a_clone_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = "tiny-learner"
    loaded = WindowedLM.from_pretrained(name)
    assert loaded.generate("Who?", ["One."], max_new_tokens=1).token_ids
    monkeypatch.setattr(resources, "files", lambda package: tmp_path / "site-packages" / package)
    with pytest.raises(ModelLoadError, match=rf"not contain.*training/models/{name}") as told:
        WindowedLM.from_pretrained(name)
    assert "https://github.com/rag-windows/rag-windows" in str(told.value)
    assert "\n" not in str(told.value)
