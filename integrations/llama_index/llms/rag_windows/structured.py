"""Answers as an object of a pydantic class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from llama_index.core.bridge.pydantic import BaseModel, ValidationError
from llama_index.core.llms import ChatMessage
from llama_index.core.output_parsers import PydanticOutputParser

from rag_windows.errors import GenerationError

Model = TypeVar("Model", bound=BaseModel)

_SHOWN = 200


def asking_for(output_cls: type[BaseModel], messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages with LlamaIndex's own request for JSON of a class.

    It goes into the system message if there is one, so that the question stays as it is.
    """
    copies = [message.model_copy(deep=True) for message in messages]
    return PydanticOutputParser(output_cls=output_cls).format_messages(copies)


def parsed(output_cls: type[Model], text: str) -> Model:
    """The object that an answer spells.

    Raises:
        GenerationError: it spells none. Not a ``ValueError``: LlamaIndex's refine step would turn
            that into an empty response.
    """
    try:
        found = PydanticOutputParser(output_cls=output_cls).parse(text)
    except (ValidationError, ValueError, TypeError) as error:
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        raise GenerationError(
            f"The model did not answer with JSON of {output_cls.__name__}: {shown!r}. Use a model "
            "that was trained for structured answers, raise max_new_tokens if the answer was cut "
            "off, or ask for text (without output_cls)."
        ) from error
    if not isinstance(found, output_cls):
        raise GenerationError(
            f"The answer was read as {type(found).__name__}, not {output_cls.__name__}."
        )
    return found
