"""The model class that lm-evaluation-harness runs its tasks with."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

import rag_windows
from lm_eval_rag_windows.contexts import ChatContext, ChatWriter
from lm_eval_rag_windows.generating import Wish
from lm_eval_rag_windows.options import Options
from lm_eval_rag_windows.reader import Prepared, Reader
from lm_eval_rag_windows.scoring import Likelihood
from lm_eval_rag_windows.tokens import Cut
from rag_windows.errors import InputError, LimitError, ModelError, PromptError
from rag_windows.methods import describe

Pair = tuple[float, bool]


class RagWindowsLM(TemplateLM):
    """A local causal LM that reads each few-shot example in a window of its own.

    The harness makes it from ``--model rag-windows --model_args ...``. With ``method=sequential``
    it computes what the harness's own ``--model hf`` computes. It runs in one process.

    Args:
        pretrained: the model, see `Options`.
        arguments: all other options, see there.

    Raises:
        InputError, ModelError, CacheError: an option that can't be used.
    """

    def __init__(self, pretrained: Any, **arguments: Any) -> None:
        super().__init__()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InputError(
                "rag-windows runs in one process, and this one was started several times (by "
                "accelerate launch or torchrun). Start it once; device_map=auto spreads a model "
                "over several accelerators."
            )
        self._options = Options.of({"pretrained": pretrained, **arguments})
        # Before gigabytes are loaded.
        examples = self._options.examples
        self.lm = self._options.load()
        if self.lm.tokenizer is None:
            raise ModelError("The harness needs a tokenizer: give tokenizer= beside pretrained=.")
        self.tokenizer: Any = self.lm.tokenizer
        self._device = self.lm.model.device
        self._examples = examples
        self._reader = Reader(self.lm, self._options, self.prefix_token_id)
        self._writer: ChatWriter | None = None

    # What the harness asks about

    @property
    def eot_token_id(self) -> int:
        """Id of the end token."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Id of what stands before a text that has no prompt."""
        if self._options.prefix_token_id is not None:
            return self._options.prefix_token_id
        beginning = self.tokenizer.bos_token_id
        return self.eot_token_id if beginning is None else int(beginning)

    @property
    def max_length(self) -> int:
        """Positions that may be used."""
        return self._reader.max_length

    @property
    def batch_size(self) -> int | str | None:
        """As it was given; how many rows make a pass is found from their size."""
        return self._options.batch_size

    @property
    def tokenizer_name(self) -> str:
        """Part of the name under which the harness keeps prompts: ours are no plain strings."""
        return str(self.tokenizer.name_or_path).replace("/", "__") + "__windows"

    def get_model_info(self) -> dict[str, Any]:
        """What the results file says about the model and its windows."""
        grouping = self._examples.grouping
        return {
            "model_num_parameters": int(self.lm.model.num_parameters()),
            "model_dtype": str(self.lm.model.dtype),
            "model_revision": self._options.revision,
            "rag_windows": {
                "version": rag_windows.__version__,
                "method": describe(self.lm.method),
                "examples_per_window": grouping.examples_per_window,
                "windows": grouping.windows,
                "max_window_tokens": self._reader.fitting.window,
                "windows_split": self._reader.fitting.split,
                "prompts_truncated": self._reader.fitting.truncated,
                **self._reader.counts.described(),
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
            kwargs = self._options.template_kwargs(self.lm)
            self._writer = ChatWriter(self.tokenizer, self._reader.boundary, kwargs)
            self._reader.prompting.wrote_chats = True
        return self._writer.write(chat_history, add_generation_prompt=add_generation_prompt)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Ids of a text; never a control token out of its characters.

        Args:
            string: the text.
            add_special_tokens: False leaves out what stands before a prompt.
            kwargs: of the harness; none has a meaning here.
        """
        cutter = self._reader.cutter
        return list(cutter.plain(string) if add_special_tokens is False else cutter.text(string))

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
                asked.append(self._reader.pair(context, continuation, request.doc, name))
        with _bar(len(asked), "Running loglikelihood requests", disable_tqdm) as bar:

            def told(index: int, found: Likelihood) -> None:
                self.cache_hook.add_partial("loglikelihood", requests[index].args, _pair(found))
                bar.update()

            return [_pair(one) for one in self._reader.score(asked, told)]

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[Pair]:
        """The same for token ids, without windows: (anything, prompt, continuation) each."""
        asked = []
        for _, context, continuation in requests:
            cut = Cut((), (), tuple(context))
            fitted = self._reader.fitting.fit(cut, len(continuation) - 1, "A request")
            asked.append(Prepared(fitted, tuple(continuation)))
        with _bar(len(asked), "Reading text", disable_tqdm) as bar:
            found = self._reader.score(asked, lambda *_: bar.update(), counted=False)
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
                wish = Wish.of(wished, self._options.max_gen_toks, end)
                asked.append(self._reader.question(context, wish, request.doc, name))
        with _bar(len(asked), "Running generate_until requests", disable_tqdm) as bar:

            def told(index: int, answer: str) -> None:
                self.cache_hook.add_partial("generate_until", requests[index].args, answer)
                bar.update()

            return self._reader.answer(asked, told, self._options.think_end_token)


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
