"""How ChatRAG-Bench words a question (Liu et al., 2024, arXiv:2401.10225, and its scripts)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from rag_windows.errors import InputError
from rag_windows.passage import Passage

Style = Literal["chatrag", "plain"]

INSTRUCTION = (
    "This is a chat between a user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions based on the context. The "
    "assistant should also indicate when the answer cannot be found in the context."
)
MAX_NEW_TOKENS = 64
"""The benchmark's limit for an answer."""

LAST_MESSAGES = 7
"""Earlier messages are left out."""

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Wording:
    """What is put before one of the user's messages.

    Attributes:
        text: the words, with a space behind them.
        first: before the first message of the user that is left; else before the question.
    """

    text: str
    first: bool = False


_LONG = Wording("Please give a full and complete answer for the question. ", first=True)

WORDINGS: Mapping[str, Wording] = {
    **dict.fromkeys(("doc2dial", "quac", "qrecc", "inscit"), _LONG),
    "topiocqa": Wording(
        "Answer the following question with a short span, or a full and complete answer. "
    ),
    "coqa": Wording(
        "Answer the following question with a short span. "
        "The answer needs to be just in a few words. "
    ),
    **dict.fromkeys(("doqa_cooking", "doqa_travel", "doqa_movies"), _LONG),
    "sqa": Wording("Answer the following question with one or a list of items. "),
    **dict.fromkeys(("hybridial", "convfinqa"), _LONG),
}
"""Dataset -> its wording. Ten datasets, one of them in three domains."""


def check_style(style: str) -> None:
    """Refuse an unknown style.

    Raises:
        InputError: it is neither "chatrag" nor "plain".
    """
    if style not in get_args(Style):
        raise InputError(f"Unknown style {style!r}; use one of {', '.join(get_args(Style))}.")


def worded(messages: Sequence[Message], dataset: str) -> tuple[Message, ...]:
    """The messages that the benchmark shows to a model, the dataset's wording among them.

    The roles' marks ("User: ") are the model's own template's. Messages of one role in a row become
    one, with a blank line between, since most templates take roles only in turn.

    Args:
        messages: of a conversation; the last one is the user's.
        dataset: a name in `WORDINGS`.
    """
    last = [dict(one) for one in messages[-LAST_MESSAGES:]]
    wording = WORDINGS[dataset]
    asked = next(one for one in (last if wording.first else last[::-1]) if one["role"] == "user")
    asked["content"] = wording.text + asked["content"]
    return united(last)


def united(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with those of one role in a row as one, a blank line between them."""
    made: list[Message] = []
    for one in messages:
        if made and made[-1]["role"] == one["role"]:
            made[-1]["content"] += f"\n\n{one['content']}"
        else:
            made.append(dict(one))
    return tuple(made)


def titled(passage: Passage) -> Passage:
    """The passage with its title in its text, as the benchmark's scripts show it to a model."""
    if passage.title is None:
        return passage
    return Passage(
        f"title: {passage.title}, source: {passage.text}",
        id=passage.id,
        score=passage.score,
        metadata={**passage.metadata, "title": passage.title},
    )
