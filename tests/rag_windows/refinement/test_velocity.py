from __future__ import annotations

import pytest
import torch

from rag_windows.steps.refinement import Velocity


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_it_follows_the_written_update(momentum: float) -> None:
    generator = torch.Generator().manual_seed(0)
    start, *targets = torch.randn(4, 2, 3, generator=generator, dtype=torch.float64)
    moved = Velocity(start, 0.25, momentum)
    place, moving = start, torch.zeros_like(start)
    for target in targets:
        moved.follow(target)
        moving = (target - place) + momentum * moving
        place = place + 0.25 * moving
        torch.testing.assert_close(moved.place, place, rtol=0, atol=1e-12)


def test_what_it_starts_from_stays_as_it_is() -> None:
    start = torch.zeros(3)
    Velocity(start, 1.0, 0.9).follow(torch.ones(3))
    assert torch.equal(start, torch.zeros(3))


def test_small_steps_of_bf16_add_up() -> None:
    start = torch.full((1,), 256.0, dtype=torch.bfloat16)
    moved = Velocity(start, 0.01, 0.0)
    for _ in range(100):
        moved.follow(torch.full((1,), 272.0, dtype=torch.bfloat16))
    # One step is 0.16, and bf16 has nothing between 256 and 258.
    assert moved.place.dtype == torch.float32
    assert moved.place.item() == pytest.approx(272 - 16 * 0.99**100, abs=1e-3)
