"""Where a model goes, and what is asked of the network before it is loaded."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from rag_windows import APE, DeepThinking, MethodError, Sequential, WindowedLM
from rag_windows.cli import models
from tests.blackbox.conftest import Run
from tests.rag_windows import small


def test_numbers_go_to_the_method_that_has_them() -> None:
    assert models.build_method("APE", 0.5, None) == APE(temperature=0.5)
    assert models.build_method("sequential", None, None) == Sequential()
    composed = models.build_method("deep-thinking+ape", 0.5, None)
    assert composed == DeepThinking(reader=APE(temperature=0.5))
    with pytest.raises(MethodError, match=r"not a parameter of deep-thinking\+pcw"):
        models.build_method("deep-thinking+pcw", None, 0.5)


@pytest.mark.parametrize(
    ("devices", "asked", "place"),
    [
        (2, "auto", None),  # loading itself knows the best device
        (2, "cpu", "cpu"),
        (2, "cuda:1", "cuda:1"),
        (1, "cuda:1", "refused"),
        (0, "cuda", "refused"),
    ],
)
def test_a_model_goes_where_it_is_asked_to(
    run: Run,
    small_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    devices: int,
    asked: str,
    place: str | None,
) -> None:
    lm = small.lm()  # made while loading is what it is
    loaded: list[dict[str, Any]] = []

    def load(name: Any, **settings: Any) -> WindowedLM:
        loaded.append({"name": name, **settings})
        return lm

    monkeypatch.setattr(WindowedLM, "from_pretrained", load)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    done = run(
        *("ask", "What does Zelwick Academy make?", "--model", small_folder, "--device", asked),
        *("--dtype", "bfloat16", "--rag-scale", "0.5", "--no-cache", "--max-new-tokens", "1"),
        *("--passage-words", "10", "--top-k", "1"),
    )
    if place == "refused":
        assert done.exit_code == 2
        assert f"--device {asked}: PyTorch sees" in done.stderr
        return
    assert done.exit_code == 0, done.stderr
    loaded[0].pop("on_loaded")
    assert loaded == [
        {
            "name": str(small_folder),
            "dtype": "bfloat16",
            "device_map": place,
            "method": APE(scale=0.5),
            "max_window_tokens": None,
            "profile": None,
            "cache": None,
        }
    ]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Addresses to which a connection was tried, and refused."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid:8443")
    monkeypatch.setattr(models, "getproxies", dict)
    asked: list[Any] = []

    def refuse(address: Any, timeout: float) -> Any:
        asked.append(address)
        raise OSError("unreachable")

    monkeypatch.setattr(socket, "create_connection", refuse)
    return asked


def test_without_a_way_to_the_hub_only_the_cache_is_used(asked: list[Any]) -> None:
    for _ in range(2):
        models.notice_missing_network()
        assert asked == [("hub.invalid", 8443)]
        assert constants.is_offline_mode()


def test_with_a_way_or_behind_a_proxy_nothing_changes(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as behind:
        behind.setattr(models, "getproxies", lambda: {"https": "http://proxy.invalid"})
        models.notice_missing_network()
        assert asked == []
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: socket.socket())
    models.notice_missing_network()
    assert not constants.is_offline_mode()
