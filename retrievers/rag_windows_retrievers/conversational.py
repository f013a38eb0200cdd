"""A conversation as one query."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from rag_windows.errors import InputError
from rag_windows_retrievers.retriever import DEFAULT_K, Retriever, ScoredPassage

Message: TypeAlias = Mapping[str, Any]
Messages: TypeAlias = Sequence[Message]
Condense: TypeAlias = Callable[[Messages], str]
"""From messages of roles "user" and "assistant", oldest first, the last one the question, to what
to look for."""

_BLANK = re.compile(r"\n\s*\n")
_log = logging.getLogger(__name__)

INSTRUCTION = (
    "Rewrite the last question of this conversation so that it can be understood without the "
    "conversation: put names in place of words that point back. Do not answer it. Write only the "
    "rewritten question."
)


class ConversationalRetriever:
    """Asks a retriever for what a conversation is about: "When was she born?" names nobody.

    Args:
        retriever: any.
        condense: makes a query of a conversation; `last_turns` and `rewritten_by` make such
            functions. None for ``last_turns()``.
    """

    def __init__(self, retriever: Retriever, condense: Condense | None = None) -> None:
        self.retriever = retriever
        self._condense = condense or last_turns()

    def retrieve(self, query: str | Messages, k: int = DEFAULT_K) -> list[ScoredPassage]:
        """Condense and retrieve; see `Retriever.retrieve`.

        Args:
            query: messages as for `WindowedLM.generate`; those of other roles than "user" and
                "assistant", and calls of tools, are left out. A string, and a question without a
                conversation before it, is asked as it is.
            k: how many passages at most, at least 1.

        Raises:
            InputError: there is no message, the last one is not the user's, or `k` is below 1.
        """
        return self.retriever.retrieve(self.query(query), k)

    def query(self, query: str | Messages) -> str:
        """What is looked for.

        Raises:
            InputError: there is no message, or the last one is not the user's.
        """
        if isinstance(query, str):
            return query
        said = [one for one in query if _is_said(one)]
        if not said or said[-1]["role"] != "user":
            raise InputError("The conversation must end with a message of the user.")
        return self._condense(said) if len(said) > 1 else said[-1]["content"]


def last_turns(turns: int | None = 3, *, weight: int = 3, answers: bool = False) -> Condense:
    """Condense to what was asked last, and the question again alone.

    The query is one paragraph with the questions of the last turns, and `weight` more with the
    question alone. BM25 so counts the question's words more often, and `DenseRetriever` asks with
    the mean of the paragraphs: a question that stands on its own is not drowned in the
    conversation, and one that points back is not lost without it. Answers repeat the passages they
    came from and draw the search back to these, so they are left out unless asked for.

    Args:
        turns: how many turns before the question, a turn being a question and its answers; None
            for all.
        weight: how often the question stands alone.
        answers: whether what the assistant said is looked for, too.

    Raises:
        InputError: `turns` or `weight` is below 0.
    """
    if (turns is not None and turns < 0) or weight < 0:
        raise InputError(f"turns and weight must be at least 0, not {turns} and {weight}.")

    def condense(messages: Messages) -> str:
        *before, question = messages
        asked = [i for i, one in enumerate(before) if one["role"] == "user"]
        if turns is not None and turns < len(asked):
            before = before[asked[-turns] :] if turns else []
        kept = [one["content"] for one in before if answers or one["role"] == "user"]
        texts = [_BLANK.sub("\n", text.strip()) for text in (*kept, question["content"])]
        return "\n\n".join(["\n".join(texts), *texts[-1:] * (weight if kept else 0)])

    return condense


def rewritten_by(ask: Callable[[str], str], *, otherwise: Condense | None = None) -> Condense:
    """Condense by a language model.

    Args:
        ask: from a prompt to the model's answer, such as
            ``lambda prompt: lm.generate(prompt, do_sample=False).text``.
        otherwise: condenses where the model answers with nothing, which is logged as a warning;
            None for ``last_turns()``.
    """
    fallback = otherwise or last_turns()

    def condense(messages: Messages) -> str:
        told = "\n".join(f"{one['role'].capitalize()}: {one['content']}" for one in messages)
        # Models like to go on: the question is the first line that says something.
        lines = ask(f"{INSTRUCTION}\n\n{told}").strip().splitlines()
        if not lines:
            _log.warning("The model rewrote a question to nothing; its conversation is asked.")
            return fallback(messages)
        return lines[0].strip()

    return condense


def _is_said(message: Message) -> bool:
    """Whether the user or the assistant said this in words."""
    role = message.get("role") if isinstance(message, Mapping) else None
    text = isinstance(role, str) and isinstance(message.get("content"), str)
    if not isinstance(role, str) or (role == "user" and not text):
        raise InputError('A message needs a "role", and one of the user a "content" of text.')
    return text and role in ("user", "assistant")
