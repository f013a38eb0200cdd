"""The model class that lm-evaluation-harness runs its tasks with."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from lm_eval_rag_windows.prompts import (
    ChatContext,
    ChatWriter,
    Cut,
    Cutter,
    Examples,
    Ids,
    Prompts,
    check_count,
)
from lm_eval_rag_windows.scoring import Counts, Wish, answer, score
from rag_windows import Method, PassageCache, Profile, WindowedLM, __version__
from rag_windows.errors import InputError, LimitError, MethodError, ModelError, PromptError
from rag_windows.integration import (
    Boundary,
    Likelihood,
    ModelSource,
    describe,
    method_of,
    position_limit,
)

UNKNOWN_LENGTH = 2048
"""Positions of a model that names no limit, as with the harness's own models."""

_log = logging.getLogger(__name__)

Pair = tuple[float, bool]


class RagWindowsLM(TemplateLM):
    r"""A local causal LM that reads each few-shot example in a window of its own.

    The harness makes it from ``--model rag-windows --model_args ...``. With ``method=sequential``
    it computes what the harness's own ``--model hf`` computes. It runs in one process.

    Args:
        pretrained: Hub name, folder, "tiny-learner", a loaded model (with ``tokenizer``), or a
            `WindowedLM`.
        tokenizer: name or folder of another tokenizer, or itself.
        method: how windows are read, such as "ape", "pcw", "deep-thinking+ape", "sequential". None
            is the profile's, else "ape".
        profile: path of a calibration.
        link_tokens: tokens of each window that are encoded in sight of the others.
        link_choose: which ones.
        revision: of the model on the Hub.
        dtype: of the weights.
        device: "cpu", "cuda", "cuda:1"; None for the first accelerator there is.
        device_map: instead of it, for several accelerators, such as "auto".
        parallelize: True is ``device_map="auto"``.
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
        numbers: parameters of the method (``temperature=0.9``).

    Raises:
        InputError, ModelError, CacheError: an option that can't be used.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        tokenizer: Any = None,
        method: Any = None,
        profile: str | None = None,
        link_tokens: Any = None,
        link_choose: Any = "first",
        revision: str | None = None,
        dtype: Any = "auto",
        device: str | None = None,
        device_map: Any = None,
        parallelize: bool = False,
        fewshot_delimiter: str = "\n\n",
        num_fewshot: int | None = None,
        examples_per_window: int | None = None,
        windows: int | None = None,
        prefix: str = "",
        max_window_tokens: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        parse_special_tokens: bool = False,
        cache: bool = True,
        cache_dir: str | None = None,
        cache_memory: int | str = "25%",
        enable_thinking: bool | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        think_end_token: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        trust_remote_code: bool = False,
        **numbers: Any,
    ) -> None:
        super().__init__()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InputError(
                "rag-windows runs in one process, and this one was started several times (by "
                "accelerate launch or torchrun). Start it once; device_map=auto spreads a model "
                "over several accelerators."
            )
        # Before gigabytes are loaded.
        check_count("max_window_tokens", max_window_tokens)
        check_count("max_length", max_length)
        check_count("max_gen_toks", max_gen_toks)
        self._examples = Examples(
            delimiter=_unescaped(fewshot_delimiter),
            shots=num_fewshot,
            each=examples_per_window,
            windows=windows,
            before=_unescaped(prefix),
        )
        self.lm = _load(
            pretrained,
            tokenizer=tokenizer,
            method=_method(method, numbers, link_tokens, link_choose),
            profile=profile,
            cache=_cache(cache, cache_dir, cache_memory),
            dtype=dtype,
            device_map="auto" if parallelize and device_map is None else device_map,
            device=device,
            revision=None if revision is None else str(revision),
            trust_remote_code=trust_remote_code or None,
        )
        if self.lm.tokenizer is None:
            raise ModelError("The harness needs a tokenizer: give tokenizer= beside pretrained=.")
        self.tokenizer: Any = self.lm.tokenizer
        self._device = self.lm.model.device
        self._revision = revision
        self._batch_size = batch_size
        self._max_gen_toks = max_gen_toks
        self._think_end = think_end_token
        self._prefix_token = prefix_token_id
        self._template_kwargs = {**self.lm.template_kwargs, **(chat_template_args or {})}
        if enable_thinking is not None:
            self._template_kwargs["enable_thinking"] = enable_thinking
        self._max_length = max_length or position_limit(self.lm.model.config) or UNKNOWN_LENGTH
        self._window = max_window_tokens or max(1, self._max_length // 2)
        self._boundary = Boundary(self.tokenizer)
        read_by = self._boundary
        if parse_special_tokens:
            read_by = Boundary(self.tokenizer, tuple(self._boundary.controls.by_content))
        bos = str(self.tokenizer.decode([self.prefix_token_id]))
        self._cutter = Cutter(self.tokenizer, read_by, add_bos_token=add_bos_token, bos=bos)
        self.prompts = Prompts(
            self.lm, self._examples, read_by, self._cutter, self._max_length, self._window
        )
        self._counts = Counts()
        self._writer: ChatWriter | None = None

    # What the harness asks about

    @property
    def eot_token_id(self) -> int:
        """Id of the end token."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Id of what stands before a text that has no prompt."""
        if self._prefix_token is not None:
            return self._prefix_token
        beginning = self.tokenizer.bos_token_id
        return self.eot_token_id if beginning is None else int(beginning)

    @property
    def max_length(self) -> int:
        """Positions that may be used."""
        return self._max_length

    @property
    def batch_size(self) -> int | str | None:
        """As it was given; how many rows make a pass is found from their size."""
        return self._batch_size

    @property
    def tokenizer_name(self) -> str:
        """Part of the name under which the harness keeps prompts: ours are no plain strings."""
        return str(self.tokenizer.name_or_path).replace("/", "__") + "__windows"

    def get_model_info(self) -> dict[str, Any]:
        """What the results file says about the model and its windows."""
        return {
            "model_num_parameters": int(self.lm.model.num_parameters()),
            "model_dtype": str(self.lm.model.dtype),
            "model_revision": self._revision,
            "rag_windows": {
                "version": __version__,
                "method": describe(self.lm.method),
                "examples_per_window": self._examples.each,
                "windows": self._examples.windows,
                "max_window_tokens": self._window,
                "windows_split": self.prompts.split,
                "prompts_truncated": self.prompts.truncated,
                **self._counts.described(),
            },
        }

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> ChatContext:
        """A prompt as a string that knows its parts.

        Raises:
            PromptError: see `ChatWriter`.
        """
        if self._examples.before:
            raise PromptError(
                "prefix= is for prompts without a chat template; give --system_instruction instead."
            )
        if self._writer is None:
            self._writer = ChatWriter(self.tokenizer, self._boundary, self._template_kwargs)
            self.prompts.wrote_chats = True
        return self._writer.write(chat_history, answered=not add_generation_prompt)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Ids of a text; never a control token out of its characters.

        Args:
            string: the text.
            add_special_tokens: False leaves out what stands before a prompt.
            kwargs: of the harness; none has a meaning here.
        """
        return list(self._cutter.text(string, leading=add_special_tokens is not False))

    # What it computes

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[Pair]:
        """Log-probability of each continuation in nats, and whether it is the greedy answer.

        Raises:
            InputError: a request that can't be read; the message names task and document.
        """
        asked = []
        for request in requests:
            with _named(request) as name:
                context, continuation = request.args[:2]
                asked.append(self._pair(context, continuation, request.doc, name))
        with _bar(len(asked), "Running loglikelihood requests", disable_tqdm) as bar:

            def told(index: int, found: Likelihood) -> None:
                self.cache_hook.add_partial("loglikelihood", requests[index].args, _pair(found))
                bar.update()

            return [_pair(one) for one in score(self.lm, asked, told, self._counts)]

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[Pair]:
        """The same for token ids, without windows: (anything, prompt, continuation) each."""
        asked: list[tuple[Cut, Ids]] = []
        for _, context, continuation in requests:
            cut = Cut((), (), tuple(context))
            fitted = self.prompts.fit(cut, len(continuation) - 1, "A request")
            asked.append((fitted, tuple(continuation)))
        with _bar(len(asked), "Reading text", disable_tqdm) as bar:
            found = score(self.lm, asked, lambda *_: bar.update())
        return [_pair(one) for one in found]

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probability of whole texts in nats, read in stretches and without windows.

        Raises:
            InputError: a text that can't be encoded; the message names task and document.
        """
        parts: list[Any] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            with _named(request):
                ids = self.tok_encode(request.args[0])
            for stretch in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1):
                parts.append((None, *make_disjoint_window(stretch)))
                owners.append(index)
        sums = [0.0] * len(requests)
        for owner, (logprob, _) in zip(
            owners, self._loglikelihood_tokens(parts, disable_tqdm), strict=True
        ):
            sums[owner] += logprob
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Free answers, each cut before the first of its stop strings.

        Raises:
            InputError: a request that can't be read; the message names task and document.
        """
        end = str(self.tokenizer.decode([self.eot_token_id], skip_special_tokens=False))
        asked = []
        for request in requests:
            with _named(request) as name:
                context, wished = request.args[:2]
                wish = Wish.of(wished, self._max_gen_toks, end)
                cut = self.prompts.cut(context, request.doc)
                if not cut.question:
                    raise InputError("the prompt has no tokens.")
                asked.append((self.prompts.fit(cut, wish.tokens, name), wish))
        with _bar(len(asked), "Running generate_until requests", disable_tqdm) as bar:

            def told(index: int, text: str) -> None:
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
                bar.update()

            return answer(self.lm, asked, told, self._counts, self._think_end)

    def _pair(self, context: str, continuation: str, doc: Any, name: str) -> tuple[Cut, Ids]:
        """A prompt and what follows it; without a prompt, the model's first token stands for it."""
        if context == "":
            first, ids = self.prefix_token_id, self._cutter.text(continuation, leading=False)
            cut, ids = Cut((), (), (first,)), ids[1:] if ids[:1] == (first,) else ids
        else:
            cut, ids = self.prompts.pair(context, continuation, doc)
        if not ids:
            raise InputError("there is no token to score in the continuation.")
        return self.prompts.fit(cut, len(ids) - 1, name), ids


