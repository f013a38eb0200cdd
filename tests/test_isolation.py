"""The guards of conftest.py: no network, and the same random numbers in every test."""

from __future__ import annotations

import random
import socket

import pytest
import torch

from tests.conftest import NetworkUsedError


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "example.org"])
def test_connections_to_the_outside_are_refused(host: str) -> None:
    with pytest.raises(NetworkUsedError, match=host):
        socket.create_connection((host, 80), timeout=1)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_connections_within_the_machine_work(host: str) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection((host, server.getsockname()[1]), timeout=5) as client,
    ):
        assert client.getpeername()[0] == "127.0.0.1"


@pytest.mark.parametrize("_", range(2))
def test_random_numbers_start_anew(_: int) -> None:
    assert random.random() == pytest.approx(random.Random(0).random(), abs=0)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))
