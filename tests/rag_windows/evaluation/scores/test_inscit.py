from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence

import numpy as np
import pytest
import sacrebleu
import spacy
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_windows import InputError, MissingExtraError
from rag_windows.evaluation.metrics import INSCIT_METRICS, inscit_scores
from rag_windows.evaluation.task import Example
from tests.rag_windows.evaluation.scores import literal
from tests.rag_windows.evaluation.scores.made import example, values

TEXTS = st.text("abcnthe' .,?-()“é", max_size=25)
NLP = spacy.blank("en")
IDS = st.lists(st.sampled_from("pqrs"), max_size=3)


def one(answer: str, *references: str) -> dict[str, float]:
    return values(inscit_scores([example(*references)], [answer], [()]))


def test_names_stand_in_order_with_a_value_for_each_example() -> None:
    examples = [example("x y"), example("z")]
    scores = inscit_scores(examples, ["x", "z"], [[], []])
    assert tuple(score.name for score in scores) == INSCIT_METRICS
    assert scores[0].values == pytest.approx((200 / 3, 100))
    assert scores[1].values == (None, None)
    assert scores[2].values == (0, 0)
    assert scores[3].values == pytest.approx((200 / 3, 100))


def test_response_f1_by_hand() -> None:
    # The rules make "do n't" of "don't"; without marks that is "do nt". Two of three and of four.
    assert one("Don't go!", "do  NT know why")["response_f1"] == pytest.approx(100 * 4 / 7)
    # ChatRAG-Bench sees "don t go" and "do nt know why".
    assert one("Don't go!", "do  NT know why")["chatrag_f1"] == 0
    assert one("Don't go!", "Don: T-go")["chatrag_f1"] == 100


def test_the_best_of_three_references_counts() -> None:
    found = one("red boats sail", "green", "the red boats", "red")
    assert found["response_f1"] == pytest.approx(80)
    assert found["chatrag_f1"] == pytest.approx(80)


@pytest.mark.parametrize(
    ("answer", "reference", "response", "chatrag"),
    [
        ("", "word", 0, 0),
        ("?!", "word", 0, 0),
        ("", "?!", 100, 0),
        ("the", "a", 100, 0),
        ("word", "?!", 0, 0),
        ("Ünïcode 東京", "ünïcode 東京", 100, 100),
        ("x \ud83d", "x", 200 / 3, 200 / 3),
    ],
)
def test_sides_without_words(answer: str, reference: str, response: float, chatrag: float) -> None:
    found = one(answer, reference)
    assert found["response_f1"] == pytest.approx(response)
    assert found["chatrag_f1"] == pytest.approx(chatrag)


def test_a_reference_without_text_is_none_for_chatrag_alone() -> None:
    scores = inscit_scores([example(" "), example("x")], ["", "x"], [[], []])
    assert scores[0].values == (100, 100)
    assert scores[3].values == (None, 100)
    assert scores[3].value == 100


@pytest.mark.parametrize(
    ("predicted", "right", "f1"),
    [
        (["p"], [["p"]], 100),
        (["p", "q"], [["p"]], 200 / 3),
        (["p", "p"], [["p"]], 100),
        (["p", "q"], [["r"], ["q", "s", "p"], []], 80),
        (["p"], [[]], 0),
        ([], [[]], 0),
        ([], [["p"]], 0),
    ],
)
def test_evidence_f1_by_hand(predicted: list[str], right: list[list[str]], f1: float) -> None:
    asked = example(*["x"] * len(right), evidence=right)
    found = values(inscit_scores([asked], ["x"], [predicted]))
    assert found["evidence_f1"] == pytest.approx(f1)


