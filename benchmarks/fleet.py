"""A fleet of replicas, simulated: what each way of routing finds in memory, and what that is worth.

    python -m benchmarks.fleet [--quick] [--out]            # minutes on 2 cores
    python -m benchmarks.fleet --check RECORD.json          # the model beside a real run

Traces are drawn from seeds, the routings are those of `rag_windows_server.fleet.routing`, and each
replica keeps passages by the policy of the passage cache, `rag_windows.cache.policy`. Time is
modelled: what is measured, what is cited and what is assumed stands beside each constant. The
tables and pictures in benchmarks/results/fleet_simulation.md are written by ``--out``.

`Record` is the form in which a real run is handed over for ``--check``.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from benchmarks.report import filled
from rag_windows.cache.policy import Policy
from rag_windows_eval.benchmark.result import table
from rag_windows_server.fleet.routing import (
    ROUTINGS,
    Held,
    Replica,
    RoutedQuestion,
    Routing,
    home_of,
)

Numbers = NDArray[np.float64]


class RecordedQuestion(BaseModel):
    """One question of a real run.

    Attributes:
        arrival_s: when it was asked, in seconds since the first one was.
        passages: a number for each of its passages, in order; equal numbers are equal passages.
        tokens: the tokens of each passage's window.
        replica: the name of the one that answered.
        encoded_tokens: of its passages, the tokens that were encoded for it: those of windows that
            were in no tier.
        first_token_s: from the request to the first text, for the client.
        whole_s: from the request to the end of the answer, if it is known.
    """

    model_config = ConfigDict(extra="forbid")

    arrival_s: float = Field(ge=0)
    passages: list[int]
    tokens: list[int]
    replica: str
    encoded_tokens: int = Field(ge=0)
    first_token_s: float = Field(ge=0)
    whole_s: float | None = None


class Record(BaseModel):
    """A real run of a fleet, for the simulator to be compared with.

    Of a run without a shared store (with one, every passage is encoded once at most, whoever
    answers) and without kills, from empty caches on.

    Attributes:
        routing: by its name in `rag_windows_server.fleet.routing.ROUTINGS`.
        replicas: names of all replicas.
        memory_bytes: limit of each replica's memory tier: ``PassageCache(memory=...)``.
        token_bytes: of the memory tier, for each token that it holds: its bytes by `stats()` over
            the tokens of the passages in it (8,254 for tiny-reader with windows of 256 tokens).
        publish_s: seconds between two times that a replica publishes what it holds.
        questions: in the order of their arrival.
        machine: what it ran on.
        command: how it was started.
    """

    model_config = ConfigDict(extra="forbid")

    routing: Literal["resident", "consistent", "prefix", "random"]
    replicas: list[str] = Field(min_length=1)
    memory_bytes: int = Field(gt=0)
    token_bytes: float = Field(gt=0)
    publish_s: float = Field(gt=0)
    questions: list[RecordedQuestion]
    machine: str = ""
    command: str = ""


# What things take

PASSAGES, TOKENS = 20, 512
"""Of a question, and of each passage. Assumptions: what a retriever commonly gives."""

WEIGHTS, TOKEN_BYTES = 8.03e9, 131_244.0
"""Of Llama 3.1 8B in bfloat16; bytes of a token in memory are measured: passage_cache.md."""

OVERHEAD_S = 0.007
"""Of a question on the host: 2 ms to find windows, 5 to tokenize; measured: passage_cache.md."""

ROOFLINE = 0.55
"""Of the memory's bandwidth that a decode step reaches; measured on a CPU: performance.md."""

ANSWER, TOGETHER = 128, 8
"""Tokens of an answer, `generate`'s default; answers that share a decode step. An assumption."""

CHECKED = 5.0e9
"""Bytes a second that come from files and are checked; measured with 2 cores: passage_cache.md."""

LATENCY_S = 0.1
"""Until the first byte: "roughly 100-200 milliseconds", Amazon's performance guidelines for S3."""

UTILISATION = 0.7
"""Share of the hours paid for in which accelerators work, where costs are told. An assumption."""


