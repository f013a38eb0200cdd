from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from rag_windows import (
    APE,
    METHODS,
    PCW,
    MateICL,
    Method,
    MethodError,
    Sequential,
    StructuredPrompting,
)
from rag_windows.methods import (
    Composed,
    chain,
    describe,
    from_description,
    query_bias,
    resolve,
)
from rag_windows.methods.mateicl import SCHEDULES


def numbers(method: Method) -> tuple[float, float, float]:
    return method.temperature, method.slope, method.shift


def test_pcw_and_sequential_change_nothing() -> None:
    for method in (PCW(), Sequential()):
        assert numbers(method) == (1.0, 1.0, 0.0)


def test_the_three_forms_of_ape() -> None:
    assert numbers(APE(0.8, 0.7)) == (0.8, 0.7, 0.0)
    printed = numbers(APE(0.8, 0.7, form="as printed"))
    assert printed == pytest.approx((0.8, 0.8, 0.8 * math.log(0.7)))
    fixed = numbers(APE(0.8, 0.7, form="fixed ratio"))
    assert fixed == pytest.approx((0.8, 1.0, math.log(0.7)))


def test_released_numbers_become_an_exponent() -> None:
    assert APE.from_released(0.9, 0.9) == APE(temperature=0.9, scale=0.9 * 0.9)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), "0.9"])
@pytest.mark.parametrize("name", ["temperature", "scale"])
def test_numbers_outside_the_domain_are_refused(name: str, value: Any) -> None:
    with pytest.raises(MethodError, match=f"APE {name} must be a finite number above 0"):
        APE(**{name: value})


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(MethodError, match="as used"):
        APE(form="as guessed")  # type: ignore[arg-type]  # the error is the test


def test_methods_by_name() -> None:
    assert resolve("APE") == APE()
    assert resolve("sequential") == Sequential()
    method = APE(0.5, 0.5)
    assert resolve(method) is method
    with pytest.raises(MethodError, match=r"\['ape', .*'pcw', 'sequential'.*\]"):
        resolve("apex")


def test_every_method_describes_itself() -> None:
    for name, method in METHODS.items():
        assert method.name == name
        assert method.formula
        assert method.paper
        assert method.__doc__


def test_query_weights() -> None:
    assert [query_bias(method, 9) for method in (PCW(), APE(), Sequential())] == [0.0] * 3
    assert query_bias(StructuredPrompting(), 9) == pytest.approx(math.log(9))
    weights = {"sqrt": 3.0, "log": 1 + math.log(9), "thirds": 4.0, "linear": 9.0, 2.5: 2.5}
    for schedule, weight in weights.items():
        assert MateICL(schedule).query_weight(9) == pytest.approx(weight)  # type: ignore[arg-type]  # looped over
    assert MateICL(lambda windows: windows + 1).query_weight(9) == 10
    for name in SCHEDULES:
        assert MateICL(name).query_weight(1) == 1.0  # type: ignore[arg-type]  # looped over


@pytest.mark.parametrize("schedule", ["cube", 0, -1.0, math.nan, math.inf, True, None, [2.0]])
def test_schedules_outside_the_domain_are_refused(schedule: Any) -> None:
    with pytest.raises(MethodError, match=r"MateICL schedule must be one of \['sqrt', 'log'"):
        MateICL(schedule)


@pytest.mark.parametrize("weight", [0.0, -2.0, math.inf, math.nan, "2"])
def test_a_function_that_gives_no_weight_is_refused(weight: Any) -> None:
    with pytest.raises(MethodError, match=r"mateicl weighs the query by .* for 3 windows"):
        query_bias(MateICL(lambda windows: weight), 3)


@dataclass(frozen=True, slots=True)
class Wrapper(Composed):
    """Changes nothing."""

    steps: int = 2

    name: ClassVar[str] = "wrapper"
    formula: ClassVar[str] = "-"
    paper: ClassVar[str] = "-"


def test_a_wrapper_is_its_reader_but_for_what_it_changes() -> None:
    reader = StructuredPrompting()
    wrapped = Wrapper(3, reader=reader)
    assert wrapped.alignment == "right"
    assert wrapped.query_weight(5) == 5
    assert Wrapper(reader=APE(0.5, 0.6)).temperature == 0.5
    assert numbers(Wrapper(reader=APE(0.5, 0.6))) == (0.5, 0.6, 0.0)
    for name in ("encoding", "refinement", "recompute", "selection", "combination"):
        assert getattr(wrapped, name) == getattr(reader, name)
    assert chain(wrapped) == [wrapped, reader]
    assert hash(wrapped) == hash(Wrapper(3, reader=StructuredPrompting()))


@pytest.mark.parametrize(
    ("reader", "reason"),
    [
        (Sequential(), "sequential, which reads passages one after the other"),
        ("ape", "must be a method such as APE"),
        (Wrapper(), "can't be combined with itself"),
    ],
)
def test_readers_that_make_no_sense_are_refused(reader: Any, reason: str) -> None:
    with pytest.raises(MethodError, match=reason):
        Wrapper(reader=reader)


def test_combined_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rag_windows.methods.registry.METHODS", {**METHODS, "wrapper": Wrapper})
    assert resolve("wrapper+ape") == resolve(" Wrapper + APE ") == Wrapper(reader=APE())
    assert resolve("wrapper") == Wrapper(reader=PCW())
    with pytest.raises(MethodError, match=r"'ape\+pcw': ape reads windows by itself.*'wrapper'"):
        resolve("ape+pcw")
    with pytest.raises(MethodError, match=r"Unknown method 'apex' in 'wrapper\+apex'"):
        resolve("wrapper+apex")
    with pytest.raises(MethodError, match="Unknown method ''"):
        resolve("wrapper+")
    with pytest.raises(MethodError, match="wrapper can't be combined with sequential"):
        resolve("wrapper+sequential")


@pytest.mark.parametrize("name", METHODS)
def test_methods_as_json_and_back(name: str) -> None:
    method = METHODS[name]()
    written = json.loads(json.dumps(describe(method)))
    assert written["name"] == name
    assert from_description(written) == from_description(name) == method
    assert from_description(method) is method


def test_descriptions_hold_readers_and_refuse_what_is_unknown() -> None:
    method = MateICL(2)
    assert describe(Wrapper(4, reader=method)) == {
        "name": "wrapper",
        "reader": {"name": "mateicl", "schedule": 2},
        "steps": 4,
    }
    unwritable = describe(MateICL(math.sqrt))
    with pytest.raises(MethodError, match="schedule must be one of"):
        from_description({**unwritable, "schedule": "math.sqrt"})
    with pytest.raises(MethodError, match="names no method"):
        from_description({"schedule": 2})
    with pytest.raises(MethodError, match="is no method of"):
        from_description({"name": "ape", "steps": 2})
