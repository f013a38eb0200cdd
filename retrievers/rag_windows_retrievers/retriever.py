"""What every retriever promises, and those that ask others: fused, reranked, in conversation."""

from __future__ import annotations

import dataclasses
import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from rag_windows import Passage
from rag_windows.errors import InputError, ModelLoadError, require

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder

DEFAULT_K = 8
DEPTH = 100
"""How many passages a ranking is asked for, at least, that is fused with others."""

ScoredPassage: TypeAlias = Passage
"""A `Passage` whose `score` is set, as `WindowedLM.generate` takes it."""

Messages: TypeAlias = Sequence[Mapping[str, Any]]
Condense: TypeAlias = Callable[[Messages], str]
"""From messages of roles "user" and "assistant", oldest first, the last one the question, to what
to look for."""

BLANK_LINE = re.compile(r"\n\s*\n")


@runtime_checkable
class Retriever(Protocol):
    """Anything that finds passages for a query.

    Every retriever of this package finds at most `k` passages, best first. Their `score` is finite
    and has a unit of the retriever's own; the rest of a passage is as it was given. Of passages
    with the same title and text only the first is found, so that copies take no other's place. A
    blank query finds nothing. Threads may share a retriever.
    """

    def retrieve(self, query: str, k: int = DEFAULT_K) -> list[ScoredPassage]:
        """Find passages.

        Args:
            query: what to look for.
            k: how many passages at most, at least 1; may exceed the corpus.

        Raises:
            InputError: `k` is below 1.
        """
        ...


def check_k(k: int) -> None:
    """Refuse a number of passages below 1."""
    if k < 1:
        raise InputError(f"k must be at least 1, not {k}.")


def best(
    passages: Sequence[Passage], scores: Any, k: int | None, *, above: float = -math.inf
) -> list[ScoredPassage]:
    """The first `k` different ones by their score, of those above one; ties keep their order."""
    scores = np.asarray(scores)
    found: dict[tuple[str | None, str], ScoredPassage] = {}
    for i in np.argsort(-scores, kind="stable"):
        if len(found) == k or not scores[i] > above:
            break
        one = passages[i]
        if content(one) not in found:
            found[content(one)] = dataclasses.replace(one, score=float(scores[i]))
    return list(found.values())


def content(passage: Passage) -> tuple[str | None, str]:
    """What a reader gets of a passage: its title and its text."""
    return passage.title, passage.text


def ranked_text(passage: Passage) -> str:
    """What a passage is found by: its title, where it has one, above its text."""
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text


class HybridRetriever:
    """Reciprocal rank fusion of several retrievers.

    A passage scores ``sum over retrievers of weight / (60 + rank)``, ranks from 1 on, over
    those retrievers that found it among their first `depth` (Cormack, Clarke and Büttcher,
    SIGIR 2009, https://doi.org/10.1145/1571941.1572114, with weights added). Equal scores keep the
    order of the retrievers; what several found comes as the first of them gave it.

    Args:
        retrievers: one or more, such as a `BM25Retriever` and a `DenseRetriever` over one corpus.
        weights: one for each, above 0; equal ones where none are given.
        depth: how many passages each is asked for, where `k` is not more.

    Raises:
        InputError: there are no retrievers, or a weight is missing or not above 0.
    """

    def __init__(
        self,
        retrievers: Sequence[Retriever],
        *,
        weights: Sequence[float] | None = None,
        depth: int = DEPTH,
    ) -> None:
        self.retrievers = tuple(retrievers)
        self.weights = (1.0,) * len(self.retrievers) if weights is None else tuple(weights)
        self.depth = depth
        matched = 0 < len(self.retrievers) == len(self.weights)
        if not matched or not all(0 < one < math.inf for one in self.weights):
            raise InputError(
                f"{len(self.retrievers)} retrievers can't be fused with the weights "
                f"{self.weights}. Give at least one retriever, and for each a weight above 0."
            )

    def retrieve(self, query: str, k: int = DEFAULT_K) -> list[ScoredPassage]:
        """Ask every retriever and fuse; see `Retriever.retrieve`."""
        check_k(k)
        some = [one.retrieve(query, max(k, self.depth)) for one in self.retrievers]
        return fused(some, self.weights, k)


def fused(
    rankings: Iterable[Sequence[Passage]], weights: Iterable[float], k: int
) -> list[ScoredPassage]:
    """The best `k` passages of several rankings, see `HybridRetriever`."""
    check_k(k)
    found: dict[object, ScoredPassage] = {}
    scores: dict[object, float] = {}
    for ranking, weight in zip(rankings, weights, strict=True):
        distinct: dict[object, ScoredPassage] = {}
        for one in ranking:
            distinct.setdefault(content(one), one)
        for rank, (key, one) in enumerate(distinct.items(), start=1):
            found.setdefault(key, one)
            scores[key] = scores.get(key, 0.0) + weight / (60 + rank)
    return best(list(found.values()), list(scores.values()), k)


