"""Retrieval for agents: documents reach the model as windows, never as text of the prompt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, NotRequired

from langchain.agents import AgentState
from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse, Runtime
from langchain.agents.middleware.types import OmitFromInput
from langchain_core.documents import Document
from langchain_core.messages import AnyMessage, HumanMessage
from langchain_core.runnables import Runnable

from langchain_rag_windows.errors import RequestError
from langchain_rag_windows.models import ChatRagWindows


class RetrievedState(AgentState[Any]):
    """An agent's state with the documents of the current turn, which come back with its result."""

    retrieved_documents: NotRequired[Annotated[list[Document], OmitFromInput]]


class RagWindowsMiddleware(AgentMiddleware[RetrievedState, Any, Any]):
    """Retrieves for the last user turn, once, and gives the documents to every call of the model.

    Each document is a window. Its text is in no message, so histories stay short and a document
    cannot be mistaken for the user. The agent's result has the documents in
    ``retrieved_documents``, each at its index in the answer's citations.

        agent = create_agent(ChatRagWindows(...), middleware=[RagWindowsMiddleware(retriever)])

    A retriever tool whose artifact is a list of documents is another way to give them; with both
    in one call the model reports an error.

    Args:
        retriever: from a question to documents: any LangChain retriever.
    """

    state_schema = RetrievedState
    tools = ()

    def __init__(self, retriever: Runnable[str, list[Document]]) -> None:
        self._retriever = retriever

    def before_agent(self, state: RetrievedState, runtime: Runtime[Any]) -> dict[str, Any] | None:
        """Retrieve for the last user turn."""
        question = last_question(state["messages"])
        found = self._retriever.invoke(question) if question else []
        return {"retrieved_documents": list(found)}

    async def abefore_agent(
        self, state: RetrievedState, runtime: Runtime[Any]
    ) -> dict[str, Any] | None:
        """Like `before_agent`."""
        question = last_question(state["messages"])
        found = await self._retriever.ainvoke(question) if question else []
        return {"retrieved_documents": list(found)}

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Give the documents to the model."""
        return handler(_with_documents(request))

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> ModelResponse[Any]:
        """Like `wrap_model_call`."""
        return await handler(_with_documents(request))


def last_question(messages: Sequence[AnyMessage]) -> str:
    """The text of the last message of the user; empty if there is none."""
    asked = [message for message in messages if isinstance(message, HumanMessage)]
    return str(asked[-1].text).strip() if asked else ""


def _with_documents(request: ModelRequest[Any]) -> ModelRequest[Any]:
    if not isinstance(request.model, ChatRagWindows):
        raise RequestError(
            f"RagWindowsMiddleware needs a ChatRagWindows, because {type(request.model).__name__} "
            "would not get the documents. Give the agent a ChatRagWindows as its model."
        )
    documents = request.state.get("retrieved_documents") or []
    if "documents" in request.model_settings:
        raise RequestError(
            "Documents for this call are in the model's settings already. Leave them out there, "
            "or leave the middleware out."
        )
    return request.override(model_settings={**request.model_settings, "documents": documents})
