"""Windows encoded in sight of tokens that are then left out, against the dense reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from rag_windows import (
    APE,
    PCW,
    DeepThinking,
    InputError,
    Linked,
    Method,
    MethodError,
    Neighbours,
    Sequential,
    Sink,
    StructuredPrompting,
)
from tests.rag_windows import small

from . import dense, engine, tolerances, zoo
from .cases import RULES, Case, case
from .dense import PLAIN, Rule
from .float64 import Layer, forward

NAMES = ("llama", "qwen3", "gpt2", "gemma3_text-sliding", "gpt_oss", "mistral-sliding", "gemma2")
DOCUMENT = case(5, (7, 12, 1, 20), 6)
BEFORE = [[], [9, 8, 7], [3] * 11, [5, 6]]


@dataclass(frozen=True, slots=True)
class SeenRow:
    """All tokens in one row: [prefix | before and window, for each window | query].

    A token of the prefix sees the prefix up to itself; one before a window, or of it, the prefix
    and what stands in front of it there; the query the prefix, all windows without what stands
    before them, and itself up to itself. The kinds are 0 prefix, 1 before, 2 window, 3 query.
    """

    ids: Tensor
    positions: Tensor
    kinds: Tensor
    texts: Tensor
    keys: dict[int, Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> Tensor:
        """(tokens,) bool: the rows of the query."""
        return self.kinds == 3

    @property
    def context(self) -> Tensor:
        """(tokens,) bool: keys of the windows."""
        return self.kinds == 2

    def visible(self, reach: int | None) -> Tensor:
        """(tokens, tokens) bool: which key each row sees in a layer of this reach."""
        index = torch.arange(len(self.ids))
        before = index[None, :] <= index[:, None]
        same = self.texts[:, None] == self.texts[None, :]
        key = self.kinds[None, :]
        seen = before & ((key == 0) | same | (self.rows[:, None] & (key == 2)))
        if reach is not None:
            seen &= self.positions[:, None] - self.positions[None, :] < reach
        return seen


def lay_out(one: Case, before: Sequence[Sequence[int]], starts: Sequence[int]) -> SeenRow:
    """The row of a case whose windows start at these positions, behind what they see."""
    prefix, query = len(one.prefix), len(one.query)
    ids, positions = list(one.prefix), list(range(prefix))
    kinds, texts = [0] * prefix, [-1] * prefix
    for number, (window, seen, start) in enumerate(zip(one.windows, before, starts, strict=True)):
        ids += [*seen, *window]
        positions += range(start - len(seen), start + len(window))
        kinds += [1] * len(seen) + [2] * len(window)
        texts += [number] * (len(seen) + len(window))
    end = max(start + len(window) for start, window in zip(starts, one.windows, strict=True))
    ids, positions = [*ids, *one.query], [*positions, *range(end, end + query)]
    rows = kinds + [3] * query, texts + [-2] * query
    ids_, positions_, kinds_, texts_ = map(torch.tensor, (ids, positions, *rows))
    return SeenRow(ids_, positions_, kinds_, texts_)


def run(name: str, row: SeenRow, rule: Rule = PLAIN) -> Tensor:
    """The specification: (len(query), vocab) fp32 logits; the row keeps every layer's keys."""

    def mixed(layer: Layer) -> Tensor:
        row.keys[layer.index] = layer.key[0]
        return dense.mixed(layer, row, rule)

    return forward(zoo.shared(name), zoo.BY_NAME[name].sliding, row, mixed)


def logits(name: str, one: Case, by: Method | str, before: Sequence[Sequence[int]]) -> Tensor:
    context = engine.encoded(name, one, by, before=before)
    return engine.shared(name).logits(context, one.query)


