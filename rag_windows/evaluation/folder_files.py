"""Names of what a run's folder holds, and their removal."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from rag_windows.errors import DataError
from rag_windows.evaluation.data.writing import safe_name

MANIFEST = "manifest.json"
RECORDS = "records.jsonl"
PASSAGES = "passages.jsonl"
SOURCE = "source.json"
SCORES = "scores.json"
REPORTS = ("report.html", "report.md")
PREDICTIONS = "predictions"
INDEX = "index"
_SUFFIXES = (".json", ".txt")


def predictions_path(folder: Path, arm: str, suffix: str = ".json") -> Path:
    """Where an arm's answers stand in the dataset's own format."""
    return folder / PREDICTIONS / f"{safe_name(arm)}{suffix}"


def stray(folder: Path) -> str | None:
    """A name of ours that the folder holds already, if it does."""
    names = (RECORDS, PASSAGES, SOURCE, SCORES, *REPORTS, PREDICTIONS, INDEX)
    return next((name for name in names if (folder / name).exists()), None)


def remove_run(folder: Path, arms: Sequence[str]) -> None:
    """Remove what a run of these arms has written, and nothing else.

    Raises:
        DataError: a file can't be removed.
    """
    own = [folder / name for name in (SCORES, *REPORTS, RECORDS, PASSAGES, SOURCE)]
    own += [predictions_path(folder, arm, suffix) for arm in arms for suffix in _SUFFIXES]
    predictions, index = folder / PREDICTIONS, folder / INDEX
    try:
        for path in own:
            path.unlink(missing_ok=True)
        if predictions.is_dir() and not any(predictions.iterdir()):
            predictions.rmdir()
        # A folder of this name that holds no index is somebody else's.
        if index.is_dir() and not index.is_symlink() and (index / MANIFEST).is_file():
            shutil.rmtree(index)
        # Last, so that a removal that was stopped can be done again.
        (folder / MANIFEST).unlink()
    except OSError as error:
        raise DataError(f"{error.filename} can't be removed: {error.strerror}.") from error
