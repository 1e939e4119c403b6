"""What a gateway or an operator asks of an engine beside generations."""

from typing import Annotated, Literal

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


DropAsker = Literal["operator", "owner"]


class DropRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Ends entries of a scope before their time, leased or not: an operator wants it, or the
    workspace that has the scope needs them no more."""

    scope: str
    # None: every entry of the scope.
    entry: str | None = None
    # Who asks. Only engines that `takes_releases` know the field.
    by: DropAsker = "operator"


class DropReply(msgspec.Struct, frozen=True):
    dropped: int


class PurgeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Removes a scope's content from the engine's memory, in every tier, leased or not."""

    # None: of all scopes.
    scope: str | None


class PurgeReply(msgspec.Struct, frozen=True, kw_only=True):
    """What is gone. Memory of blocks is zeros, files are deleted."""

    entries: int
    device_blocks: int
    host_blocks: int
    files: int
    # Blocks that running requests of the scope still use. Nobody else finds them; what these
    # requests write from now on is new content.
    busy_blocks: int
    # What the engine can't remove, in words.
    unpurged: list[str] = []


class LoadRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Loads the adapter in the folder of this name, in place of the one that has it."""

    name: str


class ClockAdvance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seconds: float


class ClockReply(msgspec.Struct, frozen=True):
    now: float
