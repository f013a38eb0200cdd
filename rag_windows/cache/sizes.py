"""How large a cache may be, and where it lies if nobody says."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from pathlib import Path

from pydantic import ByteSize, TypeAdapter, ValidationError

from rag_windows.errors import InputError

Size = int | str
"""Bytes, a text such as "4GiB" or "500MB", or a share of what is free now, such as "25%"."""

FOLDER_VARIABLE = "RAG_WINDOWS_CACHE_DIR"

_BYTES = TypeAdapter(ByteSize)
_TEXT = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[kmgt]?i?b|)", re.ASCII | re.IGNORECASE)
_UNKNOWN_MEMORY = 4 << 30
_GROUPS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def parse_size(size: Size, name: str, free: int | None = None) -> int:
    """Bytes of a size.

    Args:
        size: see `Size`.
        name: of the option, for the error.
        free: bytes that a share is a share of; None if shares make no sense.

    Raises:
        InputError: no size, or not above zero.
    """
    value = 0
    text = str(size).strip() if isinstance(size, int | str) else ""
    match = _TEXT.fullmatch(text)
    if match and match[2] != "%":
        with contextlib.suppress(ValidationError, OverflowError):
            value = int(_BYTES.validate_python(match[0].lower()))
    elif match and free is not None and float(match[1]) <= 100:
        value = int(free * float(match[1]) / 100)
    if value < 1:
        raise InputError(
            f"{name}={size!r} is no size; give bytes, a text such as '4GiB' or '500MB', or a share "
            "of what is free, such as '25%'."
        )
    return value


def show_size(size: int) -> str:
    """A size for people, such as "3.1 MiB"."""
    return ByteSize(size).human_readable(separator=" ")


def free_memory() -> int:
    """Bytes of host memory that this process could still take, limits of a container included."""
    free = _free_of_machine()
    for limit, used in _GROUPS:
        most, taken = (_number(f"/sys/fs/cgroup/{name}") for name in (limit, used))
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
    """``RAG_WINDOWS_CACHE_DIR``, else a folder in the platform's cache folder; not created here."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        base = Path(local) if local else Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:  # the specification wants an absolute path
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
