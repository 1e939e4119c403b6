"""How Alembic reaches the ledger: the URL comes from the settings, or the caller hands one in."""

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
        chain = [*context.script.walk_revisions()][::-1]
        made_by = columns_made_by(chain, revision_of(connection))
        check_upgrade(connection, [script.revision for script in chain], made_by)
        context.run_migrations()


def columns_made_by(chain: Sequence[Script], present: str | None) -> dict[str, Columns]:
    """By revision, the columns of the first one and of `present`, which the database has.

    The revisions themselves make them, in an empty database in memory.
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
