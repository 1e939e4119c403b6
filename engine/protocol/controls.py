"""The requests to an engine besides generations and counts, and their replies."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from engine.protocol.bounds import MAX_NAMES


class CancelRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    request_id: str


class CancelReply(msgspec.Struct, frozen=True):
    # False: the request is unknown, or it has ended. A second cancel does no harm.
    cancelled: bool


class NamesRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks which of these names are held. The reply is a list of `ChainHeld`."""

    names: Annotated[list[str], Meta(max_length=MAX_NAMES)]


DropAsker = Literal["operator", "owner"]


class DropRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Ends entries of a scope before their time, leased or not.

    An operator may ask for it, or the workspace that owns the scope.
    """

    scope: str
    # The entry to end; None: every entry of the scope.
    entry: str | None = None
    # Who asks. Only engines with the flag `takes_releases` know this field.
    by: DropAsker = "operator"


class DropReply(msgspec.Struct, frozen=True):
    # The number of entries that were ended.
    dropped: int


class PurgeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Removes a scope's content from the engine's memory, in every tier, leased or not."""

    # The scope to purge; None: all scopes.
    scope: str | None


class PurgeReply(msgspec.Struct, frozen=True, kw_only=True):
    """What was removed. The blocks' memory is overwritten with zeros, and files are deleted."""

    entries: int
    device_blocks: int
    host_blocks: int
    files: int
    # Blocks that running requests of the scope still use. No later request finds their content.
    busy_blocks: int
    # What the engine can't remove, in words.
    unpurged: list[str] = []


class LoadRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Loads the adapter from the folder of this name. It replaces a loaded one of the same name."""

    name: str


class ClockAdvance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seconds: float


class ClockReply(msgspec.Struct, frozen=True):
    now: float
