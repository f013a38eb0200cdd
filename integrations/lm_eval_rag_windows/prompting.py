"""From a request's prompt to prefix, windows and question in token ids."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from lm_eval_rag_windows.borders import Borders, find_borders
from lm_eval_rag_windows.contexts import ChatContext
from lm_eval_rag_windows.grouping import Grouping
from lm_eval_rag_windows.tokens import Cut, Cutter, Ids, clipped
from rag_windows.errors import InputError
from rag_windows.prompt.tokenizing import Boundary, Piece

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Examples:
    """How examples are found in a prompt, and how windows are made of them.

    Attributes:
        delimiter: what tasks put behind an example.
        shots: how many examples a prompt has; None if that is not known, 0 for none.
        grouping: examples a window.
        before: text that is put before every prompt, followed by the delimiter.
    """

    delimiter: str = "\n\n"
    shots: int | None = None
    grouping: Grouping = field(default_factory=Grouping)
    before: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.delimiter, str) or not self.delimiter:
            raise InputError(f"fewshot_delimiter must be a text, got {self.delimiter!r}.")
        shots = self.shots
        if shots is not None and (isinstance(shots, bool) or not isinstance(shots, int)):
            raise InputError(f"num_fewshot must be a whole number, got {shots!r}.")
        if shots is not None and shots < 0:
            raise InputError(f"num_fewshot must be at least 0, got {shots}.")


class Prompting:
    """Takes prompts apart.

    Args:
        cutter: of the model's tokenizer.
        examples: how examples are found.
        boundary: of the tokenizer.
    """

    def __init__(self, cutter: Cutter, examples: Examples, boundary: Boundary) -> None:
        self._cutter = cutter
        self._examples = examples
        self._spelled = boundary.controls.spelled
        self._told = False
        self.wrote_chats = False
        """Whether prompts come from a chat template; set by whoever applies one."""

    def cut(self, context: str, doc: Any = None) -> Cut:
        """Token ids of a prompt without a continuation.

        Args:
            context: the prompt.
            doc: the document that its question was made of.

        Raises:
            PromptError: text that can't be encoded safely.
        """
        pieces, ends = self._read(context, doc)
        return self._cutter.cut(pieces, ends)

    def pair(self, context: str, continuation: str, doc: Any = None) -> tuple[Cut, Ids]:
        """Token ids of a prompt and of what follows it.

        White space at the end of the prompt counts to what follows, and the two are encoded
        together, as the harness's own models do.

        Raises:
            PromptError: text that can't be encoded safely.
        """
        kept = len(context.rstrip())
        pieces, ends = self._read(context, doc, kept)
        whole = self._cutter.ids([*pieces, Piece(context[kept:] + continuation)])
        cut = self._cutter.cut(pieces, ends)
        length = len(cut.prefix) + sum(map(len, cut.windows)) + len(cut.question)
        return cut, whole[length:]

    def _read(
        self, context: str, doc: Any, kept: int | None = None
    ) -> tuple[list[Piece], list[int]]:
        """The prompt's pieces, up to ``kept`` characters, and the ends of prefix and windows."""
        pieces, borders = self._pieces(context, doc)
        if self._examples.before and not isinstance(context, ChatContext):
            before = self._examples.before + self._examples.delimiter
            pieces = [Piece(before), *pieces]
            borders = Borders(
                borders.start + len(before), tuple(end + len(before) for end in borders.ends)
            )
            kept = None if kept is None else kept + len(before)
        length = sum(len(piece.text) for piece in pieces) if kept is None else kept
        ends = [borders.start, *self._examples.grouping.ends(borders.ends)]
        return list(clipped(pieces, 0, length)), [min(end, length) for end in ends]

    def _pieces(self, context: str, doc: Any) -> tuple[list[Piece], Borders]:
        examples = self._examples
        if isinstance(context, ChatContext):
            if context.borders is not None:
                return list(context.pieces), context.borders
            if context.content is None:
                return list(context.pieces), Borders()
            start, end = context.content
            found = find_borders(
                context[start:end], examples.delimiter, shots=examples.shots, doc=doc
            )
            ends = tuple(start + end for end in found.ends)
            return list(context.pieces), Borders(start + found.start if ends else 0, ends)
        if self.wrote_chats and self._spelled.search(context):
            # The task made a plain string of it, so which texts are the template's is lost.
            if not self._told:
                self._told = True
                _log.warning(
                    "A task changes the prompts that the chat template wrote. They are read "
                    "without windows, and all control tokens in them count as the template's."
                )
            return [Piece(context, trusted=True)], Borders()
        borders = find_borders(context, examples.delimiter, shots=examples.shots, doc=doc)
        return [Piece(context)], borders
