"""A server under load: clients that come together, that leave, and a server that is killed.

    python -m benchmarks.serve [--questions 200] [--clients 16] [--out FILE]

The shipped model answers questions about the sample corpus. Each question brings 8 passages: the
4 that fit it best, which other questions bring, too, and 4 that nobody else brings. Every answer is
compared with what `WindowedLM.generate` says in this process, its text and its citations. There
are runs with one client that asks one question after the other, and with many at a time, each over
a new folder of the passage cache. The model's own answers have 2 or 3 tokens, so there are runs
in which each goes on to 32. In the last run every fifth question has a companion that leaves in
the middle of a long answer, streamed or not, and the server is killed twice and started again over
the same folder. Clients whose connection breaks ask again. At the end the server is stopped by
SIGTERM while long answers are under way.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from rag_windows import WindowedLM
from rag_windows.benchmark.result import table
from rag_windows.samples import sample_questions, samples_path
from rag_windows_retrievers import BM25Retriever, load_documents, split_documents

CHAT = "/v1/chat/completions"
END = 2
"""The token with which an answer of this model ends."""
LONG_TOKENS = 32
LONG_S = 120.0
"""Nobody waits longer for an answer, with all tries: it is lost."""
TOLERANCE = 1e-3
"""Of a citation's weight: what is computed together is rounded otherwise than alone."""


@dataclass(frozen=True)
class Question:
    """What is asked, and what `generate` answers."""

    text: str
    passages: list[str]
    answer: str
    weights: list[float]
    long: bool = False

    def body(self, **options: Any) -> dict[str, Any]:
        """The same as a streamed request."""
        messages = [{"role": "user", "content": self.text}]
        body = {"model": "tiny-reader", "messages": messages, "documents": self.passages}
        longer = _longer(LONG_TOKENS) if self.long else {}
        return {**body, "temperature": 0, "stream": True, **longer, **options}


def _longer(tokens: int) -> dict[str, Any]:
    """Options of a request for an answer of so many tokens."""
    return {"logit_bias": {str(END): -100}, "max_completion_tokens": tokens}


@dataclass
class Run:
    """What happened in one run.

    Attributes:
        first_s: of each answered question, from the last try until the first text.
        wrong: answers whose text or weights are not those of `generate`.
        lost: questions without an answer.
        again: questions that were asked once more, because a connection broke.
        left: clients that left in the middle of an answer.
        kills: of the server.
        back_s: after each kill, until the server was ready again.
        rows_behind: answers that were still being written when all clients had gone.
        peak_mib: resident memory of the server process, the most of all that ran.
    """

    name: str
    questions: int
    clients: int
    seconds: float = 0.0
    first_s: list[float] = field(default_factory=list)
    wrong: int = 0
    lost: int = 0
    again: int = 0
    left: int = 0
    kills: int = 0
    back_s: list[float] = field(default_factory=list)
    rows_behind: int = 0
    peak_mib: float = 0.0
    weight_off: float = 0.0


@dataclass
class Result:
    """What is written to JSON."""

    machine: str
    runs: list[Run]
    stop_s: float
    stopped_under_way: int


def questions(count: int) -> dict[bool, list[Question]]:
    """Questions with their passages, and the answers of `generate`: as they are, and long."""
    rng = random.Random(0)
    folder = samples_path() / "corpus"
    loaded = load_documents([folder], root=folder)
    corpus = BM25Retriever(split_documents(loaded.documents, words=60))
    lm = WindowedLM.from_pretrained("tiny-reader", device_map="cpu")
    texts = [one.text for one in corpus.passages]
    made: dict[bool, list[Question]] = {False: [], True: []}
    longer: dict[str, Any] = {"max_new_tokens": LONG_TOKENS, "sequence_bias": [[[END], -100.0]]}
    for number, text in enumerate(itertools.islice(itertools.cycle(sample_questions()), count)):
        shared = [one.text for one in corpus.retrieve(text, 4)]  # fewer where no more fit
        others = rng.sample([one for one in texts if one not in shared], 8 - len(shared))
        own = [f"Letter {number}, page {page}. {one}" for page, one in enumerate(others, 1)]
        passages = rng.sample(shared + own, len(shared + own))
        for long in (False, True):
            options = longer if long else {}
            answer = lm.generate(text, passages, do_sample=False, **options)
            weights = [one.mass for one in answer.citations or ()]
            made[long].append(Question(text, passages, answer.text, weights, long))
    return made


