"""`rag-windows bench` on its smallest shape."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.blackbox.conftest import ROOT, Run
from tests.rag_windows import small

SMALL = (
    *("--shape", "tiny", "--context", "64", "--window", "16", "--dtype", "float32"),
    *("--rounds", "1", "--new-tokens", "2", "--no-memory"),
)
COLD = ("--way", "windows, cold")
PARTIAL = "performance.partial.json"


def test_a_run_prints_its_table_and_writes_it(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("bench", *SMALL, "--way", "transformers", *COLD, "--out", out)
    assert done.exit_code == 0, done.stderr
    assert "### 64 tokens, windows of 16" in done.stdout
    assert "read by ape (temperature 0.9, scale 0.9, form as used)" in done.stdout
    assert "windows, from disk" not in done.stdout
    assert (out / "performance.md").read_text(encoding="utf-8") in done.stdout
    assert (out / "performance.png").stat().st_size > 5000
    assert not (out / PARTIAL).exists()
    found = json.loads((out / "performance.json").read_text(encoding="utf-8"))
    assert set(found) == {
        *("format", "shape", "dtype", "machine", "floor", "method", "parts", "command", "goes")
    }
    versions = found["machine"]["versions"]
    assert set(versions) == {"python", "torch", "transformers", "rag-windows", "C kernel"}
    assert f"C kernel {versions['C kernel']}" in done.stdout
    (part,) = found["parts"]
    assert set(part["cells"][0]) == {
        *("context", "window", "ragged", "way", "prefill_s", "first_s", "tokens", "tokens_per_s"),
        *("end_s", "prefill_floor_s", "decode_floor_s", "peak_bytes", "kv_bytes", "weight_bytes"),
    }
    again = run("bench", *SMALL, *COLD, "--compare", out / "performance.json")
    assert "### What moved" in again.stdout


def test_every_measurement_has_its_table(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # The profiler takes a second for a round of full length; that there is a row takes none.
    monkeypatch.setattr("rag_windows.benchmark.run._PROFILED_TOKENS", 3)
    monkeypatch.setattr("rag_windows.benchmark.run._PROFILED_ROUNDS", 1)
    done = run(
        *("bench", *SMALL, "--context", "128", "--new-tokens", "5", "--rounds", "2", "--ragged"),
        *("--against", "pcw", "--profile", "--dear-above", "64", "--dear-tokens", "3"),
        *("--questions", "2", "--question-context", "32", "--way", "transformers", *COLD),
    )
    assert done.exit_code == 0, done.stderr
    for words in (
        "end of 2 tokens",
        "end of 5 tokens",
        "### 128 tokens, ragged windows, about 16",
        "transformers: 1 of 2 rounds, 3 of 5 new tokens.",
        "| method | first token | a further token | more than pcw |",
        "| linear layers | attention over windows | over prefix, question and answer |",
        "### Growth",
        "| 2 (64 to 128) |",
        "| 2 | 32 | one by one |",
        "| 2 | 32 | together |",
    ):
        assert words in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process's peak")
def test_peak_memory_is_that_of_a_process_of_its_own(run: Run, tmp_path: Path) -> None:
    long = ["4096" if arg == "64" else arg for arg in SMALL[:-1]]
    done = run("bench", *long, *COLD, "--out", tmp_path)
    assert "peak beside the weights" in done.stdout
    parts = json.loads((tmp_path / "performance.json").read_text(encoding="utf-8"))["parts"]
    cell = parts[-1]["cells"][0]
    assert cell["kv_bytes"] == 4160 * 2 * 2 * 2 * 32 * 4
    assert cell["kv_bytes"] < cell["peak_bytes"] < cell["kv_bytes"] + 400 * 2**20


def test_a_trained_model_is_timed_and_its_positions_are_kept(run: Run, small_folder: Path) -> None:
    timed = SMALL[2:]
    done = run("bench", "--model", small_folder, *timed, *COLD)
    assert f"{small_folder}, float32" in done.stdout
    done = run("bench", "--model", small_folder, *timed, "--context", "1024", *COLD)
    assert done.exit_code == 2
    assert "take a shorter --context" in done.stderr


def test_a_killed_run_goes_on_where_it_was(run: Run, tmp_path: Path) -> None:
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "retrievers", "integrations"))
    command = ["bench", *SMALL, "--context", "128", *COLD, "--out", str(tmp_path)]
    code = (
        "import sys\n"
        "from rag_windows.benchmark import run\n"
        "from rag_windows.cli.app import main\n"
        "import time\n"
        "draw = run.load\n"
        "def stuck(vocabulary, place):\n"
        "    return time.sleep(600) if place.context == 128 else draw(vocabulary, place)\n"
        "run.load = stuck\n"
        f"sys.argv = {['rag-windows', *command]!r}\n"
        "main()\n"
    )
    # Threads are part of the machine that a run was made on; conftest.py sets one.
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        partial = tmp_path / PARTIAL
        deadline = time.monotonic() + 90
        while not partial.exists() or len(json.loads(partial.read_text())["parts"]) < 1:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    other = run("bench", *SMALL, *COLD, "--out", tmp_path)
    assert other.exit_code == 2
    assert "an unfinished run with other settings: another plan" in other.stderr
    done = run(*command)
    assert done.exit_code == 0, done.stderr
    assert "Going on with an unfinished run" in done.stderr
    assert "The run took 2 calls" in done.stdout
    assert "### 64 tokens" in done.stdout
    assert "### 128 tokens" in done.stdout


def test_an_unfinished_run_that_cannot_be_read_is_not_overwritten(run: Run, tmp_path: Path) -> None:
    path = tmp_path / PARTIAL
    path.write_text("[]", encoding="utf-8")
    done = run("bench", *SMALL, *COLD, "--out", tmp_path)
    assert done.exit_code == 2
    assert "delete the file" in done.stderr
    assert path.read_text(encoding="utf-8") == "[]"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--shape", "huge"), "choose among"),
        (("--way", "windows"), "--way 'windows' is unknown"),
        (("--context", "100", "--window", "33"), "take multiples"),
        (("--method", "none"), "none"),
        (("--against", "none"), "none"),
        (("--question-context", "300"), "take multiples"),
        (("--device", "cuda"), "no CUDA device"),
        (("--compare", "missing.json"), "missing.json: it can't be read"),
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
    first, *later = json.loads((tmp_path / "performance.json").read_text())["parts"]
    print(done.stdout)
    if later:
        alone, together = (min(crowd["seconds"]) for crowd in later[0]["crowds"])
        assert alone > 1.5 * together
    else:
        plain, warm = first["cells"]
        assert min(plain["first_s"]) > 4 * min(warm["first_s"])
        assert max(warm["tokens_per_s"]) > 1.4 * max(plain["tokens_per_s"])


@pytest.mark.timing
def test_attention_over_many_windows_is_told_apart_from_the_rest(run: Run, tmp_path: Path) -> None:
    plan = ("--shape", "tiny", "--dtype", "float32", "--context", "8192", "--rounds", "1")
    done = run("bench", *plan, *WARM, "--profile", "--no-memory", "--out", tmp_path)
    assert done.exit_code == 0, done.stderr
    ((step,),) = [
        part["steps"] for part in json.loads((tmp_path / "performance.json").read_text())["parts"]
    ]
    assert step["windows"] > step["tail"] > 0
    assert step["linear"] > 0
