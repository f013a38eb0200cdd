"""Parameters of methods, by bare name and by the name that says whose they are."""

from __future__ import annotations

import pytest

from rag_windows import APE, PCW, MethodError
from rag_windows.methods import DeepThinking, Linked
from rag_windows.methods.registry import (
    known_parameters,
    numbers_of,
    parameters,
    with_known,
    with_numbers,
    with_own,
)


def test_names() -> None:
    assert parameters(PCW) == parameters(PCW()) == ()
    assert parameters(Linked) == parameters(Linked()) == ("reader", "tokens", "choose")
    assert known_parameters(Linked(reader=PCW())) == {"tokens", "choose"}
    assert {"tokens", "temperature", "scale"} <= known_parameters(Linked(reader=APE()))


def test_a_bare_name_reaches_the_reader() -> None:
    method = Linked(4, reader=DeepThinking(steps=3, reader=APE(0.8, 0.7)))
    changed = with_known(method, {"tokens": 8, "scale": 1.0, "unknown": 1})
    assert changed == Linked(8, reader=DeepThinking(steps=3, reader=APE(0.8, 1.0)))
    assert with_known(method, {}) == method
    with pytest.raises(MethodError):
        with_known(method, {"temperature": -1.0})


def test_own_parameters_alone() -> None:
    assert with_own(APE(0.8, 0.7), {"scale": 1.0}) == APE(0.8, 1.0)
    with pytest.raises(TypeError):
        with_own(Linked(reader=APE()), {"scale": 1.0})


def test_numbers_of_readers_are_named_and_set() -> None:
    method = DeepThinking(steps=3, reader=APE(0.8, 0.7))
    numbers = numbers_of(method)
    assert (numbers["steps"], numbers["reader.temperature"]) == (3, 0.8)
    assert with_numbers(method, numbers) == method
    changed = with_numbers(method, {"steps": 4, "reader.scale": 1.0})
    assert changed == DeepThinking(steps=4, reader=APE(0.8, 1.0))
