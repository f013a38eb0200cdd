"""Keys of clients; each has its tenant, whose cache nobody else can read."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rag_windows.errors import InputError
from rag_windows_server.errors import ApiError

_FORM = 'Each line of a key file is "NAME KEY", or "NAME KEY operator"; # begins a comment.'
_SHORTEST = 16


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whom a key belongs to.

    Attributes:
        name: as the log and the metrics call it.
        salt: of its part of the passage cache; it depends only on the key. None without keys.
        operator: whether it may warm and remove passages, and read the metrics.
    """

    name: str
    salt: bytes | None = field(default=None, repr=False)
    operator: bool = False


EVERYONE = Tenant("everyone", None, operator=True)
"""The tenant of a server without keys."""


class Keys:
    """The keys that a server takes; none lets everybody in.

    Args:
        keys: name, key and whether it is an operator's, of each.
    """

    def __init__(self, keys: Iterable[tuple[str, str, bool]] = ()) -> None:
        # How long it takes to find a digest says nothing about a key.
        self._known = {
            _digest(key): Tenant(name, _salt(key), operator) for name, key, operator in keys
        }

    @classmethod
    def load(cls, path: str | Path) -> Keys:
        """Read a file of keys.

        Raises:
            InputError: it can't be read, or a line is no key; messages show no key.
        """
        try:
            text = Path(os.path.expanduser(path)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"The key file {path} can't be read: {error}. Check the path and its permissions."
            ) from error
        found: dict[str, tuple[str, str, bool]] = {}
        for number, line in enumerate(text.splitlines(), 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            if not (len(words) == 2 or (len(words) == 3 and words[2] == "operator")):
                raise InputError(f"Line {number} of the key file {path} is not a key. {_FORM}")
            name, key = words[:2]
            if len(key) < _SHORTEST or not key.isascii():
                raise InputError(
                    f"The key in line {number} of {path} must have at least {_SHORTEST} ASCII "
                    "characters. Make one with `openssl rand -hex 32`."
                )
            if key in found:
                raise InputError(
                    f"The key in line {number} of {path} appears twice. Give each "
                    "tenant a key of its own."
                )
            found[key] = (name, key, len(words) == 3)
        if not found:
            raise InputError(f"The key file {path} holds no keys. {_FORM}")
        return cls(found.values())

    def __bool__(self) -> bool:
        return bool(self._known)

    @property
    def tenants(self) -> list[Tenant]:
        """All of them."""
        return [*self._known.values()] or [EVERYONE]

    def tenant(self, authorization: str | None) -> Tenant:
        """The tenant of a request, by its Authorization header.

        Raises:
            ApiError: 401, there is no key in it, or one that is not known.
        """
        if not self._known:
            return EVERYONE
        scheme, _, key = (authorization or "").partition(" ")
        found = self._known.get(_digest(key.strip()))
        if found is None or scheme.lower() != "bearer":
            raise ApiError(
                401,
                "A key is needed: send it in the header Authorization: Bearer KEY."
                if not key
                else "This key is not known here.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _salt(key: str) -> bytes:
    return hmac.digest(key.encode(), b"rag-windows server, salt of a tenant", "sha256")
