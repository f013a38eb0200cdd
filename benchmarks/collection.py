"""A collection that changes while it is asked, and a server that is killed meanwhile.

    python -m benchmarks.collection [--questions 200] [--clients 16] [--changes 300] [--out FILE]

The shipped model answers from a watched folder and from documents that are sent to the server.
While clients ask, files are written, edited and removed, documents are sent, replaced and deleted,
and the server is killed twice (SIGKILL) and started again over the same index and cache. Each text
holds a number of its own, so that every passage that an answer read can be told from older
versions of it.

A passage is *stale* if its text had been replaced or removed before its question was asked: a
file's more than two seconds before, a sent document's once the server had answered. A question is
*lost* if it has no answer after two minutes of tries. At the end the index has to hold what folder
and sent documents hold, and the cache on disk no window of what was removed. It takes about a
minute on 2 cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx

from benchmarks.serve import CHAT, LONG_S, Server
from rag_windows import PassageCache
from rag_windows_retrievers import open_index

WATCH_S = 2.0
"""Seconds within which a changed file has to be taken up."""


@dataclass
class Version:
    """One text of a document; ``gone`` is when it was replaced or removed, None while it stands."""

    text: str
    watched: bool
    gone: float | None = None

    def stale(self, asked: float) -> bool:
        """Whether a question of this moment may not read it any more."""
        grace = WATCH_S if self.watched else 0.0
        return self.gone is not None and asked > self.gone + grace


@dataclass
class Outcome:
    """What happened.

    Attributes:
        seconds: from the first question to the last answer.
        changes: how many of each kind were made.
        answers: that came; ``stale`` of them read a text that was gone, ``unknown`` one that never
            was, ``right`` one of the versions asked for.
        noted: answers that say that a document changed while they were written.
        lost: questions without an answer.
        again: questions that were asked once more.
        back_s: after each kill, until the server was ready again.
        answer_s: of each answer, from its last try.
        missing, surplus: passages that the index lacks or has beside the documents at the end.
        windows_left: of removed documents, on disk at the end.
    """

    questions: int
    clients: int
    seconds: float = 0.0
    changes: dict[str, int] = field(default_factory=dict)
    answers: int = 0
    stale: int = 0
    unknown: int = 0
    right: int = 0
    noted: int = 0
    lost: int = 0
    again: int = 0
    back_s: list[float] = field(default_factory=list)
    answer_s: list[float] = field(default_factory=list)
    missing: int = 0
    surplus: int = 0
    windows_left: int = 0


class Collection:
    """Folder and sent documents, with every version that there ever was."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder = folder
        self.versions: dict[str, list[Version]] = {}
        self._random = random.Random(seed)
        self._numbers = iter(range(10_000, 10**9))
        for number in range(60):
            self.write(f"item{number}")

    def of(self, text: str) -> Version | None:
        """The version that a passage is of."""
        return next((v for own in self.versions.values() for v in own if v.text == text), None)

    def standing(self, *, watched: bool | None = None) -> list[str]:
        """Names of documents that are there."""
        return [
            name
            for name, own in self.versions.items()
            if own[-1].gone is None and watched in (None, own[-1].watched)
        ]

    def removed(self) -> list[str]:
        """Ids of documents that were there and are gone."""
        names = [name for name, own in self.versions.items() if own[-1].gone is not None]
        return [f"{name}.txt" if self.versions[name][-1].watched else name for name in names]

    def text(self, name: str) -> str:
        """A new text of a document."""
        number = next(self._numbers)
        return f"The code of {name} is {number}. Whoever asks for {name} is told {number}."

    def write(self, name: str) -> None:
        """Write or edit a file."""
        text = self.text(name)
        self._end(name)
        (self.folder / f"{name}.txt").write_text(text, encoding="utf-8")
        self.versions.setdefault(name, []).append(Version(text, watched=True))

    def unlink(self, name: str) -> None:
        """Remove a file."""
        (self.folder / f"{name}.txt").unlink()
        self._end(name)

    def _end(self, name: str) -> None:
        if name in self.versions:
            self.versions[name][-1].gone = time.monotonic()

    async def send(self, client: httpx.AsyncClient, name: str) -> None:
        """Send a document, or another version of one."""
        text = self.text(name)
        new = Version(text, watched=False)
        # It may be read as soon as the server has it, which is before we know.
        own = self.versions.setdefault(name, [])
        own.append(new)
        await _until_done(
            lambda: client.post("/v1/documents", json={"documents": [{"id": name, "text": text}]})
        )
        for old in own[:-1]:
            old.gone = old.gone or time.monotonic()

    async def delete(self, client: httpx.AsyncClient, name: str) -> None:
        """Delete a document."""
        await _until_done(lambda: client.delete(f"/v1/documents/{name}"), missing=True)
        self._end(name)

    async def change(self, client: httpx.AsyncClient, number: int) -> str:
        """Make one change; says which."""
        kind = self._random.choice(("write", "edit", "remove", "send", "replace", "delete"))
        files, sent = (self.standing(watched=one) for one in (True, False))
        if kind == "write" or (kind in ("edit", "remove") and len(files) < 20):
            self.write(f"new{number}")
            return "files added"
        if kind == "edit":
            self.write(self._random.choice(files))
            return "files edited"
        if kind == "remove":
            self.unlink(self._random.choice(files))
            return "files removed"
        if kind == "send" or not sent:
            await self.send(client, f"sent{number}")
            return "documents sent"
        if kind == "replace":
            await self.send(client, self._random.choice(sent))
            return "documents replaced"
        await self.delete(client, self._random.choice(sent))
        return "documents deleted"