class Server:
    """`rag-windows serve` in a process of its own, over one folder of the passage cache."""

    def __init__(self, cache: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.peak_mib = 0.0
        self._cache = cache

    async def start(self) -> float:
        """Start it; seconds until it is ready."""
        begun = time.monotonic()
        program = Path(sys.executable).with_name("rag-windows")
        self._process = subprocess.Popen(  # noqa: S603 - our own command
            [
                program,
                "serve",
                "--port",
                str(self.port),
                "--cache-dir",
                self._cache,
                "--device=cpu",
            ],
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        async with httpx.AsyncClient(base_url=self.address) as client:
            while True:
                with suppress(httpx.TransportError):
                    if (await client.get("/ready")).status_code == 200:
                        return time.monotonic() - begun
                if self._process.poll() is not None or time.monotonic() - begun > LONG_S:
                    raise SystemExit("The server did not start.")
                await asyncio.sleep(0.05)

    def end(self, number: int) -> float:
        """Send it a signal; seconds until it is gone."""
        status = Path("/proc", str(self._process.pid), "status").read_text(encoding="utf-8")
        (peak,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
        self.peak_mib = max(self.peak_mib, int(peak) / 1024)
        begun = time.monotonic()
        self._process.send_signal(number)
        self._process.wait(LONG_S)
        return time.monotonic() - begun


async def answered(client: httpx.AsyncClient, question: Question, run: Run) -> None:
    """Ask until there is an answer, and note how it was."""
    until = time.monotonic() + LONG_S
    for number in itertools.count():
        run.again += number == 1
        begun, first_s, text, last = time.monotonic(), None, "", None
        with suppress(httpx.TransportError):
            async with client.stream("POST", CHAT, json=question.body()) as answer:
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        if line == "data: [DONE]" and last is not None:
                            _compare(question, text, last["citations"], run)
                            run.first_s.append(first_s or time.monotonic() - begun)
                            return
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        break
                    delta = event["choices"][0]["delta"]
                    text += delta.get("content") or ""
                    if first_s is None and text:
                        first_s = time.monotonic() - begun
                    last = delta if event["choices"][0]["finish_reason"] else None
        if time.monotonic() > until:
            run.lost += 1
            return
        await asyncio.sleep(0.1)


def _compare(question: Question, text: str, citations: Sequence[Any], run: Run) -> None:
    found = [one["weight"] for one in citations]
    off = max(abs(a - b) for a, b in zip(found, question.weights, strict=True))
    run.weight_off = max(run.weight_off, off)
    run.wrong += text != question.answer or off > TOLERANCE


async def leaves(client: httpx.AsyncClient, question: Question, streamed: bool, run: Run) -> None:
    """Ask for a long answer, and leave in its middle."""
    body = question.body(stream=streamed, **_longer(400))
    with suppress(httpx.TransportError):
        if not streamed:
            try:
                await client.post(CHAT, json=body, timeout=0.3)
            except httpx.ReadTimeout:
                run.left += 1
            return
        async with client.stream("POST", CHAT, json=body) as answer:
            first = await anext(answer.aiter_lines(), "")
            run.left += first.startswith("data: {")


async def load(
    run: Run, asked: Sequence[Question], folder: Path, leaving: bool = False, kills: int = 0
) -> Server:
    """Ask all questions, so many at a time; the server still runs."""
    server = Server(Path(tempfile.mkdtemp(dir=folder)))
    await server.start()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=run.clients)
    async with httpx.AsyncClient(base_url=server.address, timeout=LONG_S, limits=limits) as client:
        # The first answers of a process load code and measure kernels.
        warm = Run("warm", 1, 1)
        await answered(client, Question("Who?", ["Nobody."], "", [0.0]), warm)
        left_ones: list[asyncio.Task[None]] = []
        line = iter(enumerate(asked))

        async def one_client() -> None:
            for number, question in line:
                if leaving and number % 5 == 0:
                    left = leaves(client, question, number % 2 == 0, run)
                    left_ones.append(asyncio.create_task(left))
                await answered(client, question, run)

        async def killer() -> None:
            for number in range(kills):
                while len(run.first_s) < len(asked) * (number + 1) / (kills + 1):
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(server.end, signal.SIGKILL)
                run.kills += 1
                run.back_s.append(await server.start())

        begun = time.monotonic()
        killing = asyncio.create_task(killer())
        await asyncio.gather(*(one_client() for _ in range(run.clients)))
        run.seconds = time.monotonic() - begun
        await asyncio.gather(killing, *left_ones)
        await asyncio.sleep(1)
        metrics = (await client.get("/metrics")).text
        rows = [one for one in metrics.splitlines() if one.startswith("rag_windows_batch_rows ")]
        run.rows_behind = int(float(rows[0].split()[1]))
    return server


async def stopped(server: Server, asked: Sequence[Question], clients: int) -> tuple[float, int]:
    """Seconds that SIGTERM takes with long answers under way, and how many these were."""
    seen = 0

    async def long(client: httpx.AsyncClient, question: Question) -> None:
        nonlocal seen
        body = question.body(**_longer(4000))
        with suppress(httpx.TransportError):
            async with client.stream("POST", CHAT, json=body) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                seen += 1
                async for _ in lines:
                    pass

    async with httpx.AsyncClient(base_url=server.address, timeout=LONG_S) as client:
        asking = [asyncio.create_task(long(client, one)) for one in asked[:clients]]
        while seen < clients and not all(one.done() for one in asking):
            await asyncio.sleep(0.05)
        under_way = sum(not one.done() for one in asking)
        seconds = await asyncio.to_thread(server.end, signal.SIGTERM)
        await asyncio.wait_for(asyncio.gather(*asking), 10)
    return seconds, under_way


async def measured(count: int, clients: int, machine: str) -> Result:
    """All runs."""
    asked = questions(count)
    runs = [
        Run("one by one", count, 1),
        Run("together", count, clients),
        Run("one by one, 32 tokens each", count, 1),
        Run("together, 32 tokens each", count, clients),
        Run("together, with leaving and kills", count, clients),
    ]
    with tempfile.TemporaryDirectory(prefix="rag-windows-serve-") as name:
        for index, run in enumerate(runs):
            hard = index == len(runs) - 1
            these = asked[index in (2, 3)]
            server = await load(run, these, Path(name), leaving=hard, kills=2 if hard else 0)
            if not hard:
                server.end(signal.SIGTERM)
            else:
                stop_s, under_way = await stopped(server, these, clients)
            run.peak_mib = server.peak_mib
            print(f"{run.name}: {run.seconds:.1f} s", file=sys.stderr)
    return Result(machine, runs, stop_s, under_way)


def shown(result: Result) -> str:
    """The table."""
    rows = []
    for run in result.runs:
        first = sorted(run.first_s)
        p50, p99 = (
            (statistics.median(first), first[min(len(first) - 1, int(0.99 * len(first)))])
            if first
            else (0.0, 0.0)
        )
        rows.append(
            [
                run.name,
                f"{run.questions}, {run.clients} at a time",
                f"{run.left}",
                f"{run.kills}",
                f"{run.wrong}",
                f"{run.lost}",
                f"{len(first) / run.seconds:.1f}",
                f"{1000 * p50:.0f} ms, {1000 * p99:.0f} ms",
                f"{run.peak_mib:.0f} MiB",
            ]
        )
    head = ["run", "questions", "left", "kills", "wrong", "lost", "answers/s"]
    head += ["first token: p50, p99", "peak memory"]
    lines = table(head, rows)
    hard = result.runs[-1]
    back = ", ".join(f"{seconds:.1f} s" for seconds in hard.back_s)
    lines += [
        "",
        f"After the kills the server was ready again in {back}; {hard.again} questions were asked "
        f"again. When all had gone, {hard.rows_behind} answers were still being written. SIGTERM "
        f"ended the process in {result.stop_s:.1f} s with {result.stopped_under_way} long answers "
        "under way. Weights of citations differ from those of `generate` by at most "
        f"{max(run.weight_off for run in result.runs):.0e}.",
    ]
    return "\n".join(lines)


def main(given: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--machine", default="", help="what it ran on, for the JSON")
    parser.add_argument("--out", type=Path, help="write JSON to this file")
    options = parser.parse_args(given)
    result = asyncio.run(measured(options.questions, options.clients, options.machine))
    print(shown(result))
    if options.out:
        options.out.write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
    if any(run.wrong or run.lost or run.rows_behind for run in result.runs):
        sys.exit("Answers were wrong or lost, or work went on behind clients that had left.")


if __name__ == "__main__":
    main()
