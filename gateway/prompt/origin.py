"""Who sent a turn, as its HTTP request tells: what the ledger keeps to find it again. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

NAME_CHARACTERS = 64
AGENT_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class Origin:
    """`request_id` is the id in the response's `request-id` header; `user_agent` is the client's.

    A turn of a batch has the id that an error in its result would have, and no user agent.
    `headers` are the request's, of which the caller's trace is read where turns are traced.
    """

    request_id: str | None = None
    user_agent: str | None = None
    headers: Iterable[tuple[bytes, bytes]] = ()


NO_ORIGIN = Origin()


def agent_of(user_agent: str) -> str | None:
    """The client's own name for itself, without characters that can't be shown, cut to 64."""
    return _shown(user_agent, AGENT_CHARACTERS)


def name_of(metadata: Any) -> str | None:
    """The `name` of a request's metadata, cut to 64 characters; None where it has no such text."""
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return _shown(name, NAME_CHARACTERS) if isinstance(name, str) else None


def _shown(text: str, most: int) -> str | None:
    head = text[: 4 * most]
    return "".join(letter for letter in head if letter.isprintable()).strip()[:most] or None
