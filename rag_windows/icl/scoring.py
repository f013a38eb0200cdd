"""How likely a model finds given answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from rag_windows.errors import InputError
from rag_windows.generate import Decoder
from rag_windows.kv import Members, RowsCache
from rag_windows.prefill import EncodedContext

MAX_ROW_TOKENS = 8192
"""Tokens, prefix and padding included, that the rows of one pass hold at most."""

MAX_VALUES = 2**26
"""Logits that one pass gives at most; and pairs of a token and a windows' token that it sees."""

MAX_PADDING = 0.1
"""Share of a pass that may be padding, before windows go to the next one."""

FREE_PADDING = 4
"""Tokens of padding a window may always have: a pass of its own would cost more."""


Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class Score:
    """Likelihood of one choice as the continuation of the prompt.

    Attributes:
        choice: its text.
        logprob: sum of its tokens' log-probabilities, in nats.
        tokens: how many tokens it has.
    """

    choice: str
    logprob: float
    tokens: int

    @property
    def mean_logprob(self) -> float:
        """Log-probability per token, in nats."""
        return self.logprob / self.tokens


def score_queries(
    decoder: Decoder, context: EncodedContext, queries: Sequence[Ids], choices: Sequence[Ids]
) -> list[list[float]]:
    """Log-probability of each choice's tokens after each query.

    A query is read once, together with others, each in a row of its own; choices of several tokens
    then continue it, again as rows. Without windows each row is a query and a choice.

    Args:
        decoder: of the model.
        context: what all queries read.
        queries: token ids, each of at least one token.
        choices: token ids, the same for all queries.

    Returns:
        A list a query, of one sum a choice: log-probabilities in nats, fp32.

    Raises:
        InputError: no choices, a choice or a query without tokens.
    """
    if not choices:
        raise InputError("score needs at least one choice.")
    for name, lists in (("Choice", choices), ("Query", queries)):
        empty = next((i for i, ids in enumerate(lists) if not ids), None)
        if empty is not None:
            raise InputError(f"{name} {empty} has no tokens; leave it out.")
    if context.method.selection is not None and context.windows is not None:
        # Which windows are read depends on the query, so each one reads its own.
        return [
            _scores(decoder, decoder.narrowed(context, query), [query], choices)[0]
            for query in queries
        ]
    return _scores(decoder, context, queries, choices)


