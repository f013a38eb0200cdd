"""vLLM's own prefix caching beside windows by the connector, on passages in random order.

Run in an environment with vLLM and the connector, which `make bench-vllm` makes. One engine answers
all questions, in turn, so that what else the machine does meets each way alike; in brackets stand
ratios of this process's own processor time. Only ratios mean anything elsewhere. ``sequential`` are
ordinary prompts with prefix caching on; ``windows`` were encoded before; ``cold`` reads passages
that are new and encodes them first.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from vllm_rag_windows import WindowedPrompt
from vllm_rag_windows.prompts import vllm_request

VOCABULARY = 2048
PREFIX, QUERY = 32, 16


def built(folder: str, hidden: int, layers: int) -> None:
    """Write a random Llama with a tokenizer of numbers."""
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        head_dim=64,
        max_position_embeddings=8192,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {f"t{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t1").save_pretrained(folder)


class Bench:
    """Questions over passages, asked in three ways of one engine."""

    def __init__(self, llm: Any, passages: int, tokens: int) -> None:
        self._llm, self._draw = llm, random.Random(0)
        self._prefix = self._tokens(PREFIX)
        self._passages = [self._tokens(tokens) for _ in range(passages)]

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._draw.randrange(2, VOCABULARY) for _ in range(count))

    def question(self, top_k: int) -> list[tuple[int, ...]]:
        """Some passages in random order, then a query that nobody has asked before."""
        return [*self._draw.sample(self._passages, top_k), self._tokens(QUERY)]

    def _run(self, prompts: Sequence[WindowedPrompt], tokens: int) -> None:
        from vllm import SamplingParams

        plain = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        ids, params = zip(*(vllm_request(one, plain) for one in prompts), strict=True)
        outputs = self._llm.generate(list(ids), list(params), use_tqdm=False)
        if any(one.outputs[0].finish_reason != "length" for one in outputs):
            raise RuntimeError("A request ended with an error; vLLM's log says why.")

    def encode(self, passages: Sequence[tuple[int, ...]] = ()) -> None:
        """Encode passages, by default all, whether they have been or not."""
        self._run([WindowedPrompt(self._prefix, (ids,)) for ids in passages or self._passages], 1)

    def sequential(self, questions: Sequence[list[tuple[int, ...]]], tokens: int) -> None:
        """Passages one after the other."""
        flat = [tuple(token for part in one for token in part) for one in questions]
        self._run([WindowedPrompt(self._prefix, (), ids) for ids in flat], tokens)

    def windows(self, questions: Sequence[list[tuple[int, ...]]], tokens: int) -> None:
        """Passages in windows that have been encoded."""
        made = [WindowedPrompt(self._prefix, tuple(one[:-1]), one[-1]) for one in questions]
        self._run(made, tokens)

    def cold(self, questions: Sequence[list[tuple[int, ...]]], tokens: int) -> None:
        """Passages in windows that nobody has encoded before."""
        fresh = [[self._tokens(len(ids)) for ids in one] for one in questions]
        self.encode([ids for one in fresh for ids in one[:-1]])
        self.windows(fresh, tokens)


Seconds = tuple[float, float]
"""By the wall clock, and of the processor's time in this process."""


def seconds(call: Callable[..., None], *given: Any) -> Seconds:
    """What a call takes."""
    begun, used = time.perf_counter(), time.process_time()
    call(*given)
    return time.perf_counter() - begun, time.process_time() - used


def medians(taken: Sequence[Seconds]) -> Seconds:
    """Of both times, apart."""
    wall, used = zip(*taken, strict=True)
    return statistics.median(wall), statistics.median(used)


def beside(base: Seconds, taken: Seconds) -> str:
    """How many times as fast, by either time."""
    return f"{base[0] / taken[0]:.2f} ({base[1] / taken[1]:.2f})"


def main() -> None:
    """Print one line of Markdown for each setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--passages", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--top-k", type=int, nargs="+", default=[2, 5, 10])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=16)
    asked = parser.parse_args()
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        built(folder, asked.hidden, asked.layers)
        llm = LLM(
            model=folder,
            dtype="bfloat16",
            max_model_len=8192,
            max_num_seqs=asked.batch,
            enforce_eager=True,
            enable_prefix_caching=True,
            kv_cache_memory_bytes=1 << 30,
            kv_transfer_config={
                "kv_connector": "RagWindowsConnector",
                "kv_connector_module_path": "vllm_rag_windows.connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"memory": "1GiB"},
            },
        )
        bench = Bench(llm, asked.passages, asked.tokens)
        bench.encode()
        ways = (bench.sequential, bench.windows, bench.cold)
        print("| passages | way | first token, ms | times as fast | questions/s | times as many |")
        print("|---|---|---|---|---|---|")
        for top_k in asked.top_k:
            first: dict[str, list[Seconds]] = {way.__name__: [] for way in ways}
            whole: dict[str, list[Seconds]] = {way.__name__: [] for way in ways}
            for warm_up in (True, *(False for _ in range(asked.rounds))):
                # In turn: sequential prompts find in vLLM's cache what those before have left.
                for way in ways:
                    many = [bench.question(top_k) for _ in range(asked.batch)]
                    took = (
                        seconds(way, [bench.question(top_k)], 1),
                        seconds(way, many, asked.new_tokens),
                    )
                    if not warm_up:
                        first[way.__name__].append(took[0])
                        whole[way.__name__].append(took[1])
            base = medians(first["sequential"]), medians(whole["sequential"])
            for way in ways:
                one, all_of_them = medians(first[way.__name__]), medians(whole[way.__name__])
                print(
                    f"| {top_k} x {asked.tokens} | {way.__name__} | {one[0] * 1000:.0f} | "
                    f"{beside(base[0], one)} | {asked.batch / all_of_them[0]:.2f} | "
                    f"{beside(base[1], all_of_them)} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