def test_bleu_by_hand() -> None:
    # 5 words of 5, 3 pairs of 4, 2 of 3 threes, 1 of 2 fours; the nearest reference has 6 words.
    answer, reference = "one two three four six", "one two three four five six"
    expected = 100 * math.exp(1 - 6 / 5) * (5 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25
    assert one(answer.upper(), reference)["bleu"] == pytest.approx(expected)
    # Nearer in length, and nothing else in common.
    unpunished = expected / math.exp(1 - 6 / 5)
    assert one(answer, reference, "a b c d e")["bleu"] == pytest.approx(unpunished)


def test_bleu_is_that_of_the_corpus_with_its_two_streams_of_references() -> None:
    words = "the of red boats, sail (home) don't 3.5 no-one . end".split()
    chance = random.Random(5)

    def text() -> str:
        return " ".join(chance.choices(words, k=chance.randint(1, 12)))

    answers = [text() for _ in range(60)]
    texts = [[text() for _ in range(chance.choice((1, 2)))] for _ in answers]
    streams = [[(pair * 2)[place] for pair in texts] for place in range(2)]
    score = inscit_scores([example(*pair) for pair in texts], answers, [()] * 60)[1]
    assert score.value == pytest.approx(sacrebleu.corpus_bleu(answers, streams).score, abs=1e-9)
    assert len(score.rows) == 60
    assert score.formula(score.rows.sum(0)) == pytest.approx(score.value)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(TEXTS, st.lists(st.tuples(TEXTS, IDS), min_size=1, max_size=3), IDS),
        min_size=1,
        max_size=4,
    )
)
def test_scores_agree_with_the_literal_ones(
    turns: list[tuple[str, list[tuple[str, list[str]]], list[str]]],
) -> None:
    examples = [
        example(*(text for text, _ in labels), evidence=[ids for _, ids in labels])
        for _, labels, _ in turns
    ]
    scores = inscit_scores(examples, [turn[0] for turn in turns], [turn[2] for turn in turns])
    for place, (answer, labels, ids) in enumerate(turns):
        words = literal.inscit_words(" ".join(answer.split()), NLP)
        right = [literal.inscit_words(" ".join(text.split()), NLP) for text, _ in labels]
        response = max(literal.f1(words, one, 1.0) for one in right)
        assert scores[0].values[place] == pytest.approx(100 * response)
        found = literal.evidence_f1(ids, [names for _, names in labels])
        assert scores[2].values[place] == pytest.approx(100 * found)
        plain = literal.chatrag_words(answer)
        overlap = [
            literal.f1(plain, literal.chatrag_words(text), 0.0)
            for text, _ in labels
            if text.strip()
        ]
        expected = 100 * max(overlap) if overlap else None
        assert scores[3].values[place] == pytest.approx(expected)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            *[st.lists(st.sampled_from("one two three four".split()), max_size=7).map(" ".join)] * 3
        ),
        min_size=1,
        max_size=4,
    ),
    st.randoms(use_true_random=False),
)
def test_bleu_agrees_with_the_literal_one_in_any_order(
    turns: list[tuple[str, str, str]], chance: random.Random
) -> None:
    expected = literal.bleu([turn[0] for turn in turns], [turn[1:] for turn in turns])
    mixed = chance.sample(turns, len(turns))

    def scored(some: Sequence[tuple[str, str, str]]) -> dict[str, float]:
        examples = [example(*turn[1:]) for turn in some]
        return values(inscit_scores(examples, [turn[0] for turn in some], [()] * len(some)))

    assert scored(turns)["bleu"] == pytest.approx(expected, abs=1e-9)
    assert scored(mixed) == pytest.approx(scored(turns), nan_ok=True)


def test_nothing_to_score_is_no_number() -> None:
    assert all(math.isnan(score.value) for score in inscit_scores([], [], []))


def test_what_does_not_fit_is_refused() -> None:
    asked = [example("x"), example("y", key="talk/2")]
    with pytest.raises(InputError, match="1 answers for 2 examples"):
        inscit_scores(asked, ["x"], [[], []])
    with pytest.raises(InputError, match="3 evidence lists for 2 examples"):
        inscit_scores(asked, ["x", "y"], [[], [], []])
    bare = Example("talk/3", ({"role": "user", "content": "?"},), (), "talk")
    with pytest.raises(InputError, match="talk/3 has no reference"):
        inscit_scores([bare], ["x"], [[]])


@pytest.mark.parametrize("package", ["sacrebleu", "spacy"])
def test_a_missing_package_is_named_with_its_extra(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf'{package}; run: pip install "\.\[eval'):
        inscit_scores([example("x")], ["x"], [[]])


def test_values_are_plain_numbers() -> None:
    for score in inscit_scores([example("x y z u")], ["x y z u"], [["p"]]):
        assert type(score.value) is float
        assert not any(isinstance(value, np.generic) for value in score.values)
