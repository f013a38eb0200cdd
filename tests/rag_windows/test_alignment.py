"""Where windows stand: starts, batches of windows at positions of their own, caching, warming."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rag_windows import PCW, InputError, Passage, PassageCache, StructuredPrompting, WindowedLM
from rag_windows.kv import PackedWindows, Window
from rag_windows.methods import window_starts
from rag_windows.prefill import Encoder, complete
from tests.parity import zoo
from tests.rag_windows import small

LENGTHS = (3, 19, 17, 18, 4, 20)
NAMES = ["llama", "gpt2", "gemma3_text-sliding"]


def windows() -> list[list[int]]:
    return [zoo.ids(length, number) for number, length in enumerate(LENGTHS)]


def encoder(name: str) -> Encoder:
    return WindowedLM.from_pretrained(zoo.shared(name), tokenizer=None).engine.plain_encoder


def test_starts() -> None:
    assert window_starts("left", 5, [2, 7, 1]) == [5, 5, 5]
    assert window_starts("right", 5, [2, 7, 1]) == [10, 5, 11]
    assert window_starts("in order", 5, [2, 7, 1]) == [5, 7, 14]
    assert [window_starts(name, 5, []) for name in ("left", "right", "in order")] == [[]] * 3


def test_the_query_follows_the_furthest_window() -> None:
    lm = small.lm()
    for method in (PCW(), StructuredPrompting()):
        context = lm.encode_ids([1, 2], [[3], [4, 5, 6], [7, 8]], method=method)
        assert context.query_start == 5
    assert isinstance(context.windows, PackedWindows)
    assert context.windows.positions.tolist() == [4, 2, 3, 4, 3, 4]


@pytest.mark.parametrize("name", NAMES)
def test_windows_at_positions_of_their_own_share_a_pass(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aligned on the right in one packed pass, each window is what it is alone."""
    made, ids = encoder(name), windows()
    prefix = made.encode_prefix(zoo.ids(9, 50))
    starts = window_starts("right", 9, LENGTHS)
    alone = [made.run([one], [start], prefix)[0] for one, start in zip(ids, starts, strict=True)]
    passes: list[int] = []
    run = made.run

    def counted(batch: Any, *args: Any) -> list[Window]:
        passes.append(len(batch))
        return run(batch, *args)

    monkeypatch.setattr(made, "run", counted)
    together = complete(made.prefill_windows(prefix, ids, starts=starts))
    assert passes == [len(LENGTHS)]
    for one, other in zip(alone, together, strict=True):
        assert (one.ids, one.start) == (other.ids, other.start)
        for a, b in zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_a_cached_window_is_found_at_its_position_only() -> None:
    lm = small.lm().with_cache(PassageCache("10MB"))
    method, ids = StructuredPrompting(), windows()
    first = lm.encode_ids([1, 2], ids, method=method)
    assert first.cached_tokens == 0
    assert lm.encode_ids([1, 2], ids[::-1], method=method).cached_tokens == 2 + sum(LENGTHS)
    # Without the longest window the others end earlier, but for those of its length.
    assert lm.encode_ids([1, 2], ids[:-1], method=method).cached_tokens == 2
    # The longest window starts behind the prefix, as every window does for other methods.
    assert lm.encode_ids([1, 2], ids, method=PCW()).cached_tokens == 2 + max(LENGTHS[:-1]) + 20


def test_what_depends_on_the_others_can_not_be_warmed() -> None:
    lm = WindowedLM(
        small.model(), small.tokenizer(), method="structured-prompting", cache=PassageCache("1MB")
    )
    with pytest.raises(InputError, match=r"'structured-prompting'.*such as 'ape'"):
        lm.warm([Passage("One.")])
