"""What a training sequence is made of, and what comes out: passages with a conversation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a sequence is made of. Chances are per sequence, entity, sentence or turn as named.

    `kin`: an entity shares a word of its name with another. `missing`: an entity lacks a relation.
    `unstated`: a question has the answer "not stated". `pronouns`: a sentence after the first says
    he, she, it or "the company". `surnames`: a person is called by the surname alone in a later
    sentence. `follow`: a question continues with a pronoun about the entity of the turn before.
    `linked`: half of the passages name the others' entities as their founder, author, employer ...
    `hops`: a question goes through such a link. `mixed`: the passages are of several kinds.
    `jitter`: random gaps in the positions between the parts. `fewer`: the number of facts is drawn
    from 1 to `facts` for the whole sequence. `framed`: instructions stand around the passages and
    questions. `system`: a system message comes first.
    """

    entities: int
    facts: int = 4
    questions: int = 12
    kin: float = 0.0
    missing: float = 0.0
    unstated: float = 0.0
    pronouns: float = 0.0
    surnames: float = 0.0
    follow: float = 0.0
    linked: bool = False
    hops: float = 0.0
    mixed: float = 0.2
    jitter: float = 0.3
    fewer: float = 0.2
    framed: float = 0.0
    system: float = 0.1

    @property
    def label(self) -> str:
        """What a curve calls it."""
        kind = " linked" if self.linked else " with pronouns" if self.follow else ""
        return f"{self.entities}{kind}"


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """A sequence for in-context classification: lines "words: label" over several passages.

    Each label (`labels` of them) has `keywords` words of its own; a line is `words` words, one of
    them a keyword of its label, the others fillers.
    """

    passages: int
    lines: int = 8
    labels: tuple[int, int] = (2, 4)
    keywords: tuple[int, int] = (1, 4)
    words: tuple[int, int] = (2, 3)
    questions: int = 12
    jitter: float = 0.3

    @property
    def label(self) -> str:
        """What a curve calls it."""
        return f"{self.passages} of demonstrations"


@dataclass(frozen=True, slots=True)
class Turn:
    """One question with its answer, the passage that states it (None: none does) and the task.

    `blind` is the chance of being right for a reader that knows the kind of entity and the relation
    but not the entity. `name` is the full name in the question, where it stands in the passages
    too. `bridge` is the entity that a two-hop answer names first, `steps` all that it says before
    the value.
    """

    question: str
    answer: str
    passage: int | None
    task: str
    blind: float
    name: str | None = None
    bridge: str | None = None
    steps: str | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """A context with its conversation: (title, text) of each passage, then the turns.

    `before` is text of the user's first message in front of the passages.
    """

    passages: tuple[tuple[str | None, str], ...]
    turns: tuple[Turn, ...]
    system: str | None = None
    before: str = ""
