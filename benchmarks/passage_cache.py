"""What the passage cache saves: seconds to the first token, cold and warm, and what a hit costs.

    python benchmarks/passage_cache.py [--quick] [--windows 8 32 128] [--tokens 256] [--path DIR]

Two models read the same random tokens: the embedded reader, and a Llama of a third of a billion
random weights in bfloat16. In every round each way answers once, one after the other, so that a
noisy machine treats them alike; medians are printed:

- sequential: one prompt through ``model.generate``, what a user runs today;
- cold: windows, with an empty cache in memory and on disk that is filled on the way;
- memory, disk: windows that are there.

Then what a hit costs beside the bytes it moves, how fast the disk tier reads beside ``cat`` on the
same files (read once before, so both read the page cache; starting ``cat`` counts, so only large
sizes tell), and bytes per token beside the least that keys and values take. Sequential runs of 128
windows take minutes: `--sequential 32` leaves them out above 32 windows.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rag_windows import PassageCache, WindowedLM
from rag_windows.cached_encoding import CachedEncoder

PREFIX, QUERY = 24, 24


@dataclass(frozen=True, slots=True)
class Subject:
    """A model with random prompts for it."""

    name: str
    model: PreTrainedModel

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self.model.config.vocab_size)

    def ids(self, count: int, length: int, seed: int) -> list[list[int]]:
        """Random token ids, without the first ones, which may be control tokens."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(
            min(300, self.vocabulary // 2), self.vocabulary, (count, length), generator=generator
        ).tolist()

    def token_bytes(self) -> int:
        """Least bytes that the keys and values of one token take."""
        config = self.model.config
        heads = config.num_key_value_heads
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        size = next(self.model.parameters()).element_size()
        return int(config.num_hidden_layers * 2 * heads * head * size)


def reader() -> Subject:
    """The embedded reader."""
    return Subject("tiny-reader", WindowedLM.from_pretrained("tiny-reader").model)


