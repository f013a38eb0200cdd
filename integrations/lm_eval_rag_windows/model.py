"""The model class that lm-evaluation-harness runs its tasks with."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.models.utils_hf import stop_sequences_criteria
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from lm_eval_rag_windows.prompts import ChatContext, ChatWriter, Cut, Ids, Prompts
from rag_windows import Method, PassageCache, Profile, WindowedLM, __version__
from rag_windows.errors import InputError, LimitError, MethodError, ModelError, PromptError
from rag_windows.integration import (
    Boundary,
    EncodedContext,
    ModelSource,
    describe,
    likelihoods,
    method_of,
    position_limit,
    whole_number,
)

UNKNOWN_LENGTH = 2048
"""Positions of a model that names no limit, as with the harness's own models."""

_log = logging.getLogger(__name__)

T = TypeVar("T")
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
        for name, value, least in (
            ("max_window_tokens", max_window_tokens, 1),
            ("max_length", max_length, 1),
            ("max_gen_toks", max_gen_toks, 1),
            ("num_fewshot", num_fewshot, 0),
            ("examples_per_window", examples_per_window, 1),
            ("windows", windows, 1),
        ):
            if value is not None:
                whole_number(name, value, least)
        if examples_per_window is not None and windows is not None:
            raise InputError(
                "examples_per_window and windows can't both be given; leave one of them out."
            )
        texts = (fewshot_delimiter, prefix)
        if not fewshot_delimiter or not all(isinstance(text, str) for text in texts):
            raise InputError(f"fewshot_delimiter and prefix must be texts, got {texts!r}.")
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
        length = max_length or position_limit(self.lm.model.config) or UNKNOWN_LENGTH
        boundary = Boundary(self.tokenizer)
        if parse_special_tokens:
            boundary = Boundary(self.tokenizer, tuple(boundary.controls))
        self._shown = {"examples_per_window": examples_per_window, "windows": windows}
        self.prompts = Prompts(
            lm=self.lm,
            boundary=boundary,
            bos=str(self.tokenizer.decode([self.prefix_token_id])),
            add_bos_token=add_bos_token,
            delimiter=_unescaped(fewshot_delimiter),
            shots=num_fewshot,
            each=examples_per_window or 1,
            windows=windows,
            before=_unescaped(prefix),
            max_length=length,
            max_window_tokens=max_window_tokens or max(1, length // 2),
        )
        # How many requests had so many windows; sets of prefix and windows, and what they cost.
        # Requests without any prompt, as for perplexity, are left out.
        self._by_windows: Counter[int] = Counter()
        self._counts = {"contexts": 0, "windows_encoded": 0, "windows_reused": 0}
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
        return self.prompts.max_length

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
                **self._shown,
                "max_window_tokens": self.prompts.max_window_tokens,
                "windows_split": self.prompts.split,
                "prompts_truncated": self.prompts.truncated,
                "requests_by_windows": {
                    str(n): self._by_windows[n] for n in sorted(self._by_windows)
                },
                **self._counts,
            },
        }

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> ChatContext:
        """A prompt as a string that knows its parts.

        Raises:
            PromptError: see `ChatWriter`.
        """
        if self.prompts.before:
            raise PromptError(
                "prefix= is for prompts without a chat template; give --system_instruction instead."
            )
        if self._writer is None:
            self._writer = ChatWriter(self.tokenizer, self._template_kwargs)
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
        return list(self.prompts.text(string, leading=add_special_tokens is not False))

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

        def keep(index: int, pair: Pair) -> None:
            self.cache_hook.add_partial("loglikelihood", requests[index].args, pair)

        return self._scored(asked, disable_tqdm, keep)

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[Pair]:
        """The same for token ids, without windows: (anything, prompt, continuation) each."""
        asked = []
        for _, context, continuation in requests:
            cut = Cut((), (), tuple(context))
            fitted = self.prompts.fit(cut, len(continuation) - 1, "A request")
            asked.append((fitted, tuple(continuation)))
        return self._scored(asked, disable_tqdm)

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
        found = self._loglikelihood_tokens(parts, disable_tqdm)
        for owner, (logprob, _) in zip(owners, found, strict=True):
            sums[owner] += logprob
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Free answers, one after the other, each cut before the first of its stop strings.

        Raises:
            InputError: a request that can't be read; the message names task and document.
        """
        asked, wishes = [], []
        for request in requests:
            with _named(request) as name:
                context, wished = request.args[:2]
                wish = self._wish(wished)
                cut = self.prompts.cut(context, request.doc)
                if not cut.question:
                    raise InputError("the prompt has no tokens.")
                asked.append(self.prompts.fit(cut, wish["max_new_tokens"], name))
                wishes.append(wish)

        def answered(context: EncodedContext, group: Sequence[int]) -> Iterator[str]:
            for index in group:
                text = self._answer(context, asked[index].question, wishes[index])
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
                yield text

        return self._together(asked, answered, "Answering", disable_tqdm)

    def _wish(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """A task's generation arguments as those of `generate_ids`, and ``until``."""
        end = str(self.tokenizer.decode([self.eot_token_id], skip_special_tokens=False))
        options = dict(normalize_gen_kwargs(dict(asked), self._max_gen_toks))
        until = handle_stop_sequences(options.pop("until", None), eos=end)
        options["max_new_tokens"] = int(options.pop("max_gen_toks"))
        if not options.get("do_sample"):
            options.pop("temperature", None)
        return {**options, "until": [string for string in until if string]}

    def _answer(self, context: EncodedContext, question: Ids, wish: Mapping[str, Any]) -> str:
        options = dict(wish)
        until = options.pop("until")
        begins = len(context.prefix_ids) + len(question)
        criteria = stop_sequences_criteria(self.tokenizer, list(until), begins, 1)
        ids = self.lm.generate_ids(context, question, stopping_criteria=criteria, **options)
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return str(postprocess_generated_text(text, list(until), self._think_end))

    def _scored(
        self,
        asked: Sequence[tuple[Cut, Ids]],
        disable_tqdm: bool,
        keep: Callable[[int, Pair], None] | None = None,
    ) -> list[Pair]:
        """Results of prompts with what follows them; each is kept as soon as it is there."""

        def scored(context: EncodedContext, group: Sequence[int]) -> Iterator[Pair]:
            pairs = [(asked[index][0].question, asked[index][1]) for index in group]
            for index, one in zip(group, likelihoods(self.lm, context, pairs), strict=True):
                if keep is not None:
                    keep(index, (one.logprob, one.greedy))
                yield one.logprob, one.greedy

        cuts = [cut for cut, _ in asked]
        return self._together(cuts, scored, "Scoring", disable_tqdm, counted=keep is not None)

    def _together(
        self,
        cuts: Sequence[Cut],
        work: Callable[[EncodedContext, Sequence[int]], Iterable[T]],
        title: str,
        disable_tqdm: bool,
        *,
        counted: bool = True,
    ) -> list[T]:
        """Results of prompts; ``work`` gets those that read one set of prefix and windows.

        Sets come sorted, so that those which begin alike follow each other while their windows are
        still in the cache.
        """
        groups: dict[tuple[Ids, tuple[Ids, ...]], list[int]] = {}
        for index, cut in enumerate(cuts):
            groups.setdefault((cut.prefix, cut.windows), []).append(index)
        found: dict[int, T] = {}
        with tqdm(total=len(cuts), desc=title, disable=disable_tqdm) as bar:
            for (prefix, windows), group in sorted(groups.items()):
                context = self.lm.encode_ids(prefix, windows)
                if counted:
                    self._by_windows[len(windows)] += len(group)
                    self._counts["contexts"] += 1
                    self._counts["windows_encoded"] += context.encoded_windows
                    self._counts["windows_reused"] += context.cached_windows
                for index, one in zip(group, work(context, group), strict=True):
                    found[index] = one
                    bar.update()
        return [found[index] for index in range(len(cuts))]

    def _pair(self, context: str, continuation: str, doc: Any, name: str) -> tuple[Cut, Ids]:
        """A prompt and what follows it; without a prompt, the model's first token stands for it."""
        if context == "":
            first, ids = self.prefix_token_id, self.prompts.text(continuation, leading=False)
            cut, ids = Cut((), (), (first,)), ids[1:] if ids[:1] == (first,) else ids
        else:
            cut, ids = self.prompts.pair(context, continuation, doc)
        if not ids:
            raise InputError("there is no token to score in the continuation.")
        return self.prompts.fit(cut, len(ids) - 1, name), ids


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


