"""llama.cpp's own benchmark program, timed on the very weights that are timed here."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from rag_windows.errors import InputError, require
from rag_windows_eval.benchmark.workload import head_dim

FAMILIES = ("llama", "qwen2")
"""Model types that can be written; llama.cpp has the same names."""

_ROPES = ("default", "llama3")
_SHORT = 32
"""Tokens of a prompt that is not counted: with it, llama.cpp loads the weights."""


def split(given: str) -> list[str]:
    """A program, followed by its own options."""
    try:
        words = [given] if Path(given).is_file() else shlex.split(given)
    except ValueError as error:
        raise InputError(
            f"--llama-bench {given!r} can't be read: {error}. Check its quotes."
        ) from error
    if not words:
        raise InputError(
            "--llama-bench names no program. Give the path of llama.cpp's llama-bench."
        )
    return words


def check(programs: Sequence[str], config: PreTrainedConfig, device: str) -> None:
    """Raise an `InputError`, before any work, for what could not be timed."""
    if device != "cpu":
        raise InputError("--llama-bench runs on the CPU only. Leave it or --device out.")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if config.model_type not in FAMILIES or rope not in _ROPES:
        raise InputError(
            f"--llama-bench can time models of {' and '.join(FAMILIES)} with rotary positions of "
            f"{' and '.join(_ROPES)}, not {config.model_type} with {rope}. Leave it out."
        )
    require("--llama-bench", "gguf", extra="gguf")
    for given in programs:
        program = split(given)[0]
        if "--n-depth" not in _output([program, "--help"]):
            raise InputError(
                f"--llama-bench {program} is not llama.cpp's llama-bench, or is too old: it has "
                "no option --n-depth. Build llama.cpp's target llama-bench and name it."
            )


def write_gguf(model: PreTrainedModel, path: Path) -> None:
    """Write a model's weights for llama.cpp, in their own dtype and without a tokenizer.

    Vectors, which llama.cpp wants in fp32, are cast.
    """
    import gguf

    config = model.config.get_text_config(decoder=True)
    family, dim, rope = config.model_type, head_dim(config), config.rope_parameters
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    if rope["rope_type"] != "default":
        plain = rope["rope_theta"] ** (-torch.arange(0, dim, 2).double() / dim)
        divisors = plain / model.model.rotary_emb.inv_freq.double().cpu()
        writer.add_tensor("rope_freqs.weight", divisors.float().numpy())
    types = {torch.float16: "F16", torch.float32: "F32", torch.bfloat16: "BF16"}
    kind = {family: one for one, family in gguf.MODEL_ARCH_NAMES.items()}[family]
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, last = name.rsplit(".", 1)
        tensor = weight if weight.ndim > 1 else weight.float()
        if family == "llama" and (count := heads.get(stem.rpartition(".")[2])):
            # This family keeps the two numbers that are rotated together side by side.
            halves = tensor.unflatten(0, (count, 2, -1))
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(
            f"{names.get_name(stem)}.{last}",
            # NumPy knows no bfloat16, so bytes are handed over.
            tensor.contiguous().view(torch.uint8).numpy(),
            raw_dtype=gguf.GGMLQuantizationType[types[tensor.dtype]],
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@dataclass(frozen=True, slots=True)
class LlamaBench:
    """One such program with options of its own, and the weights that it reads."""

    command: list[str]
    weights: Path
    threads: int

    def seconds(self, prompt: int, tokens: int) -> tuple[float, float]:
        """Seconds of reading a prompt, and of each of so many tokens generated after it."""
        whole = self._ask("-p", f"{_SHORT},{prompt}", "-n", "0")
        behind = self._ask("-p", "0", "-n", str(tokens), "-d", str(prompt))
        read = next(one for one in reversed(whole) if one["n_prompt"] == prompt)
        return read["samples_ns"][0] / 1e9, behind[-1]["samples_ns"][0] / 1e9 / tokens

    def about(self) -> dict[str, Any]:
        """The program's report of its build and options."""
        names = ("build_commit", "build_number", "backends", "n_threads", "type_k", "flash_attn")
        (said,) = self._ask("-p", "1", "-n", "0")
        return {name: said[name] for name in names if name in said}

    def _ask(self, *options: str) -> list[dict[str, Any]]:
        fixed = ["-m", str(self.weights), "-t", str(self.threads), "-ngl", "0", "-r", "1"]
        output = _output([*self.command, *fixed, "--no-warmup", "-o", "json", *options])
        try:
            found: list[dict[str, Any]] = json.loads(output)
            if all(one["samples_ns"] and one["n_prompt"] >= 0 for one in found) and found:
                return found
        except (ValueError, TypeError, KeyError):
            pass
        raise InputError(
            f"--llama-bench {self.command[0]} did not print times in JSON as llama.cpp's "
            f"llama-bench does. It printed {output[:200]!r}."
        )


def _output(command: list[str]) -> str:
    """What a program prints.

    Raises:
        InputError: it can't be run, or fails; with the end of what it wrote on stderr.
    """
    program = command[0]
    try:
        # The user names the program; no shell reads what it is given.
        done = subprocess.run(  # noqa: S603 - see above
            command, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise InputError(
            f"--llama-bench {program} can't be run ({error.strerror}). Name the program "
            "llama-bench that was built from llama.cpp."
        ) from error
    if done.returncode != 0:
        last = " | ".join(done.stderr.strip().splitlines()[-5:]) or "nothing on stderr"
        raise InputError(f"--llama-bench {program} failed with exit code {done.returncode}: {last}")
    return done.stdout
