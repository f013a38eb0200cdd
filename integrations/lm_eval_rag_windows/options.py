"""The harness's ``--model_args``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lm_eval_rag_windows.grouping import Grouping
from lm_eval_rag_windows.loaded import cache_of, load, method_of
from lm_eval_rag_windows.prompting import Examples
from rag_windows import WindowedLM
from rag_windows.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    r"""Everything that can stand in ``--model_args``, and what the harness adds to it.

    Attributes:
        pretrained: Hub name, folder, "tiny-learner", a loaded model (with ``tokenizer``), or a
            `WindowedLM`.
        tokenizer: name or folder of another tokenizer, or itself.
        method: how windows are read, such as "ape", "pcw", "deep-thinking+ape", "sequential". None
            is the profile's, else "ape".
        method_numbers: the method's parameters; they stand beside it (``temperature=0.9``).
        revision: of the model on the Hub.
        dtype: of the weights.
        device: "cpu", "cuda", "cuda:1"; None for the first accelerator there is.
        device_map: instead of it, for several accelerators, such as "auto".
        parallelize: True is ``device_map="auto"``.
        profile: path of a calibration.
        link_tokens: tokens of each window that are encoded in sight of the others.
        link_choose: which ones.
        fewshot_delimiter: what the task puts behind an example; ``\n`` is read as a line break.
        num_fewshot: how many examples a prompt has, where it does not show that itself, see
            `find_borders`; 0 for no windows at all.
        examples_per_window: how many share a window; default 1.
        windows: or how many windows they are spread over.
        prefix: text before every prompt, which all windows see; not with a chat template.
        max_window_tokens: longer windows are cut into several; default: half of ``max_length``.
        max_length: positions to use; default: those of the model.
        max_gen_toks: length of an answer where the task does not say it.
        add_bos_token: whether prompts begin with the beginning-of-sequence token; default: as the
            tokenizer does it.
        prefix_token_id: what stands before a text that has no prompt; default: that token, else the
            end token.
        parse_special_tokens: whether control tokens that texts spell become control tokens, as with
            ``--model hf``. The texts of a data set can then forge turns.
        cache: whether encoded windows are kept in memory.
        cache_dir: folder to keep them in, too.
        cache_memory: size of the memory, such as "8GiB" or "25%" of what is free.
        enable_thinking: variable of the chat template.
        chat_template_args: further ones.
        think_end_token: an answer is what follows this string.
        batch_size: accepted and not used: how many rows make a pass is found from their size.
        max_batch_size: likewise.
        trust_remote_code: True is refused.
    """

    pretrained: Any
    tokenizer: Any = None
    method: Any = None
    method_numbers: Mapping[str, Any] = field(default_factory=dict)
    revision: str | None = None
    dtype: Any = "auto"
    device: str | None = None
    device_map: Any = None
    parallelize: bool = False
    profile: str | None = None
    link_tokens: Any = None
    link_choose: Any = "first"
    fewshot_delimiter: str = "\n\n"
    num_fewshot: int | None = None
    examples_per_window: int | None = None
    windows: int | None = None
    prefix: str = ""
    max_window_tokens: int | None = None
    max_length: int | None = None
    max_gen_toks: int = 256
    add_bos_token: bool | None = None
    prefix_token_id: int | None = None
    parse_special_tokens: bool = False
    cache: bool = True
    cache_dir: str | None = None
    cache_memory: int | str = "25%"
    enable_thinking: bool | None = None
    chat_template_args: Mapping[str, Any] | None = None
    think_end_token: str | None = None
    batch_size: int | str | None = None
    max_batch_size: int | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name in ("max_window_tokens", "max_length", "max_gen_toks"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if value is not None and not whole:
                raise InputError(f"{name} must be a whole number from 1 on, got {value!r}.")

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Options:
        """Sort the arguments; those that are unknown here are the method's.

        Raises:
            InputError: no ``pretrained``, or a value that makes no sense.
        """
        if "pretrained" not in arguments:
            raise InputError(
                "model_args names no model: give pretrained=..., a Hub name, a folder or "
                "tiny-learner, which is shipped."
            )
        names = {one.name for one in dataclasses.fields(cls)} - {"method_numbers"}
        own = {key: value for key, value in arguments.items() if key in names}
        return cls(**own, method_numbers={k: v for k, v in arguments.items() if k not in names})

    @property
    def examples(self) -> Examples:
        """How examples are found in a prompt.

        Raises:
            InputError: values that make no sense, or no sense together.
        """
        return Examples(
            _unescaped(self.fewshot_delimiter),
            self.num_fewshot,
            Grouping(self.examples_per_window, self.windows),
            _unescaped(self.prefix),
        )

    def load(self) -> WindowedLM:
        """The model on its device; errors as in `loaded.load`."""
        several = "auto" if self.parallelize and self.device_map is None else self.device_map
        return load(
            self.pretrained,
            tokenizer=self.tokenizer,
            method=method_of(self.method, self.method_numbers, self.link_tokens, self.link_choose),
            profile=self.profile,
            dtype=self.dtype,
            device=self.device,
            device_map=several,
            revision=self.revision,
            cache=cache_of(self.cache, self.cache_dir, self.cache_memory),
            model_kwargs={"trust_remote_code": self.trust_remote_code},
        )

    def template_kwargs(self, lm: WindowedLM) -> dict[str, Any]:
        """Variables of the chat template."""
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return {**lm.template_kwargs, **(self.chat_template_args or {}), **thinking}


def _unescaped(text: Any) -> str:
    r"""A text of the command line, in which ``\n`` and ``\t`` stand for the characters."""
    if not isinstance(text, str):
        raise InputError(f"fewshot_delimiter and prefix must be texts, got {text!r}.")
    return text.replace("\\n", "\n").replace("\\t", "\t")
