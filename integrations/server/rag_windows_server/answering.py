"""Passes questions to the scheduler and answers back, without blocking the event loop."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Generator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from fastapi import Request

from rag_windows import Chunk, Generation, InputError, LimitError, Passage, WindowedLM
from rag_windows.integration import (
    AnswerReader,
    Calls,
    ModelCall,
    ToolAnswer,
    answer_record,
    call_entry,
    carried,
    describe,
    labels_of,
    logprob_content,
    one_line,
    search_text,
)
from rag_windows_server.bodies import ServerRequest, check_forms
from rag_windows_server.collection import Collection, ReadDocuments, index_of
from rag_windows_server.documents import url_of
from rag_windows_server.errors import busy, of, refused
from rag_windows_server.keys import Tenant
from rag_windows_server.metrics import Metrics
from rag_windows_server.settings import Settings

_log = logging.getLogger("rag_windows.server")

T = TypeVar("T")
FinishReason = Literal["stop", "length", "tool_calls"]


class PassageRetriever(Protocol):
    """Finds passages among the server's documents."""

    def retrieve(self, query: str, k: int) -> Sequence[Passage]:
        """The `k` best ones."""


class Remaining:
    """Leaves passages and documents that were deleted out of what a retriever finds.

    For a retriever that can forget nothing: the text stays until the server reads its documents
    again, at its next start.
    """

    def __init__(self, retriever: PassageRetriever) -> None:
        self._retriever = retriever
        self._deleted: frozenset[str] = frozenset()

    def delete(self, names: Iterable[str]) -> int:
        """Return no passage with one of these names any more; the result counts those newly hidden.

        0 where the retriever can't list its passages.
        """
        before = len(self.passages or ())
        self._deleted |= frozenset(names)
        return before - len(self.passages or ())

    @property
    def passages(self) -> Sequence[Passage] | None:
        """The passages that are left; None if the retriever can't list its own."""
        own = getattr(self._retriever, "passages", None)
        return None if own is None else self._left(own)

    def retrieve(self, query: str, k: int) -> Sequence[Passage]:
        """The `k` best of the passages that are left."""
        wanted = k
        while True:
            found = self._retriever.retrieve(query, wanted)
            left = self._left(found)
            if len(left) >= k or len(found) < wanted:
                return left[:k]
            wanted *= 2

    def _left(self, found: Sequence[Passage]) -> Sequence[Passage]:
        gone = self._deleted
        return [one for one in found if gone.isdisjoint(labels_of(one))] if gone else found


@dataclass(frozen=True, kw_only=True)
class ServedAnswer:
    """One answer.

    Attributes:
        index: which of the answers to the request.
        text: for the user; in a stream, what was not streamed yet.
        reasoning: what the model thought aloud.
        calls: of tools, in the form of chat completions.
        generation: usage, timings, notes.
        citations: of each passage ``index``, ``id``, ``title``, ``place`` (in its document: page,
            section, part; or None), ``weight`` (its share of the
            attention) and whether it ``carried`` the answer, by removal ``drop`` and ``supports``;
            of those that the server retrieved ``text`` and ``score``, too, of others the
            ``metadata`` that came with them.
        annotations: of each sentence those that carried it: ``url``, ``title``, ``start_index``,
            ``end_index``.
        rag: method, timings, notes, windows, fallback.
        logprobs: of each token, in the form of chat completions; None unless they were asked for.
    """

    index: int
    text: str
    reasoning: str
    calls: list[dict[str, Any]]
    finish_reason: FinishReason
    generation: Generation
    citations: list[dict[str, Any]]
    annotations: list[dict[str, Any]]
    rag: dict[str, Any]
    logprobs: list[dict[str, Any]] | None


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """A piece of a stream.

    Attributes:
        index: of the answer that it belongs to.
        text: which comes next; empty where nothing has been written yet.
        answered: with the last piece of an answer, all else.
        reasoning: which comes next, before the text.
    """

    index: int
    text: str
    answered: ServedAnswer | None = None
    reasoning: str = ""


