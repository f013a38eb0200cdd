"""What an adapter for another framework needs, beside the names of `rag_windows` and its errors.

An adapter imports `rag_windows`, `rag_windows.errors` and this module, and nothing else of the
package; what ``__all__`` lists here stays as stable as the names of `rag_windows` itself.

A `ModelSource` loads the model once, when it is needed, and gives what its files say before;
`Calls` answers calls together, from threads and event loops. A framework's model takes
`ModelOptions`, makes a `ModelCall` of what it is asked, with an `AnswerReader` for calls of tools,
and reports an `answer_record`. For those who cut prompts themselves, `ChatTemplate` writes a
`Conversation` in `Piece`s, a `Boundary` turns these into ids, and `likelihoods` scores ids behind
what `WindowedLM.encode_ids` gave.

A question over documents, which is answered together with those of other threads::

    source, calls = ModelSource("tiny-reader", method="auto"), Calls(max_rows=32)

    def prepared(question, documents):
        passages = [passage_of(document) for document in documents]
        return lambda: Call(lm=source.lm(), query=question, passages=passages)

    answer = calls.answer(
        prepared("Where was Vara Zelmont born?", ["Vara Zelmont was born in Sulava."]),
        lambda call, generation: generation.text,
    )
"""

from __future__ import annotations

import codecs
import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, Field, model_validator

from rag_windows.attention.layers import position_limit
from rag_windows.cache.fingerprint import tokenizer_fingerprint
from rag_windows.cache.passage_cache import parse_size
from rag_windows.calibration.profile import Profile
from rag_windows.errors import InputError
from rag_windows.guard import guard_of
from rag_windows.icl.scoring import Likelihood
from rag_windows.icl.scoring import likelihoods as likelihoods_of
from rag_windows.integration.calls import Call, Calls
from rag_windows.integration.shared_models import ModelSource, folder_state, load_shared
from rag_windows.methods import Method, describe, linked, resolve
from rag_windows.methods.linked import Choose, LinkTokens
from rag_windows.methods.registry import with_parameters
from rag_windows.model import WindowedLM
from rag_windows.passage import (
    CHUNK_KEY,
    NEIGHBOURS,
    Passage,
    chunk_metadata,
    passage_of,
    refuse_single,
    with_neighbours,
)
from rag_windows.prefill import EncodedContext
from rag_windows.prompt.answer_form import alike, check_schema
from rag_windows.prompt.answer_form import available as schemas_available
from rag_windows.prompt.conversation import (
    BaseLayout,
    ChatTemplate,
    Conversation,
    knows_variable,
    search_text,
)
from rag_windows.prompt.detokenize import Detokenizer
from rag_windows.prompt.tokenizing import Boundary, Piece
from rag_windows.prompt.tools import AnswerReader, ToolAnswer, ToolFormat
from rag_windows.request import PassageLike, check_citations, labels_of
from rag_windows.results import Generation, carried
from rag_windows.sampling import Penalties, sampling_options, whole_number
from rag_windows.visible_text import one_line

__all__ = [
    "CHUNK_KEY",
    "NEIGHBOURS",
    "AnswerReader",
    "Boundary",
    "Call",
    "Calls",
    "ChatTemplate",
    "Conversation",
    "EncodedContext",
    "ModelCall",
    "ModelOptions",
    "ModelSource",
    "PassageLike",
    "Penalties",
    "Piece",
    "ToolAnswer",
    "ToolFormat",
    "Transcript",
    "UnknownArgumentError",
    "alike",
    "answer_record",
    "call_entry",
    "carried",
    "check_citations",
    "check_schema",
    "chunk_metadata",
    "describe",
    "folder_state",
    "guard_of",
    "joined_messages",
    "keep_neighbours",
    "knows_variable",
    "labels_of",
    "leading_ids",
    "likelihoods",
    "load_shared",
    "logprob_content",
    "method_of",
    "one_line",
    "one_way",
    "passage_list",
    "passage_of",
    "refuse_single",
    "position_limit",
    "profile_of",
    "sampling_options",
    "schemas_available",
    "search_text",
    "tokenizer_fingerprint",
    "unalias",
    "warn_without_windows",
    "whole_number",
    "without_calls",
]


