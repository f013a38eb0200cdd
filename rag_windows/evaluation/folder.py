"""A run's folder: the manifest, the answers as they came, and what was made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from rag_windows.cache.locks import FileLock
from rag_windows.errors import DataError, InputError
from rag_windows.evaluation.data.fields import Place
from rag_windows.evaluation.folder_files import (
    MANIFEST,
    PASSAGES,
    RECORDS,
    predictions_path,
    remove_run,
    stray,
)
from rag_windows.evaluation.folder_lock import lock_folder
from rag_windows.evaluation.lines import JsonLines
from rag_windows.evaluation.machine import surroundings
from rag_windows.evaluation.manifest import Manifest
from rag_windows.evaluation.record import Record, Speed
from rag_windows.evaluation.record_json import line_of, read_line
from rag_windows.evaluation.texts import Texts


class RunFolder:
    """What a run has kept; made by `open` or `begin`.

    Attributes:
        path: of the folder.
        manifest: what the run is.
        notes: what the user should be told about what was found.
        texts: the passages, by the digests that records name.
    """

    def __init__(self, path: Path, manifest: Manifest, lock: FileLock | None = None) -> None:
        self.path = path
        self.manifest = manifest
        self.notes: tuple[str, ...] = ()
        self.texts = Texts(path / PASSAGES)
        self._lock = lock
        self._lines = JsonLines(path / RECORDS)
        self._records: dict[str, dict[str, Record]] = {name: {} for name in manifest.arms}
        self._speeds: dict[str, dict[str, Speed]] = {name: {} for name in manifest.arms}
        for number, line in self._lines:
            place = Place(str(self._lines.path), f"line {number}")
            found = read_line(line, place)
            if found.arm not in self._records:
                raise place.error(f'"arm" is {found.arm!r}, which the manifest does not name.')
            self._remember(found)
        for name, torn in ((RECORDS, self._lines.torn), (PASSAGES, self.texts.torn)):
            if torn:
                self._tell(
                    f"{path / name}: the last line has no end and was dropped ({torn} bytes); the "
                    "run was stopped while it wrote."
                )

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Read a run, also one that is being written; nothing is changed.

        Raises:
            DataError: there is none, or a file holds something else; names file and line.
        """
        folder = Path(path)
        if not (folder / MANIFEST).is_file():
            raise DataError(f"{folder} holds no {MANIFEST}, so it is no run's folder.")
        return cls(folder, Manifest.read(folder / MANIFEST))

    @classmethod
    def begin(cls, path: str | Path, manifest: Manifest, fresh: bool = False) -> RunFolder:
        """Go on with a run, or begin it; the folder is locked until `close`.

        Args:
            path: of the folder, which is made if it is missing.
            manifest: what the run is.
            fresh: whether what an earlier run left here is removed; other files stay.

        Raises:
            InputError: another process writes it, or it holds a run of other settings; names each
                setting that differs.
            DataError: it can't be read or written, or holds such files and no manifest.
        """
        folder = Path(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{folder} can't be made: {error.strerror}.") from error
        lock = lock_folder(folder)
        try:
            return cls._begun(folder, manifest, fresh, lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def _begun(cls, folder: Path, manifest: Manifest, fresh: bool, lock: FileLock) -> RunFolder:
        if not (folder / MANIFEST).is_file():
            if (name := stray(folder)) is not None:
                raise DataError(
                    f"{folder} holds {name} but no {MANIFEST}, so it is not known what run that is "
                    "of; name another folder with --out."
                )
            manifest.write(folder / MANIFEST)
            return cls(folder, manifest, lock)
        earlier = Manifest.read(folder / MANIFEST)
        if fresh:
            remove_run(folder, earlier.arms)
            manifest.write(folder / MANIFEST)
            return cls(folder, manifest, lock)
        if different := earlier.differences(manifest, here="there", there="now"):
            raise InputError(
                f"{folder} holds a run of other settings: {'; '.join(different)}. Give --fresh to "
                "remove it and begin anew, or name another folder with --out."
            )
        now = surroundings()
        going_on = earlier.going_on(now)
        made = cls(folder, going_on, lock)
        for name in (RECORDS, PASSAGES):
            JsonLines(folder / name).repair()
        if going_on is not earlier:
            going_on.write(folder / MANIFEST)
            before = earlier.made_with[-1] if earlier.made_with else {}
            changed = [
                f"{name} {before.get(name, 'unknown')}, now {value}"
                for name, value in now.items()
                if before.get(name) != value
            ]
            made._tell(f"{folder}: earlier answers were made with {'; '.join(changed)}.")
        return made

    def records(self, arm: str) -> Mapping[str, Record]:
        """An arm's records by the keys of their examples; of several the last one counts."""
        return self._records[arm]

    def speeds(self, arm: str) -> Mapping[str, Speed]:
        """An arm's timings by the keys of their examples."""
        return self._speeds[arm]

    def text(self, digest: str) -> str:
        """A passage's text.

        Raises:
            DataError: the file lacks it.
        """
        if digest not in self.texts:
            raise DataError(
                f"{self.path / PASSAGES} lacks the passage {digest!r} that a record names; begin "
                "anew with --fresh."
            )
        return self.texts[digest]

    def predictions(self, arm: str, suffix: str = ".json") -> Path:
        """Where an arm's answers stand in the dataset's own format."""
        return predictions_path(self.path, arm, suffix)

    def add(self, values: Iterable[Record | Speed], texts: Iterable[str] = ()) -> None:
        """Keep answers and timings, with the passages that they name; they are safe afterwards.

        Raises:
            DataError: they can't be written, or the folder was only opened to be read.
        """
        if self._lock is None:
            raise DataError(f"{self.path} is open for reading only.")
        kept = list(values)
        self.texts.add(texts)
        self._lines.append(*map(line_of, kept))
        for value in kept:
            self._remember(value)

    def close(self) -> None:
        """Let others write; again does nothing."""
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _remember(self, value: Record | Speed) -> None:
        if isinstance(value, Record):
            self._records[value.arm][value.key] = value
        else:
            self._speeds[value.arm][value.key] = value

    def _tell(self, note: str) -> None:
        self.notes = (*self.notes, note)
