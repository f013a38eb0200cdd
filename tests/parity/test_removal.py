"""Citations by removal against whole new requests that lack a passage."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rag_windows import (
    Auto,
    Generation,
    InputError,
    Passage,
    WindowedLM,
    with_neighbours,
)
from rag_windows.steps import removal
from tests.parity import zoo
from tests.rag_windows import small

QUESTION = "Where is the mill?"
PASSAGES = [
    Passage("The mill is in Norby, behind the church.", title="Mills", score=0.9, id="a"),
    Passage("Old Alda keeps goats.", score=0.2),
    Passage("A road leads from the harbour to the mill; it is steep and wet.", score=0.7),
    Passage("Norby has three streets."),
    Passage("", id="blank"),
]
METHODS = (
    "pcw",
    "ape",
    "mateicl",
    "aligned:tokens=32+ape",
    "deep-thinking+pcw",
    "codebook:retrieve=3",
    "query-likelihood:retrieve=2",
    "pced",
    "ensemble",
    "ensemble:weights=entropy,pooling=minimum",
    "auto",
)


def scored(method: str) -> list[Passage]:
    """Either all passages with text have a score, or none."""
    if method != "pced":
        return [dataclasses.replace(one, score=None) for one in PASSAGES]
    return [dataclasses.replace(one, score=one.score or 0.4) for one in PASSAGES]


def logprob(
    lm: WindowedLM, made: Generation, passages: Sequence[Passage], left: Sequence[int], method: Any
) -> float:
    """Of the answer, by a new request with the passages that are left."""
    engine = lm.engine
    kept = [passages[i] for i in left]
    request = small.request(lm, QUESTION, kept, prefix="Say.", method=method)
    context = request.encode()
    query, answer = request.parts.query_ids, made.token_ids
    ids = torch.tensor([[*query, *answer[:-1]]])
    # What a step chooses by the question is chosen by it alone.
    context = engine.decoder.for_query(context, query, request.parts.question)
    logits = engine.decoder.forward(context, ids, last=len(answer))[0].float().log_softmax(-1)
    return float(logits.gather(1, torch.tensor(answer).unsqueeze(1)).sum())


def asked(lm: WindowedLM, method: Any, passages: Sequence[Passage], **more: Any) -> dict[str, Any]:
    return {
        "query": QUESTION,
        "passages": passages,
        "prefix": "Say.",
        "method": method,
        "max_new_tokens": 6,
        "do_sample": False,
        "citations": "removal",
        **more,
    }


def check(lm: WindowedLM, made: Generation, passages: Sequence[Passage], method: Any) -> None:
    """Each passage's drop is what the same reader gives without it."""
    assert made.citations is not None
    # In the order in which they are read: in one prompt the likeliest stands first.
    read = list(dict.fromkeys(window.passage for window in made.windows))
    reader = "sequential" if isinstance(lm.engine.method_of(method), Auto) else method
    if str(reader).startswith(("query-likelihood", "codebook")):
        reader = "pcw"
    whole = logprob(lm, made, passages, read, reader)
    for one in made.citations:
        rest = [number for number in read if number != one.passage]
        expected = whole - logprob(lm, made, passages, rest, reader) if one.passage in read else 0.0
        assert one.drop == pytest.approx(expected, abs=1e-4), one
    gain = whole - logprob(lm, made, passages, [], reader)
    assert made.supported == (gain >= 2.0)


@pytest.mark.parametrize("method", METHODS)
def test_a_drop_is_what_a_new_request_without_the_passage_loses(method: str) -> None:
    lm, passages = small.lm(), scored(method)
    made = lm.generate(**asked(lm, method, passages))
    check(lm, made, passages, method)
    plain = lm.generate(**asked(lm, method, passages, citations=True))
    assert made.token_ids == plain.token_ids
    assert [one.mass for one in made.citations or ()] == [one.mass for one in plain.citations or ()]
    assert plain.supported is None
    assert all((one.drop, one.supports) == (None, None) for one in plain.citations or ())


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text-sliding", "gpt_oss", "qwen2"])
@pytest.mark.parametrize("method", ["ape", "pced", "query-likelihood:retrieve=2+sequential"])
def test_other_architectures(name: str, method: str) -> None:
    """Sliding layers, soft caps and sinks included; the longest window among those left out."""
    lm = WindowedLM.from_pretrained(zoo.shared(name), tokenizer=None)
    decoder = lm.engine.decoder
    windows = [list(range(80, 95)), [33, 44], list(range(120, 153)), [7, 8, 9]]
    prefix, query, answer = [0, 4, 70], [99, 65, 5, 30], [12, 40, 41]
    context = decoder.for_query(lm.encode_ids(prefix, windows, method=method), query)
    read = list(dict.fromkeys(context.groups))
    reader = "sequential" if len(read) < len(windows) else method

    def expected(left: list[int]) -> torch.Tensor:
        own = lm.encode_ids(prefix, [windows[i] for i in left], method=reader)
        logits = decoder.forward(own, torch.tensor([[*query, *answer[:-1]]]), last=len(answer))
        index = torch.tensor(answer).unsqueeze(1)
        return logits[0].float().log_softmax(-1).gather(1, index)[:, 0]

    found = decoder.removal(context, query, answer)
    assert torch.allclose(found.whole, expected(read), atol=1e-4)
    assert torch.allclose(found.none, expected([]), atol=1e-4)
    assert [*found.without] == read
    for group, own in found.without.items():
        left = [number for number in read if number != group]
        assert torch.allclose(own, expected(left), atol=1e-4), group


