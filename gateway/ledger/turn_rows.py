"""Closed turns as rows, inserted and added to the sums in one transaction."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError

from gateway.base.errors import LedgerRefused, SampleData
from gateway.base.record import TurnRecord
from gateway.ledger import watermark
from gateway.ledger.checksums import COLUMN, checksum_of
from gateway.ledger.schema import TurnRow
from gateway.ledger.sums.rollups import add_turns

_INSERTS = {
    kind.dialect.name: kind.insert(TurnRow).on_conflict_do_nothing().returning(TurnRow.id)
    for kind in (postgresql, sqlite)
}


def insert_closed(connection: Connection, records: Sequence[TurnRecord]) -> None:
    """Insert closed turns that are not there yet, and add them to the sums.

    Raise LedgerRefused for a value that the database can't hold, and SampleData if it holds sample
    data.
    """
    rows = {record.id: row_of(record) for record in reversed(records)}
    statement = _INSERTS[connection.dialect.name]
    try:
        inserted = connection.execute(statement, [rows[turn_id] for turn_id in sorted(rows)])
    except (IntegrityError, OverflowError, ValueError) as error:
        raise LedgerRefused from error
    # The check comes after the insert, which waits for a command that fills the database with
    # samples.
    if watermark.has_sample_mark(connection):
        raise SampleData
    add_turns(connection, inserted.scalars().all())


def row_of(record: TurnRecord) -> dict[str, Any]:
    """The columns of a turn."""
    row = {
        "id": record.id,
        "instance": record.instance,
        "workspace_id": record.workspace,
        "key_id": record.key_id,
        "model": record.model,
        "engine": record.engine,
        "engine_model": record.engine_model,
        "epoch": record.epoch,
        "stream": record.stream,
        "opened_at": record.opened_at,
        "opened_ms": int(record.opened_at.timestamp() * 1000),
        "outcome": record.outcome,
        "miss_reason": record.miss_reason,
        "input_tokens": record.input_tokens,
        "cache_read_tokens": record.cache_read_tokens,
        "cache_write_5m_tokens": record.cache_write_5m_tokens,
        "cache_write_1h_tokens": record.cache_write_1h_tokens,
        "automatic_tokens": record.automatic_tokens,
        "computed_tokens": record.computed_tokens,
        "output_tokens": record.output_tokens,
        "thinking_tokens": record.thinking_tokens,
        "first_token_seconds": record.first_token_seconds,
        "duration_seconds": record.duration_seconds,
        "price": record.price,
        "cost_nano": record.cost,
        "cost_without_cache_nano": record.cost_without_cache,
        "num_removed": record.num_removed,
        "fingerprint": record.fingerprint,
        "dialect": record.dialect,
        "prefix": record.prefix,
        "prefix_ttl": record.prefix_ttl,
        "stop_reason": record.stop_reason,
        "queue_seconds": record.queue_seconds,
        "prefill_seconds": record.prefill_seconds,
        "decode_seconds": record.decode_seconds,
        "available_tokens": record.available_tokens,
        "captured_tokens": record.captured_tokens,
        "http_request_id": record.http_request_id,
        "user_agent": record.user_agent,
        "name": record.name,
        "status": record.status,
        "error": record.error,
    }
    return {**row, COLUMN: checksum_of(row)}
