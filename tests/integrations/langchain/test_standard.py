"""LangChain's own test suites for chat models.

What is switched off, by which property, and why:

has_tool_calling: test_bind_tool_pydantic, test_bind_runnables_as_tools, test_tool_*,
    test_structured_few_shot_examples, test_agent_loop, test_unicode_tool_call_integration.
    The embedded reader's chat template has no tools; test_tools.py has models whose template does.
has_structured_output: test_with_structured_output, test_structured_output*.
    It is done with tools.
supports_json_mode: test_json_mode.
    The embedded reader can't write JSON.
supports_image_*, supports_pdf_*, supports_audio_inputs, supports_anthropic_inputs: test_image_*,
    test_pdf_*, test_audio_inputs, test_anthropic_inputs.
    These are text models; such a block is refused with an error.
model_override_value: test_*_with_model_override.
    A model is chosen when it is made; in a call, another one is an error.
enable_vcr_tests: test_stream_time.
    It replays recorded web requests, and there are none.
init_from_env_params: test_init_from_env.
    Nothing is read from the environment.
is_lc_serializable (of the model): test_serdes.
    LangChain's default: weights and engines are not rebuilt from JSON.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, cast

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_rag_windows import ChatRagWindows


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
        documents = ["Alra Ashden was born in Arava."]
        model.invoke("Where was Alra Ashden born?", documents=documents)
        if not stream:
            return model.invoke("Where was Alra Ashden born?", documents=documents)
        chunks = model.stream("Where was Alra Ashden born?", documents=documents)
        return cast(AIMessage, functools.reduce(operator.add, chunks))
