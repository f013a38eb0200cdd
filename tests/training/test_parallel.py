from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from training.parallel import Group


def test_alone_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([1.0, 2.0])
    group = Group.join()
    assert group == Group(0, 1)
    assert group.average([parameter], [3.0]) == [3.0]
    assert parameter.grad.tolist() == [1.0, 2.0]


def test_gradients_and_numbers_are_divided_by_the_size_in_place(tmp_path: Path) -> None:
    # One process stands for a group of two: the sum is its own part, the mean half of that.
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parameters = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))]
        frozen = nn.Parameter(torch.zeros(5))
        for n, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, 2.0 + 2 * n)
        numbers = Group(0, 2).average([parameters[0], frozen, parameters[1]], [8.0, 0.0])
    finally:
        dist.destroy_process_group()
    assert numbers == [4.0, 0.0]
    assert parameters[0].grad is not None
    assert parameters[1].grad is not None
    assert parameters[0].grad.unique().tolist() == [1.0]
    assert parameters[1].grad.unique().tolist() == [2.0]
    assert frozen.grad is None
