"""Options of transformers' generate that can't be had, and why."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from rag_windows.errors import GenerationError, InputError

OURS = (
    "input_ids",
    "inputs",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "past_key_values",
)
"""Model inputs that the windows decide; a caller can't pass them."""

OFF = (None, False)
WITHOUT_WINDOWS: dict[str, tuple[tuple[Any, ...], str]] = {
    # transformers takes "hybrid", the default of older Gemma models, for no wish at all.
    "cache_implementation": ((*OFF, "hybrid"), "the windows' keys stand outside of any cache"),
    "assistant_early_exit": (OFF, "its shortened model would not read the windows"),
    "output_attentions": (
        OFF,
        "fused attention has no weights to return; read Generation.citations",
    ),
    "guidance_scale": ((*OFF, 1), "its second, unconditional pass would read the windows too"),
    "negative_prompt_ids": (OFF, "its second, unconditional pass would read the windows too"),
}
"""Options of ``generate`` that can't work beside windows: values that switch them off, and why."""

WITHOUT_ROWS: dict[str, tuple[tuple[Any, ...], str]] = {
    "output_hidden_states": (
        OFF,
        "each window answers in a row of its own, so there is no one row",
    ),
}
"""The same for windows that answer each for itself."""


WHOLE = ("max_new_tokens", "num_beams", "num_return_sequences", "prefill_chunk_size")
"""Options that count something, of which transformers takes values that it can't work with."""


def whole_number(name: str, value: object, least: int = 1) -> int:
    """A number that counts something, as an int.

    Args:
        name: of the argument.
        value: an int, or another type's whole number, such as numpy's.
        least: the smallest one that is allowed.

    Raises:
        InputError: it is another kind of value, or below ``least``.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]  # what is none raises TypeError
    except TypeError:
        raise InputError(
            f"{name} must be a whole number of at least {least}, got {value!r}."
        ) from None
    if number < least:
        raise InputError(f"{name} must be at least {least}, got {number}.")
    return number


def check_counts(options: Mapping[str, Any]) -> None:
    """Refuse options that count something with what is no count.

    Args:
        options: of ``generate``, which may hold a ``generation_config``.

    Raises:
        InputError: naming the first.
    """
    for name in WHOLE:
        for given in (options.get(name), getattr(options.get("generation_config"), name, None)):
            if given is not None:
                whole_number(name, given)


def refuse_ours(options: Mapping[str, Any]) -> None:
    """Refuse model inputs among a caller's options.

    Raises:
        GenerationError: naming them.
    """
    taken = sorted(set(options) & set(OURS))
    if taken:
        raise GenerationError(
            f"{taken} can't be passed to generate: rag-windows builds them from the query and "
            "the passages. Use encode_ids and generate_ids for token-level work."
        )


def refuse(
    table: Mapping[str, tuple[tuple[Any, ...], str]], option: Callable[[str], Any], what: str
) -> None:
    """Refuse options that a table names.

    Args:
        table: per option, the values that switch it off, and why it can't be on.
        option: the value that generate would use.
        what: how the error calls what they can't be used with.

    Raises:
        GenerationError: naming the first.
    """
    for name, (off, reason) in table.items():
        value = option(name)
        plain = value is None or isinstance(value, bool | str | int | float)
        if not plain or value not in off:
            raise GenerationError(
                f"{name}={value!r} can't be used with {what}: {reason}. Leave it out (of "
                "the generation_config too), or ask without passages."
            )
