import pytest

from training.intervals import wilson


def test_known_intervals() -> None:
    # R's prop.test(81, 263, correct = FALSE) gives 0.2553 to 0.3662.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    low, high = wilson(0, 10)
    assert low == 0.0
    assert high == pytest.approx(0.2775, abs=1e-4)
    assert wilson(10, 10) == pytest.approx((1 - high, 1.0), abs=1e-12)


@pytest.mark.parametrize(("right", "total"), [(0, 0), (3, 2), (-1, 2)])
def test_impossible_counts_are_refused(right: int, total: int) -> None:
    with pytest.raises(ValueError, match="right"):
        wilson(right, total)
