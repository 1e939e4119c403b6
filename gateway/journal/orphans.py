"""Turns that an engine has and the journal has not.

A turn's record is written beside the engine's call. A kill between the two leaves a request of
which the journal knows nothing. So the request carries a note, which the engine keeps with the
final counts until they are acknowledged. Note and counts together make the turn's record.

The note tells the engine nothing that it does not know of its caller: it has no key's secret and no
workspace's name. The scope, which every request has, says which workspace it is.
"""

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta

import msgspec

from engine.protocol import MAX_RECORD_BYTES, FinalCounts
from gateway.base.record import TurnRecord, turn_of

_MAX_AGE = timedelta(days=1)
"""The ledger keeps rows for two days at least. A turn that it has not may be older and deleted."""


class TurnNote(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a turn's row has and neither its id nor its counts tell; fields as in `TurnRecord`.

    A new field must have a default, because an engine may hold notes of an earlier version.
    """

    key_id: str
    model: str
    opened_at: datetime
    stream: bool = False
    price: str | None = None
    num_removed: int = 0
    dialect: str | None = None
    prefix: str | None = None
    prefix_ttl: str | None = None
    http_request_id: str | None = None
    user_agent: str | None = None
    name: str | None = None


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(TurnNote).decode


def note_of(record: TurnRecord) -> str:
    """The note of a turn that is being opened, as JSON; empty where it is longer than may be."""
    note = TurnNote(
        key_id=record.key_id,
        model=record.model,
        opened_at=record.opened_at,
        stream=record.stream,
        price=record.price,
        num_removed=record.num_removed,
        dialect=record.dialect,
        prefix=record.prefix,
        prefix_ttl=record.prefix_ttl,
        http_request_id=record.http_request_id,
        user_agent=record.user_agent,
        name=record.name,
    )
    content = _encode(note)
    return content.decode() if len(content) <= MAX_RECORD_BYTES else ""


class Orphans:
    """Makes records of notes. `names` are all workspaces; it raises LedgerUnavailable."""

    def __init__(
        self,
        scope_of: Callable[[str], str],
        names: Callable[[], Awaitable[Sequence[str]]],
        wall: Callable[[], datetime],
    ) -> None:
        self._scope_of = scope_of
        self._names = names
        self._wall = wall

    async def workspaces(self) -> dict[str, str]:
        """The workspaces by scope."""
        return {self._scope_of(name): name for name in await self._names()}

    def record_of(
        self, note: str, final: FinalCounts, instance: str, workspaces: dict[str, str]
    ) -> TurnRecord | None:
        """The record of an orphan as it was opened, without its counts.

        None where the note says nothing of a turn of this instance that may still be settled.
        """
        turn_id, attempt = turn_of(final.request_id)
        workspace = workspaces.get(final.scope)
        is_its = attempt == 1 and turn_id.startswith(f"msg_{instance}")
        if not is_its or workspace is None:
            return None
        try:
            told = _decode(note)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None
        if told.opened_at.tzinfo is None or self._wall() - told.opened_at > _MAX_AGE:
            return None
        values = msgspec.structs.asdict(told)
        return TurnRecord(id=turn_id, instance=instance, workspace=workspace, **values)
