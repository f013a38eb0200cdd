"""Replicas and a store that they share: kills, and a restart of everything.

    python -m benchmarks.serve_fleet [--replicas 3] [--questions 500] [--clients 12] [--out FILE]

The shipped model answers questions that share passages. Each question has a topic, drawn by Zipf's
law, and brings 6 of the topic's 10 passages and 2 of all, also drawn by Zipf's law, in any order.
Every answer is compared with what `WindowedLM.generate` says in this process. Half of the
questions are streamed, and every fourth answer goes on to 32 tokens.

Replicas share a store on S3, which moto's server plays. While they answer all questions, a
replica's process is killed twice. Then everything but the store is stopped and started again,
and the same questions are asked, twice. A replica that is killed takes along what it had not
written yet, and that is encoded after the first restart. After the second one nothing may be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import serve
from benchmarks.serve import LONG_S, Answer, Question, Run, Server
from rag_windows import WindowedLM
from rag_windows.samples import samples_path
from rag_windows_eval.benchmark.result import table
from rag_windows_retrievers import load_documents

TOPICS, OF_TOPIC, OWN, OTHERS = 60, 10, 6, 2
PASSAGES = TOPICS * OF_TOPIC
EXPONENT = 1.0
"""Of Zipf's law: the topic of rank r is asked for in proportion to 1 / r."""
BUCKET = "passages"
REPLICA = "x-reader"
"""Header of an answer that names the replica it comes from."""
AGAIN = "after another restart"
PATIENT = ("--shared-wait", "5")
"""The shipped model encodes a passage in less time than any store takes."""


