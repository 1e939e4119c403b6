"""Which revision of the schema a database has. A gateway works only with its own revision.

Since 2026-11-28 revisions are only added, and a database of any of them can be upgraded. A database
from before that day, or of a newer version, is left as it is. The error says so, and what to do.
"""

import asyncio
from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, inspect, text

from gateway.base.background import repeat
from gateway.base.errors import LedgerUnavailable, SchemaRefused
from gateway.ledger.database import Ledger
from gateway.ledger.schema import REVISION, Base

LOOK_SECONDS = 2.0
Columns = Mapping[str, frozenset[str]]
"""Names of columns by table."""

_VERSIONS = "alembic_version"
_PROMISE = "2026-11-28"
_LOST = (
    "an empty database lacks its turns, sums, prices of past turns, workspaces, keys, batches and"
    " cached contents"
)


def columns_of(connection: Connection) -> Columns:
    """The columns of the database's tables that have the name of a table of the gateway."""
    reflected = inspect(connection)
    tables = [name for name in reflected.get_table_names() if name in Base.metadata.tables]
    return {
        table: frozenset(column["name"] for column in reflected.get_columns(table))
        for table in tables
    }


def revision_of(connection: Connection) -> str | None:
    """The revision that the database records; None where it records none."""
    if not inspect(connection).has_table(_VERSIONS):
        return None
    revisions = connection.execute(text(f"SELECT version_num FROM {_VERSIONS}")).scalars().all()  # noqa: S608
    return ", ".join(sorted(revisions)) or None


def check_upgrade(
    connection: Connection, revisions: Sequence[str], made_by: Mapping[str, Columns]
) -> None:
    """Raise SchemaRefused for a database that can't be upgraded.

    `revisions` are all that this version knows, in order. `made_by` has the columns that the first
    one makes, and those that the database's own revision makes, if this version knows it.
    """
    revision = revision_of(connection)
    columns = columns_of(connection)
    if revision is None and not columns:
        return
    if revision is not None and revision in made_by and columns == made_by[revision]:
        return
    first = made_by[revisions[0]]
    # Later revisions add to the first one. A database that lacks a part of it is from before.
    is_newer = revision not in revisions and all(
        table in columns and names <= columns[table] for table, names in first.items()
    )
    name = f"revision {revision}" if revision is not None else "no revision"
    if is_newer and revision is not None:
        raise SchemaRefused(
            f"the database has {name} of the schema, and the newest that this version knows is"
            f" {revisions[-1]}: start the version that migrated it, or restore the backup from"
            " before that migration, which lacks what was recorded since; nothing was changed"
        )
    raise SchemaRefused(
        f"the database says {name} of the schema and has other tables than that: it was made before"
        f" {_PROMISE}, and this version upgrades revision {revisions[0]} of that day and later ones"
        f" (to {revisions[-1]}): keep it with the version that made it, write its usage out with"
        " that version's `python -m gateway export`, and set HOLDFAST_DATA or HOLDFAST_DATABASE_URL"
        f" to an empty one; {_LOST}; nothing was changed"
    )


def problem_of(revision: str | None, columns: Columns) -> str | None:
    """Why a gateway of this version can't use a database of this revision, with these columns;
    None where it can."""
    migrate = "`python -m gateway migrate` with the settings of `serve`"
    if revision is None:
        return (
            f"the database has no schema, and this version works with revision {REVISION}: run"
            f" {migrate}"
        )
    if revision != REVISION:
        is_older = revision.isdecimal() and revision < REVISION
        return (
            f"the database has revision {revision} of the schema, and this version works with"
            f" {REVISION}: "
            + (f"run {migrate}" if is_older else f"{migrate} says whose it is, and the way on")
            + "; turns wait in the journal"
        )
    tables = Base.metadata.tables
    lacking = [
        f"{table}.{column.name}"
        for table in sorted(tables)
        for column in tables[table].columns
        if column.name not in columns.get(table, ())
    ]
    if not lacking:
        return None
    return (
        f"the database says revision {revision} of the schema and lacks `{lacking[0]}`: {migrate}"
        " says what it is, and the way on; turns wait in the journal"
    )


class SchemaWatch:
    """Looks again and again whether the database has this version's schema, and reports it to the
    ledger's identity. A database that is away is no problem of the schema."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._last_revision: str | None = None

    async def look(self) -> None:
        """Look once. Raise LedgerUnavailable while the database is away.

        Columns are read only when the revision has changed, because that takes many queries.
        """
        try:
            revision, columns = await self._read()
        except LedgerUnavailable as error:
            self._ledger.identity.away = str(error)
            raise
        self._ledger.identity.away = None
        if columns is None:
            return
        self._last_revision = revision
        self._ledger.identity.schema_problem = problem_of(revision, columns)

    async def _read(self) -> tuple[str | None, Columns | None]:
        """The revision; where it has changed since the last look, its columns too."""
        async with self._ledger.transaction(is_any_schema=True) as connection:
            revision = await connection.run_sync(revision_of)
            if revision is not None and revision == self._last_revision:
                return revision, None
            return revision, await connection.run_sync(columns_of)

    async def run(self, stopping: asyncio.Event) -> None:
        await repeat(stopping, LOOK_SECONDS, self.look, "schema_not_looked_at")