def method_of(
    value: str | Method | Mapping[str, Any],
    numbers: Mapping[str, Any] | None = None,
    *,
    link_tokens: LinkTokens | None = None,
    link_choose: Choose = "first",
) -> Method:
    """A method out of its name, itself, or what `describe` made of it.

    Args:
        numbers: parameters to set, each in the method or in its reader.
        value: the name, the method, or the description.
        link_tokens: where given, make it a `rag_windows.Linked`.
        link_choose: which tokens that encodes again, as for `rag_windows.Linked`.

    Raises:
        MethodError: an unknown name, or numbers that it does not have or that are out of range.
    """
    return linked(with_parameters(resolve(value), numbers or {}), link_tokens, link_choose)


def profile_of(value: Profile | str | Path | Mapping[str, Any] | None) -> Profile | None:
    """A calibration profile out of its path, itself, or its JSON as a mapping."""
    if isinstance(value, Mapping):
        return Profile.from_json(json.dumps(value))
    return None if value is None else Profile.of(value)


class ModelOptions(BaseModel):
    """Arguments that the models of all frameworks take.

    Attributes:
        device_map: where the weights go: "cpu", "cuda", "cuda:1"; "auto" or a mapping spreads them
            (needs accelerate). None for the best device: CUDA where there is one.
        model_kwargs: for ``AutoModelForCausalLM.from_pretrained``: quantization_config, ...
        method: how the windows are read: "ape", "pcw", "sequential", ... or a `Method`; None takes
            that of the profile, that of ``lm``, or "auto".
        link_tokens: tokens of each window to encode again with the other windows in view: a number
            (int), a share (float), or "all"; see `rag_windows.Linked`.
        link_choose: which tokens: the "first" ones, those with the largest "deviation", or those to
            which the "query" or its "last" token attends most, which reads it twice.
        fallback: "sequential" or a `rag_windows.Guard`: where windows are likely to answer worse,
            passages are read one after the other, and the answer's ``fallback`` says so.
        max_window_tokens: a longer passage becomes several windows.
        header: line above each passage: "title", "none", "number", "number+title", or a function.
        template_kwargs: variables of the chat template, such as ``{"enable_thinking": False}``.
        temperature: 0 takes the likeliest token, more samples; None leaves it to the model.
        top_p: nucleus sampling.
        generate_kwargs: for transformers' ``generate``; those of a call override them.
        batch_rows: number of calls, by tasks or by threads, that are answered together: one forward
            pass gives each its next token, and passages that several calls read are held once. The
            others wait. 1 answers one call after the other.
        batch_bytes: memory for the calls that are answered together: bytes, a text such as "8GiB",
            or a share of what is free, such as "50%"; None for 75% of what is free. The others
            wait; a call that needs more on its own is a `LimitError`.
    """

    device_map: Any = None
    model_kwargs: dict[str, Any] = Field(default_factory=dict, repr=False)
    method: Any = None
    link_tokens: Any = None
    link_choose: Choose = "first"
    fallback: Any = None
    max_window_tokens: int | None = Field(default=None, ge=1)
    header: Any = "title"
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    generate_kwargs: dict[str, Any] = Field(default_factory=dict)
    batch_rows: int = Field(default=32, ge=1)
    batch_bytes: int | str | None = None

    @model_validator(mode="after")
    def _check_reading(self) -> Self:
        if self.batch_bytes is not None:
            parse_size(self.batch_bytes, "batch_bytes", 1 << 40)
        guard_of(self.fallback)
        self.reading({}, "auto")
        return self

    def reading(self, options: dict[str, Any], default: str | Method) -> Method:
        """How a call reads its windows; removes what says so from its ``options``.

        ``default`` is the method where neither the call nor the constructor names one.
        """
        chosen = options.pop("method", None)
        own = default if self.method is None else self.method
        return method_of(
            own if chosen is None else chosen,
            link_tokens=options.pop("link_tokens", self.link_tokens),
            link_choose=options.pop("link_choose", self.link_choose),
        )