class Line:
    """A queue that bounds how many requests work, how many wait, and for how long.

    Attributes:
        waiting, working: how many.
        closed: whether new requests are refused.
    """

    def __init__(self, rows: int, most_waiting: int, wait_s: float) -> None:
        self._turns = asyncio.Semaphore(rows)
        self._rows, self._most, self._wait_s = rows, most_waiting, wait_s
        self._waits: set[asyncio.Timeout] = set()
        self._usual_s = 1.0
        self.working = 0
        self.closed = False

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return len(self._waits)

    def close(self) -> None:
        """Refuse new requests and those that wait."""
        self.closed = True
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            wait.reschedule(now)

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator[None]:
        """Wait for a turn, and hold it inside the block.

        Raises:
            ApiError: 429 where the line is full, 503 after too long a wait or at the end.
        """
        self._check_open()
        if self._turns.locked() and self.waiting >= self._most:
            raise busy(429, "Too many requests are waiting. Try again later.", self._again_after())
        wait = asyncio.timeout(self._wait_s)
        try:
            async with wait:
                self._waits.add(wait)
                await self._turns.acquire()
        except TimeoutError as error:
            self._check_open()
            message = f"No turn came within {self._wait_s:g} seconds. Try again later."
            raise busy(503, message, self._again_after()) from error
        finally:
            self._waits.discard(wait)
        self.working += 1
        begun = time.monotonic()
        try:
            self._check_open()
            yield
        finally:
            self.working -= 1
            self._usual_s += 0.2 * (time.monotonic() - begun - self._usual_s)
            self._turns.release()

    def _check_open(self) -> None:
        if self.closed:
            raise busy(503, "The server is stopping.", 5)

    def _again_after(self) -> int:
        """Seconds until a new request would have a turn."""
        ahead = (self.waiting + 1) / self._rows
        return max(1, min(60, math.ceil(ahead * self._usual_s)))


