"""The default, `method="auto"`: what it reads, its answers, and what it says of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rag_windows import (
    APE,
    PCW,
    Auto,
    Generation,
    LimitError,
    Linked,
    Method,
    MethodError,
    Neighbours,
    Passage,
    QueryLikelihood,
    Sequential,
    WindowedLM,
    with_neighbours,
)
from tests.rag_windows import small

QUESTION = "Where was Vara Zelmont born?"
MANY = [f"{name} {word} makes cheese in Birholm." for name in ("Alra", "Oska") for word in "ABCDE"]
BORN = "Vara Zelmont was born in Sulava."


@pytest.fixture(scope="module")
def lm() -> WindowedLM:
    return WindowedLM.from_pretrained("tiny-reader", method="auto")


def asked(
    lm: WindowedLM, passages: list[str] | list[Passage], method: str | Method | None = None
) -> Generation:
    return lm.generate(QUESTION, passages, method=method, max_new_tokens=6, do_sample=False)


def note(made: Generation) -> str:
    return "\n".join(one.message for one in made.notes if one.kind == "method")


def test_two_of_many_are_read_in_one_prompt(lm: WindowedLM) -> None:
    passages = [*MANY[:7], BORN, *MANY[7:]]
    made = asked(lm, passages)
    assert note(made) == (
        "auto: of 11 passages, the 2 that suit the question best are read in one prompt."
    )
    assert len(made.windows) == 2
    chosen = [passages[window.passage] for window in made.windows]
    assert made.token_ids == asked(lm, chosen, "sequential").token_ids
    assert sum((one.mass or 0) > 0 for one in made.citations or ()) == 2


def test_a_model_may_name_its_own_method() -> None:
    """The shipped one learned to write answers alone: how likely it finds questions says little."""
    lm = WindowedLM.from_pretrained("tiny-reader")
    assert lm.method == APE()
    named = copy.deepcopy(small.model())
    del named.config.rag_windows_method
    assert WindowedLM(named, small.tokenizer()).method == Auto()
    named.config.rag_windows_method = "query-likelihood:retrieve=3+pcw"
    assert WindowedLM(named, small.tokenizer()).method == QueryLikelihood(3)
    assert WindowedLM(named, small.tokenizer(), method="pcw").method == PCW()
    named.config.rag_windows_method = "magic"
    with pytest.raises(MethodError, match="Unknown method 'magic'"):
        WindowedLM(named, small.tokenizer())


def test_two_passages_are_one_prompt(lm: WindowedLM) -> None:
    few = ["Aldan Pellby was born in Birholm.", BORN]
    made, prompt = asked(lm, few), asked(lm, few, "sequential")
    assert made.token_ids == prompt.token_ids
    assert note(made) == "auto: all 2 passages are read in one prompt."
    for one, other in zip(made.citations or (), prompt.citations or (), strict=True):
        assert one.mass == pytest.approx(other.mass, abs=1e-4)
    made = asked(lm, [BORN])
    assert made.token_ids == asked(lm, [BORN], "sequential").token_ids
    assert note(made) == "auto: the only passage is read in one prompt."
    best = asked(lm, few, Auto(reader=QueryLikelihood(1, reader=Sequential())))
    assert note(best) == (
        "auto: of 2 passages, the one that suits the question best is read in one prompt."
    )


def test_what_one_prompt_may_not_hold_is_read_side_by_side() -> None:
    lm = small.wrapped(method="auto")
    long = [f"{name} {'x' * 508}" for name in "abc"]
    made = lm.generate("What?", long, max_new_tokens=4, do_sample=False)
    assert note(made).endswith("the 2 that suit the question best are read side by side.")
    assert len(made.windows) == 2
    wanted: dict[str, Any] = {
        "method": "query-likelihood:retrieve=2,attention=0.7,bridge=1.5",
        "max_new_tokens": 4,
    }
    apart = lm.generate("What?", long, do_sample=False, **wanted)
    assert made.token_ids == apart.token_ids
    with pytest.raises(LimitError, match="Set retrieve=1 or less"):
        lm.generate("What?", long, method="query-likelihood:retrieve=2+sequential")
    with pytest.raises(LimitError, match="positions"):
        lm.generate("What?", long, max_new_tokens=1000)


def test_chunks_that_know_their_document_are_read_side_by_side(lm: WindowedLM) -> None:
    chunks = [
        Passage("Vara Zelmont is a painter.", title="Vara Zelmont", document="v", index=0),
        Passage("She was born in Sulava.", document="v", index=1),
    ]
    passages = [*with_neighbours(chunks), *map(Passage, MANY)]
    made = asked(lm, passages)
    assert {window.passage for window in made.windows} == {0, 1}
    rule = "query-likelihood:retrieve=2,attention=0.7,bridge=1.5"
    apart = asked(lm, passages, f"neighbours:chunks=1+{rule}")
    assert made.token_ids == apart.token_ids
    assert note(made) == (
        "auto: of 12 passages, the 2 that suit the question best are read in one prompt, or "
        "side by side where one of them saw the chunks before it; 1 of 12 windows saw the chunks "
        "before them when encoded."
    )


def test_a_chunk_sees_the_one_in_front_of_it_and_no_other() -> None:
    lm = WindowedLM.from_pretrained("tiny-reader", cache=True, method="auto")

    def chunks(first: str) -> list[Passage]:
        told = [first, *(f"{name} makes cheese." for name in ("Oska", "Vara", "Brin"))]
        placed = [Passage(text, document="d", index=at) for at, text in enumerate(told)]
        return [*with_neighbours(placed)[2:], Passage(BORN)]

    for method, found in ((None, 3), ("auto:chunks=all", 1)):
        asked(lm, chunks("Alra makes cheese."), method)
        made = asked(lm, chunks("Nobody sells milk."), method)
        assert (made.usage.windows, made.usage.cached_windows) == (3, found)
        assert "2 of 3 windows saw the chunks before them" in note(made)


def test_batches_and_caches_know_it() -> None:
    lm = WindowedLM.from_pretrained("tiny-reader", cache=True, method="auto")
    lm.generate(QUESTION, MANY, method="pcw", max_new_tokens=1)
    found = asked(lm, MANY)
    assert found.usage.cached_windows == found.usage.windows == len(MANY)
    requests = [{"query": QUESTION, "passages": MANY[at:] + MANY[:at]} for at in range(2)]
    made = lm.generate_batch([{**one, "max_new_tokens": 6, "do_sample": False} for one in requests])
    method = "query-likelihood:retrieve=2,attention=0.7,bridge=1.5+sequential"
    assert made[0].text == found.text == asked(lm, MANY, method).text
    assert made[1].text == asked(lm, MANY[1:] + MANY[:1], method).text
    assert [len(one.windows) for one in made] == [2, 2]


def test_what_reads_all_windows_reads_them_all(lm: WindowedLM) -> None:
    """Demonstrations and linked windows are no passages to choose from."""
    linked = lm.generate(QUESTION, MANY, link_tokens=2, max_new_tokens=2)
    assert len(linked.windows) == len(MANY)
    shown = [(f"{word} is {label}.", label) for word in MANY for label in ("good", "bad")]
    plain = lm.classify("A is good.", shown, windows=4, method="ape")
    assert lm.classify("A is good.", shown, windows=4) == plain


def test_it_stands_first_and_reads_by_a_reader() -> None:
    assert Auto(reader=APE(), chunks="all").neighbours == Neighbours(reader=APE()).neighbours
    assert Auto().neighbours == 1
    assert Auto().encoding == APE().encoding
    for make in (
        lambda: Linked(reader=Auto()),
        lambda: Auto(reader=Neighbours()),
        lambda: Neighbours(reader=Auto()),
    ):
        with pytest.raises(MethodError, match=r"stand first|looks for neighbours itself"):
            make()
