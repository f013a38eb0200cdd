"""C files of this folder as kernels: compiled once, by the machine's own compiler, and stored."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Generic, TypeVar

import torch

from rag_windows.errors import CacheError
from rag_windows.folders import KERNELS, default_folder
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
_MAPS, _PROCESSOR = Path("/proc/self/maps"), Path("/proc/cpuinfo")
_ENDING = ".so"
_UNUSED_S = 90 * 24 * 3600.0
"""Stored kernels that nobody loaded for so long are removed when another one is stored."""

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
    """Load a C file of this folder as an earlier process compiled it, or compile it in a second.

    It is stored beside the passage cache, for this processor, compiler and source, in files that
    only the user can write; where there is no such folder, each process compiles anew. None, with
    the reason in the log, where this machine can't.
    """
    named = " ".join([source, *(f"{name}={value}" for name, value in macros.items())])
    try:
        compiler, openmp = _compiler(), _openmp()
        if compiler is None or openmp is None:
            raise FileNotFoundError("no C compiler, or no OpenMP that PyTorch uses")
        folder, name = _folder(), _name(compiler, openmp, source, macros)
        found = None if folder is None else _stored(folder, name)
        return found or _compiled(compiler, openmp, source, macros, folder, name)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        # A ValueError is a CC that is no command line, or an error in unknown letters.
        said = getattr(error, "stderr", None) or error
        logger.info("The CPU kernel %s is left out: %s", named, said)
        return None


def _compiled(
    compiler: list[str],
    openmp: str,
    source: str,
    macros: dict[str, int],
    stored: Path | None,
    name: str,
) -> ctypes.CDLL:
    sizes = [f"-D{macro}={value}" for macro, value in macros.items()]
    # Not TemporaryDirectory: a child that is forked meanwhile would remove it as it ends.
    folder = Path(tempfile.mkdtemp(prefix="rag-windows-"))
    try:
        written, made, linked = Path(__file__).with_name(source), folder / "made.o", folder / "made"
        _run([*compiler, *_FLAGS, "-fopenmp", *sizes, "-c", str(written), "-o", str(made)])
        # Linked by its file, so that the kernel's threads are PyTorch's own, not a second set.
        _run([*compiler, "-shared", str(made), openmp, "-lm", "-o", str(linked)])
        loaded = ctypes.CDLL(str(linked))
        if stored is not None:
            _store(linked.read_bytes(), stored, name)
        return loaded
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _name(compiler: list[str], openmp: str, source: str, macros: dict[str, int]) -> str:
    """What a stored kernel is found by: everything that its code depends on."""
    program = Path(shutil.which(compiler[0]) or compiler[0]).resolve()
    cpu = _PROCESSOR.read_text(encoding="utf-8", errors="replace") if _PROCESSOR.exists() else ""
    kinds = re.findall(r"^(?:model name|flags|Features|CPU part)\s*:.*$", cpu, re.MULTILINE)
    about = [
        *(platform.machine(), *sorted(set(kinds)), *compiler, *_FLAGS, openmp, source),
        *(f"{macro}={value}" for macro, value in sorted(macros.items())),
        *(str(program.stat().st_size), str(program.stat().st_mtime_ns)),
    ]
    digest = hashlib.sha256("\0".join(about).encode())
    for path in sorted(Path(__file__).parent.glob("*.[ch]")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _folder() -> Path | None:
    """Where kernels are stored; None where it can't be made, or others could write to it."""
    if not hasattr(os, "geteuid"):
        return None
    try:
        folder = default_folder() / KERNELS
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if _own(folder.lstat()) and folder.is_dir() else None
    except (CacheError, OSError):
        return None


def _own(state: os.stat_result) -> bool:
    """Whether only this user can write to a file: what it holds is run."""
    return state.st_uid == os.geteuid() and not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _stored(folder: Path, name: str) -> ctypes.CDLL | None:
    """What an earlier process stored, if it is whole: its name ends with its digest."""
    for path in folder.glob(f"{name}-*{_ENDING}"):
        try:
            state = path.lstat()
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            if stat.S_ISREG(state.st_mode) and _own(state) and path.stem == f"{name}-{digest}":
                os.utime(path)
                return ctypes.CDLL(str(path))
            path.unlink()
        except OSError as error:
            logger.info("A stored CPU kernel could not be used: %s", error)
    return None


def _store(made: bytes, folder: Path, name: str) -> None:
    """Store a kernel for later processes, if that can be, and remove those of no use."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(made)
        digest = hashlib.sha256(made).hexdigest()
        Path(file.name).replace(folder / f"{name}-{digest}{_ENDING}")
        before = time.time() - _UNUSED_S
        for path in folder.iterdir():
            if path.lstat().st_mtime < before:
                path.unlink()
    except OSError as error:
        logger.info("A CPU kernel could not be stored: %s", error)


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
