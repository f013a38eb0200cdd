"""What a run of the benchmark does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

SEQUENTIAL = "transformers"
PREFIX_KEPT = "transformers, prefix kept"
COLD, MEMORY, DISK = "windows, cold", "windows, from memory", "windows, from disk"
WAYS = (SEQUENTIAL, PREFIX_KEPT, COLD, MEMORY, DISK)
_SEQUENTIAL = (SEQUENTIAL, PREFIX_KEPT)


@dataclass(frozen=True, slots=True)
class Place:
    """What the ways are compared over.

    Attributes:
        context: tokens of all windows.
        window: tokens of each, or on average.
        ragged: whether their lengths differ.
    """

    context: int
    window: int
    ragged: bool

    @property
    def windows(self) -> str:
        """Their length in words."""
        return (
            f"ragged windows, about {self.window}" if self.ragged else f"windows of {self.window}"
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run.

    Attributes:
        shape: of a model of random weights.
        model: name or folder of a trained one, which is timed instead; or None.
        dtype: its precision.
        device: where it runs.
        contexts: tokens of all windows.
        windows: tokens of each window.
        ragged: whether windows of different lengths are run, too.
        tokens: numbers of new tokens to whose end time is taken.
        rounds: of each way over each context.
        ways: which of `WAYS`.
        method: of the windows.
        against: further methods, which decode over the same windows in rounds of their own.
        questions: numbers of questions that are asked at once, over the first window length.
        question_context: tokens of each of them; the first context if None.
        dear_above: over longer contexts, plain transformers does less; None for never.
        dear_rounds: its rounds there.
        dear_tokens: its new tokens there.
        memory: whether peak memory is measured, for which a process of its own answers.
        profile: whether the time of a further token is taken apart, on the CPU alone.
    """

    shape: str = "llama-0.25b"
    model: str | None = None
    dtype: str = "bfloat16"
    device: str = "cpu"
    contexts: tuple[int, ...] = (8192,)
    windows: tuple[int, ...] = (256,)
    ragged: bool = False
    tokens: tuple[int, ...] = (64,)
    rounds: int = 5
    ways: tuple[str, ...] = WAYS
    method: str = "ape"
    against: tuple[str, ...] = ()
    questions: tuple[int, ...] = ()
    question_context: int | None = None
    dear_above: int | None = None
    dear_rounds: int = 1
    dear_tokens: int = 16
    memory: bool = True
    profile: bool = False

    @property
    def places(self) -> Iterator[Place]:
        """All of them, in the order in which they are run."""
        for context in self.contexts:
            for window in self.windows:
                for ragged in (False, True)[: 1 + self.ragged]:
                    yield Place(context, window, ragged)

    def dear(self, way: str, context: int) -> bool:
        """Whether a way does less over so many tokens."""
        above = self.dear_above is not None and context > self.dear_above
        return above and way in _SEQUENTIAL

    def rounds_of(self, way: str, context: int) -> int:
        """In how many rounds it takes part."""
        return min(self.rounds, self.dear_rounds) if self.dear(way, context) else self.rounds

    def tokens_of(self, way: str, context: int) -> int:
        """How many new tokens it makes."""
        longest = max(self.tokens)
        return min(longest, self.dear_tokens) if self.dear(way, context) else longest