def random_llama(*, quick: bool) -> Subject:
    """A third of a billion random weights in bfloat16; a hundredth of them if quick."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000 if not quick else 2000,
        hidden_size=1024 if not quick else 256,
        intermediate_size=2816 if not quick else 704,
        num_hidden_layers=24 if not quick else 6,
        num_attention_heads=16 if not quick else 4,
        num_key_value_heads=4 if not quick else 2,
        max_position_embeddings=65536,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    return Subject(f"llama, {size:.2f}B, bfloat16", model)


@contextmanager
def folder(parent: str | None) -> Iterator[Path]:
    """A folder that is gone afterwards."""
    if parent is not None:
        Path(parent).mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix="rag-windows-bench-", dir=parent))
    try:
        yield path / "windows"
    finally:
        shutil.rmtree(path, ignore_errors=True)


def timed(work: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def with_cache(lm: WindowedLM, cache: PassageCache) -> WindowedLM:
    """The model with this cache, its weights looked at already, as after a first request."""
    made = lm.with_cache(cache)
    encoder = made.engine.encoder
    if isinstance(encoder, CachedEncoder):
        encoder.missing([], [[1]], made.method)
    return made


def first_token(lm: WindowedLM, prefix: list[int], windows: list[list[int]]) -> Callable[[], Any]:
    """Encode what is not there and generate one token."""
    (query,) = Subject("", lm.model).ids(1, QUERY, 2)

    def run() -> list[int]:
        context = lm.encode_ids(prefix, windows)
        return lm.generate_ids(context, query, max_new_tokens=1)

    return run


def sequential(subject: Subject, prefix: list[int], windows: list[list[int]]) -> Callable[[], Any]:
    """One prompt through transformers alone."""
    (query,) = subject.ids(1, QUERY, 2)
    prompt = torch.tensor([[*prefix, *(token for ids in windows for token in ids), *query]])
    mask = torch.ones_like(prompt)
    return lambda: subject.model.generate(
        prompt, attention_mask=mask, max_new_tokens=1, do_sample=False
    )


def round_of(
    subject: Subject, count: int, length: int, parent: str | None, *, with_sequential: bool
) -> dict[str, float]:
    """Seconds to the first token of each way, and what the warm ways are made of."""
    (prefix,) = subject.ids(1, PREFIX, 0)
    windows = subject.ids(count, length, 1)
    plain = WindowedLM(subject.model)
    seconds: dict[str, float] = {}
    if with_sequential:
        seconds["sequential"] = timed(sequential(subject, prefix, windows))
    with folder(parent) as path:
        cache = PassageCache("20GiB", disk="20GiB", path=path)
        lm = with_cache(plain, cache)
        seconds["cold"] = timed(first_token(lm, prefix, windows))
        seconds["flush"] = timed(cache.flush)
        seconds["memory"] = timed(first_token(lm, prefix, windows))
        seconds["fetch, memory"] = timed(lambda: lm.encode_ids(prefix, windows))
        stats = cache.stats()
        cache.close()
        tokens = PREFIX + count * length
        for tier in ("memory", "disk"):
            seconds[f"bytes, {tier}"] = stats.tiers[tier].bytes / tokens
        cold = PassageCache(None, disk="20GiB", path=path)
        lm = with_cache(plain, cold)
        seconds["disk"] = timed(first_token(lm, prefix, windows))
        seconds |= reading(cold, path)
        cold.close()
    return seconds


def reading(cache: PassageCache, path: Path) -> dict[str, float]:
    """Bytes per second of the disk tier and of ``cat``, on the same files."""
    files = sorted(path.rglob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    keys = [file.stem for file in files]

    def cat() -> object:
        command = ["cat", *map(str, files)]
        return subprocess.run(command, stdout=subprocess.DEVNULL, check=True)  # noqa: S603 - ours

    cat()
    best_cat = min(timed(cat) for _ in range(3))
    disk = cache.disk
    if disk is None:
        raise RuntimeError("The benchmark's cache has no disk tier.")
    best = min(timed(lambda: disk.get_many(keys)) for _ in range(3))
    return {"tier B/s": size / best, "cat B/s": size / best_cat}


def overhead(subject: Subject, count: int) -> dict[str, float]:
    """Microseconds per hit where there are hardly bytes to move: windows of two tokens."""
    windows = subject.ids(count, 2, 3)
    lm = with_cache(WindowedLM(subject.model), PassageCache("1GiB"))
    lm.encode_ids([], windows)
    cached = min(timed(lambda: lm.encode_ids([], windows)) for _ in range(15))
    few = min(timed(lambda: lm.encode_ids([], windows[:1])) for _ in range(15))
    return {"per hit": (cached - few) / (count - 1) * 1e6, "per request": few * 1e6}


def measure(subject: Subject, arguments: argparse.Namespace) -> None:
    """Print the tables of one model."""
    size = sum(tensor.nbytes for tensor in subject.model.parameters()) / 1e9
    lm = WindowedLM(subject.model)
    first = timed(lambda: with_cache(lm, PassageCache("1MiB")))
    again = with_cache(lm, PassageCache("1MiB"))
    encoder = again.engine.encoder
    check = min(
        timed(lambda: encoder.missing([], [[1]], again.method))  # type: ignore[attr-defined] # a cached encoder
        for _ in range(5)
    )
    print(f"\n## {subject.name} ({size:.2f} GB of weights)\n")
    print(f"Weights hashed once in {first:.2f} s; checked in each request in {check * 1e3:.1f} ms.")
    hit = overhead(subject, 128)
    print(f"A hit costs {hit['per hit']:.0f} µs, a request {hit['per request']:.0f} µs.\n")
    print(
        "| windows | sequential | cold | from memory | from disk | fetch from memory | writing "
        "behind | disk tier / cat | bytes a token: least, memory, disk |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for count in arguments.windows:
        wanted = count <= arguments.sequential
        rounds = [
            round_of(
                subject, count, arguments.tokens, arguments.path, with_sequential=wanted and not n
            )
            for n in range(arguments.rounds)
        ]
        middle = {
            name: statistics.median(one[name] for one in rounds if name in one)
            for name in dict.fromkeys(name for one in rounds for name in one)
        }
        share = middle["tier B/s"] / middle["cat B/s"]
        shown = f"{middle['sequential']:.2f} s" if "sequential" in middle else "-"
        print(
            f"| {count} x {arguments.tokens} | {shown} | {middle['cold']:.2f} s "
            f"| {middle['memory']:.3f} s | {middle['disk']:.3f} s "
            f"| {middle['fetch, memory'] * 1e3:.1f} ms | {middle['flush']:.2f} s "
            f"| {middle['tier B/s'] / 1e9:.2f} / {middle['cat B/s'] / 1e9:.2f} GB/s = {share:.0%} "
            f"| {subject.token_bytes()}, {middle['bytes, memory']:.0f}, "
            f"{middle['bytes, disk']:.0f} |",
            flush=True,
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Seconds to the first token, cold and warm.")
    parser.add_argument("--windows", type=int, nargs="+", default=None)
    parser.add_argument("--tokens", type=int, default=None, help="of each window")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--sequential", type=int, default=128, help="up to how many windows")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--models", nargs="+", choices=("reader", "llama"), default=None)
    parser.add_argument("--path", default=None, help="folder on the disk that is to be measured")
    parser.add_argument("--quick", action="store_true", help="small, to see that it runs")
    arguments = parser.parse_args()
    arguments.windows = arguments.windows or ([4, 8] if arguments.quick else [8, 32, 128])
    arguments.tokens = arguments.tokens or (64 if arguments.quick else 256)
    arguments.rounds = arguments.rounds or (2 if arguments.quick else 3)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    print(
        f"{' '.join(sys.argv[1:]) or 'defaults'}; torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread(s), medians of {arguments.rounds}"
    )
    subjects = {"reader": reader, "llama": lambda: random_llama(quick=arguments.quick)}
    for name, make in subjects.items():
        if arguments.models is None or name in arguments.models:
            measure(make(), arguments)


if __name__ == "__main__":
    main()
