"""What holds for every test: no network, fixed seeds, few threads."""

from __future__ import annotations

import gc
import ipaddress
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

# These are read when the libraries are imported, so they are set before anything else. A home of
# its own keeps the tests from finding models that the user happens to have.
_home = tempfile.TemporaryDirectory(prefix="rag-windows-hf-")
# The command line keeps a passage cache by default: not the user's own in tests. Its lines about
# work that takes long would come and go with the machine's load.
_windows = tempfile.TemporaryDirectory(prefix="rag-windows-cache-")
os.environ.update(
    HF_HOME=_home.name,
    RAG_WINDOWS_CACHE_DIR=_windows.name,
    RAG_WINDOWS_PROGRESS_S="0",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
)

import pytest
import torch
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


class NetworkUsedError(RuntimeError):
    """A test reached for the network."""


def _is_local(host: object) -> bool:
    if host in (None, "", b"", "localhost", b"localhost"):
        return True
    text = host.decode() if isinstance(host, bytes) else str(host)
    try:
        return ipaddress.ip_address(text.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _refuse_network(event: str, args: tuple[Any, ...]) -> None:
    """Audit hook: sees every socket of this process, whichever library opens it."""
    if event == "socket.connect":
        address = args[1]
        host = address[0] if isinstance(address, tuple) else None
    elif event == "socket.getaddrinfo":
        host = args[0]
    else:
        return
    if not _is_local(host):
        raise NetworkUsedError(f"tests must not use the network, but something asked for {host!r}")


sys.addaudithook(_refuse_network)


def pytest_configure() -> None:
    # The models here are tiny: more threads only wait for each other.
    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    # All that was imported stays. Looking through it takes the collector 0.4 s each time, which
    # tests that watch an event loop would see.
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start every test from the same random state, whatever ran before it."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Threads take turns after 20 microseconds, not 5 milliseconds: shared state would show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium that is already there; Playwright's own are never downloaded."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is on the path")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=flags)
        yield opened
        opened.close()
