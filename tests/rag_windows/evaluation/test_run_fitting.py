"""What does not fit one after the other is left out, from the end of the ranking, and told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rag_windows import InputError, Passage
from rag_windows.evaluation.run import RunFolder
from tests.rag_windows import small
from tests.rag_windows.evaluation.invented import Invented, arms_of, given, go, invented

TASK = invented()
ARMS = arms_of("sequential", "ape")


def long_passages(*sizes: int) -> tuple[Passage, ...]:
    """One byte is one token in the small model, which has 1024 positions."""
    return tuple(Passage(chr(97 + n) * size, f"p{n}") for n, size in enumerate(sizes))


@pytest.mark.parametrize(
    ("sizes", "read"),
    [
        ((300, 300, 300, 300), 3),
        ((300, 900, 10), 1),
        ((100, 100), 2),
        ((440, 440, 140, 1), 2),
    ],
)
def test_what_does_not_fit_in_order_is_left_out_and_counted(
    tmp_path: Path, sizes: tuple[int, ...], read: int
) -> None:
    example = replace(TASK.examples[0], passages=long_passages(*sizes))
    go(tmp_path, small.lm(), Invented([example]), ARMS)
    folder = RunFolder.open(tmp_path)
    record = folder.records("sequential")[example.key]
    assert record.error is None
    assert [one.id for one in record.passages] == [f"p{n}" for n in range(read)]
    assert record.left_out == len(sizes) - read
    beside = folder.records("ape")[example.key]
    assert len(beside.passages) == len(sizes)
    assert beside.left_out == 0


def test_fitting_keeps_as_many_as_the_engine_takes(tmp_path: Path) -> None:
    sizes = [53] * 30
    example = replace(TASK.examples[0], passages=long_passages(*sizes))
    go(tmp_path, small.lm(), Invented([example]), ARMS[:1])
    record = RunFolder.open(tmp_path).records("sequential")[example.key]
    count, passages = len(record.passages), given(example)
    options: dict[str, Any] = {"method": "sequential", "prefix": "Answer.", "max_new_tokens": 4}
    assert 0 < count < 30
    small.lm().generate(example.question, passages[:count], **options)
    with pytest.raises(InputError, match="positions"):
        small.lm().generate(example.question, passages[: count + 1], **options)


@pytest.mark.parametrize("sizes", [(2000,), (2000, 10), (0, 2000)])
def test_where_not_even_the_first_fits_it_is_an_error(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    example = replace(TASK.examples[0], passages=long_passages(*sizes))
    outcome = go(tmp_path, small.lm(), Invented([example]), ARMS)
    (failed,) = outcome.failed
    assert failed.arm == "sequential"
    assert "1024 positions" in str(failed.error)
    assert RunFolder.open(tmp_path).records("ape")[example.key].error is None