def _pair(found: Likelihood) -> Pair:
    return found.logprob, found.greedy


def _bar(total: int, text: str, disable: bool) -> Any:
    return tqdm(total=total, desc=text, disable=disable)


@contextmanager
def _named(request: Instance) -> Iterator[str]:
    """The request's name, which errors begin with."""
    name = f"Document {request.doc_id} of task {request.task_name}"
    try:
        yield name
    except InputError as error:
        if str(error).startswith(name):
            raise
        kind = type(error) if type(error) in (LimitError, PromptError) else InputError
        raise kind(f"{name}: {error}") from error


def _unescaped(text: Any) -> str:
    r"""A text of the command line, in which ``\n`` and ``\t`` stand for the characters."""
    if not isinstance(text, str):
        raise InputError(f"fewshot_delimiter and prefix must be texts, got {text!r}.")
    return text.replace("\\n", "\n").replace("\\t", "\t")


def _method(
    name: Any, numbers: Mapping[str, Any], link_tokens: Any, link_choose: Any
) -> Method | None:
    """The method with those of its parameters that were given; None if nothing was said of it.

    Raises:
        InputError: an unknown method, a name that is no parameter, or a number out of range.
    """
    if name is None and not numbers and link_tokens is None:
        return None
    method = method_of(name or "ape")
    try:
        return method_of(method, numbers, link_tokens=link_tokens, link_choose=link_choose)
    except MethodError as error:
        raise MethodError(
            f"{error} What stands in model_args is an option of rag-windows or a parameter of the "
            "method; docs/lm_eval.md lists the options."
        ) from error


