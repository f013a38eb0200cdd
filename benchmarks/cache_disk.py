"""Bytes per second that the disk tier reads, beside ``cat`` over the same files.

    python benchmarks/cache_disk.py --dir FOLDER

Twice: with the files in the system's page cache, and after the system was asked to drop them
(``posix_fadvise``), so that the medium is read. Each figure is the best of several rounds, and the
rounds of both take turns, since other load on the machine comes and goes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from rag_windows.cache.disk import DiskTier
from rag_windows.cache.entry import Entry
from rag_windows.kv import Window

ENTRIES, TOKENS = 64, 256
LAYERS, HEADS, WIDTH = 24, 2, 64
"""A 0.5B Llama shape in bfloat16: 3.1 MB for 256 tokens."""


def entry(number: int) -> Entry:
    """A window of noise."""
    noise = torch.Generator().manual_seed(number)
    shape = (2 * LAYERS, HEADS, TOKENS, WIDTH)
    layers = torch.randn(shape, generator=noise).to(torch.bfloat16).unbind(0)
    ids = tuple(range(number, number + TOKENS))
    return Entry(Window(ids, 0, layers[:LAYERS], layers[LAYERS:]), 1.0, (), time.time())


def drop(paths: list[Path]) -> None:
    """Ask the system to forget the files' pages."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(
    paths: list[Path], tier: DiskTier, keys: list[str], cold: bool, rounds: int
) -> dict[str, float]:
    """Gigabytes per second of each way to read all files."""

    def cat() -> None:
        subprocess.run(["/bin/cat", *map(str, paths)], stdout=subprocess.DEVNULL, check=True)  # noqa: S603 - our own files

    def read() -> None:
        if len(tier.get_many(keys)) != len(keys):
            raise SystemExit("the tier lost entries")

    ways: dict[str, Callable[[], None]] = {"cat": cat, "tier": read}
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, way in ways.items():
            if cold:
                drop(paths)
            start = time.perf_counter()
            way()
            best[name] = min(best[name], time.perf_counter() - start)
    nbytes = sum(path.stat().st_size for path in paths)
    return {name: nbytes / seconds / 1e9 for name, seconds in best.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, help="where to put the files (default: temporary)")
    parser.add_argument("--entries", type=int, default=ENTRIES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--digest", default="xxh3-128")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        tier = DiskTier(Path(folder) / "cache", 1 << 40, digest=args.digest)
        keys = [hashlib.sha256(b"%d" % number).hexdigest() for number in range(args.entries)]
        start = time.perf_counter()
        for number, key in enumerate(keys):
            if not tier.put(key, entry(number)):
                raise SystemExit("an entry could not be stored")
        stored_s = time.perf_counter() - start
        paths = [Path(folder) / "cache" / "entries" / f"{key}.safetensors" for key in keys]
        nbytes = sum(path.stat().st_size for path in paths)
        speeds = {
            name: measure(paths, tier, keys, cold, args.rounds)
            for name, cold in (("page cache", False), ("medium", True))
        }
        put_ms = 1e3 * stored_s / len(keys)
        theory = args.entries * entry(0).nbytes
        if args.json:
            found = {"bytes": nbytes, "bytes_over_theory": nbytes / theory, "put_ms": put_ms}
            json.dump({"entries": len(keys), **found, "GB_per_s": speeds}, sys.stdout)
            return
        print(f"{len(keys)} files, {nbytes / 1e6:.0f} MB, {nbytes / theory:.4f} of the tensors,")
        print(f"stored in {put_ms:.1f} ms each")
        for name, row in speeds.items():
            print(
                f"{name:12} cat {row['cat']:6.2f} GB/s   tier {row['tier']:6.2f} GB/s"
                f"   {100 * row['tier'] / row['cat']:5.0f}%"
            )


if __name__ == "__main__":
    main()
