"""Linked windows against the dense reference, and their two ends: parallel and sequential."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rag_windows import APE, PCW, InputError, Linked, Sequential
from rag_windows.steps import recompute as linker

from . import dense, engine, tolerances, zoo
from .cases import RULES, Case, case, plain
from .dense import PLAIN, Rule
from .float64 import Layer, forward

NAMES = ("llama", "qwen3", "gpt2", "gemma3", "gpt_oss", "mistral-sliding", "gemma2")
UNLINKED = Linked(1, "query")
"""Its windows stay as they were encoded until a question is known."""
CASES = {"ragged": case(5, (7, 12, 1, 20), 6), "no prefix": case(0, (9, 4, 15), 5)}


@dataclass(frozen=True, slots=True)
class LinkedRow:
    """Old and fresh rows of the windows in one row, (tokens,) each, spelled out.

    The row is [prefix | windows as encoded alone | the chosen tokens once more | query], which are
    the kinds 0 to 3. Windows stand one behind the other; a token's copy stands where it stands. A
    row of the prefix sees the prefix up to itself; a window's token the prefix and its own window
    up to itself; a copy and the query the prefix, and every token of the windows at a position up
    to their own: its copy where it has one, else itself; the query also itself. Each layer's copies
    are computed from that layer's copies, in one pass.
    """

    ids: Tensor
    positions: Tensor
    kinds: Tensor
    windows: Tensor
    replaced: Tensor
    keys: dict[int, Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> Tensor:
        """(tokens,) bool: the rows of the query."""
        return self.kinds == 3

    @property
    def context(self) -> Tensor:
        """(tokens,) bool: keys of the windows that the query may read."""
        return (self.kinds == 2) | ((self.kinds == 1) & ~self.replaced)

    def visible(self, reach: int | None) -> Tensor:
        """(tokens, tokens) bool: which key each row sees in a layer of this reach."""
        row, key = self.kinds[:, None], self.kinds[None, :]
        before = self.positions[None, :] <= self.positions[:, None]
        own = (row == 1) & (key == 1) & (self.windows[:, None] == self.windows[None, :])
        linked = ((row == 2) | (row == 3)) & (self.context | self.rows)[None, :]
        seen = before & ((key == 0) | own | linked)
        if reach is not None:
            seen &= self.positions[:, None] - self.positions[None, :] < reach
        return seen


def lay_out(one: Case, chosen: Sequence[int]) -> LinkedRow:
    """The row of a case; `chosen` indexes all windows' tokens."""
    prefix = len(one.prefix)
    flat = [token for window in one.windows for token in window]
    picked = sorted(chosen)
    total = prefix + len(flat)
    owners = [i for i, window in enumerate(one.windows) for _ in window]
    none = [-1] * (len(picked) + len(one.query))
    replaced = [False] * total + [False] * len(none)
    for index in picked:
        replaced[prefix + index] = True
    return LinkedRow(
        ids=torch.tensor([*one.prefix, *flat, *(flat[i] for i in picked), *one.query]),
        positions=torch.tensor(
            [*range(total), *(prefix + i for i in picked), *range(total, total + len(one.query))]
        ),
        kinds=torch.tensor(
            [0] * prefix + [1] * len(flat) + [2] * len(picked) + [3] * len(one.query)
        ),
        windows=torch.tensor([-1] * prefix + owners + none),
        replaced=torch.tensor(replaced),
    )


def run(
    model: PreTrainedModel,
    sliding: Sequence[int | None],
    one: Case,
    chosen: Sequence[int],
    rule: Rule = PLAIN,
) -> tuple[Tensor, LinkedRow]:
    """The specification: (len(query), vocab) fp32 logits, and the row with every layer's keys."""
    row = lay_out(one, chosen)

    def mixed(layer: Layer) -> Tensor:
        row.keys[layer.index] = layer.key[0]
        return dense.mixed(layer, row, rule)

    return forward(model, sliding, row, mixed), row


def deviations(
    model: PreTrainedModel, sliding: Sequence[int | None], one: Case, layer: int = 1
) -> Tensor:
    """(tokens of the windows,) squared distance of keys seen alone and keys seen with all."""
    total = sum(len(window) for window in one.windows)
    _, row = run(model, sliding, one, range(total))
    alone, together = row.keys[layer][:, row.kinds == 1], row.keys[layer][:, row.kinds == 2]
    return (together - alone).square().sum(dim=(0, 2))


