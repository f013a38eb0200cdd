"""The model class that lm-evaluation-harness runs its tasks with."""

from __future__ import annotations

import logging
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.models.utils_hf import stop_sequences_criteria
from lm_eval.utils import warning_once
from tqdm import tqdm

from lm_eval_rag_windows.prompts import (
    ChatContext,
    Cut,
    Ids,
    PromptEncoder,
    clipped,
    find_examples,
    write_chat,
)
from rag_windows import Method, PassageCache, WindowedLM, __version__
from rag_windows.errors import InputError, LimitError, ModelError
from rag_windows.integration import (
    EncodedContext,
    ModelSource,
    Piece,
    describe,
    likelihoods,
    method_of,
    whole_number,
)

AS_HF = (
    *("max_length", "add_bos_token", "prefix_token_id", "batch_size", "max_batch_size"),
    *("enable_thinking", "chat_template_args", "think_end_token"),
)
"""Options that mean what they mean with ``--model hf``."""

_log = logging.getLogger(__name__)

Pair = tuple[float, bool]


class RagWindowsLM(HFLM):
    r"""The harness's own `HFLM`, but that each few-shot example is read in a window of its own.

    The harness makes it from ``--model rag-windows --model_args ...``. With ``method=sequential``
    it computes what ``--model hf`` computes, and texts without a prompt (perplexity) it leaves to
    that class. It runs in one process.

    Args:
        pretrained: Hub name, folder, "tiny-learner", a loaded model (with ``tokenizer``), or a
            `WindowedLM`.
        method: how windows are read, such as "ape", "pcw", "deep-thinking+ape", "sequential". None
            is the profile's, else "ape".
        profile: file that ``rag-windows compare`` wrote.
        link_tokens: tokens of each window that are encoded in sight of the others.
        link_choose: which tokens: "first", those of largest "deviation", or those to which the
            "query" or its "last" token attends most.
        tokenizer: as with ``--model hf``.
        revision: as with ``--model hf``.
        dtype: as with ``--model hf``.
        device: as with ``--model hf``.
        device_map: as with ``--model hf``.
        parallelize: True is ``device_map="auto"``.
        fewshot_delimiter: what the task puts behind an example; ``\n`` is read as a line break.
        num_fewshot: how many examples a prompt has, where it does not show that itself, see
            `find_examples`; 0 for no windows at all.
        examples_per_window: how many share a window at most; default 1.
        windows: how many windows they are spread over, instead.
        max_window_tokens: longer windows are cut into several; default: half of ``max_length``.
        max_gen_toks: length of an answer where the task does not say it.
        cache: whether encoded windows are stored in memory.
        cache_memory: how much memory they may take, such as "8GiB", or "25%" of what is free.
        cache_dir: folder to store them in, too, whatever ``cache`` says.
        trust_remote_code: True is refused.
        options: those of `AS_HF`, and parameters of the method (``temperature=0.9``).

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
        max_window_tokens: int | None = None,
        max_gen_toks: int = 256,
        cache: bool = True,
        cache_dir: str | None = None,
        cache_memory: int | str = "25%",
        trust_remote_code: bool = False,
        **options: Any,
    ) -> None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InputError(
                "rag-windows runs in one process, but was started several times (by accelerate "
                "launch or torchrun). Start it once; device_map=auto spreads a model over "
                "several accelerators."
            )
        # Before gigabytes are loaded.
        self._shown = {"examples_per_window": examples_per_window, "windows": windows}
        counts = {**self._shown, "max_window_tokens": max_window_tokens, "num_fewshot": num_fewshot}
        counts |= {"max_gen_toks": max_gen_toks, "max_length": options.get("max_length")}
        for name, value in counts.items():
            if value is not None:
                whole_number(name, value, 0 if name == "num_fewshot" else 1)
        if not fewshot_delimiter or not isinstance(fewshot_delimiter, str):
            raise InputError(f"fewshot_delimiter must be a string, not {fewshot_delimiter!r}.")
        as_hf = {name: options.pop(name) for name in AS_HF if name in options}
        chosen: Method | None = None
        named = method is not None or options or link_tokens is not None
        if named or (profile is None and not isinstance(pretrained, WindowedLM)):
            links = {"link_tokens": link_tokens, "link_choose": link_choose}
            chosen = method_of(method or "ape", options, **links)
        stored: PassageCache | None = None
        if cache_dir is not None:
            stored = PassageCache.default(cache_dir, memory=cache_memory)
        elif cache:
            stored = PassageCache(memory=cache_memory)
        if isinstance(pretrained, WindowedLM):
            if tokenizer is not None or chosen is not None or profile is not None:
                raise InputError(
                    "A WindowedLM already has its tokenizer, method and profile. Leave these out "
                    "of model_args, or give the plain model as pretrained."
                )
            self.lm = pretrained if stored is None else pretrained.with_cache(stored)
        else:
            self.lm = ModelSource(
                pretrained,
                tokenizer=tokenizer,
                method=chosen,
                profile=profile,
                cache=stored,
                dtype=dtype,
                device_map=device_map or ("auto" if parallelize else _there(device)),
                revision=None if revision is None else str(revision),
                trust_remote_code=trust_remote_code or None,
            ).lm()
        if self.lm.tokenizer is None:
            raise ModelError("The harness needs a tokenizer. Give tokenizer= beside pretrained=.")
        super().__init__(
            self.lm.model, tokenizer=self.lm.tokenizer, revision=revision or "main", **as_hf
        )
        self._max_window_tokens = max_window_tokens or max(1, self.max_length // 2)
        self._max_gen_toks = max_gen_toks
        self._encoder = PromptEncoder(self.tokenizer, self.prefix_token_id, self.add_bos_token)
        # As the command line hands it over.
        self._delimiter = fewshot_delimiter.replace("\\n", "\n").replace("\\t", "\t")
        self._shots = num_fewshot
        self._wrote_chats = False
        # How many requests had so many windows; sets of prefix and windows, and what they cost.
        self._by_windows: Counter[int] = Counter()
        names = ("windows_split", "prompts_truncated", "contexts", "windows_encoded")
        self._counts = dict.fromkeys((*names, "windows_reused"), 0)

    # What the harness asks about

    @property
    def tokenizer_name(self) -> str:
        """Part of the name under which the harness stores prompts: ours are no plain strings."""
        return f"{super().tokenizer_name}__windows"

    def get_model_info(self) -> dict[str, Any]:
        """What the results file says about the model and its windows."""
        info = {
            "version": __version__,
            "method": describe(self.lm.method),
            **self._shown,
            "max_window_tokens": self._max_window_tokens,
            "requests_by_windows": {str(n): self._by_windows[n] for n in sorted(self._by_windows)},
            **self._counts,
        }
        return {**super().get_model_info(), "rag_windows": info}

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> ChatContext:
        """A prompt as a string that knows its parts."""
        self._wrote_chats = True
        variables = {**self.lm.template_kwargs, **self.chat_template_args}
        return write_chat(self.tokenizer, variables, chat_history)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Ids of a text; never a control token out of its characters."""
        if add_special_tokens is False:
            return self._encoder.boundary.encode(string)
        return list(self._encoder.ids([Piece(string)]))

    # What it computes

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[Pair]:
        """Log-probability of each continuation in nats, and whether it is the greedy answer."""
        asked = [self._pair(request) for request in requests]
        found: dict[int, Pair] = {}
        with tqdm(total=len(asked), desc="Scoring", disable=disable_tqdm) as bar:
            for context, places in self._contexts([cut for cut, _ in asked]):
                pairs = [(asked[place][0].question, asked[place][1]) for place in places]
                for place, one in zip(places, likelihoods(self.lm, context, pairs), strict=True):
                    found[place] = one.logprob, one.greedy
                    self.cache_hook.add_partial("loglikelihood", requests[place].args, found[place])
                bar.update(len(places))
        return [found[place] for place in range(len(asked))]

    def _pair(self, request: Instance) -> tuple[Cut, Ids]:
        """A prompt and what follows it; without a prompt, the model's first token stands for it."""
        context, continuation = request.args[:2]
        if context == "":
            first = self.prefix_token_id
            ids = tuple(self.tok_encode(continuation, add_special_tokens=False))
            cut, ids = Cut((), (), (first,)), ids[1:] if ids[:1] == (first,) else ids
        else:
            # White space at the end counts to what follows, and the two are encoded together.
            size = len(context.rstrip())
            pieces, ends = self._read(context, request.doc, size)
            whole = self._encoder.ids([*pieces, Piece(context[size:] + continuation)])
            cut = self._encoder.cut(pieces, ends)
            ids = whole[len(cut.ids) :]
        return self._fit(cut, len(ids) - 1, request), ids

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Free answers, one after the other, each cut before the first of its stop strings."""
        wishes, cuts = [], []
        for request in requests:
            context, wished = request.args[:2]
            wishes.append(dict(normalize_gen_kwargs(dict(wished), self._max_gen_toks)))
            cut = self.cut(context, request.doc)
            cuts.append(self._fit(cut, wishes[-1]["max_gen_toks"], request))
        found: dict[int, str] = {}
        with tqdm(total=len(cuts), desc="Answering", disable=disable_tqdm) as bar:
            for context, places in self._contexts(cuts):
                for place in places:
                    found[place] = self._answer(context, cuts[place].question, **wishes[place])
                    self.cache_hook.add_partial(
                        "generate_until", requests[place].args, found[place]
                    )
                    bar.update()
        return [found[place] for place in range(len(cuts))]

    def _answer(
        self,
        context: EncodedContext,
        question: Ids,
        *,
        until: list[str],
        max_gen_toks: int,
        **options: Any,
    ) -> str:
        end = str(self.tokenizer.decode([self.eot_token_id], skip_special_tokens=False))
        stops = [string for string in handle_stop_sequences(until, eos=end) if string]
        if not options.get("do_sample"):
            options.pop("temperature", None)
        begins = len(context.prefix_ids) + len(question)
        options["stopping_criteria"] = stop_sequences_criteria(self.tokenizer, stops, begins, 1)
        ids = self.lm.generate_ids(context, question, max_new_tokens=max_gen_toks, **options)
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return str(postprocess_generated_text(text, stops, self.think_end_token))

    def cut(self, context: str, doc: Any = None) -> Cut:
        """A prompt in token ids; ``doc`` is what its question was made of."""
        return self._encoder.cut(*self._read(context, doc, len(context)))

    def _read(self, context: str, doc: Any, size: int) -> tuple[tuple[Piece, ...], tuple[int, ...]]:
        """The prompt's pieces, up to ``size`` characters, and the ends of prefix and windows."""
        pieces: tuple[Piece, ...] = (Piece(context),)
        examples: Sequence[int] = ()
        content: tuple[int, int] | None = 0, len(context)
        if isinstance(context, ChatContext):
            pieces, examples, content = context.pieces, context.examples, context.content
        elif self._wrote_chats and self._encoder.boundary.spelled(context):
            # The task made a plain string of it, so which texts are the template's is lost.
            pieces, content = (Piece(context, trusted=True),), None
            warning_once(
                _log,
                "A task changes the prompts that the chat template wrote. They are read without "
                "windows, and all control tokens in them count as the template's.",
            )
        if content is not None:
            text = context[slice(*content)]
            found = find_examples(text, self._delimiter, shots=self._shots, doc=doc)
            examples = [content[0] + place for place in found]
        start, *ends = examples or [0]
        count = len(ends)
        each = self._shown["examples_per_window"] or 1
        windows = min(self._shown["windows"] or -(-count // each), count)
        spread = (start, *(ends[count * (i + 1) // windows - 1] for i in range(windows)))
        return tuple(clipped(pieces, 0, size)), tuple(min(end, size) for end in spread)

    def _contexts(self, cuts: Sequence[Cut]) -> Iterator[tuple[EncodedContext, list[int]]]:
        """Sets of prefix and windows, encoded, and the places of the prompts that read them."""
        groups: dict[tuple[Ids, tuple[Ids, ...]], list[int]] = defaultdict(list)
        for place, cut in enumerate(cuts):
            groups[cut.prefix, cut.windows].append(place)
        # Those which begin alike follow each other while their windows are still in the cache.
        for (prefix, windows), places in sorted(groups.items()):
            context = self.lm.encode_ids(prefix, windows)
            self._by_windows[len(windows)] += len(places)
            self._counts["contexts"] += 1
            self._counts["windows_encoded"] += context.encoded_windows
            self._counts["windows_reused"] += context.cached_windows
            yield context, places

    def _fit(self, cut: Cut, more: int, request: Instance) -> Cut:
        """A prompt that leaves positions free for ``more`` tokens.

        A window that is longer than it may be becomes several. What is too long then, loses tokens
        from its left end: the question where there are windows, the whole prompt where there are
        none or they are read one after the other.
        """
        name = f"Document {request.doc_id} of task {request.task_name}"
        if not cut.question or more < 0:
            raise InputError(
                f"{name} can't be scored, because the prompt or the text to score has "
                "no token. Check the task's doc_to_text and doc_to_target."
            )
        method, windows = self.lm.method, cut.windows
        in_order = not method.windowed or method.alignment == "in order"
        if not in_order:
            size = self._max_window_tokens
            windows = tuple(ids[i : i + size] for ids in windows for i in range(0, len(ids), size))
            self._counts["windows_split"] += sum(len(ids) > size for ids in cut.windows)
        lengths = [len(ids) for ids in windows]
        used = sum(lengths) if in_order else max(lengths, default=0)
        over = len(cut.prefix) + used + len(cut.question) + more - self.max_length
        if over <= 0:
            return Cut(cut.prefix, windows, cut.question)
        whole = not windows or not method.windowed
        ids = cut.ids if whole else cut.question
        if over >= len(ids):
            raise LimitError(
                f"{name} does not fit: it has {over} tokens more than the {self.max_length} "
                f"positions that may be used, with {len(cut.question)} of the question and {more} "
                "behind it. Use a smaller max_window_tokens or fewer examples, or raise "
                "max_length if the model can read more."
            )
        self._counts["prompts_truncated"] += 1
        part = "the prompt" if whole else "its question"
        message = "%s is longer than %d positions; it loses %d tokens from the left of %s."
        _log.warning(message, name, self.max_length, over, part)
        return Cut((), (), ids[over:]) if whole else Cut(cut.prefix, windows, ids[over:])


def _there(device: str | None) -> str | None:
    """A device, or the CPU for CUDA that is not there: the harness adds ``cuda:0`` by itself."""
    if device is None or not device.startswith("cuda") or torch.cuda.is_available():
        return device
    _log.warning("PyTorch sees no CUDA device, so %s becomes cpu.", device)
    return "cpu"