def drawn(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Numbers of the passages that each question brings."""
    rng = random.Random(seed)
    topics, passages = (
        list(accumulate(rank**-EXPONENT for rank in range(1, size + 1)))
        for size in (TOPICS, PASSAGES)
    )
    ranked = rng.sample(range(PASSAGES), PASSAGES)
    questions = []
    for _ in range(count):
        (topic,) = rng.choices(range(TOPICS), cum_weights=topics)
        taken = rng.sample(range(topic * OF_TOPIC, (topic + 1) * OF_TOPIC), OWN)
        while len(taken) < OWN + OTHERS:
            (other,) = rng.choices(ranked, cum_weights=passages)
            if other not in taken:
                taken.append(other)
        questions.append(tuple(rng.sample(taken, len(taken))))
    return questions


def questions(count: int, seed: int = 0) -> list[Question]:
    """Questions that share passages, with the answers of `generate`."""
    rng = random.Random(seed)
    lines = (samples_path() / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    asked_of = {one["document"]: one["question"] for one in map(json.loads, lines)}
    folder = samples_path() / "corpus"
    documents = list(load_documents([folder], root=folder).documents)
    rng.shuffle(documents)
    # The corpus is smaller than what is asked about, so its texts come again as others.
    copies = [documents[number % len(documents)] for number in range(PASSAGES)]
    texts = [f"Letter {number}. {one.text}" for number, one in enumerate(copies)]
    lm = WindowedLM.from_pretrained("tiny-reader", device_map="cpu")
    made = []
    for index, numbers in enumerate(drawn(count, seed)):
        known = [asked_of[name] for one in numbers if (name := copies[one].id) in asked_of]
        text = rng.choice(known or list(asked_of.values()))
        passages = [texts[one] for one in numbers]
        shape: dict[str, Any] = {"long": index % 4 == 0, "streamed": rng.random() < 0.5}
        made.append(serve.with_answer(lm, Question(text, passages, "", [], **shape)))
    return made


@contextmanager
def s3() -> Iterator[dict[str, str]]:
    """S3, played by moto's server in another process; the variables by which it is found."""
    port = serve.free_port()
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "--port", str(port)]
    with subprocess.Popen(  # noqa: S603 - fixed words
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            until = time.monotonic() + LONG_S
            while True:
                with suppress(httpx.TransportError):
                    if httpx.put(f"{address}/{BUCKET}").status_code == 200:
                        break
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit("moto's server did not start.")
                time.sleep(0.1)
            yield {
                "AWS_ENDPOINT_URL": address,
                "AWS_ACCESS_KEY_ID": "tests",
                "AWS_SECRET_ACCESS_KEY": "tests",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
        finally:
            process.terminate()


@dataclass
class Fleet(Run):
    """What happened in one run over replicas.

    Attributes:
        tokens: of each answered question, those of its prompt that were computed.
        windows: of each answered question, those that were encoded.
        replicas: that answered each of them.
        shared: whether there was a store.
        start_s, stop_s: until it was ready, and until its process was gone.
        counters: of each replica, by name, from ``/metrics`` at the end.
        memory_mib: of all processes by kind; pages that several share are counted once.
        behind: processes that were still there when the server had ended.
    """

    tokens: list[int] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)
    replicas: list[str] = field(default_factory=list)
    shared: bool = False
    start_s: float = 0.0
    stop_s: float = 0.0
    counters: dict[str, dict[str, float]] = field(default_factory=dict)
    memory_mib: dict[str, float] = field(default_factory=dict)
    behind: int = 0

    def add(self, answer: Answer) -> None:
        """Note what an answer took."""
        rag, usage = answer.told["rag"], answer.usage
        computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        self.tokens.append(computed)
        self.windows.append(rag["windows"] - rag["cached_windows"])
        self.replicas.append(answer.headers.get(REPLICA, ""))

    def count(self, name: str) -> float:
        """A counter, of all replicas."""
        return sum(one.get(name, 0.0) for one in self.counters.values())


def processes(pid: int) -> dict[int, str]:
    """A process and all that it has started, with their command lines."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = path.joinpath("stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1]
            parents.setdefault(int(parent), []).append(int(path.name))
    found: dict[int, str] = {}
    left = [pid]
    while left:
        one = left.pop()
        with suppress(OSError):
            line = Path("/proc", str(one), "cmdline").read_text(encoding="utf-8")
            found[one] = line.replace("\0", " ").strip()
        left += parents.get(one, ())
    return found


def readers(pid: int) -> list[int]:
    """The processes of a server's replicas; Ray writes an actor's name into its command line."""
    found = processes(pid).items()
    return [one for one, line in found if "ServeReplica" in line and ":Reader" in line]


def memory(pid: int) -> dict[str, float]:
    """MiB of a server's processes, by kind."""
    found: dict[str, float] = {}
    for one, line in processes(pid).items():
        kind = "server" if one == pid else "Ray"
        if "ServeReplica" in line:
            kind = "replicas" if "Reader" in line else "front"
        with suppress(OSError):
            told = Path("/proc", str(one), "smaps_rollup").read_text(encoding="utf-8")
            (pss,) = (row.split()[1] for row in told.splitlines() if row.startswith("Pss:"))
            found[kind] = found.get(kind, 0.0) + int(pss) / 1024
    return found


def counted(text: str) -> dict[str, dict[str, float]]:
    """The cache's counters of each replica in Prometheus' text format."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("rag_windows_cache_"):
                name = sample.name.removeprefix("rag_windows_cache_").removesuffix("_total")
                if tier := sample.labels.get("tier"):
                    name = f"{tier}: {name.removeprefix('tier_')}"
                found.setdefault(sample.labels.get("replica", ""), {})[name] = sample.value
    return found


async def asked_all(server: Server, run: Fleet, asked: Sequence[Question]) -> None:
    """Ask all questions, so many at a time; replicas are killed on the way."""
    rng = random.Random(0)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=run.clients)
    async with httpx.AsyncClient(base_url=server.address, timeout=LONG_S, limits=limits) as client:
        line = iter(asked)
        alive = readers(server.pid)
        wanted = len(alive)
        back: list[asyncio.Task[None]] = []

        async def one_client() -> None:
            for question in line:
                answer = await serve.answered(client, question, run)
                if answer is not None:
                    run.add(answer)

        async def killer() -> None:
            for number in range(run.kills):
                while len(run.first_s) < len(asked) * (number + 1) / (run.kills + 1):
                    await asyncio.sleep(0.01)
                # One that has answered, not one that is about to take another's place.
                os.kill(alive.pop(rng.randrange(len(alive))), signal.SIGKILL)
                back.append(asyncio.create_task(until_back()))

        async def until_back() -> None:
            """Note how long it takes until all replicas answer again."""
            killed, left = time.monotonic(), 0
            while left < wanted:
                await asyncio.sleep(0.5)
                told = await client.get("/metrics")
                left = len(counted(told.text)) if told.status_code == 200 else 0
            run.back_s.append(time.monotonic() - killed)

        begun = time.monotonic()
        killing = asyncio.create_task(killer())
        await asyncio.gather(*(one_client() for _ in range(run.clients)))
        run.seconds = time.monotonic() - begun
        await killing
        await asyncio.wait_for(asyncio.gather(*back), LONG_S)
        run.memory_mib = memory(server.pid)
        run.counters = counted((await client.get("/metrics")).text)


async def measured(
    run: Fleet, asked: Sequence[Question], options: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Start a server, ask all questions, stop it."""
    with tempfile.TemporaryDirectory(prefix="rag-windows-fleet-") as folder:
        log = Path(folder, "log")
        told = {**environment, "RAG_WINDOWS_CACHE_DIR": str(Path(folder, "windows"))}
        server = Server(*options, environment=told, log=log, within_s=5 * LONG_S)
        all_of_it: dict[int, str] = {}
        try:
            run.start_s = await server.start()
            await asked_all(server, run, asked)
            all_of_it = processes(server.pid)
            run.stop_s = await asyncio.to_thread(server.end, signal.SIGTERM)
            await asyncio.sleep(1)
            run.behind = len(_still(all_of_it))
            print(f"{run.name}: {run.seconds:.1f} s", file=sys.stderr)
        except BaseException:
            print(log.read_text(encoding="utf-8"), file=sys.stderr)
            raise
        finally:
            for one in _still(all_of_it or processes(server.pid)):
                with suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)


