"""How large a cache may be, and where it lies if nobody says."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
from pathlib import Path

from rag_windows.errors import InputError

Size = int | str
"""Bytes, a text such as "4GiB" or "500MB", or a share of what is free now, such as "25%"."""

MEMORY_SHARE = 0.25
DISK_SHARE = 0.2
MOST_DISK = 50 << 30
"""What `cache=True` takes: shares of what is free when it is made, and 50 GiB of disk at most."""

FOLDER_VARIABLE = "RAG_WINDOWS_CACHE_DIR"

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{p}b": 1000**n for n, p in enumerate("kmgt", start=1)}
_UNITS |= {f"{p}ib": 1024**n for n, p in enumerate("kmgt", start=1)}
_TEXT = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[a-z]*)", re.ASCII | re.IGNORECASE)
_UNKNOWN_MEMORY = 4 << 30


def parse_size(size: Size, name: str, free: int | None = None) -> int:
    """Bytes of a size.

    Args:
        size: see `Size`.
        name: of the option, for the error.
        free: bytes that a share is a share of; None if shares make no sense.

    Raises:
        InputError: no size, or not above zero.
    """
    value: float = -1
    if isinstance(size, int) and not isinstance(size, bool):
        value = size
    elif isinstance(size, str) and (match := _TEXT.fullmatch(size.strip())):
        number, unit = float(match[1]), match[2].lower()
        if unit == "%" and free is not None and number <= 100:
            value = free * number / 100
        elif unit in _UNITS:
            value = number * _UNITS[unit]
    if not 1 <= value < math.inf:
        raise InputError(
            f"{name}={size!r} is no size; give bytes, a text such as '4GiB' or '500MB', or a share "
            "of what is free, such as '25%'."
        )
    return int(value)


def show_size(size: int) -> str:
    """A size for people, such as "3.1 MiB"."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"


def free_memory() -> int:
    """Bytes of host memory that this process could still take, limits of a container included."""
    free = _free_of_machine()
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        most, taken = _number(limit), _number(used)
        if most is not None and taken is not None:
            free = min(free, max(0, most - taken))
    return free


def free_disk(path: Path) -> int:
    """Bytes free on the file system that `path` lies on, or would lie on."""
    for folder in (path, *path.parents):
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            continue
    return 0


def default_folder() -> Path:
    """The folder for windows on this machine, not created here.

    ``RAG_WINDOWS_CACHE_DIR`` if it is set; else ``rag-windows/windows`` in the platform's cache
    folder: ``%LOCALAPPDATA%`` on Windows, ``~/Library/Caches`` on macOS, ``$XDG_CACHE_HOME`` (if
    absolute, as its specification wants) or ``~/.cache`` elsewhere.
    """
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        base = Path(local) if local else Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache"
    return base / "rag-windows" / "windows"


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such group, or "max" for no limit
        return None


def _free_of_machine() -> int:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass  # not Linux
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf
        return _UNKNOWN_MEMORY