async def _until_done(call: Callable[[], Awaitable[httpx.Response]], missing: bool = False) -> None:
    """Make a request until the server has answered it; a deleted document may be gone already."""
    until = time.monotonic() + LONG_S
    while time.monotonic() < until:
        with suppress(httpx.TransportError):
            answer = await call()
            if answer.status_code == 200 or (missing and answer.status_code == 404):
                return
        await asyncio.sleep(0.1)
    raise SystemExit("The server did not take a change.")


async def measured(questions: int, clients: int, changes: int) -> Outcome:
    """The whole run."""
    outcome = Outcome(questions, clients)
    with tempfile.TemporaryDirectory(prefix="rag-windows-collection-") as name:
        root = Path(name)
        folder, index, cache = (root / one for one in ("notes", "index", "cache"))
        folder.mkdir()
        collection = Collection(folder)
        server = Server(
            *("--model", "tiny-reader", "--docs", str(folder), "--index", str(index)),
            *("--cache-dir", str(cache), "--top-k", "4"),
            log=root / "log.txt",
        )
        await server.start()
        try:
            await _run(outcome, collection, server, changes)
            await asyncio.sleep(WATCH_S)
        finally:
            server.end(signal.SIGTERM)
        with open_index(index) as held:
            found = sorted(one.text for one in held.passages)
        expected = sorted(collection.versions[one][-1].text for one in collection.standing())
        outcome.missing = sum(one not in found for one in expected)
        outcome.surplus = sum(one not in expected for one in found)
        gone = [f"{folder.name}/{one}" for one in collection.removed()] + collection.removed()
        outcome.windows_left = PassageCache(memory=None, path=cache).invalidate(gone)
    return outcome


async def _run(outcome: Outcome, collection: Collection, server: Server, changes: int) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=outcome.clients)
    async with httpx.AsyncClient(base_url=server.address, timeout=LONG_S, limits=limits) as client:
        rng, line, begun = random.Random(1), iter(range(outcome.questions)), time.monotonic()
        done = asyncio.Event()

        async def one_client() -> None:
            for _ in line:
                await _asked(client, collection, rng, outcome)

        async def changing() -> None:
            for number in range(changes):
                # As many changes as answers, whatever the server takes for one.
                while outcome.answers < outcome.questions * number / changes and not done.is_set():
                    await asyncio.sleep(0.005)
                kind = await collection.change(client, number)
                outcome.changes[kind] = outcome.changes.get(kind, 0) + 1

        async def killing() -> None:
            for number in (1, 2):
                while outcome.answers < outcome.questions * number / 3:
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(server.end, signal.SIGKILL)
                outcome.back_s.append(await server.start())

        work = [asyncio.create_task(one) for one in (changing(), killing())]
        await asyncio.gather(*(one_client() for _ in range(outcome.clients)))
        outcome.seconds = time.monotonic() - begun
        done.set()
        await asyncio.gather(*work)


async def _asked(
    client: httpx.AsyncClient, collection: Collection, rng: random.Random, outcome: Outcome
) -> None:
    """Ask about a document until there is an answer, and look at what it read."""
    name = rng.choice([*collection.versions])
    body = {
        "model": "tiny-reader",
        "messages": [{"role": "user", "content": f"What is the code of {name}?"}],
        "temperature": 0,
        "max_completion_tokens": 8,
    }
    until, tries = time.monotonic() + LONG_S, 0
    while time.monotonic() < until:
        asked = time.monotonic()
        tries += 1
        with suppress(httpx.TransportError):
            answer = await client.post(CHAT, json=body)
            if answer.status_code == 200:
                break
        await asyncio.sleep(0.1)
    else:
        outcome.lost += 1
        return
    outcome.answer_s.append(time.monotonic() - asked)
    outcome.again += tries > 1
    outcome.answers += 1
    message = answer.json()["choices"][0]["message"]
    outcome.noted += "while this answer was written" in json.dumps(message)
    read = [collection.of(one["text"]) for one in message["citations"]]
    outcome.unknown += any(one is None for one in read)
    outcome.stale += any(one is not None and one.stale(asked) for one in read)
    outcome.right += any(one in collection.versions[name] for one in read if one is not None)


def shown(outcome: Outcome) -> Iterator[str]:
    """The outcome as lines of text."""
    times = sorted(outcome.answer_s)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.changes.items()))
    yield f"{outcome.questions} questions, {outcome.clients} at a time, in {outcome.seconds:.1f} s"
    yield f"{sum(outcome.changes.values())} changes: {kinds}"
    yield f"2 kills, ready again after {', '.join(f'{one:.1f} s' for one in outcome.back_s)}"
    yield f"stale answers: {outcome.stale}, lost: {outcome.lost}, asked again: {outcome.again}"
    yield f"passages of no known text: {outcome.unknown}, answers with a note: {outcome.noted}"
    yield f"answers that read what they were asked for: {outcome.right} of {outcome.answers}"
    yield f"seconds for an answer: median {statistics.median(times):.2f}, most {times[-1]:.2f}"
    yield f"index at the end: {outcome.missing} passages missing, {outcome.surplus} too many"
    yield f"windows of removed documents on disk: {outcome.windows_left}"


def main() -> None:
    """Run and print; exit 1 where something is stale, lost or left over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--changes", type=int, default=300)
    parser.add_argument("--out", type=Path, help="write the outcome as JSON")
    options = parser.parse_args()
    outcome = asyncio.run(measured(options.questions, options.clients, options.changes))
    print("\n".join(shown(outcome)))
    if options.out is not None:
        options.out.write_text(json.dumps(asdict(outcome), indent=1) + "\n", encoding="utf-8")
    bad = outcome.stale, outcome.lost, outcome.missing, outcome.surplus, outcome.windows_left
    sys.exit(1 if any(bad) else 0)


if __name__ == "__main__":
    main()