def _unescaped(text: str) -> str:
    r"""A text of the command line, in which ``\n`` and ``\t`` stand for the characters."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


def _method(
    name: Any, numbers: Mapping[str, Any], link_tokens: Any, link_choose: Any
) -> Method | None:
    """The method with those of its parameters that were given; None if nothing was said of it."""
    if name is None and not numbers and link_tokens is None:
        return None
    try:
        return method_of(name or "ape", numbers, link_tokens=link_tokens, link_choose=link_choose)
    except MethodError as error:
        raise MethodError(
            f"{error} What stands in model_args is an option of rag-windows or a parameter of the "
            "method; docs/lm_eval.md lists the options."
        ) from error


def _cache(cache: bool, folder: str | None, memory: Any) -> PassageCache | None:
    """The passage cache of a run: in memory, or also in a folder."""
    if not cache and folder is not None:
        raise InputError("cache=false and cache_dir can't both be given; leave one out.")
    if folder is not None:
        return PassageCache.default(folder, memory=memory)
    return PassageCache(memory=memory) if cache else None


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
    """The model on its device; what is loaded already only gets the cache and the method."""
    if isinstance(pretrained, WindowedLM):
        if tokenizer is not None or method is not None or profile is not None:
            raise InputError(
                "A WindowedLM has its tokenizer, method and profile already; leave those out of "
                "model_args, or give the plain model as pretrained."
            )
        return pretrained if cache is None else pretrained.with_cache(cache)
    own = None if profile is None else Profile.load(profile)
    if isinstance(pretrained, str):
        if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
            _log.warning("PyTorch sees no CUDA device; %s becomes cpu.", device)
            device = "cpu"
        arguments["device_map"] = device if device_map is None else device_map
    else:
        arguments = {}
    source = ModelSource(
        pretrained, tokenizer=tokenizer, method=method, profile=own, cache=cache, **arguments
    )
    return source.lm()
