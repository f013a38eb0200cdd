"""Seconds to the first token and per further token, beside transformers' own generate.

    python benchmarks/first_token.py [--passages 16] [--tokens 128] [--device cpu] [--dtype float32]

A Llama with random weights reads the same random tokens in every way: one prompt through
``model.generate`` (what a user runs today), one prompt through the engine ("sequential"), windows.
Nothing is kept between runs, so every window is encoded anew. The ways take turns in each round, so
that a noisy machine treats them alike; medians and their ratios to ``model.generate`` are printed.
About two minutes on one core.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rag_windows import APE, PCW, Sequential, WindowedLM
from rag_windows.methods import Method

PREFIX, QUERY = list(range(10, 40)), list(range(50, 80))
VOCABULARY = 8000


def build(device: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """8 layers, width 512, 4 key/value heads, seeded."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=65536,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(device, dtype).eval()


def ways(model: LlamaForCausalLM, windows: list[list[int]]) -> dict[str, Callable[[int], object]]:
    """Name -> generate so many tokens."""
    lm = WindowedLM(model)
    prompt = [*PREFIX, *(token for ids in windows for token in ids), *QUERY]
    inputs = torch.tensor([prompt], device=model.device)

    def plain(tokens: int) -> object:
        mask = torch.ones_like(inputs)
        return model.generate(
            inputs, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens
        )

    def ours(method: Method, *, citations: bool) -> Callable[[int], object]:
        def run(tokens: int) -> object:
            context = lm.encode_ids(PREFIX, windows, method=method)
            options = {"max_new_tokens": tokens, "min_new_tokens": tokens}
            return lm.engine.decoder.generate(
                context, QUERY, options=options, record_mass=citations
            )

        return run

    return {
        "transformers, one prompt": plain,
        "sequential": ours(Sequential(), citations=False),
        "pcw": ours(PCW(), citations=False),
        "ape": ours(APE(), citations=False),
        "ape with citations": ours(APE(), citations=True),
    }


def measure(
    runs: dict[str, Callable[[int], object]], rounds: int, further: int
) -> dict[str, tuple[float, float]]:
    """Name -> median seconds to the first token, and per further token."""
    first: dict[str, list[float]] = {name: [] for name in runs}
    each: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            seconds = []
            for tokens in (1, 1 + further):
                begun = time.perf_counter()
                run(tokens)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - begun)
            if number:  # the first round warms up
                first[name].append(seconds[0])
                each[name].append((seconds[1] - seconds[0]) / further)
    return {n: (statistics.median(first[n]), statistics.median(each[n])) for n in runs}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Seconds to the first token.")
    parser.add_argument("--passages", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each passage")
    parser.add_argument("--further", type=int, default=24, help="tokens after the first")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = build(arguments.device, getattr(torch, arguments.dtype))
    windows = torch.randint(1, VOCABULARY, (arguments.passages, arguments.tokens)).tolist()
    results = measure(ways(model, windows), arguments.rounds, arguments.further)
    base = results["transformers, one prompt"]
    print(
        f"{arguments.passages} passages of {arguments.tokens} tokens, {arguments.dtype}, "
        f"{arguments.device}, {arguments.threads} thread(s), median of {arguments.rounds}"
    )
    print("| way | first token | ratio | each further token | ratio |\n|---|---|---|---|---|")
    for name, (one, more) in results.items():
        print(
            f"| {name} | {one:.3f} s | {one / base[0]:.2f} | {more * 1e3:.1f} ms "
            f"| {more / base[1]:.2f} |"
        )


if __name__ == "__main__":
    main()
