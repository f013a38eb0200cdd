"""What this project's own engine answers: run in its environment, read in vLLM's.

vLLM pins another version of transformers, so the two never share a process.
``python -m tests.vllm.engine_answers FOLDER`` writes models, ``answers.json`` and entries.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import rag_windows
from rag_windows import APE, PCW, PassageCache, WindowedLM
from tests.rag_windows import small
from tests.vllm.cases import CASES, MODELS, NEW_TOKENS, Case

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def write_model(name: str, folder: Path) -> None:
    """Write a model's folder."""
    if name == "tiny-reader":
        shutil.copytree(Path(rag_windows.__file__).parent / "models" / name, folder)
        return
    torch.manual_seed(0)
    if name == "qwen2":
        made: Any = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
        for parameter_name, parameter in made.named_parameters():
            if parameter_name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)
    elif name == "qwen3":
        made = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    else:
        rope = {"rope_parameters": LLAMA3} if name == "llama3-rope" else {}
        made = LlamaForCausalLM(LlamaConfig(**SHAPE, **rope))
    made.eval().save_pretrained(folder)
    small.tokenizer(SHAPE["vocab_size"]).save_pretrained(folder)


def answers(lm: WindowedLM, case: Case) -> dict[str, Any]:
    """Log-probabilities of the first token, and the first tokens greedily."""
    method = PCW() if case.temperature == 1 else APE(temperature=case.temperature, scale=1.0)
    context = lm.encode_ids(case.prefix, case.windows, method=method)
    logits = lm.logits(context, case.query)[-1].float()
    ids = lm.generate_ids(context, case.query, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
    return {"logprobs": logits.log_softmax(-1).tolist(), "ids": ids}


def main(folder: Path) -> None:
    """Write everything into a folder."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in MODELS:
        write_model(name, folder / name)
        for dtype in ("float32", "bfloat16"):
            with PassageCache(path=folder / "entries" / dtype) as cache:
                lm = WindowedLM.from_pretrained(folder / name, dtype=dtype, cache=cache)
                told = {case.name: answers(lm, case) for case in CASES}
                identity = lm.fingerprints()
            found[f"{name} {dtype}"] = {"answers": told, "identity": identity}
    (folder / "answers.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
