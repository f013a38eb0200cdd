from __future__ import annotations

import math

import numpy as np
import pytest

from rag_windows.evaluation.statistics.groups import Groups
from rag_windows.evaluation.statistics.parts import Parts


def test_a_mean_is_of_what_counts() -> None:
    parts = Parts.of_mean([10.0, None, 0.0, 50.0])
    assert parts.formula(parts.array.sum(axis=0)) == 20.0
    assert parts.rows[1] == (0.0, 0.0)


def test_a_mean_of_means_weighs_them_alike() -> None:
    parts = Parts.of_means([100.0, 0.0, None, None], [None, None, 100.0, None])
    assert parts.formula(parts.array.sum(axis=0)) == 75.0
    assert math.isnan(parts.formula(parts.array[:2].sum(axis=0)))


@pytest.mark.parametrize("parts", [Parts.of_mean([None]), Parts.of_means([None], [1.0])])
def test_nothing_to_divide_by_is_nan_without_a_warning(parts: Parts) -> None:
    assert math.isnan(parts.formula(parts.array.sum(axis=0)))


def test_no_examples_have_no_parts() -> None:
    assert Parts.of_mean([]).array.shape == (0, 0)


def test_groups_add_up() -> None:
    groups = Groups.of(["b", "a", "b", "c"])
    assert groups.numbers.tolist() == [0, 1, 0, 2]
    rows = np.array([[1.0, 2.0], [3.0, 4.0], [10.0, 20.0], [0.5, 0.0]])
    assert groups.add_up(rows).tolist() == [[11.0, 22.0], [3.0, 4.0], [0.5, 0.0]]
    assert Groups.of([]).count == 0
