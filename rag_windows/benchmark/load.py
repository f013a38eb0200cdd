"""What is read in a round: a prefix, windows and questions of random tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rag_windows.errors import InputError

PREFIX_TOKENS = QUERY_TOKENS = 32
_RAGGED = (0.5, 1.5)


@dataclass(frozen=True, slots=True)
class Load:
    """One prompt.

    Attributes:
        prefix: token ids.
        windows: token ids of each passage.
        query: token ids.
    """

    prefix: tuple[int, ...]
    windows: tuple[tuple[int, ...], ...]
    query: tuple[int, ...]

    @property
    def context(self) -> int:
        """Tokens of all windows."""
        return sum(map(len, self.windows))

    @property
    def prompt(self) -> list[int]:
        """The same as one text."""
        return [*self.prefix, *(token for ids in self.windows for token in ids), *self.query]


def lengths(context: int, window: int, *, ragged: bool, seed: int) -> list[int]:
    """Tokens of each window.

    Args:
        context: of all together.
        window: of each; on average, if they are ragged.
        ragged: between half and one and a half times as long, rather than equal.
        seed: of the lengths.

    Raises:
        InputError: the context is no multiple of the window.
    """
    if window < 2 or context < window or context % window:
        raise InputError(
            f"A context of {context} tokens can't be cut into windows of {window}; take multiples."
        )
    count = context // window
    if not ragged or count == 1:
        return [window] * count
    generator = torch.Generator().manual_seed(seed)
    low, high = _RAGGED
    wanted = (torch.rand(count, generator=generator) * (high - low) + low) * window
    made = [int(one) for one in wanted * context / wanted.sum()]
    made[0] += context - sum(made)
    return made


def load(
    vocabulary: int, context: int, window: int, *, ragged: bool = False, seed: int = 0
) -> Load:
    """Random tokens, without the first ones, which may be control tokens."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> tuple[int, ...]:
        first = min(300, vocabulary // 2)
        return tuple(torch.randint(first, vocabulary, (count,), generator=generator).tolist())

    sizes = lengths(context, window, ragged=ragged, seed=seed)
    return Load(ids(PREFIX_TOKENS), tuple(ids(size) for size in sizes), ids(QUERY_TOKENS))


def sharing(
    vocabulary: int, questions: int, context: int, window: int, *, seed: int = 0
) -> list[Load]:
    """Questions of which any two share half of their windows, in different orders.

    Args:
        vocabulary: number of token ids.
        questions: how many.
        context: tokens of each.
        window: tokens of each window.
        seed: of all of it.
    """
    base = load(vocabulary, context, window, seed=seed)
    common = base.windows[: len(base.windows) // 2]
    made = []
    generator = torch.Generator().manual_seed(seed)
    for number in range(questions):
        own = load(vocabulary, context, window, seed=seed + 1 + number)
        windows = [*common, *own.windows[len(common) :]]
        order = torch.randperm(len(windows), generator=generator).tolist()
        made.append(Load(base.prefix, tuple(windows[i] for i in order), own.query))
    return made
