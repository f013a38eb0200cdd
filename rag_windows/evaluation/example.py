"""One question of a dataset, whichever dataset it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rag_windows.passage import Passage


@dataclass(frozen=True, slots=True)
class Reference:
    """One right answer.

    Attributes:
        text: the answer.
        kind: the dataset's name for this sort of answer, such as INSCIT's "clarification".
        evidence: ids of the passages that it rests on.
    """

    text: str
    kind: str | None = None
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Example:
    """One question with its right answers.

    Attributes:
        key: unique in the dataset, and the same on every reading of it.
        messages: the conversation, ``{"role": ..., "content": ...}`` each; the last one asks.
        references: any of them is right.
        group: what is resampled together: the conversation that the question belongs to, or the
            question itself.
        kinds: labels by which results are broken down; empty for none.
        passages: those that the dataset brings, best first; None where they are retrieved.
        choices: the answers to choose from; empty where the answer is written freely.
        details: what the dataset's own metric or file format needs beside.
    """

    key: str
    messages: tuple[Mapping[str, str], ...]
    references: tuple[Reference, ...]
    group: str
    kinds: tuple[str, ...] = ()
    passages: tuple[Passage, ...] | None = None
    choices: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def question(self) -> str:
        """What is asked last."""
        return self.messages[-1]["content"]

    @property
    def evidence(self) -> frozenset[str]:
        """Ids of all passages that any right answer rests on."""
        return frozenset(name for one in self.references for name in one.evidence)
