"""A reader: one loaded model behind the server's whole application, as one replica of Serve's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ray import serve
from starlette.datastructures import Headers
from starlette.types import Message
from transformers.utils.logging import disable_progress_bar

from rag_windows.integration import one_line
from rag_windows_server.answering import Remaining
from rag_windows_server.app import create_app
from rag_windows_server.fleet.options import FleetOptions
from rag_windows_server.fleet.routing import RoutedQuestion, number_of, pack

ACCEPTED = "rag_windows.accepted"
"""Type of the first message of a reader, with its name; the others are ASGI's."""


@dataclass(frozen=True, slots=True)
class Relayed:
    """A request as it came to a front, without its connection.

    Attributes:
        scope: ASGI's, of plain values.
        body: of the request, or its beginning where that is larger than the server takes.
        late: whether its rest did not come in time.
        deleted: names of passages and documents that are not retrieved any more.
    """

    scope: dict[str, Any]
    body: bytes = b""
    late: bool = False
    deleted: frozenset[str] = frozenset()


class Reader:
    """Answers requests with the application of `rag_windows_server.create_app`.

    Args:
        options: of the fleet.
    """

    def __init__(self, options: FleetOptions) -> None:
        disable_progress_bar()
        logging.basicConfig(format="%(message)s")
        logging.getLogger("rag_windows.server").setLevel(logging.INFO)
        self.name = serve.get_replica_context().replica_id.unique_id
        self._lm = options.load_model()
        documents, keys = options.load_documents(), options.load_keys()
        self._app = create_app(self._lm, options.settings, documents, keys=keys)
        self._failed = False
        # Serve runs the application's requests, not its start and end.
        self._collection = self._app.state.served.answering.collection
        if self._collection is not None:
            self._collection.start()

    async def answer(
        self, request: Relayed, question: RoutedQuestion | None = None
    ) -> AsyncGenerator[list[Message]]:
        """Answer one request with ASGI's messages, those in one list that came together.

        The question is for the router, which chooses the reader by it.
        Close it, or cancel the task that reads it, and the work stops within a token.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        work = asyncio.create_task(self._run(request, messages.put_nowait))
        work.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            yield [{"type": ACCEPTED, "name": self.name}]
            ended = False
            while not ended:
                found = [await messages.get()]
                while not messages.empty():
                    found.append(messages.get_nowait())
                ended = found[-1] is None
                if together := [one for one in found if one is not None]:
                    yield together
            await work
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def whole(self, request: Relayed) -> tuple[str, list[Message]]:
        """The reader's name, and all messages of the answer to one request."""
        messages: list[Message] = []
        await self._run(request, messages.append)
        return self.name, messages

    def record_routing_stats(self) -> dict[str, bytes]:
        """What Serve reports to the router: the passages in memory here."""
        cache = self._lm.cache
        return {} if cache is None else {"held": pack(map(number_of, cache.resident()))}

    async def check_health(self) -> None:
        """Raise an error if the model can't answer any more; Serve then replaces this reader.

        It is tried after a question that failed, because one question may fail for itself, and all
        of them once an accelerator has.
        """
        if self._failed:
            await asyncio.to_thread(self._lm.generate, "?", max_new_tokens=1)
            self._failed = False

    async def stop(self, grace_s: float) -> None:
        """Refuse new questions, end those in progress after some seconds, write the cache."""
        answering = self._app.state.served.answering
        answering.line.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while answering.line.working:
                    await asyncio.sleep(0.02)
        answering.close()
        if self._collection is not None:
            await asyncio.to_thread(self._collection.close)
        if self._lm.cache is not None:
            await asyncio.to_thread(self._lm.cache.flush)

    async def _run(self, request: Relayed, put: Callable[[Message], object]) -> None:
        retriever = self._app.state.served.answering.retriever
        if isinstance(retriever, Remaining) and request.deleted:
            retriever.delete(request.deleted)
        more = [{"type": "http.request", "body": request.body, "more_body": request.late}]

        async def receive() -> Message:
            if more:
                return more.pop()
            if request.late:
                raise TimeoutError  # the server says what it says of clients that it waits for
            # A client that leaves cancels this work; no message says so.
            return await asyncio.get_running_loop().create_future()

        async def send(message: Message) -> None:
            self._failed |= message.get("status") == 500
            put(message)

        scope = dict(request.scope)
        # The name that Serve's proxy gave the request and the client stands in our log, too.
        if given := Headers(scope=scope).get("x-request-id"):
            scope["state"] = {"request_id": one_line(given)[:64]}
        await self._app(scope, receive, send)

    def __del__(self) -> None:
        """Write the passage cache; Serve calls this when the last question is answered."""
        collection, lm = getattr(self, "_collection", None), getattr(self, "_lm", None)
        if collection is not None:
            collection.close()
        if lm is not None and lm.cache is not None:
            lm.cache.close()
