from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from rag_windows import APE, PCW, DeepThinking, Sequential, WindowedLM
from rag_windows.cli import models
from rag_windows.cli.progress import Progress
from rag_windows.errors import InputError, MethodError
from tests.rag_windows import small


class TestMethod:
    def test_defaults_and_parameters(self) -> None:
        assert models.build_method("ape", None, None) == APE()
        assert models.build_method("APE", 0.5, None) == APE(temperature=0.5)
        assert models.build_method("ape", None, 0.7) == APE(scale=0.7)
        assert models.build_method("pcw", None, None) == PCW()
        assert models.build_method("sequential", None, None) == Sequential()

    def test_parameters_of_a_reader(self) -> None:
        built = models.build_method("deep-thinking+ape", 0.5, None)
        assert built == DeepThinking(reader=APE(temperature=0.5))
        assert models.build_method("deep-thinking+ape", None, None) == DeepThinking(reader=APE())
        with pytest.raises(MethodError, match=r"not a parameter of deep-thinking\+pcw"):
            models.build_method("deep-thinking+pcw", None, 0.5)

    def test_parameters_of_another_method(self) -> None:
        with pytest.raises(MethodError, match="--rag-temperature is not a parameter of sequential"):
            models.build_method("sequential", 1.0, None)


class TestDevice:
    @pytest.fixture(params=[0, 1, 2])
    def count(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
        count: int = request.param
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        return count

    def test_auto_takes_what_is_there(self, count: int) -> None:
        assert models.choose_device("auto") == ["cpu", "cuda", "auto"][count]
        assert models.choose_device("cpu") == "cpu"

    @pytest.mark.parametrize(("asked", "needed"), [("cuda", 1), ("cuda:0", 1), ("cuda:1", 2)])
    def test_what_is_not_there_is_refused(self, count: int, asked: str, needed: int) -> None:
        if count >= needed:
            assert models.choose_device(asked) == asked
        else:
            with pytest.raises(InputError, match=f"--device {asked}: PyTorch sees .* use cpu"):
                models.choose_device(asked)


class TestLoading:
    @pytest.fixture
    def loaded(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        """Records how models are loaded, on a machine that claims an accelerator."""
        calls: list[dict[str, Any]] = []
        # Made while loading is what it is.
        lm = small.lm()

        def load(model: Any, **kwargs: Any) -> WindowedLM:
            calls.append({"model": model, **kwargs})
            return lm

        monkeypatch.setattr(WindowedLM, "from_pretrained", load)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        return calls

    def test_on_the_cpu(self, loaded: list[dict[str, Any]]) -> None:
        options = models.ModelOptions(
            ".", device="cpu", dtype="bfloat16", rag_scale=0.5, no_cache=True
        )
        models.load_model(options, Progress())
        loaded[0].pop("on_loaded")
        assert loaded == [
            {
                "model": ".",
                "dtype": "bfloat16",
                "device_map": "cpu",
                "method": APE(scale=0.5),
                "max_window_tokens": None,
                "profile": None,
                "cache": None,
            }
        ]

    @pytest.mark.parametrize(("device", "place"), [("auto", None), ("cuda:1", "cuda:1")])
    def test_elsewhere(self, loaded: list[dict[str, Any]], device: str, place: str | None) -> None:
        """Loading itself knows the best device."""
        models.load_model(models.ModelOptions(".", device=device, no_cache=True), Progress())
        assert loaded[0]["device_map"] == place


class TestNetwork:
    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid:8443")
        monkeypatch.setattr(models, "getproxies", dict)
        asked: list[Any] = []

        def refuse(address: Any, timeout: float) -> Any:
            asked.append(address)
            raise OSError("unreachable")

        monkeypatch.setattr(socket, "create_connection", refuse)
        return asked

    def test_without_a_way_to_the_hub_only_the_cache_is_used(self, asked: list[Any]) -> None:
        models.notice_missing_network()
        assert asked == [("hub.invalid", 8443)]
        assert constants.is_offline_mode()
        models.notice_missing_network()
        assert len(asked) == 1

    def test_with_a_way_nothing_changes(
        self, asked: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(socket, "create_connection", lambda *_, **__: socket.socket())
        models.notice_missing_network()
        assert not constants.is_offline_mode()

    def test_behind_a_proxy_the_hub_may_be_out_of_sight(
        self, asked: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(models, "getproxies", lambda: {"https": "http://proxy.invalid"})
        models.notice_missing_network()
        assert asked == []
        assert not constants.is_offline_mode()
