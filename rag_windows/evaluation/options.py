"""How every question of a run is asked."""

from __future__ import annotations

from dataclasses import dataclass

from rag_windows.errors import InputError
from rag_windows.evaluation.task import Task


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What all arms have in common.

    Attributes:
        prefix: the instruction before the passages; None for none.
        max_new_tokens: length of an answer at most.
        seed: of a private generator for each answer. Answers are greedy, so it matters only to
            methods that draw.
        citations: whether to measure the attention on each passage.
        stop: strings before which an answer ends.
    """

    prefix: str | None
    max_new_tokens: int
    seed: int = 0
    citations: bool = True
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}.")

    @classmethod
    def of(
        cls,
        task: Task,
        prefix: str | None = None,
        max_new_tokens: int | None = None,
        seed: int = 0,
        stop: tuple[str, ...] = (),
    ) -> RunOptions:
        """The task's own, but for what is given.

        Args:
            task: brings an instruction and a length.
            prefix: instead of its instruction; "" for none at all.
            max_new_tokens: instead of its length.
            seed: see above.
            stop: likewise.
        """
        chosen = task.prefix if prefix is None else prefix
        tokens = task.max_new_tokens if max_new_tokens is None else max_new_tokens
        return cls(chosen or None, tokens, seed, stop=stop)
