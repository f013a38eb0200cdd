"""Writes a trained reader as shipped: `python -m training.export --run DIR --out FOLDER`.

fp16 safetensors, configuration, tokenizer and chat template; the card and the curve that are there
stay. The folder is made beside its place and moved there in one step. The configuration says
float32, so that the reader computes in fp32 unless asked otherwise.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaForCausalLM

MAX_BYTES = 12_000_000


def export(model: Path, out: Path) -> int:
    """Exports the model folder `model` to `out`; returns the bytes of the weights.

    Raises:
        ValueError: the weights are larger than `MAX_BYTES`, or out of fp16's range.
    """
    reader = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    # The embeddings are tied: stored once.
    weights = {
        name: tensor.half().contiguous()
        for name, tensor in reader.state_dict().items()
        if name != "lm_head.weight"
    }
    if not all(bool(torch.isfinite(tensor).all()) for tensor in weights.values()):
        raise ValueError("a weight is beyond fp16's range; export in another format")
    size = sum(tensor.nbytes for tensor in weights.values())
    if size > MAX_BYTES:
        raise ValueError(f"the weights have {size} bytes, more than {MAX_BYTES}")
    reader.generation_config.do_sample = False
    config = {**reader.config.to_dict(), "dtype": "float32", "architectures": ["LlamaForCausalLM"]}
    config.pop("_name_or_path", None)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".export-") as temporary:
        fresh = Path(temporary) / out.name
        AutoTokenizer.from_pretrained(model).save_pretrained(fresh)
        reader.generation_config.save_pretrained(fresh)
        save_file(weights, fresh / "model.safetensors", metadata={"format": "pt"})
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (fresh / "config.json").write_text(text, encoding="utf-8")
        for kept in ("README.md", "curve.png"):
            if (out / kept).exists():
                shutil.copy(out / kept, fresh / kept)
        if out.exists():
            out.rename(Path(temporary) / "old")
        fresh.rename(out)
    return size


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m training.export", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="the trainer's --out")
    parser.add_argument("--out", type=Path, default=Path("rag_windows/models/tiny-reader"))
    options = parser.parse_args()
    size = export(options.run / "model", options.out)
    print(f"{options.out}: {size / 1e6:.1f} MB of weights")


if __name__ == "__main__":
    main()