@dataclass(frozen=True)
class Machine:
    """What a replica runs on.

    Attributes:
        flops: operations a second while passages are encoded.
        bandwidth: bytes a second of its memory.
        price: dollars an hour.
    """

    name: str
    flops: float
    bandwidth: float
    price: float

    @property
    def token_s(self) -> float:
        """Seconds of encoding a token: two operations a weight."""
        return 2 * WEIGHTS / self.flops

    def step_s(self, together: int) -> float:
        """Seconds of a step of so many questions: it reads the weights, and passages of each."""
        read = 2 * WEIGHTS + together * PASSAGES * TOKENS * TOKEN_BYTES
        return read / (ROOFLINE * self.bandwidth)

    @property
    def answer_work_s(self) -> float:
        """Seconds of the accelerator for an answer, its share of steps with others."""
        return ANSWER * self.step_s(TOGETHER) / TOGETHER

    @property
    def cold_work_s(self) -> float:
        """Seconds of the accelerator for a question none of whose passages is in memory."""
        return PASSAGES * TOKENS * self.token_s + self.step_s(1) + self.answer_work_s


FAST = Machine("400 TFLOP/s", 400e12, 3.35e12, 2.69)
SLOW = Machine("80 TFLOP/s", 80e12, 2.04e12, 1.49)
"""The rates of encoding are assumptions, 40% of an H100's peak and 26% of an A100's: nobody has
measured this engine on a GPU. Bandwidths are from their data sheets, prices one provider's of April
2026 (jarvislabs.ai/blog/h100-vs-a100)."""


# What is asked

TURNS, PAUSE_S = 5.8, 60.0
"""Turns of a conversation (INSCIT's development set has 502 in 86); an assumption: the seconds
between them."""

NEAR, STRAY = 30, 0.15
"""Passages about one thing, of which a turn reads 20, the middle ones most often; and the share of
those that are of other things."""


@dataclass(frozen=True)
class Setting:
    """One run.

    Attributes:
        routing: by name; behind a comma whose hash is the home of a question.
        passages: of the corpus.
        memory: bytes for passages of each replica.
        store: Gbit/s of each replica's way to a shared store, or None.
        wait: seconds for which that store is waited for; None for as long as encoding takes.
        load: 1 is what the fleet could just answer if it found nothing in memory.
        zipf: the thing at rank r is asked about in proportion to r ** -zipf.
        topics: whether the passages of a question belong together, as retrieved ones do; if not,
            each is drawn by itself.
        publish_s: seconds between two times that replicas publish what they hold.
        sent: whether the router remembers what it sent where until then.
    """

    routing: str = "resident"
    passages: int = 1_000_000
    replicas: int = 16
    memory: float = 80e9
    store: float | None = None
    wait: float | None = None
    machine: Machine = FAST
    load: float = 0.8
    zipf: float = 0.9
    topics: bool = True
    publish_s: float = 1.0
    sent: bool = True
    questions: int = 0
    seed: int = 0

    @property
    def rate(self) -> float:
        """Questions a second, of the whole fleet."""
        return self.load * self.replicas / self.machine.cold_work_s

    @property
    def count(self) -> int:
        """Questions of a run, the first half of which fills the memories."""
        return self.questions or 5_000 + 100 * self.replicas


class Asked(NamedTuple):
    """One question of a trace."""

    at: float
    passages: tuple[int, ...]
    tokens: tuple[int, ...]
    home: int


@cache
def ranks(count: int, exponent: float) -> Numbers:
    """Of so many things the share that the first r have, by r."""
    shares: Numbers = np.cumsum(np.arange(1, count + 1, dtype=np.float64) ** -exponent)
    return shares / shares[-1]