def all_before(windows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Of each chunk of one document, all tokens in front of it."""
    flat = [token for window in windows for token in window]
    return [flat[:end] for end in accumulate(map(len, windows[:-1]), initial=0)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ruled", ["pcw", "as used", "as printed"])
def test_a_document_in_chunks_is_the_document(name: str, ruled: str) -> None:
    rule, before = RULES[ruled], all_before(DOCUMENT.windows)
    found = logits(name, DOCUMENT, Neighbours(reader=engine.method(rule)), before)
    document = [[token for window in DOCUMENT.windows for token in window]]
    model, sliding = zoo.shared(name), zoo.BY_NAME[name].sliding
    whole = dense.logits(model, sliding, DOCUMENT.prefix, document, DOCUMENT.query, rule)
    tolerances.agree(found, whole)
    if None in sliding:
        alone = engine.logits(name, DOCUMENT, engine.method(rule))
        assert tolerances.gap(found, alone) > tolerances.MATTERS


@pytest.mark.parametrize("reader", [PCW(), APE(0.7, 0.8)])
def test_in_float64_the_answer_is_that_of_the_document(reader: Method) -> None:
    lm = engine.wrap(zoo.build(zoo.BY_NAME["qwen3"], dtype=torch.float64))
    one, before = DOCUMENT, all_before(DOCUMENT.windows)
    chunks = lm.encode_ids(one.prefix, one.windows, method=Neighbours(reader=reader), before=before)
    document = [[token for window in one.windows for token in window]]
    whole = lm.encode_ids(one.prefix, document, method=reader)
    assert chunks.query_start == whole.query_start
    assert tolerances.gap(lm.logits(chunks, one.query), lm.logits(whole, one.query)) < 1e-6
    keys = torch.cat([window.keys[1] for window in chunks.each], dim=1)
    assert tolerances.gap(keys, whole.each[0].keys[1]) < 1e-12
    written = [lm.generate_ids(each, one.query, max_new_tokens=12) for each in (chunks, whole)]
    assert written[0] == written[1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ruled", ["pcw", "as used"])
@pytest.mark.parametrize("prefix", [5, 0])
def test_each_window_sees_what_stands_before_it(name: str, ruled: str, prefix: int) -> None:
    one, rule = case(prefix, (7, 12, 1, 20), 6), RULES[ruled]
    starts = [prefix + len(seen) for seen in BEFORE]
    found = logits(name, one, Neighbours(reader=engine.method(rule)), BEFORE)
    tolerances.agree(found, run(name, lay_out(one, BEFORE, starts), rule))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("by", ["sink", "sink+neighbours", "neighbours+sink"])
def test_a_sink_stands_in_front_of_neighbours(name: str, by: str) -> None:
    prefix, sink = DOCUMENT.prefix, DOCUMENT.prefix[:3]
    method = f"{by.replace('sink', 'sink:tokens=3')}+pcw"
    near = BEFORE if "neighbours" in by else []
    seen = [[*sink, *each] for each in BEFORE] if near else [sink] * 4
    row = lay_out(DOCUMENT, seen, [len(prefix) + len(each) for each in seen])
    found = logits(name, DOCUMENT, method, near)
    tolerances.agree(found, run(name, row))
    if None in zoo.BY_NAME[name].sliding:
        assert tolerances.gap(found, engine.logits(name, DOCUMENT, PCW())) > tolerances.MATTERS


@pytest.mark.parametrize("name", NAMES)
def test_windows_that_end_together_do_so_with_what_they_see(name: str) -> None:
    totals = [len(seen) + len(w) for seen, w in zip(BEFORE, DOCUMENT.windows, strict=True)]
    end = len(DOCUMENT.prefix) + max(totals)
    starts = [end - len(window) for window in DOCUMENT.windows]
    context = engine.shared(name).encode_ids(
        DOCUMENT.prefix,
        DOCUMENT.windows,
        method=Neighbours(reader=StructuredPrompting()),
        before=BEFORE,
    )
    assert [window.start for window in context.each] == starts
    run(name, row := lay_out(DOCUMENT, BEFORE, starts))
    keys = torch.cat([window.keys[1] for window in context.each], dim=1)
    tolerances.agree(keys, row.keys[1][:, row.context].float())


@pytest.mark.parametrize("name", NAMES)
def test_a_sink_before_linked_windows_shares_positions_with_those_in_front(name: str) -> None:
    """Before tokens are linked; what is encoded again then sees no sink, as `Linked` has it."""
    starts = list(accumulate(map(len, DOCUMENT.windows[:-1]), initial=len(DOCUMENT.prefix)))
    # Before a question is known.
    made = engine.encoded(name, DOCUMENT, Sink(2, reader=Linked(1, "query"))).each
    assert [window.start for window in made] == starts
    run(name, row := lay_out(DOCUMENT, [DOCUMENT.prefix[:2]] * 4, starts))
    keys = torch.cat([window.keys[1] for window in made], dim=1)
    tolerances.agree(keys, row.keys[1][:, row.context].float())


@pytest.mark.parametrize("choose", ["first", "deviation"])
def test_a_sink_and_all_tokens_linked_is_sequential(choose: str) -> None:
    by = Sink(reader=Linked("all", choose, reader=APE()))  # type: ignore[arg-type]  # parametrized
    found = engine.logits("llama", DOCUMENT, by)
    assert torch.equal(found, engine.logits("llama", DOCUMENT, Sequential()))
    some = Sink(reader=Linked(3, choose, reader=APE()))  # type: ignore[arg-type]  # parametrized
    plain = Linked(3, choose, reader=APE())  # type: ignore[arg-type]  # parametrized
    moved = tolerances.gap(*(engine.logits("llama", DOCUMENT, one) for one in (some, plain)))
    assert moved > tolerances.MATTERS


def test_nothing_in_front_is_the_reader_bit_for_bit() -> None:
    plain = engine.logits("llama", DOCUMENT, APE())
    for by in (Neighbours(reader=APE()), Neighbours(0, reader=APE()), Sink(0, reader=APE())):
        assert torch.equal(engine.logits("llama", DOCUMENT, by), plain)
    bare = case(0, (7, 12), 4)
    assert torch.equal(engine.logits("llama", bare, Sink()), engine.logits("llama", bare, PCW()))


def test_refined_windows_are_refined_with_what_they_see() -> None:
    """Then a token has seen all of its text, so that no text serves another one."""
    deep, before = DeepThinking(2, 0.2, 0.5), all_before(DOCUMENT.windows)
    found = engine.encoded("llama", DOCUMENT, Neighbours(reader=deep), before=before).each
    texts = [[*seen, *window] for seen, window in zip(before, DOCUMENT.windows, strict=True)]
    whole = engine.encoded("llama", Case(DOCUMENT.prefix, texts, DOCUMENT.query), deep).each
    for mine, theirs, seen in zip(found, whole, before, strict=True):
        assert mine.start == theirs.start + len(seen)
        tolerances.agree(mine.keys[1], theirs.keys[1][:, len(seen) :])
        tolerances.agree(mine.values[1], theirs.values[1][:, len(seen) :])


def test_chunks_that_begin_one_document_are_encoded_in_one_run() -> None:
    before, by, shuffled = all_before(DOCUMENT.windows), Neighbours(), [3, 0, 2, 1]
    lm = engine.shared("llama")

    def encoded(places: Sequence[int]) -> list[Any]:
        windows, seen = ([each[i] for i in places] for each in (DOCUMENT.windows, before))
        return list(lm.encode_ids((), windows, method=by, before=seen).each)

    with small.passes() as made:
        together = encoded(shuffled)
    assert made == [sum(map(len, DOCUMENT.windows))]
    for window, i in zip(together, shuffled, strict=True):
        (single,) = encoded([i])
        assert (window.ids, window.start) == (single.ids, single.start)
        tolerances.agree(window.keys[1], single.keys[1])


def test_what_can_not_be_combined_says_so() -> None:
    for wrong in (
        lambda: Neighbours(reader=Linked()),
        lambda: Linked(reader=Neighbours()),
        lambda: Neighbours(reader=Sequential()),
        lambda: Neighbours(-1),
        lambda: Neighbours(reader=Neighbours()),
        lambda: Sink(1.0),  # type: ignore[arg-type]  # the error is the test
    ):
        with pytest.raises(MethodError):
            wrong()
    with pytest.raises(InputError, match="encodes windows without neighbours"):
        logits("llama", DOCUMENT, PCW(), BEFORE)
    with pytest.raises(InputError, match="1 lists for 4 windows"):
        logits("llama", DOCUMENT, Neighbours(), [[1]])
