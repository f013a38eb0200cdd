"""A cluster of Ray on this machine, and a fleet of two readers on it."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import ray
from ray import serve

from rag_windows_server.fleet import FleetOptions, app

KEYS = {"anna": "a" * 32, "bert": "b" * 32}
"""Of an operator, and of a tenant who is none."""

NAME = "fleet"

QUIET: Any = {"log_level": "ERROR", "enable_access_log": False}


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """Address of a cluster of one machine; CPUs are what it counts with, not what there are."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Sockets lie in it, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        told: Any = ray.init(
            address="local",
            num_cpus=16,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        yield told.address_info["gcs_address"]
        ray.shutdown()


def _free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


Deploy = Callable[..., None]


@pytest.fixture(scope="module")
def deploy(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Deploy:
    """Start the fleet, or bring it up to date, with some options."""
    folder = tmp_path_factory.mktemp("fleet")
    keys = folder / "keys.txt"
    keys.write_text(f"anna {KEYS['anna']} operator\nbert {KEYS['bert']}\n", encoding="utf-8")

    def deployed(**options: Any) -> None:
        made = FleetOptions(
            replicas=2,
            device="cpu",
            cache_memory="64MiB",
            cache_dir=str(folder / "cache"),
            cache_disk="1GiB",
            api_key_file=str(keys),
            **options,
        )
        serve.run(app(made), name=NAME, logging_config=QUIET)

    return deployed


@pytest.fixture(scope="module")
def serving(cluster: str) -> Iterator[str]:
    """Where the fleet answers that a test deploys. Serve and its port end with the file."""
    port = _free_port()
    serve.start(
        http_options={"host": "127.0.0.1", "port": port},
        proxy_location="HeadOnly",
        logging_config=QUIET,
    )
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


@pytest.fixture(scope="module")
def address(serving: str, deploy: Deploy) -> str:
    """Where a fleet of two readers answers over the sample corpus."""
    deploy()
    return serving


@pytest.fixture
async def client(address: str) -> Any:
    """A client with an operator's key."""
    headers = {"Authorization": f"Bearer {KEYS['anna']}"}
    async with httpx.AsyncClient(base_url=address, headers=headers, timeout=60) as made:
        yield made
