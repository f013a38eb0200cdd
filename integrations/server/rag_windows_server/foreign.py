"""A retriever of any framework, named on the command line, with the interface of our own."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from rag_windows import InputError, Passage
from rag_windows.errors import RagWindowsError, RetrievalError
from rag_windows.integration import passage_of

FORMS = (
    "a retriever of rag_windows_retrievers, a retriever or vector store of LangChain, a retriever "
    "or index of LlamaIndex, or a function that makes one"
)


class ForeignRetriever:
    """Retrieves with any object of `FORMS`; several threads may use it at once."""

    def __init__(self, asked: Any, name: str) -> None:
        self._asked, self._name = asked, name
        self._ask = _way(asked)
        if self._ask is None:
            raise InputError(
                f"--retriever {name} names {type(asked).__name__}, which can't be asked. Name "
                f"{FORMS}."
            )

    def retrieve(self, query: str, k: int) -> Sequence[Passage]:
        """The `k` best passages, as the framework ranks them.

        Raises:
            RetrievalError: the retriever failed; the message has its own first line.
        """
        if self._ask is None or not query.strip():
            return []
        try:
            found = [passage_of(one) for one in self._ask(self._asked, query, k)]
        except RagWindowsError:
            raise
        except Exception as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise RetrievalError(
                f"The retriever {self._name} failed ({type(error).__name__}: {first}). See its "
                "own log."
            ) from error
        return found[:k]


def _way(asked: Any) -> Any:
    """How an object is asked; None if it is none of `FORMS`."""
    if callable(getattr(asked, "similarity_search", None)):
        return lambda store, query, k: store.similarity_search(query, k=k)
    if callable(getattr(asked, "as_retriever", None)):
        return lambda index, query, k: index.as_retriever(similarity_top_k=k).retrieve(query)
    if callable(getattr(asked, "get_relevant_documents", None)) or (
        callable(getattr(asked, "invoke", None)) and not hasattr(asked, "retrieve")
    ):
        return lambda retriever, query, _: retriever.invoke(query)
    if hasattr(asked, "retrieve") and hasattr(asked, "aretrieve"):
        return lambda retriever, query, _: retriever.retrieve(query)
    if callable(getattr(asked, "retrieve", None)):
        return lambda retriever, query, k: retriever.retrieve(query, k)
    return None


def named_retriever(name: str) -> ForeignRetriever:
    """The retriever that ``module:name`` names; the module is looked for here first.

    Raises:
        InputError: there is no such module or name, or what it names can't be asked.
    """
    module, colon, path = name.partition(":")
    if not (colon and module and path):
        raise InputError(
            f"--retriever {name!r} must be MODULE:NAME, such as search:retriever for the name "
            "retriever in search.py."
        )
    # As uvicorn and gunicorn do it: the command's own folder comes first.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"--retriever {name} can't be found ({error}). Check the module, the name, and that "
            "the command runs in the module's folder."
        ) from error
    if _way(found) is None and callable(found):
        found = found()
    return ForeignRetriever(found, name)
