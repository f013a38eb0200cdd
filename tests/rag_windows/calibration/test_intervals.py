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
