"""What the passage cache costs and keeps: hits, files, stored forms, and its policy of eviction.

    python benchmarks/cache.py [hits] [files] [forms] [policy] [--quick] [--path FOLDER]

- hits: microseconds of a request and of each further hit, over windows of two tokens, where there
  are hardly bytes to move.
- files: how fast windows come from disk beside ``cat`` over the same files, read once before, and
  bytes a token beside the least that keys and values take.
- forms: what a lossy stored form changes in the shipped reader's answers to held-out questions.
- policy: hit rates on made-up traces beside LRU and beside what a cache reaches that knows every
  window's true popularity. Cells are "hits / seconds": percent of the counted requests that hit,
  and percent of the seconds of encoding that they save.

How much sooner an answer begins is `rag-windows bench`. About three minutes on one core.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from rag_windows import Passage, PassageCache, WindowedLM
from rag_windows.benchmark.result import Place, table
from rag_windows.benchmark.workload import Plan, load, token_bytes
from rag_windows.cache.policy import Policy
from training.tasks import draw_case


def seconds(work: Callable[[], object]) -> float:
    """Of a call."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def hits(shape: str) -> None:
    """Print what a hit costs beside the bytes that it moves."""
    model = Plan(shape=shape).build()
    asked = load(int(model.config.vocab_size), Place(256, 2, ragged=False))
    with PassageCache("1GiB") as cache:
        lm = WindowedLM(model).with_cache(cache)
        first = seconds(lambda: lm.encode_ids((), asked.windows[:1]))
        lm.encode_ids((), asked.windows)
        few = min(seconds(lambda: lm.encode_ids((), asked.windows[:1])) for _ in range(15))
        many = min(seconds(lambda: lm.encode_ids((), asked.windows)) for _ in range(15))
    size = sum(parameter.nbytes for parameter in model.parameters()) / 1e9
    print(
        f"{shape} ({size:.2f} GB of weights): the first request {first:.2f} s, with what is made "
        f"once; then {few * 1e6:.0f} µs a request of one window, "
        f"{(many - few) / (len(asked.windows) - 1) * 1e6:.0f} µs for each further hit."
    )


def files(shape: str, windows: int, parent: Path | None) -> None:
    """Print how fast windows come from disk."""
    model = Plan(shape=shape).build()
    asked = load(int(model.config.vocab_size), Place(256 * windows, 256, ragged=False))
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        path = Path(folder) / "windows"
        with PassageCache(None, disk="64GiB", path=path) as cache:
            lm = WindowedLM(model).with_cache(cache)
            lm.encode_ids((), asked.windows)
            cache.flush()
            stored = [str(file) for file in sorted(path.rglob("*.safetensors"))]
            size = sum(Path(file).stat().st_size for file in stored)
            cat = ["/bin/cat", *stored]
            plainly: list[float] = []
            checked: list[float] = []
            for _ in range(7):
                read = partial(subprocess.run, cat, stdout=subprocess.DEVNULL, check=True)
                plainly.append(seconds(read))
                checked.append(seconds(lambda: lm.encode_ids((), asked.windows)))
    speeds = [size / min(own) / 1e9 for own in (plainly, checked)]
    least = token_bytes(model)
    print(
        f"{len(stored)} files, {size / 1e6:.0f} MB: cat {speeds[0]:.2f} GB/s, into windows "
        f"{speeds[1]:.2f} GB/s ({speeds[1] / speeds[0]:.0%}); "
        f"{size / (256 * windows):.0f} bytes a token, at least {least}."
    )