def drawn(setting: Setting) -> list[Asked]:
    """A trace: Poisson starts of conversations, with follow-up questions over what is near."""
    rng = np.random.default_rng(setting.seed)
    count, corpus = setting.count, setting.passages
    span = count / setting.rate

    def popular(shape: tuple[int, ...]) -> NDArray[np.int64]:
        """Passages by their popularity; neighbours' ranks have nothing to do with each other."""
        rank = np.searchsorted(ranks(corpus, setting.zipf), rng.random(shape))
        return (rank * 2_654_435_761 + 12_345) % corpus

    starts = rng.random(-(-count // 5)) * span
    turns = rng.geometric(1 / TURNS, starts.size)
    talk = np.repeat(np.arange(starts.size), turns)[:count]
    pauses = rng.exponential(PAUSE_S, talk.size)
    first = np.flatnonzero(np.diff(talk, prepend=-1))
    pauses[first] = 0
    since = np.cumsum(pauses)
    at = (starts[talk] + since - since[first][talk]) % span
    read = popular((talk.size, PASSAGES))
    if setting.topics:
        middle = popular((starts.size,))[talk]
        away = np.abs(np.arange(NEAR) - NEAR // 2)
        # Without replacement, the nearer the likelier and the earlier (Gumbel's trick).
        score = rng.gumbel(size=(talk.size, NEAR)) - away / (NEAR / 6)
        nearest = np.argsort(-score, axis=1)[:, :PASSAGES] - NEAR // 2
        own = (middle[:, None] + nearest) % corpus
        read = np.where(rng.random(read.shape) < STRAY, read, own)
    by_talk = setting.routing.endswith("conversation")
    asked = []
    for index in np.argsort(at).tolist():
        passages = tuple(dict.fromkeys(read[index].tolist()))
        home = home_of("tenant", f"{talk[index]}" if by_talk else "corpus")
        asked.append(Asked(float(at[index]), passages, (TOKENS,) * len(passages), home))
    return asked


# What a fleet does


@dataclass(frozen=True)
class Times:
    """Seconds: of a token that is encoded, of a question beside that, of its answer; and the store.

    `store_rate` is in bytes a second, 0 where there is no store; `wait_s` is the cache's
    `shared_wait`, by default as long as encoding takes.
    """

    token_s: float
    first_s: float
    answer_s: float
    token_bytes: float = TOKEN_BYTES
    store_rate: float = 0.0
    wait_s: float | None = None


@dataclass
class Outcome:
    """Of each question, in the order in which it was begun: tokens and seconds.

    `asked_of` counts the questions of each replica.
    """

    at: list[float] = field(default_factory=list)
    found: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    encoded: list[int] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    asked_of: Counter[int] = field(default_factory=Counter)


class Node:
    """A replica: it encodes for one question after the other, and answers many at a time."""

    def __init__(self, memory: float, times: Times, stored: set[int], outcome: Outcome) -> None:
        self.held: set[int] = set()
        self._policy = Policy(int(memory))
        self._waiting: deque[Asked] = deque()
        self._ends: deque[float] = deque()
        self._free_at = self._pause_s = self._pause_until = 0.0
        self._strikes = 0
        self._times, self._stored, self._outcome = times, stored, outcome

    def ask(self, asked: Asked) -> None:
        """A question comes."""
        self._waiting.append(asked)

    def load(self, now: float) -> int:
        """Questions under way now, when what has begun by now has begun."""
        while self._waiting and max(self._waiting[0].at, self._free_at) <= now:
            self._begin(self._waiting.popleft())
        while self._ends and self._ends[0] <= now:
            self._ends.popleft()
        return len(self._waiting) + len(self._ends)

    def _begin(self, asked: Asked) -> None:
        times, policy, tokens = self._times, self._policy, dict(zip(*asked[1:3], strict=True))
        begun = max(asked.at, self._free_at)
        missing = [one for one in tokens if one not in self.held]
        missed = sum(map(tokens.__getitem__, missing))
        waited, read = self._fetched(missing, tokens, begun)
        for one in tokens:
            policy.touch(str(one))
        for one in missing:
            size, cost = tokens[one] * times.token_bytes, tokens[one] * times.token_s
            given_up = policy.admit(str(one), int(size), cost)
            if given_up is not None:
                self.held.difference_update(map(int, given_up))
                self.held.add(one)
        if times.store_rate:
            self._stored.update(missing)
        self._free_at = begun + waited + (missed - read) * times.token_s + times.first_s
        self._ends.append(self._free_at + times.answer_s)
        told = self._outcome
        told.at.append(asked.at)
        told.found.append(sum(tokens.values()) - missed)
        told.read.append(read)
        told.encoded.append(missed - read)
        told.first_s.append(self._free_at - asked.at + OVERHEAD_S)

    def _fetched(
        self, missing: Sequence[int], tokens: Mapping[int, int], now: float
    ) -> tuple[float, int]:
        """Seconds for which the store is waited for, and tokens that come from it by then.

        As in rag_windows/cache/shared.py: it is asked for all that is missing, 16 at once, until
        encoding would have been quicker, and left alone for a while when that goes wrong thrice.
        """
        times = self._times
        if not times.store_rate or not missing or now < self._pause_until:
            return 0.0, 0
        encoding = sum(map(tokens.__getitem__, missing)) * times.token_s
        most = max(0.1, encoding) if times.wait_s is None else times.wait_s
        seconds, read, came, late = 0.0, 0, 0, len(missing)
        for first in range(0, len(missing), 16):
            wave = missing[first : first + 16]
            there = [tokens[one] for one in wave if one in self._stored]
            seconds += LATENCY_S + sum(there) * times.token_bytes / times.store_rate
            if seconds > most:
                break
            read, came, late = read + sum(there), came + len(there), late - len(wave)
        if late <= came:
            if came:
                self._strikes, self._pause_s = 0, 0.0
        else:
            self._strikes += 1
            if self._strikes >= 3:
                self._pause_s = min(60.0, max(1.0, 2 * self._pause_s))
                self._pause_until = now + self._pause_s
        return min(seconds, most), read


def replay(
    trace: Iterable[Asked],
    routing: Routing,
    names: Sequence[str],
    memory: float,
    times: Times,
    publish_s: float,
    *,
    sent: bool = True,
) -> Outcome:
    """Route every question of a trace, and see what becomes of it."""
    outcome, stored = Outcome(), set[int]()
    nodes = [Node(memory, times, stored, outcome) for _ in names]
    known = [Held() for _ in names]
    seen = [Replica(name, set[int](), 0.0) for name in names]
    published = 0.0
    for asked in trace:
        for replica, node in zip(seen, nodes, strict=True):
            replica.load = node.load(asked.at)
        if asked.at >= published:
            published = asked.at - asked.at % publish_s + publish_s
            for replica, node, held in zip(seen, nodes, known, strict=True):
                held.published(node.held, asked.at)
                replica.held = held.numbers
        best = routing(RoutedQuestion(asked.passages, asked.tokens, asked.home), seen)[0]
        nodes[best].ask(asked)
        outcome.asked_of[best] += 1
        if sent:
            known[best].sent(asked.passages, asked.at)
    for node in nodes:
        node.load(float("inf"))
    return outcome


# What is found

ROOT = Path(__file__).parents[1]
LOG = ROOT / "benchmarks" / "results" / "fleet_simulation.md"
PICTURE = ROOT / "docs" / "pictures" / "fleet.svg"


@dataclass(frozen=True)
class Found:
    """Of the second half of a run: shares of passages, tokens a question, seconds, dollars."""

    found: float
    read: float
    encoded: float
    p50: float
    p95: float
    p99: float
    thousand: float


def measured(setting: Setting) -> Found:
    """Draw a trace, replay it and count."""
    machine, name = setting.machine, setting.routing.partition(",")[0]
    share = setting.rate / setting.replicas * machine.answer_work_s
    times = Times(
        # Answers of others take their share of the accelerator meanwhile.
        token_s=machine.token_s / (1 - share),
        first_s=machine.step_s(1) / (1 - share),
        answer_s=ANSWER * machine.step_s(TOGETHER),
        store_rate=0.0 if setting.store is None else min(setting.store * 1e9 / 8, CHECKED),
        wait_s=setting.wait,
    )
    random.seed(setting.seed)
    names = [f"replica {index}" for index in range(setting.replicas)]
    outcome = replay(
        drawn(setting),
        ROUTINGS[name],
        names,
        setting.memory,
        times,
        setting.publish_s,
        sent=setting.sent,
    )
    late = np.asarray(outcome.at) > np.median(outcome.at)
    found, read, encoded = (
        np.asarray(one)[late].mean() for one in (outcome.found, outcome.read, outcome.encoded)
    )
    p50, p95, p99 = np.percentile(np.asarray(outcome.first_s)[late], [50, 95, 99])
    work_s = encoded * machine.token_s + machine.step_s(1) + machine.answer_work_s
    whole = found + read + encoded
    thousand = 1000 * work_s / UTILISATION * machine.price / 3600
    told = found / whole, read / whole, encoded, p50, p95, p99, thousand
    return Found(*map(float, told))


WAYS = ("random", "prefix", "consistent", "consistent, by conversation", "resident")

BASE = Setting()


def runs(field: str, values: Sequence[Any], base: Setting, ways: Sequence[str]) -> list[Setting]:
    """Settings in which one field takes each of these values, by each way of routing."""
    changes: list[dict[str, Any]] = [{field: one, "routing": way} for one in values for way in ways]
    return [replace(base, **change) for change in changes]


def plan(base: Setting) -> dict[str, list[Setting]]:
    """The tables, by name."""
    two, three = ("random", "resident"), ("random", "consistent, by conversation", "resident")
    alone, slow = replace(base, topics=False), replace(base, machine=SLOW)
    waiting = replace(base, wait=2.0), replace(slow, wait=2.0)
    return {
        "routing": runs("seed", [base.seed], base, WAYS),
        "replicas": runs("replicas", [1, 4, 16, 64], base, WAYS)
        + runs("replicas", [256], base, three),
        "passages": runs("passages", [100_000, 1_000_000, 10_000_000], base, three),
        "memory": runs("memory", [40e9, 80e9], base, three),
        "store": [
            one
            for machine, patient in zip((base, slow), waiting, strict=True)
            for one in (
                *runs("store", [None, 10.0, 100.0], machine, two),
                *runs("store", [10.0, 100.0], patient, two[1:]),
            )
        ],
        "load": runs("load", [0.4, 0.8, 1.2, 1.6], base, three),
        "popularity": runs("zipf", [0.6, 0.9, 1.2], base, two)
        + runs("zipf", [0.6, 0.9, 1.2], alone, two),
        "publishing": [
            replace(base, publish_s=seconds, sent=sent)
            for seconds in (1.0, 10.0)
            for sent in (False, True)
        ],
    }


def row(setting: Setting, figures: Found) -> list[str]:
    """A line of the tables of `plan`, without its first cell."""
    times = (f"{one:.2f} s" for one in (figures.p50, figures.p95, figures.p99))
    found = [f"{figures.found:.0%}"] + ([f"{figures.read:.0%}"] if setting.store else ["-"])
    return [setting.routing, *found, f"{figures.encoded:,.0f}", *times, f"${figures.thousand:.2f}"]


HEAD = "routing|in memory|from the store|tokens encoded|first token: p50|p95|p99|1,000 questions"

CHANGED: dict[str, tuple[str, Callable[[Setting], str]]] = {
    "routing": ("fleet", lambda one: "16 replicas"),
    "replicas": ("replicas", lambda one: f"{one.replicas}"),
    "passages": ("passages", lambda one: f"{one.passages:,}"),
    "memory": ("memory", lambda one: f"{one.memory / 1e9:.0f} GB"),
    "store": (
        "encoding, store",
        lambda one: (
            f"{one.machine.name}, {f'{one.store:.0f} GbE' if one.store else 'none'}"
            + (f", waits {one.wait:g} s" if one.wait else "")
        ),
    ),
    "load": ("load", lambda one: f"{one.load:.1f}"),
    "popularity": (
        "trace",
        lambda one: f"Zipf {one.zipf}, passages {'by topic' if one.topics else 'one by one'}",
    ),
    "publishing": (
        "published every",
        lambda one: f"{one.publish_s:g} s" + (", what was sent remembered" if one.sent else ""),
    ),
}
"""The first cell of each table's lines, and its heading."""


def tables(found: Mapping[Setting, Found], base: Setting) -> dict[str, str]:
    """Every table in Markdown, by its name."""
    made = {}
    for name, settings in plan(base).items():
        heading, changed = CHANGED[name]
        rows = [[changed(one), *row(one, found[one])] for one in settings]
        made[f"fleet-{name}"] = "\n".join(table([heading, *HEAD.split("|")], rows))
    return made


COLOURS = dict(zip(WAYS, ("#7f7f7f", "#d98f00", "#0072b2", "#009e73", "#cc3377"), strict=True))


def picture(found: Mapping[Setting, Found], base: Setting) -> Figure:
    """Tokens encoded by the size of the fleet, and waiting by its load."""
    figure = Figure(figsize=(5.4, 5.8), layout="constrained", facecolor="#ffffff")
    upper, lower = figure.subplots(2, 1)
    panels = (
        (upper, "replicas", "replicas", "tokens encoded a question", "encoded"),
        (lower, "load", "load", "seconds to first token, p95", "p95"),
    )
    for axes, name, below, beside, value in panels:
        for way in WAYS:
            settings = [one for one in plan(base)[name] if one.routing == way]
            if not settings:
                continue
            across = [getattr(one, name) for one in settings]
            up = [getattr(found[one], value) for one in settings]
            axes.plot(across, up, marker="o", markersize=4, color=COLOURS[way], label=way)
        axes.set_xlabel(below)
        axes.set_ylabel(beside)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#eeeeee")
    upper.set_xscale("log", base=4)
    upper.set_xticks([1, 4, 16, 64, 256], ["1", "4", "16", "64", "256"])
    upper.set_ylim(bottom=0)
    upper.minorticks_off()
    lower.set_yscale("log")
    lower.set_yticks([1, 10, 100], ["1", "10", "100"])
    lower.minorticks_off()
    figure.legend(*upper.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


# The model beside a real run


def fitted(record: Record) -> Times:
    """What things take there: a straight line through first tokens by tokens encoded."""
    encoded = np.array([one.encoded_tokens for one in record.questions], dtype=np.float64)
    first = np.array([one.first_token_s for one in record.questions])
    token_s, first_s = np.polyfit(encoded, first, 1) if np.ptp(encoded) else (0.0, first.mean())
    answers = [one.whole_s - one.first_token_s for one in record.questions if one.whole_s]
    return Times(
        token_s=max(1e-9, float(token_s)),
        first_s=max(0.0, float(first_s)),
        answer_s=float(np.median(answers)) if answers else 0.0,
        token_bytes=record.token_bytes,
    )


def checked(record: Record) -> str:
    """A table: what a real run encoded, and what the simulator says of the same questions.

    Once with each question at the replica that answered it, so that only the model of memory is
    compared; once routed anew.
    """
    random.seed(0)
    home = home_of("tenant", "corpus")
    trace = [
        Asked(one.arrival_s, tuple(one.passages), tuple(one.tokens), home)
        for one in sorted(record.questions, key=lambda one: one.arrival_s)
    ]
    ordered = sorted(record.questions, key=lambda one: one.arrival_s)
    replayed = iter([record.replicas.index(one.replica) for one in ordered])
    whole = sum(sum(one.tokens) for one in ordered)

    def as_recorded(question: RoutedQuestion, replicas: Sequence[Replica]) -> list[int]:
        return [next(replayed)]

    def line(name: str, encoded: float, counts: Iterable[int]) -> list[str]:
        shares = ", ".join(f"{count}" for count in sorted(counts, reverse=True))
        return [name, f"{1 - encoded / whole:.1%}", f"{encoded / len(ordered):,.1f}", shares]

    rows = [
        line(
            "real",
            sum(one.encoded_tokens for one in ordered),
            [sum(one.replica == name for one in ordered) for name in record.replicas],
        )
    ]
    for name, routing in (
        ("simulated, questions where they were", as_recorded),
        ("simulated, routed anew", ROUTINGS[record.routing]),
    ):
        times = fitted(record)
        told = replay(trace, routing, record.replicas, record.memory_bytes, times, record.publish_s)
        rows.append(
            line(
                name,
                sum(told.encoded),
                [told.asked_of[index] for index in range(len(record.replicas))],
            )
        )
    head = ["run", "passages in memory", "tokens encoded a question", "questions of each replica"]
    return "\n".join(table(head, rows))


def main(given: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small, to see that it runs")
    parser.add_argument("--check", type=Path, nargs="+", metavar="RECORD", help="real runs, JSON")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", action="store_true", help="write log and picture of the checkout")
    options = parser.parse_args(given)
    if options.check:
        for path in options.check:
            record = Record.model_validate_json(path.read_bytes())
            print(f"{path}, {record.routing}:\n\n{checked(record)}\n")
        return
    base = replace(BASE, questions=600 if options.quick else 0)
    settings = list(dict.fromkeys(one for group in plan(base).values() for one in group))
    with ProcessPoolExecutor(options.processes) as pool:
        found = dict(zip(settings, pool.map(measured, settings), strict=True))
    made = tables(found, base)
    print("\n\n".join(f"{name}\n{lines}" for name, lines in made.items()))
    if options.out:
        before = LOG.read_text(encoding="utf-8")
        LOG.write_text(filled(before, made.get), encoding="utf-8")
        mpl.rcParams |= {"svg.fonttype": "path", "svg.hashsalt": "rag-windows"}
        mpl.rcParams["font.family"] = "DejaVu Sans"
        picture(found, base).savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
