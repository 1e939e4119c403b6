"""How Alembic reaches the ledger. The caller gives a URL, or it comes from the settings."""

import asyncio
from collections.abc import Sequence

from alembic import context
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import Script
from sqlalchemy import Connection, create_engine, text

from gateway.base.settings import load_database
from gateway.ledger.database import make_engine
from gateway.ledger.revision import Columns, check_upgrade, columns_of, revision_of
from gateway.ledger.schema import Base

_POSTGRES_LOCK = 4_811_070_026
"""An arbitrary number: the advisory lock by which one migrator runs at a time on the server."""
_STATEMENT_MS = 3_600_000
"""A new column or index on a large table takes longer than a request may."""


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
        chain = [*context.script.walk_revisions()][::-1]
        made_by = columns_made_by(chain, revision_of(connection))
        check_upgrade(connection, [script.revision for script in chain], made_by)
        context.run_migrations()


def columns_made_by(chain: Sequence[Script], present: str | None) -> dict[str, Columns]:
    """The columns that the first revision makes, and those of `present`, the database's revision.

    The revisions make them in an empty database in memory.
    """
    made_by: dict[str, Columns] = {}
    memory = create_engine("sqlite://")
    with memory.begin() as connection:
        with Operations.context(MigrationContext.configure(connection)):
            for script in chain:
                script.module.upgrade()
                if script is chain[0] or script.revision == present:
                    made_by[script.revision] = columns_of(connection)
    memory.dispose()
    return made_by


async def run_async(url: str) -> None:
    engine = make_engine(url, _STATEMENT_MS)
    try:
        async with engine.begin() as connection:
            await connection.run_sync(run)
    finally:
        await engine.dispose()


asyncio.run(run_async(context.config.attributes.get("url") or load_database().ledger_url))
