"""Requests are taken apart here, and those that read the same examples are read together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval_rag_windows.counts import Counts
from lm_eval_rag_windows.fitting import Fitting
from lm_eval_rag_windows.generating import Wish, generate
from lm_eval_rag_windows.options import Options
from lm_eval_rag_windows.prompting import Prompting
from lm_eval_rag_windows.scoring import Continued, Likelihood, likelihoods
from lm_eval_rag_windows.tokens import Cut, Cutter, Ids
from rag_windows import WindowedLM
from rag_windows.attention.layers import position_limit
from rag_windows.errors import InputError
from rag_windows.prefill import EncodedContext
from rag_windows.prompt.tokenizing import Boundary

UNKNOWN_LENGTH = 2048
"""Positions of a model that names no limit, as with the harness's own models."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """One request in token ids.

    Attributes:
        cut: the prompt.
        continuation: what is to be scored; empty for a free answer.
        wish: how a free answer is generated.
    """

    cut: Cut
    continuation: Ids = ()
    wish: Wish | None = None


class Reader:
    """One model, and how it reads the harness's requests.

    Attributes:
        lm: the model.
        boundary: of its tokenizer.
        cutter: likewise.
        prompting: takes prompts apart.
        fitting: makes them fit.
        counts: what became of them.
        max_length: positions that may be used.

    Args:
        lm: with a tokenizer.
        options: of the run.
        prefix_token: what stands before a text that has no prompt.
    """

    def __init__(self, lm: WindowedLM, options: Options, prefix_token: int) -> None:
        self.lm = lm
        tokenizer: Any = lm.tokenizer
        self._prefix_token = prefix_token
        self.boundary = Boundary(tokenizer)
        read_by = self.boundary
        if options.parse_special_tokens:
            read_by = Boundary(tokenizer, tuple(self.boundary.controls.by_content))
        bos = str(tokenizer.decode([prefix_token]))
        self.cutter = Cutter(tokenizer, read_by, add_bos_token=options.add_bos_token, bos=bos)
        self.prompting = Prompting(self.cutter, options.examples, read_by)
        limit = position_limit(lm.model.config)
        self.max_length = options.max_length or limit or UNKNOWN_LENGTH
        window = options.max_window_tokens or max(1, self.max_length // 2)
        self.fitting = Fitting(lm.method, self.max_length, window)
        self.counts = Counts()

    def pair(self, context: str, continuation: str, doc: Any, name: str) -> Prepared:
        """A prompt with what follows it.

        Args:
            context: the prompt; without text, the model's first token stands for it.
            continuation: the text to score.
            doc: the document of the question.
            name: of the request, for errors.

        Raises:
            InputError: text that can't be encoded, nothing to score, or no room.
        """
        if context == "":
            ids = self.cutter.plain(continuation)
            if ids[:1] == (self._prefix_token,):
                cut, ids = Cut((), (), ids[:1]), ids[1:]
            else:
                cut = Cut((), (), (self._prefix_token,))
        else:
            cut, ids = self.prompting.pair(context, continuation, doc)
        if not ids:
            raise InputError("there is no token to score in the continuation.")
        return Prepared(self.fitting.fit(cut, len(ids) - 1, name), ids)

    def question(self, context: str, wish: Wish, doc: Any, name: str) -> Prepared:
        """A prompt that a free answer follows; arguments and errors as in `pair`."""
        cut = self.prompting.cut(context, doc)
        if not cut.question:
            raise InputError("the prompt has no tokens.")
        return Prepared(self.fitting.fit(cut, wish.tokens, name), wish=wish)

    def score(
        self,
        asked: Sequence[Prepared],
        told: Callable[[int, Likelihood], None],
        *,
        counted: bool = True,
    ) -> list[Likelihood]:
        """Likelihoods of continuations.

        Args:
            asked: from `pair`.
            told: called with the index and result of each as soon as it is there.
            counted: whether they count in ``counts``.
        """
        found: dict[int, Likelihood] = {}
        for context, group in self._together([one.cut for one in asked], counted):
            rows = [Continued(asked[i].cut.question, asked[i].continuation) for i in group]
            for index, result in zip(group, likelihoods(self.lm, context, rows), strict=True):
                found[index] = result
                told(index, result)
        return [found[index] for index in range(len(asked))]

    def answer(
        self,
        asked: Sequence[Prepared],
        told: Callable[[int, str], None],
        think_end: str | None,
    ) -> list[str]:
        """Free answers, one after the other; arguments as in `score`, from `question`."""
        found: dict[int, str] = {}
        for context, group in self._together([one.cut for one in asked], counted=True):
            for index in group:
                wish = asked[index].wish
                if wish is None:
                    raise InputError("A free answer needs options of generation.")
                question = asked[index].cut.question
                found[index] = generate(self.lm, context, question, wish, think_end)
                told(index, found[index])
        return [found[index] for index in range(len(asked))]

    def _together(
        self, cuts: Sequence[Cut], counted: bool
    ) -> Iterator[tuple[EncodedContext, list[int]]]:
        """Each different set of prefix and windows, encoded, with the requests that read it.

        They come sorted, so that sets which begin alike follow each other while their windows are
        still in the cache.
        """
        groups: dict[tuple[Ids, tuple[Ids, ...]], list[int]] = {}
        for index, cut in enumerate(cuts):
            groups.setdefault((cut.prefix, cut.windows), []).append(index)
        for prefix, windows in sorted(groups):
            group = groups[prefix, windows]
            context = self.lm.encode_ids(prefix, windows)
            if counted:
                self.counts.add(context, len(windows), len(group))
            yield context, group