def forms(questions: int, passages: int = 8) -> None:
    """Print what each stored form changes, as a table."""
    plain = WindowedLM.from_pretrained("tiny-reader")
    rng = np.random.default_rng([5, passages])
    cases = [draw_case(rng, "single", passages) for _ in range(questions)]
    rows = []
    exact: list[tuple[int, ...]] = []
    scores: list[float] = []
    for form in ("as computed", "int8"):
        with PassageCache("1GiB", store=form) as cache:
            lm = plain.with_cache(cache)
            equal = right = 0
            apart: list[float] = []
            for number, case in enumerate(cases):
                given = [Passage(text, title=title) for title, text in case.passages]
                asked = list(case.messages)
                lm.generate(asked, given, max_new_tokens=12, citations=False)  # stores
                made = lm.generate(asked, given, max_new_tokens=12, citations=False)
                (scored,) = lm.score(asked, given, [case.answer])
                if form == "as computed":
                    exact.append(made.token_ids)
                    scores.append(scored.logprob)
                equal += made.token_ids == exact[number]
                right += made.text.strip() == case.answer
                apart.append(abs(scored.logprob - scores[number]))
        shares = [f"{one / questions:.1%}" for one in (equal, right)]
        mean, most = statistics.fmean(apart), max(apart)
        rows.append([form, *shares, f"{mean:.2g}", f"{most:.2g}"])
    head = ["stored as", "equal", "right", "nats of the right answer apart, mean", "at most"]
    print("\n".join(table(head, rows)))


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All windows there are: keys, bytes, and seconds of encoding."""

    keys: list[str]
    sizes: list[int]
    costs: list[float]

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests, and which of them count.

    Attributes:
        name: what the table says.
        requests: indices into the catalogue.
        counted: one flag per request; those of a scan and of the warm-up don't count.
        phases: (first request, popularity per window) of each stretch of equal popularity.
    """

    name: str
    requests: list[int]
    counted: list[bool]
    phases: list[tuple[int, NDArray[np.float64]]]


def catalogue(windows: int, seed: int) -> Catalogue:
    """Windows of 24 to 1,024 tokens (lognormal, median 220) at 128 KiB a token.

    Encoding takes 2 ms and 0.1 ms a token, times a lognormal factor (sigma 0.3): machines vary.
    """
    rng = np.random.default_rng(seed)
    tokens = np.clip(rng.lognormal(math.log(220), 0.6, windows), 24, 1024).astype(np.int64)
    costs = (0.002 + 1e-4 * tokens) * np.exp(rng.normal(0.0, 0.3, windows))
    keys = [f"{seed:032x}{index:032x}" for index in range(windows)]
    return Catalogue(keys, (tokens * 131_072).tolist(), costs.tolist())


def zipf_weights(windows: int, exponent: float) -> NDArray[np.float64]:
    """Popularity by rank, which sums to one."""
    weights = np.arange(1, windows + 1, dtype=np.float64) ** -exponent
    return np.asarray(weights / weights.sum(), dtype=np.float64)


def zipf(windows: int, exponent: float, requests: int, warm_up: int, seed: int) -> Trace:
    """Independent requests; the window at rank r is asked for in proportion to r ** -exponent."""
    rng = np.random.default_rng(seed)
    popularity = zipf_weights(windows, exponent)[rng.permutation(windows)]
    drawn = rng.choice(windows, size=requests, p=popularity).tolist()
    counted = [index >= warm_up for index in range(requests)]
    return Trace(f"Zipf {exponent}", drawn, counted, [(0, popularity)])


def shifting(windows: int, period: int, requests: int, warm_up: int, seed: int) -> Trace:
    """Zipf 1.0; every `period` requests the top tenth swaps places with others drawn at random."""
    rng = np.random.default_rng(seed)
    base, hot = zipf_weights(windows, 1.0), windows // 10
    at_rank = rng.permutation(windows)
    drawn: list[int] = []
    phases = []
    for first in range(0, requests, period):
        popularity = np.empty(windows)
        popularity[at_rank] = base
        phases.append((first, popularity))
        size = min(period, requests - first)
        drawn += rng.choice(windows, size=size, p=popularity).tolist()
        others = rng.choice(np.arange(hot, windows), size=hot, replace=False)
        swapped = at_rank.copy()
        swapped[:hot], swapped[others] = at_rank[others], at_rank[:hot]
        at_rank = swapped
    counted = [index >= warm_up for index in range(requests)]
    return Trace(f"shift every {period:,}", drawn, counted, phases)


