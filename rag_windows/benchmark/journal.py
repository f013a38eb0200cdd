"""The parts of a run on the medium as they come, so that a killed run can go on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rag_windows
from rag_windows.benchmark.result import Part
from rag_windows.errors import DataError, InputError
from rag_windows.evaluation.lines import JsonLines


class Journal:
    """A file with a line for each beginning of a run and for each of its parts.

    Args:
        path: of the file; None keeps nothing.
        settings: what parts of one result must have in common, as JSON.

    Attributes:
        goes: how often the run was begun, this time included.

    Raises:
        DataError: the file can't be read or written, or holds something else.
        InputError: it is of other settings.
    """

    def __init__(self, path: Path | None = None, settings: Mapping[str, Any] | None = None) -> None:
        self._lines = None if path is None else JsonLines(path)
        self._parts: dict[str, Part] = {}
        self.goes = 1
        if path is None or self._lines is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        wanted = json.loads(json.dumps(settings))
        self._lines.repair()
        for number, line in self._lines:
            if "settings" in line:
                _check(path, line["settings"], wanted)
                self.goes += 1
                continue
            try:
                self._parts[line["part"]] = Part.from_json(line["found"])
            except (TypeError, KeyError) as error:
                raise DataError(
                    f"{path}, line {number}, is no part of a run; delete the file to begin anew."
                ) from error
        self._lines.append({"settings": wanted})

    def __len__(self) -> int:
        """Parts that are there."""
        return len(self._parts)

    def part(self, name: str) -> Part | None:
        """What an earlier call found, or None."""
        return self._parts.get(name)

    def add(self, name: str, part: Part) -> None:
        """Keep a part.

        Raises:
            DataError: it can't be written.
        """
        self._parts[name] = part
        if self._lines is not None:
            self._lines.append({"part": name, "found": dataclasses.asdict(part)})


def sources() -> str:
    """Digest of this package's source files: figures of different code are no one result."""
    home = Path(rag_windows.__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*home.rglob("*.py"), *home.rglob("*.c")]):
        digest.update(str(path.relative_to(home)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _check(path: Path, found: Any, wanted: Mapping[str, Any]) -> None:
    if found == wanted:
        return
    before = found if isinstance(found, dict) else {}
    differ = sorted(key for key in wanted if before.get(key) != wanted[key])
    raise InputError(
        f"{path} holds an unfinished run with other settings: another "
        f"{' and another '.join(differ) or 'format'}. Repeat the command that began it, name "
        "another folder with --out, or delete that file."
    )
