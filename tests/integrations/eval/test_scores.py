"""Scores equal those of the datasets' own scripts: by hand, and by their arithmetic once more."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
import sacrebleu
import spacy
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_windows_eval import chatrag, inscit, task

NLP = spacy.blank("en")
TEXTS = st.text("abcnthe' .,?-()“é", max_size=25)
IDS = st.lists(st.sampled_from("pqrs"), max_size=3)
SORRY = chatrag.SORRY


def example(
    *texts: str,
    key: str = "talk/1",
    evidence: Sequence[Sequence[str]] | None = None,
    question: str = "Which one?",
    result: Any = None,
) -> task.TaskExample:
    ids = evidence if evidence is not None else [()] * len(texts)
    references = tuple(
        task.Reference(text, None, tuple(n)) for text, n in zip(texts, ids, strict=True)
    )
    messages = ({"role": "user", "content": question},)
    return task.TaskExample(key, messages, references, key, details={"exe_answer": result})


def values(scores: Sequence[task.MetricScore]) -> dict[str, float]:
    return {one.name: one.value for one in scores}


def of_chatrag(dataset: str, answer: str, *references: str) -> dict[str, float]:
    return values(chatrag.chatrag_scores(dataset, [example(*references)], [answer]))


# The scripts' arithmetic once more, word for word and slow, for comparison.

PUNCTUATION = "!\"#$%&()*+,-./:;<=>?@[]\\^`{|}~_'"


def literal_inscit_words(text: str, nlp: spacy.language.Language) -> list[str]:
    kept = ""
    for letter in " ".join(token.text for token in nlp(text)).lower():
        if letter not in PUNCTUATION:
            kept += letter
    return _without_articles(kept)


def literal_chatrag_words(text: str) -> list[str]:
    for letter in PUNCTUATION:
        text = text.replace(letter, " ")
    return _without_articles(text.lower())


def _without_articles(text: str) -> list[str]:
    # What isn't a letter, digit or underscore bounds a word, so an article may stand in quotes.
    pieces = re.split(r"(\W+)", text)
    return "".join(" " if piece in ("a", "an", "the") else piece for piece in pieces).split()


def literal_f1(predicted: list[str], right: list[str], both_empty: float) -> float:
    if not predicted or not right:
        return both_empty if predicted == right else 0.0
    left = list(right)
    common = 0
    for word in predicted:
        if word in left:
            left.remove(word)
            common += 1
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(right)
    return 2 * precision * recall / (precision + recall)


def literal_evidence_f1(predicted: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    best = 0.0
    for right in references:
        for _ in predicted:
            hits = len([name for name in set(predicted) if name in right])
            wrong = len(set(predicted)) - hits
            missed = len(set(right)) - hits
            best = max(best, hits / (hits + (wrong + missed) / 2))
    return best


# Words, and how much two texts have in common.


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("it's 5km, isn't it?", "it 's 5 km , is n't it ?"),
        ("naïve “words”", "naïve “ words ”"),
        ("x \ud83d y", "x \ufffd y"),
        (f"it's {'(-' * 500_000} isn't", f"it 's {'(-' * 500_000} is n't"),
    ],
    ids=str.__len__,
)
def test_words_stand_apart_in_no_quadratic_time(text: str, words: str) -> None:
    assert inscit.spaced(text) == words


# INSCIT.


def test_bleu_is_that_of_the_corpus_with_its_two_streams_of_references() -> None:
    words = "the of red boats, sail (home) don't 3.5 no-one . end".split()
    chance = random.Random(5)

    def text() -> str:
        return " ".join(chance.choices(words, k=chance.randint(1, 12)))

    answers = [text() for _ in range(60)]
    texts = [[text() for _ in range(chance.choice((1, 2)))] for _ in answers]
    streams = [[(pair * 2)[place] for pair in texts] for place in range(2)]
    asked = [example(*pair) for pair in texts]
    score = inscit.inscit_scores(asked, answers, [()] * 60)[1]
    assert score.value == pytest.approx(sacrebleu.corpus_bleu(answers, streams).score, abs=1e-9)


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
    answers, named = [turn[0] for turn in turns], [turn[2] for turn in turns]
    scores = inscit.inscit_scores(examples, answers, named)
    for place, (answer, labels, ids) in enumerate(turns):
        words = literal_inscit_words(" ".join(answer.split()), NLP)
        right = [literal_inscit_words(" ".join(text.split()), NLP) for text, _ in labels]
        response = max(literal_f1(words, one, 1.0) for one in right)
        assert scores[0].values[place] == pytest.approx(100 * response)
        found = literal_evidence_f1(ids, [names for _, names in labels])
        assert scores[2].values[place] == pytest.approx(100 * found)
        plain = literal_chatrag_words(answer)
        overlap = [
            literal_f1(plain, literal_chatrag_words(text), 0.0)
            for text, _ in labels
            if text.strip()
        ]
        expected = 100 * max(overlap) if overlap else math.nan
        assert scores[3].values[place] == pytest.approx(expected, nan_ok=True)


# ChatRAG-Bench.


@pytest.mark.parametrize(
    ("dataset", "answer", "references", "f1"),
    [
        # "well known red boat" against "red boat s": two of four and of three.
        ("doc2dial", "A well-known red boat", ["The red boat's"], 400 / 7),
        ("coqa", "red", ["", "green", "red boat"], 200 / 3),
        ("qrecc", "red</s>", ["red"], 100),
        ("qrecc", "", ["red"], 0),
        ("qrecc", "?", ["?"], 0),
        # INSCIT's additional answer is no reference.
        ("inscit", SORRY, ["red boat", SORRY], 0),
        ("topiocqa", SORRY, ["red boat", SORRY], 100),
        ("inscit", SORRY, [SORRY], math.nan),
        ("sqa", "x", [" "], math.nan),
        ("quac", "The text doesn't mention it", [SORRY], 100),
    ],
)
def test_f1_by_hand(dataset: str, answer: str, references: list[str], f1: float) -> None:
    found = of_chatrag(dataset, answer, *references)["f1"]
    assert found == pytest.approx(f1, nan_ok=True)


@pytest.mark.parametrize(
    "phrase",
    """cannot find|can't find|not able to|unable to|does not provide|cannot provide|cannot answer
    couldnot answer|can't answer|couldn't answer|cannot be found|cannot be determined|do not have
    couldn't find|no information|does not mention|doesn't mention|not explicitly mentioned
    not explicitly explain|can not find|could not find|does not specify|doesn't provide
    doesn't specify|there is no|not mentioned|don't have|don't know|does not include
    doesn't include|does not contain|doesn't contain|not provided|does not indicate
    doesn't indicate|does not disclose|doesn't disclose""".replace("\n    ", "|").split("|"),
)
def test_each_phrase_of_the_benchmark_is_a_refusal(phrase: str) -> None:
    assert chatrag.settled(f"Well, {phrase.upper()} that.") == SORRY
    assert of_chatrag("quac", phrase, SORRY)["unanswerable_accuracy"] == 100


def test_a_refusal_needs_both_parts() -> None:
    assert chatrag.refuses("I am SORRY, but I cannot find the answer.")
    for answer in ("Sorry.", "I cannot find the answer.", "It is red.", "cannot  find", "does not"):
        assert not chatrag.refuses(answer)
        assert of_chatrag("doc2dial", answer, SORRY)["f1"] < 100


def test_accuracies_by_hand() -> None:
    asked = [
        example(SORRY, key="q0"),
        example("red boat", key="q1"),
        example(SORRY, "red", key="q2"),
        example("green boat", key="q3"),
        example("blue", SORRY, key="q4"),
    ]
    said = ["Unable to\nsay", "Red boat", "green", "There is no boat", "BLUE"]
    scores = chatrag.chatrag_scores("quac", asked, said)
    found = values(scores)
    # q0 is refused and q2 is not; q1 and q4 are answered, q3 is not.
    assert found["unanswerable_accuracy"] == 50
    assert found["answerable_accuracy"] == pytest.approx(200 / 3)
    assert found["mean_accuracy"] == pytest.approx((50 + 200 / 3) / 2)
    # q0 and q1 and q4 are met; q2 and q3 (now a refusal) share no word with their references.
    assert found["f1"] == pytest.approx(60)
    assert found["answerable_f1"] == pytest.approx(200 / 3)
    nan = math.nan
    assert scores[2].values == pytest.approx([100, nan, 0, nan, nan], nan_ok=True)
    assert scores[3].values == pytest.approx([nan, 100, nan, 0, 100], nan_ok=True)
    one_sort = of_chatrag("doqa_movies", "red", "red")
    assert one_sort["answerable_accuracy"] == 100
    assert math.isnan(one_sort["unanswerable_accuracy"])
    assert math.isnan(one_sort["mean_accuracy"])


HOW_MUCH, PERCENT = "How much?", "By what percentage did it rise?"


@pytest.mark.parametrize(
    ("question", "answer", "result", "right"),
    [
        (HOW_MUCH, "It is 25587.0 in all", 25587.0, True),
        (HOW_MUCH, "$25,587 million", 25587.0, True),
        (HOW_MUCH, "It is 60", 60, True),
        (HOW_MUCH, "about 0.148", 0.14785, True),
        (HOW_MUCH, "a decrease of 10.5 billion", -10.5, True),
        (HOW_MUCH, "yes, it did", "yes", True),
        (HOW_MUCH, "12 (2017) - 7 (2016)", 99.0, True),
        (HOW_MUCH, "$12 million - $7   million", 99.0, True),
        (HOW_MUCH, "", 5.0, False),
        (HOW_MUCH, "about 0.1", 0.14173, False),
        (HOW_MUCH, "It is 14.173", 0.14173, False),
        (HOW_MUCH, "It fell by 10.5", -10.5, False),
        (HOW_MUCH, "12 (in 2017) - 7", 99.0, False),
        (PERCENT, "14.785", 0.14785, True),
        (PERCENT, "14.17%", 0.14173, True),
        ("By what share?", "14.2", 0.14173, False),
        *((PERCENT, "a decrease", odd, False) for odd in (10**400, math.inf, "1e400", -(10**30))),
    ],
    ids=lambda value: str(value)[:20],
)
def test_convfinqa_finds_the_result_in_the_answer(
    question: str, answer: str, result: float | str, right: bool
) -> None:
    asked = example("12 - 7", question=question, result=result)
    assert chatrag.chatrag_scores("convfinqa", [asked], [answer])[0].value == 100 * right
