"""What an LLM is made with, under the names that HuggingFaceLLM uses."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from llama_index.core.base.llms.generic_utils import messages_to_prompt as default_messages
from llama_index.core.base.llms.types import LLMMetadata
from llama_index.core.bridge.pydantic import Field, PrivateAttr, field_serializer
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW, DEFAULT_NUM_OUTPUTS
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import default_completion_to_prompt as default_completion
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.stopping_criteria import EosTokenCriteria
from transformers.utils import TransformersKwargs

from llama_index.llms.rag_windows.serializing import as_plain
from llama_index.llms.rag_windows.source import Source
from rag_windows import Guard, Method, Profile, WindowedLM
from rag_windows.errors import InputError
from rag_windows.integration import (
    MODEL_INPUTS,
    Choose,
    FallbackOption,
    Header,
    LinkTokens,
    OnEncoded,
    guard_of,
    method_of,
    position_limit,
    profile_of,
    sampling_options,
)

MEMORY_SPARES = 256
"""Tokens of ``context_window`` that LlamaIndex's chat engines leave to the answer."""

_SHOWN_BY_TEMPLATE = {
    "messages_to_prompt": (None, default_messages),
    "completion_to_prompt": (None, default_completion),
    "query_wrapper_prompt": (None, "{query_str}"),
}
"""Arguments of HuggingFaceLLM that write a prompt by hand, and values that ask for nothing."""

CALL_OPTIONS = frozenset(
    {
        *(set(inspect.signature(WindowedLM.generate).parameters) - {"self", "query"}),
        *(set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}),
        *(name for name in vars(GenerationConfig()) if not name.startswith("_")),
        *TransformersKwargs.__optional_keys__,
        *MODEL_INPUTS,  # refused by the engine, which says why
        *("assistant_tokenizer", "tokenizer"),
        *("max_tokens", "nodes", "parallel_tool_calls", "tool_choice", "tools"),
    }
) - {"generate_kwargs"}
"""What a call may be given by name, beside its messages."""


class UnknownArgumentError(InputError, TypeError):
    """A constructor or a call was given an argument that it does not have."""


