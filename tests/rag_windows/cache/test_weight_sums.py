"""Digests of weights beside the cache: looked up where nothing changed, never believed else."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rag_windows import PassageCache, WindowedLM
from rag_windows.cache import fingerprint
from tests.rag_windows import small

Change = Callable[[Path], object]


class Reads:
    """How many tensors were read by sha256."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = fingerprint._hashed

        def hashed(tensor: torch.Tensor, hash_with: Any) -> bytes:
            self.count += hash_with is hashlib.sha256
            return original(tensor, hash_with)

        monkeypatch.setattr(fingerprint, "_hashed", hashed)

    def of(self, run: Callable[[], Any]) -> tuple[Any, int]:
        before = self.count
        return run(), self.count - before


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint."""
    small.model().save_pretrained(tmp_path / "model")
    small.tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(folder: Path, salt: str | None = None) -> WindowedLM:
    cache = PassageCache(memory="64MiB", path=folder.parent / "cache", salt=salt)
    return WindowedLM.from_pretrained(folder, cache=cache)


def stored(folder: Path) -> list[Path]:
    return [*(folder.parent / "cache" / "weights").iterdir()]


def test_weights_that_an_earlier_process_read_are_not_read_again(
    folder: Path, reads: Reads
) -> None:
    first, count = reads.of(load(folder).fingerprints)
    assert count > 10
    assert reads.of(load(folder).fingerprints) == (first, 0)
    in_memory = WindowedLM.from_pretrained(folder, cache=PassageCache(memory="64MiB"))
    assert in_memory.fingerprints() == first, "whatever way they were told"
    other_tenant, count = reads.of(load(folder, salt="another").fingerprints)
    assert (other_tenant, count > 10) == (first, True)


def other_weights(folder: Path) -> None:
    """As many bytes in the same place, with the time of the old ones."""
    file = folder / "model.safetensors"
    state, shifted = file.stat(), small.build(seed=1)
    shifted.save_pretrained(folder)
    assert file.stat().st_size == state.st_size
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))


def other_number(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = bytearray(file.read_bytes())
    whole[-3] ^= 1
    state = file.stat()
    file.write_bytes(whole)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))


@pytest.mark.parametrize("change", [other_weights, other_number])
def test_another_checkpoint_in_its_place_is_another_model(change: Change, folder: Path) -> None:
    first = load(folder).fingerprints()
    change(folder)
    assert load(folder).fingerprints() != first


@pytest.mark.parametrize("way", ["data", "numpy", "in place", "one element at the end"])
def test_weights_that_were_edited_before_the_first_question_are_noticed(
    way: str, folder: Path
) -> None:
    first = load(folder).fingerprints()
    lm = load(folder)
    weight: Any = lm.model.get_parameter("model.layers.1.mlp.down_proj.weight")
    with torch.no_grad():
        if way == "data":
            weight.data[3, 5] += 1
        elif way == "numpy":
            weight.detach().numpy()[3, 5] += 1
        elif way == "in place":
            weight[3, 5] += 1
        else:
            weight.data[-1, -1] += 1
    assert lm.fingerprints() != first


def flipped(at: int) -> Change:
    def change(path: Path) -> None:
        whole = bytearray(path.read_bytes())
        whole[at % len(whole)] ^= 4
        path.write_bytes(whole)

    return change


def linked(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def replaced_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replaced_by_a_file(path: Path) -> None:
    shutil.rmtree(path.parent)
    path.parent.write_text("x")


DAMAGE: dict[str, Change] = {
    "a bit of the seal": flipped(0),
    "a bit of a digest": flipped(40),
    "the last bit": flipped(-1),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a link": linked,
    "a folder": replaced_by_a_folder,
    "a pipe": piped,
    "gone": lambda path: path.unlink(),
    "no folder": lambda path: shutil.rmtree(path.parent),
    "open to others": lambda path: path.parent.chmod(0o777),
    "a file for the folder": replaced_by_a_file,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_not_believed(damage: str, folder: Path, reads: Reads) -> None:
    first = load(folder).fingerprints()
    (file,) = stored(folder)
    DAMAGE[damage](file)
    again, count = reads.of(load(folder).fingerprints)
    assert again == first
    assert count > 10
    assert load(folder).fingerprints() == first


def test_digests_of_another_model_under_its_name_are_not_believed(folder: Path) -> None:
    first = load(folder).fingerprints()
    (own,) = stored(folder)
    other_weights(folder)
    second = load(folder).fingerprints()
    (theirs,) = {*stored(folder)} - {own}
    shutil.copy(own, theirs)
    assert load(folder).fingerprints() == second != first


def test_few_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rag_windows.cache.weight_sums._MOST_FILES", 2)
    for seed in range(4):
        small.build(seed).save_pretrained(folder)
        load(folder).fingerprints()
    assert len(stored(folder)) == 2
