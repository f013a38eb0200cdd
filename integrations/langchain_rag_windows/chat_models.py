"""The chat model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput, ModelProfile
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableBinding, RunnableConfig
from langchain_core.tools import BaseTool
from pydantic import ConfigDict, field_validator

from langchain_rag_windows import structured
from langchain_rag_windows.answers import as_message, last_chunk
from langchain_rag_windows.calls import AnswersCalls, ModelCall
from langchain_rag_windows.errors import RequestError
from rag_windows import Chunk, Generation, Profile, WindowedLM
from rag_windows.errors import ToolsUnsupportedError
from rag_windows.integration import ModelSource, ToolFormat, position_limit, schemas_available


class BoundModel(RunnableBinding[LanguageModelInput, AIMessage]):
    """A chat model with keywords, which stay when tools or a schema are bound to it later.

    A plain binding binds those to the model behind it, without ``documents=`` and the rest.
    """

    @classmethod
    def lc_id(cls) -> list[str]:
        """LangChain's name for a binding, under which it is written down."""
        return [*cls.get_lc_namespace(), "RunnableBinding"]

    def bind_tools(
        self, tools: Sequence[Any], *, tool_choice: Any = None, **kwargs: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """See `ChatRagWindows.bind_tools`."""
        made = self.bound.bind_tools(tools, tool_choice=tool_choice, **self._kept(), **kwargs)  # type: ignore[attr-defined]  # a ChatRagWindows
        return self._configured(made)

    def with_structured_output(self, schema: Any = None, **kwargs: Any) -> Runnable[Any, Any]:
        """See `ChatRagWindows.with_structured_output`."""
        made = self.bound.with_structured_output(schema, **{**self._kept(), **kwargs})  # type: ignore[attr-defined]  # a ChatRagWindows
        return self._configured(made)

    def _kept(self) -> dict[str, Any]:
        # New tools take the place of those bound before, as with LangChain's own models.
        return {k: v for k, v in self.kwargs.items() if k not in ("tools", "tool_choice")}

    def _configured(self, made: Runnable[Any, Any]) -> Runnable[Any, Any]:
        return made.with_config(self.config) if self.config else made


class ChatRagWindows(AnswersCalls, BaseChatModel):  # type: ignore[misc]  # the first argument of _stream has another name in each
    """A local chat model that reads each document in a window of its own.

    Documents come with ``documents=`` (of ``invoke``, ``stream``, ``bind``, ...), as text-plain
    blocks of a human message, as the artifact of tool messages, or from a stock chain that formats
    them with `WindowDocumentPrompt`; see `conversation`. Without documents it is an ordinary chat
    model. Further keywords of a call are ``method``, ``temperature``, ``top_p``, ``max_tokens``,
    ``seed``, ``timeout``, ``citations``, and any option of ``transformers`` generate.

    The weights are loaded on first use, and shared by all models with equal arguments. Calls that
    are made at once, by tasks or by threads, share forward passes (``batch_rows``). Async calls
    leave the event loop free; cancelling one stops it within a token.

    Example:
        llm = ChatRagWindows(model="tiny-reader")
        answer = llm.invoke("Where was Alra Ashden born?", documents=retriever.invoke(...))
        answer.content; answer.response_metadata["citations"]; answer.content_blocks
    """

    model_config = ConfigDict(extra="forbid")

    @property
    def _llm_type(self) -> str:
        return "rag-windows-chat"

    @field_validator("profile", mode="before")
    @classmethod
    def _check_profile(cls, profile: Any) -> Any:
        if isinstance(profile, str | Path | Profile):
            raise RequestError(
                "profile= is LangChain's description of what a model can do; give the profile of "
                "a calibration as calibration=."
            )
        return profile

    def _resolve_model_profile(self) -> ModelProfile | None:
        # Only files that are here already: nothing is downloaded before the first call.
        if self.lm is not None:
            return model_profile(self.lm.model.config, self.lm.tokenizer, self.template_kwargs)
        here: dict[str, Any] = {"local_files_only": True}
        source = ModelSource(
            str(self.model),
            tokenizer=self.tokenizer,
            tokenizer_kwargs=here if isinstance(self.tokenizer, str | Path) else None,
            revision=self.revision,
            cache_dir=self.model_kwargs.get("cache_dir"),
            **here,
        )
        return model_profile(source.config(), source.read_tokenizer(), self.template_kwargs)

    def windowed_lm(self) -> WindowedLM:
        """See `EngineOptions.windowed_lm`; fills ``profile`` if that waited for the files."""
        lm = super().windowed_lm()
        if self.profile is None:
            self.profile = model_profile(lm.model.config, lm.tokenizer, lm.template_kwargs)
        return lm

    def bind(self, **kwargs: Any) -> BoundModel:  # type: ignore[override]  # theirs is private
        """See `Runnable.bind`; tools or a schema that are bound later leave these keywords."""
        return BoundModel(bound=self, kwargs=kwargs, config={})

    def with_config(
        self, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """See `Runnable.with_config`."""
        merged: Any = {**(config or {}), **kwargs}
        return BoundModel(bound=self, kwargs={}, config=merged)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """A model that may call these tools; needs a chat template that knows tools.

        Raises:
            NotImplementedError: the template knows none.
        """
        return structured.bind_tools(self, tools, tool_choice=tool_choice, **kwargs)

    def with_structured_output(
        self, schema: dict[str, Any] | type, *, include_raw: bool = False, **kwargs: Any
    ) -> Runnable[LanguageModelInput, Any]:
        """A model that answers in the form of a schema.

        Raises:
            NotImplementedError: the chat template knows no tools, which it is done with.
        """
        return structured.with_structured_output(self, schema, include_raw=include_raw, **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        made: ChatResult = self._answered([messages], stop, kwargs)[0]
        return made

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        made: ChatResult = await self._answered_async(messages, stop, kwargs)
        return made

    def _messages(self, asked: Any) -> Sequence[BaseMessage]:
        messages: Sequence[BaseMessage] = asked
        return messages

    def _read(self, call: ModelCall, generation: Generation) -> ChatResult:
        made = (as_message(call, one) for one in (generation, *generation.alternatives))
        return ChatResult(generations=[ChatGeneration(message=message) for message in made])

    def _read_chunk(self, call: ModelCall, chunk: Chunk) -> Iterator[ChatGenerationChunk]:
        text = call.reader.feed(chunk.text)
        if text:
            yield ChatGenerationChunk(message=AIMessageChunk(content=text))
        if chunk.generation is not None:
            yield ChatGenerationChunk(message=last_chunk(call, chunk.generation))


def model_profile(config: Any, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> ModelProfile:
    """What a model can do, in LangChain's words.

    ``max_input_tokens`` are the model's positions: one prompt has to fit them. Documents do not
    count together, each stands in a window of its own.
    """
    try:
        tools: ToolFormat | None = ToolFormat.of(tokenizer, template_kwargs)
    except ToolsUnsupportedError:
        tools = None
    limit = position_limit(config)
    return ModelProfile(
        **({} if limit is None else {"max_input_tokens": limit}),
        text_inputs=True,
        image_inputs=False,
        pdf_inputs=False,
        audio_inputs=False,
        video_inputs=False,
        text_outputs=True,
        image_outputs=False,
        audio_outputs=False,
        video_outputs=False,
        reasoning_output="<think>" in str(getattr(tokenizer, "chat_template", "")),
        tool_calling=tools is not None,
        tool_choice=tools is not None and tools.opening is not None,
        tool_call_streaming=False,
        # With tools an agent would bind both, and an answer held to a schema can't call a tool.
        structured_output=tools is None and schemas_available(),
        attachment=False,
        temperature=True,
    )
