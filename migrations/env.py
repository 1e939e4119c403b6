"""How Alembic reaches the ledger: the URL comes from the settings, or the caller hands one in."""

import asyncio

from alembic import context
from sqlalchemy import Connection, text

from gateway.base.settings import load_database
from gateway.ledger.database import make_engine
from gateway.ledger.schema import Base

# An arbitrary number: the advisory lock that lets one migrator run at a time on the server.
_POSTGRES_LOCK = 4_811_070_026

# A new column or index on a large table takes longer than a request may.
_STATEMENT_MS = 3_600_000


def run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        render_as_batch=True,
        compare_type=True,
    )
    with context.begin_transaction():
        if connection.dialect.name == "postgresql":
            connection.execute(text(f"SELECT pg_advisory_xact_lock({_POSTGRES_LOCK})"))
        context.run_migrations()


async def run_async(url: str) -> None:
    engine = make_engine(url, _STATEMENT_MS)
    try:
        async with engine.begin() as connection:
            await connection.run_sync(run)
    finally:
        await engine.dispose()


asyncio.run(run_async(context.config.attributes.get("url") or load_database().ledger_url))
