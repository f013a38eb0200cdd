"""The model as a judge of given answers: scores of choices, and labels learnt in context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack, overload

from rag_windows.codebook.book import PassageBook
from rag_windows.codebook.opening import opened
from rag_windows.conversation import Conversation
from rag_windows.errors import InputError, StopIterationTold
from rag_windows.learning.classification import Classification, Normalize
from rag_windows.learning.classifier import classify
from rag_windows.learning.demonstration import DemonstrationLike
from rag_windows.learning.reading import read
from rag_windows.learning.sizing import Sizes
from rag_windows.learning.template import Template
from rag_windows.request import Messages, PassageLike
from rag_windows.rescaling import Method
from rag_windows.scoring import Score
from rag_windows.text_level import TextLM


class ClassifyOptions(TypedDict, total=False):
    """Keyword arguments of `WindowedLM.classify`, which describes them."""

    template: Template | str | tuple[str, str] | None
    method: str | Method | None
    prefix: str | None
    normalize: Normalize
    calibrate_with: str | Sequence[str] | None
    windows: int | None
    window_tokens: int | None


class LearningLM(TextLM):
    """A causal LM that chooses among answers; `WindowedLM` is what users hold."""

    @StopIterationTold()
    def score(
        self,
        query: Messages,
        passages: Sequence[PassageLike] | PassageBook,
        choices: Sequence[str],
        *,
        prefix: str | None = None,
        method: str | Method | None = None,
    ) -> list[Score]:
        """How likely the model finds each choice as the answer.

        Args:
            query: as in `generate`, like those below but for the choices.
            passages: read in windows; or a book, as in `generate`.
            choices: answers, tokenized as text on their own behind the assistant header.
            prefix: system prompt.
            method: instead of the default one.

        Returns:
            One score a choice, in order; log-probabilities in nats.
        """
        reading = opened(self, query, passages, prefix, method)
        return reading.lm.score_batch(
            [query], reading.passages, choices, prefix=reading.prefix, method=reading.method
        )[0]

    @StopIterationTold()
    def score_batch(
        self,
        queries: Sequence[Messages],
        passages: Sequence[PassageLike] | PassageBook,
        choices: Sequence[str],
        *,
        prefix: str | None = None,
        method: str | Method | None = None,
    ) -> list[list[Score]]:
        """`score` for many queries about the same passages, which are encoded once.

        Args:
            queries: a list of what `score` takes.
            passages: read by all of them, as the choices and what follows.
            choices: answers.
            prefix: system prompt.
            method: instead of the default one.

        Returns:
            The scores of each query, in order.
        """
        if isinstance(queries, str | Conversation):
            raise InputError("queries must be a list; wrap the one in [], or call score().")
        if not queries:
            return []
        if isinstance(passages, PassageBook):
            # Each query reads passages of its own.
            return [
                self.score(one, passages, choices, prefix=prefix, method=method) for one in queries
            ]
        prompt = self._text().prompt
        ids = [prompt.encode_text(choice, continuation=True) for choice in choices]
        rows = read(self, queries, passages, ids, prefix=prefix, method=method).sums
        return [
            [Score(*one) for one in zip(choices, sums, map(len, ids), strict=True)] for sums in rows
        ]

    @overload
    def classify(
        self,
        text: str,
        demonstrations: Sequence[DemonstrationLike],
        labels: Sequence[str] | None = None,
        **options: Unpack[ClassifyOptions],
    ) -> Classification: ...

    @overload
    def classify(
        self,
        text: list[str] | tuple[str, ...],
        demonstrations: Sequence[DemonstrationLike],
        labels: Sequence[str] | None = None,
        **options: Unpack[ClassifyOptions],
    ) -> list[Classification]: ...

    @StopIterationTold()
    def classify(
        self,
        text: str | Sequence[str],
        demonstrations: Sequence[DemonstrationLike],
        labels: Sequence[str] | None = None,
        *,
        template: Template | str | tuple[str, str] | None = None,
        method: str | Method | None = None,
        prefix: str | None = None,
        normalize: Normalize = "sum",
        calibrate_with: str | Sequence[str] | None = None,
        windows: int | None = None,
        window_tokens: int | None = None,
    ) -> Classification | list[Classification]:
        """Label texts as demonstrations show it: in-context learning with many windows.

        Demonstrations are packed into windows, whole ones only and in the order given, about as
        many tokens in each; so their number is not bound by the model's context length. They are
        encoded once for all texts. A chat model gets the text as the user's message and the label
        as its answer; a model without a chat template goes on from plain text,
        ``demonstrations | text: label``.

        Args:
            text: one, or a list of them.
            demonstrations: (text, label) pairs, mappings with these keys, or `Demonstration`. None
                at all is allowed: the labels are then judged by the text alone.
            labels: to choose from, at least two; None takes those of the demonstrations.
            template: a `Template`, the form of a demonstration ("{text}: {label}", the default), or
                a pair of that and the text's form ("{text}:").
            method: instead of the default one.
            prefix: system prompt.
            normalize: whether labels are compared by the "sum" of their tokens' log-probabilities
                or by the "mean". Where one label begins another, it counts as chosen only when the
                longer one isn't; see `Labels.apart`.
            calibrate_with: content-free texts, such as "N/A", whose label probabilities divide
                the others (https://arxiv.org/abs/2102.09690).
            windows: how many to spread the demonstrations over; by default, as few as hold them.
            window_tokens: or how long a window may be; by default, what the model's positions leave
                beside the longest text, rounded down to eighths of them.

        Raises:
            InputError: labels, demonstrations, texts or options that can't be used.
            LimitError: a demonstration that fits no window, or with a method that reads one after
                the other, more of them than fit.
        """
        sizes = Sizes(windows, window_tokens)
        found = classify(
            self,
            [text] if isinstance(text, str) else list(text),
            demonstrations,
            labels,
            template=template,
            method=method,
            prefix=prefix,
            normalize=normalize,
            calibrate_with=calibrate_with,
            sizes=sizes,
        )
        return found[0] if isinstance(text, str) else found
