"""`method="auto"`: what it chooses, that the answers are those of that, and that it says so."""

from __future__ import annotations

import pytest

from rag_windows import (
    APE,
    Auto,
    Linked,
    MethodError,
    Neighbours,
    Passage,
    WindowedLM,
    with_neighbours,
)

QUESTION = "Where was Vara Zelmont born?"
MANY = [f"{name} {word} makes cheese in Birholm." for name in ("Alra", "Oska") for word in "ABCDE"]


@pytest.fixture(scope="module")
def lm() -> WindowedLM:
    return WindowedLM.from_pretrained("tiny-reader")


def told(lm: WindowedLM, passages: list[str] | list[Passage]) -> tuple[str, str]:
    made = lm.generate(QUESTION, passages, method="auto", max_new_tokens=6, do_sample=False)
    return made.text, "\n".join(one.message for one in made.notes if one.kind == "method")


def plain(lm: WindowedLM, passages: list[str] | list[Passage], method: str) -> str:
    return lm.generate(QUESTION, passages, method=method, max_new_tokens=6, do_sample=False).text


def test_few_short_passages_are_read_in_one_prompt(lm: WindowedLM) -> None:
    few = ["Vara Zelmont was born in Sulava.", "Aldan Pellby was born in Birholm."]
    text, note = told(lm, few)
    assert text == plain(lm, few, "sequential")
    assert "in one prompt" in note
    made = lm.generate(QUESTION, few, method="auto", max_new_tokens=2)
    assert made.fallback is not None
    assert made.fallback.taken
    assert made.usage.windows == 1


def test_many_passages_are_windows(lm: WindowedLM) -> None:
    text, note = told(lm, MANY)
    assert text == plain(lm, MANY, "pcw")
    assert "no passage has chunks in front of it; windows are read by pcw" in note


def test_chunks_are_encoded_in_sight_of_their_neighbours(lm: WindowedLM) -> None:
    chunks = [
        Passage("Vara Zelmont is a painter.", title="Vara Zelmont", document="v", index=0),
        Passage("She was born in Sulava.", document="v", index=1),
    ]
    passages = [*with_neighbours(chunks), *map(Passage, MANY)]
    text, note = told(lm, passages)
    assert text == plain(lm, passages, "neighbours+pcw")
    assert "1 of 12 windows were encoded in sight" in note
    assert text != plain(lm, passages, "pcw")


def test_batches_and_caches_know_it() -> None:
    lm = WindowedLM.from_pretrained("tiny-reader", cache=True, method="auto")
    expected = plain(lm, MANY, "pcw")
    requests = [{"query": QUESTION, "passages": MANY[at:] + MANY[:at]} for at in range(2)]
    made = lm.generate_batch([{**one, "max_new_tokens": 6, "do_sample": False} for one in requests])
    assert made[0].text == expected
    assert made[1].text == plain(lm, MANY[1:] + MANY[:1], "pcw")
    assert lm.generate(QUESTION, MANY, max_new_tokens=1).usage.cached_windows == len(MANY)


def test_it_stands_first_and_reads_by_a_reader() -> None:
    assert Auto(reader=APE()).neighbours == Neighbours(reader=APE()).neighbours
    assert Auto(reader=APE()).encoding == Neighbours(reader=APE()).encoding
    for make in (
        lambda: Linked(reader=Auto()),
        lambda: Auto(reader=Neighbours()),
        lambda: Neighbours(reader=Auto()),
    ):
        with pytest.raises(MethodError, match=r"stand first|looks for neighbours itself"):
            make()
