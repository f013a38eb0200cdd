"""The codebook as a method for passages that are given with a request."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rag_windows import (
    APE,
    PCW,
    Codebook,
    DeepThinking,
    InputError,
    Linked,
    MateICL,
    Method,
    MethodError,
    ParallelEnsemble,
    Passage,
    Sequential,
    StructuredPrompting,
)
from rag_windows.kv import PackedWindows
from rag_windows.methods import describe, from_description, resolve
from tests.rag_windows import small
from tests.rag_windows.codebook.books import PASSAGES, QUESTION

LONG = Passage("a very long passage " * 12, id="long")


@pytest.mark.parametrize(
    "method",
    [
        Codebook(retrieve=3, reader=APE()),
        Codebook(retrieve=3, fusion="mean"),
        Codebook(retrieve=3, fusion="sum", reader=MateICL()),
        Codebook(retrieve=3, reader=StructuredPrompting()),
        Codebook(retrieve=3, fusion="mean", reader=StructuredPrompting()),
        Codebook(retrieve=3, reader=DeepThinking(2)),
        DeepThinking(2, reader=Codebook(retrieve=3)),
        Codebook(retrieve=3, reader=ParallelEnsemble()),
    ],
    ids=lambda method: f"{method.name}+{method.reader.name} {getattr(method, 'fusion', '')}",
)
def test_only_what_was_chosen_is_read_and_cited(method: Method) -> None:
    lm = small.lm()
    out = lm.generate(QUESTION, PASSAGES, method=method, max_new_tokens=3)
    read = [window.passage for window in out.windows]
    assert len(read) == 3
    assert read == sorted(read)
    assert out.citations is not None
    assert out.prefix_mass is not None
    assert out.query_mass is not None
    masses = [citation.mass for citation in out.citations]
    assert [index for index, mass in enumerate(masses) if mass > 0] == read
    assert sum(masses) + out.prefix_mass + out.query_mass == pytest.approx(1, abs=1e-5)
    assert lm.score(QUESTION, PASSAGES, ["a", "bc"], method=method)


def test_chosen_windows_are_read_as_if_no_others_were_given() -> None:
    lm = small.lm()
    out = lm.generate(
        QUESTION, PASSAGES, method=Codebook(retrieve=3, reader=APE()), max_new_tokens=5
    )
    chosen = [PASSAGES[window.passage] for window in out.windows]
    alone = lm.generate(QUESTION, chosen, method=APE(), max_new_tokens=5)
    assert out.token_ids == alone.token_ids
    assert [c.mass for c in out.citations or () if c.mass] == pytest.approx(
        [c.mass for c in alone.citations or ()], abs=1e-6
    )


def test_a_passage_of_several_windows_is_chosen_as_a_whole() -> None:
    lm = small.lm()
    tight = type(lm)(lm.model, lm.tokenizer, max_window_tokens=60)
    method = Codebook(retrieve=1)
    out = tight.generate("a very long passage", [*PASSAGES, LONG], method=method, max_new_tokens=2)
    parts = [window.part for window in out.windows if window.passage == len(PASSAGES)]
    assert parts == list(range(out.windows[0].parts))
    assert len(parts) > 2


def test_a_fused_position_counts_for_the_passages_that_reach_it() -> None:
    lm = small.lm()
    windows = [[7, 8, 9, 10], [11, 12], [13, 14, 15, 16]]
    context = lm.encode_ids([5, 6], windows, method=Codebook(fusion="mean"))
    narrow = lm.engine.decoder.narrowed(context, [20, 21])
    packed = narrow.windows
    assert isinstance(packed, PackedWindows)
    assert packed.spans == (2, 2)
    assert torch.allclose(packed.shares, torch.tensor([[1 / 3] * 3, [0.5, 0.0, 0.5]]))
    assert narrow.query_start == 2 + 4


def test_a_context_is_narrowed_once() -> None:
    lm = small.lm()
    context = lm.encode_ids([5], [[7, 8], [9, 10], [11]], method=Codebook(retrieve=1))
    narrow = lm.engine.decoder.narrowed(context, [9, 10])
    assert narrow.chosen is not None
    assert len(narrow.chosen) == 1
    assert lm.engine.decoder.narrowed(narrow, [7, 8]) is narrow
    plain = replace(context, method=PCW())
    assert lm.engine.decoder.narrowed(plain, [9, 10]) is plain
    with pytest.raises(InputError, match="narrow the context"):
        lm.engine.decoder.forward(context, torch.tensor([[5], [6]]))


def test_no_passages_are_the_plain_model() -> None:
    lm = small.lm()
    plain = lm.generate(QUESTION, method=PCW(), max_new_tokens=3)
    assert lm.generate(QUESTION, method=Codebook(), max_new_tokens=3).token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"size": 0}, "size"),
        ({"retrieve": 0}, "retrieve"),
        ({"retrieve": True}, "retrieve"),
        ({"similarity": "manhattan"}, "similarity"),
        ({"fusion": "max"}, "fusion"),
        ({"page": 0}, "page"),
        ({"layers": ()}, "layers"),
        ({"layers": ("a",)}, "layers"),
        ({"reader": Sequential()}, "sequential"),
        ({"reader": Linked(4)}, "linked"),
        ({"reader": Codebook()}, "itself"),
        ({"fusion": "mean", "reader": ParallelEnsemble()}, "ensemble"),
    ],
)
def test_refused_by_name(options: dict[str, object], says: str) -> None:
    with pytest.raises(MethodError, match=says):
        Codebook(**options)  # type: ignore[arg-type]  # wrong on purpose


def test_a_layer_that_the_model_has_not() -> None:
    lm = small.lm()
    context = lm.encode_ids([5], [[7], [8]], method=Codebook(retrieve=1, layers=(2,)))
    with pytest.raises(MethodError, match="layers 0 to 1"):
        lm.logits(context, [9])


def test_by_name_and_as_json() -> None:
    assert resolve("codebook+ape") == Codebook(reader=APE())
    method = Codebook(retrieve=2, layers=(0, -1), reader=DeepThinking(3))
    assert from_description(describe(method)) == method


def test_a_short_last_page_is_the_mean_of_what_it_has() -> None:
    lm = small.lm()
    window = lm.engine.decoder.runner.run([[7, 8, 9, 10, 11]], [0], None)[0]
    rows = Codebook(similarity="dot", layers=(1,), page=2).pages(window)
    keys = window.keys[1]
    means = torch.stack([keys[:, :2].mean(1), keys[:, 2:4].mean(1), keys[:, 4]])
    assert torch.allclose(rows, means.flatten(1) / keys.shape[0] ** 0.5)