def sentence_model(kind: str, model: Any, revision: str | None, device: str | None) -> Any:
    """A model of one of sentence-transformers' classes, loaded where it is a name or a folder."""
    if hasattr(model, "tokenizer"):
        return model
    require("A dense retriever or re-ranker", "sentence-transformers", extra="retrievers")
    try:
        import sentence_transformers  # on first use: it takes seconds

        return getattr(sentence_transformers, kind)(
            str(model),
            revision=revision,
            device=device,
            trust_remote_code=False,
            model_kwargs={"use_safetensors": True},
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelLoadError(
            f"The model {str(model)!r} can't be loaded: {first} Check the name and the network, "
            "or give the folder of a sentence-transformers model with safetensors weights."
        ) from error


class Reranker:
    """Orders what another retriever found by a cross-encoder's scores.

    Where query and passage together are longer than the model reads, the end of the longer one is
    left out. Threads may share it.

    Args:
        retriever: finds the candidates.
        model: a local folder, a name on the Hub, or a loaded `CrossEncoder` with one output.
        candidates: number of passages to rerank, if `k` is not larger.
        revision: of the model on the Hub; None for its main one.
        device: "cpu", "cuda", ...; None for the best there is.

    Raises:
        InputError: the model has several outputs.
        ModelLoadError, MissingExtraError: see `SentenceEncoder`.
    """

    def __init__(
        self,
        retriever: Retriever,
        model: str | Path | CrossEncoder,
        *,
        candidates: int = 50,
        revision: str | None = None,
        device: str | None = None,
    ) -> None:
        self.retriever, self.candidates = retriever, candidates
        self._model = sentence_model("CrossEncoder", model, revision, device)
        self._lock = threading.Lock()
        if self._model.num_labels != 1:
            message = (
                f"This cross-encoder has {self._model.num_labels} outputs. Choose one for "
                "ranking, which has a single output."
            )
            raise InputError(message)

    def retrieve(self, query: str, k: int = DEFAULT_K) -> list[ScoredPassage]:
        """Ask the retriever and order what it found; see `Retriever.retrieve`."""
        check_k(k)
        return self.rerank(query, self.retriever.retrieve(query, max(k, self.candidates)), k)

    def rerank(
        self, query: str, passages: Sequence[Passage], k: int | None = None
    ) -> list[ScoredPassage]:
        """The best `k` of any passages, or all different ones, with the model's scores."""
        if not passages:
            return []
        pairs = [(query, ranked_text(one)) for one in passages]
        with self._lock:
            scores = self._model.predict(pairs, show_progress_bar=False, convert_to_numpy=True)
        return best(passages, scores, k)


class ConversationalRetriever:
    """Asks a retriever for what a conversation is about: "When was she born?" names nobody.

    Args:
        retriever: any.
        condense: makes a query of a conversation; None is `last_turns`.
    """

    def __init__(self, retriever: Retriever, condense: Condense | None = None) -> None:
        self.retriever = retriever
        self._condense = condense or last_turns()

    def retrieve(self, query: str | Messages, k: int = DEFAULT_K) -> list[ScoredPassage]:
        """Condense messages, as for `WindowedLM.generate`, and retrieve; see `Retriever.retrieve`.

        Those of other roles than "user" and "assistant", and calls of tools, are left out. A
        string, and a question without a conversation before it, is asked as it is.

        Raises:
            InputError: the last message is not words of the user, or `k` is below 1.
        """
        return self.retriever.retrieve(self.query(query), k)

    def query(self, query: str | Messages) -> str:
        """What is looked for; an `InputError` as `retrieve`."""
        if isinstance(query, str):
            return query
        said = [
            one
            for one in query
            if one.get("role") == "user"
            or (one.get("role") == "assistant" and isinstance(one.get("content"), str))
        ]
        words = all(isinstance(one.get("content"), str) for one in said)
        if not words or not said or said[-1]["role"] != "user":
            raise InputError(
                'A conversation must end with a user\'s message, and each message needs a "role" '
                'and a "content" of text.'
            )
        return self._condense(said) if len(said) > 1 else said[-1]["content"]


def last_turns(turns: int | None = 3, *, weight: int = 3) -> Condense:
    """Make a query of the last questions of a conversation; the newest one counts more.

    The query is one paragraph with the questions of the last turns, and `weight` more paragraphs
    with only the newest question. So a question that needs no context is not outweighed by the
    conversation, and one that refers to it is still found. Answers are left out, because they would
    lead the search back to the passages that they came from.

    Args:
        turns: number of turns before the question, a turn being a question and its answers; None
            for all.
        weight: how often the newest question is repeated.

    Raises:
        InputError: `turns` or `weight` is below 0.
    """
    if (turns is not None and turns < 0) or weight < 0:
        raise InputError(f"turns and weight must be at least 0, not {turns} and {weight}.")

    def condense(messages: Messages) -> str:
        questions = [one["content"].strip() for one in messages if one["role"] == "user"]
        asked = [BLANK_LINE.sub("\n", question) for question in questions]
        recent = asked if turns is None else asked[-1 - turns :]
        return "\n\n".join(["\n".join(recent), *asked[-1:] * (weight if len(recent) > 1 else 0)])

    return condense