class Settings(FunctionCallingLLM):
    """The constructor; nothing of it loads weights.

    Args:
        model_name: Hub name, local folder, or "tiny-reader" (shipped).
        model: a loaded transformers model, instead of ``model_name``; give its ``tokenizer`` too.
        lm: a loaded `WindowedLM`, instead of both.
        tokenizer_name: instead of the model's own tokenizer.
        tokenizer: a loaded tokenizer, instead of ``tokenizer_name``.
        tokenizer_kwargs: for loading the tokenizer.
        device_map: where the weights go: "cpu", "cuda", "cuda:1"; "auto" or a mapping spreads them
            (needs accelerate). None for the best device: CUDA where there is one.
        model_kwargs: for ``AutoModelForCausalLM.from_pretrained``: dtype, quantization_config, ...
        generate_kwargs: for transformers' ``generate``, and ``stop`` and ``seed``; those of a call
            go before.
        max_new_tokens: at most so many are generated (256).
        max_tokens: the same by its other name.
        temperature: 0 takes the likeliest token, more samples; None leaves it to the model.
        top_p: nucleus sampling.
        context_window: what ``metadata`` says, by which LlamaIndex packs texts into one prompt and
            cuts conversations: by default what one prompt holds, in tokens as LlamaIndex counts
            them, see `metadata`. Windows are not bound by it.
        system_prompt: the instruction, where a conversation brings none.
        is_chat_model: False makes LlamaIndex choose its templates for text models; the tokenizer's
            chat template is used in any case, where it has one.
        stopping_ids: tokens that end an answer, beside the model's own.
        method: "ape", "pcw", "sequential", or a `Method`; None takes the profile's, that of ``lm``,
            or "ape".
        profile: of a calibration, or the path of one: brings the method (where ``method`` gives
            none) and the guard's threshold.
        header: line above each passage: "title", "none", "number", "number+title", or a function.
        link_tokens: tokens of each window that are encoded in sight of the others: a number (int),
            a share (float), or "all"; see `rag_windows.Linked`.
        link_choose: which ones: "first", or those of largest "deviation".
        fallback: "sequential" or a `rag_windows.Guard`: where windows are likely to lose, passages
            are read one after the other; ``raw["fallback"]`` says so.
        max_window_tokens: a longer passage becomes several windows.
        template_kwargs: variables of the chat template, such as ``{"enable_thinking": False}``.
        citations: whether to measure each passage's attention mass.
        on_encoded: told how many windows are encoded, of how many.
        batch_rows: so many calls that are made at once, by tasks or by threads, are answered
            together: one forward pass gives each its next token, and passages that several read
            are held once. More wait in line. Each takes memory for the passages that it alone
            reads. 1 answers each call by itself.
        kwargs: of LlamaIndex's `LLM`: callback_manager, output_parser, pydantic_program_mode, ...

    Raises:
        InputError: no model or two, or an argument that writes prompts by hand.
        TypeError: an unknown argument, or an unknown option in ``generate_kwargs``.
    """

    model_name: str = Field(description="Name or folder of the model.")
    tokenizer_name: str | None = Field(default=None, description="Tokenizer, if not the model's.")
    tokenizer_kwargs: dict[str, Any] = Field(description="For loading the tokenizer.")
    device_map: Any = Field(default=None, description="Where the weights go.")
    model_kwargs: dict[str, Any] = Field(description="For loading the model.")
    generate_kwargs: dict[str, Any] = Field(description="For generating.")
    max_new_tokens: int = Field(gt=0, description="At most so many tokens are generated.")
    temperature: float | None = Field(default=None, ge=0, description="Of sampling; 0 is greedy.")
    top_p: float | None = Field(default=None, gt=0, le=1, description="Of nucleus sampling.")
    context_window: int | None = Field(default=None, gt=0, description="Advertised capacity.")
    is_chat_model: bool = Field(default=True, description="Whether templates are chats.")
    stopping_ids: list[int] = Field(description="Further tokens that end an answer.")
    method: Any = Field(default=None, description="How the windows are read.")
    profile: Any = Field(default=None, description="Of a calibration.")
    link_tokens: Any = Field(default=None, description="Tokens encoded in sight of the others.")
    link_choose: Choose = Field(default="first", description="Which tokens those are.")
    fallback: Any = Field(default=None, description="When to read passages in one prompt.")
    header: Any = Field(description="Line above each passage.")
    max_window_tokens: int | None = Field(default=None, gt=0, description="Size of a window.")
    template_kwargs: dict[str, Any] = Field(description="Variables of the chat template.")
    citations: bool = Field(default=True, description="Whether attention masses are measured.")
    on_encoded: Any = Field(default=None, exclude=True, description="Told of encoded windows.")
    batch_rows: int = Field(default=32, gt=0, description="Calls that are answered together.")

    _source: Source = PrivateAttr()

    def __init__(
        self,
        model_name: str | Path | None = None,
        *,
        model: Any = None,
        lm: WindowedLM | None = None,
        tokenizer_name: str | None = None,
        tokenizer: Any = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        device_map: Any = None,
        model_kwargs: Mapping[str, Any] | None = None,
        generate_kwargs: Mapping[str, Any] | None = None,
        max_new_tokens: int | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        context_window: int | None = None,
        system_prompt: str | None = None,
        is_chat_model: bool = True,
        stopping_ids: Sequence[int] | None = None,
        method: str | Method | Mapping[str, Any] | None = None,
        profile: Profile | str | Path | Mapping[str, Any] | None = None,
        link_tokens: LinkTokens | None = None,
        link_choose: Choose = "first",
        fallback: FallbackOption | Mapping[str, Any] = None,
        header: Header = "title",
        max_window_tokens: int | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        citations: bool = True,
        on_encoded: OnEncoded | None = None,
        batch_rows: int = 32,
        **kwargs: Any,
    ) -> None:
        for name, harmless in _SHOWN_BY_TEMPLATE.items():
            given = getattr(kwargs.get(name), "template", kwargs.get(name))
            if given not in harmless:
                raise InputError(
                    f"{name} can't be used: the prompt is written by the tokenizer's own chat "
                    "template, and text can't spell its control tokens. Leave it out; put an "
                    "instruction into system_prompt."
                )
            kwargs.pop(name, None)
        _refuse_unknown(kwargs, type(self).model_fields, "RagWindowsLLM")
        options = _named(generate_kwargs or {})
        if None not in (max_tokens, max_new_tokens):
            raise UnknownArgumentError(_TWICE)
        if model is not None and model_name is not None:
            raise InputError("Give model_name= or model=, not both.")
        profile = profile_of(profile)
        if link_tokens is not None:
            method_of("ape", link_tokens=link_tokens, link_choose=link_choose)  # in their domain?
        source = Source(
            model_name if model is None else model,
            lm=lm,
            rows=batch_rows,
            tokenizer=tokenizer if tokenizer is not None else tokenizer_name,
            tokenizer_kwargs=tokenizer_kwargs,
            model_kwargs={**(model_kwargs or {}), **_set(device_map=device_map)},
            view={
                "header": None if header == "title" else header,
                "max_window_tokens": max_window_tokens,
                "template_kwargs": dict(template_kwargs or {}),
                "profile": profile,
            },
        )
        super().__init__(
            model_name=source.name,
            tokenizer_name=tokenizer_name,
            tokenizer_kwargs=dict(tokenizer_kwargs or {}),
            device_map=device_map,
            model_kwargs=dict(model_kwargs or {}),
            generate_kwargs=options,
            max_new_tokens=next(
                given
                for given in (max_new_tokens, max_tokens, DEFAULT_NUM_OUTPUTS)
                if given is not None
            ),
            temperature=temperature,
            top_p=top_p,
            context_window=context_window,
            system_prompt=system_prompt,
            is_chat_model=is_chat_model,
            stopping_ids=list(stopping_ids or []),
            method=None if method is None else method_of(method),
            profile=profile,
            link_tokens=link_tokens,
            link_choose=link_choose,
            fallback=guard_of(fallback),
            header=header,
            max_window_tokens=max_window_tokens,
            template_kwargs=dict(template_kwargs or {}),
            citations=citations,
            on_encoded=on_encoded,
            batch_rows=batch_rows,
            **kwargs,
        )
        self._source = source

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex plans with; reads configuration and tokenizer, not the weights.

        LlamaIndex counts tokens by ``Settings.tokenizer``, which is OpenAI's unless one is set, and
        does not count role markers. So ``context_window`` is how many of its tokens fit into the
        model's positions, measured on the conversations of `counting.SAMPLES`, with room for
        ``system_prompt``, and for an answer longer than chat engines expect. With
        ``Settings.tokenizer = llm.lm.tokenizer.encode`` it is the positions, less the markers.
        """
        window = self.context_window
        if window is None:
            window = self._prompt_window()
        return LLMMetadata(
            context_window=window,
            num_output=self.max_new_tokens,
            is_chat_model=self.is_chat_model,
            is_function_calling_model=self._source.tool_format() is not None,
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

    def _prompt_window(self) -> int:
        limit = self.position_limit
        if limit is None:
            return DEFAULT_CONTEXT_WINDOW
        limit -= max(0, self.max_new_tokens - MEMORY_SPARES)
        return self._source.counting().fitting(limit, self.system_prompt)

    def __getstate__(self) -> dict[str, Any]:
        if not self._source.by_name:
            raise InputError(
                "An LLM that was given a loaded model can't be pickled; make it by model_name=."
            )
        state = dict(super().__getstate__())
        # Made anew from the fields, where the pickle is read.
        state["__pydantic_private__"] = None
        return state

    @field_serializer("model_kwargs", "tokenizer_kwargs", "generate_kwargs", "device_map", "header")
    def _as_plain(self, value: Any) -> Any:
        return as_plain(value)

    @field_serializer("method", "fallback", "profile")
    def _method_as_plain(self, value: Method | Guard | Profile | None) -> Any:
        return as_plain(value)

    def _options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options of one call over those of the constructor.

        Raises:
            TypeError: one of them is unknown.
        """
        given = _named(_set(**options))
        sampling = {name: given.pop(name) for name in ("temperature", "top_p") if name in given}
        if sampling:
            temperature = sampling.get("temperature", self.temperature)
            given = {
                **sampling_options(temperature, sampling.get("top_p", self.top_p)),
                **given,
            }
        merged: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "citations": self.citations,
            "link_choose": self.link_choose,
            **_set(
                method=self.method,
                on_encoded=self.on_encoded,
                link_tokens=self.link_tokens,
                fallback=self.fallback,
            ),
            **sampling_options(self.temperature, self.top_p),
            **self.generate_kwargs,
            **given,
        }
        if sampling.get("temperature") == 0:
            # Those of the constructor, which transformers warns of beside do_sample=False.
            for name in ("temperature", "top_p"):
                merged.pop(name, None)
        if self.stopping_ids:
            criteria = merged.get("stopping_criteria") or []
            merged["stopping_criteria"] = [*criteria, EosTokenCriteria(self.stopping_ids)]
        return merged


_TWICE = "max_tokens and max_new_tokens are one argument; give only one of them."


def _named(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a call under the engine's names.

    Raises:
        UnknownArgumentError: one has a name that nobody knows, or two names.
    """
    _refuse_unknown(options, CALL_OPTIONS, "A call of RagWindowsLLM")
    named = dict(options)
    if "max_tokens" in named:
        if "max_new_tokens" in named:
            raise UnknownArgumentError(_TWICE)
        named["max_new_tokens"] = named.pop("max_tokens")
    return named


def _refuse_unknown(given: Iterable[str], known: Iterable[str], where: str) -> None:
    names = set(known)
    for name in given:
        if name in names:
            continue
        near = get_close_matches(name, names, n=1)
        advice = f"did you mean {near[0]!r}?" if near else "leave it out."
        if name in CALL_OPTIONS:
            advice = f"give it as generate_kwargs={{{name!r}: ...}}, or in a call."
        raise UnknownArgumentError(f"{where} takes no argument {name!r}; {advice}")


def _set(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
