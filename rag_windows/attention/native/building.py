"""The compiled kernel: built once a process, by the compiler that the machine has."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rag_windows.threads import Lock

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kernel:
    """The kernel for one dtype and head size.

    Attributes:
        run: ``rag_windows_attend`` of ``attend.c``.
        many: whether this processor has what makes it fast for many rows, too.
    """

    run: Callable[..., None]
    many: bool


VARIABLE = "RAG_WINDOWS_CPU_KERNEL"
"""Environment variable that switches the kernel off, with the value "0"."""

ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The number of each dtype in the source."""

_SOURCE = Path(__file__).with_name("attend.c")
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O2", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fPIC")
_SECONDS = 60
_OPENMP = re.compile(r"/.*/lib(?:gomp|iomp5|omp)\b[^/\n]*\.so[^/\n]*$", re.MULTILINE)
_MAPS = Path("/proc/self/maps")

_lock = Lock()
_built: dict[tuple[torch.dtype, int, int], Kernel | None] = {}


def kernel(dtype: torch.dtype, dim: int, value_dim: int) -> Kernel | None:
    """The kernel for one dtype and head size; for any thread.

    The first call for each compiles it, which takes about a second: in a folder of its own that
    only this user can read and that is gone before the call returns, so that nothing stays that
    another process could have written.

    Args:
        dtype: of `ELEMENTS`.
        dim: head dim, a multiple of 16.
        value_dim: of the values, a multiple of 16.

    Returns:
        None where it is switched off (`VARIABLE`), where there is no compiler, no OpenMP of
        PyTorch's to run on, or where compiling fails.
    """
    if os.environ.get(VARIABLE) == "0":
        return None
    asked = (dtype, dim, value_dim)
    with _lock:
        if asked not in _built:
            try:
                _built[asked] = _compiled(*asked)
            except (OSError, subprocess.SubprocessError, AttributeError, ValueError) as error:
                # A ValueError is a CC that is no command line, or an error in unknown letters.
                said = getattr(error, "stderr", None) or error
                logger.info("The CPU kernel for %s is left out: %s", dtype, said)
                _built[asked] = None
        return _built[asked]


def _compiled(dtype: torch.dtype, dim: int, value_dim: int) -> Kernel | None:
    compiler, openmp = _compiler(), _openmp()
    if compiler is None or openmp is None:
        logger.info("The CPU kernel is left out: no C compiler, or no OpenMP that PyTorch uses.")
        return None
    sizes = [f"-DELEMENT={ELEMENTS[dtype]}", f"-DDIM={dim}", f"-DVALUE_DIM={value_dim}"]
    with tempfile.TemporaryDirectory(prefix="rag-windows-") as folder:
        made, library = Path(folder, "attend.o"), Path(folder, "attend.so")
        _run([*compiler, *_FLAGS, "-fopenmp", *sizes, "-c", str(_SOURCE), "-o", str(made)])
        # Linked by its file, so that the kernel's threads are PyTorch's own, not a second set.
        _run([*compiler, "-shared", str(made), openmp, "-lm", "-o", str(library)])
        loaded = ctypes.CDLL(str(library))
    entry: Any = loaded.rag_windows_attend
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    entry.restype = None
    entry.argtypes = [
        *(pointer, pointer, number),
        *(pointer, pointer, number),
        *(pointer, number, number, number, number),
        *(pointer, pointer, pointer, number, ctypes.c_int),
    ]
    return Kernel(entry, bool(ctypes.c_int.in_dll(loaded, "rag_windows_many").value))


def _run(command: list[str]) -> None:
    subprocess.run(  # noqa: S603 - the user's own compiler, on a file of this package
        command, check=True, capture_output=True, text=True, timeout=_SECONDS
    )


def _compiler() -> list[str] | None:
    """``CC`` where it is set, as for any build; else the first that is found."""
    named = shlex.split(os.environ.get("CC", ""))
    if named:
        return named
    found = next(filter(None, map(shutil.which, _COMPILERS)), None)
    return None if found is None else [found]


def _openmp() -> str | None:
    """The file of the OpenMP runtime that this process has loaded; None if that can't be told."""
    if not _MAPS.exists():
        return None
    found = set(_OPENMP.findall(_MAPS.read_text(encoding="utf-8", errors="replace")))
    torchs = [path for path in found if "torch" in path]
    return min(torchs or found, default=None)
