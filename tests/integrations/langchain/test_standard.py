"""LangChain's own test suites for chat models.

Off are tools and structured output (the embedded reader's template has no tools; test_tools.py has
models whose template does), JSON (it can't write it), other media, another model in a call (an
error), recorded web requests, the environment (nothing is read), and serialization.
"""

from __future__ import annotations

from typing import Any, cast

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_rag_windows import ChatRagWindows
from tests.integrations.langchain.asking import WAYS


class _Reader:
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatRagWindows

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # The suites chat without documents, which this reader was never taught: it says nothing.
        return {"model": "tiny-reader", "generate_kwargs": {"min_new_tokens": 4}}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False


class TestUnit(_Reader, ChatModelUnitTests):
    """A model that is never loaded."""


class TestIntegration(_Reader, ChatModelIntegrationTests):
    """The embedded reader, asked."""

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = self.chat_model_class(**self.chat_model_params)
        question, documents = "Where was Alra Ashden born?", ["Alra Ashden was born in Arava."]
        model.invoke(question, documents=documents)
        made = WAYS["stream" if stream else "invoke"](model, question, documents=documents)
        return cast(AIMessage, made)