def scanned(trace: Trace, first: int, new: range, share: int) -> tuple[Trace, Trace]:
    """The trace with a scan of windows that nobody asks for again, and the same without it.

    Both count the same requests: those of the trace from the scan's start on.

    Args:
        trace: at least as long as what the scan is spread over.
        first: request before which the scan begins.
        new: the windows scanned, in their order.
        share: so many scanned windows for each ordinary request; 0 puts them all in one run.
    """
    head, tail = trace.requests[:first], trace.requests[first:]
    mixed: list[tuple[int, bool]] = []
    if share == 0:
        mixed = [(window, False) for window in new] + [(window, True) for window in tail]
    else:
        spread = len(new) // share
        for index, window in enumerate(tail):
            if index < spread:
                scan = new[index * share : (index + 1) * share]
                mixed += [(other, False) for other in scan]
            mixed.append((window, True))
    unscored = [False] * first
    name = "scan in one run" if share == 0 else f"scan, {share} per request"
    with_scan = Trace(
        name,
        head + [window for window, _ in mixed],
        unscored + [counts for _, counts in mixed],
        trace.phases,
    )
    return with_scan, Trace(name, trace.requests, unscored + [True] * len(tail), trace.phases)


class Replayed(Protocol):
    """What a replay calls of a policy."""

    def touch(self, key: str) -> None:
        """A request, for a key held or not."""

    def admit(self, key: str, nbytes: int, cost_s: float) -> list[str] | None:
        """A key that isn't held is offered; returns what was given up, None if refused."""

    def __contains__(self, key: object) -> bool:
        """Whether it is held."""


class LRU:
    """The least recently used goes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit, self._nbytes = limit_bytes, 0
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def touch(self, key: str) -> None:
        """A request makes a key that is held the latest one."""
        if key in self._sizes:
            self._sizes.move_to_end(key)

    def admit(self, key: str, nbytes: int, cost_s: float) -> list[str] | None:
        """Takes in everything that fits at all."""
        if nbytes > self._limit:
            return None
        self._sizes[key] = nbytes
        self._nbytes += nbytes
        victims = []
        while self._nbytes > self._limit:
            victim, size = self._sizes.popitem(last=False)
            self._nbytes -= size
            victims.append(victim)
        return victims


POLICIES: dict[str, Callable[[int], Replayed]] = {
    "LRU": LRU,
    "ours, hits": partial(Policy, cost_exponent=0.0),
    "ours": Policy,
}
"""Ours is what ships; "ours, hits" values every hit alike, however long encoding took."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Percent of the requests, and of the seconds of encoding, that the cache answered."""

    hits: float
    seconds: float

    def __str__(self) -> str:
        return f"{self.hits:.1f} / {self.seconds:.1f}"


def replay(trace: Trace, windows: Catalogue, policy: Replayed) -> Rate:
    """Serve all requests: what misses is encoded and offered."""
    hits = hit_seconds = asked = asked_seconds = 0.0
    for window, counts in zip(trace.requests, trace.counted, strict=True):
        key, cost = windows.keys[window], windows.costs[window]
        held = key in policy
        policy.touch(key)
        if not held:
            policy.admit(key, windows.sizes[window], cost)
        if counts:
            asked, asked_seconds = asked + 1, asked_seconds + cost
            hits, hit_seconds = hits + held, hit_seconds + held * cost
    return Rate(100 * hits / asked, 100 * hit_seconds / asked_seconds)


