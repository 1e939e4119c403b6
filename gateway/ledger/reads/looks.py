"""What a person can tell a prefix by: its shape and its last request, never its content."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import select, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.ledger.schema import TurnRow
from gateway.prompt.fingerprint import Fingerprint, unpack

# Parts of one statement.
_BATCH = 100


class PrefixLook(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix by its last request.

    `num_tools`, `num_system` and `num_messages` count the blocks up to its end; None where the
    request's fingerprint does not have that place. `tokens` are the marked ones of that request.
    `name` is what the client called the request in its metadata.
    """

    last_turn: str
    last_ms: int
    model: str
    tokens: int
    user_agent: str | None
    name: str | None
    num_tools: int | None
    num_system: int | None
    num_messages: int | None


async def looks_of(
    connection: AsyncConnection, keys: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], PrefixLook]:
    """The looks of these prefixes, by workspace and prefix. The index finds each last request."""
    found = {}
    for start in range(0, len(keys), _BATCH):
        parts = [select(_last(*key).subquery()) for key in keys[start : start + _BATCH]]
        rows = (await connection.execute(union_all(*parts))).mappings().all()
        found.update(await asyncio.to_thread(_looks, rows))
    return found


def _looks(rows: Sequence[Any]) -> dict[tuple[str, str], PrefixLook]:
    return {(row["workspace_id"], row["prefix"]): _look(row) for row in rows}


def _last(workspace: str, prefix: str) -> Any:
    columns = (
        TurnRow.id,
        TurnRow.opened_ms,
        TurnRow.workspace_id,
        TurnRow.prefix,
        TurnRow.model,
        TurnRow.user_agent,
        TurnRow.name,
        TurnRow.fingerprint,
        TurnRow.cache_read_tokens,
        TurnRow.cache_write_5m_tokens,
        TurnRow.cache_write_1h_tokens,
    )
    return (
        select(*columns)
        .where(TurnRow.prefix == prefix, TurnRow.workspace_id == workspace)
        .order_by(TurnRow.opened_ms.desc(), TurnRow.id.desc())
        .limit(1)
    )


def _look(row: Any) -> PrefixLook:
    tools, system, messages = _shape(row["fingerprint"], row["prefix"])
    read, written = row["cache_read_tokens"], row["cache_write_5m_tokens"]
    return PrefixLook(
        last_turn=row["id"],
        last_ms=row["opened_ms"],
        model=row["model"],
        tokens=read + written + row["cache_write_1h_tokens"],
        user_agent=row["user_agent"],
        name=row["name"],
        num_tools=tools,
        num_system=system,
        num_messages=messages,
    )


def _shape(packed: bytes | None, prefix: str) -> tuple[int | None, int | None, int | None]:
    """How many tools, system blocks and message blocks the prefix has."""
    if packed is None:
        return None, None, None
    whole = unpack(packed)
    end = _end(whole, prefix)
    if end is None:
        return None, None, None
    tools = min(end, whole.num_tools)
    system = min(end - tools, whole.num_system)
    return tools, system, end - tools - system


def _end(fingerprint: Fingerprint, prefix: str) -> int | None:
    """The number of whole blocks up to the prefix's end."""
    for point in fingerprint.points:
        if point.digest.hex() == prefix:
            return point.segment + (point.characters is None)
    return None
