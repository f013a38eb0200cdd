from __future__ import annotations

import builtins
import dataclasses
import struct
from pathlib import Path
from typing import Any

import pytest

from rag_windows.calibration import Profile
from rag_windows.errors import MissingExtraError, ProfileError
from rag_windows.methods import DeepThinking, MateICL
from tests.rag_windows.calibration.profiles import profile, setting


def size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def with_settings(*settings: Any) -> Profile:
    method = settings[0].method
    return dataclasses.replace(
        profile(), settings=settings, default=method, best=settings[-1].method, method=method
    )


def test_two_numbers_make_a_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    drawn: list[str] = []
    text = Axes.text

    def spy(self: Axes, x: float, y: float, s: str, **kwargs: Any) -> Any:
        drawn.append(s)
        return text(self, x, y, s, **kwargs)

    dots: list[int] = []
    scatter = Axes.scatter

    def count(self: Axes, x: list[float], y: list[float], **kwargs: Any) -> Any:
        dots.append(len(x))
        return scatter(self, x, y, **kwargs)

    monkeypatch.setattr(Axes, "text", spy)
    monkeypatch.setattr(Axes, "scatter", count)
    path = tmp_path / "heat.png"
    profile().plot(path)
    width, height = size(path)
    assert min(width, height) > 800
    # One value a cell of the coarse grid; the finer setting is a dot.
    assert len(drawn) == 9
    assert drawn.count("0.31") == 1
    # The finer setting, its place in the legend, and the best.
    assert dots == [1, 0, 1]


def test_one_number_makes_a_curve_and_three_a_map(tmp_path: Path) -> None:
    curve, folded = tmp_path / "curve.png", tmp_path / "folded.png"
    with_settings(*(setting(MateICL(b), 0.3) for b in ("sqrt", 1.0, 2.0))).plot(curve)
    deep = [
        setting(DeepThinking(steps=steps, eta=eta, momentum=momentum), steps * eta * momentum)
        for steps in (1, 2, 3)
        for eta in (0.1, 0.2, 0.3)
        for momentum in (0.5, 0.9)
    ]
    with_settings(*deep).plot(folded)
    assert size(curve)[0] > 800
    assert size(folded)[0] > 800


def test_what_can_not_be_drawn_is_told(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="No number of the method was varied"):
        with_settings(setting(MateICL(), 0.1), setting(MateICL("log"), 0.1)).plot(tmp_path / "x")
    with pytest.raises(ProfileError, match="can't be written"):
        profile().plot(tmp_path / "no" / "folder.png")


def test_matplotlib_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r'pip install "\.\[figures\]"'):
        profile().plot(tmp_path / "heat.png")
