"""The LLM: LlamaIndex's whole interface over one windowed model."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import torch
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr, field_serializer
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW, DEFAULT_NUM_OUTPUTS
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import LLM, ToolSelection
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.tools.types import BaseTool
from llama_index.core.types import PydanticProgramMode
from pydantic_core import to_jsonable_python
from transformers.generation.stopping_criteria import EosTokenCriteria

from llama_index.llms.rag_windows.messages import (
    BROKEN,
    chat_pieces,
    chat_response,
    completion_pieces,
    completion_response,
    fitting,
    given_passages,
    read_messages,
    surfacing,
)
from llama_index.llms.rag_windows.templates import Parts, WindowedPrompt, WindowTemplate
from rag_windows import Method, Profile, WindowedLM
from rag_windows.errors import GenerationError, InputError
from rag_windows.integration import (
    AnswerReader,
    Calls,
    ModelCall,
    ModelOptions,
    ModelSource,
    describe,
    guard_of,
    method_of,
    position_limit,
    profile_of,
    sampling_options,
    unalias,
    warn_without_windows,
)

MEMORY_SPARES = 256
"""Tokens of ``context_window`` that LlamaIndex's chat engines leave to the answer."""

_SHOWN_BY_TEMPLATE = ("messages_to_prompt", "completion_to_prompt", "query_wrapper_prompt")
"""Arguments of HuggingFaceLLM that write a prompt by hand."""

_OF_LOADING = (
    *("tokenizer_kwargs", "model_kwargs", "device_map"),
    *("header", "max_window_tokens", "template_kwargs", "profile"),
)
"""Arguments that a model which is loaded already has behind it."""

_SECRETS = ("token", "use_auth_token")
"""Options that are not serialized."""

_INSTEAD = (
    "index.as_query_engine(llm=llm, response_synthesizer=WindowSynthesizer(llm)), or "
    "llm.chat(messages, nodes=nodes)."
)


