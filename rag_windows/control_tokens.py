"""Which token ids text must never produce, and how they are spelled.

The rule, for every tokenizer:

* A *control token* is any special or added token (``special`` flag set or not): role markers, end
  of turn, ``<think>``, ``[INST]``, reserved and unused ones.
* Added tokens that are only white space (or SentencePiece's sign for it) and not special are
  ordinary text: GPT-NeoX, Phi, Gemma and others keep runs of spaces there.
* The unknown token may come out of characters that the vocabulary lacks, never out of its own
  spelling. Where it doubles as a beginning, end, separator, class or mask token it is a control
  token like the others.
* Markers that a template writes as plain text (``[INST]`` of Llama 2, where it is no token) are
  text to the tokenizer, so that other text can hold them too; nothing here can tell them apart.
* Tokens named by the caller (``text_tokens``) are ordinary text: words somebody added to the
  vocabulary, or a padding token such as ``!`` that ordinary text is spelled with.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import models

from rag_windows.errors import PromptError
from rag_windows.forks import cached_property


@dataclass(frozen=True)
class ControlTokens:
    """The control tokens of one tokenizer.

    Attributes:
        by_content: spelling -> id of every control token.
        unknown: spelling and id of the unknown token where unknown characters may produce it.
        text_tokens: spelling -> added token object of those that count as ordinary text.
        strips: spelling -> (eats white space before it, after it), where one of them is true.
    """

    by_content: Mapping[str, int]
    unknown: tuple[str, int] | None
    text_tokens: Mapping[str, Any]
    strips: Mapping[str, tuple[bool, bool]]

    @classmethod
    def of(cls, tokenizer: Any, text_tokens: Collection[str] = ()) -> ControlTokens:
        """Read them off a transformers tokenizer.

        Args:
            tokenizer: a ``PreTrainedTokenizerBase``.
            text_tokens: spellings of special or added tokens that text may produce.

        Raises:
            PromptError: a name in ``text_tokens`` is no special or added token.
        """
        added = {token.content: (id_, token) for id_, token in _added(tokenizer).items()}
        ids = {content: id_ for content, (id_, _) in added.items()}
        for content, id_ in zip(
            tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True
        ):
            # A special token that the vocabulary lacks has the unknown token's id, or none.
            if id_ is not None and (
                id_ != tokenizer.unk_token_id or content == tokenizer.unk_token
            ):
                ids.setdefault(str(content), id_)
        strangers = sorted(set(text_tokens) - ids.keys())
        if strangers:
            raise PromptError(
                f"text_tokens names {strangers}, which are no special or added tokens of this "
                "tokenizer; leave them out."
            )
        kept = {
            content: token
            for content, (_, token) in added.items()
            if content in text_tokens or (not token.special and _blank(content))
        }
        unknown = _unknown(tokenizer)
        harmless = {ids[name] for name in (*kept, *text_tokens)}
        if unknown:
            harmless.add(unknown[1])
        control = {content: id_ for content, id_ in ids.items() if id_ not in harmless}
        strips = {
            content: (token.lstrip, token.rstrip)
            for content, (_, token) in added.items()
            if token.lstrip or token.rstrip
        }
        return cls(control, unknown, kept, strips)

    @cached_property
    def ids(self) -> frozenset[int]:
        """Ids that text must never produce."""
        return frozenset(self.by_content.values())

    @cached_property
    def spelled(self) -> re.Pattern[str]:
        """Matches a control token's spelling, or the unknown token's, the longest first."""
        names = list(self.by_content)
        if self.unknown:
            names.append(self.unknown[0])
        return re.compile(any_of(names))

    def name(self, id_: int) -> str:
        """Spelling of a control token, for messages."""
        return next((name for name, i in self.by_content.items() if i == id_), f"id {id_}")


def any_of(strings: Iterable[str]) -> str:
    """Regular expression matching any of the strings, as a prefix tree; the longest match wins.

    A flat alternation of the thousands of reserved tokens that some vocabularies hold would be
    tried one by one at every position.
    """
    tree: dict[str, Any] = {}
    for string in strings:
        node = tree
        for character in string:
            node = node.setdefault(character, {})
        if string:
            node[""] = {}
    return _pattern(tree) if tree else r"(?!)"


def _pattern(tree: dict[str, Any]) -> str:
    prefix = ""
    while len(tree) == 1 and "" not in tree:  # unbranched: no recursion for long tokens
        character, tree = next(iter(tree.items()))
        prefix += re.escape(character)
    branches = [re.escape(c) + _pattern(node) for c, node in sorted(tree.items()) if c]
    if not branches:
        return prefix
    return f"{prefix}(?:{'|'.join(branches)}){'?' if '' in tree else ''}"


def _added(tokenizer: Any) -> Mapping[int, Any]:
    decoder = getattr(tokenizer, "added_tokens_decoder", None)
    return decoder if isinstance(decoder, Mapping) else {}


def _blank(content: str) -> bool:
    return content.replace("▁", " ").isspace()


def _unknown(tokenizer: Any) -> tuple[str, int] | None:
    if tokenizer.unk_token is None or tokenizer.unk_token_id is None:
        return None
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    named = isinstance(model, models.Model) and not isinstance(model, models.Unigram)
    if named and getattr(model, "unk_token", None) != tokenizer.unk_token:
        return None  # declared, but no character gives it: byte-level vocabularies
    names = ("bos_token", "eos_token", "sep_token", "cls_token", "mask_token")
    if any(getattr(tokenizer, name, None) == tokenizer.unk_token for name in names):
        return None
    return str(tokenizer.unk_token), int(tokenizer.unk_token_id)
