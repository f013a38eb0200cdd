"""Whether greedy answers are right: many methods read a question in one forward pass.

An answer is compared with the model's likeliest tokens along it (teacher forcing): as long as those
are the answer's own, greedy generation writes them. Where another token comes first and the text
could still become the answer, the rest is generated. So a question is right here exactly where
the text that `WindowedLM.generate` writes is the answer, but for rounding: tokens whose logits are
nearly equal may swap. Part of the questions is written by `WindowedLM.generate_batch` as well.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from rag_windows import Passage, PassageCache, WindowedLM
from rag_windows.engine import Engine
from rag_windows.generate import Decoder
from rag_windows.kv import Windows
from rag_windows.methods import Method
from rag_windows.prefill import EncodedContext
from rag_windows.request import Request
from rag_windows.steps.packed_rows import FedRow, Plan, RowCaches, read_rows
from rag_windows.windows import WindowStore

MAX_NEW_TOKENS = 40
"""Of an answer that is generated."""

Asked = tuple[Sequence[Mapping[str, str]], Sequence[Passage]]
"""The messages of a question, and its passages."""


def requests(engine: Engine, asked: Asked, methods: Sequence[Method]) -> list[Request]:
    """The question for each method; those that encode alike share what is tokenized."""
    made: dict[Hashable, Request] = {}
    found = []
    for one in methods:
        key = one.windowed, one.encoding, one.neighbours
        if key not in made:
            messages, passages = asked
            made[key] = engine.request(
                list(messages), passages, method=one, max_new_tokens=MAX_NEW_TOKENS
            )
        found.append(made[key].with_method(one))
    return found


@torch.no_grad()
def likeliest(
    decoder: Decoder, contexts: Sequence[EncodedContext], query: Sequence[int], text: Sequence[int]
) -> list[list[int]]:
    """For each context, the likeliest token at each place of a text behind a query, and behind it.

    Contexts whose windows are read together take part in one forward pass.
    """
    decoder.follow()
    found: dict[int, list[int]] = {}
    together = []
    for place, context in enumerate(contexts):
        if isinstance(context.windows, Windows):
            together.append(place)
        else:
            ids = torch.tensor([[*query, *text]])
            logits = decoder.forward(context, ids, last=len(text) + 1)
            found[place] = logits[0].argmax(dim=-1).tolist()
    if together:
        rows = [FedRow(contexts[place], [*query, *text]) for place in together]
        made = _one_pass(decoder, rows, len(text) + 1)
        found |= dict(zip(together, made, strict=True))
    return [found[place] for place in range(len(contexts))]


def _one_pass(decoder: Decoder, rows: Sequence[FedRow], last: int) -> list[list[int]]:
    """The likeliest token behind each of the last tokens of each row."""
    plan = Plan(rows, 0)
    logits, _ = read_rows(decoder.runner, plan, RowCaches(), plan.last(last))
    tokens: list[list[int]] = logits.argmax(dim=-1).view(-1, last).tolist()
    return tokens


class Answerer:
    """Asks one model; windows that several methods read of a question are encoded once."""

    def __init__(self, lm: WindowedLM) -> None:
        self.lm, self.engine = lm, lm.engine
        self._encoder = WindowStore(self.engine.plain_encoder).for_batch()
        # Of the question before, so that the prefix is there.
        self._held: list[EncodedContext] = []

    def right(self, asked: Asked, answer: str, methods: Sequence[Method]) -> list[bool]:
        """Whether the greedy answer of each method is this one."""
        engine = self.engine
        made = requests(engine, asked, methods)
        query = made[0].parts.query_ids
        contexts = []
        for request in made:
            context = engine.encode(request, encoder=self._encoder)
            contexts.append(engine.decoder.for_query(context, query))
            self._held.append(context)
        del self._held[: -len(made)]
        text = engine.text.prompt.encode_text(answer, continuation=True)
        found = likeliest(engine.decoder, contexts, query, text)
        return [
            self._is_right(context, query, answer, text, ids)
            for context, ids in zip(contexts, found, strict=True)
        ]

    def _is_right(
        self,
        context: EncodedContext,
        query: Sequence[int],
        answer: str,
        text: Sequence[int],
        found: Sequence[int],
    ) -> bool:
        """Whether greedy generation, of which these are the first tokens, becomes the answer."""
        ends, written = self.engine.decoder.end_tokens({}), self.engine.text.detokenizer.text
        same = next((i for i, token in enumerate(text) if found[i] != token), len(text))
        if len(text) < MAX_NEW_TOKENS:
            if found[same] in ends:
                return written(text[:same]).strip() == answer
            said = written([*text[:same], found[same]]).strip()
            if not answer.startswith(said) and "\ufffd" not in said:
                return False
        ids = self.lm.generate_ids(context, query, max_new_tokens=MAX_NEW_TOKENS)
        return written(ids).strip() == answer

    def written(
        self, asked: Asked, methods: Sequence[Method], citations: bool
    ) -> list[tuple[str, int | None]]:
        """What each method writes token by token, and the passage of most attention."""
        messages, passages = asked
        options: dict[str, Any] = {
            "query": list(messages),
            "passages": passages,
            "max_new_tokens": MAX_NEW_TOKENS,
            "do_sample": False,
            "citations": citations,
        }
        found = []
        for one in self.lm.generate_batch([{**options, "method": one} for one in methods]):
            cited = [citation for citation in one.citations or () if citation.mass]
            most = max(cited, key=lambda citation: citation.mass).passage if cited else None
            found.append((one.text.strip(), most))
        return found

    def again(self, asked: Asked, method: Method) -> tuple[float, bool]:
        """What a method costs when a question comes, its windows having been encoded before.

        Returns:
            The share of the passages' tokens that are encoded again although the same question was
            asked before; and whether windows are found that were encoded for another question,
            over the same passages in reversed order behind a longer one.
        """
        messages, passages = asked
        lm = self.lm.with_cache(PassageCache("1GiB"))
        longest = max((one.text for one in passages), key=len)
        other = Passage(f"{longest} {longest}", title="Another one", score=0.0)
        (request,) = requests(lm.engine, (messages, [other, *reversed(passages)]), [method])
        lm.engine.encode(request)
        (request,) = requests(lm.engine, asked, [method])
        kept = lm.engine.encode(request)
        same = lm.engine.decoder.for_query(lm.engine.encode(request), request.parts.query_ids)
        tokens = len(request.parts.prefix_ids) + same.window_tokens
        share = (tokens - same.cached_tokens) / same.window_tokens
        return share, kept.cached_windows == len(same.lengths)