class RagWindowsLLM(FunctionCallingLLM, ModelOptions):
    """A local Hugging Face model that reads each passage in a window of its own.

    Passages come with a call, one of these ways: ``nodes=`` (LlamaIndex nodes), ``passages=``
    (`Passage`, strings or mappings), `CitableBlock` in a message, or by `WindowPromptHelper` from
    LlamaIndex's own synthesizers and engines. Without any it is an ordinary chat model. Calls that
    are made at once, by tasks or by threads, share forward passes. Options of a call (``method``,
    ``temperature``, ``top_p``, ``max_tokens``, ``stop``, ``seed``, ``on_encoded``, ``json_schema``,
    ``grammar``, any option of transformers' ``generate``) override those of the constructor; an
    unknown name is an `InputError`. Cancelling a task, or closing a stream, stops the work within a
    token.

    Tools work with models whose chat template supports them (then
    ``metadata.is_function_calling_model`` is true): in ``chat_with_tools``, ``predict_and_call``
    and their asynchronous and streaming forms, `FunctionAgent` and `AgentWorkflow`. ``chat`` takes
    ``tools``, ``tool_choice`` and ``parallel_tool_calls``. With the extra ``structured``, a forced
    call always fits its tool's schema.

    A template variable that holds `Parts` becomes windows. A structured answer is one forced tool
    call if the chat template allows forced calls, and JSON in the text otherwise and in streams;
    ``pydantic_program_mode`` overrides this.

    A chat answer holds a `CitationBlock` for each passage that carried it, the strongest first,
    with its index in ``additional_location_info["passage"]``, and a `ToolCallBlock` for each tool
    call. ``raw`` of an answer, and of a stream's last piece, is JSON, see `messages.as_raw`. The
    weights are loaded at the first call, and shared by all LLMs with equal arguments. Errors are
    `RagWindowsError`, which LlamaIndex's synthesizers do not swallow.

    Args:
        model_name: Hub name, local folder, or "tiny-reader" (shipped).
        model: a loaded transformers model, instead of ``model_name``; give its ``tokenizer`` too.
        lm: a loaded `WindowedLM`, instead of both.
        tokenizer: a loaded tokenizer, instead of ``tokenizer_name``.
        arguments: the attributes below; those of `rag_windows.integration.ModelOptions`;
            ``max_tokens``, another name of ``max_new_tokens``; and those of LlamaIndex's `LLM`:
            ``system_prompt`` (the instruction, where a conversation brings none),
            callback_manager, output_parser, pydantic_program_mode, ...

    Attributes:
        model_name: as given, or the loaded model's.
        tokenizer_name: instead of the model's own tokenizer.
        tokenizer_kwargs: for loading the tokenizer.
        max_new_tokens: largest number of tokens to generate (256).
        context_window: what ``metadata`` says, by which LlamaIndex packs texts into one prompt and
            cuts conversations: by default what one prompt holds, in tokens as LlamaIndex counts
            them, see `metadata`. Windows are not bound by it.
        is_chat_model: False makes LlamaIndex choose its templates for text models; the tokenizer's
            chat template is used in any case, where it has one.
        stopping_ids: tokens that end an answer, in addition to the model's own.
        profile: what ``rag-windows compare`` found, or its path; it sets the method if ``method``
            does not.
        citations: whether to measure each passage's attention mass; "removal" also measures what
            the answer loses without each passage, see `rag_windows.WindowedLM.generate`.
        on_encoded: called with the number of windows encoded and the number of all windows.

    Raises:
        InputError: none or several models are given, or an argument that formats prompts.
        ValueError: an unknown argument; pydantic's `ValidationError` says which.
    """

    model_config = ConfigDict(extra="forbid")

    model_name: str
    tokenizer_name: str | None = None
    tokenizer_kwargs: dict[str, Any] = Field(default_factory=dict)
    max_new_tokens: int = Field(default=DEFAULT_NUM_OUTPUTS, gt=0)
    context_window: int | None = Field(default=None, gt=0)
    is_chat_model: bool = True
    stopping_ids: list[int] = Field(default_factory=list)
    profile: Any = None
    citations: bool | str = True
    on_encoded: Any = Field(default=None, exclude=True)

    _source: ModelSource = PrivateAttr()
    _calls: Calls = PrivateAttr()

    def __init__(
        self,
        model_name: str | Path | None = None,
        *,
        model: Any = None,
        lm: WindowedLM | None = None,
        tokenizer: Any = None,
        **arguments: Any,
    ) -> None:
        for name in _SHOWN_BY_TEMPLATE:
            if arguments.pop(name, None) is not None:
                raise InputError(
                    f"{name} can't be used, because the tokenizer's own chat template writes the "
                    "prompt, and text can't spell its control tokens. Leave it out, and put an "
                    "instruction into system_prompt."
                )
        fields = _given(arguments)
        fields["generate_kwargs"] = _given(fields.get("generate_kwargs", {}))
        for name, read in (("method", method_of), ("profile", profile_of), ("fallback", guard_of)):
            if name in fields:
                fields[name] = read(fields[name])
        given_name = tokenizer if tokenizer is not None else fields.get("tokenizer_name")
        source = _source(model_name, model, lm, given_name, fields)
        super().__init__(model_name=source.name, **fields)
        self._source, self._calls = source, Calls(self.batch_rows, self.batch_bytes)

    @classmethod
    def class_name(cls) -> str:
        """Name in serialized form."""
        return "RagWindowsLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex plans with; reads configuration and tokenizer, not the weights.

        ``context_window`` is how many tokens, as ``Settings.tokenizer`` counts them (OpenAI's,
        unless one is set), fit into the model's positions with role markers, ``system_prompt``
        and an answer longer than chat engines expect, measured on a few conversations.
        """
        window, limit, source = self.context_window, self.position_limit, self._source
        if window is None and limit is not None:
            limit -= max(0, self.max_new_tokens - MEMORY_SPARES)
            tokenizer, variables = source.tokenizer(), source.template_kwargs()
            window = fitting(tokenizer, variables, limit, self.system_prompt)
        return LLMMetadata(
            context_window=window or DEFAULT_CONTEXT_WINDOW,
            num_output=self.max_new_tokens,
            is_chat_model=self.is_chat_model,
            is_function_calling_model=source.tool_format() is not None,
            model_name=self.model_name,
        )

    @property
    def position_limit(self) -> int | None:
        """Positions for instruction, one window, conversation and answer; None without a limit."""
        return position_limit(self._source.config())

    @property
    def lm(self) -> WindowedLM:
        """The engine, loaded if it is not yet."""
        return self._source.lm()

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer the last message of a conversation."""
        with surfacing():
            return self._calls.answer(self._prepare(messages, kwargs), chat_response)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt; ``formatted`` is ignored, since the chat template is always used."""
        with surfacing():
            return self._calls.answer(self._prepare_prompt(prompt, kwargs), completion_response)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """`chat` without blocking the event loop."""
        with surfacing():
            return await self._calls.answer_async(self._prepare(messages, kwargs), chat_response)

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """`complete` without blocking the event loop."""
        prepare = self._prepare_prompt(prompt, kwargs)
        with surfacing():
            return await self._calls.answer_async(prepare, completion_response)

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """`chat` piece by piece."""
        prepare = self._prepare(messages, kwargs)
        return self._stream(llm_chat_callback(), prepare, chat_pieces(), messages, kwargs)

    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """`complete` piece by piece."""
        prepare = self._prepare_prompt(prompt, kwargs)
        return self._stream(llm_completion_callback(), prepare, completion_pieces(), prompt, kwargs)

    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """`stream_chat` without blocking the event loop."""
        prepare = self._prepare(messages, kwargs)
        return await self._astream(llm_chat_callback(), prepare, chat_pieces(), messages, kwargs)

    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """`stream_complete` without blocking the event loop."""
        prepare, report = self._prepare_prompt(prompt, kwargs), llm_completion_callback()
        return await self._astream(report, prepare, completion_pieces(), prompt, kwargs)

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls in an answer; none is a `GenerationError`, where it is to be an error."""
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if error_on_no_tool_call and not calls:
            # Not a ValueError: LlamaIndex's refine step would turn that into an empty response.
            broken = response.raw.get(BROKEN) if isinstance(response.raw, Mapping) else None
            why = "".join(f" {one['error']}" for one in broken or ())
            raise GenerationError(
                "The model should have called a tool but answered "
                f"{response.message.content or ''!r}.{why} Raise max_new_tokens if the call was "
                "cut off, or use tool_required=True."
            )
        return [
            ToolSelection(
                tool_id=call.tool_call_id or "",
                tool_name=call.tool_name,
                tool_kwargs=call.tool_kwargs if isinstance(call.tool_kwargs, dict) else {},
            )
            for call in calls
        ]

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        if isinstance(user_msg, str):
            user_msg = ChatMessage(role=MessageRole.USER, content=user_msg)
        return {
            "messages": [*(chat_history or []), *([] if user_msg is None else [user_msg])],
            "tools": tools,
            "tool_choice": tool_choice or ("required" if tool_required else None),
            "parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

    def structured_predict(
        self, output_cls: Any, prompt: Any, llm_kwargs: Any = None, **prompt_args: Any
    ) -> Any:
        """An answer as an object of ``output_cls``."""
        llm, template = self._over_windows(prompt, prompt_args, calls=True)
        with surfacing():
            return LLM.structured_predict(llm, output_cls, template, llm_kwargs, **prompt_args)

    async def astructured_predict(
        self, output_cls: Any, prompt: Any, llm_kwargs: Any = None, **prompt_args: Any
    ) -> Any:
        """`structured_predict` without blocking the event loop."""
        llm, template = self._over_windows(prompt, prompt_args, calls=True)
        with surfacing():
            predict = LLM.astructured_predict
            return await predict(llm, output_cls, template, llm_kwargs, **prompt_args)

    def _structured_stream_call(
        self, output_cls: Any, prompt: Any, llm_kwargs: Any = None, **prompt_args: Any
    ) -> Generator[Any, None, None]:
        llm, template = self._over_windows(prompt, prompt_args, calls=False)
        return LLM._structured_stream_call(llm, output_cls, template, llm_kwargs, **prompt_args)

    async def _structured_astream_call(
        self, output_cls: Any, prompt: Any, llm_kwargs: Any = None, **prompt_args: Any
    ) -> AsyncGenerator[Any, None]:
        llm, template = self._over_windows(prompt, prompt_args, calls=False)
        stream = LLM._structured_astream_call
        return await stream(llm, output_cls, template, llm_kwargs, **prompt_args)

    def _over_windows(
        self, prompt: BasePromptTemplate, arguments: dict[str, Any], *, calls: bool
    ) -> tuple[RagWindowsLLM, Any]:
        """The LLM and the template of a structured answer, which may be a call where it can."""
        llm = self
        if self.pydantic_program_mode == PydanticProgramMode.DEFAULT:
            form = self._source.tool_format()
            if form is not None and (form.opening is None or not calls):
                llm = self.model_copy(update={"pydantic_program_mode": PydanticProgramMode.LLM})
        return llm, WindowTemplate.of(prompt, arguments, self)

    def _get_messages(self, prompt: BasePromptTemplate, **prompt_args: Any) -> list[ChatMessage]:
        template = WindowTemplate.of(prompt, prompt_args, self)
        return super()._get_messages(template, **prompt_args)

    def _get_prompt(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        template = WindowTemplate.of(prompt, prompt_args, self)
        if template is prompt:
            return super()._get_prompt(prompt, **prompt_args)
        return WindowedPrompt.of(super()._get_messages(template))

    def _extend_prompt(self, formatted_prompt: str) -> str:
        # The system prompt stands where the chat template has it, never inside the question.
        return formatted_prompt

    def _prepare_prompt(self, prompt: str, options: Mapping[str, Any]) -> Callable[[], ModelCall]:
        if options.get("tools"):
            raise InputError("A completion can't call tools. Use chat, or chat_with_tools.")
        if isinstance(prompt, Parts) or not isinstance(prompt, str):
            raise InputError(
                f"The prompt must be a string (the question), not {type(prompt).__name__}. Give "
                "passages as passages=."
            )
        asked = [ChatMessage(role=MessageRole.USER, content=prompt)]
        return self._prepare(getattr(prompt, "messages", asked), options)

    def _prepare(
        self, messages: Sequence[ChatMessage], options: Mapping[str, Any]
    ) -> Callable[[], ModelCall]:
        """What makes a call; it loads the model, and all else of the call is checked before."""
        chosen = self._options(options)
        tools, choice = chosen.pop("tools", None), chosen.pop("tool_choice", None)
        parallel = bool(chosen.pop("parallel_tool_calls", True))
        reader, source = AnswerReader(), self._source
        read, blocks = read_messages(messages)
        if self.system_prompt and (not read or read[0]["role"] != "system"):
            read.insert(0, {"role": "system", "content": self.system_prompt})
        if tools:
            definitions = [
                tool.metadata.to_openai_tool(skip_length_check=True)
                if isinstance(tool, BaseTool)
                else tool
                for tool in tools
            ]
            tokenizer, variables = source.tokenizer(), source.template_kwargs()
            reader = AnswerReader.of(tokenizer, variables, definitions, choice)
        query = reader.query(read)
        passages = given_passages(blocks, chosen.pop("passages", None), chosen.pop("nodes", None))
        grammar = reader.grammar()
        if grammar is not None and not chosen.keys() & {"grammar", "json_schema"}:
            chosen["grammar"] = grammar
        if not passages:
            said = "\n".join((query.system, *(turn.content for turn in query.turns)))
            warn_without_windows(said, self._count, _INSTEAD)

        def prepare() -> ModelCall:
            lm = source.lm()
            method = self.reading(chosen, lm.method)
            return ModelCall(
                lm=lm,
                query=query,
                passages=passages,
                options={**chosen, "method": method},
                method=method,
                model_name=self.model_name,
                reader=reader,
                parallel=parallel,
            )

        return prepare

    def _count(self, text: str) -> int:
        return len(self._source.tokenizer()(text, add_special_tokens=False)["input_ids"])

    def _options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options of one call over those of the constructor."""
        given = _given(options)
        names = ("temperature", "top_p")
        merged = {
            "max_new_tokens": self.max_new_tokens,
            "citations": self.citations,
            **_set({name: getattr(self, name) for name in ("on_encoded", "fallback")}),
            **self.generate_kwargs,
            **sampling_options(*(given.pop(name, getattr(self, name)) for name in names)),
            **given,
        }
        if self.stopping_ids:
            criteria = merged.get("stopping_criteria") or []
            merged["stopping_criteria"] = [*criteria, EosTokenCriteria(self.stopping_ids)]
        return merged

    def _stream(
        self, report: Any, prepare: Callable[[], ModelCall], pieces: Any, asked: Any, options: Any
    ) -> Generator[Any, None, None]:
        """A stream of an answer, with LlamaIndex's callbacks and events.

        Its reporting decorator leaves closing what it wraps to the garbage collector, which never
        does while a handler keeps the exception that ended the stream. So both are closed here.
        """
        with surfacing():
            answer = self._calls.stream(prepare, pieces)

            def make(*_: Any, **__: Any) -> Generator[Any, None, None]:
                return answer

            with closing(answer), closing(report(make)(self, asked, **options)) as reported:
                yield from reported

    async def _astream(
        self, report: Any, prepare: Callable[[], ModelCall], pieces: Any, asked: Any, options: Any
    ) -> AsyncGenerator[Any, None]:
        """`_stream` without blocking an event loop."""
        answer = self._calls.stream_async(prepare, pieces)

        async def make(*_: Any, **__: Any) -> AsyncGenerator[Any, None]:
            return answer

        reported = await report(make)(self, asked, **options)

        async def stream() -> AsyncGenerator[Any, None]:
            async with aclosing(answer), aclosing(reported):
                with surfacing():
                    async for one in reported:
                        yield one

        return stream()

    def __getstate__(self) -> dict[str, Any]:
        if not self._source.by_name:
            raise InputError(
                "An LLM with a loaded model can't be pickled. Make it with model_name=."
            )
        state = dict(super().__getstate__())
        # Made anew from the fields, where the pickle is read.
        fields = {k: v for k, v in state["__dict__"].items() if k not in _SHOWN_BY_TEMPLATE}
        state |= {"__pydantic_private__": None, "__dict__": fields}
        return state

    @field_serializer(
        *("model_kwargs", "tokenizer_kwargs", "generate_kwargs", "device_map", "header"),
        *("method", "fallback", "profile"),
    )
    def _as_plain(self, value: Any) -> Any:
        """A value as JSON; of what has no plain form, such as a header function, its name."""
        if isinstance(value, Method):
            return describe(value)
        if isinstance(value, Profile):
            return json.loads(value.to_json())
        if isinstance(value, Mapping):
            value = {name: entry for name, entry in value.items() if name not in _SECRETS}
        return to_jsonable_python(value, fallback=_name_of)


def _source(
    model_name: str | Path | None,
    model: Any,
    lm: WindowedLM | None,
    tokenizer: Any,
    fields: Mapping[str, Any],
) -> ModelSource:
    """Where the weights come from."""
    if sum(given is not None for given in (model_name, model, lm)) != 1:
        raise InputError("Exactly one of model_name=, model= and lm= must be given.")
    loading = {name: fields[name] for name in _OF_LOADING if fields.get(name)}
    if loading.get("header") == "title":
        del loading["header"]
    given = sorted([*loading, *([] if tokenizer is None else ["tokenizer"])])
    if lm is not None and given:
        raise InputError(f"{given} have no effect with lm=. Set them on the WindowedLM.")
    options = dict(loading.pop("model_kwargs", {}))
    if "torch_dtype" in options:  # its older name in transformers
        options.setdefault("dtype", options.pop("torch_dtype"))
    model = model_name if model is None else model
    return ModelSource(model, lm=lm, tokenizer=tokenizer, **{**options, **loading})


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is not None, under our names."""
    return unalias(_set(values), {"max_tokens": "max_new_tokens"})


def _set(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _name_of(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return getattr(value, "__qualname__", None) or str(value)
