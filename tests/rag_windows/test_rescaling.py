from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rag_windows import APE, METHODS, PCW, Sequential
from rag_windows.errors import MethodError
from rag_windows.rescaling import resolve

LSE = torch.tensor([-3.0, 0.0, 2.5])


def test_pcw_and_sequential_change_nothing() -> None:
    for method in (PCW(), Sequential()):
        assert torch.equal(method.context_lse(LSE), LSE)
        assert method.temperature == 1.0


def test_the_three_forms_of_ape() -> None:
    used = APE(0.8, 0.7).context_lse(LSE)
    printed = APE(0.8, 0.7, form="as printed").context_lse(LSE)
    fixed = APE(0.8, 0.7, form="fixed ratio").context_lse(LSE)
    assert torch.allclose(used, 0.7 * LSE)
    assert torch.allclose(printed, 0.8 * (LSE + math.log(0.7)))
    assert torch.allclose(fixed, LSE + math.log(0.7))


def test_released_numbers_become_an_exponent() -> None:
    assert APE.from_released(0.9, 0.9) == APE(temperature=0.9, scale=0.9 * 0.9)


@pytest.mark.parametrize("form", ["as used", "as printed", "fixed ratio"])
def test_an_empty_context_stays_empty(form: str) -> None:
    empty = torch.tensor([-torch.inf])
    assert torch.equal(APE(0.5, 0.3, form=form).context_lse(empty), empty)  # type: ignore[arg-type]  # parametrized


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
    with pytest.raises(MethodError, match=r"\['ape', 'pcw', 'sequential'\]"):
        resolve("apex")


def test_every_method_describes_itself() -> None:
    for name, method in METHODS.items():
        assert method.name == name
        assert method.formula
        assert method.paper
        assert method.__doc__