def _cache(cache: bool, folder: str | None, memory: Any) -> PassageCache | None:
    """The passage cache of a run: in memory, or also in a folder.

    Raises:
        InputError: a folder, but no cache.
        CacheError: the folder can't be used.
    """
    if not cache:
        if folder is not None:
            raise InputError("cache=false and cache_dir can't both be given; leave one out.")
        return None
    if folder is not None:
        return PassageCache.default(folder, memory=memory)
    return PassageCache(memory=memory)


def _load(
    pretrained: Any,
    *,
    tokenizer: Any,
    method: Method | None,
    profile: str | None,
    cache: PassageCache | None,
    device: str | None,
    device_map: Any,
    **arguments: Any,
) -> WindowedLM:
    """The model on its device; what is loaded already only gets the cache and the method.

    Raises:
        InputError: options that do not go together, or a device that is not there.
        ModelError: the model can't be found, loaded or read in windows.
    """
    if isinstance(pretrained, WindowedLM):
        if tokenizer is not None or method is not None or profile is not None:
            raise InputError(
                "A WindowedLM has its tokenizer, method and profile already; leave those out of "
                "model_args, or give the plain model as pretrained."
            )
        return pretrained if cache is None else pretrained.with_cache(cache)
    used: dict[str, Any] = {
        "method": method,
        "profile": None if profile is None else Profile.load(profile),
        "cache": cache,
    }
    if not isinstance(pretrained, str):
        return ModelSource(pretrained, tokenizer=tokenizer, **used).lm()
    if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
        _log.warning("PyTorch sees no CUDA device; %s becomes cpu.", device)
        device = "cpu"
    place = device if device_map is None else device_map
    return ModelSource(pretrained, tokenizer=tokenizer, device_map=place, **used, **arguments).lm()
