"""Hard limits, checked before any work."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedConfig

from rag_windows.attention.rope import table_growth, table_limit
from rag_windows.errors import LimitError
from rag_windows.passage import Passage
from rag_windows.prompt import PromptParts
from rag_windows.refinement.room import check_room
from rag_windows.rescaling import Method, Refinement, window_starts


def position_limit(config: PreTrainedConfig) -> int | None:
    """Positions that windows may use: those the model was made for while its keys stay the same.

    None where the config names no limit.
    """
    text = config.get_text_config(decoder=True)
    limits = (getattr(text, "max_position_embeddings", None), table_limit(text))
    return min((int(limit) for limit in limits if limit), default=None)


def prompt_limit(config: PreTrainedConfig) -> int | None:
    """Positions that a prompt without windows may use: all those the model was made for.

    They are more than `position_limit` where rotary tables grow with the prompt: keys that were
    made under other tables would not fit, but an ordinary prompt has none. None where the config
    names no limit.
    """
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    return None if not limit else int(limit * max(1.0, table_growth(text)))


def in_order(method: Method) -> bool:
    """Whether passages stand one after the other, so that all of them share the positions."""
    return not method.windowed or method.alignment == "in order"


def check_limits(
    parts: PromptParts,
    passages: Sequence[Passage],
    method: Method,
    max_new_tokens: int,
    limit: int | None,
) -> None:
    """Refuse a request whose last token would stand beyond the model's positions.

    With windows side by side the query follows the longest one, so only that one counts; read or
    placed one after the other, all of them do.

    Args:
        parts: the prompt.
        passages: as they were given.
        method: how the windows are read.
        max_new_tokens: of the answer.
        limit: `position_limit`, or `prompt_limit` where there are no windows; None for no limit.

    Raises:
        LimitError: naming the passage (or the query) that is too long, its size and the limit.
    """
    if limit is None:
        return
    fixed = len(parts.prefix_ids) + len(parts.query_ids) + max_new_tokens
    if not parts.windows:
        _check_prompt(fixed, max_new_tokens, limit)
        return
    beside = (
        f"{len(parts.prefix_ids)} of the prefix, {len(parts.query_ids)} of the query and "
        f"{max_new_tokens} new ones"
    )
    if fixed >= limit:
        raise LimitError(
            f"{beside} make {fixed} tokens, and the model has {limit} positions: no passage would "
            "fit. Shorten the query or the prefix, or ask for fewer new tokens."
        )
    room = limit - fixed
    used = 0
    side_by_side = not in_order(method)
    for window in parts.windows:
        used = len(window.ids) if side_by_side else used + len(window.ids)
        if used > room:
            name = passage_name(passages[window.passage], window.passage)
            size = f"{len(window.ids)} tokens"
            if side_by_side:
                raise LimitError(
                    f"Passage {name} needs a window of {size}; the model's {limit} positions leave "
                    f"{room} beside {beside}. Set max_window_tokens={room} or less, and it is "
                    "split into several windows."
                )
            raise LimitError(
                f"Read one after the other, the passages pass the model's {limit} positions at "
                f"passage {name} ({size}): {used} tokens where {room} are left beside {beside}. "
                "Give fewer passages, or use a method with windows, such as 'ape' or 'pcw'."
            )
    if method.refinement is not None:
        _check_refinement(parts, passages, method, method.refinement, limit)


def _check_prompt(tokens: int, max_new_tokens: int, limit: int) -> None:
    """Refuse a prompt without windows that the model has too few positions for."""
    if tokens > limit:
        raise LimitError(
            f"The prompt has {tokens - max_new_tokens} tokens, and with {max_new_tokens} new ones "
            f"it needs {tokens} of the model's {limit} positions. Shorten the question or the "
            "conversation, or ask for fewer new tokens; retrieved text belongs into passages=, "
            "which are read in windows."
        )


def _check_refinement(
    parts: PromptParts,
    passages: Sequence[Passage],
    method: Method,
    refinement: Refinement,
    limit: int,
) -> None:
    """Refuse windows whose further passes would stand beyond the model's positions."""
    prefix, lengths = len(parts.prefix_ids), [len(window.ids) for window in parts.windows]
    if not method.windowed:
        check_room(
            refinement,
            [prefix],
            [sum(lengths)],
            limit,
            lambda _: "The one window of all passages",
            "give passages of {} tokens in all",
        )
        return

    def name(index: int) -> str:
        number = parts.windows[index].passage
        return f"A window of passage {passage_name(passages[number], number)}"

    starts = window_starts(method.alignment, prefix, lengths)
    check_room(refinement, starts, lengths, limit, name, "set max_window_tokens={} or less")


def passage_name(passage: Passage, index: int) -> str:
    """How errors and notes call a passage: its number, and its id or title if it has one."""
    label = passage.id or passage.title
    return f"{index}" if label is None else f"{index} ({label!r})"
