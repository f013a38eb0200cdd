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
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx

from rag_windows import WindowedLM
from rag_windows.samples import sample_questions, samples_path
from rag_windows_eval.benchmark.result import table
from rag_windows_retrievers import BM25Retriever, load_documents, split_documents

Q = TypeVar("Q", bound="Question")
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
    streamed: bool = True

    def body(self, **options: Any) -> dict[str, Any]:
        """The same as a request."""
        messages = [{"role": "user", "content": self.text}]
        body = {"model": "tiny-reader", "messages": messages, "documents": self.passages}
        longer = _longer(LONG_TOKENS) if self.long else {}
        told = {"stream_options": {"include_usage": True}} if self.streamed else {}
        return {**body, "temperature": 0, "stream": self.streamed, **told, **longer, **options}


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
        again: questions that were asked once more, because a try failed.
        failed: why tries failed, and how many for each reason.
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
    failed: dict[str, int] = field(default_factory=dict)
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
    for number, text in enumerate(itertools.islice(itertools.cycle(sample_questions()), count)):
        shared = [one.text for one in corpus.retrieve(text, 4)]  # fewer where no more fit
        others = rng.sample([one for one in texts if one not in shared], 8 - len(shared))
        own = [f"Letter {number}, page {page}. {one}" for page, one in enumerate(others, 1)]
        passages = rng.sample(shared + own, len(shared + own))
        for long in (False, True):
            made[long].append(with_answer(lm, Question(text, passages, "", [], long)))
    return made


def with_answer(lm: WindowedLM, question: Q) -> Q:
    """The same question with what `generate` answers."""
    longer: dict[str, Any] = {"max_new_tokens": LONG_TOKENS, "sequence_bias": [[[END], -100.0]]}
    options = longer if question.long else {}
    answer = lm.generate(question.text, question.passages, do_sample=False, **options)
    weights = [one.mass for one in answer.citations or ()]
    return replace(question, answer=answer.text, weights=weights)


def free_port() -> int:
    """A port on which nobody listens.

    It is none of those that the system gives to outgoing connections, for it may take a minute
    until a server listens on it.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Server:
    """`rag-windows serve` in a process of its own.

    Args:
        options: of the command.
        environment: variables beside those of this process.
        log: file for what it prints; by default nobody reads that.
        within_s: seconds in which it must be ready.
    """

    def __init__(
        self,
        *options: str,
        environment: Mapping[str, str] | None = None,
        log: Path = Path(os.devnull),
        within_s: float = LONG_S,
    ) -> None:
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.peak_mib = 0.0
        program = str(Path(sys.executable).with_name("rag-windows"))
        self._command = [program, "serve", "--port", str(self.port), "--device=cpu", *options]
        self._environment = {**os.environ, **(environment or {})}
        self._log, self._within_s = log, within_s

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    async def start(self) -> float:
        """Start it; seconds until it is ready."""
        begun = time.monotonic()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own command
                self._command, env=self._environment, stderr=log, stdout=log
            )
        async with httpx.AsyncClient(base_url=self.address) as client:
            while True:
                with suppress(httpx.TransportError):
                    if (await client.get("/ready")).status_code == 200:
                        return time.monotonic() - begun
                if self._process.poll() is not None or time.monotonic() - begun > self._within_s:
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


class Failed(Exception):
    """A try to get an answer ended without one; the text says why."""


@dataclass
class Answer:
    """What came back.

    Attributes:
        told: the message, or a stream's last delta: citations, and how windows were read.
        first_s, whole_s: from the request to the first text and to the end.
    """

    text: str
    told: Mapping[str, Any]
    usage: Mapping[str, Any]
    headers: Mapping[str, str]
    first_s: float
    whole_s: float


async def answered(client: httpx.AsyncClient, question: Question, run: Run) -> Answer | None:
    """Ask until there is an answer, and note how it was; None if it is lost."""
    until = time.monotonic() + LONG_S
    for number in itertools.count():
        run.again += number == 1
        try:
            answer = await (_streamed if question.streamed else _whole)(client, question)
            _note(question, answer, run)
            return answer
        except (httpx.TransportError, Failed) as error:
            why = str(error) if isinstance(error, Failed) else type(error).__name__
            run.failed[why] = run.failed.get(why, 0) + 1
        if time.monotonic() > until:
            break
        await asyncio.sleep(0.1)
    run.lost += 1
    return None


async def _streamed(client: httpx.AsyncClient, question: Question) -> Answer:
    begun, first_s, text = time.monotonic(), None, ""
    last: Mapping[str, Any] | None = None
    usage: Mapping[str, Any] = {}
    async with client.stream("POST", CHAT, json=question.body()) as answer:
        if answer.status_code != 200:
            raise Failed(f"status {answer.status_code}")
        async for line in answer.aiter_lines():
            if line == "data: [DONE]" and last is not None:
                whole_s = time.monotonic() - begun
                first_s = first_s or whole_s
                return Answer(text, last, usage, answer.headers, first_s, whole_s)
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise Failed(f"an error {'within' if text else 'instead of'} the stream")
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                if first_s is None and text:
                    first_s = time.monotonic() - begun
                last = choice["delta"] if choice["finish_reason"] else None
    raise Failed("a stream without an end")


async def _whole(client: httpx.AsyncClient, question: Question) -> Answer:
    begun = time.monotonic()
    answer = await client.post(CHAT, json=question.body())
    if answer.status_code != 200:
        raise Failed(f"status {answer.status_code}")
    body = answer.json()
    told = body["choices"][0]["message"]
    whole_s = time.monotonic() - begun
    return Answer(told["content"], told, body["usage"], answer.headers, whole_s, whole_s)


def _note(question: Question, answer: Answer, run: Run) -> None:
    found, right = [one["weight"] for one in answer.told["citations"]], question.weights
    whole = answer.text == question.answer and len(found) == len(right)
    off = max(abs(a - b) for a, b in zip(found, right, strict=True)) if whole else 0.0
    run.weight_off = max(run.weight_off, off)
    run.wrong += not whole or off > TOLERANCE
    run.first_s.append(answer.first_s)


async def leaves(client: httpx.AsyncClient, question: Question, streamed: bool, run: Run) -> None:
    """Ask for a long answer, and leave in its middle."""
    body = replace(question, streamed=streamed).body(**_longer(400))
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
    server = Server("--cache-dir", tempfile.mkdtemp(dir=folder))
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
