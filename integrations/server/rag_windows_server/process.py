"""Runs a server with uvicorn, which starts, listens, and ends answers in progress."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from contextlib import suppress

import uvicorn
from fastapi import FastAPI

from rag_windows import InputError

_REST_S = 5.0
"""For answers that are cancelled to reach their clients."""


class Server(uvicorn.Server):
    """Runs an application of `create_app` until SIGINT or SIGTERM.

    Then waiting requests are refused, and answers in progress get some seconds; those left are
    ended after the next token, and their clients get an error.

    Args:
        app: the application.
        grace_s: seconds for answers in progress.
        report: called with " on http://..." when it listens.
    """

    def __init__(
        self,
        app: FastAPI,
        host: str = "127.0.0.1",
        port: int = 8000,
        grace_s: float = 5.0,
        report: Callable[[str], None] = lambda at: None,
    ) -> None:
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(grace_s + _REST_S),
        )
        super().__init__(config)
        self._answering = app.state.served.answering
        self._grace_s, self._report = grace_s, report

    @property
    def address(self) -> str:
        """Where it listens."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and report the address."""
        await super().startup(sockets)
        if self.started:
            self._report(f" on {self.address}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop within the grace period and a little more."""
        self._answering.line.close()

        async def end() -> None:
            await asyncio.sleep(self._grace_s)
            self._answering.close()

        ending = asyncio.create_task(end())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            with suppress(asyncio.CancelledError):
                await ending


def unavailable(host: str, port: int) -> InputError:
    """Nobody can listen there."""
    return InputError(
        f"The server can't listen on {host}:{port}. Name another --port, or a --host of this "
        "machine."
    )


def free_port(host: str, port: int) -> int:
    """The port, or any free one for 0; InputError if it is taken, or the host is not here."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((host, port), family=family) as tried:
            free: int = tried.getsockname()[1]
    except OSError as error:
        raise unavailable(host, port) from error
    return free


def run(app: FastAPI, host: str, port: int, grace_s: float, report: Callable[[str], None]) -> None:
    """Serve until a signal stops the process.

    Raises:
        InputError: it could not listen.
    """
    server = Server(app, host, port, grace_s, report)
    # uvicorn raises the signal again when all has ended; the caller still has a cache to write.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with suppress(KeyboardInterrupt, SystemExit):  # the latter is uvicorn's for a taken port
            server.run()
    finally:
        signal.signal(signal.SIGTERM, before)
    if not server.started:
        raise unavailable(host, port)
