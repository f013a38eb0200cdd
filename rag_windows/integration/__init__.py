"""What an adapter for another framework needs, beside the names of `rag_windows` and its errors.

An adapter imports `rag_windows`, `rag_windows.errors` and this module, and nothing else of the
package; what ``__all__`` lists here stays as stable as the names of `rag_windows` itself. The
adapters for LangChain, LlamaIndex and lm-evaluation-harness are built on it. By subject:

- the model: `ModelSource` loads it once, when it is needed, and tells what its files say before;
  `load_shared` gives equal arguments the same weights; `position_limit`;
- the calls: `Calls` answers them together, from threads and event loops, each with a `Call`;
- a framework's model: `ModelOptions` are arguments that all of them take, `ModelCall` one of its
  calls; `passage_list` and `one_way` read its documents, `answer_record` tells of an answer;
- options: `method_of`, `guard_of`, `profile_of`, `sampling_options`, `describe`;
- tools and forms: `AnswerReader`, `ToolAnswer`, `ToolCall`, `ToolFormat`, `check_schema`,
  `schemas_available`;
- citations: `carried`;
- prompts that hold documents as text: `warn_without_windows`;
- token ids, for those who cut prompts themselves: `ChatTemplate` writes a `Conversation` in
  `Piece`s, a `Boundary` turns these into ids, `likelihoods` scores ids behind what
  `WindowedLM.encode_ids` gave; `leading_ids`;
- numbers of users: `whole_number`;
- for the terminal: `one_line`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rag_windows.attention.layers import position_limit
from rag_windows.guard import FallbackOption
from rag_windows.icl.scoring import Likelihood
from rag_windows.icl.scoring import likelihoods as likelihoods_of
from rag_windows.integration.calls import Call, Calls
from rag_windows.integration.frameworks import (
    ModelCall,
    ModelOptions,
    answer_record,
    call_entry,
    guard_of,
    method_of,
    one_way,
    passage_list,
    profile_of,
    warn_without_windows,
)
from rag_windows.integration.shared_models import ModelSource, folder_state, load_shared
from rag_windows.methods import describe
from rag_windows.methods.linked import Choose, LinkTokens
from rag_windows.model import WindowedLM
from rag_windows.passage import passage_of
from rag_windows.prefill import EncodedContext, OnEncoded
from rag_windows.prompt.answer_form import available as schemas_available
from rag_windows.prompt.answer_form import check_schema
from rag_windows.prompt.builder import Header
from rag_windows.prompt.conversation import Conversation, ToolCall
from rag_windows.prompt.template import BaseLayout, ChatTemplate
from rag_windows.prompt.tokenizing import Boundary, Piece
from rag_windows.prompt.tools import AnswerReader, ToolAnswer, ToolFormat
from rag_windows.prompt.visible_text import one_line
from rag_windows.request import PassageLike
from rag_windows.results import carried
from rag_windows.sampling import MODEL_INPUTS, sampling_options, whole_number

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
    "ModelCall",
    "ModelOptions",
    "ModelSource",
    "OnEncoded",
    "PassageLike",
    "Piece",
    "ToolAnswer",
    "ToolCall",
    "ToolFormat",
    "answer_record",
    "call_entry",
    "carried",
    "check_schema",
    "describe",
    "folder_state",
    "guard_of",
    "leading_ids",
    "likelihoods",
    "load_shared",
    "method_of",
    "one_line",
    "one_way",
    "passage_list",
    "passage_of",
    "position_limit",
    "profile_of",
    "sampling_options",
    "schemas_available",
    "warn_without_windows",
    "whole_number",
]


def leading_ids(tokenizer: Any) -> tuple[int, ...]:
    """Ids that a tokenizer puts before a text by itself."""
    return tuple(BaseLayout(tokenizer).leading)


def likelihoods(
    lm: WindowedLM,
    context: EncodedContext,
    asked: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
) -> list[Likelihood]:
    """How likely continuations are behind questions, many of both at once.

    Args:
        lm: the model.
        context: what all questions read, from `WindowedLM.encode_ids`.
        asked: ids of a question and of its continuation, at least one each.

    Returns:
        One for each, in order.
    """
    return likelihoods_of(lm.engine.decoder, context, asked)
