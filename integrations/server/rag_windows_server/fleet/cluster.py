"""A cluster of Ray: an existing one, or one on this machine that ends with the work."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from rag_windows.errors import InputError

_PLACE = re.compile(r"([^/]+):(\d+)")
_ANSWER_S = 10.0  # for a cluster to be there


@contextmanager
def cluster(
    address: str | None, replicas: int, cpus: float, *, show_logs: bool = False
) -> Iterator[None]:
    """Connect to a cluster, or start one on this machine; it ends with the block.

    In a program that is connected already, nothing is done.

    Args:
        address: as in `ray.init`; None starts one.
        replicas: processes that shall start, each with so many CPUs.
        cpus: CPUs of each.
        show_logs: whether what they log is shown by this process.

    Raises:
        InputError: there is no cluster at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if ray.is_initialized():
        yield
        return
    started: dict[str, Any] = {}
    if address is None:
        # CPUs are what Ray counts with; all shall start, whatever the machine has.
        counted = max(os.cpu_count() or 1, int(replicas * cpus) + 1)
        started = {
            "num_cpus": counted,
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
        }
    try:
        # Ray would look for it for minutes.
        if found := _PLACE.fullmatch(address or ""):
            socket.create_connection((found[1], int(found[2])), _ANSWER_S).close()
        ray.init(
            address=address or "local",
            logging_level=logging.ERROR,
            log_to_driver=show_logs,
            **started,
        )
    except (OSError, ValueError) as error:
        raise InputError(f"There is no cluster of Ray at {address}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()
