"""What a gateway or an operator asks of an engine beside generations."""

from typing import Annotated

import msgspec
from msgspec import Meta

from engine.protocol.bounds import MAX_NAMES


class CancelRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    request_id: str


class CancelReply(msgspec.Struct, frozen=True):
    # False: the request is unknown or has ended. Cancelling is idempotent.
    cancelled: bool


class NamesRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks which of these names are held. The reply is a list of `ChainHeld`."""

    names: Annotated[list[str], Meta(max_length=MAX_NAMES)]


class DropRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ends entries of a scope before their time, leased or not: an operator wants it, or the cached
    content that held them is over."""

    scope: str
    # None: every entry of the scope.
    entry: str | None = None


class DropReply(msgspec.Struct, frozen=True):
    dropped: int


class LoadRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Loads the adapter in the folder of this name, in place of the one that has it."""

    name: str


class ClockAdvance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seconds: float


class ClockReply(msgspec.Struct, frozen=True):
    now: float
