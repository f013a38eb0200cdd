from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from rag_windows import APE, PCW, InputError, MethodError
from rag_windows.cli.evaluation.app import numbers
from rag_windows.cli.evaluation.running import compared
from rag_windows.cli.render import progress, time_shown
from rag_windows.methods import Linked, Sequential


def arms_of(methods: str, depths: tuple[int | None, ...] = (4,), **given: Any) -> Any:
    """What a run compares, by the command's options."""
    numbers = {key: given.pop(key, None) for key in ("temperature", "scale")}
    return compared([methods], depths, numbers=numbers, **given)


def test_numbers_are_read_in_rising_order() -> None:
    assert numbers(["20, 5,10"]) == (5, 10, 20)
    assert numbers(["8,0", "4"], "--shots", least=0) == (0, 4, 8)


@pytest.mark.parametrize("text", ["", "0", "5,", "5;6", "-1", "1.5", "٥", "5,5"])
def test_what_is_no_list_of_numbers_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"--top-k {text!r}")):
        numbers([text])


def test_each_method_is_compared_at_each_depth() -> None:
    found = arms_of("sequential, deep-thinking+ape", (5, 20))
    assert [one.name for one in found] == [
        "sequential@5",
        "deep-thinking+ape@5",
        "sequential@20",
        "deep-thinking+ape@20",
    ]


def test_numbers_go_to_the_methods_that_have_them() -> None:
    sequential, ape, inside = arms_of(
        "sequential,ape,linked+ape", (None,), temperature=0.5, scale=0.75
    )
    assert sequential.method == Sequential()
    assert ape.method == APE(temperature=0.5, scale=0.75)
    assert isinstance(inside.method, Linked)
    assert inside.method.reader == ape.method


def test_linked_tokens_go_to_the_methods_with_windows() -> None:
    sequential, pcw = arms_of("sequential,pcw", link_tokens=8)
    assert sequential.method == Sequential()
    assert pcw.method == Linked(tokens=8, reader=PCW())


def test_a_profile_gives_its_numbers_to_its_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rag_windows.calibration import Profile

    calibrated = type("Found", (), {"method": APE(temperature=0.5, scale=0.5)})()
    monkeypatch.setattr(Profile, "load", lambda path: calibrated)
    pcw, ape = arms_of("pcw,ape", profile="p.json")
    assert (pcw.method, ape.method) == (PCW(), calibrated.method)
    with pytest.raises(InputError, match="holds numbers of ape"):
        arms_of("pcw", profile="p.json")
    with pytest.raises(InputError, match="leave --rag-temperature"):
        arms_of("ape", temperature=0.5, profile="p.json")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"methods": "ape,nope"}, MethodError, "Unknown method 'nope'"),
        ({"methods": "ape,,pcw"}, InputError, "empty name"),
        ({"methods": ""}, InputError, "empty name"),
        ({"methods": "ape, ape"}, InputError, "ape@4 stands twice"),
        ({"methods": "pcw", "scale": 2.0}, MethodError, "--rag-scale is a parameter of none"),
        ({"methods": "ape", "temperature": -1.0}, MethodError, "temperature"),
        ({"methods": "linked+ape", "link_tokens": 4}, MethodError, "itself"),
    ],
)
def test_wrong_methods_are_refused(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        arms_of(**given)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.4, "0 s"), (59.4, "59 s"), (61, "1 min 01 s"), (3599, "59 min 59 s"), (7260, "2 h 01 min")],
)
def test_times_are_shown_for_people(seconds: float, shown: str) -> None:
    assert time_shown(seconds) == shown


def test_batch_jobs_are_told_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAG_WINDOWS_PROGRESS_S", "0.05")
    with progress("Answering\x1b") as told:
        told(4, 10)  # by an earlier run
        time.sleep(0.08)
        told(6, 1_000_000)
        time.sleep(0.08)
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first == "Answering\\x1b: 4 of 10, 0 s so far."
    assert re.fullmatch(r"Answering.* 6 of 1000000 \(\d+ h \d\d min left\), 0 s so far\.", second)
