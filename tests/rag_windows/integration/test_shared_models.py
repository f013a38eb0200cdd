"""Loaded models that are shared: loaded once, freed with their last user."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rag_windows import InputError, ModelLoadError, loading
from rag_windows.integration import shared_models
from tests.rag_windows import small


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the models whose weights were loaded."""
    names: list[str] = []
    load = loading.load

    def noted(model: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(str(model))
        return load(model, *args, **kwargs)

    monkeypatch.setattr(loading, "load", noted)
    return names


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small.model().save_pretrained(tmp_path)
    small.tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_equal_arguments_share_everything(folder: Path, loads: list[str]) -> None:
    first = shared_models.load_shared(folder, method="pcw", template_kwargs={"a": 1, "b": [2]})
    again = shared_models.load_shared(str(folder), template_kwargs={"b": [2], "a": 1}, method="pcw")
    assert again is first
    assert len(loads) == 1


@pytest.mark.parametrize(
    "other", [{"method": "pcw"}, {"header": "number"}, {"max_batch_tokens": 64}]
)
def test_another_way_to_read_shares_the_weights(
    folder: Path, loads: list[str], other: dict[str, Any]
) -> None:
    first, second = shared_models.load_shared(folder), shared_models.load_shared(folder, **other)
    assert second is not first
    assert second.model is first.model
    assert len(loads) == 1


def test_other_weights_are_loaded_anew(folder: Path, loads: list[str]) -> None:
    first = shared_models.load_shared(folder)
    small.model(seed=1).save_pretrained(folder)
    second = shared_models.load_shared(folder)
    assert not torch.equal(first.model.lm_head.weight, second.model.lm_head.weight)
    third = shared_models.load_shared(folder, dtype="bfloat16")
    assert (second.model.dtype, third.model.dtype) == (torch.float32, torch.bfloat16)
    assert len(loads) == 3


def test_threads_that_ask_at_once_wait_for_one_load(folder: Path, loads: list[str]) -> None:
    start = threading.Barrier(8)

    def ask(_: int) -> int:
        start.wait()
        made.append(shared_models.load_shared(folder))
        return id(made[-1])

    made: list[Any] = []
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(ask, range(8)))) == 1
    assert len(loads) == 1


def test_a_failed_load_is_told_to_all_and_tried_again(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    start = threading.Barrier(4)

    def ask(_: int) -> str:
        start.wait()
        with pytest.raises(ModelLoadError, match=r"model folder .* does not exist"):
            shared_models.load_shared(missing)
        return "told"

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == ["told"] * 4
    small.model().save_pretrained(missing)
    small.tokenizer().save_pretrained(missing)
    assert shared_models.load_shared(missing).tokenizer is not None


@pytest.mark.slow
def test_nothing_is_kept_alive(folder: Path, loads: list[str]) -> None:
    lm = shared_models.load_shared(folder)
    gone = weakref.ref(lm), weakref.ref(lm.model)
    del lm
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    shared_models.load_shared(folder)
    assert len(loads) == 2


def test_loaded_models_are_told_apart_by_identity() -> None:
    one = shared_models.load_shared(small.model(), tokenizer=small.tokenizer())
    assert shared_models.load_shared(small.model(), tokenizer=small.tokenizer()) is one
    assert shared_models.load_shared(small.model(seed=1), tokenizer=small.tokenizer()) is not one
    with pytest.raises(InputError, match="model must be a name"):
        shared_models.load_shared(3)


def test_arguments_are_told_apart(folder: Path) -> None:
    variables: list[Any] = [0, False, 0.0, "0", b"0", Path("0"), [0], {"0": 0}, {0}, object()]
    variables += [torch.float16, torch.bfloat16, object()]
    made = [shared_models.load_shared(folder, template_kwargs={"a": value}) for value in variables]
    assert len({id(one) for one in made}) == len(variables)
    first = shared_models.load_shared(folder, template_kwargs={"a": [1, {"b": 2}]})
    assert shared_models.load_shared(folder, template_kwargs={"a": (1, {"b": 2})}) is first
