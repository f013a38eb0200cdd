"""How good answers and rankings are, by the metrics that the datasets' own scripts use."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Sized
from importlib.util import find_spec
from typing import Any

import numpy as np

from rag_windows.errors import InputError, MissingExtraError, install
from rag_windows.evaluation.task import Array, Example, Score, mean_rows, ratio
from rag_windows.threads import Lock

INSCIT_METRICS = ("response_f1", "bleu", "evidence_f1", "chatrag_f1")
"""Names of what `inscit_scores` gives, the main one first."""

INSCIT_PACKAGES = ("sacrebleu", "spacy")

REFUSING = frozenset({"quac", "doqa_cooking", "doqa_movies", "doqa_travel"})
"""Datasets of ChatRAG-Bench some of whose questions have no answer in their passages."""

SORRY = "Sorry. I cannot find the answer based on the context."
"""What ChatRAG-Bench expects where the passages hold no answer."""

DEPTHS = (1, 5, 20)
"""How many passages of a ranking are looked at, unless told otherwise."""

LONGEST = 5000
"""Characters without a blank that are still split into English words; see `spaced`."""

_NUMBERS = "convfinqa"
_NEGATED = ("provide", "mention", "specify", "include", "contain", "indicate", "disclose")
_PHRASES = (
    *("cannot find", "can't find", "can not find", "could not find", "couldn't find"),
    *("cannot answer", "can't answer", "couldnot answer", "couldn't answer"),
    *("cannot be found", "cannot be determined", "cannot provide", "not able to", "unable to"),
    *(f"does not {verb}" for verb in _NEGATED),
    *(f"doesn't {verb}" for verb in _NEGATED),
    *("not mentioned", "not explicitly mentioned", "not explicitly explain", "not provided"),
    *("do not have", "don't have", "don't know", "no information", "there is no"),
)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_DELETED = dict.fromkeys(map(ord, string.punctuation))
_BLANKED = dict.fromkeys(map(ord, string.punctuation), " ")
_REMARK = re.compile(r"\(\w+\)")
_SURROGATE = re.compile("[\ud800-\udfff]")

_lock = Lock()
_tokenizers: list[Callable[[str], Iterable[Any]]] = []


def check_packages(*names: str) -> None:
    """Make sure that packages are there, such as "spacy"; before a long run, not after it.

    Raises:
        MissingExtraError: one is not installed.
    """
    if absent := [name for name in names if find_spec(name) is None]:
        raise MissingExtraError(
            f"Scoring needs what is not installed: {', '.join(absent)}; run: {install('eval')}"
        )


def _check_aligned(examples: Sequence[Example], what: str, items: Sized) -> None:
    if len(items) != len(examples):
        raise InputError(
            f"{len(items)} {what} for {len(examples)} examples; give one an example, in order."
        )


# Words of a text, and how much two texts have in common.


def squad_words(text: str) -> list[str]:
    """Words as SQuAD counts them (Rajpurkar et al., EMNLP 2016).

    Lower case; ASCII punctuation is deleted, so that "don't" becomes "dont"; then the articles a,
    an and the are taken out and the rest is split at white space.
    """
    return _ARTICLES.sub(" ", text.lower().translate(_DELETED)).split()


def chatrag_words(text: str) -> list[str]:
    """Words as ParlAI and, with it, ChatRAG-Bench (Liu et al., NeurIPS 2024) count them.

    As `squad_words`, but ASCII punctuation separates: "don't" becomes "don" and "t".
    """
    return _ARTICLES.sub(" ", text.lower().translate(_BLANKED)).split()


def spaced(text: str) -> str:
    """The text with one blank between its words, which are those of spaCy's English rules.

    The rules need no model: they are those of ``spacy.blank("en")``, which every English pipeline
    of spaCy starts with. Their time grows with the square of a run of punctuation, so a stretch of
    more than `LONGEST` characters without a blank stays in one piece. Half a surrogate pair, which
    JSON may hold and spaCy refuses, becomes U+FFFD. May be called from several threads.

    Raises:
        MissingExtraError: spaCy is not installed.
    """
    text = _SURROGATE.sub("\ufffd", text)
    words = text.split()
    if max(map(len, words), default=0) <= LONGEST:
        return _spaced(text)
    return " ".join(word if len(word) > LONGEST else _spaced(word) for word in words)


def _spaced(text: str) -> str:
    # The tokenizer fills a cache of its own while it works, and spaCy makes no promise on threads.
    with _lock:
        if not _tokenizers:
            check_packages("spacy")
            import spacy

            # Not the pipeline around it, which refuses texts of more than a million characters.
            _tokenizers.append(spacy.blank("en").tokenizer)
        return " ".join(token.text for token in _tokenizers[0](text))


def bag_f1(predicted: Sequence[str], right: Sequence[str], *, both_empty: float = 0.0) -> float:
    """F1 of two bags of words, 0 to 1: harmonic mean of precision and recall of the common words.

    Args:
        predicted: words of the answer; a word counts as often as it comes.
        right: words of the reference.
        both_empty: the result where neither side has a word. SQuAD says 1, ChatRAG-Bench 0.
    """
    if not predicted and not right:
        return both_empty
    common = (Counter(predicted) & Counter(right)).total()
    return 2 * common / (len(predicted) + len(right))


def bleu_score(answers: Sequence[str], references: Sequence[Sequence[str]]) -> Score:
    """SacreBLEU (Post, WMT 2018) with its defaults: 13a tokens, 4-grams, exponential smoothing.

    Args:
        answers: one an example.
        references: at least one an example; their number may differ.

    Returns:
        "bleu" in percent, NaN without examples. BLEU of all is that of the sums over the sentences
        of right n-grams, n-grams, length and length of the closest reference.
    """
    check_packages("sacrebleu")
    from sacrebleu.metrics.bleu import BLEU

    # `force` only keeps it from asking on stderr whether the text was tokenized before.
    metric = BLEU(force=True)
    rows = []
    for answer, right in zip(answers, references, strict=True):
        one = metric.corpus_score([answer], [[text] for text in right])
        rows.append((*one.counts, *one.totals, one.sys_len, one.ref_len))
    return Score.of_sums("bleu", np.array(rows, dtype=np.float64).reshape(-1, 10), bleu)


def bleu(sums: Array) -> Array:
    """BLEU-4 of sums over sentences, for many draws of them at once.

    `sacrebleu.significance.PairedTest` draws sentences apart from each other; the turns of one
    conversation go together, so it would call intervals too narrow. `BLEU.compute_bleu` computes
    this formula for one draw at a time.

    Args:
        sums: (..., 10), see `bleu_score`.

    Returns:
        (...) percent; 0 where nothing matches.
    """
    right, total, length, reference = sums[..., :4], sums[..., 4:8], sums[..., 8], sums[..., 9]
    missed = right == 0
    # The n-th order without a match counts as 1/2^n matches.
    smoothed = np.where(missed, 0.5 ** np.cumsum(missed, axis=-1), right)
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.log(smoothed / total).mean(axis=-1) + np.log(100)
        found = np.exp(precision + np.minimum(0.0, 1 - reference / length))
    empty = missed.all(axis=-1) | (total == 0).any(axis=-1) | (length == 0)
    return np.where(empty, 0.0, found)


# INSCIT (Wu et al., TACL 2023).


def inscit_scores(
    examples: Sequence[Example], answers: Sequence[str], evidence: Sequence[Collection[str]]
) -> list[Score]:
    """Score answers and the passages that they rest on, as INSCIT's own script does.

    F1 and BLEU compare with all answers that annotators gave. Response types have no part in it.

    - response_f1: words of spaCy's English rules, normalised as in SQuAD; best of the references.
    - bleu: SacreBLEU of all answers together; see `bleu_score`.
    - evidence_f1: of sets of passage ids; best of the references; 0 for an empty prediction, also
      where the reference names no passage.
    - chatrag_f1: words as ChatRAG-Bench counts them, of the answer as it was written.

    Args:
        examples: with at least one reference each.
        answers: one an example.
        evidence: ids of passages, one collection an example.

    Returns:
        One score for each of `INSCIT_METRICS`, in percent.

    Raises:
        InputError: another number of answers than of examples, or an example without reference.
        MissingExtraError: sacrebleu or spaCy is not installed.
    """
    _check_aligned(examples, "answers", answers)
    _check_aligned(examples, "evidence lists", evidence)
    if bare := next((one.key for one in examples if not one.references), None):
        raise InputError(f"{bare} has no reference, so no answer to it can be scored.")
    check_packages(*INSCIT_PACKAGES)
    plain = [" ".join(one.lower().split()) for one in answers]
    right = [
        [" ".join(one.text.lower().split()) for one in example.references] for example in examples
    ]
    response = [_response_f1(*pair) for pair in zip(plain, right, strict=True)]
    named = [
        _evidence_f1(set(one), example) for one, example in zip(evidence, examples, strict=True)
    ]
    overlap = [
        _chatrag_f1(answer, [one.text for one in example.references])
        for answer, example in zip(answers, examples, strict=True)
    ]
    return [
        Score.mean("response_f1", response),
        bleu_score(plain, right),
        Score.mean("evidence_f1", named),
        Score.mean("chatrag_f1", overlap),
    ]


def _response_f1(answer: str, references: Sequence[str]) -> float:
    words = squad_words(spaced(answer))
    return 100 * max(bag_f1(words, squad_words(spaced(one)), both_empty=1.0) for one in references)


def _evidence_f1(named: set[str], example: Example) -> float:
    if not named:
        return 0.0
    right = [set(one.evidence) for one in example.references]
    return max(200 * len(named & one) / (len(named) + len(one)) for one in right)


# ChatRAG-Bench (Liu et al., NeurIPS 2024).


def chatrag_metrics(dataset: str) -> tuple[str, ...]:
    """Names of what `chatrag_scores` gives for a dataset, the main one first."""
    if dataset == _NUMBERS:
        return ("accuracy",)
    if dataset in REFUSING:
        accuracies = ("unanswerable_accuracy", "answerable_accuracy", "mean_accuracy")
        return ("f1", "answerable_f1", *accuracies)
    return ("f1",)


def chatrag_scores(
    dataset: str,
    examples: Sequence[Example],
    answers: Sequence[str],
    answerable: Collection[str] | None = None,
) -> list[Score]:
    """Score answers as ChatRAG-Bench's own script scores this dataset.

    - ConvFinQA has "accuracy" alone: `holds_result`, with the example's ``details["exe_answer"]``.
    - All others have "f1", with the best of the references that have text. INSCIT's additional
      answer `SORRY` is no reference.
    - QuAC and DoQA: `settled` answers are scored. "unanswerable_accuracy" is the share of questions
      whose first reference is `SORRY` that are answered so, "answerable_accuracy" the share of the
      others that are not, "mean_accuracy" the mean of both shares, and "answerable_f1" the F1 of
      the answerable ones.

    Args:
        dataset: its name in the benchmark, such as "doqa_movies".
        examples: references are all answers of the file in their order, empty ones included.
        answers: one an example.
        answerable: keys of those answerable questions that count for "answerable_accuracy" and
            "answerable_f1"; None for all. For QuAC the benchmark counts only those whose first five
            passages hold the answer.

    Returns:
        One score for each of `chatrag_metrics`, in percent; NaN where no example counts.

    Raises:
        InputError: another number of answers than of examples, or no ``exe_answer`` in one.
    """
    _check_aligned(examples, "answers", answers)
    answers = [one_line(answer) for answer in answers]
    if dataset == _NUMBERS:
        right = [_number_right(*pair) for pair in zip(examples, answers, strict=True)]
        return [Score.mean("accuracy", right)]
    if dataset in REFUSING:
        answers = [settled(answer) for answer in answers]
    f1: list[float | None] = []
    for example, answer in zip(examples, answers, strict=True):
        texts = [one.text for one in example.references]
        f1.append(_chatrag_f1(answer, [t for t in texts if dataset != "inscit" or t != SORRY]))
    if dataset not in REFUSING:
        return [Score.mean("f1", f1)]
    refused: list[float | None] = []
    answered: list[float | None] = []
    overlap: list[float | None] = []
    for example, answer, one in zip(examples, answers, f1, strict=True):
        sorry, without = refuses(answer), unanswerable(example)
        counts = not without and (answerable is None or example.key in answerable)
        refused.append(100.0 * sorry if without else None)
        answered.append(100.0 * (not sorry) if counts else None)
        overlap.append(one if counts else None)
    # It counts both shares the same, however many questions each has, so it is no mean of theirs.
    both = np.concatenate([mean_rows(refused), mean_rows(answered)], axis=1)
    return [
        Score.mean("f1", f1),
        Score.mean("answerable_f1", overlap),
        Score.mean("unanswerable_accuracy", refused),
        Score.mean("answerable_accuracy", answered),
        Score.of_sums("mean_accuracy", both, _mean_of_ratios),
    ]


def one_line(answer: str) -> str:
    """The answer as it stands in a predictions file of the benchmark, which has one a line."""
    return answer.replace("\r\n", " ").replace("\n", " ").replace("\r", " ").strip()


def unanswerable(example: Example) -> bool:
    """Whether the benchmark says that the passages hold no answer."""
    return bool(example.references) and example.references[0].text == SORRY


def settled(answer: str) -> str:
    """`SORRY` if the answer holds a phrase of refusal, otherwise the answer in lower case."""
    lowered = answer.lower()
    return SORRY if any(phrase in lowered for phrase in _PHRASES) else lowered


def refuses(answer: str) -> bool:
    """Whether the answer counts as refusal: it is sorry and cannot find the answer."""
    lowered = answer.lower()
    return "sorry" in lowered and "cannot find the answer" in lowered


def holds_result(answer: str, question: str, result: float | str, formula: str) -> bool:
    """Whether an answer is right for ConvFinQA.

    Readers answer at length, so it is enough that the answer contains the result or its formula as
    text, once commas, dollar signs, "million", "billion" and single words in parentheses are taken
    out of it. A result also counts rounded to three or two decimals; times 100, in full and rounded
    to one or two decimals, if the question holds "percent"; without ".0"; and without its minus if
    the answer speaks of a decrease. A blank result or formula is found in nothing.

    Args:
        answer: what the reader wrote.
        question: the last one.
        result: as the dataset's ``exe_answer`` holds it, mostly a number, sometimes "yes" or "no".
        formula: the dataset's first answer.
    """
    text = re.sub("[,$]|million|billion", "", answer)
    text = " ".join(_REMARK.sub("", text).split())
    wanted = (str(result), formula, *_written(result, "percent" in question, "decrease" in text))
    return any(one.strip() and one in text for one in wanted)


def _written(result: float | str, percent: bool, decrease: bool) -> Iterator[str]:
    """Other ways to write a result that is a number."""
    try:
        number = float(result)
    except (ValueError, OverflowError):
        return
    yield str(round(number, 3))
    yield str(round(number, 2))
    if percent:
        yield str(number * 100)
        yield str(round(number * 100, 1))
        yield str(round(number * 100, 2))
    if str(result).endswith(".0"):
        yield str(int(number))
    if decrease and number < 0:
        yield str(-number if isinstance(result, str) else -result)


def _chatrag_f1(answer: str, references: Iterable[str]) -> float | None:
    words = chatrag_words(answer.strip().replace("</s>", ""))
    right = [chatrag_words(text) for text in references if text.strip()]
    return max((100 * bag_f1(words, one) for one in right), default=None)


def _number_right(example: Example, answer: str) -> float:
    result = example.details.get("exe_answer")
    if result is None or not example.references:
        raise InputError(f"{example.key} has no exe_answer or no answer; ConvFinQA needs both.")
    question = example.conversation[-1]["content"]
    return 100.0 * holds_result(answer, question, result, example.references[0].text)


def _mean_of_ratios(sums: Array) -> Array:
    return ratio(sums.reshape(*sums.shape[:-1], -1, 2)).mean(axis=-1)


# Answers that are right to the word, and rankings.


def accuracy(examples: Sequence[Example], answers: Sequence[str]) -> Score:
    """Answers that are a reference, letter by letter: for those chosen among given ones."""
    return _share("accuracy", examples, answers, lambda answer, text: answer == text)


def exact_match(examples: Sequence[Example], answers: Sequence[str]) -> Score:
    """Answers with the words of a reference, as SQuAD normalises them, and no others."""
    return _share("exact_match", examples, answers, lambda a, b: squad_words(a) == squad_words(b))


def contained(examples: Sequence[Example], answers: Sequence[str]) -> Score:
    """Answers that hold all words of a reference in a row, as SQuAD normalises them.

    A reference without words, such as "?!", is searched for letter by letter; an empty one is found
    nowhere.
    """
    return _share("contained", examples, answers, _holds)


def _holds(answer: str, text: str) -> bool:
    wanted = squad_words(text)
    if not wanted:
        return bool(text.strip()) and text.strip() in answer
    # Words hold no blank, so with a blank on each side a match can't begin or end within one.
    return f" {' '.join(wanted)} " in f" {' '.join(squad_words(answer))} "


def _share(
    name: str,
    examples: Sequence[Example],
    answers: Sequence[str],
    right: Callable[[str, str], bool],
) -> Score:
    _check_aligned(examples, "answers", answers)
    return Score.mean(
        name,
        [
            100.0 * any(right(answer, one.text) for one in example.references)
            for example, answer in zip(examples, answers, strict=True)
        ],
    )


def retrieval_scores(
    examples: Sequence[Example],
    rankings: Sequence[Sequence[str | None]],
    depths: Sequence[int] = DEPTHS,
) -> list[Score]:
    """Score rankings against `Example.evidence`. Examples without evidence don't count.

    - recall@k: share of an example's right passages among the first k.
    - hit@k: whether a right passage is among the first k.
    - mrr: 1 / rank of the first right passage, 0 where the ranking holds none.

    Args:
        examples: what was searched for.
        rankings: ids of passages, best first, one ranking an example; None for a passage without
            id, which is never right. What a ranking doesn't hold was not found.
        depths: the numbers of passages k.

    Returns:
        "recall@k" for each depth, then "hit@k" for each, then "mrr"; percent, and NaN where no
        example has evidence.

    Raises:
        InputError: another number of rankings than of examples, or a depth below 1.
    """
    _check_aligned(examples, "rankings", rankings)
    if any(depth < 1 for depth in depths):
        raise InputError(f"Depths must be 1 or more, not {list(depths)}.")
    ranks: list[list[int] | None] = []
    for example, ranking in zip(examples, rankings, strict=True):
        first: dict[str, int] = {}
        for rank, name in enumerate(ranking, start=1):
            if name is not None and name in example.evidence:
                first.setdefault(name, rank)
        ranks.append(list(first.values()) if example.evidence else None)
    recalls, hits = [], []
    for depth in depths:
        within = [None if one is None else sum(rank <= depth for rank in one) for one in ranks]
        shares = [
            None if found is None else 100 * found / len(example.evidence)
            for found, example in zip(within, examples, strict=True)
        ]
        recalls.append(Score.mean(f"recall@{depth}", shares))
        hit = [None if found is None else 100.0 * (found > 0) for found in within]
        hits.append(Score.mean(f"hit@{depth}", hit))
    reciprocal = [None if one is None else 100 / one[0] if one else 0.0 for one in ranks]
    return [*recalls, *hits, Score.mean("mrr", reciprocal)]