def bucket_by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group windows of like length that are padded to the longest, longest first.

    Args:
        lengths: tokens of each window.
        max_tokens: bound on rows x longest row of one bucket; a longer window is alone in its own.

    Returns:
        Indices into ``lengths``, each once. In every bucket each window is at most
        ``max(FREE_PADDING, MAX_PADDING * longest)`` tokens shorter than the longest.
    """
    buckets: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = (
            bool(buckets)
            and longest - lengths[index] <= max(FREE_PADDING, MAX_PADDING * longest)
            and (len(buckets[-1]) + 1) * longest <= max_tokens
        )
        if fits:
            buckets[-1].append(index)
        else:
            buckets.append([index])
            longest = lengths[index]
    return buckets


def _scores(
    decoder: Decoder, context: EncodedContext, queries: Sequence[Ids], choices: Sequence[Ids]
) -> list[list[float]]:
    limit = _Limit.of(decoder, context)
    longest = max((len(ids) for ids in queries), default=1)
    whole = context.windows is None
    read = _read_whole if whole else _read_once
    more = max(len(choice) for choice in choices) if whole else 0
    scored: dict[int, list[float]] = {}
    for group in bucket_by_length([len(q) for q in queries], limit.rows(longest + more) * longest):
        sums = read(decoder, context, [queries[index] for index in group], choices, limit)
        scored |= dict(zip(group, sums.tolist(), strict=True))
    return [scored[index] for index in range(len(queries))]


@dataclass(frozen=True, slots=True)
class _Limit:
    """How many queries make a pass.

    Attributes:
        prefix: its tokens, which each row of the cache holds.
        values: logits of one token, or the windows' tokens that it sees, whichever are more.
        rows_each: rows that a query takes.
    """

    prefix: int
    values: int
    rows_each: int

    @classmethod
    def of(cls, decoder: Decoder, context: EncodedContext) -> _Limit:
        windows = context.windows
        rows_each = windows.per_query if isinstance(windows, Members) else 1
        values = max(1, decoder.vocabulary, context.window_tokens // rows_each)
        return cls(len(context.prefix_ids), values, rows_each)

    def rows(self, length: int) -> int:
        by_tokens = MAX_ROW_TOKENS // (self.prefix + length)
        by_values = MAX_VALUES // (length * self.values)
        return max(1, min(by_tokens, by_values) // self.rows_each)


def _read_once(
    decoder: Decoder,
    context: EncodedContext,
    queries: Sequence[Ids],
    choices: Sequence[Ids],
    limit: _Limit,
) -> torch.Tensor:
    """(queries, choices): the queries as rows, then what continues them as rows of their own."""
    cache = context.new_cache(len(queries))
    lengths = [len(ids) for ids in queries]
    longest, least = max(lengths), min(lengths)
    logits = decoder.forward(context, _padded(queries), cache, last=longest - least + 1)
    ends = torch.tensor(lengths, device=logits.device) - least
    ending = logits[torch.arange(len(queries), device=logits.device), ends]
    first = torch.tensor([choice[0] for choice in choices], device=logits.device)
    sums = ending.float().log_softmax(dim=-1)[:, first].cpu()
    later = [index for index, choice in enumerate(choices) if len(choice) > 1]
    if not later:
        return sums
    size = limit.rows(longest + max(len(choice) for choice in choices))
    held = cache.get_seq_length()
    for length in sorted(set(lengths)):
        # What follows must stand behind the last token, so the padding is cut off before.
        pairs = [(row, i) for row, own in enumerate(lengths) if own == length for i in later]
        for start in range(0, len(pairs), size):
            rows, columns = zip(*pairs[start : start + size], strict=True)
            kept = _rows_of(cache, rows, held - longest + length)
            answers = [choices[index] for index in columns]
            inputs = _padded([answer[:-1] for answer in answers])
            logits = decoder.forward(context, inputs, kept, past=length)
            sums[list(rows), list(columns)] += _sums(logits, [answer[1:] for answer in answers])
    return sums


def _read_whole(
    decoder: Decoder,
    context: EncodedContext,
    queries: Sequence[Ids],
    choices: Sequence[Ids],
    limit: _Limit,
) -> torch.Tensor:
    """(queries, choices): each row is a query and a choice."""
    pairs = [(query, choice) for query in queries for choice in choices]
    size = limit.rows(max(len(query) + len(choice) for query, choice in pairs))
    sums = []
    for start in range(0, len(pairs), size):
        chunk = pairs[start : start + size]
        logits = decoder.forward(context, _padded([(*q, *choice[:-1]) for q, choice in chunk]))
        behind = [logits[row, len(q) - 1 :] for row, (q, _) in enumerate(chunk)]
        sums += [_sums(one.unsqueeze(0), [c]) for one, (_, c) in zip(behind, chunk, strict=True)]
    return torch.cat(sums).view(len(queries), len(choices))


def _sums(logits: torch.Tensor, answers: Sequence[Ids]) -> torch.Tensor:
    """(rows,) fp32 on the CPU: log-probabilities of each row's tokens, summed."""
    target = _padded(answers).to(logits.device)
    found = logits[:, : target.shape[1]].float().log_softmax(dim=-1).gather(2, target.unsqueeze(2))
    lengths = torch.tensor([len(ids) for ids in answers], device=logits.device)
    real = torch.arange(target.shape[1], device=logits.device) < lengths.unsqueeze(1)
    return found.squeeze(2).where(real, 0.0).sum(dim=1).cpu()


def _padded(lists: Sequence[Ids]) -> torch.Tensor:
    rows = torch.zeros(len(lists), max(len(ids) for ids in lists), dtype=torch.int64)
    for row, ids in enumerate(lists):
        rows[row, : len(ids)] = torch.tensor(list(ids))
    return rows


def _rows_of(cache: DynamicCache, rows: Sequence[int], length: int) -> DynamicCache:
    """The first tokens of some queries' rows; ``cache`` itself stays as it is."""
    if isinstance(cache, RowsCache):
        return cache.part(rows, length)
    kept = DynamicCache()
    index = torch.tensor(rows)
    for number, layer in enumerate(cache.layers):
        own = index.to(layer.keys.device)
        kept.update(layer.keys[own, :, :length], layer.values[own, :, :length], number)
    return kept
