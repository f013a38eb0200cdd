from __future__ import annotations

import math

import pytest
import torch

from rag_windows.calibration.intervals import Mean, bootstrap


def test_an_interval_is_that_of_the_normal_law_for_many_values() -> None:
    values = torch.randn(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (mean,) = bootstrap([values.tolist()], seed=2)
    error = float(values.std()) / math.sqrt(400)
    assert mean.value == pytest.approx(float(values.mean()))
    assert mean.low == pytest.approx(mean.value - 1.96 * error, abs=0.15 * error)
    assert mean.high == pytest.approx(mean.value + 1.96 * error, abs=0.15 * error)


def test_rows_are_resampled_alike_and_the_seed_decides() -> None:
    row = [0.0, 1.0, 1.0, 0.0, 3.0]
    shifted = [value + 1 for value in row]
    one, other = bootstrap([row, shifted], seed=1)
    assert [other.low, other.high] == pytest.approx([one.low + 1, one.high + 1])
    assert bootstrap([row], seed=1) == [one]
    assert bootstrap([row, [2.0] * 5], seed=7)[1] == Mean(2.0, 2.0, 2.0)
    assert bootstrap([], seed=1) == []


def test_the_figures_of_the_first_profiles_stand() -> None:
    # Written down when torch computed all of it: profiles that users keep were made with these.
    rows = [
        [((7 * i * i + 3 * i) % 31) / 31 - 0.4 for i in range(50)],
        [float((i * i) % 3 == 1) for i in range(50)],
        [((5 * i) % 17) ** 2 / 10 for i in range(50)],
    ]
    found = [value for one in bootstrap(rows, seed=11) for value in (one.value, one.low, one.high)]
    wanted = [0.015483870967741906, -0.06000000000000002, 0.0858064516129032]
    wanted += [0.66, 0.52, 0.78, 8.687999999999999, 6.446000000000001, 10.906299999999998]
    assert found == pytest.approx(wanted, rel=1e-12)