@dataclass(frozen=True, kw_only=True)
class ModelCall(Call):
    """A call of a framework's model.

    Attributes:
        method: how its windows are read.
        model_name: as the answer reports it.
        reader: of the answer; finds calls of tools.
        parallel: whether an answer may call several tools.
    """

    method: Method
    model_name: str
    reader: AnswerReader
    parallel: bool = True


class UnknownArgumentError(InputError, TypeError):
    """A constructor or a call was given an argument that it does not have, or has already."""


def unalias(given: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Arguments under our names; an `UnknownArgumentError` where one comes under two."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        ours = aliases.get(name, name)
        if ours in found:
            message = f"{name} and {ours} are the same argument. Give only one of them."
            raise UnknownArgumentError(message)
        found[ours] = value
    return found


def passage_list(name: str, documents: object) -> list[Passage]:
    """The passages of a list of documents, see `passage_of`; None is an empty list.

    An `InputError`, which tells the ``name``, says that it is no list or what is no document.
    """
    if documents is None:
        return []
    if isinstance(documents, str | Mapping) or not isinstance(documents, Sequence):
        raise InputError(
            f"{name} must be a list of documents, mappings or strings, not "
            f"{type(documents).__name__}. Wrap a single one in []."
        )
    return [passage_of(document) for document in documents]


def keep_neighbours(documents: Iterable[Any], most: int = NEIGHBOURS) -> list[Any]:
    """Copies of a framework's documents, which keep their neighbours wherever they are stored.

    Give it the chunks of a whole corpus before they go into a store, as splitters made them:
    LangChain documents with ``source`` and ``start_index`` (``add_start_index=True``), LlamaIndex
    nodes with their source and previous nodes. What a store then gives back makes passages with
    `Passage.before`. It stands as JSON in one metadata entry, which no model and no embedding of
    LlamaIndex is shown.

    Args:
        documents: in any order; what does not say where it stands comes back without the entry.
        most: how many chunks, see `with_neighbours`.
    """
    refuse_single(documents)
    given = list(documents)
    copies = []
    for document, passage in zip(given, with_neighbours(given, most), strict=True):
        node = getattr(document, "node", document)
        if not hasattr(node, "model_copy"):
            raise InputError(
                f"{type(node).__name__} is neither LangChain's document nor LlamaIndex's node. "
                "For passages, use with_neighbours()."
            )
        changes: dict[str, Any] = {"metadata": {**node.metadata, **chunk_metadata(passage)}}
        for name in ("excluded_llm_metadata_keys", "excluded_embed_metadata_keys"):
            if hasattr(node, name):
                changes[name] = list(dict.fromkeys([*getattr(node, name), CHUNK_KEY]))
        copy = node.model_copy(update=changes)
        copies.append(copy if node is document else document.model_copy(update={"node": copy}))
    return copies


def one_way(ways: Mapping[str, list[Passage]]) -> list[Passage]:
    """The passages of a request, which may come in one way only; several are an error."""
    used = {name: passages for name, passages in ways.items() if passages}
    if len(used) > 1:
        names = " and ".join(f"{name} ({len(passages)})" for name, passages in used.items())
        raise InputError(
            f"Documents are given in several ways at once: {names}. Give all of them in one way."
        )
    return next(iter(used.values()), [])


def call_entry(name: str, arguments: Any, identity: str | None) -> dict[str, Any]:
    """A tool's call in the form of OpenAI's chat API, which chat templates read, too."""
    function = {"name": name, "arguments": arguments}
    return {"id": identity, "type": "function", "function": function}


class Transcript:
    """Puts the messages of a framework together, and the passages that they bring.

    An adapter reads its framework's own classes and adds one message after the other; what chat
    templates and windows want of a conversation is done here.

    Args:
        noun: what a note to the model calls the passages.

    Attributes:
        messages: in the form of OpenAI's chat API, one for each that was added.
        ways: the passages, by the way in which they came, of which `one_way` refuses several.
    """

    def __init__(self, noun: str = "documents") -> None:
        self._noun = noun
        self.messages: list[dict[str, Any]] = []
        self.ways: dict[str, list[Passage]] = {}
        self._blank: set[int] = set()
        self._answered: set[str] = set()

    def bring(self, way: str, passages: Iterable[Passage]) -> None:
        """Add passages that came in one way."""
        self.ways.setdefault(way, []).extend(passages)

    def count(self) -> int:
        """How many passages there are."""
        return sum(map(len, self.ways.values()))

    def add(
        self,
        role: str,
        text: str,
        *,
        brought: int = 0,
        calls: Sequence[Mapping[str, Any]] = (),
        call_id: str | None = None,
        name: str | None = None,
    ) -> None:
        """Add a message.

        Args:
            role: "system", "user", "assistant" or "tool".
            text: without the passages. A tool's result that was nothing else becomes a note.
            brought: how many passages stood in the message.
            calls: of tools by the assistant, as `call_entry` makes them.
            call_id: of the call that a tool's message answers.
            name: of that tool, or of who speaks.
        """
        said: dict[str, Any] = {"role": role, "content": text}
        if name is not None:
            said["name"] = name
        if role == "tool":
            said["tool_call_id"] = call_id
            if brought and not text:
                note = f"{brought} {self._noun}; they stand at the beginning of this conversation."
                said["content"] = note
                self._answered.add(str(call_id))
        elif calls:
            said["tool_calls"] = list(calls)
        elif brought and not text.strip():
            self._blank.add(len(self.messages))
        self.messages.append(said)

    def conversation(self, *, tools: bool) -> list[dict[str, Any]]:
        """The messages as `WindowedLM.generate` takes them.

        A message that held nothing but passages is left out, and messages of one role that follow
        each other are joined; many templates want that. Where no ``tools`` are bound, calls whose
        results are all passages are left out with them: the model sees the passages and the
        question, in any chat template.
        """
        said = [one for place, one in enumerate(self.messages) if place not in self._blank]
        return joined_messages(said if tools else without_calls(said, self._answered))


def without_calls(read: list[dict[str, Any]], brought: set[str]) -> list[dict[str, Any]]:
    """Messages, without calls of tools that brought only documents, and without their results."""
    asked = [{call["id"] for call in said.get("tool_calls", ())} for said in read]
    hidden = brought - {id_ for ids in asked if not ids <= brought for id_ in ids}
    return [
        said
        for said, ids in zip(read, asked, strict=True)
        if said.get("tool_call_id") not in hidden and not (ids and ids <= hidden)
    ]


def joined_messages(read: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with those of one role, beside calls of tools, put together."""

    def kind(said: Mapping[str, Any]) -> object:
        return said["role"] if said.keys() == {"role", "content"} else object()

    joined: list[dict[str, Any]] = []
    for _, group in groupby(read, kind):
        first, *more = group
        if more:
            texts = [one["content"] for one in (first, *more)]
            first = {**first, "content": "\n\n".join(text for text in texts if text)}
        joined.append(first)
    return joined


def logprob_content(generation: Generation, tokenizer: Any) -> list[dict[str, Any]]:
    """The log-probabilities of an answer's tokens as OpenAI's models report them.

    The ``bytes`` of all tokens joined are the answer's text: tokens of the reasoning and behind a
    stop string are left out. Of a token in which a stop string begins, or reasoning ends, ``token``
    and ``bytes`` are its part in the text, and ``logprob`` that of the whole token.
    """
    detokenizer = Detokenizer(tokenizer)
    thought = generation.usage.reasoning_tokens
    noted = (generation.logprobs or ())[max(0, thought - 1) :]
    pieces = [detokenizer.token_bytes(one.id) for one in noted]
    spans = _spans(pieces, generation.text, bool(thought))

    def entry(text: bytes, logprob: float) -> dict[str, Any]:
        return {"token": text.decode(errors="replace"), "bytes": [*text], "logprob": logprob}

    content = []
    for one, piece, (start, end) in zip(noted, pieces, spans, strict=True):
        if start < end:
            top = [entry(detokenizer.token_bytes(id_), logprob) for id_, logprob in one.top]
            content.append({**entry(piece[start:end], one.logprob), "top_logprobs": top})
    return content


def _spans(pieces: Sequence[bytes], text: str, thought: bool) -> list[tuple[int, int]]:
    """Which part of each piece stands in a text; the pieces joined hold it somewhere.

    Where the model ``thought``, the first piece ends the reasoning, and may begin the text.
    """
    written, wanted = b"".join(pieces), text.encode(errors="replace")
    behind = len(pieces[0]) if thought and pieces else 0
    start = written.find(wanted, behind)
    if start < 0:
        start = written.find(wanted)
    if start < 0:
        # Bytes that are no UTF-8, which are replaced in the text: so many characters are taken.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        left, size = len(text), 0
        for index, byte in enumerate(written[behind:], 1):
            if decoded := decoder.decode(bytes([byte])):
                left -= len(decoded)
                if left < 0:
                    break
                size = index
        start, wanted = behind, written[behind:][: size if left <= 0 else None]
    spans, at = [], 0
    for piece in pieces:
        low = max(0, start - at)
        high = max(low, min(len(piece), start + len(wanted) - at))
        spans.append((low, high))
        at += len(piece)
    return spans


def answer_record(generation: Generation) -> dict[str, Any]:
    """What is reported of an answer beside its text, as plain JSON.

    Keys:
        finish_reason: "stop", "length" or "cancelled".
        timings: seconds: encode_s, ttft_s, total_s.
        windows: for each window the passage, its part of how many, the span of the passage's text
            and its tokens.
        fallback: None, or what the guard found: where it was ``taken``, passages were read one
            after the other.
        supported: see `Generation`.
        statements: of each sentence where it starts and ends, its text, and its citations: the
            passage's number, mass, drop and supports.
    """
    fallback = generation.fallback
    span = ("passage", "part", "parts", "start", "end")
    return {
        "finish_reason": generation.finish_reason,
        "timings": asdict(generation.timings),
        "windows": [
            {**{name: getattr(window, name) for name in span}, "tokens": len(window.ids)}
            for window in generation.windows
        ],
        "fallback": None if fallback is None else fallback.as_dict(),
        "supported": generation.supported,
        "statements": [
            {**asdict(one), "citations": [asdict(cited) for cited in one.citations]}
            for one in generation.statements
        ],
    }


LONG_PROMPT_TOKENS = 512
"""A prompt of so many tokens and no passages probably holds documents that were glued together."""

_log = logging.getLogger("rag_windows")
_warned = threading.Event()


def warn_without_windows(text: str, count: Callable[[str], int], instead: str) -> None:
    """Log a warning, once a process, of a long prompt without passages: it makes no windows.

    ``count`` tells how many tokens a text has, ``instead`` is the line that hands over documents.
    """
    if _warned.is_set() or len(text) < LONG_PROMPT_TOKENS:
        return
    tokens = count(text)
    if tokens >= LONG_PROMPT_TOKENS:
        _warned.set()
        _log.warning(
            "This prompt has %d tokens and no passages, so nothing is read in windows or cached. "
            "If it holds retrieved documents, pass them separately: %s",
            tokens,
            instead,
        )


def leading_ids(tokenizer: Any) -> tuple[int, ...]:
    """Ids that a tokenizer puts before a text by itself."""
    return tuple(BaseLayout(tokenizer).leading)


def likelihoods(
    lm: WindowedLM,
    context: EncodedContext,
    asked: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
) -> list[Likelihood]:
    """How likely continuations are behind questions, ids of both, in order.

    ``context`` is what all of them read, from `WindowedLM.encode_ids`.
    """
    return likelihoods_of(lm.engine.decoder, context, asked)
