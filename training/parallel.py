"""Several processes train one model: `torchrun --nproc-per-node N -m training.train ...`.

Each process draws its own batch; gradients and the few numbers that steer the run are averaged, so
all processes stay equal. On a CPU one process a core is faster than one process with many threads.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True, slots=True)
class Group:
    """This process's place among `size`."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls) -> Group:
        """The group that torchrun's environment describes; alone without one."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if not dist.is_initialized():
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        return cls(dist.get_rank(), size)

    def average(self, parameters: Sequence[nn.Parameter], numbers: Sequence[float]) -> list[float]:
        """Averages the gradients of `parameters` in place, and `numbers`, over the group."""
        if self.size == 1:
            return list(numbers)
        gradients = [p.grad for p in parameters if p.grad is not None]
        device = parameters[0].device if parameters else None
        extra = torch.tensor(list(numbers), device=device)
        flat = torch.cat([*(g.reshape(-1) for g in gradients), extra])
        dist.all_reduce(flat)
        flat /= self.size
        start = 0
        for gradient in gradients:
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()
        return [float(x) for x in flat[start:]]