async def until_left(request: Request, work: Awaitable[T]) -> T:
    """Do some work, but cancel it if the client leaves before it is done.

    Raises:
        ClientLeft: it did; the work was cancelled.
    """
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        for one in (task, left):
            one.cancel()
        # A cancelled task lets go of the model's work before anybody else goes on.
        await asyncio.gather(task, left, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class ClientLeft(Exception):
    """The client has disconnected."""


class Answering:
    """Answers questions of all routes with one model.

    Args:
        lm: the model.
        settings: the server's.
        tenants: whose questions come; each has its own part of the passage cache.
        retriever: of the server's documents, or None.
        metrics: count the answers.

    Attributes:
        collection: the documents, if they can change while the server runs; else None.
    """

    def __init__(
        self,
        lm: WindowedLM,
        settings: Settings,
        tenants: Iterable[Tenant],
        retriever: PassageRetriever | None,
        metrics: Metrics,
    ) -> None:
        self.metrics = metrics
        self._lm, self._settings = lm, settings
        self._calls = Calls(settings.max_rows, settings.max_bytes)
        self.line = Line(settings.max_rows, settings.most_waiting, settings.wait_s)
        metrics.watch(lambda: self.line.waiting)
        self._models = {
            tenant: lm if tenant.salt is None else lm.tenant(tenant.salt) for tenant in tenants
        }
        self.collection: Collection | None = None
        self.retriever: Collection | Remaining | None = None
        if (index := index_of(retriever)) is not None:
            self.collection = Collection(index, retriever, [*self._models.values()])
            self.retriever = self.collection
        elif retriever is not None:
            self.retriever = Remaining(retriever)

    @property
    def instruction(self) -> str | None:
        """The system prompt of questions to the server's own documents that bring none."""
        settings = self._settings
        return settings.default_system if settings.system is None else settings.system

    def close(self) -> None:
        """Refuse new questions, and cancel those in progress within a token."""
        self.line.close()
        settings = self._settings
        bounds: dict[str, Any] = {"max_rows": settings.max_rows, "max_bytes": settings.max_bytes}
        self._lm.shared_scheduler(**bounds).cancel()

    def model(self, tenant: Tenant) -> WindowedLM:
        """The model with this tenant's part of the cache."""
        return self._models[tenant]

    async def answer(self, asked: ServerRequest, tenant: Tenant) -> list[ServedAnswer]:
        """Answer a question, ``n`` times; a cancelled task stops the work within a token."""
        async with self.line.turn():
            calls, reading = await asyncio.to_thread(self._prepared, asked, tenant)
            with (
                self._reads(reading),
                _naming(asked.param),
                self.metrics.answering(tenant, len(calls)) as outcome,
            ):
                tasks = [
                    asyncio.create_task(self._answer(index, call, asked, reading))
                    for index, call in enumerate(calls)
                ]
                try:
                    answers = await asyncio.gather(*tasks)
                finally:
                    for task in tasks:
                        task.cancel()
                outcome.answers = answers
                self._log(asked, answers)
                return answers

    async def _answer(
        self, index: int, call: ModelCall, asked: ServerRequest, reading: ReadDocuments | None
    ) -> ServedAnswer:
        def read(_: ModelCall, generation: Generation) -> ServedAnswer:
            found, notes = call.reader.whole(generation), self._notes(reading)
            return _answered(index, call, asked, found, generation, notes)

        return await self._calls.answer_async(lambda: call, read, timeout=self._settings.timeout_s)

    async def stream(
        self, asked: ServerRequest, tenant: Tenant
    ) -> AsyncGenerator[StreamPiece, None]:
        """Answer a question piece by piece; errors of the request come before the first piece.

        That piece is empty, and comes as soon as the question was checked. The last piece of each
        answer has the `ServedAnswer`. Close it, or cancel the task that reads it, and the work
        stops within a token.
        """
        async with self.line.turn():
            calls, reading = await asyncio.to_thread(self._prepared, asked, tenant)
            with (
                self._reads(reading),
                _naming(asked.param),
                self.metrics.answering(tenant, len(calls)) as outcome,
            ):
                answers: list[ServedAnswer] = []
                # One after the other: the first one encodes the windows that all read.
                for index, call in enumerate(calls):
                    async with aclosing(self._stream(index, call, asked, reading)) as pieces:
                        async for piece in pieces:
                            if piece.answered is not None:
                                answers.append(piece.answered)
                            if len(answers) == len(calls):
                                outcome.answers = answers
                                self._log(asked, answers)
                            yield piece

    def _stream(
        self, index: int, call: ModelCall, asked: ServerRequest, reading: ReadDocuments | None
    ) -> AsyncGenerator[StreamPiece, None]:
        length = 0

        def read(_: ModelCall, chunk: Chunk) -> Iterable[StreamPiece]:
            nonlocal length
            text = call.reader.feed(chunk.text)
            length += len(text)
            if chunk.generation is None:
                said = text or chunk.reasoning
                return [StreamPiece(index, text, reasoning=chunk.reasoning)] if said else []
            rest = call.reader.last(chunk.generation)
            notes = self._notes(reading)
            answered = _answered(index, call, asked, rest, chunk.generation, notes, length)
            return [StreamPiece(index, text + answered.text, answered, chunk.reasoning)]

        timeout, begun = self._settings.timeout_s, [StreamPiece(index, "")]
        return self._calls.stream_async(lambda: call, read, timeout=timeout, begun=begun)

    def _notes(self, reading: ReadDocuments | None) -> list[str]:
        return [] if self.collection is None else self.collection.notes(reading)

    @contextmanager
    def _reads(self, reading: ReadDocuments | None) -> Generator[None]:
        """At the end, what a request has stored of documents that went meanwhile goes, too."""
        try:
            yield
        finally:
            if self.collection is not None:
                self.collection.ended(reading)

    def _log(self, asked: ServerRequest, answers: Sequence[ServedAnswer]) -> None:
        if self._settings.log_texts:
            texts = [one.generation.text for one in answers]
            said = {"messages": asked.messages, "answers": texts}
            _log.info("%s", json.dumps(said, ensure_ascii=True))

    def _prepared(
        self, asked: ServerRequest, tenant: Tenant
    ) -> tuple[list[ModelCall], ReadDocuments | None]:
        """The calls of the model for each of the answers; this reads, retrieves and tokenizes."""
        lm, reading = self._models[tenant], None
        passages: Sequence[Passage] = asked.passages
        if asked.top_k and self.collection is not None:
            passages, reading = self.collection.read(searched(asked.messages), asked.top_k)
        elif asked.top_k and self.retriever is not None:
            passages = self.retriever.retrieve(searched(asked.messages), asked.top_k)
        calls = []
        for index in range(asked.n):
            with _naming("tools", InputError):
                tools = asked.tools or None
                variables = {**lm.template_kwargs, **asked.template_kwargs}
                reader = AnswerReader.of(lm.tokenizer, variables, tools, asked.tool_choice)
            with _naming(asked.param, InputError):
                query = reader.query(asked.messages, asked.template_kwargs)
            options = asked.generate_options(index)
            if (grammar := reader.grammar()) is not None:
                options["grammar"] = grammar
            elif asked.strict is not None:
                check_forms(asked.strict)
                why = "can only be kept where tool_choice forces a call. Leave strict out."
                raise refused(asked.strict, why)
            if (system := self._system(asked)) is not None:
                options["prefix"] = system
            calls.append(
                ModelCall(
                    lm=lm,
                    query=query,
                    passages=passages,
                    options=options,
                    method=asked.method,
                    model_name=self._settings.model_name,
                    reader=reader,
                    parallel=asked.parallel,
                )
            )
        with _naming(asked.param):
            self._check_tokens(calls[0])
        return calls, reading

    def _system(self, asked: ServerRequest) -> str | None:
        """The operator's instruction, or the default one where nobody gave any."""
        own = any(one["role"] == "system" for one in asked.messages)
        return self._settings.system if own or not asked.top_k else self.instruction

    def _check_tokens(self, call: ModelCall) -> None:
        most = self._settings.most_prompt_tokens
        if most is None:
            return
        if (tokens := call.prompt_tokens()) > most:
            raise LimitError(
                f"The prompt has {tokens} tokens with its passages; this server takes {most}. "
                "Send fewer or shorter documents."
            )


@contextmanager
def _naming(param: str, kind: type[InputError] = LimitError) -> Generator[None]:
    """Name the request's field in an error of the engine."""
    try:
        yield
    except kind as error:
        named = of(error)
        named.error["param"] = named.error["param"] or param
        raise named from error


def searched(messages: Sequence[dict[str, Any]]) -> str:
    """What to retrieve with: the last question, and before it the conversation."""
    said = [one for one in messages if one["role"] in ("user", "assistant")]
    places = [index for index, one in enumerate(said) if one["role"] == "user"]
    if not places:
        return ""
    return search_text(said[: places[-1]], said[places[-1]]["content"])


def _answered(
    index: int,
    call: ModelCall,
    asked: ServerRequest,
    found: ToolAnswer,
    generation: Generation,
    notes: Sequence[str],
    before: int = 0,
) -> ServedAnswer:
    made = found.calls if call.parallel else found.calls[:1]
    text = found.text + "".join(one.text for one in found.broken)
    finish: FinishReason = "length" if generation.finish_reason == "length" else "stop"
    whole = not found.calls and before + len(text) == len(generation.text)
    citations, annotations = _citations(call, asked, generation, before + len(text), whole=whole)
    return ServedAnswer(
        index=index,
        text=text,
        reasoning=found.reasoning,
        calls=[call_entry(one.name, json.dumps(one.arguments), one.id) for one in made],
        finish_reason="tool_calls" if made else finish,
        generation=generation,
        citations=citations,
        annotations=annotations,
        rag=_record(call, generation, notes),
        logprobs=None
        if generation.logprobs is None
        else logprob_content(generation, call.lm.tokenizer),
    )


def _citations(
    call: ModelCall, asked: ServerRequest, generation: Generation, length: int, *, whole: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    strongest = [one.passage for one in carried(generation.citations)]
    citations, annotations = [], {}
    for one in generation.citations or ():
        passage: Any = call.passages[one.passage]
        entry = {
            "index": one.passage,
            "id": passage.id,
            "title": passage.title,
            "place": passage.place and one_line(passage.place),
            "weight": one.mass,
            "carried": one.passage in strongest,
        }
        if one.drop is not None:
            entry |= {"drop": one.drop, "supports": one.supports}
        if asked.top_k:
            entry |= {"text": passage.text, "score": passage.score}
        elif passage.metadata:
            entry["metadata"] = dict(passage.metadata)
        citations.append(entry)
        annotations[one.passage] = {
            "url": url_of(passage, one.passage),
            "title": passage.title or passage.id or f"Passage {one.passage + 1}",
        }
    stretches = [(0, length, strongest)]
    if whole and generation.statements:
        stretches = [
            (said.start, said.end, [one.passage for one in said.citations])
            for said in generation.statements
        ]
        # What carried the answer, but none of its sentences by itself.
        named = {passage for _, _, passages in stretches for passage in passages}
        stretches.append((0, length, [one for one in strongest if one not in named]))
    return citations, [
        {**annotations[passage], "start_index": start, "end_index": end}
        for start, end, passages in stretches
        for passage in passages
    ]


def _record(call: ModelCall, generation: Generation, notes: Sequence[str]) -> dict[str, Any]:
    record = answer_record(generation)
    usage = generation.usage
    return {
        "method": describe(call.method),
        "timings": record["timings"],
        "windows": usage.windows,
        "cached_windows": usage.cached_windows,
        "notes": [*(note.message for note in generation.notes), *notes],
        "fallback": record["fallback"],
        "supported": record["supported"],
        "statements": record["statements"],
        "prefix_weight": generation.prefix_mass,
        "query_weight": generation.query_mass,
    }
