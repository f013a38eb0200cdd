from __future__ import annotations

import math

import numpy as np
import pytest

from rag_windows.evaluation.statistics.comparing import Comparison
from rag_windows.evaluation.statistics.groups import Groups
from rag_windows.evaluation.statistics.parts import Parts

GROUPS = Groups.of([f"talk {i // 3}" for i in range(30)])
RNG = np.random.default_rng(0)
BASE = (100 * RNG.random(30)).tolist()
OWN: list[float | None] = [None if i == 4 else 0.8 * one for i, one in enumerate(BASE)]
MASKS = np.array([[True] * 30, [i % 2 == 0 for i in range(30)], [False] * 30])


def compared() -> Comparison:
    parts = [Parts.of_mean(BASE), Parts.of_mean(OWN), Parts.of_mean(BASE)]
    return Comparison(parts, GROUPS, [0, 0, 0], MASKS)


def test_sections_are_means_of_their_examples() -> None:
    found = compared()
    assert [found.n(0, section) for section in range(3)] == [30, 15, 0]
    assert [found.n(1, section) for section in range(3)] == [29, 14, 0]
    assert found.value(0, 0).value == pytest.approx(np.mean(BASE))
    assert found.value(0, 1).value == pytest.approx(np.mean(BASE[::2]))
    assert found.value(0, 1).low < np.mean(BASE[::2]) < found.value(0, 1).high
    own = np.mean([one for one in OWN[::2] if one is not None])
    assert found.value(1, 1).value == pytest.approx(own)
    assert found.difference(1, 1).value == pytest.approx(own - np.mean(BASE[::2]))
    assert found.retention(1, 1).value == pytest.approx(100 * own / np.mean(BASE[::2]))


def test_an_empty_section_has_no_value() -> None:
    found = compared()
    assert math.isnan(found.value(0, 2).value)
    assert math.isnan(found.retention(1, 2).value)
    assert not found.value(0, 2).bounded


def test_arms_are_tested_against_their_bases_and_corrected_together() -> None:
    base, worse, same = compared().tests()
    assert base is None
    assert worse is not None
    assert same is not None
    assert worse.holm == pytest.approx(2 * worse.p)
    assert worse.p < 0.05 < same.p == 1


def test_arms_with_different_bases_are_one_family() -> None:
    _, worse, _ = compared().tests()
    parts = [Parts.of_mean(one) for one in (BASE, OWN, OWN, BASE)]
    first, own, second, base = Comparison(parts, GROUPS, [0, 0, 2, 2], MASKS).tests()
    assert first is None
    assert second is None
    assert own == base
    assert own is not None
    assert worse is not None
    assert own.p == worse.p
    assert own.holm == pytest.approx(2 * worse.p)


def test_one_arm_alone_is_compared_with_nothing() -> None:
    alone = Comparison([Parts.of_mean(BASE)], GROUPS, [0], MASKS[:1])
    assert alone.tests() == [None]
    assert alone.value(0, 0).bounded
