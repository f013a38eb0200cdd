"""The twin of LangChain's ``create_stuff_documents_chain`` that keeps documents apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from langchain_core.documents import Document
from langchain_core.language_models import BaseLanguageModel, LanguageModelLike
from langchain_core.output_parsers import BaseOutputParser, StrOutputParser
from langchain_core.prompts import BasePromptTemplate, format_document
from langchain_core.runnables import (
    Runnable,
    RunnableLambda,
    RunnablePassthrough,
    RunnableSequence,
    RunnableWithFallbacks,
)
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.configurable import DynamicRunnable

from langchain_rag_windows.errors import RequestError, in_langchain_terms
from langchain_rag_windows.models import ChatRagWindows, RagWindows, StructuredModel
from rag_windows import Passage
from rag_windows.integration import passage_list


def create_windows_chain(
    llm: LanguageModelLike,
    prompt: BasePromptTemplate[Any],
    *,
    output_parser: BaseOutputParser[Any] | None = None,
    document_prompt: BasePromptTemplate[Any] | None = None,
    document_separator: str = "\n\n",
    document_variable_name: str = "context",
) -> Runnable[dict[str, Any], Any]:
    """A chain that gives a list of documents to the model, each in a window of its own.

    It takes the arguments of ``create_stuff_documents_chain`` and stands in its place, in
    ``create_retrieval_chain`` too. Where the prompt has the documents' variable, nothing is
    written: the model reads the documents before the first user message.

    Args:
        llm: `ChatRagWindows` or `RagWindows`, also bound, configured, with fallbacks, or with
            structured output.
        prompt: with the documents' variable among its input variables.
        output_parser: `StrOutputParser` unless given; none for a model with structured output.
        document_prompt: makes the whole text of a window, from ``page_content`` and metadata; no
            title is put above it then. Without, a window is the title, if any, and the content.
        document_separator: taken for the signature's sake; windows need no separator.
        document_variable_name: key of the documents in the input, and variable of the prompt.

    Returns:
        A runnable from a mapping with the list of documents and the prompt's other variables.

    Raises:
        RequestError: the prompt lacks the variable, or a model would not get the documents.
    """
    if document_variable_name not in prompt.input_variables:
        raise RequestError(
            f"The prompt must have {document_variable_name!r} among its variables; it has "
            f"{prompt.input_variables}. Put it in, or name yours with document_variable_name."
        )
    for asked in _asked(llm):
        if isinstance(asked, BaseLanguageModel):
            if not isinstance(asked, ChatRagWindows | RagWindows):
                raise RequestError(
                    f"{type(asked).__name__} would not get the documents. Use ChatRagWindows or "
                    "RagWindows, or create_stuff_documents_chain for this model."
                )
        elif not isinstance(asked, RunnableLambda):
            raise RequestError(
                f"A {type(asked).__name__} hands no documents on to the model in it. Give the "
                "model itself, also bound, configured or with fallbacks, or what its "
                "with_structured_output returns."
            )
    model: Any = llm
    while isinstance(model, RunnableBindingBase):
        model = model.bound
    structured = isinstance(model, StructuredModel)
    own: Runnable[Any, Any] = RunnablePassthrough() if structured else StrOutputParser()
    parser = output_parser or own

    def ask(inputs: dict[str, Any]) -> Runnable[dict[str, Any], Any]:
        with in_langchain_terms():
            passages = passage_list(document_variable_name, inputs[document_variable_name])
        if document_prompt is not None:
            passages = [_shaped(passage, document_prompt) for passage in passages]
        emptied = RunnablePassthrough.assign(**{document_variable_name: lambda _: ""})
        return emptied | prompt | llm.bind(documents=passages) | parser

    return RunnableLambda(ask).with_config(run_name="windows_chain")


def _shaped(passage: Passage, document_prompt: BasePromptTemplate[Any]) -> Passage:
    document = Document(page_content=passage.text, metadata=dict(passage.metadata))
    text = format_document(document, document_prompt)
    return Passage(text, id=passage.id, score=passage.score, metadata=passage.metadata)


def _asked(llm: object) -> Iterator[object]:
    """What gets the keywords of a call, behind bindings, fallbacks and sequences."""
    if isinstance(llm, RunnableBindingBase):
        yield from _asked(llm.bound)
    elif isinstance(llm, DynamicRunnable):
        yield from _asked(llm.default)
    elif isinstance(llm, RunnableWithFallbacks):
        for runnable in llm.runnables:
            yield from _asked(runnable)
    elif isinstance(llm, RunnableSequence):
        yield from _asked(llm.first)
    else:
        yield llm