def _still(pids: Iterable[int]) -> list[int]:
    """Those that run still."""
    return [one for one in pids if Path("/proc", str(one)).exists()]


async def proved(
    asked: Sequence[Question], replicas: int, clients: int
) -> AsyncGenerator[Fleet, None]:
    """Ask a server, replicas with two kills, and these after restarts of all but the store."""
    size = len(asked), clients
    runs = [
        Fleet("one process", *size),
        Fleet(f"{replicas} replicas, two kills", *size, kills=2, shared=True),
        Fleet("after a restart", *size, shared=True),
        Fleet(AGAIN, *size, shared=True),
    ]
    with s3() as environment:
        for run in runs:
            fleet = ["--replicas", str(replicas), "--shared", f"s3://{BUCKET}/proof", *PATIENT]
            await measured(run, asked, fleet if run.shared else (), environment)
            yield run


def shown(runs: Sequence[Fleet]) -> list[str]:
    """A table of runs."""
    rows = []
    for run in runs:
        first = sorted(run.first_s) or [0.0]
        middle, late = statistics.median(first), first[min(len(first) - 1, int(0.99 * len(first)))]
        reads = run.count("shared: hits") / max(1, len(first))
        answered = Counter(run.replicas).values()
        rows.append(
            [
                run.name,
                str(run.questions),
                str(run.kills),
                str(run.wrong),
                str(run.lost),
                str(run.again),
                f"{statistics.mean(run.tokens or [0]):.1f}",
                f"{statistics.mean(run.windows or [0]):.2f}",
                f"{reads:.2f}",
                f"{100 * max(answered, default=0) / len(first):.0f}%",
                f"{len(run.first_s) / run.seconds:.1f}",
                f"{1000 * middle:.0f} ms, {1000 * late:.0f} ms",
            ]
        )
    head = ["run", "questions", "kills", "wrong", "lost", "asked again", "tokens computed"]
    head += ["windows computed", "windows from the store", "busiest replica", "answers/s"]
    return table([*head, "first token: p50, p99"], rows)


def main(given: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--out", type=Path, help="write JSON into this folder")
    runs = asyncio.run(_all(parser.parse_args(given)))
    print("\n".join(shown(runs)))
    if any(run.wrong or run.lost or run.behind for run in runs):
        sys.exit("Answers were wrong or lost, or processes were left behind.")
    if any(run.count("misses") for run in runs if run.name == AGAIN):
        sys.exit("What the store had was encoded anew after a restart.")


async def _all(options: argparse.Namespace) -> list[Fleet]:
    runs = []
    async for run in proved(questions(options.questions), options.replicas, options.clients):
        runs.append(run)
        if options.out:
            write(run, options.out)
    return runs


def write(run: Fleet, folder: Path) -> None:
    """A run as a file of its name."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"run {run.name}.json".replace(", ", "-").replace(" ", "-")
    path.write_text(json.dumps(_rounded(asdict(run))) + "\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    """The same with milliseconds in place of nanoseconds."""
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return round(value, 3) if isinstance(value, float) and value > 0.01 else value


if __name__ == "__main__":
    main()