def perfect_frequencies(
    trace: Trace, windows: Catalogue, limit: int, values: Sequence[float]
) -> float:
    """Expected percentage of the value when every window's true popularity is known.

    The best fixed set of windows under the limit, by popularity times value over bytes, the last
    one in part (a fractional knapsack). For independent requests nothing that doesn't see the
    future does better in the long run. Where the popularity shifts, the set changes with it, at no
    cost.
    """
    sizes = np.asarray(windows.sizes, dtype=np.float64)
    worth = np.asarray(values, dtype=np.float64)
    counts = np.asarray(trace.counted)
    ends = [first for first, _ in trace.phases[1:]] + [len(trace.requests)]
    got = whole = 0.0
    for (first, popularity), end in zip(trace.phases, ends, strict=True):
        value = popularity * worth
        order = np.argsort(-value / sizes)
        before = np.concatenate([[0.0], np.cumsum(sizes[order])[:-1]])
        parts = np.clip((limit - before) / sizes[order], 0.0, 1.0)
        requests = float(counts[first:end].sum())
        got += requests * float((value[order] * parts).sum())
        whole += requests * float(value.sum())
    return 100.0 * got / whole


def policy(count: int, length: int) -> None:
    """Replay all traces with room for 1, 5 and 20% of all bytes, and print the tables."""
    windows, strangers = catalogue(count, seed=1), catalogue(2 * count, seed=2)
    both = Catalogue(
        windows.keys + strangers.keys,
        windows.sizes + strangers.sizes,
        windows.costs + strangers.costs,
    )
    warm_up, new = length // 3, range(count, 3 * count)
    traces = [zipf(count, exponent, length, warm_up, seed=3) for exponent in (0.7, 1.0, 1.3)]
    traces += [shifting(count, length // n, length, warm_up, seed=4) for n in (15, 4)]
    # The scan's harm is looked for where it is greatest: until as many requests have passed since.
    short = zipf(count, 1.0, warm_up + 2 * len(new), warm_up, seed=3)
    pairs = [scanned(short, warm_up, new, together) for together in (0, 1, 4)]
    reached, lost = [], []
    for share in (0.01, 0.05, 0.2):
        limit = int(share * sum(windows.sizes))
        for trace in traces:
            rates = [replay(trace, windows, make(limit)) for make in POLICIES.values()]
            bound = Rate(
                perfect_frequencies(trace, windows, limit, [1.0] * count),
                perfect_frequencies(trace, windows, limit, windows.costs),
            )
            reached.append([trace.name, f"{share:.0%}", *map(str, (*rates, bound))])
        for scan, without in pairs:
            ends = [
                (replay(without, both, make(limit)), replay(scan, both, make(limit)))
                for make in POLICIES.values()
            ]
            points = [str(Rate(a.hits - b.hits, a.seconds - b.seconds)) for a, b in ends]
            lost.append([scan.name, f"{share:.0%}", *points])
    print(f"{count:,} windows, {length:,} requests; hits / seconds, in percent.\n")
    print("\n".join(table(["trace", "room", *POLICIES, "perfect frequencies"], reached)))
    print("\nPoints lost to a scan of twice as many windows as there are:\n")
    print("\n".join(table(["trace", "room", *POLICIES], lost)))


def main(given: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/cache.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = ("hits", "files", "forms", "policy")
    parser.add_argument("part", nargs="*", metavar="PART", help=f"of {', '.join(parts)}")
    parser.add_argument("--quick", action="store_true", help="small, to see that it runs")
    parser.add_argument("--path", type=Path, help="folder on the disk that is to be measured")
    options = parser.parse_args(given)
    if unknown := set(options.part) - set(parts):
        parser.error(f"unknown {sorted(unknown)}; choose among {list(parts)}")
    shape = "tiny" if options.quick else "llama-0.25b"
    work = {
        "hits": lambda: hits(shape),
        "files": lambda: files(shape, 4 if options.quick else 64, options.path),
        "forms": lambda: forms(3 if options.quick else 100),
        "policy": lambda: policy(*((400, 6000) if options.quick else (4000, 90_000))),
    }
    torch.set_num_threads(1)
    for name in options.part or parts:
        print(f"\n## {name}\n", flush=True)
        work[name]()


if __name__ == "__main__":
    main()