def attention(
    model: PreTrainedModel,
    sliding: Sequence[int | None],
    one: Case,
    rule: Rule = PLAIN,
    *,
    last: bool = False,
) -> Tensor:
    """(tokens of the windows,) float64: the query's weights, summed over rows, heads, layers.

    With `last` they are those of its last row, in the middle half of the layers.
    """
    row, paid = lay_out(one, ()), torch.zeros(sum(map(len, one.windows)), dtype=torch.float64)

    def mixed(layer: Layer) -> Tensor:
        weights = dense.weights(layer.logits, None, layer.seen, row, rule)
        rows = row.rows & (torch.arange(len(row.rows)) == len(row.rows) - 1) if last else row.rows
        outer = len(sliding) // 4 if last else 0
        if layer.index in range(outer, len(sliding) - outer):
            paid.add_(weights[0][:, rows][:, :, row.context].sum(dim=(0, 1)))
        return dense.mixed(layer, row, rule)

    forward(model, sliding, row, mixed)
    return paid


def most(scores: Tensor, one: Case, count: int) -> list[int]:
    """Indices of the tokens behind the first window with the largest scores."""
    behind = len(one.windows[0])
    order = torch.sort(scores[behind:], descending=True, stable=True).indices
    return (order[:count] + behind).tolist()


def with_next(scores: Tensor, one: Case) -> Tensor:
    """Scores of which each is at least that of the token in front of it in its window."""
    made, start = scores.clone(), 0
    for window in one.windows:
        for i in range(start + 1, start + len(window)):
            made[i] = max(scores[i], scores[i - 1])
        start += len(window)
    return made


def first(one: Case, count: int) -> list[int]:
    """Indices of the first tokens of each window but the first one."""
    chosen, start = [], 0
    for number, window in enumerate(one.windows):
        chosen += [start + i for i in range(min(count, len(window))) if number]
        start += len(window)
    return chosen


def reference(name: str, one: Case, chosen: Sequence[int], rule: Rule = PLAIN) -> Tensor:
    return run(zoo.shared(name), zoo.BY_NAME[name].sliding, one, chosen, rule)[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("which", "ruled"), [("ragged", "as used"), ("no prefix", "pcw")])
def test_first_tokens(name: str, ruled: str, which: str) -> None:
    one, rule = CASES[which], RULES[ruled]
    found = engine.logits(name, one, Linked(3, reader=engine.method(rule)))
    tolerances.agree(found, reference(name, one, first(one, 3), rule))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("which", CASES)
