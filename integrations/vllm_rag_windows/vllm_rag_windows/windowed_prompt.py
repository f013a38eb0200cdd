"""What a request says of its windows: the object ``kv_transfer_params`` beside its token ids."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rag_windows.errors import InputError

_SALT = re.compile(r"rag-windows-[0-9a-f]{32}")


def new_cache_salt() -> str:
    """A ``cache_salt`` that no other request has.

    vLLM's prefix cache finds blocks by token ids and salt. The keys of a request that reads windows
    are rotated, so no other request may find them, and it must find nobody else's.
    """
    return f"rag-windows-{secrets.token_hex(16)}"


class _Params(BaseModel):
    """The fields of ``kv_transfer_params``; further ones are an error."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prefix: int = Field(default=0, ge=0)
    windows: list[Annotated[int, Field(ge=1)]] | None = Field(default=None, min_length=1)
    encode: bool = False
    temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class WindowedPrompt:
    """The prompt of one request, cut into prefix, windows and query.

    Attributes:
        prefix: token ids of the prefix, which may be empty.
        windows: token ids of each window, at least one, none of them empty.
        query_tokens: how many tokens stand behind the windows.
        temperature: T > 0, divides the logits inside the windows.
        encode: whether the request is there to encode its one window, behind the prefix, and has no
            query.
    """

    prefix: tuple[int, ...]
    windows: tuple[tuple[int, ...], ...]
    query_tokens: int
    temperature: float = 1.0
    encode: bool = False

    @property
    def read_tokens(self) -> int:
        """Tokens of prefix and all windows: those whose keys and values are loaded."""
        return len(self.prefix) + sum(map(len, self.windows))

    @property
    def rotation(self) -> int:
        """Positions by which keys are moved forward.

        vLLM counts the query's positions from `read_tokens` on. Attention with rotary embeddings
        knows distances alone, so the keys are moved instead of the query, which belongs behind the
        longest window.
        """
        return self.read_tokens - len(self.prefix) - max(map(len, self.windows))

    @classmethod
    def of(
        cls, params: Mapping[str, Any] | None, ids: Sequence[int] | None
    ) -> WindowedPrompt | None:
        """Read what a request says; None for an ordinary one.

        Args:
            params: ``{"prefix": 12, "windows": [200, 180]}``, lengths in tokens, and perhaps a
                ``temperature``; or ``{"prefix": 12, "encode": true}``.
            ids: the request's prompt.

        Raises:
            InputError: the fields are wrong, don't fit the prompt, or ask for what vLLM's attention
                can't do.
        """
        if not params:
            return None
        try:
            given = _Params.model_validate(dict(params))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))[:80]
            raise InputError(f"kv_transfer_params.{place}: {first['msg']}.") from error
        if ids is None:
            raise InputError("Windows are read by token ids. Send prompt_token_ids, no embeddings.")
        if given.scale != 1:
            raise InputError(
                f"scale={given.scale} is not possible in vLLM, whose attention weighs all keys "
                "alike. Use scale=1, or rag-windows' own engine."
            )
        prefix, rest = tuple(ids[: given.prefix]), tuple(ids[given.prefix :])
        if given.encode:
            if given.windows is not None or not rest:
                raise InputError(
                    "A request that encodes has one window: all of its prompt behind the prefix. "
                    "Leave 'windows' out, and send at least one token behind the prefix."
                )
            return cls(prefix, (rest,), 0, encode=True)
        if given.windows is None:
            raise InputError("kv_transfer_params need 'windows', the lengths of the windows.")
        ends = list(accumulate(given.windows, initial=0))
        if ends[-1] >= len(rest):
            raise InputError(
                f"Prefix and windows take {given.prefix + ends[-1]} tokens of a prompt of "
                f"{len(ids)}. At least one token of the query must follow them."
            )
        windows = tuple(rest[start:end] for start, end in pairwise(ends))
        return cls(prefix, windows, len(rest) - ends[-1], given.temperature)


def check_cache_salt(salt: str | None) -> None:
    """Refuse a reading request that vLLM's prefix cache could mix up with another.

    Raises:
        InputError: the salt is not one of `new_cache_salt`.
    """
    if salt is None or _SALT.fullmatch(salt) is None:
        raise InputError(
            "With vLLM's prefix caching on, a request that reads windows needs a cache_salt of its "
            "own. Make one by vllm_rag_windows.new_cache_salt(), or start vLLM with "
            "--no-enable-prefix-caching."
        )
