"""C files of this folder as kernels: compiled once a process, by the machine's own compiler."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Generic, TypeVar

import torch

from rag_windows.threads import Lock

logger = logging.getLogger(__name__)

VARIABLE = "RAG_WINDOWS_CPU_KERNEL"
"""Environment variable that switches all kernels off, with the value "0"."""

ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The number of each dtype in the sources."""

_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O2", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fPIC")
_SECONDS = 60
_OPENMP = re.compile(r"/.*/lib(?:gomp|iomp5|omp)\b[^/\n]*\.so[^/\n]*$", re.MULTILINE)
_MAPS = Path("/proc/self/maps")

Key = TypeVar("Key", bound=Hashable)
Made = TypeVar("Made")


class SingleFlight(Generic[Key, Made]):
    """What is made once for each key, by the first thread that asks, and stored for the process.

    Others that ask for the same key wait only for that thread, those that ask for another key do
    not wait, and what is made is read without a lock. A forked child has what was made before.
    """

    def __init__(self, make: Callable[[Key], Made]) -> None:
        self._make = make
        self._made: dict[Key, Made] = {}
        self._locks: dict[Key, Lock] = {}

    def __call__(self, key: Key) -> Made:
        """What belongs to a key; what `make` raises is raised, and the next call tries again."""
        if key not in self._made:
            with self._locks.setdefault(key, Lock()):
                if key not in self._made:
                    self._made[key] = self._make(key)
        return self._made[key]


def switched_off() -> bool:
    """Whether the user wants no kernels (`VARIABLE`); may change at any time."""
    return os.environ.get(VARIABLE) == "0"


def library(source: str, **macros: int) -> ctypes.CDLL | None:
    """Compile a C file of this folder and load it, in about a second; nothing stays on disk.

    None, with the reason in the log, where this machine can't.
    """
    named = " ".join([source, *(f"{name}={value}" for name, value in macros.items())])
    try:
        compiler, openmp = _compiler(), _openmp()
        if compiler is None or openmp is None:
            raise FileNotFoundError("no C compiler, or no OpenMP that PyTorch uses")
        return _compiled(compiler, openmp, source, macros)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        # A ValueError is a CC that is no command line, or an error in unknown letters.
        said = getattr(error, "stderr", None) or error
        logger.info("The CPU kernel %s is left out: %s", named, said)
        return None


def _compiled(compiler: list[str], openmp: str, source: str, macros: dict[str, int]) -> ctypes.CDLL:
    sizes = [f"-D{name}={value}" for name, value in macros.items()]
    # Not TemporaryDirectory: a child that is forked meanwhile would remove it as it ends.
    folder = Path(tempfile.mkdtemp(prefix="rag-windows-"))
    try:
        written, made, linked = Path(__file__).with_name(source), folder / "made.o", folder / "made"
        _run([*compiler, *_FLAGS, "-fopenmp", *sizes, "-c", str(written), "-o", str(made)])
        # Linked by its file, so that the kernel's threads are PyTorch's own, not a second set.
        _run([*compiler, "-shared", str(made), openmp, "-lm", "-o", str(linked)])
        return ctypes.CDLL(str(linked))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
    """The file of the OpenMP runtime that this process has loaded; None if that is unknown."""
    if not _MAPS.exists():
        return None
    found = set(_OPENMP.findall(_MAPS.read_text(encoding="utf-8", errors="replace")))
    torchs = [path for path in found if "torch" in path]
    return min(torchs or found, default=None)
