"""A training run on disk: tensors as safetensors, the rest as JSON in the same file's header."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

NAME = "checkpoint.safetensors"


def save_checkpoint(
    folder: Path,
    model: PreTrainedModel,
    optimizers: Sequence[torch.optim.Optimizer],
    facts: Mapping[str, Any],
) -> None:
    """Write a checkpoint; the old one stays until the new one is whole.

    Args:
        folder: of the run.
        model: its parameters are saved, shared ones once.
        optimizers: their states and parameter groups.
        facts: anything else, as JSON holds it.
    """
    tensors = {f"model.{name}": p.detach().contiguous() for name, p in model.named_parameters()}
    rest: dict[str, Any] = {"facts": dict(facts), "optimizers": []}
    for number, optimizer in enumerate(optimizers):
        state = optimizer.state_dict()
        scalars: dict[str, dict[str, Any]] = {}
        for index, values in state["state"].items():
            for name, value in values.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"optimizer.{number}.{index}.{name}"] = value.contiguous()
                else:
                    scalars.setdefault(str(index), {})[name] = value
        rest["optimizers"].append({"groups": state["param_groups"], "scalars": scalars})
    fresh = folder / f"{NAME}.new"
    save_file(tensors, fresh, metadata={"rest": json.dumps(rest)})
    with fresh.open("rb") as file:
        os.fsync(file.fileno())
    fresh.replace(folder / NAME)


def load_checkpoint(
    folder: Path,
    model: PreTrainedModel,
    optimizers: Sequence[torch.optim.Optimizer],
    device: str,
) -> dict[str, Any] | None:
    """Put a checkpoint back into model and optimizers; returns its facts, or None without one."""
    path = folder / NAME
    if not path.exists():
        return None
    with safe_open(path, framework="pt", device=device) as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
        rest = json.loads(file.metadata()["rest"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
    for number, (optimizer, saved) in enumerate(zip(optimizers, rest["optimizers"], strict=True)):
        state: dict[int, dict[str, Any]] = {
            int(index): dict(values) for index, values in saved["scalars"].items()
        }
        prefix = f"optimizer.{number}."
        for key, tensor in tensors.items():
            if key.startswith(prefix):
                index, name = key.removeprefix(prefix).split(".", 1)
                state.setdefault(int(index), {})[name] = tensor
        optimizer.load_state_dict({"state": state, "param_groups": saved["groups"]})
    return dict(rest["facts"])
