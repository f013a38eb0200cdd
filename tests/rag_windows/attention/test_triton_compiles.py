"""The Triton kernels compile for GPUs, which needs none: the interpreter takes more than that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# The launches of a decoded step, but that kernels are compiled as for a device, and not run.
CODE = """
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from rag_windows.attention.backends import Request, triton_launch
from rag_windows.attention.kernels.loading import Kernels, kernels

class Device:
    def get_current_target(self):
        return GPUTarget("cuda", int(sys.argv[1]), 32)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 0

made = []

class Compiled:
    def __init__(self, function):
        self.function = function
    def __getitem__(self, grid):
        return lambda *args, **options: made.append(
            self.function.warmup(*args, grid=grid, **options)
        )

driver.set_active(Device())
real = kernels()
assert not real.interpreted
compiled = Kernels(Compiled(real.partials), Compiled(real.combine), False, real.errors)
triton_launch.kernels = lambda: compiled

def ask(kv_heads, rows, keys, dim, dtype, segments, **options):
    query, key = (torch.zeros(1, kv_heads, n, dim, dtype=dtype) for n in (rows, keys))
    request = Request(query, key, key, 0.1, **options)
    if not segments:
        triton_launch.attend(request)
        return
    other = query.view(1, kv_heads * rows, 1, dim), torch.zeros(1, kv_heads * rows, 1)
    sink = torch.zeros(kv_heads * rows, dtype=dtype)
    triton_launch.attend_merged(request, 1, 1, [other] * segments, (0.9, 0.0), sink)

# A Llama of 8B; an odd one that caps its logits and slides; the same with more keys.
ask(8, 4, 5000, 128, torch.bfloat16, 1)
ask(1, 1, 1, 80, torch.float16, 0, softcap=2.0, mask=torch.ones(1, 1, dtype=torch.bool))
many = len({kernel.hash for kernel in made})
for keys in (5001, 8192, 1):
    ask(8, 4, keys, 128, torch.bfloat16, 1)
assert len({kernel.hash for kernel in made}) == many == 4, "compiled anew for other keys"
print(max(kernel.metadata.shared for kernel in made))
"""


@pytest.mark.parametrize("capability", ["90"])
def test_kernels_compile(capability: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    run = subprocess.run(
        [sys.executable, "-c", CODE, capability],
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    # What the smallest of the GPUs with bf16 gives a program.
    assert 0 < int(run.stdout) <= 99 * 2**10