def test_tokens_of_largest_deviation(name: str, which: str) -> None:
    entry, model, one = zoo.BY_NAME[name], zoo.shared(name), CASES[which]
    expected = deviations(model, entry.sliding, one)
    count = sum(-(-len(window) // 4) for window in one.windows[1:])
    chosen = most(expected, one, count)
    right = reference(name, one, chosen)
    tolerances.agree(engine.logits(name, one, Linked(0.25, "deviation")), right)
    if None in entry.sliding:  # else the query reaches too few of them to tell
        assert tolerances.gap(reference(name, one, first(one, 3)), right) > tolerances.MATTERS


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("which", "ruled"), [("ragged", "as used"), ("no prefix", "pcw")])
@pytest.mark.parametrize(("rows", "choose"), [(1, "query"), (64, "last")])
def test_tokens_that_the_query_attends_to(
    name: str, which: str, ruled: str, rows: int, choose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the weights are worked out a row of the query at a time."""
    monkeypatch.setattr("rag_windows.steps.query_attention.MAX_MASK", rows * 4 * 40)
    sliding, one, rule = zoo.BY_NAME[name].sliding, CASES[which], RULES[ruled]
    method = Linked(0.25, choose, reader=engine.method(rule))
    expected = attention(zoo.shared(name), sliding, one, rule, last=choose == "last")
    if choose == "last":
        expected = with_next(expected, one)
    chosen = most(expected, one, sum(-(-len(window) // 4) for window in one.windows[1:]))
    assert sorted(chosen) != first(one, len(chosen) // (len(one.windows) - 1))
    right = reference(name, one, chosen, rule)
    tolerances.agree(engine.logits(name, one, method), right)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_each_query_chooses_its_own_tokens_of_one_context(name: str) -> None:
    """The windows that all of them share stay as they were encoded."""
    one, lm, method = CASES["ragged"], engine.shared(name), Linked(3, "query")
    sliding, model = zoo.BY_NAME[name].sliding, zoo.shared(name)
    context = engine.encoded(name, one, method)
    before = [tensor.clone() for window in context.each for tensor in window.tensors]
    choices = []
    for seed in range(3):
        asked = replace(one, query=zoo.ids(5 + seed, 40 + seed))
        chosen = most(attention(model, sliding, asked), asked, 3 + 1 + 3)
        choices.append(sorted(chosen))
        forced = zoo.ids(4, seed)
        longer = replace(asked, query=[*asked.query, *forced[:-1]])
        right = reference(name, longer, chosen)[len(asked.query) - 1 :]
        tokens, found = engine.decode(lm, context, asked.query, len(forced), forced)
        assert tokens == forced
        tolerances.agree(found, right)
    assert len({*map(tuple, choices)}) == len(choices)
    after = [tensor for window in context.each for tensor in window.tensors]
    assert all(map(torch.equal, before, after))
    with pytest.raises(InputError, match=r"chooses what each query reads.*for_query"):
        lm.engine.decoder.forward(context, torch.tensor([one.query] * 2))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_each_decoded_step(name: str) -> None:
    one, forced = CASES["ragged"], zoo.ids(9, 99)
    longer = Case(one.prefix, one.windows, [*one.query, *forced[:-1]])
    chosen = [
        start + i
        for start, window in ((7, one.windows[1]), (19, one.windows[2]), (20, one.windows[3]))
        for i in range(-(-len(window) // 5))
    ]
    right = reference(name, longer, chosen)[len(one.query) - 1 :]
    tolerances.agree(engine.steps(name, one, Linked(0.2), forced), right)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("tokens", "choose"), [("all", "deviation"), (20, "first")])
def test_all_tokens_are_sequential(name: str, tokens: object, choose: object) -> None:
    one, lm = CASES["ragged"], engine.shared(name)
    method = Linked(tokens, choose, reader=APE())  # type: ignore[arg-type] # parametrized
    tolerances.agree(engine.logits(name, one, method), plain(name, one))
    contexts = engine.encoded(name, one, method), engine.encoded(name, one, Sequential())
    answers = [lm.generate_ids(each, one.query, max_new_tokens=6) for each in contexts]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mask", [1 << 30, 7 * 45])
def test_every_token_encoded_again_is_sequential(
    name: str, mask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the pass itself, also in several pieces, not by the shortcut for all tokens."""
    monkeypatch.setattr(linker, "MAX_MASK", mask)
    one, lm = CASES["ragged"], engine.shared(name)
    encoded = engine.encoded(name, one, UNLINKED)
    chosen = torch.arange(7, sum(len(window) for window in one.windows))
    windows = linker.encode_again(lm.engine.encoder.runner, encoded.each, encoded.prefix, chosen)
    packed = engine.encoded(name, one, Linked(1)).narrowed(windows, range(len(windows)))
    tolerances.agree(lm.logits(replace(packed, method=PCW()), one.query), plain(name, one))


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens_are_parallel_bit_for_bit(name: str) -> None:
    one, reader = CASES["ragged"], engine.method(RULES["as used"])
    unlinked = engine.logits(name, one, reader)
    assert torch.equal(engine.logits(name, one, Linked(0, reader=reader)), unlinked)
    some = engine.logits(name, one, Linked(1, reader=reader))
    if None in zoo.BY_NAME[name].sliding:  # else the query reaches the last window only
        assert tolerances.gap(some, unlinked) > tolerances.MATTERS


@pytest.mark.parametrize("choose", ["first", "deviation", "query", "last"])
def test_one_window_is_left_as_it_is(choose: object) -> None:
    one = case(5, (9,), 4)
    method = Linked(3, choose)  # type: ignore[arg-type] # parametrized
    assert torch.equal(engine.logits("llama", one, method), engine.logits("llama", one, PCW()))
