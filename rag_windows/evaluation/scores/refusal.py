"""Answers that say that there is no answer, as ChatRAG-Bench tells them."""

from __future__ import annotations

SORRY = "Sorry. I cannot find the answer based on the context."
"""What the benchmark expects where the passages hold no answer."""

_NEGATED = ("provide", "mention", "specify", "include", "contain", "indicate", "disclose")
_PHRASES = (
    *("cannot find", "can't find", "can not find", "could not find", "couldn't find"),
    *("cannot answer", "can't answer", "couldnot answer", "couldn't answer"),
    *("cannot be found", "cannot be determined", "cannot provide", "not able to", "unable to"),
    *(f"does not {verb}" for verb in _NEGATED),
    *(f"doesn't {verb}" for verb in _NEGATED),
    *("not mentioned", "not explicitly mentioned", "not explicitly explain", "not provided"),
    *("do not have", "don't have", "don't know", "no information", "there is no"),
)


def settled(answer: str) -> str:
    """`SORRY` if the answer holds a phrase of refusal, otherwise the answer in lower case.

    The benchmark's scorer does this to every answer on QuAC and DoQA before it scores.
    """
    lowered = answer.lower()
    return SORRY if any(phrase in lowered for phrase in _PHRASES) else lowered


def refuses(answer: str) -> bool:
    """Whether the answer counts as refusal: it is sorry and cannot find the answer."""
    lowered = answer.lower()
    return "sorry" in lowered and "cannot find the answer" in lowered
