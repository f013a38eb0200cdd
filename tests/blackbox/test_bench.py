"""`rag-windows bench` on its smallest shape."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.blackbox.conftest import Run
from tests.rag_windows import small

SMALL = (
    *("--shape", "tiny", "--context", "64", "--window", "16", "--dtype", "float32"),
    *("--rounds", "1", "--new-tokens", "2", "--no-memory"),
)
COLD = ("--way", "windows, cold")


def test_a_run_prints_its_tables_and_writes_them(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run(
        *("bench", *SMALL, "--new-tokens", "5", "--rounds", "2"),
        *("--against", "pcw", "--questions", "2", "--out", out),
    )
    assert done.exit_code == 0, done.stderr
    for words in (
        "### 64 tokens, windows of 16",
        "read by ape (temperature 0.9, scale 0.9, form as used)",
        "| end of 5 tokens | sooner |",
        "| windows, from disk |",
        "| windows, from memory, pcw |",
        "2 rounds.",
        "| 2 | one by one |",
        "| 2 | together |",
    ):
        assert words in done.stdout
    assert (out / "performance.md").read_text(encoding="utf-8") in done.stdout
    found = json.loads((out / "performance.json").read_text(encoding="utf-8"))
    assert set(found) == {
        *("format", "shape", "dtype", "machine", "floor", "method", "context", "window", "tokens"),
        *("cells", "crowds", "command"),
    }
    versions = found["machine"]["versions"]
    assert set(versions) == {"python", "torch", "transformers", "rag-windows", "C kernel"}
    assert f"C kernel {versions['C kernel']}" in done.stdout
    for cell in found["cells"]:
        timed = ("prefill_s", "first_s", "tokens_per_s", "end_s")
        assert set(cell) == {
            *("way", "decode_floor_s", "peak_bytes", "kv_bytes", "weight_bytes", *timed)
        }
        assert all(len(cell[name]) == 2 and min(cell[name]) > 0 for name in timed)
    assert [len(crowd["seconds"]) for crowd in found["crowds"]] == [2, 2]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process's peak")
def test_peak_memory_is_that_of_a_process_of_its_own(run: Run, tmp_path: Path) -> None:
    long = ["4096" if arg == "64" else arg for arg in SMALL[:-1]]
    done = run("bench", *long, *COLD, "--out", tmp_path)
    assert "peak beside the weights" in done.stdout
    (cell,) = json.loads((tmp_path / "performance.json").read_text(encoding="utf-8"))["cells"]
    assert cell["kv_bytes"] == 4160 * 2 * 2 * 2 * 32 * 4
    assert cell["kv_bytes"] < cell["peak_bytes"] < cell["kv_bytes"] + 400 * 2**20


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--shape", "huge"), "is not one of"),
        (("--way", "windows"), "--way 'windows' is unknown"),
        (("--context", "100", "--window", "33"), "take multiples"),
        (("--method", "none"), "none"),
        (("--against", "none"), "none"),
        (("--device", "cuda"), "no CUDA device"),
    ],
)
def test_bad_options_are_one_line_before_any_work(
    run: Run, arguments: tuple[str, ...], told: str
) -> None:
    done = run("bench", *arguments)
    assert done.exit_code == 2
    assert told in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


# One model is nearly all keys and values, the other nearly all weights, so that ratios don't hang
# on what Python costs on a machine.
SIZES = {
    "many keys": {
        **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2},
        **{"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 96},
    },
    "heavy": {
        **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 3},
        **{"num_attention_heads": 12, "num_key_value_heads": 4},
    },
}
WARM = ("--way", "windows, from memory")


@pytest.mark.timing
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ("many keys", ("--context", "3072", "--window", "128", "--way", "transformers")),
        ("heavy", ("--context", "256", "--window", "64", "--questions", "8")),
    ],
)
def test_windows_stay_fast(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: str, options: tuple[str, ...]
) -> None:
    """A guard against slowing down: ratios in one run, the quickest round of each, wide margins.

    One thread computes, and its processor time counts: other work on the machine hardly changes
    that. On 2 cores with two busy loops beside it, a step is about 4 times as fast as plain
    generate's, which copies the context, and 8 questions together 2.3 to 2.8 times as one by one.
    """
    monkeypatch.setattr(time, "perf_counter", time.process_time)
    torch.manual_seed(0)
    special = {"eos_token_id": None, "pad_token_id": 0, "max_position_embeddings": 8192}
    config = LlamaConfig(vocab_size=1000, **special, **SIZES[sizes])
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    small.tokenizer().save_pretrained(tmp_path / "model")
    threads = torch.get_num_threads()
    done = run(
        *("bench", "--model", tmp_path / "model", "--dtype", "float32", "--new-tokens", "12"),
        *("--rounds", "2", "--threads", "1", "--no-memory", "--out", tmp_path, *WARM, *options),
    )
    torch.set_num_threads(threads)
    assert done.exit_code == 0, done.stderr
    found = json.loads((tmp_path / "performance.json").read_text())
    print(done.stdout)
    if found["crowds"]:
        alone, together = (min(crowd["seconds"]) for crowd in found["crowds"])
        assert alone > 1.5 * together
    else:
        plain, warm = found["cells"]
        assert min(plain["first_s"]) > 4 * min(warm["first_s"])
        assert max(warm["tokens_per_s"]) > 1.4 * max(plain["tokens_per_s"])
