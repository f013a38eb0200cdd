"""What an adapter for another framework needs, beside the names of `rag_windows` and its errors.

An adapter imports `rag_windows`, `rag_windows.errors` and this module, and nothing else of the
package; what ``__all__`` lists here stays as stable as the names of `rag_windows` itself. The
adapters for LangChain, LlamaIndex and lm-evaluation-harness are built on it. By subject:

- the model: `ModelSource` loads it once, when it is needed, and tells what its files say before;
  `load_shared` gives equal arguments the same weights; `position_limit`;
- the calls: `Calls` answers them together, from threads and event loops, each with a `Call`;
- options: `method_of`, `guard_of`, `profile_of`, `sampling_options`, `describe`;
- tools and forms: `AnswerReader`, `ToolAnswer`, `ToolCall`, `ToolFormat`, `check_schema`,
  `schemas_available`;
- citations: `carried`;
- prompts that hold documents as text: `warn_without_windows`;
- token ids, for those who cut prompts themselves: `ChatTemplate` writes a `Conversation` in
  `Piece`s, a `Boundary` turns these into ids, `likelihoods` scores ids behind what
  `WindowedLM.encode_ids` gave; `leading_ids`, `window_starts`, `check_room`;
- for the terminal: `one_line`.
"""

from __future__ import annotations

import json
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from rag_windows import guard
from rag_windows.attention.layers import position_limit
from rag_windows.calibration.profile import Profile
from rag_windows.errors import InputError, MethodError
from rag_windows.guard import FallbackOption, Guard
from rag_windows.integration.calls import Call, Calls
from rag_windows.integration.continuations import Likelihood, likelihoods
from rag_windows.integration.shared_models import ModelSource, folder_state, load_shared
from rag_windows.methods import Method, describe, from_description, linked, window_starts
from rag_windows.methods.registry import known_parameters, with_known
from rag_windows.methods.steps import Choose, LinkTokens
from rag_windows.passage import passage_of
from rag_windows.prefill import EncodedContext, OnEncoded
from rag_windows.prompt.answer_form import available as schemas_available
from rag_windows.prompt.answer_form import check_schema
from rag_windows.prompt.builder import Header
from rag_windows.prompt.conversation import Conversation
from rag_windows.prompt.template import BaseLayout, ChatTemplate
from rag_windows.prompt.tokenizing import Boundary, Piece
from rag_windows.prompt.tool_answers import AnswerReader, ToolAnswer
from rag_windows.prompt.tool_calls import ToolCall, ToolFormat
from rag_windows.prompt.visible_text import one_line
from rag_windows.request import PassageLike
from rag_windows.results import carried
from rag_windows.sampling import MODEL_INPUTS, sampling_options
from rag_windows.steps.refinement import check_room

__all__ = [
    "AnswerReader",
    "Boundary",
    "Call",
    "Calls",
    "ChatTemplate",
    "Choose",
    "Conversation",
    "EncodedContext",
    "FallbackOption",
    "Header",
    "Likelihood",
    "LinkTokens",
    "MODEL_INPUTS",
    "ModelSource",
    "OnEncoded",
    "PassageLike",
    "Piece",
    "ToolAnswer",
    "ToolCall",
    "ToolFormat",
    "carried",
    "check_room",
    "check_schema",
    "describe",
    "folder_state",
    "guard_of",
    "leading_ids",
    "likelihoods",
    "load_shared",
    "method_of",
    "one_line",
    "passage_of",
    "position_limit",
    "profile_of",
    "sampling_options",
    "schemas_available",
    "warn_without_windows",
    "window_starts",
]

LONG_PROMPT_TOKENS = 512
"""A prompt of so many tokens and no passages probably holds documents that were glued together."""


def method_of(
    value: str | Method | Mapping[str, Any],
    numbers: Mapping[str, Any] | None = None,
    *,
    link_tokens: LinkTokens | None = None,
    link_choose: Choose = "first",
) -> Method:
    """A method out of what users give.

    Args:
        value: its name, itself, or what `describe` made of it.
        numbers: parameters to set, each in the method or in the one that it stands on.
        link_tokens: makes it a `rag_windows.Linked`; None leaves it as it is.
        link_choose: of `rag_windows.Linked`.

    Raises:
        MethodError: an unknown name, or numbers that it does not have or that are out of range.
    """
    method, numbers = from_description(value), numbers or {}
    known = known_parameters(method)
    if unknown := sorted(set(numbers) - known):
        raise MethodError(
            f"{unknown} are no parameters of the method {method.name!r} "
            f"({', '.join(sorted(known)) or 'it has none'})."
        )
    try:
        return linked(with_known(method, numbers), link_tokens, link_choose)
    except TypeError as error:
        raise MethodError(f"{dict(numbers)!r} do not fit the method {method.name!r}.") from error


def guard_of(value: FallbackOption | Mapping[str, Any]) -> Guard | None:
    """The guard that ``fallback=`` asks for: "sequential", a `Guard`, or its fields.

    Raises:
        InputError: it is none of them.
    """
    if not isinstance(value, Mapping):
        return guard.guard_of(value)
    try:
        return Guard(**value)
    except TypeError as error:
        raise InputError(f"{dict(value)!r} are no numbers of a Guard: {error}.") from error


def profile_of(value: Profile | str | Path | Mapping[str, Any] | None) -> Profile | None:
    """A calibration profile out of its path, itself, or its JSON as a mapping.

    Raises:
        ProfileError: it can't be used.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        return Profile.from_json(json.dumps(value))
    return Profile.of(value)


def leading_ids(tokenizer: Any) -> tuple[int, ...]:
    """Ids that a tokenizer puts before a text by itself."""
    return tuple(BaseLayout(tokenizer).leading)


_warned = threading.Event()


def warn_without_windows(
    text: str, count: Callable[[str], int], instead: str, between: Collection[str]
) -> None:
    """Warn, once a process, of a long prompt without passages: it makes no windows.

    Args:
        text: of the prompt.
        count: how many tokens a text has; asked only where the prompt may be long.
        instead: the line to write, which hands over documents as passages.
        between: top-level packages whose frames stand between the user's line, which the warning
            names, and the caller. In a thread of a pool there is no line of the user's, and the
            outermost frame has to do.
    """
    if _warned.is_set() or len(text) < LONG_PROMPT_TOKENS:
        return
    tokens = count(text)
    if tokens < LONG_PROMPT_TOKENS:
        return
    _warned.set()
    inside = {"rag_windows", *between}
    level, frame = 2, sys._getframe(1)
    while (
        frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in inside
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(
        f"This prompt has {tokens} tokens and no passages, so nothing is read in windows or cached."
        f" If it holds retrieved documents, hand them over instead: {instead}",
        UserWarning,
        stacklevel=level,
    )