@pytest.mark.parametrize("most", [1, 3, 50])
@pytest.mark.parametrize("method", ["ape", "pced", "query-likelihood:retrieve=2+sequential"])
def test_a_long_answer_is_read_in_pieces(
    monkeypatch: pytest.MonkeyPatch, method: str, most: int
) -> None:
    """As many tokens in a pass as its logits allow; a query of one token, too."""
    lm, answer = small.lm(), [12, 40, 41, 9, 33, 70, 12]
    for query in ([99, 65, 5], [99]):
        context = lm.encode_ids([0, 4], [[80, 81, 82], [33, 44], [7, 8, 9, 10]], method=method)
        context = lm.engine.decoder.for_query(context, query)
        whole = lm.engine.decoder.removal(context, query, answer)
        with monkeypatch.context() as patch:
            patch.setattr(removal, "MAX_LOGITS", most * lm.engine.decoder.vocabulary)
            pieces = lm.engine.decoder.removal(context, query, answer)
        assert torch.allclose(pieces.none, whole.none, atol=1e-4)
        assert torch.allclose(pieces.whole, whole.whole, atol=1e-4)
        assert pieces.without.keys() == whole.without.keys()
        for group, own in whole.without.items():
            assert torch.allclose(pieces.without[group], own, atol=1e-4)


def test_one_prompt_of_the_guard_leaves_nothing_out() -> None:
    lm = small.lm()
    made = lm.generate("Where?", ["One.", "Two."], citations="removal", fallback="sequential")
    assert made.fallback is not None
    assert made.fallback.taken
    assert made.supported is None
    assert any("none can be left out" in note.message for note in made.notes)


def test_cached_split_and_batched_alike() -> None:
    lm = small.wrapped(cache=True, max_window_tokens=24)
    passages = scored("ape")
    for method in ("ape", "pcw", "query-likelihood:retrieve=2"):
        one = asked(lm, method, passages)
        first = lm.generate(**one)
        batch = lm.generate_batch([one, {**one, "seed": 1}, {**one, "citations": True}])
        for made in (first, lm.generate(**one), *batch[:2]):
            check(lm, made, passages, method)
        assert all(each.drop is None for each in batch[2].citations or ())


def test_neighbours_stay_what_windows_have_seen() -> None:
    lm = small.lm()
    chunks = [Passage(text, document="d", index=i) for i, text in enumerate(("One.", "Two.", "3"))]
    passages = with_neighbours([*chunks, Passage("Alone.")])
    made = lm.generate(**asked(lm, "neighbours+pcw", passages))
    check(lm, made, passages, "neighbours+pcw")


def test_only_the_passages_with_most_attention() -> None:
    lm, passages = small.lm(), scored("ape")
    whole = lm.generate(**asked(lm, "ape", passages)).citations or ()
    made = lm.generate(**asked(lm, "ape", passages, citations="removal:top=2")).citations or ()
    most = sorted(whole, key=lambda one: -one.mass)[:2]
    for one in made:
        same = whole[one.passage]
        looked = one.passage in {other.passage for other in most} or one.mass == 0
        assert one.drop == (pytest.approx(same.drop, abs=1e-4) if looked else None)
        assert (one.supports is None) == (not looked)


def test_a_row_that_won_nothing_was_read_all_the_same() -> None:
    """Its share of the attention is 0, but beyond `top` it was not looked at."""
    made = small.lm().generate(
        **asked(small.lm(), "pced", scored("pced"), citations="removal:top=1")
    )
    drops = [one.drop for one in made.citations or ()]
    assert sum(drop is not None for drop in drops[:4]) == 1
    assert drops[4] == 0.0  # blank
    assert [one.supports is None for one in made.citations or ()] == [d is None for d in drops]


def test_several_answers_and_streams() -> None:
    lm, passages = small.lm(), scored("ape")
    made = lm.generate(**asked(lm, "ape", passages, do_sample=True, num_return_sequences=2, seed=3))
    check(lm, made, passages, "ape")
    check(lm, made.alternatives[0], passages, "ape")
    *_, last = lm.stream(**asked(lm, "ape", passages))
    assert last.generation is not None
    check(lm, last.generation, passages, "ape")


def test_without_passages_there_is_nothing_to_leave_out() -> None:
    lm = small.lm()
    made = lm.generate("Hello?", [], citations="removal", max_new_tokens=2)
    assert (made.citations, made.supported) == ((), None)
    only = lm.generate("Hello?", ["One."], citations="removal", max_new_tokens=2).citations or ()
    assert only[0].drop is not None


@pytest.mark.parametrize(
    "method",
    ["sequential", "linked", "structured-prompting", "codebook:retrieve=2,fusion=mean", "pcw"],
)
def test_what_can_not_be_left_out_is_refused_by_name(method: str) -> None:
    more: dict[str, Any] = {"link_tokens": 4} if method == "pcw" else {}
    name = "linked" if more else method.partition(":")[0]
    with pytest.raises(InputError, match=f"'{name}' .*Use citations by attention"):
        small.lm().generate("a", ["b"], method=method, citations="removal", **more)


@pytest.mark.parametrize(
    "wrong", ["remove", "removal:top=0", "removal:3", "", 3, None, ["removal"]]
)
def test_other_values_are_refused(wrong: Any) -> None:
    with pytest.raises(InputError, match="citations must be True, False, 'removal' or such as"):
        small.lm().generate("a", ["b"], citations=wrong)
